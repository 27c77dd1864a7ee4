"""Messages and tokens: templates are the model's own, and sampled tokens are never encoded again."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.tokens import as_ids
from grpo_core.demo.tiny import write_tokenizer
from grpo_core.text.rendering import INLINE, Renderer
from grpo_core.text.response_formats import parse_calls

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
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


def test_the_end_of_sequence_token_ends_a_completion_and_is_not_in_its_text(directory):
    renderer = Renderer.load(str(directory))
    (eos,) = renderer.stop_token_ids
    assert renderer.texts([(*renderer.prompt_ids([user("12")]), eos), ()]) == ["12", ""]


def test_with_a_template_the_prompt_ends_where_the_model_speaks(tokenizer):
    tokenizer.chat_template = TEMPLATE
    renderer = Renderer(tokenizer)
    assert renderer.text(renderer.prompt_ids([user("hi")])) == "<user>hi</><assistant>"


# ---------------------------------------------------------------------------------- several turns

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As many models have it: a line break follows the token that ends a turn, which nobody samples."""

FORGETFUL = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
"""Drops the reasoning of all turns but the last."""

MUTE = "{{ messages[0].content }}"

SILENT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def merging():
    """A tokenizer that merges: most texts can be written in many ways."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["assistant user tool what is the answer no yes again think"] * 9,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def chat(tokenizer, template):
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def said(content, *calls):
    functions = [{"type": "function", "id": "call00000", "function": c} for c in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": functions} if calls else {})}


TURNS = st.lists(
    st.tuples(
        st.text("abc think</>\n", max_size=12),
        st.sampled_from(["user", "tool"]),
        st.text("no yes\n", max_size=8),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.long
@given(turns=TURNS)
def test_a_row_equals_the_templates_rendering_of_the_whole_conversation(merging, turns):
    """If the model writes its tokens as the tokenizer would."""
    renderer = chat(merging, CHATML)
    (end,) = renderer.stop_token_ids
    messages = [user("what is it")]
    row = renderer.prompt_ids(messages)
    for reply, role, answer in turns:
        row += (*merging.encode(reply), end)
        answers = [{"role": role, "content": answer}]
        row += renderer.continuation_ids(answers, before=messages, said=said(reply), end=end)
        messages += [said(reply), *answers]
    whole = merging.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert merging.decode(row) == whole
    assert row == renderer.prompt_ids(messages)


@pytest.mark.long
@given(st.lists(st.integers(0, 399), min_size=1, max_size=8), st.booleans())
def test_tokens_that_the_tokenizer_would_write_otherwise_stay_as_they_were_sampled(merging, sampled, ended):
    renderer = chat(merging, CHATML)
    (end,) = renderer.stop_token_ids
    completion = tuple(token for token in sampled if token != end) + ((end,) if ended else ())
    text = renderer.text(completion)
    new = renderer.continuation_ids(
        [user("again")], before=[user("?")], said=said(text), end=end if ended else None
    )
    assert merging.decode(new) == ("" if ended else "<|im_end|>") + (
        "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    ), "what is new does not depend on what was said, and one token ends it"


def test_tool_answers_follow_their_call(merging):
    renderer = chat(merging, CHATML)
    renderer.check_turns(tools=True)
    garbled = said("", {"name": "", "arguments": "not JSON"})
    answer = {"role": "tool", "name": "", "tool_call_id": "call00000", "content": "error"}
    new = renderer.continuation_ids(
        [answer], before=[user("?")], said=garbled, end=renderer.stop_token_ids[0]
    )
    assert merging.decode(new) == "\n<|im_start|>tool\nerror<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_shown_by_the_template_and_no_tools_are_not_announced(merging):
    renderer = chat(merging, CHATML)
    shown = merging.decode(renderer.prompt_ids([user("hi")], [{"type": "function", "name": "price"}]))
    assert '"name": "price"' in shown
    assert merging.decode(renderer.prompt_ids([user("hi")], ())) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_template_answers_follow_unchanged(directory):
    renderer = Renderer.load(str(directory))
    renderer.check_turns(tools=True)
    new = renderer.continuation_ids([user("no"), user("!")], before=[user("?")], said=said("x"), end=None)
    assert renderer.text(new) == "no!"


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (MUTE, False, "does not render assistant messages"),
        (REWRITING, False, "does not render assistant messages"),
        (SILENT, True, "cannot render messages of user, assistant, tool: no tools here"),
    ],
)
def test_a_template_that_cannot_render_a_conversation_is_refused_before_generation(
    merging, template, tools, message
):
    with pytest.raises(ModelError, match=message):
        chat(merging, template).check_turns(tools=tools)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_refused(merging, template):
    with pytest.raises(ModelError, match="the chat template cannot render messages of user"):
        chat(merging, template).prompt_ids([user("x")])


# ---------------------------------------------------------------------------------- tool calls


def parsed(renderer, text, *, tools=({"type": "function"},)):
    ids = as_ids(renderer.tokenizer.encode(text))
    return renderer.message(text, token_ids=ids, before=as_ids(()), tools=tools)


def test_calls_stand_between_tags_if_the_tokenizer_does_not_say_otherwise(directory):
    message = parsed(
        Renderer.load(str(directory)),
        'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> '
        '<tool_call>{"name": "f"}</tool_call>',
    )
    assert message["content"] == "So:"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "f", "arguments": {}},
    ]


@pytest.mark.parametrize("text", ["", "no call", "<tool_call>{", "</tool_call><tool_call>"])
def test_text_without_a_call_stays_text(directory, text):
    assert parsed(Renderer.load(str(directory)), text) == {"role": "assistant", "content": text}


@given(st.text(), st.text())
def test_no_text_can_break_the_reading_of_calls(before, inner):
    _, calls = parse_calls(f"{before}<tool_call>{inner}</tool_call>")
    assert len(calls) >= 1
    assert all(isinstance(call["function"]["name"], str) for call in calls)


def test_a_tokenizer_that_says_how_calls_are_written_is_followed(tokenizer):
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    message = parsed(Renderer(tokenizer), 'Well [CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]')
    assert message["content"].strip() == "Well"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    for garbled in ('[CALL]{"name": [/CALL]', "[CALL]7[/CALL]", '[CALL]{"name": 3}[/CALL]'):
        (call,) = parsed(Renderer(tokenizer), garbled)["tool_calls"]
        assert call["function"] == {"name": "", "arguments": garbled}


def test_the_models_sizes_bound_prompts_and_token_ids(directory, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    unknown = Renderer.load(str(model))
    assert (unknown.context, unknown.vocabulary) == (2**31, 2**31)
    sizes = {"max_position_embeddings": 64, "vocab_size": 99}
    for config in (sizes, {"text_config": sizes}):
        (model / "config.json").write_text(json.dumps(config))
        renderer = Renderer.load(str(model))
        assert (renderer.context, renderer.vocabulary) == (64, 99)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}})),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "7"),
        ("config.json", "[" * 100_000),
        ("config.json", "[]"),
        ("config.json", '{"text_config": 3}'),
        ("config.json", "\0"),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("generation_config.json", '{"eos_token_id": -7}'),
        ("generation_config.json", '"text"'),
    ],
)
def test_a_malformed_file_of_a_model_is_one_clear_error(directory, tmp_path, file, content):
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    (model / file).write_text(content)
    with pytest.raises(ModelError, match=r"its tokenizer cannot be loaded|config\.json") as raised:
        Renderer.load(str(model))
    assert len(str(raised.value).splitlines()) == 1


def test_the_event_loop_continues_while_a_long_conversation_is_rendered_and_a_short_one_waits(tokenizer):
    renderer = Renderer(tokenizer)
    begun, release, finished = threading.Event(), threading.Event(), []

    def long_work():
        begun.set()
        return release.wait(60)

    async def story():
        long = asyncio.create_task(renderer.run(long_work, INLINE + 1))
        await asyncio.sleep(0)
        assert begun.wait(60)
        short = asyncio.create_task(renderer.run(lambda: finished.append("short"), 1))
        for _ in range(9):
            await asyncio.sleep(0)
        assert finished == [], "a tokenizer need not be thread-safe"
        release.set()
        assert await long
        await short
        await renderer.run(lambda: finished.append(threading.current_thread().name), INLINE)

    asyncio.run(story())
    assert finished == ["short", threading.main_thread().name]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        Renderer.load(str(tmp_path))
