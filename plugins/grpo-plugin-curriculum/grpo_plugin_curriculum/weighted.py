"""Base classes of samplers with weights of tasks in the configuration.

Annotations are evaluated in this module, because they are the types of inherited options.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import define, field

import grpo_core as grpo

Shares = Literal["random", "drawn", "trained"]


@define(eq=False, slots=False)
class Weighted(grpo.WeightedTaskSampler):
    """Base class of the samplers of this plugin that draw tasks by weights.

    Args:
        weights: weight of each task, or its factor.  A task without one has weight 1.  Default: the tasks'
            weights in the configuration.
        seed: seed of the draws of tasks.  Default: the run's seed.
        shares: exact shares of each request: ``"drawn"``, or ``"trained"``, as in the sampler ``mix``.

    Raises:
        ConfigError: a weight is not a finite number of at least 0.
    """

    _weights: Mapping[str, float] | None = field(default=None, kw_only=True)
    _seed: int = field(default=0, kw_only=True)
    _shares: Shares = field(default="random", kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__init__(self._seed, self._shares)
        self._weights = {task: self.checked(task, weight) for task, weight in (self._weights or {}).items()}

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        given = self._weights or {}
        self.known(given, tasks, "weigh")
        return [given.get(task, 1.0) for task in tasks]


@define(eq=False, slots=False)
class Observing(Weighted):
    """Base class of samplers that use success rates.

    Args:
        success: reward from which a rollout is a success.  None: the task's own success, or a reward of 1 if
            it declares none.
    """

    _success: float | None = field(default=None, kw_only=True)
