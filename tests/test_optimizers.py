"""Optimizers and groups of parameters: what is trained, with which learning rate, and how it continues."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer import batch, ragged, row, same, save, weights
from test_trainer import setup as plain_setup

from grpo_core.app.make import make
from grpo_core.config import OptimizerConfig, ParameterGroupConfig, build
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import CheckpointError, ConfigError, PluginError
from grpo_core.demo import tiny
from grpo_core.loop.schedule import schedule
from grpo_core.plugins.host import PluginHost
from grpo_core.training.microbatch import collate
from grpo_core.training.optimization import divided, flat
from grpo_core.training.optimizers import state_of
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_doctor.memory import state_bytes

NAMES = ("adamw", "adamw_8bit", "muon")
TORCHAO = pytest.param(
    OptimizerConfig(name="adamw_torchao"),
    marks=pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao: pip install torchao"),
    id="adamw_torchao",
)
CHOICES = [
    *(pytest.param(OptimizerConfig(name=name), id=name) for name in NAMES),
    TORCHAO,
]
"""Each optimizer as it is, and with another state."""
each = pytest.mark.parametrize("chosen", CHOICES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model some of whose matrices have the 4,096 numbers from which states have 8 bits."""
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=64, layers=1, warm_start_steps=0)
    return str(directory)


def group(*patterns: str, **chosen: Any) -> ParameterGroupConfig:
    return ParameterGroupConfig(parameters=list(patterns), **chosen)


def setup(model: str, optimizer: OptimizerConfig, **given: Any) -> TrainerSetup:
    return attrs.evolve(plain_setup(model, **given), optimizer=optimizer)


def train_beside(
    trainer: TorchTrainer, twins: Mapping[str, torch.Tensor], stepped: Callable[[], None]
) -> None:
    """Train three steps; the twins get the gradients of each update, and ``stepped`` is their update."""
    step = trainer.optimizers.step

    def both(factor: float) -> None:
        for name, parameter in trainer._named:
            assert parameter.grad is not None
            twins[name].grad = parameter.grad.clone()
        step(factor)
        stepped()

    trainer.optimizers.step = both  # type: ignore[method-assign]
    for number in range(3):
        trainer.step(batch(ragged(seed=number), number))


def options_of(trainer: TorchTrainer) -> list[dict[str, Any]]:
    return [group for each in trainer.optimizers._optimizers for group in each.param_groups]


# ---------------------------------------------------------------------------------- each optimizer


@pytest.mark.long
@each
def test_each_optimizer_makes_good_tokens_likelier(model: str, chosen: OptimizerConfig) -> None:
    trainer = TorchTrainer(setup(model, chosen, lr=3e-3))
    rows = [row("ab", "cd", 1.0), row("ab", "xy", -1.0)]
    good = collate(rows[:1], torch.device("cpu"))

    @torch.no_grad()
    def likelihood() -> float:
        return float(trainer.model.score(good, 1.0)[0].sum())

    before = likelihood()
    for step in range(3):
        trainer.step(batch(rows, step))
    assert likelihood() > before + 0.1


@pytest.mark.long
@each
def test_resumed_training_is_the_same_bit_for_bit_with_each_optimizer(
    model: str, tmp_path: Path, chosen: OptimizerConfig
) -> None:
    optimizer = attrs.evolve(
        chosen,
        groups={"embeddings": group("*embed*", lr=1e-4), "norms": group("*norm*", weight_decay=0.1)},
    )
    given: dict[str, Any] = {"weight_decay": 0.02, "lr_schedule": "cosine", "updates_per_step": 2}

    def train(trainer: TorchTrainer, steps: range) -> None:
        for step in steps:
            trainer.step(batch(ragged(seed=step), step))

    straight, first = (TorchTrainer(setup(model, optimizer, **given)) for _ in range(2))
    train(straight, range(6))
    train(first, range(3))
    save(first, tmp_path)
    resumed = TorchTrainer(setup(model, optimizer, resume_from=tmp_path, **given))
    train(resumed, range(3, 6))
    assert same(straight, resumed)
    assert not same(straight, first)


