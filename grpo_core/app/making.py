"""The components that a configuration names, and the functions that make them; nothing starts here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from attrs import define, evolve, field

from grpo_core.app.model_sources import StartModelSource, with_max_tokens
from grpo_core.app.placement import Devices, Placement
from grpo_core.config import Config, EngineConfig, ModelConfig, ScoreConfig, TrainerConfig, ValidationConfig
from grpo_core.config.run import (
    HealthConfig,
    LossConfig,
    PipelineConfig,
    RolloutConfig,
    TrainerSetup,
    needed_scores,
)
from grpo_core.contracts import protocols
from grpo_core.contracts.errors import ConfigError, SelectionError
from grpo_core.contracts.events import Event
from grpo_core.contracts.loss import LossSetting, Remark, check_options, hints_of
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import EngineSetup, Group, Prompt, Rollout, Weights
from grpo_core.data.loaders import LookAhead
from grpo_core.data.samplers import FunctionSampler, draws_itself
from grpo_core.engines.addresses import is_loopback
from grpo_core.environments.budget import ErrorBudget, failures_of_calls
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.canary import LENGTH
from grpo_core.loop.dynamic import DynamicSampling, short_name
from grpo_core.loop.endings import TimeLimit
from grpo_core.loop.health import Thresholds
from grpo_core.loop.hints import Hints
from grpo_core.loop.pipeline import Checks, Learning, ObserveAttempt, Playing, Schedule
from grpo_core.loop.rollout import LostBudget, SamplingParams
from grpo_core.loop.rows import Clipped
from grpo_core.loop.versions import Interval
from grpo_core.models.files import chat_template, size_of
from grpo_core.plugins.configured import model_section
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.offers import Bound
from grpo_core.plugins.transports import find_transport
from grpo_core.processes.aio import UNLIMITED, FairSemaphore
from grpo_core.processes.memory import thread_count
from grpo_core.storage.published import Published
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import Context, HeldOut, Validation

T = TypeVar("T")

SYNC_GRACE = 15.0
"""Extra seconds for an engine's own deadlines, and to end a process that does not answer."""
SYNC_ATTEMPTS = 2
"""Number of processes that an engine tries to update, each for ``engine.deadline``: one that does not answer
is replaced."""

EXTRA_GROUPS = 20
"""Default limit of filtered groups for each group of a step."""

PROMPTS = 12
"""Number of prompts of all tasks whose ends, where replies begin, the canary begins with."""


@define(eq=False)
class RunSetup:
    """The components of a run, which ``make`` sets in this order."""

    config: Config
    """The configuration; keys that depend on the model or the prompts are completed when these are known."""
    plugins: PluginHost
    trains: bool = True
    """Whether they train; otherwise an engine plays alone."""
    model: StartModelSource = field(init=False)
    """The source of the model that training starts from."""
    placement: Placement = field(init=False)
    """The placement of engines and environments, not yet connected."""
    sampler: protocols.Sampler = field(init=False)
    engines: Mapping[str, EngineConfig] = field(init=False)
    """The sections of the engines that start, by key."""
    text_engine: str = field(init=False)
    """Key of an engine without tokens; empty if there is none."""
    loss: Bound[Any, Any] = field(init=False)
    remarks: Sequence[Remark] = field(init=False)
    """Remarks about the loss."""
    scores: Mapping[str, ScoreConfig] = field(init=False)
    """The scores that the loss needs, by name."""
    learning: Learning = field(init=False)
    strategies: Mapping[str, protocols.ValidationStrategy] = field(init=False)
    """The strategies of ``[validation]``, whose key is "", and of each set."""
    trainer_here: TrainerConfig | None = field(init=False)
    """The section of the trainer; None if nothing is trained, or in a placement's workers."""
    ranks: int = field(init=False)
    """Number of the trainer's processes."""
    data_plane: protocols.DataPlane = field(init=False)
    """The data plane of a run that trains, not yet started."""
    transport: str = field(init=False)
    """The transport of weights from the trainer to the engines."""
    _kept: AsyncExitStack = field(init=False, factory=AsyncExitStack)

    def keep(self, part: T) -> T:
        """Return a part, which ``aclose`` will close."""
        if hasattr(part, "aclose"):
            self._kept.push_async_callback(part.aclose)
        return part

    async def aclose(self) -> None:
        """Close all that was made, the last part first."""
        await self._kept.aclose()


