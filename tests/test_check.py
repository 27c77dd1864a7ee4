"""``grpo-core check``, and what an environment has to be for training on it to mean something."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import attrs
import forks
import pytest

import grpo_core as grpo
from grpo_core.cli import make_app
from grpo_core.contracts.errors import ConfigError, PluginError, SelectionError
from grpo_core.plugins.host import Kind, PluginHost
from grpo_core.testing import run
from grpo_plugin_devkit import check, decoding
from grpo_plugin_devkit.contracts import Noted, finding_of
from grpo_plugin_devkit.environments import check_environment, environment_findings
from grpo_plugin_devkit.wheels import CHECK as WHEEL

GRPO = Path(sys.executable).with_name("grpo-core")
MADE = iter(range(10**6))


class Words(grpo.Environment):
    """Keeps the contract."""

    def prompts(self, split):
        numbers = range(40) if split == "train" else range(40, 50)
        return [grpo.Prompt(messages=f"Spell backwards: w{n}x", answer=f"x{n}w"[::-1][::-1]) for n in numbers]

    def evaluate(self, episodes):
        return [self.judge(e.reply, e.prompt.answer) for e in episodes]

    def judge(self, reply, answer):
        return float(reply == answer)


class NotANumber(Words):
    """Has a field in its prompts that does not equal itself."""

    def prompts(self, split):
        return [attrs.evolve(prompt, info={"level": float("nan")}) for prompt in super().prompts(split)]


class Empty(Words):
    def prompts(self, split):
        return []


class Shuffled(Words):
    """Other prompts each time."""

    def prompts(self, split):
        made = next(MADE)
        return [grpo.Prompt(messages=f"{made} {n}", answer=str(n)) for n in range(9)]


class Mean(Words):
    """Its own solution gets half of what it declares as a success."""

    success = 1.0

    def judge(self, reply, answer):
        return 0.5 * (reply == answer)


class Gullible(Words):
    """Any reply in which the answer's first letter stands is right."""

    def judge(self, reply, answer):
        return float(reply == answer or "x" in reply or "reward" in reply)


class Fragile(Words):
    """Breaks on a reply that it cannot read."""

    def judge(self, reply, answer):
        return float(reply == answer) if reply[0] else 0.0


class Silent(Words):
    def judge(self, reply, answer):
        return float(reply == answer) if reply.strip() else None


class Odd(Words):
    """Divides by the length of a reply, which may be empty."""

    def judge(self, reply, answer):
        share = 1.0 if reply else float("nan")
        return grpo.Feedback(reward=float(reply == answer), metrics={"share": share})


class Mute(Words):
    def judge(self, reply, answer):
        raise KeyError("gold")


class Relative(Words):
    """Compares the episodes of a batch, though they are of different groups."""

    def evaluate(self, episodes):
        longest = max(len(e.reply) for e in episodes)
        return [float(e.reply == e.prompt.answer) + (len(e.reply) == longest) / 9 for e in episodes]


class RelativeInGroups(Words):
    needs_group = True

    def evaluate(self, episodes):
        sizes = {e.group: sum(len(o.reply) for o in episodes if o.group == e.group) for e in episodes}
        return [float(e.reply == e.prompt.answer) - 1e-6 * (sizes[e.group] % 7) / 9 + 1e-6 for e in episodes]


class Moody(Words):
    """As a judge that is asked for an opinion."""

    def judge(self, reply, answer):
        return float(reply == answer) + next(MADE) * 1e-9


class Sessions(Words):
    """The data that judges an episode is in its session, which is opened once and closed once."""

    live: dict = {}  # noqa: RUF012

    def open(self, prompt):
        self.live[prompt.id] = self.live.get(prompt.id, 0) + 1
        return SimpleNamespace(answer=prompt.answer, id=prompt.id)

    def evaluate(self, episodes):
        return [self.judge(e.reply, e.session.answer) for e in episodes]

    def close(self, session):
        self.live[session.id] -= 1


class TwoTurns(Words):
    """Asks for the answer once more; each time it is worth half."""

    max_turns = 2
    needs_group = True

    def solve(self, prompt):
        return prompt.answer + ("!" if prompt.messages[-1]["content"] == "louder" else "")

    def evaluate(self, episodes):
        return [self.feedback(e, e.prompt.answer + "!" * e.turn) for e in episodes]

    def feedback(self, episode, answer):
        messages = () if episode.turn else "louder"
        return grpo.Feedback(reward=(episode.reply == answer) / 2, done=bool(episode.turn), messages=messages)


