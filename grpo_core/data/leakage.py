"""Finds prompts that are both trained on and held out, by exact text.  Pure."""

from __future__ import annotations

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


def leaked(train: Iterable[int], held_out: Iterable[int]) -> list[int]:
    """Return the indices of held-out prompts whose digest occurs among the training prompts."""
    indices: dict[int, list[int]] = {}
    for index, found in enumerate(held_out):
        indices.setdefault(found, []).append(index)
    both = {found for found in train if found in indices}
    return sorted(index for found in both for index in indices[found])
