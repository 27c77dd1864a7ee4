"""The commands ``grpo-core simulate`` and ``grpo-core whatif``, called with parsed arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, evolve, field

from grpo_core.app.launch import configure
from grpo_core.complaints import complain, say
from grpo_core.config import Config, as_table, build, merge, parse_setting, parse_settings, read_toml
from grpo_core.errors import ConfigError
from grpo_core.planning.fitting import calibrated, fit, has_queue, without_rows
from grpo_core.planning.forecast import Forecast, for_steps, forecast, summarise
from grpo_core.planning.moments import Moments
from grpo_core.planning.outcomes import DrawnOutcomes, Outcomes
from grpo_core.planning.picture import check_writable, write
from grpo_core.planning.recorded import Recorded, read
from grpo_core.planning.settings import check_lengths, without_effect
from grpo_core.planning.tables import Row, as_json, best, table
from grpo_core.planning.times import Times, read_times
from grpo_core.plugins.host import PluginHost

STEPS = 100
"""Largest number of steps that are simulated unless the user says how many."""
FEWEST = 20
"""As many are simulated, however large they are."""
ROLLOUTS = 12_800
"""Number of rollouts that are enough for the means, and take about a second."""
SWEEP = (0, 1, 2, 4)
"""Values of ``pipeline.max_staleness`` that are compared if no others are given."""


def simulate(
    *,
    config_file: Path | None,
    settings: Sequence[str],
    times_file: Path | None,
    time_settings: Sequence[str],
    sweep: Sequence[str],
    steps: int | None,
    seed: int,
    as_json: bool,
    block: Sequence[str],
    picture: Path | None = None,
) -> int:
    """Run ``grpo-core simulate``; return the exit status."""
    if picture is not None:
        check_writable(picture)
    times = read_times(times_file, time_settings)
    tables = [read_toml(config_file)] if config_file else []
    config, host = configure(tables, parse_settings(settings), block)
    if times.rollout.tokens > (limit := config.rollout.max_tokens):
        complain(
            f"note: completions have {times.rollout.tokens:g} tokens on average (rollout.tokens of the "
            f"service times), and rollout.max_tokens of the configuration cuts them off at {limit}"
        )
    planner = Planner(config, times, DrawnOutcomes(times.rollout), host, steps=steps, seed=seed)
    rows = [planner.row("as configured", {}), *planner.sweep(sweep)]
    _show(rows, len(rows) - 1, times, as_json=as_json)
    if picture is not None:
        write(picture, rows, len(rows) - 1)
    return 0


def whatif(
    *,
    directory: Path,
    settings: Sequence[str],
    time_settings: Sequence[str],
    sweep: Sequence[str],
    steps: int | None,
    seed: int,
    as_json: bool,
    block: Sequence[str],
    picture: Path | None = None,
) -> int:
    """Run ``grpo-core whatif``; return the exit status."""
    if picture is not None:
        check_writable(picture)
    recorded = read(directory)
    changes = parse_settings(settings)
    variants = [flat(merge(changes, parse_setting(each))) for each in variants_of(sweep)]
    idle = set().union(*(without_effect(each) for each in variants))
    for each in variants:
        check_lengths(recorded, each)
    present = evolve(recorded.config, validation=evolve(recorded.config.validation, sets={}))
    host = PluginHost.discover(present.plugins, block)
    times = _times_of(recorded, present, host, time_settings)
    planner = Planner(
        present, times, recorded.outcomes, host, steps=steps, seed=seed, held_out=len(recorded.validated)
    )
    rows = [
        Row(name="recorded", settings={}, forecast=summarise(recorded.steps), recorded=True),
        planner.row("the same, forecast", {}),
        *([planner.row("with --set", changes)] if changes else []),
    ]
    alternatives = planner.sweep(sweep, changes)
    if idle:
        complain(f"note: no time depends on {', '.join(sorted(idle))}")
    rows += alternatives
    _show(rows, len(alternatives), times, as_json=as_json)
    if picture is not None:
        write(picture, rows, len(alternatives))
    return 0


def _times_of(recorded: Recorded, present: Config, host: PluginHost, settings: Sequence[str]) -> Times:
    """Return the service times of a run; settings give some of them."""
    fitted = fit(recorded)
    times = read_times(None, settings, fitted)
    if not has_queue(recorded, times):
        return times
    times = read_times(None, settings, without_rows(recorded, fitted))
    if any(setting.startswith("engine.token=") for setting in settings):
        return times
    steps = for_steps(present, enough_steps(present))
    return calibrated(recorded, times, steps, host, len(recorded.validated))


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
    held_out: int | None = None
    """Number of rollouts of a validation, if it is not that of the configuration."""
    _made: list[tuple[Config, Forecast, Moments]] = field(init=False, factory=list)

    def row(self, name: str, changes: Mapping[str, Any]) -> Row:
        """Return the forecast for the configuration with changes, which are a table."""
        config = build([merge(as_table(self.config), changes)]) if changes else self.config
        refuse_unknown_parts(config)
        found, moments = self._forecast(config)
        return Row(name=name, settings=flat(changes), forecast=found, moments=moments)

    def sweep(self, given: Sequence[str], onto: Mapping[str, Any] | None = None) -> list[Row]:
        """Return a forecast for each value of each key; by default for some of ``max_staleness``."""
        return [self.row(each, merge(onto or {}, parse_setting(each))) for each in variants_of(given)]

    def _forecast(self, config: Config) -> tuple[Forecast, Moments]:
        for known, found, moments in self._made:
            if known == config:
                return found, moments
        moments = Moments()
        held_out = self.held_out
        if held_out is None:
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
    return min(STEPS, max(FEWEST, ROLLOUTS // rollouts))


def at_least_one(option: str, value: int | None) -> int | None:
    """Return the value of an option.  Raises ConfigError if it is given and below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{option} is {value}; expected 1 or more")
    return value


def variants_of(sweep: Sequence[str]) -> list[str]:
    """Return a setting for each value of each key; by default some values of ``max_staleness``."""
    given = [each for text in sweep for each in _values(text)]
    return given or [f"pipeline.max_staleness={value}" for value in SWEEP]


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
    if rows[0].recorded:
        recorded, same = (row.forecast.seconds_per_step for row in rows[:2])
        say(f"the forecast of the run as it was differs from the run by {same / recorded - 1:+.0%}")
    if choice is not None:
        seconds = choice.forecast.seconds_per_step
        say(f"best: {choice.name}, {seconds:.3g} s/step (the first that is within 2% of the fastest)")
    skipped = [row.name for row in rows if row.forecast.skipped and not row.recorded]
    if skipped:
        say(f"prompts are skipped with {', '.join(skipped)}: rollouts are longer than rollout.deadline")


def _print_json(rows: Sequence[Row], choice: Row | None, times: Times) -> None:
    found = {
        "rows": [as_json(row) for row in rows],
        "best": None if choice is None else choice.name,
        "times": attrs.asdict(times),
    }
    print(json.dumps(found, indent=2))
