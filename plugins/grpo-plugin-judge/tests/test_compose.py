"""The environment ``compose``: sums, products, gates, and unscored parts."""

import asyncio
import textwrap

import pytest

from grpo_core import Episode, GrpoError, Prompt
from grpo_core.config import EnvironmentConfig
from grpo_core.kit import EnvironmentProcess, EnvironmentSpec
from grpo_core.testing import HostedEnvironment, make_offer

PARTS = '''
    import asyncio
    import grpo_core as grpo

    asked = []

    class Right(grpo.Environment):
        """Compares with the answer."""

        success = 1.0

        def prompts(self, split):
            return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(4)]

        def evaluate(self, episodes):
            return [grpo.Feedback(reward=float(e.reply.startswith(e.prompt.answer)), answer=e.reply,
                                  metrics={"length": len(e.reply)}) for e in episodes]

    class Short(grpo.Environment):
        def evaluate(self, episodes):
            asked.extend(e.reply for e in episodes)
            return [1.0 / max(1, len(e.reply)) for e in episodes]

    class Odd(grpo.Environment):
        def evaluate(self, episodes):
            return [grpo.Feedback(reward=0.5, metrics={"ratio": float("nan")}) for e in episodes]

    class Later(Short):
        concurrency = 4
        deadline = 100.0
        closed = 0

        async def evaluate(self, episodes):
            await asyncio.sleep(0)
            return super().evaluate(episodes)

        async def aclose(self):
            Later.closed += 1

    class Out(grpo.Environment):
        def evaluate(self, episodes):
            return [grpo.Feedback(error="the judge is out") for _ in episodes]

    class Best(grpo.Environment):
        needs_group = True

        def evaluate(self, episodes):
            longest = max(len(e.reply) for e in episodes)
            return [float(len(e.reply) == longest) for e in episodes]

    class Turns(grpo.Environment):
        max_turns = 2

        def open(self, prompt):
            return {"turns": 0}

        def evaluate(self, episodes):
            return [self.one(e) for e in episodes]

        def one(self, e):
            e.session["turns"] += 1
            last = e.session["turns"] == 2
            return grpo.Feedback(reward=0.5, done=last, messages="" if last else "go on")

    class Wide(grpo.Environment):
        concurrency = 64

        def prompts(self, split):
            return [grpo.Prompt(messages=str(i), answer="1") for i in range(64)]

        async def evaluate(self, episodes):
            await asyncio.sleep(0)
            return [1.0] * len(episodes)

    class Narrow(grpo.Environment):
        concurrency = 2
        deadline = 10.0
        now = most = calls = 0

        async def evaluate(self, episodes):
            self.calls += 1
            self.now += len(episodes)
            self.most = max(self.most, self.now)
            for _ in range(5):  # others may begin meanwhile
                await asyncio.sleep(0)
            self.now -= len(episodes)
            return [grpo.Feedback(reward=1.0, metrics={"most": self.most}) for _ in episodes]

    class Groups(Narrow):
        needs_group = True

    class Played(Narrow):
        max_turns = 2

        async def open(self, prompt):
            await asyncio.sleep(0)
            return {}

    class Agent(grpo.Environment):
        async def run(self, prompt, client):
            return 1.0
'''


@pytest.fixture
def parts(tmp_path):
    """Return a function that makes ``compose`` of classes in a file."""
    file = tmp_path / "parts.py"
    file.write_text(textwrap.dedent(PARTS))

    def make(formula="sum", **given):
        tables = {
            name: {"env": f"{file}:{table.pop('kind')}", **table}
            for name, table in ((name, dict(table)) for name, table in given.items())
        }
        return make_offer("environment", "compose", plugins=["judge"], parts=tables, formula=formula)

    make.file = f"{file}:"
    return make


def replied(*replies, session=None):
    prompt = Prompt(messages="1=", answer="1", id="1")
    said = [[*prompt.messages, {"role": "assistant", "content": reply}] for reply in replies]
    return [Episode(prompt=prompt, messages=messages, group="g", session=session) for messages in said]


def judged(environment, *replies):
    host = HostedEnvironment(environment).host
    try:
        return host.call("evaluate", replied(*replies))
    finally:
        host.end()


