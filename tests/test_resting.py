"""Between two steps, a trainer's weights and state leave their device, and nothing else changes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from adapting import with_lora
from test_trainer import batch, ragged, same, save, setup

from grpo_core.config import OptimizerConfig, build
from grpo_core.contracts.errors import ConfigError
from grpo_core.demo import tiny
from grpo_core.plugins.host import PluginHost
from grpo_core.weights.reading import read_weights
from grpo_plugin_scale.config import check
from grpo_plugin_scale.lora import LoraConfig
from grpo_plugin_scale.training.resting import Resting
from grpo_plugin_scale.training.trainer import ScaledTrainer, create


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=64, layers=2, warm_start_steps=0)
    return str(directory)


def held(trainer: ScaledTrainer) -> int:
    """The bytes behind the trainer's weights and the optimizers' state."""
    tensors = [*trainer.model.weights(), *trainer.optimizers.tensors()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def made(given: Any) -> ScaledTrainer:
    """A trainer whose weights are in memory, as on a GPU, and not in a file that is mapped."""
    trainer = ScaledTrainer(given)
    for tensor in trainer.model.weights():
        tensor.data = tensor.data.clone()
    return trainer


def configured(model: str, kind: str, **given: Any) -> Any:
    chosen = setup(model, loss={"kl": {"coefficient": 0.1}}, **given)
    if kind == "adapters":
        lora = LoraConfig(rank=8, publish="merged")
        return with_lora(chosen, lora)
    return attrs.evolve(chosen, optimizer=OptimizerConfig(name=kind))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        *("adamw", "adamw_8bit", "muon", "adapters"),
        pytest.param(
            "adamw_torchao", marks=pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")
        ),
    ],
)
def test_a_trainer_that_rests_between_steps_gives_nearly_all_back_and_trains_the_same(
    model: str, tmp_path: Path, kind: str
) -> None:
    straight, resting = (made(configured(model, kind, offload=on)) for on in (False, True))
    for step in range(2):
        for trainer in (straight, resting):
            trainer.step(batch(ragged(seed=step), step))
            trainer.publish()
        assert held(resting) <= 0.1 * held(straight)
    save(resting, tmp_path)
    assert held(resting) <= 0.1 * held(straight)  # the checkpoint is of the copies
    assert same(straight, resting)
    continued = ScaledTrainer(configured(model, kind, resume_from=tmp_path))
    for trainer in (straight, resting, continued):
        trainer.step(batch(ragged(seed=2), 2))
    assert same(straight, resting)
    assert same(straight, continued)


def test_what_was_published_is_complete_while_the_trainer_rests(model: str) -> None:
    straight, resting = (made(setup(model, offload=on)) for on in (False, True))
    mine, theirs = read_weights(straight.publish()), read_weights(resting.publish())
    assert held(resting) < held(straight)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])


def test_views_and_tied_tensors_survive_a_rest() -> None:
    whole = torch.arange(4096.0)
    part, small = whole[1024:2048].view(2, 512), torch.ones(3)
    resting = Resting()
    assert resting.leave([whole, part, small]) == whole.nbytes
    assert whole.untyped_storage().nbytes() == 0
    assert torch.equal(resting.readable(part), torch.arange(1024.0, 2048.0).view(2, 512))
    assert resting.readable(small) is small
    resting.come_back()
    assert torch.equal(part, torch.arange(1024.0, 2048.0).view(2, 512))
    whole += 1  # a second rest has the new numbers
    resting.leave([whole])
    resting.come_back()
    assert torch.equal(part[0], torch.arange(1025.0, 1537.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": {"max_staleness": 1}}, r"pipeline\.max_staleness = 1 both work at once: set it to 0"),
        ({"trainer": {"offload": True, "ranks": 2}}, r"the weights of trainer\.ranks = 2 stay"),
        ({"trainer": {"offload": True, "device": "cpu"}}, r'trainer\.device = "cpu" has them already'),
    ],
)
def test_a_run_in_which_nothing_could_rest_is_refused_before_it_starts(
    changes: dict[str, Any], message: str
) -> None:
    base = {"tasks": {"sort": {"env": "math:sort"}}, "trainer": {"offload": True}}
    host = PluginHost.discover()
    config = build([base, {"pipeline": {"max_staleness": 0}}, changes], host.sections)
    with pytest.raises(ConfigError, match=message):
        check(config=config, host=host)


def test_a_trainer_on_a_cpu_has_nowhere_to_rest(model: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload .*on a CPU.*leave it out"):
        create(setup(model, offload=True, device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_trainer_that_rests_has_given_its_memory_to_the_gpu(model: str) -> None:
    trainer = ScaledTrainer(setup(model, offload=True, device="cuda"))
    trainer.step(batch(ragged()))
    before = torch.cuda.memory_allocated()
    nbytes = held(trainer)
    trainer.publish()
    assert torch.cuda.memory_allocated() <= before - 0.9 * nbytes
    assert torch.cuda.memory_reserved() <= torch.cuda.memory_allocated() + (4 << 20)
    trainer.step(batch(ragged(seed=1), 1))