# ---------------------------------------------------------------------------------- engines and trainer


def engines_of(config: Config, *, trains: bool) -> dict[str, EngineConfig]:
    """Return the sections of the engines that start, by key."""
    own = config.validation.engine
    if trains:
        with_own = own is not None and config.validation.measures
        return {"engine": config.engine} | ({"validation.engine": own} if own and with_own else {})
    return {"engine": config.engine} if own is None else {"validation.engine": own}


def text_engine_of(engines: Mapping[str, EngineConfig], plugins: PluginHost) -> str:
    """Return the key of an engine without tokens; empty if there is none."""
    outputs = {key: plugins.find("engine", each.name).offer.output for key, each in engines.items()}
    return next((key for key, output in outputs.items() if output == "text"), "")


def workers_of(section: EngineConfig, plugins: PluginHost) -> int:
    """Return the number of engines of a section: ``workers``, or the number in the engine's options.

    Raises ConfigError if both are set and differ, or if there are several and no pool.
    """
    selected = plugins.find("engine", section.name)
    number = section.workers
    if selected.offer.workers is not None:
        number = selected.loaded(selected.offer.workers)(**section.options)
        if section.workers not in (1, number):
            raise ConfigError(
                f"engine.workers = {section.workers}: the options of engine {section.name!r} describe "
                f"{number}; leave out engine.workers"
            )
    if number > 1:
        try:
            plugins.the_one("engine", "pools_engines")
        except SelectionError as error:
            raise ConfigError(f"engine.workers = {number}: several engines are a pool; {error}") from error
    return number


def engine_setup(
    config: Config, section: EngineConfig, model: str, *, logs: Path | None, colocated: bool, trains: bool
) -> EngineSetup:
    """Make the setup of an engine.

    If the order of training is fixed, and no completion mixes versions by timing, then equal seeds can
    give equal weights, which needs the engine's support.

    Args:
        config: of the run.
        section: of this engine.
        model: directory of the model; it is made absolute, since a worker may have another working directory.
        logs: directory of its log files.
        colocated: whether training runs on this machine at the same time.
        trains: whether its completions are trained.
    """
    pipeline = config.pipeline
    fixed = pipeline.policy == "in_order" and not (pipeline.max_staleness and pipeline.in_flight_updates)
    return EngineSetup(
        model=str(Path(model).absolute()) if model else "",
        sections=config.sections,
        trust_remote_code=config.model.trust_remote_code,
        threads=thread_count(section.threads, colocated),
        seed=config.seed,
        log_directory=str(logs.absolute()) if logs else None,
        deadline=section.deadline,
        max_requests=section.max_requests,
        reproducible=trains and fixed,
    )


def engines(
    setup: RunSetup, devices: Devices, model: str, logs: Path | None = None
) -> dict[str, protocols.Engine]:
    """Make the engines with their GPUs, not yet started, by the keys of their sections.

    Args:
        setup: of the run.
        devices: the GPUs of the engines.
        model: directory of the model.
        logs: directory of the log files.
    """
    config, made = setup.config, {}
    for key, section in setup.engines.items():
        with_training = setup.trains and (config.pipeline.max_staleness > 0 or key != "engine")
        own = logs / "validation" if logs and key != "engine" else logs
        chosen = engine_setup(config, section, model, logs=own, colocated=with_training, trains=setup.trains)
        variables = [{**setup.plugins.variables(), **each} for each in devices.engines.get(key) or [{}]]
        made[key] = setup.keep(
            setup.placement.engine(
                evolve(section, workers=workers_of(section, setup.plugins)),
                evolve(chosen, shares_gpu=key in devices.shared),
                variables,
                canary_tolerance(config.health, section),
            )
        )
    return made


def published(config: Config, engine: protocols.Engine, weights: Weights, version: int) -> Published | None:
    """Describe the newest weights of the engine of training, for the checkpoint of a version."""
    option = config.engine.options.get("dtype", "auto")
    return Published.of(
        weights,
        version=version,
        engine=getattr(engine, "dtype", "") if option == "auto" else str(option),
        apart=getattr(engine, "keeps_adapters", False),
        exact=bool(weights.base) or model_section(config) is None,  # other machines round sums otherwise
    )


