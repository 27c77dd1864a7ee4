"""Renders pages from templates: single offline files that treat all contents of a run as text.

Templates escape everything, and the page's content security policy allows only its own script.
"""

from __future__ import annotations

import hashlib
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_core import ConfigError
from grpo_core.processes.secrets import inert
from grpo_plugin_report.charts import label, readings
from grpo_plugin_report.curves import Task
from grpo_plugin_report.values import is_number

GENERATOR = '<meta name="generator" content="grpo-core report">'
"""Tag at the start of a page that identifies it."""


def rendered(template: str, **values: Any) -> str:
    """Render a template with these values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("grpo_plugin_report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: inert(value) if type(value) is str else value,  # markup stays unchanged
    )
    script = Markup(loader.get_source(environment, "report.js")[0])
    filters = (number, share, percent, signed, readings, measure, result, lacking)
    environment.filters |= {each.__name__: each for each in filters}
    return environment.get_template(template).render(
        script=script,
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def save(output: Path, make: Callable[[], str]) -> Path:
    """Write a page atomically; return the file.

    Raises ConfigError, before the page is made, if it would replace something that is not a page, and if it
    cannot be written.
    """
    if output.is_dir():
        raise ConfigError(f"--output {output}: is a directory; give the name of a page, as compared.html")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if output.exists() and not is_page(output):
        raise ConfigError(f"--output {output}: exists, and is not a report; give another name")
    html = make()
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        beside.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
        beside.replace(output)
    except OSError as error:
        raise ConfigError(
            f"--output {output}: the report cannot be written ({error.strerror}); give another file"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return output


def is_page(path: Path) -> bool:
    """Whether a file is a page of this module, which a newer one may replace."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return GENERATOR in file.read(1000)
    except OSError:
        return False


# ---------------------------------------------------------------------------------- numbers


def number(value: Any) -> str:
    """Format a number in a few digits: 12345678 is 12.3M."""
    return label(value) if is_number(value) else "-"


def measure(task: Task, value: Any) -> str:
    """Format the main metric of a task: a share in percent, any other number in a few digits."""
    return share(value) if task.in_percent else number(value)


def result(task: Task, index: int) -> str:
    """Format a validation's result of a task: its value, or else its interval."""
    version, value = task.validation[index]
    ends = {x: (low, high) for x, low, high in task.intervals}
    text = measure(task, value)
    if not is_number(value):
        text = " to ".join(measure(task, end) for end in ends[version]) if version in ends else "no score"
    return text


def lacking(task: Task) -> str:
    """Describe the unscored rollouts of a task's last validation; empty without any."""
    missing = task.unscored.get(task.validation[-1][0]) if task.validation else None
    return f"{missing:.0%} unscored" if missing else ""


def share(value: Any) -> str:
    """Format a value, in percent if it is a share."""
    return f"{value:.1%}" if is_number(value) and 0 <= value <= 1 else number(value)


def percent(value: float) -> str:
    """Format a share in percent; the end of an interval may be below 0 or above 1."""
    return f"{value:.1%}"


def signed(value: float, share: bool) -> str:
    """Format a difference with its sign; one of shares in points of percent."""
    return f"{value * 100:+.1f} points" if share else f"{value:+.3g}"
