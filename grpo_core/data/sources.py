"""Prompts from files and data sets, for tasks whose environment only scores replies.

    [tasks.gsm8k]
    env = "math:gsm8k"
    source = { path = "train.jsonl", validation_path = "test.jsonl", prompt = "question" }

A source is a sequence of prompts.  It opens its file on first use and then reads every row once, so that a
bad row is an error before the run begins.  A pickled source opens its file again.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from grpo_core.config import SourceConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import Message, Prompt
from grpo_core.contracts.unicode import lone_surrogate, unreadable
from grpo_core.data.files import Rows, check_apart, is_file, is_null, read
from grpo_core.data.leakage import digest
from grpo_core.data.loaders import fingerprint
from grpo_core.data.repeats import exact_digest
from grpo_core.data.sizes import size
from grpo_core.data.templates import Templates
from grpo_core.text.messages import MessageError, prompt_messages

PROMPT_FIELDS = ("prompt", "messages", "question")
"""Fields that may hold the prompt, in order of preference, if the configuration names no field."""


class Source(Sequence[Prompt]):
    """The prompts of one split of a task.

    Args:
        task: name of the task, which is set on each prompt.
        path: a file (see ``grpo_core.data.files``), or a data set (a directory or hub id for ``datasets``).
        split: split of the data set.
        config: how rows become prompts.
        what: description of the path, for messages.
        train: the split of the training prompts, which these must not be, if they are of the same path.

    Raises (when it is opened):
        ConfigError: the file cannot be read, or a row is not a prompt.
    """

    def __init__(
        self,
        task: str,
        path: str,
        config: SourceConfig,
        *,
        split: str = "train",
        what: str = "source",
        train: str = "",
    ) -> None:
        self._what, self._train = what, train
        self._task, self._path, self._config, self._split = task, path, config, split
        self._rows: Rows | None = None
        self.without_answer = 0
        """Number of prompts without an answer; set by ``open``."""
        self.fingerprint = ""
        """Hash of all ids and messages, in order; set by ``open``."""
        self.left_out = self.repeated = 0
        """Numbers of rows that ``where`` and ``deduplicate`` leave out; set by ``open``."""
        self.digests = array("Q")
        """Digest of each prompt's text, see ``grpo_core.data.leakage``; set by ``open``."""
        self.sizes = array("I")
        """Upper bound of each prompt's tokens, see ``grpo_core.data.sizes``; set by ``open``."""
        self._kept = array("q")
        """Places of the rows that are prompts, if some are not."""
        texts = {key: getattr(config, key) for key in ("where", "template", "answer_template")}
        self._templates = Templates(texts, f"task {task!r}: source")

    def __len__(self) -> int:
        return len(self._kept) or len(self._opened())

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        rows = self._opened()
        indices = (self._kept or range(len(rows)))[index]
        if isinstance(indices, int):
            return next(self._prompts(rows, [indices]))
        return list(self._prompts(rows, indices))

    def _prompts(self, rows: Rows, indices: Iterable[int]) -> Iterator[Prompt]:
        for index, row, filled in self._templates.fill((index, rows[index]) for index in indices):
            yield self._prompt(row, index, filled)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def open(self) -> None:
        """Read every row once; further calls do nothing."""
        self._opened()

    def leave_out(self, indices: Collection[int]) -> None:
        """Leave out the prompts at some indices; later prompts move up."""
        left = [nth for nth in range(len(self)) if nth not in indices]
        kept = self._kept or range(len(self._opened()))
        self._kept = array("q", (kept[nth] for nth in left))
        self.digests = array("Q", (self.digests[nth] for nth in left))
        self.sizes = array("I", (self.sizes[nth] for nth in left))
        known = f"{self.fingerprint} without {sorted(indices)}"
        self.fingerprint = hashlib.sha256(known.encode()).hexdigest()[:16]

    def _opened(self) -> Rows:
        if self._rows is None:
            rows = self._read()
            self.fingerprint = self.fingerprint or self._check(rows)
            self._rows = rows
        return self._rows

    def _read(self) -> Rows:
        who, subset = f"task {self._task!r}: source", self._config.subset
        rows = read(self._path, subset, self._split, who=who)
        if self._train:
            check_apart(read(self._path, subset, self._train, who=who), rows, f"{who} {self._path!r}")
        return rows

    def _check(self, rows: Rows) -> str:
        """Return the fingerprint.  Raises ConfigError for a row that is not a prompt or repeats an id."""
        if not len(rows):
            raise ConfigError(f"task {self._task!r}: source {self._path!r} is empty; expected prompts")
        found = fingerprint(self._unique(rows, self._kept_of(rows)))
        answer = self._config.answer
        if len(self._kept) == len(rows):
            self._kept = array("q")
        elif not self._kept:
            raise ConfigError(
                f"task {self._task!r}: source {self._path!r}: source.where = {self._config.where!r} leaves "
                f"out all of its {len(rows):,} rows"
            )
        if "answer_template" not in self._templates and answer != SourceConfig().answer:
            self._refuse_empty("answer", answer, rows)
        if self._config.id != SourceConfig().id:
            self._refuse_empty("id", self._config.id, rows)
        return found

    def _refuse_empty(self, key: str, name: str, rows: Rows) -> None:
        """Raise ConfigError if no row has a value in a field."""
        if all(missing(row.get(name)) for row in rows):
            raise ConfigError(
                f"task {self._task!r}: source {self._path!r}: no row has a value in the field {name!r}, "
                f"which source.{key} names; the first row has {', '.join(map(repr, rows[0]))}"
            )

    def _kept_of(self, rows: Rows) -> Iterator[tuple[int, Prompt]]:
        """Yield the prompts that are kept with their places, and count those without an answer."""
        self.without_answer = self.left_out = self.repeated = 0
        self.digests, self.sizes, self._kept = array("Q"), array("I"), array("q")
        seen: set[bytes] = set()
        for place, row, filled in self._templates.fill(enumerate(rows)):
            if not filled.get("where", True):
                self.left_out += 1
                continue
            prompt = self._prompt(row, place, filled)
            if self._config.deduplicate:
                if (exact := exact_digest(prompt)) in seen:
                    self.repeated += 1
                    continue
                seen.add(exact)
            self._kept.append(place)
            self.digests.append(digest(prompt))
            self.sizes.append(size(prompt))
            self.without_answer += missing(prompt.answer)
            yield place, prompt

    def _unique(self, rows: Rows, prompts: Iterator[tuple[int, Prompt]]) -> Iterator[Prompt]:
        """Yield the prompts.  Raises ConfigError for a repeated id."""
        seen: set[int] = set()  # hashes, since five million ids would take half a GB
        for place, prompt in prompts:
            if (found := hash(prompt.id)) in seen:
                made = zip(self._kept, self._prompts(rows, self._kept), strict=False)
                same = (other for other, known in made if known.id == prompt.id)
                if (other := next(same)) != place:
                    raise ConfigError(
                        f"{self._place(place)}: has the id {prompt.id!r}, as row {other + 1}; ids must be "
                        "unique in a task (source.id names their field)"
                    )
            seen.add(found)
            yield prompt

    def prompt_of(self, row: Mapping[str, Any], place: int) -> Prompt | None:
        """Return the prompt of any row, or None if ``where`` leaves it out.  Raises ConfigError."""
        ((_, _, filled),) = self._templates.fill([(place, row)])
        return self._prompt(row, place, filled) if filled.get("where", True) else None

    def _prompt(self, row: Mapping[str, Any], place: int, filled: Mapping[str, Any]) -> Prompt:
        config, given = self._config, dict(row)
        answer = filled.get("answer_template", given.pop(config.answer, None))
        field = "template" if "template" in filled else self._field(given, place)
        found = filled["template"] if "template" in filled else given.pop(field)
        messages = self._messages(found, field, place)
        named = given.pop(config.id, None)
        id = str(place) if missing(named) else str(named)
        if surrogate := lone_surrogate([id, messages]):
            raise ConfigError(f"{self._place(place)}: prompt {id!r} {unreadable(surrogate)}")
        return Prompt(
            messages=messages,
            answer=None if is_null(answer) else answer,
            id=id,
            environment=self._task,
            info={name: value for name, value in given.items() if not is_null(value)},
        )

    def _messages(self, given: Any, field: str, place: int) -> tuple[Message, ...]:
        """Return the messages of a prompt's field.  Raises ConfigError if it is not a prompt."""
        given = given.tolist() if hasattr(given, "tolist") else given  # numpy's, in rows of pandas
        if not isinstance(given, (str, list, tuple)) or not given:
            raise ConfigError(
                f"{self._place(place)}: {field!r} is {given!r:.80}, expected text or messages such as "
                "{'role': 'user', 'content': '...'}"
            )
        messages: tuple[Message, ...] = ({"role": "user", "content": given},)
        try:
            messages = messages if isinstance(given, str) else prompt_messages(given)
        except MessageError as error:
            raise ConfigError(f"{self._place(place)}: {error}") from None
        system = self._config.system
        return ({"role": "system", "content": system}, *messages) if system else messages

    def _field(self, given: Mapping[str, Any], place: int) -> str:
        """Return the field of the prompt.  Raises ConfigError if there is none."""
        config = self._config
        wanted = (config.prompt,) if config.prompt else PROMPT_FIELDS
        there = [name for name in wanted if name in given]
        if not there:
            raise ConfigError(
                f"{self._place(place)}: has no field {' or '.join(map(repr, wanted))}, only "
                f"{', '.join(map(repr, given)) or 'nothing'}; source.prompt names the field of the prompt"
            )
        return next((name for name in there if not is_null(given[name])), there[0])

    def _place(self, place: int) -> str:
        return f"task {self._task!r}: {self._what} {self._path!r}, row {place + 1}"