def canary_tolerance(health: HealthConfig, section: EngineConfig) -> Tolerance:
    """Return the tolerance for an engine, whose dtype may be unknown."""
    dtype = section.options.get("dtype", "auto")
    return Tolerance(health.canary_tolerance, "" if dtype == "auto" else str(dtype))


def place_of_trainer(trainer: TrainerConfig, plugins: PluginHost) -> str:
    """Return the placement of the trainer's processes; empty if they run on this machine."""
    return str(plugins.find("trainer", trainer.name).offer.placement)


def ranks_of(config: Config, plugins: PluginHost) -> int:
    """Return the number of the trainer's processes."""
    selected = plugins.find("trainer", config.trainer.name)
    count = selected.offer.workers
    return 1 if count is None else int(selected.loaded(count)(config, plugins))


def transport_of(
    engine: EngineConfig, own: EngineConfig | None, plugins: PluginHost, placement: Placement, place: str
) -> str:
    """Return the transport of weights from the trainer to the engines.

    Args:
        engine: section of the engine of training.
        own: section of the engine of validation; None without one.
        plugins: have the transports.
        placement: of the engines.
        place: of the trainer, as ``place_of_trainer`` returns it.

    Raises ConfigError if an engine does not support it, PluginError for an unknown engine or transport.
    """
    engines, from_here = [engine, own] if own is not None else [engine], not place
    if own is not None and (own.transport != "auto" or own.transport_options):
        raise ConfigError("validation.engine.transport: weights come to all engines by engine.transport")
    chosen = engine.transport
    if chosen == "auto":
        chosen = "shm" if from_here else plugins.the_one("transport", "crosses_machines")
    offer = find_transport(chosen, plugins, engine.transport_options)
    if engine.transport == "auto" and from_here:
        return chosen
    declared = [set(plugins.find("engine", each.name).offer.transports) for each in engines]
    takes = set.intersection(*(each | {chosen} if "*" in each else each for each in declared))
    if chosen not in takes:
        names = " and ".join(repr(each.name) for each in engines)
        raise ConfigError(
            f"engine.transport = {chosen!r}: engine {names} takes weights by {', '.join(sorted(takes))} only"
        )
    setting = f'engine.transport = "{engine.transport}"'
    shared = placement.pooled or any(each.workers > 1 for each in engines)
    host, near = f"engine.transport_options.host = {offer.host!r}", is_loopback(offer.host)
    if not from_here and not offer.remote:
        raise ConfigError(
            f"{setting} needs a trainer on this machine, but this one is in workers, perhaps on several: "
            "leave it out"
        )
    if not from_here and not near:
        raise ConfigError(
            f"{host}: each process of this trainer listens at its own machine's address; leave it out"
        )
    if from_here and offer.remote and placement.remote and near:
        raise ConfigError(
            f"{setting}: workers on other machines cannot reach {host}; set it to an address of this "
            "machine in the cluster's network"
        )
    if from_here and not offer.several and shared:
        raise ConfigError(
            f"{setting} is for one engine: a late one of several would read the trainer's next "
            'weights; use "shm"'
        )
    return chosen


def trainer_setup(config: Config, plugins: PluginHost, model: str, **started: Any) -> TrainerSetup:
    """Make the trainer's setup.

    Args:
        config: of the run.
        plugins: those of the run.
        model: directory of the model that the run starts from.
        started: what the configuration does not determine.
    """
    return TrainerSetup(
        sections=config.sections,
        model=evolve(config.model, path=model),
        trainer=config.trainer,
        loss=config.loss,
        optimizer=config.optimizer,
        seed=config.seed,
        colocated=config.pipeline.max_staleness > 0,
        async_save=config.checkpoint.async_save,
        engine_dtype=engine_dtype(config.engine),
        transport_options=config.engine.transport_options,
        max_non_finite=config.health.max_non_finite,
        plugins=plugins.selection.allow,
        block=plugins.selection.block,
        directory=plugins.selection.directory,
        **started,
    )


def load_renderer(section: ModelConfig, model: str, engines: Iterable[EngineConfig]) -> Renderer:
    """Load the renderer of a model; an engine's option ``max_model_len`` bounds its rollouts, too."""
    renderer = Renderer.load(
        model,
        trust_remote_code=section.trust_remote_code,
        chat_template=chat_template(section.chat_template),
        chat_template_kwargs=section.chat_template_kwargs,
        response_format=section.response_format,
        rendered=section.prompt_is_rendered,
    )
    lengths = [engine.options.get("max_model_len") for engine in engines]
    renderer.context = min([renderer.context, *(each for each in lengths if isinstance(each, int))])
    return renderer


