"""The engine `vllm` on a GPU, with a stand-in for vLLM: its calls and their failures.

The child process, its server and its options are the real ones; only the package ``vllm`` is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core import (
    ConfigError,
    EngineError,
    EngineSetup,
    GenerationRequest,
    TensorInfo,
    Weights,
    WeightSyncError,
)
from grpo_core.kit import reported_to
from grpo_plugin_vllm.engine import VllmEngine

STAND_IN = Path(__file__).parent / "stand_in"
REQUEST = GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=3)

pytestmark = pytest.mark.long


def weights(version, dtype="float32"):
    one = TensorInfo(name="w", dtype=dtype, shape=(1,), offset=0, checksum=0)
    return Weights(version=version, location="nowhere", nbytes=4, tensors=(one,))


class Tried:
    """An engine on the stand-in, and what its calls were."""

    def __init__(self, directory, *, reproducible=False, **options):
        self.directory = directory
        setup = EngineSetup(
            model=str(directory), log_directory=str(directory), deadline=60.0, reproducible=reproducible
        )
        self.engine = VllmEngine(setup, **{"device": "cuda", **options})

    def fails(self, call):
        (self.directory / "fault").write_text(call)

    def calls(self):
        return [json.loads(line) for line in (self.directory / "calls").read_text().splitlines()]

    def names(self):
        return [call for call, *_ in self.calls()]

    async def generate(self):
        (completion,) = await self.engine.generate([REQUEST])
        assert completion.token_ids.tolist() == [7, 7, 7]
        return completion.versions.tolist()

    async def called(self, name, times=1):
        async with asyncio.timeout(30):
            while self.names().count(name) < times:  # noqa: ASYNC110 - another process calls
                await asyncio.sleep(0.01)


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Run a story with an engine, which is closed after it."""
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))

    def run(story, **options):
        incidents = []

        async def whole():
            tried = Tried(tmp_path, **options)
            tried.incidents = incidents
            try:
                with reported_to(incidents.append):
                    await story(tried)
            finally:
                await tried.engine.aclose()

        asyncio.run(whole())

    return run


# ---------------------------------------------------------------------------------- the calls


@pytest.mark.parametrize(
    ("dtype", "set_by_user", "expected"),
    [("float32", None, "ieee"), ("float32", "tf32", "tf32"), ("bfloat16", None, None)],
)
def test_on_a_gpu_processes_are_spawned_and_float32_is_exact_unless_the_user_says_otherwise(
    tried, monkeypatch, dtype, set_by_user, expected
):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    if set_by_user:
        monkeypatch.setenv("TRITON_F32_DEFAULT", set_by_user)

    async def story(tried):
        await tried.engine.update_weights(weights(0, dtype))
        ((_, given, environ),) = (call for call in tried.calls() if call[0] == "start")
        assert given["dtype"] == dtype
        assert given["gpu_memory_utilization"] == 0.5
        assert given["enable_sleep_mode"] is False
        assert not {"enforce_eager", "block_size", "kv_cache_memory_bytes"} & set(given), "as on a CPU"
        assert environ == {
            "TRITON_F32_DEFAULT": expected,
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False",
            "VLLM_BATCH_INVARIANT": None,
        }

    tried(story, memory_fraction=0.5)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_reproducible_completions_come_from_batch_invariant_kernels_or_are_refused(
    tried, monkeypatch, capability
):
    """Nothing depends on what is found in the prefix cache either."""
    monkeypatch.setenv("STAND_IN_CAPABILITY", capability)

    async def story(tried):
        if capability == "80":
            with pytest.raises(ConfigError, match=r"from compute capability 9\.0 on; set pipeline\.policy"):
                await tried.engine.update_weights(weights(0))
            return
        await tried.engine.update_weights(weights(0))
        ((_, given, environ),) = (call for call in tried.calls() if call[0] == "start")
        assert environ["VLLM_BATCH_INVARIANT"] == "1"
        assert given["enable_prefix_caching"] is False
        assert await tried.generate() == [0, 0, 0]

    tried(story, reproducible=True)


def test_reproducible_completions_need_the_seeds_of_their_requests(tmp_path):
    with pytest.raises(
        ConfigError, match=r"engine\.options\.seeds = false draws tokens that depend on other"
    ):
        VllmEngine(EngineSetup(model=str(tmp_path), reproducible=True), seeds=False)
    with pytest.raises(ConfigError, match=r"enable_prefix_caching = true, and pipeline\.policy"):
        VllmEngine(EngineSetup(model=str(tmp_path), reproducible=True), vllm={"enable_prefix_caching": True})


