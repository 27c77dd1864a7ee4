"""Environments run in child processes; a failure affects only the feedback that caused it."""

import asyncio
import math
import os
import pickle
import signal
import textwrap
from datetime import date
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from killing import left_after

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Episode, Feedback, Judgement, Prompt
from grpo_core.environments.feedback import as_feedback
from grpo_core.environments.host import made
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.installed import PluginSelection

SCENES = """
    import asyncio, os, signal, subprocess, sys, time
    import grpo_core as grpo

    class Scenes(grpo.Environment):
        '''Does what the reply says.'''

        max_turns = 3

        def __init__(self, mode="fine"):
            self.mode = mode
            self.calls = 0
            if mode == "cannot be made":
                raise RuntimeError("no such table")
            if mode == "leaves":
                raise SystemExit(0)
            if mode == "dies":
                print("about to leave")
                sys.stdout.flush()
                os._exit(7)
            if mode == "dies once":
                self.die_once("made")

        def die_once(self, of):
            try:
                os.close(os.open(f"{__file__}.{of}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

        def prompts(self, split):
            prompts = [grpo.Prompt(messages=f"{split} {i}", answer=str(i)) for i in range(3)]
            match self.mode:
                case "dies once": self.die_once("asked")
                case "raises": raise OSError("the disk is gone")
                case "exits": raise SystemExit(2)
                case "yields": return iter(prompts)
                case "yields without end":
                    return (grpo.Prompt(messages="x", id=str(i)) for i, _ in enumerate(iter(int, 1)))
                case "no prompt": prompts[1] = "text"
                case "no message": prompts[1] = grpo.Prompt(messages=[])
                case "bad message": prompts[1] = grpo.Prompt(messages=["hello"])
                case "same ids": prompts = [grpo.Prompt(messages="x", id="a")] * 2
                case "local class": prompts[1] = grpo.Prompt(messages="x", answer=Scenes())
                case "lambda": prompts[1] = grpo.Prompt(messages="x", answer=lambda: 1)
            return prompts

        def evaluate(self, episodes):
            self.calls += 1
            results = [self.one(e.reply) for e in episodes]
            match self.mode:
                case "one too many": results += [0.0]
                case "always one": results = [1.0]
                case "at most 32": results = results[:32]
                case "text": results = "good"
                case "dictionaries": results = [{"reward": 1.0} for _ in results]
                case "no batches" if len(results) > 1: raise RuntimeError("CUDA out of memory")
            return results

        def one(self, reply):
            match reply:
                case "raise": raise KeyError("gold")
                case "die": os.kill(os.getpid(), signal.SIGSEGV)
                case "hang":
                    while True: pass
                case "leave": raise SystemExit(2)
                case "nan": return float("nan")
                case "text": return "1.0"
                case "start": return float(subprocess.Popen(["sleep", "1234"]).pid)
                case "calls": return float(self.calls)
                case "pid": return float(os.getpid())
                case "cuda": return float(os.environ["CUDA_VISIBLE_DEVICES"] == "")
                case "more": return grpo.Feedback(done=False, messages="go on", metrics={"a": True})
            return 1.0

        def solve(self, prompt):
            if self.mode == "cannot solve": raise KeyError(prompt.id)
            return prompt.answer

    class Groups(Scenes):
        needs_group = True

        def evaluate(self, episodes):
            sizes = {e.group: sum(o.group == e.group for o in episodes) for e in episodes}
            if any(size != 2 for size in sizes.values()):
                raise ValueError("half a group")
            return super().evaluate(episodes)

    class Judged(Scenes):
        async def evaluate(self, episodes):
            if not hasattr(self, "gate"):
                self.gate = asyncio.Semaphore(2)  # works as long as the loop stays the same
            return await asyncio.gather(*(self.later(e) for e in episodes))

        async def later(self, episode):
            if episode.reply == "leave":
                del self.gate
                return self.one(episode.reply)
            async with self.gate:
                await asyncio.sleep(0)
                return self.one(episode.reply)

    class Bare:
        def prompts(self, split):
            return [grpo.Prompt(messages="1+1=", answer="2")]
"""


