"""After each weight sync the engine says of a few prompts what the trainer says, or the run stops."""

from __future__ import annotations

import asyncio
import json

import attrs
import pytest
from test_cli import grpo
from test_pipeline import Run

from grpo_core.contracts.errors import DeadlineExceeded, EngineError, WeightSyncError
from grpo_core.contracts.events import Dispatched, GroupsReady
from grpo_core.contracts.records import Canary, Completion, TensorInfo, Weights
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.loop import canary
from grpo_core.loop.agreement import Agreement, Tolerance
from grpo_core.testing import FakeEngine, FakeTrainer, run
from grpo_core.validation.runner import WeightsTrackingEngine
from grpo_plugin_scale.engines.pool import EnginePool

PROMPT = (7, 8, 9)


class Singer(FakeTrainer):
    """A trainer whose canary's next token has the logprob -1 - version / 10."""

    async def publish(self, canary=()):
        sung = Canary(
            prompt_ids=PROMPT, token_ids=(1, 2), logprobs=(-1 - self.version / 10, -5.0 - self.version)
        )
        return attrs.evolve(await super().publish(), canary=(sung,))


class Listener(FakeEngine):
    """An engine that answers the canary from the weights of ``used(version)``; and what it was asked."""

    def __init__(self, used=lambda version: version, **changes):
        super().__init__(**{"latency": lambda rng: 0.5, **changes})
        self.used, self.asked, self.deaths = used, [], 0

    async def generate(self, requests):
        if tuple(requests[0].prompt_ids) != PROMPT:
            return await super().generate(requests)
        await asyncio.sleep(0.01)
        if self.deaths:
            self.deaths -= 1
            raise EngineError("engine: died")
        self.asked.append(self.version)
        assert [(r.max_tokens, r.temperature) for r in requests] == [(1, 0.0)]
        return [self.completion(logprob=-1 - self.used(self.version) / 10)]

    def completion(self, token=1, logprob=-1.0):
        return Completion(
            token_ids=(token,), logprobs=(logprob,), versions=(self.version,), finish_reason="length"
        )


def test_every_version_is_asked_about_before_it_is_used():
    done = Run(engine=Listener(), trainer=Singer(), steps=6)()
    assert done.result == "finished"
    assert done.engine.asked == [0, 1, 2, 3, 4, 5, 6]


def test_an_engine_that_still_uses_older_weights_stops_the_run_before_the_next_rollout():
    """The effect of a prefix cache that survives an update, or of a wake-up that rolls weights back."""
    stuck = Run(engine=Listener(used=lambda version: min(version, 2)), trainer=Singer(), max_staleness=0)
    with pytest.raises(
        WeightSyncError,
        match=r"does not use the weights of version 3: for token 1 .* logprob is -1\.2.* trainer's -1\.3",
    ):
        stuck()
    dispatched = [slot.generation_version for event in stuck.of(Dispatched) for slot in event.slots]
    assert max(dispatched) == 2, "nothing was dispatched for the version that the engine does not use"
    assert max(event.step for event in stuck.of(GroupsReady)) == 2


def verify(engine, *, tolerance=1e-3, deadline=60.0, version=4):
    async def story():
        trainer = Singer(version=version)
        weights = await trainer.publish()
        await engine.update_weights(weights)
        found = await canary.verify(engine, weights, tolerance=Tolerance(tolerance), deadline=deadline)
        return found.largest

    return run(story())


def test_the_error_names_the_difference_between_engine_and_trainer():
    assert verify(Listener(used=lambda version: version + 0.005)) == pytest.approx(5e-4, abs=1e-6)
    assert verify(Listener(used=lambda version: version + 0.5), tolerance=0.1) == pytest.approx(
        0.05, abs=1e-6
    )


def test_a_token_that_the_trainer_finds_unlikely_is_a_mismatch():
    engine = Listener()
    engine.completion = lambda logprob: Listener.completion(engine, token=3, logprob=logprob)
    with pytest.raises(WeightSyncError, match="less than for its likeliest tokens"):
        verify(engine)


def test_another_version_on_the_answer_is_a_mismatch():
    engine = Listener()
    engine.completion = lambda logprob: Completion(
        token_ids=[1], logprobs=[logprob], versions=[3], finish_reason="length"
    )
    with pytest.raises(WeightSyncError, match=r"with versions \[3\]; expected \[4\]"):
        verify(engine)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logprobs": [-1.5]}, r"for token 1 .* logprob is -1\.5"),
        ({"token_ids": [2]}, "for token 2"),
        ({"token_ids": [3]}, "less than for its likeliest tokens"),
        ({"versions": [3]}, r"with versions \[3\]; expected \[4\]"),
    ],
    ids=["logprob", "token", "unknown token", "version"],
)
def test_the_answer_to_each_context_is_compared(place, wrong, message):
    """The others agree: a tensor of a few tokens only, or one worker of several, may be old."""
    contexts = [Canary(prompt_ids=(i,), token_ids=(1, 2), logprobs=(-1.0, -5.0)) for i in range(3)]
    right = {"token_ids": [1], "logprobs": [-1.0], "versions": [4], "finish_reason": "length"}

    class Listed(FakeEngine):
        async def generate(self, requests):
            asked = [request.prompt_ids[0] for request in requests]
            return [Completion(**(right | wrong if each == place else right)) for each in asked]

    weights = Weights(version=4, location="", nbytes=0, tensors=(), canary=contexts)
    with pytest.raises(WeightSyncError, match=message):
        run(canary.verify(Listed(), weights, tolerance=Tolerance(0.1), deadline=60.0))


