"""Forecasts of published asynchronous runs, from generation and training times that are published with them.

    python tests/benchmarks/bench_published.py

The tables give how long a synchronous batch is generated and how long a step trains, and hardly anything
else.  So every row is made in the same way, with the defaults of ``grpo-core simulate`` where the table is
silent:

* The engine's seconds per token are those with which a synchronous batch takes the published time.  Lengths
  have the default spread.  In a full batch, half of the seconds of a token are the same for any number of
  rows, and half are added by the rows.  ``range`` is what comes out if all of them are the same, or all are
  added by the rows.
* Where generation was measured on more GPUs than the run had for it, the measured batch has so many engines
  of one GPU share each, and the run has fewer of them.
* The trainer takes the seconds that the row itself has for training.
* A batch has 64 prompts with 8 rollouts, or the published number if that is smaller.
* verl's fully asynchronous trainer makes four updates from a batch, and holds up to ``1 + threshold`` batches
  between two weight syncs: these are four steps here, and as many whole quarters of a batch may be on their
  way.  Threshold 0 is a synchronous batch.  Its one-step trainer syncs when the next batch is complete, which
  is ``in_flight_updates = false``.

No published step time goes into a forecast.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from attrs import evolve, field, frozen

from grpo_core.app.launch import configure
from grpo_core.config import Config
from grpo_core.plugins.host import PluginHost
from grpo_plugin_replay.forecast import forecast
from grpo_plugin_replay.times import EngineTimes, Times, TrainerTimes

FULLY_ASYNC = "verl docs/advance/fully_async.md, 2026-08-22"
ONE_STEP = "verl docs/advance/one_step_off.md, 2026-08-22"
BATCHES = 40
"""Number of batches that are simulated."""
UPDATES = 4
"""Updates of a batch between two weight syncs of verl's fully asynchronous trainer."""
ENOUGH = 0.2
"""Largest difference of a good forecast, as a share of what was published."""


@frozen(kw_only=True)
class Published:
    """A row of a published table."""

    name: str
    source: str
    published: float
    """Seconds of a step; nothing else of the row is what is forecast."""
    generation: float
    """Seconds in which a synchronous batch is generated."""
    training: float
    """Seconds of the row's own training, of a whole batch."""
    pipeline: dict[str, Any]
    """Settings of our pipeline that do the same, or nearly so."""
    updates: int = 1
    """Steps that train a batch."""
    measured_on: int = 1
    engines: int = 1
    """Engines, of equal size, on which generation was measured, and which the run has."""
    prompts: int = 64
    group_size: int = 8
    origin: str = field(kw_only=True)
    """Where in the source the generation time is."""


def fully_async(threshold: float) -> dict[str, Any]:
    """Return how our pipeline holds as many quarters of a batch as verl's fully asynchronous trainer."""
    return {"max_staleness": int(UPDATES * (1 + threshold) + 1e-9) - 1}


ON_64 = "the colocated run on 64 GPUs of the same page, as generation here has 64"
COUNTED = (
    Published(
        name="verl 7B 64:64, threshold 0",
        source=FULLY_ASYNC,
        published=231.34,
        generation=150.72,
        training=98.77,
        pipeline={"max_staleness": 0},
        origin=ON_64,
    ),
    Published(
        name="verl 7B 64:64, threshold 0.1",
        source=FULLY_ASYNC,
        published=171.30,
        generation=150.72,
        training=109.12,
        pipeline=fully_async(0.1),
        updates=UPDATES,
        origin=ON_64,
    ),
    Published(
        name="verl 7B 64:64, threshold 0.3",
        source=FULLY_ASYNC,
        published=146.11,
        generation=150.72,
        training=103.22,
        pipeline=fully_async(0.3),
        updates=UPDATES,
        origin=ON_64,
    ),
    Published(
        name="verl 7B 64:64, threshold 0.5",
        source=FULLY_ASYNC,
        published=150.63,
        generation=150.72,
        training=113.16,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        origin=ON_64,
    ),
    Published(
        name="verl 7B 32:32",
        source=FULLY_ASYNC,
        published=189.26,
        generation=357.41,
        training=156.98,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        origin="the colocated run on 32 GPUs of the same table",
    ),
    Published(
        name="verl 7B 8:8, no gain",
        source=FULLY_ASYNC,
        published=489.953,
        generation=52.939,
        training=435.874,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        measured_on=2,
        engines=1,
        origin="the colocated run on 16 GPUs of the same table",
    ),
    Published(
        name="verl 30B-A3B 96:32",
        source=FULLY_ASYNC,
        published=282.75,
        generation=348.05,
        training=50.05 + 206.63,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        measured_on=4,
        engines=3,
        origin="the colocated run on 128 GPUs of the same table",
    ),
    Published(
        name="verl one step off, FSDP2",
        source=ONE_STEP,
        published=520,
        generation=458,
        training=108 + 337,
        pipeline={"max_staleness": 1, "in_flight_updates": False},
        origin="the same row: generate_sequences",
    ),
    Published(
        name="verl one step off, Megatron",
        source=ONE_STEP,
        published=566,
        generation=501,
        training=120 + 347,
        pipeline={"max_staleness": 1, "in_flight_updates": False},
        origin="the same row: generate_sequences",
    ),
    Published(
        name="vime 4B 2:2",
        source="vllm-project/vime issue 358, comment of 2026-07-24, setup 2",
        published=104.0,
        generation=97.2,
        training=99.6,
        pipeline={"max_staleness": 1},
        prompts=32,
        group_size=8,
        origin="what the trainer of the synchronous run waits, on the same devices",
    ),
)
"""Ten rows.  Five are named in our notes on the field; the others are the asynchronous rows of the same pages
and of the older table of these notes that have generation and training times, if generation was measured on
nearly as many GPUs.  All of them were chosen, and put down with these settings, before any was simulated."""
FURTHER = (
    Published(
        name="verl 7B 16 colocated",
        source=FULLY_ASYNC,
        published=484.623,
        generation=52.939,
        training=430.263,
        pipeline={"max_staleness": 0},
        origin="the same row; its step beside that of 8:8 is the gain that there is not",
    ),
    Published(
        name="verl 7B 16:16",
        source=FULLY_ASYNC,
        published=294.77,
        generation=357.41,
        training=313.81,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        measured_on=2,
        engines=1,
        origin="the colocated run on 32 GPUs of the same table",
    ),
    Published(
        name="verl 7B with tools 16:16",
        source=FULLY_ASYNC,
        published=221.36,
        generation=228.03,
        training=179.58,
        pipeline=fully_async(1),
        updates=UPDATES,
        measured_on=2,
        engines=1,
        origin="the colocated run on 32 GPUs of the same table",
    ),
    Published(
        name="verl 7B, require_batches 1",
        source=FULLY_ASYNC,
        published=203.47,
        generation=150.72,
        training=181.08,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        origin=ON_64,
    ),
    Published(
        name="verl 7B, require_batches 2",
        source=FULLY_ASYNC,
        published=158.72,
        generation=150.72,
        training=128.08,
        pipeline=fully_async(0.5),
        updates=UPDATES,
        origin=ON_64,
    ),
)
"""Rows that do not count: the run is synchronous, generation was measured on twice the GPUs, or the notes do
not name them."""
WITHOUT_TIMES = {
    "marin 67B, 1652.8 to 1182.2 and 959.7 s": "no generation and training times of these runs were found",
    "NeMo RL v0.6, 192 to 152 and 34.5 s": "the table has the whole step only",
}


