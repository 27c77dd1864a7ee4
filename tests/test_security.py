"""What SECURITY.md claims and no other test shows."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo_core.errors import ModelError
from grpo_core.events import GroupsReady
from grpo_core.records import Group, Prompt, Rollout
from grpo_core.rendering import Renderer
from grpo_core.reporting.terminal import Terminal
from grpo_core.training import policy

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
    with Terminal(10, Console(file=shown, force_terminal=True, color_system=None, width=200)) as terminal:
        before = len(shown.getvalue())
        terminal(GroupsReady(groups=(group,)))
    text = shown.getvalue()[before:]
    assert "reply" in text
    for control in ("\x1b]0;", "\x1b[2J\x9b", "\x9b", "\x07", "\x08", "\u202e"):
        assert control not in text


MARK = "from pathlib import Path\nPath({mark!r}).touch()\nclass Theirs: pass\n"


@pytest.mark.parametrize("load", [Renderer.load, functools.partial(policy.load, device=torch.device("cpu"))])
def test_code_that_comes_with_a_model_is_not_run_by_default(tmp_path: Path, load: Callable[[str], object]):
    mark, model = tmp_path / "it-ran", tmp_path / "model"
    model.mkdir()
    (model / "theirs.py").write_text(MARK.format(mark=str(mark)))
    code = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.Theirs"}
    (model / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": code}))
    tokenizer = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="custom code"):
        load(str(model))
    assert not mark.exists()
