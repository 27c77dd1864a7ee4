"""The contract of validation strategies, as a test for authors.

    from grpo_plugin_devkit.strategies import check_validation_strategy

    def test_mine_keeps_the_contract():
        check_validation_strategy(Mine)

Everything runs under the virtual clock with fakes: an engine that is always right, one that is always wrong,
one that guesses, and two tasks, with one turn and with two.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from grpo_core import Episode, Feedback, GenerationRequest, Prompt, ValidationStrategy, Weights
from grpo_core.config import EnvironmentConfig
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.loop.metrics import headline
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeTrainer, clock, fake_run, results_of
from grpo_plugin_devkit.contracts import Contract

Results = Mapping[str, Mapping[str, float]]
Policy = Callable[[GenerationRequest, random.Random], str]

TURNS = {"long": 2, "short": 1}
"""Number of turns of each task."""
PROMPTS = 24
MAX_BATCH = 8
MAX_TOKENS = 32


def oracle(request: GenerationRequest, rng: random.Random) -> str:
    """Return the answer."""
    found = re.search(r"answer (\d+)", "".join(map(chr, request.prompt_ids)))
    assert found is not None, "a prompt that the context does not have"
    return found[1]


def garbage(request: GenerationRequest, rng: random.Random) -> str:
    """Return a wrong answer."""
    return rng.choice(["", "?", "no idea"])


def guesses(request: GenerationRequest, rng: random.Random) -> str:
    """Return the answer half of the time."""
    return rng.choice([oracle, garbage])(request, rng)


@define(eq=False)
class World:
    """Two tasks with environments, and an engine; completions take a second, feedback a tenth."""

    policy: Policy = oracle
    max_batch: int = MAX_BATCH
    silent: Callable[[Episode], bool] = lambda episode: False
    """Whether an episode is unscored."""
    prompts: dict[str, list[Prompt]] = field(init=False)
    engine: FakeEngine = field(init=False)
    fakes: dict[str, FakeEnvironment] = field(init=False)
    environments: dict[str, EnvironmentPool] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.prompts = {
            task: [
                Prompt(messages=f"{task}: answer {i}.", answer=str(i), id=str(i), environment=task)
                for i in range(PROMPTS)
            ]
            for task in TURNS
        }
        self.engine = FakeEngine(reply=self.policy, latency=lambda rng: 1.0)
        self.fakes = {task: FakeEnvironment(self._feedback, max_turns=turns) for task, turns in TURNS.items()}

    def _feedback(self, episode: Episode) -> Feedback:
        if self.silent(episode):
            return Feedback()
        if episode.turn + 1 < TURNS[episode.prompt.environment]:
            return Feedback(done=False, messages="go on")
        return Feedback(reward=float(episode.reply == episode.prompt.answer), answer=episode.reply or None)

    async def start(self) -> None:
        """Load version 0."""
        config = EnvironmentConfig(max_batch=self.max_batch, max_wait=0.01)
        self.environments = {task: EnvironmentPool([fake], config) for task, fake in self.fakes.items()}
        await self.engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))

    async def results(self, strategy: ValidationStrategy, version: int = 0) -> Results:
        """Return the metrics of a version."""
        return await results_of(
            strategy,
            self.prompts,
            engine=self.engine,
            environments=self.environments,
            version=version,
            max_tokens=MAX_TOKENS,
        )


@define(eq=False)
class ValidationContract(Contract):
    """The contract of a validation strategy.

    Args:
        make: returns a new strategy, the same each time, such as a class.
        score: metric that is 1 if everything is right and 0 if nothing is; None: ``accuracy``, or else the
            first metric.
        rounds: largest number of sequential calls of ``context.rollout`` for a task.
    """

    make: Callable[[], ValidationStrategy]
    score: str | None = None
    rounds: int = 1

    def full_marks_for_an_oracle_and_none_for_garbage(self) -> None:
        for policy, expected in ((oracle, 1.0), (garbage, 0.0)):
            for task, metrics in self._results(World(policy)).items():
                score = self._score(metrics)
                assert math.isclose(score, expected, abs_tol=1e-6), (
                    f"task {task!r}: a policy of {policy.__name__} scores {score}, expected {expected}"
                )

    def an_unscored_rollout_is_no_wrong_answer(self) -> None:
        results = self._results(World(silent=lambda episode: int(episode.prompt.id) % 4 == 0))
        for task, metrics in results.items():
            name = self.score or headline(metrics)
            score = metrics.get(f"{name}", metrics.get(f"{name}_high", 1.0))  # or an interval
            assert math.isclose(score, 1.0, abs_tol=1e-6), (
                f"task {task!r}: right wherever there is feedback, and the score is {score}: a rollout "
                "whose reward is None must not count as wrong"
            )

    def the_same_whatever_is_batched_and_whoever_goes_first(self) -> None:
        first = self._results(World(guesses))
        for seed, max_batch in enumerate((1, 7, 1000)):
            other = self._results(World(guesses, max_batch), seed=seed)
            assert other == first, f"with batches of {max_batch}: {other}; with {MAX_BATCH}: {first}"

    def environments_are_called_in_batches(self) -> None:
        world = World()
        self._results(world)
        for task, fake in world.fakes.items():
            rollouts = len(fake.opened)
            allowed = self.rounds * TURNS[task] * math.ceil(rollouts / MAX_BATCH)
            assert len(fake.calls) <= allowed, (
                f"task {task!r}: {len(fake.calls)} environment calls for {rollouts} rollouts of "
                f"{TURNS[task]} turns, expected at most {allowed} of up to {MAX_BATCH}: ask for all rollouts "
                "at once, or give rounds= if later ones depend on earlier ones"
            )

    def it_can_be_cancelled_at_any_moment(self) -> None:
        for seconds in (0.0, 0.5, 1.05, 1.5, 2.25):
            world = World()
            clock.run(self._cancelled(world, seconds))
            for task, fake in world.fakes.items():
                open_still = set(fake.opened) - set(fake.closed)
                assert not open_still, f"cancelled at {seconds:g} s: sessions of {task!r} stay open"

    def what_it_remembers_survives_a_resume(self) -> None:
        """Check that a strategy resumed from JSON measures a later version like an uninterrupted one."""
        uninterrupted, resumed = self.make(), self.make()
        self._results(World(guesses), strategy=uninterrupted)
        if hasattr(uninterrupted, "state_dict") and hasattr(resumed, "load_state_dict"):
            resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict(), allow_nan=False)))
        metrics = [self._results(World(oracle), strategy=one) for one in (uninterrupted, resumed)]
        assert metrics[0] == metrics[1], f"resumed, it measures {metrics[1]}; uninterrupted, {metrics[0]}"

    def training_goes_on_as_if_it_were_not_there(self) -> None:
        """Check that batches and weights of a run do not depend on the validation."""
        with_, without = (_trained(self.make, validate) for validate in (True, False))
        assert with_ == without, "validation changes the training"

    # ------------------------------------------------------------------------------ how

    def _score(self, metrics: Mapping[str, float]) -> float:
        if self.score is None:
            name = headline(metrics)
            assert name is not None, "the strategy measured nothing"
            return metrics[name]
        assert self.score in metrics, f"there is no metric {self.score!r} in {sorted(metrics)}"
        return metrics[self.score]

    def _results(
        self, world: World, *, seed: int | None = None, strategy: ValidationStrategy | None = None
    ) -> Results:
        before = {task: list(prompts) for task, prompts in world.prompts.items()}

        async def story() -> Results:
            chosen = strategy or self.make()
            assert isinstance(chosen, ValidationStrategy), f"{chosen!r} has no method validate(context)"
            await world.start()
            return await world.results(chosen)

        results = clock.run(story(), seed=seed)
        assert world.prompts == before, "the context's prompts were changed"
        return results

    async def _cancelled(self, world: World, seconds: float) -> None:
        await world.start()
        validating = asyncio.create_task(world.results(self.make()))
        await asyncio.sleep(seconds)
        ended = validating.done()
        validating.cancel()
        done, _ = await asyncio.wait([validating], timeout=60)
        assert done, f"still validating a minute after it was cancelled (at {seconds:g} s)"
        assert ended or validating.cancelled(), f"cancelled at {seconds:g} s, it ran to its end"
        assert not world.engine.running, f"cancelled at {seconds:g} s, and the engine still generates"
        left = asyncio.all_tasks() - {asyncio.current_task()}
        left = {task for task in left if task.get_name() != "batched call"}  # a call may be shared
        assert not left, f"cancelled at {seconds:g} s, and these still run: {left}"


def check_validation_strategy(
    make: Callable[[], ValidationStrategy], *, score: str | None = None, rounds: int = 1
) -> None:
    """Check all clauses of ``ValidationContract``, with the same arguments."""
    ValidationContract(make, score, rounds).check()


# ---------------------------------------------------------------------------------- a training


def _trained(make: Callable[[], ValidationStrategy], validates: bool) -> Any:
    """Return weights, batches and remaining prompts of a run with or without validation."""
    world, trainer = World(guesses), FakeTrainer()
    stream = iter([prompt for both in zip(*world.prompts.values(), strict=True) for prompt in both])

    async def validate(version: int) -> Results:
        return await world.results(make(), version)

    async def story() -> None:
        await world.start()
        await fake_run(
            stream,
            engine=world.engine,
            environments=world.environments,
            trainer=trainer,
            steps=6,
            prompts_per_step=4,
            max_tokens=MAX_TOKENS,
            validate=validate if validates else None,
        )

    clock.run(story())
    return trainer.state, trainer.batches, [prompt.id for prompt in stream]
