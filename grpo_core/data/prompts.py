"""Facts about prompts that need no tokenizer.  Pure.

Digests find prompts that are repeated, or both trained on and held out.  Sizes are upper bounds of the
numbers of tokens: a token stands for at least one byte of text, so a prompt has at most as many tokens as
bytes, plus those that a chat template writes around each message.  Most prompts are so short that they need
not be encoded to know that they fit.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from grpo_core.contracts.records import Prompt


def text_of(prompt: Prompt) -> str:
    """Return the text of a prompt.  White space and system messages make no difference."""
    texts = [str(message.get("content")) for message in prompt.messages if message.get("role") != "system"]
    return " ".join(" ".join(texts).split())


def digest(prompt: Prompt) -> int:
    """Return a number for warnings, which is equal for prompts of the same ``text_of``."""
    return int.from_bytes(blake2b(text_of(prompt).encode("utf-8", "replace"), digest_size=8).digest())


def exact_digest(prompt: Prompt) -> bytes:
    """Return bytes that are equal for prompts of equal messages alone, with their roles, borders and calls.

    White space around a text makes no difference.
    """
    messages = [
        {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
        for message in prompt.messages
    ]
    return blake2b(json.dumps(messages, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def leaked(train: Iterable[int], held_out: Iterable[int]) -> list[int]:
    """Return the indices of held-out prompts whose digest occurs among the training prompts."""
    indices: dict[int, list[int]] = {}
    for index, found in enumerate(held_out):
        indices.setdefault(found, []).append(index)
    both = {found for found in train if found in indices}
    return sorted(index for found in both for index in indices[found])


# ---------------------------------------------------------------------------------- sizes

AROUND = 16
"""Largest number of tokens that a chat template writes around a message; known models write 3 to 8."""
UNBOUNDED = 2**32 - 1
"""Size of a prompt whose length only encoding can find: a template may write anything for its parts."""
_PLAIN = frozenset({"role", "content", "name"})


def size(prompt: Prompt) -> int:
    """Return an upper bound of a prompt's tokens, without the text that the template always writes."""
    total = 0
    for message in prompt.messages:
        text = message.get("content")
        if not isinstance(text, str) or not _PLAIN.issuperset(message):
            return UNBOUNDED
        total += AROUND + (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")))
    return min(total, UNBOUNDED)


def sizes(prompts: Iterable[Prompt]) -> array[int]:
    """Return the size of each prompt."""
    return array("I", map(size, prompts))
