"""TRL's reward functions and environment classes as environments: their arguments and results."""

import contextlib
import importlib.util
import json
from pathlib import Path

import forks
import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, make_offer

HERE = Path(__file__).parent
OURS = HERE / "rewards_for_trl.py"
RECORDED = [json.loads(line) for line in (HERE / "recorded.jsonl").read_text().splitlines()]
FUNCTIONS = {
    "accuracy_reward": 1.0,
    "reasoning_accuracy_reward": 0.5,
    "think_format_reward": 0.25,
    "get_cosine_scaled_reward": 2.0,
    "get_soft_overlong_punishment": 0.125,
}
"""The functions of TRL that are recorded, with the weights of ``record.py``."""
ARGUMENTS = {
    "get_cosine_scaled_reward": {"max_len": 40},
    "get_soft_overlong_punishment": {"max_completion_len": 50, "soft_punish_cache": 20},
}


def offered(name, **options):
    return make_offer("environment", f"trl:{name}", plugins=["trl"], **options)


def ours(name, **options):
    return offered(f"{OURS}:{name}", **options)


def episode(reply, *, question="?", tokens=0, group="", **columns):
    answer = columns.pop("answer", None)
    prompt = grpo.Prompt(messages=question, answer=answer, info=columns)
    said = {"role": "assistant", "content": reply}
    return grpo.Episode(
        prompt=prompt, messages=[*prompt.messages, said], completion_tokens=tokens, group=group
    )


@contextlib.contextmanager
def hosting(environment):
    host = HostedEnvironment(environment).host
    try:
        yield host
    finally:
        host.end()


def judged(environment, episodes):
    with hosting(environment) as host:
        return host.call("evaluate", episodes)


def rewards(environment, episodes):
    return [feedback.reward for feedback in judged(environment, episodes)]


# ---------------------------------------------------------------------------------- TRL's own functions


REPLIES = [episode(row["reply"], tokens=row["tokens"], solution=row["solution"]) for row in RECORDED]


def agrees(environment):
    """Whether an environment of all functions gives the rewards that TRL's trainer gave."""
    for row, feedback in zip(RECORDED, judged(environment, REPLIES), strict=True):
        assert feedback.reward == pytest.approx(row["total"], abs=1e-6)  # TRL adds in float32
        known = [part for part in row["rewards"].values() if part is not None]
        assert list(feedback.metrics.values()) == pytest.approx(known, abs=1e-6)


def test_two_hundred_replies_have_the_rewards_that_the_trainer_of_trl_gave_them():
    first, *others = [
        {"function": f"{OURS}:Recorded", "weight": weight, "arguments": {"function": function}}
        for function, weight in FUNCTIONS.items()
    ]
    assert len(RECORDED) == 200
    assert any(None in row["rewards"].values() for row in RECORDED)
    agrees(offered(first["function"], weight=1.0, arguments=first["arguments"], more=others))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_functions_of_trl_give_these_rewards():
    first, *others = [
        {"function": f"trl.rewards:{function}", "weight": weight, "arguments": ARGUMENTS.get(function)}
        for function, weight in FUNCTIONS.items()
    ]
    agrees(offered(first["function"], weight=1.0, more=others))


# ---------------------------------------------------------------------------------- arguments and results


def test_columns_of_the_data_set_are_keywords_and_none_is_unscored():
    episodes = [
        episode("4", solution="4", level=2.0),
        episode("5", solution="4", level=2.0),
        episode("5", solution=None, level=1.0),
    ]
    assert rewards(ours("matches"), episodes) == [2.0, 0.0, None]


def test_a_column_without_a_value_in_any_row_of_a_call_is_passed_once_it_is_known():
    """A prompt has no fields that are null; TRL passes None for them."""
    first = [episode("5", level=1.0), episode("4", solution="4", level=2.0)]
    with hosting(ours("matches")) as host:
        assert [feedback.reward for feedback in host.call("evaluate", first)] == [None, 2.0]
        assert [feedback.reward for feedback in host.call("evaluate", [episode("5", level=1.0)])] == [None]
        with pytest.raises(TypeError, match="'solution'"):
            judged(ours("matches"), [episode("4", level=1.0)])


