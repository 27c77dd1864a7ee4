"""The command ``grpo-core simulate``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
from attrs import define, evolve, field, frozen

from grpo_core import ConfigError
from grpo_core.app import launch
from grpo_core.commands.complaints import complain, say
from grpo_core.config import parse_settings, read_toml
from grpo_core.kit import Config, PluginHost
from grpo_core.plugins.configured import changed
from grpo_core.plugins.options import AsJson, Flag, Settings, Words
from grpo_plugin_replay.forecast import Forecast, fewest_steps, for_steps, forecast
from grpo_plugin_replay.times import Times, fitting, read_times

STEPS = 100
"""Default limit of simulated steps."""
FEWEST = 20
"""Smallest default number of steps."""
ROLLOUTS = 12_800
"""Number of rollouts that suffices for the means and takes about a second."""
SWEEP = (0, 1, 2, 4)
"""Default values of ``pipeline.max_staleness`` to compare."""
SHORT = 16
"""Limit of a completion if it depends on a model that is made when the run starts."""

SIMULATED = (
    "advantage.*",
    "checkpoint.every",
    "checkpoint.every_minutes",
    "dynamic_sampling.*",
    "engine.max_requests",
    "engine.workers",
    "loss.all_rows",
    "pipeline.*",
    "rollout.deadline",
    "rollout.group_size",
    "rollout.max_in_flight",
    "rollout.max_retries",
    "rollout.max_tokens",
    "sampler.*",
    "shaping.*",
    "tasks.*",
    "trainer.prompts_per_step",
    "trainer.steps",
    "validation.at_start",
    "validation.deadline",
    "validation.every",
    "validation.pause",
    "validation.prompts",
)
"""Patterns of keys that the simulation takes into account."""
NEAR = 1.02
"""Forecasts within this factor of each other count as equal."""
HEADS = ("", "s/step", "overlap", "generating", "training", "waiting", "staleness", "tokens/s")

Variant = tuple[str, Mapping[str, Any]]
"""The name of a row of the table, and its changes of the configuration."""


def simulate(
    config: Path | None = None,
    *,
    times: Path | None = None,
    time: Words = None,
    settings: Settings = None,
    sweep: Words = None,
    cross: Flag = False,
    steps: int | None = None,
    seed: int = 0,
    as_json: AsJson = False,
    no_plugin: Words = None,
) -> int:
    """Forecast the time of a run: the real pipeline on virtual time, with service times that you give.

    Parameters
    ----------
    config
        A TOML file as for `train`; engine, trainer and environment are replaced by their service times.
    times
        A TOML file with service times, as in "[engine]" and "token = 0.02" below it.
    time
        Set a service time, as in "engine.token=0.02" or "trainer.step=30"; may be repeated.
    settings
        Set a configuration key, as in "rollout.group_size=16"; may be repeated.
    sweep
        Compare values of a configuration key, as in "engine.workers=1,2,4"; may be repeated.  Default:
        pipeline.max_staleness=0,1,2,4.
    cross
        Combine each value of a sweep with each value of the others.
    steps
        Number of steps that are simulated.  Default: at most 100, and fewer if they are large.
    seed
        Seed of the simulation.
    as_json
        Print the forecasts as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps is {steps}; expected 1 or more")
    tables = [read_toml(config)] if config else []
    changes, variants = parse_settings(settings or []), variants_of(sweep or [], cross=cross)
    check_comparable(dict.fromkeys(key for _, each in variants for key in flat(each)))
    run, host = launch.configure(tables, changes, no_plugin or [])
    if run.rollout.max_tokens == 0:  # the model is not made
        run = evolve(run, rollout=evolve(run.rollout, max_tokens=SHORT))
    service = read_times(times, time or [], fitting(run.rollout.max_tokens))
    for key in unknown(flat(changes)):
        complain(
            f"note: the simulation does not know what {key} changes: it changes no service time; --time "
            "gives those that you expect"
        )
    if service.rollout.tokens > (limit := run.rollout.max_tokens):
        complain(
            f"note: completions have {service.rollout.tokens:g} tokens on average (rollout.tokens of the "
            f"service times), and rollout.max_tokens of the configuration cuts them off at {limit}"
        )
    planner = Planner(run, service, host, steps=steps, seed=seed)
    for each in ({}, *(its for _, its in variants)):
        planner.configured(each)
    rows = [planner.row("as configured", {}), *(planner.row(*variant) for variant in variants)]
    _show(rows, service, as_json=as_json)
    return 0


def refuse_unknown_parts(config: Config) -> None:
    """Raise ConfigError for parts of the configuration that are not simulated."""
    unknown = {
        "validation.engine": config.validation.engine is not None,
        "filters": bool(config.filters),
        "validation.sets": any(config.validation.of_set(name).every for name in config.validation.sets),
    }
    if named := [name for name, there in unknown.items() if there]:
        raise ConfigError(
            f"{' and '.join(named)}: a simulation does not know how long this takes or what it changes; "
            "leave it out of the configuration to simulate the rest"
        )


@frozen(kw_only=True)
class Row:
    """A row of the table."""

    name: str
    """Name of the variant, such as "pipeline.max_staleness=2"."""
    settings: Mapping[str, Any]
    """Configuration keys that differ from the given configuration."""
    forecast: Forecast


