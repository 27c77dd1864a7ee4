"""The sections of what surrounds a run, such as checkpoints, trackers and health."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, le

from grpo_core.config.choices import PluginChoice
from grpo_core.config.idle import only_with


@frozen(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = field(default=20, validator=ge(0))
    """Save every this many steps; 0 turns this off. The end of a run is always saved."""
    every_minutes: float = field(default=10.0, validator=ge(0))
    """Also save after the first step that ends this many minutes after the last checkpoint; 0 means never.
    The interval is at least 20 times as long as that checkpoint took."""
    keep: int = field(default=2, validator=ge(1))
    """Number of newest complete checkpoints to keep."""
    keep_every: int = field(default=0, validator=ge(0))
    """Keep checkpoints at multiples of this many steps forever; 0 means none."""
    best: str = ""
    """Also keep the checkpoint with the largest value of this metric, as in `validation/sort/accuracy`, or
    with the smallest value if `-` precedes the name. Only validated checkpoints are compared: choose
    `checkpoint.every` as a multiple of `validation.every`."""
    keep_best: int = field(default=1, validator=ge(1), metadata=only_with("best"))
    """Number of checkpoints to keep for `best`."""
    async_save: bool = True
    """Write a checkpoint while the next step computes its gradient; the update of the weights waits for it.
    If false, training waits until the checkpoint is written."""


@frozen(kw_only=True)
class TrackingConfig:
    """The trackers, which receive the metrics, rollouts and events of a run.

    A table `[tracking.NAME]` holds the options of the tracker NAME.
    """

    trackers: list[str] = field(factory=lambda: ["files", "terminal", "*"])
    """Names of the trackers. `files` writes `metrics.jsonl`, `events.jsonl`, `rollouts/` and
    `validation/`; without it the run leaves no report and cannot be verified. `*` stands for the trackers
    that installed plugins offer by default, such as the page of grpo-plugin-report."""
    options: dict[str, dict[str, Any]] = field(factory=dict)
    """Options by tracker; they are written as tables `[tracking.NAME]`, without the word `options`."""


def _in_order(instance: object, attribute: attrs.Attribute[Any], limits: tuple[float, float]) -> None:
    """Check that a metric that gets worse reaches the warning before the abort."""
    warn, abort = limits if attribute.name != "effective_sample_size" else limits[::-1]
    if warn > abort and min(limits) > 0:
        raise ValueError(
            f"'{attribute.name}' is {list(limits)}: the run would end before it warns; expected [warn, abort]"
        )


_LIMITS: Any = [deep_iterable(ge(0)), _in_order]


@frozen(kw_only=True)
class HealthConfig:
    """Limits of health metrics, [warn, abort] for the median of the last five steps; 0 disables one."""

    canary_tolerance: float = field(default=0.0, validator=ge(0))
    """Largest difference of a token's logprob between engine and trainer after a weight sync.  0 uses limits
    for mean and maximum that the dtype explains: 0.0003 and 0.001 in float32, 0.1 and 1 in bfloat16."""
    logprob_diff: tuple[float, float] = field(default=(0.5, 2.0), validator=_LIMITS)
    """Limits for the mean difference of logprobs between the engine and the trainer at the start of a
    step."""
    mismatch_kl: tuple[float, float] = field(default=(0.5, 4.0), validator=_LIMITS)
    """Limits for the KL from the policy that generated to the policy at the start of a step."""
    effective_sample_size: tuple[float, float] = field(default=(0.1, 0.01), validator=_LIMITS)
    """Limits for the effective sample size of the importance ratios, as a share of the tokens; smaller is
    worse."""
    clip_fraction: tuple[float, float] = field(default=(0.3, 0.9), validator=_LIMITS)
    """Limits for the share of clipped tokens, on either side."""
    max_non_finite: float = field(default=0.1, validator=[ge(0), le(1)])
    """The run stops when more than this share of an update's rows has a loss that is not finite; fewer rows
    are skipped and counted."""


@frozen(kw_only=True)
class PlacementConfig(PluginChoice):
    """The place where engines and environments run."""

    name: str = "local"
    """Name of the placement: `local` uses child processes of this machine; `--ray` chooses `ray`, a Ray
    cluster."""


@frozen(kw_only=True)
class DataPlaneConfig(PluginChoice):
    """The place of the tokens of finished rollouts, until they are trained."""

    name: str = "memory"
    """Name of the data plane: `memory` keeps tokens in the run's process; `ray`, with `--ray`, in Ray's
    object store, from which the trainer's processes fetch the tokens of their rows; `transferqueue`, with
    `--ray`, in storage units of TransferQueue (grpo-plugin-transferqueue)."""
