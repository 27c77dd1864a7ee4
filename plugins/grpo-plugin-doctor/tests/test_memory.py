"""The memory of a run: each part against numbers computed by hand, and against real allocations."""

from __future__ import annotations

import re
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from attrs import evolve
from large import EIGHT, EIGHT_PARAMETERS, eight_billion, model_files
from logged import Logged
from moe import FAMILIES, make_moe_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_core.app import launch, placement
from grpo_core.config import ModelConfig, parse_settings
from grpo_core.contracts.errors import ConfigError, ModelError
from grpo_core.contracts.records import EngineLoad, MemoryPart
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.engines.local.memory import memory as local_memory
from grpo_core.kit import files
from grpo_core.plugins.configured import configured as built
from grpo_core.plugins.host import PluginHost
from grpo_core.training.memory import trainer_parts
from grpo_core.training.model import ModelSource, Scorer
from grpo_core.training.passes import Passes, for_training
from grpo_plugin_doctor import machine, memory
from grpo_plugin_doctor.activations import Pass, activation_bytes, model_shapes
from grpo_plugin_doctor.machine import Gpu, Memory
from grpo_plugin_doctor.parameters import (
    linear_parameters,
    lora_shapes,
    shapes_in,
)
from grpo_plugin_scale.lora import LoraConfig

GIB = 1 << 30


def certain_parts(*case):
    return memory.certain_parts(memory.Case(*case))


def configured(*settings):
    """Return the configuration of a run on sorting, and its plugins."""
    return launch.configure([], parse_settings(settings, {"tasks": launch.tasks_of(["math:sort"])}))


def sizes(parts):
    return {part.name: (part.nbytes, part.device) for part in parts}


# ---------------------------------------------------------------------------------- the trainer


def parts_of(**changes):
    chosen = {
        "parameters": 1000, "optimizer": 8000, "dtype": "float32", "device": "host", "on_device": False,
        "kept": 0,
    } | changes  # fmt: skip
    usual = dict.fromkeys(("trained", "published"), chosen["parameters"])
    usual |= {"config": None, "weights": 4 * chosen["parameters"]}
    return trainer_parts(**usual | chosen)


def test_a_trainer_on_the_host_holds_20_bytes_of_a_parameter():
    assert sizes(parts_of()) == {
        "weights": (4000, "host"),
        "gradients": (4000, "host"),
        "optimizer": (8000, "host"),
        "published weights": (4000, "host"),
    }
    assert all(part.certain for part in parts_of())


def test_a_trainer_on_a_gpu_leaves_publication_to_the_host():
    assert sizes(parts_of(dtype="bfloat16", device="cuda:1", kept=1)) == {
        "weights": (4000, "cuda:1"),
        "gradients": (4000, "cuda:1"),
        "optimizer": (8000, "cuda:1"),
        "published weights": (2000, "host"),
        "kept weights": (4000, "cuda:1"),
        "checkpoint copy": (8000, "host"),
    }


def test_a_block_that_engines_read_on_the_gpu_is_there():
    found = sizes(parts_of(dtype="bfloat16", device="cuda", on_device=True))
    assert found["published weights"] == (2000, "cuda")


def test_a_trainer_of_adapters_holds_gradients_and_moments_of_these_alone():
    assert sizes(parts_of(trained=10, published=10, optimizer=80, kept=1)) == {
        "weights": (4000, "host"),
        "gradients": (40, "host"),
        "optimizer": (80, "host"),
        "published weights": (40, "host"),
        "adapters": (40, "host"),
    }


