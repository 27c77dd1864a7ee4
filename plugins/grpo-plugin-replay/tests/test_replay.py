"""``bisect``, ``replay`` and ``fork``: each step of a run can be recomputed from its files.

More runs, steps and flipped bits: ``python tests/benchmarks replay``.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import statistics

import attrs
import numpy as np
import pytest
from forks import grpo
from safetensors.numpy import load_file

from grpo_core import ConfigError, Run, errors
from grpo_plugin_replay import bisect, fork, history, replay

pytestmark = pytest.mark.long

ENVIRONMENT = """
import grpo_core as grpo

class Letters(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{i}=") for i in range(24)]
    def evaluate(self, episodes):
        return [float(sum(map(ord, e.reply)) % 5) for e in episodes]
"""
REPRODUCIBLE = {
    "seed": 5, "pipeline.policy": "in_order", "pipeline.in_flight_updates": "false",
    "trainer.threads": 1, "engine.threads": 1,
}  # fmt: skip
SMALL = {
    "trainer.steps": 4, "trainer.prompts_per_step": 3, "rollout.group_size": 3, "rollout.max_tokens": 8,
    "validation.every": 0, "model.options.warm_start_steps": 0, "model.options.width": 32,
    "checkpoint.every": 2,
}  # fmt: skip
OTHER = {
    "model.lora.rank": 2, "model.lora.dropout": 0.2, "trainer.updates_per_step": 2, "trainer.threads": 1,
    "pipeline.max_staleness": 2, "trainer.steps": 2,
}  # fmt: skip
"""Settings of a run with adapters, whose weights depend on random numbers of the trainer."""


def train(directory, *arguments, **settings):
    """Run ``grpo-core train`` in a separate process."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = grpo(directory, "train", *arguments, *sets, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with the same seed, whose groups are generated while a step trains."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "letters.py").write_text(ENVIRONMENT)
    for name in ("first", "second"):
        train(directory, "--env", "./letters.py:Letters", "--output", name, **REPRODUCIBLE, **SMALL)
    return directory / "first", directory / "second"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run with adapters that was resumed after its second step with another learning rate."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "letters.py").write_text(ENVIRONMENT)
    train(directory, "--env", "./letters.py:Letters", "--output", "run", **{**SMALL, **OTHER})
    train(directory, "--resume", "run", **{"trainer.steps": 4, "trainer.lr": 1e-3})
    return directory / "run"


@pytest.fixture
def run(runs, tmp_path):
    """A copy of a run, to be damaged."""
    shutil.copytree(runs[0], tmp_path / "run")
    return tmp_path / "run"


def arrays(run, pattern):
    return {
        f"{path.relative_to(run)}: {name}": value.tobytes()
        for path in sorted(run.glob(pattern))
        for name, value in load_file(path).items()
    }


# ---------------------------------------------------------------------------------- equal runs


def test_two_runs_with_the_same_seed_have_the_same_weights_to_the_last_bit(runs, capsys):
    first, second = runs
    for pattern in ("rollouts/*.safetensors", "checkpoints/**/*.safetensors"):
        assert arrays(first, pattern) == arrays(second, pattern)
        assert arrays(first, pattern)
    assert bisect.bisect(first, second) == 0
    assert "steps 1 to 4 are the same" in capsys.readouterr().out
    assert not Run(first).verify()


