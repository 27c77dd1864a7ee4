"""Causes in rewards and prompts."""

from __future__ import annotations

import math
from statistics import fmean
from urllib.parse import unquote

from grpo_plugin_report.explain.causes import Finding, percent
from grpo_plugin_report.explain.facts import Facts, Series


def _reward(facts: Facts, task: str) -> str:
    return f"mean reward of task {task!r}: {facts.of(f'reward/{task}').moved}"


def filters_drop_most(facts: Facts) -> Finding | None:
    """Most finished groups are filtered."""
    for task in facts.tasks:
        share = facts.of(f"filtered_fraction/{task}")
        filtered, sent = facts.of("buffer/filtered").most, facts.of("buffer/dispatched").most
        if len(share) and share.median >= 0.6 and filtered >= 0.6 * sent:
            return Finding.of(
                f"Filters leave out most groups of task {task!r}.",
                f"groups left out in a step: {percent(share.median)} (median)",
                f"{filtered:g} of {sent:g} groups were generated for nothing",
                f"their mean reward: {facts.of(f'filtered_reward/{task}').mean:.3g}",
                "choose prompts of the right difficulty (a mean reward near 0 is too hard, near 1 too easy), "
                'widen the bounds in [filters], or set sampler.name = "learnable_prompts"',
            )
    if facts.error_type == "SamplingError" and facts.error is not None:
        return Finding.of(
            "Filters leave out most groups.",
            f"the run ended with: {facts.error.message}",
            facts.settings("dynamic_sampling.enabled"),
            f"filters: {', '.join(facts.table('filters')) or 'none'}",
            "choose prompts of the right difficulty, or widen the bounds in [filters]",
        )
    return None


def few_different_prompts(facts: Facts) -> Finding | None:
    """A task has so few prompts that a step repeats them."""
    per_step = facts.number("trainer.prompts_per_step", 1.0)
    for task, prompts in sorted(facts.prompts.items()):
        if len(prompts.ids) < 2 * per_step and prompts.sent >= 6 * len(prompts.ids):
            return Finding.of(
                f"Task {task!r} has only {len(prompts.ids)} different prompts.",
                f"{prompts.sent} prompts were sent to the engine, {len(prompts.ids)} of them different",
                f"each was played {prompts.sent / max(1, len(prompts.ids)):.3g} times, in groups of "
                f"{facts.setting('rollout.group_size')}",
                f"trainer.prompts_per_step = {per_step:g}",
                "give the task more prompts (tasks.TASK.data, or prompts() of the environment); a path or "
                "a filter (`[filters]`) may leave most of them out",
            )
    return None


def one_task_dominates(facts: Facts) -> Finding | None:
    """Nearly all groups are of one of several tasks."""
    wanted = (task for task in facts.table("tasks") if facts.number(f"tasks.{task}.weight", 1.0) > 0)
    totals = {task: facts.of(f"groups/{task}").total for task in wanted}
    whole = sum(totals.values())
    if len(totals) < 2 or not whole or facts.steps < 5:
        return None
    first = max(totals, key=lambda task: totals[task])
    if totals[first] < 0.93 * whole:
        return None
    weights = {task: facts.number(f"tasks.{task}.weight", 1.0) for task in totals}
    return Finding.of(
        f"Nearly all trained groups are of task {first!r}.",
        f"groups by task: {', '.join(f'{task} {count:g}' for task, count in totals.items())}",
        f"tasks.TASK.weight: {', '.join(f'{task} {weight:g}' for task, weight in weights.items())}",
        f"skipped prompts by task: "
        f"{', '.join(f'{task} {found.count:g}' for task, found in facts.skipped.items()) or 'none'}",
        f'if that is not meant, lower tasks.{first}.weight, or set sampler.options.shares = "trained" for '
        "exact shares",
    )


def _parts(facts: Facts, task: str) -> dict[str, Series]:
    """Return the parts of a task's reward, by the names of their metrics.

    With `shaping.weights` these are the weighted parts; otherwise all numbers that the environment reports.
    """
    found = {}
    weights = facts.table("shaping.weights")
    for name, series in facts.series.items():
        part, _, its = name.removeprefix("feedback_").partition("/")
        paid = not weights or facts.number(f"shaping.weights.{unquote(part)}", 0.0) > 0
        if name.startswith("feedback_") and its == task and len(series) >= 8 and paid:
            found[name] = series
    return found


def _fell(part: Series) -> bool:
    """Whether a part of the reward fell to at most half of its earlier value."""
    third = len(part) // 3
    best = max(fmean(part.values[:third]), fmean(part.values[third : 2 * third]))
    return best >= 0.04 and part.last < 0.5 * best


def reward_part_gamed(facts: Facts) -> Finding | None:
    """One part of the reward rises while another one falls."""
    for task in facts.tasks:
        reward = facts.of(f"reward/{task}")
        parts, right = _parts(facts, task), facts.of(f"accuracy/{task}")
        if len(reward) < 8 or reward.rise < 0.05:
            continue
        if len(right) and right.rise > 0.05:
            continue  # a falling part with rising successes counts mistakes
        up = [name for name, each in parts.items() if each.rise > 0.3]
        down = [name for name, each in parts.items() if _fell(each)]
        if up and down:
            return Finding.of(
                f"The model of task {task!r} learns one part of the reward at the cost of another.",
                _reward(facts, task),
                f"{up[0]}: {parts[up[0]].moved}",
                f"{down[0]}: {parts[down[0]].moved}",
                "lower the weight of the part that rises, or give it only to correct replies; "
                "grpo-core score judges stored rollouts with another environment",
            )
    return None


def reward_pays_length(facts: Facts) -> Finding | None:
    """Completions become much longer without other improvements."""
    for task in facts.tasks:
        reward, length = facts.of(f"reward/{task}"), facts.of(f"completion_tokens/{task}")
        right = facts.of(f"accuracy/{task}")
        parts = [
            series
            for name, series in facts.series.items()
            if name.startswith("feedback_") and name.endswith(f"/{task}")
        ]
        if len(length) < 8 or math.isnan(reward.last):
            continue
        better = any(each.rise > 0.05 for each in (right, *parts))
        if length.last > 1.5 * length.first and reward.last > reward.first + 0.02 and not better:
            return Finding.of(
                f"The replies of task {task!r} grow, and the reward with them, but nothing else.",
                f"mean length in tokens: {length.moved}",
                _reward(facts, task),
                f"share of successes: {right.moved}"
                if len(right)
                else "no success is declared, and no part of the feedback rises",
                "remove what rewards length from the reward, or set shaping.token_price or "
                "shaping.overlong_buffer",
            )
    return None
