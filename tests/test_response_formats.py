"""Completions are read in the format of their family: reasoning, content and tool calls."""

from __future__ import annotations

import sys

import pytest
from test_segments import PLAIN, TOOL, make_tokenizer

from grpo_core.contracts.errors import ConfigError, ModelError
from grpo_core.contracts.tokens import as_ids
from grpo_core.text.rendering import Renderer
from grpo_core.text.response_formats import check_response_format

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QWEN3 = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", *TAGS)
GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>",
       "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink", *TAGS)  # fmt: skip
INKLING = ("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>",
           "<|content_text|>", "<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>",
           "<|content_xml|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>",
           "<|content_model_end_sampling|>", "<|end_message|>", "<|audio_end|>", "<|unused_200054|>",
           "<|unused_200053|>", "<|endoftext|>")  # fmt: skip
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>'
GLM_CALL = (
    "<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>tea</arg_value>\n</tool_call><|observation|>"
)


def read(name, tokens, reply, before="", tools=(TOOL,)):
    tokenizer = make_tokenizer(PLAIN, tokens)
    renderer = Renderer(tokenizer, response_format=name)
    ids = [as_ids(tokenizer.encode(text, add_special_tokens=False)) for text in (reply, before)]
    return renderer.message(renderer.text(ids[0].tolist()), token_ids=ids[0], before=ids[1], tools=tools)


def called(*calls):
    return [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]


@pytest.mark.parametrize(
    ("name", "tokens", "reply", "content"),
    [
        ("qwen3", QWEN3, f"<think>\nno no\n</think>\n\nyes{CALL}<|im_end|>", "yes"),
        ("glm-4.5", GLM, f"<think>no no</think>\nyes{GLM_CALL}", "yes"),
    ],
)
def test_reasoning_and_calls_of_a_family_are_read(name, tokens, reply, content):
    assert read(name, tokens, reply) == {
        "role": "assistant",
        "content": content,
        "reasoning_content": "no no",
        "tool_calls": called(("price", {"item": "tea"})),
    }


def test_reasoning_that_the_prompt_opens_is_reasoning():
    message = read("qwen3", QWEN3, "no no\n</think>\n\nyes<|im_end|>", "<|im_start|>assistant\n<think>\n")
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "no no"}


def test_a_garbled_call_is_a_call_without_a_name_and_an_error_for_the_model():
    message = read("qwen3", QWEN3, 'yes<tool_call>\n{"name": "price", "arg\n</tool_call><|im_end|>')
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == ""
    assert '"arg' in call["function"]["arguments"]


def test_a_reply_at_which_a_format_fails_is_such_a_call():
    message = read("inkling", INKLING, "yes<|content_invoke_tool_json|>" + "[" * 5000)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == ""


def test_an_unknown_format_is_named_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"is 'qwen4', which is unknown. Did you mean 'qwen3"):
        check_response_format("qwen4")
    check_response_format("auto")


def test_a_format_whose_tokens_the_tokenizer_lacks_is_refused():
    with pytest.raises(ModelError, match=r"'glm-4\.5', which does not fit the model's tokenizer"):
        read("glm-4.5", QWEN3, "yes")


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers.configs", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-core\[formats\]'"):
        check_response_format("qwen3")
