"""A second opinion: another environment judges some of the rollouts that a run trains, beside the loop.

The loop hands over the groups of a step and goes on.  A task of its own draws successes among them, lets the
second environment judge them in its own process, and counts what it refuses.  Whatever goes wrong here costs
the run no step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from grpo_core.app import workers
from grpo_core.app.evidence import Evidence
from grpo_core.app.placement import Placement
from grpo_core.app.rejudging import Judged, judge
from grpo_core.config import AuditConfig, Config, TaskConfig
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.errors import ConfigError, describe
from grpo_core.events import Event, GroupsReady
from grpo_core.incidents import report
from grpo_core.playing import derive_seed
from grpo_core.protocols import EnvironmentClient
from grpo_core.records import Group, Message, Prompt, Rollout

WAITING = 8
"""Steps whose rollouts may wait to be judged; those of further ones are left out."""
TRIED = 4
"""Prompts of each task that are judged before the run starts."""
PATIENCE = 20.0
"""Seconds that the end of a run waits for the rollouts that are still to be judged."""
NONSENSE = "I do not know."

Groups = list[tuple[int, Group]]


@contextlib.asynccontextmanager
async def asked(
    config: Config,
    placement: Placement,
    environments: Mapping[str, EnvironmentPool],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    logs: Path,
    warn: Callable[[str, str], None],
) -> AsyncIterator[tuple[SecondOpinion, list[str]]]:
    """Start the second environment, with one worker, and judge what is received until the block ends.

    Yields also messages for the start of the run.  Raises ConfigError if it cannot judge the run's tasks.

    Args:
        environments: those of the run's tasks.
        prompts: prompts to train on, by task.
        warn: receives the cause and the text of a warning.
    """
    audit = config.audit
    names = audit.tasks or list(config.tasks)
    second = workers.make_environment(
        "second opinion",
        TaskConfig(env=audit.second_opinion, options=audit.options, success=audit.success),
        evolve(config.environment, workers=1),
        placement,
        log=logs / "second-opinion.log",
    )
    try:
        await second.start()
        told = await tried(audit, second, {name: environments[name] for name in names}, prompts)
        opinion = SecondOpinion(audit=audit, seed=config.seed, tasks=names, environment=second, warn=warn)
        async with opinion.running():
            yield opinion, told
    finally:
        await second.aclose()


async def tried(
    audit: AuditConfig,
    second: EnvironmentPool,
    tasks: Mapping[str, EnvironmentPool],
    prompts: Mapping[str, Sequence[Prompt]],
) -> list[str]:
    """Let the second environment judge a few replies of each task before anything else starts.

    Returns messages about own solutions that it refuses.  Raises ConfigError if it cannot judge these tasks.
    """
    name, told = f"audit.second_opinion = {audit.second_opinion!r}", []
    if second.needs_group:
        raise ConfigError(f"{name} compares the rollouts of a group, and would see single ones; use another")
    if second.runs_agents:
        raise ConfigError(f"{name} runs an agent, and cannot judge what another one said; use another")
    if second.success is None:
        raise ConfigError(f"{name} declares no success; set audit.success to the reward of one")
    for task, environment in tasks.items():
        if environment.success is None:
            raise ConfigError(
                f"{name}: the environment of task {task!r} declares no success; set tasks.{task}.success"
            )
        if environment.runs_agents or environment.max_turns > second.max_turns:
            plays = "runs an agent" if environment.runs_agents else f"plays {environment.max_turns} turns"
            raise ConfigError(
                f"{name} judges {second.max_turns} turns, and the environment of task {task!r} {plays}; "
                "leave the task out of audit.tasks"
            )
        few = [evolve(prompt, environment=task) for prompt in prompts[task][:TRIED]]
        told += await _tried(name, task, environment, second, few)
    return told


async def _tried(
    name: str, task: str, environment: EnvironmentPool, second: EnvironmentPool, few: Sequence[Prompt]
) -> list[str]:
    solutions = await environment.solve(few)
    groups = [
        (place, _group(prompt, solution or NONSENSE))
        for place, (prompt, solution) in enumerate(zip(few, solutions, strict=True))
    ]
    judged = await judge(groups, {task: second})
    for one in judged:
        if one.error is not None:
            has = ", ".join(sorted(one.prompt.info)) or "none"
            raise ConfigError(
                f"{name} cannot judge prompt {one.prompt.id!r} of task {task!r}: {one.error}. The columns of "
                f"the prompt besides messages and answer are: {has}"
            )
    if environment.max_turns > 1:
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


@define(eq=False, kw_only=True)
class SecondOpinion:
    """Judges successes of a run's steps once more, and says when too many of them are refused.

    Args:
        audit: the section of the configuration.
        seed: with the step it decides which rollouts are judged.
        tasks: names of the tasks that are judged.
        environment: the second environment, which has started.
        warn: receives the cause and the text of a warning.
        stop: ends the run after its step, for a reason.
    """

    audit: AuditConfig
    seed: int
    tasks: Sequence[str]
    environment: EnvironmentClient
    warn: Callable[[str, str], None]
    stop: Callable[[str], None] = lambda reason: None
    evidence: dict[str, Evidence] = field(init=False)
    _waiting: asyncio.Queue[tuple[int, Groups]] = field(
        init=False, factory=lambda: asyncio.Queue(maxsize=WAITING)
    )
    _left_out: Counter[str] = field(init=False, factory=Counter)
    """Number of rollouts that could not be judged since the metrics were read, by task."""
    _ended: bool = field(init=False, default=False)

    @evidence.default
    def _evidence(self) -> dict[str, Evidence]:
        level = self.audit.false_alarms / len(self.tasks)
        return {task: Evidence(self.audit.tolerance, level) for task in self.tasks}

    # ------------------------------------------------------------------------------ in the loop

    def receive(self, event: Event) -> None:
        """Take the groups of a step, and return at once."""
        if not isinstance(event, GroupsReady) or self._ended:
            return
        chosen = self.drawn(event.step, event.groups)
        try:
            self._waiting.put_nowait((event.step, chosen))
        except asyncio.QueueFull:
            self._left_out.update(group.prompt.environment for _, group in chosen for _ in group.rollouts)

    def drawn(self, step: int, groups: Sequence[Group]) -> Groups:
        """Return the rollouts of a step that are judged: successes, drawn without regard to their text."""
        found: dict[str, list[tuple[int, Rollout]]] = defaultdict(list)
        for place, group in enumerate(groups):
            task = group.prompt.environment
            found[task] += [(place, rollout) for rollout in group.rollouts if rollout.success]
        chosen: dict[int, list[Rollout]] = defaultdict(list)
        for task in self.tasks:
            rng = random.Random(derive_seed("second opinion", self.seed, task, step))
            own = found[task]
            for place, rollout in rng.sample(own, min(self.audit.rollouts, len(own))):
                chosen[place].append(rollout)
        return [(place, evolve(groups[place], rollouts=tuple(own))) for place, own in chosen.items()]

    def metrics(self) -> dict[str, float]:
        """Return what is known, and how many rollouts were left out since the last call."""
        told: dict[str, float] = {}
        for task, evidence in self.evidence.items():
            told[f"second_opinion_judged/{task}"] = float(evidence.judged)
            told[f"second_opinion_refused/{task}"] = evidence.share
            told[f"second_opinion_evidence/{task}"] = min(1.0, evidence.level * evidence.money)
            if self._left_out[task]:
                told[f"second_opinion_left_out/{task}"] = float(self._left_out.pop(task))
        return told

    # ------------------------------------------------------------------------------ beside the loop

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Judge what is received, until the block ends; then for ``PATIENCE`` seconds what is left."""
        working = asyncio.create_task(self._work())
        try:
            yield
            judged = asyncio.create_task(self._waiting.join())
            await asyncio.wait((working, judged), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            judged.cancel()
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

    async def _work(self) -> None:
        try:
            while True:
                step, groups = await self._waiting.get()
                self._take(step, await judge(groups, dict.fromkeys(self.tasks, self.environment)))
                self._waiting.task_done()
        except Exception as error:
            self._ended = True
            why = describe(error)
            self.warn("second_opinion", f"there is no second opinion any more, and the run goes on: {why}")

    def _take(self, step: int, judged: Sequence[Judged]) -> None:
        """Count the judgements of a step, group by group."""
        by_group: dict[int, list[Judged]] = defaultdict(list)
        for one in judged:
            if one.error is None:
                by_group[one.group].append(one)
                continue
            task = one.prompt.environment
            self._left_out[task] += 1
            report("unscored", f"second opinion of task {task!r}", f"prompt {one.prompt.id!r}: {one.error}")
        for place in sorted(by_group):
            own = by_group[place]
            refused = [one for one in own if not one.success]
            task = own[0].prompt.environment
            if self.evidence[task].add(len(refused), len(own)):
                self._alarm(task, step, refused[0])

    def _alarm(self, task: str, step: int, last: Judged) -> None:
        found = self.evidence[task]
        reward = "nothing" if last.reward is None else f"a reward of {last.reward:g}"
        ends = "; the run stops (audit.stop)" if self.audit.stop else ""
        self.warn(
            f"second_opinion/{task}",
            f"task {task!r}: {self.audit.second_opinion} refuses {found.refused} of {found.judged} successes "
            f"that it judged, and more than the tolerated {self.audit.tolerance:.0%} of late: the model may "
            f"have found what its reward pays for by mistake. Read the rollouts of step {step + 1}, such as "
            f"those of prompt {last.prompt.id!r}, one of which gets {reward} from it{ends}",
        )
        if self.audit.stop:
            self.stop("second opinion")

    # ------------------------------------------------------------------------------ in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence so far; what waits to be judged is not in it."""
        evidence = {task: one.state_dict() for task, one in self.evidence.items()}
        return {"environment": self.audit.second_opinion, "evidence": evidence}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on with the evidence of a checkpoint; return messages about what begins anew."""
        if not state:
            return []
        if state["environment"] != self.audit.second_opinion:
            return ["the second opinion is another one now, and its evidence begins anew"]
        return [
            f"the second opinion of task {task!r} has other limits now, and its evidence begins anew"
            for task, found in state["evidence"].items()
            if task in self.evidence and not self.evidence[task].load_state_dict(found)
        ]
