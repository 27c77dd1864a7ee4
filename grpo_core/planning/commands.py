"""The command ``grpo-core simulate``."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field

from grpo_core.app.launch import configure
from grpo_core.complaints import complain, say
from grpo_core.config import Config, as_table, build, merge, parse_setting, parse_settings, read_toml
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import Forecast, fewest_steps, for_steps, forecast
from grpo_core.planning.moments import Moments
from grpo_core.planning.outcomes import DrawnOutcomes, Outcomes
from grpo_core.planning.picture import check_writable, write
from grpo_core.planning.settings import (
    DRAWN,
    check_comparable,
    idle,
    unknown,
)
from grpo_core.planning.tables import Row, as_json, best, table, work_differs
from grpo_core.planning.times import Times, fitting, read_times
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.options import AsJson, Flag, Settings, Words

STEPS = 100
"""Largest number of steps that are simulated unless the user says how many."""
FEWEST = 20
"""As many are simulated, however large they are."""
ROLLOUTS = 12_800
"""Number of rollouts that are enough for the means, and take about a second."""
SWEEP = (0, 1, 2, 4)
"""Values of ``pipeline.max_staleness`` that are compared if no others are given."""

Variant = tuple[str, Mapping[str, Any]]
"""The name of a line of the table, and the table of its changes of the configuration."""


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
    picture: Path | None = None,
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
        Seed of what is drawn.
    as_json
        Print the forecasts as JSON.
    picture
        Draw the forecasts, and some steps of each simulated run, in this SVG file.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if picture is not None:
        check_writable(picture)
    steps = at_least_one("--steps", steps)
    tables = [read_toml(config)] if config else []
    changes, variants = parse_settings(settings or []), variants_of(sweep or [], cross=cross)
    check_comparable(dict.fromkeys(key for _, each in variants for key in flat(each)))
    run, host = configure(tables, changes, no_plugin or [])
    service = read_times(times, time or [], fitting(run.rollout.max_tokens))
    _note_without_effect(changes, variants)
    if service.rollout.tokens > (limit := run.rollout.max_tokens):
        complain(
            f"note: completions have {service.rollout.tokens:g} tokens on average (rollout.tokens of the "
            f"service times), and rollout.max_tokens of the configuration cuts them off at {limit}"
        )
    planner = Planner(run, service, DrawnOutcomes(service.rollout), host, steps=steps, seed=seed)
    planner.check([{}, *(each for _, each in variants)])
    rows = [planner.row("as configured", {}), *planner.rows(variants)]
    _show(rows, len(rows) - 1, service, as_json=as_json)
    if picture is not None:
        write(picture, rows, len(rows) - 1)
    return 0


def _note_without_effect(changes: Mapping[str, Any], variants: Sequence[Variant]) -> None:
    """Say which of the given keys change nothing in a simulation with given service times."""
    given = flat(changes)
    for key in unknown(given, *DRAWN):
        complain(
            f"note: the simulation does not know what {key} changes: it changes no service time; --time "
            "gives those that you expect"
        )
    _note_idle({*idle(given), *idle(key for _, each in variants for key in flat(each))})


def _note_idle(keys: Collection[str]) -> None:
    if keys:
        complain(f"note: no time depends on {', '.join(sorted(keys))}")


def refuse_unknown_parts(config: Config) -> None:
    """Raise ConfigError if the configuration has parts whose time no simulated part takes."""
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


@define
class Planner:
    """Makes forecasts for variants of a configuration."""

    config: Config
    times: Times
    outcomes: Outcomes
    host: PluginHost
    seed: int
    steps: int | None = None
    _made: list[tuple[Config, Forecast, Moments]] = field(init=False, factory=list)

    def check(self, variants: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError for the first of these changes that cannot be simulated."""
        for changes in variants:
            self._configured(changes)

    def row(self, name: str, changes: Mapping[str, Any]) -> Row:
        """Return the forecast for the configuration with changes, which are a table."""
        config = self._configured(changes)
        found, moments = self._forecast(config)
        return Row(name=name, settings=flat(changes), forecast=found, moments=moments)

    def rows(self, variants: Iterable[Variant]) -> list[Row]:
        """Return a forecast for each variant."""
        return [self.row(*each) for each in variants]

    def _configured(self, changes: Mapping[str, Any]) -> Config:
        config = self.config
        if changes:
            config = build([merge(as_table(config), changes)], self.host.sections)
        refuse_unknown_parts(config)
        staleness = config.pipeline.max_staleness
        if self.steps is not None and self.steps < (least := fewest_steps(staleness)):
            raise ConfigError(
                f"--steps {self.steps}: so few steps show how the pipeline is filled, and not how long "
                f"a step takes; a forecast with pipeline.max_staleness={staleness} needs at least {least}"
            )
        return config

    def _forecast(self, config: Config) -> tuple[Forecast, Moments]:
        for known, found, moments in self._made:
            if known == config:
                return found, moments
        moments = Moments()
        held_out = config.validation.prompts * max(1, len(config.tasks))
        found = forecast(
            for_steps(config, self.steps or enough_steps(config)),
            self.times,
            self.outcomes,
            self.host,
            seed=self.seed,
            held_out=held_out if config.validation.measures else 0,
            emit=moments.receive,
        )
        self._made.append((config, found, moments))
        return found, moments