def test_an_update_follows_vllms_sequence(tried):
    async def story(tried):
        await tried.engine.update_weights(weights(3))
        assert tried.engine.positions == 100, "vLLM's own limit, which rollouts keep to"
        assert await tried.generate() == [3, 3, 3]
        assert tried.names() == [
            "start",
            "init_weight_transfer_engine",
            "fetch_weights",
            "fetched_weights",
            "sleep 0 keep",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "set_weight_version",
            "reset_prefix_cache",
            "wake_up scheduling",
            "add_request",
            "step",
        ]

    tried(story)


@pytest.mark.parametrize(
    ("dtype", "native", "expected"),
    [
        ("bfloat16", None, True),
        ("float32", None, False),
        ("bfloat16", False, False),
        ("float32", True, True),
    ],
)
def test_adapters_stay_apart_from_weights_that_would_swallow_them(tried, dtype, native, expected):
    """In bfloat16 the sum of a weight and of an early adapter is the weight: the engine would not learn."""
    infos = [
        TensorInfo(name=f"a.lora_{each}.weight", dtype=dtype, shape=(2, 2), offset=0, checksum=0)
        for each in "AB"
    ]

    async def story(tried):
        given = Weights(version=0, location="nowhere", nbytes=8, tensors=tuple(infos), base="model")
        await tried.engine.update_weights(given)
        assert ("add_lora" in tried.names()) is expected
        ((_, asked, _),) = (call for call in tried.calls() if call[0] == "start")
        assert asked.get("max_lora_rank", 0) == (8 if expected else 0)

    tried(story, native_lora=native)


def test_an_engine_in_turn_with_the_trainer_keeps_requests_while_it_rests(tried):
    """No step is made in a trainer's turn, and what came meanwhile waits, weights as well."""

    async def story(tried):
        await tried.engine.update_weights(weights(0))
        await tried.engine.rest()
        waiting = [
            asyncio.create_task(each) for each in (tried.generate(), tried.engine.update_weights(weights(1)))
        ]
        await asyncio.sleep(0.1)
        await tried.engine.wake()
        await asyncio.gather(*waiting)
        names = tried.names()
        assert names[names.index("sleep 1 keep") + 1] == "wake_up", "before anything is computed"
        assert await tried.generate() == [1, 1, 1]
        assert tried.incidents == []

    tried(story, in_turn=True)


def test_an_engine_next_to_the_trainer_does_not_rest(tried):
    async def story(tried):
        await tried.engine.update_weights(weights(0))
        await tried.engine.rest()
        assert await tried.generate() == [0, 0, 0]
        await tried.engine.wake()
        assert not {"sleep 1 keep", "wake_up"} & set(tried.names())

    tried(story)


WORKER = """
from types import SimpleNamespace
import torch
from vllm.model_executor.model_loader.reload import calls
torch.cuda.set_device = lambda device: calls.append(f"use-{device}")
torch.accelerator.is_available = lambda: True
torch.accelerator.synchronize = lambda: calls.append("synchronize")
from grpo_plugin_vllm import worker
from grpo_plugin_vllm.transfer import as_table
from grpo_core import TensorInfo, Weights

class Model(torch.nn.Linear):
    def load_weights(self, weights):
        calls.append("load")
        return {name for name, _ in weights}

def read_weights(weights, *, device, verify=True):
    calls.append(f"read-on-{device}" + "-verified" * verify + "-added-to-base" * bool(weights.base))
    return {"weight": torch.ones(2, 2)}

def read_buckets(weights, **how):
    yield read_weights(weights, **how)

worker.read_weights, worker.read_buckets = read_weights, read_buckets
gpu = torch.device("cuda", 1)
info = TensorInfo(name="weight", dtype="float32", shape=(2, 2), offset=0, checksum=0)
table = as_table(Weights(version=1, location="nowhere", nbytes=16, tensors=(info,), base="model"))
fetching = worker.Fetching()
fetching.device = gpu
fetching.fetch_weights(table)
assert fetching.fetched_weights(True) == ""
backend = worker.Backend(Model(2, 2, bias=False), SimpleNamespace(quantization=None), gpu)
backend.start_weight_update()
backend.update_weights(table)
backend.finish_weight_update()

def told(quantization):
    model = Model(2, 2, bias=False)
    model.weight_scale = torch.nn.Parameter(torch.ones(1))
    backend = worker.Backend(model, SimpleNamespace(quantization=quantization), gpu)
    backend.start_weight_update()
    try:
        backend.update_weights(table)
    except ValueError as error:
        return str(error)

assert told("fp8") is None
assert told(None) == "version 1 has nothing for ['weight_scale']"
print(*calls[:8])
"""


def in_stand_in(program, *given):
    """The lines that a program prints when it finds the stand-in for vLLM."""
    path = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *given],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_worker_on_a_gpu_loads_layer_by_layer_and_waits_for_the_copies_before_it_says_so():
    """Adapters are verified without the model below them, which is read once, to load their sum.

    Parameters that no checkpoint names, as the scales of a quantised model, need not be brought.
    """
    (said,) = in_stand_in(WORKER)
    assert said.split() == [
        "use-cuda:1",
        "read-on-cuda:1-verified",
        "initialize",
        "read-on-cuda:1-added-to-base",
        "load",
        "synchronize",
        "finalize",
        "synchronize",
    ]