def configuration(row: Published, *, engines: int, pipeline: dict[str, Any], updates: int) -> Config:
    """Return the configuration of a simulated run."""
    config, _ = configure(
        [
            {
                "tasks": {"task": {"env": "math:sort"}},
                "trainer": {"steps": BATCHES * updates, "prompts_per_step": row.prompts // updates},
                "pipeline": pipeline,
                "engine": {"workers": engines},
                "rollout": {"group_size": row.group_size, "max_tokens": 100_000, "deadline": 1e9},
                "checkpoint": {"every": 0},
                "validation": {"every": 0, "at_start": False},
            }
        ],
        {},
    )
    return config


def seconds(config: Config, times: Times) -> float:
    """Return the seconds per step of a simulated run."""
    return forecast(config, times, PluginHost.discover()).seconds_per_step


def forecast_of(row: Published, same: float = 0.5) -> float:
    """Forecast a row's seconds per step.

    Args:
        same: share of a token's seconds in a full batch that is the same for any number of rows.
    """
    rows = row.prompts * row.group_size / row.measured_on
    unit = Times(engine=EngineTimes(token=max(same, 1e-6), row=(1 - same) / (rows - 1)))
    measured = configuration(row, engines=row.measured_on, pipeline={"max_staleness": 0}, updates=1)
    scale = row.generation / seconds(measured, unit)
    times = evolve(
        unit,
        engine=EngineTimes(token=unit.engine.token * scale, row=unit.engine.row * scale),
        trainer=TrainerTimes(step=row.training / row.updates),
    )
    config = configuration(row, engines=row.engines, pipeline=row.pipeline, updates=row.updates)
    return seconds(config, times) * row.updates


def line(row: Published) -> tuple[str, bool]:
    """Return a line of the table, and whether the forecast is near."""
    found, ends = forecast_of(row), sorted((forecast_of(row, 1), forecast_of(row, 0)))
    difference = found / row.published - 1
    good = abs(difference) <= ENOUGH
    words = (
        f"| {row.name} | {row.generation:.0f} | {row.training:.0f} | {row.published:.1f} | {found:.1f} "
        f"| {difference:+.0%} | {ends[0]:.0f} to {ends[1]:.0f} | {'ok' if good else 'short'} |"
    )
    return words, good


def main() -> int:
    print(json.dumps({row.name: row.source for row in (*COUNTED, *FURTHER)}, indent=1))
    heads = ("row", "generation", "training", "published", "forecast", "difference", "range", "")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    lines = [line(row) for row in COUNTED]
    print("\n".join(words for words, _ in lines))
    near = sum(good for _, good in lines)
    print(f"{near} of {len(COUNTED)} within {ENOUGH:.0%}")
    print("\n".join(line(row)[0] for row in FURTHER))
    for name, reason in WITHOUT_TIMES.items():
        print(f"{name}: {reason}")
    return 0 if near >= 8 else 1


if __name__ == "__main__":
    sys.exit(main())
