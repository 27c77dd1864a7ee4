"""The workers of a plugin's torch loader: started without threads, and ended with the run."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import PluginError
from grpo_core.plugins.files import FILE_PREFIX


def prepare_workers(loader: Any, who: str) -> None:
    """Start a loader's workers from a server without threads: a fork of a process with threads may hang.

    Raises PluginError if the workers could not import its dataset.
    """
    kind = type(loader.dataset)
    if kind.__module__.startswith(FILE_PREFIX):
        raise PluginError(
            f"{who}: num_workers = {loader.num_workers}: its dataset {kind.__name__} is defined in a single "
            "file, which workers cannot import; move it to a module next to the file, or set num_workers = 0"
        )
    loader.multiprocessing_context = loader.multiprocessing_context or _context()
    if not isinstance(loader.worker_init_fn, EndsWith):
        loader.worker_init_fn = EndsWith(os.getpid(), loader.worker_init_fn)


def readers_of(loader: Any) -> int:
    """Return the number of workers that may each read all rows of an iterable; 0 if there are no several."""
    torch = sys.modules.get("torch.utils.data")
    if torch is None or not isinstance(loader, torch.DataLoader) or loader.num_workers < 2:
        return 0
    by_index = hasattr(loader.dataset, "__getitem__") and not isinstance(
        loader.dataset, torch.IterableDataset
    )
    return 0 if by_index else loader.num_workers


def _context() -> Any:
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
