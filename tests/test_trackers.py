"""Trackers: what they receive, on which thread, and what happens when they fail."""

from __future__ import annotations

import asyncio
import csv
import errno
import gzip
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from logged import Logged
from recording import add, record, tracked

import grpo_core as grpo
from grpo_core import Run
from grpo_core.config import Config, TrackingConfig, build, merge, parse_setting
from grpo_core.contracts.errors import ConfigError, PluginError, TrackingError
from grpo_core.contracts.events import (
    GroupFinished,
    GroupsReady,
    RunStarted,
    Saving,
    StepEnded,
    Validated,
    ValidationPlayed,
    WarningRaised,
)
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting import files, trackers
from grpo_core.reporting import stored as stored_files
from grpo_core.reporting.files import DiskRoom
from grpo_core.reporting.trackers import check_trackers, make_trackers
from grpo_core.storage.run_directory import RunDirectory

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "tracker.py")


class Heard(grpo.Tracker):
    """Notes what it is called with."""

    def __init__(self):
        self.metrics_of, self.rollouts_of, self.events = [], [], []
        self.warned, self.ended, self.closed = threading.Event(), threading.Event(), 0

    def metrics(self, step, values):
        self.metrics_of.append((step, dict(values)))

    def rollouts(self, step, groups):
        self.rollouts_of.append((step, groups))

    def event(self, event):
        self.events.append(event)
        if isinstance(event, WarningRaised):
            self.warned.set()

    def close(self):
        self.closed += 1
        self.ended.set()


