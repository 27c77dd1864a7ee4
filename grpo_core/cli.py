"""The command line: ``train``, ``validate``, ``verify``, ``report``, ``check``, ``plugins``.

Imports are inside the commands: ``--help``, ``plugins`` and ``check`` (but of an engine) load no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

ALONE = {"--resume": "latest", "--ray": ""}
"""What an option means without its value."""

app = App(
    name="grpo-core",
    help="Asynchronous GRPO for language models: domains are plugins, async RL is the core.",
    version=lambda: __import__("grpo_core").__version__,
    version_flags=["--version"],
    help_format="plaintext",
)


@app.command
def train(
    config: Path | None = None,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    sampler: str | None = None,
    validation: str | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    output: Path | None = None,
    resume: str | None = None,
    ray: str | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Train a model with asynchronous GRPO.

    Parameters
    ----------
    config
        A TOML file; every key has a default.
    env
        Environment to train on, as "math:sort" or "./file.py:Class"; may be repeated.
    sampler
        Chooses the next prompts.
    validation
        How held-out prompts are measured.
    engine
        Generates completions.
    set_
        One configuration key, as "trainer.lr=1e-4"; may be repeated.
    output
        Directory of the run; must not hold anything yet.  Default: runs/NAME.
    resume
        Continue the run in this directory, or without one the latest in runs/.
    ray
        Engines and environments in workers of the Ray cluster at this address ("auto", "host:6379"), or
        without one of a cluster of this machine alone, for the run.
    no_plugin
        Name of an installed plugin that is not to be loaded; may be repeated.
    """
    from grpo_core import commands

    chosen = {"sampler": sampler, "validation": validation, "engine": engine}
    return commands.train(
        config_file=config,
        envs=env or [],
        chosen={section: name for section, name in chosen.items() if name is not None},
        settings=set_ or [],
        output=output,
        resume=resume,
        ray=ray,
        block=no_plugin or [],
    )


@app.command
def validate(
    model: str,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    validation: str | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    json: bool = False,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Measure a model, or the newest checkpoint of a run, on held-out prompts.

    Parameters
    ----------
    model
        Directory of a run or of a model, or a hub id.
    env
        Environment to measure on, as "math:sort"; may be repeated.  Default: the tasks of the run.
    validation
        How prompts are rolled out and measured; default: as in the run.
    engine
        Generates completions; default: as in the run's validation.
    set_
        One configuration key, as "validation.prompts=1000" or "validation.options.k=8"; may be repeated.
    json
        Print the results as JSON.
    no_plugin
        Name of an installed plugin that is not to be loaded; may be repeated.
    """
    from grpo_core import commands

    chosen = {"validation": validation, "engine": engine}
    return commands.validate(
        target=model,
        envs=env or [],
        chosen={section: name for section, name in chosen.items() if name is not None},
        settings=set_ or [],
        as_json=json,
        block=no_plugin or [],
    )


@app.command
def verify(run: Path) -> int:
    """Check over everything that happened in a run that nothing was lost, doubled or too stale.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core import commands

    return commands.verify(directory=run)


@app.command
def report(run: Path) -> int:
    """Write report.html of a run: finished, going on, or killed.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core import commands

    return commands.report(directory=run)


@app.command
def check(
    name: str,
    *,
    kind: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    task: Annotated[list[str] | None, Parameter(negative="")] = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Check that a plugin's environment, sampler, engine, loss and so on keeps its contract.

    Parameters
    ----------
    name
        What a plugin offers, as "math:sort" or "./file.py:Class".
    kind
        environment, sampler, validation_strategy, engine, loss or advantage, if the name does not tell.
    set_
        One of its options, as "length=3"; may be repeated.
    task
        Name of a task that a sampler is to work with; may be repeated.
    no_plugin
        Name of an installed plugin that is not to be loaded; may be repeated.
    """
    from grpo_core import check

    return check.main(name, kind=kind, settings=set_ or [], tasks=task or [], block=no_plugin or [])


@app.command
def plugins(*, json: bool = False) -> int:
    """Show the installed plugins: what each offers, or why it is broken.

    Parameters
    ----------
    json
        As JSON.
    """
    from grpo_core.plugins.host import PluginHost, listing

    rows = listing(PluginHost.discover())
    if json:
        import json as dumper

        print(dumper.dumps(rows, indent=2))
    else:
        print("\n".join(_describe(row) for row in rows))
    return 0


def _describe(row: dict[str, Any]) -> str:
    lines = [f"{row['name']}  ({row['distribution']} {row['version']})"]
    if row.get("error"):
        lines.append(f"  broken: {row['error']}")
    if row.get("note"):
        lines.append(f"  note: {row['note']}")
    for kind, names in row.get("offers", {}).items():
        if names:
            lines.append(f"  {kind.replace('_', ' ')}: {', '.join(names)}")
    return "\n".join(lines)


def main() -> None:
    """Entry point: messages instead of tracebacks, and an exit status that tells."""
    from grpo_core.errors import GrpoError

    try:
        status = app(_with_values(sys.argv[1:]), exit_on_error=True, result_action="return_value")
    except GrpoError as error:
        print(f"grpo-core: {error}", file=sys.stderr)
        status = error.exit_status
    except OSError as error:  # a full disk, a directory without permission: not ours to mend
        print(f"grpo-core: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _with_values(arguments: list[str]) -> list[str]:
    """``--resume`` and ``--ray`` may stand alone: the latest run, a cluster of this machine alone."""
    given = []
    for i, argument in enumerate(arguments):
        given.append(argument)
        following = arguments[i + 1] if i + 1 < len(arguments) else "-"
        if argument in ALONE and (following.startswith("-") or following.endswith(".toml")):
            given.append(ALONE[argument])
    return given
