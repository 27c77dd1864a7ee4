"""``grpo-core score``: judges stored rollouts again by the environments of today, and shows what changes."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from attrs import evolve, field, frozen
from rich.console import Console
from rich.text import Text

from grpo_core.aio import to_the_end
from grpo_core.app import preflight
from grpo_core.app.launch import configure, new_directory, tasks_of, unused
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.rejudging import Judged, KnownPrompts, judge, look_up
from grpo_core.app.run import lines_of_incidents
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, TaskConfig, as_table, check_settings, parse_settings
from grpo_core.errors import ConfigError, GrpoError, cut, wrong_input
from grpo_core.incidents import reported_to
from grpo_core.inert import inert
from grpo_core.plugins.host import PluginHost
from grpo_core.records import Prompt
from grpo_core.reporting.differences import TaskDifference, shown
from grpo_core.reporting.stored import TEXTS, as_json, files_of_texts, groups_in, prompts_in
from grpo_core.run_directory import CONFIG, ROLLOUTS, VALIDATION, RunDirectory, rollouts_step

SCORED = "scored"
"""Directory of a run in which new judgements are written."""
PARENTS = 4
"""Largest number of directories between a file of rollouts and the run that it belongs to."""


@frozen(kw_only=True)
class Stored:
    """The files of rollouts that are judged again, and the configuration that they were made with."""

    target: Path
    files: Mapping[int, Path]
    """Files of texts by step."""
    held_out: bool
    """Whether they belong to validations."""
    table: Mapping[str, Any] = field(factory=dict)
    """Configuration of their run; empty if they are not in a run."""
    directory: Path
    """Directory in which a directory for the result is made."""


def main(
    stored: Path,
    *,
    envs: Sequence[str],
    steps: Sequence[int],
    validation: bool,
    settings: Sequence[str],
    output: Path | None,
    as_json: bool,
    block: Sequence[str],
) -> int:
    """Run ``grpo-core score``; return the exit status, which is 1 if a rollout could not be judged."""
    with wrong_input():
        found = find(stored, steps, validation=validation)
        wanted = _prompts(found)
        config, tasks, host, notes = _configured(found, list(wanted), envs, settings, block)
        directory = new_directory(
            output or unused(found.directory / SCORED / datetime.now().strftime("%Y%m%d-%H%M%S"))
        )
    errors = Console(stderr=True)

    def tell(text: str) -> None:
        errors.print(Text(inert(text), style="dim"), soft_wrap=True)

    for note in notes:
        tell(note)
    work = _judge_all(found, config, tasks, host, wanted, directory, errors)
    try:
        with reported_to(lines_of_incidents(tell)):
            differences, known = to_the_end(work)
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty
            directory.rmdir()
        raise
    report = _report(found, directory, differences, known)
    (directory / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print(inert(shown(differences, known.missing, known.others, Console().width)))
        print(inert(f"\nall judgements: {directory}"))
    failed = any(each.failed for each in differences.values())
    return 1 if failed or not any(each.judged for each in differences.values()) else 0


# ---------------------------------------------------------------------------------- what is judged


def find(stored: Path, steps: Sequence[int], *, validation: bool) -> Stored:
    """Find the files of a run, or one file with the run that it belongs to.  Raises ConfigError."""
    if stored.is_file():
        if steps or validation:
            raise ConfigError(f"{stored}: is one file of rollouts; leave out --step and --validation")
        if not stored.name.endswith(TEXTS):
            raise ConfigError(f"{stored}: is no file of rollouts; expected a name that ends in {TEXTS[1]}")
        parents = stored.resolve().parents[:PARENTS]
        run = next((parent for parent in parents if (parent / CONFIG).is_file()), None)
        return Stored(
            target=stored,
            files={rollouts_step(stored.name) or 0: stored},
            held_out=stored.resolve().parent.name == VALIDATION,
            table={} if run is None else as_table(RunDirectory.open(run)[1]),
            directory=stored.parent if run is None else run,
        )
    _, config = RunDirectory.open(stored)
    folder = stored / (VALIDATION if validation else ROLLOUTS)
    files = files_of_texts(folder)
    if not files:
        raise ConfigError(f"{folder}: there are no rollouts; the run has stored none")
    if unknown := [step for step in steps if step not in files]:
        raise ConfigError(
            f"--step {unknown[0]}: {folder} has no rollouts of it; the steps are {min(files)} to {max(files)}"
        )
    return Stored(
        target=stored,
        files={step: file for step, file in files.items() if step in steps or not steps},
        held_out=validation,
        table=as_table(config),
        directory=stored,
    )


def _prompts(stored: Stored) -> dict[str, dict[str, Prompt]]:
    """Return the prompts of all files, by task and id."""
    wanted: dict[str, dict[str, Prompt]] = {}
    for file in stored.files.values():
        for prompt in prompts_in(file):
            wanted.setdefault(prompt.environment, {}).setdefault(prompt.id, prompt)
    if not wanted:
        raise ConfigError(f"{stored.target}: holds no rollouts")
    return wanted


def _configured(
    stored: Stored, names: Sequence[str], envs: Sequence[str], settings: Sequence[str], block: Sequence[str]
) -> tuple[Config, dict[str, TaskConfig], PluginHost, list[str]]:
    """Return the configuration with the tasks of the stored rollouts, and messages to the user."""
    others = _others(envs, names)
    changes: dict[str, Any] = {"tasks": {name: {"env": env} for name, env in others.items()}}
    config, host = configure([stored.table], parse_settings(settings, changes), block)
    why = "stored rollouts are judged again, and that does not depend on this key"
    check_settings(parse_settings(settings), _read_by_score(config, names), why, but=["tasks.*.weight"])
    tasks = {**config.tasks, **_of_sets(config)}
    if unknown := [name for name in names if name not in tasks]:
        raise ConfigError(
            f"{stored.target}: nothing says which environment judges task {unknown[0]!r}; name it, as in "
            f"--env {unknown[0]}=math:sort"
        )
    notes: list[str] = []
    chosen = {}
    for name in names:
        task = tasks[name]
        if name in others:
            task, left_out = _taken(task, host)
            notes += [f"{task.env} has no option {option!r}: it is left out" for option in left_out]
        preflight.check_task(name, task, config, host)
        chosen[name] = task
    return config, chosen, host, notes


def _read_by_score(config: Config, names: Sequence[str]) -> list[str]:
    """Return patterns of the keys that the judgement of the rollouts of these tasks and sets depends on."""
    sets = {name: config.validation.sets[name] for name in names if name in config.validation.sets}
    tasks = {sets[name].task or name if name in sets else name for name in names}
    return [
        *(f"tasks.{name}.*" for name in sorted(tasks)),
        *(f"validation.sets.{name}.*" for name in sets),
        "environment.*",
        "plugins",
    ]


def _others(envs: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the environments of the command line by task: "TASK=ENV", or one environment for all tasks."""
    found: dict[str, str] = {}
    for each in envs:
        task, equals, env = each.partition("=")
        if equals and task not in names:
            raise ConfigError(
                f"--env {each}: no rollout is of task {task!r}; the tasks are {', '.join(names)}"
            )
        found |= {task: env} if equals else dict.fromkeys(names, each)
        tasks_of([env or each])
    return found


