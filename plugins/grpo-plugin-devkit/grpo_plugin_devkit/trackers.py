"""The contract of trackers, as checks for authors.

    def test_mine_keeps_the_contract():
        check_tracker(MyTracker, columns=["loss"])

Each check raises AssertionError.  A tracker is called as in a run: on a separate thread, with the events of a
small run of the real pipeline.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from grpo_core import Group, RunInfo, Tracker, errors, events
from grpo_core.kit import Config, as_table
from grpo_core.reporting.trackers import TrackerThread
from grpo_core.testing import a_run
from grpo_plugin_devkit.contracts import Contract, message_of

PATIENCE = 30.0
"""Time limit in seconds for all events of a small run."""
METHODS = ("metrics", "rollouts", "event", "close")
HOSTILE = "\x1b[31m <script>alert(1)</script> \ud800 \u202e\n" + "x" * 5000
"""A text with control characters, markup and invalid Unicode, as models generate."""


def check_tracker(make: Callable[..., Any], **options: Any) -> None:
    """Check a tracker's contract; ``make`` is its factory.  Raises AssertionError."""
    TrackerContract(lambda run: make(run, **options)).check()


class TrackerContract(Contract):
    """The contract of a tracker.

    Args:
        make: the factory with its options filled in.
    """

    essential = ("its factory makes a tracker",)

    def __init__(self, make: Callable[[RunInfo], Any]) -> None:
        self._make = make

    def its_factory_makes_a_tracker(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            made = self._make(_info(Path(directory)))
            expected = "expected a subclass of grpo_core.Tracker"
            assert isinstance(made, Tracker), f"its factory returned {type(made).__name__}; {expected}"
            waiting = [name for name in METHODS if inspect.iscoroutinefunction(getattr(made, name))]
            if "close" not in waiting:
                with contextlib.suppress(Exception):  # the next checks report the error and its line
                    made.close()
            names = ", ".join(waiting)
            assert not waiting, f"{names} is async, and nobody awaits it; it may block, on its own thread"

    def it_takes_every_event_of_a_run_on_a_thread_of_its_own(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self._send(Path(directory), [*_started(), *a_run(), events.RunEnded(step=3, reason="finished")])

    def it_takes_numbers_and_texts_of_any_kind(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self._send(Path(directory), [*_started(), *_rare(), events.RunEnded(step=2, reason="finished")])

    def it_takes_a_run_that_fails_at_once(self) -> None:
        failed = [events.ErrorRaised(message="the model cannot be read"), events.RunEnded(reason="failed")]
        for story in ([], failed, [*_started(), *failed]):
            with tempfile.TemporaryDirectory() as directory:
                self._send(Path(directory), story)

    def it_goes_on_where_a_resumed_run_does(self) -> None:
        """Check that files written before a resume are still there."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            self._send(path, [*_started(), *a_run(), events.RunEnded(step=3, reason="interrupted")])
            files = (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
            before = {file: file.stat().st_size for file in files}  # links may lead elsewhere
            again = [
                events.RunStarted(step=3, directory="", config=as_table(Config()), resumed=True),
                events.RunEnded(step=3, reason="finished"),
            ]
            self._send(path, again, resumed_from=3)
            for file, size in before.items():
                name = file.relative_to(path)
                assert file.exists(), f"{name} is gone after the run was resumed (run.resumed_from is 3)"
                now = file.stat().st_size
                assert now >= size, (
                    f"{name} had {size} bytes when the run stopped, and has {now} after it was resumed at "
                    "the same step (run.resumed_from is 3); open it to append"
                )

    def it_changes_nothing_that_others_see(self) -> None:
        story = [*_started(), *a_run(), *_rare(), events.RunEnded(step=3, reason="finished")]
        before = [repr(event) for event in story]
        with tempfile.TemporaryDirectory() as directory:
            self._send(Path(directory), story)
        for event, was in zip(story, before, strict=True):
            assert repr(event) == was, (
                f"it changed a {type(event).__name__}, which other trackers receive, too"
            )

    def its_state_survives_a_checkpoint(self) -> None:
        """Check that the state is JSON and is restored exactly."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            state = self._send(path, [*_started(), *a_run(), events.RunEnded(step=3, reason="interrupted")])
            if state is None:
                return
            again = self._send(path, [], resumed_from=3, state=state)
            assert again == state, (
                f"state_dict() returns {errors.shown(again)} after load_state_dict() of "
                f"{errors.shown(state)}; expected the same: a resumed run continues from it"
            )

    def _send(
        self,
        directory: Path,
        story: Sequence[events.Event],
        resumed_from: int | None = None,
        state: Any = None,
    ) -> Any:
        """Send events to a new tracker like a run; return its state, or None if it has none."""
        failures: list[errors.TrackingError] = []
        tracker = self._make(_info(directory, resumed_from))
        thread = TrackerThread("checked", tracker, lambda name, error, required: failures.append(error))
        if state is not None:
            thread.load(state)
        now = time.time()
        for event in story:
            thread.put(evolve(event, time=now))
        saved = thread.state() if thread.has_state else None
        thread.put(None)
        until = time.monotonic() + PATIENCE
        while not (thread.ended or failures) and time.monotonic() < until:
            time.sleep(0.002)
        late = f"it has not returned from {thread.doing} for {PATIENCE:g} s"
        assert thread.ended or failures, late
        if failures:
            raise AssertionError(_where(failures[0])) from failures[0]
        return None if saved is None else saved.result()


def _where(error: errors.TrackingError) -> str:
    """Describe the error of a tracker, with its line."""
    cause = error.__cause__
    if not isinstance(cause, Exception):
        return str(error)
    message = str(error).partition(": ")[0].removeprefix("tracker 'checked' ")
    return f"it {message}: {message_of(cause)}"


def _info(directory: Path, resumed_from: int | None = None) -> RunInfo:
    return RunInfo(name="checked", directory=directory, config=as_table(Config()), resumed_from=resumed_from)


def _started() -> list[events.Event]:
    return [
        events.StatusChanged(message="the environments start"),
        events.RunStarted(directory="", config=as_table(Config())),
        events.StageBegan(stage="first weight sync"),
    ]


def _rare() -> list[events.Event]:
    """Return unusual events: NaN, metrics that appear and disappear, hostile texts."""
    groups = next(event.groups for event in a_run() if isinstance(event, events.GroupsReady))
    return [
        events.GroupsReady(step=0, groups=tuple(map(_odd, groups))),
        events.StepEnded(step=1, metrics={"loss": float("nan"), "only/once": float("inf")}),
        events.Validated(step=1, version=1, results={"task": {}, "other task": {"reward": float("nan")}}),
        events.StepEnded(step=2, metrics={}),
        events.GroupFiltered(step=2, slot=1, task="task", prompt=HOSTILE, reward=0.5, reason=HOSTILE),
        events.PromptSkipped(step=2, task="task", prompt=HOSTILE, error=HOSTILE, slot=2),
        events.WarningRaised(step=2, cause="a cause", message=HOSTILE),
        events.IncidentReported(step=2, kind="died", component="engine", message=HOSTILE, count=3),
    ]


def _odd(group: Group) -> Group:
    """Return a group with an unscored rollout, and with replies that are not valid UTF-8."""
    first, *others = group.rollouts
    said = ({"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE})
    return evolve(
        group,
        rollouts=(evolve(first, reward=None, messages=said, metrics={"part": float("nan")}), *others),
    )