def test_bisect_notes_once_for_each_run_that_its_rollouts_are_not_stored(runs, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(runs[1], bare)
    shutil.rmtree(bare / "rollouts")
    assert bisect.bisect(runs[0], bare) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert f"{bare}: has not stored the rollouts of step 1;" in note
    assert note.endswith("more of its steps cannot be compared either)")


def test_bisect_names_the_first_value_that_differs(runs, run):
    one, other = history.read(runs[0]), attrs.evolve(history.read(run), files={})
    flip(run / "rollouts" / "step-000003.safetensors", "logprobs", 5, bit=0)
    assert [bisect.difference(one, other, step) for step in (1, 2, 4)] == ["", "", ""]
    told = bisect.difference(one, other, 3)
    assert re.match(r"slot 6 \(letters, prompt \d+\), rollout \d: the logprob of token \d is -", told)
    given = other.steps[4]
    tensors = bytearray(base64.b64decode(given.digest.tensors))
    tensors[4 * 3] ^= 1
    changed = attrs.evolve(given.digest, weights="0", tensors=base64.b64encode(tensors).decode())
    other = attrs.evolve(other, steps={**other.steps, 4: attrs.evolve(given, digest=changed)})
    assert bisect.difference(one, other, 4) == f"after the same rollouts, {given.digest.names[3]} differs"


@pytest.mark.parametrize(
    ("name", "value"), [("turn_rewards", (0.5, 0.5)), ("token_advantages", np.array([0.5, -0.5]))]
)
def test_bisect_compares_what_turns_were_paid_and_what_tokens_were_trained_with(name, value, runs):
    (group, *_) = history.read(runs[0]).groups(1)
    first, *others = group.rollouts
    changed = attrs.evolve(group, rollouts=(attrs.evolve(first, **{name: value}), *others))
    assert bisect._of_groups([group], [group]) == ""
    assert f"rollout 0: the {name} is " in bisect._of_groups([group], [changed])


def test_the_stages_of_the_timeline_sum_to_the_time_of_the_run(runs):
    spans = [json.loads(line) for line in (runs[0] / "timeline.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (runs[0] / "events.jsonl").read_text().splitlines()]
    took = events[-1]["time"] - events[0]["time"]
    assert sum(span["busy"] for span in spans if span["lane"] == "loop") == pytest.approx(took, rel=0.02)
    lanes = {"loop", "trainer", "sync", "checkpoint", "engine", "environment letters"}
    assert lanes == {span["lane"] for span in spans}
    assert sum(span["what"] == "step" and span["lane"] == "loop" for span in spans) == 4


# ---------------------------------------------------------------------------------- replay


@pytest.mark.nightly
def test_a_step_is_computed_again_from_the_newest_checkpoint_before_it(runs, capsys):
    assert replay.replay(runs[0], step=4) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("from checkpoint step-000002")
    assert [line.split(" (")[0] for line in said[1:]] == [
        f"step {n}: the same weights and optimizer state, bit for bit" for n in (3, 4)
    ]


@pytest.mark.nightly
def test_adapters_with_dropout_and_a_resume_with_other_settings_are_replayed_from_the_start(
    resumed, tmp_path, capsys
):
    shutil.copytree(resumed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert replay.replay(tmp_path / "run", step=4) == 0
    said = capsys.readouterr().out
    assert "from the model that the run started from" in said
    assert said.count("bit for bit") == 4


@pytest.mark.slow
def test_a_step_that_was_computed_differently_is_reported_with_its_first_tensor(run, capsys):
    """The run says that it trained with another learning rate than it did."""
    events = run / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["event"] == "RunStarted":
            line["config"]["trainer"]["lr"] *= 1.5
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay.replay(run, step=3) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(
        "step 3: differs from the run: the first tensor that differs is model.embed_tokens.weight"
    )
    assert "; loss is " in told


@pytest.mark.slow
def test_a_step_without_fingerprints_is_not_said_to_be_the_same(run, capsys):
    without_fingerprints(run, step=3)
    assert replay.replay(run, step=4) == 0
    third, fourth = capsys.readouterr().out.splitlines()[1:]
    assert third.startswith("step 3: computed again, and not compared, because there are no fingerprints")
    assert fourth.startswith("step 4: the same weights and optimizer state, bit for bit (")


def without_fingerprints(run, step):
    events = run / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["event"] == "StepEnded" and line["step"] == step:
            line["digest"] = None
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("rollouts/step-000003.safetensors",), "tracking.files.tokens = true"),
        (("rollouts/step-000003.jsonl.gz",), "tracking.files.every = 1 and tracking.files.keep = 0"),
    ],
)
def test_what_was_not_stored_is_named_with_the_setting_that_stores_it(settings, message, run):
    (run / settings[0]).unlink()
    with pytest.raises(ConfigError, match=message):
        replay.replay(run, step=4)


# ---------------------------------------------------------------------------------- damage


def flip(path, name, at, bit):
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:header])[name]["data_offsets"]
    assert 4 * at < end - begin
    data[header + begin + 4 * at + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("rollouts/step-000003.safetensors", "ids", "safetensors has changed since the run wrote it"),
        ("checkpoints/step-000002/trainer/model.safetensors", "model.norm.weight",
         "trainer/model.safetensors has changed since .*; to replay from the checkpoint before"),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_found_before_anything_is_computed(file, name, message, run):
    flip(run / file, name, 4, bit=21)
    with pytest.raises((ConfigError, errors.CheckpointError), match=message):
        replay.replay(run, step=4)
    found = Run(run).verify()
    assert any(message.partition(" ")[0] in each for each in found) == file.startswith("checkpoints")


# ---------------------------------------------------------------------------------- fork


@pytest.mark.slow
def test_a_fork_shows_the_first_number_that_differs_and_the_metrics_side_by_side(runs, tmp_path, capsys):
    """Rollout 1 of the first group has another reward, as ``grpo-core score`` writes it."""
    (first, *_), *_ = stored = [group.rollouts for group in history.read(runs[0]).groups(1)]
    judged = {"step": 1, "group": 0, "seed": stored[0][1].seed, "reward": first.reward + 7, "success": None}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(judged) + "\n")
    changes = ["advantage.options.scale=none", "trainer.lr=0.01"]
    assert fork.fork(runs[0], step=1, settings=changes, scored=tmp_path) == 0
    said = capsys.readouterr().out
    mean = statistics.fmean(judged["reward"] if i == 1 else each.reward for i, each in enumerate(stored[0]))
    assert f"slot 0, rollout 0: {first.advantage!r} -> {first.reward - mean!r}" in said
    assert {"metric", "lr", "grad_norm"} <= {line.split()[0] for line in said.splitlines()}


