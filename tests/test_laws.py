"""``grpo-core verify``: the laws, read from the file of a run."""

from __future__ import annotations

import copy

import pytest

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
            "validation": {"every": 1},
            "checkpoint": {"every": 1},
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


def ended(step, staleness, **buffer):
    counted = {"in_flight": 0.0, "retrying": 0.0, "ready": 0.0, "dispatched": 4.0, "skipped": 0.0}
    counted |= {"filtered": 0.0, "attempts": 5.0, **buffer}
    metrics = {f"buffer/{name}": value for name, value in counted.items()}
    metrics |= {"groups/t": 2.0, "reward/t": 0.5, "staleness_max": staleness}
    return {"event": "StepEnded", "step": step, "metrics": metrics}


def validated(version):
    return {"event": "Validated", "step": version, "version": version, "results": {}}


def saved(step):
    return [{"event": "Saving", "step": step}, {"event": "Saved", "step": step}]


def a_run():
    """Two steps of two prompts; the first prompt fails once."""
    finished = [{"event": "GroupFinished", "step": 0, "slot": i} for i in range(4)]
    return [
        started(dispatched=0, trained=0, skipped=0, filtered=0, ready=0) | {"resumed": False},
        validated(0),
        {"event": "Dispatched", "step": 0, "slots": [slot(i) for i in range(4)]},
        finished[1],
        finished[2],
        {"event": "Dispatched", "step": 0, "slots": [slot(0, attempt=1)]},
        {"event": "GroupsReady", "step": 0, "groups": [group(1), group(2)]},
        ended(1, 0.0, in_flight=1.0, retrying=1.0),
        {"event": "Synced", "step": 1},
        validated(1),
        *saved(1),
        finished[3],
        finished[0],
        {"event": "GroupsReady", "step": 1, "groups": [group(0), group(3)]},
        ended(2, 1.0),
        {"event": "Synced", "step": 2},
        validated(2),
        *saved(2),
        {"event": "RunEnded", "step": 2, "reason": "finished"},
    ]


def violated(events):
    laws = Laws()
    for event in events:
        laws.observe(event)
    laws.close()
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


def metric(place, name, value):
    def change(events):
        events[place] = {**events[place], "metrics": {**events[place]["metrics"], name: value}}

    return change


def doubled(place):
    return lambda events: events.insert(place, events[place])


