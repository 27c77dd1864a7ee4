"""Fits service times to the records of a run.

How fast an engine decodes is read from groups: a group takes ``turns * turn + tokens * (token + row * (n -
1))`` seconds, where its longest rollout has so many turns and tokens, and n is the mean number of rows that
ran beside it.  The three times are fitted by least squares, and none is negative.

Where rows wait for each other, a group's seconds say nothing by themselves.  Then the seconds of a token are
those with which the groups of a simulated run take as long as the recorded ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from grpo_core.config import Config
from grpo_core.events import Dispatched, Event, GroupFinished
from grpo_core.planning.forecast import WARM_UP, forecast
from grpo_core.planning.recorded import Recorded, RecordedGroup
from grpo_core.planning.times import (
    CheckpointTimes,
    EngineTimes,
    EnvironmentTimes,
    MachineTimes,
    Times,
    TrainerTimes,
)
from grpo_core.plugins.host import PluginHost

Floats = NDArray[np.float64]

ENVIRONMENT = "environment "
"""Begin of the lanes of environments in a timeline."""
ROUNDS = 6
"""Number of simulated runs after which the seconds of a token hardly change."""
SHORTEST = 1e-6
"""Seconds for a token, at least: no engine is infinitely fast."""


def fit(recorded: Recorded, slowdown: float = 1.0) -> Times:
    """Return the service times with which a simulated run is most like the recorded one.

    Args:
        slowdown: factor by which decoding and training took longer while both computed.
    """
    token, row, environment = _decoding(recorded, slowdown)
    spans = [span for span in recorded.spans if span["step"] > WARM_UP]
    return Times(
        engine=EngineTimes(
            token=max(token, SHORTEST),
            row=row,
            sync=_mean(spans, "sync", "update weights"),
            canary=_mean(spans, "sync", "canary"),
        ),
        environment=environment,
        trainer=evolve(
            _training(recorded, slowdown),
            publish=_mean(spans, "trainer", "publish") + _mean(spans, "loop", "account"),
        ),
        checkpoint=CheckpointTimes(
            cut=_mean(recorded.spans, "loop", "cut of the checkpoint"),
            write=_mean(recorded.spans, "checkpoint", "write"),
        ),
        machine=MachineTimes(slowdown=slowdown),
    )


def has_queue(recorded: Recorded, times: Times) -> bool:
    """Return whether rollouts of the run may have waited for others."""
    config = recorded.config
    return bool(config.engine.max_requests or config.rollout.max_in_flight or times.engine.rows)


def without_rows(recorded: Recorded, times: Times) -> Times:
    """Return the times of an engine whose rows do not slow each other, and of the environment's calls."""
    calls = [span for span in recorded.spans if span["lane"].startswith(ENVIRONMENT)]
    turn = sum(_mean(calls, lane, "evaluate") for lane in {span["lane"] for span in calls})
    turn /= max(1, len(recorded.config.tasks))
    return evolve(
        times, engine=evolve(times.engine, row=0.0), environment=evolve(times.environment, turn=turn)
    )


def calibrated(recorded: Recorded, times: Times, config: Config, host: PluginHost, held_out: int) -> Times:
    """Return the times with the seconds of a token that make groups take as long as the recorded ones."""
    wanted = fmean(group.end - group.begin for group in recorded.groups if group.step > WARM_UP)
    for _ in range(ROUNDS):
        took = _group_seconds(recorded, times, config, host, held_out)
        token = max(times.engine.token * wanted / took, SHORTEST)
        times = evolve(times, engine=evolve(times.engine, token=token))
    return times


def _group_seconds(
    recorded: Recorded, times: Times, config: Config, host: PluginHost, held_out: int
) -> float:
    begins: dict[int, float] = {}
    seconds: list[float] = []

    def receive(event: Event) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(event, Dispatched):
            begins.update((slot.id, now) for slot in event.slots)
        elif isinstance(event, GroupFinished) and event.step >= WARM_UP:
            seconds.append(now - begins[event.slot])

    forecast(config, times, recorded.outcomes, host, held_out=held_out, emit=receive)
    return fmean(seconds)


def least_squares(columns: Sequence[Floats], values: Floats) -> list[float]:
    """Return the factors, none of them negative, whose sum of columns is nearest to the values."""
    best, factors = float("inf"), [0.0] * len(columns)
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), size):
            matrix = np.stack([columns[i] for i in chosen], axis=1)
            found = np.linalg.lstsq(matrix, values, rcond=None)[0]
            error = float(np.sum((matrix @ found - values) ** 2))
            if (found >= 0).all() and error < best:
                best = error
                factors = [0.0] * len(columns)
                for i, factor in zip(chosen, found.tolist(), strict=True):
                    factors[i] = factor
    return factors


