"""Rollouts of several turns: what was sampled is what is trained; tools, sessions, groups and limits."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import grpo_core as grpo
from grpo_core.contracts.errors import EngineError
from grpo_core.contracts.records import Completion, Feedback, Judgement, SessionStart, Weights
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, cause, derive_seed, play
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, HostedEnvironment, prompts, run
from grpo_core.validation.runner import Context

SAMPLING = SamplingParams(temperature=1.0, max_tokens=200_000)


def weights(version):
    return Weights(version=version, location="", nbytes=0, tensors=())


def scripted(*replies):
    """The model's replies in its turns: a turn is known by the number of answers that the row has."""

    def reply(request, rng):
        text = FakeRenderer().text(request.prompt_ids)
        turn = sum(text.count(reply) for reply in dict.fromkeys(replies))
        return replies[min(turn, len(replies) - 1)]

    return FakeEngine(reply=reply)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(environment, engine, n=1, *, sampling=SAMPLING, deadline=None, group="g", renderer=None):
    async def story():
        await engine.update_weights(weights(0))
        return await play(
            [RolloutRequest(prompt=prompts(1)[0], seed=i, group=group) for i in range(n)],
            engine=engine,
            environments={"task": environment},
            renderer=renderer or FakeRenderer(),
            sampling=sampling,
            deadline=deadline,
        )

    return run(story())


# ---------------------------------------------------------------------------------- the row


class WeightsTrackingEngine(FakeEngine):
    """Gives prepared replies; remembers each request with its reply."""

    def __init__(self, lengths, cut):
        super().__init__()
        self.lengths, self.cut, self.said = lengths, cut, []

    async def generate(self, requests):
        completions = []
        for request in requests:
            await asyncio.sleep(0.7)
            n = min(self.lengths[len(self.said) % len(self.lengths)], request.max_tokens)
            place = len(self.said)
            completion = Completion(
                token_ids=tuple(0x4E00 + 100 * place + i for i in range(n)),
                logprobs=tuple(-(i + 1) / 8 for i in range(n)),
                versions=tuple(self.version if i >= n // 2 else max(0, self.version - 1) for i in range(n)),
                finish_reason="length" if place in self.cut or n == request.max_tokens else "stop",
            )
            self.said.append((request, completion))
            completions.append(completion)
        return completions


def begins(prompt_ids, rollout):
    """Whether a request belongs to this rollout."""
    text = FakeRenderer().text
    return text(prompt_ids).startswith(text(rollout.segments[0].prompt_ids))


@pytest.mark.long
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    answers=st.lists(st.text("xyz", max_size=5), min_size=1, max_size=4),
    cut=st.sets(st.integers(0, 12), max_size=2),
    n=st.integers(1, 3),
    turns=st.integers(1, 4),
    total=st.sampled_from([0, 12, 20, 30]),
)
def test_a_row_is_the_engines_tokens_with_the_answers_in_between(lengths, answers, cut, n, turns, total):
    """Whatever is said, answered, cut off or limited, while the weights are updated."""
    engine = WeightsTrackingEngine(lengths, cut)
    told = []

    def feedback(episode):
        answer = answers[episode.turn % len(answers)]
        told.append((episode.prompt.id, answer))
        return Feedback(reward=0.5, done=episode.turn == len(answers), messages=answer)

    async def story():
        await engine.update_weights(weights(0))
        rows = asyncio.create_task(
            play(
                [RolloutRequest(prompt=prompt, seed=i) for i, prompt in enumerate(prompts(n))],
                engine=engine,
                environments={"task": FakeEnvironment(feedback, max_turns=turns)},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8, max_total_tokens=total),
            )
        )
        version = 0
        while not rows.done():
            version += 1
            await engine.update_weights(weights(version))
        return await rows

    for rollout in run(story()):
        spoken = [
            (request.prompt_ids.tolist(), completion.tokens)
            for request, completion in engine.said
            if begins(request.prompt_ids, rollout)
        ]
        (segment,) = rollout.segments
        prompt, tokens = segment.prompt_ids.tolist(), segment.tokens
        place = 0
        for seen, said in spoken:
            end = len(seen) - len(prompt)
            assert seen == prompt + tokens.ids[:end].tolist(), "seen = kept"
            assert not any(tokens.sampled[place:end]), "answers are not trained"
            assert set(tokens.versions[place:end]) <= {-1}
            assert set(tokens.logprobs[place:end]) <= {0.0}
            place = end + len(said)
            assert all(tokens.sampled[end:place])
            kept = {name: part[end:place] for name, part in tokens.arrays().items()}
            assert Tokens(**kept) == said
        assert place == len(tokens), "a row ends with what was sampled"
        assert tokens.n_sampled == sum(len(said) for _, said in spoken)
        assert rollout.turns == len(spoken) <= turns
        assert rollout.reward == 0.5 * rollout.turns
        assert not total or len(prompt) + len(tokens) <= total


