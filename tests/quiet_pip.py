"""Runs pip without its lines "Requirement already satisfied", of which 30 projects have hundreds.

    python tests/quiet_pip.py install ...

Its option --quiet would hide the progress bars, too, and a pipe would have none.  The filter is on a logger
of pip's: where another version has moved it, the lines are there again.
"""

from __future__ import annotations

import logging
import sys

from pip._internal.cli.main import main

if __name__ == "__main__":
    logger = logging.getLogger("pip._internal.operations.prepare")
    logger.addFilter(lambda record: not record.getMessage().startswith("Requirement already satisfied"))
    raise SystemExit(main(sys.argv[1:]))
