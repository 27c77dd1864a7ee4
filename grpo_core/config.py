"""The configuration of a run: what may be written in CONFIG.toml or with ``--set section.key=value``.

Every key has a default.  Unknown keys are errors that name the nearest one.  Each part of the program
receives its own section and no other.
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, le

from grpo_core.errors import ConfigError, did_you_mean


@frozen(kw_only=True)
class ModelConfig:
    """Which model is trained."""

    path: str = "tiny"
    """A directory, a hub id, or a model that a plugin makes by its name; "tiny" is made on the spot, with
    90,000 parameters."""
    options: dict[str, Any] = field(factory=dict)
    """Options of a model that a plugin makes; for "tiny" `width`, `layers` and `warm_start_steps`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products in training; weights and optimizer state stay float32."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


@frozen(kw_only=True)
class SourceConfig:
    """Where a task's prompts come from, if not from its environment."""

    path: str = ""
    """Of the training prompts: a .jsonl or .parquet file, or a data set (a directory or a hub id).  Empty:
    the environment has them."""
    validation_path: str = ""
    """Of held-out prompts; empty: `path` if it is a data set and `validation_split` is given, else the
    environment has them."""
    subset: str = ""
    """Of a data set that has several."""
    split: str = "train"
    """Of a data set."""
    validation_split: str = ""
    """Of a data set."""
    prompt: str = ""
    """Field of a row that holds the prompt, as text or messages.  Empty: the first of `prompt`, `messages`
    and `question` that there is."""
    answer: str = "answer"
    """Field of the answer."""
    id: str = "id"
    """Field of the id; a row without one has its number as id.  All other fields are the prompt's `info`."""
    system: str = ""
    """A system message before each prompt."""
    workers: int = field(default=0, validator=ge(0))
    """Processes that read rows ahead; worth while only for rows that are slow to read."""


@frozen(kw_only=True)
class TaskConfig:
    """A named source of prompts: an environment with its options."""

    env: str
    options: dict[str, Any] = field(factory=dict)
    weight: float = field(default=1.0, validator=ge(0))
    """Share of the prompts, for samplers that weigh tasks."""
    source: SourceConfig = field(factory=SourceConfig)


