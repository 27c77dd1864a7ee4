"""The endless stream of one task's prompts, which is reshuffled each epoch and resumes exactly.

The order of an epoch is a function of (seed, task, epoch), so the state is two numbers and a resumed run
draws what the uninterrupted run would have drawn, with any number of workers.  torchdata loads rows of files,
data sets and plugins, with or without workers, and gets one index at a time.  The prompts of an environment,
which are a list, are read without it: importing torch takes a second.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import select
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from grpo_core.contracts.errors import CheckpointError, PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.data.permutation import Permutation

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader


class ShuffledIndices:
    """An endless iterator over lists of ``want`` indices; its state is an epoch and a position."""

    def __init__(self, n: int, *, seed: int, task: str) -> None:
        self.want = 1
        self.epoch = 0
        self.position = 0
        self._n = n
        self._key = f"{seed}/{task}"
        self._order: Permutation | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        indices: list[int] = []
        while len(indices) < self.want:
            if self.position == self._n:
                self.epoch, self.position, self._order = self.epoch + 1, 0, None
            if self._order is None:
                self._order = Permutation(self._n, f"{self._key}/{self.epoch}")
            end = min(self.position + self.want - len(indices), self._n)
            indices += [self._order[place] for place in range(self.position, end)]
            self.position = end
        return indices

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position, self._order = state["epoch"], state["position"], None


class _PromptDataset:
    """A data set that is read by lists of indices."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, indices: list[int]) -> list[Prompt]:
        return [self._prompts[index] for index in indices]


class TaskLoader:
    """A ``Loader`` for the prompts of one task.

    No prompt is read before the first one is taken.

    Args:
        task: name of the task; part of the shuffling seed, so that tasks of equal length differ in order.
        prompts: the prompts, with unique ids.
        seed: seed of the shuffling.
        workers: number of processes that read prompts ahead; 0 reads them in this process.
        torchdata: whether torchdata reads the prompts, as it does with workers.  A list in memory does not
            need it, and it imports torch.

    Raises:
        PluginError: there are no prompts.
    """

    def __init__(
        self, task: str, prompts: Sequence[Prompt], *, seed: int, workers: int = 0, torchdata: bool = False
    ) -> None:
        self.task = task
        self._prompts = prompts
        self._seed = seed
        self._workers = workers
        self._torchdata = torchdata or workers > 0
        self._drawn = 0
        self._offers = False
        """Whether a sampler has called ``offer``: then no prompts are read ahead."""
        self._order: ShuffledIndices | None = None
        """The remaining order, if this process reads the prompts itself."""
        self._dataloader: StatefulDataLoader | None = None
        self._stream: Iterator[list[Prompt]] = iter(())

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self._prompts)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the position; a copy continues there with its own workers."""
        return {**self.__dict__, "_dataloader": None, "_stream": None}

    @property
    def epoch(self) -> float:
        """Number of epochs drawn; 1.5 is half of the second."""
        return self._drawn / len(self)

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        if n < 1:
            return []
        if self._offers or not self._torchdata:
            return self.prompts_at(self._draw(n))
        if self._dataloader is None:
            self._dataloader = self._open()
            self._stream = iter(self._dataloader)
        self._drawn += n
        return [prompt for _ in range(n) for prompt in next(self._stream)]

    def offer(self, n: int) -> list[int]:
        """Return the places, in the task's data, of the next ``n`` prompts."""
        if not self._offers:
            self._offers = True
            self._dataloader, self._stream = None, iter(())
        return self._draw(n)

    def prompts_at(self, places: Sequence[int]) -> list[Prompt]:
        """Return the prompts at places that were offered."""
        return [self._prompts[place] for place in places]

    def pass_over(self, place: int, reason: str) -> None:
        """Leave an offered prompt out of this epoch; the caller that draws prompts records it."""

    def _draw(self, n: int) -> list[int]:
        self._order = self._order or self._order_from_here()
        self._drawn += n
        self._order.want = n
        return next(self._order) if n else []

    def _order_from_here(self) -> ShuffledIndices:
        if not len(self):
            raise PluginError(
                f"task {self.task!r}: its environment has no training prompts; expected at least one"
            )
        order = ShuffledIndices(len(self), seed=self._seed, task=self.task)
        epoch, position = divmod(self._drawn, len(self))
        order.load_state_dict({"epoch": epoch, "position": position})
        return order

    def prompt(self, id: str, slot: int = 0) -> Prompt:
        """Return the prompt with this id, in any slot.  Raises CheckpointError if it is gone."""
        try:
            return self._prompts[self._index_of[id]]
        except KeyError:
            raise CheckpointError(
                f"task {self.task!r}: the checkpoint mentions prompt {id!r}, which is not among the "
                f"{len(self)} prompts that the environment offers; resume with the environment and the "
                "options that the run was started with"
            ) from None

    def state_dict(self, unfinished: Mapping[int, Prompt] = MappingProxyType({})) -> dict[str, Any]:
        """Return the position and a fingerprint of the prompts, as JSON values.

        The ``unfinished`` prompts are not part of it: they are found again by their ids.
        """
        return {**self._source, "taken": self._drawn, **({"offers": True} if self._offers else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.  Raises CheckpointError if it belongs to other prompts or another seed."""
        for key, expected in self._source.items():
            if state.get(key) != expected:
                raise CheckpointError(
                    f"task {self.task!r}: its prompts differ from the checkpoint's ({key} is "
                    f"{expected!r}, in the checkpoint {state.get(key)!r}); resume with the environment, the "
                    "options and the seed that the run was started with, or start a new run"
                )
        self._drawn = state["taken"]
        self._dataloader, self._stream, self._order = None, iter(()), None
        self._offers = bool(state.get("offers"))

    def _open(self) -> StatefulDataLoader:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's call
            return StatefulDataLoader(
                _PromptDataset(self._prompts),
                batch_size=None,
                sampler=self._order_from_here(),
                collate_fn=as_it_is,
                generator=torch.Generator(),  # otherwise it draws from torch's global generator
                num_workers=self._workers,
                multiprocessing_context=workers_context() if self._workers else None,
                worker_init_fn=EndsWith(os.getpid()),
            )

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        return {prompt.id: index for index, prompt in enumerate(self._prompts)}

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        """Return what determines the stream.  Answers are left out, so that they can be corrected."""
        prompts = len(self)
        known = getattr(self._prompts, "fingerprint", "")
        return {"prompts": prompts, "fingerprint": known or fingerprint(self._prompts), "seed": self._seed}


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Hash ids and messages, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps([prompt.id, prompt.messages], default=lambda value: type(value).__name__)
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def workers_context() -> Any:
    """Make a context whose workers are forked from a server without threads."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchdata.stateful_dataloader", __name__])
    return context


@frozen
class EndsWith:
    """A loader's ``worker_init_fn`` that ends the worker with the run's process.

    Without it, the server that forks the workers and the workers keep each other alive.
    """

    pid: int
    also: Callable[[int], None] | None = None
    """The loader's original function."""

    def __call__(self, worker: int) -> None:
        if hasattr(os, "pidfd_open"):  # Linux
            threading.Thread(target=self._wait, args=(os.pidfd_open(self.pid),), daemon=True).start()
        if self.also is not None:
            self.also(worker)

    @staticmethod
    def _wait(process: int) -> None:
        select.select([process], [], [])
        os._exit(1)


def as_it_is(rows: Any) -> Any:
    """Return the rows unchanged; torch would make tensors of their numbers."""
    return rows
