"""Real vLLM on this machine's CPU: the contract of engines, and features of vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from adapted import AdaptedEngine
from attrs import evolve
from killing import Run, left_after
from scaled import scaled
from test_agreement import Served, made, not_loaded, planted, stale, swapped
from test_trainer import setup as trainer_setup

from grpo_core import EngineError, EngineSetup, GenerationRequest, ModelError, TrainerSetup
from grpo_core.kit import PluginHost
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model, start_engine
from grpo_plugin_devkit.engines import check_engine
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_vllm.engine import VllmEngine
from grpo_plugin_vllm.transfer import LAYERWISE

GRPO = Path(sys.executable).with_name("grpo-core")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
    ),
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="in place"),
        # tests/test_vllm_moe.py updates weights like this in CI
        pytest.param("1", id="layer by layer, as on a GPU", marks=pytest.mark.nightly),
    ],
)
def tried(tmp_path_factory, request):
    model = make_test_model(tmp_path_factory.mktemp("model"))
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAYERWISE, request.param)
        engine = runner.run(start_engine(VllmEngine, model, max_rows=64, cache_mib=64))
        tried = EngineUnderTest(engine=engine, model=model, recomputes=True)
        runner.run(engine.update_weights(tried.publish(0)))
        yield runner, tried
        runner.run(engine.aclose())


@pytest.mark.parametrize("law", ENGINE_LAWS)
def test_vllm_keeps_the_laws_of_decoding(tried, law):
    runner, engine = tried
    runner.run(ENGINE_LAWS[law](engine))


@pytest.mark.parametrize(
    "native", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["added", "computed by vLLM"]
)
def test_vllm_keeps_the_laws_of_decoding_with_adapters(native, tmp_path):
    """Adapters are replaced while requests run, and the rank is none that vLLM has room for."""

    async def story():
        model = make_test_model(tmp_path)
        engine = await start_engine(VllmEngine, model, max_rows=64, cache_mib=64, native_lora=native)
        tried = AdaptedEngine(engine=engine, model=model, recomputes=True)
        await tried.engine.update_weights(tried.publish(0))
        for law in ENGINE_LAWS.values():
            await law(tried)
        await engine.aclose()
        assert ("load_format=auto" in (tmp_path / "engine-vllm.log").read_text()) == native

    asyncio.run(story())


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_vllm_generates_with_the_parts_of_a_trainers_ranks(transport, tmp_path):
    async def story():
        path = make_test_model(tmp_path)
        engine = await start_engine(VllmEngine, path, max_rows=8, cache_mib=64)
        given = TrainerSetup(transport=transport)
        given = evolve(
            given,
            model=evolve(given.model, path=str(path)),
            trainer=evolve(given.trainer, threads=1, device="cpu"),
            sections=scaled(ranks=3),
        )
        trainer = PluginHost.discover().find("trainer", "torch").load()(given)
        await trainer.started()
        weights = await trainer.publish([(5, 8, 2)])
        assert {part.rank for info in weights.tensors for part in info.parts} == {0, 1, 2}
        await engine.update_weights(weights)
        greedy = GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=1, temperature=0.0)
        (completion,) = await engine.generate([greedy])
        (expected,) = weights.canary
        assert completion.token_ids.tolist() == [expected.token_ids[0]]
        assert completion.logprobs[0] == pytest.approx(expected.logprobs[0], abs=1e-4)
        await trainer.aclose()
        await engine.aclose()

    asyncio.run(story())


def test_vllm_computes_no_adapters_where_there_are_none(tmp_path):
    """A model that is measured before its training has no adapters."""

    async def story():
        model = make_test_model(tmp_path)
        engine = await start_engine(VllmEngine, model, cache_mib=64, native_lora=True)
        tried = EngineUnderTest(engine=engine, model=model, recomputes=True)
        await engine.update_weights(tried.publish(0))
        await ENGINE_LAWS["logprobs are those of the model"](tried)
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.nightly
def test_vllm_in_its_own_process_keeps_the_contract_of_engines(tmp_path, monkeypatch):
    """As on GPUs, with weights that are sent; and when its parent is killed, it does not stay behind."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def story():
        engine = await start_engine(VllmEngine, make_test_model(tmp_path), max_rows=64, cache_mib=64)
        writer = CollectiveWriter(torch.device("cpu"), "127.0.0.1")
        tried = EngineUnderTest(engine=engine, model=tmp_path / "m", recomputes=True, writer=writer)
        await tried.engine.update_weights(tried.publish(0))
        await ENGINE_LAWS["each token is of the version that it names"](tried)
        await ENGINE_LAWS["weights of another model are refused and change nothing"](tried)
        pid = engine.pid
        decoding = children(pid)
        assert decoding
        request = GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=250)
        generating = asyncio.create_task(tried.engine.generate([request] * 64))
        await tried.engine.generate([GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=1)])
        began = time.perf_counter()
        os.kill(decoding[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="died while it generated"):
            await asyncio.wait_for(generating, 30)
        assert time.perf_counter() - began < 2, "its end is an event, and not a time-out"
        assert len(await tried.engine.generate([request])) == 1, "another has been started"
        assert not left_after([pid, *decoding])
        pid = engine.pid
        decoding = children(pid)
        os.kill(pid, signal.SIGKILL)
        assert not left_after([pid, *decoding])
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_turn", [False, True], ids=["beside the trainer", "in turn with it"])
def test_vllm_shares_a_gpu_with_the_trainer(in_turn, tmp_path):
    """In turn it leaves nearly all of the memory, and then decodes as before."""
    options = {"memory_fraction": 0.3, "in_turn": in_turn, "dtype": "float32", "max_rows": 64}

    async def story():
        model = make_test_model(tmp_path)
        setup = EngineSetup(
            model=str(model), log_directory=str(tmp_path), deadline=600.0
        )  # it compiles first
        engine = VllmEngine(setup, device="cuda", **options)
        tried = EngineUnderTest(engine=engine, model=model, recomputes=True, tolerance=1e-3)
        beside = torch.empty(torch.cuda.mem_get_info()[1] // 2, dtype=torch.uint8, device="cuda")
        for law in ENGINE_LAWS:
            await ENGINE_LAWS[law](tried)
            free = torch.cuda.mem_get_info()[0]
            await engine.rest()
            if in_turn:
                assert torch.cuda.mem_get_info()[0] > free + 0.25 * torch.cuda.mem_get_info()[1]
            await engine.wake()
        del beside
        await engine.aclose()

    asyncio.run(story())


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAULTS = stale, swapped, not_loaded


@pytest.mark.gpu
@pytest.mark.nightly
def test_no_fault_of_a_sync_with_vllm_counts_as_right_and_no_other_sync_is_doubted(tmp_path):
    """A hundred syncs in bfloat16 on a GPU, four in float32 on a CPU; rounding leaves some unproved."""
    model = made(tmp_path / "m", width=128, warm_start_steps=30)
    syncs, dtype = (100, torch.bfloat16) if DEVICE == "cuda" else (4, torch.float32)
    given = trainer_setup(model, lr=2e-4 if DEVICE == "cuda" else 1e-3)
    given = evolve(given, model=evolve(given.model, dtype=str(dtype).removeprefix("torch.")))
    found = planted(
        given,
        FAULTS,
        dtype,
        syncs=syncs,
        make=partial(Served, make=VllmEngine, max_rows=64, cache_mib=64 if DEVICE == "cpu" else 1024),
    )
    assert found["swapped", "found"] == syncs
    assert not any(found[fault.__name__, "right"] for fault in FAULTS)
    assert min(found["stale", "found"], found["not_loaded", "found"], found["none", "right"]) >= syncs / 2


def children(pid):
    """The processes in which vLLM decodes."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [
        child for child in found if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_vllm_keeps_the_contract_of_engines(tmp_path):
    async def story():
        engine = await start_engine(VllmEngine, make_test_model(tmp_path), max_rows=64, cache_mib=64)
        await check_engine(
            engine, EngineUnderTest(engine=engine, model=tmp_path / "m").publish, prompt_ids=(5, 8, 2)
        )

    asyncio.run(story())


def test_reproducible_completions_are_the_same_to_the_last_bit_whatever_else_runs(tmp_path):
    """Calls that overlap, that were cancelled, and that come again, as after a canary."""
    setup = EngineSetup(
        model=str(make_test_model(tmp_path)), log_directory=str(tmp_path), deadline=120.0, reproducible=True
    )
    calls = [
        [
            GenerationRequest(
                prompt_ids=(5, 8, *range(10, 10 + 3 * (i % 4))), max_tokens=12 + 5 * i, seed=i + 10 * n
            )
            for i in range(5)
        ]
        for n in range(3)
    ]
    probe = [GenerationRequest(prompt_ids=(5, 8, 10, 11), max_tokens=1)]

    async def story():
        engine = VllmEngine(setup, device="cpu", max_rows=4, cache_mib=64)
        await engine.update_weights(EngineUnderTest(engine=engine, model=tmp_path / "m").publish(0))
        alone = [await engine.generate(call) for call in calls]
        given_up = asyncio.create_task(engine.generate(calls[1]))
        await engine.generate(probe)
        together = asyncio.gather(*map(engine.generate, reversed(calls)))
        await engine.generate(probe)
        given_up.cancel()
        together = await together
        await engine.aclose()
        return alone, list(reversed(together))

    for here, there in zip(*asyncio.run(story()), strict=True):
        for one, other in zip(here, there, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert "each call alone" in (tmp_path / "engine-vllm.log").read_text()


class Learning(Run):
    """Some steps of the demo, with a model whose heads are as wide as vLLM's kernels want them."""

    def __init__(self, cwd):
        self.cwd, self.directory, self.kills, self.memory = cwd, cwd / "run", 0, set()
        settings = {
            "model.options.width": 128,
            "trainer.steps": 24,
            "validation.every": 24,
            "checkpoint.every": 24,
            "engine.options.cache_mib": 64,
        }
        chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._start("--env", "math:sort", "--engine", "vllm", *chosen, "--output", "run")


@pytest.mark.nightly
def test_a_run_learns_and_loses_nothing_when_its_engine_is_killed_in_the_middle_of_a_step(tmp_path):
    run = Learning(tmp_path)
    run.wait(lambda: run.steps >= 5, seconds=120)
    run.kill("engine")
    said = run.end(seconds=200)
    assert run.process.returncode == 0, said
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    subprocess.run([GRPO, "verify", run.directory], check=True, capture_output=True, timeout=60)
    assert sum(event["event"] == "StepEnded" for event in events) == 24
    first, last = (event["results"]["sort"]["accuracy"] for event in events if event["event"] == "Validated")
    assert last >= first + 0.15, "it learns"


def test_a_model_that_vllms_kernels_for_cpus_cannot_compute_is_refused_before_the_first_token(tmp_path):
    model = make_test_model(tmp_path, width=64)

    async def story():
        engine = await start_engine(VllmEngine, model, device="cpu", cache_mib=64)
        with pytest.raises(ModelError, match=r"heads are 16 wide.*--set model\.options\.width=128"):
            await engine.update_weights(EngineUnderTest(engine=engine, model=model).publish(0))
        await engine.aclose()

    asyncio.run(story())