@pytest.mark.parametrize(("truncated", "trained"), [("train", [True, True]), ("mask", [False, True])])
def test_what_a_token_limit_cut_off_may_be_left_out_of_training(truncated, trained):
    seen = []

    def feedback(episode):
        seen.append((episode.truncated, episode.completion_tokens))
        return Feedback(reward=0.0)

    sampling = evolve(SAMPLING, truncated=truncated)
    rollouts = played(FakeEnvironment(feedback), WeightsTrackingEngine([2], cut={0}), 2, sampling=sampling)
    assert [rollout.train for rollout in rollouts] == trained
    assert sorted(seen) == [(False, 2), (True, 2)]


def test_a_compared_group_is_shown_a_truncated_rollout_that_stays_unscored():
    seen = []

    def feedback(episode):
        seen.append(episode.truncated)
        return Feedback(reward=1.0)

    sampling = evolve(SAMPLING, truncated="unscored")
    environment = FakeEnvironment(feedback, needs_group=True)
    rollouts = played(environment, WeightsTrackingEngine([2], cut={0}), 2, sampling=sampling)
    assert sorted((rollout.truncated, rollout.reward) for rollout in rollouts) == [(False, 1.0), (True, None)]
    assert sorted(seen) == [False, True]


def test_an_environment_may_leave_a_rollout_out_of_training_in_any_turn():
    def feedback(episode):
        return Feedback(reward=1.0, done=episode.turn == 1, messages="go on", train=episode.turn == 1)

    (rollout,) = played(FakeEnvironment(feedback, max_turns=2), FakeEngine())
    assert (rollout.train, rollout.reward) == (False, 2.0)


def test_metrics_of_all_turns_are_kept_and_their_mean_counts():
    def feedback(episode):
        metrics = {f"turn {episode.turn}": 1.0, "mean": float(episode.turn)}
        return Feedback(reward=0.0, done=episode.turn == 2, messages="go on", metrics=metrics)

    (rollout,) = played(FakeEnvironment(feedback, max_turns=3), FakeEngine())
    assert rollout.metrics == {"turn 0": 1.0, "turn 1": 1.0, "turn 2": 1.0, "mean": 1.0}


def test_a_metric_that_is_not_a_number_in_a_turn_has_no_value():
    """The other turn's value would pass for the whole."""

    def feedback(episode):
        given = ({"speed": 1.0, "form": 1.0}, {"form": 2.0})[episode.turn]
        left_out = ({}, {"speed": "nan"})[episode.turn]
        return Judgement(
            reward=0.0, done=episode.turn == 1, messages="go on", metrics=given, left_out=left_out
        )

    (rollout,) = played(FakeEnvironment(feedback, max_turns=2), FakeEngine())
    assert (rollout.metrics, rollout.left_out) == ({"form": 1.5}, {"speed": "nan"})


@pytest.mark.parametrize(("said", "ended"), [("ab", False), ("a.", True), ("", False)])
def test_the_renderer_is_told_whether_the_model_has_ended_its_turn_itself(said, ended):
    """After a stop string the template's end of turn is missing in the row, and must be added."""
    told = []

    class Renderer(FakeRenderer):
        stop_token_ids = (ord("."),)

        def continuation_ids(self, messages, *, end, **others):
            told.append(end)
            return super().continuation_ids(messages, **others)

    environment = FakeEnvironment(
        lambda episode: Feedback(reward=0.0, done=episode.turn == 1, messages="go on"), max_turns=2
    )
    played(environment, FakeEngine(reply=lambda request, rng: said), renderer=Renderer())
    assert told == [ord(".") if ended else None]


@pytest.mark.parametrize("max_turns", [1, 2])
def test_the_template_is_checked_for_later_turns_if_there_may_be_some(max_turns):
    checked = []

    class Renderer(FakeRenderer):
        def check_turns(self, *, tools):
            checked.append(tools)

    played(FakeEnvironment(max_turns=max_turns), FakeEngine(), renderer=Renderer())
    assert checked == [False] * (max_turns - 1)