def group(*, rollouts=2, tokens=3):
    n = tokens
    rollout = Rollout(
        segments=[
            Segment(
                prompt_ids=(1,), tokens=Tokens.generated((2,) * n, logprobs=(-0.5,) * n, versions=(0,) * n)
            )
        ],
        messages=({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4" * n}),
        reward=1.0,
        turns=1,
        finish_reason="stop",
    )
    prompt = Prompt(messages="2+2=", id="p", environment="sum", answer="4")
    return Group(
        prompt=prompt, rollouts=(rollout,) * rollouts, generation_version=0, target_version=1, slot=0
    )


EVENTS = [
    RunStarted(directory="d", config={}),
    Validated(step=0, version=0, results={"sum": {"accuracy": 0.5}}),
    GroupsReady(step=0, groups=(group(),)),
    StepEnded(step=1, metrics={"loss": 0.25}),
]


# ---------------------------------------------------------------------------------- what they receive


def test_a_tracker_receives_metrics_rollouts_and_events_in_order_and_is_closed_once():
    heard = Heard()
    tracked({"heard": heard}, lambda all_of_them: [all_of_them.emit(event) for event in EVENTS])
    assert heard.metrics_of == [(0, {"validation/sum/accuracy": 0.5}), (1, {"loss": 0.25})]
    assert [(step, len(groups)) for step, groups in heard.rollouts_of] == [(1, 1)]
    assert [type(event) for event in heard.events] == [type(event) for event in EVENTS]
    assert all(abs(event.time - time.time()) < 60 for event in heard.events)
    assert heard.closed == 1


def test_a_tracker_that_only_wants_metrics_waits_for_nothing_else():
    class Numbers(grpo.Tracker):
        def __init__(self):
            self.steps = []

        def metrics(self, step, values):
            self.steps.append(step)

    numbers = Numbers()
    thread = trackers.TrackerThread("numbers", numbers, lambda *failure: None)
    thread.put(None)
    thread.join(time.monotonic() + 10)
    for event in EVENTS:
        thread.put(event)  # the thread has ended: what was put is still there
    assert [type(item).__name__ for item in thread._waiting] == ["Validated", "StepEnded"]


@pytest.mark.long
def test_the_event_loop_never_writes_json_of_rollouts_nor_looks_at_their_tokens(tmp_path, monkeypatch):
    """256 rollouts of 2,000 tokens: all work on them is on the trackers' threads."""
    seen = {}

    def noting(name, function):
        def noted(*args, **options):
            seen.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **options)

        return noted

    monkeypatch.setattr(stored_files, "as_json", noting("json", stored_files.as_json))
    monkeypatch.setattr(stored_files, "tokens", noting("tokens", stored_files.tokens))
    monkeypatch.setattr(files, "plain", noting("plain", files.plain))
    groups = tuple(group(rollouts=8, tokens=2000) for _ in range(32))

    async def story(trackers):
        seen.clear()  # the first line is written before the run starts
        trackers.emit(GroupsReady(step=0, groups=groups))

    run = RunDirectory.create(tmp_path / "run", Config())
    tracked({"files": files.FilesTracker(run.info(Config(), None))}, story)
    written = gzip.decompress((run.path / "rollouts" / "step-000001.jsonl.gz").read_bytes()).splitlines()
    assert len(written) == 256
    assert set(seen) == {"json", "tokens", "plain"}
    assert all(threading.get_ident() not in threads for threads in seen.values())


# ---------------------------------------------------------------------------------- failures


class Raising(Heard):
    def event(self, event):
        super().event(event)
        raise ValueError("no network")


def test_a_tracker_that_raises_is_reported_once_and_not_called_again():
    raising, heard = Raising(), Heard()

    async def story(all_of_them):
        all_of_them.emit(EVENTS[0])
        await asyncio.to_thread(heard.warned.wait)
        for event in EVENTS[1:]:
            all_of_them.emit(event)
        await all_of_them.flush()

    with Logged() as log:
        tracked({"raising": raising, "heard": heard}, story)
    assert len(raising.events) == 1
    assert raising.ended.wait(30), "nobody waits for a tracker that failed"
    assert raising.closed == 1
    (warning,) = [event for event in heard.events if isinstance(event, WarningRaised)]
    text = warning.message
    assert warning.cause == "tracker 'raising'"
    assert text.startswith("tracker 'raising' failed in RunStarted: test_trackers.py:")
    assert text.endswith("in event: ValueError: no network; it is not called again")
    assert (warning.fault.kind, warning.fault.message) == ("ValueError", "no network")
    assert "in event\n" in warning.fault.traceback
    assert [type(event) for event in heard.events if event is not warning] == [type(e) for e in EVENTS]
    assert log.text == "", "the event is enough"


class Uploading(Heard):
    """Sends metrics to a service that is away for the first calls."""

    calls = 0

    def metrics(self, step, values):
        self.calls += 1
        if self.calls < 4:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        super().metrics(step, values)


def test_a_tracker_whose_service_is_away_is_called_again_and_loses_nothing(monkeypatch):
    monkeypatch.setattr("grpo_core.environments.outages.SHORTEST", 0.01)
    uploading = Uploading()
    with Logged() as log:
        tracked({"up": uploading}, lambda all_of_them: [all_of_them.emit(event) for event in EVENTS])
    assert [step for step, _ in uploading.metrics_of] == [0, 1]
    (told,) = [record.getMessage() for record in log.records]
    assert "tracker 'up': its service is unavailable in Validated: " in told
    assert "Connection refused" in told


def test_a_tracker_whose_service_stays_away_is_not_called_again(monkeypatch):
    monkeypatch.setattr("grpo_core.environments.outages.SHORTEST", 0.01)
    monkeypatch.setattr(trackers, "AWAY", 0.05)
    uploading = Uploading()
    uploading.calls = -(10**9)
    with Logged() as log:
        tracked({"up": uploading}, lambda all_of_them: [all_of_them.emit(event) for event in EVENTS])
    assert "Connection refused; it is not called again" in log.text


def test_a_tracker_that_hangs_delays_neither_the_run_nor_other_trackers(monkeypatch):
    monkeypatch.setattr(trackers, "BACKLOG", 20)
    monkeypatch.setattr(trackers, "PATIENCE", 1.0)
    forever, begun, received = threading.Event(), threading.Event(), threading.Semaphore(0)

    class KeepingUp(Heard):
        def event(self, event):
            super().event(event)
            received.release()

    heard = KeepingUp()

    class Hanging(grpo.Tracker):
        def event(self, event):
            begun.set()
            forever.wait()

    async def story(all_of_them):
        all_of_them.emit(EVENTS[0])
        await asyncio.to_thread(begun.wait)
        for slot in range(60):
            all_of_them.emit(GroupFinished(slot=slot, task="sum", prompt="p"))
            await asyncio.to_thread(received.acquire)

    tracked({"hanging": Hanging(), "heard": heard}, story)
    forever.set()
    assert [event.slot for event in heard.events if isinstance(event, GroupFinished)] == list(range(60))
    (warning,) = [event for event in heard.events if isinstance(event, WarningRaised)]
    told = "tracker 'hanging' is too far behind the run, in RunStarted; it is not called again"
    assert told in warning.message


def test_a_tracker_that_does_not_end_is_left_behind(monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    forever = threading.Event()

    class Hanging(grpo.Tracker):
        def close(self):
            forever.wait()

    with Logged() as log:
        tracked({"hanging": Hanging()}, lambda all_of_them: None)
    forever.set()
    assert "tracker 'hanging' has not returned from close(); the run ends without it" in log.text


def test_rollouts_that_wait_for_a_slow_tracker_are_bounded_by_their_tokens(monkeypatch):
    monkeypatch.setattr(trackers, "TOKENS", 100)
    forever, begun = threading.Event(), threading.Event()

    class Slow(grpo.Tracker):
        def rollouts(self, step, groups):
            begun.set()
            forever.wait()

    async def story(all_of_them):
        all_of_them.emit(EVENTS[2])
        await asyncio.to_thread(begun.wait)
        for step in range(4):
            all_of_them.emit(GroupsReady(step=step, groups=(group(tokens=30),)))

    with Logged() as log:
        tracked({"slow": Slow()}, story)
    forever.set()
    assert "tracker 'slow' is too far behind the run, in GroupsReady" in log.text


class Required(Heard):
    required = True


def test_a_run_ends_when_a_tracker_that_it_needs_fails():
    class Full(Required):
        def event(self, event):
            raise OSError(errno.ENOSPC, "No space left on device", "run/events.jsonl")

    async def story(all_of_them):
        all_of_them.emit(EVENTS[0])
        with pytest.raises(TrackingError, match=r"tracker 'full' failed in RunStarted: .*No space left"):
            await all_of_them.watch()
        with pytest.raises(TrackingError, match="No space left"):
            await all_of_them.flush()

    with pytest.raises(TrackingError, match=r"run/events\.jsonl"):
        tracked({"full": Full()}, story)


def test_a_checkpoint_waits_for_the_events_before_it():
    release = threading.Event()

    class Slow(Required):
        def event(self, event):
            release.wait()
            super().event(event)

    slow = Slow()

    async def story(all_of_them):
        all_of_them.emit(Saving(step=4))
        flushed = asyncio.ensure_future(all_of_them.flush())
        await asyncio.sleep(0.05)
        assert not flushed.done()
        release.set()
        await flushed
        assert [event.step for event in slow.events] == [4]

    tracked({"slow": slow}, story)


def test_a_tracker_that_the_run_needs_and_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "REQUIRED_PATIENCE", 0.05)
    monkeypatch.setattr(trackers, "PATIENCE", 0.05)
    forever = threading.Event()

    class Hanging(Required):
        def event(self, event):
            forever.wait()

    async def story(all_of_them):
        all_of_them.emit(EVENTS[0])
        with pytest.raises(TrackingError, match=r"'hanging' has not returned from RunStarted for 0\.05 s"):
            await all_of_them.flush()

    tracked({"hanging": Hanging()}, story)
    forever.set()


def test_a_directory_that_cannot_be_written_ends_a_run_with_its_name(tmp_path):
    run = RunDirectory.create(tmp_path / "run", Config())
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step-000001.jsonl.gz").mkdir()  # root may write everywhere but here
    with pytest.raises(TrackingError, match=r"tracker 'files' failed in GroupsReady: .*step-000001\.jsonl"):
        add(run, EVENTS, Config(tracking=TrackingConfig(trackers=["files"])))


FULL = """
import resource, sys
from pathlib import Path
from recording import record
from test_trackers import group
from grpo_core.config import Config, TrackingConfig
from grpo_core.contracts.events import GroupsReady, Saving, Span, StepEnded, TimelineExtended
SPAN = Span(lane="loop", what="plays", begin=0.0, end=1.0, busy=1.0)
events = {
    "events.jsonl": [Saving(step=1)] * 1000,
    "metrics.jsonl": [StepEnded(step=1, metrics={"loss": 0.5})] * 1000,
    "timeline.jsonl": [TimelineExtended(step=1, spans=(SPAN,), now=1.0)] * 1000,
    "rollouts/step-000001.jsonl.partial": [GroupsReady(step=0, groups=(group(rollouts=500),))],
}[sys.argv[2]]
if sys.argv[2] == "metrics.jsonl":  # its file is the larger one, since it holds the line of a life before
    from grpo_core.storage.run_directory import RunDirectory
    record_into = RunDirectory.create
    def create(path, config):
        run = record_into(path, config)
        (path / "metrics.jsonl").write_text('{"step": 0, "' + 5800 * "x" + '": 0.5}\\n')
        return run
    RunDirectory.create = create
    RunDirectory.forget_after = lambda *given: None
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
config = Config(tracking=TrackingConfig(trackers=["files"], options={"files": {"compress": False}}))
record(Path(sys.argv[1], "run"), events, config)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["events.jsonl", "metrics.jsonl", "timeline.jsonl", "rollouts/step-000001.jsonl.partial"]
)
def test_a_file_that_cannot_grow_is_named_with_what_to_do(tmp_path, name):
    """A limit of the file's size stands for a full disk: the write fails in the same place."""
    ended = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert re.search(
        rf"TrackingError: tracker 'files' failed in \w+: \[Errno 27\] .*{re.escape(name)}'", last
    )
    assert "continue with --resume" in last


@pytest.mark.parametrize(("free", "warned"), [(3_000, True), (100_000_000, False)])
def test_a_disk_that_will_soon_be_full_is_a_warning(tmp_path, free, warned):
    heard = []
    config = Config(tracking=TrackingConfig(trackers=["files"]))
    run = RunDirectory.create(tmp_path / "run", config)
    room = DiskRoom(run.path, 1000, heard.append, free=lambda directory: free)
    events = [
        event
        for step in range(10)
        for event in (
            GroupsReady(step=step, groups=(group(),)),
            StepEnded(step=step + 1, metrics={"loss": 0.5}),
        )
    ]
    writer = files.FilesTracker(run.info(config, None))
    for event in events:
        trackers.call(writer, event)
        trackers.call(room, event)
    writer.close()
    assert bool(heard) == warned
    if warned:
        assert (heard[0].step, heard[0].cause) == (6, "disk")
        assert re.match(r"the disk has room for about \d more steps: 0\.003 MB are free", heard[0].message)


def named(folder, *steps):
    return [f"{folder}/step-{step:06d}.{end}" for step in steps for end in ("jsonl.gz", "safetensors")]


def stored(run):
    found = (path for folder in ("rollouts", "validation") for path in (run.path / folder).iterdir())
    return sorted(str(path.relative_to(run.path)) for path in found)


def steps_and_validations(count):
    for step in range(count):
        yield ValidationPlayed(version=step, groups=(group(),))
        yield GroupsReady(step=step, groups=(group(),))
        yield StepEnded(step=step + 1, metrics={})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*named("rollouts", 1, 2, 3), *named("validation", 0, 1, 2)]),
        ({"keep": 2}, [*named("rollouts", 2, 3), *named("validation", 1, 2)]),
        (
            {"keep": 1, "compress": False, "tokens": False},
            ["rollouts/step-000003.jsonl", "validation/step-000002.jsonl"],
        ),
        ({"every": 2, "keep": 1}, [*named("rollouts", 2), *named("validation", 2)]),
        ({"every": 0}, named("validation", 0, 1, 2)),
    ],
)
def test_options_decide_which_rollouts_stay_on_disk(tmp_path, options, expected):
    config = Config(tracking=TrackingConfig(trackers=["files"], options={"files": options}))
    run = record(tmp_path / "run", steps_and_validations(3), config)
    assert stored(run) == expected