def at(code, method):
    """The place of a line of SCENES, as errors show it."""
    lines = textwrap.dedent(SCENES).splitlines()
    return f"scenes.py:{next(number for number, line in enumerate(lines, 1) if code in line)} in {method}"


RAISES, BATCH = at('case "raise"', "one"), at('case "no batches"', "evaluate")


@pytest.fixture
def scenes(tmp_path):
    file = tmp_path / "scenes.py"
    file.write_text(textwrap.dedent(SCENES))
    return str(file)


def episodes(*replies, group="g"):
    return [
        Episode(prompt=Prompt(messages="?"), messages=({"role": "assistant", "content": reply},), group=group)
        for reply in replies
    ]


def run(scenes, story, *, name="Scenes", deadline=30.0, log=None, **options):
    """Tell a story with a running environment."""

    async def main():
        config = EnvironmentConfig(deadline=deadline)
        spec = EnvironmentSpec(task="play", env=f"{scenes}:{name}", options=options, config=config, log=log)
        process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
        try:
            return await story(process)
        finally:
            await process.aclose()

    return asyncio.run(main())


# ---------------------------------------------------------------------------------- results


def test_results_become_feedback():
    class Exact:
        def __float__(self):
            return 0.25

    given = [1, True, 0.5, Exact(), None, Feedback(reward=2, metrics={"form": 1}), Feedback(error="no judge")]
    assert as_feedback(given, 7, "who") == [
        Judgement(reward=1.0),
        Judgement(reward=1.0),
        Judgement(reward=0.5),
        Judgement(reward=0.25),
        Judgement(),
        Judgement(reward=2.0, metrics={"form": 1.0}),
        Judgement(error="no judge"),
    ]
    assert type(as_feedback([True], 1, "who")[0].reward) is float
    assert as_feedback((float(x) for x in range(2)), 2, "who") == [
        Judgement(reward=0.0),
        Judgement(reward=1.0),
    ]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e300, 10**400])
@pytest.mark.parametrize(
    "wrap", [float, lambda reward: Feedback(reward=reward, done=False, messages="go on")]
)
def test_a_non_finite_reward_is_unscored(reward, wrap):
    if reward == 10**400:
        wrap = int
    (feedback,) = as_feedback([wrap(reward)], 1, "who")
    assert feedback.reward is None
    assert feedback.done
    told = math.inf if reward == 10**400 else reward
    assert feedback.error == f"reward is {told}, expected a number between -1e+300 and 1e+300"
    assert as_feedback([9e299], 1, "who") == [Judgement(reward=9e299)]


def test_an_error_with_a_reward_is_unscored():
    assert as_feedback([Feedback(reward=1.0, error="judge away")], 1, "who") == [
        Judgement(error="judge away")
    ]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1.0], "who: evaluate returned 1 results for 2 episodes"),
        ([1.0, 1.0, 1.0], "who: evaluate returned 3 results for 2 episodes"),
        (None, "who: evaluate returned NoneType, expected one result per episode"),
        (1.0, "who: evaluate returned float, expected one result per episode"),
        ("ab", "who: evaluate returned str, expected one result per episode"),
        ([1.0, "0.5"], "who: evaluate returned '0.5' (str), expected a float, a Feedback or None"),
        ([1.0, [1.0]], "who: evaluate returned [1.0] (list), expected a float, a Feedback or None"),
        ([[1.0, 2.0]] * 2, "who: evaluate returned [1.0, 2.0] (list), expected a float, a Feedback or None"),
        ([np.ones(2)] * 2, "who: evaluate returned array([1., 1.]) (ndarray), expected a float, a Feedback"),
        (
            [Feedback(done=False, messages=[{"role": "user", "content": "on", "at": date(2026, 1, 1)}])] * 2,
            "who: evaluate returned messages that no model can read: a message has the date datetime.date(",
        ),
        (
            [Feedback(done=False, messages=[{"role": "user", "content": "on", "p": [math.nan]}])] * 2,
            "who: evaluate returned messages that no model can read: a message has the number nan; expected",
        ),
        (
            [Feedback(done=False, messages=[{"role": "user", "content": "on", "of": {1: 2}}])] * 2,
            "who: evaluate returned messages that no model can read: a message has the key 1; expected",
        ),
        (
            [1.0, Feedback(done=False, messages=["on"])],
            "who: evaluate returned messages that no model can read: message 1 is 'on'; expected one such as",
        ),
    ],
)
def test_an_invalid_result_is_an_error_that_shows_it(results, message):
    with pytest.raises(PluginError) as caught:
        as_feedback(results, 2, "who")
    assert str(caught.value).startswith(message)


