"""``grpo-core audit``: probes the rewards of an environment for mistakes and loopholes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from rich.console import Console
from rich.text import Text

from grpo_core import ConfigError, GrpoError, __version__, events
from grpo_core.app import sourced
from grpo_core.config import parse_settings
from grpo_core.kit import EnvironmentSpec, PluginHost, aio, reported_to
from grpo_core.plugins.options import Settings, Words
from grpo_core.processes.secrets import inert
from grpo_plugin_audit.audit import STARTUP, Audit, Extent
from grpo_plugin_audit.records import Check, Finding, Severity

STYLES: Mapping[Severity, tuple[str, str]] = {
    "passed": ("ok    ", "green"),
    "failed": ("FAILED", "bold red"),
    "warned": ("warn  ", "yellow"),
    "noted": ("note  ", "cyan"),
    "not applicable": ("n/a   ", "dim"),
}
COUNTED: tuple[Severity, ...] = ("failed", "warned", "noted", "passed", "not applicable")


def audit(
    name: str,
    /,
    *,
    set_: Settings = None,
    prompts: int = 24,
    seconds: float = 60.0,
    seed: int = 0,
    model: str | None = None,
    engine: str | None = None,
    json: Path | None = None,
    no_plugin: Words = None,
) -> int:
    """Check whether the rewards of an environment mean anything: what it rewards, and what it should not.

    The exit status is 1 if a check failed.

    Parameters
    ----------
    name
        Name of the environment, as "math:sort" or "./file.py:Class".
    set_
        Set an option of the environment, as in "length=3", the source of its prompts, as in
        "data=train.jsonl", or of the engine, as in "engine.options.model=gpt-5-mini"; may be repeated.
    prompts
        Largest number of prompts that are played.
    seconds
        Approximate time limit of the audit; a slow environment plays fewer prompts.
    seed
        Seed of the replies that are tried.
    model
        Model that plays groups of rollouts first, to see how many would teach it: a directory, a hub
        id, a name as "tiny", or the directory of a run.
    engine
        Engine of this model; an engine of a hosted model needs no --model.
    json
        File for the findings as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if prompts < 1 or not seconds > 0:
        raise ConfigError(f"--prompts is {prompts} and --seconds {seconds:g}; expected numbers above 0")
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"{json}: there is no directory {json.absolute().parent}; make it first")
    options = parse_settings(set_ or [])
    engine_section = {**({} if engine is None else {"name": engine}), **options.pop("engine", {})}
    host = PluginHost.discover(block=no_plugin or [])
    hosted = engine is not None and host.find("engine", engine).offer.output == "text"
    if engine is not None and model is None and not hosted:
        raise ConfigError("--engine is for a model that plays: add --model")
    elsewhere = options.get("environment", {}).get("python")  # only it can import the environment
    offer = f"{name} ({elsewhere})" if elsewhere else str(host.find("environment", name))
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(inert(offer), style="bold"))
    begin = time.monotonic()
    extent = Extent(prompts=prompts, seconds=seconds, seed=seed)
    found = []
    if model is not None or hosted:  # first, so that a missing model is an error before the audit
        from grpo_plugin_audit.training import played_signal  # imports torch

        errors = Console(stderr=True)

        def show(text: str) -> None:
            errors.print(Text(inert(text), style="dim"), soft_wrap=True)

        playing = played_signal(name, options, model, engine_section, prompts=prompts, seed=seed, status=show)
        found.append(evolve(aio.to_the_end(playing), seconds=time.monotonic() - begin))
        _show(console, found[0])

    async def audited() -> None:
        async for finding in findings(host, name, dict(options), extent):
            _show(console, finding)
            found.append(finding)

    aio.to_the_end(audited())
    seconds = time.monotonic() - begin
    counts = Counter(finding.severity for finding in found)
    summary = ", ".join(f"{counts[each]} {each}" for each in COUNTED if counts[each] or each == "failed")
    console.print(f"{summary}, in {seconds:.1f} s")
    if json is not None:
        report = {
            "environment": offer,
            "options": options,
            "version": __version__,
            "seconds": seconds,
            "findings": [asdict(finding) for finding in found],
        }
        json.write_text(dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    return 1 if counts["failed"] else 0


async def findings(
    host: PluginHost, name: str, options: dict[str, Any], extent: Extent
) -> AsyncIterator[Finding]:
    """Audit an environment in its own process; ``options`` may contain sections of a run's configuration."""
    sections = sourced.pop_sections(options)
    config = sections.environment
    incidents: list[events.IncidentReported] = []
    make = partial(
        sourced.SourcedProcess,
        EnvironmentSpec(task="audit", env=name, options=options, config=config),
        plugins=host.selection,
        data=sections.task,
    )
    with reported_to(incidents.append):
        try:
            async for finding in Audit(make, config.max_batch, extent, incidents).run():
                yield finding
        except GrpoError as error:
            if error.exit_status == ConfigError.exit_status:
                raise  # wrong options are an error of the user, not a finding
            yield Check(STARTUP, "it can be made").finding("failed", str(error))


def _show(console: Console, finding: Finding) -> None:
    mark, style = STYLES[finding.severity]
    console.print(Text.assemble((mark, style), inert(f"  {finding.title}: {finding.result}")))
    if finding.evidence:
        console.print(Text(inert(f"          for example: {finding.evidence}"), style="dim"))
    if finding.advice:
        console.print(Text(inert(f"          to do: {finding.advice}")))
