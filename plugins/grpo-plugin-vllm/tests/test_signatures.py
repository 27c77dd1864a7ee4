"""The stand-in for vLLM on a GPU has the signatures of the installed vLLM, which is parsed, not imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ENGINE = Path("v1/engine/llm_engine.py")
HERE = Path(__file__).parent / "stand_in" / "vllm"
FOUND = importlib.util.find_spec("vllm")


def methods(path):
    """The names of the parameters of each method of the engine, and how many of them have a default."""
    tree = ast.parse(path.read_text())
    (engine,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LLMEngine")
    found = (node for node in engine.body if isinstance(node, ast.FunctionDef))
    return {node.name: ([each.arg for each in node.args.args], len(node.args.defaults)) for node in found}


@pytest.mark.skipif(FOUND is None, reason="vLLM is not installed: make install-vllm")
def test_the_stand_in_takes_what_vllm_takes_and_nothing_else():
    assert FOUND is not None
    real = methods(Path(FOUND.origin).parent / ENGINE)
    ours = {name: names for name, (names, _) in methods(HERE / ENGINE).items() if not name.startswith("_")}
    assert len(ours) > 8
    for name, taken in ours.items():
        known, defaults = real[name]
        needed = known[: len(known) - defaults]
        assert set(taken) <= set(known), name
        assert taken[: len(needed)] == needed, name
