"""The configuration of a run, its sections and their keys, and the setup of a trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
from attrs import field, fields, frozen
from attrs.validators import deep_iterable, ge, gt, le, lt, min_len, optional

from grpo_core.config.idle import CLUSTER, MEASURED, WEIGHING, WORKER_GPUS, only_with
from grpo_core.contracts.loss import score_names
from grpo_core.contracts.records import WithSections

# ---------------------------------------------------------------------------------- shared by sections

TASK_NAME = r"[A-Za-z0-9_.-]{1,64}"
"""Pattern of task names, which are also file names."""


NAMED = {"tasks": "task", "validation.sets": "set", "scores": "score"}
"""Tables whose keys are such names, and the thing that each key names."""


@frozen(kw_only=True)
class PluginChoice:
    """The name of a plugin's offer, and the options of its factory."""

    name: str
    """Name of the offer, as `grpo-core plugins` lists it."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the offer's factory."""


# ---------------------------------------------------------------------------------- models, and scores


@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """Directory or hub id of the model, or the name of a model that a plugin makes; "tiny" is made locally,
    with 90,000 parameters."""
    options: dict[str, Any] = field(factory=dict)
    """Options of a model that a plugin makes; "tiny" has `width`, `layers` and `warm_start_steps`."""
    chat_template: str = ""
    """Chat template that replaces the tokenizer's and is saved with the model: a Jinja file, or "chatml",
    which comes with grpo-core, writes ChatML as Qwen models read it, and keeps reasoning."""
    chat_template_kwargs: dict[str, Any] = field(factory=dict)
    """Variables that the chat template reads, such as `enable_thinking = false` for Qwen3."""
    prompt_is_rendered: bool = False
    """Whether prompts are rendered text, such as few-shot examples for a base model: no chat template is
    used, and control tokens that prompts spell are these tokens. Otherwise their spelling is text. What tools
    and environments write is text in either case."""
    response_format: str = "auto"
    """Format in which reasoning and tool calls are read from a completion: "auto" is the tokenizer's own, or
    calls between <tool_call> and </tool_call>; others, such as "qwen3" and "gpt-oss", come with
    `pip install 'grpo-core[formats]'`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products in training, and of the weights that engines receive; the trainer's weights
    and its optimizer stay float32. "auto" is bfloat16 on a GPU, and for 50 million parameters or more on a
    processor with bfloat16 products (AVX512-BF16); float32 otherwise."""
    attention: str = ""
    """Attention of the trainer by its name in transformers, such as "eager", "sdpa", "flash_attention_2" or
    "flex_attention"; empty is the model's default. If it is set, rows are padded, not packed."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""


@frozen(kw_only=True)
class ScoreConfig:
    """A score, which the loss compares with: logprobs of the sampled tokens by named weights."""

    weights: str = field(default="start", validator=min_len(1))
    """Weights that score: "start" (those that the run started from; under adapters the model without them),
    "current" (those that a step starts from), "ema" (the start's, moved toward the trained ones), or a model
    with the same vocabulary: its directory or hub id, or the directory of a run for its newest checkpoint."""
    every: int = field(default=1, validator=ge(1))
    """Move the weights "ema" after every this many steps."""
    mix: float = field(default=0.05, validator=[gt(0), le(1)])
    """Share of the trained weights in a move of "ema"; 1 copies them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of a model's weights and matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    trust_remote_code: bool = False
    """Allow code that comes with a model to run."""

    hint: bool = False
    """Score in the hinted context, in which the first user message has the hint of the rollout."""

    def __attrs_post_init__(self) -> None:
        idle = ("dtype", "trust_remote_code") if not self.model else ()
        for name in (*idle, *(("every", "mix") if self.weights != "ema" else ())):
            if getattr(self, name) != getattr(fields(ScoreConfig), name).default:
                raise ValueError(f"{name} does nothing with weights = {self.weights!r}: leave it out")

    @property
    def model(self) -> str:
        """The model that scores; "" if the trained model has the weights."""
        return "" if self.weights in ("start", "current", "ema") else self.weights


USUAL_SCORES = {"reference": ScoreConfig(), "hinted": ScoreConfig(hint=True)}
"""Scores of which a loss may need one without a table of the configuration."""


def needed_scores(chosen: Mapping[str, ScoreConfig], needs: Iterable[str]) -> dict[str, ScoreConfig]:
    """Return the scores that a loss needs, except missing ones."""
    known = USUAL_SCORES | dict(chosen)
    return {name: known[name] for name in score_names(needs) if name in known}


# ---------------------------------------------------------------------------------- tasks and their data


@frozen(kw_only=True)
class RowOptions:
    """The keys of `data_options` that the core reads; all others are options of the dataloader."""

    prompt: str = ""
    """Field of a row with the prompt, as text or messages.  If it is empty, the first of `prompt`, `messages`
    and `question` that exists is used."""
    answer: str = "answer"
    """Field of a row with the answer."""
    id: str = "id"
    """Field of a row with the id; the default id is the row's number.  All other fields become the prompt's
    `info`."""
    system: str = ""
    """System message before each prompt, unless it is empty."""
    template: str = ""
    """Text that makes the prompt, instead of `prompt`, such as "{{ question }} Answer with a number."; each
    `{{ field }}` is replaced by the field of the row."""
    answer_template: str = ""
    """Text that makes the answer, instead of `answer`."""
    deduplicate: bool = False
    """Keep only the first of several rows with the same messages, for files and lists: their roles, texts and
    calls; white space around a text makes no difference."""
    split: str = ""
    """Split of a data set with the training prompts; the default is "train"."""
    validation_split: str = ""
    """Split of a data set with the held-out prompts; the default is "validation"."""
    exact: bool = True
    """Whether a resumed run has to continue with exactly the next row.  Without it, a stream whose position
    cannot be proved is accepted, and the run says so."""
    repeats: bool = False
    """Whether ids may repeat within an epoch, as with a weighted sampler."""


@frozen(kw_only=True)
class TaskConfig:
    """A named source of prompts: an environment with its options."""

    env: str
    """Name of the environment, as in "math:sort" or "./file.py:Class"."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the environment's factory."""
    weight: float = field(default=1.0, validator=ge(0), metadata=only_with(WEIGHING))
    """Relative share of the prompts, for samplers that weigh tasks."""
    success: float | None = None
    """Smallest reward of a success, which `accuracy` counts; by default the environment's own threshold, if
    it declares one."""
    data: str = ""
    """The prompts: a file (.jsonl, .csv, .tsv, .parquet, .arrow), a directory, a data set "hub:NAME", or a
    dataloader such as "sql:questions" or "./file.py:Questions".  If it is empty, the environment has them."""
    data_options: dict[str, Any] = field(factory=dict, metadata=only_with("data", "validation_data"))
    """How rows become prompts, and options of the dataloader's factory; see docs/sources.md."""
    validation_data: str = ""
    """The held-out prompts, like `data`.  If it is empty, `data` is opened with the split "validation"; if it
    has none, the held-out prompts are the environment's."""
    player: str = ""
    """Name of the player of the rollouts: "turns" of the core, or one of a plugin.  If it is empty, the
    player of agents plays environments that define `run`, and "turns" all others."""
    player_options: dict[str, Any] = field(factory=dict, metadata=only_with("player"))
    """Options of the player's factory."""
    python: str = ""
    """Python interpreter, or directory of a virtual environment, that runs the environment instead of
    `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of this environment's process, in addition to `environment.env_vars`."""


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
    tolerance: float = field(default=0.0, validator=ge(0), metadata=only_with("enabled"))
    """Rewards of a group are equal if they differ by no more than this."""
    max_extra_groups: int = field(default=0, validator=ge(0), metadata=only_with("enabled", "filters"))
    """The run ends with an error when more groups than this are filtered between two steps.  0 allows 20 for
    each group of a step."""


@frozen(kw_only=True)
class EnvironmentConfig:
    """Rules for calling environments, in training and validation."""

    workers: int | None = field(default=None, validator=optional(ge(1)))
    """Number of workers per environment that share the episodes, on this machine or in a cluster.  An agent's
    start on this machine when the others are busy.  If this is not set, there is 1, and for an agent on this
    machine at most 8."""
    max_batch: int = field(default=256, validator=ge(1))
    """Largest number of episodes in one call."""
    max_wait: float = field(default=0.005, validator=ge(0))
    """Seconds that an episode waits for others to share its call."""
    deadline: float | None = field(default=None, validator=optional(gt(0)))
    """Time limit of a call in seconds.  A late async call is cancelled; if the process does not react, it is
    killed, and each episode is tried alone.  If this is not set, the environment may declare it; the default
    is 30."""
    start_deadline: float = field(default=120.0, validator=gt(0))
    """Time limit in seconds for the start of an environment, and for its prompts."""
    concurrency: int | None = field(default=None, validator=optional(ge(0)))
    """Number of concurrent calls of an async `evaluate`, of tools and of `open` in each worker, each with one
    episode (or one group, if the environment compares rollouts).  The next call starts as soon as one ends.
    0 calls `evaluate` with batches, one after another.  If this is not set, the environment may declare it;
    the default is 0.  It is also the number of rollouts that an agent plays at once in a worker, at least
    one."""
    max_error_rate: float = field(default=0.2, validator=[ge(0), le(1)])
    """The run ends when more than this share of 200 calls have failed among the last 200 of a task, or 20 in
    a row; 1 turns both rules off.  A call judges an episode, or a group if the environment compares rollouts.
    A prompt's first failure is tried again and does not count, unless `rollout.max_retries` is 0."""
    unavailable_for: float = field(default=600.0, validator=gt(0))
    """Seconds that a task waits for a service that does not answer, such as a judge; then the run ends with a
    checkpoint.  Before the service's first answer, it waits 30 seconds at most."""
    python: str = ""
    """Python interpreter (3.11 or newer), or directory of a virtual environment, that runs environments, with
    the packages and plugins that are installed there.  If it is empty, they run in the interpreter of
    grpo-core."""
    agent_host: str = "127.0.0.1"
    """Address of this machine at which agents reach the model; on a cluster, an address in its network."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of the environments' processes.  `$NAME` or `${NAME}` in a value, as in
    "Bearer $NAME", stands for the variable NAME of this process, so that no file holds a secret; `$$` is a
    dollar sign."""


# ---------------------------------------------------------------------------------- engines and rollouts


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
    """Largest number of concurrent requests of each engine; the others wait, oldest first.  0 leaves the
    limit to the engine."""
    gpus: list[int] = field(factory=list)
    """GPUs of this machine for the engines, shared evenly among `workers`: with two workers, `[0, 1, 2, 3]`
    gives the first engine 0 and 1.  If the list is empty, they share all GPUs but the trainer's."""
    gpus_per_worker: float = field(default=0.0, validator=ge(0), metadata=WORKER_GPUS)
    """Number of GPUs of each engine worker in a cluster; with 0, a worker sees none."""
    placement: Literal["pack", "spread"] = field(default="pack", metadata=only_with(CLUSTER))
    """Place the engine workers of a cluster on as few machines as possible ("pack") or on as many
    ("spread")."""
    env_vars: dict[str, str] = field(factory=dict, metadata=only_with(CLUSTER))
    """Environment variables of each engine worker of a cluster, set before the engine's plugin is loaded.
    `$NAME` in a value stands for the variable NAME of this process, and `$$` for a dollar sign."""
    transport: str = "auto"
    """Transport of weights to engines: `shm` works through shared memory (in a cluster, its object store);
    docs/engines.md has those of plugins. `auto` is `shm`, or for a trainer in workers of a cluster the one
    that crosses machines."""
    transport_options: dict[str, Any] = field(factory=dict)
    """Options of the transport; see docs/engines.md."""


TRUNCATIONS = ("top_p", "top_k", "min_p")
"""Keys that truncate the sampling distribution of a validation."""


@frozen(kw_only=True)
class RolloutConfig:
    """Limits and sampling parameters of rollouts."""

    group_size: int = field(default=8, validator=ge(2))
    """Number of rollouts of each prompt."""
    temperature: float = field(default=1.0, validator=gt(0))
    """Sampling temperature of the completions."""
    max_tokens: int = field(default=256, validator=ge(0))
    """Largest number of tokens in one completion; 0 leaves it to a model that is made for the run, as `tiny`
    is: a quarter more than the longest solution of its environments has."""
    max_prompt_tokens: int = field(default=0, validator=ge(0))
    """Leave out training and held-out prompts with more tokens than this before the run begins, with a
    warning that gives their number; 0 keeps all.  Prompts that leave no room for `max_tokens` are skipped
    when they are drawn.  Prompts that an agent writes are not limited."""
    max_turns: int = field(default=0, validator=ge(0))
    """Largest number of completions in a rollout, if its environment allows more; 0 leaves it to the
    environment."""
    max_total_tokens: int = field(default=0, validator=ge(0))
    """Largest number of tokens in a rollout (prompt, completions and the environment's messages); 0 uses all
    positions of the model."""
    max_tool_calls: int = field(default=0, validator=ge(0))
    """Largest number of tool calls in a rollout; 0 means no limit."""
    truncated: Literal["train", "mask", "unscored"] = "train"
    """How to handle rollouts that a token limit cut off: train them like others ("train"), count their reward
    only in the mean of their group ("mask"), or neither judge nor count them ("unscored")."""
    max_hint_tokens: int = field(default=1024, validator=ge(1))
    """Largest number of tokens that a hint adds to a prompt; a longer one loses its beginning."""
    hint_place: Literal["user", "message"] = "user"
    """Whether a hint begins the text of the first user message, or is a user message before it."""
    stop: list[str] = field(factory=list, validator=deep_iterable(min_len(1)))
    """Strings that end a completion, in addition to the tokenizer's end-of-sequence token."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Time limit in seconds for one attempt at a rollout; then it is tried again.  It includes the time that
    requests wait for the engine: raise it for long completions."""
    max_retries: int = field(default=3, validator=ge(0))
    """Number of attempts after the first; then the prompt is skipped, and the skip is recorded."""
    max_in_flight: int = field(default=0, validator=ge(0))
    """Largest number of concurrent rollouts, including validation; 0 means no limit.  The rollouts of a group
    begin together, so a larger group is played alone."""


# ---------------------------------------------------------------------------------- training

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
    tokens_per_microbatch: int = field(default=0, validator=ge(0))
    """Largest number of tokens in a micro-batch, padding included; a longer row is a micro-batch by itself. 0
    is 8,192, and on a GPU up to 65,536 after a step has shown how many fit half of its free memory."""
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


# ---------------------------------------------------------------------------------- validation

INHERITED = ("name", "every", "at_start", "prompts", "top_p", "top_k", "min_p", "deadline")
"""Keys that a set of held-out prompts inherits from ``[validation]`` if it does not set them."""


@frozen(kw_only=True)
class ValidationSetConfig:
    """A named set of held-out prompts: of a task, or of an environment that nothing is trained on.

    The keys from `name` on are also keys of `[validation]`, which gives the value of a key that is not set.
    """

    task: str = ""
    """Task whose held-out prompts and environment the set uses."""
    env: str = ""
    """Name of the set's own environment, as in "math:sort" or "./file.py:Class", instead of `task`; it needs
    no prompts for training."""
    env_options: dict[str, Any] = field(factory=dict)
    """Options of the factory of `env`."""
    success: float | None = None
    """Smallest reward of a success in `env`; by default the environment's own threshold."""
    data: str = ""
    """The prompts for `env`: a file, a data set or a dataloader, all of whose rows are held out."""
    data_options: dict[str, Any] = field(factory=dict, metadata=only_with("data"))
    """How rows become prompts, and options of the dataloader's factory."""
    python: str = ""
    """Python interpreter or virtual environment that runs `env` instead of `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of the process of `env`, in addition to `environment.env_vars`."""
    name: str | None = None
    """Name of the validation strategy."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the strategy, such as `n` and `temperature`; if the strategy is the one of `[validation]`,
    they are added to its options."""
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
                f"task = {self.task!r} with env = {self.env!r}: set either the task or the environment"
            )
        of_env = (
            self.env_options,
            self.success is not None,
            self.data,
            self.data_options,
            self.python,
            self.env_vars,
        )
        if self.task and any(of_env):
            raise ValueError(
                f"task = {self.task!r} with env_options, success or data: these keys belong to `env`; a "
                "task brings its own"
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
    pause: bool = field(default=False, metadata=only_with(MEASURED))
    """Pause training during validation.  The validated weights do not change in either case."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Time limit in seconds for each set of rollouts of a strategy; unfinished rollouts are unscored.  A
    strategy that neither plays rollouts nor returns for twice as long ends the run."""
    engine: EngineConfig | None = None
    """A separate engine for validation, with its own options; training does not wait for its results."""
    sets: dict[str, ValidationSetConfig] = field(factory=dict)
    """Named sets of held-out prompts, in addition to the tasks' own, with metrics `validation/SET/NAME`.
    A set cannot have the name of a task."""

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
        """Return the environments of the sets that have one."""
        found = {name: self.sets[name] for name in sets if self.sets[name].env}
        return {
            name: TaskConfig(
                env=one.env,
                options=one.env_options,
                success=one.success,
                validation_data=one.data,
                data_options=one.data_options,
                python=one.python,
                env_vars=one.env_vars,
            )
            for name, one in found.items()
        }

    def of_set(self, name: str) -> ValidationConfig:
        """Return the section for a set, whose own keys override it."""
        chosen = self.sets[name]
        own = {key: value for key in INHERITED if (value := getattr(chosen, key)) is not None}
        inherited = self.options if own.get("name", self.name) == self.name else {}
        return attrs.evolve(self, options={**inherited, **chosen.options}, sets={}, **own)


# ---------------------------------------------------------------------------------- what surrounds a run


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


# ---------------------------------------------------------------------------------- all of it


@frozen(kw_only=True)
class Config(WithSections):
    """The configuration of a run."""

    seed: int = field(default=0, validator=[ge(0), lt(2**63)])
    """Seed of everything that is random in the run."""
    plugins: list[str] | None = None
    """Names of the plugins that may be loaded; by default all installed ones may."""
    directory: str = ""
    """Directory from which relative paths in options count; a run has the one in which it was started."""
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
    filters: dict[str, dict[str, Any]] = field(factory=dict)
    """Filters by name, each with its options: `[filters.pass_rate]` and `high = 0.9` below it. A group that
    one of them rejects is not trained, and another prompt is drawn instead."""
    loss: LossConfig = field(factory=LossConfig)
    scores: dict[str, ScoreConfig] = field(factory=dict)
    """Scores by name, for losses that compare with one, as `[scores.teacher]`; a loss with a KL term has
    `reference`, the weights that the run started from, without a table."""
    trainer: TrainerConfig = field(factory=TrainerConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    pipeline: PipelineConfig = field(factory=PipelineConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    health: HealthConfig = field(factory=HealthConfig)
    tracking: TrackingConfig = field(factory=TrackingConfig)

    @property
    def slots(self) -> int:
        """Largest number of groups that are in flight or ready."""
        return (self.pipeline.max_staleness + 1) * self.trainer.prompts_per_step

    def choices(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield kind, name and options of each offer that is chosen."""
        for each in fields(type(self)):
            chosen = getattr(self, each.name)
            if isinstance(chosen, PluginChoice):
                kind = "validation_strategy" if each.name == "validation" else each.name
                yield kind, chosen.name, chosen.options
        yield "model", self.model.path, self.model.options
        if self.validation.engine is not None:
            yield "engine", self.validation.engine.name, self.validation.engine.options
        of_sets = self.validation.environments(self.validation.sets)
        for task in (*self.tasks.values(), *of_sets.values()):
            yield "environment", task.env, task.options
            for data in filter(None, (task.data, task.validation_data)):
                yield "dataloader", data, task.data_options
            if task.player:
                yield "player", task.player, task.player_options
        for one in self.validation.sets.values():
            yield "validation_strategy", one.name or self.validation.name, one.options
        for name, options in self.filters.items():
            yield "filter", name, options
        for name in {**dict.fromkeys(self.tracking.trackers), **self.tracking.options}:
            yield "tracker", name, self.tracking.options.get(name, {})


# ---------------------------------------------------------------------------------- a trainer's setup

PROFILED_AFTER = 2
"""Steps of a process before the first profiled one: they allocate memory and choose kernels."""


def steps_of_profile(steps: int) -> tuple[int, int]:
    """Return the numbers of the first and the last traced step, counted from 1."""
    return PROFILED_AFTER + 1, PROFILED_AFTER + steps


@frozen(kw_only=True)
class TrainerSetup(WithSections):
    """The argument of a trainer's factory, in addition to the options that the user chose."""

    model: ModelConfig = field(factory=ModelConfig)
    """The model that the run starts from; ``path`` is its directory."""
    trainer: TrainerConfig = field(factory=TrainerConfig)
    """The ``[trainer]`` section."""
    loss: LossConfig = field(factory=LossConfig)
    """Name and options of the loss, for ``PluginHost.function``."""
    scores: Mapping[str, ScoreConfig] = field(factory=dict)
    """The scores that the loss needs, by name; ``weights`` of a model is its directory."""
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    """The ``[optimizer]`` section."""
    seed: int = 0
    """Seed of the run."""
    colocated: bool = True
    """Whether engines generate on this machine while the trainer trains; it then leaves them cores."""
    prepare: Callable[[], None] | None = None
    """Makes the model at ``model.path``; the trainer calls it once, in its process, before it loads the
    model."""
    resume_from: str | None = None
    """A directory that ``Trainer.save`` wrote; None: start from ``model``."""
    async_save: bool = True
    """Write checkpoints while training continues; see ``CheckpointConfig``."""
    transport: str = "shm"
    """Transport of weights to engines; see ``EngineConfig``.  From a CPU, ``cuda_ipc`` is ``shm``."""
    engine_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Dtype of the training engine's weights; they are sent in it if it is smaller than the trainer's."""
    transport_options: Mapping[str, Any] = field(factory=dict)
    """Options of the transport."""
    max_non_finite: float = 0.1
    """Share of an update's rows that may have a non-finite loss; see ``HealthConfig``."""
    plugins: tuple[str, ...] | None = None
    """Allow-list of the plugins that a loss may come from; None allows all."""
    block: tuple[str, ...] = ()
    """Plugins that are not imported."""
    directory: str = ""
    """Directory from which relative paths in options count."""
    env_vars: Mapping[str, str] = field(factory=dict)
    """Environment variables of the trainer's process, such as the ones that select its GPU."""
    shares_gpu: bool = False
    """Whether an engine computes on the trainer's GPU and needs the memory that is free between steps."""
    rank: int = 0
    """Rank of this process in the trainer."""
    ranks: int = 1
    """Number of the trainer's processes."""
    rendezvous: str = ""
    """Rendezvous of the ranks: a file that the first one makes, or ``tcp://address:port``, at which the first
    one listens."""
    profile: str = ""
    """Directory for the traces of ``trainer.profile`` steps."""
    log: str | None = None
    """File for the trainer's output; None means standard error."""
