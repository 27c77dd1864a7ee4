"""Finds secrets in a configuration, and hides those of environment variables in texts.  Pure.

Both would be written to files of the run and its report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from attrs import field, frozen

from grpo_core.errors import GrpoError, shortened

_NAME = re.compile(
    r"(^|_)((api|access|auth|private|secret|signing)_?keys?|secrets?|pass(word|wd|phrase)s?|credentials?"
    r"|authorization)$"
)
"""Names that only a secret has."""
_TOKEN = re.compile(r"(^|_)token$")
_OF_A_TOKENIZER = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop|end|start|max|min|num)_token$")
_KEY = re.compile(r"(^|_)([a-z]*api)?key$")
"""Names that a secret may have: its value decides, which may be the name of a field as well."""
_FIELD = re.compile(r"[A-Za-z_. -]{1,24}")
_VALUE = re.compile(r"(sk|rk|pk)-(?=\S*\d)[\w-]{16,}|xox[a-z]-\S{16,}|(Bearer|Basic) \S{12,}")
"""Values that only a secret has, if nothing else is beside them."""
_INSIDE = re.compile(
    r"(?<![\w-])(sk|rk|pk)-([a-z]+\d*-)*(?=\w*\d)\w{16,}|(?<!\w)(hf_[A-Za-z0-9]{30,}|gh[a-z]_\w{30,}"
    r"|github_pat_\w{20,}|xox[a-z]-[\w-]{16,}|AKIA[A-Z0-9]{16}(?!\w))"
    r"|(?<!\w)(Bearer|Basic) (?=\S*\d)[^\s${<]{12,}|(?<![\w+.-])[\w+.-]+://[^/@\s:]*:[^/@\s]+@"
)
"""The pattern of secrets anywhere in a text: tokens of well-known services, and a URL with a password."""
_GIVEN = re.compile(
    r"""(?:[?&;](?P<query>[\w.-]+)=|(?<!\S)--?(?P<option>[A-Za-z][\w.-]*)(?:=|\s+(?!-))"""
    r"""|(?<!\S)(?P<variable>[A-Z][A-Z0-9_]*)=)["']?(?P<value>[^\s"'&;#$<{][^\s"'&;#]*)"""
)
"""The pattern of named values in a text: of a URL's query, a program's option or a variable."""
_LONG = re.compile(r"(?=\S*\d)[\w.~+-]{16,}")
"""A value that is a secret behind the name "key" inside a text, where short ones and paths are ordinary."""

REFERENCE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
"""``$NAME`` or ``${NAME}`` in a value of ``env_vars``, and ``$$``, which is a dollar sign."""


def secrets_in(value: Any, where: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys whose values look like secrets, to judge by names and values.

    ``env_vars`` may name variables of this process, as in ``"$HF_TOKEN"`` or ``"Bearer $HF_TOKEN"``.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from secrets_in(item, (*where, str(key)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from secrets_in(item, where)
        if value and all(isinstance(item, str) for item in value) and _has_secret(" ".join(value)):
            yield ".".join(where)  # a command line, whose option and value are two items
    elif isinstance(value, str) and value:
        named = "env_vars" in where[:-1] and any(not found[1] for found in REFERENCE.finditer(value))
        rest = REFERENCE.sub("", value)
        if _has_secret(rest) if named else is_secret(where[-1] if where else "", value):
            yield ".".join(where)


def is_secret(name: str, value: str) -> bool:
    """Whether a value with this name looks like a secret, or has one inside."""
    name = _plain(name)
    if _names_secret(name) or _VALUE.fullmatch(value) or _has_secret(value):
        return True
    return bool(_KEY.search(name)) and not _FIELD.fullmatch(value)


def _has_secret(text: str) -> bool:
    """Whether a text, such as an address or a command line, has a secret inside."""
    if _INSIDE.search(text):
        return True
    for found in _GIVEN.finditer(text):
        name = _plain(found["query"] or found["option"] or found["variable"])
        if _names_secret(name) or (_KEY.search(name) and _LONG.fullmatch(found["value"])):
            return True
    return False


def _names_secret(name: str) -> bool:
    return bool(_NAME.search(name) or (_TOKEN.search(name) and not _OF_A_TOKENIZER.search(name)))


def _plain(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]", "_", name).lower()


SHORTEST = 6
"""Characters of a value that is hidden at least: shorter ones, such as "true", are in ordinary texts."""


@frozen
class Mask:
    """Hides the values of environment variables in texts: ``$NAME`` stands there instead.

    A value is also found as URLs, JSON and Python's ``repr`` write it.

    Args:
        values: the values by the names of their variables.
    """

    values: Mapping[str, str] = field(factory=dict, repr=False)

    def __call__(self, text: str) -> str:
        """Return the text without the values."""
        for shown, name in self._shown():
            text = text.replace(shown, f"${name}")
        return text

    def error(self, error: BaseException) -> BaseException:
        """Return the error itself, or one that says the same without the values."""
        said = str(error)
        if (hidden := self(said)) == said:
            return error
        if not isinstance(error, GrpoError):
            return GrpoError(shortened(f"{type(error).__name__}: {hidden}"))
        try:
            found: BaseException = type(error)(hidden)
        except TypeError:
            found = GrpoError(hidden)
        vars(found).update(exit_status=error.exit_status)
        return found

    def _shown(self) -> list[tuple[str, str]]:
        """Return how texts show the values, with the variables' names; the longest ones are first."""
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


NOTHING_HIDDEN = Mask()
