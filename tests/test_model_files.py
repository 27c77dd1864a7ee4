"""Files of a model that contradict each other are found before its weights are loaded."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from test_early_checks import ENV, FILE, option, refused
from test_rollout import played, requests

from grpo_core.config import Config, ModelConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.incidents import reported_to
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.diagnosis.model_files import check_files
from grpo_core.testing import FakeEnvironment, FakeRenderer
from grpo_core.text.rendering import Renderer

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return directory


@pytest.fixture
def model(made, tmp_path):
    """A tiny model with 99 tokens, whose head is its embedding."""
    return shutil.copytree(made, tmp_path / "model")


def edit(model, name, **changes):
    path = model / name
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(table | changes))


def tensors(model, change):
    path = model / "model.safetensors"
    found = load_file(path)
    change(found)
    save_file(found, path, {"format": "pt"})


def rows(model, number):
    """Give the embedding another number of rows."""
    tensors(model, lambda found: found.update({EMBEDDING: found[EMBEDDING].repeat(2, 1)[:number].clone()}))
    edit(model, "config.json", vocab_size=number)


def add_token(model, text, *, special, id=99):
    file = model / "tokenizer.json"
    table = json.loads(file.read_text())
    table["added_tokens"].append({**table["added_tokens"][0], "id": id, "content": text, "special": special})
    file.write_text(json.dumps(table))


def test_files_that_fit_together_are_not_mentioned(model):
    assert check_files(Config(), model) == []
    rows(model, 128)  # padding
    assert check_files(Config(), model) == []


def other_head(found):
    found["lm_head.weight"] = found[EMBEDDING] + 1


def third_layer(found):
    for name in [name for name in found if ".layers.1." in name]:
        found[name.replace(".layers.1.", ".layers.2.")] = found[name].clone()


CONTRADICTIONS = {
    "embedding too small": (
        lambda model: rows(model, 80),
        "its tokenizer has 99 ids, and its embedding 80 rows: 19 tokens have none, such as ",
    ),
    "added tokens": (
        lambda model: add_token(model, "<think>", special=True),
        "its tokenizer has 100 ids, and its embedding 99 rows: 1 tokens have none, such as '<think>'",
    ),
    "config of another model": (
        lambda model: edit(model, "config.json", vocab_size=80),
        "vocab_size is 80 in config.json, and model.embed_tokens.weight has 99 rows in the weights",
    ),
    "padding": (
        lambda model: edit(model, "config.json", pad_token_id=500),
        "pad_token_id is 500 in config.json, and its embedding has 99 rows",
    ),
    "end of another model": (
        lambda model: edit(model, "generation_config.json", eos_token_id=[500, 501]),
        "eos_token_id is 500 in generation_config.json, and its embedding has 99 rows",
    ),
    "end that is not a token": (
        lambda model: edit(model, "tokenizer_config.json", eos_token="<|im_end|>"),
        "eos_token is '<|im_end|>' in tokenizer_config.json, and tokenizer.json has no such token",
    ),
    "another head": (
        lambda model: tensors(model, other_head),
        "tie_word_embeddings is true in config.json, and lm_head.weight differs from model.embed_tokens",
    ),
    "no head": (
        lambda model: edit(model, "config.json", tie_word_embeddings=False),
        "tie_word_embeddings is false in config.json, and the weights have no head",
    ),
    "too few layers": (
        lambda model: edit(model, "config.json", num_hidden_layers=3),
        "config.json says 3 layers, and the weights have 2",
    ),
    "adapters": (
        lambda model: edit(model, "adapter_config.json", r=4),
        "it has a file adapter_config.json, so transformers would add adapters",
    ),
    "no table": (
        lambda model: (model / "generation_config.json").write_text("[]"),
        "generation_config.json is list; expected a table",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_wrong_input_that_names_both_sides(model, case):
    harm, message = CONTRADICTIONS[case]
    harm(model)
    with pytest.raises(ModelError) as wrong:
        check_files(Config(), model)
    assert message in str(wrong.value)
    assert wrong.value.exit_status == 2


@pytest.mark.long
def test_a_run_and_a_validation_are_refused_before_anything_starts(model):
    (model.parent / "file.py").write_text(FILE)
    rows(model, 80)
    for command, arguments in (("train", option("model.path", "model")), ("validate", ["model"])):
        said = refused(model.parent, command, *ENV, *arguments)
        assert "its tokenizer has 99 ids, and its embedding 80 rows" in said


SUSPICIONS = {
    "more layers": (
        lambda model: tensors(model, third_layer),
        "the model's weights have 3 layers, and config.json says 2: the others are not used",
    ),
    "template of another model": (
        lambda model: (model / "chat_template.jinja").write_text(
            "{# <|none|> #}{% for m in messages %}<|im_start|>{{ m.content }}<|end|>{% endfor %}"
        ),
        "the chat template writes '<|im_start|>', which the tokenizer does not have as tokens",
    ),
    "end that is an ordinary token": (
        lambda model: edit(model, "generation_config.json", eos_token_id=20),
        "eos_token_id is 20 in generation_config.json, which is the ordinary token '0'",
    ),
}


@pytest.mark.parametrize("case", SUSPICIONS)
def test_what_may_be_meant_is_a_warning(model, case):
    harm, message = SUSPICIONS[case]
    harm(model)
    (said,) = check_files(Config(), model)
    assert message in said


def test_the_chosen_template_counts_and_not_the_tokenizers(model, tmp_path):
    written = tmp_path / "other.jinja"
    written.write_text("<|im_start|>{{ messages[0].content }}")
    (said,) = check_files(Config(model=ModelConfig(chat_template=str(written))), model)
    assert "<|im_start|>" in said


def test_a_placeholder_for_images_needs_no_row(model):
    """The smallest Gemma 3 reads texts only, and its tokenizer has one."""
    add_token(model, "<image_soft_token>", special=True)
    edit(model, "tokenizer_config.json", extra_special_tokens={"image_token": "<image_soft_token>"})
    assert check_files(Config(), model) == []
    (model / "chat_template.jinja").write_text("<image_soft_token>{{ messages[0].content }}")
    with pytest.raises(ModelError, match="such as '<image_soft_token>' with the id 99"):
        check_files(Config(), model)


@pytest.mark.parametrize(("tokens", "said"), [(2**31, []), (97, [("textless", "the model")])])
def test_a_token_without_a_text_is_said_when_it_is_sampled(monkeypatch, tokens, said):
    """Most embeddings have more rows than the tokenizer has ids, and those are hardly ever sampled."""
    monkeypatch.setattr(FakeRenderer, "tokens", tokens)
    incidents = []
    with reported_to(incidents.append):
        played(requests(1), {"task": FakeEnvironment()})
    assert [(incident.kind, incident.component) for incident in incidents] == said


def test_a_tokenizer_without_a_known_file_is_compared_when_it_is_loaded(model):
    renderer = Renderer.load(str(model))
    assert (renderer.tokens, renderer.vocabulary) == (99, 99)
    renderer.tokens = 100
    renderer.check_tokens(str(model))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="its tokenizer has 100 ids, and its embedding 99 rows"):
        renderer.check_tokens(str(model))