# ---------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("short", ["Short", "Later"])
def test_rewards_are_added_with_their_weights_and_are_metrics(parts, short):
    environment = parts(right={"kind": "Right", "weight": 2}, short={"kind": short, "weight": 0.5})
    right, wrong = judged(environment, "1 it is", "2")
    assert right.reward == pytest.approx(2 + 0.5 / 7)
    assert wrong.reward == pytest.approx(0.5)
    assert right.metrics == {"right": 1.0, "right_length": 7.0, "short": pytest.approx(1 / 7)}
    assert right.answer == "1 it is", "what votes are counted on is the first part's"


def test_a_metric_of_a_part_that_is_not_a_number_is_left_out_of_the_whole(parts):
    environment = parts(right={"kind": "Right"}, odd={"kind": "Odd"})
    (feedback,) = judged(environment, "0")
    assert (feedback.reward, feedback.left_out) == (0.5, {"odd_ratio": "nan"})


def test_a_product_is_zero_if_one_part_is(parts):
    environment = parts("product", right={"kind": "Right"}, short={"kind": "Short"})
    assert [feedback.reward for feedback in judged(environment, "10", "2")] == [0.5, 0.0]


@pytest.mark.parametrize("short", ["Short", "Later"])
def test_a_gate_asks_a_part_only_where_earlier_rewards_are_high_enough(parts, short):
    environment = parts(right={"kind": "Right"}, short={"kind": short, "requires": {"right": 1.0}})
    import sys

    module = sys.modules[type(environment._parts[1].environment).__module__]
    module.asked.clear()
    right, wrong = judged(environment, "10", "2")
    assert (right.reward, wrong.reward) == (1.5, 0.0)
    assert (right.metrics["short_asked"], wrong.metrics["short_asked"]) == (1.0, 0.0)
    assert "short" not in wrong.metrics
    assert module.asked == ["10"]


def test_a_part_without_a_reward_leaves_the_whole_unscored_and_not_zero(parts):
    environment = parts(right={"kind": "Right"}, out={"kind": "Out", "requires": {"right": 1.0}})
    right, wrong = judged(environment, "1", "2")
    assert (right.reward, right.error) == (None, "out: the judge is out")
    assert wrong.reward == 0.0, "the part that is out was not needed"


def test_parts_that_compare_get_whole_groups(parts):
    environment = parts(right={"kind": "Right"}, best={"kind": "Best", "weight": 0.1})
    assert environment.needs_group
    assert [feedback.reward for feedback in judged(environment, "10", "123")] == [1.0, 1.1]


# ---------------------------------------------------------------------------------- the first part


def test_prompts_turns_and_sessions_are_those_of_the_first_part(parts):
    environment = parts(turns={"kind": "Turns"}, short={"kind": "Short"})
    hosted = HostedEnvironment(environment).host
    assert hosted.description().max_turns == 2
    (start,) = hosted.call("open", [("s", Prompt(messages="1=", id="1"))])
    assert start.error is None
    (first,) = hosted.call("evaluate", replied("12", session="s"))
    assert (first.done, first.reward, first.metrics) == (False, 0.5, {"turns": 0.5})
    (second,) = hosted.call("evaluate", replied("12", session="s"))
    assert (second.done, second.reward) == (True, 1.0)


def test_a_rollout_that_a_limit_ends_is_judged_by_all_parts(parts):
    environment = parts(turns={"kind": "Turns"}, short={"kind": "Short"})
    hosted = HostedEnvironment(environment).host
    hosted.call("open", [("s", Prompt(messages="1=", id="1"))])
    (episode,) = replied("12", session="s")
    cut = Episode(prompt=episode.prompt, messages=episode.messages, session="s", finish_reason="length")
    (feedback,) = hosted.call("evaluate", [cut])
    assert feedback.metrics == {"turns": 0.5, "short": 0.5}
    assert feedback.reward == 1.0


def test_prompts_are_those_of_the_first_part_and_the_tasks_success_has_to_be_named(parts):
    environment = parts(right={"kind": "Right"}, short={"kind": "Later"})
    assert [prompt.answer for prompt in environment.prompts("train")] == ["0", "1", "2", "3"]
    assert environment.success is None
    assert (environment.concurrency, environment.deadline) == (4, 130.0)


