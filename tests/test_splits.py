"""Held-out prompts of all printed environments look like the training prompts.

A model that has never seen a word end in "a" cannot be measured on words that do: validation then falls while
training rises.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks

from grpo_core.plugins.files import import_file
from grpo_plugin_devkit import new as scaffold

SHOWS = re.compile(r"def prompts\(")
PRINTED = [
    block
    for page in PAGES
    for block in blocks(page, "python")
    if SHOWS.search(block.text) and "import" in block.text
]
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if SHOWS.search(path.read_text())]
MADE = [("environment", variant) for variant in ("", *scaffold.VARIANTS)] + [("agent", "")]
ODD = 0.1
"""Largest share of held-out prompts with a character where no training prompt has it."""


def splits(path: Path) -> list[tuple[list[str], list[str]]]:
    """The texts of the training prompts and the held-out prompts of each environment or agent in a file."""
    module = import_file(path)
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    offers = [each().prompts for each in own if isinstance(each, type) and "prompts" in vars(each)]
    offers += [each for each in own if getattr(each, "__name__", "") == "prompts"]
    parts = [(offer("train"), offer("validation")) for offer in offers]
    return [
        tuple([str(prompt.messages[-1]["content"]) for prompt in part] for part in both) for both in parts
    ]


def places(text: str) -> set[tuple[int, str]]:
    """Each character with its place, counted from the beginning, and from the end."""
    forward = {(place, character) for place, character in enumerate(text)}
    return forward | {(place - len(text), character) for place, character in enumerate(text)}


def odd(train: list[str], held_out: list[str]) -> list[str]:
    """The held-out prompts with a character where no training prompt has it."""
    seen = set().union(*map(places, train))
    return [text for text in held_out if places(text) - seen]


def check(path: Path) -> None:
    found = splits(path)
    assert found, f"{path.name} shows prompts and offers none"
    for train, held_out in found:
        assert len(odd(train, held_out)) <= ODD * len(held_out)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_holds_out_prompts_like_those_that_it_trains_on(path):
    if "openai" in path.read_text():
        pytest.importorskip("openai")
    check(path)


@pytest.mark.parametrize("block", PRINTED, ids=str)
def test_a_printed_environment_holds_out_prompts_like_those_that_it_trains_on(block, tmp_path):
    if "openai" in block.text:
        pytest.importorskip("openai")
    (tmp_path / "printed.py").write_text(block.text)
    check(tmp_path / "printed.py")


@pytest.mark.parametrize(("sort", "variant"), MADE)
def test_a_new_environment_holds_out_prompts_like_those_that_it_trains_on(sort, variant, tmp_path):
    pytest.importorskip("openai" if sort == "agent" else "grpo_core")
    project = scaffold.write(sort, "mine", [variant] if variant else [], tmp_path)
    check(project / "grpo_plugin_mine" / f"{sort}.py")


def test_a_split_by_every_other_word_is_noticed():
    """As README once split: training words ended in b, d, f or h alone."""
    words = [a + b for a in "abcdefgh" for b in "abcdefgh"]
    assert len(odd(words[1::2], words[::10])) > 0.9 * len(words[::10])
