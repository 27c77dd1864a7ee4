"""A file of paid replies, which a restarted measurement reuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from grpo_core import Reply


class Replies:
    """The replies of one measurement, by request, in a file until it is complete.

    Args:
        path: file of JSON lines; None keeps them in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Reply] = {}
        self._missing: set[str] = set()
        """Failed or cancelled requests without a reply; the file is kept while there are any."""
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_text(encoding="utf-8").splitlines() if path else ():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line may be incomplete
                    kept = json.loads(line)
                    key = kept.pop("request")
                    self._known[key] = Reply(**kept)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, request: Mapping[str, Any]) -> Reply | None:
        """Return the stored reply to an equal request, or None."""
        return self._known.get(digest(request))

    def keep(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Store the reply to a request."""
        key = digest(request)
        self._known[key] = reply
        self._missing.discard(key)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {
            "request": key,
            "message": reply.message,
            "finish_reason": reply.finish_reason,
            "completion_tokens": reply.completion_tokens,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def miss(self, request: Mapping[str, Any]) -> None:
        """Record that a request has no reply."""
        self._missing.add(digest(request))

    def close(self) -> Path | None:
        """Remove the file of a complete measurement; return the file of an incomplete one."""
        if self._path is None or not self._path.exists():
            return None
        if self._missing:
            return self._path
        self._path.unlink()
        with contextlib.suppress(OSError):  # the directory is not empty
            self._path.parent.rmdir()
        return None


def digest(request: Mapping[str, Any]) -> str:
    """Return a digest of a request."""
    return blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).hexdigest()