def test_an_engine_that_dies_while_it_is_asked_is_asked_again_but_not_for_ever():
    engine = Listener()
    engine.deaths = 2
    assert verify(engine) == pytest.approx(0, abs=1e-6)
    engine.deaths = 3
    with pytest.raises(EngineError, match="died"):
        verify(engine)


def test_an_engine_that_does_not_answer_is_an_error_at_the_deadline():
    class Silent(Listener):
        async def generate(self, requests):
            await asyncio.sleep(1e6)

    with pytest.raises(DeadlineExceeded, match="no answer to the canary of version 4 within 60 s"):
        verify(Silent())


def test_an_engine_that_does_not_answer_is_given_the_weights_again_and_asked_again():
    """The process of such an engine is frozen, and is replaced by one that is given weights."""

    class Frozen(Listener):
        given = 0

        async def generate(self, requests):
            if self.given < 2:
                await asyncio.sleep(1e6)
            return await super().generate(requests)

        async def update_weights(self, weights):
            self.given += 1
            await super().update_weights(weights)

    engine = Frozen()
    assert verify(engine) == pytest.approx(0, abs=1e-6)
    assert engine.given == 2


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_a_timeout_inside_an_engine_is_not_reported_as_the_deadline_of_the_canary(deadline):
    class Impatient(Listener):
        async def generate(self, requests):
            raise TimeoutError("the socket timed out")

    with pytest.raises(TimeoutError, match="the socket timed out"):
        verify(Impatient(), deadline=deadline)


def test_a_run_waits_for_the_canary_of_a_frozen_engine_as_long_as_for_its_weights():
    class Frozen(Listener):
        async def generate(self, requests):
            if self.version == 2 and tuple(requests[0].prompt_ids) == PROMPT:
                await asyncio.sleep(1e6)
            return await super().generate(requests)

    story = Run(
        engine=Frozen(), trainer=Singer(), steps=6, schedule={"rollout_deadline": 1e5, "sync_deadline": 50.0}
    )
    with pytest.raises(DeadlineExceeded, match=r"canary of version 2 within 50 s \(engine.deadline\)"):
        story()


def test_without_a_canary_nothing_is_asked():
    async def story():
        weights = Weights(version=0, location="", nbytes=0, tensors=())
        return await canary.verify(FakeEngine(), weights, tolerance=Tolerance(), deadline=None)

    assert run(story()) == Agreement()


@pytest.mark.parametrize(
    ("dtype", "used", "refused"),
    [
        ("float32", 0.5, "tolerance 0.0003 and 0.001"),
        ("bfloat16", 0.5, None),
        ("bfloat16", 2.0, "tolerance 0.1 and 1"),
    ],
)
def test_without_a_tolerance_the_dtype_of_the_weights_decides(dtype, used, refused):
    """A logprob that differs by 0.05 is explained by bfloat16, and not by float32; 0.2 is by neither."""
    info = TensorInfo(name="a", dtype=dtype, shape=(1,), offset=0, checksum=0)
    sung = Canary(prompt_ids=PROMPT, token_ids=(1, 2), logprobs=(-1.0, -5.0))
    weights = Weights(version=0, location="", nbytes=4, tensors=(info,), canary=(sung,))

    async def story():
        engine = Listener(used=lambda version: used)
        await engine.update_weights(weights)
        return (await canary.verify(engine, weights, tolerance=Tolerance(), deadline=10)).largest

    if refused:
        with pytest.raises(WeightSyncError, match=refused):
            run(story())
    else:
        assert run(story()) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "held",
    [
        lambda engine: engine,
        lambda engine: LimitedEngine(engine, 4),
        WeightsTrackingEngine,
        lambda engine: EnginePool(lambda number: LimitedEngine(engine, 4), 2),
    ],
    ids=["engine", "limited", "tracked", "pool"],
)
@pytest.mark.parametrize(("dtype", "refused"), [("bfloat16", False), ("float32", True), ("", True)])
def test_an_engine_that_computes_in_another_dtype_than_that_of_the_weights_says_so(held, dtype, refused):
    """Its logprobs of a float32 trainer's weights differ by what bfloat16 explains."""
    info = TensorInfo(name="a", dtype="float32", shape=(1,), offset=0, checksum=0)
    sung = Canary(prompt_ids=PROMPT, token_ids=(1, 2), logprobs=(-1.0, -5.0))
    weights = Weights(version=0, location="", nbytes=4, tensors=(info,), canary=(sung,))

    async def story():
        made = Listener(used=lambda version: 0.5)
        made.dtype = dtype
        engine = held(made)
        try:
            await engine.update_weights(weights)
            return (await canary.verify(engine, weights, tolerance=Tolerance(), deadline=10)).largest
        finally:
            await engine.aclose()

    if refused:
        with pytest.raises((WeightSyncError, EngineError), match=r"tolerance 0\.0003 and 0\.001"):
            run(story())
    else:
        assert run(story()) == pytest.approx(0.05)