def _decoding(recorded: Recorded, slowdown: float) -> tuple[float, float, EnvironmentTimes]:
    """Return the seconds of a token of a row that is alone, those of each further row, and the rest.

    What a group takes beyond its tokens, and how much that differs, stands as the environment's time.
    """
    groups = [group for group in recorded.groups if group.step > WARM_UP] or recorded.groups
    paused = _Integral([(s["begin"], s["end"], 1.0) for s in recorded.spans if s["what"] == "update weights"])
    validations = _Integral(
        [(s["begin"], s["end"], 1.0) for s in recorded.spans if s["lane"] == "validation"]
    )
    training = _Integral([(s["begin"], s["end"], 1.0) for s in recorded.spans if _is_step(s)])
    clean = [group for group in groups if not validations.between(group.begin, group.end)]
    groups = clean if len(clean) >= len(groups) // 4 else groups
    running = _Integral([each for group in recorded.groups for each in _rows(group)])
    engines = recorded.config.engine.workers
    took = np.array([g.end - g.begin - paused.between(g.begin, g.end) for g in groups])
    beside = np.array([running.between(g.begin, g.end) / (g.end - g.begin) / engines - 1 for g in groups])
    shared = np.array([training.between(g.begin, g.end) / (g.end - g.begin) for g in groups])
    alone = _alone(shared, slowdown)
    tokens = np.array([float(sum(group.longest.turn_tokens)) for group in groups])
    turns = np.array([float(len(group.longest.turn_tokens)) for group in groups])
    columns = [tokens, tokens * np.maximum(beside, 0.0), turns]
    token, row, turn = least_squares(columns, took * alone)
    rest = took - np.stack(columns, axis=1) @ np.array([token, row, turn]) / alone
    spread = float(np.std(rest)) / turn / float(np.sqrt(turns.mean())) if turn else 0.0
    return token, row, EnvironmentTimes(turn=turn, spread=spread)


def _rows(group: RecordedGroup) -> list[tuple[float, float, float]]:
    """Return when each rollout of a group was decoded, if all of them got their tokens at the same speed."""
    longest = sum(group.longest.turn_tokens)
    return [
        (group.begin, group.begin + (group.end - group.begin) * sum(each.turn_tokens) / longest, 1.0)
        for each in group.outcomes
    ]


class _Integral:
    """The sum of intervals over time: how many there are at each moment."""

    def __init__(self, intervals: Sequence[tuple[float, float, float]]) -> None:
        changes = sorted(
            itertools.chain.from_iterable(((b, weight), (e, -weight)) for b, e, weight in intervals)
        )
        self._times = np.array([time for time, _ in changes] or [0.0])
        heights = np.cumsum([change for _, change in changes] or [0.0])
        areas = np.diff(self._times) * heights[:-1]
        self._sums = np.concatenate([[0.0], np.cumsum(areas)])

    def between(self, begin: float, end: float) -> float:
        """Return the seconds of all intervals between two times."""
        at = np.interp([begin, end], self._times, self._sums)
        return float(at[1] - at[0])


def _is_step(span: Mapping[str, Any]) -> bool:
    return (span["lane"], span["what"]) == ("trainer", "step")


def _training(recorded: Recorded, slowdown: float) -> TrainerTimes:
    """Return the seconds of a step, and by how much they differ from what its tokens explain."""
    decoding = _Integral(_together([(group.begin, group.end) for group in recorded.groups]))
    seconds: dict[int, float] = {}
    alone: dict[int, float] = {}
    for span in filter(_is_step, recorded.spans):
        step, shared = span["step"], decoding.between(span["begin"], span["end"])
        share = shared / max(span["end"] - span["begin"], 1e-9)
        seconds[step] = seconds.get(step, 0.0) + span["busy"]
        alone[step] = alone.get(step, 0.0) + span["busy"] * _alone(share, slowdown)
    steps = sorted(step for step in seconds if step in recorded.trained_tokens)
    steps = steps[WARM_UP:] or steps
    tokens = np.array([float(recorded.trained_tokens[step]) for step in steps])
    took, without = np.array([seconds[step] for step in steps]), np.array([alone[step] for step in steps])
    fixed, each = least_squares([np.ones_like(tokens), tokens], without)
    rest = took - (fixed + each * tokens) * took / np.maximum(without, 1e-9)
    spread = float(np.std(rest)) / float(took.mean()) if took.any() else 0.0
    return TrainerTimes(step=fixed, token=each, spread=spread)


def _alone(shared: Any, slowdown: float) -> Any:
    """Return the share of its seconds that something takes alone, if others compute for a share of them."""
    return 1 - shared * (1 - 1 / slowdown)


def _together(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Return disjoint intervals that cover the same times."""
    found: list[tuple[float, float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]), 1.0)
        else:
            found.append((begin, end, 1.0))
    return found


def _mean(spans: Sequence[Mapping[str, Any]], lane: str, what: str) -> float:
    """Return the seconds of a call."""
    chosen = [span for span in spans if (span["lane"], span["what"]) == (lane, what)]
    calls = sum(span["calls"] for span in chosen)
    return sum(span["busy"] for span in chosen) / calls if calls else 0.0
