"""Trackers that warn, set metrics, stop the run, and keep a state in its checkpoints."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from killing import SETTINGS, Run
from recording import tracked

import grpo_core as grpo
from grpo_core.contracts.events import LineShown, StatusChanged, StepEnded, WarningRaised
from grpo_core.reporting import trackers

RUN = grpo.RunInfo(name="run", directory=Path("run"), config={})


class Heard(grpo.Tracker):
    def __init__(self):
        self.events = []

    def event(self, event):
        self.events.append(event)


def test_what_a_tracker_asks_of_its_run_does_nothing_outside_of_a_run():
    RUN.warn("strange")
    RUN.stop("enough")
    RUN.set_metrics({"strange": 1.0})
    RUN.show("strange", "1")


def test_warnings_metrics_and_the_stop_of_a_tracker_reach_its_run_from_its_thread():
    class Watch(grpo.Tracker):
        def __init__(self, run, asked):
            self.run, self.asked = run, asked

        def event(self, event):
            if isinstance(event, StepEnded):
                self.run.set_metrics({"seen": event.step})
                self.run.show("seen", f"step {event.step}")
                self.run.warn("strange")
                self.run.stop("enough")
                self.asked()

    heard, ends = Heard(), []

    async def story(running):
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        watch = Watch(running.info(RUN, "watch"), lambda: loop.call_soon_threadsafe(asked.set))
        running.add({"watch": watch})
        running.emit(StepEnded(step=3, metrics={}, digest=""))
        await asked.wait()
        running.on_stop(ends.append)  # the pipeline is made later than the trackers
        assert running.metrics() == {"seen": 3.0}

    tracked({"heard": heard}, story)
    assert [(each.name, each.text) for each in heard.events if isinstance(each, LineShown)] == [
        ("seen", "step 3")
    ]
    assert ends == ["enough"]
    (warning,) = [event for event in heard.events if isinstance(event, WarningRaised)]
    assert (warning.step, warning.cause, warning.message) == (3, "tracker 'watch'", "strange")


class Counts(grpo.Tracker):
    """Counts events, and keeps the number."""

    def __init__(self):
        self.seen, self.go = 0, threading.Event()
        self.go.set()

    def event(self, event):
        self.go.wait()
        self.seen += isinstance(event, StatusChanged)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_a_state_is_that_of_all_events_before_the_cut_and_of_none_after_it():
    counts, found = Counts(), []

    async def story(running):
        counts.go.clear()
        running.status("one")
        states = running.states()
        running.status("two")
        counts.go.set()
        found.append(await states())

    tracked({"counts": counts, "heard": Heard()}, story)
    assert found == [{"counts": {"seen": 1}}]
    assert counts.seen == 2


def test_a_state_is_loaded_before_the_first_event():
    counts = Counts()

    async def story(running):
        running.add({"counts": counts}, {"counts": {"seen": 5}, "gone": {}})
        running.status("one")

    tracked({}, story)
    assert counts.seen == 6


@pytest.mark.parametrize(
    "value", [float("nan"), (1, 2), {1: 2}, object()], ids=["nan", "tuple", "key", "object"]
)
def test_a_state_that_json_does_not_keep_is_a_fault_of_its_tracker(value):
    class Odd(Counts):
        def state_dict(self):
            return {"value": value}

    heard, found = Heard(), []

    async def story(running):
        found.append(await running.states()())

    tracked({"odd": Odd(), "counts": Counts(), "heard": heard}, story)
    assert found == [{"counts": {"seen": 0}}]
    (warning,) = [event for event in heard.events if isinstance(event, WarningRaised)]
    assert "tracker 'odd' failed in state_dict()" in warning.message


def test_a_checkpoint_does_not_wait_long_for_the_state_of_a_tracker_that_hangs(monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.05)
    slow, heard, found = Counts(), Heard(), []

    async def story(running):
        slow.go.clear()
        running.status("one")
        found.append(await running.states()())
        slow.go.set()

    tracked({"slow": slow, "heard": heard}, story)
    assert found == [{}]
    (warning,) = [event for event in heard.events if isinstance(event, WarningRaised)]
    assert "the checkpoint does not contain its state" in warning.message


WATCH = '''
import json
import grpo_core as grpo

class Counts(grpo.Tracker):
    """Keeps the numbers of all steps, warns of the fifth, and stops the run after some."""

    def __init__(self, run):
        self.run, self.steps = run, []

    def metrics(self, step, values):
        self.steps.append(step)
        self.run.set_metrics({"counted": len(self.steps)})
        if len(self.steps) == 5:
            self.run.warn("five steps")
        if len(self.steps) == 20:
            self.run.stop("enough")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def close(self):
        (self.run.directory / "steps.json").write_text(json.dumps(self.steps))
'''


@pytest.mark.nightly
def test_the_state_of_a_tracker_survives_a_kill_and_it_stops_the_run_with_a_checkpoint(tmp_path):
    name, most = f"{tmp_path}/watch.py:Counts", 20
    (tmp_path / "watch.py").write_text(WATCH)
    run = Run(tmp_path, settings={**SETTINGS, "tracking.trackers": json.dumps(["files", name])})
    run.wait(lambda: run.steps >= 8)
    run.kill("all")
    run.end()
    run.resume()
    said = run.end()
    assert run.finished, said
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "RunEnded"
    last = events[-1]["step"]
    assert events[-1]["reason"] == "enough"
    assert most <= last < SETTINGS["trainer.steps"]
    counted = list(range(1, last + 1))
    assert json.loads((run.directory / "steps.json").read_text()) == counted
    saved = json.loads((run.directory / f"checkpoints/step-{last:06d}/trackers.json").read_text())
    assert saved == {name: {"steps": counted}}
    assert [each["message"] for each in events if each.get("cause") == f"tracker {name!r}"] == ["five steps"]
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["counted"] >= last - 2  # of the events that were handled when the step ended
