"""``grpo-core audit``: finds out whether the rewards of an environment mean anything."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve
from rich.console import Console
from rich.text import Text

from grpo_core.aio import to_the_end
from grpo_core.app import provenance
from grpo_core.audit.audit import Audit, Extent
from grpo_core.audit.card import Card
from grpo_core.audit.process import WatchedProcess
from grpo_core.audit.records import Finding, Severity
from grpo_core.audit.training import PlayingModel
from grpo_core.commands.check import elsewhere
from grpo_core.config import parse_settings
from grpo_core.credentials import secrets_in
from grpo_core.environments.sourced import taken_sections
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.incidents import Incident, reported_to
from grpo_core.inert import inert
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.offers import Offer

if TYPE_CHECKING:
    from grpo_core.commands.signal import Playing

STYLES: Mapping[Severity, tuple[str, str]] = {
    "passed": ("ok    ", "green"),
    "failed": ("FAILED", "bold red"),
    "warned": ("warn  ", "yellow"),
    "noted": ("note  ", "cyan"),
    "not applicable": ("n/a   ", "dim"),
}
COUNTED: tuple[Severity, ...] = ("failed", "warned", "noted", "passed", "not applicable")


def main(
    name: str,
    *,
    extent: Extent,
    model: PlayingModel | None = None,
    settings: Sequence[str],
    json_file: Path | None,
    html_file: Path | None,
    block: Sequence[str],
) -> int:
    """Print each finding; return the exit status, which is 1 if a check failed."""
    if extent.prompts < 1 or not extent.seconds > 0:
        raise ConfigError(
            f"--prompts is {extent.prompts} and --seconds {extent.seconds:g}; expected numbers above 0"
        )
    for file in (json_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no directory {file.absolute().parent}; make it first")
    options = parse_settings(settings)
    if secrets := sorted(set(secrets_in({"set": options}))):
        raise ConfigError(
            f"{', '.join(secrets)}: this option is named like a secret, and a card would show it; let the "
            "environment read a variable (os.environ) instead"
        )
    playing = None
    if model is not None:  # a wrong name is an error before the audit
        from grpo_core.commands.signal import playable  # it loads torch

        playing = playable(name, model, options, block)
    host = PluginHost.discover(block=block)
    python = options.get("environment", {}).get("python")
    offer = elsewhere(name, python) if python else host.find("environment", name)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(inert(str(offer)), style="bold"))
    begin = time.monotonic()
    given = dict(options)
    found = to_the_end(_all(host, offer, options, extent, functools.partial(_show, console)))
    failure = None
    if model is not None and playing is not None and not any(one.check == "runtime.startup" for one in found):
        try:
            found.append(_signal(playing, model, console))
        except GrpoError as error:
            failure = error  # what was found before belongs on the card
    card = Card(
        name=name,
        offer=str(offer),
        options=given,
        findings=found,
        seconds=time.monotonic() - begin,
        code=provenance.environment_code(name, options, host),
    )
    counts = Counter(finding.severity for finding in found)
    told = ", ".join(f"{counts[each]} {each}" for each in COUNTED if counts[each] or each == "failed")
    console.print(f"{told}, in {card.seconds:.1f} s")
    if json_file is not None:
        card.write_json(json_file)
    if html_file is not None:
        card.write_page(html_file)
    if failure is not None:
        raise failure
    return 1 if counts["failed"] else 0


def _signal(playing: Playing, model: PlayingModel, console: Console) -> Finding:
    """Return, and print, what groups of a model would teach."""
    from grpo_core.commands.signal import signal  # it loads torch

    errors = Console(stderr=True)

    def tell(text: str) -> None:
        errors.print(Text(inert(text), style="dim"), soft_wrap=True)

    begin = time.monotonic()
    finding: Finding = to_the_end(signal(playing, model, tell))
    finding = evolve(finding, seconds=time.monotonic() - begin)
    _show(console, finding)
    return finding


async def _all(
    host: PluginHost, offer: Offer, options: dict[str, Any], extent: Extent, show: Callable[[Finding], None]
) -> list[Finding]:
    found = []
    async for finding in findings(host, offer, options, extent):
        show(finding)
        found.append(finding)
    return found


async def findings(
    host: PluginHost, offer: Offer, options: dict[str, Any], extent: Extent
) -> AsyncIterator[Finding]:
    """Audit an environment in its own process; ``options`` may hold sections of a run."""
    sections = taken_sections(options)
    config = sections.environment
    incidents: list[Incident] = []
    make = functools.partial(
        WatchedProcess,
        "audit",
        offer.name,
        options,
        config=config,
        plugins=host.selection,
        source=sections.source,
    )
    audit = Audit(make, config.max_batch, extent, incidents)
    with reported_to(incidents.append):
        try:
            async for finding in audit.run():
                yield finding
        except GrpoError as error:
            if error.exit_status == ConfigError.exit_status:
                raise  # the options are wrong, and not the environment
            yield Finding(check="runtime.startup", title="it can be made", severity="failed", told=str(error))


def _show(console: Console, finding: Finding) -> None:
    mark, style = STYLES[finding.severity]
    console.print(Text.assemble((mark, style), inert(f"  {finding.title}: {finding.told}")))
    if finding.evidence:
        console.print(Text(inert(f"          for example: {finding.evidence}"), style="dim"))
    if finding.advice:
        console.print(Text(inert(f"          to do: {finding.advice}")))
