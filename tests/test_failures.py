"""Known failure classes of asynchronous trainers that no other test covers.

The numbers are those of docs/reliability.md, which says for every class what is promised and which test shows
it.  Stories without a process run on virtual time.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import gc
import json
import os
import re
import signal
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killing import alive
from recording import record
from test_pipeline import Run, cut, resumed

from grpo_core.app import making
from grpo_core.app.launch import FIXED
from grpo_core.config import Config, ModelConfig, PipelineConfig, RolloutConfig, build
from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.events import Dispatched, PromptSkipped, StepEnded, Synced
from grpo_core.contracts.records import EngineSetup, Feedback, GenerationRequest, Weights
from grpo_core.data.loaders import IndexedLoader
from grpo_core.demo import tiny
from grpo_core.engines.child import ChildEngine
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.processes.child import Child
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeTrainer, prompts
from grpo_core.training import model as models
from grpo_core.weights.reading import read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_scale.engines.pool import EnginePool

ROOT = Path(__file__).parent.parent
LEFT = ("agents", "algorithms", "audit", "curriculum", "devkit", "doctor", "replay", "report", "scale")
"""Distributions of parts that have left the core."""
MODULES = sorted(
    path
    for package in (ROOT / "grpo_core", *(ROOT / f"plugins/grpo-plugin-{n}/grpo_plugin_{n}" for n in LEFT))
    for path in package.rglob("*.py")
)


def names_used(path):
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }


# ---------------------------------------------------------------------------------- on virtual time


def test_01_a_prompt_that_is_never_answered_is_skipped_after_its_retries_and_no_step_waits_longer():
    class Silent(FakeEngine):
        async def _one(self, request):
            if request.prompt_ids.tolist() == list(map(ord, "prompt 5")):
                await asyncio.sleep(1e9)
            return await super()._one(request)

    done = Run(engine=Silent(), max_retries=2)()
    (skip,) = done.of(PromptSkipped)
    assert skip.prompt == "5"
    assert "not finished within its deadline of 60 s" in skip.error
    assert sorted(map(int, done.trained)) == [i for i in range(49) if i != 5]
    assert max(event.metrics["time/step"] for event in done.of(StepEnded)) < 3 * 60 + 10


@pytest.mark.long
def test_16_from_whatever_was_saved_the_next_step_follows_at_once():
    for max_staleness in range(4):
        for policy_ in ("deadline", "in_order"):
            saved = []
            changes = {"max_staleness": max_staleness, "policy": policy_}
            first = Run(schedule={"save_every": 1}, steps=6, **changes)
            first.pipeline.save = cut(first, saved)
            first()
            for at in saved[:-1]:
                again = resumed(at, engine=FakeEngine(latency=lambda rng: 2.0), steps=6, **changes)()
                assert again.of(StepEnded)[0].metrics["time/step"] <= 2.0 + 0.1 + 1.0 + 0.2


def test_22_slow_prompts_are_trained_like_all_others_and_nothing_finished_is_thrown_away():
    """Every 20th prompt takes longer than max_staleness steps."""

    class Slow(FakeEngine):
        generated = 0

        async def _one(self, request):
            number = int("".join(map(chr, request.prompt_ids)).removeprefix("prompt "))
            await asyncio.sleep(9.0 if number % 20 == 3 else 0.5)
            self.generated += 1
            return await super()._one(request)

    done = Run(engine=Slow(latency=lambda rng: 0.0), steps=25)()
    assert sorted(map(int, done.trained)) == list(range(100))
    assert done.engine.generated == 100 * 4
    assert not done.of(PromptSkipped)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3, 4, 5, 9])
def test_24_a_small_dataset_begins_again_and_never_ends_a_run(size):
    loader = IndexedLoader("task", prompts(size), seed=0)
    small = Run(steps=6)
    small.pipeline.prompts.draw = lambda request: loader.take(request.expected_prompts)
    small()
    counts = Counter(small.trained)
    assert counts.total() == 24
    assert max(counts.values()) - min(counts.get(str(i), 0) for i in range(size)) <= 1


@pytest.mark.long
def test_29_a_generator_that_is_ten_times_faster_waits_and_loses_nothing():
    fast = Run(engine=FakeEngine(latency=lambda rng: 0.1), max_staleness=2, steps=20)
    outstanding = []
    emit = fast.pipeline.emit

    def watch(event):
        statistics = fast.buffer.statistics()
        outstanding.append(statistics.dispatched - statistics.skipped - 4 * fast.buffer.step)
        emit(event)

    fast.pipeline.emit = watch
    fast()
    assert max(outstanding) == 3 * 4
    assert fast.trained == [str(i) for i in range(80)]


def test_37_rewards_that_are_all_equal_teach_nothing_and_end_nothing():
    equal = Run(environment=FakeEnvironment(lambda episode: Feedback(reward=0.25)), steps=20)()
    assert equal.result == "finished"
    assert all(batch.rows == () for batch in equal.trainer.batches)
    assert all(event.metrics["frac_reward_zero_std/task"] == 1.0 for event in equal.of(StepEnded))


@pytest.mark.long
def test_50_after_a_weight_sync_generation_is_at_its_cap_within_no_time():
    """With updates that wait until nothing runs, the hardest barrier there is."""
    times = []
    stopped = Run(max_staleness=2, schedule={"in_flight_updates": False}, engine=FakeEngine())
    stopped.pipeline.emit = lambda event: times.append((asyncio.get_running_loop().time(), event))
    stopped()
    synced = [at for at, event in times if isinstance(event, Synced) and event.step <= 9]
    dispatched = Counter()
    for at, event in times:
        if isinstance(event, Dispatched):
            dispatched[at] += len(event.slots)
    assert synced
    assert all(dispatched[at] == 4 for at in synced), "a step was trained: as many permits are free"


@pytest.mark.nightly
def test_28_a_long_run_needs_no_more_memory_than_a_short_one():
    class Forgetful(FakeTrainer):
        async def step(self, batch):
            self.batches.clear()
            return await super().step(batch)

    class ForgetfulEnvironment(FakeEnvironment):
        async def close(self, sessions):
            self.opened.clear()
            self.calls.clear()

    used = []

    def measure(event):
        if isinstance(event, StepEnded) and event.step in (100, 500):
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])

    long = Run(steps=510, trainer=Forgetful(), environment=ForgetfulEnvironment())
    long.pipeline.emit = measure
    long.pipeline.prompts.draw = lambda request: long.stream.take(
        request.expected_prompts
    )  # keeps no request
    tracemalloc.start()
    try:
        long()
    finally:
        tracemalloc.stop()
    before, after = used
    assert (after - before) / 400 < 1024, "bytes a step"


# ---------------------------------------------------------------------------------- weights and engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    return directory


@functools.cache
def tensors(directory, factor=1.0):
    module = models.load(directory, device=torch.device("cpu"))
    return [(name, parameter.detach() * factor) for name, parameter in module.named_parameters()]


def test_03_a_single_wrong_byte_names_its_tensor(model):
    named = tensors(model)
    weights = SharedMemoryWriter().write(7, named)
    wrong = weights.tensors[len(named) // 2]
    with open(weights.location, "r+b") as memory:
        memory.seek(wrong.offset)
        byte = memory.read(1)[0]
        memory.seek(wrong.offset)
        memory.write(bytes([byte ^ 1]))
    with pytest.raises(WeightSyncError, match=rf"version 7: tensor '{re.escape(wrong.name)}' .* is not what"):
        read_weights(weights)


@pytest.mark.parametrize("size", [5, 8, 21])
def test_03_the_checksum_counts_every_byte_also_those_beyond_the_last_whole_word(size):
    weights = SharedMemoryWriter().write(7, [("a", torch.arange(size, dtype=torch.uint8))])
    (info,) = weights.tensors
    with open(weights.location, "r+b") as memory:
        for place in range(size):
            memory.seek(info.offset + place)
            memory.write(bytes([place ^ 1]))
            memory.flush()
            with pytest.raises(WeightSyncError, match=r"tensor 'a' .* is not what"):
                read_weights(weights)
            memory.seek(info.offset + place)
            memory.write(bytes([place]))
            memory.flush()
    assert read_weights(weights)["a"].tolist() == list(range(size))


REQUEST = GenerationRequest(prompt_ids=tuple(range(5, 45)), max_tokens=4, temperature=0.0)


def with_engine(model, story, deadline=60.0):
    async def main():
        engine = LocalEngine(EngineSetup(model=str(model), deadline=deadline))
        try:
            return await story(engine)
        finally:
            await engine.aclose()

    return asyncio.run(main())


@pytest.mark.slow
def test_09_the_same_prompt_after_an_update_is_answered_by_the_new_weights_alone(model):
    """Three requests in a row would find keys and values of older weights, if anything kept them."""
    old, new = SharedMemoryWriter(), SharedMemoryWriter()

    async def logprobs(engine, weights):
        await engine.update_weights(weights)
        return [(await engine.generate([REQUEST]))[0].logprobs.tolist() for _ in range(2)]

    async def updated(engine):
        await logprobs(engine, old.write(1, tensors(model)))
        return await logprobs(engine, new.write(2, tensors(model, 1.5)))

    async def fresh(engine):
        return await logprobs(engine, new.write(2, tensors(model, 1.5)))

    assert with_engine(model, updated) == with_engine(model, fresh)


@pytest.mark.slow
def test_06_an_engine_that_stops_answering_is_replaced_and_an_update_never_hangs(model):
    writer = SharedMemoryWriter()

    async def story(engine):
        loop = asyncio.get_running_loop()
        await engine.update_weights(writer.write(1, tensors(model)))
        frozen = engine.pid
        os.kill(frozen, signal.SIGSTOP)
        began = loop.time()
        await engine.update_weights(writer.write(2, tensors(model)))
        assert loop.time() - began <= 2 * 10 + 1
        assert engine.pid != frozen
        assert not alive(frozen)
        (completion,) = await engine.generate([REQUEST])
        return set(completion.versions.tolist())

    assert with_engine(model, story, deadline=10.0) == {2}


class Stuck:
    """A server that never takes weights."""

    def __init__(self, setup):
        return None

    def update_weights(self, weights):
        signal.pause()


@pytest.mark.slow
def test_06_an_engine_whose_processes_all_hang_ends_the_update_after_two_of_them():
    async def main():
        engine = ChildEngine(
            EngineSetup(model="m", deadline=3.0), name="stuck", server=f"{__file__}:Stuck", options={}
        )
        await engine.started()
        first = engine.pid
        with pytest.raises(
            WeightSyncError, match=r"version 2, and neither does the process that replaced it .* within 3 s"
        ):
            await engine.update_weights(Weights(version=2, location="", nbytes=0, tensors=()))
        assert engine._deaths == 2
        assert engine.pid is None, "no process is left"
        assert not alive(first)
        await engine.aclose()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_06_engines_of_a_pool_that_stop_answering_are_replaced(model, stopped):
    writer = SharedMemoryWriter()

    async def main():
        engines = []

        def make(number):
            engines.append(LocalEngine(EngineSetup(model=str(model), deadline=10.0)))
            return engines[-1]

        pool = EnginePool(make, 2, deadline=10.0, lag=1000.0 if stopped == 2 else 1.0)
        try:
            await pool.update_weights(writer.write(1, tensors(model)))
            for engine in engines[:stopped]:
                os.kill(engine.pid, signal.SIGSTOP)
            await pool.update_weights(writer.write(2, tensors(model)))
            completions = await pool.generate([REQUEST] * 4)
            return {version for completion in completions for version in completion.versions.tolist()}
        finally:
            await pool.aclose()

    assert asyncio.run(main()) == {2}


def test_47_code_that_comes_with_a_model_is_not_run(model, tmp_path):
    trap = tmp_path / "model"
    trap.mkdir()
    for path in model.iterdir():
        (trap / path.name).write_bytes(path.read_bytes())
    described = json.loads((trap / "config.json").read_text())
    described["auto_map"] = {"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.M"}
    (trap / "config.json").write_text(json.dumps(described))
    (trap / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    assert ModelConfig().trust_remote_code is False
    models.load(trap, device=torch.device("cpu"))
    assert not (tmp_path / "sprung").exists()


# ---------------------------------------------------------------------------------- processes


def with_child(module, story):
    async def main():
        child = Child("importlib:import_module", {"name": module}, name=module)
        try:
            return await story(child)
        finally:
            await child.aclose()

    return asyncio.run(main())


@pytest.mark.slow
def test_41_a_call_that_blocks_its_process_blocks_no_other(tmp_path):
    async def story(child):
        await child.started(seconds=30)
        blocked = asyncio.create_task(child.call("sleep", 0.5, seconds=30))
        ticks = 0
        while not blocked.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert with_child("time", story) > 100


@pytest.mark.slow
def test_58_a_thousand_calls_at_once_are_all_answered_and_none_by_anothers_answer():
    async def story(child):
        return await asyncio.gather(*(child.call("mul", [i], i % 50, seconds=30) for i in range(1000)))

    assert with_child("operator", story) == [[i] * (i % 50) for i in range(1000)]


@pytest.mark.slow
def test_40_no_port_is_opened_but_free_ones_by_collective_transport():
    """Parent and child speak over a socket pair, which has neither a name nor a port."""
    by_libraries = {
        "TCPSite": ["server.py", "watch.py"],
        "init_process_group": ["group.py"],
    }  # free ports, on loopback
    for name, files in by_libraries.items():
        assert sorted(path.name for path in MODULES if name in names_used(path)) == files
    for path in MODULES:
        names = names_used(path)
        assert not names & {"start_http_server", "make_server", "HTTPServer", "run_app"}, path
        if path.name in ("collective.py", "group.py"):  # by which ranks of several machines find each other
            assert path.read_text().count("create_server") == 1
            continue
        assert not names & {"listen", "start_server", "create_server"}, path
        assert not {"socket", "bind"} <= names, path


@pytest.mark.long
def test_53_no_process_is_ever_forked():
    """A fork copies locks that threads hold; children are spawned, or started by a server without threads."""
    for path in MODULES:
        named = {"fork"} if path.name in ("fork.py", "cli.py") else set()  # the command of that name
        assert not (names_used(path) - named) & {"fork", "forkpty", "ProcessPoolExecutor"}, path
        if "multiprocessing" in names_used(path):
            assert re.search(r'multiprocessing\.get_context\("(forkserver|spawn)"\)', path.read_text()), path


# ---------------------------------------------------------------------------------- configuration, files


@pytest.mark.long
@given(
    rollout=st.builds(RolloutConfig, deadline=st.floats(0.1, 1e5), max_retries=st.integers(0, 9)),
    max_staleness=st.integers(0, 9),
)
def test_44_the_outer_deadline_is_longer_than_all_that_may_happen_within(rollout, max_staleness):
    config = Config(rollout=rollout, pipeline=PipelineConfig(max_staleness=max_staleness))
    schedule = making.schedule(config)
    attempts = rollout.deadline * (rollout.max_retries + 1)
    assert schedule.rollout_deadline == rollout.deadline
    assert schedule.stall > attempts + config.engine.deadline
    assert schedule.stall > attempts + config.trainer.deadline


@pytest.mark.slow
@given(separator=st.sampled_from(["\u2028", "\u2029", "\x85", "\r", "\x0b", "\x1c"]), text=st.text())
def test_60_a_line_separator_in_a_text_breaks_no_line(separator, text):
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        config = build([{"tasks": {"a": {"env": "x"}}, "tracking": {"trackers": ["files"]}}])
        said = text + separator + text
        directory = record(
            Path(scratch) / "run", [PromptSkipped(step=1, task="a", prompt="p", error=said)], config
        )
        _, line = (directory.path / "events.jsonl").read_text().splitlines()
        assert json.loads(line)["error"] == said


# ---------------------------------------------------------------------------------- the table


def rows_of_the_table():
    """Number of the class, and its line, of docs/reliability.md."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    return [(int(n), line) for line in text.splitlines() for n in re.findall(r"^\| (\d+) \|", line)]


