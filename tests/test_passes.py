"""Layers that are compiled, and activations that leave a GPU."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from adapting import with_lora
from test_trainer import batch, ragged, setup, weights

from grpo_core.app.make import make
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError, ModelError
from grpo_core.demo import tiny
from grpo_core.plugins.host import PluginHost
from grpo_core.training.passes import Passes, for_training
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_scale.lora import LoraConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return str(directory)


def trained(given: object, steps: int = 3) -> dict[str, torch.Tensor]:
    trainer = TorchTrainer(given)  # type: ignore[arg-type]
    for step in range(steps):
        trainer.step(batch(ragged(seed=step), step))
    return weights(trainer)


def test_inputs_of_layers_that_wait_elsewhere_give_the_same_gradients(model: str) -> None:
    """The input of each layer leaves, and comes back for the backward pass, as from a GPU."""
    left: list[tuple[int, ...]] = []

    def leave(tensor: torch.Tensor) -> tuple[object, torch.dtype]:
        left.append(tuple(tensor.shape))
        return tensor.detach().clone().numpy(), tensor.dtype

    def come_back(kept: tuple[Any, torch.dtype]) -> torch.Tensor:
        return torch.from_numpy(kept[0]).to(kept[1])

    found = []
    for activations in ("keep", "offload"):
        trainer = TorchTrainer(setup(model, activations=activations))
        if activations == "offload":
            hooks: Any = torch.autograd.graph.saved_tensors_hooks
            trainer.model.policy._around = partial(hooks, leave, come_back)  # type: ignore[attr-defined]
        trainer.step(batch(ragged()))
        found.append(weights(trainer))
    assert sum(len(shape) == 3 and shape[2] == 16 for shape in left) >= 2  # the model has two layers
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])


@pytest.mark.parametrize("family", ["Mixtral", "Phimoe"])
def test_layers_that_are_computed_again_choose_the_experts_that_the_engine_chooses(family: str) -> None:
    """In training mode Mixtral's experts are chosen from inputs with noise, and Phi's are drawn."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(router_jitter_noise=0.5, **sizes)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    kept, again = (
        for_training(copy.deepcopy(made), Passes(activations=choice)) for choice in ("keep", "recompute")
    )
    calls = []
    for layer in Passes.layers_of(again):
        # transformers 5.24 calls a layer's own hooks once: they stay outside of what is computed again
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.arange(32)[None]
    for _ in range(2):
        calls.clear()
        found, expected = (model(input_ids=ids, use_cache=False).logits for model in (again, kept))
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert len(calls) == 4, "each of the two layers is computed twice"
    for mine, theirs in zip(again.parameters(), kept.parameters(), strict=True):
        assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def test_what_waits_leaves_a_gpu_and_no_cpu() -> None:
    offload = Passes(activations="offload")
    assert isinstance(offload.around(torch.device("cuda"))(), torch.autograd.graph.save_on_cpu)
    assert isinstance(offload.around(torch.device("cpu"))(), nullcontext)
    assert isinstance(Passes().around(torch.device("cuda"))(), nullcontext)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it to compile
@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param(False, id="all weights"),
        pytest.param(True, id="adapters", marks=pytest.mark.nightly),
    ],
)
def test_compiled_layers_train_the_weights_of_plain_layers(model: str, adapters: bool) -> None:
    """Rows of several lengths, a reference without a gradient, and layers that are computed again."""
    given = setup(model, loss={"kl": {"coefficient": 0.1}}, activations="recompute")
    if adapters:
        lora = LoraConfig(rank=4, dropout=0.0, publish="merged")
        given = with_lora(given, lora)
    compiled = attrs.evolve(given, trainer=attrs.evolve(given.trainer, compile=True))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    mine, theirs = trained(given), trained(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it to compile
def test_compiled_layers_train_packed_rows_as_plain_layers_do(model: str) -> None:
    """Each micro-batch has parts of other lengths, for which no layer is compiled again."""
    given = setup(model, packing=True)
    compiled = attrs.evolve(given, trainer=attrs.evolve(given.trainer, compile=True))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    theirs = trained(compiled, steps=4)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 8
    assert not torch._dynamo.utils.counters["recompile_limit"]
    mine = trained(given, steps=4)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


def test_a_model_that_does_not_name_its_layers_is_not_compiled() -> None:
    small = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    unnamed = transformers.LlamaForCausalLM(small)
    unnamed._no_split_modules = None
    with pytest.raises(ModelError, match="LlamaForCausalLM does not say which modules are its layers"):
        for_training(unnamed, Passes(compiled=True))


def test_several_ranks_with_compiled_layers_are_refused_before_anything_starts() -> None:
    host = PluginHost.discover()
    table = {"tasks": {"sort": {"env": "math:sort"}}, "trainer": {"ranks": 2, "compile": True}}
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 2: trainer\.compile = true is for one process"):
        make(build([table], host.sections), host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_each_way_to_treat_activations_takes_less_memory_than_the_one_before(
    tmp_path: Path, model: str
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=98, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    peaks = []
    for activations in ("keep", "recompute", "offload"):
        given = setup(str(tmp_path), device="cuda", activations=activations, tokens_per_microbatch=65536)
        trainer = TorchTrainer(given)
        torch.cuda.reset_peak_memory_stats()
        peaks.append(trainer.step(batch(ragged(groups=512, size=4))).metrics["memory_gpu/trainer"])
        del trainer
        gc.collect()
    assert peaks[0] > peaks[1] > peaks[2]
