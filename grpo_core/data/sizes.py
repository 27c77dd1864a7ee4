"""Upper bounds of the numbers of tokens of prompts, without a tokenizer.  Pure.

A token stands for at least one byte of text, so a prompt has at most as many tokens as bytes, plus the tokens
that a chat template writes around each message.  Most prompts are so short that they need not be encoded to
know that they fit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from grpo_core.contracts.records import Prompt

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
