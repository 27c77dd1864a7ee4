"""Reads the rows of files and data sets; rows of long tables stay on disk.

Tables have one type for all rows of a column, so an object has the keys of all objects, with null where it
had none. Such keys are removed from the objects in a row.
"""

from __future__ import annotations

import json
import math
import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import without_nulls

LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".ipc")
"""Suffixes of tables, which pyarrow reads."""
PART = 1024
"""Number of rows of a table that are converted together when all are read."""


class Rows(Protocol):
    """The rows of a file or data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


def is_file(path: str) -> bool:
    """Whether a path names a file of rows, by its suffix, and not a data set."""
    return Path(path).suffix in (*LINES, *TABLES)


def file(path: Path, split: str, *, subset: str = "") -> Rows | None:
    """Read a file, or a data set that ``datasets`` saved into a directory.

    Args:
        path: of the file (.jsonl, .csv, .tsv, .parquet, .arrow, .feather) or the directory.
        split: "train", "validation" or another split of a data set; a file has training prompts only.
        subset: name of the subset, for a data set with several.

    Raises ConfigError if it cannot be read.
    """
    who, suffix = "data", path.suffix
    if path.is_dir():
        return _data_set(str(path), subset, split, who)
    if not is_file(str(path)):
        known = ", ".join((*LINES, *TABLES))
        raise ConfigError(f"{who} {str(path)!r}: expected one of {known}, or a data set, got {suffix!r}")
    if split == "validation":
        return None
    if split != "train" or subset:
        key = "subset" if subset else "split"
        raise ConfigError(
            f"{who} {str(path)!r} is a file, which has no splits and subsets: leave out data_options.{key}; "
            "validation_data names a file of held-out prompts"
        )
    return JsonLines(path, who) if suffix in LINES else _table(str(path), suffix, who)


def hub(name: str, split: str, *, subset: str = "") -> Rows | None:
    """Read a data set of the Hugging Face hub.

    Args:
        name: of the data set, such as "openai/gsm8k".
        split: of the data set.
        subset: name of the subset, for a data set with several.

    Raises ConfigError if it cannot be read.
    """
    return _data_set(name, subset, split, "data")


class JsonLines:
    """A file with one JSON object per line, which is parsed on access.

    Blank lines are skipped.
    """

    read_at_start = True

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who
        with open(path, "rb") as file:
            self._offsets = array("q", self._lines(file))
            empty = not file.seek(0, 2)
            self._text = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self._path, self._who)

    def __len__(self) -> int:
        return len(self._offsets) // 2

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        begin, end = self._offsets[2 * index : 2 * index + 2]
        text = self._text[begin:end]
        where = f"{self._who} {str(self._path)!r}, row {index + 1}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: {row!r:.60}, expected an object")
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))

    @staticmethod
    def _lines(file: Any) -> Iterator[int]:
        """Return begin and end of each line that is not blank."""
        end = 0
        for line in file:
            begin, end = end, end + len(line)
            if line.strip():
                yield begin
                yield end


def is_null(value: Any) -> bool:
    """Return whether a field has no value: null, or NaN, which pandas writes for null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


class _DataSet:
    """The rows of a data set of ``datasets``."""

    read_at_start = True

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return _own_keys(self._rows[index])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(_own_keys, self._rows)


def _own_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the keys of its objects that are null."""
    return {column: without_nulls(value) for column, value in row.items()}


class _Table:
    """The rows of a pyarrow table."""

    read_at_start = True

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        (row,) = self._table.slice(index, 1).to_pylist(maps_as_pydicts="lossy")
        return _own_keys(row)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield all rows, converted in batches, which takes a tenth of the time."""
        for batch in self._table.to_batches(max_chunksize=PART):
            yield from map(_own_keys, batch.to_pylist(maps_as_pydicts="lossy"))


def _table(path: str, suffix: str, who: str) -> Rows:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{who} {path!r}: {suffix} needs pyarrow: pip install 'grpo-core[data]'") from None
    try:
        if suffix in (".arrow", ".feather", ".ipc"):
            table = _arrow(pyarrow, path)
            _check_names(table.schema.names)
            return _Table(table)
        batches = _parquet(path) if suffix == ".parquet" else _csv(path, "\t" if suffix == ".tsv" else ",")
        return _Table(_on_disk(pyarrow, batches))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{who} {path!r}: cannot be read as {suffix}: {error}") from error


def _arrow(pyarrow: Any, path: str) -> Any:
    """Map a file of Arrow into memory; ``datasets`` writes streams, others files."""
    from pyarrow import ipc

    source = pyarrow.memory_map(path)
    try:
        return ipc.open_file(source).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return ipc.open_stream(source).read_all()


def _parquet(path: str) -> Iterable[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    yield file.schema_arrow
    yield from file.iter_batches()


def _csv(path: str, delimiter: str) -> Iterable[Any]:
    """Yield the schema and the batches of a file whose first line names its columns.

    All values are texts, so that "007" is not changed.
    """
    import pyarrow
    import pyarrow.csv

    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pyarrow.csv.open_csv(path, parse_options=parsing) as file:
        names = file.schema.names
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    with pyarrow.csv.open_csv(path, parse_options=parsing, convert_options=texts) as file:
        yield file.schema
        yield from file


def _check_names(names: Sequence[str]) -> None:
    """Raise ValueError if two columns have the same name: a row would have the last one's value."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        several, occur = ("s", "occur") if len(twice) > 1 else ("", "occurs")
        text = ", ".join(map(repr, twice))
        raise ValueError(f"the column{several} {text} {occur} more than once; name each column differently")


def _on_disk(pyarrow: Any, parts: Iterable[Any]) -> Any:
    """Write batches to an unnamed file and map it into memory, where the system keeps only what is used.

    Raises ValueError if two columns have one name.
    """
    from pyarrow import ipc

    batches = iter(parts)
    schema = next(batches)
    _check_names(schema.names)
    with tempfile.TemporaryFile() as file:
        with ipc.new_file(pyarrow.PythonFile(file, "w"), schema) as writer:
            for batch in batches:
                writer.write(batch)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return ipc.open_file(pyarrow.py_buffer(mapped)).read_all()


def _data_set(path: str, subset: str, split: str, who: str) -> Rows | None:
    """Read a split of a data set; None if it has no split "validation"."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{who} {path!r}: data sets need the package datasets: pip install 'grpo-core[data]'"
        ) from None
    try:
        if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
            found = datasets.load_from_disk(path)
            splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
            if split == "validation" and split not in splits:
                return None
            if split not in splits:
                raise ValueError(f"it has the splits {', '.join(splits)}")
            return _DataSet(splits[split])
        if split == "validation" and split not in datasets.get_dataset_split_names(path, subset or None):
            return None
        return _DataSet(datasets.load_dataset(path, subset or None, split=split))
    except Exception as error:
        named = f"{path!r}" + (f", subset {subset!r}" if subset else "")
        raise ConfigError(
            f"{who} {named}, split {split!r}: cannot be loaded: {type(error).__name__}: {error}"
        ) from error
