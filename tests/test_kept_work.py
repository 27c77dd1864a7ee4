"""An error that ends a run costs no step that was finished: the run leaves a checkpoint of the newest one."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from safetensors.torch import save_file
from test_api import SMALL
from test_pipeline import Run, cut, resumed

import grpo_core
from grpo_core.app.build import stop_at
from grpo_core.contracts.errors import (
    CheckpointError,
    ConfigError,
    DataPlaneError,
    EngineError,
    PluginError,
    TrackingError,
    TrainerError,
    WeightSyncError,
)
from grpo_core.contracts.events import GroupsReady, GroupsReturned, Saved, Saving, StepEnded, Synced
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import Canary, Completion, StepResult, Weights
from grpo_core.loop import checkpoint
from grpo_core.loop.endings import Goal
from grpo_core.loop.health import Thresholds
from grpo_core.loop.versions import Interval
from grpo_core.models.files import not_finite
from grpo_core.reporting.trackers import Trackers
from grpo_core.storage.planes import MemoryPlane
from grpo_core.testing import FakeEngine, FakeTrainer, run

AT = 5
"""Version at which parts begin to fail."""


class BoomError(Exception):
    pass


def saving(**changes):
    """A run that keeps in ``saved`` what it saves."""
    run_ = Run(**changes)
    run_.saved = []
    run_.pipeline.save = cut(run_, run_.saved)
    return run_


def fails(run_, error, match=None):
    with pytest.raises(error, match=match) as caught:
        run_()
    return getattr(caught.value, "__notes__", [])


def late(run_, error=None):
    """Return a function that raises an error once the run has trained some steps."""

    def raising(*given, **named):
        if run_.trainer.version >= AT:
            raise error or BoomError("boom")

    return raising


def goes_on(run_, **changes):
    """Resume from the newest checkpoint; return which prompts were trained in both lives."""
    at = run_.saved[-1]
    again = resumed(at, **changes)()
    assert again.result == "finished"
    return sorted(map(int, run_.trained[: at[0] * 4] + again.trained))


# ---------------------------------------------------------------------------------- whose error it is


def engine_fails(run_):
    raising = late(run_)
    run_.engine.fault = lambda request: raising()


def environment_fails(run_):
    feedback, raising = run_.environment.feedback, late(run_)
    run_.environment.feedback = lambda episode: raising() or feedback(episode)


def budget_of_errors(run_):
    run_.pipeline.checks.observe_attempt = late(run_, PluginError("environment 'task' fails too often"))


def tracker_fails(run_):
    async def died():
        await run_.pipeline._changes.until(lambda: run_.trainer.version >= AT)
        raise TrackingError("tracker 'files' failed")

    run_.pipeline.checks.watch = [died]


def sync_fails(run_):
    update, raising = run_.engine.update_weights, late(run_)

    async def update_weights(weights):
        await update(weights)
        raising()

    run_.engine.update_weights = update_weights


def publication_fails(run_):
    publish, raising = run_.trainer.publish, late(run_, WeightSyncError("no room in /dev/shm"))

    async def published(canary=()):
        raising()
        return await publish(canary)

    run_.trainer.publish = published


def validation_fails(run_):
    raising = late(run_)

    async def validate(version):
        await asyncio.sleep(3.0)
        raising()
        return {"task": {"accuracy": 0.5}}

    run_.pipeline.validate = validate


def paused_validation_fails(run_):
    run_.pipeline.schedule = run_.pipeline.schedule.__class__(
        validations=[Interval(1)], stall=3600.0, rollout_deadline=60.0, pause_to_validate=True
    )
    validation_fails(run_)


def sampler_that_observes_fails(run_):
    run_.pipeline.prompts.observe = late(run_)


def readings_fail(run_):
    raising = late(run_)
    run_.pipeline.readings = lambda: raising() or {}


def goal_that_nothing_measures(run_):
    receive, emit = (
        stop_at(Goal.parse("validation/task/acuracy >= 0.9"), run_.pipeline, {}),
        run_.pipeline.emit,
    )
    run_.pipeline.emit = lambda event: (emit(event), run_.trainer.version < AT or receive(event))

    async def validate(version):
        return {"task": {"accuracy": 0.5}}

    run_.pipeline.validate = validate


def health_fails(run_):
    step = run_.trainer.step

    async def stepped(batch):
        result = await step(batch)
        far = 9.0 if run_.trainer.version >= AT else 0.0
        return StepResult(
            version=result.version,
            metrics={**result.metrics, "logprob_diff_mean": far, "tokens/trained": 9.0},
        )

    run_.trainer.step = stepped
    run_.pipeline.checks.limits = {"logprob_diff_mean": Thresholds(hard=2.0)}


def advantages_fail(run_):
    advantages, raising = run_.pipeline.learning.advantages, late(run_)
    run_.pipeline.learning.advantages = lambda groups: raising() or advantages(groups)


def loss_fails(run_):
    """The trainer has computed something, and has not changed the weights."""
    step, raising = run_.trainer.step, late(run_, TrainerError("5 of 9 rows are not finite"))

    async def stepped(batch):
        await asyncio.sleep(0.5)
        raising()
        return await step(batch)

    async def unchanged():
        return True

    run_.trainer.step, run_.trainer.unchanged = stepped, unchanged


def data_plane_is_gone(run_):
    """No tokens can be kept, and those that were kept cannot be read."""
    raising, save = late(run_, DataPlaneError("the tokens are lost")), run_.pipeline.save

    class Plane(MemoryPlane):
        async def put(self, group):
            raising()
            return group

    async def saving_tokens(version, failure=None):
        if run_.buffer.state_dict()["ready"]:
            raising()
        return await save(version, failure)

    run_.pipeline.plane, run_.pipeline.save = Plane(None), saving_tokens


CAUSES = {
    advantages_fail: BoomError,
    loss_fails: TrainerError,
    data_plane_is_gone: DataPlaneError,
    engine_fails: BoomError,
    environment_fails: BoomError,
    budget_of_errors: PluginError,
    tracker_fails: TrackingError,
    sync_fails: BoomError,
    publication_fails: WeightSyncError,
    validation_fails: BoomError,
    paused_validation_fails: BoomError,
    sampler_that_observes_fails: BoomError,
    readings_fail: BoomError,
    goal_that_nothing_measures: ConfigError,
    health_fails: TrainerError,
}


@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_that_is_not_the_trainer_s_leaves_a_checkpoint_of_the_newest_step(cause, policy):
    changes = {"policy": policy, "max_staleness": 2}
    run_ = saving(schedule={"validations": [Interval(1)]}, **changes)
    cause(run_)
    notes = fails(run_, CAUSES[cause])
    ((version, *_, trainer),) = run_.saved
    assert version == trainer == run_.trainer.version == run_.of(StepEnded)[-1].step >= AT
    assert notes == [f"step {version}, the newest that was finished, is saved"]
    assert [event.step for event in run_.of(Saved)] == [version]
    assert run_.of(Saving)[0].reason
    assert all(event.slots for event in run_.of(GroupsReturned)), "only if a step had taken some"
    assert run_.engine.running == 0
    assert goes_on(run_, **changes) == list(range(48))


def after_the_begin_of_a_step(run_, failed):
    """Return a watcher that fails while a step runs, and says so in ``failed``."""

    async def died():
        await run_.pipeline._changes.until(lambda: len(run_.of(GroupsReady)) > AT)
        await asyncio.sleep(0.5)
        failed.append(True)
        raise TrackingError("tracker 'files' failed")

    return died


def test_the_step_that_runs_is_finished_and_no_other_is_begun():
    run_ = saving(trainer=FakeTrainer(seconds=100.0))
    step = run_.trainer.step
    failed = []

    async def stepped(batch):
        result = await step(batch)
        if batch.step == AT:
            assert failed, "the error came in the step"
        return result

    run_.trainer.step = stepped

    run_.pipeline.checks.watch = [after_the_begin_of_a_step(run_, failed)]
    fails(run_, TrackingError)
    assert [event.step for event in run_.of(StepEnded)] == list(range(1, AT + 2))
    assert [version for version, *_ in run_.saved] == [AT + 1]
    assert len(run_.of(Synced)) == AT, "nobody needs these weights any more"
    assert goes_on(run_) == list(range(48))


def test_what_weights_sampled_that_the_canary_disproves_is_generated_again():
    """The engine claims a version that it does not use, until its canary says so."""
    told = {}

    class Claiming(FakeEngine):
        async def _one(self, request):
            if request.max_tokens == 1 and request.temperature == 0.0:  # the canary
                await asyncio.sleep(20.0)
                right = -1.0 if self.version < AT else -9.0
                return Completion(
                    token_ids=(97,), logprobs=(right,), versions=(self.version,), finish_reason="length"
                )
            said = await super()._one(request)
            if max(said.versions.tolist()) >= AT:
                told[request.group] = True
            return said

    class Publishing(FakeTrainer):
        async def publish(self, canary=()):
            one = Canary(prompt_ids=(97,), token_ids=(97,), logprobs=(-1.0,))
            return Weights(version=self.version, location="", nbytes=0, tensors=(), canary=(one,))

    engine = Claiming(reply=lambda request, rng: rng.choice("ab") * 3)
    run_ = saving(engine=engine, trainer=Publishing(), max_staleness=3, canary=[(97,)])
    fails(run_, WeightSyncError, "does not use the weights of version 5")
    ((version, buffer, *_),) = run_.saved
    assert version in (AT, AT + 1)
    assert told, "some groups were finished with these weights"
    assert not {slot.id for slot, _ in buffer["ready"]} & set(map(int, told))
    assert {slot.id for slot in buffer["retrying"]} >= set(map(int, told))
    assert goes_on(run_, max_staleness=3) == list(range(48))


class Needed(Tracker):
    """A tracker that the run needs, and that fails at a step."""

    required = True

    def __init__(self, fails=False, hangs=None):
        self.fails, self.hangs, self.steps = fails, hangs, []

    def metrics(self, step, values):
        if self.fails and step >= AT:
            if self.hangs is not None:
                self.hangs.wait()
            raise OSError(28, "No space left on device")
        self.steps.append(step)


def tracked(run_, **trackers):
    """Play a run with trackers; return the notes of the error that ends it."""

    async def story():
        running = Trackers()
        running.add(trackers)
        run_.pipeline.emit, run_.pipeline.flush = running.emit, running.flush
        run_.pipeline.checks.watch = [running.watch]
        try:
            with pytest.raises(TrackingError, match="tracker 'bad'") as caught:
                await run_.pipeline.run()
        finally:
            await running.close()
        return getattr(caught.value, "__notes__", [])

    return asyncio.run(story())


def quick(**changes):
    engine = FakeEngine(latency=lambda rng: rng.uniform(0.0, 0.01), update_seconds=0.0)
    return saving(engine=engine, trainer=FakeTrainer(seconds=0.01), steps=500, **changes)


@pytest.mark.slow
def test_a_tracker_that_fails_costs_no_step_and_the_others_have_all_events():
    run_, good = quick(), Needed()
    (note,) = tracked(run_, bad=Needed(fails=True), good=good)
    ((version, *_),) = run_.saved
    assert note == f"step {version}, the newest that was finished, is saved"
    assert good.steps == list(range(1, version + 1))


@pytest.mark.slow
def test_a_tracker_that_hangs_is_waited_for_once_and_costs_no_step(monkeypatch):
    monkeypatch.setattr("grpo_core.reporting.trackers.REQUIRED_PATIENCE", 0.3)
    monkeypatch.setattr("grpo_core.reporting.trackers.PATIENCE", 0.1)
    monkeypatch.setattr("grpo_core.reporting.trackers.BACKLOG", 50)
    run_, good, end = quick(), Needed(), threading.Event()
    try:
        (note,) = tracked(run_, bad=Needed(fails=True, hangs=end), good=good)
    finally:
        end.set()
    ((version, *_),) = run_.saved
    assert note == f"step {version}, the newest that was finished, is saved"
    assert good.steps == list(range(1, version + 1))


# ---------------------------------------------------------------------------------- what cannot be saved


def test_a_step_that_the_trainer_failed_in_is_not_saved_and_the_message_says_so():
    run_ = saving(schedule={"save_every": 3})
    step, raising = run_.trainer.step, late(run_, TrainerError("out of memory"))

    async def stepped(batch):
        raising()
        return await step(batch)

    run_.trainer.step = stepped
    (note,) = fails(run_, TrainerError, "out of memory")
    assert [version for version, *_ in run_.saved] == [3]
    assert note == (
        "steps 4 to 5 are lost, since step 5 could not be saved: the trainer may hold a part of step 6, "
        "which failed"
    )


def test_a_trainer_that_has_died_saves_nothing():
    run_ = saving()

    async def gone(*given):
        raise TrainerError("trainer died (killed by SIGKILL)")

    async def died():
        await run_.pipeline._changes.until(lambda: run_.trainer.version >= AT)
        run_.trainer.step = run_.pipeline.save = gone
        await gone()

    run_.pipeline.checks.watch = [died]
    (note,) = fails(run_, TrainerError, "^trainer died")
    assert note.endswith("could not be saved: trainer died (killed by SIGKILL)")
    assert not run_.saved


def test_a_step_has_ended_when_the_trainer_dies_while_the_engine_takes_older_weights():
    run_ = saving()
    update = run_.engine.update_weights

    async def slowly(weights):
        await asyncio.sleep(60.0)
        await update(weights)

    async def died():
        await run_.pipeline._changes.until(lambda: run_.trainer.version >= AT)
        await asyncio.sleep(1.0)
        raise TrainerError("trainer died (killed by SIGKILL)")

    run_.engine.update_weights = slowly
    run_.pipeline.checks.watch = [died]
    fails(run_, TrainerError, "^trainer died")
    assert [event.step for event in run_.of(StepEnded)] == list(range(1, AT + 1))
    assert [event.step for event in run_.of(Saving)] == [AT]
    assert run_.of(Synced)[-1].step == AT - 2


def test_a_trainer_that_never_answers_does_not_hold_the_run_for_ever():
    run_ = saving(schedule={"ending": 500.0})
    run_.pipeline.checks.watch = [after_the_begin_of_a_step(run_, [])]
    step = run_.trainer.step

    async def stepped(batch):
        if batch.step == AT:
            await asyncio.sleep(1e9)
        return await step(batch)

    run_.trainer.step = stepped

    async def story():
        with pytest.raises(TrackingError) as caught:
            await run_.pipeline.run()
        return asyncio.get_running_loop().time(), caught.value.__notes__

    at, (note,) = run(story())
    assert at < 600.0
    assert note == "steps 1 to 5 are lost, since step 5 could not be saved: that has taken more than 500 s"


def test_an_error_of_saving_does_not_hide_the_first_one():
    async def save(version, failure=None):
        raise CheckpointError("checkpoint 5: cannot be written: the disk is full")

    run_ = Run(save=save)
    engine_fails(run_)
    (note,) = fails(run_, BoomError, "boom")
    assert note.endswith("could not be saved: checkpoint 5: cannot be written: the disk is full")


def test_whoever_interrupts_the_saving_gets_the_first_error_at_once():
    run_ = saving()
    engine_fails(run_)

    async def save(version, failure=None):
        asyncio.get_running_loop().call_soon(main[0].cancel)
        await asyncio.sleep(1e9)

    run_.pipeline.save, main = save, []

    async def story():
        main.append(asyncio.current_task())
        await run_.pipeline.run()

    with pytest.raises(BoomError) as caught:
        run(story())
    assert caught.value.__notes__[0].endswith("could not be saved: that was interrupted")


def test_a_run_that_is_ended_at_once_saves_nothing():
    run_ = saving()

    async def story():
        running = asyncio.create_task(run_.pipeline.run())
        await asyncio.sleep(7.3)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        run(story())
    assert run_.saved == []
    assert len(run_.of(StepEnded)) >= 2


@pytest.mark.parametrize("begun", [0, 3])
def test_a_run_that_fails_before_its_first_step_has_nothing_to_save(begun):
    first = saving(schedule={"save_every": 3})
    first()
    again = resumed(first.saved[0]) if begun else saving()
    again.saved = []
    again.pipeline.save = cut(again, again.saved)

    async def died():
        raise BoomError("boom")

    again.pipeline.checks.watch = [died]
    assert fails(again, BoomError) == []
    assert again.saved == []


def test_a_step_that_is_saved_already_is_not_saved_again():
    run_ = saving(schedule={"save_every": AT})
    receive, emit = late(run_), run_.pipeline.emit
    run_.pipeline.emit = lambda event: (emit(event), isinstance(event, Saved) and receive())
    assert fails(run_, BoomError) == [f"step {run_.trainer.version}, the newest that was finished, is saved"]
    assert [version for version, *_ in run_.saved] == sorted({AT, run_.trainer.version})


def test_a_checkpoint_that_is_being_written_is_finished_first():
    run_ = saving(schedule={"save_every": AT})
    complete, order = run_.pipeline.save, []

    async def save(version, failure=None):
        written = await complete(version, failure)
        order.append(("begun", version))

        async def slow():
            await asyncio.sleep(300.0)
            await written()
            order.append(("written", version))

        return slow

    run_.pipeline.save = save
    engine_fails(run_)
    fails(run_, BoomError)
    last = run_.trainer.version
    assert order[:2] == [("begun", AT), ("written", AT)]
    assert order[2:] == ([("begun", last), ("written", last)] if last > AT else [])


def test_an_engine_that_reports_versions_that_nobody_published_is_an_error():
    class Ahead(FakeEngine):
        async def _one(self, request):
            said = await super()._one(request)
            return Completion(
                token_ids=said.token_ids,
                logprobs=said.logprobs,
                versions=[99] * len(said.token_ids),
                finish_reason="stop",
            )

    with pytest.raises(EngineError, match="tokens of version 99"):
        Run(engine=Ahead())()


# ---------------------------------------------------------------------------------- with a real trainer


@pytest.mark.slow
def test_a_run_whose_environment_fails_keeps_its_steps_and_continues_when_that_is_mended(tmp_path, capsys):
    judged = []

    def judge(reply):
        judged.append(reply)
        if len(judged) > 130 and not mended:
            raise RuntimeError("the judge is gone")
        return float(len(reply))

    mended, path = [], tmp_path / "run"
    given = {**SMALL, "env": judge, "data": [{"prompt": f"{i}>", "answer": "a"} for i in range(40)]}
    given |= {"validation": {"every": 0}, "checkpoint": {"every": 5, "keep": 1}}
    given |= {"trainer": {"steps": 20, "prompts_per_step": 4}}
    with pytest.raises(PluginError, match="the judge is gone") as caught:
        grpo_core.train(output=path, **given)
    ended = grpo_core.Run(path)
    *older, newest = ended.checkpoints
    assert newest == max(ended.steps()) > 5
    assert older == [5], "retention removes nothing because of an error"
    said, how = caught.value.__notes__
    assert said == f"step {newest}, the newest that was finished, is saved"
    assert how == f"train(resume={str(path)!r}) continues the run"
    failure = checkpoint.read_pipeline(ended.checkpoints[newest]).failure
    assert failure.error == str(caught.value)
    assert failure.proved in (newest - 1, newest)

    mended.append(True)
    capsys.readouterr()
    grpo_core.train(resume=path, env=judge, data=given["data"], trainer={"steps": newest + 2})
    assert f"the run ended after step {newest} by an error: task 'judge'" in capsys.readouterr().out
    assert ended.steps() == list(range(1, newest + 3))
    assert ended.verify() == []


def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    def write(step, number):
        async def save_trainer(directory):
            async def written():
                (directory / "trainer").mkdir(parents=True)
                tensors = {"good": torch.ones(3), "bad": torch.tensor([1.0, number], dtype=torch.bfloat16)}
                save_file(tensors, directory / "trainer" / "model.safetensors")

            return written

        async def story():
            finish = await checkpoint.begin(
                tmp_path, step=step, pipeline={}, loaders={}, save_trainer=save_trainer, keep=1
            )
            return await finish()

        return asyncio.run(story())

    assert write(1, 1e38).is_dir()
    with pytest.raises(
        CheckpointError,
        match=r"step-000002: cannot be written: the weights are not finite: bad in trainer/model.safetensors "
        r"has NaN or an infinity; the checkpoints before it are untouched",
    ):
        write(2, math.nan)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(tmp_path, dtype, number):
    path, most = tmp_path / "model.safetensors", torch.finfo(dtype).max
    good = torch.tensor([most, -most, 0.0] * 700_000, dtype=dtype)
    save_file({"a": good, "words": torch.full((3,), -1)}, path)
    assert not_finite(path) == ""
    for place in (0, len(good) // 2, len(good) - 1):
        bad = good.clone()
        bad[place] = number
        save_file({"a": good, "b": bad}, path)
        assert not_finite(path) == "b"