class SameBeginning(TwoTurns):
    """The subject of an episode comes in its later turns, and is in the answer."""

    def prompts(self, split):
        return [grpo.Prompt(messages="Ready?", answer=p.answer, id=p.answer) for p in super().prompts(split)]


class Ranked(Words):
    """Orders the replies of a group, from 0 for the worst to 1 for the best."""

    needs_group = True

    def evaluate(self, episodes):
        return [self.rank(e, [o for o in episodes if o.group == e.group]) for e in episodes]

    def rank(self, episode, group):
        mine = self.quality(episode)
        return sum(self.quality(other) < mine for other in group) / (len(group) - 1)

    def quality(self, episode):
        return sum(one == other for one, other in zip(episode.reply, episode.prompt.answer, strict=False))


class RankedBackwards(Ranked):
    """Prefers whatever is wrong."""

    def quality(self, episode):
        return -super().quality(episode)


class Points(Words):
    """Pays up to ten points, and says nothing about success."""

    def judge(self, reply, answer):
        return 10.0 * (reply == answer)


class Praise(Words):
    """Pays the same for everything."""

    def judge(self, reply, answer):
        return 10.0


class Shared(Words):
    """Gives the results of its first 32 episodes, as does an array of a fixed size."""

    def evaluate(self, episodes):
        return super().evaluate(episodes)[:32]


class TooFew(Words):
    def evaluate(self, episodes):
        return super().evaluate(episodes)[:1]


class BatchBug(Words):
    """Fails for every batch, and succeeds for single episodes."""

    def evaluate(self, episodes):
        if len(episodes) > 1:
            raise RuntimeError("CUDA out of memory: the reward model cannot take this batch")
        return super().evaluate(episodes)


class Speechless(TwoTurns):
    """Knows how to begin."""

    def solve(self, prompt):
        return super().solve(prompt) if len(prompt.messages) == 1 else None


def findings(make):
    return {finding.check: finding for finding in environment_findings(make)}


def failed(make):
    return {name: finding.result for name, finding in findings(make).items() if finding.outcome == "failed"}


# ---------------------------------------------------------------------------------- environments


@pytest.mark.parametrize(
    "kept", [Words, NotANumber, RelativeInGroups, Sessions, TwoTurns, SameBeginning, Ranked, Points]
)
def test_an_environment_that_keeps_its_contract_passes_every_check(kept):
    assert {name: (f.outcome, f.result) for name, f in findings(kept).items() if f.outcome != "passed"} == {}
    assert set(Sessions.live.values()) <= {0}, "each session is closed, and once"


@pytest.mark.parametrize(
    ("broken", "where", "told"),
    [
        (Empty, "prompts to train on", 'prompts("train") is empty'),
        (Shuffled, "the same prompts each time", "9 prompts of which 9 differ"),
        (Mean, "a solution gets full marks", "its own solution: reward 0.5, expected at least 1.0, which"),
        (
            Praise,
            "a solution gets full marks",
            "reward 10, expected more than for 'I do not know.': reward 10",
        ),
        (RankedBackwards, "a solution gets full marks", "'I do not know.' in its group: reward 0.5"),
        (Shared, "a full batch is evaluated at once", "evaluate returned 32 results for"),
        (TooFew, "a full batch is evaluated at once", "evaluate returned 1 results for"),
        (BatchBug, "a full batch is evaluated at once", "RuntimeError: CUDA out of memory"),
        (Gullible, "rubbish does not get full marks", "full marks, as for 8 of 8 prompts"),
        (Fragile, "every reply is scored", "IndexError"),
        (Odd, "every reply is scored", "reply '': the metric 'share' is nan, expected a finite number"),
        (Silent, "every reply is scored", "reply '': unscored (None)"),
        (Mute, "a reply is scored", "KeyError"),
        (Relative, "the place in the batch makes no difference", "judge each episode by itself"),
    ],
)
def test_a_broken_environment_is_reported_with_place_and_advice(broken, where, told):
    found = failed(broken)
    assert told in found.pop(where)
    assert not found or broken in (Fragile, Shared, TooFew), (
        "a wrong number fails in whichever check it occurs"
    )
    with pytest.raises(AssertionError, match=where):
        check_environment(broken)


