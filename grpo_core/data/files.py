"""Reads files and data sets of rows as they are written (law B3).

Nothing becomes a date or a number that a text file does not write as one.  Only the places of its rows are in
memory, and a row is parsed on access.

In tables (Parquet, Arrow, ``datasets``) a value has the type of its file, but bytes that are UTF-8 are text,
and a 32-bit float has its shortest decimal: 0.1, as the program that wrote it shows it, and not
0.10000000149011612.  Tables have one type for all rows of a column, so an object has the keys of all objects,
with null where it had none.  Such keys are removed from the objects in a row.
"""

from __future__ import annotations

import csv
import json
import math
import mmap
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_core.contracts.errors import ConfigError, describe
from grpo_core.contracts.records import without_nulls

# ---------------------------------------------------------------------------------- text files

JSON = (".jsonl", ".ndjson", ".json")
DELIMITED = {".csv": ",", ".tsv": "\t"}
"""Suffixes of delimited text, and their delimiters."""
LONGEST_CELL = 1 << 26
"""Characters of a cell: a quotation mark that is never closed must not read the whole file."""


class Rows(Protocol):
    """The rows of a file or data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class TextRows:
    """The rows of a text file, by the places of their bytes.

    Raises ConfigError for a row that cannot be found or read, with its number.
    """

    def __init__(self, path: str, who: str) -> None:
        self._who = who
        with open(path, "rb") as file:
            self._text: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else b""
            self._begin = len(_MARK) if self._text[: len(_MARK)] == _MARK else 0
            file.seek(self._begin)
            self._places = array("q", self._found(file))

    def __len__(self) -> int:
        return len(self._places) // 2

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        begin, end = self._places[2 * index : 2 * index + 2]
        try:
            return self._row(self._text[begin:end].decode())
        except (ValueError, RecursionError) as error:
            raise self._wrong(index, error) from None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))

    def _found(self, file: Any) -> Iterator[int]:
        """Yield begin and end of each row."""
        raise NotImplementedError

    def _row(self, text: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def _wrong(self, index: int, error: object) -> ConfigError:
        hint = "; save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        return ConfigError(f"{self._who}, row {index + 1}: {error}{hint}")


_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which programs of Windows write before UTF-8."""


# ---------------------------------------------------------------------------------- JSON


class JsonRows(TextRows):
    """Objects of JSON: one per line, or a list of them.

    Blank lines are skipped.
    """

    def _found(self, file: Any) -> Iterator[int]:
        begin = self._skip_space(self._begin)
        if self._text[begin : begin + 1] == b"[":
            yield from self._of_list(begin + 1)
            return
        end = self._begin
        for line in file:
            begin, end = end, end + len(line)
            if line.strip():
                yield begin
                yield end

    def _of_list(self, place: int) -> Iterator[int]:
        """Yield begin and end of each object of a list."""
        nth = 0
        place = self._skip_space(place)
        while nth or self._text[place : place + 1] != b"]":
            end = self._after_object(place, nth)
            yield place
            yield end
            place, nth = self._skip_space(end), nth + 1
            if self._text[place : place + 1] == b"]":
                break
            if self._text[place : place + 1] != b",":
                raise self._wrong(nth - 1, "not valid JSON: expected ',' or ']' after it")
            place = self._skip_space(place + 1)
        if self._skip_space(place + 1) != len(self._text):
            raise ConfigError(f"{self._who}: not valid JSON: there is more after the end of the list")

    def _after_object(self, place: int, nth: int) -> int:
        if self._text[place : place + 1] != b"{":
            raise self._wrong(nth, f"{self._text[place : place + 60]!r}, expected an object")
        depth = 0
        while (byte := self._text[place : place + 1]) in (b"{", b"[", b"}", b"]"):
            depth += 1 if byte in (b"{", b"[") else -1
            place += 1
            if not depth:
                return place
            place = _NO_BRACKET.match(self._text, place).end()  # type: ignore[union-attr]
        raise self._wrong(nth, "not valid JSON: the file ends within it")

    def _skip_space(self, place: int) -> int:
        return _SPACE.match(self._text, place).end()  # type: ignore[union-attr]

    def _row(self, text: str) -> Mapping[str, Any]:
        try:
            row = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{row!r:.60}, expected an object")
        return row


