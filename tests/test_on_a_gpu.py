"""Branches for GPUs, executed on a CPU with a fake GPU or with recorded calls."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import flash
import pytest
import torch
from peft import LoraConfig as PeftConfig
from scaled import scaled
from separate_gpu import GPU, OnGpu, on_a_gpu, wide
from test_trainer import batch, ragged, setup
from torch.torch_version import TorchVersion

from grpo_core.config import TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.protocols import ParameterGroup
from grpo_core.demo import tiny
from grpo_core.engines.local import columns
from grpo_core.processes import cpu
from grpo_core.training import digest, packing
from grpo_core.training import logprobs as fused
from grpo_core.training import model as models
from grpo_core.training import trainer as trainers
from grpo_core.training.budget import overhead
from grpo_core.training.logprobs import token_logprobs
from grpo_core.training.model import ModelSource
from grpo_core.training.passes import Passes
from grpo_core.training.ranks import Alone
from grpo_core.weights import shm
from grpo_core.weights.reading import read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_algorithms.optimizers import adamw_torchao
from grpo_plugin_scale.training import group as groups
from grpo_plugin_scale.training import lora, resting
from grpo_plugin_scale.training.trainer import ScaledTrainer
from grpo_plugin_scale.weights import cuda_ipc

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Runtime:
    """CUDA's calls that pin memory."""

    def __init__(self):
        self.pinned = {}
        self.ever = 0
        self.late = []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        assert address % 4096 == 0
        self.pinned[address] = nbytes
        self.ever += 1
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        del self.pinned[address]
        if not is_mapped(address):
            self.late.append(address)


def is_mapped(address):
    areas = Path("/proc/self/maps")
    if not areas.exists():
        return True  # this system does not tell
    bounds = (line.split()[0].split("-") for line in areas.read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in bounds)


@contextlib.contextmanager
def pinning(synchronize=lambda gpu: None):
    """Stand in for what copies to pinned memory need."""
    runtime = Runtime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        yield runtime


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    return str(directory)


# ---------------------------------------------------------------------------------- the trainer


@pytest.mark.slow
@on_a_gpu
def test_the_head_of_a_gpu_multiplies_rounded_factors_and_has_larger_chunks():
    """Its logprobs and gradients are those of float64 for the same factors, of each token."""
    torch.manual_seed(0)
    wide.clear()
    factors = (torch.randn(100, 8).bfloat16(), torch.randn(30, 8).bfloat16())
    given = (torch.randint(30, (100,)), torch.randn(100))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "CHUNK_BYTES", 16 * 30 * 4)
        patch.setattr(fused, "CUDA_CHUNK_BYTES", 40 * 30 * 4)
        patch.setattr(fused, "KEEP_BYTES", 0)
        for device, wide_as, product in (("cpu", torch.float64, None), (GPU, torch.float32, torch.bfloat16)):
            hidden, weight = (each.to(device, wide_as).requires_grad_() for each in factors)
            targets, upstream = given[0].to(device), given[1].to(device, wide_as)
            logprobs, entropy = token_logprobs(
                hidden, weight, targets, temperature=0.7, product_dtype=product
            )
            gradients = torch.autograd.grad(logprobs, (hidden, weight), upstream)
            found.append([each.detach().cpu() for each in (logprobs, entropy, *gradients)])
    assert wide[:3] == [40, 40, 20], "as many tokens as fit"
    (logprobs, entropy, *exact), (logprobs_there, entropy_there, *gradients) = found
    assert torch.allclose(logprobs_there.double(), logprobs, atol=1e-5)
    assert torch.allclose(entropy_there.double(), entropy, atol=1e-5)
    for wanted, gradient in zip(exact, gradients, strict=True):
        assert ((gradient - wanted).norm(dim=1) <= 0.03 * wanted.norm(dim=1)).all()


@on_a_gpu
def test_what_leaves_a_gpu_goes_to_one_pinned_block_and_is_complete_before_its_memory_is_given_back():
    seen, plain = [], resting._bytes
    tensors = [torch.arange(2000.0) + i for i in range(3)]

    def wait(gpu):
        seen.append((str(gpu), tensors[0].untyped_storage().nbytes()))

    away = resting.Resting()
    with pinning(wait) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(resting, "_bytes", lambda storage: OnGpu(plain(storage)))
        for _ in range(2):
            away.leave(tensors)
            away.come_back()
    assert seen == [("gpu:0", 8000)] * 4, "before the memory goes, and after it is back"
    assert [tensor[1].item() for tensor in tensors] == [1.0, 2.0, 3.0]
    assert list(runtime.pinned.values()) == [3 * 8000], "once: the block is kept"


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cuda", 1)])
def test_a_trainer_that_rests_gives_the_memory_that_torch_keeps_to_the_engine_on_its_gpu(
    monkeypatch, model, device, times
):
    trainer = ScaledTrainer(setup(model, offload=True))
    trainer.step(batch(ragged()))
    trainer.device = torch.device(device)
    held, seen = list(trainer.optimizers.tensors()), []

    def empty_cache():
        seen.append(
            {tensor.untyped_storage().nbytes() for tensor in held if tensor.nbytes > resting.SMALLEST}
        )

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    trainer.publish()
    assert seen == [{0}] * times, "after the state has left"


