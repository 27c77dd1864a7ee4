"""Validation: held-out prompts, rolled out by one version of the weights, measured by a strategy.

The strategies go through the same ``play`` and the same environment batching as training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from attrs import define

from grpo_core.errors import ConfigError, PluginError
from grpo_core.metrics import FULL_MARKS
from grpo_core.protocols import Engine, Judge, ValidationContext, ValidationStrategy
from grpo_core.records import Prompt, Rollout
from grpo_core.rendering import Renderer
from grpo_core.rollout import Sampling, Start, play, seed_of


@define(kw_only=True, eq=False)
class Context:
    """What a strategy works with (``ValidationContext``): one version, held-out prompts, ``rollout``."""

    version: int
    prompts: Mapping[str, Sequence[Prompt]]
    engine: Engine
    judges: Mapping[str, Judge]
    renderer: Renderer
    sampling: Sampling
    deadline: float | None = None
    seed: int = 0

    async def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        mode: Literal["batched", "pipelined"] = "batched",
    ) -> list[Rollout]:
        """``n`` rollouts of each prompt, side by side.

        ``batched``: turn by turn, one environment call for all that are live.  ``pipelined``: each on its
        own; the environment's batching still merges what arrives together.
        """
        starts = [
            Start(prompt=prompt, seed=seed_of("validation", self.seed, prompt.id, i), group=f"v{prompt.id}")
            for prompt in prompts
            for i in range(n)
        ]
        sampling = Sampling(
            temperature=temperature,
            max_tokens=max_tokens or self.sampling.max_tokens,
            stop=self.sampling.stop,
        )
        parts = [starts] if mode == "batched" else [[start] for start in starts]
        played = await asyncio.gather(*(self._play(part, sampling) for part in parts if part))
        return [rollout for part in played for rollout in part]

    async def _play(self, starts: Sequence[Start], sampling: Sampling) -> list[Rollout]:
        return await play(
            starts,
            engine=self.engine,
            judges=self.judges,
            renderer=self.renderer,
            sampling=sampling,
            deadline=self.deadline,
        )


class Greedy:
    """One rollout of each prompt: accuracy, mean reward, mean length, and how many had no verdict.

    Args:
        temperature: 0 is greedy decoding.
        mode: ``"batched"`` or ``"pipelined"``.
    """

    def __init__(self, temperature: float = 0.0, mode: Literal["batched", "pipelined"] = "batched") -> None:
        if mode not in ("batched", "pipelined"):
            raise ConfigError(f"validation 'greedy': mode is {mode!r}; expected 'batched' or 'pipelined'")
        self.temperature = temperature
        self.mode = mode

    async def validate(self, context: ValidationContext) -> dict[str, dict[str, float]]:
        tasks = sorted(context.prompts)
        played = await asyncio.gather(
            *(
                context.rollout(context.prompts[task], temperature=self.temperature, mode=self.mode)
                for task in tasks
            )
        )
        return {task: _summary(rollouts) for task, rollouts in zip(tasks, played, strict=True)}


def _summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    judged = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in judged if r.reward is not None]
    return {
        "accuracy": fmean(float(reward >= FULL_MARKS) for reward in rewards) if rewards else 0.0,
        "reward": fmean(rewards) if rewards else 0.0,
        "completion_tokens": fmean(sum(r.sampled) for r in judged) if judged else 0.0,
        "prompts": float(len(judged)),
        "errors": float(len(rollouts) - len(judged)),
    }


async def run_strategy(
    name: str, strategy: ValidationStrategy, context: ValidationContext
) -> dict[str, dict[str, float]]:
    """Run a strategy and check what it returns.  Raises PluginError that names it."""
    results = await strategy.validate(context)
    if not isinstance(results, Mapping) or not all(isinstance(part, Mapping) for part in results.values()):
        raise PluginError(
            f"validation strategy {name!r}: validate() returned {type(results).__name__}, "
            "expected {task: {metric: number}}"
        )
    return {task: {metric: float(value) for metric, value in part.items()} for task, part in results.items()}
