"""Judges that wait for a network: each call has a slot and a deadline, in a real child process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import ChildDied, PluginError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Episode, Judgement, Prompt, SessionStart
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.process import EnvironmentProcess
from grpo_core.plugins.selection import PluginSelection
from grpo_core.processes.aio import FairSemaphore
from grpo_core.testing import HostedEnvironment, clock, finished

JUDGES = """
    import asyncio, os, signal, time
    import grpo_core as grpo

    class Judge(grpo.Environment):
        '''Does what the reply says: "wait 3" ends when three calls wait, and tells how many there were.'''

        max_turns = 2
        concurrency = 4
        deadline = 20.0

        def __init__(self, log=None, closes="fine"):
            self.log, self.closes = log, closes
            self.waiting = self.most = self.calls = self.cancelled = 0
            self.changed = asyncio.Condition()

        def write(self, words):
            with open(self.log, "a") as log:
                print(words, file=log)

        def prompts(self, split):
            return [grpo.Prompt(messages="?")]

        async def evaluate(self, episodes):
            self.calls += 1
            return [await self.one(episode.reply, len(episodes)) for episode in episodes]

        async def one(self, reply, size):
            word, _, argument = reply.partition(" ")
            if word == "wait":
                async with self.changed:
                    self.waiting += 1
                    self.most = max(self.most, self.waiting)
                    self.changed.notify_all()
                    await self.changed.wait_for(lambda: self.most >= int(argument))
                await asyncio.sleep(0.05)
                self.waiting -= 1
                return grpo.Feedback(reward=1.0, metrics={"most": self.most, "size": size})
            match word:
                case "hang":
                    try:
                        await asyncio.Future()
                    finally:
                        self.cancelled += 1
                case "block":
                    while True: pass
                case "deaf":
                    while True:
                        try:
                            await asyncio.Future()
                        except asyncio.CancelledError:
                            pass
                case "die": os.kill(os.getpid(), signal.SIGKILL)
                case "raise": raise RuntimeError("no such rubric")
                case "text": return "1.0"
                case "calls": return float(self.calls)
                case "cancelled": return float(self.cancelled)
                case "sleep": await asyncio.sleep(float(argument))
                case "pid": return float(os.getpid())
                case "exit":
                    async def leave(): raise SystemExit(3)
                    await asyncio.gather(leave(), asyncio.sleep(0.01))
                case "number": return float(argument)
            return 1.0

        async def aclose(self):
            await asyncio.sleep(0)
            if self.log:
                self.write("aclose")
            if self.closes == "raises":
                raise OSError("cannot be closed")
            if self.closes == "hangs":
                await asyncio.Future()

    class Groups(Judge):
        needs_group = True

        async def evaluate(self, episodes):
            self.calls += 1
            if self.calls % 10 == 0:
                raise RuntimeError("no such rubric")
            await asyncio.sleep(0.001)
            assert len({episode.group for episode in episodes}) == 1
            return [float(i) for i, _ in enumerate(episodes)]

    class Sessions(Judge):
        def __init__(self, log):
            super().__init__(log)
            self.opening = 0

        async def open(self, prompt):
            text = prompt.messages[0]["content"]
            if text.startswith("wait"):
                await self.one(text, 1)
            if text == "hang":
                await asyncio.Future()
            self.write("open " + text)
            return [text]

        async def close(self, session):
            self.write("close " + session[0])

        async def evaluate(self, episodes):
            (episode,) = episodes
            try:
                return [await self.one(episode.reply, 1)]
            finally:
                await asyncio.sleep(0.1)
                self.write("judged " + episode.session[0])

    class Tools(Judge):
        '''A plain evaluate, and a tool that waits.'''

        def __init__(self):
            super().__init__()

            async def ask(reply: str) -> str:
                '''Asks.

                Args:
                    reply: what to do
                '''
                return str((await self.one(reply, 1)).metrics["most"])

            self.tools = [ask]

        def evaluate(self, episodes):
            return [float(len(episodes))] * len(episodes)

    class Odd(Judge):
        def __init__(self, **attributes):
            super().__init__()
            vars(self).update(attributes)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "judges.py"
    path.write_text(textwrap.dedent(JUDGES))
    return path


