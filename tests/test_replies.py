"""Runs that look healthy and teach nothing, or the wrong thing, say so within a few steps."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from test_pipeline import Run

from grpo_core.contracts.events import WarningRaised
from grpo_core.contracts.records import Completion, Feedback, Group, Rollout, RunInfo
from grpo_core.diagnosis.replies import Diagnosis, Replies
from grpo_core.loop.health import WINDOW
from grpo_core.reporting.trackers import call
from grpo_core.testing import FakeEngine, FakeEnvironment, prompts

# ---------------------------------------------------------------------------------- nothing is learnt


def judged_run(reward, **options):
    return Run(environment=FakeEnvironment(lambda episode: Feedback(reward=reward(episode))), **options)


def warnings(run, **scores):
    """Return the warnings about rows of the tracker, which hears the events of a run."""
    said = []

    def warn(text, *, cause, step):
        said.append(WarningRaised(step=step, cause=cause, message=text))

    tracker = Diagnosis(RunInfo(name="run", directory=Path(), config={"scores": scores}, warn=warn))
    for event in run.events:
        call(tracker, event)
    return [event for event in said if event.cause == "rows"]


def test_a_run_whose_rewards_are_all_equal_says_so_after_five_steps():
    done = judged_run(lambda episode: 0.5, steps=7)()
    assert [event.step for event in warnings(done)] == [5, 6, 7]
    assert warnings(done)[0].message == (
        "the last 5 steps trained nothing: 100% of the groups of task 'task' have equal rewards (mean reward "
        "0.5), and its prompts are all too hard or all too easy for the model, or evaluate gives everything "
        "the same reward; read rollouts/ of the run"
    )
    assert not any(len(batch.rows) for batch in done.trainer.batches)


def test_rows_of_which_no_token_is_trained_teach_nothing():
    masked, some = {"rows": 8.0, "tokens/trained": 0.0}, {"rows": 8.0, "tokens/trained": 9.0}
    assert causes([step(half())] * 5, [masked] * 5) == ["rows"]
    assert causes([step(half())] * 5, [masked] * 4 + [some]) == []


def test_a_run_whose_replies_are_cut_off_says_what_to_raise():
    class Endless(FakeEngine):
        async def _one(self, request):
            return Completion.of((await super()._one(request)).tokens, "length")

    done = judged_run(lambda episode: 0.0, engine=Endless(), steps=5)()
    (warning,) = warnings(done)
    assert "100% of its rollouts are cut off by a token limit: raise rollout.max_tokens" in warning.message


def test_a_run_whose_replies_end_and_are_never_paid_says_to_look_at_their_format():
    """Most are cut off, but also those that ended by themselves were paid 0: a limit explains nothing."""

    class Half(FakeEngine):
        async def _one(self, request):
            reason = "length" if request.seed % 4 else "stop"
            return Completion.of((await super()._one(request)).tokens, reason)

    done = judged_run(lambda episode: 0.0, engine=Half(), steps=5)()
    (warning,) = warnings(done)
    assert "raise rollout.max_tokens" not in warning.message
    assert re.search(
        r"no reply was rewarded, also none of the \d\d% that ended by themselves: their format may not be "
        r"the one that evaluate expects, or the task is too hard; read rollouts/ of the run",
        warning.message,
    )


def test_an_advantage_function_that_masks_everything_is_named():
    done = Run(advantages=lambda groups: [[None] * len(group.rollouts) for group in groups], steps=5)()
    (warning,) = warnings(done)
    assert "the advantage function gives 0 or None to all of its rollouts" in warning.message


@pytest.mark.long
def test_a_run_that_trains_one_row_in_five_steps_is_not_warned_about():
    rewarded = []

    def once(episode):
        rewarded.append(episode.prompt.id == "9")
        return float(episode.prompt.id == "9" and episode.reply == "a")

    assert not warnings(judged_run(once, steps=7, policy="in_order")())
    assert any(rewarded)


# ---------------------------------------------------------------------------------- what the replies say


def reply(reward=0.0, *, text="a", cut=False, success=None, advantage=1.0, **parts):
    return Rollout(
        reward=reward,
        success=success,
        metrics=parts,
        finish_reason="length" if cut else "stop",
        messages=({"role": "user", "content": "?"}, {"role": "assistant", "content": text}),
        advantage=advantage,
    )


def step(replies, *, size=8):
    """The groups of a step whose replies these are."""
    (prompt,) = prompts(1)
    parts = [tuple(replies[i : i + size]) for i in range(0, len(replies), size)]
    return [
        Group(prompt=prompt, rollouts=part, generation_version=0, target_version=0, slot=0) for part in parts
    ]


def half():
    return [reply(float(i % 2)) for i in range(64)]


def findings(steps, metrics=None, **options):
    """Return the warnings of the last of these steps."""
    watch = Replies(**options)
    metrics = metrics or [{"rows": 8.0}] * len(steps)
    return [watch.observe(groups, of_step) for groups, of_step in zip(steps, metrics, strict=True)][-1]


def causes(steps, metrics=None, **options):
    return [finding.metric for finding in findings(steps, metrics, **options)]


def test_rows_without_an_advantage_are_not_a_signal_whatever_else_the_loss_trains_them_for():
    """A KL term trains all rows; only a teacher makes up for rewards that are all equal."""
    equal = step([reply(0.5, advantage=0.0)] * 64)
    assert causes([equal] * WINDOW) == ["rows"]
    assert causes([equal] * WINDOW, taught_by_rewards=False) == []


def test_a_task_among_others_that_pays_nothing_is_named():
    (other,) = prompts(1, task="other")
    unpaid = [evolve(group, prompt=other) for group in step([reply(0.0, advantage=0.0, text="so 4")] * 64)]
    (finding,) = findings([[*step(half()), *unpaid]] * WINDOW)
    assert finding.metric == "rows/other"
    assert "trained nothing of a task: 100% of the groups of task 'other'" in finding.message
    assert "'so 4'" in finding.message


def with_cut(share, *, cut_right, n=128):
    """Half of the replies are right; of these, and of the others, so many are cut off."""
    right = [reply(1.0, success=True, cut=i < cut_right * n / 2) for i in range(n // 2)]
    wrong = [reply(0.0, success=False, cut=i < share * n / 2) for i in range(n // 2)]
    return step([*right, *wrong])


def test_successes_that_do_not_end_are_said_before_half_of_them_are_cut():
    assert causes([with_cut(0.1, cut_right=0.2)] * WINDOW) == []
    (finding,) = findings([with_cut(0.1, cut_right=0.3)] * WINDOW)
    assert finding.metric == "accuracy_finished/task"
    assert "100 of 320 successes were cut off by a token limit (20 of 64 in the newest)" in finding.message
    assert "rollout.max_tokens alone feeds it" in finding.message


def test_failures_that_are_cut_are_not_successes():
    """The same two means as above: what counts is which replies are cut."""
    assert causes([with_cut(0.6, cut_right=0.0)] * WINDOW) == []


def test_all_or_nothing_rewards_are_successes_where_none_is_declared():
    paid = [reply(1.0, cut=i % 57 > 0) for i in range(57)]
    assert causes([step([*paid, *[reply(0.0)] * 71])] * WINDOW) == ["accuracy_finished/task"]


def test_masked_replies_teach_nobody_not_to_end():
    masked = [reply(1.0, cut=True, advantage=None)] * 40 + half()
    assert causes([step(masked)] * WINDOW) == []


def test_cut_replies_with_partial_rewards_are_said_within_five_steps():
    cut = step([reply(0.1 * (i % 7), cut=i % 32 > 0) for i in range(128)])
    assert causes([cut] * (WINDOW - 1)) == []
    (finding,) = findings([cut] * WINDOW)
    assert finding.metric == "truncated/task"
    assert "97% of the replies are cut off by a token limit" in finding.message


def test_a_model_that_is_paid_for_ending_is_left_alone_and_one_that_is_not_is_warned_of():
    def with_rewards(ended, cut):
        return step([reply(ended if i % 4 == 0 else cut, cut=i % 4 > 0) for i in range(64)] + [reply(0.5)])

    assert causes([with_rewards(0.9, 0.1)] * WINDOW) == []
    assert causes([with_rewards(0.1, 0.2)] * WINDOW) == ["truncated/task"]


def test_cut_replies_that_become_few_are_not_said():
    shares = [0.97, 0.9, 0.8, 0.6, 0.45]
    falling = [step([reply(0.1 * (i % 7), cut=i < share * 128) for i in range(128)]) for share in shares]
    assert causes(falling) == []


def test_complete_replies_in_another_format_are_shown_and_no_limit_is_blamed():
    replies = [reply(0.0, text=f"The answer\nis {i}.", advantage=0.0, tags=0.0) for i in range(128)]
    (finding,) = findings([step(replies)] * WINDOW)
    assert "their format may not be the one that evaluate expects" in finding.message
    assert "no reply in 640 had tags: nothing can be learned about it" in finding.message
    assert "'The answer is 125.', 'The answer is 126.', 'The answer is 127.'" in finding.message
    assert "max_tokens" not in finding.message


def test_a_part_that_no_reply_has_is_said_while_another_one_is_learnt():
    replies = [reply(0.1 * (i % 3), short=float(i % 3), tags=0.0) for i in range(128)]
    assert causes([step(replies)] * WINDOW) == ["never/task"]
    right = [reply(1.0, success=True, short=1.0, tags=0.0), *replies]
    assert causes([step(right)] * WINDOW) == [], "what no right reply has is not needed"


def test_a_part_that_no_reply_of_a_small_run_has_is_said_once_there_were_enough():
    replies = [reply(0.5 * (i % 2), one=float(i % 2), tags=0.0) for i in range(16)]
    assert causes([step(replies)] * 7) == []
    (finding,) = findings([step(replies)] * 8)
    assert "no reply in 128 had tags: nothing can be learned about it" in finding.message
    shown = [reply(0.5, one=1.0, tags=1.0), *replies]
    assert causes([step(replies), step(shown), *[step(replies)] * 7]) == [], "one has shown it"


def test_paid_replies_that_are_all_cut_off_are_not_answered_by_more_room():
    replies = [reply(float(i > 1), cut=True, advantage=0.0) for i in range(64)]
    (finding,) = findings([step(replies)] * WINDOW)
    assert "do not reward cut-off text" in finding.message
    assert "raise rollout.max_tokens" not in finding.message


# ---------------------------------------------------------------------------------- a part that is gamed


def replies_of(step_, *, format_, value, success=None):
    """Replies of which these shares have each part; both are paid."""
    rng = random.Random(step_)
    made = []
    for _ in range(128):
        one, other = float(rng.random() < format_), float(rng.random() < value)
        right = None if success is None else rng.random() < success
        made.append(reply(0.3 * one + 0.7 * other, success=right, format=one, value=other))
    return step(made)


def all_causes(steps):
    watch = Replies()
    return {finding.metric for groups in steps for finding in watch.observe(groups, {"rows": 8.0})}


def test_a_part_that_rises_while_another_one_vanishes_is_said_although_accuracy_stays_0():
    """The model finds that repeating the number is paid, and stops trying to be right."""
    values = [0.07, 0.15, 0.3, 0.3, 0.3, 0.25, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    formats = [min(1.0, 0.1 + 0.1 * i) for i in range(len(values))]
    gamed = [replies_of(i, format_=formats[i], value=value, success=0.0) for i, value in enumerate(values)]
    assert all_causes(gamed) == {"gamed/task/value"}
    watch = Replies()
    message = [watch.observe(groups, {"rows": 8.0}) for groups in gamed][-1][0].message
    assert re.search(r"value fell from 0\.\d+ to \S+ while format rose from 0\.\d+ to 0.9", message)


def test_a_part_gives_way_to_successes_without_a_word():
    steps = [replies_of(i, format_=i / 20, value=max(0.0, 0.4 - i / 20), success=i / 20) for i in range(20)]
    assert all_causes(steps) == set()


def test_a_count_of_mistakes_may_vanish():
    def of(i):
        rng = random.Random(i)
        made = []
        for _ in range(128):
            good = float(rng.random() < i / 20)
            made.append(reply(good, good=good, mistakes=float(rng.random() < 0.9 - 0.9 * good)))
        return step(made)

    assert all_causes([of(i) for i in range(1, 21)]) == set()


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_is_never_warned_about(seed):
    """Noise alone, at every level of two parts, in 60 steps of few replies."""
    rng = random.Random(seed)
    level, steps = [rng.random() * 0.3, rng.random() * 0.3], []
    for _ in range(60):
        level = [min(0.98, max(0.05, each + rng.gauss(0.005, 0.02))) for each in level]
        made = []
        for _ in range(32):
            one, other = (float(rng.random() < each) for each in level)
            right, cut = bool(one and other), rng.random() < 0.1
            made.append(reply(0.3 * one + 0.7 * other, success=right, cut=cut, one=one, other=other))
        steps.append(step(made))
    assert all_causes(steps) == set()


WITHOUT = """
from grpo_core.plugins import builtins
from grpo_core.reporting import trackers
trackers.ALWAYS = ()
del builtins.grpo_preflight
"""


@pytest.mark.slow
def test_a_run_without_the_diagnosis_trains_the_same_weights(tmp_path):
    def weights_of(name, without=""):
        program = tmp_path / f"{name}.py"
        program.write_text(
            "import sys\n"
            "import grpo_core\n"
            f"{without}"
            "if __name__ == '__main__':\n"
            "    grpo_core.train(env='math:sort', steps=2, output=sys.argv[1], trainer={'threads': 1},\n"
            "        engine={'threads': 1}, pipeline={'policy': 'in_order', 'max_staleness': 0})\n"
            "    print(*(name for name in sys.modules if name.startswith('grpo_core.diagnosis.')))\n"
        )
        done = subprocess.run([sys.executable, program, name], cwd=tmp_path, check=True, capture_output=True)
        files = sorted((tmp_path / name).rglob("*.safetensors"))
        return done.stdout.splitlines()[-1], [path.read_bytes() for path in files]

    room, trained = weights_of("with")
    assert room.count(b"grpo_core.diagnosis.") == 4, "replies, first_look, conventions and model_files"
    assert weights_of("without", WITHOUT) == (b"", trained) != (b"", [])
