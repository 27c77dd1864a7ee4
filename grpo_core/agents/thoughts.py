"""Parts the thinking of a reply from what it says.  Pure.

Models write their thinking in the text of a reply, between ``<think>`` and ``</think>``.  Some chat templates
write the first tag themselves, at the end of the prompt, so that a reply may have the second one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPENS, ENDS = "<think>", "</think>"
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which a response format, or an agent, gives thinking that is parted already."""


def split_thought(text: str, *, thinking: bool = False) -> tuple[str, str]:
    """Return the thinking of a text, and the rest; a text without thinking stays as it is.

    Thinking ends with the last ``</think>``.  A text that was cut off before that is all thinking.

    Args:
        text: the text of a reply.
        thinking: whether the prompt has begun the thinking, so that a text without its end is all thinking.
    """
    thought, ends, rest = text.rpartition(ENDS)
    if not ends:
        if not thinking and not text.lstrip().startswith(OPENS):
            return "", text
        thought, rest = text, ""
    return thought.strip().removeprefix(OPENS).strip(), rest.strip()


def parted(message: Mapping[str, Any], *, thinking: bool = False) -> tuple[str, str]:
    """Return the thinking of an assistant message, and what it says; see ``split_thought``."""
    content = str(message.get("content") or "")
    for key in KEYS:
        if thought := message.get(key):
            return str(thought), content
    return split_thought(content, thinking=thinking)