@pytest.mark.parametrize("targets", [[], ["q_proj", "mlp.down_proj"]])
def test_the_shapes_of_adapters_are_known_from_the_headers_of_the_files_alone(tmp_path, targets):
    make_tiny_model(tmp_path / "tiny", (), warm_start_steps=0)
    config = ModelConfig(path=str(tmp_path / "tiny"))
    source = ModelSource(start=config.path, saved=None, config=config, device=torch.device("cpu"))
    trained = LoraConfig(rank=3, targets=targets).build_model(source).trainable()
    held = {name: tuple(parameter.shape) for name, parameter in trained}
    for told in (shapes_in(tmp_path / "tiny"), model_shapes(config.path).tensors):
        found = lora_shapes(told, 3, targets)
        assert {f"base_model.model.{name}": shape for name, shape in found.items()} == held


# ---------------------------------------------------------------------------------- activations


@pytest.fixture
def llama(tmp_path):
    def write(layers=2, vocabulary=4000):
        directory = tmp_path / f"llama-{layers}-{vocabulary}"
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=320, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        ).save_pretrained(directory)  # fmt: skip
        return str(directory)

    return write


RECOMPUTE = Passes(activations="recompute")
WORK = Pass(rows=8, tokens=100, sampled=60, dtype="float32")