(
    STARTED, VALIDATED_0, DISPATCHED, FINISHED_1, FINISHED_2, RETRIED, READY_0,
    ENDED_1, SYNCED_1, VALIDATED_1, SAVING_1, SAVED_1, FINISHED_3, FINISHED_0, READY_1,
    ENDED_2, SYNCED_2, VALIDATED_2, SAVING_2, SAVED_2, END,
) = range(21)  # fmt: skip
SKIPPED = {"event": "PromptSkipped", "step": 0, "slot": 0}
OFFERED = {"event": "PromptsPassedOver", "step": 0, "task": "t", "size": 9, "offered": [0, 1, 0, 2, 3]}
OFFERED |= {"drawn": ["p0", "p1", "p2", "p3"], "passed_over": [[0, "solved"]]}
FILTERED = {"event": "GroupFiltered", "step": 0, "slot": 0, "filter": "unknown", "reason": "any"}
COUNTED = ("in_flight", "retrying", "ready", "dispatched", "skipped", "filtered", "attempts")
BROKEN = [
    ("staleness", inside(READY_1, "groups", 0, token_versions=[-1, 0])),
    ("staleness", inside(READY_1, "groups", 0, token_versions=[0, 2])),
    ("staleness", inside(READY_1, "groups", 0, token_versions=[])),
    ("staleness", inside(READY_1, "groups", 0, generation_version=1, token_versions=[0, 1])),
    ("batch", changed(READY_1, groups=[group(0)])),
    ("batch", inside(READY_0, "groups", 0, rewards=[0.0, None])),
    ("batch", inside(READY_0, "groups", 0, rewards=[0.0])),
    ("once", changed(READY_1, groups=[group(0), group(1)])),
    ("once", without(FINISHED_0)),
    ("once", doubled(FINISHED_1)),
    ("deadline", inside(READY_1, "groups", 0, target_version=0)),
    ("steps", changed(READY_1, step=2)),
    ("steps", changed(ENDED_1, step=2)),
    ("steps", without(ENDED_1)),
    ("steps", doubled(ENDED_1)),
    ("steps", lambda events: events.__setitem__(slice(ENDED_1, None), [events[READY_1]])),
    ("metrics", inside(READY_0, "groups", 0, rewards=[1.0, 1.0])),
    ("metrics", metric(ENDED_1, "reward/t", 0.25)),
    ("metrics", metric(ENDED_1, "reward/t", None)),
    ("metrics", metric(ENDED_1, "groups/t", 1.0)),
    ("metrics", metric(ENDED_1, "groups/another", 1.0)),
    ("metrics", metric(ENDED_1, "staleness_max", 1.0)),
    ("steps", lambda events: events.__setitem__(slice(READY_0, None), [events[ENDED_1]])),
    ("stamps", inside(DISPATCHED, "slots", 0, generation_version=1)),
    ("stamps", inside(DISPATCHED, "slots", 0, target_version=2)),
    ("stamps", inside(READY_1, "groups", 0, generation_version=1, token_versions=[1, 1])),
    ("stream", inside(DISPATCHED, "slots", 3, slot=4)),
    ("stream", inside(RETRIED, "slots", 0, prompt="another")),
    ("retries", inside(RETRIED, "slots", 0, attempt=2)),
    ("retries", lambda events: events.insert(RETRIED, SKIPPED)),
    ("epoch", lambda events: events.insert(DISPATCHED, OFFERED)),
    ("epoch", lambda events: events.insert(DISPATCHED, OFFERED | {"passed_over": [[9, ""]]})),
    ("filter", lambda events: events.insert(FINISHED_0, FILTERED)),
    ("memory", changed(DISPATCHED, slots=[slot(i) for i in range(5)])),
    ("memory", lambda events: events.insert(SYNCED_1, events[DISPATCHED] | {"slots": [slot(4)]})),
    ("sync", changed(SYNCED_1, step=0)),
    ("sync", doubled(SYNCED_1)),
    ("validation", changed(VALIDATED_1, version=0)),
    ("validation", without(VALIDATED_0)),
    ("validation", doubled(VALIDATED_1)),
    ("checkpoint", without(SAVING_1)),
    ("checkpoint", without(SAVED_1)),
    ("checkpoint", doubled(SAVED_1)),
    ("checkpoint", doubled(SAVING_1)),
    ("checkpoint", without(SAVED_2)),
    ("checkpoint", lambda events: events.__delitem__(slice(SAVING_1, FINISHED_3))),
    ("resume", changed(SAVING_1, step=0)),
    ("end", without(SYNCED_2)),
    ("end", doubled(END)),
    ("end", without(STARTED)),
    *(
        ("conservation", metric(ENDED_1, f"buffer/{name}", value))
        for name in COUNTED
        for value in (3.0, None)
    ),
    ("record", lambda events: events.clear()),
    ("record", lambda events: events.append([1, 2])),
    ("record", lambda events: events.append({"event": "Synced"})),
    ("record", inside(READY_0, "groups", 0, rewards=["1.0", "0.0"])),
    ("record", inside(READY_0, "groups", 0, token_versions=None)),
    ("record", inside(DISPATCHED, "slots", 0, prompt=7)),
    ("record", changed(ENDED_1, metrics=[])),
]


@pytest.mark.parametrize(("law", "change"), BROKEN, ids=[f"{law}-{i}" for i, (law, _) in enumerate(BROKEN)])
def test_each_law_is_awake(law, change):
    events = copy.deepcopy(a_run())
    change(events)
    laws, text = violated(events)
    assert law in laws
    assert LAWS[law] in text


def test_an_event_outside_of_a_life_says_where_it_is():
    laws = Laws()
    laws.observe({"event": "Synced", "step": 1})
    for event in [*a_run(), {"event": "Synced", "step": 3}]:
        laws.observe(event)
    said = [violation.what for violation in laws.violations if violation.law == "end"]
    assert said == ["Synced comes before RunStarted", "Synced comes after RunEnded"]


@pytest.mark.parametrize(("apart", "lost", "noticed"), [
    (False, [], False), (False, [1], True), (True, [1], False), (True, [0, 1], True),
])  # fmt: skip
def test_a_validation_of_its_own_engine_may_be_one_behind(apart, lost, noticed):
    run = a_run()[:END]
    run[STARTED]["config"]["trainer"]["steps"] = 3
    if apart:
        run[STARTED]["config"]["validation"]["engine"] = {}
    run += [
        {"event": "Dispatched", "step": 2, "slots": [slot(4, 2), slot(5, 2)]},
        {"event": "GroupFinished", "step": 2, "slot": 4},
        {"event": "GroupFinished", "step": 2, "slot": 5},
        {"event": "GroupsReady", "step": 2, "groups": [group(4, 2), group(5, 2)]},
    ]
    gone = {VALIDATED_2, *((VALIDATED_0, VALIDATED_1)[version] for version in lost)}
    left = [event for place, event in enumerate(run) if place not in gone]
    laws, _ = violated(left)
    assert ("validation" in laws) == noticed


def test_every_law_has_a_case():
    assert {law for law, _ in BROKEN} == set(LAWS)


def test_a_second_interruption_leaves_no_checkpoint():
    events = a_run()
    interrupted = {"event": "RunEnded", "step": 2, "reason": "interrupted"}
    assert violated([*events[:SAVING_2], interrupted])[0] == []