def test_checks_stop_when_a_reply_is_unscored():
    assert list(findings(Mute)) == [
        "prompts to train on",
        "held-out prompts",
        "the same prompts each time",
        "a reply is scored",
    ]


def test_a_judge_may_be_moody_which_is_noted():
    found = findings(Moody)
    assert found["the same reply gets the same reward"].outcome == "noted"
    assert found["the place in the batch makes no difference"].outcome == "noted"


def test_a_solution_that_ends_too_early_is_noted():
    finding = findings(Speechless)["a solution gets full marks"]
    assert (finding.outcome, finding.result) == (
        "noted",
        "solve(prompt) knows how to begin, but not how to end",
    )


def test_held_out_prompts_that_are_trained_on_are_noted():
    class Same(Words):
        def prompts(self, split):
            return super().prompts("train")

    assert "40 of 40 are trained on as well" in findings(Same)["held-out prompts"].result


# ---------------------------------------------------------------------------------- by name


def checked(capsys, *arguments):
    """The status and what was printed."""
    status = make_app()(["check", *map(str, arguments)], result_action="return_value")
    return status, capsys.readouterr().out


def test_a_sampler_with_tasks_in_its_options_needs_their_names(capsys):
    status, told = checked(capsys, "chosen", "--set", 'order=["hard", "easy"]')
    assert status == 1
    assert "there is no task 'hard' to choose" in told
    assert "name them: --task A --task B" in told


def test_a_setting_of_the_section_environment_that_is_not_a_table_is_one_clear_line(capsys):
    with pytest.raises(ConfigError, match="'environment': expected a table, got 'math:copy'"):
        checked(capsys, "math:copy", "--set", "environment=math:copy")


@pytest.mark.long
def test_a_sampler_of_certain_tasks_is_checked_with_them(capsys):
    given = ["--set", 'order=["hard", "easy"]', "--task", "hard", "--task", "easy"]
    status, told = checked(capsys, "chosen", *given)
    assert (status, told.splitlines()[-1]) == (0, "2 passed, 0 failed")


def test_a_sampler_that_breaks_its_contract_is_shown_with_the_shortest_calls(capsys, tmp_path):
    (tmp_path / "few.py").write_text(
        "class TooFew:\n    def sample(self, loaders, request):\n"
        "        return next(iter(loaders.values())).take(request.expected_prompts - 1)\n"
    )
    status, told = checked(capsys, tmp_path / "few.py:TooFew")
    assert status == 1
    assert "FAILED  its contract: sampler 'TooFew' returned" in told
    assert "state = Contract()" in told


@pytest.mark.long
def test_a_sampler_that_raises_is_a_finding_with_its_line(capsys, tmp_path):
    (tmp_path / "deaf.py").write_text(
        "import grpo_core as grpo\nclass Deaf:\n    def sample(self, loaders, request):\n"
        "        return grpo.take_prompts(loaders, [min(loaders)] * request.expected_prompts)\n"
        "    def observe(self, groups):\n        return [g.prompt.task for g in groups]\n"
    )
    status, told = checked(capsys, tmp_path / "deaf.py:Deaf")
    assert status == 1
    assert "FAILED  its contract: AttributeError: 'Prompt' object has no attribute 'task'" in told
    assert "(deaf.py, line 6: return [g.prompt.task for g in groups])" in told
    assert "state.hear_of_groups(" in told
    assert told.splitlines()[-1] == "1 passed, 1 failed"


@pytest.mark.long
def test_a_validation_strategy_is_checked(capsys):
    status, told = checked(capsys, "greedy")
    assert (status, told.splitlines()[-1]) == (0, "8 passed, 0 failed")
    assert f"ok      {WHEEL}: " in told
    with pytest.raises(SelectionError, match="has no option 'n'"):
        checked(capsys, "greedy", "--set", "n=0")


def test_an_unknown_name_suggests_the_nearest_of_any_kind():
    host = PluginHost.discover(allow=[])
    with pytest.raises(PluginError, match=r"no sampler 'round_robbin'\. Did you mean 'round_robin'"):
        check.find(host, "round_robbin")
    with pytest.raises(PluginError, match=r"no sampler 'round_robbin'\. Did you mean 'round_robin'"):
        check.find(host, "round_robbin", "sampler")