def allocated(path: str, work: Pass) -> int:
    """The peak of real allocations in two passes, as torch's profiler records them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    scorer = Scorer(for_training(model, work.passes), getattr(torch, work.dtype), plain_head=True)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        for _ in range(1 + work.again):
            logprobs, _ = scorer.score(work.microbatch(), 1.0)
            logprobs.sum().backward()
            del logprobs
    events = sorted(
        (each for each in profile.kineto_results.events() if each.name() == "[memory]"),
        key=lambda each: each.start_ns(),
    )
    now = peak = 0
    for each in events:
        now += each.nbytes()
        peak = max(peak, now)
    return peak - sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        WORK,
        evolve(WORK, again=False),
        evolve(WORK, passes=RECOMPUTE),
        evolve(WORK, dtype="bfloat16"),
        evolve(WORK, tokens=40, rows=20),
    ],
    ids=["float32", "one micro-batch", "recompute", "bfloat16", "short rows"],
)
def test_activations_are_what_torch_really_allocates(llama, work):
    path = llama()
    assert activation_bytes(path, work) == pytest.approx(allocated(path, work), rel=0.05)


@pytest.mark.long
def test_layers_with_bfloat16_weights_keep_less_than_float32_weights_whose_products_are_rounded(llama):
    rounds = evolve(WORK, dtype="bfloat16")
    copies = evolve(rounds, passes=Passes(copies=True))
    of_four_layers = [
        activation_bytes(llama(6), work) - activation_bytes(llama(2), work) for work in (copies, rounds)
    ]
    assert of_four_layers[0] < 0.8 * of_four_layers[1]


def test_a_reference_has_bfloat16_weights_if_layers_have_and_it_does_not_move(tmp_path):
    model = eight_billion(tmp_path / "model")

    def reference(*more: str) -> int:
        settings = [f"model.path={model}", "loss.options.kl.coefficient=0.1", "trainer.device=cpu", *more]
        config, host = configured(*settings)
        (trainer, *_) = certain_parts(config, host, str(model), shapes_in(model), [])
        return sizes(trainer.parts)["kept weights"][0]

    copies = "model.dtype=bfloat16", "trainer.weights=bfloat16"
    assert reference() == reference(*copies, "scores.reference.weights=ema") == 2 * reference(*copies)


def test_linear_layers_that_adapters_leave_in_bfloat16_take_two_bytes_on_a_gpu(
    tmp_path, two_gpus, monkeypatch
):
    """The host has all of them in float32 while the model is loaded."""
    monkeypatch.setattr(machine, "build_of_torch", lambda: "cuda")
    model = eight_billion(tmp_path / "model")
    outer = 2 * 128256 * 4096 + 65 * 4096  # embedding, output layer, norms

    def weights(*more: str) -> tuple[int, str]:
        settings = [f"model.path={model}", "model.lora.rank=16", *more]
        config, host = configured(*settings)
        (trainer, *_) = certain_parts(config, host, str(model), shapes_in(model), machine.gpus())
        return sizes(trainer.parts)["weights"]

    assert weights() == (4 * outer + 2 * (EIGHT_PARAMETERS - outer), "cuda:0")
    assert weights("model.dtype=float32") == (4 * EIGHT_PARAMETERS, "cuda:0")
    assert weights("trainer.device=cpu", "model.dtype=bfloat16") == (4 * EIGHT_PARAMETERS, "host")
    with (model / "model.safetensors").open("r+b") as file:
        header = file.read(200_000)
        file.seek(header.index(b'"BF16"', header.index(b"gate_proj")))
        file.write(b'"F16" ')
    one = 14336 * 4096
    expected = 4 * (outer + one) + 2 * (EIGHT_PARAMETERS - outer - one)
    assert weights() == (expected, "cuda:0"), "some numbers of float16 are none of bfloat16"
    assert linear_parameters({"model.embed_tokens_per_layer.weight": (262144, 7680)}) == 0
    assert linear_parameters({"layers.0.mlp.experts.0.up_proj.weight": (64, 64)}) == 0


def test_weights_that_rest_on_the_host_are_counted(tmp_path, two_gpus, monkeypatch):
    monkeypatch.setattr(machine, "build_of_torch", lambda: "cuda")
    model = eight_billion(tmp_path / "model")
    settings = [f"model.path={model}", "trainer.offload=true",
                "pipeline.max_staleness=0", "trainer.device=cuda"]  # fmt: skip
    config, host = configured(*settings)
    (trainer, *_) = certain_parts(config, host, str(model), shapes_in(model), machine.gpus())
    found = sizes(trainer.parts)
    p = EIGHT_PARAMETERS
    assert found["optimizer"] == (8 * p, "cuda:0")
    assert found["weights between steps"] == (4 * p + 8 * p, "host")


@pytest.mark.long
def test_a_checkpointed_layer_keeps_its_input_and_nothing_else(llama):
    work = evolve(WORK, passes=RECOMPUTE)
    few, more = (activation_bytes(llama(layers), work) for layers in (2, 6))
    assert more - few == 4 * (8 * 100 * 128 * 4)  # layers x tokens x width x bytes


@pytest.mark.long
def test_an_offloaded_layer_keeps_nothing_on_its_device(llama):
    work = evolve(WORK, passes=Passes(activations="offload"), offloads=True)
    few, more = (activation_bytes(llama(layers), work) for layers in (2, 6))
    assert more == few


def test_shapes_come_from_the_configuration_and_tied_weights_count_once(llama):
    d, i, v, kv = 128, 320, 4000, 64
    layer = 2 * d + 2 * d * d + 2 * kv * d + 3 * i * d
    assert model_shapes(llama()).parameters == v * d + d + 2 * layer
    assert model_shapes(llama()).vocabulary == v


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_activations_of_experts_are_what_torch_really_allocates(tmp_path, family, dtype):
    """Whichever experts the tokens go to: their number is the same."""
    path, work = str(make_moe_model(tmp_path / "moe", family, experts=8)), evolve(WORK, dtype=dtype)
    assert activation_bytes(path, work) == pytest.approx(allocated(path, work), rel=0.1)


class LooksConfig(LlamaConfig):
    model_type = "looks_at_its_numbers"


class Looks(LlamaForCausalLM):
    config_class = LooksConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda module, given, made: made * given[0].max().item()
        )


def test_a_model_whose_code_looks_at_its_numbers_is_unknown_in_one_line(tmp_path, capfd):
    AutoConfig.register(LooksConfig.model_type, LooksConfig, exist_ok=True)
    AutoModelForCausalLM.register(LooksConfig, Looks, exist_ok=True)
    LooksConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    ).save_pretrained(tmp_path / "looks")  # fmt: skip
    with (
        Logged() as log,
        pytest.raises(ModelError, match="the activations cannot be computed ahead") as caught,
    ):
        activation_bytes(str(tmp_path / "looks"), WORK)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err + log.text


def test_a_configuration_that_is_not_a_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ModelError, match="no configuration of a causal language model"):
        model_shapes(str(tmp_path))


# ---------------------------------------------------------------------------------- the engine


LOAD = EngineLoad(
    parameters=1000,
    config={"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "tie_word_embeddings": True},
    dtype="bfloat16", requests=50, tokens=200,
)  # fmt: skip


def test_the_local_engine_declares_its_weights_and_its_cache():
    found = sizes(local_memory(LOAD))
    assert found == {
        "weights": (2000, "host"),
        "keys and values": (50 * 320 * (2 * 3 * 2 * 16) * 2, "host"),
        "logits": (2 * 50 * 100 * 4, "host"),
        "head": (100 * 64 * 2, "host"),
    }
    few = sizes(local_memory(LOAD, max_rows=10, dtype="float32", device="cuda"))
    assert few["weights"] == (4000, "cuda")
    assert "head" not in few
    assert few["keys and values"] == (10 * 320 * (2 * 3 * 2 * 16) * 4, "cuda")


def test_only_the_weights_of_an_engine_are_certain():
    assert [part.name for part in local_memory(LOAD) if part.certain] == ["weights"]


# ---------------------------------------------------------------------------------- files of a model


def parameters_in(directory):
    return sum(map(prod, shapes_in(directory).values()))


def test_parameters_are_counted_by_the_headers_of_the_files(tmp_path, llama):
    make_tiny_model(tmp_path / "tiny", (), warm_start_steps=0)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    assert parameters_in(tmp_path / "tiny") == sum(p.numel() for p in made.parameters())
    made.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert parameters_in(tmp_path / "shards") == parameters_in(tmp_path / "tiny")
    assert parameters_in(eight_billion(tmp_path / "eight")) == EIGHT_PARAMETERS
    assert model_shapes(str(tmp_path / "eight")).parameters == EIGHT_PARAMETERS


@pytest.mark.parametrize(
    ("config", "content"),
    [
        ("{}", b""),
        ("{}", b"\0" * 100),
        ("{}", struct.pack("<Q", 2) + b"[]"),
        ("{}", struct.pack("<Q", 1 << 60)),
        ("[]", struct.pack("<Q", 2) + b"{}"),
        ('{"quantization_config": {}}', struct.pack("<Q", 2) + b"{}"),
        ("{}", None),
    ],
    ids=str,
)
def test_files_of_unknown_size_are_left_to_the_trainer(tmp_path, config, content):
    (tmp_path / "config.json").write_text(config)
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert shapes_in(tmp_path) is None


# ---------------------------------------------------------------------------------- what does not fit


def run_of(directory, *settings):
    return configured(f"model.path={directory}", *settings)


def checked(directory, *settings):
    return memory.checked(*run_of(directory, *settings))


def test_eight_billion_parameters_do_not_fit_a_small_host(tmp_path):
    there = machine.host_memory()
    if there is None or there.available > 24 * EIGHT_PARAMETERS:
        pytest.skip("this host would hold them")
    with pytest.raises(ConfigError) as caught:
        checked(eight_billion(tmp_path / "eight"), "trainer.device=cpu", "model.dtype=float32")
    text = str(caught.value)
    for told in (
        f"the run needs at least {memory.size(24 * EIGHT_PARAMETERS)} of the host's memory, which has ",
        f"trainer's optimizer {memory.size(8 * EIGHT_PARAMETERS)}",
        f"engine's weights {memory.size(4 * EIGHT_PARAMETERS)}",
        'model.dtype = "bfloat16"',
        "--set health.max_memory=0 turns the check off",
    ):
        assert told in text
    assert "\n" not in text


@pytest.mark.parametrize(("has_products", "nbytes"), [(False, 24), (True, 20)])
def test_a_processor_with_bfloat16_products_holds_smaller_weights_for_engines(
    tmp_path, monkeypatch, has_products, nbytes
):
    """20 bytes a parameter: weights, gradients and AdamW's moments, and what is published and decoded."""
    processor = tmp_path / "cpuinfo"
    processor.write_text("avx512_bf16" if has_products else "")
    monkeypatch.setattr(files, "PROCESSOR", processor)
    monkeypatch.setattr(machine, "host_memory", lambda: Memory(total=1 << 34, available=1 << 34))
    with pytest.raises(ConfigError, match=re.escape(memory.size(nbytes * EIGHT_PARAMETERS))):
        checked(eight_billion(tmp_path / "eight"), "trainer.device=cpu")


