"""The contracts of trainers and optimizers, kept and broken, and what other parts keep."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from attrs import evolve
from documents import ROOT
from file_plane import FilePlane
from parts_kept import check_data_plane, check_model_source, check_placement

import grpo_core as grpo
from grpo_core.app.placement import LocalPlacement
from grpo_core.cli import make_app
from grpo_core.contracts.errors import PluginError
from grpo_core.demo.source import TinyModel
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.planes import MemoryPlane
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_devkit.optimizers import check_optimizer
from grpo_plugin_devkit.trainers import TrainerContract

# ---------------------------------------------------------------------------------- trainers


class InProcess(grpo.Trainer):
    """The built-in trainer, in this process."""

    def __init__(self, setup):
        self.setup = setup

    async def started(self):
        self.inner = TorchTrainer(self.setup)

    async def step(self, batch):
        return self.inner.step(batch)

    async def publish(self, canary=()):
        return self.inner.publish(canary)

    async def save(self, directory):
        self.inner.save(directory)
        return partial(asyncio.to_thread, self.inner.written().result)


class MakesNoModel(InProcess):
    async def started(self):
        return None


class AnotherModel(InProcess):
    async def started(self):
        await super().started()
        with torch.no_grad():
            next(parameter for _, parameter in self.inner.model.trainable()).add_(1)


class WrongCanary(InProcess):
    async def publish(self, canary=()):
        weights = await super().publish(canary)
        shifted = [evolve(c, logprobs=[v - 1 for v in c.logprobs]) for c in weights.canary]
        return evolve(weights, canary=tuple(shifted))


class FirstCanary(InProcess):
    """It says of a prompt what it said first."""

    def __init__(self, setup):
        super().__init__(setup)
        self.said = {}

    async def publish(self, canary=()):
        weights = await super().publish(canary)
        first = [self.said.setdefault(each.prompt_ids, each) for each in weights.canary]
        return evolve(weights, canary=tuple(first))


class Backwards(InProcess):
    async def step(self, batch):
        return await super().step(
            evolve(batch, rows=tuple(evolve(row, advantage=-row.advantage) for row in batch.rows))
        )


class SameVersion(InProcess):
    async def step(self, batch):
        return evolve(await super().step(batch), version=batch.step)


class StepsWithoutRows(InProcess):
    """Its weights decay although there is nothing to train."""

    async def step(self, batch):
        if not batch.rows:
            with torch.no_grad():
                next(parameter for _, parameter in self.inner.model.trainable()).mul_(0.999)
        return await super().step(batch)


class SavesLate(InProcess):
    async def save(self, directory):
        async def written():
            self.inner.save(directory)
            self.inner.written().result()

        return written


class ForgetsTheOptimizer(InProcess):
    async def started(self):
        await super().started()
        if self.setup.resume_from:
            for each in self.inner.optimizers._optimizers:
                each.state.clear()


class ForgetsTheVersion(InProcess):
    async def publish(self, canary=()):
        weights = await super().publish(canary)
        return evolve(weights, version=0) if self.setup.resume_from else weights


class SeesItsDeath(InProcess):
    async def watch(self):
        raise grpo.errors.TrainerError("the trainer is dead")


def told(contract, outcome):
    """The names of the clauses with an outcome, with what they say."""
    return {
        found.check.replace(" ", "_"): found.result
        for found in contract.findings()
        if found.outcome == outcome
    }


def broken_trainer(trainer):
    with TrainerContract(trainer) as contract:
        return told(contract, "failed")


@pytest.mark.long
def test_the_built_in_trainer_keeps_the_contract():
    assert broken_trainer(InProcess) == {}


class WithoutCanary(InProcess):
    async def publish(self, canary=()):
        return await super().publish()


@pytest.mark.long
def test_of_a_trainer_without_a_canary_it_is_noted_that_nothing_was_compared():
    with TrainerContract(WithoutCanary) as contract:
        notes = told(contract, "noted")
    for clause in ("its_canary_is_what_its_weights_say", "its_canary_follows_its_weights"):
        assert notes.pop(clause) == "publish() returns none: no run can show that its engines use the weights"
    assert not notes


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "clause", "told"),
    [
        (MakesNoModel, "it_starts_and_makes_the_model", "it calls setup.prepare, if there is one"),
        (AnotherModel, "it_publishes_the_model_that_it_started_with", "differs from the model"),
        (WrongCanary, "its_canary_is_what_its_weights_say", "the engine would be found at fault"),
        (FirstCanary, "its_canary_follows_its_weights", "the engine would be found at fault"),
        (Backwards, "a_step_makes_good_tokens_likelier_and_bad_ones_rarer", "expected more"),
        (SameVersion, "a_step_makes_good_tokens_likelier_and_bad_ones_rarer", "version 0, expected 1"),
        (StepsWithoutRows, "a_batch_without_rows_only_raises_the_version", "after a batch without rows"),
        (SavesLate, "what_it_saves_is_what_it_published_although_it_trains_on", "in the checkpoint"),
        (ForgetsTheOptimizer, "another_one_continues_exactly_from_what_was_saved", "after it continued"),
        (ForgetsTheVersion, "another_one_continues_exactly_from_what_was_saved", "continues with version 0"),
        (SeesItsDeath, "it_is_watched_as_long_as_it_lives", "the trainer is dead"),
    ],
)
def test_a_trainer_that_breaks_a_clause_is_found(trainer, clause, told):
    assert told in broken_trainer(trainer)[clause]


# ---------------------------------------------------------------------------------- optimizers


def sgd(groups):
    """Keeps the contract: no state, no momentum."""
    return torch.optim.SGD([group.for_torch() for group in groups])


def decoupled(groups, *, lr_of=None, skip=(), state=True, coupled=False, private_lr=False, random=False):
    """An optimizer with faults by option."""

    class Faulty(torch.optim.Optimizer):
        def __init__(self, given):
            super().__init__(given, {})
            self.lrs = [group["lr"] for group in self.param_groups]
            self.updates = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.updates += 1
            for group, lr in zip(self.param_groups, self.lrs, strict=True):
                rate = lr if private_lr else group["lr"]
                for parameter in group["params"]:
                    kept = self.state[parameter]
                    kept["momentum"] = 0.5 * kept.get("momentum", 0 * parameter) + parameter.grad
                    parameter.mul_(1 - rate * (0.5 if coupled else group["weight_decay"]))
                    speed = 1 if state else min(self.updates, 4)
                    noise = torch.rand(()) if random else 1
                    parameter.sub_(10 * rate * speed * noise * kept["momentum"])

    return Faulty([group.for_torch() for group in groups])


def half(groups):
    return torch.optim.SGD([group.for_torch() for group in groups[:1]], lr=1e-2)


def uphill(groups):
    return torch.optim.SGD([group.for_torch() for group in groups], maximize=True)


declares_nothing_that_it_keeps = grpo.OptimizerOffer(
    decoupled, state=lambda name, shape, **options: {"velocity": (shape, "float32")}
)


def built_in(name):
    return PluginHost.discover().find("optimizer", name).offer


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (built_in("adamw"), {}),
        (built_in("muon"), {}),
        pytest.param(
            built_in("adamw_torchao"),
            {},
            marks=pytest.mark.skipif(not find_spec("torchao"), reason="torchao"),
        ),
        (sgd, {}),
        (decoupled, {}),
    ],
)
def test_the_built_in_optimizers_keep_the_contract(function, options):
    check_optimizer(function, **options)


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (half, {}, "of 4 parameters once each"),
        (uphill, {}, "expected less"),
        (decoupled, {"private_lr": True}, "the schedule's factor is 0"),
        (decoupled, {"coupled": True}, "neither a gradient nor a weight decay"),
        (decoupled, {"random": True}, "two runs of the same updates"),
        (decoupled, {"state": False}, "continues from the saved state"),
        (declares_nothing_that_it_keeps, {}, "its state() declares"),
    ],
)
@pytest.mark.long
def test_an_optimizer_that_breaks_a_clause_is_found(function, options, told):
    with pytest.raises((AssertionError, PluginError)) as found:
        check_optimizer(function, **options)
    assert told in str(found.value)


# ---------------------------------------------------------------------------------- other parts


@pytest.mark.long
def test_the_source_of_the_core_makes_a_model_that_is_loaded(tmp_path):
    check_model_source(lambda: TinyModel(width=8, layers=1, warm_start_steps=1), tmp_path)


@pytest.mark.long
def test_the_source_of_the_page_makes_a_model_that_is_loaded(tmp_path):
    page = (ROOT / "docs/contracts/infrastructure.md").read_text()
    known: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], known)
    make_tiny_model(tmp_path / "shelf", (), width=16, layers=1, warm_start_steps=0)
    check_model_source(partial(known["Shelf"], name=str(tmp_path / "shelf")), tmp_path)


@pytest.mark.long
def test_the_plane_of_the_core_gives_what_was_put_there():
    check_data_plane(MemoryPlane(None))


@pytest.mark.long
def test_a_plane_of_files_gives_it_to_other_processes(tmp_path):
    check_data_plane(FilePlane(None, directory=str(tmp_path)))


@pytest.mark.long
def test_the_placement_of_the_core_starts_what_a_run_needs(tmp_path):
    check_placement(LocalPlacement(PluginHost.discover(allow=[])), tmp_path)


# ---------------------------------------------------------------------------------- the command


@pytest.mark.long
def test_the_command_checks_parts_by_name_and_shows_what_is_broken(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n"
        "def uphill(parameter_groups, *, faster: float = 1.0):\n"
        "    return torch.optim.SGD([{'params': list(g.parameters.values()), 'lr': g.lr} for g in "
        "parameter_groups], maximize=True)\n"
    )
    assert make_app()(["check", f"{file}:uphill"], result_action="return_value") == 1
    assert "FAILED  it lowers the loss: after 60 updates" in capsys.readouterr().out
    with pytest.raises(PluginError, match="has no option 'slower'"):
        make_app()(["check", f"{file}:uphill", "--set", "slower=1"], result_action="return_value")
