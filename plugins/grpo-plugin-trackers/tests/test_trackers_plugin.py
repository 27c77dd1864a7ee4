"""Trackers write the metrics of a run; each is read back by its library."""

from __future__ import annotations

import json
import math
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from logged import Logged

import grpo_core as grpo
from grpo_core.kit import PluginHost
from grpo_core.testing import a_run, make_offer
from grpo_plugin_devkit.trackers import check_tracker
from grpo_plugin_trackers.openmetrics import named

STEP = {"loss": 0.5, "reward/sort": 0.25, "time/step": 1.5}
VALIDATION = {"validation/sort/accuracy": 0.75}


def made(name, path, *, resumed_from=None, **options):
    run = grpo.RunInfo(name="a run", directory=path, config={"seed": 1}, resumed_from=resumed_from)
    return make_offer("tracker", name, run, **options)


def groups():
    """The groups of a small run of the real pipeline."""
    (first, *_) = (event.groups for event in a_run() if isinstance(event, grpo.events.GroupsReady))
    return first


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")


# ---------------------------------------------------------------------------------- TensorBoard


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(path))
    read.Reload()
    found = {
        name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]
    }
    texts = [
        tensor.tensor_proto.string_val[0].decode()
        for name in read.Tags()["tensors"]
        for tensor in read.Tensors(name)
    ]
    return found, texts


@pytest.mark.long
def test_tensorboard_shows_the_metrics_and_rollouts_of_a_run(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = made("tensorboard", tmp_path, every=2, completions=3)
    for step in (1, 2, 3):
        tracker.rollouts(step, groups())
        tracker.metrics(step, {**STEP, "loss": 1 / step})
    tracker.metrics(2, VALIDATION)
    tracker.close()
    again = made("tensorboard", tmp_path, resumed_from=2)
    again.metrics(3, {"loss": 7.0})
    again.close()
    found, texts = scalars(tmp_path / "tensorboard")
    assert found["loss"] == [(1, 1.0), (2, 0.5), (3, 7.0)], "what came after the checkpoint is hidden"
    assert found["validation/sort/accuracy"] == [(2, 0.75)]
    (text,) = texts
    assert text.count("<tr>") == 4
    check_tracker(PluginHost.discover().factory("tracker", "tensorboard"))


# ---------------------------------------------------------------------------------- Weights & Biases


def logged(path):
    """The rows, the configuration and the ids of the runs that W&B keeps in a directory.

    A file is a log of records in blocks of 32 KiB, as of LevelDB; each record is a message of W&B.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    rows, settings, ids = [], {}, []
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        for record in closed(file, Record):
            match record.WhichOneof("record_type"):
                case "history":
                    items = record.history.item
                    rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
                case "run":
                    ids.append(record.run.run_id)
                    settings |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    return rows, settings, ids


def closed(file, kind, seconds=30):
    """The records of a run that has ended; W&B's service may write the last ones after ``finish``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = [kind.FromString(data) for data in records(file.read_bytes())]
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file} has no last record after {seconds} s")


def records(data, block=32768, header=7):
    at, parts = header, []  # the file's own header has that length, too
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + header + size > len(data):  # it is being written
            return
        parts.append(data[at + header : at + header + size])
        at += header + size
        if kind in (1, 4):  # a whole record, or the end of one
            yield b"".join(parts)
            parts = []


@pytest.mark.long
@pytest.mark.usefixtures("offline")
def test_wandb_has_the_metrics_and_a_resumed_run_is_the_same_one(tmp_path):
    tracker = made("wandb", tmp_path, mode="offline", every=2, completions=3)
    tracker.metrics(1, STEP)
    tracker.rollouts(2, groups())
    tracker.metrics(0, VALIDATION)  # of an earlier version
    tracker.event(grpo.events.RunEnded(step=2, reason="finished"))
    tracker.close()
    again = made("wandb", tmp_path, resumed_from=2, mode="offline")
    again.metrics(3, {**STEP, "loss": math.inf})
    again.close()
    rows, settings, ids = logged(tmp_path)
    assert rows[0].items() >= {"step": 1, **STEP}.items()
    assert rows[1]["rollouts/nrows"] == 3
    assert rows[2].items() >= {"step": 0, **VALIDATION}.items()
    assert rows[3].items() >= {"step": 3, "reward/sort": 0.25}.items()
    assert settings["seed"] == 1
    assert set(ids) == {(tmp_path / "wandb-id").read_text().strip()}


@pytest.mark.long
@pytest.mark.usefixtures("offline")
def test_wandb_hears_of_the_end_of_a_run_that_was_killed_before_it(tmp_path):
    ended = grpo.events.RunEnded(step=1, reason="finished")
    for directory, known in (("killed", True), ("never seen", False)):
        (tmp_path / directory).mkdir()
        if known:
            made("wandb", tmp_path / directory, mode="offline").metrics(1, STEP)
        again = made("wandb", tmp_path / directory, resumed_from=1, mode="offline")
        again.event(ended)
        again.close()
        assert len(list((tmp_path / directory).glob("wandb/offline-run-*"))) == 2 * known