@pytest.mark.parametrize("lost_in", [0, 1])
def test_a_rollout_whose_engine_is_lost_is_not_an_orphan_of_its_environment(lost_in):
    """The environment's answer is the last message when the engine fails in the second turn."""
    engine = FakeEngine()
    engine.fault = lambda r: EngineError("lost") if len(r.prompt_ids) > 8 or lost_in == 0 else None
    go_on = FakeEnvironment(lambda e: Feedback(reward=0.0, done=False, messages="go on"), max_turns=3)
    (rollout,) = played(go_on, engine)
    assert (rollout.turns, rollout.error) == (lost_in, "lost")
    assert cause(rollout) == "rollouts_lost"
    (orphan,) = played(FakeEnvironment(lambda e: Judgement(error="restarted", lost=True)), FakeEngine())
    assert cause(orphan) == "rollouts_orphaned"


def test_in_lockstep_a_rollout_that_has_failed_is_not_evaluated_again():
    def feedback(episode):
        lost = episode.session == first and episode.turn == 0
        return Feedback(error="lost") if lost else Feedback(reward=0.0, done=episode.turn == 2, messages="on")

    environment, engine = FakeEnvironment(feedback, max_turns=3), FakeEngine()

    async def story():
        await engine.update_weights(weights(0))
        return await play(
            [RolloutRequest(prompt=prompt, seed=i) for i, prompt in enumerate(prompts(3))],
            engine=engine,
            environments={"task": environment},
            renderer=FakeRenderer(),
            sampling=SAMPLING,
            lockstep=True,
        )

    first = None
    opening = environment.open

    async def open(sessions):
        nonlocal first
        first = next(iter(sessions))
        return await opening(sessions)

    environment.open = open
    assert [rollout.error for rollout in run(story())] == ["lost", None, None]
    assert environment.calls == [3, 2, 2]


def test_one_prompt_with_other_tools_is_rendered_again():
    tools = ({"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b"}})

    class Environment(FakeEnvironment):
        async def open(self, prompts):
            return [SessionStart(tools=tools[i % 2 :][:1]) for i in range(len(prompts))]

    class Renderer(FakeRenderer):
        def prompt_ids(self, messages, tools=()):
            return super().prompt_ids([*({"content": t["function"]["name"]} for t in tools), *messages])

    prompt, engine = prompts(1)[0], FakeEngine()

    async def story():
        await engine.update_weights(weights(0))
        return await play(
            [RolloutRequest(prompt=prompt, seed=i) for i in range(4)],
            engine=engine,
            environments={"task": Environment()},
            renderer=Renderer(),
            sampling=SAMPLING,
        )

    shown = [FakeRenderer().text(rollout.segments[0].prompt_ids) for rollout in run(story())]
    assert shown == ["aprompt 0", "bprompt 0"] * 2


# ---------------------------------------------------------------------------------- tools


class Shop(grpo.Environment):
    """Tells prices; right is who says 7 at the end."""

    max_turns = 4

    def __init__(self):
        def price(item: str, count: int = 1) -> int:
            """The price of something.

            Args:
                item: its name
                count: how many
            """
            if item == "unicorn":
                raise LookupError("not in this world")
            return 7 * count

        self.tools = [price]
        self.seen = []

    def prompts(self, split):
        return prompts(3)

    def evaluate(self, episodes):
        self.seen += [episode.messages[-1]["content"] for episode in episodes]
        return [Feedback(reward=float("7" in e.reply), metrics={"turn": e.turn}) for e in episodes]


def answered(*calls):
    """The answers of the shop's tools to calls in one message."""
    shop = Shop()
    (rollout,) = played(HostedEnvironment(shop), scripted("".join(calls), "done 7"))
    assert shop.seen == ["done 7"], "the environment sees only what calls nothing"
    assert (rollout.turns, rollout.reward, rollout.tool_calls) == (2, 1.0, len(calls))
    return [m for m in rollout.messages if m["role"] == "tool"]