@frozen(kw_only=True)
class PluginChoice:
    """A plugin's offer and the options of its factory."""

    name: str
    options: dict[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class SamplerConfig(PluginChoice):
    name: str = "mix"


@frozen(kw_only=True)
class DynamicSamplingConfig:
    """Dynamic sampling: groups whose rewards are all equal teach nothing, and are replaced."""

    enabled: bool = False
    """Train only groups whose rewards differ; generate others in the place of the rest."""
    tolerance: float = field(default=0.0, validator=ge(0))
    """Rewards of a group that differ by no more than this are equal."""
    max_extra_groups: int = field(default=0, validator=ge(0))
    """Groups filtered between two steps, at most; then the run ends with an error that says how many passed.
    0: 20 for each group of a step."""


@frozen(kw_only=True)
class EngineConfig(PluginChoice):
    name: str = "local"
    threads: int = field(default=0, validator=ge(0))
    """Of torch on the CPU; 0: half of the cores when training runs beside it, else all of them."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Seconds for a weight update, and for the engine to start."""
    workers: int = field(default=1, validator=ge(1))
    """Number of engines that share the requests, on this machine or in workers of a cluster."""
    gpus_per_worker: float = field(default=0.0, validator=ge(0))
    """Number of GPUs of each engine worker in a cluster."""
    placement: Literal["pack", "spread"] = "pack"
    """Put the engine workers of a cluster on as few machines as possible, or on as many."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of each engine worker in a cluster, set before the engine's plugin is loaded."""
    transport: Literal["auto", "shm", "cuda_ipc", "collective"] = "auto"
    """How the trainer sends weights to engines: `shm` through shared memory (in a cluster, its object store),
    `cuda_ipc` by a handle to GPU memory, `collective` by NCCL between GPUs and by gloo otherwise. `auto` is
    `shm`: the two others have not been run on GPUs yet."""
    collective_host: str = "127.0.0.1"
    """Address of this machine at which engines reach the trainer, for `collective`; on a cluster use an
    address of its network."""


@frozen(kw_only=True)
class LossConfig(PluginChoice):
    name: str = "grpo"


@frozen(kw_only=True)
class AdvantageConfig(PluginChoice):
    name: str = "group"


@frozen(kw_only=True)
class EnvironmentConfig:
    """How environments are called, in training and validation alike."""

    workers: int = field(default=1, validator=ge(1))
    """Number of workers of each task's environment, here or in a cluster; they share the episodes."""
    max_batch: int = field(default=256, validator=ge(1))
    """Episodes in one call at most."""
    max_wait: float = field(default=0.005, validator=ge(0))
    """Seconds that an episode waits for others to share its call."""
    deadline: float = field(default=30.0, validator=gt(0))
    """Seconds for a call; then the process is killed and each episode tried alone."""
    start_deadline: float = field(default=120.0, validator=gt(0))
    concurrency: int = field(default=0, validator=ge(0))
    """Calls of an async `evaluate` that run at once, each with one episode (or one group that is compared),
    and of async tools; 0: `evaluate` gets the whole batch, and all tools run at once."""
    max_error_rate: float = field(default=0.2, validator=[ge(0), le(1)])
    """The run stops when more than this share of the last 200 episodes of a task were unscored."""


@frozen(kw_only=True)
class RolloutConfig:
    """How prompts are played."""

    group_size: int = field(default=8, validator=ge(2))
    temperature: float = field(default=1.0, validator=gt(0))
    max_tokens: int = field(default=256, validator=ge(1))
    """Of one completion."""
    max_turns: int = field(default=0, validator=ge(0))
    """Completions of a rollout, where its environment allows more; 0: as many as the environment says."""
    max_total_tokens: int = field(default=0, validator=ge(0))
    """Of a whole rollout: prompt, completions and what the environment answers; 0: as many as the model has
    positions for."""
    max_tool_calls: int = field(default=0, validator=ge(0))
    """Of a rollout; 0: any number."""
    stop: list[str] = field(factory=list)
    """Strings that end a completion, besides the tokenizer's end-of-sequence token."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Seconds for one attempt at a rollout; one that takes longer is played again."""
    max_retries: int = field(default=3, validator=ge(0))
    """Attempts after the first; then the prompt is skipped, and that is recorded."""


@frozen(kw_only=True)
class TrainerConfig:
    """The optimizer."""

    steps: int = field(default=100, validator=ge(1))
    prompts_per_step: int = field(default=16, validator=ge(1))
    updates_per_step: int = field(default=1, validator=ge(1))
    lr: float = field(default=1e-6, validator=gt(0))
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_end: float = field(default=0.1, validator=[ge(0), le(1)])
    """Where a linear or cosine schedule ends, as a share of ``lr``."""
    warmup_updates: int = field(default=5, validator=ge(0))
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = field(default=0.0, validator=ge(0))
    max_grad_norm: float = field(default=1.0, validator=gt(0))
    proximal: Literal["recompute", "generation"] = "recompute"
    """What the clipped ratio is relative to: the trainer's weights when the step began (one more forward
    pass if there are several updates), or the weights that generated."""
    tokens_per_microbatch: int = field(default=8192, validator=ge(1))
    """Rows times the longest of them, padding included, at most (a longer row comes alone)."""
    gradient_checkpointing: bool = False
    device: str = "auto"
    """"cpu", "cuda", or "auto"."""
    threads: int = field(default=0, validator=ge(0))
    """Of torch on the CPU; 0: half of the cores when generation runs beside it, else all of them."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Seconds for one step, publish or save, and for the start."""


@frozen(kw_only=True)
class PipelineConfig:
    """How generation and training run beside each other."""

    max_staleness: int = field(default=1, validator=ge(0))
    """Steps between the weights that generate and the step that trains; 0 is synchronous."""
    policy: Literal["deadline", "in_order"] = "deadline"
    in_flight_updates: bool = True
    """Running requests go on with new weights; else a weight update waits until none is running."""


@frozen(kw_only=True)
class ValidationConfig(PluginChoice):
    name: str = "greedy"
    every: int = field(default=10, validator=ge(0))
    """Steps; 0: never."""
    prompts: int = field(default=200, validator=ge(1))
    """Of each task, at most."""
    pause: bool = False
    """Training waits: no step and no group begins while validation runs.  Else it goes on; in either case the
    weights that are measured stay the same."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Seconds for the rollouts that a strategy asks for at once; those not finished then are unscored."""
    engine: EngineConfig | None = None
    """An engine for validation alone, with options of its own; training does not wait for its results."""


@frozen(kw_only=True)
class CheckpointConfig:
    every: int = field(default=20, validator=ge(0))
    """Steps; 0: only at the end."""
    keep: int = field(default=2, validator=ge(1))
    """Newest complete ones that stay on disk."""
    async_save: bool = True
    """Write while training goes on, from a copy of weights and optimizer in the host's memory, which it keeps
    (12 bytes for each parameter in float32).  False: no copy; training waits until all is written."""


_LIMITS: Any = deep_iterable(ge(0))


@frozen(kw_only=True)
class HealthConfig:
    """What the run watches.  Two numbers are [a warning, the end of the run], of the median of the last five
    steps; 0 is never."""

    canary_tolerance: float = field(default=0.0, validator=ge(0))
    """Difference of logprobs between engine and trainer after a weight sync, at most; 0: 0.001, or 0.1 where
    one of them computes in bfloat16."""
    logprob_diff: tuple[float, float] = field(default=(0.5, 2.0), validator=_LIMITS)
    """Of the sampled tokens, between the engine and the trainer at the start of a step."""
    mismatch_kl: tuple[float, float] = field(default=(0.5, 4.0), validator=_LIMITS)
    """From the policy that generated to the one that a step starts from."""
    effective_sample_size: tuple[float, float] = field(default=(0.1, 0.01), validator=_LIMITS)
    """Share of the tokens, by their importance ratios; smaller is worse."""
    clip_fraction: tuple[float, float] = field(default=(0.3, 0.9), validator=_LIMITS)
    """Share of the tokens, on either side."""
    max_non_finite: float = field(default=0.1, validator=[ge(0), le(1)])
    """The run stops when the loss of more than this share of an update's rows is not finite; up to it they
    are left out and counted."""


@frozen(kw_only=True)
class PlacementConfig(PluginChoice):
    """Where engines and environments run."""

    name: str = "local"
    """`local` is child processes of this machine; `--ray` chooses `ray`, the workers of a Ray cluster."""


@frozen(kw_only=True)
class Config:
    """The whole of it."""

    seed: int = field(default=0, validator=ge(0))
    plugins: list[str] | None = None
    """Allow-list of plugin names; None: all that are installed."""
    tasks: dict[str, TaskConfig] = field(factory=dict)
    model: ModelConfig = field(factory=ModelConfig)
    sampler: SamplerConfig = field(factory=SamplerConfig)
    dynamic_sampling: DynamicSamplingConfig = field(factory=DynamicSamplingConfig)
    engine: EngineConfig = field(factory=EngineConfig)
    environment: EnvironmentConfig = field(factory=EnvironmentConfig)
    placement: PlacementConfig = field(factory=PlacementConfig)
    rollout: RolloutConfig = field(factory=RolloutConfig)
    advantage: AdvantageConfig = field(factory=AdvantageConfig)
    loss: LossConfig = field(factory=LossConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig)
    pipeline: PipelineConfig = field(factory=PipelineConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    health: HealthConfig = field(factory=HealthConfig)


# ---------------------------------------------------------------------------------- reading


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; a configuration is a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None


def parse_setting(setting: str) -> dict[str, Any]:
    """``"trainer.lr=1e-4"`` as ``{"trainer": {"lr": 1e-4}}``; a value that is not TOML is a string."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting}: expected section.key=value, as in --set trainer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    nested: Any = value
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return typing.cast("dict[str, Any]", nested)


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


def build(layers: Iterable[Mapping[str, Any]]) -> Config:
    """The configuration from tables, later ones over earlier ones.

    Raises ConfigError that names every unknown key (with the nearest known one) and every bad value.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    problems = list(_problems(Config, merged, ""))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cattrs.structure(merged, Config)
    except cattrs.BaseValidationError as error:
        raise ConfigError("\n".join(_out_of_range(error, ""))) from None


def as_table(config: Config) -> dict[str, Any]:
    """Plain dicts and lists; ``build([as_table(c)]) == c``.  Keys that are None are left out."""
    table: dict[str, Any] = _without_none(cattrs.unstructure(config))
    return table


def _without_none(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def as_toml(config: Config) -> str:
    """The resolved configuration as it is written into the run's directory."""
    return "".join(_toml_lines(as_table(config), ""))


def _problems(kind: Any, value: Any, where: str) -> Iterable[str]:
    """What is wrong with the shape of a value: unknown and missing keys, and values of other types."""
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
            yield f"unknown configuration key {prefix + key!r}.{did_you_mean(key, set(known))}"
    for key, attribute in known.items():
        if attribute.default is attrs.NOTHING and key not in value:
            yield f"configuration key {prefix + key!r} is missing"


def _scalar_problem(kind: type, value: Any) -> str:
    """What was expected instead, or nothing."""
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
        yield f"configuration key {where!r}: {error}"
        return
    for inner in error.exceptions:
        names = [getattr(note, "name", None) for note in getattr(inner, "__notes__", ())]
        place = ".".join(filter(None, [where, *(name for name in names if isinstance(name, str))]))
        yield from _out_of_range(inner, place)


def _toml_lines(table: Mapping[str, Any], name: str) -> Iterable[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) or (name and k == "options")}
    if name and (plain or not table):
        yield f"\n[{name}]\n"
    for key, value in plain.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}\n"
    for key, value in table.items():
        if key not in plain:
            yield from _toml_lines(value, f"{name}.{_toml_key(key)}" if name else _toml_key(key))


def _toml_key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case Mapping():
            return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        case _:
            return repr(value)
