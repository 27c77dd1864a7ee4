"""Messages in one form: what is read in several ways is the same, and what no model could read is refused."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.text.messages import MessageError, normalised, prompt_messages

TEA = {"role": "user", "content": "tea?"}
CALL = {"type": "function", "id": "c1", "function": {"name": "price", "arguments": {"item": "tea"}}}
ANSWER = {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "price"}


def said(**keys):
    return {"role": "assistant", "content": "", **keys}


def called(arguments):
    """The arguments of a call as they are read."""
    call = {**CALL, "function": {"name": "price", "arguments": arguments}}
    return normalised([said(tool_calls=[call])])[0]["tool_calls"][0]["function"]["arguments"]


# ---------------------------------------------------------------------------------- one form


@pytest.mark.parametrize(
    ("message", "form"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "tea"}, "?"]}, TEA),
        ({"role": "user", "content": np.array([{"type": "input_text", "text": "tea?", "url": None}])}, TEA),
        ({"role": "user", "content": "tea?", "tool_calls": None, "name": None, "x": None}, TEA),
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "assistant", "content": None}, said()),
        (said(tool_calls=[]), said()),
        (said(tool_calls=None, function_call=None, refusal=None), said()),
        ({"role": "assistant", "tool_calls": [CALL]}, said(tool_calls=[CALL])),
        (said(tool_calls=[CALL["function"] | {"id": "c1"}]), said(tool_calls=[CALL])),
        (
            said(function_call={"name": "price", "arguments": '{"item": "tea"}'}),
            said(tool_calls=[{"type": "function", "function": CALL["function"]}]),
        ),
        (
            {"role": "function", "name": "price", "content": "7"},
            {"role": "tool", "content": "7", "name": "price"},
        ),
        (
            {"role": "tool", "content": None, "tool_call_id": 7},
            {"role": "tool", "content": "", "tool_call_id": "7"},
        ),
        (
            said(reasoning_content="hm", steps=np.int64(3), of=(1, {"a": None})),
            said(reasoning_content="hm", steps=3, of=[1, {}]),
        ),
    ],
)
def test_a_message_is_the_same_however_it_is_written(message, form):
    (read,) = normalised([message])
    assert read == form
    assert json.loads(json.dumps(read)) == form


@pytest.mark.parametrize("arguments", [{}, None, "", "{}", "null", {"item": None}])
def test_a_call_without_arguments_has_none(arguments):
    assert called(arguments) == {}


def test_arguments_that_are_text_are_read_and_keep_their_nulls():
    assert called('{"item": "tea"}') == called({"item": "tea", "size": None}) == {"item": "tea"}
    assert called({"of": [{"a": 1, "b": None}, None]}) == {"of": [{"a": 1}, None]}
    meant = {"item": None, "of": [{"a": None}]}
    assert called(json.dumps(meant)) == meant
    again = pickle.loads(pickle.dumps(called(json.dumps(meant))))
    assert called(again) == meant, "also when they are read again"


def test_the_answer_of_a_tool_has_the_name_of_its_call():
    nameless = {key: ANSWER[key] for key in ("role", "content", "tool_call_id")}
    other = said(tool_calls=[{**CALL, "id": "c2", "function": {"name": "open", "arguments": {}}}])
    assert normalised([TEA, said(tool_calls=[CALL]), other, nameless])[-1] == ANSWER
    assert normalised([nameless]) == (nameless,)


def test_a_call_that_a_model_wrote_stays_as_it_is():
    """An agent sends back what was sampled; what would be changed here would begin a new segment."""
    for arguments, read in [
        ("{garbled", "{garbled"),
        ({"a": None}, {"a": None}),
        ('{"a": null}', {"a": None}),
    ]:
        call = {"id": "c1", "function": {"name": "", "arguments": arguments}}
        ((back,),) = (
            [*message["tool_calls"]] for message in normalised([said(tool_calls=[call])], sampled=True)
        )
        assert back == {"type": "function", "id": "c1", "function": {"name": "", "arguments": read}}


# ---------------------------------------------------------------------------------- refused


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "there are no messages"),
        (["hi"], "message 1 is 'hi'; expected one such as {'role': 'user'"),
        ([{"content": "hi"}], "message 1 has the role None; expected system, user, assistant or tool"),
        ([{"role": "alien", "content": "hi"}], "message 1 has the role 'alien'"),
        (
            [TEA, {"role": "user", "content": [IMAGE]}],
            "message 2 (user): its content has the part {'image_url",
        ),
        ([{"role": "user", "content": 3}], "message 1 (user): its content is 3; expected text"),
        ([{"role": "user", "content": None}], "message 1 (user) has no content"),
        ([{"role": "system"}, TEA], "message 1 (system) has no content"),
        ([{**TEA, "tool_calls": [CALL]}], "message 1 (user) calls a tool"),
        ([TEA, said(tool_calls="price")], "message 2 (assistant): its tool_calls are 'price'"),
        (
            [TEA, said(tool_calls=["price"])],
            "message 2 (assistant): the tool call 'price' has no function with",
        ),
        ([TEA, said(tool_calls=[{"id": "c1"}])], "has no function with a name"),
        ([TEA, said(reasoning=["hm"])], "message 2 (assistant): its reasoning is ['hm']; expected text"),
        ([{**TEA, "at": float("nan")}], "a message has the number nan"),
        ([{**TEA, "at": {1: 2}}], "a message has the key 1"),
        ([{**TEA, "at": object}], "a message has the type <class 'object'>"),
        (
            [TEA, said(content="7")],
            "message 2 (assistant) is the last one, and the model would answer itself",
        ),
        ([TEA, ANSWER], "message 2 (tool) answers the call 'c1', and no message before it makes such a call"),
        ([said(tool_calls=[CALL]), TEA, ANSWER], "message 3 (tool) answers the call 'c1', and no message"),
        (
            [said(tool_calls=[CALL]), {**ANSWER, "tool_call_id": "c9"}],
            "message 2 (tool) answers the call 'c9'",
        ),
    ],
)
def test_what_no_model_could_read_is_refused(messages, why):
    with pytest.raises(MessageError) as raised:
        prompt_messages(messages)
    assert why in str(raised.value)


@pytest.mark.parametrize("arguments", ["{garbled", "[1]", '"tea"', "7", [1], 7, "[" * 100_000, '{"a": NaN}'])
def test_arguments_that_are_not_a_json_object_are_refused(arguments):
    with pytest.raises(MessageError, match=r"arguments of price are .*; expected a JSON object|number nan"):
        called(arguments)


def test_a_message_that_is_nested_too_deep_is_refused():
    deep = {}
    for _ in range(200):
        deep = {"a": deep}
    with pytest.raises(MessageError, match="nested more than 100 deep"):
        normalised([{**TEA, "at": deep}])


@pytest.mark.parametrize(
    "messages",
    [
        [TEA, {"role": "system", "content": "Be brief."}],
        [TEA, said(content="<tool_call>price</tool_call>"), {"role": "tool", "content": "7"}],
        [said(tool_calls=[CALL, {**CALL, "id": "c2"}]), ANSWER, {**ANSWER, "tool_call_id": "c2"}],
        [said(tool_calls=[CALL]), ANSWER, said(content="7"), {**TEA, "content": ""}],
    ],
)
def test_conversations_that_models_read_stay_as_they_are(messages):
    assert list(prompt_messages(messages)) == messages


# ---------------------------------------------------------------------------------- whatever comes


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.sampled_from(['{"a": null}', "null"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["text", "type", "name", "id", "function", "arguments", "a"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KEYS = ["content", "tool_calls", "function_call", "tool_call_id", "name", "reasoning", "x"]
MESSAGES = st.builds(
    lambda role, rest: {"role": role, **rest},
    st.sampled_from(["user", "assistant", "tool", "system", "developer", "function"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
)


@pytest.mark.long
@given(st.lists(MESSAGES, max_size=4), st.booleans())
def test_whatever_comes_is_refused_or_reads_the_same_when_it_is_read_again(messages, sampled):
    try:
        once = normalised(messages, sampled=sampled)
    except MessageError:
        return
    assert all(isinstance(message["content"], str) for message in once)
    if not sampled:
        assert normalised(once) == once
        calls = [call for message in once for call in message.get("tool_calls", ())]
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
        assert not any(part is None for message in once for part in message.values())