@pytest.mark.parametrize("option", ["every", "keep"])
def test_an_option_below_0_is_refused(tmp_path, option):
    run = RunDirectory.create(tmp_path / "run", Config())
    with pytest.raises(ConfigError, match=rf"tracking\.files\.{option} is -1, expected at least 0"):
        files.FilesTracker(run.info(Config(), None), **{option: -1})
    assert not (run.path / "events.jsonl").exists()


# ---------------------------------------------------------------------------------- selection


def configured(*settings):
    table = {"tasks": {"sum": {"env": "x"}}}
    for setting in settings:
        table = merge(table, parse_setting(setting))
    return build([table])


def checked(*settings):
    check_trackers(configured(*settings).tracking, PluginHost.discover(allow=[]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ['tracking.trackers=["file"]'],
            r"no tracker 'file'\. Did you mean 'files'\? Installed: core:diagnosis, core:f",
        ),
        (["tracking.files.zip=true"], "tracker 'files' .* has no option 'zip'"),
        (["tracking.fils.compress=true"], r"tracking\.trackers does not select\. Did you mean 'files'\?"),
        (
            [f'tracking.trackers=["{EXAMPLE}:Csv"]', "tracking.x.columns=[]"],
            "tracking.x: options of",
        ),
    ],
)
def test_a_wrong_tracker_or_option_is_refused_before_a_tracker_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        checked(*settings)


