"""The audit of an environment: plays probes in stages, and passes the results to pure judgements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import fmean
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core import ConfigError, GrpoError, Prompt, events
from grpo_core.kit import EnvironmentWorker
from grpo_plugin_audit import behaviour, misses, replies, rewards, texts
from grpo_plugin_audit.player import Player
from grpo_plugin_audit.records import Check, Finding, Reply, Solution, Trial, spread
from grpo_plugin_audit.rewards import Scale

FEWEST = 4
"""Smallest number of prompts, however slow the environment is."""
ALONE = 16
"""Number of prompts whose replies are repeated."""
ROUNDS = 5
"""Number of rounds in which the same replies are repeated."""
AT_ONCE = 8
"""Concurrent calls assumed of an environment that evaluates episodes one by one."""
FEWEST_ROUNDS = 2
"""Smallest number of rounds: one round has nothing to compare with."""
PANELS_UNTIL, FORMS_UNTIL, MISSES_UNTIL = 0.25, 0.35, 0.45
ROUNDS_UNTIL = 0.6
"""Fractions of the time budget after which a stage stops, so that later stages have time even if calls
become slower than the first ones."""
LEAST = 0.25
"""Smallest fraction of the time budget for playing, however long the prompts take to load."""
STARTUP = "runtime.startup"
"""Name of the check that the others need."""
UNSTEADY = "rewards differ from call to call"
STATELESS = "keep nothing of a rollout in the object or the module: a run has several processes"


@frozen(kw_only=True)
class Extent:
    """The size of an audit.

    Attributes:
        prompts: largest number of prompts; fewer if the environment is slow.
        seconds: approximate time limit of the audit.
        seed: seed of the draws of prompts.
    """

    prompts: int = 24
    seconds: float = 60.0
    seed: int = 0


@define(eq=False)
class Audit:
    """One audit.

    Args:
        make: returns a new environment, the same each time, not started.
        max_batch: number of episodes of the largest call.
        extent: size of the audit.
        incidents: receives the incidents that are reported (``grpo_core.contracts.incidents.reported_to``).
        pause: seconds between two rounds of the same replies, so that a reward that depends on the time of
            day differs.
        clock: returns the time in seconds.
    """

    make: Callable[[], EnvironmentWorker]
    max_batch: int
    extent: Extent
    incidents: list[events.IncidentReported] = field(factory=list)
    pause: float = 0.23
    clock: Callable[[], float] = time.monotonic
    player: Player = field(init=False)
    some: list[Prompt] = field(factory=list)
    """Selected prompts."""
    solutions: list[Solution] = field(factory=list)
    scale: Scale = field(init=False)
    everything: list[Trial] = field(factory=list)
    _first: list[Trial] = field(factory=list)
    """The first trials of the process."""
    _steady: bool = True
    _rounds: list[list[Trial]] = field(factory=list)
    _began: float = 0.0
    _making: float = 0.0
    """Seconds that the process took to start and to load the prompts."""

    async def run(self) -> AsyncIterator[Finding]:
        """Yield the findings as they are made.  Raises the error of an environment that does not start."""
        environment = self.make()
        self._began = self.clock()
        try:
            await environment.start()
            self.player = Player(environment, self.max_batch, clock=self.clock)
            if environment.about.runs_agents:
                raise ConfigError(
                    "an agent plays its rollouts by itself: audit an environment that judges conversations, "
                    "or look at what the agent gets for a few prompts (grpo-core try)"
                )
            async for finding in self._stages():
                yield finding
        finally:
            await environment.aclose()

    async def _stages(self) -> AsyncIterator[Finding]:
        stages: Sequence[Callable[[], Any]] = (
            self._prompts,
            self._solutions,
            self._floor,
            self._panels,
            self._forms,
            self._misses,
            self._repeat,
            self._elsewhere,
            self._levels,
        )
        for stage in stages:
            begin = time.monotonic()
            try:
                findings: list[Finding] = await stage()
            except GrpoError as error:
                check = Check(STARTUP, f"it can be played ({stage.__name__.strip('_')})")
                advice = "`grpo-core check` says more about the contract"
                findings = [check.finding("failed", str(error), "", advice)]
            for finding in findings:
                yield evolve(finding, seconds=(time.monotonic() - begin) / len(findings))
            if any(finding.check == STARTUP for finding in findings):
                return  # later stages need the results of this one

    # ------------------------------------------------------------------------------ prompts

    async def _prompts(self) -> list[Finding]:
        train = await self.player.environment.prompts("train")
        if not train:
            result = 'prompts("train") is empty; expected at least one prompt'
            return [Check(STARTUP, "prompts to train on").finding("failed", result)]
        step = max(1, len(train) // self.extent.prompts)
        known = await self.player.solve(train[:: max(1, len(train) // 256)])
        self.some = train[::step][: self.extent.prompts]
        turns = self.player.environment.about.max_turns
        held_out = await self.player.environment.prompts("validation")
        self._making = self.clock() - self._began
        return [
            await asyncio.to_thread(texts.split_leakage, train, held_out, turns),
            await asyncio.to_thread(texts.duplicates, train, turns),
            texts.in_prompt(known),
            texts.majority(known),
        ]

    # ------------------------------------------------------------------------------ solutions and nonsense

    async def _solutions(self) -> list[Finding]:
        await self.player.solve(self.some[:FEWEST])
        few = self.some[:FEWEST]
        # the first replies of the process: a wrong one, a right one, and the wrong one again
        wrong = [Reply(p, replies.NONSENSE[0], "first") for p in few]
        right = [Reply(p, None, "first") for p in few if p.id in self.player.solutions]
        self._first = await self._play([*wrong, *right])
        seconds = []
        for prompt in few:
            await self.player.play([Reply(prompt, replies.NONSENSE[0], "time")])
            seconds.append(self.player.last_call)
        self.some = self.some[: self._affordable(min(seconds))]
        known = [one for one in await self.player.solve(self.some) if one.text is not None]
        solved = await self._play([Reply(one.prompt, None, "solution") for one in known])
        got = {trial.prompt.id: trial for trial in solved if trial.ended}
        self.solutions = [
            evolve(one, reward=got[one.prompt.id].reward, turns=got[one.prompt.id].turns)
            if one.prompt.id in got
            else one
            for one in known
        ]
        return [rewards.oracle(solved, self.player.environment.about.success)]

    def _affordable(self, call: float) -> int:
        """Estimate the number of prompts that fit into the time budget.

        Args:
            call: seconds of a call with one episode, the fastest of several.
        """
        per_prompt = 130
        rest = max(1.0, 0.55 * self._playing)
        each = max(self.player.per_episode, call / self.max_batch)
        if self.player.environment.about.slots == "all":
            each = call / AT_ONCE
        return max(FEWEST, min(len(self.some), int(rest / max(1e-6, each * per_prompt))))

    async def _floor(self) -> list[Finding]:
        nonsense = [Reply(p, text, "nonsense") for text in replies.NONSENSE for p in self.some]
        trials = await self._play(nonsense)
        known = {one.prompt.id: one for one in self.solutions}
        scale = Scale(solutions=known, success=self.player.environment.about.success, floor=0.0)
        got = [t.reward for t in trials if t.reward is not None and not scale.deserves(t)]
        self.scale = evolve(scale, floor=fmean(got) if got else 0.0)
        return [rewards.floor(trials, self.scale)]

    # ------------------------------------------------------------------------------ what answers nothing

    async def _panels(self) -> list[Finding]:
        form = replies.form_of(self.solutions, self.some)
        constant = await self._play(list(replies.constant_replies(self.some, form)), PANELS_UNTIL)
        copied = await self._play(list(replies.copied_prompts(self.some, form)), PANELS_UNTIL)
        foreign = await self._play(list(replies.foreign_solutions(self.solutions)), PANELS_UNTIL)
        injected = [t for t in constant if t.kind == "injected instruction"]
        plain = [t for t in constant if t.kind != "injected instruction"]
        by_text, by_kind = (lambda trial: trial.said), (lambda trial: trial.kind)
        compare = (
            "compare the reply with the prompt's answer: a model finds such a reply, and says nothing else"
        )
        data = "do not let words of the reply decide; give a judge the reply as data"
        panel, scale = rewards.panel, self.scale
        return [
            panel(Check(check, title), trials, scale, by, advice)
            for check, title, trials, by, advice in (
                ("semantic.canary_floor", "empty and constant replies", plain, by_text, compare),
                ("statistical.adversarial_floor", "injected instructions", injected, by_text, data),
                ("reward.copied_prompt", "the prompt as a reply", copied, by_kind, compare),
                ("reward.foreign_solution", "another prompt's solution", foreign, by_kind, compare),
            )
        ]

    async def _forms(self) -> list[Finding]:
        surface = list(replies.surfaces(self.solutions))
        listed = list(replies.listings(self.solutions, self.extent.seed))
        cut = [Reply(one.prompt, one.text, "cut off", cut=True) for one in self.solutions]
        if self.player.environment.about.max_turns > 1:  # these forms are made for a single turn
            surface, cut = [], []
        long = list(replies.lengthening(self.some))
        formed = await self._play(surface, FORMS_UNTIL)
        options = await self._play(listed, FORMS_UNTIL)
        others = await self._play([*long, *cut], FORMS_UNTIL)
        return [
            rewards.surface_forms(formed, self.scale),
            rewards.listing(options, self.scale),
            rewards.length([trial for trial in others if not trial.reply.cut], self.scale),
            rewards.unfinished([trial for trial in others if trial.reply.cut], self.scale),
        ]

    async def _misses(self) -> list[Finding]:
        near = list(misses.near_misses(self.solutions))
        numbers = list(misses.prompt_numbers(self.some, replies.form_of(self.solutions, self.some)))
        moves = list(misses.named_moves(self.some, self.player.environment.about.max_turns))
        trials = await self._play([*near, *numbers, *moves], MISSES_UNTIL)

        def of(replies: list[Reply]) -> list[Trial]:
            ids = set(map(id, replies))
            return [trial for trial in trials if id(trial.reply) in ids]

        return [
            misses.near(of(near), self.scale),
            misses.numbers(of(numbers), self.scale),
            misses.moves(of(moves), self.scale),
        ]

    # ------------------------------------------------------------------------------ behaviour

    async def _repeat(self) -> list[Finding]:
        mixed = self._mixed(min(ALONE, len(self.some)))
        for number in range(ROUNDS):
            if number >= FEWEST_ROUNDS and self._late(ROUNDS_UNTIL):
                break
            if number:
                await asyncio.sleep(self.pause)
            self._rounds.append(await self._play(mixed))
        whole = spread([trial.reward for trial in self.everything if trial.reward is not None])
        found = behaviour.determinism(self._rounds, whole)
        if (made := len(self._rounds)) < ROUNDS:
            found = evolve(found, result=f"{found.result}; {made} of {ROUNDS} times, since it is slow")
        self._steady = found.severity == "passed"
        return [found]

    def _mixed(self, number: int) -> list[Reply]:
        """Return alternating right and wrong replies."""
        known = {one.prompt.id for one in self.solutions}
        wrong = ["1", *replies.NONSENSE, "0", "yes"]
        return [
            Reply(prompt, None if index % 2 and prompt.id in known else wrong[index % len(wrong)], "again")
            for index, prompt in enumerate(self.some[:number])
        ]

    async def _elsewhere(self) -> list[Finding]:
        """Compare with a new process, and with the first trials of this one."""
        anew = Check("semantic.verifier_portability", "the same rewards in another process")
        isolated = Check("runtime.episode_isolation", "no state between sessions")
        if not self._steady:
            return [anew.not_applicable(UNSTEADY), isolated.not_applicable(UNSTEADY)]
        where = "in a new process, in another order"
        other = self.make()
        try:
            await other.start()
            player = Player(other, self.max_batch, solutions=dict(self.player.solutions))
            there = (await player.play(self._mixed(min(ALONE, len(self.some)))[::-1]))[::-1]
        finally:
            await other.aclose()
        found = behaviour.compared(anew, self._rounds[0], there, where, STATELESS)
        after = f"after {self.player.episodes:,} episodes of other sessions"
        now = await self._play([trial.reply for trial in self._first])
        return [found, behaviour.compared(isolated, self._first, now, after, STATELESS)]

    # ------------------------------------------------------------------------------ all together

    async def _levels(self) -> list[Finding]:
        found = rewards.scored(self.everything)
        bad = [each for each in self.incidents if each.kind in ("deadline", "died")]
        if bad and found.severity == "passed":
            found = evolve(found, severity="failed", result=f"{found.result}, but: {bad[0].message}")
        return [
            found,
            rewards.reach(self.everything, self.scale),
            rewards.bounds(self.everything, self.scale),
        ]

    def _late(self, until: float) -> bool:
        """Whether more than this fraction of the time budget has passed."""
        return self.clock() - self._began - self._making > until * self._playing

    @property
    def _playing(self) -> float:
        """Seconds of the time budget for playing."""
        return max(LEAST * self.extent.seconds, self.extent.seconds - self._making)

    async def _play(self, given: Sequence[Reply], until: float | None = None) -> list[Trial]:
        """Play replies; with ``until`` prompt by prompt, so that prompts can be skipped.

        Args:
            given: the replies.
            until: fraction of the time budget after which only ``FEWEST`` prompts are played.
        """
        order = {prompt.id: index for index, prompt in enumerate(self.some)}

        def index(reply: Reply) -> int:
            return order.get(reply.prompt.id, len(order))

        ordered = given if until is None else sorted(given, key=index)
        size = max(1, len(ordered)) if until is None else self.player.size
        trials: list[Trial] = []
        for begin in range(0, len(ordered), size):
            part = ordered[begin : begin + size]
            if until is not None and self._late(until) and index(part[0]) >= FEWEST:
                self.some = self.some[: index(part[0])]  # nor will the next stages have time
                break
            trials += await self.player.play(part)
        self.everything += trials
        return trials