def test_the_table_has_every_class_once():
    numbers = sorted(n for n, _ in rows_of_the_table())
    assert numbers == list(range(1, len(numbers) + 1))
    text = " ".join((ROOT / "docs/reliability.md").read_text().split())
    assert f" {len(numbers)} ways in which" in text


def test_the_page_names_every_key_that_a_resumed_run_keeps():
    text = " ".join((ROOT / "docs/reliability.md").read_text().split())
    _, said = text.split("These keys keep their values as long as there is a checkpoint: ")
    assert re.findall(r"`([\w.]+)`", said.split(". ")[0]) == list(FIXED)


@pytest.mark.long
@pytest.mark.parametrize(("number", "line"), rows_of_the_table(), ids=lambda value: str(value)[:2])
def test_every_promise_names_a_test_that_exists_or_says_not_yet(number, line):
    tests = re.findall(r"`((?:tests|plugins)/[\w/-]+\.py)::(\w+)`", line)
    assert tests or "not yet:" in line
    for path, name in tests:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


# ---------------------------------------------------------------------------------- memory in libraries


def _fails(*chain):
    """Raise errors, each while the one before it is handled."""
    first, *others = chain
    try:
        raise first
    except Exception:
        if not others:
            raise
        _fails(*others)


LIBRARIES = [
    [MemoryError()],
    [MemoryError("Unable to allocate 3.00 GiB for an array with shape (402653184,)")],
    [RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried "
                  "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)")],
    [RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")],
    [MemoryError(), ValueError("a file of the model is unreadable")],
    [ExceptionGroup("two parts failed", [ValueError("no"), RuntimeError("std::bad_alloc")])],
]  # fmt: skip


@pytest.mark.parametrize("chain", LIBRARIES, ids=lambda chain: type(chain[-1]).__name__)
def test_a_library_without_memory_ends_the_command_with_one_line(chain, monkeypatch, capsys):
    from grpo_core import cli

    monkeypatch.setattr(cli, "make_app", lambda chosen: lambda *given, **options: _fails(*chain))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert told.startswith("grpo-core: out of memory")
    assert len(told.splitlines()) == 1


def test_any_other_error_of_a_library_keeps_its_traceback(monkeypatch, capsys):
    from grpo_core import cli

    monkeypatch.setattr(
        cli, "make_app", lambda chosen: lambda *given, **options: _fails(ValueError("no idea"))
    )
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.strip().endswith("ValueError: no idea")
