"""Jinja templates and conditions over the rows of a source, in Jinja's sandbox and a killable process.

A sandbox protects the machine, but not its time and memory: one line of a template may run for years or make
gigabytes of text.

A null field counts as missing, since tables cannot distinguish the two: it is not defined.  It is also false
and equal to none, and is never written as "None".
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import resource
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.contracts.errors import ChildDied, ConfigError, DeadlineExceeded, describe
from grpo_core.data.files import is_null
from grpo_core.processes.child import Child

SECONDS = 30.0
"""Seconds for ``ROWS`` rows, and for each row of them if they take longer."""
STARTING = 120.0
"""Seconds for the start of the process."""
MEMORY = 1 << 30
"""Bytes that the process may use in addition to its memory at the start."""
ROWS = 256
"""Number of rows that are sent together."""
CONDITION = "where"
"""Key of the source whose text is an expression, not a template."""

Row = tuple[int, Mapping[str, Any]]
"""A row and its place."""
Filled = dict[str, Any]
"""The filled templates of a row by key, and whether the row fulfils the condition."""


class Templates:
    """The templates of a source, and its condition such as ``level >= 3 and "geometry" in tags``.

    Args:
        texts: Jinja texts by their keys; empty ones are left out.  A field that a row does not have, or that
            is null, is an error where it would be written.
        who: the source in errors.

    Raises ConfigError if one cannot be read.
    """

    def __init__(self, texts: Mapping[str, str], who: str) -> None:
        self._texts, self._who = {key: text for key, text in texts.items() if text}, who
        self._fields = {name for key, text in self._texts.items() for name in _fields_of(text, key, who)}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def fill(self, rows: Iterable[Row]) -> Iterator[tuple[int, Mapping[str, Any], Filled]]:
        """Yield each row with its filled templates, or the condition alone if the row does not fulfil it.

        Raises ConfigError.
        """
        if not self._texts:
            yield from ((place, row, {}) for place, row in rows)
            return
        rows = iter(rows)
        while part := list(itertools.islice(rows, ROWS)):
            yield from self._part(part)

    def _part(self, rows: Sequence[Row]) -> Iterator[tuple[int, Mapping[str, Any], Filled]]:
        named = [(place, {name: row[name] for name in self._fields if name in row}) for place, row in rows]
        keys = " or ".join(f"{self._who}.{key}" for key in self._texts)
        try:
            filled, wrong = _process(os.getpid()).fill(self._texts, self._who, named)
        except (ChildDied, DeadlineExceeded) as error:
            if len(rows) > 1:  # it may be one of them, which the error names
                for row in rows:
                    yield from self._part([row])
                return
            late = isinstance(error, DeadlineExceeded)
            why = f"takes more than {SECONDS:g} s" if late else f"ended its process ({describe(error)})"
            raise ConfigError(f"{keys} {why} for row {rows[0][0] + 1}") from error
        except Exception as error:
            raise ConfigError(
                f"{keys}: a value of rows {rows[0][0] + 1} to {rows[-1][0] + 1} cannot be sent to "
                f"their process: {describe(error)}"
            ) from error
        yield from ((place, row, each) for (place, row), each in zip(rows, filled, strict=False))
        if wrong is not None:
            raise wrong


class _Process:
    """The child process that fills in the templates of this process; it is started again after its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._loop = asyncio.new_event_loop()
        # the child ends with the thread that has started it
        threading.Thread(target=self._loop.run_forever, name="templates", daemon=True).start()
        atexit.register(self._end, os.getpid())

    def fill(self, *given: Any) -> tuple[list[Filled], ConfigError | None]:
        """Fill in rows.  Raises ChildDied, DeadlineExceeded, and others if a value cannot be sent."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(self._filled(*given), self._loop).result()

    async def _filled(self, *given: Any) -> tuple[list[Filled], ConfigError | None]:
        if self._child is None or not self._child.alive:
            self._child = Child(f"{__name__}:Filler", name="templates of sources")
            await self._child.started(seconds=STARTING)
        filled: tuple[list[Filled], ConfigError | None]
        filled = await self._child.call("fill", *given, seconds=SECONDS)
        return filled

    def _end(self, pid: int) -> None:
        """End the child with this process, unless this is a fork of the process that started it."""

        async def end() -> None:
            if self._child is not None:
                self._child.kill()
                await self._child.aclose()

        if os.getpid() == pid:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(SECONDS)


@functools.cache
def _process(pid: int) -> _Process:
    """Return the child of this process, which may be a fork of a process with another child."""
    return _Process()


class Filler:
    """The child's side: fills in templates under a memory limit."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # Linux alone says and limits it
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, most))

    def fill(
        self, texts: Mapping[str, str], who: str, rows: Sequence[Row]
    ) -> tuple[list[Filled], ConfigError | None]:
        filled: list[Filled] = []
        for place, row in rows:
            made: Filled = {}
            for key in texts:
                try:
                    made[key] = _filled(texts[key], key, who, row)
                except Exception as error:  # what a template raises may be of any class
                    where = f"{who}.{key} fails for row {place + 1}"
                    return filled, ConfigError(f"{where}: {describe(error)}")
                if made[key] is False:
                    break
            filled.append(made)
        return filled, None


def _filled(text: str, key: str, who: str, row: Mapping[str, Any]) -> str | bool:
    fields = {
        name: _null()(hint=f"{name!r} is null") if is_null(value) else value for name, value in row.items()
    }
    compiled = _compiled(text, key, who)
    return bool(compiled(fields)) if key == CONDITION else str(compiled.render(fields))


@functools.cache
def _jinja() -> Any:
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        # constants are not folded here, since computing them is the work of the process
        optimized=False,
        finalize=jinja2.pass_context(_written),
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, _null())
    return environment


@functools.cache
def _compiled(text: str, key: str, who: str) -> Any:
    import jinja2

    try:
        if key == CONDITION:
            return _jinja().compile_expression(text, undefined_to_none=False)
        return _jinja().from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"{who}.{key} = {text!r:.100} cannot be read: {error}") from error


def _fields_of(text: str, key: str, who: str) -> set[str]:
    """Return the fields that a text names.  Raises ConfigError if it cannot be read."""
    import jinja2.nodes

    _compiled(text, key, who)
    parsed = _jinja().parse(f"{{{{ {text} }}}}" if key == CONDITION else text)
    return {name.name for name in parsed.find_all(jinja2.nodes.Name)}


@functools.cache
def _null() -> Any:
    """Return the class of a field that is null."""
    import jinja2

    class Null(jinja2.Undefined):
        __str__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error
        __hash__ = jinja2.Undefined.__hash__

        def __eq__(self, other: object) -> bool:
            return other is None or isinstance(other, Null)

        def __ne__(self, other: object) -> bool:
            return not self == other

    return Null


def _written(context: Any, value: Any) -> Any:
    """Return a value that is written into a text.  Raises ValueError for null."""
    if is_null(value):
        raise ValueError(
            "a null would be written as None; write another text for it, as in {{ field or '' }}"
        )
    return value
