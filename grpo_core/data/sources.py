"""Prompts from files and data sets, for tasks whose environment only scores replies.

    [tasks.gsm8k]
    env = "math:gsm8k"
    source = { path = "train.jsonl", validation_path = "test.jsonl", prompt = "question" }

A source is a sequence of prompts.  It opens its file on first use and then reads every row once, so that a
bad row is an error before the run begins.  A pickled source opens its file again.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from grpo_core.config import SourceConfig
from grpo_core.data.loaders import fingerprint
from grpo_core.errors import ConfigError
from grpo_core.records import Prompt
from grpo_core.unicode import lone_surrogate, unreadable

PROMPT_FIELDS = ("prompt", "messages", "question")
"""Fields that may hold the prompt, in order of preference, if the configuration names no field."""

FILES = (".jsonl", ".ndjson", ".parquet")
"""Suffixes of the files that can be read."""


class Rows(Protocol):
    """The rows of a file or data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Source(Sequence[Prompt]):
    """The prompts of one split of a task.

    Args:
        task: name of the task, which is set on each prompt.
        path: a ``.jsonl`` or ``.parquet`` file, or a data set (a directory or hub id for ``datasets``).
        split: split of the data set.
        config: how rows become prompts.

    Raises (when it is opened):
        ConfigError: the file cannot be read, or a row is not a prompt.
    """

    def __init__(self, task: str, path: str, config: SourceConfig, *, split: str = "train") -> None:
        self._task, self._path, self._config, self._split = task, path, config, split
        self._rows: Rows | None = None
        self.without_answer = 0
        """Number of rows without the field of the answer; set by ``open``."""
        self.fingerprint = ""
        """Hash of all ids and messages, in order; set by ``open``."""

    def __len__(self) -> int:
        return len(self._opened())

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        rows = self._opened()
        places = range(len(rows))[index]
        if isinstance(places, range):
            return [self._prompt(rows[place], place) for place in places]
        return self._prompt(rows[places], places)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def open(self) -> None:
        """Read every row once; further calls do nothing."""
        self._opened()

    def _opened(self) -> Rows:
        if self._rows is None:
            rows = read(self._path, self._config.subset, self._split, who=f"task {self._task!r}: source")
            self.fingerprint = self.fingerprint or self._check(rows)
            self._rows = rows
        return self._rows

    def _check(self, rows: Rows) -> str:
        """Return the fingerprint.  Raises ConfigError for a row that is not a prompt or repeats an id."""
        if not len(rows):
            raise ConfigError(f"task {self._task!r}: source {self._path!r} is empty; expected a prompt a row")
        found = fingerprint(self._unique(self._prompt(row, place) for place, row in self._counted(rows)))
        answer = self._config.answer
        if self.without_answer == len(rows) and answer != SourceConfig().answer:
            raise ConfigError(
                f"task {self._task!r}: source {self._path!r}: no row has the field {answer!r}, which "
                f"source.answer names; the first row has {', '.join(map(repr, rows[0]))}"
            )
        return found

    def _counted(self, rows: Rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield each row with its place, and count those without an answer."""
        self.without_answer = 0
        for place in range(len(rows)):
            row = rows[place]
            self.without_answer += self._config.answer not in row
            yield place, row

    def _unique(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        seen: dict[str, int] = {}
        for place, prompt in enumerate(prompts):
            if (other := seen.setdefault(prompt.id, place)) != place:
                raise ConfigError(
                    f"{self._where(place)}: has the id {prompt.id!r}, as row {other + 1}; ids are unique in "
                    "a task (source.id names their field)"
                )
            yield prompt

    def _prompt(self, row: Mapping[str, Any], place: int) -> Prompt:
        config, given = self._config, dict(row)
        wanted = (config.prompt,) if config.prompt else PROMPT_FIELDS
        field = next((name for name in wanted if name in given), None)
        if field is None:
            raise ConfigError(
                f"{self._where(place)}: has no field {' or '.join(map(repr, wanted))}, only "
                f"{', '.join(map(repr, given)) or 'nothing'}; source.prompt names the field of the prompt"
            )
        messages = given.pop(field)
        if not _is_prompt(messages):
            raise ConfigError(
                f"{self._where(place)}: {field!r} is {messages!r:.80}, expected text or messages such as "
                "{'role': 'user', 'content': '...'}"
            )
        if config.system:
            text = messages if not isinstance(messages, str) else [{"role": "user", "content": messages}]
            messages = [{"role": "system", "content": config.system}, *text]
        id = given.pop(config.id, None)
        if found := lone_surrogate([id, messages]):
            name = str(place) if id is None else str(id)
            raise ConfigError(f"{self._where(place)}: prompt {name!r} {unreadable(found)}")
        return Prompt(
            messages=messages,
            answer=given.pop(config.answer, None),
            id=str(place) if id is None else str(id),
            environment=self._task,
            info=given,
        )

    def _where(self, place: int) -> str:
        return f"task {self._task!r}: source {self._path!r}, row {place + 1}"


def _is_prompt(given: Any) -> bool:
    if isinstance(given, str):
        return bool(given)
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in given)
    )


def find_source(task: str, config: SourceConfig, split: str) -> Source | None:
    """Return the source of ``"train"`` or ``"validation"``, or None if the environment has the prompts."""
    if split == "train":
        return Source(task, config.path, config, split=config.split) if config.path else None
    path = config.validation_path or (config.path if config.validation_split else "")
    return Source(task, path, config, split=config.validation_split or config.split) if path else None


# ---------------------------------------------------------------------------------- reading


def read(path: str, subset: str, split: str, *, who: str) -> Rows:
    """Read a file or data set.  Raises ConfigError if it cannot be read."""
    suffix = Path(path).suffix
    if suffix in FILES:
        if not Path(path).is_file():
            raise ConfigError(f"{who} {path!r}: there is no such file (from {str(Path.cwd())!r})")
        return _parquet(path, who) if suffix == ".parquet" else JsonLines(Path(path), who)
    if suffix in (".json", ".csv", ".gz", ".txt"):
        raise ConfigError(f"{who} {path!r}: expected .jsonl, .parquet, or a data set, got {suffix}")
    return _data_set(path, subset, split, who)


class JsonLines:
    """A file with one JSON object per line, which is parsed on access.

    Blank lines are skipped.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who
        with open(path, "rb") as file:
            self._offsets = array("q", self._lines(file))
            empty = not file.seek(0, 2)
            self._text = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) // 2

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        begin, end = self._offsets[2 * index : 2 * index + 2]
        try:
            row = json.loads(self._text[begin:end])
        except ValueError as error:
            raise ConfigError(f"{self._who} {str(self._path)!r}, row {index + 1}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self._who} {str(self._path)!r}, row {index + 1}: {row!r:.60}, expected an object"
            )
        return row

    @staticmethod
    def _lines(file: Any) -> Iterator[int]:
        """Return begin and end of each line that is not blank."""
        end = 0
        for line in file:
            begin, end = end, end + len(line)
            if line.strip():
                yield begin
                yield end


class _Table:
    """The rows of a pyarrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        (row,) = self._table.slice(index, 1).to_pylist()
        return dict(row)


def _parquet(path: str, who: str) -> Rows:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{who} {path!r}: reading Parquet needs pyarrow: pip install 'grpo-core[data]'"
        ) from None
    try:
        return _Table(pyarrow.parquet.read_table(path, memory_map=True))
    except Exception as error:
        raise ConfigError(f"{who} {path!r}: cannot be read as Parquet: {error}") from error


def _data_set(path: str, subset: str, split: str, who: str) -> Rows:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{who} {path!r}: is no .jsonl or .parquet file; data sets need the package datasets: "
            "pip install 'grpo-core[data]'"
        ) from None
    try:
        if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
            found = datasets.load_from_disk(path)
            rows: Rows = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            rows = datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:
        named = f"{path!r}" + (f", subset {subset!r}" if subset else "")
        raise ConfigError(
            f"{who} {named}, split {split!r}: cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return rows