def test_the_answer_of_a_prompt_is_passed_by_the_name_that_the_function_wants():
    environment = ours("matches", answer="solution")
    assert rewards(environment, [episode("4", answer="4", level=1.0)]) == [1.0]


def test_a_column_may_hold_a_reply_with_full_marks():
    row = grpo.Prompt(messages="2+2=", answer="4", info={"reply": "four"})
    assert ours("length").solve(row) is None
    assert ours("length", solution="reply").solve(row) == "four"
    assert ours("length", answer="gold", solution="gold").solve(row) == "4"
    with pytest.raises(grpo.ConfigError, match="solution = 'other' is not a column of the data, which has"):
        ours("length", solution="other").solve(row)


def test_rewards_are_added_with_their_weights_and_their_parts_are_metrics():
    more = [f"{OURS}:length", {"function": f"{OURS}:matches", "weight": 10}]
    environment = ours("length", weight=0.5, more=more)
    right, unknown = judged(
        environment, [episode("four", solution="four", level=1.0), episode("4", solution=None, level=1.0)]
    )
    assert right.reward == 0.5 * 4 + 1 * 4 + 10 * 1
    assert right.metrics == {"length": 4.0, "length_2": 4.0, "matches": 1.0}
    assert unknown.reward == 1.5, "a part that is None is left out of the sum, as TRL does"
    assert unknown.metrics == {"length": 1.0, "length_2": 1.0}


def test_async_functions_and_objects_are_awaited():
    environment = ours("judged", more=[f"{OURS}:judge", f"{OURS}:length"])
    (feedback,) = judged(environment, [episode("four")])
    assert feedback.reward == 0.25 + 0.5 + 4
    assert feedback.metrics == {"judged": 0.25, "Judge": 0.5, "length": 4.0}


def test_plain_text_instead_of_messages():
    assert rewards(ours("text_length", conversational=False), [episode("four")]) == [4.0]


def test_what_a_function_logs_becomes_a_metric():
    (feedback,) = judged(ours("logs"), [episode("a")])
    assert feedback.metrics == {"calls/all": 3.0, "logs": 1.0}


def test_the_number_of_tokens_is_known_and_the_tokens_are_not():
    assert rewards(ours("tokens"), [episode("a", tokens=7), episode("b", tokens=0)]) == [7.0, 0.0]
    with pytest.raises(TypeError, match="know the number of a completion's tokens"):
        judged(ours("reads_ids"), [episode("a", tokens=7)])


def test_the_state_of_the_trainer_is_not_known():
    with pytest.raises(
        AttributeError, match=r"trainer_state.global_step: environments of grpo-core do not see"
    ):
        judged(ours("reads_state"), [episode("a")])


def test_a_reward_that_is_not_a_number_is_an_error_that_names_the_function():
    with pytest.raises(
        grpo.PluginError, match="'in_words' returned a value that is not a number: could not convert"
    ):
        judged(ours("in_words"), [episode("a")])


def test_another_number_of_rewards_is_an_error_that_names_the_function():
    with pytest.raises(grpo.PluginError, match="'too_few' returned 1 rewards for 2 completions"):
        judged(ours("too_few"), [episode("a"), episode("b")])


