"""The trainer and the engine `local` never mix tensors of a GPU and of the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import flash
import pytest
import torch
import transformers
from adapting import with_lora
from separate_gpu import GPU, MixedError, on_a_gpu
from test_engine_local import logprobs_by, mixed_requests, run, tensors
from test_trainer import batch, copied, ragged, setup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from grpo_core.config.run import TrainerSetup
from grpo_core.demo import tiny
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.training import model as models
from grpo_core.training.passes import Passes
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.reading import read_weights
from grpo_plugin_devkit.decoding import make_test_model
from grpo_plugin_doctor.activations import Pass
from grpo_plugin_scale.lora import LoraConfig

pytest.importorskip("peft")  # looks for a GPU when it is imported
CPU = torch.device("cpu")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return str(directory)


def trained(given: TrainerSetup, directory: Path) -> dict[str, torch.Tensor]:
    """Train, publish, save, and train on from the checkpoint."""
    trainer = TorchTrainer(given)
    for step in range(2):
        trainer.step(batch(ragged(seed=step), step))
    trainer.publish([(5, 6)])
    trainer.save(directory)
    trainer.written().result()
    resumed = TorchTrainer(attrs.evolve(given, resume_from=str(directory)))
    resumed.step(batch(ragged(seed=2), 2))
    return {name: tensor.clone() for name, tensor in read_weights(resumed.publish()).items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "lora", "options"),
    [
        (
            "float32",
            None,
            {"loss": {"kl": {"coefficient": 0.1}}, "reference": copied(1), "updates_per_step": 2},
        ),
        ("bfloat16", None, {"packing": False}),
        ("bfloat16", None, {"packing": True}),
        ("float32", LoraConfig(rank=2, publish="merged"), {"offload": True}),
    ],
    ids=["reference", "rounded", "packing", "adapters and rest"],
)
@on_a_gpu
def test_a_trainer_on_a_gpu_leaves_no_tensor_behind(
    model: str, tmp_path: Path, dtype: str, lora: LoraConfig | None, options: dict[str, Any]
) -> None:
    """The weights are those of a CPU."""
    given = setup(model, **{"packing": False, "lr": 1e-4, **options})
    given = with_lora(attrs.evolve(given, model=attrs.evolve(given.model, dtype=dtype)), lora)
    expected = trained(given, tmp_path / "here")
    with flash.on_a_cpu():
        found = trained(attrs.evolve(given, trainer=attrs.evolve(given.trainer, device=GPU)), tmp_path / GPU)
    rtol, atol = (0.02, 2e-3) if dtype == "bfloat16" else (1e-5, 1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol)


@flash.needs_grouped_heads
@on_a_gpu
def test_a_trainer_on_a_gpu_packs_rows_by_calls_of_flash_attention(tmp_path: Path) -> None:
    """The heads have the size that its kernels take."""
    tiny.make_tiny_model(tmp_path / "m", (), width=32, layers=2, warm_start_steps=0)
    given = setup(str(tmp_path / "m"), device=GPU, packing=True)
    with flash.on_a_cpu() as calls:
        trained(attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16")), tmp_path / "saved")
    assert {*calls} == {"forward", "backward"}


@on_a_gpu
def test_the_engine_local_on_a_gpu_leaves_no_tensor_behind(tmp_path: Path) -> None:
    hf = models.load(make_test_model(tmp_path), device=CPU)
    given, requests = tensors(hf), mixed_requests(30)
    shape = Shape.of(json.loads(hf.config.to_json_string()))
    assert shape is not None
    decoder = Decoder(Llama(shape, device=torch.device(GPU), dtype=torch.float32), max_rows=12)
    decoder.load([given], 0)
    completions = run(decoder, requests, at_once=5)
    for request, completion in zip(requests, completions, strict=True):
        assert (logprobs_by(hf, request, completion) - torch.tensor(completion.logprobs)).abs().max() <= 1e-4


@on_a_gpu
def test_a_tensor_that_was_left_on_the_host_is_named() -> None:
    """In a backward pass as well."""
    here, far = torch.ones(3), torch.ones(3, device=GPU, requires_grad=True)
    assert (far + far).tolist() == [2.0] * 3
    with pytest.raises(MixedError, match=r"a tensor \[3\] is on the host"):
        torch.add(far, here)

    class Left(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.ones(3)

    with pytest.raises(MixedError, match=r"a tensor \[3\] is on the host"):
        Left.apply(far).sum().backward()


# Qwen3-4B with two layers
LARGE = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@on_a_gpu
def test_a_pass_of_a_large_model_leaves_no_tensor_behind() -> None:
    """torch's fake tensors have a device and no values."""
    with _disable_current_modes(), FakeTensorMode():
        with torch.device(GPU):
            module = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LARGE))
            micro = Pass(rows=2, tokens=2048, sampled=1024, dtype="bfloat16").microbatch()
        module = models.for_training(module, Passes(activations="recompute"))
        policy = models.Scorer(module, torch.bfloat16, plain_head=True)
        for _ in range(2):
            logprobs, _ = policy.score(micro, 1.0)
            logprobs.sum().backward()
        with pytest.raises(RuntimeError, match=r"two (different )?devices"):
            policy.score(attrs.evolve(micro, targets=torch.zeros(2048, dtype=torch.int64)), 1.0)
    assert sum(parameter.nbytes for parameter in module.parameters()) > 2 << 30
    assert {str(parameter.grad.device) for parameter in module.parameters()} == {"gpu:0"}