def lines_of(run, step, **fields):
    """Lines of a step as ``grpo-core score`` writes them, each with a higher reward."""
    return [
        {"step": step, "group": place, "seed": each.seed, "reward": each.reward + 1, "success": None} | fields
        for place, group in enumerate(history.read(run).groups(step))
        for each in group.rollouts
    ]


def scored_by(run, step, lines, tmp_path):
    """Return the groups of a step with the rewards of these lines."""
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = history.read(run).groups(step)
    return fork.rewarded(groups, fork.read_rewards(tmp_path, step), tmp_path)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"seed": 1}, "0 of its 3 lines of this step fit one of the 9 rollouts: it is of other rollouts"),
        ({"group": 7}, "0 of its 9 lines of this step fit one of the 9 rollouts: it is of other rollouts"),
        ({"prompt": "nobody"}, "0 of its 9 lines .*: it is of other rollouts"),
        ({"stored_reward": 77.0}, "0 of its 9 lines .*: it is of other rollouts"),
        ({"reward": None}, "9 of its 9 lines .* fit one of the 9 rollouts: none of them has a reward"),
    ],
    ids=str,
)
def test_a_fork_with_rewards_of_other_rollouts_is_refused(others, told, runs, tmp_path):
    lines = {(line["group"], line["seed"]): line for line in lines_of(runs[0], 1, **others)}
    with pytest.raises(ConfigError, match=told):
        scored_by(runs[0], 1, lines.values(), tmp_path)


