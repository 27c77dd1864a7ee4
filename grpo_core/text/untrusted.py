"""Reads the output of servers, agents and models, and raises nothing but ValueError.  Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any, TypeVar

from grpo_core.contracts.unicode import DEEPEST, well_formed

T = TypeVar("T")

_NAMES: Mapping[Any, str] = {dict: "a JSON object", list: "a JSON list", object: "JSON"}


def read_json(text: str | bytes | bytearray, kind: type[T]) -> T:
    """Return JSON, with U+FFFD in place of each lone surrogate.

    Args:
        kind: dict, list, or object for any value.

    Raises ValueError if it is not JSON, not UTF-8, nested more than ``DEEPEST`` deep, or of another kind.
    """
    try:
        value = well_formed(json.loads(text))
    except RecursionError:
        raise ValueError(f"lists and objects more than {DEEPEST} deep") from None
    if not isinstance(value, kind):
        raise ValueError(f"expected {_NAMES[kind]}, got {json.dumps(value):.80}")
    return value


async def read_body(parts: AsyncIterable[bytes], headers: Mapping[str, str], largest: int) -> bytes:
    """Return the body of an answer.

    A client asks for it with ``Accept-Encoding: identity``: a few compressed bytes can unfold to gigabytes.

    Args:
        headers: of the answer, with case-insensitive names.
        largest: largest number of bytes.

    Raises ValueError if it is compressed, or longer.
    """
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the answer is compressed ({encoding[:50]!r}); expected it uncompressed")
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > largest:
            raise ValueError(f"the answer has more than {largest:,} bytes")
    return bytes(body)
