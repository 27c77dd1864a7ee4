"""Causes in the changes of the policy: steps too large or too small, collapse, stale rollouts."""

from __future__ import annotations

from grpo_plugin_report.explain.causes import Finding, percent
from grpo_plugin_report.explain.facts import Facts

ENOUGH = 5
"""Smallest number of steps for findings about learning."""


def _rise(facts: Facts) -> float:
    """Return the largest increase of a task's mean reward, at least 0."""
    rises = [facts.of(f"reward/{task}").rise for task in facts.tasks]
    return max((rise for rise in rises if rise == rise), default=0.0)


def _rewards(facts: Facts) -> str:
    rises = [f"{task} {facts.of(f'reward/{task}').moved}" for task in facts.tasks]
    return f"mean reward: {'; '.join(rises)}"


def _mixture_moved(facts: Facts) -> bool:
    """Whether a task's share of the groups changed by a fifth, which moves means over all tokens."""
    groups = {task: facts.of(f"groups/{task}") for task in facts.tasks}
    last = max((step for series in groups.values() for step in series.steps), default=0)

    def shares(first: float, end: float) -> list[float]:
        sizes = [
            sum(size for step, size in zip(series.steps, series.values, strict=True) if first < step <= end)
            for series in groups.values()
        ]
        return [size / (sum(sizes) or 1.0) for size in sizes]

    return any(abs(a - b) > 0.2 for a, b in zip(shares(0, last / 5), shares(last * 0.8, last), strict=True))


def engine_logprobs_differ(facts: Facts) -> Finding | None:
    """Engine and trainer disagree about the logprobs of fresh tokens."""
    series = facts.of("logprob_diff_mean")
    if not len(series):
        return None
    stale = facts.of("staleness_mean")
    fresh = series.values[0] if len(stale) and stale.values[0] == 0.0 else series.least
    if fresh < 0.1:
        return None
    ratio = facts.of("importance_ratio_max")
    return Finding.of(
        "Engine and trainer disagree about the tokens that the same weights sampled.",
        f"logprob_diff_mean of the first step, before anything was learnt: {fresh:.3g} nats",
        f"largest importance ratio: {ratio.most:.3g}; smallest effective_sample_size: "
        f"{facts.of('effective_sample_size').least:.3g}",
        facts.settings("rollout.temperature", "model.dtype", "engine.options"),
        "let the engine sample at rollout.temperature with top_p 1 and return logprobs of that distribution; "
        "compare dtypes; grpo-core check tests an engine",
    )


def learning_rate_too_high(facts: Facts) -> Finding | None:
    """Single steps change the policy so much that it breaks."""
    entropy, kl = facts.of("entropy"), facts.of("mismatch_kl")
    difference, size = facts.of("logprob_diff_mean"), facts.of("effective_sample_size")
    if len(entropy) < 2 or facts.number("trainer.updates_per_step", 1.0) > 8:
        return None
    if facts.number("loss.options.entropy.coefficient", 0.0) < 0.0:
        return None  # a negative entropy bonus explains the same numbers
    steps = min(4, len(entropy))
    fell = entropy.values[0] > 0.2 and min(entropy.values[:steps]) < 0.2 * entropy.values[0]
    fell = fell and _rise(facts) < 0.1
    wild = difference.usual_most > 1.0 or kl.usual_most > 1.0 or size.usual_least < 0.05
    stale = facts.of("staleness_mean").median > 4.0
    if stale or not (fell or wild):
        return None
    return Finding.of(
        "The learning rate is too high: single steps change the policy beyond recognition.",
        f"entropy: {entropy.values[0]:.3g} in the first step, {min(entropy.values[:steps]):.3g} within "
        f"{steps} steps",
        f"largest logprob_diff_mean {difference.most:.3g} nats, largest mismatch_kl {kl.most:.3g}; "
        f"{_rewards(facts)}",
        facts.settings("trainer.lr", "trainer.updates_per_step"),
        f"divide trainer.lr by 10 or more: --set trainer.lr={facts.number('trainer.lr', 1e-6) / 10:.0e}",
    )


