"""Reads the rows of text files: JSON and delimited text, by the standard library (law B3).

Nothing becomes a date or a number that the file does not write as one.  Only the places of the rows are in
memory, and a row is parsed on access.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from grpo_core.contracts.errors import ConfigError

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
                    self._check(cells)
                    yield begin
                    yield end
                    nth += 1
                begin = end
        except (ValueError, csv.Error) as error:
            if nth < 0:
                raise ConfigError(f"{self._who}: its first line, of the columns: {error}") from None
            raise self._wrong(nth, self._help(error)) from None

    def _check(self, cells: list[str]) -> None:
        if len(cells) != len(self._names):
            delimiter = self._dialect["delimiter"]
            raise ValueError(f"{len(cells)} cells, expected {len(self._names)} columns between {delimiter!r}")

    def _help(self, error: Exception) -> object:
        if not isinstance(error, csv.Error):
            return error
        return (
            f"not RFC 4180: {error}. A cell that begins with a quotation mark ends with one, and marks "
            "within it are doubled; in a .tsv they are text"
        )

    def _row(self, text: str) -> Mapping[str, Any]:
        return dict(zip(self._names, next(csv.reader([text], **self._dialect)), strict=True))