@pytest.mark.parametrize(
    ("features", "settings", "slow"),
    [
        ("flags : fma avx2", ["model.dtype=bfloat16"], ["model.dtype"]),
        ("flags : fma avx2", ["engine.options.dtype=float16"], ["engine.options.dtype"]),
        ("flags : fma avx2", [], []),
        ("flags : fma avx2", ["model.dtype=bfloat16", "trainer.device=cuda"], []),
        ("flags : fma avx2 avx512f", ["model.dtype=bfloat16"], []),
        ("Features : fp asimd bf16", ["model.dtype=bfloat16"], []),
    ],
)
def test_sixteen_bits_on_a_processor_without_products_of_them_are_a_warning(
    tmp_path, monkeypatch, features, settings, slow
):
    (tmp_path / "cpuinfo").write_text(features)
    monkeypatch.setattr(files, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "gpus", list)
    warned = memory.slow_products(*configured(*settings))
    assert [text.partition(" = ")[0] for text in warned] == slow


def test_the_check_can_be_turned_off(tmp_path):
    directory = eight_billion(tmp_path / "eight")
    assert checked(directory, "trainer.device=cpu", "health.max_memory=0") == []


@pytest.mark.slow
def test_a_gpu_is_named_with_its_parts(tmp_path, two_gpus):
    with pytest.raises(ConfigError) as caught:
        checked(eight_billion(tmp_path / "eight"), "trainer.device=cuda:1")
    text = str(caught.value)
    assert text.startswith("the run needs at least 120 GiB of GPU cuda:1, which has 21.5 GiB available")
    assert "trainer's weights 29.9 GiB, trainer's gradients 29.9 GiB, trainer's optimizer 59.8 GiB" in text
    assert "published" not in text


