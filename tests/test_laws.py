"""``grpo-core verify``: the laws, read from the file of a run."""

from __future__ import annotations

import copy
import json

import pytest

from grpo_core import cli
from grpo_core.loop.laws import LAWS, Laws, summary


def started(step=0, sampler="mix", **buffer):
    return {
        "event": "RunStarted",
        "step": step,
        "resumed": bool(buffer),
        "buffer": buffer,
        "config": {
            "trainer": {"prompts_per_step": 2, "steps": 2},
            "pipeline": {"max_staleness": 1, "policy": "deadline"},
            "rollout": {"max_retries": 1, "group_size": 2},
            "sampler": {"name": sampler},
        },
    }


def slot(id, version=0, attempt=0, **changes):
    stamps = {"generation_version": version, "target_version": version + 1}
    return {"slot": id, "task": "t", "prompt": f"p{id}", "attempt": attempt, "kept": 0, **stamps, **changes}


def group(id, version=0, **changes):
    stamps = {"generation_version": version, "target_version": version + 1}
    return {
        "slot": id,
        "task": "t",
        "prompt": f"p{id}",
        "token_versions": [version, version],
        "rewards": [0.0, 1.0],
        **stamps,
        **changes,
    }


def a_run():
    """Two steps of two prompts; the first prompt fails once."""
    finished = [{"event": "GroupFinished", "step": 0, "slot": i} for i in range(4)]
    return [
        started(dispatched=0, trained=0, skipped=0, filtered=0, ready=0) | {"resumed": False},
        {"event": "Dispatched", "step": 0, "slots": [slot(i) for i in range(4)]},
        finished[1],
        finished[2],
        {"event": "Dispatched", "step": 0, "slots": [slot(0, attempt=1)]},
        {"event": "GroupsReady", "step": 0, "groups": [group(1), group(2)]},
        {"event": "StepEnded", "step": 1, "metrics": {}},
        {"event": "Synced", "step": 1},
        {"event": "Validated", "step": 1, "version": 1},
        {"event": "Saving", "step": 1},
        finished[3],
        finished[0],
        {"event": "GroupsReady", "step": 1, "groups": [group(0), group(3)]},
        {"event": "StepEnded", "step": 2, "metrics": {}},
        {"event": "Synced", "step": 2},
        {"event": "RunEnded", "step": 2, "reason": "finished"},
    ]


def violated(events):
    laws = Laws()
    for event in events:
        laws.observe(event)
    return [violation.law for violation in laws.violations], summary(laws)


def test_a_run_that_keeps_them():
    laws, text = violated(a_run())
    assert laws == []
    counted = "4 prompts dispatched, 4 trained, 0 skipped, 0 filtered, 0 unfinished"
    assert text == f"{len(LAWS)} laws hold over 2 steps: {counted}"


def changed(place, **changes):
    def change(events):
        events[place] = {**events[place], **changes}

    return change


def inside(place, name, at, **changes):
    def change(events):
        events[place][name][at] = {**events[place][name][at], **changes}

    return change


def without(place):
    return lambda events: events.pop(place)


COUNTED = ("in_flight", "retrying", "ready", "dispatched", "skipped", "filtered", "attempts")
BROKEN = [
    ("staleness", inside(12, "groups", 0, token_versions=[-1, 0])),
    ("batch", changed(12, groups=[group(0)])),
    ("batch", inside(5, "groups", 0, rewards=[0.0, None])),
    ("batch", inside(5, "groups", 0, rewards=[0.0])),
    ("once", changed(12, groups=[group(0), group(1)])),
    ("once", without(11)),
    ("deadline", inside(12, "groups", 0, target_version=0)),
    ("steps", changed(12, step=2)),
    ("steps", changed(6, step=2)),
    ("stamps", inside(1, "slots", 0, generation_version=1)),
    ("stamps", inside(1, "slots", 0, target_version=2)),
    ("stream", inside(1, "slots", 3, slot=4)),
    ("stream", inside(4, "slots", 0, prompt="another")),
    ("retries", inside(4, "slots", 0, attempt=2)),
    ("retries", lambda events: events.insert(4, {"event": "PromptSkipped", "step": 0, "slot": 0})),
    ("memory", changed(1, slots=[slot(i) for i in range(5)])),
    ("sync", changed(7, step=0)),
    ("sync", lambda events: events.insert(7, events[7])),
    ("validation", changed(8, version=0)),
    ("resume", changed(9, step=0)),
    ("end", without(14)),
    (
        "conservation",
        changed(6, metrics={f"buffer/{name}": 2 for name in COUNTED}),
    ),
]


