"""The commands ``train``, ``validate`` and ``verify``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_core.app import build, session
from grpo_core.app.launch import changes_of, continued, new_run, tasks_of
from grpo_core.app.model_sources import RUNS
from grpo_core.commands.complaints import NEXT, complain, say, to_a_reader
from grpo_core.config import check_settings, merge, parse_settings, read_toml
from grpo_core.config.run import steps_of_profile
from grpo_core.contracts.errors import ConfigError
from grpo_core.loop.endings import GOAL_REACHED
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import install_command
from grpo_core.plugins.options import AsJson, Flag, Settings, Words
from grpo_core.processes.aio import to_the_end
from grpo_core.processes.interrupts import INTERRUPTED
from grpo_core.reporting.terminal import write
from grpo_core.reporting.verification import verified
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.validation.results import progress, table

MEASURED_BY = (
    "seed",
    "plugins",
    "tasks.*",
    "model.*",
    "engine.*",
    "environment.*",
    "placement.*",
    "rollout.*",
    "validation.*",
    "health.canary_tolerance",
    "trainer.device",
)
"""Patterns of the keys that a validation without training depends on."""
DOUBTFUL = 20
"""Number of weight syncs without a proof in a row that are worth a warning; up to 11 are usual."""


def train(
    config: Path | None = None,
    *,
    model: str | None = None,
    env: Words = None,
    data: str | None = None,
    dataloader: str | None = None,
    sampler: str | None = None,
    validation: str | None = None,
    engine: str | None = None,
    trainer: str | None = None,
    set_: Settings = None,
    output: Path | None = None,
    resume: str | None = None,
    profile: int | None = None,
    quiet: Flag = False,
    as_json: AsJson = False,
    ray: str | None = None,
    no_plugin: Words = None,
) -> int:
    """Train a model with asynchronous GRPO.

    Parameters
    ----------
    config
        A TOML file; every key has a default, which `grpo-core config` prints.
    model
        Directory, hub id or name of the model that the run starts from, as in "tiny" or "smollm2".
    env
        Environment to train on, as "math:sort" or "./file.py:Class"; may be repeated.
    data
        Prompts of this environment: a file, a data set "hub:NAME" or a dataloader, as "./file.py:Rows".
    dataloader
        Another word for --data, which is an error that says so.
    sampler
        Sampler that chooses the next prompts.
    validation
        Validation strategy for held-out prompts.
    engine
        Engine that generates completions.
    trainer
        Trainer that computes the steps.
    set_
        Set a configuration key, as in "trainer.lr=1e-4"; may be repeated.
    output
        Directory of the run, which must be empty or new.  Default: runs/NAME.
    resume
        Continue the run in this directory.  Without a value, continue the latest run in runs/.
    profile
        Trace this many steps of the trainer after the first two with torch's profiler.
    quiet
        Print only warnings, recovered faults and the summary.
    as_json
        Print events as JSON, one per line, on standard output, and everything else on standard error.
    ray
        Run engines and environments on the Ray cluster at this address ("auto", "host:6379").  Without a
        value, start a local cluster for this run.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if quiet and as_json:
        raise ConfigError("use --quiet or --json, not both")
    settings = [
        *(set_ or []),
        *([] if profile is None else [f"trainer.profile={profile}"]),
        *(['tracking.terminal.view="quiet"'] if quiet else []),
        *(['tracking.terminal.view="json"'] if as_json else []),
    ]
    chosen = {"sampler": sampler, "validation": validation, "engine": engine, "trainer": trainer}
    if dataloader is not None:
        raise ConfigError(f"--dataloader is called --data here: --data {dataloader}")
    changes = _with_data(changes_of(env, chosen, settings, model), env, "data", data)
    block = no_plugin or []
    if ray is not None:
        cluster = PluginHost.discover(block=block).the_one("placement", "crosses_machines")
        changes = merge(changes, {"placement": {"name": cluster, "options": {"address": ray}}})
    if resume is None:
        start = new_run([read_toml(config)] if config else [], changes, block, output=output)
    else:
        if config is not None or output is not None or env:
            raise ConfigError(
                "--resume continues a run as it was configured: leave out CONFIG.toml, --output and --env "
                "(--set tasks.NAME.env=... adds a task)"
            )
        path = RunDirectory.latest(RUNS) if resume == "latest" else Path(resume)
        start = continued(path, changes, block)
    configured, host = start.setup.config, start.setup.plugins
    view = configured.tracking.options.get("terminal", {}).get("view")
    tell = complain if view == "json" else say  # standard output has JSON and nothing else
    with to_a_reader():
        for note in start.notes if resume is not None or view not in ("quiet", "json") else ():
            tell(note)
    directory, again, finished = start.directory, start.again(block), start.finished
    if finished is not None and finished.complete:
        directory.unlock()
        return 0
    try:
        outcome = to_the_end(build.train(start))
    except KeyboardInterrupt:
        with to_a_reader():
            tell(f"interrupted at once; run: {directory.path}\n{NEXT}{again}")
        return INTERRUPTED
    except Exception as error:
        if directory.has_trained():
            error.add_note(f"run: {directory.path}\n{NEXT}{again}")
        raise
    finally:
        directory.unlock()
    with to_a_reader():
        if configured.trainer.profile and finished is None:
            tell(_profile(directory.profile, configured.trainer.profile))
        tell(_summary(outcome))
        if directory.page.is_file():
            tell(f"page: {directory.page}")
        elif "*" in configured.tracking.trackers and not host.in_role("tracker", "is_default"):
            tell(f"page: {install_command('tracker', 'is_default')}, then grpo-core report {directory.path}")
        tell(NEXT + _next(outcome, again))
    return INTERRUPTED if outcome.reason == "interrupted" else 0