def _of_sets(config: Config) -> dict[str, TaskConfig]:
    """Return the environments of the validation sets, by set."""
    sets = config.validation.sets
    same = {name: config.tasks[one.task] for name, one in sets.items() if one.task in config.tasks}
    return {**same, **config.validation.environments(sets)}


def _taken(task: TaskConfig, host: PluginHost) -> tuple[TaskConfig, list[str]]:
    """Leave out the options of a task that another environment does not take; return their names, too."""
    offer = host.find("environment", task.env)
    if isinstance(offer.given, str):
        return task, []
    taken = {}
    for option, value in task.options.items():
        try:
            host.check_options("environment", task.env, {option: value})
        except GrpoError as error:
            if "has no option" not in str(error):
                raise
        else:
            taken[option] = value
    return evolve(task, options=taken), [option for option in task.options if option not in taken]


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
    """Judge all files again, write what is found, and count the differences."""
    differences = {name: TaskDifference(env=task.env) for name, task in tasks.items()}
    around = Tasks.start(tasks, config.environment, LocalPlacement(host), sets={}, logs=None, host=host)
    with errors.status("starting the environments") as status:
        async with around as started:
            for name, environment in started.environments.items():
                if environment.runs_agents:
                    raise ConfigError(
                        f"task {name!r}: an agent plays and judges its rollouts by itself, and what it did "
                        f"is not stored; name an environment that judges conversations: --env {name}=ENV"
                    )
            status.update("looking for the prompts")
            known = await look_up(started, wanted, held_out=stored.held_out)
            with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
                for step, path in stored.files.items():
                    status.update(f"judging the rollouts of step {step:,} ({len(stored.files):,} files)")
                    groups = list(enumerate(groups_in(path)))
                    today = [(place, now) for place, group in groups if (now := known.of(group))]
                    found = await judge(today, started.environments)
                    _take(step, found, differences, file)
    return differences, known


def _take(
    step: int, found: Iterable[Judged], differences: Mapping[str, TaskDifference], file: TextIO
) -> None:
    groups: dict[tuple[str, int], list[Judged]] = defaultdict(list)
    for judged in found:
        groups[judged.prompt.environment, judged.group].append(judged)
        file.write(as_json(_line(step, judged)) + "\n")
    for (task, _), group in groups.items():
        differences[task].add(step, group)


def _line(step: int, judged: Judged) -> dict[str, Any]:
    return {
        "step": step,
        "task": judged.prompt.environment,
        "prompt": judged.prompt.id,
        "group": judged.group,
        "seed": judged.stored.seed,
        "reward": judged.reward,
        "success": judged.success,
        "metrics": dict(judged.metrics),
        "turn_rewards": judged.turn_rewards,
        "turn_states": judged.turn_states,
        "reply_answer": judged.answer,
        "train": judged.train,
        "stored_reward": judged.stored.reward,
        "stored_success": judged.stored.success,
        "changed": judged.changed,
        **({} if judged.error is None else {"error": cut(judged.error, 2000)}),
        **({"answers_differ": True} if judged.answers_differ else {}),
        **({"unfinished": True} if judged.unfinished else {}),
    }


def _report(
    stored: Stored, directory: Path, differences: Mapping[str, TaskDifference], known: KnownPrompts
) -> dict[str, Any]:
    return {
        "stored": str(stored.target),
        "steps": list(stored.files),
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
