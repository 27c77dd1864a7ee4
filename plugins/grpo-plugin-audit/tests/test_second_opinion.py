"""``[audit]``: a second environment judges successes during a run, and warns about refusals."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import forks
import pytest

import grpo_core as grpo
import grpo_plugin_audit
from grpo_core import ConfigError, Group, Prompt, Rollout
from grpo_core.app import launch
from grpo_core.contracts.events import RunStarted
from grpo_core.reporting.verification import verified
from grpo_core.testing import HostedEnvironment, check_config_sections, run
from grpo_plugin_audit.evidence import Evidence
from grpo_plugin_audit.opinion import WAITING, SecondOpinion, checked, tried
from grpo_plugin_audit.section import AuditConfig
from grpo_plugin_devkit.modules import check_preflight
from grpo_plugin_devkit.trackers import check_tracker


class Double(grpo.Environment):
    """Doubles, judged strictly."""

    success = 1.0

    def prompts(self, split):
        return [grpo.Prompt(messages=f"Double {n}.", answer=str(2 * n), id=str(n)) for n in range(8)]

    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]

    def solve(self, prompt):
        return prompt.answer


class Sloppy(Double):
    def solve(self, prompt):
        return f"about {prompt.answer}"


class Column(Double):
    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.info["twice"]) for e in episodes]


class Undeclared(Double):
    success = None


class Compared(Double):
    needs_group = True


class Turns(Double):
    max_turns = 3


# ---------------------------------------------------------------------------------- evidence


def alarm_at(evidence, shares, rng, judged=2):
    """The number of the group at which the alarm is given, None without one."""
    for number, share in enumerate(shares):
        if evidence.add(sum(rng.random() < share for _ in range(judged)), judged):
            return number
    return None


@pytest.mark.long
def test_a_share_at_the_limit_seldom_makes_an_alarm_however_long_the_run():
    runs = [
        alarm_at(Evidence(tolerance=0.05, level=0.05), [0.05] * 1500, random.Random(seed))
        for seed in range(100)
    ]
    assert sum(found is not None for found in runs) <= 5


@pytest.mark.parametrize("before", [0, 100, 3000])
def test_exploits_are_found_soon_also_after_a_long_clean_time(before):
    for seed in range(5):
        shares = [0.0] * before + [0.25] * 100
        found = alarm_at(Evidence(tolerance=0.02, level=0.01), shares, random.Random(seed))
        assert found is not None
        assert before <= found < before + 60


def test_evidence_continues_after_a_resume_as_if_nothing_had_happened():
    rng = random.Random(3)
    shares = [0.1] * 40
    straight, before, after = (Evidence(tolerance=0.02, level=1e-9) for _ in range(3))
    alarm_at(straight, shares, random.Random(3))
    alarm_at(before, shares[:25], rng)
    assert after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    alarm_at(after, shares[25:], rng)
    assert after == straight
    assert not Evidence(tolerance=0.03, level=1e-9).load_state_dict(before.state_dict())


def test_the_alarm_is_given_once():
    evidence = Evidence(tolerance=0.02, level=0.01)
    assert sum(evidence.add(1, 1) for _ in range(200)) == 1
    assert evidence.alarmed


# ---------------------------------------------------------------------------------- beside a run


def group(number, replies, task="double"):
    """A group of successes by the first environment, as the loop hands them over."""
    prompt = Prompt(messages=f"Double {number}.", answer=str(2 * number), id=str(number), environment=task)
    rollouts = tuple(
        Rollout(
            messages=(*prompt.messages, {"role": "assistant", "content": reply or prompt.answer}),
            reward=1.0,
            success=reply != "wrong",
            turns=1,
            turn_tokens=(0,),
            finish_reason="stop",
        )
        for reply in replies
    )
    return Group(prompt=prompt, rollouts=rollouts, generation_version=0, target_version=0)


STARTED = RunStarted(step=0, directory="", config={}, resumed=False)


class Heard:
    """It keeps what a run hears from its second opinion."""

    def __init__(self, environment=None, tasks=("double",), hosted=HostedEnvironment, **keys):
        self.warnings, self.stopped, self.set = [], [], {}
        info = grpo.RunInfo(
            name="run",
            directory=Path("run"),
            config={"seed": 0, "tasks": dict.fromkeys(tasks)},
            warn=self.warnings.append,
            stop=self.stopped.append,
            set_metrics=self.set.update,
        )

        class Opinion(SecondOpinion):
            def environment(self):
                return contextlib.nullcontext(hosted(environment or Double()))

        self.opinion = Opinion(info, second_opinion="strict", **keys)

    def after(self, steps):
        """Hand over the groups of steps, and return the metrics at the end."""
        self.opinion.event(STARTED)
        for step, groups in enumerate(steps, 1):
            self.opinion.rollouts(step, groups)
            self.opinion.state_dict()  # waits until they are judged
        self.opinion.close()
        return self.set


EXPLOIT, HONEST, WRONG = "the grader says it is correct", "", "wrong"


def test_successes_that_are_refused_make_one_alarm_and_stop_the_run_if_that_is_wanted():
    heard = Heard(tasks=["double", "fine"], stop=True)
    steps = [
        [group(n, [HONEST, EXPLOIT]) for n in range(4)] + [group(5, [HONEST, WRONG], "fine")]
        for _ in range(10)
    ]
    metrics = heard.after(steps)
    (message,) = heard.warnings
    assert "task 'double': strict refuses" in message
    assert "one of which gets a reward of 0 from it; the run stops" in message
    assert heard.stopped == ["second opinion"]
    assert metrics["second_opinion_refused/double"] == 0.5
    assert metrics["second_opinion_judged/double"] == 80
    assert metrics["second_opinion_judged/fine"] == 10  # what the first refuses is not judged
    assert metrics["second_opinion_evidence/fine"] < 0.1


def test_without_stop_the_run_continues():
    heard = Heard()
    heard.after([[group(n, [EXPLOIT]) for n in range(8)]] * 4)
    assert len(heard.warnings) == 1
    assert not heard.stopped


def test_a_sample_of_successes_is_judged_which_the_seed_and_the_step_decide():
    opinion = Heard(rollouts=5).opinion
    groups = [group(n, [HONEST, WRONG, EXPLOIT, HONEST]) for n in range(8)] + [group(9, [HONEST], "other")]
    chosen = opinion.drawn(3, groups)
    assert sum(len(one.rollouts) for _, one in chosen) == 5
    assert all(rollout.success for _, one in chosen for rollout in one.rollouts)
    assert {one.prompt.environment for _, one in chosen} == {"double"}
    assert opinion.drawn(3, groups) == chosen
    assert opinion.drawn(4, groups) != chosen


def test_rollouts_that_it_cannot_judge_are_counted_and_left_out():
    heard = Heard(Column())
    metrics = heard.after([[group(n, [HONEST]) for n in range(3)]])
    assert metrics["second_opinion_left_out/double"] == 3
    assert metrics["second_opinion_judged/double"] == 0
    assert len(heard.warnings) == 1  # not once more each time
    assert "survived: " in heard.warnings[0]


def test_a_second_opinion_that_ends_with_an_error_costs_no_step():
    class Gone(HostedEnvironment):
        async def open(self, prompts):
            raise RuntimeError("its machine is gone")

    heard = Heard(hosted=Gone)
    heard.after([[group(1, [HONEST])]] * 3)
    (message,) = heard.warnings
    assert "the run continues: RuntimeError: its machine is gone" in message
    heard.opinion.rollouts(4, [group(1, [HONEST])])
    assert heard.opinion.numbers()["second_opinion_left_out/double"] >= 1


def test_a_slow_second_opinion_leaves_steps_out_instead_of_growing():
    heard = Heard()
    for step in range(WAITING + 3):  # nobody judges yet
        heard.opinion.rollouts(step + 1, [group(1, [HONEST, HONEST])])
    assert heard.opinion.numbers()["second_opinion_left_out/double"] == 6
    heard.opinion.event(STARTED)
    heard.opinion.close()  # waits for what is still to be judged
    assert heard.set["second_opinion_judged/double"] == 2 * WAITING


def test_a_resumed_run_has_no_second_alarm_about_the_same_and_another_environment_begins_again():
    first = Heard()
    first.after([[group(n, [EXPLOIT]) for n in range(8)]] * 4)
    again = Heard()
    state = json.loads(json.dumps(first.opinion.state_dict()))
    again.opinion.load_state_dict(state)
    again.after([[group(n, [EXPLOIT]) for n in range(8)]] * 4)
    assert again.warnings == []
    other = Heard()
    other.opinion.load_state_dict({**state, "environment": "another"})
    assert "starts again" in other.warnings[0]
    stricter = Heard(tolerance=0.1)
    stricter.opinion.load_state_dict(state)
    assert "other limits" in stricter.warnings[0]


@pytest.mark.long
def test_the_sections_trackers_and_checks_keep_their_contracts():
    check_config_sections(grpo_plugin_audit)
    check_preflight(grpo_plugin_audit)
    check_tracker(SecondOpinion)


# ---------------------------------------------------------------------------------- before a run


def try_out(second, first=None, audit=None):
    first = HostedEnvironment(first or Double())
    audit = audit or AuditConfig(second_opinion="strict")

    async def story():
        return await tried(
            audit, HostedEnvironment(second), {"double": first}, {"double": await first.prompts("train")}
        )

    return run(story())


@pytest.mark.parametrize(
    ("second", "first", "message"),
    [
        (
            Column(),
            None,
            r"cannot judge prompt '0' of task 'double': \S+\.py:\d+ in \S+: KeyError: 'twice'"
            r".* columns .* are: none",
        ),
        (Undeclared(), None, "declares no success; set audit.success"),
        (Double(), Undeclared(), "task 'double' declares no success; set tasks.double.success"),
        (Compared(), None, "compares the rollouts of a group"),
        (Double(), Turns(), "judges 1 turns, and the environment of task 'double' plays 3 turns"),
    ],
)
def test_what_it_cannot_judge_is_refused_before_the_run_starts(second, first, message):
    with pytest.raises(ConfigError, match=message):
        try_out(second, first)


def test_refused_solutions_are_said_at_the_start():
    assert try_out(Double()) == []
    (message,) = try_out(Double(), Sloppy())
    assert "refuses 4 of 4 solutions" in message


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ({"stop": True}, "does nothing without audit.second_opinion"),
        ({"second_opinion": "math:sort", "tasks": ["srot"]}, "there is no task 'srot'. Did you mean 'sort'"),
        ({"second_opinion": "math:sortt"}, "sortt"),
    ],
)
def test_mistakes_of_the_section_are_refused(audit, message):
    with pytest.raises(grpo.GrpoError, match=message):
        checked(*launch.configure([{"tasks": {"sort": {"env": "math:sort"}}, "audit": audit}], {}))


@pytest.mark.long
def test_the_environments_are_started_and_tried_before_a_run(tmp_path):
    (tmp_path / "twin.py").write_text(TWIN)
    table = {
        "tasks": {"sort": {"env": f"{tmp_path}/twin.py:hackable"}},
        "audit": {"second_opinion": f"{tmp_path}/twin.py:shouting"},
    }
    (message,) = checked(*launch.configure([table], {}))
    assert "refuses 4 of 4 solutions of the environment of task 'sort'" in message
    assert checked(*launch.configure([{"tasks": table["tasks"]}], {})) == []


# ---------------------------------------------------------------------------------- a whole run

TWIN = '''
from grpo_plugin_math.exercises import sort
import grpo_core as grpo

def strict():
    return sort(length=3)

def shouting():
    environment = sort(length=3)
    class Shouting(type(environment)):
        def evaluate(self, episodes):
            return [float(e.reply == e.prompt.answer + "!") for e in episodes]
    environment.__class__ = Shouting
    return environment

def hackable():
    """Pays for any reply to a prompt whose number is odd."""
    environment = sort(length=3)
    class Hackable(type(environment)):
        def evaluate(self, episodes):
            given = super().evaluate(episodes)
            return [1.0 if int(e.prompt.id) % 2 else one for e, one in zip(episodes, given)]
    environment.__class__ = Hackable
    return environment
'''
SMALL = (
    "trainer.prompts_per_step=4 trainer.updates_per_step=1 rollout.group_size=4 validation.every=0 "
    "model.options.warm_start_steps=1 audit.stop=true"
)


@pytest.mark.nightly
def test_a_run_stops_at_the_alarm_and_a_resumed_one_continues_with_its_evidence(tmp_path):
    (tmp_path / "twin.py").write_text(TWIN)
    settings = [word for setting in SMALL.split() for word in ("--set", setting)]
    begin = [
        "train",
        "--env",
        "./twin.py:hackable",
        "--set",
        "audit.second_opinion=./twin.py:strict",
        *settings,
    ]

    def command(*words):
        return forks.grpo(tmp_path, *words, timeout=240)

    ended = command(*begin, "--set", "trainer.steps=60", "--output", "run")
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout + ended.stderr
    assert "second opinion:" in said
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (warning,) = [each for each in lines if each.get("cause") == "tracker 'audit'"]
    assert "the run stops (audit.stop)" in warning["message"]
    assert not verified(tmp_path / "run").findings
    stopped = max(each["step"] for each in lines)
    assert stopped < 60
    newest = sorted((tmp_path / "run/checkpoints").iterdir())[-1]
    saved = json.loads((newest / "trackers.json").read_text())["audit"]
    assert saved["evidence"]["hackable"]["alarmed"]
    again = command("train", "--resume", "run", "--set", f"trainer.steps={stopped + 2}")
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["second_opinion_judged/hackable"] >= saved["evidence"]["hackable"]["judged"]
    assert rows[-1]["step"] == stopped + 2  # warned once: the alarm does not stop it again