_SPACE = re.compile(rb"[ \t\r\n]*+")
_NO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
"""Text outside of brackets, with the strings in which brackets are text."""


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object.  Raises ValueError if a key occurs twice: one of the values would be lost."""
    made = dict(fields)
    if len(made) != len(fields):
        check_names([name for name, _ in fields], "key")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def check_names(names: list[str], what: str = "column") -> None:
    """Raise ValueError if a name occurs twice: a row would have the last one's value."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        several, occur = ("s", "occur") if len(twice) > 1 else ("", "occurs")
        text = ", ".join(map(repr, twice))
        raise ValueError(f"the {what}{several} {text} {occur} more than once; name each {what} differently")


# ---------------------------------------------------------------------------------- delimited text


class DelimitedRows(TextRows):
    """Rows of cells below a row of names; all cells are text.

    Args:
        delimiter: one character.
        quoted: whether quotation marks around a cell belong to the format (RFC 4180), as in .csv, and not to
            the cell, as in .tsv.
    """

    def __init__(self, path: str, who: str, delimiter: str, *, quoted: bool) -> None:
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"{who}: delimiter = {delimiter!r}; expected one character, such as ';'")
        self._dialect: dict[str, Any] = {
            "delimiter": delimiter,
            "quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            "strict": True,
        }
        self._names: list[str] = []
        csv.field_size_limit(LONGEST_CELL)  # of the whole process; csv has no other
        super().__init__(path, who)

    def _found(self, file: Any) -> Iterator[int]:
        end = self._begin

        def lines() -> Iterator[str]:
            nonlocal end
            for line in file:
                end += len(line)
                yield line.decode()

        reader = csv.reader(lines(), **self._dialect)
        nth = -1
        try:
            self._names = next(reader, [])
            check_names(self._names)
            nth, begin = 0, end
            for cells in reader:
                if cells:  # a blank line has none
                    if len(cells) != (expected := len(self._names)):
                        between = f"columns between {self._dialect['delimiter']!r}"
                        raise ValueError(f"{len(cells)} cells, expected {expected} {between}")
                    yield begin
                    yield end
                    nth += 1
                begin = end
        except (ValueError, csv.Error) as error:
            if nth < 0:
                raise ConfigError(f"{self._who}: its first line, of the columns: {error}") from None
            why: object = error
            if isinstance(error, csv.Error):
                why = (
                    f"not RFC 4180: {error}. A cell that begins with a quotation mark ends with one, and "
                    "marks within it are doubled; in a .tsv they are text"
                )
            raise self._wrong(nth, why) from None

    def _row(self, text: str) -> Mapping[str, Any]:
        return dict(zip(self._names, next(csv.reader([text], **self._dialect)), strict=True))


# ---------------------------------------------------------------------------------- tables

PART = 1024
"""Number of rows of a table that are converted together when all are read."""

Convert = Callable[[Any], Any]