# ---------------------------------------------------------------------------------- whole runs

PARTS = '''
import os
import signal

from grpo_core import Completion, Prompt
from grpo_core.engines.local.engine import LocalEngine


class Longer:
    """Pays for each character."""

    def prompts(self, split):
        return [Prompt(messages=f"{i}=", id=str(i)) for i in range(40)]

    def solve(self, prompt):
        return "abc"

    def evaluate(self, episodes):
        return [float(len(episode.reply)) for episode in episodes]


class Deaf(LocalEngine):
    """Takes the first weights, ignores all later ones, and says that it has them."""

    version = None

    async def update_weights(self, weights):
        if self.version is None:
            await super().update_weights(weights)
        self.version = weights.version

    async def generate(self, requests):
        return [
            Completion(
                token_ids=each.token_ids,
                logprobs=each.logprobs,
                versions=[self.version] * len(each.token_ids),
                finish_reason=each.finish_reason,
            )
            for each in await super().generate(requests)
        ]


class Freezing(LocalEngine):
    """Its process is frozen when it has taken the weights of version 2, before the canary is asked."""

    async def update_weights(self, weights):
        await super().update_weights(weights)
        if weights.version == 2 and not os.path.exists("frozen"):
            open("frozen", "w").close()
            os.kill(self.pid, signal.SIGSTOP)
'''


def trained(directory, engine, **settings):
    """Train a tiny model for eight steps."""
    (directory / "parts.py").write_text(PARTS)
    settings = {
        "model.options.warm_start_steps": 5,
        "trainer.steps": 8,
        "trainer.prompts_per_step": 4,
        "trainer.lr_schedule": "constant",
        "trainer.warmup_updates": 0,
        "rollout.group_size": 4,
        "rollout.max_tokens": 8,
        "validation.every": 0,
        "checkpoint.every": 0,
        **settings,
    }
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return grpo(
        directory, "train", "--env", "./parts.py:Longer", "--engine", engine, *chosen, "--output", "run"
    )


def canary_metrics(directory):
    lines = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [{key[7:]: line[key] for key in line if key.startswith("canary/")} for line in lines]


@pytest.mark.nightly
def test_an_engine_that_ignores_small_updates_is_found_when_they_add_up(tmp_path):
    """A step moves logprobs by a tenth of what float32 is allowed, so limits alone would let all pass."""
    done = trained(tmp_path, "./parts.py:Deaf", **{"trainer.lr": 1e-7})
    assert done.returncode == 1, done.stdout
    assert "it does not use the weights of version" in done.stderr
    assert "nearer to older weights" in done.stderr
    seen = canary_metrics(tmp_path)
    assert seen[0]["moved"] == 0
    assert all(each["difference_max"] < 1e-3 for each in seen), "no difference was beyond the limit"
    assert all(each["unproved"] for each in seen[1:]), "no sync was proved"


@pytest.mark.nightly
def test_a_run_that_moves_less_than_rounding_ends_and_says_that_its_weight_sync_is_unproved(tmp_path):
    done = trained(tmp_path, "./parts.py:Deaf", **{"trainer.lr": 1e-9, "trainer.steps": 20})
    assert done.returncode == 0, done.stderr
    assert "20 of 20 steps" in done.stdout
    assert "warning: nothing has shown that the engine used the last 20 versions" in done.stdout
    assert "trainer.lr" in done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_whose_process_freezes_with_new_weights_is_replaced_before_the_canary_is_asked_again(
    tmp_path,
):
    done = trained(tmp_path, "./parts.py:Freezing", **{"trainer.steps": 4, "engine.deadline": 20})
    assert (tmp_path / "frozen").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 steps" in done.stdout
    assert [each["unproved"] for each in canary_metrics(tmp_path)] == [0] * 4


@pytest.mark.slow
def test_a_right_engine_is_proved_to_use_each_version(tmp_path):
    done = trained(tmp_path, "local", **{"trainer.lr": 1e-4, "trainer.steps": 4})
    assert done.returncode == 0, done.stderr
    assert "unproved" not in done.stdout
    assert [each["unproved"] for each in canary_metrics(tmp_path)] == [0] * 4
