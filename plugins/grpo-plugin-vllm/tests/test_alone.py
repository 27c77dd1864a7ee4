"""Sequential decoding of calls."""

from __future__ import annotations

from grpo_core import GenerationRequest
from grpo_plugin_vllm.server import Queue

LONG, SHORT = (GenerationRequest(prompt_ids=(1,), max_tokens=n) for n in (9, 1))
PROBE = GenerationRequest(prompt_ids=(1,), max_tokens=1, temperature=0.0)


def keys(call):
    return [key for key, _ in call]


def queue(*calls):
    made = Queue()
    for call in calls:
        made.put([(key, LONG) for key in call])
    return made


def test_a_call_begins_when_all_requests_of_the_one_before_have_ended():
    calls = queue((1, 2), (3,))
    assert keys(calls.next()) == [1, 2]
    calls.ended(1)
    assert not calls.next(), "2 still runs"
    calls.ended(2)
    assert keys(calls.next()) == [3]
    calls.ended(3)
    assert not calls.next()


def test_a_canary_waits_for_the_running_call_alone():
    calls = queue((1,), (2,), (3,))
    assert keys(calls.next()) == [1]
    calls.put([(4, PROBE), (5, PROBE)])
    calls.put([(6, PROBE), (7, LONG)])
    calls.ended(1)
    assert keys(calls.next()) == [4, 5]


def test_short_calls_take_turns_with_the_others():
    calls = queue((1,))
    calls.put([(2, SHORT)])
    assert keys(calls.next()) == [1]
    calls.ended(1)
    assert keys(calls.next()) == [2]


def test_what_is_forgotten_does_not_begin_and_ends_its_call_if_it_runs():
    calls = queue((1, 2), (3, 4), (5,))
    calls.next()
    assert calls.forget({3, 4}) == set(), "they wait"
    assert calls.forget({1, 2}) == {1, 2}, "vLLM has to be told of these"
    assert keys(calls.next()) == [5]