def staleness_too_high(facts: Facts) -> Finding | None:
    """Rollouts are too stale when they are trained."""
    stale, difference = facts.of("staleness_mean"), facts.of("logprob_diff_mean")
    if not (stale.median >= 4.0 and difference.most >= 0.08):
        return None
    return Finding.of(
        "Rollouts are trained so many steps later that another policy sampled them.",
        f"mean staleness {stale.median:.3g} steps (median), largest {facts.of('staleness_max').most:g}; "
        f"{facts.settings('pipeline.max_staleness')}",
        f"largest logprob_diff_mean {difference.most:.3g} nats, smallest effective_sample_size "
        f"{facts.of('effective_sample_size').least:.3g}",
        f"training waits for groups in {percent(facts.stage('wait for groups'))} of the time",
        "set pipeline.max_staleness = 2",
    )


def too_many_updates(facts: Facts) -> Finding | None:
    """Each step makes so many updates that many tokens are clipped."""
    updates = facts.number("trainer.updates_per_step", 1.0)
    low, high = facts.of("clip_fraction_low"), facts.of("clip_fraction_high")
    if updates < 6 or not (low.most >= 0.06 or high.most >= 0.06):
        return None
    return Finding.of(
        "Each step makes so many updates from the same rollouts that the clip removes much of the gradient.",
        f"trainer.updates_per_step = {updates:g}",
        f"largest clip_fraction_low {percent(low.most)}, largest clip_fraction_high {percent(high.most)}",
        _rewards(facts),
        "set trainer.updates_per_step = 2, and raise trainer.lr instead if learning is too slow",
    )


def gradient_clip_too_small(facts: Facts) -> Finding | None:
    """The norm of every gradient is far above the clip."""
    norm, limit = facts.of("grad_norm"), facts.number("trainer.max_grad_norm", 1.0)
    if len(norm) < ENOUGH or limit <= 0.0 or norm.least < 30.0 * limit or norm.median < 50.0 * limit:
        return None
    return Finding.of(
        "Every gradient is clipped to a small part of its norm.",
        f"trainer.max_grad_norm = {limit:g}",
        f"grad_norm before the clip: smallest {norm.least:.3g}, median {norm.median:.3g}",
        f"the median is {norm.median / limit:.3g} times the limit; {_rewards(facts)}",
        f"set trainer.max_grad_norm near the median: --set trainer.max_grad_norm={norm.median:.1g}",
    )


def learning_rate_too_low(facts: Facts) -> Finding | None:
    """The policy does not change, although there is something to learn."""
    entropy, norm, stale = facts.of("entropy"), facts.of("grad_norm"), facts.of("staleness_mean")
    kl = facts.of("mismatch_kl")
    difference = facts.of("logprob_diff_mean")
    if facts.steps < 8 or len(norm) < 8 or norm.median <= 0.0:
        return None
    if stale.median > 0.3:  # stale tokens show how far the weights move
        still = difference.median < 1e-3 and kl.median < 1e-5
    else:
        still = abs(entropy.rise) < 0.01 * max(entropy.first, 1e-9) and abs(_rise(facts)) < 0.03
    if not still or entropy.last < 0.05:
        return None
    return Finding.of(
        "The policy does not change: the learning rate is too low, or the weights are frozen.",
        f"logprobs by weights that are {stale.median:.2g} steps older differ by {difference.median:.2g} nats",
        f"there is a gradient (grad_norm {norm.median:.3g}), and {_rewards(facts)}",
        f"{facts.settings('trainer.lr', 'trainer.updates_per_step')}, "
        f"lr at the end {facts.of('lr').last:.3g}",
        f"raise trainer.lr tenfold until logprob_diff_mean is near 0.01: --set trainer.lr="
        f"{facts.number('trainer.lr', 1e-6) * 10:.0e}",
    )


