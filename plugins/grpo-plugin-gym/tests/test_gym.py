"""Environments of gymnasium in text: its own toy texts, and classes of users."""

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, make_offer
from grpo_plugin_devkit.environments import check_environment

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")

CLASSES = '''
import gymnasium as gym
import numpy as np


class Echo(gym.Env):
    """The text of the action is the next observation; its length is the reward."""

    def __init__(self, limit=3):
        self.action_space, self.observation_space = gym.spaces.Text(1000), gym.spaces.Text(1000)
        self.limit, self.steps = limit, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return f"room {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.steps += 1
        return action, float(len(action)), self.steps == self.limit, False, {}


class Fickle(Echo):
    count = 0

    def reset(self, seed=None, options=None):
        Fickle.count += 1
        return str(Fickle.count), {}


class Fragile(Echo):
    def step(self, action):
        if action == "break":
            raise RuntimeError("the board is broken")
        return super().step(action)


class Arm(Echo):
    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action):
        return {"arm": action, "at": (1, None)}, float(action.sum()), False, True, {}


class Turns(Echo):
    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action):
        return f"action {action}", float(action), False, False, {}


class Switches(Arm):
    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.MultiBinary([2, 3])


class Dials(Arm):
    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.MultiDiscrete([3, 3])


class Several(Echo):
    def __init__(self, space="Dict"):
        super().__init__()
        parts = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(2)}
        self.action_space = gym.spaces.Dict(parts) if space == "Dict" else gym.spaces.Tuple(parts.values())
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "games.py").write_text(CLASSES)
    return f"{tmp_path}/games.py"


def offered(name, **options):
    return make_offer("environment", f"gym:{name}", plugins=["gym"], **{"prompts": 4, **options})


def played(environment, *replies, place=0):
    """Play one rollout; return its prompt, the answers, and the feedback on each reply."""
    prompt = environment.prompts("train")[place]
    host = HostedEnvironment(environment).host
    (start,) = host.call("open", [("s", prompt)])
    messages, feedback = list(prompt.messages), [grpo.Feedback(error=start.error)] if start.error else []
    for reply in replies if start.error is None else ():
        messages.append({"role": "assistant", "content": reply})
        feedback += host.call("evaluate", [grpo.Episode(prompt=prompt, messages=messages, session="s")])
        messages += feedback[-1].messages
        if feedback[-1].done:
            break
    host.end()
    return prompt, [each.messages[0]["content"] for each in feedback if each.messages], feedback


LAKE = {"arguments": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


def test_a_walk_over_the_frozen_lake_is_drawn_and_rewarded():
    walk = ["I go down.", "down", "right", "right", "down", "Left? No, right!"]
    prompt, answers, feedback = played(offered("FrozenLake-v1", **LAKE), *walk)
    assert prompt.messages[0]["content"] == (
        "Reply with one of these actions: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert answers[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [each.reward for each in feedback] == [0.0] * 5 + [1.0]
    assert feedback[-1].done


def test_a_reply_that_is_not_an_action_gets_a_reason_and_the_game_continues():
    _, answers, feedback = played(offered("FrozenLake-v1", **LAKE, wrong_action=-0.1), "jump", "down")
    assert answers[0] == (
        "error: 'jump' names no action. Reply with one of these actions: left, down, right, up."
    )
    assert [each.reward for each in feedback] == [-0.1, 0.0]
    assert [each.metrics["wrong_action"] for each in feedback] == [1.0, 0.0]


@pytest.mark.parametrize("reply", ["", "north", "9", "-1", "9" * 400, "1.5e400", "2.1", "1e-1"])
def test_a_number_that_is_not_an_action_is_refused(reply):
    _, (answer,), _ = played(offered("FrozenLake-v1", show="observation"), reply)
    assert answer.startswith("error: ")
    assert answer.endswith("Reply with an action: a number from 0 to 3.")


def test_seeds_decide_how_a_game_begins_and_validation_has_others():
    environment = offered("Blackjack-v1", prompts=40)
    train, held_out = environment.prompts("train"), environment.prompts("validation")
    assert {len(train), len(held_out)} == {40, 10}
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in held_out}
    assert len({prompt.messages[0]["content"] for prompt in train}) > 10
    assert environment.prompts("train") == train


def test_a_class_of_a_file_with_texts(file):
    prompt, answers, feedback = played(offered(f"{file}:Echo", arguments={"limit": 2}), "hello", "you")
    assert prompt.messages[0]["content"].startswith("room ")
    assert (answers, [each.reward for each in feedback]) == (["hello"], [5.0, 3.0])


def test_an_array_is_a_list_and_an_observation_is_json(file):
    _, answers, feedback = played(offered(f"{file}:Arm"), "[0.5]", "[2, 0]", "nothing", "I say [0.5, 0.25]")
    assert [answer.split(". Reply")[0] for answer in answers] == [
        "error: '[0.5]' is not an action",
        "error: '[2, 0]' is not an action",
        "error: 'nothing' is not a list of numbers",
    ]
    assert (feedback[-1].reward, feedback[-1].done) == (0.75, True)


def test_a_fraction_turns_no_dial(file):
    replies = ["[1.9, 2.2]", "[1e-3, 0]", "[1e400, 0]", "[1.0, 2]"]
    _, answers, feedback = played(offered(f"{file}:Dials"), *replies)
    assert [answer.split(". Reply")[0] for answer in answers] == [
        "error: '[1.9, 2.2]' has numbers that are not whole numbers",
        "error: '[1e-3, 0]' has numbers that are not whole numbers",
        "error: '[1e400, 0]' is not a list of numbers",
    ]
    assert feedback[-1].reward == 3.0


def test_an_array_may_have_rows_of_bits(file):
    prompt, _, feedback = played(offered(f"{file}:Switches"), "[[1, 0, 1], [0, 0, 1]]")
    assert "a JSON list of numbers of the shape [2, 3]" in prompt.messages[0]["content"]
    assert [each.reward for each in feedback] == [3.0]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("turn left", "action 5"),
        ("I turn  LEFT.", "action 5"),
        ("not left, turn right!", "action 6"),
        ("turn right, or left", "action 7"),
        ("return left", "action 7"),
        ("turn leftish", "error: "),
        ("turn", "error: "),
    ],
)
def test_names_of_several_words_are_found_the_longest_first(file, reply, answer):
    actions = ["Turn left", "turn right", "left"]
    _, answers, _ = played(offered(f"{file}:Turns", actions=actions), reply)
    assert answers[0].startswith(answer)


def test_names_of_signs_are_found(file):
    _, answers, _ = played(offered(f"{file}:Turns", actions=["<-", "->", "(*)"]), "I take -> or (*)", "->")
    assert answers == ["action 7", "action 6"]


def test_a_step_that_raises_is_unscored_and_no_other_game_steps_twice(file):
    environment = offered(f"{file}:Fragile")
    prompt = environment.prompts("train")[0]
    host = HostedEnvironment(environment).host
    host.call("open", [(name, prompt) for name in "abc"])

    def turn(**replies):
        return host.call("evaluate", [
            grpo.Episode(
                prompt=prompt,
                messages=[*prompt.messages, {"role": "assistant", "content": said}],
                session=name,
            )
            for name, said in replies.items()
        ])  # fmt: skip

    first, broken, last = turn(a="hello", b="break", c="you")
    assert broken.reward is None
    assert broken.error.endswith(":Fragile: step('break') failed: RuntimeError: the board is broken")
    later = [*turn(a="hello", c="you"), *turn(a="hello", c="you")]
    host.end()
    assert [each.reward for each in (first, last, *later)] == [5.0, 3.0] * 3
    assert [each.done for each in (first, last, *later)] == [False] * 4 + [True] * 2, "three steps each"


def test_thinking_is_not_part_of_the_action(file):
    _, answers, _ = played(offered(f"{file}:Echo"), "<think>hm, a < b</think>\n\nhello", "you")
    assert answers == ["hello", "you"]
    _, (answer,), _ = played(offered("FrozenLake-v1", **LAKE), "<think>left or down?</think>I do not know.")
    assert answer.startswith("error: 'I do not know.' names no action")
    _, (answer,), _ = played(offered("FrozenLake-v1", **LAKE), "<think>left, or down, or")
    assert answer.startswith("error: '' names no action")


def test_a_pattern_finds_the_action():
    lake = {**LAKE, "pattern": r"<move>(.*?)</move>"}
    _, answers, _ = played(offered("FrozenLake-v1", **lake), "up <move>down</move>", "down")
    assert answers[0].startswith("  (Down)")
    assert answers[1].startswith("error: no action was found")


@pytest.mark.long
def test_a_search_for_the_action_takes_at_most_a_second():
    lake = {**LAKE, "pattern": "((?:a|a)*)[bc]"}
    _, (answer,), _ = played(offered("FrozenLake-v1", **lake), "a" * 50)
    assert answer.startswith("error: options.pattern takes more than 1 s")


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Several", {}, "its actions are of the space Dict("),
        ("Several", {"arguments": {"space": "Tuple"}}, "its actions are of the space Tuple("),
        ("Switches", {"actions": ["on", "off"]}, "names actions of a Discrete space, and it has Multi"),
        ("Turns", {"actions": ["on", "On ", "off"]}, "has an empty name, or one name twice"),
        ("Turns", {"actions": ["on", " ", "off"]}, "has an empty name, or one name twice"),
    ],
)
def test_actions_that_no_reply_can_name_are_refused_at_the_start(file, name, options, why):
    with pytest.raises(grpo.PluginError) as raised:
        offered(f"{file}:{name}", **options)
    assert why in str(raised.value)


def test_an_environment_that_takes_no_seed_is_refused(file):
    _, _, (feedback,) = played(offered(f"{file}:Fickle"))
    assert "reset(seed=...) has to decide that" in feedback.error


@pytest.mark.long
def test_the_contract_of_environments_holds():
    check_environment(lambda: offered("CliffWalking-v1", max_turns=4))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("FrozenLake-v2", {}, "has no environment 'FrozenLake-v2'. Did you mean 'FrozenLake"),
        ("no_such_module:Maze", {}, "no_such_module cannot be imported"),
        ("./no_such_file.py:Maze", {}, "there is no file"),
        ("FrozenLake-v1", {"actions": ["left"]}, "has 4 actions, and options.actions names 1"),
        ("FrozenLake-v1", {"arguments": {"size": 4}}, "cannot be made with"),
        ("FrozenLake-v1", {"pattern": "("}, "is not a regular expression"),
        ("FrozenLake-v1", {"show": "html"}, "option 'show' is 'html'; expected 'auto'"),
        ("FrozenLake-v1", {"prompts": 0}, "prompts = 0"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(name, options, why):
    with pytest.raises(grpo.PluginError) as raised:
        offered(name, **options)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2