def test_tools_answer_and_the_model_speaks_again():
    environment = HostedEnvironment(Shop())
    (rollout,) = played(environment, scripted(call("price", item="tea"), "it costs 7"))
    _, said, told, last = rollout.messages
    assert said["content"] == ""
    assert said["tool_calls"] == [
        {
            "type": "function",
            "id": "call00000",
            "function": {"name": "price", "arguments": {"item": "tea"}},
        }
    ]
    assert told == {"role": "tool", "tool_call_id": "call00000", "name": "price", "content": "7"}
    assert last == {"role": "assistant", "content": "it costs 7"}
    assert (
        FakeRenderer().text(rollout.segments[0].tokens.ids) == call("price", item="tea") + "7" + "it costs 7"
    )
    assert (rollout.reward, rollout.metrics, rollout.finish_reason) == (1.0, {"turn": 1.0}, "stop")
    assert environment.calls == [1, 1]


def test_several_calls_of_one_message_are_answered_in_order():
    first, second = answered(call("price", item="tea"), call("price", item="cake", count=2))
    assert [first["content"], second["content"]] == ["7", "14"]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("price", item="unicorn"), "error: LookupError: not in this world"),
        (call("prise", item="tea"), "error: there is no tool 'prise'; there is price"),
        (call("price"), "error: price: missing a required argument: 'item'"),
        (
            call("price", item="tea", colour="red"),
            "error: price: got an unexpected keyword argument 'colour'",
        ),
        (call("price", item="tea", count="2"), "error: price: argument 'count' is '2', expected an integer"),
        (
            call("price", item="tea", count=True),
            "error: price: argument 'count' is True, expected an integer",
        ),
        (
            "<tool_call>{'name': price}</tool_call>",
            "error: not a call: \"{'name': price}\"; expected a JSON object with a name and arguments",
        ),
        (
            '<tool_call>{"name": "price", "arguments": "tea"}</tool_call>',
            "error: the arguments of price are 'tea', expected a JSON object",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
    ],
)
def test_failures_of_a_call_are_reported_to_the_model(said, told):
    (message,) = answered(said)
    assert message["content"].startswith("error: not a call" if told is None else told)


def test_text_around_a_call_is_kept():
    shop = Shop()
    (rollout,) = played(HostedEnvironment(shop), scripted("Let me see. " + call("price", item="tea"), "7"))
    assert rollout.messages[1]["content"] == "Let me see."


def test_an_environment_without_tools_sees_such_text_as_it_is():
    seen = []
    environment = FakeEnvironment(lambda e: seen.append(e.messages[-1]) or Feedback(reward=1.0))
    played(environment, scripted(call("price")))
    assert seen == [{"role": "assistant", "content": call("price")}]


# ---------------------------------------------------------------------------------- limits


def go_on(episode):
    return Feedback(reward=0.25, done=False, messages="more")


@pytest.mark.parametrize(
    ("environment", "limits", "reason", "turns", "reward"),
    [
        (FakeEnvironment(go_on, max_turns=3), {}, "turns", 3, 0.75),
        (FakeEnvironment(go_on, max_turns=9), {"max_turns": 2}, "turns", 2, 0.5),
        (FakeEnvironment(go_on, max_turns=2), {"max_turns": 9}, "turns", 2, 0.5),
        (FakeEnvironment(go_on, max_turns=9), {"max_total_tokens": 8 + 4 + 4 + 4}, "tokens", 2, 0.5),
        (FakeEnvironment(go_on, max_turns=9), {"max_tokens": 4}, "length", 1, 0.25),
        (FakeEnvironment(max_turns=1), {}, "stop", 1, 0.0),
        (FakeEnvironment(max_turns=9), {}, "stop", 1, 0.0),
        (HostedEnvironment(Shop()), {"max_turns": 2}, "turns", 2, 1.0),
        (HostedEnvironment(Shop()), {}, "turns", 4, 1.0),
        (HostedEnvironment(Shop()), {"max_tool_calls": 2}, "tool_calls", 3, 1.0),
        (HostedEnvironment(Shop()), {"max_total_tokens": 100}, "tokens", 2, 1.0),
    ],
)
def test_each_limit_ends_a_rollout_with_its_own_reason(environment, limits, reason, turns, reward):
    shop = isinstance(environment, HostedEnvironment)
    say = "7 " + call("price", item="tea") if shop else "said"

    class Talker(FakeEngine):
        async def generate(self, requests):
            completions = await super().generate(requests)
            return [self.cut(c, r.max_tokens) for c, r in zip(completions, requests, strict=True)]

        def cut(self, completion, n):
            if len(completion.token_ids) < n:
                return completion
            return Completion(
                token_ids=completion.token_ids[:n],
                logprobs=completion.logprobs[:n],
                versions=completion.versions[:n],
                finish_reason="length",
            )

    engine = Talker(reply=lambda request, rng: say)
    (rollout,) = played(environment, engine, sampling=evolve(SAMPLING, **limits))
    assert (rollout.finish_reason, rollout.turns, rollout.reward) == (reason, turns, reward)
    assert rollout.messages[-1]["role"] == "assistant", "nothing follows that nobody reads"
    assert rollout.segments[-1].tokens.sampled[-1]
    assert rollout.error is None