@define
class Planner:
    """Computes forecasts for variants of a configuration."""

    config: Config
    times: Times
    host: PluginHost
    seed: int
    steps: int | None = None
    _made: list[tuple[Config, Forecast]] = field(init=False, factory=list)

    def row(self, name: str, changes: Mapping[str, Any]) -> Row:
        """Return the forecast for the configuration with a table of changes."""
        return Row(name=name, settings=flat(changes), forecast=self._forecast(self.configured(changes)))

    def configured(self, changes: Mapping[str, Any]) -> Config:
        """Return the configuration with changes.  Raises ConfigError if it cannot be simulated."""
        config = changed(self.config, changes, self.host)
        refuse_unknown_parts(config)
        staleness = config.pipeline.max_staleness
        if self.steps is not None and self.steps < (least := fewest_steps(staleness)):
            raise ConfigError(
                f"--steps {self.steps}: so few steps show how the pipeline is filled, and not how long "
                f"a step takes; a forecast with pipeline.max_staleness={staleness} needs at least {least}"
            )
        return config

    def _forecast(self, config: Config) -> Forecast:
        for known, found in self._made:
            if known == config:
                return found
        held_out = config.validation.prompts * max(1, len(config.tasks))
        found = forecast(
            for_steps(config, self.steps or enough_steps(config)),
            self.times,
            self.host,
            seed=self.seed,
            held_out=held_out if config.validation.measures else 0,
        )
        self._made.append((config, found))
        return found


def enough_steps(config: Config) -> int:
    """Return a number of steps after which the means are stable; the run may have fewer."""
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    fewest = max(FEWEST, fewest_steps(config.pipeline.max_staleness))
    return max(fewest, min(STEPS, ROLLOUTS // rollouts))


def variants_of(sweep: Sequence[str], *, cross: bool = False) -> list[Variant]:
    """Return a variant for each value of each key; by default for values of ``max_staleness``.

    Args:
        cross: combine each value of a key with each value of the others.
    """
    given: list[tuple[str, ...]]
    if not sweep:
        given = [(f"pipeline.max_staleness={value}",) for value in SWEEP]
    elif cross:
        given = list(itertools.product(*(_values(text) for text in sweep)))
    else:
        given = [(each,) for text in sweep for each in _values(text)]
    return [(" ".join(each), parse_settings(each)) for each in given]


def _values(text: str) -> list[str]:
    """Split ``KEY=1,2`` into ``["KEY=1", "KEY=2"]``."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not all(value.strip() for value in values.split(",")):
        raise ConfigError(
            f"--sweep {text}: expected section.key=value,value, as in --sweep pipeline.max_staleness=0,1,2"
        )
    return [f"{key.strip()}={value.strip()}" for value in values.split(",")]


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a table to dotted keys, such as "trainer.steps"."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


# ---------------------------------------------------------------------------------- which keys it knows


def unknown(changes: Iterable[str]) -> list[str]:
    """Return the keys whose effect is not simulated."""
    return [key for key in changes if not any(fnmatchcase(key, pattern) for pattern in SIMULATED)]


def check_comparable(keys: Iterable[str]) -> None:
    """Raise ConfigError for keys that change the service times themselves."""
    if found := unknown(keys):
        raise ConfigError(
            f"{', '.join(found)}: the simulation does not know what this changes, because the service times "
            "are the same for all of its values; give those of each value with --time, one command for "
            f"each. A sweep can change {', '.join(SIMULATED)}"
        )


# ---------------------------------------------------------------------------------- what it prints


def _show(rows: Sequence[Row], times: Times, *, as_json: bool) -> None:
    """Print the rows; rows after the first one are alternatives."""
    choice = best(rows[1:])
    if as_json:
        found = {
            "rows": [
                {"name": row.name, "settings": dict(row.settings), **attrs.asdict(row.forecast)}
                for row in rows
            ],
            "best": choice.name,
            "times": attrs.asdict(times),
        }
        print(json.dumps(found, indent=2))
        return
    its = choice.forecast
    say(
        f"{table(rows)}\n\nbest: {choice.name}, {its.seconds_per_step:.3g} s/step, "
        f"{its.rollouts_per_second:.3g} trained rollouts/s (the first that is within 2% of the most)"
    )
    skipped = [row.name for row in rows if row.forecast.skipped]
    if skipped:
        say(f"prompts are skipped with {', '.join(skipped)}: rollouts are longer than rollout.deadline")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    its = row.forecast
    return (
        row.name,
        f"{its.seconds_per_step:.3g}" if its.seconds_per_step < 1000 else f"{its.seconds_per_step:.0f}",
        f"{its.overlap:.0%}",
        f"{its.generating:.0%}",
        f"{its.training:.0%}",
        f"{its.waiting:.0%}",
        f"{its.staleness_mean:.2f}, max {its.staleness_max:.0f}",
        f"{its.tokens_per_second:.0f}",
    )


def best(rows: Sequence[Row]) -> Row:
    """Return the first row whose trained rollouts per second are within ``NEAR`` of the best."""
    most = max(row.forecast.rollouts_per_second for row in rows)
    return next(row for row in rows if row.forecast.rollouts_per_second * NEAR >= most)