@pytest.mark.long
@each
def test_an_optimizer_keeps_what_it_says_that_it_keeps(model: str, chosen: OptimizerConfig) -> None:
    trainer = TorchTrainer(setup(model, chosen))
    trainer.step(batch(ragged()))
    make = trainer.optimizers._make
    nbytes, tables = 0, set()
    for parameter_name, parameter in trainer._named:
        state = flat(trainer.optimizers.state(parameter))
        kept = {
            slot: (tuple(v.shape), str(v.dtype)[6:]) if isinstance(v, torch.Tensor) else ((), "int")
            for slot, v in state.items()
        }
        assert kept == state_of(make.selected, chosen.options, parameter_name, parameter.shape)
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        nbytes += sum(value.nbytes for value in tensors if value.dim())
        tables |= {shape for shape, dtype in kept.values() if dtype == "uint8"}
    shapes = {parameter_name: tuple(parameter.shape) for parameter_name, parameter in trainer._named}
    assert state_bytes(make.selected, chosen.options, shapes) == nbytes
    assert bool(tables) == (chosen.name in ("adamw_8bit", "adamw_torchao"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
def test_on_a_gpu_each_optimizer_trains_and_continues_with_its_state(
    model: str, tmp_path: Path, chosen: OptimizerConfig
) -> None:
    """The state is the same bit for bit; kernels of a GPU add gradients in any order."""
    if chosen.name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    trainer = TorchTrainer(setup(model, chosen, device="cuda"))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    resumed = TorchTrainer(setup(model, chosen, device="cuda", resume_from=tmp_path))
    for (_, mine), (_, theirs) in zip(trainer._named, resumed._named, strict=True):
        state, other = trainer.optimizers.state(mine), resumed.optimizers.state(theirs)
        assert state.keys() == other.keys()
        for slot, value in state.items():
            same_slot = (
                torch.equal(value, other[slot]) if isinstance(value, torch.Tensor) else value == other[slot]
            )
            assert same_slot, slot
    for each in (trainer, resumed):
        each.step(batch(ragged(seed=1), 1))
    for key, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, weights(resumed)[key], rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("chosen", [TORCHAO])
def test_moments_of_torchao_are_nearly_those_of_torch(model: str, chosen: OptimizerConfig) -> None:
    trainer = TorchTrainer(setup(model, chosen, weight_decay=0.1))
    twins = {name: parameter.detach().clone() for name, parameter in trainer._named}
    matrices = [tensor for tensor in twins.values() if tensor.dim() > 1]
    others = [tensor for tensor in twins.values() if tensor.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=trainer._config.betas)
    train_beside(trainer, twins, reference.step)
    for name, parameter in trainer._named:
        of_8_bits = parameter.numel() >= 4096 and parameter.numel() % 256 == 0
        tolerance = 1e-3 if of_8_bits else 1e-6  # a third of the way that three updates go
        torch.testing.assert_close(parameter.detach(), twins[name], rtol=0, atol=tolerance)
        moment = trainer.optimizers.state(parameter)["exp_avg"]
        assert (moment.__class__.__name__ == "OptimState8bit") == of_8_bits


def test_muon_trains_hidden_matrices_and_adamw_the_rest_as_torch_does(model: str) -> None:
    trainer = TorchTrainer(
        setup(model, OptimizerConfig(name="muon", options={"momentum": 0.9}), lr=1e-2, weight_decay=0.1)
    )
    twins = {name: parameter.detach().clone().requires_grad_() for name, parameter in trainer._named}
    hidden = {name: twin for name, twin in twins.items() if twin.dim() == 2 and "embed" not in name}
    assert {name.rsplit(".", 2)[-2] for name in hidden} >= {"q_proj", "o_proj", "up_proj", "down_proj"}
    norms = [twin for twin in twins.values() if twin.dim() == 1]
    embedding = [twin for name, twin in twins.items() if "embed" in name]
    muon = torch.optim.Muon(
        hidden.values(), lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [{"params": embedding, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip

    def stepped() -> None:
        muon.step()
        adamw.step()

    train_beside(trainer, twins, stepped)
    for name, parameter in trainer._named:
        torch.testing.assert_close(parameter, twins[name], rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_matrices_that_adamw_is_to_train_are_not_muons(model: str) -> None:
    chosen = OptimizerConfig(name="muon", options={"adamw": ["*embed*", "*q_proj*"]})
    trainer = TorchTrainer(setup(model, chosen))
    trainer.step(batch(ragged()))
    slots = {name: set(trainer.optimizers.state(parameter)) for name, parameter in trainer._named}
    assert {kind for name, kind in ((n, frozenset(s)) for n, s in slots.items()) if "q_proj" in name} == {
        frozenset({"step", "exp_avg", "exp_avg_sq"})
    }
    assert all(slots[name] == {"momentum_buffer"} for name in slots if "k_proj" in name)


# ---------------------------------------------------------------------------------- groups


def divisions(model: str, optimizer: OptimizerConfig, **trainer: Any) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter."""
    given = setup(model, optimizer, **trainer)
    named = TorchTrainer(given)._named
    parts = divided(named, optimizer, given.trainer)
    assert sum(len(part.parameters) for part in parts) == len(named)
    return {name: (part.lr, part.weight_decay) for part in parts for name in part.parameters}


def test_weight_decay_acts_on_matrices_unless_all_parameters_have_it(model: str) -> None:
    found = divisions(model, OptimizerConfig(), weight_decay=0.1)
    assert {decay for name, (_, decay) in found.items() if "norm" in name} == {0.0}
    assert {decay for name, (_, decay) in found.items() if "norm" not in name} == {0.1}
    found = divisions(model, OptimizerConfig(decay="all"), weight_decay=0.1)
    assert {decay for _, decay in found.values()} == {0.1}


def test_a_group_has_its_own_learning_rate_and_weight_decay_and_the_first_that_fits_wins(model: str) -> None:
    chosen = OptimizerConfig(
        groups={
            "attention": group("*q_proj*", "*k_proj*", lr=5e-4),
            "layers": group("model.layers.*", weight_decay=0.3),
        }
    )
    found = divisions(model, chosen, lr=1e-3, weight_decay=0.1)
    layer = "model.layers.0."
    assert found[f"{layer}self_attn.q_proj.weight"] == (5e-4, 0.1)
    assert found[f"{layer}mlp.up_proj.weight"] == (1e-3, 0.3)
    assert found[f"{layer}input_layernorm.weight"] == (1e-3, 0.3)  # its own decay is for all of the group
    assert found["model.norm.weight"] == (1e-3, 0.0)
    assert found["model.embed_tokens.weight"] == (1e-3, 0.1)


def test_the_schedule_scales_the_learning_rate_of_every_group(model: str) -> None:
    chosen = OptimizerConfig(name="muon", groups={"embeddings": group("*embed*", lr=4e-3)})
    given = setup(model, chosen, lr=1e-3, steps=4, lr_schedule="linear", warmup_updates=1)
    trainer = TorchTrainer(given)
    factors = [schedule(given.trainer, update) for update in range(4)]
    assert len(set(factors)) == 4
    for step, factor in enumerate(factors):
        metrics = trainer.step(batch(ragged(), step)).metrics
        assert metrics["lr"] == pytest.approx(1e-3 * factor)
        assert {g["lr"] for g in options_of(trainer)} == {1e-3 * factor, 4e-3 * factor}


@pytest.mark.long
def test_parameters_whose_learning_rate_is_0_stay_as_they_are(model: str) -> None:
    chosen = OptimizerConfig(groups={"frozen": group("*embed*", "*norm*", lr=0.0)})
    trainer = TorchTrainer(setup(model, chosen, weight_decay=0.1))
    before = weights(trainer)
    trainer.step(batch(ragged()))
    after = weights(trainer)
    still = {name for name in after if torch.equal(before[name], after[name])}
    assert still == {name for name in after if "embed" in name or "norm" in name}


@pytest.mark.parametrize(
    "groups",
    [{"typo": group("*embedding*")}, {"all": group("*"), "late": group("*norm*", lr=0.1)}],
    ids=["fits nothing", "comes too late"],
)
def test_a_group_without_parameters_is_refused_with_the_names_that_there_are(
    model: str, groups: Mapping[str, ParameterGroupConfig]
) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups.(typo|late): no parameter fits .*embed_tokens"):
        TorchTrainer(setup(model, OptimizerConfig(groups=dict(groups))))


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.long
def test_the_state_of_another_optimizer_is_refused(model: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(setup(model, OptimizerConfig()))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    with pytest.raises(CheckpointError, match="it belongs to 'adamw', not to 'muon'"):
        TorchTrainer(setup(model, OptimizerConfig(name="muon"), resume_from=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_a_state_of_another_shape_is_refused_for_each_optimizer(
    model: str, tmp_path: Path, name: str
) -> None:
    chosen = OptimizerConfig(name=name)
    trainer = TorchTrainer(setup(model, chosen))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    file = tmp_path / "optimizer" / "state.safetensors"
    state = load_file(file)
    key = next(k for k, v in state.items() if k.endswith(("absmax1", "momentum_buffer")))
    save_file({**state, key: torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"has .*\[3\] float32.*expected"):
        TorchTrainer(setup(model, chosen, resume_from=tmp_path))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "adamm"}, "there is no optimizer 'adamm'.*adamw"),
        ({"name": "muon", "options": {"momentun": 0.9}}, "no option 'momentun'.*momentum"),
        ({"name": "muon", "options": {"lr_scale": "rms"}}, "lr_scale.*match_rms_adamw"),
        ({"name": "muon", "options": {"momentum": 1.5}}, "momentum is 1.5"),
        ({"options": {"eps": -1.0}}, "eps is -1.0"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_before_anything_starts(
    chosen: dict[str, Any], message: str
) -> None:
    config = build([{"tasks": {"sort": {"env": "math:sort"}}, "optimizer": chosen}])
    with pytest.raises(PluginError, match=message):
        make(config, PluginHost.discover())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"groups": {"a": {"lr": 1e-3}}}, "'optimizer.groups.a.parameters' is missing"),
        ({"groups": {"a": {"parameters": []}}}, "Length of 'parameters' must be >= 1"),
        ({"groups": {"a": {"parameters": ["*"], "lr": -1.0}}}, "optimizer.groups.*'lr' must be >= 0"),
        ({"groups": {"a": {"parameters": ["*"], "wd": 1.0}}}, "unknown configuration key .*a.wd"),
    ],
)  # fmt: skip
def test_a_group_is_checked_when_the_configuration_is_read(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build([{"optimizer": table}])


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("adamw_8bit", "bitsandbytes", "optimizers"), ("adamw_torchao", "torchao", "torchao")],
)
def test_an_optimizer_that_is_not_installed_names_the_command_that_installs_it(
    name: str, package: str, extra: str
) -> None:
    code = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name == '{package}' else find(name, *rest)\n"
        "from grpo_core.plugins.host import PluginHost\n"
        f"PluginHost.discover(['algorithms']).check_options('optimizer', '{name}', {{}})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"{package} is not installed: pip install 'grpo-core[{extra}]'" in done.stderr


# ---------------------------------------------------------------------------------- a plugin's


PLUGIN = """
import torch

def sgd(groups, *, momentum: float = 0.9):
    parts = [{"params": list(g.parameters.values()), "lr": g.lr} for g in groups]
    return torch.optim.SGD(parts, momentum=momentum)

def half(groups):
    return torch.optim.SGD(list(groups[0].parameters.values()), lr=groups[0].lr)
"""


@pytest.mark.long
def test_the_optimizer_of_a_plugin_trains_and_continues(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    chosen = OptimizerConfig(name=f"{tmp_path}/own.py:sgd", options={"momentum": 0.5})
    trainer = TorchTrainer(setup(model, chosen, lr=0.1))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path / "saved")
    resumed = TorchTrainer(setup(model, chosen, lr=0.1, resume_from=tmp_path / "saved"))
    for each in (trainer, resumed):
        each.step(batch(ragged(seed=1), 1))
    assert same(trainer, resumed)
    with pytest.raises(PluginError, match=r"train .* parameters once each"):
        TorchTrainer(setup(model, OptimizerConfig(name=f"{tmp_path}/own.py:half"), weight_decay=0.1))