# ---------------------------------------------------------------------------------- what is learnt from


def loss(section: LossConfig, plugins: PluginHost) -> Bound[Any, Any]:
    """Make the loss, with its options.  Raises ConfigError or PluginError if it cannot be made."""
    return plugins.function("loss", section.name, **section.options)


def remarks_about(loss: Bound[Any, Any], trainer: TrainerConfig, pipeline: PipelineConfig) -> list[Remark]:
    """Return remarks about the loss; raise ConfigError if its options contradict other sections."""
    setting = LossSetting(
        proximal=trainer.proximal,
        updates_per_step=trainer.updates_per_step,
        max_staleness=pipeline.max_staleness,
    )
    found = list(check_options(loss.function, loss.options, setting))
    if problems := [each for each in found if isinstance(each, str)]:
        raise ConfigError(f"loss {loss.selected.name!r}: " + "; ".join(problems))
    return [each for each in found if isinstance(each, Remark)]


def sampler(config: Config, plugins: PluginHost) -> protocols.Sampler:
    """Make the sampler; factories with these parameters get ``seed`` and the tasks' ``weights``."""
    chosen = config.sampler
    factory = plugins.factory("sampler", chosen.name)
    takes = inspect.signature(factory).parameters
    if draws_itself(factory, chosen.options):
        if unknown := sorted(chosen.options.keys() - takes.keys()):
            raise ConfigError(
                f"sampler {chosen.name!r}: the function has no parameter {unknown[0]!r} for "
                f"sampler.options.{unknown[0]}"
            )
        return FunctionSampler(partial(factory, **chosen.options))
    weights = {name: task.weight for name, task in config.tasks.items()}
    known: dict[str, Any] = {"seed": config.seed, "weights": weights}
    options = {key: value for key, value in known.items() if key in takes}
    sampler: protocols.Sampler = plugins.make("sampler", chosen.name, **{**options, **chosen.options})
    return sampler


def shaping_of(config: Config, plugins: PluginHost) -> protocols.Shaping | None:
    """Make the shaping of rewards from a plugin's section, or None."""
    sections = (config.section(each.kind, None) for each in plugins.sections.added)
    found = (
        section.reward_shaping(config.rollout.max_tokens)
        for section in sections
        if isinstance(section, protocols.ShapingSection)
    )
    return next((shaping for shaping in found if shaping is not None), None)


def of_reward(config: Config, plugins: PluginHost) -> dict[str, str]:
    """Return the metrics of which rewards are made, each with the key that says so."""
    chosen = config.advantage
    selected = plugins.find("advantage", chosen.name)
    reads = selected.offer.parts
    compared = () if reads is None else selected.loaded(reads)(**chosen.options)
    shaping = shaping_of(config, plugins)
    return {
        **dict.fromkeys(compared, f"advantage.name = {chosen.name!r}"),
        **dict.fromkeys(() if shaping is None else shaping.parts, "shaping.weights"),
    }


def dynamic_sampling(config: Config, plugins: PluginHost) -> DynamicSampling | None:
    """Make the dynamic sampling, or None if no groups are filtered."""
    section, filters = config.dynamic_sampling, config.filters
    if not section.enabled and not filters:
        return None
    if len({*map(short_name, filters)}) < len(filters):
        raise ConfigError(
            f"filters: two of {', '.join(filters)} have the same name in metrics; rename one, in its file"
        )
    return DynamicSampling(
        tolerance=section.tolerance if section.enabled else None,
        filters={
            short_name(name): plugins.function("filter", name, **options) for name, options in filters.items()
        },
        max_extra_groups=section.max_extra_groups or EXTRA_GROUPS * config.trainer.prompts_per_step,
    )


def learning(config: Config, loss: Bound[Any, Any], plugins: PluginHost) -> Learning:
    """Make the advantages, clipped as their section sets, the hints and the filters."""
    section, chosen = config.rollout, config.advantage
    advantages: protocols.AdvantageFunction = plugins.function("advantage", chosen.name, **chosen.options)
    if chosen.clip_low is not None or chosen.clip_high is not None:
        advantages = Clipped(advantages, chosen.clip_low, chosen.clip_high)
    hints = Hints(
        choose=hints_of(loss.function, loss.options),
        who=str(loss),
        place=section.hint_place,
        max_tokens=section.max_hint_tokens,
    )
    return Learning(
        advantages=advantages,
        all_rows=config.loss.all_rows or "all_rows" in loss.needs,
        shaping=shaping_of(config, plugins),
        dynamic=dynamic_sampling(config, plugins),
        hints=hints if any(each.hint for each in needed_scores(config.scores, loss.needs).values()) else None,
        needs_hints="hints" in loss.needs,
    )


