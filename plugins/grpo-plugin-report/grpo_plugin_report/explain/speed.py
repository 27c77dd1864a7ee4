"""Causes in the use of time, from the timeline and the waiting times of steps."""

from __future__ import annotations

import math

from grpo_plugin_report.explain.causes import Finding, percent
from grpo_plugin_report.explain.facts import Facts

ENOUGH = 4
"""Smallest number of steps for findings about times."""


def _waits(facts: Facts) -> float:
    return facts.stage("wait for groups")


def _step(facts: Facts) -> str:
    return f"a step takes {facts.of('time/step').median:.3g} s (median of {facts.steps})"


def _training(facts: Facts) -> str:
    return f"the trainer computes in {percent(facts.stage('step'))} of the time"


def _enough(facts: Facts) -> bool:
    return facts.steps >= ENOUGH and facts.seconds > 0.0


def _environment(facts: Facts) -> tuple[str, float]:
    """Return the busiest environment, and the share of the time in which it was busy."""
    lanes = {lane for lane, _ in facts.lanes if lane.startswith("environment ")}
    shares = {lane: facts.lane(lane, "evaluate", "open", "close") for lane in lanes}
    lane = max(shares, key=lambda each: shares[each], default="environment")
    return lane, shares.get(lane, 0.0)


def checkpoints_block(facts: Facts) -> Finding | None:
    """Training waits for checkpoints."""
    cut, wait = facts.stage("cut of the checkpoint"), facts.stage("wait for the checkpoint")
    if not _enough(facts) or cut + wait < 0.2:
        return None
    return Finding.of(
        "Training waits for checkpoints.",
        f"{percent(cut)} of the time goes to cuts, {percent(wait)} to waiting for the last checkpoint",
        facts.settings("checkpoint.every", "checkpoint.async_save"),
        f"{_step(facts)}; {_training(facts)}",
        "raise checkpoint.every, keep checkpoint.async_save = true, or write to a faster disk",
    )


def validation_blocks(facts: Facts) -> Finding | None:
    """Training waits for validation."""
    share = facts.lane("validation", "validate")
    waits = facts.stage("wait for validation", "wait for the weight sync")
    if not _enough(facts) or share < 0.45 or waits < 0.35:
        return None
    return Finding.of(
        "Training waits for validation.",
        f"validations run in {percent(share)} of the time",
        f"training waits for them, or for the weight sync after them, in {percent(waits)} of the time",
        facts.settings("validation.every", "validation.prompts", "validation.pause"),
        "raise validation.every, lower validation.prompts, or give it an engine ([validation.engine])",
    )


def updates_wait_for_rollouts(facts: Facts) -> Finding | None:
    """New weights wait until all running rollouts have ended."""
    share = facts.lane("sync", "wait for rollouts to end")
    if not _enough(facts) or share < 0.25:
        return None
    return Finding.of(
        "New weights wait until all running rollouts have ended.",
        f"a weight sync waits for rollouts in {percent(share)} of the time",
        facts.settings("pipeline.in_flight_updates"),
        f"{_step(facts)}; training waits for groups in {percent(_waits(facts))} of the time and for the "
        f"sync in {percent(facts.stage('wait for the weight sync'))}",
        "set pipeline.in_flight_updates = true",
    )


def weight_sync_is_slow(facts: Facts) -> Finding | None:
    """The trainer takes long to publish its weights, or the engines to load them."""
    publishes, loads = facts.stage("publish"), facts.lane("sync", "update weights", "canary")
    if not _enough(facts) or (publishes < 0.2 and loads < 0.3):
        return None
    return Finding.of(
        "New weights take long from the trainer to the engines.",
        f"the trainer publishes in {percent(publishes)} of the time, engines load in {percent(loads)}",
        f"training waits for a weight sync in {percent(facts.stage('wait for the weight sync'))} of the "
        f"time; {_step(facts)}",
        facts.settings("engine.transport", "engine.workers", "trainer.ranks"),
        "choose a faster engine.transport (cuda_ipc on one machine, collective between machines), or train "
        "adapters (model.lora)",
    )


