"""The log of the code, for tests that read it.

The plugin of pytest for this is left out: for each test it looks six times at every logger of all libraries.
"""

from __future__ import annotations

import logging


class Logged(logging.Handler):
    """Keeps the warnings and errors that are logged while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    @property
    def text(self) -> str:
        return "\n".join(map(self.format, self.records))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> Logged:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self)