def tell(file, story, *, name="Judge", options=None, pool=False, **config):
    """Return what a story returns, and the incidents."""
    incidents = []

    async def main():
        settings = EnvironmentConfig(**config)
        process = EnvironmentProcess(
            "play", f"{file}:{name}", options, config=settings, plugins=PluginSelection(allow=())
        )
        environment = EnvironmentPool([process], settings) if pool else process
        await environment.start()
        try:
            return await story(environment)
        finally:
            await environment.aclose()

    with reported_to(incidents.append):
        return asyncio.run(main()), incidents


def saying(*replies, session=None, group="g"):
    return [
        Episode(
            prompt=Prompt(messages="?", environment="play"),
            messages=({"role": "assistant", "content": reply},),
            group=group,
            session=session,
        )
        for reply in replies
    ]


def asking(reply):
    call = {"id": "0", "function": {"name": "ask", "arguments": {"reply": reply}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [Episode(prompt=Prompt(messages="?"), messages=(message,))]


def kinds(incidents):
    return [incident.kind for incident in incidents]


# ---------------------------------------------------------------------------------- slots


@pytest.mark.long
@given(
    number=st.integers(1, 5),
    calls=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 3), st.none() | st.floats(0, 3)), max_size=12),
    seed=st.integers(0, 99),
)
def test_slots_are_never_taken_twice_and_all_are_free_in_the_end(number, calls, seed):
    taken = 0

    async def call(slots, size, seconds, patience):
        nonlocal taken
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience), slots.take(min(size, number)):
                taken += min(size, number)
                assert taken <= slots.taken <= number, "a call that has its slots may not have begun"
                try:
                    await asyncio.sleep(seconds)
                finally:
                    taken -= min(size, number)

    async def main():
        slots = FairSemaphore(number)
        async with asyncio.TaskGroup() as group:
            for each in calls:
                group.create_task(call(slots, *each))
        assert slots.taken == 0
        async with slots.take(number):
            assert slots.taken == number

    clock.run(main(), seed=seed)


def test_a_call_that_takes_all_slots_is_not_passed_by():
    order = []

    async def call(slots, size, name):
        async with slots.take(size):
            order.append(name)
            await asyncio.sleep(1)

    async def main():
        slots = FairSemaphore(2)
        await asyncio.gather(
            *(call(slots, size, name) for name, size in zip("abcd", (1, 2, 1, 1), strict=True))
        )

    clock.run(main())
    assert order == ["a", "b", "c", "d"]


# ---------------------------------------------------------------------------------- calls at the same time


@pytest.mark.slow
@pytest.mark.parametrize("pool", [False, True])
def test_a_free_slot_takes_the_next_episode_at_once(file, pool):
    """One call lasts until the fourth wave waits next to it: with a barrier after each wave it would hang."""

    async def story(environment):
        first = asyncio.create_task(environment.evaluate(saying("wait 4")))
        await environment.evaluate(saying(*["number 1"] * 12))
        rest = await asyncio.gather(*(environment.evaluate(saying("wait 4")) for _ in range(7)))
        return [await first, *rest]

    results, incidents = tell(file, story, pool=pool)
    assert {feedback.metrics["most"] for (feedback,) in results} == {4.0}, (
        "as many as the environment declares"
    )
    assert {feedback.metrics["size"] for (feedback,) in results} == {1.0}
    assert not incidents


@pytest.mark.slow
def test_the_configuration_overrides_what_an_environment_declares(file):
    async def story(environment):
        feedback = await environment.evaluate(saying(*["wait 2"] * 6))
        late = await environment.evaluate(saying("hang"))
        return feedback, late

    (feedback, (late,)), incidents = tell(file, story, concurrency=2, deadline=0.5)
    assert {each.metrics["most"] for each in feedback} == {2.0}
    assert late.error == "environment of task 'play': no answer to 'evaluate' within 0.5 s; cancelled"
    assert kinds(incidents) == ["deadline"]