def test_what_layers_keep_is_moved_to_pinned_memory_from_a_gpu_alone():
    offload = Passes(activations="offload")
    moved = offload.around(torch.device("cuda", 1))
    assert (moved.func, moved.keywords) == (torch.autograd.graph.save_on_cpu, {"pin_memory": True})
    with moved():
        pass  # torch takes the arguments
    others = (offload.around(CPU), Passes(activations="recompute").around(CUDA))
    assert others == (contextlib.nullcontext, contextlib.nullcontext)


def test_updates_of_8_bits_are_compiled_on_a_gpu_and_not_on_a_cpu(monkeypatch):
    optimizers = pytest.importorskip("torchao.optim")
    stances = []

    @contextlib.contextmanager
    def set_stance(stance):
        stances.append(stance)
        yield
        stances.pop()

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    monkeypatch.setattr(optimizers.AdamW8bit, "step", lambda self: seen.append(tuple(stances)))
    seen = []
    for device in ("cpu", "meta"):
        parameter = torch.nn.Parameter(torch.zeros(4, device=device))
        group = ParameterGroup(parameters={"w": parameter}, lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
        (optimizer,) = adamw_torchao([group])
        optimizer.step()
    assert seen == [("force_eager",), ()]


def test_a_digest_names_the_gpu_that_rounded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU called {device}")
    assert "a GPU called cuda:1, ranks 2" in digest._described(torch.device("cuda", 1), 2)


def test_a_gpu_has_larger_microbatches_and_pays_more_for_each():
    assert overhead(90_000, CUDA) == 256 > overhead(4_000_000, CPU)
    assert overhead(8_000_000_000, CUDA) > overhead(8_000_000_000, CPU) == 4


def test_weights_stay_on_the_gpu_for_cuda_ipc_and_on_a_cpu_they_are_shared_memory():
    setup = TrainerSetup(transport="cuda_ipc")
    assert isinstance(cuda_ipc.writer(setup, CUDA, Alone()), cuda_ipc.CudaIpcWriter)
    assert isinstance(cuda_ipc.writer(setup, CPU, Alone()), SharedMemoryWriter)


class Copies(torch.overrides.TorchFunctionMode):
    """Notes the dtypes between which values are copied: torch converts on the host what is copied there."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            self.seen.append((args[0].dtype, args[1].dtype))
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@on_a_gpu
def test_weights_of_a_gpu_are_rounded_there_and_copied_into_pinned_shared_memory():
    """A host would convert twice as many bytes, and copy them through a buffer of the driver."""
    with pinning() as runtime:
        writer = shm.writer(TrainerSetup(), CUDA, Alone())
        with Copies() as copies:
            weights = writer.write(1, [("w", torch.ones(3, 2, device=GPU))], dtype=torch.bfloat16)
        assert copies.seen == [(torch.bfloat16, torch.bfloat16)]
        assert torch.equal(read_weights(weights)["w"], torch.ones(3, 2, dtype=torch.bfloat16))
        assert list(runtime.pinned.values()) == [weights.nbytes]
        del writer
        gc.collect()
        assert (runtime.pinned, runtime.late) == ({}, [])
        shm.writer(TrainerSetup(), CPU, Alone()).write(1, [("w", torch.ones(2))])
        assert runtime.ever == 1, "nothing is pinned for a CPU"


@flash.needs_grouped_heads
@pytest.mark.parametrize("window", [None, 2])
@on_a_gpu
def test_packed_rows_of_16_bits_are_one_call_of_flash_attention_with_the_results_of_a_call_for_each(window):
    """Its operations are torch's own, with the demands of their kernels for GPUs."""
    parts = [packing.Part(length=3), packing.Part(length=1, before=0), packing.Part(length=4, before=0)]
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 8, 16) for heads in (4, 2, 2)]
    upstream, found = torch.randn(1, 8, 4, 16), []
    with flash.on_a_cpu() as calls:
        for device in ("cpu", GPU):
            here = [each.detach().to(device).requires_grad_() for each in given]
            packed = packing.Packed(parts, torch.device(device))
            with torch.autocast(device, dtype=torch.bfloat16):
                out, _ = packing.attention(None, *here, None, sliding_window=window, packed=packed)
            out.backward(upstream.to(out))
            found.append([each.detach().cpu().float() for each in (out, *(t.grad for t in here))])
    assert calls == ["forward", "backward"], "the second time"
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("capability", "head", "of_values"),
    [((7, 5), 16, 16), ((9, 0), 20, 20), ((9, 0), 264, 264), ((9, 0), 16, 8)],
    ids=["an old GPU", "no multiple of 8", "too large", "other values"],
)
@on_a_gpu
def test_packed_rows_that_flash_attention_refuses_are_a_call_each(capability, head, of_values):
    query = torch.randn(1, 2, 5, head, dtype=torch.bfloat16).to(GPU)
    value = torch.randn(1, 2, 5, of_values, dtype=torch.bfloat16).to(GPU)
    packed = packing.Packed([packing.Part(length=2), packing.Part(length=3)], torch.device(GPU))
    with flash.on_a_cpu() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        out, _ = packing.attention(None, query, query, value, None, packed=packed)
    assert (tuple(out.shape), calls) == ((1, 5, 2, of_values), [])


