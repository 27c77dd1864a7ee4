"""``grpo-core score``: judges stored rollouts with the current environments, and shows the changes."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

from attrs import evolve, field, frozen
from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from grpo_core import ConfigError, GrpoError, Prompt, Run
from grpo_core.app import launch
from grpo_core.app.make import check_task
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import Tasks
from grpo_core.config import TaskConfig, check_settings, parse_settings
from grpo_core.contracts.errors import shortened, wrong_input
from grpo_core.contracts.incidents import lines_of_incidents
from grpo_core.kit import Config, PluginHost, aio, reported_to
from grpo_core.plugins.options import AsJson, Flag, Settings, Words
from grpo_core.processes.secrets import inert
from grpo_core.reporting.stored import as_json, groups_in
from grpo_plugin_audit.differences import TaskDifference, shown
from grpo_plugin_audit.rejudging import Judged, KnownPrompts, judge, look_up

SCORED = "scored"
"""Directory of a run for new judgements."""
PARENTS = 4
"""Largest number of directory levels between a file of rollouts and its run."""


@frozen(kw_only=True)
class Stored:
    """Files of rollouts to judge again, and the configuration of their run."""

    target: Path
    files: Mapping[int, Path]
    """Files of rollouts by step."""
    held_out: bool
    """Whether the rollouts belong to validations."""
    table: Mapping[str, Any] = field(factory=dict)
    """Configuration of the run; empty for a file outside of a run."""
    directory: Path
    """Directory in which the directory of the results is created."""


def score(
    stored: Path,
    /,
    *,
    env: Words = None,
    step: Annotated[list[int] | None, Parameter(negative="")] = None,
    validation: Flag = False,
    set_: Settings = None,
    output: Path | None = None,
    print_json: AsJson = False,
    no_plugin: Words = None,
) -> int:
    """Judge stored rollouts again, such as after a reward was corrected, and show what changes.

    The exit status is 1 if rollouts could not be judged.

    Parameters
    ----------
    stored
        Directory of a run, or one of its files of rollouts, as in "runs/a/rollouts/step-000120.jsonl.gz".
    env
        Another environment that judges, as in "sort=./fixed.py:Sort" for the task "sort", or without a task
        for all; may be repeated.  Default: the environments of the run as they are now.
    step
        Step whose rollouts are judged; may be repeated.  Default: all steps.
    validation
        Judge the rollouts of the validations, not those of training.
    set_
        Set a configuration key, as in "tasks.sort.options.length=3"; may be repeated.
    output
        Directory for the judgements.  Default: RUN/scored/DATE.
    print_json
        Print the differences as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    with wrong_input():
        found = find(stored, step or [], validation=validation)
        wanted = _prompts(found)
        config, tasks, host, notes = _configured(found, list(wanted), env or [], set_ or [], no_plugin or [])
        directory = launch.new_directory(
            output or launch.unused(found.directory / SCORED / datetime.now().strftime("%Y%m%d-%H%M%S"))
        )
    errors = Console(stderr=True)

    def show(text: str) -> None:
        errors.print(Text(inert(text), style="dim"), soft_wrap=True)

    for note in notes:
        show(note)
    work = _judge_all(found, config, tasks, host, wanted, directory, errors)
    try:
        with reported_to(lines_of_incidents(show)):
            differences, known = aio.to_the_end(work)
    except BaseException:
        with contextlib.suppress(OSError):  # the directory is not empty
            directory.rmdir()
        raise
    report = {
        "stored": str(stored),
        "steps": list(found.files),
        "directory": str(directory),
        "tasks": {
            task: {
                **difference.as_dict(),
                "prompts_missing": known.missing.get(task, []),
                "prompts_with_other_text": known.others.get(task, []),
            }
            for task, difference in differences.items()
        },
    }
    (directory / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if print_json:
        print(json.dumps(report, indent=2))
    else:
        print(inert(shown(differences, known.missing, known.others, Console().width)))
        print(inert(f"\nall judgements: {directory}"))
    failed = any(each.failed for each in differences.values())
    return 1 if failed or not any(each.judged for each in differences.values()) else 0


# ---------------------------------------------------------------------------------- what is judged


def find(stored: Path, steps: Sequence[int], *, validation: bool) -> Stored:
    """Find the files of a run, or one file and its run.  Raises ConfigError."""
    if stored.is_file():
        if steps or validation:
            raise ConfigError(f"{stored}: is one file of rollouts; leave out --step and --validation")
        if not stored.name.endswith((".jsonl", ".jsonl.gz")):
            raise ConfigError(f"{stored}: is not a file of rollouts; expected a name that ends in .jsonl.gz")
        for run in stored.resolve().parents[:PARENTS]:
            with contextlib.suppress(ConfigError):
                table, directory = Run(run).config, run
                break
        else:
            table, directory = {}, stored.parent
        digits = "".join(filter(str.isdigit, stored.name))
        return Stored(
            target=stored,
            files={int(digits or 0): stored},
            held_out=stored.resolve().parent.name == "validation",
            table=table,
            directory=directory,
        )
    found = Run(stored)
    files = found.texts(validation=validation)
    if not files:
        raise ConfigError(f"{stored}: has stored no rollouts{' of validations' if validation else ''}")
    if unknown := [step for step in steps if step not in files]:
        raise ConfigError(
            f"--step {unknown[0]}: {stored} has no rollouts of it; the steps are {min(files)} to {max(files)}"
        )
    return Stored(
        target=stored,
        files={step: stored / file for step, file in files.items() if step in steps or not steps},
        held_out=validation,
        table=found.config,
        directory=stored,
    )


def _prompts(stored: Stored) -> dict[str, dict[str, Prompt]]:
    """Return the prompts of all files, by task and id."""
    wanted: dict[str, dict[str, Prompt]] = {}
    for file in stored.files.values():
        for prompt in (group.prompt for group in groups_in(file, tokens=False)):
            wanted.setdefault(prompt.environment, {}).setdefault(prompt.id, prompt)
    if not wanted:
        raise ConfigError(f"{stored.target}: holds no rollouts")
    return wanted


def _configured(
    stored: Stored, names: Sequence[str], envs: Sequence[str], settings: Sequence[str], block: Sequence[str]
) -> tuple[Config, dict[str, TaskConfig], PluginHost, list[str]]:
    """Return the configuration of the stored rollouts' tasks, and messages to the user."""
    others: dict[str, str] = {}
    for each in envs:  # "TASK=ENV", or one environment for all tasks
        task, equals, env = each.partition("=")
        if equals and task not in names:
            raise ConfigError(
                f"--env {each}: no rollout is of task {task!r}; the tasks are {', '.join(names)}"
            )
        others |= {task: env} if equals else dict.fromkeys(names, each)
        launch.tasks_of([env or each])
    changes: dict[str, Any] = {"tasks": {name: {"env": env} for name, env in others.items()}}
    config, host = launch.configure([stored.table], parse_settings(settings, changes), block)
    why = "stored rollouts are judged again, and that does not depend on this key"
    check_settings(parse_settings(settings), _read_by_score(config, names), why, but=["tasks.*.weight"])
    sets = config.validation.sets
    same = {name: config.tasks[one.task] for name, one in sets.items() if one.task in config.tasks}
    known = {**config.tasks, **same, **config.validation.environments(sets)}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{stored.target}: nothing says which environment judges task {unknown[0]!r}; name it, as in "
            f"--env {unknown[0]}=math:sort"
        )
    notes: list[str] = []
    chosen = {}
    for name in names:
        judge_of = known[name]
        if name in others:
            judge_of, left_out = _without_unknown_options(judge_of, host)
            notes += [f"{judge_of.env} has no option {option!r}: it is left out" for option in left_out]
        check_task(f"tasks.{name}", judge_of, config.environment, host)
        chosen[name] = judge_of
    return config, chosen, host, notes


