"""Makes and checks all components that a configuration names; no process starts and no model is read.

The checks of ``grpo_preflight`` follow, each when all that its parameters name is there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from math import lcm
from pathlib import Path
from typing import Any, cast

from attrs import evolve

from grpo_core.app import making
from grpo_core.app.data import check_data
from grpo_core.app.making import RunSetup
from grpo_core.app.model_sources import StartModelSource, model_source, scoring_model
from grpo_core.config import TRUNCATIONS, Config, EnvironmentConfig, TaskConfig, ValidationConfig
from grpo_core.config.idle import CLUSTER, MEASURED, WEIGHING, idle_keys
from grpo_core.config.run import needed_scores
from grpo_core.contracts.errors import ConfigError, PluginError, did_you_mean, plugin_errors, wrong_input
from grpo_core.contracts.hookspecs import TrainerOffer
from grpo_core.contracts.loss import score_names
from grpo_core.contracts.protocols import ValidationStrategy
from grpo_core.data.samplers import plugin_state
from grpo_core.loop.endings import Goal
from grpo_core.loop.metrics import COMPARED, names_of_tasks
from grpo_core.loop.schedule import rate
from grpo_core.loop.versions import Interval
from grpo_core.models.files import ADAPTERS, chat_template, check_path
from grpo_core.plugins.configured import model_section
from grpo_core.plugins.host import Kind, PluginHost
from grpo_core.plugins.offers import Selected
from grpo_core.processes.aio import in_own_loop
from grpo_core.processes.interpreters import Interpreter, from_here
from grpo_core.reporting.trackers import check_trackers
from grpo_core.storage.planes import check_reader
from grpo_core.text.response_formats import check_response_format

CHECKED = ("engine", "trainer", "loss", "optimizer", "advantage", "filter", "player")
"""Kinds whose names and options are checked alone; other kinds are made, or checked in context."""


def _stands_alone(name: str, host: PluginHost) -> bool:
    """Return whether an environment has prompts without any option."""
    try:
        return len(host.make("environment", name).prompts("train")) > 0
    except Exception:  # it needs an option, a service, or data
        return False


def make(
    config: Config, host: PluginHost, *, trains: bool = True, model: StartModelSource | None = None
) -> RunSetup:
    """Make the components of a run, to train or to play alone; close all if one of them cannot be made.

    The modules of the selected plugins are imported, except environments offered as a string: they may load
    only in their own process.  Raises ConfigError, PluginError or ModelError for the first invalid choice.

    Args:
        config: the whole configuration.
        host: its plugins.
        trains: whether the run trains.
        model: the source that ``model.path`` names, if it has been made.
    """
    setup = RunSetup(config, host, trains)
    with wrong_input():
        try:
            setup.model = setup.keep(model or model_source(config.model, host))
            _make(setup)
        except BaseException:
            in_own_loop(setup.aclose())
            raise
    return setup


def _make(setup: RunSetup) -> None:
    config, host, trains, validation = setup.config, setup.plugins, setup.trains, setup.config.validation
    if not config.tasks and (trains or not validation.sets):
        raise _no_task(host, trains=trains)
    placement = host.make("placement", config.placement.name, host, **config.placement.options)
    setup.placement = setup.keep(placement)
    for name, task in config.tasks.items():
        check_task(f"tasks.{name}", task, config.environment, host, remote=placement.remote)
        check_data(f"tasks.{name}", name, task, host)
    setup.sampler = setup.keep(making.sampler(config, host))
    plugin_state(setup.sampler, f"sampler {config.sampler.name!r}")  # or the first checkpoint would fail
    _check_choices(config, host, trains=trains)

    for engine in (config.engine, validation.engine):
        if engine is not None:
            making.workers_of(engine, host)
    setup.engines = making.engines_of(config, trains=trains)
    setup.text_engine = key = making.text_engine_of(setup.engines, host)
    if trains and key:
        raise ConfigError(
            f"{key}.name = {setup.engines[key].name!r}: this engine returns text, but training needs "
            "tokens and their logprobs; measure it with grpo-core validate, or choose an engine that holds "
            "the model's weights, such as local or vllm"
        )

    setup.loss = making.loss(config.loss, host)
    setup.remarks = making.remarks_about(setup.loss, config.trainer, config.pipeline)
    setup.scores = needed_scores(config.scores, setup.loss.needs)
    _check_scores(setup)
    setup.learning = making.learning(config, setup.loss, host)
    if (section := model_section(config)) is not None:
        section.check(config)
    if config.model.attention and config.trainer.packing is True:
        raise ConfigError(
            f"trainer.packing = true uses its own attention, but model.attention = "
            f"{config.model.attention!r} asks for another one; leave one of them out"
        )
    for step in (0, config.trainer.steps):  # a failing function of a file is an error now
        rate(config.trainer, step)
    best_interval(config)
    _check_goal(config)
    _check_idle(config, host, remote=placement.remote)

    setup.strategies = strategies = {}
    for name in ("", *validation.sets):
        if name:
            _check_set(name, setup)
        chosen = validation.of_set(name) if name else validation
        strategy = host.make("validation_strategy", chosen.name, **chosen.options)
        strategies[name] = setup.keep(strategy)
        _check_strategy(strategy, name, validation)
    check_trackers(config.tracking, host)

    place, setup.ranks = making.place_of_trainer(config.trainer, host), making.ranks_of(config, host)
    setup.trainer_here = config.trainer if trains and not place else None
    placement.check(setup.trainer_here, setup.engines, setup.ranks)
    if trains:
        if place and place != config.placement.name:
            raise ConfigError(
                f'trainer.name = "{config.trainer.name}" runs in the workers of placement.name = '
                f'"{place}", but placement.name is "{config.placement.name}"; set it to "{place}"'
            )
        plane = host.make("data_plane", config.data_plane.name, placement, **config.data_plane.options)
        setup.data_plane = setup.keep(plane)
        check_reader(plane, config.data_plane.name)
    own = validation.engine if validation.measures else None
    setup.transport = making.transport_of(config.engine, own, host, placement, place)
    setup.model.check()
    chat_template(config.model.chat_template)
    check_response_format(config.model.response_format)


def _no_task(host: PluginHost, *, trains: bool) -> ConfigError:
    """Return the error if there is nothing to train on, or to measure."""
    offered = sorted(f"{p.name}:{n}" for p in host.plugins for n in p.offers.get("environment", ()))
    whole = [name for name in offered if trains and not name.endswith("*")]
    first = next((name for name in whole if _stands_alone(name, host)), "")
    proposed = f"try grpo-core train --env {first}; " if first else ""
    return ConfigError(
        f"no task to {'train on' if trains else 'measure'}: give an environment with --env NAME, or "
        f"[tasks.NAME] in CONFIG.toml; {proposed}installed: "
        + (", ".join(offered) or "none (pip install grpo-plugin-math, for one)")
    )


def _check_choices(config: Config, host: PluginHost, *, trains: bool) -> None:
    """Raise PluginError for a name that nothing offers, or wrong options."""
    known = {
        "group_size": config.rollout.group_size,
        "betas": config.trainer.betas,
        "config": config,
        "host": host,
    }
    for kind, name, options in config.choices():
        if kind in CHECKED:
            host.check_options(cast(Kind, kind), name, options)
            if trains or kind != "trainer":
                host.check_values(cast(Kind, kind), name, options, **known)


def _check_scores(setup: RunSetup) -> None:
    """Raise ConfigError if loss, scores and trainer do not fit, ModelError if a score's model is none."""
    config, scores, loss = setup.config, setup.scores, f"the loss {setup.config.loss.name!r}"
    needed = score_names(setup.loss.needs)
    if idle := sorted(config.scores.keys() - set(needed)):
        reads = ", ".join(needed) or "no score"
        raise ConfigError(f"[scores.{idle[0]}] does nothing: with its options {loss} reads {reads}")
    if not setup.trains:
        return
    if missing := next((name for name in needed if name not in scores), ""):
        raise ConfigError(
            f"{loss} compares with the score {missing!r}; write\n[scores.{missing}]\nweights = (a model)"
        )
    offered = sorted(cast(TrainerOffer, setup.plugins.find("trainer", config.trainer.name).offer).scores)
    for name, score in scores.items():
        kind = "model" if score.model else score.weights
        if kind not in offered:
            raise ConfigError(
                f"{loss} needs scores.{name} by the weights {score.weights!r}, and trainer.name = "
                f"{config.trainer.name!r} scores by {', '.join(offered) or 'none'}"
            )
        model = score.model and scoring_model(name, score.model)
        if model and not (Path(os.path.expanduser(model)) / ADAPTERS).is_file():
            check_path(model)
        elif model and importlib.util.find_spec("peft") is None:  # transformers needs it for adapters
            raise ConfigError("a score by adapters needs the package peft: pip install 'grpo-core[lora]'")


