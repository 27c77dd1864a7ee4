"""The data that a configuration names, and rows that are all read before a run begins.

A bad row, a field that no row has and a repeated id are errors then.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from attrs import fields_dict, frozen

from grpo_core.config import RowOptions, structured
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import Prompt
from grpo_core.data.files import is_file
from grpo_core.data.leakage import digest
from grpo_core.data.positions import columns_of
from grpo_core.data.repeats import exact_digest
from grpo_core.data.rows import NAMED, RowReader, missing
from grpo_core.data.sizes import size
from grpo_core.plugins.installed import in_file

FILES = "file:"
"""Name of the offer that reads files and directories; the path follows."""


@frozen
class DataChoice:
    """A dataloader, with the options that name the fields of its rows and its own options."""

    name: str
    """Name of the offer."""
    text: str
    """Value of the key ``data``."""
    rows: RowOptions
    options: Mapping[str, Any]
    """Options of the dataloader's factory."""

    def same(self, other: DataChoice) -> bool:
        """Return whether both name the same file, directory or data set."""
        paths = [os.path.realpath(Path(each.text).expanduser()) for each in (self, other)]
        return self.text == other.text or (self.name.startswith(FILES) and paths[0] == paths[1])

    def split(self, split: str) -> str:
        """Return the name of ``"train"`` or ``"validation"`` in the data."""
        return (self.rows.split if split == "train" else self.rows.validation_split) or split


def choose(text: str, options: Mapping[str, Any], *, where: str = "data_options") -> DataChoice:
    """Return the dataloader for ``data`` and ``data_options``.

    Raises ConfigError for an option of ours with a value of a wrong type.
    """
    known = fields_dict(RowOptions)
    ours = {key: value for key, value in options.items() if key in known}
    own = {key: value for key, value in options.items() if key not in known}
    name = FILES + text if is_path(text) else text
    return DataChoice(name, text, structured(RowOptions, ours, where=where), own)


def is_path(text: str) -> bool:
    """Return whether a value of ``data`` is a file or a directory, and not the name of a dataloader."""
    if in_file(text) is not None:
        return False
    return is_file(text) or Path(text).expanduser().exists() or (":" not in text and "/" in text)


def check_there(text: str, *, who: str) -> None:
    """Raise ConfigError if a value of ``data`` is a path that does not exist."""
    if not is_path(text) or Path(text).expanduser().exists():
        return
    hint = "" if is_file(text) else f"; a data set of the Hugging Face hub is written hub:{text}"
    raise ConfigError(f"{who} = {text!r}: there is no such file (from {str(Path.cwd())!r}){hint}")


# ---------------------------------------------------------------------------------- rows that are all read


class SomePrompts(list[Prompt]):
    """Some prompts of many.

    Args:
        digests: of the texts that a warning compares: of all training rows, or of these held-out prompts.
        known: number of all prompts; 0 if they are a stream, of which these are the first.
    """

    def __init__(self, prompts: Sequence[Prompt], digests: Sequence[int], known: int = 0) -> None:
        super().__init__(prompts)
        self.digests, self.known = digests, known


def known_of(prompts: Sequence[Prompt]) -> int:
    """Return the number of all prompts of which these are some; 0 if they are the first of a stream."""
    return prompts.known if isinstance(prompts, SomePrompts) else len(prompts)


