"""Reads files and data sets of rows as they are written (law B3)."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_core.contracts.errors import ConfigError, describe
from grpo_core.data.tables import read_table, table_of
from grpo_core.data.text_files import DELIMITED, JSON, DelimitedRows, JsonRows
from grpo_core.data.text_files import Rows as Rows

TABLES = (".parquet", ".arrow", ".feather", ".ipc")
"""Suffixes of tables, which pyarrow reads."""


def is_file(path: str) -> bool:
    """Whether a path names a file of rows, by its suffix, and not a data set."""
    return Path(path).suffix in (*JSON, *DELIMITED, *TABLES) and not Path(path).is_dir()


def check_there(path: str, *, who: str) -> None:
    """Raise ConfigError if a path names a missing file, or a file of another kind."""
    if is_file(path) and not Path(path).is_file():
        raise ConfigError(f"{who} {path!r}: there is no such file (from {str(Path.cwd())!r})")
    suffix, known = Path(path).suffix, ", ".join((*JSON, *DELIMITED, *TABLES))
    if suffix in (".gz", ".zst", ".zip", ".txt", ".xlsx") or (Path(path).is_file() and not is_file(path)):
        raise ConfigError(f"{who} {path!r}: expected one of {known}, or a data set, got {suffix or 'a file'}")


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
    if path.is_dir() or split == "train":
        return read(str(path), subset, split, who="data", delimiter=delimiter)
    if split == "validation":
        return None
    raise ConfigError(
        f"data {str(path)!r} is a file, which has no split {split!r}: leave out data_options.split; "
        "validation_data names a file of held-out prompts"
    )


def hub(name: str, split: str, *, subset: str = "") -> Ranges | None:
    """Read a data set of the Hugging Face hub.

    Args:
        name: of the data set, such as "openai/gsm8k".
        split: of the data set, or a part of one such as "train[:80%]".
        subset: name of the subset, for a data set with several.

    Raises ConfigError if it cannot be read.
    """
    return read(name, subset, split, who="data")


def read(path: str, subset: str, split: str, *, who: str, delimiter: str = "") -> Ranges | None:
    """Read a file or data set; None if a data set has no split "validation".

    Args:
        subset: of a data set.
        split: of a data set, such as "train" or "train[:80%]".
        who: the source, for messages.
        delimiter: the character between the cells of a .csv or .tsv; by default a comma or a tab.

    Raises ConfigError if it cannot be read.
    """
    check_there(path, who=who)
    named = f"{who} {path!r}"
    if delimiter and Path(path).suffix not in DELIMITED:
        raise ConfigError(f"{named}: has no delimiter, as {' and '.join(DELIMITED)} have; leave it out")
    if not is_file(path):
        parts = data_set(path, subset, split, named)
        return None if parts is None else Ranges(parts, again=(path, subset, split, who, delimiter))
    if subset:
        raise ConfigError(
            f"{named}: is a file, which has no subset {subset!r}; leave out data_options.subset"
        )
    rows = read_file(path, Path(path).suffix, named, delimiter)
    return Ranges([(os.path.realpath(path), rows, 0, len(rows))], again=(path, subset, split, who, delimiter))


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
        parts: the name of rows, the rows, and the indices from and before which they belong to it.
        again: arguments of ``read``, which a pickled copy calls.
    """

    read_at_start = True

    def __init__(self, parts: Sequence[tuple[str, Rows, int, int]], again: tuple[str, ...] = ()) -> None:
        self.parts, self._again = parts, again
        self._ends = list(accumulate(end - begin for *_, begin, end in parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_again, self._again

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        nth = bisect_right(self._ends, index)
        _, rows, _, end = self.parts[nth]
        return rows[end - self._ends[nth] + index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for _, rows, begin, end in self.parts:
            whole = (begin, end) == (0, len(rows))
            yield from rows if whole else (rows[index] for index in range(begin, end))

    def shared(self, other: Ranges) -> int:
        """Return the number of rows that are in both."""
        pairs = [(a, b) for a in self.parts for b in other.parts if a[0] == b[0]]
        return sum(max(0, min(a[3], b[3]) - max(a[2], b[2])) for a, b in pairs)


def _read_again(path: str, subset: str, split: str, who: str, delimiter: str) -> Ranges | None:
    return read(path, subset, split, who=who, delimiter=delimiter)


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


Parts = list[tuple[str, Rows, int, int]]


def data_set(path: str, subset: str, split: str, who: str) -> Parts | None:
    """Return the parts of a split; None if there is no split "validation".

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
    parts: Parts = []
    for name, path in zip(files, here, strict=True):
        suffix = next(each for each in reversed(Path(name).suffixes) if each in (*JSON, *DELIMITED))
        delimiter = config.delimiter or config.sep if suffix == ".csv" else ""
        rows = read_file(path, suffix, f"{who}: {name!r}", delimiter)
        parts.append((name, rows, 0, len(rows)))
    return Ranges(parts)
