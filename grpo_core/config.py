"""The configuration of a run: what may be written in CONFIG.toml or with ``--set section.key=value``.

Every key has a default.  An unknown key is an error that names the nearest known key.  Each part of the
program receives its own section and no other.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, le, lt, optional

from grpo_core.credentials import secrets_in
from grpo_core.errors import ConfigError, did_you_mean

GOAL = re.compile(r"\s*(\S+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
"""A condition on a metric: its name, the comparison, and a number."""

TASK_NAME = r"[A-Za-z0-9_.-]{1,64}"
"""Names of tasks; they are names of files, too."""
NAMED = {"tasks": "task", "validation.sets": "set"}
"""Tables whose keys are such names, and what they name."""


@frozen(kw_only=True)
class LoraConfig:
    """LoRA trains two small matrices beside each chosen layer, the adapters, and keeps the model's weights.

    The section `[model.lora]`, empty or not, turns it on.
    """

    rank: int = field(default=16, validator=ge(1))
    """Each adapter is a product of two matrices with this inner dimension."""
    alpha: float = field(default=32.0, validator=gt(0))
    """Adapters are multiplied by `alpha / rank`."""
    targets: list[str] = field(factory=list)
    """Names of the layers that get adapters, as in `["q_proj", "v_proj"]`; if the list is empty, all linear
    layers but the output layer."""
    dropout: float = field(default=0.0, validator=[ge(0), lt(1)])
    """Share of an adapter's inputs that are dropped in passes with a gradient; engines never drop any, so
    this adds noise to the ratios of the loss."""
    publish: Literal["adapters", "merged"] = "adapters"
    """A weight sync sends the adapters alone, which the engine adds to the model's files, or the sum of both
    ("merged"), for engines on machines without these files."""


@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """The model is a directory, a hub id, or the name of a model that a plugin makes; "tiny" is made locally,
    with 90,000 parameters."""
    options: dict[str, Any] = field(factory=dict)
    """Options of a model that a plugin makes; "tiny" has `width`, `layers` and `warm_start_steps`."""
    chat_template: str = ""
    """Chat template instead of the tokenizer's, saved with the model: a file in Jinja's language, or
    "chatml", which comes with grpo-core, writes ChatML as Qwen models read it, and keeps reasoning."""
    chat_template_kwargs: dict[str, Any] = field(factory=dict)
    """Variables that the chat template reads, such as `enable_thinking = false` for Qwen3."""
    response_format: str = "auto"
    """Format in which reasoning and tool calls are read from a completion: "auto" is the tokenizer's own, or
    calls between <tool_call> and </tool_call>; others, such as "qwen3" and "gpt-oss", come with
    `pip install 'grpo-core[formats]'`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Matrix products in training use this type, and engines receive the weights in it; the trainer's own
    weights and its optimizer stay float32. "auto" is bfloat16 on a GPU and float32 on a CPU."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    lora: LoraConfig | None = None
    """Adapters that are trained instead of the model's weights."""


@frozen(kw_only=True)
class TeacherConfig:
    """The teacher, a frozen model that scores the policy's tokens for on-policy distillation."""

    path: str = ""
    """The teacher is a model's directory, a hub id, or a run's directory, which stands for its newest
    checkpoint. Its vocabulary has to be that of the trained model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The teacher's weights and matrix products have this type; "auto" is bfloat16 on a GPU and float32 on a
    CPU."""
    trust_remote_code: bool = False
    """Allow code that comes with the teacher to run."""


@frozen(kw_only=True)
class SourceConfig:
    """A file or data set of prompts, for tasks whose environment has none."""

    path: str = ""
    """Training prompts come from this file (.jsonl, .csv, .tsv, .parquet, .arrow or .feather) or data set (a
    directory or a hub id); if it is empty, from the environment."""
    validation_path: str = ""
    """Held-out prompts come from this file or data set.  If it is empty, they come from `path` if that is a
    data set and `validation_split` is given, otherwise from the environment."""
    subset: str = ""
    """Name of the subset, for a data set with several."""
    split: str = "train"
    """Split of a data set with the training prompts."""
    validation_split: str = ""
    """Split of a data set with the held-out prompts."""
    prompt: str = ""
    """Field of a row with the prompt, as text or messages.  If it is empty, the first of `prompt`, `messages`
    and `question` that exists is used."""
    answer: str = "answer"
    """Field of a row with the answer.  Another field than `answer` has to be in at least one row."""
    id: str = "id"
    """Field of a row with the id; the default id is the row's number.  All other fields become the prompt's
    `info`."""
    system: str = ""
    """System message before each prompt, unless it is empty."""
    template: str = ""
    """Jinja template of the prompt with the fields of a row, instead of `prompt`, such as
    "{{ question }} Answer with a number."."""
    answer_template: str = ""
    """Jinja template of the answer with the fields of a row, instead of `answer`."""
    where: str = ""
    """A row is a prompt if it fulfils this Jinja expression over its fields, such as
    'level == "5" and question | length < 500'; the others are left out."""
    deduplicate: bool = False
    """The first of several rows with the same prompt counts alone; white space makes no difference."""
    workers: int = field(default=0, validator=ge(0))
    """Number of processes that read rows ahead; they pay only for rows that are slow to read."""