NUMBERS = {
    "numpy's float": (np.float32(0.25), 0.25),
    "numpy's whole number": (np.int64(3), 3.0),
    "numpy's bool": (np.bool_(True), 1.0),
    "a bool": (True, 1.0),
    "a decimal": (Decimal("0.25"), 0.25),
    "a fraction": (Fraction(1, 4), 0.25),
    "torch's number": (torch.tensor(0.25), 0.25),
}
NO_NUMBERS = {
    "NaN": (math.nan, "nan"),
    "infinite": (-math.inf, "-inf"),
    "numpy's NaN": (np.float32("nan"), "nan"),
    "a decimal NaN": (Decimal("sNaN"), "Decimal('sNaN')"),
    "too large for a mean": (1e308, "1e+308"),
    "too large for a float": (10**400, "inf"),
    "None": (None, "None"),
    "a text": ("good", "'good'"),
    "complex": (1j, "1j"),
    "several numbers": (torch.ones(2), "tensor([1., 1.])"),
    "an array": (np.ones(3), "array([1., 1., 1.])"),
    "a list": ([0.5], "[0.5]"),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_metric_and_a_reward_may_be_any_kind_of_number(kind):
    given, number = NUMBERS[kind]
    first, second = as_feedback([Feedback(reward=1.0, metrics={"speed": given}), given], 2, "who")
    assert first == Judgement(reward=1.0, metrics={"speed": number})
    assert second == Judgement(reward=number)
    assert {type(first.metrics["speed"]), type(second.reward)} == {float}


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_a_metric_that_is_not_a_number_is_left_out_and_its_reward_stays(kind):
    """A description of a reply must not decide whether the reply counts."""
    given, shown = NO_NUMBERS[kind]
    metrics = {"speed": given, "form": 1.0}
    again = Feedback(reward=0.5, done=False, messages="go on", metrics=metrics)
    first, second = as_feedback([Feedback(reward=1.0, metrics=metrics), again], 2, "who")
    assert (first.reward, first.error, first.metrics) == (1.0, None, {"form": 1.0})
    assert (second.reward, second.done, second.metrics) == (0.5, False, {"form": 1.0})
    assert list(first.left_out) == ["speed"]
    assert first.left_out["speed"].startswith(shown)


@pytest.mark.parametrize("given", [None, [1.0], 0.5])
def test_metrics_without_names_are_left_out_as_a_whole(given):
    (feedback,) = as_feedback([Feedback(reward=1.0, metrics=given)], 1, "who")
    assert feedback == Judgement(reward=1.0, left_out={"metrics": repr(given)})


# ---------------------------------------------------------------------------------- prompts


def test_prompts_are_completed(scenes):
    host = made("play", f"{scenes}:Scenes", {}, plugins=PluginSelection(allow=()))
    first, second, _ = pickle.loads(host.prompts("train"))
    assert first == Prompt(
        messages=({"role": "user", "content": "train 0"},), answer="0", id="0", environment="play"
    )
    assert second.id == "1"
    assert host.solve([first, second]) == ["0", "1"]


def test_prompts_may_be_yielded(scenes):
    host = made("play", f"{scenes}:Scenes", {"mode": "yields"}, plugins=PluginSelection(allow=()))
    assert [prompt.id for prompt in pickle.loads(host.prompts("train"))] == ["0", "1", "2"]


def test_prompts_are_counted_while_they_are_read(scenes, monkeypatch, capsys):
    monkeypatch.setattr("grpo_core.environments.host.COUNTED", 0.0)
    host = made("play", f"{scenes}:Scenes", {"mode": "yields"}, plugins=PluginSelection(allow=()))
    host.prompts("train")
    counted = [line.partition("prompts('train'): ")[2] for line in capsys.readouterr().out.splitlines()]
    assert counted == ["1 prompts so far", "2 prompts so far", "3 prompts so far"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raises", f"prompts('train') raised {at('OSError', 'prompts')}: OSError: the disk is gone"),
        ("exits", f"prompts('train') raised {at('SystemExit(2)', 'prompts')}: SystemExit: 2"),
        ("no prompt", "prompts('train')[1] is str, expected grpo_core.Prompt"),
        ("no message", "prompts('train')[1]: prompt '1': there are no messages; expected at least one"),
        ("bad message", "prompts('train')[1]: prompt '1': message 1 is 'hello'; expected one such as"),
        ("yields without end", "prompts('train'): yields more than 100,000 prompts; return a sequence"),
        ("same ids", "prompts('train'): two prompts have the id 'a'; ids must be unique"),
        ("lambda", "prompts('train'): a prompt cannot be sent to the trainer's process; put plain data"),
    ],
)
def test_bad_prompts_are_errors_that_name_task_plugin_and_prompt(scenes, mode, message):
    host = made("play", f"{scenes}:Scenes", {"mode": mode}, plugins=PluginSelection(allow=()))
    with pytest.raises(PluginError) as caught:
        host.prompts("train")
    who = f"task 'play': environment '{scenes}:Scenes' of plugin 'scenes.py' (a file): "
    assert str(caught.value).startswith(who + message)


