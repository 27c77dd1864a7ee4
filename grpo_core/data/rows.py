"""The rows of a plugin's dataloader, as prompts.

A *sized* dataloader is read by index, in the order of ``TaskLoader``: sequences, and torch's ``Dataset``.  A
*stream* is iterated: everything else that has a state.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import evolve

from grpo_core.config import SourceConfig
from grpo_core.contracts.errors import (
    CheckpointError,
    ConfigError,
    GrpoError,
    PluginError,
    describe,
    fault_of,
)
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import EndsWith, TaskLoader, as_it_is, workers_context
from grpo_core.data.sources import Source
from grpo_core.data.states import packed, unpacked
from grpo_core.plugins.files import FILE_PREFIX, module_name
from grpo_core.plugins.installed import import_file
from grpo_core.text.messages import readable as readable_prompt

FORMS = (
    "a sequence, a torch Dataset, a torchdata StatefulDataLoader or torchdata.nodes pipeline, or an iterable "
    "with state_dict() and load_state_dict()"
)


class Feed(Protocol):
    """The rows of a dataloader, one after another."""

    size: int | None
    """Number of rows of an epoch; None if it is not known."""

    def read(self) -> tuple[int | None, Prompt | None]:
        """Return the next row's place, if rows are read by index, and its prompt.

        The prompt is None if ``source.where`` leaves the row out.
        """

    def state(self) -> Any:
        """Return what ``restore`` needs to continue after the last row that was read."""

    def restore(self, state: Any) -> None:
        """Continue from a state.  Raises CheckpointError if it belongs to other rows."""


class RowReader:
    """Makes prompts of rows, as the source of a task does.

    Args:
        task: name of the task.
        who: the dataloader, for messages.
        config: ``tasks.NAME.source``, whose keys name the fields of a row.
    """

    def __init__(self, task: str, who: str, config: SourceConfig) -> None:
        self._task, self._who = task, who
        self._source = Source(task, who, config, what="dataloader")

    def prompt(self, row: Any, place: int) -> Prompt | None:
        """Return the prompt of a row, or None if ``source.where`` leaves it out.

        Raises ConfigError for a row that is not a prompt, PluginError for one that no checkpoint can hold.
        """
        if isinstance(row, Prompt):
            who = f"task {self._task!r}: dataloader {self._who!r}, row {place + 1}"
            prompt = readable_prompt(evolve(row, environment=self._task, id=row.id or str(place)), who)
        elif isinstance(row, Mapping):
            found = self._source.prompt_of(row, place)
            if found is None:
                return None
            prompt = found
        else:
            batch = isinstance(row, list | tuple) and bool(row) and isinstance(row[0], Prompt | Mapping)
            hint = "; give batch_size=None, so that rows come one by one" if batch else ""
            raise PluginError(
                f"task {self._task!r}: dataloader {self._who!r}, row {place + 1} is {row!r:.80} of type "
                f"{type(row).__name__}, expected a Prompt or a mapping of fields{hint}"
            )
        packed(plain(prompt), f"task {self._task!r}: dataloader {self._who!r}, row {place + 1}")
        return prompt


def plain(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt to values that ``packed`` accepts."""
    return {
        "id": prompt.id,
        "messages": list(prompt.messages),
        "answer": prompt.answer,
        "info": dict(prompt.info),
    }