def most_at_once(parts, concurrency=None, **given):
    """Evaluate 64 rollouts in a process as a run does; return the most that the last part had at once."""

    async def story():
        names = {name: {"env": parts.file + kind} for name, kind in given.items()}
        config = EnvironmentConfig(concurrency=concurrency)
        process = EnvironmentProcess(
            EnvironmentSpec(task="play", env="compose", options={"parts": names}, config=config)
        )
        try:
            prompts = await process.prompts("train")
            await process.open({prompt.id: prompt for prompt in prompts})
            said = {"role": "assistant", "content": "1"}
            episodes = [
                Episode(prompt=each, messages=(*each.messages, said), group=str(i // 4), session=each.id)
                for i, each in enumerate(prompts)
            ]
            feedback = await process.evaluate(episodes)
        finally:
            await process.aclose()
        assert not any(each.error for each in feedback), feedback[0].error
        return max(each.metrics[f"{list(given)[-1]}_most"] for each in feedback)

    return asyncio.run(story())


@pytest.mark.parametrize("concurrency", [None, 0], ids=["in slots", "in batches"])
def test_each_part_keeps_to_its_own_limit_of_calls_at_once(parts, concurrency):
    assert most_at_once(parts, concurrency, wide="Wide", narrow="Narrow") == 2


def test_a_part_that_compares_has_whole_groups_within_its_limit(parts):
    assert most_at_once(parts, wide="Wide", groups="Groups") == 2 * 4


def test_the_limit_of_a_first_part_with_sessions_holds_for_the_whole(parts):
    """It is that of ``open`` and of its tools, too, which are not asked by way of compose."""
    environment = parts(played={"kind": "Played"}, wide={"kind": "Wide"})
    assert environment.concurrency == 2


def test_the_deadline_has_room_for_calls_that_wait_for_a_part(parts):
    environment = parts(wide={"kind": "Wide"}, narrow={"kind": "Narrow"})
    assert (environment.concurrency, environment.deadline) == (64, 30.0 + 32 * 10.0)


def test_all_parts_are_closed(parts):
    environment = parts(right={"kind": "Right"}, short={"kind": "Later"})
    kind = type(environment._parts[1].environment)
    before = kind.closed
    asyncio.run(environment.aclose())
    assert kind.closed == before + 1


def test_parts_are_looked_for_among_the_plugins_of_the_run_alone():
    """A plugin that a run leaves out is not imported for a part, either."""
    with pytest.raises(GrpoError, match="there is no environment 'math:sort'"):
        make_offer("environment", "compose", plugins=["judge"], parts={"sort": {"env": "math:sort"}})


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("formula", "given", "why"),
    [
        ("sum", {}, "there are no parts"),
        ("sum", {"a": {"kind": "Right", "wieght": 1}}, "has no key 'wieght'. Did you mean 'weight'?"),
        ("sum", {"a": {"kind": "Right", "weight": "1"}}, "weight is '1'; expected a finite number"),
        (
            "sum",
            {"a": {"kind": "Right", "requires": {"b": 1}}},
            "requires 'b', which is not a part before it",
        ),
        ("product", {"a": {"kind": "Right", "weight": 2}}, "means nothing in a product"),
        ("product", {"a": {"kind": "Turns"}}, "has 2 turns, whose rewards are added"),
        ("sum", {"a": {"kind": "Right"}, "b": {"kind": "Turns"}}, "only the first part may have"),
        ("sum", {"a": {"kind": "Turns"}, "b": {"kind": "Best"}}, "another part compares groups"),
        ("sum", {"a": {"kind": "Right"}, "b": {"kind": "Best", "requires": {"a": 1}}}, "cannot require"),
        ("sum", {"a": {"kind": "Agent"}}, "is an agent"),
        ("sum", {"a": {"kind": "Nobody"}}, "has no 'Nobody'"),
    ],
)
def test_what_makes_no_sense_is_refused(parts, formula, given, why):
    with pytest.raises(GrpoError) as raised:
        parts(formula, **given)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2