class Table:
    """The rows of tables of pyarrow.

    Args:
        part: returns the table of the rows from one index to another.
        rows: number of all rows.
    """

    def __init__(self, schema: Any, part: Callable[[int, int], Any], rows: int, who: str) -> None:
        self._part, self._rows, self._who = part, rows, who
        exact = {name: _exact(type) for name, type in zip(schema.names, schema.types, strict=True)}
        self._exact = {name: convert for name, convert in exact.items() if convert is not _same}

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._read(index, index + 1)[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield all rows, converted together, which takes a tenth of the time."""
        for begin in range(0, self._rows, PART):
            yield from self._read(begin, min(begin + PART, self._rows))

    def _read(self, begin: int, end: int) -> list[Mapping[str, Any]]:
        try:
            rows = self._part(begin, end).to_pylist(maps_as_pydicts="strict")
            for name, convert in self._exact.items():
                for row in rows:
                    if row[name] is not None:
                        row[name] = convert(row[name])
        except Exception as error:
            if end - begin > 1:
                return [self[index] for index in range(begin, end)]
            raise ConfigError(f"{self._who}, row {begin + 1}: cannot be read: {describe(error)}") from error
        return [{column: without_nulls(value) for column, value in row.items()} for row in rows]


def _exact(type: Any) -> Convert:
    """Return what makes the values of a type exact; ``_same`` if they are."""
    import pyarrow.types as kinds

    if kinds.is_binary(type) or kinds.is_large_binary(type) or kinds.is_binary_view(type):
        return _text
    if kinds.is_float32(type) or kinds.is_float16(type):
        number = np.float32 if kinds.is_float32(type) else np.float16
        return lambda value: float(str(number(value)))
    if kinds.is_timestamp(type) and type.unit == "ns":
        return _moment
    if kinds.is_dictionary(type) or kinds.is_run_end_encoded(type):
        return _exact(type.value_type)
    if kinds.is_map(type):
        key, item = _exact(type.key_type), _exact(type.item_type)
        return _same if key is item is _same else _of_objects(lambda name: (key(name), item))
    if kinds.is_struct(type):
        fields = {field.name: _exact(field.type) for field in type}
        return _of_objects(lambda name: (name, fields[name])) if {*fields.values()} - {_same} else _same
    if hasattr(type, "value_type"):  # lists of all kinds
        each = _exact(type.value_type)
        return _same if each is _same else lambda items: [one if one is None else each(one) for one in items]
    if hasattr(type, "storage_type") and type.extension_name != "arrow.uuid":  # of which pyarrow makes UUIDs
        return _exact(type.storage_type)
    return _same


def _of_objects(field: Callable[[Any], tuple[Any, Convert]]) -> Convert:
    def convert(given: Mapping[Any, Any]) -> dict[Any, Any]:
        named = ((field(name), value) for name, value in given.items())
        return {name: value if value is None else exact(value) for (name, exact), value in named}

    return convert


def _same(value: Any) -> Any:
    return value


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _moment(value: Any) -> Any:
    """Return a datetime for pandas' own kind, if it has no nanoseconds."""
    return value if getattr(value, "nanosecond", 1) else value.to_pydatetime()


# ---------------------------------------------------------------------------------- files of tables


def read_table(path: str, suffix: str, who: str) -> Table:
    """Read a file of Parquet or Arrow.  Raises ConfigError."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{who}: {suffix} needs pyarrow: pip install 'grpo-core[data]'") from None
    try:
        table = _on_disk(pyarrow, path) if suffix == ".parquet" else _arrow(pyarrow, path)
        check_names(table.schema.names)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{who}: cannot be read as {suffix}: {error}") from error
    return Table(table.schema, lambda begin, end: table.slice(begin, end - begin), table.num_rows, who)


def _arrow(pyarrow: Any, path: str) -> Any:
    """Map a file of Arrow into memory; ``datasets`` writes streams, others files."""
    from pyarrow import ipc

    source = pyarrow.memory_map(path)
    try:
        return ipc.open_file(source).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return ipc.open_stream(source).read_all()


def _on_disk(pyarrow: Any, path: str) -> Any:
    """Write the rows of a Parquet file to an unnamed file, and map it into memory."""
    from pyarrow import ipc, parquet

    read = parquet.ParquetFile(path, memory_map=True)
    check_names(read.schema_arrow.names)
    with tempfile.TemporaryFile() as file:
        with ipc.new_file(pyarrow.PythonFile(file, "w"), read.schema_arrow) as writer:
            for batch in read.iter_batches():
                writer.write(batch)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return ipc.open_file(pyarrow.py_buffer(mapped)).read_all()


def table_of(rows: Any, who: str) -> Table:
    """Return the rows of a data set of ``datasets`` as its file has them: images are not decoded."""
    rows = rows.with_format("arrow")
    return Table(rows.features.arrow_schema, lambda begin, end: rows[begin:end], len(rows), who)


# ---------------------------------------------------------------------------------- files and data sets

TABLES = (".parquet", ".arrow", ".feather", ".ipc")
"""Suffixes of tables, which pyarrow reads."""


def is_file(path: str) -> bool:
    """Whether a path names a file of rows, by its suffix, and not a data set."""
    return Path(path).suffix in (*JSON, *DELIMITED, *TABLES) and not Path(path).is_dir()


def file(path: Path, split: str, *, subset: str = "", delimiter: str = "") -> Ranges | None:
    """Read a file, or a directory of files, or a data set that ``datasets`` saved into a directory.

    Args:
        path: of the file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather) or the directory.
        split: "train", "validation" or another split of a data set, or a part of one such as "train[:80%]"; a
            file has training prompts only.
        subset: name of the subset, for a data set with several.
        delimiter: the character between the cells of a .csv or .tsv; by default a comma or a tab.

    Raises ConfigError if it cannot be read.
    """
    again = partial(file, path, split, subset=subset, delimiter=delimiter)
    who, suffix, known = f"data {str(path)!r}", path.suffix, (*JSON, *DELIMITED, *TABLES)
    if delimiter and suffix not in DELIMITED:
        raise ConfigError(f"{who}: has no delimiter, as {' and '.join(DELIMITED)} have; leave it out")
    if path.is_dir():
        return _ranges(data_set(str(path), subset, split, who), again)
    if suffix not in known:
        raise ConfigError(
            f"{who}: expected one of {', '.join(known)}, or a data set, got {suffix or 'a file'}"
        )
    if split == "validation":
        return None
    if split != "train":
        raise ConfigError(
            f"{who} is a file, which has no split {split!r}: leave out data_options.split; validation_data "
            "names a file of held-out prompts"
        )
    if subset:
        raise ConfigError(f"{who}: is a file, which has no subset {subset!r}; leave out data_options.subset")
    rows = read_file(str(path), suffix, who, delimiter)
    return Ranges([(os.path.realpath(path), rows, 0, len(rows))], again)


def hub(name: str, split: str, *, subset: str = "") -> Ranges | None:
    """Read a data set of the Hugging Face hub.

    Args:
        name: of the data set, such as "openai/gsm8k".
        split: of the data set, or a part of one such as "train[:80%]".
        subset: name of the subset, for a data set with several.

    Raises ConfigError if it cannot be read.
    """
    again = partial(hub, name, split, subset=subset)
    return _ranges(data_set(name, subset, split, f"data {name!r}"), again)


def _ranges(slices: Sequence[Slice] | None, again: Callable[[], Ranges | None]) -> Ranges | None:
    return None if slices is None else Ranges(slices, again)


def read_file(path: str, suffix: str, who: str, delimiter: str = "") -> Rows:
    """Read a file of a known format.  Raises ConfigError."""
    if suffix in JSON:
        return JsonRows(path, who)
    if suffix in DELIMITED:
        return DelimitedRows(path, who, delimiter or DELIMITED[suffix], quoted=suffix == ".csv")
    return read_table(path, suffix, who)


class Ranges:
    """Ranges of the rows of others, one after another.

    Args:
        slices: the name of rows, the rows, and the indices from and before which they belong to it.
        again: reads them, for a copy in another process.
    """

    def __init__(self, slices: Sequence[Slice], again: Callable[[], Ranges | None] | None = None) -> None:
        self.slices, self._again = slices, again
        self._ends = list(accumulate(end - begin for *_, begin, end in slices))

    def __reduce__(self) -> Any:
        return self._again, ()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        nth = bisect_right(self._ends, index)
        _, rows, _, end = self.slices[nth]
        return rows[end - self._ends[nth] + index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for _, rows, begin, end in self.slices:
            whole = (begin, end) == (0, len(rows))
            yield from rows if whole else (rows[index] for index in range(begin, end))

    def shared(self, other: Ranges) -> int:
        """Return the number of rows that are in both."""
        pairs = [(a, b) for a in self.slices for b in other.slices if a[0] == b[0]]
        return sum(max(0, min(a[3], b[3]) - max(a[2], b[2])) for a, b in pairs)


def check_apart(train: Ranges, held_out: Ranges, who: str) -> None:
    """Raise ConfigError if rows that are held out are also trained."""
    if both := train.shared(held_out):
        raise ConfigError(
            f"{who}: {both:,} of its {len(held_out):,} held-out rows are training rows as well; name splits "
            'that do not overlap, such as "train[:90%]" and "train[90%:]", or another file'
        )


def is_null(value: Any) -> bool:
    """Return whether a field has no value: null, or NaN, which pandas writes for null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