def test_a_fork_says_how_many_rewards_fit(runs, tmp_path, capsys):
    lines = lines_of(runs[0], 1)
    lines[0]["seed"], lines[1]["reward"] = 1, None
    groups = scored_by(runs[0], 1, lines, tmp_path)
    assert (
        "8 of its 9 lines of this step fit one of the 9 rollouts; 2 rollouts keep" in capsys.readouterr().out
    )
    before = [each.reward for group in history.read(runs[0]).groups(1) for each in group.rollouts]
    after = [each.reward for group in groups for each in group.rollouts]
    assert after == before[:2] + [reward + 1 for reward in before[2:]]


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"reward": "x"}, 'group 0, seed .*: reward is "x"; expected a number'),
        ({"reward": float("nan")}, "reward is NaN; expected a number"),
        ({"reward": True}, "reward is true; expected a number"),
        ({"success": "yes"}, 'success is "yes"; expected true or false or null'),
        ({"success": ...}, "success is null; expected a value; the key is missing"),
        ({"reward": ...}, "reward is null; expected a value; the key is missing"),
        ({"metrics": {"form": "good"}}, 'metrics.form is "good"; expected a number'),
        (
            {"turn_rewards": [1.0, 2.0]},
            r"turn_rewards is \[1.0, 2.0\]; expected numbers of 1 turns, which add",
        ),
        ({"turn_rewards": [100.0]}, r"turn_rewards is \[100.0\]; .* which add up to the reward"),
        ({"train": 1}, "train is 1; expected true or false"),
        ({"reply_answer": 4}, "reply_answer is 4; expected a string or null"),
    ],
    ids=str,
)
def test_a_value_that_no_reward_can_be_is_named_with_its_line(others, told, runs, tmp_path):
    lines = [
        {key: value for key, value in line.items() if value is not ...}
        for line in lines_of(runs[0], 1, **others)
    ]
    with pytest.raises(ConfigError, match=told) as caught:
        scored_by(runs[0], 1, lines, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_rollout_of_several_turns_needs_a_reward_for_each(runs, tmp_path):
    (group, *_) = history.read(runs[0]).groups(1)
    first, *others = group.rollouts
    groups = [attrs.evolve(group, rollouts=(attrs.evolve(first, turns=2, turn_tokens=(1, 1)), *others))]
    line = {"step": 1, "group": 0, "seed": first.seed, "reward": 3.0, "success": None}
    rewards = {(0, first.seed): line}
    with pytest.raises(ConfigError, match="turn_rewards is null; expected a value; the key is missing"):
        fork.rewarded(groups, rewards, tmp_path)
    rewards = {(0, first.seed): line | {"turn_rewards": [1.0, 2.0], "turn_states": ["", "hall"]}}
    judged = fork.rewarded(groups, rewards, tmp_path)[0].rollouts[0]
    assert (judged.reward, judged.turn_rewards, judged.turn_states) == (3.0, (1.0, 2.0), ("", "hall"))


def test_two_rewards_of_one_rollout_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="has two lines of the same rollout of step 1"):
        scored_by(runs[0], 1, [*lines_of(runs[0], 1), *lines_of(runs[0], 1)], tmp_path)


@pytest.mark.parametrize("key", ["health.canary_tolerance=1", 'trainer.stop_when="reward/x > 1"', "seed=9"])
def test_a_fork_refuses_a_key_that_no_step_depends_on(key, runs):
    with pytest.raises(ConfigError, match=f"^--set {key.partition('=')[0]}: a fork computes a step again"):
        fork.fork(runs[0], step=1, settings=[key])


@pytest.mark.slow
def test_a_fork_with_the_values_of_the_run_says_so(runs, capsys):
    assert fork.fork(runs[0], step=1, settings=["trainer.threads=1"]) == 0
    assert "note: the run had these values already" in capsys.readouterr().out


def test_a_fork_refuses_what_would_make_other_rollouts(runs):
    with pytest.raises(
        ConfigError, match=r"rollout.max_tokens: a fork computes a step again from its stored"
    ):
        fork.fork(runs[0], step=1, settings=["rollout.max_tokens=3"])


@pytest.mark.nightly
def test_a_fork_computes_with_the_threads_that_are_asked_for(runs, capsys):
    assert fork.fork(runs[0], step=1, settings=["trainer.threads=2"]) == 0
    assert "torch threads: 1 as it was, 2 forked" in capsys.readouterr().out
    assert fork.fork(runs[0], step=1, settings=["trainer.lr=0.01"]) == 0
    assert "torch threads" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^--scored .*rewards.jsonl: cannot be read: No such file or directory$"),
        ("rubbish", r"^--scored .*rewards.jsonl: is not a file of rewards as `grpo-core score` writes it: "),
        ('{"step": 1}', r"is not a file of rewards"),
    ],
)
def test_rewards_that_cannot_be_read_are_reported_without_a_class(tmp_path, content, message):
    file = tmp_path / "rewards.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        fork.read_rewards(file, 1)
    assert "Error" not in str(caught.value)
