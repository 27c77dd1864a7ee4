"""The command line as ``python -m grpo_core``."""

from grpo_core.cli import main

main()
