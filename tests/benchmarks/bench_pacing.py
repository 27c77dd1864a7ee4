"""Two ways to bound staleness: reserve a step before generating (pacing), or throw away what comes too late.

    python tests/benchmarks/bench_pacing.py

Pacing is the real pipeline under the virtual clock.  The other is a model of a loop that never stops
generating, drops a finished group whose weights are older than the bound, and generates its prompt again at
once.  Both generate at most (bound + 1) x groups a step at the same time, and have the same prompts and
durations: one prompt in ten is slow.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

from attrs import define, frozen

from grpo_core.contracts.events import GroupsReady
from grpo_core.contracts.records import GenerationRequest, Group, Prompt, SampleRequest
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as advantages
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, prompts, run
from grpo_core.testing.fakes import FakePrompts

STEPS, GROUPS, TRAIN = 200, 16, 1.0
SLOW = 10
"""Every tenth prompt is slow."""


@frozen
class Outcome:
    seconds: float
    generated: int
    dropped: int
    slow_share: float
    """Share of slow prompts among the trained groups; 0.1 of all prompts are slow."""
    never: int
    """Prompts that were drawn early enough and never trained."""


def duration(prompt: int, attempt: int, slow: float) -> float:
    """Seconds of a group: about one, and ``slow`` times as many for a slow prompt."""
    noise = random.Random(f"{prompt} {attempt}").lognormvariate(-0.08, 0.4)
    return noise * (slow if prompt % SLOW == 0 else 1.0)


class Timed(FakeEngine):
    """Takes the seconds of the prompt."""

    def __init__(self, slow: float) -> None:
        super().__init__(reply=lambda request, rng: rng.choice("ab"), update_seconds=0.0)
        self.slow, self.generated = slow, 0

    async def _one(self, request: GenerationRequest):
        self.generated += 1
        prompt = int("".join(map(chr, request.prompt_ids)).split()[-1])
        self.latency = lambda rng: duration(prompt, 0, self.slow)
        return await super()._one(request)


def paced(bound: int, slow: float, policy: str) -> Outcome:
    """The real pipeline."""
    drawn, position = prompts(20_000), 0
    ready: list[Group] = []
    engine = Timed(slow)

    def draw(request: SampleRequest) -> Sequence[Prompt]:
        nonlocal position
        position += request.expected_prompts
        return drawn[position - request.expected_prompts : position]

    def note(event: object) -> None:
        if isinstance(event, GroupsReady):
            ready.extend(event.groups)

    pipeline = Pipeline(
        buffer=Buffer(prompts_per_step=GROUPS, max_staleness=bound, num_steps=STEPS, policy=policy),
        prompts=FakePrompts(draw),
        engine=engine,
        playing=Playing(
            environments={"task": FakeEnvironment(seconds=0.0)},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=4),
            group_size=1,
        ),
        learning=Learning(advantages=advantages),
        trainer=FakeTrainer(seconds=TRAIN),
        emit=note,
        schedule=Schedule(rollout_deadline=1e6, stall=1e6),
    )

    async def timed() -> float:
        await pipeline.run()
        return asyncio.get_running_loop().time()

    seconds = run(timed())
    trained = [int(group.prompt.id) for group in ready]
    return outcome(seconds, engine.generated, 0, trained, position)


@define
class Discarding:
    """Generates without pause, and drops what is older than the bound when a step is filled."""

    bound: int
    slow: float

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        waiting, finished = deque((prompt, 0) for prompt in range(20_000)), asyncio.Queue(self.bound * GROUPS)
        version, generated, dropped, drawn = 0, 0, 0, 0
        trained: list[int] = []

        async def worker() -> None:
            nonlocal generated, drawn
            while True:
                prompt, attempt = waiting.popleft()
                drawn = max(drawn, prompt + 1)
                generated, began = generated + 1, version
                await asyncio.sleep(duration(prompt, attempt, self.slow))
                await finished.put((prompt, attempt, began))

        workers = [asyncio.create_task(worker()) for _ in range((self.bound + 1) * GROUPS)]
        for step in range(STEPS):
            batch: list[int] = []
            while len(batch) < GROUPS:
                prompt, attempt, began = await finished.get()
                if step - began > self.bound:
                    dropped += 1
                    waiting.appendleft((prompt, attempt + 1))
                else:
                    batch.append(prompt)
            await asyncio.sleep(TRAIN)
            trained += batch
            version = step + 1
        seconds = loop.time()
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        return outcome(seconds, generated, dropped, trained, drawn)


def outcome(seconds: float, generated: int, dropped: int, trained: list[int], drawn: int) -> Outcome:
    slow = sum(prompt % SLOW == 0 for prompt in trained) / len(trained)
    early = drawn - 10 * GROUPS
    return Outcome(seconds / STEPS, generated, dropped, slow, len(set(range(early)) - set(trained)))


def main() -> None:
    print(f"{STEPS} steps of {GROUPS} groups; training takes {TRAIN:g} s a step")
    for slow in (2.0, 4.0, 8.0):
        for bound in (1, 2, 4):
            arms = {
                "paced, deadline": paced(bound, slow, "deadline"),
                "paced, in order": paced(bound, slow, "in_order"),
                "discarding": run(Discarding(bound, slow).run()),
            }
            for name, one in arms.items():
                print(
                    f"slow ones take {slow:g}x, bound {bound}, {name:<16}: {one.seconds:5.2f} s a step, "
                    f"{one.generated:5} generated, {one.dropped:4} dropped, slow ones among the trained "
                    f"{one.slow_share:5.1%}, never trained {one.never}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
