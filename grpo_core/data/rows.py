"""Rows of dataloaders, the prompts that they become, and rows that are all read before a run begins.

The latter are those of files and lists.  A bad row, a field that no row has and a repeated id are errors
then.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import fields_dict, frozen

from grpo_core.config import RowOptions, structured
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Message, Prompt
from grpo_core.contracts.unicode import lone_surrogate, unreadable
from grpo_core.data.files import Ranges, is_file, is_null
from grpo_core.data.positions import columns_of
from grpo_core.data.prompts import digest, exact_digest, size
from grpo_core.data.workers import prepare_workers
from grpo_core.plugins.files import in_file
from grpo_core.plugins.offers import signature_of
from grpo_core.text.messages import MessageError, prompt_messages
from grpo_core.text.messages import readable as readable_prompt

GUESSED = "question"
"""Field of the prompt in data sets of questions and answers."""
PROMPT_FIELDS = ("prompt", "messages", GUESSED)
"""Fields that may hold the prompt, in order of preference, if the configuration names no field."""
FORMS = (
    "a sequence, a torch Dataset, a torchdata StatefulDataLoader or torchdata.nodes pipeline, or an iterable "
    "with state_dict() and load_state_dict()"
)
FIELD = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
"""A field in a template."""
NAMED = ("prompt", "answer", "id")
"""Fields that every row has in ``Environment.prompt``, under these names."""


class RowReader:
    """Makes prompts of rows.

    Args:
        task: name of the task.
        who: the dataloader, for messages.
        options: name the fields of a row.
    """

    def __init__(self, task: str, who: str, options: RowOptions) -> None:
        self.task, self.who, self.options = task, who, options
        names = {key: getattr(options, key) for key in NAMED}
        self.named = {key: name for key, name in names.items() if name != getattr(RowOptions(), key)}
        """Fields that the configuration names."""

    def fields(self, row: Any, place: int) -> dict[str, Any]:
        """Return what ``Environment.prompt`` receives for a row: its columns, and the three named fields.

        The field ``prompt`` is missing if no column may hold the prompt and none is named.
        Raises ConfigError for a field that is not a prompt, PluginError for something that is not a row.
        """
        options = self.options
        if isinstance(row, str):
            row = {"prompt": row}
        if isinstance(row, Prompt):
            messages: Any = readable_prompt(row, self._place(place)).messages
            named = {"prompt": self._with_system(messages), "answer": row.answer, "id": row.id or str(place)}
            return {**row.info, **named}
        columns = self._columns(row, place)
        if options.template:
            text = self._filled("template", options.template, columns, place)
            messages = self._messages(text, "template", place)
        elif (field := self._prompt_field(columns)) is not None:
            messages = self._messages(columns[field], field, place)
        elif options.prompt:
            raise self.unseen("prompt", columns, self._place(place))
        else:
            messages = None
        if options.answer_template:
            answer: Any = self._filled("answer_template", options.answer_template, columns, place)
        else:
            answer = columns.get(options.answer)
        id = columns.get(options.id)
        named = {"answer": None if is_null(answer) else answer, "id": str(place) if missing(id) else str(id)}
        return {**columns, **({} if messages is None else {"prompt": messages}), **named}

    def prompt(self, row: Any, fields: Mapping[str, Any], place: int) -> Prompt:
        """Return the prompt of a row whose environment does not convert it.

        Args:
            row: as the dataloader gave it.
            fields: of the row.
            place: of the row.

        Raises ConfigError if the row has no prompt.
        """
        if "prompt" not in fields:
            columns = ", ".join(map(repr, row)) or "nothing"
            raise ConfigError(
                f"{self._place(place)}: has no field {' or '.join(map(repr, PROMPT_FIELDS))}, only "
                f"{columns}; data_options.prompt names the field of the prompt"
            )
        id, messages = fields["id"], fields["prompt"]
        if surrogate := lone_surrogate([id, messages]):
            raise ConfigError(f"{self._place(place)}: prompt {id!r} {unreadable(surrogate)}")
        if isinstance(row, Prompt):
            answer, info, hint = row.answer, row.info, row.hint
            return Prompt(
                messages=messages, answer=answer, id=id, environment=self.task, info=info, hint=hint
            )
        used = {self.options.answer, self.options.id, self._prompt_field(row)}
        columns = {} if isinstance(row, str) else row
        info = {name: each for name, each in columns.items() if name not in used and not is_null(each)}
        return Prompt(messages=messages, answer=fields["answer"], id=id, environment=self.task, info=info)

    def check_named(self, rows: Sequence[Any]) -> None:
        """Raise ConfigError if a field that the options name is in none of these rows.

        A field that is named by nobody is guessed for the prompt only if the answer is there as well.
        """
        tables = [row for row in rows if isinstance(row, Mapping)]
        columns = dict.fromkeys(str(name) for row in tables for name in row)
        for key, name in self.named.items():
            if tables and name and name not in columns:
                raise self.unseen(key, columns)
        guessed = not self.options.prompt and self._prompt_field(columns) == GUESSED
        if guessed and not self.options.answer_template and self.options.answer not in columns:
            raise ConfigError(
                f"{self.who}: no row has {self.options.answer!r}; columns: {', '.join(columns)}. Name them, "
                f'as in data_options = {{ prompt = "{GUESSED}", answer = "{list(columns)[-1]}" }}'
            )

    def unseen(self, key: str, columns: Iterable[Any], where: str = "") -> ConfigError:
        """Return the error for a field that the configuration names and that has no value."""
        lacks = f"{where}: has no field" if where else f"{self.who}: no row has a value in"
        return ConfigError(
            f"{lacks} {self.named[key]!r}, which data_options.{key} "
            f"names; columns: {', '.join(map(str, columns))}"
        )

    def _columns(self, row: Any, place: int) -> Mapping[str, Any]:
        if isinstance(row, Mapping):
            return row
        batch = isinstance(row, list | tuple) and bool(row) and isinstance(row[0], Prompt | Mapping)
        hint = "; give batch_size=None, so that rows come one by one" if batch else ""
        raise PluginError(
            f"{self._place(place)} is {row!r:.80} of type {type(row).__name__}, expected a Prompt or a "
            f"mapping of fields{hint}"
        )

    def _prompt_field(self, columns: Any) -> str | None:
        """Return the field of the prompt, or None if there is none, or a template makes the prompt."""
        if self.options.template:
            return None
        wanted = (self.options.prompt,) if self.options.prompt else PROMPT_FIELDS
        there = [name for name in wanted if name in columns] if isinstance(columns, Mapping) else []
        return next((name for name in there if not is_null(columns[name])), there[0] if there else None)

    def _messages(self, given: Any, field: str, place: int) -> tuple[Message, ...]:
        """Return the messages of a prompt's field.  Raises ConfigError if it is not a prompt."""
        given = given.tolist() if hasattr(given, "tolist") else given  # numpy's, in rows of pandas
        if not isinstance(given, str | list | tuple) or not given:
            raise ConfigError(
                f"{self._place(place)}: {field!r} is {given!r:.80}, expected text or messages such as "
                "{'role': 'user', 'content': '...'}"
            )
        messages: tuple[Message, ...] = ({"role": "user", "content": given},)
        try:
            messages = messages if isinstance(given, str) else prompt_messages(given)
        except MessageError as error:
            raise ConfigError(f"{self._place(place)}: {error}") from None
        return self._with_system(messages)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        system = self.options.system
        return ({"role": "system", "content": system}, *messages) if system else messages

    def _filled(self, key: str, template: str, columns: Mapping[str, Any], place: int) -> str:
        """Replace the fields in a template.  Raises ConfigError for a field that the row does not have."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name not in columns or is_null(columns[name]):
                raise ConfigError(
                    f"{self._place(place)}: data_options.{key} names the field {name!r}, which "
                    f"{'is null' if name in columns else 'is missing'}; it has "
                    f"{', '.join(map(repr, columns))}. A dataloader can compute other texts "
                    "(docs/first-dataloader.md)"
                )
            return str(columns[name])

        return FIELD.sub(value, template)

    def _place(self, place: int) -> str:
        return f"{self.who}, row {place + 1}"


def missing(value: Any) -> bool:
    """Return whether an answer or id is null, or an empty text, as in a table of texts."""
    return is_null(value) or (isinstance(value, str) and not value)


def plain(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt to values that a checkpoint can hold."""
    own = {name: getattr(prompt, name) for name in fields_dict(Prompt)}
    return {**own, "messages": list(prompt.messages), "info": dict(prompt.info)}


