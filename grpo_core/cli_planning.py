"""The commands ``grpo-core simulate`` and ``grpo-core whatif``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Strings = Annotated[list[str] | None, Parameter(negative="")]


def simulate(
    config: Path | None = None,
    *,
    times: Path | None = None,
    time: Strings = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    sweep: Strings = None,
    cross: Annotated[bool, Parameter(negative="")] = False,
    price: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    json: bool = False,
    picture: Path | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
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
    set_
        Set a configuration key, as in "rollout.group_size=16"; may be repeated.
    sweep
        Compare values of a configuration key, as in "engine.workers=1,2,4"; may be repeated.  Default:
        pipeline.max_staleness=0,1,2,4.
    cross
        Combine each value of a sweep with each value of the others.
    price
        The price of an hour of a GPU; the table then says what 1,000 trained rollouts cost.
    steps
        Number of steps that are simulated.  Default: at most 100, and fewer if they are large.
    seed
        Seed of what is drawn.
    json
        Print the forecasts as JSON.
    picture
        Draw the forecasts, and some steps of each simulated run, in this SVG file.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.planning import commands

    return commands.simulate(
        config_file=config,
        settings=set_ or [],
        times_file=times,
        time_settings=time or [],
        sweep=sweep or [],
        cross=cross,
        price=commands.at_least_zero("--price", price),
        steps=commands.at_least_one("--steps", steps),
        seed=seed,
        as_json=json,
        picture=picture,
        block=no_plugin or [],
    )


def whatif(
    run: Path,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    time: Strings = None,
    sweep: Strings = None,
    cross: Annotated[bool, Parameter(negative="")] = False,
    price: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    json: bool = False,
    picture: Path | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Forecast what another setting would change in the times of a run, from what the run recorded.

    The first forecast repeats the recorded run.  Its error shows how far you can trust the others.

    Parameters
    ----------
    run
        Directory of a run.
    set_
        Set a configuration key, as in "trainer.prompts_per_step=32"; may be repeated.
    time
        Set a service time that is not to be fitted, as in "engine.rows=64"; may be repeated.
    sweep
        Compare values of a configuration key, as in "engine.workers=1,2,4"; may be repeated.  Default:
        pipeline.max_staleness=0,1,2,4.
    cross
        Combine each value of a sweep with each value of the others.
    price
        The price of an hour of a GPU; the table then says what 1,000 trained rollouts cost.
    steps
        Number of steps that are simulated.  Default: at most 100, and fewer if they are large.
    seed
        Seed of what is drawn.
    json
        Print the forecasts as JSON, with the fitted service times.
    picture
        Draw the forecasts, and some steps of each simulated run, in this SVG file.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.planning import commands

    return commands.whatif(
        directory=run,
        settings=set_ or [],
        time_settings=time or [],
        sweep=sweep or [],
        cross=cross,
        price=commands.at_least_zero("--price", price),
        steps=commands.at_least_one("--steps", steps),
        seed=seed,
        as_json=json,
        picture=picture,
        block=no_plugin or [],
    )
