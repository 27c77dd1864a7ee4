"""Hypothesis strategies for records with any values in all fields, including future fields."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve, fields
from hypothesis import strategies as st

from grpo_core.contracts.errors import Fault
from grpo_core.contracts.records import Group, Prompt, Rollout, Row, Segment
from grpo_core.contracts.tokens import Tokens

numbers = st.floats(allow_nan=False, allow_infinity=False)
float32s = st.floats(-4, 4, width=32)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)
"""Values that JSON has."""
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=5)},
        optional={"tool_calls": st.lists(values, max_size=1)},
    ),
    max_size=2,
).map(tuple)
BY_TYPE = {
    "str": st.text(max_size=5),
    "str | None": st.none() | st.text(max_size=5),
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "int": st.integers(-1, 2**62),
    "int | None": st.none() | st.integers(0, 9),
    "float": numbers,
    "float | None": st.none() | numbers,
    "Any": values,
    "Mapping[str, float]": st.dictionaries(st.text(max_size=5), numbers, max_size=2),
    "Mapping[str, Any]": st.dictionaries(st.text(max_size=5), values, max_size=2),
    "Mapping[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    "tuple[str, ...]": st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(0, 9), max_size=3).map(tuple),
    "tuple[float, ...]": st.lists(numbers, max_size=3).map(tuple),
    "tuple[Message, ...]": messages,
    "tuple[Mapping[str, Any], ...]": st.just(()),
    "Ids": st.lists(st.integers(0, 9), max_size=3),
    "Fault | None": st.none() | st.builds(Fault, *[st.text(max_size=5)] * 4),
}
"""Values of the fields of records, by their annotation; a field of another type needs an entry."""


def any_of(kind: type, **own: Any) -> st.SearchStrategy[Any]:
    """Records of a class: each field has any value of its type, or the strategy that is given for it."""
    others = {
        each.name: BY_TYPE[kind.__annotations__[each.name]] for each in fields(kind) if each.name not in own
    }
    return st.builds(kind, **others, **own)


@st.composite
def any_tokens(draw: Any) -> Tokens:
    some = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), float32s), max_size=4))
    versions = [draw(st.integers(-1, 9)) if sampled else -1 for _, sampled, _ in some]
    return Tokens(*([each[i] for each in some] for i in range(3)), versions=versions)


segments = any_of(Segment, prompt_ids=st.lists(st.integers(0, 9), max_size=3), tokens=any_tokens())


def by_token(n: int) -> st.SearchStrategy[Any]:
    """Advantages of n tokens, as exact as a row has them; None if all have the same."""
    if not n:
        return st.none()
    return st.none() | st.lists(float32s, min_size=n, max_size=n).map(np.array)


@st.composite
def any_rollouts(draw: Any) -> Rollout:
    its = draw(st.lists(segments, max_size=2))
    n = sum(each.tokens.n_sampled for each in its)
    return draw(any_of(Rollout, segments=st.just(its), token_advantages=by_token(n)))


@st.composite
def any_groups(draw: Any) -> Group:
    prompt = draw(any_of(Prompt))
    rollouts = draw(st.lists(any_rollouts(), min_size=1, max_size=2))
    rollouts = [evolve(each, messages=(*prompt.messages, *each.messages)) for each in rollouts]
    return draw(any_of(Group, prompt=st.just(prompt), rollouts=st.just(tuple(rollouts))))


@st.composite
def any_rows(draw: Any) -> Row:
    tokens = draw(any_tokens())
    advantages = by_token(tokens.n_sampled).map(lambda a: None if a is None else a.astype(np.float32))
    ids = st.lists(st.integers(0, 9), max_size=3)
    return draw(any_of(Row, prompt_ids=ids, tokens=st.just(tokens), token_advantages=advantages))