def test_the_kind_of_a_file_follows_from_its_methods_or_the_user(tmp_path):
    file = tmp_path / "parts.py"
    file.write_text(
        "class A:\n    def evaluate(self): ...\n\nclass B:\n    def sample(self): ...\n\n"
        "class C:\n    def validate(self): ...\n\ndef make(): return B()\n"
    )
    host = PluginHost.discover(allow=[])
    kinds = [check.find(host, f"{file}:{name}").kind for name in "ABC"]
    assert kinds == ["environment", "sampler", "validation_strategy"]
    with pytest.raises(
        ConfigError, match="name its kind with --kind: environment, dataloader, player, sampler"
    ):
        check.find(host, f"{file}:make")
    assert check.find(host, f"{file}:make", "sampler").kind == "sampler"
    file = tmp_path / "trackers.py"
    file.write_text(
        "import grpo_core as grpo\n\nclass Mine(grpo.Tracker): ...\n\n"
        "@grpo.hookimpl\ndef grpo_trackers():\n    return {'mine': Mine}\n"
    )
    for name in (f"{file}:Mine", f"{file}:mine", "terminal"):
        assert check.find(host, name).kind == "tracker"
    with pytest.raises(ConfigError, match="--kind train: there is no such kind; expected environment"):
        check.find(host, f"{file}:make", "train")


def test_every_kind_that_strangers_write_can_be_checked():
    ours = {"model", "data_plane", "placement", "transport"}
    assert set(check.CHECKED) == set(get_args(Kind)) - ours
    host = PluginHost.discover(allow=[])
    found = {name: check.find(host, name).kind for name in ("torch", "adamw", "local")}
    assert list(found.values()) == ["trainer", "optimizer", "engine"]


def test_a_clause_that_had_nothing_to_check_is_noted_and_not_passed():
    def its_canary():
        raise Noted("there is none")

    found = finding_of("its canary", its_canary)
    assert (found.outcome, found.result) == ("noted", "there is none")


LOSSES = """
import torch

def fine(inputs):
    return -inputs.advantages * inputs.policy_logprobs, {}

def mean(inputs):
    return -(inputs.advantages * inputs.policy_logprobs).mean(), {}

def scalar_metric(inputs):
    return -inputs.advantages * inputs.policy_logprobs, {"mine": inputs.advantages.mean()}

def nothing(inputs):
    return -inputs.advantages * inputs.policy_logprobs.detach(), {}

def overflows(inputs):
    return -inputs.advantages * (inputs.policy_logprobs - inputs.proximal_logprobs).exp(), {}

def by_row_number(inputs):
    return -inputs.advantages * inputs.policy_logprobs * (1 + inputs.rows), {}

def by_batch(inputs):
    centred = inputs.advantages - inputs.advantages.mean()
    return -centred * inputs.policy_logprobs, {}

def by_chance(inputs):
    return -inputs.advantages * inputs.policy_logprobs * torch.rand(()), {}

def overwrites(inputs):
    inputs.advantages.mul_(2)
    return -inputs.advantages * inputs.policy_logprobs, {}

def zeros(groups):
    return [[0.0] * len(group.rollouts) for group in groups]

def too_few(groups):
    return [[0.0] * len(group.rollouts) for group in groups[1:]]

def divides(groups):
    return [[r / 1e-300 for r in group.rewards] for group in groups]

def absolute(groups):
    return [list(group.rewards) for group in groups]

def by_place(groups):
    return [[float(i * differs(group)) for i, _ in enumerate(group.rewards)] for group in groups]

def differs(group):
    return len(set(group.rewards)) > 1

class Counts:
    calls = 0

def changes(groups):
    Counts.calls += 1
    return [[Counts.calls * r if differs(group) else None for r in group.rewards] for group in groups]
"""
FILTERS = """
def fine(group, *, low=0.1):
    done = group.successes(None)
    return "too hard" if done and sum(done) / len(done) < low else None

def says_true(group):
    return max(r.reward or 0.0 for r in group.rollouts) < 1 or None

def says_nothing(group):
    return "" if group.rollouts[0].reward else None

def rejects_all(group):
    return "never good enough"

def adds_up(group):
    return "worth nothing" if sum(group.rewards) == 0 else None

def by_place(group):
    return "the first failed" if not group.rollouts[0].reward else None

def marks(group):
    group.rollouts[0].metrics["seen"] = 1.0

class Counts:
    calls = 0

def by_turns(group):
    Counts.calls += 1
    return f"call {Counts.calls}" if Counts.calls % 3 == 0 else None

def looks_at_parts(group):
    return "no format" if sum(r.metrics["format"] for r in group.rollouts) < 1 else None

async def waits(group):
    return None
"""


