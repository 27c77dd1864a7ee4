"""Finds keys of a configuration that are named as secrets, and hides values of variables in texts.  Pure.

Both would be written to files of the run and its report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from attrs import evolve, field, frozen

from grpo_core.contracts.errors import CodeError, GrpoError, Unavailable, message_of

_NAME = re.compile(
    r"(^|_)((api|access|auth|private|secret|signing)_?keys?|secrets?|pass(word|wd|phrase)s?|credentials?"
    r"|authorization|token)$"
)
"""Names of secrets, and of a tokenizer's tokens."""
_OF_A_TOKENIZER = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop|end|start|max|min|num)_token$")
REFERENCE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
"""``$NAME`` or ``${NAME}`` in a value of ``env_vars``, and ``$$``, which is a dollar sign."""


def secrets_in(value: Any, where: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys that have the name of a secret, and a value.

    In ``env_vars`` a value may name variables of this process, as in ``"Bearer $HF_TOKEN"``.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from secrets_in(item, (*where, str(key)))
    elif isinstance(value, str) and value and where:
        named = "env_vars" in where[:-1] and any(not found[1] for found in REFERENCE.finditer(value))
        if (names_secret(where[-1]) and not named) or _address_with_secret(value):
            yield ".".join(where)


def _address_with_secret(text: str) -> bool:
    """Whether a text has an address with a password, or with a parameter that is named as a secret."""
    if "://" not in text:
        return False
    parameters = re.findall(r"[?&]([^=&#\s]+)=[^&#\s$]", text)
    return bool(re.search(r"://[^/\s@:]*:[^/\s@$]+@", text)) or any(map(names_secret, parameters))


def names_secret(name: str) -> bool:
    """Whether a variable, a key or a parameter has the name of a secret."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]", "_", name).lower()
    return bool(_NAME.search(plain)) and not _OF_A_TOKENIZER.search(plain)


SHORTEST = 6
"""Smallest number of characters of a hidden value: shorter ones, such as "true", occur in ordinary texts."""


@frozen
class Mask:
    """Replaces the values of environment variables in texts by ``$NAME``.

    Values are also found in the escaped forms of URLs, JSON and Python's ``repr``.

    Args:
        values: the values by the names of their variables.
    """

    values: Mapping[str, str] = field(factory=dict, repr=False)
    _shown: list[tuple[str, str]] = field(init=False, repr=False, eq=False)
    """The forms of the values with the variables' names, longest first."""

    @_shown.default
    def _forms(self) -> list[tuple[str, str]]:
        found = {}
        for name, value in self.values.items():
            if len(value) >= SHORTEST:
                shown = (
                    value,
                    quote(value),
                    quote(value, safe=""),
                    repr(value)[1:-1],
                    json.dumps(value)[1:-1],
                )
                found.update(dict.fromkeys(shown, name))
        return sorted(found.items(), key=lambda pair: len(pair[0]), reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text without the values."""
        for shown, name in self._shown:
            text = text.replace(shown, f"${name}")
        return text

    def error(self, error: BaseException) -> BaseException:
        """Return the error itself, or an equal one without the values."""
        said = message_of(error)
        if (hidden := self(said)) == said:
            return error
        if not isinstance(error, GrpoError):
            return CodeError.of(error, self)
        try:
            found: BaseException = type(error)(hidden)
        except TypeError:
            found = GrpoError(hidden)
        if (fault := error.fault) is not None:
            fault = evolve(fault, message=self(fault.message), traceback=self(fault.traceback))
        vars(found).update(exit_status=error.exit_status, fault=fault)
        if isinstance(found, Unavailable) and isinstance(error, Unavailable):
            found.retry_after, found.timed_out = error.retry_after, error.timed_out
        return found


NOTHING_HIDDEN = Mask()
