"""The data of a task: its dataloader, and the prompts of its environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from attrs import define, evolve, field, fields_dict, frozen

from grpo_core.config import RowOptions, TaskConfig
from grpo_core.contracts.errors import ConfigError, PluginError, did_you_mean, wrong_input
from grpo_core.contracts.records import Prompt
from grpo_core.data.files import Ranges, check_apart
from grpo_core.data.loaders import Convert, IndexedLoader, LookAhead, StreamLoader, Thread, converted
from grpo_core.data.order import some
from grpo_core.data.positions import NO_FIELDS
from grpo_core.data.prompts import digest
from grpo_core.data.rows import (
    DataChoice,
    ReadRows,
    RowReader,
    SomePrompts,
    check_there,
    choose,
    is_at_hand,
    is_sized,
    readable,
)
from grpo_core.data.streams import Reading, compare, read_elsewhere, try_here
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.offers import signature_of

Trial = Callable[[Thread], Awaitable[Collection[str]]]
"""Tries a stream on a thread; returns fields that differ each time a row is read."""
AT_ONCE = 1000
"""Number of rows that an environment converts in one call."""


class Converting(Protocol):
    """An environment that may have prompts, and may make prompts of rows."""

    async def prompts(self, split: str) -> list[Prompt]: ...
    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None: ...


@define(eq=False)
class TaskData:
    """The prompts of a task or validation set.

    Training prompts are a sequence if all of them are at hand; otherwise ``loader`` reads them.
    """

    task: str
    host: PluginHost
    environment: Converting
    choice: DataChoice | None
    """The dataloader of the training prompts; None: the environment has them."""
    held_out: DataChoice | None
    """The dataloader of the held-out prompts alone."""
    seed: int = 0
    deadline: float = 120.0
    tries: bool = False
    """Whether a stream is tried before it is used."""
    needs: int = 0
    """Number of prompts that the run needs at least."""
    notes: dict[str, str] = field(init=False, factory=dict)
    """Warnings about the dataloader, by cause."""
    _opened: LookAhead | None = field(init=False, default=None)
    """Reads the training prompts; made by ``prompts("train")``."""

    @classmethod
    def of(
        cls, name: str, task: TaskConfig, host: PluginHost, environment: Converting, **given: Any
    ) -> TaskData:
        choice, held_out = choices(name, task, host)
        for each in (choice, held_out):
            if each is not None:
                host.find("dataloader", each.name).load()  # two threads must not import a plugin
        return cls(name, host, environment, choice, held_out, **given)

    async def prompts(self, split: str, first: int) -> Sequence[Prompt]:
        """Return the prompts of a split, or the ``first`` of rows that are not at hand.

        Raises PluginError, ConfigError.
        """
        return await (self._train(first) if split == "train" else self._validation(first))

    @property
    def loader(self) -> LookAhead | None:
        """Reads the training prompts, if they are not at hand."""
        opened = self._opened
        return None if isinstance(opened, IndexedLoader) and opened.at_hand else opened

    def close(self) -> None:
        """End reading."""
        if self._opened is not None:
            self._opened.close()

    # ------------------------------------------------------------------------------ training

    async def _train(self, first: int) -> Sequence[Prompt]:
        if self.choice is None:
            return await self._own("train")
        with wrong_input():
            source = await self._source(self.choice)
            if self._opened is None:
                trial = partial(self._try, self.choice, source) if self.tries else None
                self._opened = await source.training(trial)
                self._opened.warn = self.notes.__setitem__
            read = self._opened.data if isinstance(self._opened, IndexedLoader) else None
            if not isinstance(read, ReadRows):
                return await self._opened.first(first)
            if self.loader is None:
                return read
            return SomePrompts(await source.prompts(read[:first], read.places), read.digests)

    async def _try(self, choice: DataChoice, source: Source, thread: Thread) -> Collection[str]:
        """Try a stream that a plugin makes; return fields that differ each time a row is read.

        Notes what was found.  Raises ConfigError, PluginError.
        """
        who, split, make = source.who, choice.split("train"), partial(source.make, "train")
        tried: Reading | None
        if self.host.of_program(choice.name):
            tried = await source.called(thread, partial(try_here, make, who))
        else:
            reading = await read_elsewhere(
                self.host.selection, choice.name, split, choice.options, who, seconds=self.deadline
            )
            tried = await source.called(thread, partial(compare, reading, make, who))
        if tried is None:
            return ()
        if tried.ends is not None and tried.ends < self.needs:
            raise ConfigError(
                f"{who} has {tried.ends:,} rows and cannot be read twice; the run needs {self.needs:,} "
                "(trainer.steps x trainer.prompts_per_step). Give a function that makes it, for each epoch "
                "anew, or train fewer steps"
            )
        if tried.without:
            self.notes[f"fields_differ/{self.task}"] = (
                f"{who}: {', '.join(sorted(tried.without))} differ each time a row is read; the other fields "
                "prove its position"
            )
        if tried.lost:
            seconds = 1e6 * tried.seconds / tried.rows
            self.notes[f"rows_are_counted/{self.task}"] = (
                f"{who}: its state lacks {tried.lost}, so a resumed run reads all rows again and compares: "
                f"about {max(1, round(seconds)):,} s for a million rows"
            )
        return tried.without

    # ------------------------------------------------------------------------------ held-out prompts

    async def _validation(self, first: int) -> Sequence[Prompt]:
        """Return held-out prompts: of their own dataloader, of the task's, or of the environment."""
        found = await self.held_out_rows(first)
        return await self._own("validation") if found is None else found

    async def held_out_rows(self, first: int) -> Sequence[Prompt] | None:
        """Return the held-out prompts of dataloaders, or None if they have none."""
        if self.held_out is None:
            return None if self.choice is None else await self._held_out(self.choice, "validation", first)
        for split in ("validation", "train"):  # a file has one split, all of which is held out
            if (found := await self._held_out(self.held_out, split, first)) is not None:
                return found
        raise ConfigError(
            f"task {self.task!r}: dataloader {self.held_out.text!r}: it has no held-out prompts"
        )

    async def _held_out(self, choice: DataChoice, split: str, first: int) -> Sequence[Prompt] | None:
        source = await self._source(choice)

        def make(_: str) -> Any:
            rows = source.make(split)
            if isinstance(rows, Ranges) and self.choice is not None and self.choice.same(choice):
                check_apart(self._make(self.choice, "train"), rows, source.who)
            return rows

        return await evolve(source, make=make).held_out(first)

    # ------------------------------------------------------------------------------ shared

    async def _own(self, split: str) -> Sequence[Prompt]:
        """Return the environment's prompts.  Raises PluginError, ConfigError."""
        try:
            prompts = await self.environment.prompts(split)
        except PluginError as error:
            if split == "train" or self.choice is None:
                raise
            raise ConfigError(
                f"task {self.task!r}: it has no held-out prompts: its data {self.choice.text!r} has training "
                f"prompts only, and its environment offers none. Set tasks.{self.task}.validation_data, or "
                f"validation.every=0. ({error})"
            ) from error
        if split == "train" and not prompts:
            raise PluginError(
                f"task {self.task!r}: prompts('train') of its environment is empty; expected at least one "
                "prompt"
            )
        return prompts

    def _make(self, choice: DataChoice, split: str) -> Any:
        return self.host.make("dataloader", choice.name, choice.split(split), **choice.options)

    async def _source(self, choice: DataChoice) -> Source:
        converts = await self.environment.convert([]) is not None
        return Source(
            self.task,
            choice.text,
            partial(self._make, choice),
            choice.rows,
            self.seed,
            self.deadline,
            self.environment.convert if converts else None,
        )