# ---------------------------------------------------------------------------------- dataloaders


def is_sized(rows: Any) -> bool:
    """Return whether rows are read by index."""
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def is_at_hand(rows: Any) -> bool:
    """Return whether all rows can be read before a run begins: a list, or the rows of a file."""
    return isinstance(rows, list | tuple | Ranges)


def readable(make: Callable[[], Any], who: str, *, exact: bool = True) -> Any:
    """Make a dataloader; return rows that are read by index, an iterable, or None if it is None.

    Args:
        make: makes a plugin's dataloader.
        who: the dataloader, for messages.
        exact: whether its position has to be saved.

    Raises PluginError for anything else.
    """
    # torchdata itself makes a call of torch that warns
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    if (given := make()) is None:
        return None
    if is_of(given, "torch.utils.data", "IterableDataset"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        if _needs_arguments(getattr(given, "state_dict", None)):
            kind = type(given).__name__
            raise PluginError(
                f"{who}: state_dict() of {kind} needs arguments, which the loader of its library gives: "
                "return that loader"
            )
        given = StatefulDataLoader(given, batch_size=None, collate_fn=as_it_is)
    if is_of(given, "torch.utils.data", "DataLoader") and given.num_workers:
        prepare_workers(given, who)
    if is_of(given, "torchdata.nodes", "BaseNode"):
        from torchdata.nodes import Loader

        return Loader(given, restart_on_stop_iteration=False)
    if hasattr(given, "iloc"):  # iterating a DataFrame gives the names of its columns
        raise PluginError(
            f"{who}: it is a {type(given).__name__}; give its rows, as in frame.to_dict('records')"
        )
    sized = is_sized(given)
    if isinstance(given, str | bytes | Mapping) or not (sized or hasattr(given, "__iter__")):
        raise PluginError(f"{who}: it is {given!r:.80}, of type {type(given).__name__}; expected {FORMS}")
    if sized:
        return given
    lacking = [name for name in ("state_dict", "load_state_dict") if not hasattr(given, name)]
    if lacking and exact:
        better = (
            "torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and has both"
            if is_of(given, "torch.utils.data", "DataLoader")
            else "without them a run could not be resumed. Add them, return rows with a length, or set "
            "data_options.exact = false"
        )
        kind = type(given).__name__
        raise PluginError(f"{who}: it is an iterable, a {kind}, without {' and '.join(lacking)}: {better}")
    return given


def _needs_arguments(method: Any) -> bool:
    signature = signature_of(method)
    return signature is not None and any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in signature.parameters.values()
    )