def test_an_environment_without_a_method_is_refused(scenes):
    with pytest.raises(PluginError, match=r"Bare has no method 'evaluate'"):
        made("play", f"{scenes}:Bare", {}, plugins=PluginSelection(allow=()))


# ---------------------------------------------------------------------------------- in a process


@pytest.mark.slow
def test_an_environment_runs_in_a_process_without_cuda(scenes):
    async def story(process):
        assert isinstance(await process.evaluate(episodes("cuda")), list)
        (here, there), (cuda,) = (
            await process.evaluate(episodes("x", "pid")),
            await process.evaluate(episodes("cuda")),
        )
        assert here == cuda == Judgement(reward=1.0)
        assert there.reward != os.getpid()
        assert process.about.max_turns == 3
        assert process.starts == 1
        prompts = await process.prompts("validation")
        assert [prompt.environment for prompt in prompts] == ["play"] * 3
        assert await process.solve(prompts) == ["0", "1", "2"]
        (more,) = await process.evaluate(episodes("more"))
        assert more == Judgement(done=False, messages="go on", metrics={"a": 1.0})
        environment: EnvironmentClient = process
        assert await environment.evaluate([]) == []

    run(scenes, story)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Scenes", "Judged"])
def test_only_the_culprits_lose_their_rewards(scenes, name):
    async def story(process):
        replies = ["a", "raise", "b", "die", "leave", "nan", "c"]
        results = await process.evaluate(episodes(*replies))
        assert [v.reward for v in results] == [1.0, None, 1.0, None, None, None, 1.0]
        errors = dict(zip(replies, [v.error for v in results], strict=True))
        assert errors["raise"] == f"{RAISES}: KeyError: 'gold'"
        assert "environment of task 'play' died (killed by SIGSEGV)" in errors["die"]
        assert "SystemExit: 2" in errors["leave"]
        assert errors["nan"].startswith("reward is nan")
        assert "in one\n" in results[1].fault.traceback
        assert results[1].fault.kind == "KeyError"
        # what asyncio.gather leaves behind when one of its tasks raises goes on, and dies a second time
        assert process.starts == (2 if name == "Scenes" else 3), "only a death needs a new process"

    run(scenes, story, name=name)