def varlen_attn_of_torch_2_11(  # it is never called
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    raise AssertionError


@on_a_gpu
def test_packed_rows_are_a_call_each_where_torch_has_no_flash_attention_for_grouped_heads():
    """torch 2.10 and 2.11 have the function, without the arguments that it is given."""
    query, key = (torch.randn(1, heads, 5, 16, dtype=torch.bfloat16).to(GPU) for heads in (4, 2))
    packed = packing.Packed([packing.Part(length=2), packing.Part(length=3)], torch.device(GPU))
    packing._has_varlen.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn_of_torch_2_11)
            out, _ = packing.attention(None, query, key, key, None, packed=packed)
    finally:
        packing._has_varlen.cache_clear()
    assert tuple(out.shape) == (1, 5, 4, 16)


class ChosenError(Exception):
    """The device of a rank."""


@pytest.mark.parametrize(
    ("device", "rank", "weights", "seen", "expected"),
    [
        ("cuda", 1, "float32", 2, "cuda:1"),
        ("cuda", 1, "float32", 1, "cuda:0"),
        ("cuda", 0, "bfloat16", 2, "cuda:0"),
        ("cuda:2", 0, "bfloat16", 4, "cuda:2"),
        ("cuda:2", 0, "float32", 4, "cuda:2"),
        ("cuda", 0, "float32", 2, "cuda"),
        ("cpu", 1, "float32", 0, "cpu"),
    ],
)
def test_each_rank_computes_on_the_gpu_with_its_number_or_its_only_one_unless_one_is_named(
    monkeypatch, device, rank, weights, seen, expected
):
    def join(trainer, *, leaves):
        raise ChosenError(str(trainer.device))

    current = ["cuda:0"]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(ScaledTrainer, "join", join)
    monkeypatch.setattr(trainers.cpu, "resolve_device", lambda device, key: torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    config, ranks = TrainerConfig(device=device), 2 if rank else 1
    sections = scaled(weights=weights, ranks=ranks)
    with pytest.raises(ChosenError, match=f"^{expected}$"):
        ScaledTrainer(TrainerSetup(trainer=config, rank=rank, ranks=ranks, sections=sections))
    assert current[-1] == (expected if expected.startswith("cuda:") else "cuda:0")


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def joined(monkeypatch):
    """The calls by which a group is made, which none is, and no setting of the user."""
    seen = []
    for name in INTERFACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def join(*args, **named):
        given = inspect.signature(torch.distributed.init_process_group).bind(*args, **named).arguments
        backends = torch.distributed.distributed_c10d.BackendConfig(given["backend"])
        seen.append({device: str(name) for device, name in backends.get_device_backend_map().items()})

    names = ("is_initialized", "init_process_group")
    stand_in = SimpleNamespace(**dict(zip(names, (lambda: False, join), strict=True)))
    monkeypatch.setattr(groups, "dist", stand_in)
    monkeypatch.setattr(groups, "DeviceMesh", lambda kind, ranks: seen.append((kind, ranks.tolist())))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    return seen


def test_ranks_on_gpus_choose_theirs_before_they_join_a_group_with_nccl_for_gpus_and_gloo_for_cpus(joined):
    """Otherwise each of them would make its communicators on the first GPU."""
    groups.Group(0, 1, rendezvous="", device=torch.device("cuda", 1), seconds=60.0)
    assert joined == ["cuda:1", {"cpu": "gloo", "cuda": "nccl"}, ("cuda", [0])]


@pytest.mark.parametrize(("leaves", "here"), [(False, INTERFACES), (True, ("GLOO_SOCKET_IFNAME",))])
def test_nccl_stays_on_this_machine_unless_it_brings_weights_to_others(joined, leaves, here):
    """It has one choice of interfaces for all groups of a process."""
    groups.Group(0, 1, rendezvous="", device=CPU, seconds=60.0, leaves=leaves)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert {name: os.environ.get(name) for name in INTERFACES} == {
        name: loopback if name in here else None for name in INTERFACES
    }


@pytest.fixture
def generators(monkeypatch):
    """Random numbers of two GPUs, as torch keeps them; the second one is current."""
    made = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    for name, stand_in in {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **how: call(),
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "device_count": lambda: 2,
    }.items():
        monkeypatch.setattr(torch.cuda.random, name, stand_in)
    return made


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_random_numbers_of_a_gpu_continue_where_they_were_saved(tmp_path, generators, model, device):
    """A checkpoint of a GPU is resumed on a CPU as well, which has none."""
    trainer = trainers.TorchTrainer(setup(model))
    saving, there = trainer._saving, torch.device(device)
    saving._device = there
    torch.rand(1, generator=generators[1])  # the seed of both is the same
    saving.save(tmp_path, 0)
    saving.written().result()
    expected = torch.rand(3, generator=generators[1])
    restore = saving._optimizers.restore

    def on_the_cpu(state, about, device):
        assert device == there
        restore(state, about, CPU)

    saving._optimizers.restore = on_the_cpu
    saving.resume(tmp_path)
    assert torch.equal(torch.rand(3, generator=generators[1]), expected)
    trainers.TorchTrainer(attrs.evolve(setup(model), resume_from=str(tmp_path)))
    assert torch.equal(*(each.get_state() for each in generators)), "both have the seed, and nothing else"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_adapters_draw_no_random_numbers_of_a_gpu_that_the_caller_misses(generators, model, device):
    source = ModelSource(
        start=model, saved=None, config=setup(model).model, device=torch.device(device), seed=7
    )
    module = models.load(Path(model), device=CPU)
    before = [each.get_state() for each in generators]
    lora._inject(PeftConfig(r=2, target_modules="all-linear"), module, source, [])
    assert torch.equal(generators[1].get_state(), before[1])


def test_a_gpu_chooses_its_attention_itself():
    def rows(device, length):
        return SimpleNamespace(input_ids=SimpleNamespace(device=device, shape=(2, length)), packed=())

    for enabled in (True, False):
        torch.backends.cuda.enable_flash_sdp(enabled)
        models._choose_attention(rows(CUDA, 4))
        assert torch.backends.cuda.flash_sdp_enabled() is enabled
    models._choose_attention(rows(CPU, 10_000))
    assert torch.backends.cuda.flash_sdp_enabled()


def test_auto_is_a_gpu_if_there_is_one_and_a_device_that_is_not_there_is_named(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert cpu.resolve_device("auto", "trainer.device").type == ("cuda" if there else "cpu")
    with pytest.raises(
        ConfigError, match=r"^trainer\.device is 'cuda:99', which torch .* cannot use here: .*"
    ):
        cpu.resolve_device("cuda:99", "trainer.device")


def test_a_torch_that_is_too_old_for_gpus_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))
    for configured in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"torch 2\.9\.1\+cu128 is too old .* expected at least 2\.10;"):
            cpu.resolve_device(configured, "trainer.device")
    assert cpu.resolve_device("cpu", "trainer.device").type == "cpu"


