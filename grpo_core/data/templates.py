"""Jinja templates and conditions over the rows of a source, in Jinja's sandbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from grpo_core.errors import ConfigError, describe


class Template:
    """A template that is filled in with the fields of a row.

    Args:
        text: Jinja template; a field that a row does not have is an error.
        who: its name in errors.

    Raises ConfigError if it is no template.
    """

    def __init__(self, text: str, who: str) -> None:
        self._text, self._who = text, who
        self._compiled()

    def render(self, row: Mapping[str, Any], place: int) -> str:
        """Return the text for a row.  Raises ConfigError."""
        try:
            text: str = self._compiled().render(row)
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
            return bool(_compiled(self._text, self._who, expression=True)(row))
        except Exception as error:
            raise _failed(self._who, place, error) from error


@functools.cache  # a source is pickled for its workers, and what is compiled cannot be
def _compiled(text: str, who: str, *, expression: bool) -> Any:
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        if expression:
            return environment.compile_expression(text, undefined_to_none=False)
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{who} = {text!r:.100} cannot be read: {error}") from error


def _failed(who: str, place: int, error: Exception) -> ConfigError:
    return ConfigError(f"{who} fails for row {place + 1}: {describe(error)}")