def test_after_a_resume_only_unfinished_prompts_are_repeated():
    cut = started(1, dispatched=4, trained=2, skipped=0, filtered=0, ready=0)
    rest = [
        cut,
        {"event": "Dispatched", "step": 1, "slots": [slot(0, version=1, attempt=1), slot(3, version=1)]},
        {"event": "GroupFinished", "step": 1, "slot": 0},
        {"event": "GroupFinished", "step": 1, "slot": 3},
        {"event": "GroupsReady", "step": 1, "groups": [group(0, version=1), group(3, version=1)]},
        ended(2, 0.0, attempts=7.0),
        {"event": "Synced", "step": 2},
        validated(2),
        *saved(2),
        {"event": "RunEnded", "step": 2, "reason": "finished"},
    ]
    killed = a_run()[: FINISHED_0 + 1]
    assert violated([*killed, *rest])[0] == []
    doubled = copy.deepcopy(rest)
    doubled[1]["slots"].append(slot(1, version=1))
    assert violated([*killed, *doubled])[0] != []
    assert "resume" in violated([*killed, changed_copy(cut, dispatched=3), *rest[1:]])[0]
    assert "end" in violated([*killed, cut, *rest[-5:]])[0]
    known = [{**event, "manifest": "a"} if event["event"] == "Saved" else event for event in killed]
    assert violated([*known, {**cut, "manifest": "a"}, *rest[1:]])[0] == []
    assert violated([*known, {**cut, "manifest": "b"}, *rest[1:]])[0] == ["resume"]


def test_a_run_that_fails_may_be_saved_before_its_last_weight_sync():
    failing = [
        *a_run()[: FINISHED_0 - 5],
        {"event": "Saving", "step": 1, "reason": "the canary failed"},
        {"event": "Saved", "step": 1},
        {"event": "RunEnded", "step": 1, "reason": "failed"},
    ]
    assert [event["event"] for event in failing[-5:-3]] == ["GroupsReady", "StepEnded"]
    rest = [
        started(1, dispatched=4, trained=2, skipped=0, filtered=0, ready=0),
        validated(1),
        {"event": "Dispatched", "step": 1, "slots": [slot(0, version=1, attempt=1), slot(3, version=1)]},
        {"event": "GroupFinished", "step": 1, "slot": 0},
        {"event": "GroupFinished", "step": 1, "slot": 3},
        {"event": "GroupsReady", "step": 1, "groups": [group(0, version=1), group(3, version=1)]},
        ended(2, 0.0, attempts=7.0),
        {"event": "Synced", "step": 2},
        validated(2),
        *saved(2),
        {"event": "RunEnded", "step": 2, "reason": "finished"},
    ]
    assert violated([*failing, *rest])[0] == []
    without_reason = [*failing[:-3], *saved(1), failing[-1]]
    assert "resume" in violated([*without_reason, *rest])[0]
    early = [*failing[:-4], *failing[-3:]]
    assert "checkpoint" in violated([*early, *rest])[0], "its step has not ended"


def test_the_groups_of_a_step_that_failed_are_generated_again():
    before = a_run()[: FINISHED_0 - 5]
    assert [event["event"] for event in before[-2:]] == ["GroupsReady", "StepEnded"]
    failing = [
        *before[:-1],
        {"event": "GroupsReturned", "step": 0, "slots": [1, 2]},
        {"event": "Saving", "step": 0, "reason": "the loss is not finite"},
        {"event": "Saved", "step": 0},
        {"event": "RunEnded", "step": 0, "reason": "failed"},
    ]
    rest = [
        started(0, dispatched=4, trained=0, skipped=0, filtered=0, ready=0),
        {"event": "Dispatched", "step": 0, "slots": [slot(i, attempt=int(i == 0)) for i in range(4)]},
        *({"event": "GroupFinished", "step": 0, "slot": i} for i in range(4)),
        {"event": "GroupsReady", "step": 0, "groups": [group(1), group(2)]},
        ended(1, 0.0, ready=2.0, attempts=9.0),
    ]
    assert violated([*failing, *rest])[0] == []
    silent = [event for event in failing if event["event"] != "GroupsReturned"]
    assert violated([*silent, *rest])[0] != [], "they would be trained twice"
    late = [*before, *failing[-4:]]
    assert "steps" in violated([*late, *rest])[0], "its step has ended"
    other = {**failing[-4], "slots": [1, 3]}
    assert violated([*failing[:-4], other, *failing[-3:], *rest])[0] != []


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
    first += a_run()[1:FINISHED_3]
    after_the_cut = [{"event": "Dispatched", "step": 1, "slots": [slot(4, version=1)]}]
    assert violated([*first, *after_the_cut, *resumed("p4")])[0] == []
    assert violated([*first, *after_the_cut, *resumed("another")])[0] == ["stream"]


def changed_copy(event, **buffer):
    return {**event, "buffer": {**event["buffer"], **buffer}}
