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


class Errors:
    """The errors of OpenAI's dialects."""

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        return "", self.error(status, message, code)