@pytest.mark.slow
def test_an_environment_that_hangs_is_killed_at_its_deadline(scenes):
    async def story(process):
        results = await process.evaluate(episodes("a", "hang", "b"))
        assert [v.reward for v in results] == [1.0, None, 1.0]
        assert results[1].error == "environment of task 'play': no answer to 'evaluate' within 0.5 s; killed"
        assert process.starts == 3

    run(scenes, story, deadline=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "replies", "message"),
    [
        ("one too many", 1, "evaluate returned 2 results for 1 episodes"),
        ("one too many", 40, "evaluate returned 41 results for 40 episodes"),
        ("always one", 40, "evaluate returned 1 results for 40 episodes"),
        ("at most 32", 40, "evaluate returned 32 results for 40 episodes"),
        ("text", 40, "evaluate returned str, expected one result per episode"),
        ("dictionaries", 2, "evaluate returned {'reward': 1.0} (dict), expected a float, a Feedback or None"),
    ],
)
def test_results_of_a_wrong_number_or_type_are_fatal_although_single_episodes_would_work(
    scenes, mode, replies, message
):
    async def story(process):
        with pytest.raises(PluginError) as caught:
            await process.evaluate(episodes(*["a"] * replies))
        who = f"task 'play': environment '{scenes}:Scenes' of plugin 'scenes.py' (a file): "
        assert str(caught.value) == who + message

    run(scenes, story, mode=mode)


# ---------------------------------------------------------------------------------- incidents


def heard(scenes, story, **options):
    """Return the kinds and messages of the incidents of a story."""
    incidents = []
    with reported_to(incidents.append):
        run(scenes, story, **options)
    assert {incident.component for incident in incidents} <= {"environment of task 'play'"}
    return incidents


@pytest.mark.slow
def test_a_batch_that_fails_while_its_parts_succeed_is_reported(scenes):
    async def story(process):
        for _ in range(2):
            assert await process.evaluate(episodes(*"abcd")) == [Judgement(reward=1.0)] * 4
        assert await process.evaluate(episodes("a")) == [Judgement(reward=1.0)]

    incidents = heard(scenes, story, mode="no batches")
    assert [(i.kind, i.message) for i in incidents] == [
        (
            "batch_failed",
            f"batches of 4 fail ({BATCH}: RuntimeError: CUDA out of memory); 4 of 4 single calls succeed",
        )
    ] * 2
    assert "in evaluate" in incidents[0].fault.traceback


@pytest.mark.slow
def test_what_fails_is_reported_with_its_cause(scenes):
    async def story(process):
        await process.evaluate(episodes("raise"))
        await process.evaluate(episodes("die"))
        await process.evaluate(episodes("a", "raise", "b"))

    first, death, single, batch = heard(scenes, story)
    assert (first.kind, first.message) == ("call_failed", f"{RAISES}: KeyError: 'gold'")
    assert "in one\n" in first.fault.traceback
    assert (death.kind, death.message) == ("died", "died (killed by SIGSEGV); it is started again")
    assert (single.kind, single.message) == (first.kind, first.message)
    assert batch.message == f"batches of 3 fail ({RAISES}: KeyError: 'gold'); 2 of 3 single calls succeed"


@pytest.mark.slow
def test_an_environment_that_dies_between_two_calls_is_reported_once(scenes):
    async def story(process):
        await process.evaluate(episodes("a"))
        os.kill(process._child.pid, signal.SIGKILL)
        await process._child.died()
        assert await process.evaluate(episodes("a")) == [Judgement(reward=1.0)]

    (death,) = heard(scenes, story)
    assert (death.kind, death.message) == ("died", "died (killed by SIGKILL); it is started again")