# ---------------------------------------------------------------------------------- the engine `local`


def test_unused_columns_of_a_gpu_are_zeros_of_its_own_memory():
    meta = torch.device("meta")
    zeros = columns._zeros(5, torch.empty(0, device=meta))
    assert (zeros.device.type, zeros.shape) == ("meta", (5,))


# ---------------------------------------------------------------------------------- the checks of a GPU


@pytest.mark.slow
def test_the_checks_of_a_gpu_train_with_fsdp_on_one_rank_and_find_the_same_weights(tmp_path):
    script = Path(__file__).parent / "benchmarks" / "gpu_check.py"
    command = [sys.executable, script, "--device", "cpu", "--output", tmp_path / "said.json", "FSDP"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "said.json").read_text())["results"]
    assert (result["check"], result["ok"]) == ("FSDP on one rank", True)


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed: make install-vllm")
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed")
def test_the_checks_of_a_gpu_give_one_to_the_engine_in_a_ray_worker(monkeypatch):
    """Without `engine.gpus_per_worker` it would see none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    gpu_check = importlib.import_module("gpu_check")
    (check,) = (check for name, check in gpu_check.checks("cuda") if "Ray" in name)
    assert "--ray" in check.args
    (given,) = (each for each in check.args if each.startswith("engine.gpus_per_worker="))
    assert 0 < float(given.partition("=")[2]) < 1, "the trainer needs the rest where there is no other GPU"