def hints_quoted(facts: Facts) -> Finding | None:
    """Wrong replies quote hints that they did not see."""
    hints, quoted = (sum(facts.of(name).values) for name in ("hints", "hints_quoted"))
    if quoted < 5 or quoted < 0.05 * hints:
        return None
    return Finding.of(
        "Replies quote the hints, which the policy does not see: it learns their words, not the task.",
        f"{quoted:g} of {hints:g} hinted rollouts are wrong and say a line of their hint",
        f"loss.options.teach = {facts.setting('loss.options.teach', 'wrong_only')}",
        _rewards(facts),
        "check that the environment does not show the hint in a message, and write hints that speak of the "
        "task, not of themselves",
    )


def hints_collapsed(facts: Facts) -> Finding | None:
    """Replies or their entropy collapsed while hints taught."""
    if facts.steps < 8 or not sum(facts.of("hints").values) or _mixture_moved(facts):
        return None
    entropy, lengths = facts.of("entropy"), [facts.of(f"completion_tokens/{task}") for task in facts.tasks]
    shorter = [each for each in lengths if len(each) and each.last < 0.5 * each.first]
    if _rise(facts) > 0.3 or not (shorter or entropy.last < 0.25 * entropy.first):
        return None
    length = shorter[0].moved if shorter else "no task has shorter replies"
    return Finding.of(
        "Hints teach the policy into a corner: replies or their entropy collapse without more reward.",
        f"entropy: {entropy.moved} (nats)",
        f"sampled tokens of a rollout: {length}",
        _rewards(facts),
        'set loss.options.teach = "wrong_only", [scores.hinted] weights = "start" with hint = true, or a '
        "lower loss.options.coefficient",
    )


def entropy_collapsed(facts: Facts) -> Finding | None:
    """The entropy collapsed before the policy was right."""
    entropy = facts.of("entropy")
    if len(entropy) < 8 or not entropy.last < 0.25 * entropy.first or _mixture_moved(facts):
        return None
    best = [facts.of(f"accuracy/{task}") for task in facts.tasks]
    right = max((series.last for series in best if len(series)), default=None)
    rewards = max((facts.of(f"reward/{task}").last for task in facts.tasks), default=0.0)
    if (rewards if right is None else right) > 0.6:
        return None
    coefficient = facts.setting("loss.options.entropy.coefficient", 0.0)
    return Finding.of(
        "The policy became certain of one reply before it was right: nothing is explored any more.",
        f"entropy: {entropy.moved} (nats)",
        _rewards(facts),
        f"loss.options.entropy.coefficient = {coefficient}, rollout.temperature = "
        f"{facts.setting('rollout.temperature')}",
        "set loss.options.entropy.target = 0.3 (the factor must not be negative), loss.options.clip_high = "
        "0.28 and rollout.temperature = 1.0",
    )


def overfitted(facts: Facts) -> Finding | None:
    """Held-out prompts get worse while training prompts do not."""
    for fall in filter(None, facts.falls.values()):
        before, now = fall.trained
        validated = facts.of(f"validation/{fall.task}/prompts").values
        trained = len(facts.prompts[fall.task].ids) if fall.task in facts.prompts else 0
        return Finding.of(
            f"Task {fall.task!r} gets worse on held-out prompts, and does not on training prompts.",
            f"mean reward in training: {before:.3g} at that time, {now:.3g} at the end",
            f"validation {fall.metric}: {fall.best:.3g} at step {fall.step}, {fall.last:.3g} at the end",
            f"{trained} different training prompts, "
            f"{f'{validated[-1]:g}' if validated else 'unknown'} held-out ones",
            "shuffle prompts with a seed before you split them, add training prompts like the held-out ones, "
            f'or keep the best checkpoint (checkpoint.best = "validation/{fall.task}/{fall.metric}")',
        )
    return None
