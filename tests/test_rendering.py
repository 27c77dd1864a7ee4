"""Messages and tokens: templates are the model's own, and sampled tokens are never encoded again."""

from __future__ import annotations

import pytest

from grpo_core.errors import ModelError
from grpo_core.rendering import Renderer
from grpo_core.tiny import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWRITING = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def user(content):
    return {"role": "user", "content": content}


def test_without_a_template_contents_stand_as_they_are(directory):
    renderer = Renderer.load(str(directory))
    ids = renderer.prompt_ids([user("52341=")])
    assert renderer.text(ids) == "52341="
    assert len(ids) == 6
    assert renderer.prompt_ids([user("ab"), user("cd")]) == renderer.prompt_ids([user("abcd")])


def test_the_end_of_sequence_token_ends_a_completion_and_is_not_part_of_what_was_said(directory):
    renderer = Renderer.load(str(directory))
    (eos,) = renderer.stop_token_ids
    assert renderer.texts([(*renderer.prompt_ids([user("12")]), eos), ()]) == ["12", ""]


def test_with_a_template_the_prompt_ends_where_the_model_speaks(tokenizer):
    tokenizer.chat_template = TEMPLATE
    renderer = Renderer(tokenizer)
    assert renderer.text(renderer.prompt_ids([user("hi")])) == "<user>hi</><assistant>"


def test_what_an_environment_answers_is_encoded_alone_and_follows_the_sampled_tokens(tokenizer):
    tokenizer.chat_template = TEMPLATE
    renderer = Renderer(tokenizer)
    assert renderer.text(renderer.continuation_ids([user("no")])) == "<user>no</><assistant>"


def test_a_template_that_rewrites_what_was_said_is_refused(tokenizer):
    tokenizer.chat_template = REWRITING
    with pytest.raises(ModelError, match="the chat template rewrites earlier messages"):
        Renderer(tokenizer).continuation_ids([user("no")])


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        Renderer.load(str(tmp_path))