@frozen(kw_only=True)
class TaskConfig:
    """A named source of prompts: an environment with its options."""

    env: str
    """Name of the environment, as in "math:sort" or "./file.py:Class"."""
    options: dict[str, Any] = field(factory=dict)
    """Options are passed to the environment's factory."""
    weight: float = field(default=1.0, validator=ge(0))
    """Relative share of the prompts, for samplers that weigh tasks."""
    success: float | None = None
    """Reward from which a rollout is a success, which `accuracy` counts; without it, the environment's own
    threshold, if it declares one."""
    source: SourceConfig = field(factory=SourceConfig)
    """Prompts can come from a file or data set instead of the environment."""
    python: str = ""
    """The environment runs in this Python interpreter or directory of a virtual environment, instead of
    `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables are set in this environment's process, besides `environment.env_vars`."""


@frozen(kw_only=True)
class PluginChoice:
    """The name of a plugin's offer, and the options of its factory."""

    name: str
    """Name of the offer, as `grpo-core plugins` lists it."""
    options: dict[str, Any] = field(factory=dict)
    """Options are passed to the offer's factory."""


@frozen(kw_only=True)
class SamplerConfig(PluginChoice):
    """The sampler, which chooses the next prompts."""

    name: str = "mix"
    """Name of the sampler, as `grpo-core plugins` lists it, or `./file.py:Name`."""


@frozen(kw_only=True)
class DynamicSamplingConfig:
    """Dynamic sampling replaces groups whose rewards are all equal, because they have no learning signal."""

    enabled: bool = False
    """Train only groups whose rewards differ, and generate others instead of the rest."""
    tolerance: float = field(default=0.0, validator=ge(0))
    """Rewards of a group are equal if they differ by no more than this."""
    max_extra_groups: int = field(default=0, validator=ge(0))
    """The run ends with an error when more groups than this are filtered between two steps.  0 allows 20 for
    each group of a step."""


def _range(instance: object, attribute: attrs.Attribute[Any], value: tuple[float, float]) -> None:
    low, high = value
    if not low < high and value != (0.0, 0.0):
        raise ValueError(f"'{attribute.name}' must be [low, high] with low < high: {list(value)}")


@frozen(kw_only=True)
class ShapingConfig:
    """Shaping changes the rewards that advantages compare; metrics and records keep the original ones.

    It is applied in the order of the keys.
    """

    weights: dict[str, float] = field(factory=dict)
    """The reward is the sum of these parts (`Feedback.metrics`), each times its weight; without parts, the
    environment's reward."""
    source: tuple[float, float] = field(default=(0.0, 0.0), validator=_range)
    """Rewards are clipped to this range, [lowest, highest], and mapped to `target`; [0, 0] is off."""
    target: tuple[float, float] = field(default=(0.0, 0.0), validator=_range)
    """The range `source` becomes this range; [0, 0] only clips."""
    truncated_factor: float = field(default=1.0, validator=[ge(0), le(1)])
    """The reward of a rollout that a token limit cut off is multiplied by this."""
    token_price: float = field(default=0.0, validator=ge(0))
    """Each sampled token costs this much reward."""
    overlong_buffer: int = field(default=0, validator=ge(0))
    """DAPO's soft overlong punishment rises over this many tokens below `overlong_limit`; 0 is off."""
    overlong_limit: int = field(default=0, validator=ge(0))
    """Rollouts with this many sampled tokens or more have the whole penalty; 0 takes `rollout.max_tokens`."""
    overlong_penalty: float = field(default=1.0, validator=ge(0))
    """The whole penalty of an overlong rollout."""


def _ports(instance: object, attribute: object, value: tuple[int, int]) -> None:
    first, last = value
    if tuple(value) != (0, 0) and not 1 <= first <= last <= 65535:
        raise ValueError(
            "'collective_ports' must be [first, last] with 1 <= first <= last <= 65535, or [0, 0] for any "
            f"free port: {list(value)}"
        )


