"""Shared parts of the replies of OpenAI's dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CREATED = 0
"""Timestamp of every reply, in seconds; constant, so that equal requests have equal replies."""


def arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
