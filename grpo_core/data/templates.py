"""Jinja templates and conditions over the rows of a source, in Jinja's sandbox.

A field that is null is as one that the row does not have, since tables cannot tell them apart: it is not
defined.  It is also false and equal to none, and nowhere written as "None".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from grpo_core.data.files import is_null
from grpo_core.errors import ConfigError, describe


class Template:
    """A template that is filled in with the fields of a row.

    Args:
        text: Jinja template; a field that a row does not have, or that is null, is an error where it would be
            written.
        who: its name in errors.

    Raises ConfigError if it is not a template.
    """

    def __init__(self, text: str, who: str) -> None:
        self._text, self._who = text, who
        self._compiled()

    def render(self, row: Mapping[str, Any], place: int) -> str:
        """Return the text for a row.  Raises ConfigError."""
        try:
            text: str = self._compiled().render(_fields(row))
        except Exception as error:  # what a template raises may be of any class
            raise _failed(self._who, place, error) from error
        return text

    def _compiled(self) -> Any:
        return _compiled(self._text, self._who, expression=False)


class Condition:
    """A Jinja expression over the fields of a row, such as ``level >= 3 and "geometry" in tags``."""

    def __init__(self, text: str, who: str) -> None:
        self._text, self._who = text, who
        _compiled(text, who, expression=True)

    def holds(self, row: Mapping[str, Any], place: int) -> bool:
        """Return whether a row fulfils it.  Raises ConfigError."""
        try:
            return bool(_compiled(self._text, self._who, expression=True)(_fields(row)))
        except Exception as error:
            raise _failed(self._who, place, error) from error


@functools.cache  # a source is pickled for its workers, and what is compiled cannot be
def _compiled(text: str, who: str, *, expression: bool) -> Any:
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_written
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, _null())
    try:
        if expression:
            return environment.compile_expression(text, undefined_to_none=False)
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{who} = {text!r:.100} cannot be read: {error}") from error


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


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row as expressions see them."""
    return {
        name: _null()(hint=f"{name!r} is null") if is_null(value) else value for name, value in row.items()
    }


def _written(value: Any) -> Any:
    """Return a value that is written into a text.  Raises ValueError for null."""
    if is_null(value):
        raise ValueError(
            "a null would be written as None; write another text for it, as in {{ field or '' }}"
        )
    return value


def _failed(who: str, place: int, error: Exception) -> ConfigError:
    return ConfigError(f"{who} fails for row {place + 1}: {describe(error)}")