@frozen
class Source:
    """A dataloader of a task, and the way in which its rows become prompts."""

    task: str
    name: str
    """Name of the dataloader, for messages."""
    make: Callable[[str], Any]
    """Makes the dataloader of a split."""
    options: RowOptions
    seed: int = 0
    """Seed of the shuffling, and of the choice of held-out prompts."""
    deadline: float = 120.0
    """Seconds for making it, and for each wait for a prompt."""
    convert: Convert | None = None
    """Lets the environment make the prompts."""

    @property
    def who(self) -> str:
        """The dataloader in messages."""
        return f"task {self.task!r}: dataloader {self.name!r}"

    async def training(self, trial: Trial | None = None) -> LookAhead:
        """Make the dataloader on a thread, and return the loader of its training rows.

        Rows that can be read before the run begins are read.

        Args:
            trial: tries a stream whose position is to be proved.

        Raises PluginError, ConfigError.
        """
        thread = Thread(self.who)
        try:
            rows = await self._rows("train", thread)
            if rows is None:
                raise PluginError(f"{self.who}: it is None for 'train'; expected rows")
            named: dict[str, Any] = {"name": self.name, "options": self.options}
            named |= {"deadline": self.deadline, "convert": self.convert, "thread": thread}
            if not is_sized(rows):
                again, without = partial(self.make, "train"), NO_FIELDS
                if trial is not None and self.options.exact:
                    rows, without = None, await trial(thread)
                return StreamLoader(self.task, make=again, first=rows, without=without, **named)
            if at_hand := is_at_hand(rows):
                rows = await self._read(rows)
            named |= {"seed": self.seed, "at_hand": at_hand and self.convert is None}
            loader = IndexedLoader(self.task, rows, **named)
            if not await self.called(thread, lambda: loader.size):  # rows may be used on their thread alone
                raise ConfigError(f"{self.who} is empty; expected at least one row")
            return loader
        except BaseException:
            thread.close()
            raise

    async def held_out(self, first: int) -> Sequence[Prompt] | None:
        """Return the held-out prompts of the dataloader; None if it has none.

        Where they are not all at hand, as many as ``first`` are chosen by the seed, or the first of a stream.

        Raises PluginError, ConfigError.
        """
        thread = Thread(self.who)
        try:
            rows = await self._rows("validation", thread)
            if rows is None:
                return None
            if not is_sized(rows):
                found = await self.called(thread, lambda: list(islice(rows, first)))
                prompts = await self.prompts(found, range(len(found)))
                known = 0 if len(found) == first else len(found)
                return SomePrompts(prompts, list(map(digest, prompts)), known)
            if is_at_hand(rows):
                rows = await self._read(rows)
                if self.convert is None:
                    return rows
            known = await self.called(thread, lambda: len(rows))
            places = some(known, first, f"{self.seed}/validation/{self.task}")
            found = await self.called(thread, lambda: [rows[place] for place in places])
            if not isinstance(rows, ReadRows):
                prompts = await self.prompts(found, places)
                return SomePrompts(prompts, list(map(digest, prompts)), known)
            prompts = await self.prompts(found, [rows.places[place] for place in places])
            return SomePrompts(prompts, [rows.digests[place] for place in places], known)
        finally:
            thread.close()

    async def prompts(self, rows: Sequence[Any], places: Sequence[int]) -> list[Prompt]:
        """Return the prompts of some rows."""
        reader, prompts = RowReader(self.task, self.who, self.options), list[Prompt]()
        reader.check_named(rows)
        read = [(row, reader.fields(row, place), place) for row, place in zip(rows, places, strict=False)]
        for begin in range(0, len(read), AT_ONCE):
            prompts += await converted(reader, self.convert, read[begin : begin + AT_ONCE])
        return prompts

    async def called(self, thread: Thread, call: Callable[[], Any]) -> Any:
        """Call the dataloader on its thread.  Raises PluginError or another GrpoError."""
        try:
            async with asyncio.timeout(self.deadline):
                return await thread(call)
        except TimeoutError:
            raise PluginError(
                f"{self.who} gave no rows within {self.deadline:g} s (environment.start_deadline); it is not "
                "made yet"
            ) from None

    async def _rows(self, split: str, thread: Thread) -> Any:
        """Make the dataloader of a split on its thread; return its rows, or None."""
        make = partial(self.make, split)
        return await self.called(thread, lambda: readable(make, self.who, exact=self.options.exact))

    async def _read(self, rows: Sequence[Any]) -> ReadRows:
        reader = RowReader(self.task, self.who, self.options)
        return await asyncio.to_thread(ReadRows, rows, reader, converts=self.convert is not None)


