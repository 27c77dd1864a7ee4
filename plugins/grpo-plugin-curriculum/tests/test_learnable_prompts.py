"""``learnable_prompts`` estimates success rates, skips prompts, and resumes exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Group, Prompt, Rollout, SampleRequest
from grpo_core.contracts.typed import checked
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream, RoundRobin
from grpo_core.loop.laws import Laws
from grpo_core.reporting.files import plain
from grpo_core.testing import prompts
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts, Rates, SavedEvidence
from grpo_plugin_devkit.samplers import check_sampler

N = 40


def request(n: int, version: int = 0) -> SampleRequest:
    return SampleRequest(
        generation_version=version, target_version=version, current_version=version, expected_prompts=n
    )


def result(prompt: Prompt, *rewards: float, version: int = 0, filtered: bool = False) -> Group:
    return Group(
        prompt=prompt,
        rollouts=tuple(Rollout(reward=reward, advantage=None if filtered else 0.0) for reward in rewards),
        generation_version=version,
        target_version=version,
    )


def a_stream(sampler: Any = None, n: int = N) -> PromptStream:
    loaders = {"task": IndexedLoader("task", prompts(n), seed=0)}
    return PromptStream(sampler=sampler or LearnablePrompts(), loaders=loaders, name="learnable_prompts")


def epoch(stream: PromptStream, version: int = 0) -> list[str]:
    """The ids of the prompts that are drawn while the loader offers its prompts once."""
    drawn: list[str] = []
    loader = cast(IndexedLoader, stream.loaders["task"])
    before = loader.rows
    while loader.rows < before + len(loader):
        drawn += [prompt.id for prompt in stream.draw(request(1, version))]
    return drawn


# ---------------------------------------------------------------------------------- what is drawn


def test_without_evidence_each_prompt_is_drawn_once_an_epoch_as_from_the_loader() -> None:
    plainly = IndexedLoader("task", prompts(N), seed=0).take(3 * N)
    stream = a_stream()
    assert [prompt.id for prompt in stream.draw(request(3 * N))] == [prompt.id for prompt in plainly]


def test_solved_and_hopeless_prompts_are_passed_over_and_uncertain_ones_are_drawn() -> None:
    stream = a_stream(LearnablePrompts(candidates=20))
    kinds = {"solved": (1.0,) * 8, "hopeless": (0.0,) * 8, "uncertain": (1.0, 0.0) * 4}
    for prompt in stream.draw(request(N)):
        kind = list(kinds)[int(prompt.id) % 4 % 3]
        stream.observe([result(prompt, *kinds[kind])])
    stream.passed_over.clear()
    assert all(int(id) % 4 % 3 == 2 for id in epoch(stream))
    reasons = {place: why for event in stream.passed_over for place, why in event.passed_over}
    assert reasons
    assert all(why.startswith("success rate 0.") for why in reasons.values())
    assert {place % 4 % 3 for place in reasons} == {0, 1}


def test_what_is_known_fades_so_that_a_solved_prompt_is_tried_again() -> None:
    stream = a_stream(LearnablePrompts(half_life=10.0, candidates=20))
    for prompt in stream.draw(request(N)):
        stream.observe([result(prompt, *((1.0,) * 8 if int(prompt.id) % 2 else (1.0, 0.0) * 4))])
    soon, later = epoch(stream, version=1), epoch(stream, version=100)
    assert all(int(id) % 2 == 0 for id in soon)
    assert len(later) == N  # nothing is passed over
    assert any(int(id) % 2 for id in later)


def test_if_nothing_is_worth_it_the_best_of_the_candidates_are_drawn() -> None:
    stream = a_stream(LearnablePrompts(candidates=3))
    for prompt in stream.draw(request(N)):
        stream.observe([result(prompt, *(1.0,) * 8)])
    assert len(stream.draw(request(5))) == 5
    assert len(stream.passed_over[-1].offered) == 15


def test_success_is_what_the_task_declares_or_a_threshold() -> None:
    sampler = LearnablePrompts(success=0.4)
    stream = a_stream(sampler)
    (prompt,) = stream.draw(request(1))
    stream.observe([result(prompt, 0.5, 0.3)])
    assert sampler._rates["task"].total[:2] == [1.0, 1.0]


def test_a_prompt_that_is_trained_filtered_or_skipped_is_not_kept_as_on_its_way() -> None:
    sampler = LearnablePrompts()
    stream = a_stream(sampler)
    trained, filtered, skipped = stream.draw(request(3))
    stream.observe([result(trained, 1.0, 0.0)])
    stream.observe([result(filtered, 1.0, 1.0, filtered=True)])
    stream.untrained(filtered, 0)
    stream.untrained(skipped, 0)
    assert sampler.state_dict()["drawn_at"] == {"task": {}}
    assert sampler._rates["task"].total[:2] == [3.0, 1.0]


# ---------------------------------------------------------------------------------- evidence

evidence = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8), st.integers(0, 100)), max_size=12
)


@given(evidence, st.randoms(use_true_random=False))
def test_late_results_in_any_order_give_the_same_rates(heard: list[tuple[int, ...]], random: Any) -> None:
    shuffled = list(heard)
    random.shuffle(shuffled)
    one, other = Rates(4, 20.0), Rates(4, 20.0)
    for place, successes, failures, step in heard:
        one.observe(place, successes, failures, step)
    for place, successes, failures, step in shuffled:
        other.observe(place, successes, failures, step)
    prior = one.prior(2.0)
    for mine, its in zip(
        one.expected(range(4), 100, prior), other.expected(range(4), 100, prior), strict=True
    ):
        assert mine == pytest.approx(its, rel=1e-4)


@pytest.mark.long
@given(evidence)
def test_the_state_of_rates_is_exact(heard: list[tuple[int, ...]]) -> None:
    rates = Rates(4, 20.0)
    for place, successes, failures, step in heard:
        rates.observe(place, successes, failures, step)
    again = Rates.of(checked(json.loads(json.dumps(rates.state())), SavedEvidence), 20.0)
    prior = rates.prior(2.0)
    assert again.expected(range(4), 120, prior) == rates.expected(range(4), 120, prior)
    assert again.total == rates.total


def test_a_group_that_is_heard_of_twice_counts_once() -> None:
    sampler = LearnablePrompts()
    stream = a_stream(sampler)
    (prompt,) = stream.draw(request(1))
    for _ in range(2):
        stream.observe([result(prompt, 1.0, 0.0)])
    assert sampler._rates["task"].total[:2] == [1.0, 1.0]


# ---------------------------------------------------------------------------------- contracts


@pytest.mark.long
def test_it_keeps_the_contract_of_samplers() -> None:
    check_sampler(lambda: LearnablePrompts(seed=3), tasks={"a": 7, "b": 30}, examples=60)


@pytest.mark.parametrize("cut", [1, 17, 55])
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have(cut: int) -> None:
    def play(stream: PromptStream, steps: range) -> list[list[str]]:
        found = []
        for step in steps:
            drawn = stream.draw(request(4, step))
            stream.observe([result(p, float(int(p.id) % 3 > 0), 1.0, version=step) for p in drawn])
            found.append([prompt.id for prompt in drawn])
        return found

    whole = a_stream()
    expected = play(whole, range(60))
    first = a_stream()
    play(first, range(cut))
    state = json.loads(json.dumps([first.state_dict(), first.loaders["task"].state_dict()]))  # type: ignore[attr-defined]
    second = a_stream()
    second.load_state_dict(state[0])
    second.loaders["task"].load_state_dict(state[1])  # type: ignore[attr-defined]
    assert play(second, range(cut, 60)) == expected[cut:]


def test_a_run_may_change_to_this_sampler_and_back() -> None:
    plainly = [prompt.id for prompt in IndexedLoader("task", prompts(N), seed=0).take(30)]
    first = a_stream(RoundRobin())
    found = [prompt.id for prompt in first.draw(request(10))]
    second = a_stream()
    second.loaders["task"].load_state_dict(first.loaders["task"].state_dict())  # type: ignore[attr-defined]
    found += [prompt.id for prompt in second.draw(request(10))]
    third = a_stream(RoundRobin())
    third.loaders["task"].load_state_dict(second.loaders["task"].state_dict())  # type: ignore[attr-defined]
    found += [prompt.id for prompt in third.draw(request(10))]
    assert found == plainly


class Forgetful(LearnablePrompts):
    """Looks at a prompt more than it decides on."""

    def _pick(self, task: str, loader: Any, count: int, now: int) -> list[Prompt]:
        loader.take(1)
        return super()._pick(task, loader, count, now)


def test_a_prompt_that_was_offered_and_forgotten_is_an_error() -> None:
    with pytest.raises(PluginError, match="from a loader and did not return it"):
        a_stream(Forgetful()).draw(request(3))


@pytest.mark.parametrize("options", [{"enough": 2.0}, {"candidates": 0}, {"half_life": 0.0}, {"prior": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampler learnable_prompts: expected 0 <= enough <= 1"):
        LearnablePrompts(**options)


# ---------------------------------------------------------------------------------- the law


def lives(*, cut: int | None = None) -> list[dict[str, Any]]:
    """The events of a run that draws four prompts a step; it may be cut and resumed."""
    events: list[dict[str, Any]] = []
    stream, slot = a_stream(n=12), 0
    saved: list[Any] = []
    for step in [*range(8), *([] if cut is None else range(cut, 10))]:
        if step == cut and not saved:
            saved = [stream.state_dict(), stream.loaders["task"].state_dict(), slot]  # type: ignore[attr-defined]
        elif step == cut:
            stream = a_stream(n=12)
            stream.load_state_dict(saved[0])
            stream.loaders["task"].load_state_dict(saved[1])  # type: ignore[attr-defined]
            events.append({"event": "cut"})
            slot = saved[2]
        drawn = stream.draw(request(4, step))
        events += [plain(event) for event in stream.passed_over]
        stream.passed_over.clear()
        events.append({"event": "Dispatched", "slots": [(slot + i, p.id) for i, p in enumerate(drawn)]})
        slot += 4
        stream.observe([result(p, float(int(p.id) % 3 > 0), 1.0, version=step) for p in drawn])
    return events


def broken(events: list[dict[str, Any]]) -> Counter[str]:
    """The laws of drawing that a story breaks; it does not cover slots and steps."""
    laws = Laws()
    laws.terms = _terms()
    accounts = [laws._now.copy()]
    for event in events:
        if event["event"] == "cut":
            laws._now = accounts[0]
        elif event["event"] == "Dispatched":
            for id, prompt in event["slots"]:
                laws._draw(_slot(prompt), f"slot {id}")
        else:
            laws.observe(event)
        if len([each for each in events[: events.index(event) + 1] if each["event"] == "Dispatched"]) == 5:
            accounts = accounts[:1]
    return Counter(violation.law for violation in laws.violations)


def _terms() -> Any:
    from grpo_core.loop.laws import Terms

    config = {
        "trainer": {"prompts_per_step": 4, "steps": 10},
        "pipeline": {"max_staleness": 0, "policy": "deadline"},
        "rollout": {"max_retries": 0, "group_size": 2},
    }
    return Terms.of(config)


def _slot(prompt: str) -> Any:
    from grpo_core.loop.laws import _Open

    return _Open(task="task", prompt=prompt, generation_version=0, target_version=0, attempt=0)


def test_the_laws_hold_for_what_is_drawn_and_passed_over() -> None:
    events = lives()
    assert any(event.get("passed_over") for event in events)
    assert not broken(events)


def change(events: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    place = next(i for i, event in enumerate(events) if event.get("passed_over"))
    return [*events[:place], {**events[place], **changes}, *events[place + 1 :]]


@pytest.mark.parametrize(
    "changes",
    [{"drawn": ("0", "1", "2", "3")}, {"passed_over": ()}, {"offered": (0, 0, 0, 0)}],
)
def test_the_law_of_epochs_is_awake(changes: dict[str, Any]) -> None:
    assert broken(change(lives(), **changes))["epoch"]


def test_the_stream_of_offers_is_the_same_in_each_life() -> None:
    first, second = lives(), lives()
    assert not broken([*first, {"event": "cut"}, *second])
    other = change(
        second, offered=tuple(reversed(next(e for e in second if e.get("passed_over"))["offered"]))
    )
    assert broken([*first, {"event": "cut"}, *other])["stream"]
