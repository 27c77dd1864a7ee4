"""Samplers that change the mixture of tasks with the step, or with the success rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from attrs import define, field

import grpo_core as grpo
from grpo_core.kit import typed
from grpo_plugin_curriculum.weighted import Observing, Weighted

LARGEST = 0.25
"""Largest variance of a reward that is 0 or 1."""


class TaskOrder(grpo.TaskSampler):
    """Draws from the tasks listed for each step.

    Args:
        order: a task, or several that alternate, for each of the steps 0, 1, ...; the list repeats after the
            last entry.  The step is the ``target_version``: the last step that may train the prompt, and with
            ``policy = "in_order"`` the step that trains it.

    Raises:
        ConfigError: the list is empty, or names an unknown task.
    """

    name = "chosen"

    def __init__(self, order: Sequence[str | Sequence[str]]) -> None:
        super().__init__()
        self._order = [[tasks] if isinstance(tasks, str) else list(tasks) for tasks in order]
        if isinstance(order, str) or not self._order or not all(self._order):
            raise grpo.ConfigError(
                f"sampler chosen: order is {order!r}, expected for each step a task, or a list of tasks"
            )

    def choose(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[str]:
        self.known(itertools.chain.from_iterable(self._order), tasks, "choose")
        due = self._order[request.target_version % len(self._order)]
        return [due[(self.drawn + i) % len(due)] for i in range(request.expected_prompts)]


@define(eq=False, slots=False)
class Schedule(Weighted):
    """Draws tasks by weights that are functions of the step.

    Args:
        points: ``[[step, weight], ...]`` with rising steps for each task.  The weight is interpolated
            linearly between points, and constant before the first and after the last.  The step is the
            request's ``target_version``, so that a longer pipeline does not shift the schedule.
        weights: weight of each task without points.  Default: the tasks' weights in the configuration, or 1.

    Raises:
        ConfigError: points are not pairs of a rising step and a weight of at least 0, or name an unknown
            task.
    """

    name = "schedule"

    _points: Mapping[str, Sequence[Sequence[float]]]

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._points = {task: self._checked_points(task, given) for task, given in self._points.items()}

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        self.known(self._points, tasks, "schedule")
        weights = super().weights(tasks, request)
        for index, task in enumerate(tasks):
            if task in self._points:
                steps, values = np.array(self._points[task]).T
                weights[index] = float(np.interp(request.target_version, steps, values))
        return weights

    def _checked_points(self, task: str, given: Any) -> list[tuple[float, float]]:
        pairs = isinstance(given, list | tuple) and all(
            isinstance(point, list | tuple) and len(point) == 2 for point in given
        )
        steps = [point[0] for point in given] if pairs else []
        numbers = all(isinstance(step, int | float) and math.isfinite(step) for step in steps)
        if not steps or not numbers or sorted(set(steps)) != steps:
            raise grpo.ConfigError(
                f"sampler schedule: the points of task {task!r} are {given!r}, expected "
                "[[step, weight], ...] with rising steps, as in [[0, 1.0], [50, 0.2]]"
            )
        return [(float(step), self.checked(task, weight)) for step, weight in given]


@define(eq=False, slots=False)
class Curriculum(Observing):
    """Draws mostly from tasks that are neither too hard nor too easy.

    The training signal of a group is strongest if about half of its rollouts succeed, and zero if all agree.
    A task's success rate is the mean over its newest ``window`` groups.  A task inside the band, or with an
    unknown rate, has its full weight.  Outside of the band it keeps a small share, so that its rate is still
    measured.  If every task is outside, the tasks that are too hard have their full weight: a solved task has
    no training signal, an unsolved one may still get one.

    The index in the stream decides which groups are the newest: order and delay of observations have no
    effect, and a group that is observed twice counts once.

    Args:
        low: a task whose success rate is below this is too hard.
        high: a task whose success rate is above this is too easy.
        window: number of a task's newest groups whose mean is its success rate.
        known_after: number of groups of a task after which its success rate is known.
        rest: share of its weight that a task outside of the band keeps.
        weights: weight of each task inside the band.  A task without one has weight 1.  Default: the tasks'
            weights in the configuration.

    Raises:
        ConfigError: a number is out of range, or a weight names an unknown task.
    """

    name = "curriculum"

    low: float = 0.1
    high: float = 0.9
    window: int = 32
    known_after: int = 8
    rest: float = 0.1
    _rates: dict[str, dict[int, float]] = field(init=False, factory=dict)
    """Success rates of the newest groups of each task, by index in the stream."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        band, share = 0 <= self.low < self.high <= 1, 0 < self.rest <= 1
        if not (band and share and 1 <= self.known_after <= self.window):
            raise grpo.ConfigError(
                "sampler curriculum: expected 0 <= low < high <= 1, 0 < rest <= 1 and 1 <= known_after <= "
                f"window, got low = {self.low}, high = {self.high}, rest = {self.rest}, known_after = "
                f"{self.known_after}, window = {self.window}"
            )

    def observe(self, groups: Sequence[grpo.Group]) -> None:
        """Record the rewards of groups."""
        for group in groups:
            if not (succeeded := group.successes(self._success)):
                continue
            rates = self._rates.setdefault(group.prompt.environment, {})
            rates[group.slot] = round(fmean(succeeded), 6)
            if len(rates) > self.window:
                del rates[min(rates)]

    def rate(self, task: str) -> float | None:
        """Return a task's success rate, or None while it is unknown."""
        rates = self._rates.get(task, {})
        return fmean(rates.values()) if len(rates) >= self.known_after else None

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        rates = [self.rate(task) for task in tasks]
        reaches = grpo.advantages.reaches
        due = [rate is None or (reaches(rate, self.low) and reaches(self.high, rate)) for rate in rates]
        if not any(due):
            due = [rate is not None and not reaches(rate, self.low) for rate in rates]
        return [
            weight * (1.0 if now else self.rest)
            for weight, now in zip(super().weights(tasks, request), due, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        rates = {task: sorted(rates.items()) for task, rates in self._rates.items()}
        return {**super().state_dict(), "rates": rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        found = typed.checked(state.get("rates"), dict[str, list[tuple[typed.Count, float]]], "rates")
        self._rates = {task: dict(rates) for task, rates in found.items()}


@define(eq=False, slots=False)
class Learnable(Observing):
    """Draws a task in proportion to ``p * (1 - p)``, with ``p`` the share of its rollouts that succeed.

    ``p`` is an exponential moving average over groups in the order of observation, and starts at 0.5.

    Args:
        floor: share of the largest weight that each task keeps.
        memory: weight of the old ``p`` when a group is observed.

    Raises:
        ConfigError: a number is out of range, or a weight names an unknown task.
    """

    name = "learnable"

    floor: float = 0.1
    memory: float = 0.95
    _rates: dict[str, float] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not (0 < self.floor <= 1 and 0 <= self.memory < 1):
            raise grpo.ConfigError(
                f"sampler learnable: expected 0 < floor <= 1 and 0 <= memory < 1, got {self.floor} and "
                f"{self.memory}"
            )

    def observe(self, groups: Sequence[grpo.Group]) -> None:
        """Record the rewards of groups."""
        for group in groups:
            if not (succeeded := group.successes(self._success)):
                continue
            task, now = group.prompt.environment, fmean(succeeded)
            before = self._rates.get(task, 0.5)
            self._rates[task] = self.memory * before + (1 - self.memory) * now

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        rates = [self._rates.get(task, 0.5) for task in tasks]
        taught = [self.floor + (1 - self.floor) * rate * (1 - rate) / LARGEST for rate in rates]
        weights = super().weights(tasks, request)
        return [weight * share for weight, share in zip(weights, taught, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = dict(state["rates"])
