"""Fingerprints of a trainer: any changed bit changes them, and equal states have equal ones."""

from __future__ import annotations

import attrs
import pytest
import torch
from test_trainer import batch, model, ragged, setup  # noqa: F401 - a fixture

from grpo_core.training.digest import BLOCK, Digests
from grpo_core.training.ranks import Alone
from grpo_core.training.trainer import TorchTrainer


class Kept:
    """The state of an optimizer, as ``Optimization.saved`` returns it."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def saved(self):
        return dict(self.tensors), {"numbers": {"w/step": 3}, "twins": {}}


def digests(weights, state=None):
    return Digests(
        [(name, torch.nn.Parameter(value, requires_grad=False)) for name, value in weights.items()],
        Kept(**(state or {})),
        ranks=Alone(),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("size", [1, 3, 1000, 2 * BLOCK - 1, 5 * BLOCK + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_any_changed_bit_changes_the_fingerprint_and_names_the_tensor(size, dtype):
    torch.manual_seed(0)
    weights = {name: (torch.randn(size) * 9).to(dtype) for name in ("a", "b")}
    taken = digests(weights).current()
    assert digests(weights).current() == taken
    for place in {0, size // 2, size - 1}:
        changed = {name: value.clone() for name, value in weights.items()}
        changed["b"].view(torch.uint8)[place * changed["b"].itemsize] ^= 1
        other = digests(changed).current()
        assert (other.weights != taken.weights, other.optimizer) == (True, taken.optimizer)


def test_numbers_that_change_places_change_the_fingerprint():
    weights = {"a": torch.arange(6 * BLOCK, dtype=torch.float32)}
    swapped = weights["a"].clone()
    swapped[[2, 4 * BLOCK]] = swapped[[4 * BLOCK, 2]]
    assert digests({"a": swapped}).current().weights != digests(weights).current().weights


def test_names_are_sent_once_and_again_when_the_tensors_change():
    of = digests({"w": torch.zeros(3)})
    assert [of.current().names, of.current().names] == [("w",), ()]
    of._optimizers.tensors = {"w/moment": torch.zeros(3), "w/step": torch.tensor(1.0)}
    assert of.current().names == ("w", "w/moment")


@pytest.mark.long
def test_a_step_has_fingerprints_with_which_a_resumed_trainer_continues(model, tmp_path):  # noqa: F811
    whole = TorchTrainer(setup(model))
    first = whole.step(batch(ragged()))
    whole.save(tmp_path)
    whole.written().result()
    second = whole.step(batch(ragged(seed=1), step=1))
    resumed = TorchTrainer(setup(model, resume_from=tmp_path)).step(batch(ragged(seed=1), step=1))
    assert first.digest is not None
    assert attrs.evolve(resumed.digest, names=()) == attrs.evolve(second.digest, names=())
    assert first.digest.weights != second.digest.weights
    assert first.digest.optimizer != second.digest.optimizer
    assert TorchTrainer(setup(model, fingerprints=False)).step(batch(ragged())).digest is None
