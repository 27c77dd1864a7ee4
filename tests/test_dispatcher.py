"""The queue of an environment's calls: few calls, only the culprit fails, everybody gets the own results.

On virtual time a fake worker says what its calls do; in a real process a judge does what its replies say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import textwrap
import time
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_core import Environment
from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import (
    ChildDied,
    CodeError,
    DeadlineExceeded,
    Fault,
    GrpoError,
    PluginError,
    Unavailable,
)
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Episode, Judgement, Prompt, SessionStart
from grpo_core.environments.dispatcher import Failure
from grpo_core.environments.host import EnvironmentHost
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import PluginSelection
from grpo_core.processes.aio import Limit
from grpo_core.processes.child import Child
from grpo_core.testing import FakeEnvironment, HostedEnvironment, clock, finished

# ---------------------------------------------------------------------------------- on virtual time


def late(message="late"):
    error = Unavailable(message)
    error.timed_out = True
    return error


REFUSED, LATE = Unavailable("refused"), late()


def failure(cause, **options):
    if isinstance(cause, str):
        cause = CodeError(cause).carrying(Fault("ValueError", cause))
    return Failure(cause, str(cause), **options)


def saying(reply, *, prompt="p", group="g", session=None):
    return Episode(
        prompt=Prompt(messages="?", id=prompt, environment="play"),
        messages=({"role": "assistant", "content": reply},),
        group=group,
        session=session,
    )


class Worker(FakeEnvironment):
    """Squares the numbers in its replies, takes a while, and remembers its calls.

    Args:
        rule: says for the numbers of a call why it fails; None if it does not.
    """

    def __init__(self, rule=lambda numbers: None, **options):
        super().__init__(**{"seconds": 1.0} | options)
        self.rule, self.batches, self.times, self.running, self.most = rule, [], [], 0, 0

    async def call(self, method, items, slots):
        numbers = [int(episode.reply) for episode in items]
        self.running += slots
        self.most = max(self.most, self.running)
        assert self.running <= max(1, self.about.concurrency), "no slot is taken twice"
        self.batches.append(numbers)
        self.times.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.seconds)
            why = self.rule(numbers)
            if isinstance(why, Exception):
                raise why
            return why or [Judgement(reward=float(number * number)) for number in numbers]
        finally:
            self.running -= slots


def told(story, worker=None, **config):
    """Return what a story returns, and the incidents, of ``story(ask, worker)`` with a pool."""
    worker, incidents = worker or Worker(), []

    async def main():
        pool = EnvironmentPool([worker], EnvironmentConfig(**{"max_batch": 4, "max_wait": 0.5} | config))

        async def ask(*numbers, wait=0.0, group="", prompt=None):
            await asyncio.sleep(wait)
            feedback = await pool.evaluate(
                [saying(str(i), prompt=prompt or str(i), group=group or str(i)) for i in numbers]
            )
            return [each.error or each.reward for each in feedback]

        ask.pool = pool
        try:
            return await story(ask, worker)
        finally:
            await pool.aclose()

    with reported_to(incidents.append):
        return clock.run(main()), incidents


def test_episodes_that_arrive_within_the_wait_or_during_a_call_share_the_next():
    async def story(ask, worker):
        calls = (ask(1, 2), ask(3, wait=0.4), ask(4, wait=0.6), ask(5, wait=1.4), ask(6, wait=3.0))
        assert await asyncio.gather(*calls) == [[1, 4], [9], [16], [25], [36]]
        assert worker.batches == [[1, 2, 3], [4, 5], [6]]
        assert worker.times == [0.5, 1.5, 3.5], "the wait counts from the first arrival"

    told(story)


def test_a_full_batch_does_not_wait_and_a_long_one_is_split():
    async def story(ask, worker):
        assert await asyncio.gather(ask(1), ask(*range(9))) == [[1], [n * n for n in range(9)]]
        assert worker.batches == [[1, 0, 1, 2], [3, 4, 5, 6], [7, 8]]
        assert worker.times == [0.0, 1.0, 2.0]
        assert await ask() == []

    told(story)


def test_without_a_wait_those_of_the_same_moment_still_share_a_call():
    async def story(ask, worker):
        await asyncio.gather(*(ask(number) for number in range(3)))
        assert worker.batches == [[0, 1, 2]]

    told(story, max_wait=0.0)


def test_a_group_that_is_compared_is_never_split():
    async def story(ask, worker):
        await asyncio.gather(
            ask(1, 1, 1, group="a"), ask(2, 2, 2, group="b"), ask(3), ask(*[4] * 6, group="c")
        )
        assert worker.batches == [[1, 1, 1], [2, 2, 2, 3], [4] * 6]

    told(story, Worker(needs_group=True))


def test_a_broken_contract_reaches_all_in_the_call_and_the_next_caller_if_they_are_gone():
    async def story(ask, worker):
        shared = await asyncio.gather(ask(1), ask(2), ask(3, wait=0.6), return_exceptions=True)
        assert [type(each) for each in shared] == [PluginError, PluginError, list]
        worker.rule = lambda numbers: [Judgement()] * 9
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await ask(4)
        await asyncio.sleep(1.0)
        worker.rule = lambda numbers: None
        with pytest.raises(PluginError, match="a call with 1 items returned 9 results"):
            await ask(5)

    told(story, Worker(lambda numbers: PluginError("broken") if 1 in numbers else None))


def test_the_rest_of_a_submission_whose_call_broke_the_contract_is_never_sent():
    async def story(ask, worker):
        await asyncio.gather(ask(*range(6)), ask(*[7] * 4), return_exceptions=True)
        assert worker.batches == [[0, 1, 2, 3], [7] * 4]

    told(story, Worker(lambda numbers: PluginError("broken") if 0 in numbers else None))


def test_a_caller_that_goes_away_disturbs_nobody():
    async def story(ask, worker):
        running = asyncio.create_task(ask(1, 2, 3, 4))
        await asyncio.sleep(0.1)
        waiting, neighbour = asyncio.create_task(ask(5)), asyncio.create_task(ask(6))
        await asyncio.sleep(0.1)
        running.cancel()
        waiting.cancel()
        assert await neighbour == [36]
        assert (worker.batches, worker.times) == ([[1, 2, 3, 4], [6]], [0.0, 1.0])
        caller = asyncio.create_task(ask(1, 2, 3))
        await asyncio.sleep(0.1)
        caller.cancel()
        await asyncio.sleep(10.0)
        assert len(worker.batches) == 2, "there is no call if all callers are gone"

    told(story)


def test_closing_stops_the_call_waits_for_its_end_and_fails_all_callers():
    ended = []

    class Careful(Worker):
        async def call(self, *given):
            try:
                return await super().call(*given)
            finally:
                await asyncio.sleep(3.0)
                ended.append(asyncio.get_running_loop().time())

    async def story(ask, worker):
        callers = [asyncio.create_task(ask(*[number] * 4)) for number in range(3)]
        await asyncio.sleep(0.1)
        await ask.pool.aclose()
        errors = await asyncio.gather(*callers, return_exceptions=True)
        assert {type(error) for error in errors} == {GrpoError}
        assert ["during" in str(error) for error in errors] == [True, False, False]
        assert ended == [3.1]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(GrpoError, match="is closed"):
            await ask(1)

    told(story, Careful())


Arrival = st.tuples(
    st.floats(0, 3), st.lists(st.integers(-1, 9), min_size=1, max_size=9), st.none() | st.floats(0, 3)
)


@pytest.mark.long
@example(
    arrivals=[(0.0, [-1], None), (0.5, [3], None)],
    max_batch=4,
    max_wait=0.0,
    slots=("all", 3),
    whole=False,
    deaths=True,
)
@given(
    arrivals=st.lists(Arrival, max_size=12),
    max_batch=st.integers(1, 6),
    max_wait=st.sampled_from([0.0, 0.3]),
    slots=st.sampled_from([("none", 0), ("all", 1), ("all", 3)]),
    whole=st.booleans(),
    deaths=st.booleans(),
)
def test_whatever_happens_each_gets_the_own_results_and_only_the_culprits_fail(
    arrivals, max_batch, max_wait, slots, whole, deaths
):
    """A negative number makes its call raise, or kills the process with all that runs there."""
    worker = Worker(needs_group=whole)
    worker.about = evolve(worker.about, slots=slots[0], concurrency=slots[1])
    alive = [0]

    async def call(method, items, taken):
        begun = alive[0]
        alone = not worker.running
        result = await Worker.call(worker, method, items, taken)
        if any(int(episode.reply) < 0 for episode in items):
            alive[0] += deaths
            alone = alone and worker.running == 0
            return failure("negative", died=deaths, alone=deaths and alone)
        if alive[0] != begun:
            return failure("killed", died=True, alone=False)
        return result

    worker.call = call

    async def story(ask, _):
        async def caller(number, begin, items, patience):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    found = await ask(*items, wait=begin, group=str(number))
                    fails = whole and min(items) < 0
                    assert found == ["negative" if fails or i < 0 else i * i for i in items]

        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                group.create_task(caller(number, *arrival))

    told(story, worker, max_batch=max_batch, max_wait=max_wait)
    if not whole:
        assert all(len(batch) <= max_batch for batch in worker.batches)


# ---------------------------------------------------------------------------------- failures of batches


def raising(*bad, **options):
    return lambda numbers: failure("no such rubric", **options) if {*bad} & {*numbers} else None


def test_a_batch_that_fails_is_called_one_by_one_before_others_and_reported_with_its_cause():
    async def story(ask, worker):
        found, after = await asyncio.gather(ask(1, 2, 3, 4), ask(5, wait=0.1))
        assert found == [1, "no such rubric", 9, 16]
        assert after == [25]
        assert worker.batches == [[1, 2, 3, 4], [1], [2], [3], [4], [5]]

    _, incidents = told(story, Worker(raising(2)))
    assert [(each.kind, each.message) for each in incidents] == [
        ("call_failed", "no such rubric"),
        ("batch_failed", "batches of 4 fail (no such rubric); 3 of 4 single calls succeed"),
    ]


def test_an_environment_that_always_fails_is_not_tried_forever():
    async def story(ask, worker):
        assert await ask(*range(50)) == ["no such rubric"] * 50
        assert len(worker.batches) == 21

    _, incidents = told(story, Worker(raising(*range(50))), max_batch=64)
    assert Counter(each.kind for each in incidents) == {"call_failed": 20}


def test_a_single_episode_is_not_called_twice():
    async def story(ask, worker):
        assert await ask(2) == ["no such rubric"]
        assert worker.batches == [[2]]

    told(story, Worker(raising(2)))


# ---------------------------------------------------------------------------------- services


def test_a_batch_whose_service_is_away_is_not_taken_apart_and_one_call_at_a_time_asks():
    async def story(ask, worker):
        worker.rule = away(0.0, 20.0)
        assert await asyncio.gather(ask(1, 2, 3, 4), ask(5, 6)) == [[1, 4, 9, 16], [25, 36]]
        calls = [(batch, at) for batch, at in zip(worker.batches, worker.times, strict=True) if at < 19]
        assert [len(batch) for batch, _ in calls] == [4, *[1] * (len(calls) - 1)]
        pauses = [b - a - 1.0 for (_, a), (_, b) in itertools.pairwise(calls)]
        assert pauses == sorted(pauses)
        assert 1.0 <= pauses[0] <= 1.6

    _, incidents = told(story)
    assert {each.kind for each in incidents} == {"unavailable", "available"}


def away(begin, end):
    def rule(numbers):
        here = not begin <= asyncio.get_running_loop().time() < end
        return None if here else failure(REFUSED)

    return rule


def test_the_only_prompt_of_a_service_that_is_away_waits_and_its_deadline_stands():
    async def story(ask, worker):
        assert await ask(1) == [1]
        async with Limit(10.0):
            assert await ask(1) == [1]
        return asyncio.get_running_loop().time(), len(worker.batches)

    (seconds, calls), _ = told(story, Worker(away(2.0, 100.0)))
    assert 100 < seconds < 150
    assert calls < 12


@pytest.mark.parametrize("answers", [0, 1])
def test_a_service_that_stays_away_ends_the_run_after_its_budget(answers):
    async def story(ask, worker):
        if answers:
            await ask(1)
        waiting = [asyncio.create_task(ask(i, wait=3.0)) for i in range(3)]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in errors} == {Unavailable}
        with pytest.raises(Unavailable) as caught:
            await ask(4)
        assert "environment.unavailable_for" in str(caught.value)
        return asyncio.get_running_loop().time()

    seconds, _ = told(story, Worker(away(2.0 * answers, 1e9)), unavailable_for=60.0)
    assert (60 if answers else 30) < seconds < (70 if answers else 40)


@pytest.mark.parametrize("why", [REFUSED, LATE], ids=["refused", "late"])
@pytest.mark.parametrize("slots", [("none", 0), ("all", 4)], ids=["batches", "slots"])
def test_a_prompt_that_its_service_never_answers_fails_alone_and_the_others_wait_for_nothing(why, slots):
    def rule(numbers):
        return failure(why) if 3 in numbers else None

    async def story(ask, worker):
        worker.about = evolve(worker.about, slots=slots[0], concurrency=slots[1])
        calls = [ask(number, wait=number / 2, prompt=f"prompt {number % 9}") for number in range(40)]
        found = await asyncio.gather(*calls)
        assert [each for (each,) in found] == [str(why) if i == 3 else i * i for i in range(40)]
        assert asyncio.get_running_loop().time() < 60

    told(story, Worker(rule))


@pytest.mark.parametrize("slots", [("none", 0), ("all", 4)], ids=["batches", "slots"])
def test_a_service_that_hangs_costs_no_reply(slots):
    def rule(numbers):
        here = asyncio.get_running_loop().time()
        return None if here < 10 or here > 100 else failure(DeadlineExceeded("late"))

    async def story(ask, worker):
        worker.about = evolve(worker.about, slots=slots[0], concurrency=slots[1])
        await ask(99)
        await asyncio.sleep(10.0)
        found = await asyncio.gather(*(ask(number) for number in range(8)))
        assert [each for (each,) in found] == [i * i for i in range(8)]
        return len(worker.batches)

    calls, incidents = told(story, Worker(rule, seconds=5.0))
    assert calls < 25
    assert incidents[-1].kind == "available"


def test_a_late_call_without_others_is_the_fault_of_its_prompt():
    async def story(ask, worker):
        assert await ask(1) == ["late"]
        assert await ask(2, 2, prompt="the same") == ["late", "late"]
        assert len(worker.batches) == 1 + 1 + 2

    told(story, Worker(lambda numbers: failure(LATE)))


def test_a_service_is_tried_with_a_prompt_of_any_worker_that_has_not_failed_yet():
    def rule(numbers):
        return failure(REFUSED) if 0 in numbers else None

    async def story():
        workers = [Worker(rule, seconds=0.1), Worker(rule, seconds=0.1)]
        pool = EnvironmentPool(workers, EnvironmentConfig(max_wait=0.0))

        async def ask(number):
            await asyncio.sleep(number / 2)
            (feedback,) = await pool.evaluate([saying(str(number), prompt=str(number), group=str(number))])
            return feedback.error or feedback.reward

        found = await asyncio.gather(*map(ask, range(40)))
        await pool.aclose()
        assert all(worker.batches for worker in workers)
        return found

    with reported_to(lambda incident: None):
        assert clock.run(story()) == [str(REFUSED), *(i * i for i in range(1, 40))]


def test_a_call_cancelled_while_its_service_is_away_leaves_the_turn_to_others():
    async def story(ask, worker):
        worker.rule = away(0.0, 20.0)
        first, second = asyncio.create_task(ask(1)), asyncio.create_task(ask(2))
        await asyncio.sleep(5.0)
        first.cancel()
        assert await second == [4]

    told(story)


# ---------------------------------------------------------------------------------- in real processes

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


def run(file, story, *, name="Judge", options=None, pool=False, **config):
    """Return what a story returns, and the incidents."""
    incidents = []

    async def main():
        settings = EnvironmentConfig(**config)
        spec = EnvironmentSpec(task="play", env=f"{file}:{name}", options=options or {}, config=settings)
        process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
        environment = EnvironmentPool([process], settings) if pool else process
        await environment.start()
        try:
            return await story(environment)
        finally:
            await environment.aclose()

    with reported_to(incidents.append):
        return asyncio.run(main()), incidents


def replying(*replies, session=None, group="g"):
    return [saying(reply, session=session, group=group) for reply in replies]


def asking(reply):
    call = {"id": "0", "function": {"name": "ask", "arguments": {"reply": reply}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [Episode(prompt=Prompt(messages="?"), messages=(message,))]


def kinds(incidents):
    return [incident.kind for incident in incidents]


# ---------------------------------------------------------------------------------- frames


def test_a_call_passes_five_functions_here_and_four_in_the_process(monkeypatch):
    here, there = [], []
    rooms = ("grpo_core/environments/", "grpo_core/processes/child.py")

    def stack():
        frame, names = sys._getframe(2), []
        while frame is not None:
            if any(room in frame.f_code.co_filename for room in rooms):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return names[::-1]

    class Judge:
        def prompts(self, split):
            return [Prompt(messages="?")]

        def evaluate(self, episodes):
            there.extend(name for name in stack() if not name.startswith("_Serving"))
            return [1.0] * len(episodes)

    call = Child.call_alongside

    async def traced(*given, **named):
        here.extend(stack())
        return await call(*given, **named)

    async def main():
        host = PluginHost.discover(allow=[])
        host.add({"environment": {"judge": Judge}})
        process = EnvironmentProcess(EnvironmentSpec(task="play", env="program:judge"), host=host)
        pool = EnvironmentPool([process], EnvironmentConfig())
        await pool.start()
        monkeypatch.setattr(Child, "call_alongside", traced)
        asking = pool.evaluate([saying("x")])
        task = asyncio.create_task(asking)
        await asyncio.sleep(0)
        here.extend([asking.cr_code.co_qualname, asking.cr_await.cr_code.co_qualname])
        assert [each.reward for each in await task] == [1.0]
        await pool.aclose()

    asyncio.run(main())
    asks = ["EnvironmentPool.evaluate", "Dispatcher.ask"]
    assert here == [*asks, "Dispatcher._call", "EnvironmentProcess.call"]  # and Child.call_alongside
    assert there == ["Calls.serve", "Calls._receive", "Calls._answer", "EnvironmentHost._evaluate"]


# ---------------------------------------------------------------------------------- calls at the same time


@pytest.mark.slow
def test_a_free_slot_takes_the_next_episode_at_once(file):
    """One call lasts until the fourth wave waits next to it: with a barrier after each wave it would hang."""

    async def story(environment):
        first = asyncio.create_task(environment.evaluate(replying("wait 4")))
        await environment.evaluate(replying(*["number 1"] * 12))
        rest = await asyncio.gather(*(environment.evaluate(replying("wait 4")) for _ in range(7)))
        return [await first, *rest]

    results, incidents = run(file, story, pool=True)
    assert {feedback.metrics["most"] for (feedback,) in results} == {4.0}, (
        "as many as the environment declares"
    )
    assert {feedback.metrics["size"] for (feedback,) in results} == {1.0}
    assert not incidents


@pytest.mark.slow
def test_the_configuration_overrides_what_an_environment_declares(file):
    async def story(environment):
        feedback = await environment.evaluate(replying(*["wait 2"] * 6))
        late = await environment.evaluate(replying("hang"))
        return feedback, late

    (feedback, (late,)), incidents = run(file, story, concurrency=2, deadline=0.5)
    assert {each.metrics["most"] for each in feedback} == {2.0}
    assert late.error == "environment of task 'play': no answer to 'evaluate' within 0.5 s; cancelled"
    assert kinds(incidents) == ["deadline"]


@pytest.mark.slow
def test_async_tools_run_in_slots_while_plain_judgements_are_merged(file):
    async def story(environment):
        answers = await asyncio.gather(*(environment.evaluate(asking("wait 4")) for _ in range(8)))
        judged = await asyncio.gather(*(environment.evaluate(replying("x")) for _ in range(8)))
        return answers, judged

    (answers, judged), _ = run(file, story, name="Tools", pool=True)
    assert {answer.messages[0]["content"] for (answer,) in answers} == {"4"}
    assert {feedback.reward for (feedback,) in judged} == {8.0}, "one call for all"


# ---------------------------------------------------------------------------------- deadlines, deaths, errors


@pytest.mark.slow
def test_a_deadline_counts_for_one_call_from_when_it_has_its_slot(file):
    """Ten calls of 0.3 s in two slots take 1.5 s, which is more than a deadline of 1 s."""

    async def story(environment):
        return await environment.evaluate(replying(*["sleep 0.3"] * 10))

    results, incidents = run(file, story, pool=True, concurrency=2, deadline=1.0)
    assert [each.reward for each in results] == [1.0] * 10
    assert not incidents


@pytest.mark.slow
def test_a_call_that_overruns_is_cancelled_and_its_process_and_the_others_live_on(file):
    async def story(environment):
        results = await environment.evaluate(replying("pid", "hang", "sleep 0.4", "hang", "pid", "cancelled"))
        (cancelled,) = await environment.evaluate(replying("cancelled"))
        return results, cancelled, environment.starts

    (results, cancelled, starts), incidents = run(file, story, deadline=1.0)
    assert [each.reward is None for each in results] == [False, True, False, True, False, False]
    assert results[0] == results[4], "the same process"
    assert (cancelled.reward, starts) == (2.0, 1)
    assert kinds(incidents) == ["deadline", "deadline"]
    assert incidents[0].message == "no answer to 'evaluate' within 1 s; cancelled"


@pytest.mark.slow
def test_a_process_that_does_not_react_is_killed_and_only_the_culprit_is_unscored(file):
    async def story(environment):
        results = await environment.evaluate(
            replying("sleep 0.2", "sleep 30", "block", "number 5", "sleep 0.1")
        )
        return results, environment.starts

    (results, starts), incidents = run(file, story, deadline=1.0)
    assert [each.reward for each in results] == [1.0, None, None, 5.0, 1.0]
    assert results[2].error.endswith("no answer to 'evaluate' within 1 s; killed")
    assert starts >= 2
    assert set(kinds(incidents)) == {"deadline"}


@pytest.mark.slow
def test_a_death_costs_only_the_call_that_died(file):
    """The calls that the process held run again, in smaller company each time: here four, then one."""

    async def story(environment):
        results = await environment.evaluate(replying("sleep 0.5", "die", *["sleep 0.5"] * 8))
        return results, environment.starts

    (results, starts), incidents = run(file, story)
    assert [each.reward for each in results] == [1.0, None] + [1.0] * 8
    assert "died (killed by SIGKILL)" in results[1].error
    assert starts == 3
    assert kinds(incidents) == ["died", "died"], "one for each death, not for each call"


@pytest.mark.slow
def test_a_call_that_ignores_its_cancellation_ends_its_process(file):
    async def story(environment):
        (deaf,) = await environment.evaluate(replying("deaf"))
        busy = asyncio.create_task(environment.evaluate(replying(*["sleep 0.5"] * 60)))
        return deaf, await busy, environment.starts

    (deaf, busy, starts), incidents = run(file, story, deadline=1.0)
    assert deaf.error.endswith("no answer to 'evaluate' within 1 s; cancelled")
    assert {each.reward for each in busy} == {1.0}
    assert starts == 2
    assert kinds(incidents) == ["deadline", "died"]


@pytest.mark.slow
def test_a_call_that_raises_is_reported_and_unscored_and_made_once(file):
    async def story(environment):
        results = await environment.evaluate(replying("number 1", "raise", "exit", "number 2"))
        (calls,) = await environment.evaluate(replying("calls"))
        return results, calls, environment.starts

    (results, calls, starts), incidents = run(file, story)
    assert [each.reward for each in results] == [1.0, None, None, 2.0]
    assert results[1].error.endswith(" in one: RuntimeError: no such rubric")
    assert results[2].error.endswith(": SystemExit: 3")
    assert (calls.reward, starts) == (5.0, 1)
    assert kinds(incidents) == ["call_failed", "call_failed"]
    assert "in one\n" in incidents[0].fault.traceback


@pytest.mark.slow
def test_a_group_whose_judge_failed_is_judged_in_the_next_attempt(file):
    """A judge of groups that fails one call in ten: each failure costs one group its first attempt."""

    async def story(environment):
        left, attempts = [f"group {i}" for i in range(60)], 0
        while left:
            attempts += 1
            groups = [replying(*["x"] * 8, group=name) for name in left]
            judged = await asyncio.gather(*(environment.evaluate(group) for group in groups))
            for feedback in judged:
                assert len({each.reward is None for each in feedback}) == 1, "a group is scored as a whole"
            left = [name for name, some in zip(left, judged, strict=True) if some[0].reward is None]
        return attempts

    attempts, incidents = run(file, story, name="Groups", pool=True)
    assert attempts == 2
    assert kinds(incidents) == ["call_failed"] * 6, "one for each call, not for each rollout"


# ---------------------------------------------------------------------------------- cancelling and closing


@pytest.mark.slow
def test_a_caller_that_goes_away_cancels_its_call_and_frees_its_slot(file):
    async def story(environment):
        hanging = [asyncio.create_task(environment.evaluate(replying("hang"))) for _ in range(3)]
        await environment.evaluate(replying("number 1"))  # the three have begun
        hanging.append(asyncio.create_task(environment.evaluate(replying("hang"))))
        await asyncio.sleep(0)  # its call is on its way
        waiting = asyncio.create_task(environment.evaluate(replying("number 7")))
        for caller in hanging:
            caller.cancel()
        (feedback,) = await waiting
        (cancelled,) = await environment.evaluate(replying("cancelled"))
        return feedback.reward, cancelled.reward >= 3, environment.starts

    assert run(file, story) == ((7.0, True, 1), [])


@pytest.mark.slow
def test_closing_ends_the_calls_that_run_and_those_that_wait(file):
    async def story(environment):
        callers = [asyncio.create_task(environment.evaluate(replying("hang"))) for _ in range(6)]
        await asyncio.sleep(0)  # four are on their way
        await environment.aclose()
        return await asyncio.gather(*callers, return_exceptions=True)

    errors, incidents = run(file, story)
    assert {type(error) for error in errors} == {ChildDied}
    assert not incidents


def prompted(*messages):
    return {message: Prompt(messages=message, environment="play") for message in messages}


@pytest.mark.slow
def test_sessions_open_in_slots_and_are_closed_once(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        assert await environment.open(prompted(*(f"wait {n}" for n in (1, 2, 3, 4)))) == [SessionStart()] * 4
        await environment.evaluate(replying("number 1", session="wait 2"))
        await environment.close(["wait 2"])

    run(file, story, name="Sessions", options={"log": str(log)})
    told = log.read_text().splitlines()
    assert sorted(told[:4]) == [f"open wait {n}" for n in (1, 2, 3, 4)]
    assert told[4] == "judged wait 2"
    assert sorted(told[5:-1]) == [f"close wait {n}" for n in (1, 2, 3, 4)]
    assert told[-1] == "aclose"


def test_a_session_is_closed_once_in_the_process_that_holds_it():
    closed = []

    class Held(Environment):
        def prompts(self, split):
            return []

        def open(self, prompt):
            return prompt.id

        def evaluate(self, episodes):
            return [1.0] * len(episodes)

        def close(self, session):
            closed.append(session)

    host = EnvironmentHost(Held())
    host.call("open", [(name, Prompt(messages="?", id=name)) for name in "ab"])
    host.call("close", ["a"])
    host.call("close", ["a"])
    host.end()
    assert closed == ["a", "b"]


@pytest.mark.slow
def test_a_session_is_not_closed_while_a_cancelled_call_cleans_up(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        await environment.open(prompted("a"))
        caller = asyncio.create_task(environment.evaluate(replying("hang", session="a")))
        await environment.evaluate(replying("number 1", session="unknown"))  # the caller's call has begun
        caller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller
        await environment.close(["a"])

    run(file, story, name="Sessions", options={"log": str(log)})
    assert log.read_text().splitlines() == ["open a", "judged a", "close a", "aclose"]


@pytest.mark.slow
def test_a_session_that_opens_too_late_is_an_error_and_the_others_are_open(file, tmp_path):
    log = tmp_path / "log"

    async def story(environment):
        return await environment.open(prompted("a", "hang", "b"))

    (a, hang, b), incidents = run(file, story, name="Sessions", options={"log": str(log)}, deadline=1.0)
    assert (a, b) == (SessionStart(), SessionStart())
    assert hang.error.endswith("no answer to 'open' within 1 s; cancelled")
    assert kinds(incidents) == ["deadline"]
    assert sorted(log.read_text().splitlines()) == ["aclose", "close a", "close b", "open a", "open b"]


@pytest.mark.slow
@pytest.mark.parametrize("closes", ["fine", "raises", "hangs"])
def test_an_environment_is_closed_once_at_the_end(file, tmp_path, closes):
    log = tmp_path / "log"

    async def story(environment):
        await environment.evaluate(replying("number 1"))

    begun = time.monotonic()
    run(file, story, options={"log": str(log), "closes": closes})
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
        run(file, story, name="Odd", options=attributes)


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
    assert finished(hosted.evaluate(replying("a", "b"))) == [Judgement(reward=1.0)] * 2
    finished(hosted.aclose())
    assert judge.closed