def validate(
    model: str | None = None,
    /,
    *,
    env: Words = None,
    data: str | None = None,
    only: Words = None,
    step: int | None = None,
    validation: str | None = None,
    engine: str | None = None,
    set_: Settings = None,
    output: Path | None = None,
    as_json: AsJson = False,
    no_plugin: Words = None,
) -> int:
    """Validate a model, or a checkpoint of a run, on held-out prompts.

    Parameters
    ----------
    model
        Directory of a run or of a model, or a hub id.  An engine of a hosted model needs none.
    env
        Environment to validate on, as "math:sort"; may be repeated.  Default: the tasks and validation sets
        of the run.
    data
        Held-out prompts of the task of --env, as "held_out.jsonl".
    only
        Task or validation set of the run to measure; may be repeated.  Default: all.
    step
        Step of the run's checkpoint.  Default: the newest one.
    validation
        Validation strategy for the prompts.  Default: the strategy of the run.
    engine
        Engine that generates completions.  Default: the engine of the run's validation.
    set_
        Set a configuration key, as in "validation.prompts=1000"; may be repeated.
    output
        Directory for the results and the rollouts.  Default: RUN/validated/DATE, or
        runs/TASKS-validated-DATE for a model.
    as_json
        Print the results as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    chosen = {"validation": validation, "engine": engine}
    changes = _with_data(changes_of(env, chosen, set_), env, "validation_data", data)
    why = "validate measures the model as it is and does not use this key"
    check_settings(parse_settings(set_ or []), MEASURED_BY, why, but=["tasks.*.weight"])
    measurement = session.prepare(
        model, changes, tasks=bool(env), only=only or [], step=step, output=output, block=no_plugin or []
    )
    console = Console(stderr=True)

    def tell(text: str, style: str = "dim") -> None:
        write(console, text, style)

    report = to_the_end(measurement.play(tell))
    tell(f"results and rollouts: {measurement.directory}", "")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        strategies = dict.fromkeys(report["validation"].values())
        say(f"{report['model']}, version {report['version']}, measured by {', '.join(strategies)}\n")
        say(table(report["results"]))
    return 0


def verify(run: Path, /) -> int:
    """Check the events of a run: no prompt was lost, trained twice, or trained too late.

    Parameters
    ----------
    run
        Directory of the run.
    """
    found = verified(run)
    say(str(found))
    return 1 if found.findings else 0


def _with_data(changes: Mapping[str, Any], env: Words, key: str, data: str | None) -> Mapping[str, Any]:
    """Set a key of the task of --env to the prompts of --data.  Raises ConfigError without exactly one."""
    if data is None:
        return changes
    if len(env or []) != 1:
        raise ConfigError(f"--data {data}: it needs one --env, whose prompts it names; got {len(env or [])}")
    task = next(iter(tasks_of(env or [])))
    return merge({"tasks": {task: {key: data}}}, changes)


def _profile(directory: Path, steps: int) -> str:
    """Return a line with the directory of a run's traces."""
    if any(directory.glob("*.trace.json.gz")):
        return (
            f"the traces of {steps} steps, and torch's tables of them, are in {directory}; "
            "https://ui.perfetto.dev shows them"
        )
    return (
        f"no profile was written: it needs {steps_of_profile(steps)[1]} steps of this process, which ended "
        "before; use a larger trainer.steps, or a smaller --profile"
    )


def _summary(outcome: build.Outcome) -> str:
    """Summarise a run in one line: its scores, steps, seconds and directory; a doubt is a line before it."""
    found = RunDirectory(outcome.directory).scores()
    scores = [(task, progress(first, last)) for task, (first, last) in found.items()]
    learnt = ", ".join(f"{task}: validation {score}" for task, score in scores if score)
    now = f", {outcome.step - outcome.began} of them now" if outcome.began else ""
    did = f"{outcome.step} of {outcome.steps} steps{now} in {outcome.seconds:.0f} s"
    inexact = f"; position not exact: {', '.join(outcome.inexact)}" if outcome.inexact else ""
    line = f"{outcome.reason}: {learnt + '; ' if learnt else ''}{did}{inexact}; run: {outcome.directory}"
    if outcome.unproved < DOUBTFUL:
        return line
    return (
        f"warning: nothing has shown that the engine used the last {outcome.unproved} versions of the "
        f"weights: they differ by less than its rounding. Is trainer.lr too small?\n{line}"
    )


def _next(outcome: build.Outcome, again: str) -> str:
    """Return the command that a user needs next; ``again`` continues the run."""
    if outcome.reason == GOAL_REACHED:
        return f"{again} --set trainer.stop_when=''"
    if outcome.reason != "finished":
        return again
    weights = any(RunDirectory(outcome.directory).checkpoints.glob("step-*/trainer/**/*.safetensors"))
    return shlex.join(["grpo-core", "export" if weights else "validate", str(outcome.directory)])
