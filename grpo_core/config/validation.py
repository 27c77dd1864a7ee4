"""The section of validation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from grpo_core.config.choices import PluginChoice
from grpo_core.config.generation import EngineConfig
from grpo_core.config.idle import MEASURED, only_with
from grpo_core.config.tasks import TaskConfig

INHERITED = ("name", "every", "at_start", "prompts", "top_p", "top_k", "min_p", "deadline")
"""Keys that a set of held-out prompts inherits from ``[validation]`` if it does not set them."""


@frozen(kw_only=True)
class ValidationSetConfig:
    """A named set of held-out prompts: of a task, or of an environment that nothing is trained on.

    The keys from `name` on are also keys of `[validation]`, which gives the value of a key that is not set.
    """

    task: str = ""
    """Task whose held-out prompts and environment the set uses."""
    env: str = ""
    """Name of the set's own environment, as in "math:sort" or "./file.py:Class", instead of `task`; it needs
    no prompts for training."""
    env_options: dict[str, Any] = field(factory=dict)
    """Options of the factory of `env`."""
    success: float | None = None
    """Smallest reward of a success in `env`; by default the environment's own threshold."""
    data: str = ""
    """The prompts for `env`: a file, a data set or a dataloader, all of whose rows are held out."""
    data_options: dict[str, Any] = field(factory=dict, metadata=only_with("data"))
    """How rows become prompts, and options of the dataloader's factory."""
    python: str = ""
    """Python interpreter or virtual environment that runs `env` instead of `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of the process of `env`, in addition to `environment.env_vars`."""
    name: str | None = None
    """Name of the validation strategy."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the strategy, such as `n` and `temperature`; if the strategy is the one of `[validation]`,
    they are added to its options."""
    every: int | None = field(default=None, validator=optional(ge(0)))
    """Measure the set every this many steps, and after the last; 0 leaves it to `grpo-core validate`."""
    at_start: bool | None = None
    """Measure the weights that the run starts from as well."""
    prompts: int | None = field(default=None, validator=optional(ge(1)))
    """Largest number of prompts."""
    top_p: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    """Sample from the likeliest tokens whose probabilities add up to this."""
    top_k: int | None = field(default=None, validator=optional(ge(0)))
    """Sample from this many likeliest tokens; 0 is all tokens."""
    min_p: float | None = field(default=None, validator=optional([ge(0), le(1)]))
    """Sample from tokens with at least this share of the likeliest token's probability."""
    deadline: float | None = field(default=None, validator=optional(gt(0)))
    """Time limit in seconds for each set of rollouts of the strategy."""

    def __attrs_post_init__(self) -> None:
        if bool(self.task) == bool(self.env):
            raise ValueError(
                f"task = {self.task!r} with env = {self.env!r}: set either the task or the environment"
            )
        of_env = (
            self.env_options,
            self.success is not None,
            self.data,
            self.data_options,
            self.python,
            self.env_vars,
        )
        if self.task and any(of_env):
            raise ValueError(
                f"task = {self.task!r} with env_options, success or data: these keys belong to `env`; a "
                "task brings its own"
            )


@frozen(kw_only=True)
class ValidationConfig(PluginChoice):
    """The validation strategy, and when it runs."""

    name: str = "greedy"
    """Name of the validation strategy, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    every: int = field(default=10, validator=ge(0))
    """Validate every this many steps, and after the last; 0 means never."""
    at_start: bool = True
    """Validate the weights that the run starts from as well."""
    prompts: int = field(default=200, validator=ge(1))
    """Largest number of held-out prompts per task."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Sample from the likeliest tokens whose probabilities add up to this; 1 is all tokens.  Like the next
    two keys it is for strategies that sample; training always samples from the whole distribution."""
    top_k: int = field(default=0, validator=ge(0))
    """Sample from this many likeliest tokens; 0 is all tokens."""
    min_p: float = field(default=0.0, validator=[ge(0), le(1)])
    """Sample from tokens with at least this share of the likeliest token's probability; 0 is all tokens."""
    pause: bool = field(default=False, metadata=only_with(MEASURED))
    """Pause training during validation.  The validated weights do not change in either case."""
    deadline: float = field(default=3600.0, validator=gt(0))
    """Time limit in seconds for each set of rollouts of a strategy; unfinished rollouts are unscored.  A
    strategy that neither plays rollouts nor returns for twice as long ends the run."""
    engine: EngineConfig | None = None
    """A separate engine for validation, with its own options; training does not wait for its results."""
    sets: dict[str, ValidationSetConfig] = field(factory=dict)
    """Named sets of held-out prompts, in addition to the tasks' own, with metrics `validation/SET/NAME`.
    A set cannot have the name of a task."""

    @property
    def measures(self) -> bool:
        """Whether a run measures anything."""
        return bool(self.every or self.due_sets)

    @property
    def longest_deadline(self) -> float:
        return max([self.deadline, *(self.of_set(name).deadline for name in self.sets)])

    @property
    def due_sets(self) -> list[str]:
        """Names of the sets that a run measures."""
        return [name for name in self.sets if self.of_set(name).every]

    def environments(self, sets: Iterable[str]) -> dict[str, TaskConfig]:
        """Return the environments of the sets that have one."""
        found = {name: self.sets[name] for name in sets if self.sets[name].env}
        return {
            name: TaskConfig(
                env=one.env,
                options=one.env_options,
                success=one.success,
                validation_data=one.data,
                data_options=one.data_options,
                python=one.python,
                env_vars=one.env_vars,
            )
            for name, one in found.items()
        }

    def of_set(self, name: str) -> ValidationConfig:
        """Return the section for a set, whose own keys override it."""
        chosen = self.sets[name]
        own = {key: value for key in INHERITED if (value := getattr(chosen, key)) is not None}
        inherited = self.options if own.get("name", self.name) == self.name else {}
        return attrs.evolve(self, options={**inherited, **chosen.options}, sets={}, **own)