def best_interval(config: Config) -> Interval:
    """Return when checkpoints are compared; raise ConfigError if none could be the best."""
    best = config.checkpoint.best.removeprefix("-")
    if not best:
        return Interval()
    key, every = interval_of(best, config, "checkpoint.best")
    if not every or not config.checkpoint.every:
        raise ConfigError(
            f"checkpoint.best compares validated checkpoints: checkpoint.every and {key} "
            f"must not be 0; they are {config.checkpoint.every} and {every}"
        )
    if (name := best.rpartition("/")[2]) in COMPARED:
        raise ConfigError(
            f"checkpoint.best is {best!r}, and {name} compares each version with a changing one; choose a "
            "metric of a single version, such as accuracy or reward"
        )
    met = lcm(config.checkpoint.every, every)
    if not config.trainer.epochs and min(config.checkpoint.every, every) <= config.trainer.steps < met:
        raise ConfigError(
            "checkpoint.best compares validated checkpoints, but of "
            f"{config.trainer.steps} steps only the last would be both: checkpoint.every is "
            f"{config.checkpoint.every} and {key} is {every}; "
            "make one of them a multiple of the other"
        )
    return Interval(every)


def _check_goal(config: Config) -> None:
    """Raise ConfigError if nothing measures the run's goal."""
    goal = config.trainer.stop_when
    if not goal:
        return
    metric = Goal.parse(goal).metric
    name, _, task = metric.partition("/")
    if name in names_of_tasks() and task not in config.tasks:
        near = did_you_mean(task, set(config.tasks))
        raise ConfigError(f"trainer.stop_when is {goal!r}, and there is no task {task!r}.{near}")
    if not metric.startswith("validation/"):
        return
    key, every = interval_of(metric, config, "trainer.stop_when")
    if not every:
        raise ConfigError(f"trainer.stop_when is {goal!r}, which nothing measures: {key} is 0")