@pytest.mark.parametrize(
    ("name", "failed", "told"),
    [
        ("fine", None, "what it rejects: 8 of the 28 groups that were tried"),
        ("looks_at_parts", None, "what it rejects: 0 of the 28 groups that were tried"),
        (
            "says_true",
            "it returns a text that says why or none",
            "it returned bool True; expected a text",
        ),
        ("says_nothing", "it returns a text that says why or none", "it returned '', which says nothing"),
        ("waits", "it returns a text that says why or none", "it returned coroutine"),
        ("rejects_all", "it lets some group pass", "it rejects all 28 groups that were tried"),
        ("adds_up", "it takes groups with unscored rollouts", "TypeError: unsupported operand"),
        ("by_place", "the order within a group does not matter", "in another order"),
        ("marks", "it returns the same each time and changes no group", "it changed the group"),
        ("by_turns", "it returns the same each time and changes no group", "for the same group"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_filters_are_checked(capsys, tmp_path, name, failed, told):
    (tmp_path / "filters.py").write_text(FILTERS)
    status, out = checked(capsys, f"{tmp_path / 'filters.py'}:{name}")
    assert status == (0 if failed is None else 1)
    assert told in out
    assert failed is None or f"FAILED  {failed}: " in out


@pytest.mark.parametrize(("name", "passed"), [("equal_rewards", 7), ("pass_rate", 6), ("mean_length", 6)])
def test_our_filters_keep_their_contract(capsys, name, passed):
    status, out = checked(capsys, name)
    assert (status, out.splitlines()[-1]) == (0, f"{passed} passed, 0 failed, 1 to note")
    assert (f"ok      {WHEEL}: " in out) == (passed == 7), "only the core has files next to its modules"


def test_options_of_a_filter_are_checked_first(capsys):
    status, out = checked(capsys, "pass_rate", "--set", "low=0.9", "--set", "high=0.1")
    assert status == 1
    assert "low is 0.9 and high is 0.1; expected 0 <= low <= high <= 1" in out


TRACKERS = """
import asyncio, sqlite3
import grpo_core as grpo

class Fine(grpo.Tracker):
    def __init__(self, run, name="numbers"):
        self.file = open(run.directory / f"{name}.txt", "a", encoding="utf-8", errors="replace")
    def metrics(self, step, values):
        print(step, dict(values), file=self.file)
    def event(self, event):
        print(type(event).__name__)
    def close(self):
        self.file.close()

class NoTracker:
    def __init__(self, run): ...
    def rollouts(self, step, groups): ...

class Waits(Fine):
    async def metrics(self, step, values): ...

class OneThread(grpo.Tracker):
    def __init__(self, run):
        self.rows = sqlite3.connect(run.directory / "rows.db")
        self.rows.execute("create table rows (step int)")
    def metrics(self, step, values):
        self.rows.execute("insert into rows values (?)", [step])

class WantsLoss(Fine):
    def metrics(self, step, values):
        self.file.write(f"{values['loss']}")

class AllScored(grpo.Tracker):
    def __init__(self, run): ...
    def rollouts(self, step, groups):
        self.mean = sum(sum(group.rewards) for group in groups)

class Begins(Fine):
    def __init__(self, run):
        self.file = open(run.directory / "numbers.txt", "w")

class WantsAStep(grpo.Tracker):
    def __init__(self, run):
        self.last = None
    def metrics(self, step, values):
        self.last = step
    def close(self):
        assert self.last > 0

class Changes(grpo.Tracker):
    def __init__(self, run): ...
    def metrics(self, step, values):
        values.pop("time/step", None)

class Counts(grpo.Tracker):
    def __init__(self, run):
        self.seen = []
    def metrics(self, step, values):
        self.seen.append(step)
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class Forgets(Counts):
    def load_state_dict(self, state): ...

class Tuples(Counts):
    def state_dict(self):
        return {"seen": tuple(self.seen)}
"""


@pytest.mark.parametrize(
    ("name", "failed", "told"),
    [
        ("Fine", None, "7 passed, 0 failed"),
        (
            "NoTracker",
            "its factory makes a tracker",
            "returned NoTracker; expected a subclass of grpo_core.Tracker",
        ),
        ("Waits", "its factory makes a tracker", "metrics is async, and nobody awaits it"),
        (
            "OneThread",
            "it takes every event of a run on a thread of its own",
            "failed in StepEnded: ProgrammingError",
        ),
        ("WantsLoss", "it takes numbers and texts of any kind", "failed in Validated: KeyError: 'loss'"),
        ("AllScored", "it takes numbers and texts of any kind", "unsupported operand"),
        ("Begins", "it goes on where a resumed run does", "and has 0 after it was resumed"),
        ("WantsAStep", "it takes a run that fails at once", "failed in close(): TypeError"),
        ("Changes", "it changes nothing that others see", "it changed a StepEnded"),
        ("Counts", None, "7 passed, 0 failed"),
        ("Forgets", "its state survives a checkpoint", "{'seen': []} after load_state_dict() of {'seen': ["),
        ("Tuples", "its state survives a checkpoint", "returned a value that JSON would change"),
    ],
)
def test_trackers_are_checked(capsys, tmp_path, name, failed, told):
    (tmp_path / "trackers.py").write_text(TRACKERS)
    status, out = checked(capsys, f"{tmp_path / 'trackers.py'}:{name}")
    assert status == (0 if failed is None else 1)
    assert told in out
    assert failed is None or f"FAILED  {failed}: " in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "passed"), [("files", 8), ("terminal", 8), ("report", 8), ("./examples/tracker.py:Csv", 7)]
)
def test_the_trackers_of_the_core_keep_their_contract(capsys, name, passed):
    status, out = checked(capsys, name.replace("./", f"{Path(__file__).parent.parent}/"))
    assert (status, out.splitlines()[-1]) == (0, f"{passed} passed, 0 failed")
    assert (f"ok      {WHEEL}: " in out) == (passed == 8), "only the core has files next to its modules"


EACH = "it returns one loss and one of each metric for each token"


@pytest.mark.parametrize(
    ("name", "failed", "told"),
    [
        ("fine", None, "6 passed, 0 failed, 1 to note"),
        ("mean", EACH, "losses have shape (), expected (18,)"),
        ("scalar_metric", EACH, "metric 'mine' has shape (), expected (18,)"),
        ("nothing", "it trains the policy", "does not depend on policy_logprobs"),
        (
            "overflows",
            "extreme inputs have finite losses and gradients",
            "the loss is not finite; limit a log ratio",
        ),
        ("by_row_number", "the order of rows does not matter", "rows in another order: the losses differ"),
        (
            "by_batch",
            "it does not matter how rows are split",
            "in their own micro-batch: the losses diff",
        ),
        (
            "by_chance",
            "it returns the same each time and changes no input",
            "a second call: the losses differ",
        ),
        (
            "overwrites",
            "it returns the same each time and changes no input",
            "it changed its input advantages",
        ),
        ("zeros", None, "5 passed, 0 failed"),
        (
            "too_few",
            "it returns a finite number or none for each rollout",
            "groups of sizes [4, 4, 4]; expected",
        ),
        ("divides", "extreme rewards have finite advantages", "rollout 0: the advantage is inf"),
        ("absolute", "equal rewards are worth nothing", "four rewards of 1.0 have advantages [1.0, 1.0"),
        ("by_place", "the order within a group does not matter", "in the order [2, 0, 3, 1] they have"),
        ("changes", "it returns the same each time", "for the same groups"),
    ],
)
@pytest.mark.long
def test_losses_and_advantages_are_checked(capsys, tmp_path, name, failed, told):
    (tmp_path / "functions.py").write_text(LOSSES)
    status, printed = checked(capsys, tmp_path / f"functions.py:{name}")
    assert told in printed
    assert status == (0 if failed is None else 1)
    if failed:
        assert f"FAILED  {failed}: " in printed


@pytest.mark.parametrize("name", ["grpo", "group"])
def test_the_losses_and_advantages_of_the_core_keep_their_contracts(capsys, name):
    status, printed = checked(capsys, name)
    assert status == 0, printed
    with pytest.raises(SelectionError, match="has no option 'no_such'"):
        checked(capsys, name, "--set", "no_such=1")


@pytest.mark.parametrize("name", ["custom_loss.py:gspo", "custom_advantage.py:concise"])
@pytest.mark.long
def test_the_examples_keep_their_contracts(capsys, name):
    status, printed = checked(capsys, Path(__file__).parent.parent / "examples" / name)
    assert status == 0, printed


# ---------------------------------------------------------------------------------- as users do it


@pytest.mark.slow
def test_an_environment_that_hangs_or_crashes_is_a_failed_check(tmp_path):
    (tmp_path / "env.py").write_text(
        "import os\nimport grpo_core as grpo\nclass Dies(grpo.Environment):\n"
        "    def prompts(self, split): return [grpo.Prompt(messages='a', answer='b')]\n"
        "    def evaluate(self, episodes): os._exit(11)\n"
    )
    done = forks.grpo(tmp_path, "check", "./env.py:Dies")
    assert done.returncode == 1, done.stderr
    assert "FAILED  a reply is scored" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


PLUGIN = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "grpo-plugin-backwards"
version = "0.1"
dependencies = ["grpo-core>=0.1,<1"]

[project.entry-points.grpo_core]
backwards = "grpo_plugin_backwards"

[tool.setuptools]
py-modules = ["grpo_plugin_backwards"]
""",
    "grpo_plugin_backwards.py": """
import grpo_core as grpo

class Backwards(grpo.Environment):
    def prompts(self, split):
        words = ["alpha", "beta", "gamma"] if split == "train" else ["delta", "omega"]
        return [grpo.Prompt(messages=f"Spell backwards: {w}", answer=w[::-1]) for w in words]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]

