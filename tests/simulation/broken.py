"""Labelled broken runs without end: for each cause that ``grpo-core explain`` knows, what brings it about.

    python -m simulation.broken --cause learning_rate_too_high --seed 3 --output /tmp/run

A run is drawn healthy, with random sizes, times, samplers and noise (``healthy``), and then one thing is
broken, with a random severity.  Nothing else differs: names, seeds and keys of the configuration are drawn
alike, and what is broken is in the configuration only where a user would have broken it there.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from simulation.learner import Task, World
from simulation.recorded_runs import record

NAMES = ("sort", "maths", "quiz", "code", "chat")


@define(kw_only=True)
class Draw:
    """A run that is drawn and not recorded yet."""

    rng: random.Random
    settings: dict[str, Any]
    world: World
    generation: float
    """Seconds in which the engines sample the rollouts of a step, about."""
    size: int = field(default=0)
    """Number of rollouts of a step."""

    def tasks(self, **changes: Any) -> None:
        """Change all tasks."""
        self.world.tasks = [evolve(task, **changes) for task in self.world.tasks]


def healthy(seed: int) -> Draw:
    """Draw a run in which nothing is wrong."""
    rng = random.Random(f"healthy/{seed}")
    prompts, group = rng.randint(4, 6), rng.randint(4, 6)
    staleness, workers = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 1, 1, 2, 3])
    names = rng.sample(NAMES, rng.choice([1, 1, 1, 2]))
    size, generation = prompts * group, 10.0 ** rng.uniform(0.0, 1.2)
    rows = max(2, int(size * rng.uniform(0.15, 0.4) / workers))
    settings = {
        "seed": seed,
        "trainer.steps": rng.randint(16, 22),
        "trainer.prompts_per_step": prompts,
        "trainer.lr": 1e-6 * rng.uniform(0.6, 1.6),
        "trainer.updates_per_step": rng.choice([1, 1, 1, 2]),
        "rollout.group_size": group,
        "rollout.max_tokens": rng.choice([20, 24, 32]),
        "rollout.deadline": 10_000.0,
        "rollout.temperature": rng.choice([1.0, 1.0, 0.9]),
        "pipeline.max_staleness": staleness,
        "pipeline.policy": rng.choice(["deadline", "deadline", "in_order"]),
        "engine.workers": workers,
        "validation.every": rng.choice([6, 8]),
        "validation.prompts": rng.choice([8, 10, 12]),
        "validation.name": "batched",
        "validation.options.temperature": 1.0,
        "checkpoint.every": rng.choice([0, 8, 10]),
        "loss.name": rng.choice(["grpo", "grpo", "cispo"]),
        "tracking.files.tokens": False,
        "tracking.files.every": 0,
    }
    tasks = [
        Task(
            name=name,
            length=rng.randint(2, 4),
            classes=tuple(rng.sample(range(6), rng.randint(2, 4))),
            prompts=rng.choice([150, 200, 300]),
            judge=rng.choice(["share", "share", "parts", "exact"]),
            seconds=generation * rng.uniform(0.002, 0.01),
            unscored=rng.choice([0.0, 0.0, 0.0, 0.004]),
        )
        for name in names
    ]
    if rng.random() < 0.2 and all(task.judge != "exact" for task in tasks):
        settings["dynamic_sampling.enabled"] = True
    world = World(
        tasks=tasks,
        rows=rows,
        token=generation * rows * workers / (size * 5.0),
        step=generation * rng.uniform(0.6, 1.3),
        sync=generation * rng.uniform(0.005, 0.03),
        publish=generation * rng.uniform(0.002, 0.01),
        cut=generation * rng.uniform(0.005, 0.03),
        write=generation * rng.uniform(0.05, 0.5),
        spread=rng.uniform(0.03, 0.15),
        hint=rng.uniform(2.2, 3.2),
        stop_bias=rng.uniform(0.4, 0.8),
        dies=rng.choice([0.0, 0.0, 0.0, 0.002]),
        restart=generation * 0.3,
    )
    return Draw(rng=rng, settings=settings, world=world, generation=generation, size=size)


Break = Callable[[Draw], None]
BREAKS: dict[str, Break] = {}
CAUSES: dict[str, str] = {}
"""The cause that ``grpo-core explain`` names, by what was broken."""


def breaks(what: str, *, cause: str = "") -> Callable[[Break], Break]:
    """Register what brings a cause about, which has its name unless another one is given."""

    def add(function: Break) -> Break:
        BREAKS[what], CAUSES[what] = function, cause or what
        return function

    return add


def drawn(cause: str, seed: int) -> Draw:
    """Draw a run with a cause, or a healthy one."""
    draw = healthy(seed)
    draw.rng = random.Random(f"{cause}/{seed}")
    if cause != "healthy":
        BREAKS[cause](draw)
    return draw


def write(path: Path, cause: str, seed: int) -> None:
    """Record a run with a cause in a directory."""
    draw = drawn(cause, seed)
    record(path, draw.settings, draw.world)


# ---------------------------------------------------------------------------------- rewards


@breaks("rewards_all_zero", cause="warned")
def _all_zero(draw: Draw) -> None:
    if draw.rng.random() < 0.5:
        draw.tasks(judge="zero")
    else:  # far too hard
        draw.tasks(judge="exact", length=12)
        draw.world.hint = draw.rng.uniform(0.0, 0.5)
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("rewards_all_full", cause="warned")
def _all_full(draw: Draw) -> None:
    if draw.rng.random() < 0.5:
        draw.tasks(judge="one")
    else:  # far too easy
        draw.world.hint = draw.rng.uniform(9.0, 12.0)
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("rewards_constant", cause="warned")
def _constant(draw: Draw) -> None:
    draw.tasks(judge="constant", breaks_at=draw.rng.choice([1.0, 0.3, 0.5]))
    if draw.world.tasks[0].breaks_at < 1.0:
        draw.tasks(judge="share")
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("filters_drop_most")
def _filters(draw: Draw) -> None:
    draw.settings["dynamic_sampling.enabled"] = True
    draw.tasks(judge="exact", length=3, seconds=draw.generation * 0.002)
    draw.world.hint = draw.rng.uniform(1.0, 1.4)
    draw.settings["trainer.lr"] *= 0.1


@breaks("rewards_not_numbers", cause="rollouts_unscored")
def _nan(draw: Draw) -> None:
    draw.tasks(nan=draw.rng.uniform(0.08, 0.3))
    draw.settings |= {"environment.max_error_rate": draw.rng.choice([0.2, 0.5, 1.0])}


@breaks("rollouts_unscored")
def _unscored(draw: Draw) -> None:
    draw.tasks(unscored=draw.rng.uniform(0.08, 0.3))
    draw.settings |= {"environment.max_error_rate": draw.rng.choice([0.2, 0.5, 1.0])}


@breaks("prompts_never_scored")
def _poisoned(draw: Draw) -> None:
    draw.tasks(poisoned=draw.rng.uniform(0.08, 0.25))
    draw.settings |= {"environment.max_error_rate": 1.0}


# ---------------------------------------------------------------------------------- texts and prompts


@breaks("completions_truncated", cause="warned")
def _truncated(draw: Draw) -> None:
    draw.world.stop_bias = draw.rng.uniform(-3.0, -1.6)
    draw.tasks(length=draw.rng.randint(8, 12), judge="share", shown_length=3)
    draw.settings["rollout.max_tokens"] = draw.rng.choice([6, 7, 8])


@breaks("solutions_too_long", cause="warned")
def _solutions(draw: Draw) -> None:
    draw.tasks(shown_length=draw.rng.randint(60, 400))


@breaks("no_stop_token", cause="warned")
def _no_stop(draw: Draw) -> None:
    draw.world.stops = False
    draw.tasks(judge=draw.rng.choice(["share", "parts"]))


@breaks("tools_not_in_prompt", cause="warned")
def _tools(draw: Draw) -> None:
    draw.tasks(tools=draw.rng.randint(1, 5))


@breaks("prompts_too_long", cause="warned")
def _long(draw: Draw) -> None:
    draw.tasks(long_prompts=draw.rng.uniform(0.05, 0.4))
    draw.world.positions = 256


@breaks("held_out_prompts_leaked", cause="warned")
def _leak(draw: Draw) -> None:
    draw.tasks(leaks=draw.rng.randint(4, 16))


@breaks("few_different_prompts")
def _few(draw: Draw) -> None:
    draw.tasks(prompts=draw.rng.randint(1, 6), classes=(0, 1, 2))


@breaks("one_task_dominates")
def _dominates(draw: Draw) -> None:
    first = draw.world.tasks[0]
    while len(draw.world.tasks) < draw.rng.choice([2, 3]):
        free = [name for name in NAMES if name not in [task.name for task in draw.world.tasks]]
        draw.world.tasks.append(evolve(first, name=free[0]))
    draw.settings[f"tasks.{first.name}.weight"] = draw.rng.uniform(40.0, 300.0)


# ---------------------------------------------------------------------------------- learning


@breaks("learning_rate_too_high")
def _lr_high(draw: Draw) -> None:
    draw.settings["trainer.lr"] = 1e-6 * 10 ** draw.rng.uniform(1.7, 4.0)
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("learning_rate_too_low")
def _lr_low(draw: Draw) -> None:
    draw.settings["trainer.lr"] = 1e-6 * 10 ** draw.rng.uniform(-9.0, -3.5)


@breaks("entropy_collapsed")
def _entropy(draw: Draw) -> None:
    draw.settings["loss.options.entropy.coefficient"] = -draw.rng.uniform(2.0, 6.0)
    draw.settings["loss.name"] = "grpo"
    draw.settings["trainer.updates_per_step"] = 1
    draw.tasks(judge="share", length=4)
    draw.world.hint = draw.rng.uniform(0.0, 0.2)
    draw.world.scale *= 3.0
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("reward_pays_length")
def _length(draw: Draw) -> None:
    draw.tasks(judge="pays_length", success=None, length=draw.rng.randint(2, 4))
    draw.world.hint = draw.rng.uniform(1.5, 2.2)
    draw.world.scale *= 2.0
    draw.settings |= {"rollout.max_tokens": draw.rng.choice([32, 48, 64]), "trainer.steps": 22}
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("reward_part_gamed")
def _part(draw: Draw) -> None:
    draw.tasks(judge="pays_style", success=None)
    draw.world.hint = draw.rng.uniform(2.2, 2.9)
    draw.world.scale *= 2.5
    draw.settings["trainer.steps"] = 22
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("overfitted")
def _overfit(draw: Draw) -> None:
    draw.tasks(classes=(0, 1), held_out_classes=(3, 4, 5), judge="share", length=4)
    draw.world.shared = draw.rng.uniform(2.0, 4.0)
    draw.world.hint = draw.rng.uniform(3.2, 3.8)
    draw.settings |= {"validation.prompts": 32, "trainer.steps": 24, "validation.every": 6}
    draw.settings.pop("dynamic_sampling.enabled", None)


@breaks("gradients_not_finite")
def _not_finite(draw: Draw) -> None:
    draw.world.nan_from = draw.rng.uniform(0.2, 0.8)


@breaks("gradient_clip_too_small")
def _clip(draw: Draw) -> None:
    draw.settings["trainer.max_grad_norm"] = 10 ** draw.rng.uniform(-6.0, -4.0)


@breaks("too_many_updates")
def _updates(draw: Draw) -> None:
    draw.settings |= {"trainer.updates_per_step": draw.rng.randint(12, 32), "loss.name": "grpo"}
    draw.settings.pop("dynamic_sampling.enabled", None)
    draw.settings["trainer.prompts_per_step"] = max(6, draw.settings["trainer.prompts_per_step"])
    draw.settings["trainer.lr"] = 4e-6
    draw.settings["trainer.proximal"] = draw.rng.choice(["generation", "recompute"])


@breaks("engine_logprobs_differ")
def _mismatch(draw: Draw) -> None:
    draw.world.warmth = draw.rng.choice([draw.rng.uniform(0.4, 0.7), draw.rng.uniform(1.5, 2.5)])


@breaks("engine_has_old_weights", cause="known_error")
def _old(draw: Draw) -> None:
    draw.world.old_weights = draw.rng.uniform(0.1, 0.8)


@breaks("staleness_too_high")
def _stale(draw: Draw) -> None:
    draw.settings |= {"pipeline.max_staleness": draw.rng.randint(9, 11), "pipeline.policy": "in_order"}
    draw.settings["trainer.lr"] = draw.rng.uniform(3e-6, 6e-6)
    draw.settings["trainer.prompts_per_step"] = 4
    draw.world.step *= draw.rng.uniform(0.6, 1.0)


# ---------------------------------------------------------------------------------- speed


@breaks("engine_is_the_bottleneck")
def _engine(draw: Draw) -> None:
    draw.world.token *= draw.rng.uniform(5.0, 20.0)


@breaks("environment_is_the_bottleneck")
def _environment(draw: Draw) -> None:
    seconds = draw.generation * draw.rng.uniform(4.0, 12.0)
    calls = draw.settings["trainer.prompts_per_step"]
    draw.tasks(episode_seconds=seconds / draw.size * len(draw.world.tasks), seconds=seconds / calls * 0.05)


@breaks("trainer_is_the_bottleneck")
def _trainer(draw: Draw) -> None:
    draw.world.step = draw.generation * draw.rng.uniform(6.0, 20.0)


@breaks("weight_sync_is_slow")
def _sync(draw: Draw) -> None:
    draw.world.sync = draw.generation * draw.rng.uniform(2.0, 6.0)


@breaks("publishing_is_slow", cause="weight_sync_is_slow")
def _publish(draw: Draw) -> None:
    draw.world.publish = draw.generation * draw.rng.uniform(2.0, 6.0)


@breaks("checkpoints_block")
def _checkpoints(draw: Draw) -> None:
    draw.settings["checkpoint.every"] = draw.rng.choice([1, 2])
    if draw.rng.random() < 0.5:
        draw.world.cut = draw.generation * draw.rng.uniform(2.0, 5.0)
    else:
        draw.world.write = draw.generation * draw.rng.uniform(8.0, 20.0)


@breaks("validation_blocks")
def _validation(draw: Draw) -> None:
    draw.settings |= {"validation.every": draw.rng.choice([1, 2]), "validation.prompts": 4 * draw.size}
    if draw.rng.random() < 0.5:
        draw.settings |= {"validation.pause": True}


@breaks("no_overlap")
def _overlap(draw: Draw) -> None:
    draw.settings["pipeline.max_staleness"] = 0
    draw.world.step = draw.generation * draw.rng.uniform(0.7, 1.3)


@breaks("too_few_in_flight")
def _in_flight(draw: Draw) -> None:
    group = draw.settings["rollout.group_size"]
    draw.settings["rollout.max_in_flight"] = group
    draw.world.rows = max(draw.world.rows, draw.size)
    draw.world.token = draw.generation * draw.rng.uniform(3.0, 6.0) / (draw.size / group) / 8.0


@breaks("updates_wait_for_rollouts")
def _waiting_updates(draw: Draw) -> None:
    draw.settings |= {"pipeline.in_flight_updates": False}
    draw.world.token *= draw.rng.uniform(1.0, 2.0)
    draw.world.step = draw.generation * draw.rng.uniform(0.2, 0.5)


# ---------------------------------------------------------------------------------- faults


@breaks("engine_dies", cause="process_dies")
def _engine_dies(draw: Draw) -> None:
    draw.world.dies = draw.rng.uniform(0.1, 0.3)
    draw.world.restart = draw.generation * draw.rng.uniform(0.1, 1.0)


@breaks("engine_is_late")
def _late(draw: Draw) -> None:
    draw.settings["engine.workers"] = draw.rng.choice([2, 3])
    draw.world.slow_member = draw.rng.uniform(100.0, 400.0)
    draw.world.sync = max(draw.world.sync, draw.generation * 0.02)


@breaks("environment_dies", cause="process_dies")
def _environment_dies(draw: Draw) -> None:
    draw.tasks(dies=draw.rng.uniform(0.08, 0.3))


@breaks("environment_hangs")
def _hangs(draw: Draw) -> None:
    draw.tasks(hangs=draw.rng.uniform(0.06, 0.2), patience=draw.generation * draw.rng.uniform(0.5, 3.0))
    draw.settings |= {"environment.max_error_rate": 1.0}


@breaks("environment_raises")
def _raises(draw: Draw) -> None:
    draw.tasks(raises=draw.rng.uniform(0.08, 0.5))
    draw.settings |= {"environment.max_error_rate": draw.rng.choice([0.2, 1.0])}


@breaks("rollouts_exceed_deadline")
def _deadline(draw: Draw) -> None:
    draw.settings["rollout.deadline"] = draw.world.token * draw.rng.uniform(7.0, 11.0)


@breaks("disk_nearly_full", cause="warned")
def _disk(draw: Draw) -> None:
    draw.world.free = 10 ** draw.rng.uniform(3.0, 4.0)


@breaks("disk_full", cause="known_error")
def _full(draw: Draw) -> None:
    draw.world.full_at = draw.rng.uniform(0.2, 0.9)


@breaks("out_of_memory", cause="known_error")
def _memory(draw: Draw) -> None:
    draw.world.memory_at = draw.rng.uniform(0.2, 0.9)


@breaks("killed")
def _killed(draw: Draw) -> None:
    draw.world.killed_at = draw.rng.uniform(0.2, 0.9)


def main() -> int:
    """Record one run."""
    parser = argparse.ArgumentParser(prog="python -m simulation.broken", description=main.__doc__)
    parser.add_argument("--cause", choices=["healthy", *BREAKS], default="healthy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    write(given.output, given.cause, given.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
