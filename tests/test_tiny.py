"""The tiny model: an ordinary transformers directory, made on the spot."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.app.model_sources import with_max_tokens
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError
from grpo_core.demo import tiny
from grpo_core.demo.demonstrations import LONGEST, lengths
from grpo_core.training.microbatch import collate
from grpo_core.training.model import Scorer

SORTED = tuple(
    (f"{a}{b}{c}=", "".join(sorted(f"{a}{b}{c}"))) for a in range(5) for b in range(5) for c in range(5)
)


def make(directory: Path, **options: int) -> Path:
    tiny.make_tiny_model(directory, SORTED, **{"width": 16, "layers": 1, "warm_start_steps": 2, **options})
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(directory: Path):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(directory)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=40))
def test_every_printable_text_survives_the_tokenizer(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tuple(ids) == tiny.encode(text)
    assert tokenizer.decode(ids) == text


def test_other_characters_are_unknown_one_by_one(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer("aéñb").input_ids == [*tiny.encode("a"), 2, 2, *tiny.encode("b")]
    assert tiny.encode("aéñb") == tuple(tokenizer("aéñb").input_ids)


def test_model_and_tokenizer_agree_on_the_special_tokens(directory: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((directory / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"]) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    assert config["vocab_size"] == len(tokenizer)
    assert tokenizer.chat_template is None
    assert tokenizer.decode([*tiny.encode("12"), 1], skip_special_tokens=True) == "12"


def test_the_default_model_has_ninety_thousand_parameters(tmp_path: Path) -> None:
    tiny.make_tiny_model(tmp_path / "m", (), warm_start_steps=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert sum(p.numel() for p in model.parameters()) == 88_576
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_weights_are_a_function_of_the_seed(directory: Path, tmp_path: Path) -> None:
    torch.rand(3)  # the state of the global generator is not an input
    again, other = make(tmp_path / "again"), make(tmp_path / "other", seed=1)
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (directory / weights).read_bytes()
    assert (other / weights).read_bytes() != (directory / weights).read_bytes()


@pytest.mark.long
def test_the_warm_start_teaches_replies_and_their_end(tmp_path: Path) -> None:
    micro = collate([tiny._row(*pair) for pair in SORTED], torch.device("cpu"))

    def mean_logprob(steps: int) -> float:
        path = make(tmp_path / str(steps), warm_start_steps=steps)
        model = AutoModelForCausalLM.from_pretrained(path)
        return Scorer(model).score(micro, 1.0)[0].mean().item()

    assert mean_logprob(30) > mean_logprob(0) + 1.5


def test_nothing_to_start_from_is_said_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"solve\(prompt\).*warm_start_steps = 0"):
        tiny.make_tiny_model(tmp_path / "m", (), warm_start_steps=3)
    assert not list(tmp_path.iterdir())


def test_the_directory_replaces_an_unfinished_one(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "rest").touch()
    make(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert not (tmp_path / "m" / "rest").exists()


def test_nothing_is_printed_while_it_is_made(tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    from transformers.utils import logging

    logging.enable_progress_bar()
    tiny.make_tiny_model(tmp_path / "m", (), warm_start_steps=0)
    assert capfd.readouterr() == ("", "")


def test_only_the_replies_of_a_demonstration_are_learnt() -> None:
    row = tiny._row("7:", "7", "3:", "37")
    assert tuple(row.prompt_ids) == tiny.encode("7:")
    assert tuple(row.tokens.ids) == (*tiny.encode("7"), 1, *tiny.encode("3:37"), 1)
    assert row.tokens.sampled.tolist() == [True, True, False, False, True, True, True]


def test_its_lengths_follow_the_solutions() -> None:
    """The longest reply with its end, and a quarter more, in each of the turns that may be played."""
    short, tool = [("52=", "25")], [("pear=", "c" * 75, "8", "8"), ("fig=", "7")]
    assert lengths(short, 1) == (256, 16)
    assert lengths((), 1) == (256, 16)
    assert lengths(tool, 3) == (5 + 3 * (95 + 1), 95)
    assert lengths([("p" * 900, "c" * 400)], 1000)[0] == 2 * LONGEST


def test_a_solution_longer_than_the_usual_positions_is_learnt(tmp_path: Path) -> None:
    said = [("word:", "x" * 400), ("other:", "y" * 300)]
    positions, _ = lengths(said, 1)
    tiny.make_tiny_model(tmp_path / "m", said, width=16, layers=1, positions=positions, warm_start_steps=2)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["max_position_embeddings"] == positions >= 5 + 501
    assert AutoTokenizer.from_pretrained(tmp_path / "m").model_max_length == positions


def test_a_length_that_nobody_knows_is_asked_for() -> None:
    config = build([{"model": {"path": "tiny"}, "rollout": {"max_tokens": 0}}])
    assert with_max_tokens(config, 95).rollout.max_tokens == 95
    assert with_max_tokens(build([{"rollout": {"max_tokens": 7}}]), 95).rollout.max_tokens == 7
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens is 0"):
        with_max_tokens(config, 0)


@pytest.mark.long
def test_the_warm_up_of_long_solutions_takes_more_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until some replies are right: one that is never right teaches nothing afterwards."""
    monkeypatch.setattr(tiny, "STEPS", 4)
    call = '{"fruit": "pear"}'
    tiny.make_tiny_model(tmp_path / "m", [(f"{n}?", call) for n in range(100)], width=16, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert tiny._solved(Scorer(model), [tiny._row(f"{n}?", call) for n in range(8)]) > 0.02
