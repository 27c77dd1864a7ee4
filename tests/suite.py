"""Runs a part of the tests as CI does: the few that fail beside others are run once more, alone.

Some tests kill processes, fill memory or hold a process to a deadline of seconds.  On a loaded machine one
of thousands of them may fail for what runs beside it.  A test that fails alone as well fails the suite; one
that passes alone is named at the end, because it should be mended.  If more than `AT_MOST` fail, the code is
at fault and nothing is repeated.

    python tests/suite.py ARGUMENTS OF PYTEST
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

AT_MOST = 5
"""How many failed tests are run again: a real fault in a thing that tests share breaks more of them."""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        status = _pytest("-o", f"cache_dir={cache}", *arguments)
        kept = Path(cache, "v/cache/lastfailed")
        failed = sorted(json.loads(kept.read_text())) if kept.exists() else []
    if status != 1 or not 0 < len(failed) <= AT_MOST:
        return status
    print(
        f"\n{len(failed)} failed beside others and {'is' if len(failed) == 1 else 'are'} run again, alone",
        flush=True,
    )
    status = _pytest("-n", "0", "-p", "no:cacheprovider", *failed)
    if status == 0:
        print("These tests failed beside others and passed alone; they depend on what runs beside them:")
        print("\n".join(f"    {name}" for name in failed), flush=True)
    return status


def _pytest(*arguments: str) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", *arguments])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