def test_calls_in_a_last_turn_are_not_run_and_the_environment_evaluates():
    shop = Shop()
    asked = []
    original, shop.evaluate = shop.evaluate, lambda e: asked.extend(e) or original(e)
    played(HostedEnvironment(shop), FakeEngine(reply=lambda *_: call("price", item="tea")))
    (episode,) = asked
    assert (episode.turn, episode.finish_reason, episode.reply) == (3, "turns", "")


def test_a_deadline_is_a_separate_reason_and_not_feedback():
    environment = FakeEnvironment(go_on, max_turns=99, seconds=1.0)
    (rollout,) = played(environment, FakeEngine(latency=lambda rng: 1.0), deadline=5.5)
    assert (rollout.finish_reason, rollout.reward, rollout.lost) == ("deadline", None, True)
    assert rollout.turns == 3


def test_a_prompt_longer_than_the_rollout_limit_is_reported():
    (rollout,) = played(FakeEnvironment(), FakeEngine(), sampling=evolve(SAMPLING, max_total_tokens=8))
    assert rollout.error == (
        "prompt '0' of task 'task' has 8 tokens, as many as a whole rollout may have "
        "(rollout.max_total_tokens is 8) or more"
    )
    assert rollout.lost, "it is no fault of the environment"


def test_later_turns_end_where_the_models_positions_end():
    renderer = FakeRenderer()
    renderer.context = 20
    engine = WeightsTrackingEngine([4], set())
    (rollout,) = played(
        FakeEnvironment(go_on, max_turns=9),
        engine,
        sampling=evolve(SAMPLING, max_tokens=9),
        renderer=renderer,
    )
    assert [request.max_tokens for request, _ in engine.said] == [9, 4]
    assert (rollout.turns, rollout.finish_reason) == (2, "tokens")


@pytest.mark.parametrize("total", [0, 20, 100], ids=["no limit", "the same limit", "a larger limit"])
@pytest.mark.parametrize("around", [lambda engine: engine, lambda engine: LimitedEngine(engine, 1)])
def test_later_turns_end_where_an_engine_has_no_more_room_than_that(total, around):
    """The model has more positions; the engine says how many it takes, when it holds weights."""
    engine = WeightsTrackingEngine([4], set())
    engine.positions = 20
    (rollout,) = played(
        FakeEnvironment(go_on, max_turns=9),
        around(engine),
        sampling=evolve(SAMPLING, max_tokens=9, max_total_tokens=total),
    )
    assert [request.max_tokens for request, _ in engine.said] == [9, 4]
    assert (rollout.turns, rollout.finish_reason) == (2, "tokens")


def test_a_prompt_for_which_an_engine_has_no_room_is_reported():
    engine = FakeEngine()
    engine.positions = 8
    for total, problem in (
        (0, "completion (max_tokens) they exceed the 8 positions of the model or the engine"),
        (9, "and the model or the engine has 8 positions"),
    ):
        sampling = evolve(SAMPLING, max_tokens=1, max_total_tokens=total)
        (rollout,) = played(FakeEnvironment(), engine, sampling=sampling)
        assert rollout.lost
        assert problem in rollout.error


# ---------------------------------------------------------------------------------- sessions


class Counters(grpo.Environment):
    """Each rollout has its own counter, which its tool moves; the reward is its value."""

    max_turns = 3

    def __init__(self, fault=""):
        self.fault, self.log = fault, []

    def prompts(self, split):
        return prompts(3)

    def open(self, prompt):
        if self.fault == "open":
            raise OSError("no more of them")
        counter = Tally(self.log, self.fault)
        self.log.append(("open", id(counter)))
        return counter

    def evaluate(self, episodes):
        if self.fault == "evaluate":
            raise KeyError("gold")
        return [float(episode.session.value) for episode in episodes]

    def close(self, session):
        self.log.append(("close", id(session)))
        session.log = None