@pytest.mark.parametrize(("plugin", "more"), [("math", []), ("report", ["report"])])
def test_the_report_is_left_out_where_no_plugin_offers_it(tmp_path, plugin, more):
    run, host = RunDirectory.create(tmp_path / "run", Config()), PluginHost.discover(allow=[plugin])
    made = make_trackers(Config(), host, lambda name: run.info(Config(), None))
    for tracker in made.values():
        tracker.close()
    assert [*made] == ["files", "terminal", *more, "diagnosis"]
    checked('tracking.trackers=["files", "*"]')


def test_a_misspelt_key_next_to_the_trackers_is_refused():
    with pytest.raises(ConfigError, match=r"unknown configuration key 'tracking\.tracker'\. Did you mean"):
        configured('tracking.tracker=["files"]')


def test_options_of_trackers_survive_being_written_and_read():
    from grpo_core.config import as_table, as_toml

    config = build(
        [{"tracking": {"trackers": ["files", "x"], "x": {"project": "a b", "tags": {"deep": [1]}}}}]
    )
    assert config.tracking.options == {"x": {"project": "a b", "tags": {"deep": [1]}}}
    assert build([as_table(config)]) == config
    import tomllib

    assert build([tomllib.loads(as_toml(config))]) == config


def test_a_factory_that_makes_something_else_is_a_fault_of_its_plugin(tmp_path):
    (tmp_path / "odd.py").write_text("def make(run): return print\n")
    config = Config(tracking=TrackingConfig(trackers=["files", f"{tmp_path}/odd.py:make"]))
    run = RunDirectory.create(tmp_path / "run", Config())
    with pytest.raises(PluginError, match=r"expected a subclass of grpo_core\.Tracker"):
        make_trackers(config, PluginHost.discover(allow=[]), lambda name: run.info(Config(), None))


def test_the_tracker_of_the_examples_writes_a_table_with_its_options(tmp_path):
    name = f"{EXAMPLE}:Csv"
    table = {"tracking": {"trackers": ["files", name], name: {"columns": ["loss"]}}}
    run = record(tmp_path / "run", EVENTS, build([table]))
    add(run, [StepEnded(step=2, metrics={"loss": 0.125})], build([table]), resumed_from=1)
    rows = list(csv.reader((run.path / "metrics.csv").read_text().splitlines()))
    assert rows == [["step", "loss"], ["1", "0.25"], ["2", "0.125"]]
    assert [event["event"] for event in Run(run.path).events()][-1] == "StepEnded"
