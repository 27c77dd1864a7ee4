"""Finds secrets in a configuration, which would be written to files of the run and its report.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(
    r"(^|_)((api|access|auth|private|secret|signing)_?keys?|secrets?|pass(word|wd|phrase)s?|credentials?"
    r"|authorization)$"
)
"""Names that only a secret has."""
_TOKEN = re.compile(r"(^|_)token$")
_OF_A_TOKENIZER = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop|end|start)_token$")
_KEY = re.compile(r"(^|_)([a-z]*api)?key$")
"""Names that a secret may have: its value decides, which may be the name of a field as well."""
_FIELD = re.compile(r"[A-Za-z_. -]{1,24}")
_VALUE = re.compile(
    r"(sk|rk|pk)-(?=\S*\d)[\w-]{16,}|hf_[A-Za-z0-9]{30,}|gh[a-z]_\w{30,}|github_pat_\w{20,}|xox[a-z]-\S{16,}"
    r"|AKIA[A-Z0-9]{16}|(Bearer|Basic) \S{12,}|[\w+.-]+://[^/@\s:]*:[^/@\s]+@.*"
)
"""Values that only a secret has: tokens of well-known services, and a URL with a password."""
_REFERENCE = re.compile(r"\$(\w+|\{\w+\})")


def secrets_in(value: Any, where: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys whose values look like secrets, to judge by names and values.

    ``env_vars`` may name a variable of this process, as in ``"$HF_TOKEN"``.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from secrets_in(item, (*where, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, where)
    elif isinstance(value, str) and value:
        named = "env_vars" in where[:-1] and _REFERENCE.fullmatch(value)
        if not named and is_secret(where[-1] if where else "", value):
            yield ".".join(where)


def is_secret(name: str, value: str) -> bool:
    """Whether a value with this name looks like a secret."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]", "_", name).lower()
    token = _TOKEN.search(name) and not _OF_A_TOKENIZER.search(name)
    if token or _NAME.search(name) or _VALUE.fullmatch(value):
        return True
    return bool(_KEY.search(name)) and not _FIELD.fullmatch(value)
