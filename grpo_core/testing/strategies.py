"""Hypothesis strategies for tests of environments; they need the package ``hypothesis``.

@given(testing.strategies.episodes(environment.prompts("train")))
def test_a_reward_is_between_0_and_1(episode):
    assert 0 <= environment.evaluate([episode])[0] <= 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import Episode, Feedback, Prompt

try:
    from hypothesis import strategies as st
except ImportError:
    raise ConfigError("grpo_core.testing.strategies needs hypothesis: pip install hypothesis") from None

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ENDS = ("stop", "length", "turns", "tokens", "tool_calls")


def texts() -> SearchStrategy[str]:
    """Texts of a model: any Unicode but lone surrogates, which no tokenizer writes."""
    return st.text(max_size=200)


def prompts() -> SearchStrategy[Prompt]:
    """Prompts of one user message, with an answer."""
    return st.builds(
        Prompt, messages=texts(), answer=texts(), id=st.uuids().map(str), environment=st.just("task")
    )


def episodes(of: Sequence[Prompt] = (), *, turns: int = 1) -> SearchStrategy[Episode]:
    """Episodes that end with a reply of the model.

    Args:
        of: the prompts that are played; default: any.
        turns: largest number of replies; the user says something between them.
    """

    def played(prompt: Prompt, replies: list[str], said: list[str], end: str, group: str) -> Episode:
        messages = [*prompt.messages, {"role": "assistant", "content": replies[0]}]
        for answer, reply in zip(said, replies[1:], strict=False):
            messages += [{"role": "user", "content": answer}, {"role": "assistant", "content": reply}]
        return Episode(
            prompt=prompt,
            messages=tuple(messages),
            turn=len(replies) - 1,
            group=group,
            finish_reason=end,  # type: ignore[arg-type]  # one of ENDS
            completion_tokens=sum(map(len, replies)),
        )

    replies = st.lists(texts(), min_size=1, max_size=turns)
    said = st.lists(texts(), min_size=turns - 1, max_size=turns - 1)
    some = st.sampled_from(list(of)) if of else prompts()
    return st.builds(played, some, replies, said, st.sampled_from(ENDS), st.sampled_from(["0", "1"]))


def feedback() -> SearchStrategy[Feedback]:
    """Valid feedback: scored, unscored, or with an answer after which the model continues."""
    rewards = st.floats(-1e6, 1e6)
    metrics = st.dictionaries(st.sampled_from("abc"), rewards, max_size=2)
    ended = st.builds(Feedback, reward=st.none() | rewards, metrics=metrics)
    going = st.builds(Feedback, reward=st.none() | rewards, done=st.just(False), messages=texts())
    return ended | going | st.builds(Feedback, error=texts())