def too_few_in_flight(facts: Facts) -> Finding | None:
    """A limit of rollouts in flight keeps the engine idle."""
    limits = {
        "rollout.max_in_flight": facts.number("rollout.max_in_flight", 0.0),
        "engine.max_requests": facts.number("engine.max_requests", 0.0) * facts.number("engine.workers", 1.0),
    }
    key = min(limits, key=lambda name: limits[name] or math.inf)
    most = limits[key]
    group = facts.number("rollout.group_size", 8.0)
    wanted = facts.number("trainer.prompts_per_step", 1.0) * group
    if not _enough(facts) or not 0 < most <= 0.5 * wanted or _waits(facts) < 0.4:
        return None
    return Finding.of(
        "So few rollouts may be in flight that the engine has little to do.",
        f"{key} = {facts.setting(key)} lets {most:g} rollouts be played at the same time; a step trains "
        f"{wanted:g}",
        f"training waits for groups in {percent(_waits(facts))} of the time",
        f"the engines sample {facts.of('tokens_per_second/generation').median:.3g} tokens/s",
        f"set {key} = 0 (no limit), or raise it until at least {2 * wanted:g} are played at the same time",
    )


def environment_is_the_bottleneck(facts: Facts) -> Finding | None:
    """Training waits for environments."""
    lane, share = _environment(facts)
    if not _enough(facts) or share < 0.55 or _waits(facts) < 0.5:
        return None
    return Finding.of(
        "Training waits for an environment.",
        f"{lane} is busy in {percent(share)} of the time",
        f"training waits for groups in {percent(_waits(facts))} of the time; {_training(facts)}",
        f"{facts.settings('environment.workers', 'environment.max_batch')}; {_step(facts)}",
        "raise environment.workers, make evaluate async, or judge faster",
    )


def no_overlap(facts: Facts) -> Finding | None:
    """Generation and training take turns although they could run at the same time."""
    waits, trains = _waits(facts), facts.stage("step")
    if not _enough(facts) or facts.setting("pipeline.max_staleness") != 0 or min(waits, trains) < 0.25:
        return None
    return Finding.of(
        "Generation and training take turns.",
        "pipeline.max_staleness = 0: each step waits for rollouts of the newest weights",
        f"training waits for groups in {percent(waits)} of the time, and computes in {percent(trains)}",
        f"{_step(facts)}; with overlap about {facts.of('time/step').median * max(waits, trains):.3g} s",
        "set pipeline.max_staleness = 1",
    )


def engine_is_the_bottleneck(facts: Facts) -> Finding | None:
    """Training waits for sampling most of the time."""
    busy, judged = facts.lane("engine", "generate"), _environment(facts)[1]
    if not _enough(facts) or busy < 0.85 or judged > 0.5:
        return None
    if _waits(facts) < max(0.45, 2.5 * facts.stage("step")):
        return None
    return Finding.of(
        "Training waits for the engines most of the time.",
        f"training waits for groups in {percent(_waits(facts))} of the time; {_training(facts)}",
        f"the engines generate in {percent(busy)} of the time, environments judge in {percent(judged)}",
        f"{facts.of('tokens_per_second/generation').median:.3g} tokens/s with "
        f"{facts.settings('engine.workers')}",
        'raise engine.workers or use a faster engine (engine.name = "vllm"), or lower rollout.max_tokens',
    )


def trainer_is_the_bottleneck(facts: Facts) -> Finding | None:
    """The engines wait for the trainer most of the time."""
    share, generates = facts.stage("step"), facts.share_of_time("time/generate")
    rows = facts.of("tokens/padding")
    padding = rows.median if len(rows) else 0.0
    if not _enough(facts) or share < 0.85 or generates > 0.4:
        return None
    return Finding.of(
        "The engines wait for the trainer most of the time.",
        f"{_training(facts)}; {_step(facts)}",
        f"rollouts are played in {percent(generates)} of the time",
        f"{facts.settings('trainer.ranks', 'trainer.updates_per_step')}, padding {percent(padding)}",
        "raise trainer.tokens_per_microbatch, use more trainer.ranks, or lower trainer.updates_per_step; "
        'with much padding set trainer.packing = "auto"; --profile 3 shows where a step\'s time goes',
    )