def as_it_is(rows: Any) -> Any:
    """Return the rows unchanged; torch would make tensors of their numbers."""
    return rows


def is_of(given: Any, module: str, name: str) -> bool:
    """Return whether something is of a class whose module may not be imported."""
    there = sys.modules.get(module)
    return there is not None and isinstance(given, getattr(there, name))


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
        paths = [os.path.realpath(Path(os.path.expanduser(each.text))) for each in (self, other)]
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
    return is_file(text) or Path(os.path.expanduser(text)).exists() or (":" not in text and "/" in text)


def check_there(text: str, *, who: str) -> None:
    """Raise ConfigError if a value of ``data`` is a path that does not exist."""
    if not is_path(text) or Path(os.path.expanduser(text)).exists():
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


class ReadRows(Sequence[Any]):
    """Rows that are read before the run begins, as prompts; as they are if the environment makes these.

    Args:
        rows: the rows.
        reader: makes prompts of them.
        converts: whether the environment makes the prompts: then a row need not have one.

    Raises ConfigError if a row is not a prompt, or an id repeats.
    """

    def __init__(self, rows: Sequence[Any], reader: RowReader, *, converts: bool = False) -> None:
        self._rows, self._reader, self._converts = rows, reader, converts
        self.without_answer = 0
        """Number of rows without an answer."""
        self.repeated = 0
        """Number of rows that ``deduplicate`` leaves out."""
        self.digests = array("Q")
        """Digest of each prompt's text, see ``grpo_core.data.prompts``."""
        self.sizes = array("I")
        """Upper bound of each prompt's tokens, see ``grpo_core.data.prompts``."""
        if not len(rows):
            raise ConfigError(f"{reader.who} is empty; expected at least one row")
        kept, hashed = array("q"), hashlib.sha256()
        texts: set[bytes] = set()
        ids: set[int] = set()  # hashes, since five million ids would take half a GB
        unseen = reader.named
        for place, row in enumerate(rows):
            fields = reader.fields(row, place)
            if "prompt" in fields or not converts:
                prompt = reader.prompt(row, fields, place)
            else:
                prompt = Prompt(messages=(), id=fields["id"])
            if reader.options.deduplicate:
                if (exact := exact_digest(prompt)) in texts:
                    self.repeated += 1
                    continue
                texts.add(exact)
            text = digest(prompt)
            self._check_id(prompt.id, place, ids, kept)
            unseen = {key: name for key, name in unseen.items() if missing(columns_of(row).get(name))}
            kept.append(place)
            self.digests.append(text)
            self.sizes.append(size(prompt))
            self.without_answer += missing(prompt.answer)
            hashed.update(f"{prompt.id!r} {text};".encode())
        self.places: Sequence[int] = kept if self.repeated else range(len(rows))
        """Places of the rows that are kept."""
        self.fingerprint = hashed.hexdigest()[:16]
        """Hash of all ids and messages, in order."""
        if unseen:
            raise reader.unseen(next(iter(unseen)), columns_of(rows[0]))
        if self.without_answer == len(kept):
            reader.check_named([rows[0]])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        places = self.places[index]
        return self._one(places) if isinstance(places, int) else [self._one(place) for place in places]

    def _one(self, place: int) -> Any:
        row = self._rows[place]
        return row if self._converts else self._reader.prompt(row, self._reader.fields(row, place), place)

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