class ReadRows(Sequence[Prompt]):
    """Rows that are read before the run begins, as prompts.

    Args:
        rows: the rows.
        reader: makes prompts of them.
        converts: whether the environment makes the prompts: then a row need not have one.

    Raises (when it is opened):
        ConfigError: a row is not a prompt, or an id repeats.
    """

    def __init__(self, rows: Sequence[Any], reader: RowReader, *, converts: bool = False) -> None:
        self._rows, self._reader, self._converts = rows, reader, converts
        self.without_answer = 0
        """Number of rows without an answer; set by ``open``."""
        self.fingerprint = ""
        """Hash of all ids and messages, in order; set by ``open``."""
        self.repeated = 0
        """Number of rows that ``deduplicate`` leaves out; set by ``open``."""
        self.digests = array("Q")
        """Digest of each prompt's text, see ``grpo_core.data.leakage``; set by ``open``."""
        self.sizes = array("I")
        """Upper bound of each prompt's tokens, see ``grpo_core.data.sizes``; set by ``open``."""
        self.places: Sequence[int] = range(len(rows))
        """Places of the rows that are kept."""

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        places = self.places[index]
        return self._prompt(places) if isinstance(places, int) else [self._prompt(place) for place in places]

    def _prompt(self, place: int) -> Prompt:
        row = self._rows[place]
        return self._reader.prompt(row, self._reader.fields(row, place), place)

    @property
    def raw(self) -> RawRows:
        """The rows as the dataloader gave them."""
        return RawRows(self._rows, self.places, self.fingerprint)

    def open(self) -> None:
        """Read every row; further calls do nothing."""
        if self.fingerprint:
            return
        if not len(self._rows):
            raise ConfigError(f"{self._reader.who} is empty; expected at least one row")
        deduplicates, kept, hashed = self._reader.options.deduplicate, array("q"), hashlib.sha256()
        texts: set[bytes] = set()
        ids: set[int] = set()  # hashes, since five million ids would take half a GB
        options, usual = self._reader.options, RowOptions()
        unseen = [key for key in NAMED if getattr(options, key) != getattr(usual, key)]
        for place, row in enumerate(self._rows):
            fields = self._reader.fields(row, place)
            if "prompt" in fields or not self._converts:
                prompt = self._reader.prompt(row, fields, place)
            else:
                prompt = Prompt(messages=(), id=fields["id"])
            if deduplicates:
                if (exact := exact_digest(prompt)) in texts:
                    self.repeated += 1
                    continue
                texts.add(exact)
            text = digest(prompt)
            self._check_id(prompt.id, place, ids, kept)
            unseen = [key for key in unseen if missing(columns_of(row).get(getattr(options, key)))]
            kept.append(place)
            self.digests.append(text)
            self.sizes.append(size(prompt))
            self.without_answer += missing(prompt.answer)
            hashed.update(f"{prompt.id!r} {text};".encode())
        self.places = kept if self.repeated else self.places
        if unseen:
            name = getattr(options, unseen[0])
            raise ConfigError(
                f"{self._reader.who}: no row has a value in {name!r}, which data_options.{unseen[0]} names; "
                f"columns: {', '.join(columns_of(self._rows[0]))}"
            )
        if self.without_answer == len(self.places):
            self._reader.check_named([self._rows[0]])
        self.fingerprint = hashed.hexdigest()[:16]

    def _check_id(self, id: str, place: int, ids: set[int], kept: Sequence[int]) -> None:
        """Raise ConfigError for a repeated id."""
        if (known := hash(id)) in ids and not self._reader.options.repeats:
            for other in kept:
                if self._reader.fields(self._rows[other], other)["id"] == id:
                    raise ConfigError(
                        f"{self._reader.who}, row {place + 1}: has the id {id!r}, as row {other + 1}; ids "
                        "must be unique in a task (data_options.id names their field)"
                    )
        ids.add(known)

    def leave_out(self, indices: Collection[int]) -> None:
        """Leave out the prompts at some indices; later prompts move up."""
        left = [nth for nth in range(len(self)) if nth not in indices]
        self.places = array("q", (self.places[nth] for nth in left))
        self.digests = array("Q", (self.digests[nth] for nth in left))
        self.sizes = array("I", (self.sizes[nth] for nth in left))
        known = f"{self.fingerprint} without {sorted(indices)}"
        self.fingerprint = hashlib.sha256(known.encode()).hexdigest()[:16]


class RawRows(Sequence[Any]):
    """Rows as the dataloader gave them, of those that are kept."""

    def __init__(self, rows: Sequence[Any], places: Sequence[int], fingerprint: str) -> None:
        self._rows, self.places, self.fingerprint = rows, places, fingerprint

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        places = self.places[index]
        return self._rows[places] if isinstance(places, int) else [self._rows[place] for place in places]

    def __iter__(self) -> Iterator[Any]:
        return (self._rows[place] for place in self.places)
