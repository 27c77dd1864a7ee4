"""Functions that make one part of a run from its sections of the configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve

from grpo_core.aio import UNLIMITED, Slots
from grpo_core.app.placement import Placement
from grpo_core.config import (
    AdvantageConfig,
    CheckpointConfig,
    Config,
    DataPlaneConfig,
    DynamicSamplingConfig,
    EngineConfig,
    HealthConfig,
    ModelConfig,
    PipelineConfig,
    PlacementConfig,
    RolloutConfig,
    SamplerConfig,
    ShapingConfig,
    TrainerConfig,
    ValidationConfig,
)
from grpo_core.data.dataloaders import Dataloader
from grpo_core.environments.budget import ErrorBudget, errors_of_calls
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.errors import ConfigError
from grpo_core.events import Event
from grpo_core.loop.advantages import Clipped
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.canary import LENGTH
from grpo_core.loop.dynamic import DynamicSampling, short_name
from grpo_core.loop.health import Limits
from grpo_core.loop.pipeline import ObserveAttempt, Schedule
from grpo_core.loop.rendering import Renderer
from grpo_core.loop.rollout import LostBudget, SamplingParams
from grpo_core.loop.shaping import Shaping
from grpo_core.models import chat_template
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import AdvantageFunction, DataPlane, Engine, Sampler
from grpo_core.records import EngineSetup, Group, Prompt, Rollout
from grpo_core.training.process import thread_count
from grpo_core.validation.runner import Context
from grpo_core.validation.sets import HeldOut, Measured, Validation
from grpo_core.versions import Interval

SYNC_GRACE = 15.0
"""Extra seconds for an engine to keep its own deadlines, and to end a process that does not answer."""
SYNC_ATTEMPTS = 2
"""Number of processes that an engine asks to take weights, each for ``engine.deadline``: one that does not
answer is replaced."""

EXTRA_GROUPS = 20
"""Default limit of filtered groups for each group of a step."""

PROMPTS = 12
"""Number of prompts that the canary begins with."""


def make_placement(config: PlacementConfig, plugins: PluginHost) -> Placement:
    """Make the placement of engines and environments, which is not connected yet."""
    placement: Placement = plugins.make("placement", config.name, plugins, **config.options)
    return placement


def trainer_here(config: TrainerConfig, plugins: PluginHost) -> TrainerConfig | None:
    """Return the section of the trainer; None if its processes are in the workers of a placement."""
    return None if placement_of(config, plugins) else config


def placement_of(config: TrainerConfig, plugins: PluginHost) -> str:
    """Return the name of the placement that has the trainer's processes; empty if this machine has them."""
    return plugins.find("trainer", config.name).offer.placement


def make_data_plane(config: DataPlaneConfig, plugins: PluginHost, placement: Placement) -> DataPlane:
    """Make the data plane of a run, which is not started yet.

    Raises ConfigError if it cannot work with the placement.
    """
    plane: DataPlane = plugins.make("data_plane", config.name, placement, **config.options)
    return plane


def make_sampler(
    config: SamplerConfig, host: PluginHost, *, seed: int, weights: Mapping[str, float]
) -> Sampler:
    """Make the sampler; factories that take them get ``seed`` and the tasks' ``weights``."""
    takes = inspect.signature(host.factory("sampler", config.name)).parameters
    known: dict[str, Any] = {"seed": seed, "weights": weights}
    options = {key: value for key, value in known.items() if key in takes} | config.options
    sampler: Sampler = host.make("sampler", config.name, **options)
    return sampler


def make_advantages(config: AdvantageConfig, host: PluginHost) -> AdvantageFunction:
    """Make the advantage function, with the limits of its section."""
    function: AdvantageFunction = host.function("advantage", config.name, **config.options)
    if config.clip_low is None and config.clip_high is None:
        return function
    return Clipped(function, config.clip_low, config.clip_high)