def _read_by_score(config: Config, names: Sequence[str]) -> list[str]:
    """Return patterns of the configuration keys that the judgement of these tasks and sets depends on."""
    sets = {name: config.validation.sets[name] for name in names if name in config.validation.sets}
    tasks = {sets[name].task or name if name in sets else name for name in names}
    return [
        *(f"tasks.{name}.*" for name in sorted(tasks)),
        *(f"validation.sets.{name}.*" for name in sets),
        "environment.*",
        "plugins",
    ]


def _without_unknown_options(task: TaskConfig, host: PluginHost) -> tuple[TaskConfig, list[str]]:
    """Return a task without the options that another environment does not accept, and their names."""
    if isinstance(host.find("environment", task.env).offer.factory, str):
        return task, []
    accepted = {}
    for option, value in task.options.items():
        try:
            host.check_options("environment", task.env, {option: value})
        except GrpoError as error:
            if "has no option" not in str(error):
                raise
        else:
            accepted[option] = value
    return evolve(task, options=accepted), [option for option in task.options if option not in accepted]


# ---------------------------------------------------------------------------------- judging


async def _judge_all(
    stored: Stored,
    config: Config,
    tasks: Mapping[str, TaskConfig],
    host: PluginHost,
    wanted: Mapping[str, Mapping[str, Prompt]],
    directory: Path,
    errors: Console,
) -> tuple[dict[str, TaskDifference], KnownPrompts]:
    """Judge all files again, write the results, and count the differences."""
    differences = {name: TaskDifference(env=task.env) for name, task in tasks.items()}
    around = Tasks.start(evolve(config, tasks=dict(tasks)), host, LocalPlacement(host))
    with errors.status("starting the environments") as status:
        async with around as started:
            for name, environment in started.environments.items():
                if environment.about.runs_agents:
                    raise ConfigError(
                        f"task {name!r}: an agent plays and judges its rollouts by itself, and what it did "
                        f"is not stored; name an environment that judges conversations: --env {name}=ENV"
                    )
            status.update("looking for the prompts")
            known = await look_up(started, wanted, held_out=stored.held_out)
            with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
                for step, path in stored.files.items():
                    status.update(f"judging the rollouts of step {step:,} ({len(stored.files):,} files)")
                    groups = list(enumerate(groups_in(path, tokens=False)))
                    today = [(index, now) for index, group in groups if (now := known.of(group))]
                    found = await judge(today, started.environments)
                    _take(step, found, differences, file)
    return differences, known


def _take(
    step: int, found: Iterable[Judged], differences: Mapping[str, TaskDifference], file: TextIO
) -> None:
    groups: dict[tuple[str, int], list[Judged]] = defaultdict(list)
    for judged in found:
        groups[judged.prompt.environment, judged.group].append(judged)
        line = {
            "step": step,
            "task": judged.prompt.environment,
            "prompt": judged.prompt.id,
            "group": judged.group,
            "seed": judged.stored.seed,
            "reward": judged.reward,
            "success": judged.success,
            "metrics": judged.metrics,
            "turn_rewards": judged.turn_rewards,
            "turn_states": judged.turn_states if any(judged.turn_states) else [],
            "reply_answer": judged.answer,
            "train": judged.train and (judged.stored.train or not judged.stored.truncated),
            "stored_reward": judged.stored.reward,
            "stored_success": judged.stored.success,
            "changed": judged.changed,
            **({} if judged.error is None else {"error": shortened(judged.error, 2000)}),
            **({"answers_differ": True} if judged.answers_differ else {}),
            **({"unfinished": True} if judged.unfinished else {}),
        }
        file.write(as_json(line) + "\n")
    for (task, _), group in groups.items():
        differences[task].add(step, group)
