"""The sections of the loss, the advantages, the trainer, its optimizer and the pipeline."""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, le, lt, min_len, optional

from grpo_core.config.choices import PluginChoice
from grpo_core.config.idle import OF_LOSS, only_with

MOST_STEPS = 10**9
"""Largest number of steps: a run of one a second would take 30 years."""
GOAL = re.compile(r"\s*(\S+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
"""A condition on a metric: its name, the comparison, and a number."""


@frozen(kw_only=True)
class LossConfig(PluginChoice):
    """The loss, which the optimizer minimises."""

    name: str = "grpo"
    """Name of the loss, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """How an update averages the losses of its tokens, for any loss: over all tokens ("token"), as the mean
    of the rollouts' means ("sequence"), as the mean of the prompts' means ("prompt"), or summed and divided
    by the number of rollouts times `aggregation_constant` ("constant")."""
    aggregation_constant: float = field(default=0.0, validator=ge(0))
    """Divisor of the sum of a rollout's losses with `aggregation = "constant"`; Dr. GRPO uses the largest
    number of tokens of a completion, and 1 leaves the sum."""
    all_rows: bool = False
    """Train rollouts with advantage 0 as well, so that they count in the averages; losses with other terms
    always train them."""
    max_sequence_error: float = field(default=0.0, validator=ge(0))
    """Do not train rollouts whose mean of exp(|difference of logprobs between engine and trainer|) over their
    tokens exceeds this; 0 trains all.  It costs one more forward pass."""

    def __attrs_post_init__(self) -> None:
        if (self.aggregation == "constant") != (self.aggregation_constant > 0):
            raise ValueError(
                f"aggregation = {self.aggregation!r} with aggregation_constant = "
                f'{self.aggregation_constant:g}: aggregation "constant" needs a constant above 0, such as '
                "rollout.max_tokens, and the other aggregations need 0"
            )
        if 0 < self.max_sequence_error <= 1:
            raise ValueError(
                f"max_sequence_error = {self.max_sequence_error:g}: expected 0, or more than 1, since it "
                "is 1 for a rollout on which engine and trainer agree"
            )


@frozen(kw_only=True)
class AdvantageConfig(PluginChoice):
    """The advantage function, which compares the rewards of a group."""

    name: str = "group"
    """Name of the advantage function, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    clip_low: float | None = field(default=None, validator=optional(le(0)))
    """Advantages below this are raised to it; without it there is no lower limit."""
    clip_high: float | None = field(default=None, validator=optional(ge(0)))
    """Advantages above this are lowered to it; without it there is no upper limit."""


def _goal(instance: object, attribute: object, value: str) -> None:
    if value and not GOAL.fullmatch(value):
        raise ValueError(
            f"'stop_when' must be NAME >= NUMBER or NAME <= NUMBER, as in validation/sort/accuracy >= 0.95: "
            f"{value!r}"
        )


SCHEDULES = ("constant", "linear", "cosine")
"""Shapes of the learning rate."""


def _schedule(instance: object, attribute: object, value: str) -> None:
    if value not in SCHEDULES and not re.fullmatch(r".+:\w+", value):
        raise ValueError(
            f"'lr_schedule' must be {', '.join(map(repr, SCHEDULES))}, or a function, such as "
            f"'./file.py:name': {value!r}"
        )


ActivationsChoice = Literal["keep", "recompute", "offload"]


@frozen(kw_only=True)
class TrainerConfig(PluginChoice):
    """The trainer with its steps, optimizer and device."""

    name: str = "torch"
    """Name of the trainer, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    steps: int = field(default=100, validator=[ge(1), le(MOST_STEPS)])
    """Number of steps of the run."""
    epochs: float = field(default=0.0, validator=ge(0))
    """Number of passes over the prompts of all tasks, instead of `steps`; 0 means `steps`.
    Filtered and skipped prompts are replaced by others, so dynamic sampling draws prompts more often."""
    time_limit: float = field(default=0.0, validator=ge(0))
    """End the run with a complete checkpoint within this many seconds of its start or resume; 0 means no
    limit."""
    stop_when: str = field(default="", validator=_goal)
    """End the run with a checkpoint as soon as a metric of a step or of a validation reaches a value, as in
    `validation/sort/accuracy >= 0.95` or `mismatch_kl >= 0.5`."""
    prompts_per_step: int = field(default=16, validator=ge(1))
    """Number of groups in one step."""
    updates_per_step: int = field(default=1, validator=ge(1))
    """Number of optimizer updates in one step; each takes a part of the groups, so a step that trains fewer
    groups makes fewer updates."""
    lr: float = field(default=1e-6, validator=gt(0))
    """Peak learning rate."""
    lr_schedule: str = field(default="constant", validator=_schedule)
    """Shape of the learning rate after the warm-up: "constant", "linear", "cosine", or a function,
    `./file.py:name` or `module:name`, from the fraction of updates done, 0 to 1, to the factor of `lr`. It
    may also take the metrics of the step so far, which has none before it begins."""
    lr_end: float = field(default=0.1, validator=[ge(0), le(1)], metadata=only_with("lr_schedule"))
    """Final learning rate of a linear or cosine schedule, as a fraction of `lr`."""
    warmup_updates: int = field(default=5, validator=ge(0))
    """Number of updates in which the learning rate rises linearly to `lr`."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), validator=deep_iterable([ge(0), lt(1)]))
    """Decay rates of AdamW's first and second moments."""
    weight_decay: float = field(default=0.0, validator=ge(0))
    """Weight decay of matrices; `optimizer.decay` extends it to all parameters."""
    max_grad_norm: float = field(default=1.0, validator=gt(0))
    """Gradients are clipped to this norm."""
    proximal: Literal["recompute", "generation"] = "recompute"
    """Source of the proximal logprobs: recomputed with the trainer's weights at the start of the step (one
    more forward pass if there are several updates), or the engine's."""
    reference_every: int = field(default=0, validator=ge(0), metadata=only_with(OF_LOSS["reference"]))
    """Update the reference model of a KL term to the trained weights every this many steps; 0 keeps the
    weights that the run started from."""
    reference_mix: float = field(default=1.0, validator=[gt(0), le(1)], metadata=only_with("reference_every"))
    """Share of the trained weights in an updated reference model: 1 copies them, less makes an exponential
    moving average."""
    tokens_per_microbatch: int = field(default=8192, validator=ge(1))
    """Largest number of tokens in a micro-batch, padding included; a longer row is a micro-batch by itself. A
    value other than the default is refused if a completion alone may be longer."""
    packing: Literal[False, True, "auto"] = "auto"
    """Pack the rows of a micro-batch into one sequence without padding: each row attends only to itself, and
    a prompt that several rows share is computed once. If false, rows of about the same length are padded.
    "auto" packs on a CPU, and on a GPU in 16 bits; models that cannot be packed, and compiled layers, use
    padding."""
    activations: ActivationsChoice = "keep"
    """Keep the activations of each layer until the backward pass ("keep"), or recompute them from the layer's
    input: gradient checkpointing, about a third more work ("recompute"); "offload" also moves these inputs
    from a GPU to host memory."""
    compile: bool = False
    """Compile layers with torch. The first step takes a minute longer, and later ones are faster if small
    operations dominate. It needs a C++ compiler."""
    fingerprints: bool = True
    """Record fingerprints of the weights and the optimizer's state in `events.jsonl` after each step, for
    `grpo-core replay`. They cost two passes over this memory."""
    profile: int = field(default=0, validator=ge(0))
    """Trace this many steps of the trainer after the first two, with torch's profiler, and write the trace
    and torch's table of its operations into `profile/` of the run; 0 does nothing. `--profile N` sets it."""
    device: str = "auto"
    """Device of the trainer: "cpu", "cuda", or "auto" for CUDA if it is available."""
    gpus: list[int] = field(factory=list)
    """GPU of the trainer, as in `[7]`, one for each of its processes.  If the list is empty, the first ones
    that no engine uses."""
    threads: int = field(default=0, validator=ge(0))
    """Number of torch threads on the CPU; 0 uses half of the cores if generation runs at the same time,
    otherwise all."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Time limit in seconds for the start, and for each step, publication and save."""


@frozen(kw_only=True)
class ParameterGroupConfig:
    """Parameters with a separate learning rate or weight decay."""

    parameters: list[str] = field(validator=min_len(1))
    """Patterns of parameter names, as in `["*embed_tokens*", "model.layers.0.*"]`; a parameter
    belongs to the first group with a matching pattern."""
    lr: float | None = field(default=None, validator=optional(ge(0)))
    """Peak learning rate of these parameters; the schedule scales it like `trainer.lr`, which is the default.
    0 freezes them."""
    weight_decay: float | None = field(default=None, validator=optional(ge(0)))
    """Weight decay of all of these parameters; without it, `trainer.weight_decay` and `optimizer.decay`
    apply."""


@frozen(kw_only=True)
class OptimizerConfig(PluginChoice):
    """The optimizer, and parameter groups with other settings."""

    name: str = "adamw"
    """Name of the optimizer, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    decay: Literal["matrices", "all"] = "matrices"
    """Weight decay acts on matrices only, not on norm gains and biases ("matrices"), or on all
    parameters ("all")."""
    groups: dict[str, ParameterGroupConfig] = field(factory=dict)
    """Groups of parameters by name, each a table `[optimizer.groups.NAME]`."""


@frozen(kw_only=True)
class PipelineConfig:
    """The schedule of generation and training, which run at the same time."""

    max_staleness: int = field(default=1, validator=ge(0))
    """Largest number of steps between the weights that generate and the step that trains; 0 is
    synchronous."""
    policy: Literal["deadline", "in_order"] = "deadline"
    """Train ready groups by deadline, or in the order of their prompts, which is reproducible: with
    `in_flight_updates = false` or `max_staleness = 0`, calls of the engines `local` and `vllm` then do not
    depend on each other, which is slower, and equal runs have equal weights (docs/replay.md lists what else
    they need)."""
    in_flight_updates: bool = True
    """Running requests continue with new weights; if false, a weight update waits until no request is
    running."""