@pytest.mark.slow
def test_an_environment_that_hangs_is_reported(scenes):
    async def story(process):
        await process.evaluate(episodes("hang"))

    (late,) = heard(scenes, story, deadline=0.5)
    assert late.kind == "deadline"
    assert late.message == "no answer to 'evaluate' within 0.5 s; killed; it is started again"


# ---------------------------------------------------------------------------------- in a process, again


@pytest.mark.slow
@pytest.mark.parametrize("end", ["a", "die", "hang"])
def test_what_an_environment_has_started_never_outlives_it(scenes, end):
    async def story(process):
        ((started,), _) = await process.evaluate(episodes("start")), await process.evaluate(episodes(end))
        return int(started.reward)

    pid = run(scenes, story, deadline=1.0)
    assert left_after([pid], 5.0) == []


@pytest.mark.slow
def test_a_single_episode_is_not_tried_twice(scenes):
    async def story(process):
        await process.evaluate(episodes("raise"))
        assert await process.evaluate(episodes("calls")) == [Judgement(reward=2.0)]

    run(scenes, story)


@pytest.mark.slow
def test_groups_that_are_compared_stay_whole(scenes):
    async def story(process):
        await process.start()
        batch = episodes("a", "raise", group="1") + episodes("b", "c", group="2")
        assert [v.reward for v in await process.evaluate(batch)] == [None, None, 1.0, 1.0]

    run(scenes, story, name="Groups")


@pytest.mark.slow
def test_an_environment_that_always_fails_is_not_tried_forever(scenes):
    async def story(process):
        results = await process.evaluate(episodes(*["raise"] * 50))
        assert [v.error for v in results] == [f"{RAISES}: KeyError: 'gold'"] * 50
        assert await process.evaluate(episodes("calls")) == [Judgement(reward=22.0)]

    run(scenes, story)


@pytest.mark.slow
def test_a_call_whose_caller_is_gone_ends_at_its_deadline_and_the_next_one_follows(scenes):
    async def story(process):
        await process.start()
        hanging = asyncio.create_task(process.evaluate(episodes("hang")))
        await asyncio.sleep(0)  # the call is on its way
        hanging.cancel()
        assert await process.evaluate(episodes("a")) == [Judgement(reward=1.0)]
        assert process.starts == 2

    run(scenes, story, deadline=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "cannot be made"},
            f"cannot be made: {at('no such table', '__init__')}: RuntimeError: no such",
        ),
        ({"mode": "leaves"}, f"cannot be made: {at('SystemExit(0)', '__init__')}: SystemExit: 0"),
        ({"mood": "fine"}, "has no option 'mood'. Did you mean 'mode'? Its options: mode='fine'"),
        ({"mode": "dies"}, "task 'play': the environment cannot be started: environment of task 'play' died"),
    ],
)
def test_an_environment_that_cannot_be_made_is_fatal(scenes, tmp_path, options, message):
    async def story(process):
        with pytest.raises(PluginError) as caught:
            await process.start()
        assert message in str(caught.value)
        if "dies" in options.values():
            assert "about to leave" in str(caught.value), "what it printed last is shown"
            assert process.starts == 3

    run(scenes, story, log=tmp_path / "play.log", **options)


@pytest.mark.slow
def test_an_environment_that_is_killed_while_it_starts_or_offers_prompts_is_started_again(scenes):
    async def story(process):
        await process.start()
        assert process.starts == 2
        assert len(await process.prompts("train")) == 3
        assert process.starts == 3

    run(scenes, story, mode="dies once")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local class", "lambda"])
def test_prompts_that_cannot_leave_their_process_are_an_error(scenes, mode):
    async def story(process):
        with pytest.raises(PluginError, match="put plain data into answer and info"):
            await process.prompts("train")

    run(scenes, story, mode=mode)


@pytest.mark.slow
def test_a_solution_that_raises_is_an_error(scenes):
    async def story(process):
        with pytest.raises(PluginError, match=r"solve raised scenes.py:\d+ in solve: KeyError: '1'"):
            await process.solve((await process.prompts("train"))[1:])

    run(scenes, story, mode="cannot solve")