class SizedRows(Sequence[Any]):
    """Rows that are read by index: places with prompts, or with None if ``source.where`` leaves it out."""

    def __init__(self, rows: Any, reader: RowReader) -> None:
        self._rows, self._reader = rows, reader
        kind = type(rows)
        self.fingerprint = str(getattr(rows, "fingerprint", "") or f"{kind.__module__}.{kind.__qualname__}")
        """Text that identifies the rows without reading them."""

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker, which has not imported the file of a plugin that is not installed."""
        module = sys.modules.get(type(self._rows).__module__)
        file = getattr(module, "__file__", None) or ""
        try:
            rows = pickle.dumps(self._rows)
        except Exception as error:
            raise PluginError(
                f"its rows cannot be sent to the processes of source.workers ({describe(error)}); leave "
                "workers out, or open files and connections when the first row is read"
            ) from error
        named = file if module is not None and module.__name__ == module_name(Path(file)) else ""
        return _rows_again, (named, rows, self._reader)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return index, self._reader.prompt(self._rows[index], index)


def _rows_again(file: str, rows: bytes, reader: RowReader) -> SizedRows:
    """Return the rows that were sent to this process."""
    if file:
        import_file(Path(file))
    return SizedRows(pickle.loads(rows), reader)


class SizedFeed:
    """The rows of a sized dataloader, shuffled each epoch, read by torchdata."""

    def __init__(self, task: str, rows: SizedRows, *, seed: int, workers: int) -> None:
        self.size: int | None = len(rows)
        self._loader = TaskLoader(task, rows, seed=seed, workers=workers, torchdata=True)

    def read(self) -> tuple[int | None, Prompt | None]:
        row: Any = self._loader.take(1)[0]  # of SizedRows
        return row[0], row[1]

    def state(self) -> Any:
        return self._loader.state_dict()

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class StreamFeed:
    """The rows of a stream, which is made anew when it ends.

    Args:
        make: makes the stream.
        first: the stream that was made already.
    """

    size: int | None = None

    def __init__(self, make: Callable[[], Any], first: Any, reader: RowReader, *, who: str) -> None:
        self._make, self._stream, self._reader, self._who = make, first, reader, who
        self._iterator: Iterator[Any] | None = None
        self._rows = self._epoch = self._of_epoch = 0

    def read(self) -> tuple[int | None, Prompt | None]:
        while True:
            if self._stream is None:
                self._stream = self._make()
            if self._iterator is None:
                self._iterator = iter(self._stream)
            try:
                row = next(self._iterator)
            except StopIteration:
                if not self._of_epoch:
                    raise PluginError(f"{self._who}: it ended without a row") from None
                self._epoch, self._of_epoch, self._stream, self._iterator = self._epoch + 1, 0, None, None
                continue
            place, self._rows, self._of_epoch = self._rows, self._rows + 1, self._of_epoch + 1
            return None, self._reader.prompt(row, place)

    def state(self) -> Any:
        state, arrays = packed(self._stream.state_dict(), f"{self._who}: state_dict()")
        return {
            "epoch": self._epoch,
            "rows": self._rows,
            "of_epoch": self._of_epoch,
            "own": unpacked(state, arrays),  # a copy: the stream may change what it returned
        }

    def restore(self, state: Any) -> None:
        self._stream, self._iterator = self._make(), None
        self._rows, self._epoch, self._of_epoch = state["rows"], state["epoch"], state["of_epoch"]
        try:
            self._stream.load_state_dict(state["own"])
        except Exception as error:
            raise CheckpointError(
                f"{self._who} cannot continue from its state in the checkpoint: {describe(error)}"
            ) from error


def feed(make: Callable[[], Any], reader: RowReader, *, task: str, who: str, seed: int, workers: int) -> Feed:
    """Make a dataloader and return its rows.

    Args:
        make: calls the plugin's factory.
        workers: number of processes that read sized rows ahead.

    Raises PluginError if it cannot be read, or its position cannot be saved.
    """
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's own call
    given = make()
    first = readable(given, who, workers)
    if is_sized(first):
        if not len(first):
            raise PluginError(f"{who}: it has no rows; expected at least one")
        return SizedFeed(task, SizedRows(first, reader), seed=seed, workers=workers)
    if workers and not _is(given, "torch.utils.data", "IterableDataset"):
        raise ConfigError(
            f"{who}: tasks.{task}.source.workers = {workers} reads rows by index, and this is a stream; "
            "leave it out, and let the stream have its own workers"
        )
    return StreamFeed(lambda: readable(make(), who, workers), first, reader, who=who)


def is_sized(rows: Any) -> bool:
    """Return whether rows are read by index."""
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def in_order(rows: Any) -> Iterator[Any]:
    """Yield the rows of an epoch."""
    return (rows[place] for place in range(len(rows))) if is_sized(rows) else iter(rows)


def readable(given: Any, who: str, workers: int = 0) -> Any:
    """Return a sized dataloader or a stream with a state.  Raises PluginError for anything else."""
    if _is(given, "torch.utils.data", "IterableDataset"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        given = StatefulDataLoader(given, batch_size=None, num_workers=workers, collate_fn=as_it_is)
    if _is(given, "torch.utils.data", "DataLoader") and given.num_workers:
        _prepare_workers(given, who)
    if _is(given, "torchdata.nodes", "BaseNode"):
        from torchdata.nodes import Loader

        return Loader(given, restart_on_stop_iteration=False)
    if isinstance(given, str | bytes | Mapping):
        raise PluginError(f"{who}: it is {given!r:.80}, of type {type(given).__name__}; expected {FORMS}")
    if is_sized(given):
        return given
    if not hasattr(given, "__iter__"):
        raise PluginError(f"{who}: it is {given!r:.80}, of type {type(given).__name__}; expected {FORMS}")
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(given, name)]
    if missing:
        better = (
            "torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and has both"
            if _is(given, "torch.utils.data", "DataLoader")
            else "without them a run could not be resumed. Add them, or return "
            "torchdata.nodes.IterableWrapper(...), which skips what was read before"
        )
        kind = type(given).__name__
        raise PluginError(f"{who}: it is an iterable, a {kind}, without {' and '.join(missing)}: {better}")
    return given


def _prepare_workers(loader: Any, who: str) -> None:
    """Start a loader's workers from a server without threads: a fork of a process with threads may hang.

    Raises PluginError if the workers could not import its dataset.
    """
    kind = type(loader.dataset)
    if kind.__module__.startswith(FILE_PREFIX):
        raise PluginError(
            f"{who}: num_workers = {loader.num_workers}: its dataset {kind.__name__} is defined in a single "
            "file, which workers cannot import; move it to a module next to the file, or set num_workers = 0"
        )
    loader.multiprocessing_context = loader.multiprocessing_context or workers_context()
    loader.worker_init_fn = EndsWith(os.getpid(), loader.worker_init_fn)


def _is(given: Any, module: str, name: str) -> bool:
    """Return whether something is of a class whose module may not be imported."""
    there = sys.modules.get(module)
    return there is not None and isinstance(given, getattr(there, name))


def raised(who: str, what: str, error: BaseException) -> GrpoError:
    """Return the error that names the dataloader."""
    if isinstance(error, GrpoError):
        return error
    fault = fault_of(error)
    return PluginError(f"{who}: {what} raised {fault}").carrying(fault)