@pytest.fixture
def four_billion(tmp_path):
    """A model of 4.1e9 parameters, of which a trainer holds 61 GiB."""
    shape = {**EIGHT, "hidden_size": 2048, "vocab_size": 100_000, "num_hidden_layers": 1}
    return model_files(tmp_path / "four", shape, {f"part.{i}": [100_000, 2048] for i in range(20)})


FOUR = 20 * 100_000 * 2048


def certain(directory, *settings):
    """Bytes that are certain, by device."""
    config, host = run_of(directory, *settings)
    parts = certain_parts(config, host, str(directory), shapes_in(directory), machine.gpus())
    return {each.device: each.certain for each in memory.capacities(parts, machine.gpus())}


ON_GPUS = ["trainer.device=cuda", "engine.options.device=cuda"]


def test_trainer_and_engines_are_counted_on_the_gpus_that_they_are_given(four_billion, two_gpus):
    assert certain(four_billion, *ON_GPUS) == {
        "cuda:0": 16 * FOUR, "cuda:1": 2 * FOUR, "host": 2 * FOUR,
    }  # fmt: skip
    assert certain(four_billion, *ON_GPUS, "trainer.gpus=[1]", "engine.workers=3") == {
        "cuda:1": 16 * FOUR, "cuda:0": 3 * 2 * FOUR, "host": 2 * FOUR,
    }  # fmt: skip
    found = certain(four_billion, *ON_GPUS, "engine.options.dtype=float32", "engine.workers=2")
    assert found["cuda:1"] == 2 * 4 * FOUR


