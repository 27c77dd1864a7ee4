"""Separates the thinking of a reply from its text.  Pure.

Models write their thinking in the text of a reply, between ``<think>`` and ``</think>``.  Some chat templates
write the first tag themselves, at the end of the prompt, so that a reply may have only the second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THOUGHT_OPENS = "<think>"
THOUGHT_ENDS = "</think>"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for separated thinking; templates, response formats and agents use them."""


def split_thought(text: str, *, thinking: bool = False) -> tuple[str, str]:
    """Return the thinking of a text, and the rest; a text without thinking stays as it is.

    Thinking ends with the last ``</think>``.  A text that was cut off before that is all thinking.

    Args:
        text: the text of a reply.
        thinking: whether the prompt has begun the thinking, so that a text without its end is all thinking.
    """
    thought, ends, rest = text.rpartition(THOUGHT_ENDS)
    if not ends:
        if not thinking and not text.lstrip().startswith(THOUGHT_OPENS):
            return "", text
        thought, rest = text, ""
    return thought.strip().removeprefix(THOUGHT_OPENS).strip(), rest.strip()


def parted(message: Mapping[str, Any], *, thinking: bool = False) -> tuple[str, str]:
    """Return the thinking and the text of an assistant message; see ``split_thought``."""
    content = str(message.get("content") or "")
    for key in THOUGHT_KEYS:
        if thought := message.get(key):
            return str(thought), content
    return split_thought(content, thinking=thinking)
