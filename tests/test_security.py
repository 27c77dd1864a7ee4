"""The claims of SECURITY.md that no other test shows."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy
import tokenizers
from rich.console import Console

from grpo_core.config import Config, as_table
from grpo_core.events import GroupsReady, StatusChanged
from grpo_core.records import Group, Prompt, Rollout, RunInfo
from grpo_core.reporting.terminal import TerminalTracker

CONTROLS = "\x1b]0;title\x07 \x1b[2J\x9b31m\x08 \u202e reply"
"""Sets a title, clears the screen, changes colours (with one byte, too), and turns the direction of text."""


def test_a_completion_cannot_control_the_terminal():
    said = {"role": "assistant", "content": CONTROLS}
    group = Group(
        prompt=Prompt(messages=CONTROLS, environment="sort"),
        rollouts=(Rollout(prompt_ids=(1,), messages=(said,), reward=1.0),),
        generation_version=0,
        target_version=1,
    )
    shown = io.StringIO()

    class Terminal(TerminalTracker):
        @staticmethod
        def make_console():
            return Console(file=shown, force_terminal=True, color_system=None, width=200)

    terminal = Terminal(RunInfo(name="run", directory=Path("run"), config=as_table(Config())))
    terminal.event(StatusChanged(message="starting"))
    before = len(shown.getvalue())
    terminal.event(GroupsReady(groups=(group,)))
    terminal.close()
    text = shown.getvalue()[before:]
    assert "reply" in text
    for control in ("\x1b]0;", "\x1b[2J\x9b", "\x9b", "\x07", "\x08", "\u202e"):
        assert control not in text


CODE = "from pathlib import Path\nPath({mark!r}).touch()\nclass Theirs: pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tokenizer", "model"])
def test_code_that_comes_with_a_model_is_not_run_by_default(tmp_path: Path, part: str):
    mark, model = tmp_path / "it-ran", tmp_path / "model"
    model.mkdir()
    (model / "theirs.py").write_text(CODE.format(mark=str(mark)))
    (model / "model.safetensors").write_bytes(safetensors.numpy.save({}))
    code = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.Theirs"}
    (model / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": code}))
    if part == "tokenizer":
        named = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    else:
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
        letters = dict.fromkeys(["<end>", *"0123456789="])
        words = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(letters)}, "<end>")
        tokenizers.Tokenizer(words).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    program = [sys.executable, "-c", "from grpo_core.cli import main; main()", "train", "--env", "math:sort"]
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    settings = ["--set", f"model.path={model}", "--output", "run"]
    ended = subprocess.run(
        [*program, *settings], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode not in (0, -9), ended.stdout
    assert "contains custom code" in ended.stderr
    assert not mark.exists()
