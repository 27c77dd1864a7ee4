"""Several ranks of a simulated trainer: the real ``ScaledProcess`` in front of processes that die and hang.

The ranks compute together what one simulated trainer computes: each step is put together again from the rows
that each of them got, and each saves a part of the weights.  When a rank dies, its parent notices within a
second; the others notice before or after that, or wait for it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from scaled import scaled

from grpo_core.config import TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ChildDied, DeadlineExceeded, GrpoError, TrainerError
from grpo_core.contracts.records import Batch, Row, StepResult, Weights
from grpo_core.processes.aio import cancel
from grpo_core.training.plan import PADDED, Share
from grpo_plugin_scale.training.process import ScaledProcess, Together
from simulation.world import TRAINER_DEADLINE, SimulatedTrainer, Tell, never

NOTICED = 1.0
"""Seconds within which a parent notices the death of its child."""
TYPED = 5.0
"""Seconds within which the run has to know which rank died."""
UPDATES = 2
"""Optimizer updates of a step, by which its rows are divided."""


class SimulatedRanks(ScaledProcess):
    """Trains with several ranks, and checks that they fail as a whole and by name.

    Args:
        size: number of ranks.
        together: computes what they compute together.
        tell: adds a line to the story.
    """

    def __init__(self, size: int, together: SimulatedTrainer, tell: Tell) -> None:
        self.together, self.tell = together, tell
        self.exchange = Exchange(size)
        self.deaths: dict[int, float] = {}
        """Times at which ranks died by themselves."""
        self._known = False
        """Whether the run knows that the trainer has failed."""
        self.ranks: list[SimulatedRank] = []
        config = TrainerConfig(deadline=TRAINER_DEADLINE, updates_per_step=UPDATES)
        super().__init__(TrainerSetup(trainer=config, sections=scaled(ranks=size)), self._rank)
        self.process = self._start()
        if isinstance(self.process, Together):
            self.process._layout = PADDED  # what the ranks say when they have started

    def _rank(self, target: str, setup: TrainerSetup, name: str) -> Any:
        self.ranks.append(SimulatedRank(setup.rank, name, self))
        return self.ranks[-1]

    def forget(self) -> None:
        """Remove what the processes would have left to the machine."""
        if isinstance(self.process, Together):
            self.process._closing.close()

    async def watch(self) -> None:
        try:
            await super().watch()
        except Exception as error:
            self._check(error)
            raise

    async def aclose(self) -> None:
        await super().aclose()
        self._law(not any(rank.alive for rank in self.ranks), "the trainer is closed, and ranks go on")

    async def _call(self, method: str, *args: Any) -> Any:
        begun = asyncio.get_running_loop().time()
        try:
            return await super()._call(method, *args)
        except OSError:  # of a disk
            raise
        except Exception as error:
            left = [rank.name for rank in self.ranks if rank.alive]
            self._law(not left, f"{method} failed, and {left} go on")
            waited = asyncio.get_running_loop().time() - begun
            self._law(waited <= TRAINER_DEADLINE + TYPED, f"{method} failed after {waited:g} s")
            self._check(error)
            raise

    def _check(self, error: Exception) -> None:
        """A death is reported with the name of the rank, at once; a rank that hangs, when its time is up.

        Calls after that, such as to save what is left, find no rank any more.
        """
        if not isinstance(error, GrpoError):
            self._law(False, f"an error that is none of ours: {error!r}")
        known, self._known = self._known, True
        if known or not self.deaths or self.together.dice.fatal not in ([], ["rank_death"]):
            return
        named = re.search(r"^trainer rank (\d) died \(killed by SIGKILL\)", str(error))
        self._law(isinstance(error, TrainerError) and named is not None, f"a rank died, but {error!r}")
        first = min(self.deaths.values())
        waited = asyncio.get_running_loop().time() - first
        self._law(named is None or int(named[1]) in self.deaths, f"{error} names a rank that lives")
        self._law(waited <= TYPED, f"the death of a rank was known after {waited:g} s")

    def _law(self, holds: bool, what: str) -> None:
        self.together.truth.law(holds, self.together.version, f"ranks: {what}")


class Exchange:
    """The place where ranks meet: each brings a value, and the last one computes what all of them get."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[int, Any] = {}
        self._result: asyncio.Future[Any] | None = None

    async def meet(self, rank: int, value: Any, compute: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        if self._result is None:
            self._result = asyncio.get_running_loop().create_future()
        result = self._result
        self._values[rank] = value
        if len(self._values) < self._size:
            return await asyncio.shield(result)
        values = [value for _, value in sorted(self._values.items())]
        self._values, self._result = {}, None
        try:
            computed = await compute(values)
        except Exception as error:
            if not result.done():
                result.set_exception(error)
                result.exception()  # all others may be gone
            raise
        if not result.done():
            result.set_result(computed)
        return computed

    def broken(self) -> None:
        """The others notice that one of them is gone."""
        if self._result is not None and not self._result.done():
            self._result.set_exception(RuntimeError("Connection closed by peer"))
            self._result.exception()


class SimulatedRank:
    """A process of a rank, as ``grpo_core.processes.child.Child`` shows it to its parent."""

    def __init__(self, number: int, name: str, trainer: SimulatedRanks) -> None:
        self.name = name
        self._number, self._trainer = number, trainer
        self._together, self._dice = trainer.together, trainer.together.dice
        self._death: Exception | None = None
        self._gone: asyncio.Event = asyncio.Event()
        """The parent has noticed that it ended."""
        self._playing: set[asyncio.Task[Any]] = set()
        self._part: dict[str, Any] = {}
        """The part of the state that it saves next."""
        self._directory = Path()

    @property
    def alive(self) -> bool:
        return self._death is None

    async def started(self, *, seconds: float) -> None:
        return None

    async def call(self, method: str, *args: Any, seconds: float) -> Any:
        if self._gone.is_set():
            assert self._death is not None
            raise self._death
        answer = asyncio.create_task(self._answer(method, *args), name=f"{method} of {self.name}")
        gone = asyncio.create_task(self._gone.wait(), name=f"end of {self.name}")
        self._playing.add(answer)
        try:
            done, _ = await asyncio.wait([answer, gone], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._death is not None:
                await self._gone.wait()
                assert self._death is not None
                raise self._death
            if not done:
                late = DeadlineExceeded(f"{self.name}: no answer to {method!r} within {seconds:g} s; killed")
                self.kill(late)
                raise late
            return answer.result()
        finally:
            self._playing.discard(answer)
            await cancel([answer, gone])

    async def died(self) -> Exception:
        await self._gone.wait()
        assert self._death is not None
        return self._death

    def kill(self, why: Exception | None = None) -> None:
        self._death = self._death or why or ChildDied(f"{self.name} was stopped")
        self._stop()
        self._gone.set()

    async def aclose(self) -> None:
        self.kill(ChildDied(f"{self.name} is closed"))

    def _stop(self) -> None:
        for playing in self._playing:
            playing.cancel()

    # ------------------------------------------------------------------------------ in the process

    async def _answer(self, method: str, *args: Any) -> Any:
        if self._death is not None:
            await never()
        fault = self._dice.pick("rank_death", "rank_hang")
        if fault == "rank_death":  # in this call, or some time after
            asyncio.get_running_loop().call_later(self._dice.random.uniform(0.0, 3.0), self._die, method)
        if fault == "rank_hang":
            self._trainer.tell(f"{self.name} hangs in {method!r}")
            self._dice.fatal.append(fault)
            await never()
        serving: Callable[..., Awaitable[Any]] = getattr(self, method)
        return await serving(*args)

    def _die(self, method: str) -> None:
        if self._death is not None:
            return
        loop, chance = asyncio.get_running_loop(), self._dice.random
        self._trainer.tell(f"{self.name} is killed {'in a call' if self._playing else 'between calls'}")
        (self._dice.fatal if self._playing else self._dice.doubtful).append("rank_death")
        self._trainer.deaths[self._number] = loop.time()
        self._death = ChildDied(f"{self.name} died (killed by SIGKILL)")
        self._stop()
        loop.call_later(chance.uniform(0.0, NOTICED), self._gone.set)
        if chance.random() < 0.5:
            loop.call_later(chance.uniform(0.0, NOTICED), self._trainer.exchange.broken)

    async def train(self, share: Share) -> StepResult:
        result: StepResult = await self._trainer.exchange.meet(self._number, share, self._train)
        return result

    async def publish(self, canary: Sequence[tuple[int, ...]]) -> Weights:
        async def together(asked: list[Any]) -> Weights:
            return await self._together.publish(asked[0])

        weights: Weights = await self._trainer.exchange.meet(self._number, canary, together)
        return weights

    async def save(self, directory: Path) -> None:
        async def together(asked: list[Any]) -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return self._together.state()

        state = await self._trainer.exchange.meet(self._number, directory, together)
        size = len(self._trainer.ranks)
        self._part = {**state, "digest": state["digest"][self._number :: size], "files": size}
        self._directory = directory

    async def written(self) -> None:
        part, name = self._part, f"state-{self._number + 1}-of-{len(self._trainer.ranks)}.json"
        path = self._directory / "trainer" / name
        await self._together.write(path, json.dumps(part).encode())

    async def _train(self, given: list[Share]) -> StepResult:
        """Put the step together again from the shares of all ranks."""
        rows: dict[int, Row] = {}
        for share in given:
            self._trainer._law(not rows.keys() & share.rows.keys(), "two ranks got one row")
            rows |= share.rows
        first = given[0]
        self._trainer._law(sorted(rows) == list(range(len(first.facts))), "nobody got some row")
        batch = Batch(
            step=first.step, rows=tuple(rows[i] for i in sorted(rows)), temperature=first.temperature
        )
        return await self._together.step(batch)