# ---------------------------------------------------------------------------------- data sets


Slice = tuple[str, Rows, int, int]


def data_set(path: str, subset: str, split: str, who: str) -> list[Slice] | None:
    """Return the slices of a split; None if there is no split "validation".

    Raises ConfigError if there is no such data set or split.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{who}: is not a file with a known suffix; data sets need the package datasets: "
            "pip install 'grpo-core[data]'"
        ) from None
    try:
        if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
            found = _saved(datasets, path, subset, who)
        else:
            found = _loaded(datasets, path, subset, who)
        if split == "validation" and split not in found:
            return None
        split = "+".join(found) if split == "all" else split
        wanted = [part.partition("[")[0].strip() for part in split.split("+")]
        if not found.keys() >= {*wanted}:
            raise ConfigError(f"{who}: has no split {split!r}; it has {', '.join(map(repr, found))}")
        rows = {name: found[name]() for name in wanted}
        lengths = {name: len(own) for name, own in rows.items()}
        ranges = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except ConfigError:
        raise
    except Exception as error:
        of = f", subset {subset!r}" if subset else ""
        raise ConfigError(f"{who}{of}, split {split!r}: cannot be loaded: {describe(error)}") from error
    named = f"{os.path.realpath(path) if os.path.exists(path) else path}/{subset}"
    return [(f"{named}/{each.splitname}", rows[each.splitname], each.from_, each.to) for each in ranges]


def _saved(datasets: Any, path: str, subset: str, who: str) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a data set that ``save_to_disk`` wrote; one without a name is "train"."""
    if subset:
        raise ConfigError(f"{who}: a saved data set has no subsets, got {subset!r}; leave it out")
    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        found = {str(found.split or "train").partition("[")[0]: found}
    return {str(name): partial(table_of, rows, who) for name, rows in found.items()}