def choices(name: str, task: TaskConfig, host: PluginHost) -> tuple[DataChoice | None, DataChoice | None]:
    """Return the dataloaders of a task's training prompts and of its held-out prompts.

    Options of the dataloader's own are for the held-out prompts as well, if both are of one kind.
    """
    where = f"tasks.{name}.data_options"
    train = choose(task.data, task.data_options, where=where) if task.data else None
    held_out = choose(task.validation_data, task.data_options, where=where) if task.validation_data else None
    if train is not None and held_out is not None:
        kinds = [host.find("dataloader", each.name).offer for each in (train, held_out)]
        if kinds[0] is not kinds[1]:
            held_out = DataChoice(held_out.name, held_out.text, held_out.rows, {})
    return train, held_out


def check_data(key: str, name: str, task: TaskConfig, host: PluginHost) -> None:
    """Raise ConfigError or PluginError if a dataloader of a task cannot be made.

    Args:
        key: of the task or set in the configuration.
        name: of the task.
        task: its section.
        host: has the dataloaders.
    """
    texts = {"data": task.data, "validation_data": task.validation_data}
    for each, text in texts.items():
        if text:
            check_there(text, who=f"{key}.{each}")
    if not any(texts.values()) and task.data_options:
        return
    for choice in choices(name, task, host):
        if choice is None:
            continue
        signature = signature_of(host.find("dataloader", choice.name).load())
        own = set(signature.parameters) if signature is not None else set()
        if both := sorted((set(fields_dict(RowOptions)) - {"split"}) & own):
            raise ConfigError(
                f"{key}: the dataloader {choice.text!r} has an option {both[0]!r}, which is a key of the "
                "core in data_options; its factory has to call it differently"
            )
        for option in choice.options:
            near = did_you_mean(option, set(fields_dict(RowOptions)))
            if near and option not in own:
                raise ConfigError(f"{key}.data_options has no key {option!r}.{near}")
        host.check_options("dataloader", choice.name, choice.options)