@pytest.mark.slow
def test_without_concurrency_an_async_judge_gets_batches(file):
    async def story(environment):
        return await environment.evaluate(saying("wait 1", "wait 1"))

    results, _ = tell(file, story, pool=True, concurrency=0)
    assert [feedback.metrics["size"] for feedback in results] == [2.0, 2.0]


@pytest.mark.slow
def test_results_have_the_order_of_the_episodes_whatever_ends_first(file):
    chance = random.Random(3)
    replies = [f"number {i}" if chance.random() < 0.5 else f"sleep {chance.random() / 10}" for i in range(60)]

    async def story(environment):
        return await environment.evaluate(saying(*replies))

    results, _ = tell(file, story, pool=True)
    assert [each.reward for each in results] == [
        float(reply.split()[1]) if reply.startswith("number") else 1.0 for reply in replies
    ]


@pytest.mark.slow
def test_async_tools_run_in_slots_while_plain_judgements_are_merged(file):
    async def story(environment):
        answers = await asyncio.gather(*(environment.evaluate(asking("wait 4")) for _ in range(8)))
        judged = await asyncio.gather(*(environment.evaluate(saying("x")) for _ in range(8)))
        return answers, judged

    (answers, judged), _ = tell(file, story, name="Tools", pool=True)
    assert {answer.messages[0]["content"] for (answer,) in answers} == {"4"}
    assert {feedback.reward for (feedback,) in judged} == {8.0}, "one call for all"


# ---------------------------------------------------------------------------------- deadlines, deaths, errors


@pytest.mark.slow
def test_a_deadline_counts_for_one_call_from_when_it_has_its_slot(file):
    """Ten calls of 0.3 s in two slots take 1.5 s, which is more than a deadline of 1 s."""

    async def story(environment):
        return await environment.evaluate(saying(*["sleep 0.3"] * 10))

    results, incidents = tell(file, story, pool=True, concurrency=2, deadline=1.0)
    assert [each.reward for each in results] == [1.0] * 10
    assert not incidents


@pytest.mark.slow
def test_a_call_that_overruns_is_cancelled_and_its_process_and_the_others_live_on(file):
    async def story(environment):
        results = await environment.evaluate(saying("pid", "hang", "sleep 0.4", "hang", "pid", "cancelled"))
        (cancelled,) = await environment.evaluate(saying("cancelled"))
        return results, cancelled, environment.starts

    (results, cancelled, starts), incidents = tell(file, story, deadline=1.0)
    assert [each.reward is None for each in results] == [False, True, False, True, False, False]
    assert results[0] == results[4], "the same process"
    assert (cancelled.reward, starts) == (2.0, 1)
    assert kinds(incidents) == ["deadline", "deadline"]
    assert incidents[0].message == "no answer to 'evaluate' within 1 s; cancelled"


@pytest.mark.slow
def test_a_process_that_does_not_react_is_killed_and_only_the_culprit_is_unscored(file):
    async def story(environment):
        results = await environment.evaluate(
            saying("sleep 0.2", "sleep 30", "block", "number 5", "sleep 0.1")
        )
        return results, environment.starts

    (results, starts), incidents = tell(file, story, deadline=1.0)
    assert [each.reward for each in results] == [1.0, None, None, 5.0, 1.0]
    assert results[2].error.endswith("no answer to 'evaluate' within 1 s; killed")
    assert starts >= 2
    assert set(kinds(incidents)) == {"deadline"}


@pytest.mark.slow
def test_a_death_costs_only_the_call_that_died(file):
    """The calls that the process held run again, in smaller company each time: here four, then one."""

    async def story(environment):
        results = await environment.evaluate(saying("sleep 0.5", "die", *["sleep 0.5"] * 8))
        return results, environment.starts

    (results, starts), incidents = tell(file, story)
    assert [each.reward for each in results] == [1.0, None] + [1.0] * 8
    assert "died (killed by SIGKILL)" in results[1].error
    assert starts == 3
    assert kinds(incidents) == ["died", "died"], "one for each death, not for each call"