@frozen(kw_only=True)
class EngineConfig(PluginChoice):
    """The engine, which generates completions."""

    name: str = "local"
    """Name of the engine, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    threads: int = field(default=0, validator=ge(0))
    """Number of torch threads on the CPU; 0 uses half of the cores if training runs at the same time,
    otherwise all."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Time limit in seconds for a weight update and for the start of the engine; a process that exceeds it is
    replaced, once for each update."""
    workers: int = field(default=1, validator=ge(1))
    """Number of engines that share the requests, on this machine or in workers of a cluster."""
    max_requests: int = field(default=0, validator=ge(0))
    """Largest number of requests that each engine is given at the same time; the others wait, the oldest
    first.  0 leaves the number to the engine."""
    gpus: list[int] = field(factory=list)
    """GPUs of this machine for the engines, shared evenly among `workers`: with two workers, `[0, 1, 2, 3]`
    gives the first engine 0 and 1.  If the list is empty, they share all GPUs but the trainer's."""
    gpus_per_worker: float = field(default=0.0, validator=ge(0))
    """Number of GPUs of each engine worker in a cluster; with 0, a worker sees none."""
    placement: Literal["pack", "spread"] = "pack"
    """Place the engine workers of a cluster on as few machines as possible ("pack") or on as many
    ("spread")."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables are set in each engine worker of a cluster before the engine's plugin is
    loaded. The value "$NAME" stands for the variable NAME of this process."""
    transport: Literal["auto", "shm", "cuda_ipc", "collective"] = "auto"
    """Transport of weights to engines: `shm` works through shared memory (in a cluster, its object store),
    `cuda_ipc` by a handle to GPU memory, `collective` by NCCL between GPUs and by TCP otherwise. `auto` is
    `shm`: the two others have not been run on GPUs yet."""
    collective_host: str = "127.0.0.1"
    """Engines reach the trainer at this address of its machine (`collective` only); on a cluster use an
    address of its network."""
    collective_ports: tuple[int, int] = field(default=(0, 0), validator=_ports)
    """Engines reach the trainer at the first free port of this range, [first, last] (`collective` only);
    [0, 0] is any free port. A firewall has to let the range through."""


