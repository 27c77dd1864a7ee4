"""Rows of dataloaders, and the prompts that they become."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.config import RowOptions
from grpo_core.contracts.errors import ConfigError, GrpoError, PluginError, fault_of
from grpo_core.contracts.records import Message, Prompt
from grpo_core.contracts.unicode import lone_surrogate, unreadable
from grpo_core.data.files import is_null
from grpo_core.data.workers import prepare_workers
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
        elif (field := self._field(columns, place)) is not None:
            messages = self._messages(columns[field], field, place)
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
        if isinstance(row, Prompt):
            info = row.info
        else:
            used = {self.options.answer, self.options.id, self._prompt_field(row)}
            info = {
                name: value
                for name, value in ({} if isinstance(row, str) else row).items()
                if name not in used and not is_null(value)
            }
        id, messages = fields["id"], fields["prompt"]
        if surrogate := lone_surrogate([id, messages]):
            raise ConfigError(f"{self._place(place)}: prompt {id!r} {unreadable(surrogate)}")
        return Prompt(messages=messages, answer=fields["answer"], id=id, environment=self.task, info=info)

    def check_named(self, rows: Sequence[Any]) -> None:
        """Raise ConfigError if a field that the options name is in none of these rows.

        A field that is named by nobody is guessed for the prompt only if the answer is there as well.
        """
        tables = [row for row in rows if isinstance(row, Mapping)]
        usual, columns = RowOptions(), dict.fromkeys(str(name) for row in tables for name in row)
        for key in NAMED:
            name = getattr(self.options, key)
            if tables and name and name != getattr(usual, key) and name not in columns:
                raise ConfigError(
                    f"{self.who}: no row has {name!r}, which data_options.{key} names; columns: "
                    f"{', '.join(columns)}"
                )
        guessed = not self.options.prompt and self._prompt_field(columns) == GUESSED
        if guessed and not self.options.answer_template and self.options.answer not in columns:
            raise ConfigError(
                f"{self.who}: no row has {self.options.answer!r}; columns: {', '.join(columns)}. Name them, "
                f'as in data_options = {{ prompt = "{GUESSED}", answer = "{list(columns)[-1]}" }}'
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

    def _field(self, columns: Mapping[str, Any], place: int) -> str | None:
        """Return the field of the prompt.  Raises ConfigError if the options name one that is not there."""
        field = self._prompt_field(columns)
        if field is None and (named := self.options.prompt):
            raise ConfigError(
                f"{self._place(place)}: no row has {named!r}, which data_options.prompt names; columns: "
                f"{', '.join(map(str, columns))}"
            )
        return field

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
    return {
        "id": prompt.id,
        "messages": list(prompt.messages),
        "answer": prompt.answer,
        "info": dict(prompt.info),
    }


# ---------------------------------------------------------------------------------- dataloaders


def is_sized(rows: Any) -> bool:
    """Return whether rows are read by index."""
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def is_at_hand(rows: Any) -> bool:
    """Return whether all rows can be read before a run begins: a list, or the rows of a file."""
    return isinstance(rows, list | tuple) or bool(getattr(rows, "read_at_start", False))


def readable(given: Any, who: str, *, exact: bool = True) -> Any:
    """Return rows that are read by index, or an iterable.  Raises PluginError for anything else.

    Args:
        given: a plugin's dataloader.
        who: the dataloader, for messages.
        exact: whether its position has to be saved.
    """
    ignore_warnings_of_torchdata()
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
    if isinstance(given, str | bytes | Mapping):
        raise PluginError(f"{who}: it is {given!r:.80}, of type {type(given).__name__}; expected {FORMS}")
    if hasattr(given, "iloc"):  # iterating a DataFrame gives the names of its columns
        raise PluginError(
            f"{who}: it is a {type(given).__name__}; give its rows, as in frame.to_dict('records')"
        )
    if is_sized(given):
        return given
    if not hasattr(given, "__iter__"):
        raise PluginError(f"{who}: it is {given!r:.80}, of type {type(given).__name__}; expected {FORMS}")
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


def ignore_warnings_of_torchdata() -> None:
    """Ignore the warning of a call of torch that torchdata makes itself."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def as_it_is(rows: Any) -> Any:
    """Return the rows unchanged; torch would make tensors of their numbers."""
    return rows


def is_of(given: Any, module: str, name: str) -> bool:
    """Return whether something is of a class whose module may not be imported."""
    there = sys.modules.get(module)
    return there is not None and isinstance(given, getattr(there, name))


def raised(who: str, what: str, error: BaseException) -> GrpoError:
    """Return the error that names the dataloader."""
    if isinstance(error, GrpoError):
        return error
    fault = fault_of(error)
    return PluginError(f"{who}: {what} raised {fault}").carrying(fault)
