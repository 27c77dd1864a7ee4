"""The decision list: all causes in order of precedence.

First causes that end a run or lose its rollouts, then causes that leave no training signal, then changes of
the policy, then an otherwise unexplained end, and last the use of time: each explains the following ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve

from grpo_plugin_report.explain import faults, learning, rewards, speed
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.explain.facts import Facts

FAILED = "run_failed"
"""Name of the cause for errors that no other cause explains."""
CAUSES: Mapping[str, Callable[[Facts], Finding | None]] = {
    cause.__name__: cause
    for cause in (
        faults.known_error,
        faults.warned,
        faults.process_dies,
        faults.environment_hangs,
        faults.environment_raises,
        faults.prompts_never_scored,
        faults.rollouts_unscored,
        faults.engine_is_late,
        faults.rollouts_exceed_deadline,
        rewards.few_different_prompts,
        learning.engine_logprobs_differ,
        faults.gradients_not_finite,
        learning.learning_rate_too_high,
        rewards.filters_drop_most,
        rewards.reward_part_gamed,
        rewards.reward_pays_length,
        rewards.one_task_dominates,
        learning.staleness_too_high,
        learning.too_many_updates,
        learning.gradient_clip_too_small,
        learning.learning_rate_too_low,
        learning.hints_quoted,
        learning.hints_collapsed,
        learning.entropy_collapsed,
        learning.overfitted,
        faults.killed,
        faults.run_failed,
        speed.checkpoints_block,
        speed.updates_wait_for_rollouts,
        speed.weight_sync_is_slow,
        speed.too_few_in_flight,
        speed.environment_is_the_bottleneck,
        speed.no_overlap,
        speed.engine_is_the_bottleneck,
        speed.validation_blocks,
        speed.trainer_is_the_bottleneck,
    )
}


def explained(facts: Facts) -> list[Finding]:
    """Return the causes found in a run, the likeliest first."""
    found = [
        evolve(finding, cause=name) for name, cause in CAUSES.items() if (finding := cause(facts)) is not None
    ]
    if facts.error is None or not facts.error.message:
        return found
    said = facts.error.message
    quoted = any(said in line for each in found if each.cause != FAILED for line in each.evidence)
    return [each for each in found if each.cause != FAILED or not quoted]
