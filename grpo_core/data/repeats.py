"""Finds prompts and ids that are repeated.  Pure."""

from __future__ import annotations

import json
from hashlib import blake2b

from grpo_core.contracts.records import Prompt


def exact_digest(prompt: Prompt) -> bytes:
    """Return bytes that are equal for prompts of equal messages alone, with their roles, borders and calls.

    White space around a text makes no difference.
    """
    messages = [
        {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
        for message in prompt.messages
    ]
    return blake2b(json.dumps(messages, sort_keys=True, default=repr).encode(), digest_size=16).digest()