def test_weights_for_engines_of_16_bits_take_half_of_the_room(four_billion, two_gpus):
    whole = certain(four_billion, *ON_GPUS, "model.dtype=float32")
    half = certain(four_billion, *ON_GPUS, "model.dtype=float32", "engine.options.dtype=bfloat16")
    assert (whole["host"], half["host"]) == (4 * FOUR, 2 * FOUR)


def test_the_ranks_of_a_trainer_hold_equal_parts_on_separate_gpus(four_billion, two_gpus):
    cpu_engine = "engine.options.device=cpu"
    found = certain(four_billion, *ON_GPUS[:2], cpu_engine, "trainer.ranks=2")
    assert (found["cuda:0"], found["cuda:1"]) == (8 * FOUR, 8 * FOUR)
    on_host = certain(four_billion, "trainer.device=cpu", cpu_engine, "trainer.ranks=2")
    assert on_host == certain(four_billion, "trainer.device=cpu", cpu_engine)


def test_a_gpu_that_the_trainer_and_the_engine_share_has_to_hold_both(four_billion, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa")
    assert certain(four_billion, *ON_GPUS)["cuda:0"] == 18 * FOUR
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,GPU-aaaa")
    assert certain(four_billion, *ON_GPUS, "trainer.gpus=[1]") == {
        "cuda:1": 16 * FOUR, "cuda:0": 2 * FOUR, "host": 2 * FOUR,
    }  # fmt: skip


def test_a_model_too_small_to_ask_for_gpus_is_checked_on_a_machine_with_several(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(placement, "visible", lambda: 2)
    make_tiny_model(tmp_path / "tiny", (), warm_start_steps=0)
    assert checked(tmp_path / "tiny") == []


def test_several_engines_on_a_gpu_are_refused_together(four_billion, two_gpus):
    with pytest.raises(ConfigError, match=r"GPU cuda:1.*engine's weights 7\.63 GiB x 3"):
        checked(four_billion, *ON_GPUS, "engine.workers=3")


def test_memory_that_is_nearly_used_up_is_a_warning():
    here = Memory(total=100, available=100)
    capacity = memory.Capacity(device="host", needed=95, certain=95, memory=here)
    assert capacity.tight
    assert not capacity.refused(1.0)
    assert evolve(capacity, certain=101).refused(1.0)
    assert evolve(capacity, certain=101).refused(0) is False


def test_estimates_alone_never_refuse_a_run():
    parts = (
        MemoryPart(name="activations", nbytes=1 << 60, certain=False),
        MemoryPart(name="weights", nbytes=1 << 10),
    )
    (found,) = memory.capacities([memory.ProcessMemory(name="trainer", parts=parts)], [])
    assert found.needed > found.memory.total
    assert not found.refused(1.0)


def test_a_trainer_that_inherits_says_nothing_about_its_memory(tmp_path):
    (tmp_path / "own.py").write_text(
        "from grpo_core.training.process import ProcessTrainer\n"
        "class Adapters(ProcessTrainer):\n    '''Trains something small.'''\n"
    )
    directory = eight_billion(tmp_path / "eight")
    config, host = run_of(directory, f"trainer.name={tmp_path}/own.py:Adapters", "trainer.device=cpu")
    found = certain_parts(config, host, str(directory), {"matrix": (EIGHT_PARAMETERS, 1)}, [])
    assert [process.name for process in found] == ["engine"]


# ---------------------------------------------------------------------------------- the machine


def test_gpus_are_read_in_the_order_of_the_visible_ones(two_gpus, monkeypatch):
    h200 = Gpu(
        name="NVIDIA H200", memory=Memory(total=143771 << 20, available=143000 << 20), driver="570.86.15"
    )
    l4 = Gpu(name="NVIDIA L4", memory=Memory(total=23034 << 20, available=22000 << 20), driver="570.86.15")
    assert machine.gpus() == [h200, l4]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-aaaa")
    assert machine.gpus() == [l4, h200]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc")
    assert machine.gpus() == [Gpu(name="MIG-cccc", memory=None, driver="")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpus() == []


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []


MEMINFO = "MemTotal: 8000 kB\nMemAvailable: 6000 kB\nSwapTotal: 2000 kB\nSwapFree: 1000 kB\n"


def write(root, **files):
    for path, text in files.items():
        there = root / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
    return root


def test_the_memory_of_the_machine_is_what_is_available_with_swap(tmp_path):
    root = write(tmp_path, **{"proc/meminfo": MEMINFO})
    assert machine.host_memory(root) == Memory(total=10000 << 10, available=7000 << 10)


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": str(4000 << 10),
            "sys/fs/cgroup/job/memory.current": str(3000 << 10),
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {300 << 10}\nactive_file {200 << 10}\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "1\n",
        },
        {
            "proc/self/cgroup": "4:cpu,memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4000 << 10),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3000 << 10),
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 9\ntotal_inactive_file {300 << 10}\n"
            f"total_active_file {200 << 10}\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_container_or_a_job_counts(tmp_path, files):
    found = machine.host_memory(write(tmp_path, **{"proc/meminfo": MEMINFO}, **files))
    assert found is not None
    assert (found.total, found.available) == (4000 << 10, 1500 << 10)
    assert found.limit.startswith(str(tmp_path / "sys/fs/cgroup"))


def test_another_system_than_linux_has_unknown_memory(tmp_path):
    assert machine.host_memory(tmp_path) is None


def test_the_build_of_torch_is_read_without_importing_it():
    assert machine.build_of_torch() == (f"cuda {torch.version.cuda}" if torch.version.cuda else "")


def test_the_host_of_plugins_is_the_one_that_discovers(monkeypatch):
    selected = PluginHost.discover().find("engine", "local")
    assert selected.loaded(selected.offer.memory) is local_memory


# ---------------------------------------------------------------------------------- optimizers, teachers


def test_the_estimate_of_memory_knows_the_bytes_of_each_optimizer(tmp_path: Path) -> None:
    directory = eight_billion(tmp_path / "eight")
    shapes = shapes_in(directory)
    assert shapes is not None

    def of(name: str) -> int:
        tables = {
            "model": {"path": str(directory)},
            "trainer": {"device": "cpu"},
            "optimizer": {"name": name},
        }
        config, host = built([tables])
        (trainer, *_) = certain_parts(config, host, str(directory), shapes, [])
        parts = {part.name: part.nbytes for part in trainer.parts}
        return parts["optimizer"]

    embeddings, gains = 2 * 128256 * 4096, 65 * 4096
    assert of("adamw") == 8 * EIGHT_PARAMETERS
    assert of("muon") == 8 * (embeddings + gains) + 4 * (EIGHT_PARAMETERS - embeddings - gains)
    assert of("adamw_8bit") == pytest.approx(2 * (1 + 4 / 256) * EIGHT_PARAMETERS, rel=1e-4)


def test_the_estimate_of_memory_knows_the_teacher(tmp_path: Path) -> None:
    student, teacher = eight_billion(tmp_path / "student"), tmp_path / "teacher"
    make_tiny_model(teacher, (), warm_start_steps=0)
    shapes, parameters = shapes_in(student), parameters_in(teacher)

    def bytes_with(dtype: str) -> int:
        tables = {
            "trainer": {"device": "cpu"},
            "loss": {"name": "distillation"},
            "scores": {"teacher": {"weights": str(teacher), "dtype": dtype}},
        }
        config, host = built([tables])
        (trainer, *_) = certain_parts(config, host, str(student), shapes, [])
        return {part.name: part.nbytes for part in trainer.parts}["scoring models"]

    assert bytes_with("auto") == 4 * parameters
    assert bytes_with("bfloat16") == 2 * parameters
