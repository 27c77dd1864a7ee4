"""A cache of judges' answers on disk."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpo_core as grpo

WAIT = 30.0
"""Lock timeout in seconds while the file is opened."""
LATER_WAIT = 0.1
"""Later lock timeout in seconds; it blocks all judging, and writing an answer takes less than 0.001 s."""


class Cache:
    """A table of answers in an SQLite file, shared between processes; without a path it stays empty.

    If reading or writing fails because of a lock, a full disk or a damaged file, the judge is called again.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._connection: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")  # answers lost in a crash are requested again
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT)")
            self._connection.execute(f"PRAGMA busy_timeout={int(1000 * LATER_WAIT)}")
        except (OSError, sqlite3.Error) as error:
            raise grpo.ConfigError(f"judge: the cache {str(path)!r} cannot be opened: {error}") from error

    def get(self, key: str) -> str | None:
        if self._connection is None:
            return None
        row = None
        with suppress(sqlite3.Error):
            row = self._connection.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def key_of(**question: Any) -> str:
    """Return the key of a question: a digest of everything that the answer depends on."""
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
