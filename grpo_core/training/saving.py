"""Saves and restores a trainer's state: the model, the optimizers and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from torch import Tensor

from grpo_core.contracts.errors import CheckpointError, one_line
from grpo_core.losses.entropy import EntropyControl
from grpo_core.training.model import Model
from grpo_core.training.optimization import Optimization
from grpo_core.training.ranks import Ranks
from grpo_core.training.state_files import disk_errors, read_about, read_state, write_state

_MODEL = "model/"
"""Prefix of the names of the model's own tensors in a saved state."""
_KEPT = "kept/"
"""Prefix of the names of the tensors of other weights, which move."""
_RNG, _RNG_CUDA = "rng", "rng_cuda"
"""Names of the first rank's random states; other ranks append a slash and their number."""


class Checkpointer:
    """Saves everything that a trainer needs to continue, and restores it.

    A thread reads the tensors themselves while training continues: whoever changes them waits for
    ``settled``.  Those of a GPU are copied to the host first.

    Args:
        model: saved; a resumed trainer has loaded it already.
        optimizers: their state is saved and restored.
        ranks: each saves its part.
        device: of the trainer.
        entropy: the control of an entropy bonus, if the loss has one.
        readable: returns a readable tensor for a tensor that is elsewhere.
    """

    def __init__(
        self,
        model: Model,
        optimizers: Optimization,
        *,
        ranks: Ranks,
        device: torch.device,
        entropy: EntropyControl | None,
        readable: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._optimizers, self._ranks, self._device = model, optimizers, ranks, device
        self._entropy = entropy
        self._chosen = None if entropy is None else entropy.coefficient
        self._readable = readable
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def save(self, directory: Path, version: int) -> None:
        """Begin to write all that is needed to continue into ``directory``."""
        self.settled()
        model = {f"{_MODEL}{name}": tensor for name, tensor in self._model.saved().items()}
        state, about = self._optimizers.saved()
        state |= {f"{_KEPT}{name}": t for name, t in self._model.saved_kept().items()}
        mine = {**model, **self._ranks.dealt(state), **self._random()}
        state = {name: self._readable(t) for name, t in mine.items()}
        about["version"] = version
        if self._entropy is not None:
            about["entropy"] = [self._entropy.coefficient, self._entropy.entropy, self._chosen]
        self._written = self._thread.submit(self._write, directory, about, state)

    def _random(self) -> dict[str, Tensor]:
        """Return the states of this rank's random numbers: for dropout each rank draws for its own rows."""
        states = {self._own(_RNG): torch.get_rng_state()}
        if self._device.type == "cuda":
            states[self._own(_RNG_CUDA)] = torch.cuda.get_rng_state(self._device)
        return states

    def _restore_random(self, states: Mapping[str, Tensor], ranks: int) -> None:
        """Continue with this rank's random numbers, or with the first rank's if other ranks saved."""
        own = self._own if ranks == self._ranks.size else str
        if _RNG in states:
            torch.set_rng_state(states.get(own(_RNG), states[_RNG]))
        if _RNG_CUDA in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states.get(own(_RNG_CUDA), states[_RNG_CUDA]), self._device)

    def _own(self, name: str) -> str:
        return f"{name}/{self._ranks.rank}" if self._ranks.rank else name

    def written(self) -> Future[None]:
        """Done when the last save is written, or with the OSError that prevents it."""
        assert self._written is not None, "nothing was saved"
        return self._written

    def settled(self) -> None:
        """Return when no tensor is read any more, so that all of them may change."""
        if self._written is not None:
            self._written.exception()  # the caller that waits for ``written`` raises it

    def _write(self, directory: Path, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """``trainer/`` (a transformers directory) and ``optimizer/``; no pickles."""
        model = {name.removeprefix(_MODEL): t for name, t in state.items() if name.startswith(_MODEL)}
        rest = {name: tensor for name, tensor in state.items() if not name.startswith(_MODEL)}
        with disk_errors():
            self._model.write(directory / "trainer", on_host(model))
            mine = {"rank": self._ranks.rank, "ranks": self._ranks.size}
            write_state(directory / "optimizer", on_host(rest), about, **mine)

    def resume(self, directory: Path) -> int:
        """Continue from a saved directory; return the version.  Raises CheckpointError."""
        try:
            return self._resume(directory)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{directory}: the optimizer's state is missing or is not this model's "
                f"({type(error).__name__}: {one_line(error)}); resume from another checkpoint, or start a "
                "new run with model.path set to its export (grpo-core export; for adapters, with --merged)"
            ) from error

    def _resume(self, directory: Path) -> int:
        by_name = dict(self._model.trainable())
        about = read_about(directory / "optimizer")
        state, kept, random = {}, {}, {}
        for name, tensor in read_state(directory / "optimizer"):
            if name.startswith(_KEPT):
                kept[name.removeprefix(_KEPT)] = tensor
            elif name.partition("/")[0] in (_RNG, _RNG_CUDA):
                random[name] = tensor
            else:
                state[name] = self._ranks.part(tensor, by_name[name.rpartition("/")[0]])
        self._restore_random(random, about.files)
        self._model.restore_kept(kept)
        self._optimizers.restore(state, asdict(about), self._device)
        if self._entropy is not None and about.entropy is not None:
            coefficient, self._entropy.entropy, chosen = about.entropy
            if chosen == self._chosen:  # otherwise it begins at the value chosen for this start
                self._entropy.coefficient = coefficient
        return about.version


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, those of a GPU as copies in host memory; names of one tensor share a copy."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = tensor.data_ptr(), tensor.shape
        if key not in copies:
            copies[key] = tensor.cpu()
        found[name] = copies[key]
    return found