@pytest.mark.long
def test_wandb_without_a_key_is_refused_before_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "netrc").touch(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(grpo.GrpoError, match="there is no key; set WANDB_API_KEY"):
        made("wandb", tmp_path)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password hidden\n")
    assert made("wandb", tmp_path) is not None


@pytest.mark.long
@pytest.mark.usefixtures("offline")
def test_wandb_keeps_the_contract():
    check_tracker(PluginHost.discover().factory("tracker", "wandb"), mode="offline")


def checkpoint(path, step):
    """A complete checkpoint's directory, and its event."""
    directory = path / f"step-{step:06d}"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({"step": step}))
    return grpo.events.Saved(step=step, directory=str(directory))


@pytest.mark.long
@pytest.mark.usefixtures("offline")
def test_wandb_keeps_checkpoints_as_versions_of_an_artifact(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    saved = [checkpoint(tmp_path, step) for step in (1, 2, 3)]
    (tmp_path / "step-000002" / "manifest.json").unlink()
    (tmp_path / "step-000002").rmdir()  # newer ones replaced it
    tracker = made("wandb", tmp_path, mode="offline", artifacts=True)
    with Logged() as log:
        for event in saved:
            tracker.event(event)
        tracker.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    requests = [record.request.log_artifact.artifact for record in closed(file, Record)]
    artifacts = [record.artifact for record in closed(file, Record) if record.HasField("artifact")]
    logged = [one for one in (*requests, *artifacts) if one.name]
    assert [set(one.aliases) - {"latest"} for one in logged] == [{"step-1"}, {"step-3"}]
    assert {one.type for one in logged} == {"model"}
    assert "the checkpoint of step 2 was deleted before" in log.text


# ---------------------------------------------------------------------------------- Trackio


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """Trackio with a separate database; it reads the variable when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return pytest.importorskip("trackio", reason="Trackio is not installed")


@pytest.mark.long
def test_trackio_has_the_metrics_and_a_resumed_run_is_the_same_one(tmp_path, trackio):
    tracker = made("trackio", tmp_path, every=2, completions=3)
    tracker.metrics(1, STEP)
    tracker.rollouts(2, groups())
    tracker.metrics(0, VALIDATION)  # of an earlier version
    tracker.close()
    again = made("trackio", tmp_path, resumed_from=2)
    again.metrics(3, {**STEP, "loss": math.inf})
    again.close()
    another = made("trackio", tmp_path)  # it has the same name, and is not a continuation
    another.metrics(1, {"loss": 9.0})
    another.close()
    runs = {run.id: run for run in trackio.Api().runs("grpo-core")}
    from trackio.sqlite_storage import SQLiteStorage

    logs = sorted(
        (SQLiteStorage.get_logs("grpo-core", run.name, run_id=run.id) for run in runs.values()), key=len
    )
    assert [len(rows) for rows in logs] == [1, 4]
    rows = logs[1]
    assert rows[0].items() >= {"step": 1, **STEP}.items()
    assert len(rows[1]["rollouts"]["_value"]) == 3
    assert rows[2].items() >= {"step": 0, **VALIDATION}.items()
    assert rows[3].items() >= {"step": 3, "loss": math.inf, "reward/sort": 0.25}.items()
    assert all(run.config["seed"] == 1 for run in runs.values())


@pytest.mark.long
def test_trackio_keeps_checkpoints_as_versions_of_an_artifact(tmp_path, trackio):
    tracker = made("trackio", tmp_path, artifacts=True)
    for step in (1, 2):
        tracker.event(checkpoint(tmp_path, step))
    tracker.close()
    kept = trackio.init("grpo-core", name="reader", embed=False).use_artifact("a-run:step-2")
    assert kept.metadata == {"step": 2}
    assert json.loads(Path(kept.download(tmp_path / "read"), "manifest.json").read_text()) == {"step": 2}


@pytest.mark.long
def test_trackio_keeps_the_contract(trackio):
    check_tracker(PluginHost.discover().factory("tracker", "trackio"))


# ---------------------------------------------------------------------------------- OpenMetrics


def served(tracker):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(tracker.address, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, s.labels["of"]): s.value for family in families for s in family.samples}


@pytest.mark.long
def test_the_newest_numbers_are_served_on_loopback(tmp_path):
    pytest.importorskip("prometheus_client")
    tracker = made("openmetrics", tmp_path, port=0)
    tracker.metrics(1, STEP)
    tracker.metrics(2, {**STEP, "loss": 0.25})
    tracker.metrics(2, VALIDATION)
    assert tracker.address.startswith("http://127.0.0.1:")
    assert served(tracker) == {
        ("grpo_core_loss", ""): 0.25,
        ("grpo_core_reward", "sort"): 0.25,
        ("grpo_core_time", "step"): 1.5,
        ("grpo_core_step", ""): 2.0,
        ("grpo_core_validation_accuracy", "sort"): 0.75,
        ("grpo_core_validation_step", ""): 2.0,
    }
    address = tracker.address
    tracker.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=10)


@pytest.mark.long
def test_what_a_later_step_does_not_have_is_served_no_longer(tmp_path):
    """An alarm about errors ends when there are none; a validation stays until the next of its set."""
    pytest.importorskip("prometheus_client")
    tracker = made("openmetrics", tmp_path, port=0)
    tracker.metrics(1, {**STEP, "errors/sort": 3.0, "errors/sum": 1.0})
    tracker.metrics(1, {"validation/sort/accuracy": 0.5, "validation/sort/reward": 0.25})
    tracker.metrics(1, {"validation/sum/accuracy": 0.5})
    tracker.metrics(2, {**STEP, "errors/sum": 2.0})
    tracker.metrics(2, VALIDATION)
    told = served(tracker)
    tracker.close()
    assert {key: told[key] for key in told if "errors" in key[0]} == {("grpo_core_errors", "sum"): 2.0}
    assert {key: told[key] for key in told if "validation" in key[0]} == {
        ("grpo_core_validation_accuracy", "sort"): 0.75,
        ("grpo_core_validation_accuracy", "sum"): 0.5,
        ("grpo_core_validation_step", ""): 2.0,
    }


@pytest.mark.long
def test_metrics_with_names_that_are_rewritten_to_the_same_one_are_all_served(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    names = ["a-b/sort", "a_b/sort", "a.b/sort", "a/sort/b", "a_b/sort/", "a/b/c_d", "a/b/c/d", "a_c/b/d"]
    tracker = made("openmetrics", tmp_path, port=0)
    tracker.metrics(1, {name: float(place) for place, name in enumerate(names)})
    with urllib.request.urlopen(tracker.address, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    tracker.metrics(2, {"a_b/sort": 9.0})
    left = served(tracker)
    tracker.close()
    read = {s.labels["metric"]: s.value for family in families for s in family.samples}
    assert {name: read.get(name) for name in names} == {name: float(i) for i, name in enumerate(names)}
    assert left == {("grpo_core_a_b", "sort"): 9.0, ("grpo_core_step", ""): 2.0}


@pytest.mark.long
def test_a_free_port_is_reported(tmp_path):
    pytest.importorskip("prometheus_client")
    tracker = made("openmetrics", tmp_path, port=0)
    with Logged() as log:
        tracker.metrics(1, STEP)
        tracker.metrics(2, STEP)
    address = tracker.address
    tracker.close()
    assert log.text == f"tracker openmetrics serves {address}"


@pytest.mark.parametrize(
    ("metric", "gauge"),
    [
        ("feedback_a-b/sort", ("grpo_core_feedback_a_b", "sort")),
        ("feedback_größe/größen", ("grpo_core_feedback_gr_f6__df_e", "größen")),
        ("feedback_对/sort", ("grpo_core_feedback__5bf9_", "sort")),
        ("feedback_错/sort", ("grpo_core_feedback__9519_", "sort")),
    ],
)
def test_a_gauge_has_a_name_that_every_reader_of_the_format_takes(metric, gauge):
    assert named(metric) == gauge
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", gauge[0])


@pytest.mark.long
def test_openmetrics_keeps_the_contract():
    pytest.importorskip("prometheus_client")
    check_tracker(PluginHost.discover().factory("tracker", "openmetrics"), port=0)


# ---------------------------------------------------------------------------------- together


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_all_of_them_have_what_metrics_jsonl_has(tmp_path):
    """One run with all trackers: the same names and values everywhere."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    run = grpo.train(
        env="math:sort",
        trainer={"steps": 2, "prompts_per_step": 4},
        rollout={"group_size": 4},
        model={"path": "tiny", "options": {"warm_start_steps": 2}},
        validation={"prompts": 4},
        tracking={
            "trackers": ["files", "tensorboard", "wandb", "openmetrics"],
            "wandb": {"mode": "offline"},
            "openmetrics": {"port": 0},
        },
        output=tmp_path / "run",
    )
    written = [
        ({name: value for name, value in row.items() if name not in ("step", "time")}, row["step"])
        for row in run.metrics()
    ]
    assert len(written) >= 4
    found, _ = scalars(run.path / "tensorboard")
    rows, _, _ = logged(run.path)
    for values, step in written:
        for name, value in values.items():
            near = [seen for at, seen in found[name] if at == step]
            assert pytest.approx(value, rel=1e-6) in near, name
        assert any(row["step"] == step and row.items() >= values.items() for row in rows), step