@pytest.mark.slow
def test_a_call_that_ignores_its_cancellation_ends_its_process(file):
    async def story(environment):
        (deaf,) = await environment.evaluate(saying("deaf"))
        busy = asyncio.create_task(environment.evaluate(saying(*["sleep 0.5"] * 60)))
        return deaf, await busy, environment.starts

    (deaf, busy, starts), incidents = tell(file, story, deadline=1.0)
    assert deaf.error.endswith("no answer to 'evaluate' within 1 s; cancelled")
    assert {each.reward for each in busy} == {1.0}
    assert starts == 2
    assert kinds(incidents) == ["deadline", "died"]


@pytest.mark.slow
def test_a_call_that_raises_is_reported_and_unscored_and_made_once(file):
    async def story(environment):
        results = await environment.evaluate(saying("number 1", "raise", "exit", "number 2"))
        (calls,) = await environment.evaluate(saying("calls"))
        return results, calls, environment.starts

    (results, calls, starts), incidents = tell(file, story)
    assert [each.reward for each in results] == [1.0, None, None, 2.0]
    assert results[1].error.endswith(" in one: RuntimeError: no such rubric")
    assert results[2].error.endswith(": SystemExit: 3")
    assert (calls.reward, starts) == (5.0, 1)
    assert kinds(incidents) == ["call_failed", "call_failed"]
    assert "in one\n" in incidents[0].fault.traceback


@pytest.mark.slow
def test_a_wrong_type_is_fatal_in_a_slot_too(file):
    async def story(environment):
        with pytest.raises(PluginError, match=r"evaluate returned '1.0' \(str\), expected a float"):
            await environment.evaluate(saying("sleep 0.1", "text", "sleep 0.1"))

    tell(file, story, pool=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 32])
def test_a_group_whose_judge_failed_is_judged_in_the_next_attempt(file, size):
    """A judge of groups that fails one call in ten: each failure costs one group its first attempt."""

    async def story(environment):
        left, attempts = [f"group {i}" for i in range(60)], 0
        while left:
            attempts += 1
            groups = [saying(*["x"] * size, group=name) for name in left]
            judged = await asyncio.gather(*(environment.evaluate(group) for group in groups))
            for feedback in judged:
                assert len({each.reward is None for each in feedback}) == 1, "a group is scored as a whole"
            left = [name for name, some in zip(left, judged, strict=True) if some[0].reward is None]
        return attempts

    attempts, incidents = tell(file, story, name="Groups", pool=True)
    assert attempts == 2
    assert kinds(incidents) == ["call_failed"] * 6, "one for each call, not for each rollout"


# ---------------------------------------------------------------------------------- cancelling and closing


@pytest.mark.slow
def test_a_caller_that_goes_away_cancels_its_call_and_frees_its_slot(file):
    async def story(environment):
        hanging = [asyncio.create_task(environment.evaluate(saying("hang"))) for _ in range(3)]
        await environment.evaluate(saying("number 1"))  # the three have begun
        hanging.append(asyncio.create_task(environment.evaluate(saying("hang"))))
        await asyncio.sleep(0)  # its call is on its way
        waiting = asyncio.create_task(environment.evaluate(saying("number 7")))
        for caller in hanging:
            caller.cancel()
        (feedback,) = await waiting
        (cancelled,) = await environment.evaluate(saying("cancelled"))
        return feedback.reward, cancelled.reward >= 3, environment.starts

    assert tell(file, story) == ((7.0, True, 1), [])