class Tally:
    def __init__(self, log, fault):
        self.value, self.log, self._fault = 0, log, fault

    def add(self, amount: int) -> str:
        """Moves the counter.

        Args:
            amount: how far
        """
        self.value += amount
        return str(self.value)

    def _hidden(self):
        """No tool."""


def test_public_methods_of_a_session_are_tools_and_sessions_do_not_meet():
    environment = Counters()
    said = {i: call("add", amount=i + 1) for i in range(4)}

    def reply(request, rng):
        first = len(request.prompt_ids) == len("prompt 0")
        return said[request.seed] if first else "so"

    rollouts = played(HostedEnvironment(environment), FakeEngine(reply=reply), n=4)
    assert [rollout.reward for rollout in rollouts] == [1.0, 2.0, 3.0, 4.0]
    opened = Counter(name for what, name in environment.log if what == "open")
    closed = Counter(name for what, name in environment.log if what == "close")
    assert sum(opened.values()) == 4
    assert opened == closed


@pytest.mark.parametrize(
    "end", ["feedback", "deadline", "engine", "bug", "cancelled", "cancelled twice", "evaluate"]
)
def test_a_session_is_closed_once_however_its_rollout_ends(end):
    counters = Counters("evaluate" if end == "evaluate" else "")
    faults = {"engine": EngineError("died"), "bug": ZeroDivisionError()}
    engine = FakeEngine(
        latency=lambda rng: 100.0 if end in ("deadline", "cancelled", "cancelled twice") else 1.0,
        fault=lambda request: faults.get(end),
    )
    environment = HostedEnvironment(counters)

    async def story():
        await engine.update_weights(weights(0))
        rollouts = asyncio.create_task(
            play(
                [RolloutRequest(prompt=prompts(1)[0], seed=i) for i in range(3)],
                engine=engine,
                environments={"task": environment},
                renderer=FakeRenderer(),
                sampling=SAMPLING,
                deadline=10.0 if end == "deadline" else None,
            )
        )
        await asyncio.sleep(5.0)
        if "cancelled" in end:
            rollouts.cancel()
        if "twice" in end:
            await asyncio.sleep(0)
            rollouts.cancel()
        await asyncio.gather(rollouts, return_exceptions=True)

    run(story())
    assert Counter(what for what, _ in counters.log) == {"open": 3, "close": 3}
    assert not environment.host._sessions


def test_a_session_that_cannot_be_opened_is_unscored_and_is_not_closed():
    environment = Counters("open")
    (rollout,) = played(HostedEnvironment(environment), FakeEngine())
    assert (rollout.reward, rollout.lost, rollout.turns) == (None, False, 0)
    assert rollout.error.startswith("open raised test_turns.py:")
    assert rollout.error.endswith(" in open: OSError: no more of them")
    assert rollout.fault.kind == "OSError"
    assert environment.log == []


# ---------------------------------------------------------------------------------- groups that are compared


class Ranking(Shop):
    """The reward is the rank of the reply's length in its group."""

    needs_group = True

    def __init__(self):
        super().__init__()
        self.sizes = []

    def evaluate(self, episodes):
        self.sizes.append(len(episodes))
        lengths = sorted(len(e.reply) for e in episodes)
        return [float(lengths.index(len(e.reply))) for e in episodes]


def test_a_compared_group_is_evaluated_when_no_member_calls_a_tool():
    environment = Ranking()

    calls_of = {derive_seed(i, turn) if turn else i: i for i in range(3) for turn in range(4)}

    def reply(request, rng):
        """The first calls no tool, the second one, the third two after each other."""
        made = FakeRenderer().text(request.prompt_ids).count("<tool_call>")
        return call("price", item="tea") if made < calls_of[request.seed] else "x" * (1 + made)

    rollouts = played(HostedEnvironment(environment), FakeEngine(reply=reply), n=3)
    assert environment.sizes == [3]
    assert [r.turns for r in rollouts] == [1, 2, 3]
    answers = [[m["content"] for m in r.messages if m["role"] == "tool"] for r in rollouts]
    assert answers == [[], ["7"], ["7", "7"]], "tools answer although the group is not complete"
    assert [r.reward for r in rollouts] == [0.0, 1.0, 2.0]


