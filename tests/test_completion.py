"""``grpo-core completion``: a shell completes commands and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from forks import grpo


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "found"),
    [("sc", {"score"}), ("score --js", {"--json"}), ("new en", {"engine", "environment"})],
)
def test_bash_completes_commands_options_and_choices(words, found):
    script = grpo(".", "completion", "bash").stdout
    given = ["grpo-core", *words.split()]
    asked = f"COMP_WORDS=({' '.join(given)}); COMP_CWORD={len(given) - 1}; _grpo_core"
    ended = subprocess.run(
        ["bash", "-c", f'{script}\n{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
    )
    assert set(ended.stdout.split()) == found, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_all_commands(shell):
    script = grpo(".", "completion", shell).stdout
    assert all(command in script for command in ("train", "score", "validate", "completion"))
