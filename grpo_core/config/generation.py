"""The sections of engines and rollouts."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, min_len

from grpo_core.config.choices import PluginChoice
from grpo_core.config.idle import CLUSTER, only_with


@frozen(kw_only=True)
class EngineConfig(PluginChoice):
    """The engine, which generates completions."""

    name: str = "local"
    """Name of the engine, as `grpo-core plugins` lists it, or `./file.py:Name`."""
    threads: int = field(default=0, validator=ge(0))
    """Number of torch threads on the CPU; 0 uses half of the cores if training runs at the same time,
    otherwise all."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Time limit in seconds for a weight update and for the start of the engine; a process that exceeds it is
    replaced, once for each update."""
    workers: int = field(default=1, validator=ge(1))
    """Number of engines that share the requests, on this machine or in workers of a cluster."""
    max_requests: int = field(default=0, validator=ge(0))
    """Largest number of concurrent requests of each engine; the others wait, oldest first.  0 leaves the
    limit to the engine."""
    gpus: list[int] = field(factory=list)
    """GPUs of this machine for the engines, shared evenly among `workers`: with two workers, `[0, 1, 2, 3]`
    gives the first engine 0 and 1.  If the list is empty, they share all GPUs but the trainer's."""
    gpus_per_worker: float = field(default=0.0, validator=ge(0))
    """Number of GPUs of each engine worker in a cluster; with 0, a worker sees none."""
    placement: Literal["pack", "spread"] = field(default="pack", metadata=only_with(CLUSTER))
    """Place the engine workers of a cluster on as few machines as possible ("pack") or on as many
    ("spread")."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of each engine worker of a cluster, set before the engine's plugin is loaded.
    `$NAME` in a value stands for the variable NAME of this process, and `$$` for a dollar sign."""
    transport: str = "auto"
    """Transport of weights to engines: `shm` works through shared memory (in a cluster, its object store);
    docs/engines.md has those of plugins. `auto` is `shm`, or for a trainer in workers of a cluster the one
    that crosses machines."""
    transport_options: dict[str, Any] = field(factory=dict)
    """Options of the transport; see docs/engines.md."""


CUTS = ("top_p", "top_k", "min_p")
"""Keys that truncate the sampling distribution of a validation."""


@frozen(kw_only=True)
class RolloutConfig:
    """Limits and sampling parameters of rollouts."""

    group_size: int = field(default=8, validator=ge(2))
    """Number of rollouts of each prompt."""
    temperature: float = field(default=1.0, validator=gt(0))
    """Sampling temperature of the completions."""
    max_tokens: int = field(default=256, validator=ge(0))
    """Largest number of tokens in one completion; 0 leaves it to a model that is made for the run, as `tiny`
    is: a quarter more than the longest solution of its environments has."""
    max_prompt_tokens: int = field(default=0, validator=ge(0))
    """Leave out training and held-out prompts with more tokens than this before the run begins, with a
    warning that gives their number; 0 keeps all.  Prompts that leave no room for `max_tokens` are skipped
    when they are drawn.  Prompts that an agent writes are not limited."""
    max_turns: int = field(default=0, validator=ge(0))
    """Largest number of completions in a rollout, if its environment allows more; 0 leaves it to the
    environment."""
    max_total_tokens: int = field(default=0, validator=ge(0))
    """Largest number of tokens in a rollout (prompt, completions and the environment's messages); 0 uses all
    positions of the model."""
    max_tool_calls: int = field(default=0, validator=ge(0))
    """Largest number of tool calls in a rollout; 0 means no limit."""
    truncated: Literal["train", "mask", "unscored"] = "train"
    """How to handle rollouts that a token limit cut off: train them like others ("train"), count their reward
    only in the mean of their group ("mask"), or neither judge nor count them ("unscored")."""
    stop: list[str] = field(factory=list, validator=deep_iterable(min_len(1)))
    """Strings that end a completion, in addition to the tokenizer's end-of-sequence token."""
    deadline: float = field(default=600.0, validator=gt(0))
    """Time limit in seconds for one attempt at a rollout; then it is tried again.  It includes the time that
    requests wait for the engine: raise it for long completions."""
    max_retries: int = field(default=3, validator=ge(0))
    """Number of attempts after the first; then the prompt is skipped, and the skip is recorded."""
    max_in_flight: int = field(default=0, validator=ge(0))
    """Largest number of concurrent rollouts, including validation; 0 means no limit.  The rollouts of a group
    begin together, so a larger group is played alone."""