def test_a_group_stays_whole_when_some_of_it_have_ended():
    shown = []

    def feedback(episode):
        shown.append((episode.turn, episode.reply))
        return Feedback(reward=1.0, done=episode.reply == "a", messages="again")

    environment = FakeEnvironment(feedback, max_turns=3, needs_group=True)
    rollouts = played(environment, FakeEngine(), n=4)
    assert set(environment.calls) == {4}, "each call has all of the group"
    assert [r.reward for r in rollouts] == [float(r.turns) for r in rollouts], (
        "what ended is not judged again"
    )
    assert len({r.turns for r in rollouts}) > 1, "some have ended before the others"


# ---------------------------------------------------------------------------------- rollouts on their own


class PacedEngine(FakeEngine):
    """Takes for each completion what ``seconds`` says of its rollout (its number, from 0) and its turn."""

    def __init__(self, seconds, *, rollouts=8, turns=8, **options):
        super().__init__(**options)
        self.seconds, self.asked = seconds, []
        self.place = {
            derive_seed(i, turn) if turn else i: (i, turn) for i in range(rollouts) for turn in range(turns)
        }

    async def generate(self, requests):
        for request in requests:
            rollout, turn = self.place[request.seed]
            self.asked.append((rollout, turn, round(asyncio.get_running_loop().time())))
        await asyncio.sleep(max(self.seconds(*self.place[request.seed]) for request in requests))
        return await super().generate(requests)


def at_pace(seconds, **options):
    return PacedEngine(seconds, latency=lambda rng: 0.0, update_seconds=0.0, **options)


def seconds_of(environment, engine, n, **options):
    """Rollouts, and virtual seconds until the last has ended."""
    clock = {}

    async def evaluate(episodes):
        feedback = await original(episodes)
        clock["end"] = asyncio.get_running_loop().time()
        return feedback

    original, environment.evaluate = environment.evaluate, evaluate
    return played(environment, engine, n, **options), clock["end"]


def varied(rollout, turn):
    """Each rollout is slow in another turn."""
    return 100.0 if rollout == turn else 1.0


def test_rollouts_of_a_group_do_not_wait_for_each_other():
    environment = FakeEnvironment(go_on, max_turns=3, seconds=0.0)
    engine = at_pace(varied)
    rollouts, seconds = seconds_of(environment, engine, 3)
    assert [rollout.turns for rollout in rollouts] == [3, 3, 3]
    assert seconds == pytest.approx(102.0), "as long as each of them alone"
    assert sorted(engine.asked) == [
        *((0, 0, 0), (0, 1, 100), (0, 2, 101)),
        *((1, 0, 0), (1, 1, 1), (1, 2, 101)),
        *((2, 0, 0), (2, 1, 1), (2, 2, 2)),
    ]


def test_in_lockstep_they_wait_and_share_one_call_a_turn():
    environment = FakeEnvironment(go_on, max_turns=3, seconds=0.0)

    async def story():
        engine = at_pace(varied)
        await engine.update_weights(weights(0))
        await play(
            [RolloutRequest(prompt=prompts(1)[0], seed=i) for i in range(3)],
            engine=engine,
            environments={"task": environment},
            renderer=FakeRenderer(),
            sampling=SAMPLING,
            lockstep=True,
        )
        return asyncio.get_running_loop().time()

    assert run(story()) == pytest.approx(300.0)
    assert environment.calls == [3, 3, 3]


@pytest.mark.parametrize("limits", [{}, {"max_turns": 1}])
def test_a_group_of_one_turn_shares_one_call_of_its_engine_and_its_environment(limits):
    environment = FakeEnvironment(go_on, max_turns=3 if limits else 1)
    calls = []

    class Counting(FakeEngine):
        async def generate(self, requests):
            calls.append(len(requests))
            return await super().generate(requests)

    played(environment, Counting(), 8, sampling=evolve(SAMPLING, **limits))
    assert calls == environment.calls == [8]


def test_only_the_evaluation_of_a_compared_group_waits_and_its_tools_do_not():
    """The first calls its tool three times, which takes as long as the other's only completion."""

    environment = Ranking()

    def reply(request, rng):
        rollout, turn = engine.place[request.seed]
        return call("price", item="tea") if rollout == 0 and turn < 3 else "done"

    engine = at_pace(lambda rollout, turn: 1.0 if rollout == 0 else 4.0, reply=reply)
    rollouts, seconds = seconds_of(HostedEnvironment(environment), engine, 2)
    assert [rollout.turns for rollout in rollouts] == [4, 1]
    assert environment.sizes == [2]
    assert seconds == pytest.approx(4.0)