@frozen(kw_only=True)
class LossConfig(PluginChoice):
    """The loss, which the optimizer minimises."""

    name: str = "grpo"
    """Name of the loss, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """The losses of an update's tokens are averaged over all tokens ("token"), over the rollouts of their
    means ("sequence"), over the prompts of their means ("prompt"), or summed and divided by the number of
    rollouts times `aggregation_constant` ("constant"), whatever the loss is."""
    aggregation_constant: float = field(default=0.0, validator=ge(0))
    """The sum of a rollout's losses is divided by this with `aggregation = "constant"`; Dr. GRPO takes the
    largest number of tokens of a completion, 1 sums them up."""
    all_rows: bool = False
    """Rollouts with advantage 0 are trained as well, so that they count in the averages; losses with other
    terms need them in any case."""
    max_sequence_error: float = field(default=0.0, validator=ge(0))
    """Rollouts are not trained if the mean of exp(|difference of logprobs between engine and trainer|) over
    their tokens is above this; 0 trains all.  It costs one more forward pass."""

    def __attrs_post_init__(self) -> None:
        if (self.aggregation == "constant") != (self.aggregation_constant > 0):
            raise ValueError(
                f"aggregation = {self.aggregation!r} with aggregation_constant = "
                f'{self.aggregation_constant:g}: aggregation "constant" needs a constant above 0, such as '
                "rollout.max_tokens, and no other has one"
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
    clip_low: float | None = None
    """Advantages below this are raised to it; without it there is no lower limit."""
    clip_high: float | None = None
    """Advantages above this are lowered to it; without it there is no upper limit."""


@frozen(kw_only=True)
class EnvironmentConfig:
    """Rules for calling environments, in training and validation."""

    workers: int = field(default=1, validator=ge(1))
    """Number of workers per environment that share the episodes, on this machine or in a cluster."""
    max_batch: int = field(default=256, validator=ge(1))
    """Largest number of episodes in one call."""
    max_wait: float = field(default=0.005, validator=ge(0))
    """An episode waits this many seconds for others to share its call."""
    deadline: float | None = field(default=None, validator=optional(gt(0)))
    """Time limit of a call in seconds.  Then an async call is cancelled; if the process does not react, it is
    killed, and each episode is tried alone.  If this is not set, the environment may declare it; the default
    is 30."""
    start_deadline: float = field(default=120.0, validator=gt(0))
    """Time limit in seconds for the start of an environment, and for its prompts."""
    concurrency: int | None = field(default=None, validator=optional(ge(0)))
    """Number of calls of an async `evaluate`, of tools and of `open` that run at once in each worker, each
    with one episode (or one group, if the environment compares rollouts).  A call that ends makes room for
    the next at once.  0 gives `evaluate` batches, one after another.  If this is not set, the environment may
    declare it; the default is 0."""
    max_error_rate: float = field(default=0.2, validator=[ge(0), le(1)])
    """The run ends when more calls than this share of 200 have failed among the last 200 calls of a task, or
    20 in a row; 1 turns both rules off.  A call judges an episode, or a group if the environment compares
    rollouts.  A prompt's first failure is tried again and does not count, unless `rollout.max_retries` is
    0."""
    python: str = ""
    """Environments run in this Python interpreter (3.11 or newer), or in this directory of a virtual
    environment, with the packages and plugins that are installed there.  If it is empty, they run in the
    interpreter of grpo-core."""
    agent_host: str = "127.0.0.1"
    """Agents find the model at this address of this machine; on a cluster use an address of its network."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables are set in the environments' processes.  The value "$NAME" stands for the
    variable NAME of this process, so that no file holds a secret."""


CUTS = ("top_p", "top_k", "min_p")
"""Keys that cut the distribution that a validation samples from."""


@frozen(kw_only=True)
class RolloutConfig:
    """Limits and sampling parameters of rollouts."""

    group_size: int = field(default=8, validator=ge(2))
    """Number of rollouts of each prompt."""
    temperature: float = field(default=1.0, validator=gt(0))
    """Sampling temperature of the completions."""
    max_tokens: int = field(default=256, validator=ge(1))
    """Largest number of tokens in one completion."""
    max_prompt_tokens: int = field(default=0, validator=ge(0))
    """Training and held-out prompts with more tokens than this are left out before the run begins, and a
    message tells their number; 0 keeps all.  Prompts that leave no room for `max_tokens` are skipped when
    they are drawn.  An agent writes its own prompts, which this does not limit."""
    max_turns: int = field(default=0, validator=ge(0))
    """Largest number of completions in a rollout, if its environment allows more; 0 leaves it to the
    environment."""
    max_total_tokens: int = field(default=0, validator=ge(0))
    """Largest number of tokens in a rollout (prompt, completions and the environment's messages); 0 uses all
    positions of the model."""
    max_tool_calls: int = field(default=0, validator=ge(0))
    """Largest number of tool calls in a rollout; 0 means no limit."""
    truncated: Literal["train", "mask", "unscored"] = "train"
    """Rollouts that a token limit cut off are trained like others ("train"), their reward only counts in
    the mean of their group ("mask"), or they are not judged and do not count at all ("unscored")."""
    stop: list[str] = field(factory=list)
    """A completion ends with any of these strings, or with the tokenizer's end-of-sequence token."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Time limit in seconds for one attempt at a rollout; then it is tried again.  It includes the time in
    which requests wait for room in the engine: raise it for long completions."""
    max_retries: int = field(default=3, validator=ge(0))
    """Number of attempts after the first; then the prompt is skipped, and the skip is recorded."""
    max_in_flight: int = field(default=0, validator=ge(0))
    """Largest number of rollouts that are played at the same time, those of a validation included; 0 means no
    limit.  The rollouts of a group begin together, so a group that is larger is played alone."""


def _goal(instance: object, attribute: object, value: str) -> None:
    if value and not GOAL.fullmatch(value):
        raise ValueError(
            f"'stop_when' must be NAME >= NUMBER or NAME <= NUMBER, as in validation/sort/accuracy >= 0.95: "
            f"{value!r}"
        )


ActivationsChoice = Literal["keep", "recompute", "offload"]


@frozen(kw_only=True)
class TrainerConfig(PluginChoice):
    """The trainer with its steps, optimizer and device."""

    name: str = "torch"
    """Name of the trainer, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    steps: int = field(default=100, validator=ge(1))
    """Number of steps of the run."""
    epochs: float = field(default=0.0, validator=ge(0))
    """The run has as many steps as it takes to draw the prompts of all tasks this many times, instead of
    `steps`; 0 means `steps`. Prompts that are filtered, skipped or passed over count as drawn."""
    time_limit: float = field(default=0.0, validator=ge(0))
    """End the run before this many seconds since its start, or its resume, are over, early enough for a
    complete checkpoint; 0 means no limit. `--until TIME` sets it."""
    stop_when: str = field(default="", validator=_goal)
    """End the run with a checkpoint as soon as a metric of a step or of a validation reaches a value, as in
    `validation/sort/accuracy >= 0.95` or `kl <= 0.1`."""
    prompts_per_step: int = field(default=16, validator=ge(1))
    """Number of groups in one step."""
    updates_per_step: int = field(default=1, validator=ge(1))
    """Number of optimizer updates in one step."""
    lr: float = field(default=1e-6, validator=gt(0))
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    lr_end: float = field(default=0.1, validator=[ge(0), le(1)])
    """A linear or cosine schedule ends at this share of `lr`."""
    warmup_updates: int = field(default=5, validator=ge(0))
    """Number of updates in which the learning rate rises linearly to `lr`."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), validator=deep_iterable([ge(0), lt(1)]))
    """Decay rates of AdamW's first and second moments."""
    weight_decay: float = field(default=0.0, validator=ge(0))
    """Weight decay of matrices; `optimizer.decay` extends it to all parameters."""
    max_grad_norm: float = field(default=1.0, validator=gt(0))
    """Gradients are clipped to this norm."""
    proximal: Literal["recompute", "generation", "interpolate"] = "recompute"
    """Proximal logprobs are recomputed with the trainer's weights at the start of the step (one more forward
    pass if there are several updates), taken from generation, or interpolated between generation and policy
    by the staleness of each token, without a forward pass (A-3PO)."""
    reference_every: int = field(default=0, validator=ge(0))
    """The reference model of a KL term takes the trained weights every this many steps; with 0 it keeps the
    weights that the run started from."""
    reference_mix: float = field(default=1.0, validator=[gt(0), le(1)])
    """The reference model becomes this share of the trained weights and keeps the rest of its own when it is
    refreshed; 1 copies them, less makes an exponential moving average."""
    tokens_per_microbatch: int = field(default=8192, validator=ge(1))
    """Largest number of tokens in a micro-batch, padding included; a longer row gets a micro-batch of its
    own."""
    packing: Literal[False, True, "auto"] = False
    """Rows of a micro-batch stand one after the other without padding, each attends to itself alone, and a
    prompt that several rows share is computed once; if false, rows of about the same length are side by
    side. "auto" does for each update what costs less by a rule that was measured on CPUs."""
    activations: ActivationsChoice = "keep"
    """Activations of each layer are kept until the backward pass ("keep"), or computed again there from the
    layer's input, which is gradient checkpointing and about a third more work ("recompute"); "offload" also
    moves these inputs from a GPU to the machine's memory."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Passes compute with float32 weights, which matrix products round ("float32"), or with bfloat16 copies
    of one layer at a time, made of the float32 weights that the optimizer updates ("bfloat16", which is
    FSDP2's mixed precision): activations are bfloat16, and the trainer scores with exactly the weights that
    engines get. For `model.dtype = "bfloat16"`."""
    compile: bool = False
    """Layers are compiled by torch, which takes a minute at the first step and makes later ones faster where
    small operations take much of the time; it needs a C++ compiler."""
    fingerprints: bool = True
    """The fingerprints of the weights and of the optimizer's state after each step are in `events.jsonl`, so
    that `grpo-core replay` can compare; they cost two passes over this memory."""
    profile: int = field(default=0, validator=ge(0))
    """Time this many steps after the first two in every process, trace as many more in the trainer, and write
    where the time went into the run's directory; 0 does nothing. `--profile N` sets it."""
    offload: bool = False
    """Between two steps, the weights and the optimizer's state are in the machine's memory instead of the
    GPU's, so that an engine on the same GPU has that; for `pipeline.max_staleness = 0`, where the engine and
    the trainer take turns."""
    device: str = "auto"
    """Device of the trainer: "cpu", "cuda", or "auto" for CUDA if it is available."""
    gpus: list[int] = field(factory=list)
    """The trainer computes on this GPU of this machine, as in `[7]`.  If the list is empty, on the
    first one that no engine is given."""
    ranks: int = field(default=1, validator=ge(1))
    """Number of processes that train together: each holds a part of the weights, gradients and optimizer, and
    computes a part of the rows. With GPUs, each has one of its own."""
    threads: int = field(default=0, validator=ge(0))
    """Number of torch threads on the CPU; 0 uses half of the cores if generation runs at the same time,
    otherwise all."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Time limit in seconds for the start, and for each step, publication and save."""


def _some(instance: object, attribute: attrs.Attribute[Any], value: list[str]) -> None:
    if not value:
        raise ValueError(f"'{attribute.name}' must name at least one pattern: {value}")


@frozen(kw_only=True)
class ParameterGroupConfig:
    """Parameters with a learning rate or a weight decay of their own."""

    parameters: list[str] = field(validator=_some)
    """Patterns of the names of parameters, as in `["*embed_tokens*", "model.layers.0.*"]`; a parameter
    belongs to the first group with a pattern that fits."""
    lr: float | None = field(default=None, validator=optional(ge(0)))
    """Peak learning rate of these parameters; the schedule scales it like `trainer.lr`, which holds if this
    is not set. With 0 they stay as they are."""
    weight_decay: float | None = field(default=None, validator=optional(ge(0)))
    """Weight decay of all of these parameters; without it, `trainer.weight_decay` and `optimizer.decay`
    hold."""


@frozen(kw_only=True)
class OptimizerConfig(PluginChoice):
    """The optimizer, and groups of parameters that it trains in another way."""

    name: str = "adamw"
    """Name of the optimizer, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    decay: Literal["matrices", "all"] = "matrices"
    """Weight decay acts on matrices only, not on the gains of norms and on biases ("matrices"), or on all
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
    """Train groups as they become ready, by deadline, or in the order of their prompts, which is
    reproducible: with `in_flight_updates = false`, or `max_staleness = 0`, the engine `local` then decodes
    each call alone, which is slower, and equal runs have equal weights."""
    in_flight_updates: bool = True
    """Running requests continue with new weights; if false, a weight update waits until no request is
    running."""


INHERITED = ("name", "every", "at_start", "prompts", "top_p", "top_k", "min_p", "deadline")
"""Keys that a set of held-out prompts takes from ``[validation]`` if it has none of its own."""


@frozen(kw_only=True)
class ValidationSetConfig:
    """A named set of held-out prompts: of a task, or of an environment that nothing is trained on.

    The keys after `source` are those of `[validation]`, and a key that is not set has its value from there.
    """

    task: str = ""
    """The set has the held-out prompts of this task, and its environment."""
    env: str = ""
    """Name of the set's own environment, as in "math:sort" or "./file.py:Class", instead of `task`; it needs
    no prompts for training."""
    env_options: dict[str, Any] = field(factory=dict)
    """Options are passed to the factory of `env`."""
    success: float | None = None
    """Reward from which a rollout in `env` is a success; without it, the environment's own threshold."""
    source: SourceConfig = field(factory=SourceConfig)
    """Prompts for `env` can come from a file or data set: from its `validation_path`, or else its `path`."""
    python: str = ""
    """`env` runs in this Python interpreter or virtual environment, instead of `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables are set in the process of `env`, besides `environment.env_vars`."""
    name: str | None = None
    """Name of the validation strategy."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the strategy, such as `n` and `temperature`; with the strategy of `[validation]` its options
    count as well."""
    every: int | None = field(default=None, validator=optional(ge(0)))
    """Measure the set every this many steps, and after the last; 0 leaves it to `grpo-core validate`."""
    at_start: bool | None = None
    """Measure the weights that the run starts from as well."""
    prompts: int | None = field(default=None, validator=optional(ge(1)))
    """Largest number of prompts."""
    top_p: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    """Sample from the likeliest tokens whose probabilities add up to this."""
    top_k: int | None = field(default=None, validator=optional(ge(0)))
    """Sample from this many likeliest tokens; 0 is all tokens."""
    min_p: float | None = field(default=None, validator=optional([ge(0), le(1)]))
    """Sample from tokens with at least this share of the likeliest token's probability."""
    deadline: float | None = field(default=None, validator=optional(gt(0)))
    """Time limit in seconds for each set of rollouts of the strategy."""

    def __attrs_post_init__(self) -> None:
        if bool(self.task) == bool(self.env):
            raise ValueError(
                f"task = {self.task!r} with env = {self.env!r}: a set has the prompts of a task, or an "
                "environment of its own"
            )
        of_env = (
            self.env_options,
            self.success is not None,
            self.source != SourceConfig(),
            self.python,
            self.env_vars,
        )
        if self.task and any(of_env):
            raise ValueError(
                f"task = {self.task!r} with env_options, success or source: these belong to `env`, and a "
                "task has its own"
            )


@frozen(kw_only=True)
class ValidationConfig(PluginChoice):
    """The validation strategy, and when it runs."""

    name: str = "greedy"
    """Name of the validation strategy, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    every: int = field(default=10, validator=ge(0))
    """Validate every this many steps, and after the last; 0 means never."""
    at_start: bool = True
    """Validate the weights that the run starts from as well."""
    prompts: int = field(default=200, validator=ge(1))
    """Largest number of held-out prompts per task."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Sample from the likeliest tokens whose probabilities add up to this; 1 is all tokens.  Like the next
    two keys it is for strategies that sample; training always samples from the whole distribution."""
    top_k: int = field(default=0, validator=ge(0))
    """Sample from this many likeliest tokens; 0 is all tokens."""
    min_p: float = field(default=0.0, validator=[ge(0), le(1)])
    """Sample from tokens with at least this share of the likeliest token's probability; 0 is all tokens."""
    pause: bool = False
    """Pause training during validation.  If false, training goes on; the validated weights stay the same in
    either case."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Time limit in seconds for each set of rollouts of a strategy; unfinished rollouts are unscored.  A
    strategy that neither plays rollouts nor returns for twice as long ends the run."""
    engine: EngineConfig | None = None
    """A separate engine for validation, with its own options; training does not wait for its results."""
    sets: dict[str, ValidationSetConfig] = field(factory=dict)
    """Named sets of held-out prompts, which are measured besides those of the tasks, by metrics
    `validation/SET/NAME`. A set has no task's name."""

    @property
    def measures(self) -> bool:
        """Whether a run measures anything."""
        return bool(self.every or self.due_sets)

    @property
    def longest_deadline(self) -> float:
        return max([self.deadline, *(self.of_set(name).deadline for name in self.sets)])

    @property
    def due_sets(self) -> list[str]:
        """Names of the sets that a run measures."""
        return [name for name in self.sets if self.of_set(name).every]

    def environments(self, sets: Iterable[str]) -> dict[str, TaskConfig]:
        """Return the environments of those of the sets that have their own."""
        found = {name: self.sets[name] for name in sets if self.sets[name].env}
        return {
            name: TaskConfig(
                env=one.env,
                options=one.env_options,
                success=one.success,
                source=one.source,
                python=one.python,
                env_vars=one.env_vars,
            )
            for name, one in found.items()
        }

    def of_set(self, name: str) -> ValidationConfig:
        """Return the section as it is for a set, whose own keys come first."""
        chosen = self.sets[name]
        own = {key: value for key in INHERITED if (value := getattr(chosen, key)) is not None}
        inherited = self.options if own.get("name", self.name) == self.name else {}
        return attrs.evolve(self, options={**inherited, **chosen.options}, sets={}, **own)


@frozen(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = field(default=20, validator=ge(0))
    """Save every this many steps; 0 means only at the end."""
    keep: int = field(default=2, validator=ge(1))
    """Number of newest complete checkpoints that stay on disk."""
    keep_every: int = field(default=0, validator=ge(0))
    """Checkpoints at multiples of this many steps stay on disk for ever; 0 means none."""
    best: str = ""
    """The checkpoint with the largest value of this metric of a task or validation set stays on disk, too, as
    in `validation/sort/accuracy`; with `-` before the name, the one with the smallest value. Checkpoints
    are compared that are validated: choose `checkpoint.every` as a multiple of `validation.every`."""
    async_save: bool = True
    """Save in the background from a snapshot in host memory, which stays allocated (12 bytes per float32
    parameter). If false, training waits until the checkpoint is written."""


@frozen(kw_only=True)
class TrackingConfig:
    """The trackers, which receive the metrics, rollouts and events of a run.

    A table `[tracking.NAME]` holds the options of the tracker NAME.
    """

    trackers: list[str] = field(factory=lambda: ["files", "terminal", "report"])
    """Names of the trackers. `files` writes `metrics.jsonl`, `events.jsonl`, `rollouts/` and
    `validation/`; without it the run leaves no report and cannot be verified."""
    options: dict[str, dict[str, Any]] = field(factory=dict)
    """Options by tracker; they are written as tables `[tracking.NAME]`, without the word `options`."""


_LIMITS: Any = deep_iterable(ge(0))


@frozen(kw_only=True)
class HealthConfig:
    """Limits of health metrics, [warn, abort] for the median of the last five steps; 0 disables one."""

    canary_tolerance: float = field(default=0.0, validator=ge(0))
    """Largest difference of logprobs between engine and trainer after a weight sync.  0 chooses 0.001, or 0.1
    if one of them computes in bfloat16."""
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
    max_memory: float = field(default=1.0, validator=ge(0))
    """The run is refused before it starts if the parts of its memory that it certainly needs take more than
    this share of the available memory of the host or of a GPU; 0 turns the check off."""


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
    """Name of the data plane: `memory` is the process of the run; `ray`, with `--ray`, is Ray's object store,
    from which the trainer's processes fetch the tokens of their rows."""


@frozen(kw_only=True)
class Config:
    """The configuration of a run."""

    seed: int = field(default=0, validator=[ge(0), lt(2**63)])
    """Seed of everything that is random in the run."""
    plugins: list[str] | None = None
    """Names of the plugins that may be loaded; by default all installed ones may."""
    tasks: dict[str, TaskConfig] = field(factory=dict)
    """Tasks by name; each is a source of prompts with its environment. A name has up to 64 letters (a to z),
    digits and the characters `.`, `_`, `-`, since files are named after it."""
    model: ModelConfig = field(factory=ModelConfig)
    sampler: SamplerConfig = field(factory=SamplerConfig)
    dynamic_sampling: DynamicSamplingConfig = field(factory=DynamicSamplingConfig)
    engine: EngineConfig = field(factory=EngineConfig)
    environment: EnvironmentConfig = field(factory=EnvironmentConfig)
    placement: PlacementConfig = field(factory=PlacementConfig)
    data_plane: DataPlaneConfig = field(factory=DataPlaneConfig)
    rollout: RolloutConfig = field(factory=RolloutConfig)
    advantage: AdvantageConfig = field(factory=AdvantageConfig)
    shaping: ShapingConfig = field(factory=ShapingConfig)
    filters: dict[str, dict[str, Any]] = field(factory=dict)
    """Filters by name, each with its options: `[filters.pass_rate]` and `high = 0.9` below it. A group that
    one of them rejects is not trained, and another prompt is drawn instead."""
    loss: LossConfig = field(factory=LossConfig)
    teacher: TeacherConfig = field(factory=TeacherConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    pipeline: PipelineConfig = field(factory=PipelineConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    health: HealthConfig = field(factory=HealthConfig)
    tracking: TrackingConfig = field(factory=TrackingConfig)


# ---------------------------------------------------------------------------------- reading


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; a configuration is a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as TOML: its values are nested too deeply") from None


def parse_setting(setting: str) -> dict[str, Any]:
    """``"trainer.lr=1e-4"`` as ``{"trainer": {"lr": 1e-4}}``; a value that is not TOML is a string."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting}: expected section.key=value, as in --set trainer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise ConfigError(f"--set {key}: its value is nested too deeply") from None
    nested: Any = value
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return typing.cast("dict[str, Any]", nested)


def parse_settings(settings: Iterable[str], onto: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a table with what each ``--set`` says, the later ones over the earlier ones and ``onto``."""
    table = dict(onto or {})
    for setting in settings:
        table = merge(table, parse_setting(setting))
    return table


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key, everything else in ``over`` replaces what is in ``base``."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def replace_parts(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without the options of those parts that ``over`` replaces by others."""
    kept = dict(table)
    for section, above in over.items():
        below = kept.get(section)
        if (
            isinstance(below, Mapping)
            and isinstance(above, Mapping)
            and above.get("name", below.get("name")) != below.get("name")
        ):
            kept[section] = {key: value for key, value in below.items() if key != "options"}
    return kept


def build(layers: Iterable[Mapping[str, Any]]) -> Config:
    """The configuration from tables, later ones over earlier ones.

    Raises ConfigError that names every unknown key (with the nearest known one) and every bad value.
    """
    try:
        merged: dict[str, Any] = {}
        for layer in layers:
            merged = merge(merged, layer)
        secrets = map(_refuse_secret, sorted(set(secrets_in(merged))))
        merged = _with_tracker_options(merged)
        problems = [*secrets, *_problems(Config, merged, "")]
        if problems:
            raise ConfigError("\n".join(problems))
        config = cattrs.structure(merged, Config)
        as_toml(config)
        return config
    except cattrs.BaseValidationError as error:
        raise ConfigError("\n".join(_out_of_range(error, ""))) from None
    except RecursionError:
        raise ConfigError("the configuration: a value is nested too deeply") from None


def _refuse_secret(key: str) -> str:
    return (
        f"configuration key {key!r}: looks like a secret, and the configuration is written to config.toml, "
        "events.jsonl and report.html of the run. Set an environment variable instead, and let the plugin "
        "read it (os.environ): child processes have the variables of grpo-core"
    )


def as_table(config: Config) -> dict[str, Any]:
    """Plain dicts and lists; ``build([as_table(c)]) == c``.  Keys that are None are left out."""
    table: dict[str, Any] = _without_none(cattrs.unstructure(config))
    table["tracking"] |= table["tracking"].pop("options")
    return table


def _with_tracker_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the tables ``[tracking.NAME]`` to where ``TrackingConfig`` has them."""
    given = table.get("tracking")
    if not isinstance(given, Mapping):
        return dict(table)
    options = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    rest = {key: value for key, value in given.items() if key not in options}
    return {**table, "tracking": {**rest, "options": options}}


def _without_none(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def as_toml(config: Config) -> str:
    """The resolved configuration as it is written into the run's directory."""
    import tomli_w

    return tomli_w.dumps(as_table(config))


def _problems(kind: Any, value: Any, where: str) -> Iterable[str]:
    """Describe what is wrong with a value: unknown or missing keys, and wrong types."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and attrs.has(kind):
        yield from _table_problems(kind, value, where)
    elif origin in (typing.Union, types.UnionType):
        if value is not None:
            yield from _problems(next(k for k in arguments if k is not types.NoneType), value, where)
    elif origin is Literal:
        if value not in arguments:
            yield _expected(where, " or ".join(map(repr, arguments)), value)
    elif origin is dict:
        if not isinstance(value, Mapping):
            yield _expected(where, "a table", value)
        else:
            if where in NAMED:
                yield from (_name(where, name) for name in value if not re.fullmatch(TASK_NAME, name))
            for key, item in value.items():
                yield from _problems(arguments[1], item, f"{where}.{key}")
    elif origin in (list, tuple):
        if not isinstance(value, list | tuple):
            yield _expected(where, "a list", value)
        elif origin is tuple and len(value) != len(arguments):
            yield _expected(where, f"{len(arguments)} values", value)
        else:
            for i, item in enumerate(value):
                yield from _problems(arguments[0], item, f"{where}.{i}")
    elif kind is not Any and (expected := _scalar_problem(kind, value)):
        yield _expected(where, expected, value)


def _table_problems(kind: type, value: Any, where: str) -> Iterable[str]:
    if not isinstance(value, Mapping):
        yield _expected(where, "a table", value)
        return
    known = attrs.fields_dict(attrs.resolve_types(kind))
    prefix = f"{where}." if where else ""
    for key, item in value.items():
        if key in known:
            yield from _problems(known[key].type, item, prefix + key)
        else:
            yield f"unknown configuration key {prefix + key!r}.{_nearest(key, known, prefix)}"
    for key, attribute in known.items():
        if attribute.default is attrs.NOTHING and key not in value:
            yield f"configuration key {prefix + key!r} is missing"


def _nearest(key: str, known: Mapping[str, Any], prefix: str) -> str:
    """Return a hint at the key that was meant: one beside it, or one of that name in a section."""
    if prefix == "rollout." and key in CUTS:
        return (
            " Training samples from the whole distribution, since its logprobs are those of all tokens; "
            f"validation.{key} is for validation"
        )
    if near := did_you_mean(key, set(known)):
        return near
    if "options" in known:
        what = "name" if key == "strategy" else f"options.{key}"
        return f" Did you mean {prefix + what!r}, {'the strategy' if key == 'strategy' else 'an option'}?"
    inside = [
        f"{section}.{key}"
        for section, attribute in attrs.fields_dict(attrs.resolve_types(Config)).items()
        if (kind := attribute.type) and attrs.has(kind) and key in attrs.fields_dict(kind)
    ]
    return f" Did you mean {' or '.join(map(repr, inside))}?" if inside and not prefix else ""


def _name(where: str, name: str) -> str:
    return (
        f"configuration key {where!r}: the name {name[:80]!r} of a {NAMED[where]} has to be 1 to 64 letters, "
        "digits and the characters . _ -"
    )


def _scalar_problem(kind: type, value: Any) -> str:
    """Describe the expected type, or return an empty string."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind is str:
        return "" if isinstance(value, str) else "a string"
    if not number:
        return "a number"
    return "a whole number" if kind is int and value != int(value) else ""


def _expected(where: str, expected: str, value: Any) -> str:
    return f"configuration key {where!r}: expected {expected}, got {value!r}"


def _out_of_range(error: BaseException, where: str) -> Iterable[str]:
    """The leaves of cattrs' exception group, each with the section that it is about."""
    if not isinstance(error, cattrs.BaseValidationError):
        yield f"configuration key {where!r}: {error}" if where else f"configuration: {error}"
        return
    for inner in error.exceptions:
        names = [getattr(note, "name", None) for note in getattr(inner, "__notes__", ())]
        place = ".".join(filter(None, [where, *(name for name in names if isinstance(name, str))]))
        yield from _out_of_range(inner, place)
