"""The second environment of ``[audit]``, which judges some of the rollouts that a run trains.

A tracker draws successes from the groups of a step.  A thread has them evaluated by the second environment in
its own process, and counts refusals.  A failure here does not affect the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from attrs import evolve

from grpo_core import (
    ConfigError,
    Group,
    GrpoError,
    Message,
    Prompt,
    Rollout,
    RunInfo,
    Tracker,
    did_you_mean,
    events,
)
from grpo_core.app import launch
from grpo_core.app.make import check_task
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import Tasks
from grpo_core.config import TaskConfig
from grpo_core.contracts.incidents import lines_of_incidents
from grpo_core.kit import Config, PluginHost, report, reported_to
from grpo_core.processes.aio import in_own_loop
from grpo_plugin_audit.evidence import Evidence
from grpo_plugin_audit.rejudging import Judged, judge
from grpo_plugin_audit.section import AuditConfig

WAITING = 8
"""Largest number of steps in the queue; rollouts of further steps are skipped."""
TRIED = 4
"""Number of prompts of each task that are judged before the run starts."""
PATIENCE = 20.0
"""Seconds that a checkpoint, or the end of a run, waits for the queue."""
NONSENSE = "I do not know."
NAME = "second-opinion"
"""Name of the second environment in messages and of its log."""

Groups = list[tuple[int, Group]]


# ---------------------------------------------------------------------------------- before the run


def checked(config: Config, host: PluginHost) -> list[str]:
    """Try the second environment on a few replies of each task, before anything else starts.

    Returns messages about refused solutions of a task.  Raises ConfigError if it cannot judge a task.
    """
    audit = config.section(AuditConfig, None)
    if audit is None:
        return []
    if not audit.second_opinion:
        raise ConfigError("[audit] does nothing without audit.second_opinion, the name of an environment")
    for name in audit.tasks:
        if name not in config.tasks:
            near = did_you_mean(name, set(config.tasks))
            raise ConfigError(f"audit.tasks: there is no task {name!r}.{near}")
    task = _task(audit)
    check_task(f"tasks.{NAME}", task, config.environment, host)
    return in_own_loop(_checked(audit, config, host))


async def _checked(audit: AuditConfig, config: Config, host: PluginHost) -> list[str]:
    tasks = {name: config.tasks[name] for name in audit.tasks or config.tasks}
    async with started(audit, config, host) as second, _started(config, host, tasks) as first:
        prompts = await first.prompts("train", TRIED)
        return await tried(audit, second, first.environments, prompts)


@contextlib.asynccontextmanager
async def started(
    audit: AuditConfig, config: Config, host: PluginHost, logs: Path | None = None
) -> AsyncIterator[Any]:
    """Start the second environment with one worker."""
    async with _started(config, host, {NAME: _task(audit)}, logs) as tasks:
        yield tasks.environments[NAME]


def _started(
    config: Config, host: PluginHost, tasks: dict[str, TaskConfig], logs: Path | None = None
) -> contextlib.AbstractAsyncContextManager[Tasks]:
    """Start tasks that have one worker each, on this machine."""
    alone = evolve(config, tasks=tasks, environment=evolve(config.environment, workers=1))
    return Tasks.start(alone, host, LocalPlacement(host), logs=logs)


def _task(audit: AuditConfig) -> TaskConfig:
    return TaskConfig(env=audit.second_opinion, options=audit.options, success=audit.success)


async def tried(
    audit: AuditConfig,
    second: Any,
    tasks: Mapping[str, Any],
    prompts: Mapping[str, Sequence[Prompt]],
) -> list[str]:
    """Judge a few replies of each task with the started second environment; see ``checked``."""
    name, messages = f"audit.second_opinion = {audit.second_opinion!r}", []
    judges = second.about
    if judges.needs_group:
        raise ConfigError(f"{name} compares the rollouts of a group, and would see single ones; use another")
    if judges.runs_agents:
        raise ConfigError(f"{name} runs an agent, and cannot judge what another one said; use another")
    if judges.success is None:
        raise ConfigError(f"{name} declares no success; set audit.success to the reward of one")
    for task, environment in tasks.items():
        about = environment.about
        if about.success is None:
            raise ConfigError(
                f"{name}: the environment of task {task!r} declares no success; set tasks.{task}.success"
            )
        if about.runs_agents or about.max_turns > judges.max_turns:
            plays = "runs an agent" if about.runs_agents else f"plays {about.max_turns} turns"
            raise ConfigError(
                f"{name} judges {judges.max_turns} turns, and the environment of task {task!r} {plays}; "
                "leave the task out of audit.tasks"
            )
        few = [evolve(prompt, environment=task) for prompt in prompts[task][:TRIED]]
        messages += await _tried(name, task, environment, second, few)
    return messages


async def _tried(name: str, task: str, environment: Any, second: Any, few: Sequence[Prompt]) -> list[str]:
    solutions = await environment.solve(few)
    groups = [
        (index, _group(prompt, solution or NONSENSE))
        for index, (prompt, solution) in enumerate(zip(few, solutions, strict=True))
    ]
    judged = await judge(groups, {task: second})
    for one in judged:
        if one.error is not None:
            has = ", ".join(sorted(one.prompt.info)) or "none"
            raise ConfigError(
                f"{name} cannot judge prompt {one.prompt.id!r} of task {task!r}: {one.error}. The columns of "
                f"the prompt besides messages and answer are: {has}"
            )
    if environment.about.max_turns > 1:
        return []
    known = [one for one, solution in zip(judged, solutions, strict=True) if solution is not None]
    refused = [one for one in known if not one.success]
    if not refused:
        return []
    return [
        f"{name} refuses {len(refused)} of {len(known)} solutions of the environment of task {task!r}, as"
        f" that of prompt {refused[0].prompt.id!r}: one of the two is wrong"
    ]


def _group(prompt: Prompt, text: str) -> Group:
    message: Message = {"role": "assistant", "content": text}
    said = Rollout(messages=(*prompt.messages, message), turns=1, turn_tokens=(0,), finish_reason="stop")
    return Group(prompt=prompt, rollouts=(said,), generation_version=0, target_version=0)


# ---------------------------------------------------------------------------------- during the run


class SecondOpinion(Tracker):
    """A tracker that judges successes of a run's steps again, and warns if too many are refused.

    Args:
        run: the run.
        keys: the section ``[audit]``.
    """

    def __init__(self, run: RunInfo, **keys: Any) -> None:
        self._run, self.audit = run, AuditConfig(**keys)
        self.tasks: list[str] = self.audit.tasks or list(run.config.get("tasks", {}))
        level = self.audit.false_alarms / max(1, len(self.tasks))
        self.evidence = {task: Evidence(self.audit.tolerance, level) for task in self.tasks}
        self._left_out: Counter[str] = Counter()
        """Number of skipped rollouts by task."""
        self._waiting: deque[tuple[int, Groups]] = deque()
        self._judging = self._closed = self._ended = False
        self._change = threading.Condition()
        """Guards the attributes above, which the judging thread changes."""
        self._thread = threading.Thread(target=self._work, name="second opinion", daemon=True)

    def environment(self) -> AbstractAsyncContextManager[Any]:
        """Run the second environment until the block ends."""
        config, host = launch.configure([self._run.config], {})
        logs = self._run.directory / "logs"
        logs.mkdir(exist_ok=True)
        return started(self.audit, config, host, logs)

    # ------------------------------------------------------------------------------ on the tracker's thread

    def event(self, event: events.Event) -> None:
        """Start judging when the run starts."""
        if isinstance(event, events.RunStarted):
            self._run.set_metrics(self.numbers())
            self._thread.start()

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Queue the groups of a step; returns at once."""
        chosen = self.drawn(step, groups)
        with self._change:
            if self._ended or len(self._waiting) >= WAITING:
                self._left_out.update(group.prompt.environment for _, group in chosen for _ in group.rollouts)
            else:
                self._waiting.append((step, chosen))
                self._change.notify_all()

    def drawn(self, step: int, groups: Sequence[Group]) -> Groups:
        """Draw the rollouts of a step to judge: successes, independent of their text."""
        found: dict[str, list[tuple[int, Rollout]]] = defaultdict(list)
        for index, group in enumerate(groups):
            task = group.prompt.environment
            found[task] += [(index, rollout) for rollout in group.rollouts if rollout.success]
        chosen: dict[int, list[Rollout]] = defaultdict(list)
        for task in self.tasks:
            rng = random.Random(f"second opinion {self._run.config.get('seed', 0)} {task} {step}")
            own = found[task]
            for index, rollout in rng.sample(own, min(self.audit.rollouts, len(own))):
                chosen[index].append(rollout)
        return [(index, evolve(groups[index], rollouts=tuple(own))) for index, own in chosen.items()]

    def numbers(self) -> dict[str, float]:
        """Return the metrics so far."""
        metrics: dict[str, float] = {}
        for task, evidence in self.evidence.items():
            metrics[f"second_opinion_judged/{task}"] = float(evidence.judged)
            metrics[f"second_opinion_refused/{task}"] = evidence.share
            metrics[f"second_opinion_evidence/{task}"] = min(1.0, evidence.level * evidence.money)
            if self._left_out[task]:
                metrics[f"second_opinion_left_out/{task}"] = float(self._left_out[task])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence, after waiting for the queue for at most ``PATIENCE`` seconds."""
        with self._change:
            self._change.wait_for(self._is_idle, PATIENCE)
            evidence = {task: one.state_dict() for task, one in self.evidence.items()}
        return {"environment": self.audit.second_opinion, "evidence": evidence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the evidence of a checkpoint; warn about evidence that starts anew."""
        if state["environment"] != self.audit.second_opinion:
            self._run.warn("the second opinion has changed, so its evidence starts again")
            return
        for task, found in state["evidence"].items():
            if task in self.evidence and not self.evidence[task].load_state_dict(found):
                self._run.warn(
                    f"the second opinion of task {task!r} has other limits now, so its evidence starts again"
                )

    def close(self) -> None:
        """End the second environment, after waiting for the queue."""
        with self._change:
            if self._thread.is_alive():
                self._change.wait_for(self._is_idle, PATIENCE)
            self._closed = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _is_idle(self) -> bool:
        return self._ended or not (self._waiting or self._judging)

    # ------------------------------------------------------------------------------ on a thread that judges

    def _work(self) -> None:
        try:
            asyncio.run(self._judge_all())
        except Exception as error:
            why = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
            self._run.warn(f"the second opinion has ended, and the run continues: {why}")
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    async def _judge_all(self) -> None:
        with reported_to(lines_of_incidents(self._run.warn)):
            async with self.environment() as environment:
                while (found := await asyncio.to_thread(self._next)) is not None:
                    step, groups = found
                    judged = await judge(groups, dict.fromkeys(self.tasks, environment))
                    with self._change:
                        self._take(step, judged)
                    self._run.set_metrics(self.numbers())

    def _next(self) -> tuple[int, Groups] | None:
        """Wait for the next step of the queue; None at the end."""
        with self._change:
            self._judging = False
            self._change.notify_all()
            self._change.wait_for(lambda: bool(self._waiting) or self._closed)
            if self._closed:
                return None
            self._judging = True
            return self._waiting.popleft()

    def _take(self, step: int, judged: Sequence[Judged]) -> None:
        """Add the judgements of a step to the evidence, group by group."""
        by_group: dict[int, list[Judged]] = defaultdict(list)
        for one in judged:
            if one.error is None:
                by_group[one.group].append(one)
                continue
            task = one.prompt.environment
            self._left_out[task] += 1
            report("unscored", f"second opinion of task {task!r}", f"prompt {one.prompt.id!r}: {one.error}")
        for index in sorted(by_group):
            own = by_group[index]
            refused = [one for one in own if not one.success]
            task = own[0].prompt.environment
            if self.evidence[task].add(len(refused), len(own)):
                self._alarm(task, step, refused[0])

    def _alarm(self, task: str, step: int, last: Judged) -> None:
        found = self.evidence[task]
        reward = "nothing" if last.reward is None else f"a reward of {last.reward:g}"
        ends = "; the run stops (audit.stop)" if self.audit.stop else ""
        self._run.warn(
            f"task {task!r}: {self.audit.second_opinion} refuses {found.refused} of {found.judged} successes "
            f"that it judged, and more than the tolerated {self.audit.tolerance:.0%} of late: the model may "
            f"have found a mistake of its reward. Read the rollouts of step {step}, such as "
            f"those of prompt {last.prompt.id!r}, one of which gets {reward} from it{ends}"
        )
        if self.audit.stop:
            self._run.stop("second opinion")