def missing(value: Any) -> bool:
    """Return whether an answer or id is null, or an empty text, as in a table of texts."""
    return is_null(value) or (isinstance(value, str) and not value)


def find_source(task: str, config: SourceConfig, split: str) -> Source | None:
    """Return the source of ``"train"`` or ``"validation"``, or None if the environment has the prompts."""
    _refuse_splits_of_a_file(task, config)
    if split == "train":
        return Source(task, config.path, config, split=config.split) if config.path else None
    path = config.validation_path or (config.path if config.validation_split else "")
    if not path:
        return None
    train = config.split if config.path and _same(path, config.path) else ""
    return Source(task, path, config, split=config.validation_split or config.split, train=train)


def _same(path: str, other: str) -> bool:
    return path == other or os.path.realpath(path) == os.path.realpath(other)


def _refuse_splits_of_a_file(task: str, config: SourceConfig) -> None:
    """Raise ConfigError for keys that apply to data sets only, if the paths are files."""
    default, validation = SourceConfig(), config.validation_path or config.path
    keys = []
    if all(is_file(path) for path in (config.path, validation) if path):
        keys += [key for key in ("subset", "split") if getattr(config, key) != getattr(default, key)]
    if config.validation_split and is_file(validation):
        keys.append("validation_split")
    if not keys or not validation:
        return
    held_out = "; source.validation_path names a file of held-out prompts"
    raise ConfigError(
        f"task {task!r}: source {validation!r} is a file, which has no splits and subsets: "
        f"leave out {' and '.join(f'source.{key}' for key in keys)}"
        + (held_out if "validation_split" in keys and not config.validation_path else "")
    )