@pytest.mark.slow
def test_closing_ends_the_calls_that_run_and_those_that_wait(file):
    async def story(environment):
        callers = [asyncio.create_task(environment.evaluate(saying("hang"))) for _ in range(6)]
        await asyncio.sleep(0)  # four are on their way
        await environment.aclose()
        return await asyncio.gather(*callers, return_exceptions=True)

    errors, incidents = tell(file, story)
    assert {type(error) for error in errors} == {ChildDied}
    assert not incidents


def prompted(*messages):
    return {message: Prompt(messages=message, environment="play") for message in messages}


@pytest.mark.slow
def test_sessions_open_in_slots_and_are_closed_once(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        assert await environment.open(prompted(*(f"wait {n}" for n in (1, 2, 3, 4)))) == [SessionStart()] * 4
        await environment.evaluate(saying("number 1", session="wait 2"))
        await environment.close(["wait 2"])

    tell(file, story, name="Sessions", options={"log": str(log)})
    told = log.read_text().splitlines()
    assert sorted(told[:4]) == [f"open wait {n}" for n in (1, 2, 3, 4)]
    assert told[4] == "judged wait 2"
    assert sorted(told[5:-1]) == [f"close wait {n}" for n in (1, 2, 3, 4)]
    assert told[-1] == "aclose"


@pytest.mark.slow
def test_a_session_is_not_closed_while_a_cancelled_call_cleans_up(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        await environment.open(prompted("a"))
        caller = asyncio.create_task(environment.evaluate(saying("hang", session="a")))
        await environment.evaluate(saying("number 1", session="unknown"))  # the caller's call has begun
        caller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller
        await environment.close(["a"])

    tell(file, story, name="Sessions", options={"log": str(log)})
    assert log.read_text().splitlines() == ["open a", "judged a", "close a", "aclose"]


@pytest.mark.slow
def test_a_session_that_opens_too_late_is_an_error_and_the_others_are_open(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        return await environment.open(prompted("a", "hang", "b"))

    (a, hang, b), incidents = tell(file, story, name="Sessions", options={"log": str(log)}, deadline=1.0)
    assert (a, b) == (SessionStart(), SessionStart())
    assert hang.error.endswith("no answer to 'open' within 1 s; cancelled")
    assert kinds(incidents) == ["deadline"]
    assert sorted(log.read_text().splitlines()) == ["aclose", "close a", "close b", "open a", "open b"]


@pytest.mark.slow
@pytest.mark.parametrize("closes", ["fine", "raises", "hangs"])
def test_an_environment_is_closed_once_at_the_end(file, tmp_path, closes):
    log = tmp_path / "log"

    async def story(environment):
        await environment.evaluate(saying("number 1"))

    begun = time.monotonic()
    tell(file, story, options={"log": str(log), "closes": closes})
    assert log.read_text() == "aclose\n"
    assert time.monotonic() - begun < 60


# ---------------------------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"concurrency": -1}, "concurrency is -1, expected a whole number of at least 0"),
        ({"concurrency": 2.5}, "concurrency is 2.5, expected a whole number"),
        ({"concurrency": True}, "concurrency is True, expected a whole number"),
        ({"deadline": 0}, "deadline is 0, expected a number of seconds above 0"),
        ({"deadline": "30"}, "deadline is '30', expected a number of seconds above 0"),
    ],
)
@pytest.mark.slow
def test_a_declaration_that_makes_no_sense_is_an_error(file, attributes, message):
    async def story(environment):
        raise AssertionError("it starts")

    with pytest.raises(PluginError, match=message):
        tell(file, story, name="Odd", options=attributes)


def test_a_test_of_a_judge_with_slots_gives_it_one_episode_at_a_time():
    class Judge:
        concurrency = 8

        def prompts(self, split):
            return [Prompt(messages="?")]

        async def evaluate(self, episodes):
            assert len(episodes) == 1
            return [1.0]

        async def aclose(self):
            self.closed = True

    judge = Judge()
    hosted = HostedEnvironment(judge)
    assert finished(hosted.evaluate(saying("a", "b"))) == [Judgement(reward=1.0)] * 2
    finished(hosted.aclose())
    assert judge.closed
