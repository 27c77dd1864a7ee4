"""An environment or agent reads what was sampled: what a reply adds to the text of its prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_control import CHATML, KINDS, pair
from test_segments import TOOL

from grpo_core.contracts.tokens import as_ids
from grpo_core.engines.local.stopping import StopStrings
from grpo_core.text.decoding import added
from grpo_core.text.rendering import Renderer
from grpo_core.text.response_formats import parse_calls

IDS = st.lists(st.integers(5, 340), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=IDS, reply=IDS, filler=st.sampled_from(["what ", "a", "é", "\n"]))
def test_a_reply_is_what_it_adds_to_the_text_of_its_prompt(kind, prompt, reply, filler):
    """The oracle decodes the whole of both, whose length is not bounded."""
    renderer, _ = pair(kind, CHATML)
    tokenizer = renderer.tokenizer
    hidden = set(tokenizer.all_special_ids)
    prompt = [*tokenizer.encode(filler, add_special_tokens=False), *prompt]
    reply = [token for token in reply if token not in hidden]

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    before, whole = text(prompt), text([*prompt, *reply])
    if not whole.startswith(before):  # the prompt ends within a character that the reply completes
        before = before.rstrip("\N{REPLACEMENT CHARACTER}")
    if whole.startswith(before):
        assert renderer.text(reply, prompt) == whole[len(before) :]


def test_clean_up_removes_no_blanks_whatever_the_configuration_says():
    renderer, _ = pair("unigram", CHATML)
    renderer.tokenizer.clean_up_tokenization_spaces = True
    ids = renderer.tokenizer.encode("what , it 's a .", add_special_tokens=False)
    try:
        assert renderer.text(ids) == "what , it 's a ."
    finally:
        renderer.tokenizer.clean_up_tokenization_spaces = False


def test_a_long_run_of_bytes_before_a_reply_does_not_break_its_first_character():
    renderer, _ = pair("byte fallback", CHATML)
    prompt = renderer.tokenizer.encode("what " + "😀" * 9, add_special_tokens=False)
    reply = renderer.tokenizer.encode("😀é", add_special_tokens=False)[1:]
    assert renderer.text(reply, prompt) == "😀é"


@pytest.mark.parametrize("kind", KINDS)
def test_tags_of_thoughts_are_read_also_if_they_are_special_tokens(kind):
    from transformers import AddedToken

    renderer, _ = pair(kind, CHATML)
    renderer.tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(tag, special=True) for tag in ("<think>", "</think>")]}
    )
    made = Renderer(renderer.tokenizer)
    ids = made.tokenizer.encode("<think>no</think>yes<|im_end|>", add_special_tokens=False)
    assert made.text(ids, ids[:1]).replace(" ", "") == "<think>no</think>yes"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(answer=st.text("y=1; <s>|\n", max_size=8))
def test_without_a_template_an_answer_is_what_it_adds_to_the_row(kind, answer):
    """A tokenizer may begin each text that it encodes with a blank."""
    renderer, _ = pair(kind, "")
    said = renderer.encode("what it")
    messages = [{"role": "user", "content": answer}]
    ids = renderer.continuation_ids(
        messages, before=[], said={"role": "assistant", "content": "what"}, end=None
    )
    assert renderer.whole([*said, *ids]) == renderer.whole(said) + answer


# ---------------------------------------------------------------------------------- thoughts and calls

CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
ODD = '<tool_call>{"name": "write", "arguments": {"text": "</think>"}}</tool_call>'


def called(text, before=""):
    renderer, _ = pair("byte BPE", CHATML)
    ids = [as_ids(renderer.tokenizer.encode(part, add_special_tokens=False)) for part in (text, before)]
    message = renderer.message(text, token_ids=ids[0], before=ids[1], tools=[TOOL])
    return message["content"], [call["function"]["name"] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize(
    ("text", "before", "content", "names"),
    [
        (f"<think>{CALL}</think>Hello", "", f"<think>{CALL}</think>Hello", []),
        (f"<think>{CALL}</think>Hello{CALL}", "", f"<think>{CALL}</think>Hello", ["price"]),
        (f"<think>{CALL}", "", f"<think>{CALL}", []),
        (f"{CALL}</think>Hello", "a<think>\n", f"{CALL}</think>Hello", []),
        (f"{CALL} and", "a<think>\n", f"{CALL} and", []),
        (f"{CALL} and", "a<think>\n\n</think>\n", "and", ["price"]),
        (f"{CALL}</think>Hello", "", f"{CALL}</think>Hello", []),
        (f"{CALL}<think>no</think>{CALL}", "", "<think>no</think>", ["price", "price"]),
        (f"So: {ODD}", "", "So:", ["write"]),
        (f"<think>a <tool_call> b</think>{ODD}", "", "<think>a <tool_call> b</think>", ["write"]),
        (f"a <tool_call> b</think>{CALL}", "", "a <tool_call> b</think>", ["price"]),
    ],
)
def test_a_call_that_is_a_thought_is_no_call_and_stays_in_the_thought(text, before, content, names):
    assert called(text, before) == (content, names)


PARTS = st.lists(st.sampled_from([CALL, "a", " "]), max_size=4).map("".join)


@given(
    thoughts=st.lists(PARTS, max_size=3), said=st.lists(PARTS, min_size=4, max_size=4), opened=st.booleans()
)
def test_calls_are_those_outside_of_thoughts(thoughts, said, opened):
    """The oracle knows the parts of which the text is made."""
    text = "".join(f"{part}<think>{thought}</think>" for part, thought in zip(said, thoughts, strict=False))
    outside = said[: len(thoughts)]
    if opened and thoughts:
        text, outside = text[len(said[0]) + len("<think>") :], outside[1:]
    last = said[3]
    _, calls = parse_calls(text + last, thinking=opened and bool(thoughts))
    assert len(calls) == sum(part.count(CALL) for part in (*outside, last))


# ---------------------------------------------------------------------------------- stop texts


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.text("aé <>😀。\n", min_size=1, max_size=14),
    stop=st.sampled_from([" a", "。", "a<", "😀。", "\n", " "]),
)
def test_a_stop_text_is_found_where_the_reply_has_it(tmp_path_factory, kind, text, stop):
    """Also in the first token, inside of a token, and after a long run of bytes."""
    renderer, _ = pair(kind, CHATML)
    folder = tmp_path_factory.getbasetemp() / f"stops {kind}"
    if not folder.exists():
        renderer.tokenizer.save_pretrained(folder)
    stops = StopStrings(str(folder))
    start = renderer.tokenizer.encode("a", add_special_tokens=False)
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    for n in range(1, len(ids) + 1):
        reply = added(renderer.whole, start, ids[:n])
        ended = stops.may_end((stop,), ids[n - 1]) and stops.ended((stop,), ids[:n][-stops.window((stop,)) :])
        if stop in reply:
            assert ended, (reply, ids[:n])
            return
        assert not ended or "\N{REPLACEMENT CHARACTER}" in reply