@grpo.hookimpl
def grpo_environments():
    return {"backwards": Backwards}
""",
}


@pytest.mark.long
@pytest.mark.nightly  # CI follows docs/tutorial.md, which does the same
def test_the_smallest_plugin_is_installed_checked_and_trained_on(tmp_path):
    """pip install . && grpo-core check backwards && grpo-core train --env backwards"""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name, text in PLUGIN.items():
        (source / name).write_text(text)
    environ = os.environ | {"PYTHONPATH": str(site)}

    def done(*command):
        finished = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    done(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
         "--target", str(site), str(source))  # fmt: skip
    assert "11 passed, 0 failed" in done(GRPO, "check", "backwards")
    told = done(GRPO, "train", "--env", "backwards", "--output", "run", "--set", "trainer.steps=2",
                "--set", "trainer.prompts_per_step=4",
                "--set", "model.options.warm_start_steps=5")  # fmt: skip
    assert "finished: backwards: validation" in told
    assert (tmp_path / "run" / "report.html").is_file()


# ---------------------------------------------------------------------------------- engines


class Constant:
    """An engine that says the same whatever it is asked."""

    def __init__(self, setup):
        self.version = 0

    async def generate(self, requests):
        said = grpo.Completion(
            token_ids=(5,), logprobs=(-1.0,), versions=(self.version,), finish_reason="stop"
        )
        return [said for _ in requests]

    async def update_weights(self, weights):
        self.version = weights.version

    async def aclose(self):
        pass


@pytest.mark.slow
def test_an_engine_is_checked_for_its_contract_and_its_results():
    host = PluginHost.discover()
    found = list(check.findings(host, check.find(host, "local"), {"max_rows": 64}))
    assert [(f.check, f.result) for f in found if f.outcome != "passed"] == []
    assert len(found) > 8


@pytest.mark.long
def test_a_broken_engine_is_reported_with_the_place():
    host = PluginHost.discover()
    offer = check.find(host, f"{__file__}:Constant")
    assert offer.kind == "engine"
    failed = {f.check: f.result for f in check.findings(host, offer, {}) if f.outcome == "failed"}
    assert {"it keeps its contract", "logprobs are those of the model"} <= failed.keys()
    assert all(failed.values()), "each says what is wrong"


class Careless:
    """An engine that decodes whole distributions; it does not check its requests, know stop strings or name a
    tensor.
    """

    def __init__(self, setup):
        self.setup, self.model, self.version = setup, None, -1

    async def generate(self, requests):
        if self.model is None:
            raise grpo.EngineError("careless: no weights")
        return [self.decode(request) for request in requests]

    def decode(self, request):
        import torch

        random = torch.Generator().manual_seed(request.seed)
        ids, logprobs = list(request.prompt_ids), []
        for _ in range(request.max_tokens):
            logits = self.model(torch.tensor([ids])).logits[0, -1].detach()
            likely = (logits / (request.temperature or 1.0)).log_softmax(-1)
            drawn = torch.multinomial(likely.exp(), 1, generator=random)
            ids.append(int(drawn if request.temperature else likely.argmax()))
            logprobs.append(float(likely[ids[-1]]))
            if ids[-1] in request.stop_token_ids:
                break
        sampled = ids[len(request.prompt_ids) :]
        stopped = bool(sampled) and sampled[-1] in request.stop_token_ids
        return grpo.Completion(
            token_ids=sampled,
            logprobs=logprobs,
            versions=[self.version] * len(sampled),
            finish_reason="stop" if stopped else "length",
        )

    async def update_weights(self, weights):
        import torch

        from grpo_core.kit import read_weights
        from grpo_core.training import model

        tensors = read_weights(weights)
        self.model = self.model or model.load(self.setup.model, device=torch.device("cpu"))
        parameters = dict(self.model.named_parameters())
        if parameters.keys() != tensors.keys():
            raise grpo.WeightSyncError("careless: weights of another model")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        self.version = weights.version

    async def aclose(self):
        self.model = None


def told_by_the_laws(tmp_path, *laws):
    """Return the message with which ``Careless`` breaks each law."""
    model = decoding.make_test_model(tmp_path)
    told = {}
    with asyncio.Runner() as runner:
        tried = decoding.EngineUnderTest(
            engine=runner.run(decoding.start_engine(Careless, model)), model=model
        )
        runner.run(tried.update())
        for law in laws:
            with pytest.raises(AssertionError) as caught:
                runner.run(decoding.ENGINE_LAWS[law](tried))
            told[law] = str(caught.value)
    return told


@pytest.mark.long
def test_a_law_of_engines_says_what_was_asked_and_what_was_expected(tmp_path):
    refused, stop, another = (
        "what cannot be generated is refused and harms nobody",
        "a stop string ends a completion and stays in it",
        "weights of another model are refused and change nothing",
    )
    cut = "top k top p and min p cut the distribution"
    told = told_by_the_laws(tmp_path, refused, stop, another, cut)
    assert "with top_k=3 the logprob of a token differs from that of transformers' warpers" in told[cut]
    assert "the engine ignores top_k=3, or cuts the distribution in another way" in told[cut]
    assert "a request with {'prompt_ids': ()} raised " in told[refused]
    assert "; expected EngineError, see check_request of grpo_core.kit" in told[refused]
    assert "stop=" in told[stop]
    assert "expected it to end with the token" in told[stop]
    assert (
        "WeightSyncError('careless: weights of another model'), which does not name the tensor"
        in told[another]
    )


class Stuck(Careless):
    async def generate(self, requests):
        await asyncio.Event().wait()


def test_a_law_of_engines_says_how_long_it_waited_and_for_what(tmp_path):
    tried = decoding.EngineUnderTest(engine=Stuck(None), model=tmp_path)
    with pytest.raises(AssertionError, match="1 requests for at most 5 tokens each took longer than 60 s"):
        run(tried.ask(decoding.SMALL))


class Deaf(Constant):
    """An engine that takes no weights."""

    async def update_weights(self, weights):
        raise RuntimeError("no room")


@pytest.mark.long
def test_an_engine_that_takes_no_weights_is_a_finding_and_not_asked_for_more():
    host = PluginHost.discover()
    found = list(check.findings(host, check.find(host, f"{__file__}:Deaf"), {}))
    assert {f.check: f.result for f in found}["it takes weights"].startswith(
        "RuntimeError: no room (test_check"
    )
    assert [f.outcome for f in found] == ["passed", "failed", "failed", "passed"]
