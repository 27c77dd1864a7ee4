"""The secrets that this process knows, and the texts that leave it without them.

What a run writes, prints or sends to a tracker passes ``masked``: a secret is found by its value, whoever
repeats it.  Secrets are exported variables that are named as one, that the configuration names, or that
``env_vars`` takes, and passwords in addresses of exported variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import attrs

from grpo_core.contracts import unicode
from grpo_core.text.credentials import REFERENCE, Mask, names_secret

T = TypeVar("T")

_values: dict[str, str] = {}


def learn(config: Any = None, environ: Mapping[str, str] = os.environ) -> None:
    """Hide the secrets in the variables of this process from now on.

    Args:
        config: plain data, whose texts may name variables.
    """
    named = set(_variables(config))
    for name, value in environ.items():
        if name in named or names_secret(name):
            _values[name] = value
        elif "@" in value and "://" in value and (password := _password(value)):
            _values[name] = password


def mask() -> Mask:
    """Return the mask of the secrets that are known now."""
    return Mask(dict(_values))


def masked(value: T) -> T:
    """Return a value with its secrets replaced by ``$NAME``: a text, plain data, or records with texts."""
    return _masked(value, mask()) if _values else value


def inert(text: str) -> str:
    """Return a text for a screen: without secrets, and without characters that control a terminal."""
    return unicode.inert(masked(text))


def _masked(value: Any, mask: Mask) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        found = {_masked(key, mask): _masked(part, mask) for key, part in value.items()}
        return found if any(found.get(key) is not part for key, part in value.items()) else value
    if isinstance(value, (list, tuple)):
        parts = [_masked(part, mask) for part in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, type) and attrs.has(type(value)):
        from grpo_core.contracts.tokens import Tokens  # imports numpy

        if isinstance(value, Tokens):  # they have no text, and may have to be fetched
            return value
        changed = {
            each.alias: new
            for each in attrs.fields(type(value))
            if each.init and (new := _masked(old := getattr(value, each.name), mask)) is not old
        }
        return attrs.evolve(value, **changed) if changed else value
    return value


def _variables(value: Any) -> Iterator[str]:
    """Yield the names of variables that plain data has as a text, or refers to in one."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _variables(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _variables(part)
    elif isinstance(value, str):
        yield value
        for found in REFERENCE.finditer(value):
            yield found[2] or found[3] or ""


def _password(address: str) -> str:
    try:
        return urlsplit(address).password or ""
    except ValueError:
        return ""