@pytest.mark.parametrize(("law", "change"), BROKEN, ids=[law for law, _ in BROKEN])
def test_each_law_is_awake(law, change):
    events = copy.deepcopy(a_run())
    change(events)
    laws, text = violated(events)
    assert law in laws
    assert LAWS[law] in text


def test_every_law_has_a_case():
    assert {law for law, _ in BROKEN} == set(LAWS)


def test_after_a_resume_only_unfinished_prompts_are_repeated():
    cut = started(1, dispatched=4, trained=2, skipped=0, filtered=0, ready=0)
    rest = [
        cut,
        {"event": "Dispatched", "step": 1, "slots": [slot(0, version=1, attempt=1), slot(3, version=1)]},
        {"event": "GroupFinished", "step": 1, "slot": 0},
        {"event": "GroupFinished", "step": 1, "slot": 3},
        {"event": "GroupsReady", "step": 1, "groups": [group(0, version=1), group(3, version=1)]},
        {"event": "Synced", "step": 2},
        {"event": "RunEnded", "step": 2, "reason": "finished"},
    ]
    killed = a_run()[:12]
    assert violated([*killed, *rest])[0] == []
    doubled = copy.deepcopy(rest)
    doubled[1]["slots"].append(slot(1, version=1))
    assert violated([*killed, *doubled])[0] != []
    assert "resume" in violated([*killed, changed_copy(cut, dispatched=3), *rest[1:]])[0]
    assert "end" in violated([*killed, cut, *rest[-2:]])[0]


@pytest.mark.parametrize("sampler", ["mix", "schedule", "curriculum", "chosen", "./mine.py:Sampler"])
def test_a_resumed_run_draws_the_same_prompts_of_a_task_whatever_the_sampler(sampler):
    """The loader decides which prompt of a task is the next; the sampler only decides how many are drawn."""

    def resumed(next_prompt):
        cut = started(1, sampler, dispatched=4, trained=2, skipped=0, filtered=0, ready=0)
        waiting = [slot(0, version=1, attempt=1), slot(3, version=1)]
        fresh = [slot(4, version=1, prompt=next_prompt)]
        return [cut, {"event": "Dispatched", "step": 1, "slots": waiting + fresh}]

    first = [
        started(0, sampler, dispatched=0, trained=0, skipped=0, filtered=0, ready=0) | {"resumed": False}
    ]
    first += a_run()[1:10]
    after_the_cut = [{"event": "Dispatched", "step": 1, "slots": [slot(4, version=1)]}]
    assert violated([*first, *after_the_cut, *resumed("p4")])[0] == []
    assert violated([*first, *after_the_cut, *resumed("another")])[0] == ["stream"]


def changed_copy(event, **buffer):
    return {**event, "buffer": {**event["buffer"], **buffer}}


def test_the_command_lists_laws_that_hold_and_violations(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")

    def verify(events):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return cli.app(["verify", str(tmp_path)], exit_on_error=True, result_action="return_value")

    assert verify(a_run()) == 0
    assert f"{len(LAWS)} laws hold over 2 steps" in capsys.readouterr().out
    assert verify(a_run()[:11] + a_run()[12:]) == 1
    assert "step 1: once: slot 0 (prompt 'p0') is trained as" in capsys.readouterr().out
