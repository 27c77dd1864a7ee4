"""The command line as a program: ``grpo-core`` and ``python -m grpo_core``."""

from __future__ import annotations

import sys

from grpo_core.processes import interrupts


def main() -> None:
    """Run the command line."""
    try:
        interrupts.begin()  # the imports take long enough for a ctrl-C
        from grpo_core import cli

        cli.main()
    except SystemExit as end:
        interrupts.leave(end.code)
    except KeyboardInterrupt:
        print("grpo-core: interrupted", file=sys.stderr)
        interrupts.leave()


if __name__ == "__main__":
    main()