def interval_of(metric: str, config: Config, key: str) -> tuple[str, int]:
    """Return the key of a validation metric's interval, and its value.  Raises ConfigError."""
    validation = config.validation
    intervals = dict.fromkeys(config.tasks, ("validation.every", validation.every)) | {
        name: (f"validation.sets.{name}.every", validation.of_set(name).every) for name in validation.sets
    }
    for name, found in intervals.items():
        if re.fullmatch(rf"validation/{re.escape(name)}/[^/]+", metric):
            return found
    sets = f" or of the sets {', '.join(validation.sets)}" if validation.sets else ""
    raise ConfigError(
        f"{key} is {metric!r}, which is not a metric of validation; expected validation/TASK/NAME "
        f"with one of the tasks {', '.join(config.tasks)}{sets}"
    )


def _check_set(name: str, setup: RunSetup) -> None:
    """Raise ConfigError or PluginError if a validation set cannot be measured."""
    config, validation = setup.config, setup.config.validation
    key = f"validation.sets.{name}"
    chosen = validation.sets[name]
    if name in config.tasks:
        raise ConfigError(
            f"{key}: {name!r} is the name of a task, which [validation] measures under that name; give the "
            "set another one"
        )
    if chosen.task and chosen.task not in config.tasks:
        raise ConfigError(
            f"{key}.task is {chosen.task!r}; the tasks are {', '.join(config.tasks) or '(none)'}"
        )
    if setup.trains and chosen.every is None and not validation.every:
        raise ConfigError(
            f"{key} is never measured, since validation.every is 0: set {key}.every, to 0 if only "
            "`grpo-core validate` should measure it"
        )
    for environment in validation.environments([name]).values():
        check_task(key, environment, config.environment, setup.plugins, remote=setup.placement.remote)
        check_data(key, name, environment, setup.plugins)


def _check_strategy(strategy: ValidationStrategy, of_set: str, validation: ValidationConfig) -> None:
    """Raise ConfigError or PluginError if a strategy has no state, or ignores keys of its section.

    With sets, a key of [validation] may be meant for the strategy of one of them.
    """
    own, chosen = (validation.sets[of_set], validation.of_set(of_set)) if of_set else (None, validation)
    section = f"validation.sets.{of_set}" if of_set else "validation"
    plugin_state(strategy, f"validation strategy {chosen.name!r}")
    usual = ValidationConfig()
    keys = {key: value for key in TRUNCATIONS if (value := getattr(chosen, key)) != getattr(usual, key)}
    if own is not None or validation.sets:
        keys = {key: value for key, value in keys.items() if getattr(own, key, None) is not None}
    if keys and getattr(strategy, "temperature", None) == 0:
        key, value = next(iter(keys.items()))
        raise ConfigError(
            f"{section}.{key} = {value:g} does nothing with {section}.name = {chosen.name!r}, which "
            'takes the likeliest token: choose a strategy that samples, such as "pipelined", or leave out '
            f"{key}"
        )