def _loaded(datasets: Any, path: str, subset: str, who: str) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a directory of files, or of a data set of the hub.

    ``datasets`` makes dates of texts in JSON, and numbers of cells, so these files are read here.
    """
    builder = datasets.load_dataset_builder(path, subset or None)
    config, files = builder.config, builder.config.data_files or {}
    default = type(config)()
    changed = {name for name in vars(default) if getattr(config, name) != getattr(default, name)}
    if builder.info.builder_name in ("json", "csv") and changed <= _READ_HERE:
        return {str(name): partial(_of_files, datasets, own, config, who) for name, own in files.items()}
    found = datasets.load_dataset(path, subset or None)
    return {str(name): partial(table_of, rows, who) for name, rows in found.items()}


_READ_HERE = {"name", "version", "data_dir", "data_files", "description", "sep", "delimiter"}
"""Settings of ``datasets`` for files of JSON and CSV that the readers of this package know."""


def _of_files(datasets: Any, files: Sequence[str], config: Any, who: str) -> Ranges:
    here = datasets.DownloadManager().download_and_extract(list(files))
    slices: list[Slice] = []
    for name, path in zip(files, here, strict=True):
        suffix = next(each for each in reversed(Path(name).suffixes) if each in (*JSON, *DELIMITED))
        delimiter = config.delimiter or config.sep if suffix == ".csv" else ""
        rows = read_file(path, suffix, f"{who}: {name!r}", delimiter)
        slices.append((name, rows, 0, len(rows)))
    return Ranges(slices)
