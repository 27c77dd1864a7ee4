"""No tensor of a GPU meets one of the host: the trainer and the engine `local` with a GPU of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import flash
import pytest
import separate_gpu
import torch
from adapting import with_lora
from separate_gpu import GPU, MixedError
from test_engine_local import logprobs_by, mixed_requests, run, tensors
from test_trainer import batch, ragged, setup

from grpo_core.demo import tiny
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.training import model as models
from grpo_core.training.setup import TrainerSetup
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.reading import read_weights
from grpo_plugin_devkit.decoding import make_test_model
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


@pytest.mark.parametrize(
    ("dtype", "lora", "options"),
    [
        ("float32", None, {"loss": {"kl_coefficient": 0.1}, "reference_every": 1, "updates_per_step": 2}),
        ("bfloat16", None, {"packing": True}),
        ("float32", LoraConfig(rank=2, publish="merged"), {"offload": True}),
    ],
    ids=["reference", "packing", "adapters and rest"],
)
def test_a_trainer_on_a_gpu_leaves_no_tensor_behind(
    model: str, tmp_path: Path, dtype: str, lora: LoraConfig | None, options: dict[str, Any]
) -> None:
    """The weights are those of a CPU, bit for bit: here both compute the same, if both pack or none."""
    found = []
    for device in ("cpu", "cuda"):
        given = setup(model, device=device, **{"packing": False, **options})
        given = with_lora(attrs.evolve(given, model=attrs.evolve(given.model, dtype=dtype)), lora)
        with pytest.MonkeyPatch.context() as patch:
            if device == "cuda":
                with separate_gpu.install(patch):
                    found.append(trained(given, tmp_path / device))
            else:
                found.append(trained(given, tmp_path / device))
    here, there = found
    assert all(torch.equal(there[name], tensor) for name, tensor in here.items())


def test_a_trainer_on_a_gpu_packs_rows_by_calls_of_flash_attention(tmp_path: Path) -> None:
    """The heads have the size that its kernels take."""
    tiny.make_tiny_model(tmp_path / "m", (), width=32, layers=2, warm_start_steps=0)
    found = []
    for device in ("cpu", "cuda"):
        given = setup(str(tmp_path / "m"), device=device, packing=True, lr=1e-4)
        given = attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16"))
        with pytest.MonkeyPatch.context() as patch, flash.on_a_cpu() as calls:
            if device == "cuda":
                machine = separate_gpu.install(patch)
                patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
                with machine:
                    found.append(trained(given, tmp_path / device))
            else:
                found.append(trained(given, tmp_path / device))
        assert {*calls} == ({"forward", "backward"} if device == "cuda" else set())
    here, there = found
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0.02, atol=2e-3)


def test_the_engine_local_on_a_gpu_leaves_no_tensor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = models.load(make_test_model(tmp_path), device=CPU)
    given, requests = tensors(hf), mixed_requests(30)
    shape = Shape.of(json.loads(hf.config.to_json_string()))
    assert shape is not None
    with separate_gpu.install(monkeypatch):
        decoder = Decoder(Llama(shape, device=GPU, dtype=torch.float32), max_rows=12)
        decoder.load([given], 0)
        completions = run(decoder, requests, at_once=5)
    for request, completion in zip(requests, completions, strict=True):
        assert (logprobs_by(hf, request, completion) - torch.tensor(completion.logprobs)).abs().max() <= 1e-4


def test_a_tensor_that_was_left_on_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with separate_gpu.install(monkeypatch):
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert (there + there).cpu().tolist() == [2.0] * 3
        with pytest.raises(MixedError, match=r"a tensor \[3\] is on the host"):
            torch.add(there, here)