def make_buffer(
    trainer: TrainerConfig, pipeline: PipelineConfig, rollout: RolloutConfig
) -> Buffer[Prompt, Group]:
    return Buffer(
        prompts_per_step=trainer.prompts_per_step,
        max_staleness=pipeline.max_staleness,
        num_steps=trainer.steps,
        policy=pipeline.policy,
        max_retries=rollout.max_retries,
    )


def engine_setup(
    path: str,
    config: Config,
    engine: EngineConfig,
    *,
    logs: Path | None,
    colocated: bool,
    reproducible: bool = False,
) -> EngineSetup:
    """Make the setup of an engine.

    Args:
        path: directory of the model; it is made absolute, since a worker may have another working directory.
        config: of the run.
        engine: section of this engine.
        logs: directory of its log files.
        colocated: whether training runs on this machine at the same time.
        reproducible: see ``EngineSetup``.
    """
    return EngineSetup(
        model=str(Path(path).absolute()),
        sections=config.sections,
        trust_remote_code=config.model.trust_remote_code,
        threads=thread_count(engine.threads, colocated),
        seed=config.seed,
        log_directory=str(logs.absolute()) if logs else None,
        deadline=engine.deadline,
        max_requests=engine.max_requests,
        reproducible=reproducible,
    )


def reproducible(pipeline: PipelineConfig) -> bool:
    """Whether a run is configured so that equal seeds can give equal weights, which needs the engine's help.

    The order of training is fixed then, and no completion has tokens of two versions by chance of time.
    """
    return pipeline.policy == "in_order" and not (pipeline.max_staleness and pipeline.in_flight_updates)


def engines_of(config: Config, *, trains: bool) -> dict[str, EngineConfig]:
    """Return the sections of the engines that training, or a validation alone, starts, by key."""
    own = config.validation.engine
    if trains:
        with_own = own is not None and config.validation.measures
        return {"engine": config.engine} | ({"validation.engine": own} if own and with_own else {})
    return {"engine": config.engine} if own is None else {"validation.engine": own}


def engine_dtype(engines: Iterable[EngineConfig]) -> Literal["auto", "bfloat16", "float16"]:
    """Return the 16-bit dtype in which all engines hold the weights by their option ``dtype``, or "auto"."""
    options = [engine.options.get("dtype") for engine in engines]
    if all(option == "bfloat16" for option in options):
        return "bfloat16"
    return "float16" if all(option == "float16" for option in options) else "auto"


def canary_tolerance(health: HealthConfig, engine: EngineConfig) -> Tolerance:
    """Return the tolerance for an engine, which need not say itself what it computes in."""
    dtype = engine.options.get("dtype", "auto")
    return Tolerance(health.canary_tolerance, "" if dtype == "auto" else str(dtype))


def load_renderer(path: str, model: ModelConfig, engines: Sequence[EngineConfig]) -> Renderer:
    """Load the renderer of a model; an engine's option ``max_model_len`` bounds its rollouts, too."""
    renderer = Renderer.load(
        path,
        trust_remote_code=model.trust_remote_code,
        chat_template=chat_template(model.chat_template),
        chat_template_kwargs=model.chat_template_kwargs,
        response_format=model.response_format,
    )
    lengths = [engine.options.get("max_model_len") for engine in engines]
    renderer.context = min([renderer.context, *(length for length in lengths if isinstance(length, int))])
    return renderer