def _check_idle(config: Config, host: PluginHost, *, remote: bool) -> None:
    """Raise ConfigError for changed keys without effect."""
    sampler = inspect.signature(host.factory("sampler", config.sampler.name)).parameters
    holds = {
        CLUSTER: remote,
        WEIGHING: "weights" in sampler,
        MEASURED: config.validation.measures,
    }
    there = [words for words, there in holds.items() if there]
    found = list(idle_keys(config, config, there))
    for each in host.sections.added:
        found += idle_keys(config.section(each.kind, None), config, there, each.name)
    if found:
        raise ConfigError("\n".join(found))


def of_task(config: EnvironmentConfig, task: TaskConfig) -> EnvironmentConfig:
    """Return the environment section for a task, whose own keys take precedence."""
    return evolve(config, python=task.python or config.python, env_vars={**config.env_vars, **task.env_vars})


def check_task(
    key: str, task: TaskConfig, environment: EnvironmentConfig, host: PluginHost, *, remote: bool = False
) -> None:
    """Raise ConfigError or PluginError if the environment of a task or of a set cannot be made.

    Another interpreter's packages are known only when the environment starts there.
    """
    own = of_task(environment, task)
    if host.of_program(task.env):
        if remote or own.python:
            where = "a worker of the cluster" if remote else f"the interpreter {own.python}"
            raise ConfigError(
                f"{key}: {task.env!r} is an object of this program, which {where} does not have; write it "
                "into a file, and give its name, as in env='./file.py:NAME'"
            )
        if task.env_vars:
            raise ConfigError(
                f"{key}.env_vars: {task.env!r} is an object of this program, which has its own environment "
                "variables; set them there"
            )
        if (own.workers or 1) > 1 and host.find("environment", task.env).offer.single_use:
            raise ConfigError(
                f"environment.workers = {own.workers}: {task.env!r} is one object; give its class, so that "
                "each worker makes its own object"
            )
    from_here(own.env_vars, f"{key}.env_vars" if task.env_vars else "environment.env_vars")
    if own.python:
        if not remote:
            Interpreter.find(own.python)
    elif not isinstance(host.find("environment", task.env).offer.factory, str):
        host.check_options("environment", task.env, task.options)


# ---------------------------------------------------------------------------------- grpo_preflight

STAGES = (("config", "host"), ("model",), ("renderer", "held_out", "prompts", "environments"))
"""Parameters that are known before anything starts, when the model is here, and before the first rollout."""


async def preflight(config: Config, host: PluginHost, **there: Any) -> list[tuple[str, str]]:
    """Call the checks of a stage off the event loop; return causes and messages of their warnings.

    A text without a cause has the name of its check.  Checks may be async.  Raises GrpoError.

    Args:
        config: of the run.
        host: its plugins, which have the checks.
        there: what else is there at this stage.
    """
    warnings: list[tuple[str, str]] = []
    known = {"config": config, "host": host, **there}
    offers = [(p, *each) for p in host.plugins for each in p.offers.get("preflight", {}).items()]
    for plugin, name, offer in offers:
        selected = Selected("preflight", name, plugin, offer)
        check = selected.load()
        takes = inspect.signature(check).parameters
        needed = {each for each, parameter in takes.items() if parameter.default is parameter.empty}
        if unknown := needed.difference(*STAGES):
            raise PluginError(
                f"{selected}: no run has its parameter {min(unknown)!r}; expected some of "
                + ", ".join(each for stage in STAGES for each in stage)
            )
        if _stage(takes) != _stage(known) or not needed <= known.keys():
            continue
        with plugin_errors(str(selected)):
            found = await asyncio.to_thread(check, **{each: known[each] for each in takes if each in known})
            found = await found if inspect.isawaitable(found) else found
            warnings += found.items() if isinstance(found, Mapping) else [(name, each) for each in found]
    return warnings


def _stage(names: Iterable[str]) -> int:
    return max((i for i, stage in enumerate(STAGES) if not set(stage).isdisjoint(names)), default=0)