# ---------------------------------------------------------------------------------- the loop


def buffer(config: Config) -> Buffer[Prompt, Group]:
    """Make the buffer of a new run."""
    return Buffer(
        prompts_per_step=config.trainer.prompts_per_step,
        max_staleness=config.pipeline.max_staleness,
        num_steps=config.trainer.steps,
        policy=config.pipeline.policy,
        max_retries=config.rollout.max_retries,
    )


def checks(
    config: Config,
    remarks: Sequence[Remark],
    environments: Mapping[str, EnvironmentClient],
    prompts: Mapping[str, Sequence[Prompt]],
    renderer: Renderer,
) -> Checks:
    """Make the checks that end a run which cannot learn."""
    limits = config.health
    some = [prompt for part in prompts.values() for prompt in part[: max(1, PROMPTS // len(prompts))]]
    ends = [tuple(renderer.prompt_ids(each.messages)[-LENGTH:]) for each in some[:PROMPTS]]
    return Checks(
        observe_attempt=budgets(config, environments),
        canary=[ids for ids in dict.fromkeys(ends) if ids and max(ids) < renderer.vocabulary],
        tolerance=canary_tolerance(limits, config.engine),
        limits={
            "logprob_diff_mean": Thresholds(*limits.logprob_diff),
            "mismatch_kl": Thresholds(*limits.mismatch_kl),
            "effective_sample_size": Thresholds(*limits.effective_sample_size),
            "clip_fraction_low": Thresholds(*limits.clip_fraction),
            "clip_fraction_high": Thresholds(*limits.clip_fraction),
        },
        correction=", ".join(
            f"loss.options.{name} = {value!r}" for name, value in config.loss.options.items()
        ),
        uncorrected=next((each.message for each in remarks if each.costs), ""),
    )


def schedule(config: Config, *, began: float = 0.0) -> Schedule:
    """Make the loop's schedule and deadlines; ``stall`` exceeds all deadlines within it.

    Args:
        config: of the run.
        began: start of the program, on the clock of the event loop.
    """
    seconds = config.trainer.time_limit
    rollout, trainer, pipeline = config.rollout, config.trainer, config.pipeline
    engine, validation, checkpoint = config.engine, config.validation, config.checkpoint
    attempts = rollout.max_retries + 2
    rounds = 1
    if rollout.max_in_flight:
        rounds = -(-config.slots // max(1, rollout.max_in_flight // rollout.group_size))
    return Schedule(
        validations=intervals(validation),
        save_every=checkpoint.every,
        save_seconds=60.0 * checkpoint.every_minutes,
        rollout_deadline=rollout.deadline,
        sync_deadline=SYNC_ATTEMPTS * engine.deadline + SYNC_GRACE,
        in_flight_updates=pipeline.in_flight_updates,
        pause_to_validate=validation.pause,
        time_limit=TimeLimit(end=began + seconds, seconds=seconds) if seconds else None,
        stall=rollout.deadline * attempts * rounds
        + trainer.deadline
        + SYNC_ATTEMPTS * engine.deadline
        + validation.longest_deadline * validation.measures,
    )


def budgets(config: Config, environments: Mapping[str, EnvironmentClient]) -> ObserveAttempt:
    """Make the observer of attempts, which raises when too many calls fail or rollouts are lost.

    As many rollouts may be lost in a row as all attempts of all outstanding slots have.
    """
    rollout, max_retries = config.rollout, config.rollout.max_retries
    lost = LostBudget(config.slots * rollout.group_size * (max_retries + 1))
    of_task = {task: ErrorBudget(task, config.environment.max_error_rate) for task in environments}

    def observe(task: str, rollouts: Sequence[Rollout], attempts: int) -> None:
        for each in rollouts:
            lost.observe(each)
        for failed in failures_of_calls(rollouts, needs_group=environments[task].about.needs_group):
            again = attempts == 0 < max_retries
            of_task[task].observe(failed, last=not again)

    return observe


def playing(
    rollout: RolloutConfig,
    environments: Mapping[str, EnvironmentClient],
    renderer: protocols.Renderer,
    *,
    seed: int,
) -> Playing:
    """Make the settings for playing groups."""
    return Playing(
        environments=environments,
        renderer=renderer,
        sampling=sampling_params(rollout),
        group_size=rollout.group_size,
        places=FairSemaphore(rollout.max_in_flight or UNLIMITED),
        seed=seed,
    )


def validation(
    setup: RunSetup,
    playing: Playing,
    held_out: Sequence[HeldOut],
    engine: protocols.Engine,
    *,
    emit: Callable[[Event], None],
    last: int = 0,
) -> Validation:
    """Make the validation of a run's versions up to the ``last`` one, which shares the places of training."""
    shared = Context(
        version=0,
        prompts={},
        engine=engine,
        environments={},
        renderer=playing.renderer,
        sampling=playing.sampling,
        retries=setup.config.rollout.max_retries,
        seed=playing.seed,
        group_size=playing.group_size,
        places=playing.places,
    )
    chosen = {part.name: setup.strategies[part.name] for part in held_out}
    return Validation(parts=held_out, strategies=chosen, shared=shared, last=last, emit=emit)


def sampling_params(config: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of training."""
    return SamplingParams(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        stop=tuple(config.stop),
        max_turns=config.max_turns,
        max_total_tokens=config.max_total_tokens,
        max_tool_calls=config.max_tool_calls,
        truncated=config.truncated,
    )


def engine_dtype(engine: EngineConfig) -> Literal["auto", "bfloat16", "float16"]:
    """Return the 16-bit dtype that an engine sets for weights by its option ``dtype``, or "auto"."""
    option = engine.options.get("dtype")
    return option if option in ("bfloat16", "float16") else "auto"


def intervals(config: ValidationConfig) -> list[Interval]:
    """Return when the tasks and each set are measured."""
    each = (config, *map(config.of_set, config.sets))
    return [Interval(section.every, section.at_start) for section in each]


def check_loaders(
    epochs: float, loaders: Mapping[str, LookAhead], sampler: protocols.Sampler, name: str
) -> None:
    """Raise ConfigError for streams if the number of prompts must be known.

    Args:
        epochs: of the trainer.
        loaders: of all tasks.
        sampler: of the run.
        name: of the sampler.
    """
    streams = [loader for loader in loaders.values() if loader.size is None]
    if not streams:
        return
    who = f"{streams[0].who} is a stream with an unknown number of prompts"
    if epochs:
        raise ConfigError(f"{who}, and trainer.epochs = {epochs:g} needs it: set trainer.steps instead")
    if getattr(sampler, "needs_places", False):
        raise ConfigError(
            f"{who}, and the sampler {name!r} selects prompts by index: "
            "choose a sampler that only takes the next prompts, such as mix, or let the dataloader return a "
            "sequence"
        )


def with_steps(trainer: TrainerConfig, sizes: Mapping[str, int]) -> TrainerConfig:
    """Return the section with the number of steps for ``trainer.epochs``.

    ``sizes``: number of training prompts by task.
    """
    if not trainer.epochs:
        return trainer
    steps = math.ceil(trainer.epochs * sum(sizes.values()) / trainer.prompts_per_step)
    return evolve(trainer, steps=max(1, steps))


def check_small_files(
    config: Config, engines: Iterable[EngineConfig], model: str, prompts: Iterable[Prompt] = ()
) -> None:
    """Check a model that may still lack its weights: its positions, and its chat template with some prompts.

    Raises ConfigError, ModelError.
    """
    check_lengths(with_max_tokens(config, 0).rollout, size_of(model, "max_position_embeddings"))
    renderer = load_renderer(config.model, model, engines)
    for prompt in prompts:
        renderer.prompt_ids(prompt.messages)


def check_lengths(config: RolloutConfig, positions: int) -> None:
    """Raise ConfigError if rollouts would exceed the model's positions for every prompt."""
    key = "max_total_tokens" if config.max_total_tokens else "max_tokens"
    room = positions if config.max_total_tokens else positions - 1
    if (given := getattr(config, key)) > room:
        raise ConfigError(
            f"rollout.{key} is {given}; the model has {positions} positions for prompt and completions "
            f"together: choose at most {room}"
        )