@pytest.mark.parametrize(("needs_group", "rewards"), [(False, [0.75, None, 0.75]), (True, [None] * 3)])
def test_an_engines_error_loses_the_rollout_that_it_hit_or_the_group_that_is_compared(needs_group, rewards):
    environment = FakeEnvironment(go_on, max_turns=3, needs_group=needs_group)

    def fault(request):
        return EngineError("died") if engine.place[request.seed] == (1, 1) else None

    engine = at_pace(varied, fault=fault)
    rollouts = played(environment, engine, 3)
    assert [rollout.reward for rollout in rollouts] == rewards
    assert [rollout.lost for rollout in rollouts] == [reward is None for reward in rewards]
    assert engine.running == 0


def test_the_deadline_ends_those_that_are_late_and_keeps_what_is_finished():
    environment = FakeEnvironment(go_on, max_turns=3)
    engine = at_pace(lambda rollout, turn: 10.0 if rollout == 1 else 1.0)
    rollouts = played(environment, engine, 3, deadline=15.0)
    assert [rollout.reward for rollout in rollouts] == [0.75, None, 0.75]
    assert [rollout.turns for rollout in rollouts] == [3, 1, 3]
    late = "not finished within its deadline of 15 s; it waited for the engine in turn 2, or in its queue"
    assert rollouts[1].error == f"{late}, which counts as well"
    assert engine.running == 0


@pytest.mark.parametrize("needs_group", [False, True])
def test_a_session_ends_with_its_rollout_unless_its_group_is_compared(needs_group):
    environment = FakeEnvironment(max_turns=3, needs_group=needs_group, seconds=0.0)
    engine = at_pace(lambda rollout, turn: 100.0 if rollout == 2 else 1.0)
    moments = []

    async def close(sessions):
        moments.append((round(asyncio.get_running_loop().time()), len(sessions)))

    environment.close = close
    played(environment, engine, 3)
    assert moments == ([(100, 3)] if needs_group else [(1, 1), (1, 1), (100, 1)])


def test_an_error_in_one_rollout_leaves_no_other_of_its_group_running():
    engine = at_pace(varied, fault=lambda r: ZeroDivisionError() if engine.place[r.seed] == (1, 0) else None)
    environment = FakeEnvironment(go_on, max_turns=3)

    async def story():
        await engine.update_weights(weights(0))
        with pytest.raises(ZeroDivisionError):
            await play(
                [RolloutRequest(prompt=prompts(1)[0], seed=i) for i in range(3)],
                engine=engine,
                environments={"task": environment},
                renderer=FakeRenderer(),
                sampling=SAMPLING,
            )
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(story())
    assert sorted(environment.closed) == sorted(environment.opened)


# ---------------------------------------------------------------------------------- the same everywhere


@pytest.mark.parametrize("mode", ["batched", "pipelined"])
def test_training_and_validation_play_the_same(mode):
    """Turns, rewards, metrics and types, of an environment with tools."""

    def reply(request, rng):
        text = FakeRenderer().text(request.prompt_ids)
        if "<tool_call>" in text:
            return "costs 7"
        return call("price", item="tea") if ord(text[7]) % 2 else "no idea"

    items = prompts(6)
    engine = FakeEngine(reply=reply)

    async def story():
        await engine.update_weights(weights(0))
        environments = {"task": HostedEnvironment(Shop())}
        trained = []
        for prompt in items:
            trained += await play(
                [RolloutRequest(prompt=prompt, seed=i, group=prompt.id) for i in range(2)],
                engine=engine,
                environments=environments,
                renderer=FakeRenderer(),
                sampling=SAMPLING,
            )
        context = Context(
            version=0,
            prompts={"task": items},
            engine=engine,
            environments=environments,
            renderer=FakeRenderer(),
            sampling=SAMPLING,
        )
        return trained, await context.rollout(items, n=2, temperature=1.0, mode=mode)

    trained, validated = run(story())
    assert [evolve(r, seed=0) for r in trained] == [evolve(r, seed=0) for r in validated]
    assert {r.turns for r in trained} == {1, 2}
    for a, b in zip(trained, validated, strict=True):
        assert type(a.reward) is type(b.reward) is float
        assert all(type(value) is float for value in (*a.metrics.values(), *b.metrics.values()))