def enough_steps(config: Config) -> int:
    """Return a number of steps after which the means hardly change; the run itself may have fewer."""
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    fewest = max(FEWEST, fewest_steps(config.pipeline.max_staleness))
    return max(fewest, min(STEPS, ROLLOUTS // rollouts))


def at_least_one(option: str, value: int | None) -> int | None:
    """Return the value of an option.  Raises ConfigError if it is given and below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{option} is {value}; expected 1 or more")
    return value


def variants_of(sweep: Sequence[str], *, cross: bool = False) -> list[Variant]:
    """Return a variant for each value of each key; by default for some values of ``max_staleness``.

    Args:
        cross: each value of a key is combined with each value of the others.
    """
    given: list[tuple[str, ...]]
    if not sweep:
        given = [(f"pipeline.max_staleness={value}",) for value in SWEEP]
    elif cross:
        given = list(itertools.product(*(_values(text) for text in sweep)))
    else:
        given = [(each,) for text in sweep for each in _values(text)]
    return [(" ".join(each), functools.reduce(merge, map(parse_setting, each))) for each in given]


def _values(text: str) -> list[str]:
    """Return ``KEY=1,2`` as ``["KEY=1", "KEY=2"]``."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not all(value.strip() for value in values.split(",")):
        raise ConfigError(
            f"--sweep {text}: expected section.key=value,value, as in --sweep pipeline.max_staleness=0,1,2"
        )
    return [f"{key.strip()}={value.strip()}" for value in values.split(",")]


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table with one key for each value, such as "trainer.steps"."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _show(rows: Sequence[Row], compared: int, times: Times, *, as_json: bool) -> None:
    """Print the rows; the last ``compared`` ones are alternatives."""
    choice = best(rows[len(rows) - compared :]) if compared else None
    if as_json:
        _print_json(rows, choice, times)
        return
    say(f"{table(rows)}\n")
    if choice is not None:
        say(f"best: {choice.name}, {_why(choice, rows[len(rows) - compared :])}")
    skipped = [row.name for row in rows if row.forecast.skipped]
    if skipped:
        say(f"prompts are skipped with {', '.join(skipped)}: rollouts are longer than rollout.deadline")


def _why(choice: Row, among: Sequence[Row]) -> str:
    """Say how fast the best variant is, and by what it was compared."""
    its = choice.forecast
    if work_differs(among):
        return (
            f"{its.rollouts_per_second:.3g} trained rollouts/s, {its.seconds_per_step:.3g} s/step (the first "
            "that is within 2% of the most trained rollouts per second: the steps differ in their work)"
        )
    return f"{its.seconds_per_step:.3g} s/step (the first that is within 2% of the fastest)"


def _print_json(rows: Sequence[Row], choice: Row | None, times: Times) -> None:
    found = {
        "rows": [as_json(row) for row in rows],
        "best": None if choice is None else choice.name,
        "times": attrs.asdict(times),
    }
    print(json.dumps(found, indent=2))