def canary_prompts(prompts: Mapping[str, Sequence[Prompt]], renderer: Renderer) -> list[tuple[int, ...]]:
    """Encode the ends of some prompts of all tasks, where replies begin."""
    some = [prompt for part in prompts.values() for prompt in part[: max(1, PROMPTS // len(prompts))]]
    encoded = [tuple(renderer.prompt_ids(prompt.messages)[-LENGTH:]) for prompt in some[:PROMPTS]]
    return [ids for ids in dict.fromkeys(encoded) if ids and max(ids) < renderer.vocabulary]


def rollout_places(config: RolloutConfig) -> Slots:
    """Return the places that limit how many rollouts are played at the same time."""
    return Slots(config.max_in_flight or UNLIMITED)


def check_dataloaders(config: Config, dataloaders: Mapping[str, Dataloader], sampler: Sampler) -> None:
    """Raise ConfigError for streams where the number of prompts has to be known."""
    streams = [name for name, dataloader in dataloaders.items() if dataloader.size is None]
    if not streams:
        return
    who = f"{dataloaders[streams[0]].who} is a stream, whose number of prompts is not known"
    if config.trainer.epochs:
        raise ConfigError(
            f"{who}, and trainer.epochs = {config.trainer.epochs:g} counts them: set trainer.steps instead"
        )
    if getattr(sampler, "needs_places", False):
        raise ConfigError(
            f"{who}, and the sampler {config.sampler.name!r} chooses among the places of a task's prompts: "
            "choose a sampler that only takes the next prompts, such as mix, or let the dataloader return a "
            "sequence"
        )


def with_steps(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the configuration with the number of steps that ``trainer.epochs`` stands for.

    ``sizes``: number of training prompts by task.
    """
    if not config.trainer.epochs:
        return config
    drawn = config.trainer.epochs * sum(sizes.values())
    steps = max(1, math.ceil(drawn / config.trainer.prompts_per_step))
    return evolve(config, trainer=evolve(config.trainer, steps=steps))


def sampling_params(config: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        stop=tuple(config.stop),
        max_turns=config.max_turns,
        max_total_tokens=config.max_total_tokens,
        max_tool_calls=config.max_tool_calls,
        truncated=config.truncated,
    )


def check_lengths(config: RolloutConfig, positions: int) -> None:
    """Raise ConfigError if rollouts would exceed the model's positions, whatever the prompt."""
    key = "max_total_tokens" if config.max_total_tokens else "max_tokens"
    room = positions if config.max_total_tokens else positions - 1
    if (given := getattr(config, key)) > room:
        raise ConfigError(
            f"rollout.{key} is {given}; the model has {positions} positions for prompt and completions "
            f"together: choose at most {room}"
        )


def dynamic_sampling(
    config: DynamicSamplingConfig,
    filters: Mapping[str, Mapping[str, Any]],
    host: PluginHost,
    *,
    prompts_per_step: int,
) -> DynamicSampling | None:
    """Make what filters groups, or None if nothing does."""
    if not config.enabled and not filters:
        return None
    extra = config.max_extra_groups or EXTRA_GROUPS * prompts_per_step
    return DynamicSampling(
        tolerance=config.tolerance if config.enabled else None,
        filters={
            short_name(name): host.function("filter", name, **options) for name, options in filters.items()
        },
        max_extra_groups=extra,
    )


def make_shaping(config: ShapingConfig, *, max_tokens: int) -> Shaping | None:
    """Make the shaping of rewards, or None if the section changes nothing."""
    if config == ShapingConfig():
        return None
    source = config.source if any(config.source) else None
    limit = config.overlong_limit or max_tokens
    if config.overlong_buffer > limit:
        raise ConfigError(
            f"shaping.overlong_buffer is {config.overlong_buffer}; expected at most shaping.overlong_limit, "
            f"which is {limit}"
        )
    if any(config.target) and source is None:
        raise ConfigError("shaping.target needs shaping.source, the range that it maps")
    return Shaping(
        weights=config.weights,
        source=source,
        target=config.target if any(config.target) else source,
        truncated_factor=config.truncated_factor,
        token_price=config.token_price,
        limit=limit,
        limit_of_turns=not config.overlong_limit,
        buffer=config.overlong_buffer,
        penalty=config.overlong_penalty,
    )


def health_limits(config: HealthConfig) -> dict[str, Limits]:
    """Return the health limits by metric."""
    return {
        "logprob_diff_mean": Limits(*config.logprob_diff),
        "mismatch_kl": Limits(*config.mismatch_kl),
        "effective_sample_size": Limits(*config.effective_sample_size),
        "clip_fraction_low": Limits(*config.clip_fraction),
        "clip_fraction_high": Limits(*config.clip_fraction),
    }


def error_budgets(
    environments: Mapping[str, EnvironmentPool], *, max_error_rate: float, max_retries: int, max_lost: int
) -> ObserveAttempt:
    """Make an observer of attempts that raises when too many calls fail, or too many rollouts are lost.

    Args:
        max_retries: number of attempts after the first, for each prompt.
        max_lost: number of rollouts that may be lost in a row.
    """
    budgets = {task: ErrorBudget(task, max_error_rate) for task in environments}
    lost = LostBudget(max_lost)

    def observe(task: str, rollouts: Sequence[Rollout], attempts: int) -> None:
        for rollout in rollouts:
            lost.observe(rollout)
        environment = environments[task]
        for error in errors_of_calls(rollouts, needs_group=environment.needs_group):
            again = attempts == 0 < max_retries
            budgets[task].observe(error, last=not again, traceback=environment.first_traceback)

    return observe


def make_schedule(
    *,
    rollout: RolloutConfig,
    engine: EngineConfig,
    trainer: TrainerConfig,
    pipeline: PipelineConfig,
    validation: ValidationConfig,
    checkpoint: CheckpointConfig,
) -> Schedule:
    """Make the schedule; its ``stall`` is longer than everything that may happen within it."""
    attempts = rollout.max_retries + 2
    rounds = 1
    if rollout.max_in_flight:
        groups = (pipeline.max_staleness + 1) * trainer.prompts_per_step
        rounds = -(-groups // max(1, rollout.max_in_flight // rollout.group_size))
    return Schedule(
        validations=intervals(validation),
        save_every=checkpoint.every,
        save_seconds=60.0 * checkpoint.every_minutes,
        rollout_deadline=rollout.deadline,
        sync_deadline=SYNC_ATTEMPTS * engine.deadline + SYNC_GRACE,
        in_flight_updates=pipeline.in_flight_updates,
        pause_to_validate=validation.pause,
        stall=rollout.deadline * attempts * rounds
        + trainer.deadline
        + SYNC_ATTEMPTS * engine.deadline
        + validation.longest_deadline * validation.measures,
    )


def intervals(config: ValidationConfig) -> list[Interval]:
    """Return when the tasks and each set are measured."""
    return [_interval(config), *(_interval(config.of_set(name)) for name in config.sets)]


def _interval(config: ValidationConfig) -> Interval:
    return Interval(config.every, config.at_start)


def make_validation(
    held_out: Sequence[HeldOut],
    rollout: RolloutConfig,
    plugins: PluginHost,
    *,
    seed: int,
    engine: Engine,
    renderer: Renderer,
    places: Slots,
    last: int = 0,
    emit: Callable[[Event], None] = lambda event: None,
) -> Validation:
    """Make what validates the versions of a run until the ``last`` one."""

    def context(part: HeldOut) -> Context:
        config = part.config
        return Context(
            version=0,
            prompts={name: own[: config.prompts] for name, own in part.prompts.items() if own},
            engine=engine,
            environments=part.environments,
            renderer=renderer,
            sampling=evolve(
                sampling_params(rollout), top_p=config.top_p, top_k=config.top_k, min_p=config.min_p
            ),
            deadline=config.deadline,
            retries=rollout.max_retries,
            seed=seed,
            group_size=rollout.group_size,
            places=places,
        )

    return Validation(
        parts=[
            Measured(
                set=part.name,
                name=part.config.name,
                strategy=plugins.make("validation_strategy", part.config.name, **part.config.options),
                interval=_interval(part.config),
                context=context(part),
            )
            for part in held_out
        ],
        last=last,
        emit=emit,
    )