def test_functions_that_compare_get_whole_groups():
    assert not ours("best_of_batch").needs_group
    assert ours("best_of_batch", whole_groups=True).needs_group


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (f"{OURS}:lenght", {}, "has no 'lenght'. Did you mean 'length'?"),
        ("no_such_module:f", {}, "no_such_module cannot be imported: ModuleNotFoundError"),
        ("nothing", {}, "write trl:MODULE:NAME"),
        ("./missing.py:f", {}, "there is no file"),
        (f"{OURS}:length", {"more": [{"weight": 2}]}, "names no function"),
        (f"{OURS}:length", {"more": [{"function": f"{OURS}:length", "wieght": 2}]}, "has no 'wieght'"),
        (f"{OURS}:length", {"weight": float("nan")}, "expected a finite number"),
        (f"{OURS}:Recorded", {"arguments": {"function": "f", "nonsense": 1}}, "TypeError"),
        (f"{OURS}:Counter", {"weight": 2.0}, "leave out weight"),
        (f"{OURS}:Counter", {"solution": "gold"}, "leave out solution"),
        (f"{OURS}:Counter", {"arguments": {"nonsense": 1}}, "unexpected keyword"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(name, options, why):
    with pytest.raises(grpo.PluginError) as raised:
        offered(name, **options)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2


def test_without_a_source_there_are_no_prompts():
    with pytest.raises(grpo.ConfigError, match=r"tasks.NAME.data"):
        ours("length").prompts("train")


# ---------------------------------------------------------------------------------- environment classes


def played(environment, *calls, row=None):
    """Play one rollout: the model makes these calls, and then says that it is done."""
    prompt = environment.prompt(
        {"prompt": grpo.Prompt(messages="Count to 7.").messages, "id": "0", **(row or {})}
    )
    with hosting(environment) as host:
        (start,) = host.call("open", [("s", prompt)])
        if start.error:
            return prompt, start, [], None
        messages, answers = list(prompt.messages), []
        for i, (name, arguments) in enumerate(calls):
            call = {"id": str(i), "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            (feedback,) = host.call("evaluate", [grpo.Episode(prompt=prompt, messages=messages, session="s")])
            # functions and get_reward see the whole conversation once, as TRL's trainer calls them
            assert (feedback.done, feedback.reward or 0.0, dict(feedback.metrics)) == (False, 0.0, {})
            messages += feedback.messages
            answers.append(feedback.messages[-1]["content"])
        messages.append({"role": "assistant", "content": "done"})
        (feedback,) = host.call("evaluate", [grpo.Episode(prompt=prompt, messages=messages, session="s")])
        return prompt, start, answers, feedback


def test_an_environment_class_has_its_tools_its_observation_and_its_reward():
    prompt, start, answers, feedback = played(
        ours("Counter"),
        ("add", {"number": 3}),
        ("add", {"number": 2}),
        ("add", {"number": "x"}),
        row={"start": 2},
    )
    assert prompt.messages[-1]["content"] == "Count to 7. The counter is at 2."
    assert [tool["function"]["name"] for tool in start.tools] == ["add"], "reset and get_reward are no tools"
    assert answers == ["5", "7", "error: add: argument 'number' is 'x', expected an integer"]
    assert (feedback.reward, feedback.metrics) == (7.0, {"Counter": 7.0})


def test_reward_functions_see_the_environments_and_add_to_their_reward():
    environment = ours("Counter", more=[{"function": f"{OURS}:final_count", "weight": 100}])
    *_, feedback = played(environment, ("add", {"number": 7}))
    assert (feedback.reward, feedback.metrics) == (107.0, {"final_count": 1.0, "Counter": 7.0})


def test_a_reset_that_returns_nothing_leaves_the_prompt_and_a_reward_may_be_async():
    prompt, _, _, feedback = played(ours("Silent"), ("add", {"number": 1}))
    assert prompt.messages[-1]["content"] == "Count to 7."
    assert feedback.reward == -2.0


def test_a_reset_that_is_not_the_same_for_the_same_row_is_refused():
    _, start, _, _ = played(ours("Fickle"))
    assert "it must be the same for the same row" in start.error


def test_each_rollout_has_its_own_instance():
    environment = ours("Counter")
    prompt = environment.prompt({"prompt": grpo.Prompt(messages="?").messages, "id": "0"})
    first, second = environment.open(prompt), environment.open(prompt)
    first.add(5)
    assert (first._environment.count, second._environment.count) == (5, 0)


# ---------------------------------------------------------------------------------- a run


@pytest.mark.slow
def test_a_run_trains_on_a_reward_function_and_a_file_of_rows(tmp_path):
    rows = [{"prompt": f"{n}=", "solution": str(n), "level": 1.0} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        "trainer.steps=2", "trainer.prompts_per_step=2", "rollout.group_size=2", "validation.every=0",
        "tasks.rows.data=rows.jsonl", f"tasks.rows.env=trl:{OURS}:matches",
        'tasks.rows.options.more=["' + f'{OURS}:length' + '"]', "model.path=tiny", "rollout.max_tokens=8",
        "model.options.warm_start_steps=0",
    ]  # fmt: skip
    chosen = (part for each in settings for part in ("--set", each))
    done = forks.grpo(tmp_path, "train", "--output", "run", *chosen)
    assert done.returncode == 0, done.stderr
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "feedback_matches/rows" in json.loads(last)