SENT = """
from types import SimpleNamespace
import torch
from attrs import evolve
from grpo_plugin_vllm import worker
from grpo_plugin_vllm.transfer import as_table
from grpo_plugin_scale.weights.collective import CollectiveWriter

class Model(torch.nn.Linear):
    def load_weights(self, weights):
        return {self.load_state_dict({name: tensor}) and name for name, tensor in weights}

model, cpu = Model(2, 2, bias=False), torch.device("cpu")
backend = worker.Backend(model, SimpleNamespace(quantization=None), cpu)
writer, fetching = CollectiveWriter(cpu, "127.0.0.1"), worker.Fetching()
fetching.device, fetching.rank = cpu, 0
weights = writer.write(1, [("weight", torch.ones(2, 2))])
(info,) = weights.tensors
damaged = evolve(weights, tensors=(evolve(info, checksum=info.checksum + 1),))
for given in (weights, damaged):
    fetching.fetch_weights(as_table(given))
    assert fetching.fetched_weights(True) == ""
    backend.start_weight_update()
    try:
        backend.update_weights(as_table(given))
        print(model.weight.tolist())
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.long
def test_weights_that_are_sent_come_once_and_are_verified_as_they_are_loaded():
    """Who loads damaged ones has neither version, so that its process ends."""
    loaded, refused = in_stand_in(SENT)
    assert loaded == "[[1.0, 1.0], [1.0, 1.0]]"
    assert refused.startswith("the weights have been written in part: ")
    assert "checksum" in refused


# ---------------------------------------------------------------------------------- a call fails


@pytest.mark.parametrize(
    "call", ["step", "sleep 1 keep", "fetch_weights", "start_weight_update", "reset_prefix_cache"]
)
def test_a_call_after_which_vllms_state_is_unknown_ends_its_process_and_another_takes_over(tried, call):
    """Callers that wait get an EngineError with the cause; the next one is answered."""

    async def story(tried):
        await tried.engine.update_weights(weights(0))
        pid = tried.engine.pid
        tried.fails(call)
        if call == "step":
            with pytest.raises(EngineError, match=r"died while it generated(.|\n)*step: CUDA out of memory"):
                await tried.generate()
        elif call == "sleep 1 keep":
            await tried.engine.rest()
            await tried.engine.wake()
        else:
            await tried.engine.update_weights(weights(1))
        version = 0 if call in ("step", "sleep 1 keep") else 1
        assert await tried.generate() == [version] * 3
        assert tried.engine.pid != pid
        (incident,) = tried.incidents
        assert (incident.kind, incident.component) == ("died", "engine vllm")

    tried(story, in_turn=call == "sleep 1 keep")


def test_a_request_that_vllm_refuses_fails_alone(tried):
    async def story(tried):
        await tried.engine.update_weights(weights(0))
        pid = tried.engine.pid
        tried.fails("add_request")
        with pytest.raises(EngineError, match="vLLM refuses a request: RuntimeError: add_request"):
            await tried.generate()
        assert await tried.generate() == [0, 0, 0]
        assert tried.engine.pid == pid

    tried(story)


def test_a_request_that_ends_with_an_error_fails_alone(tried):
    async def story(tried):
        await tried.engine.update_weights(weights(0))
        pid = tried.engine.pid
        tried.fails("answer")
        answers = await asyncio.gather(tried.generate(), tried.generate(), return_exceptions=True)
        failed, *more = sorted(answers, key=lambda answer: isinstance(answer, list))
        assert isinstance(failed, EngineError)
        assert "finish reason 'error'" in str(failed)
        assert more == [[0, 0, 0]]
        assert tried.engine.pid == pid

    tried(story)


def test_memory_that_the_trainer_still_holds_is_named(tried):
    async def story(tried):
        await tried.engine.update_weights(weights(0))
        await tried.engine.rest()
        tried.fails("wake_up")
        with pytest.raises(EngineError, match=r"cannot take its GPU memory .*out of memory.*memory_fraction"):
            await tried.engine.wake()

    tried(story, in_turn=True)


@pytest.mark.parametrize("call", ["start", "init_weight_transfer_engine"])
def test_an_engine_that_does_not_start_says_why(tried, call):
    async def story(tried):
        tried.fails(call)
        with pytest.raises(
            WeightSyncError, match=rf"vLLM does not start: RuntimeError: {call}: CUDA out of memory"
        ):
            await tried.engine.update_weights(weights(0))
        await tried.engine.update_weights(weights(0))
        assert await tried.generate() == [0, 0, 0]

    tried(story)
