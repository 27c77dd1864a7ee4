"""Checks for options of a loss that are out of range, cannot be combined, or have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from attrs import frozen

from grpo_core.losses import IDLE_CLIP, LossSetting, Remark
from grpo_plugin_algorithms.ranges import FINITE, Range

Lack = Literal["ratio", "proximal"]
"""A missing part of an objective: a ratio, or a use of the proximal logprobs other than its weights."""


@frozen(kw_only=True)
class Declared:
    """Declarations of a loss about its options."""

    ranges: Mapping[str, Range]
    """Range of each option; other options may be any finite number."""
    only_with: Mapping[str, str]
    """Options without effect unless another option is set, with that option."""
    lacks: Collection[Lack]


def problems(
    given: Mapping[str, Any], full: Mapping[str, Any], setting: LossSetting, declared: Declared
) -> Iterator[str | Remark]:
    """Return the errors in the options, and remarks about them.

    Args:
        given: the options that the configuration gives.
        full: all options, with their defaults.
        setting: the relevant rest of the configuration.
        declared: declarations of the loss.
    """
    for name, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            problem = declared.ranges.get(name, FINITE).problem(name, value)
            if problem is not None:
                yield problem
        if (needed := declared.only_with.get(name)) and not full[needed]:
            yield f"{name} does nothing without {needed}"
    yield from _of_correction(given, full, setting)
    if setting.updates_per_step > 1 and (full["on_policy"] or "ratio" in declared.lacks):
        why = "on_policy makes every ratio 1" if full["on_policy"] else "this loss has no ratio"
        yield (
            f"{why}, and nothing would bound {setting.updates_per_step} updates of a "
            "step: set trainer.updates_per_step = 1"
        )
    if full["kl_in"] == "reward" and "kl_weight" in given:
        yield 'kl_weight weights a term of the loss, and kl_in = "reward" has none'
    elif full["kl_weight"] == "ratio" and "ratio" in declared.lacks:
        yield (
            "kl_weight = 'ratio': this loss has no ratio to weight the estimate with; expected 'score', "
            "'generation' or 'none'"
        )
    if not full["reward_coefficient"] and not full["teacher_coefficient"]:
        yield "reward_coefficient = 0 without teacher_coefficient leaves nothing to learn from"
    low, begin, high = (full[f"entropy_{name}"] for name in ("min", "coefficient", "max"))
    if full["entropy_target"] is not None and not low <= begin <= high:
        yield f"entropy_coefficient = {begin} is not between entropy_min = {low} and entropy_max = {high}"
    yield from _remarks(given, full, setting, declared)


def _remarks(
    given: Mapping[str, Any], full: Mapping[str, Any], setting: LossSetting, declared: Declared
) -> Iterator[Remark]:
    """Yield remarks: neither weight nor ratio corrects for older weights, or a given clip cannot act."""
    fixed = full["on_policy"] or setting.proximal == "recompute"
    weightless = full["correction"] == "off" or (setting.proximal == "generation" and not full["on_policy"])
    if setting.max_staleness and weightless and (fixed or "ratio" in declared.lacks):
        why = (
            "correction = 'off'"
            if full["correction"] == "off"
            else f"trainer.proximal = {setting.proximal!r} with a loss that has no ratio"
        )
        yield Remark(
            f"{why} with pipeline.max_staleness = {setting.max_staleness}: tokens that older weights sampled "
            "are trained as if the newest had sampled them. The gradient is biased, the more the larger the "
            "steps are, and the run may become unstable: choose loss.options.correction = "
            "'token_truncate', or pipeline.max_staleness = 0",
            costs=True,
        )
    if setting.updates_per_step == 1 and fixed and {"clip_low", "clip_high"} & given.keys():
        yield IDLE_CLIP


def _of_correction(given: Mapping[str, Any], full: Mapping[str, Any], setting: LossSetting) -> Iterator[str]:
    bounds = {"importance_floor", "importance_cap"} & set(given)
    generated = setting.proximal == "generation" and not full["on_policy"]
    if full["correction"] == "off" and bounds:
        yield f"{min(bounds)} bounds a weight that correction = 'off' does not compute: leave one of them out"
    elif generated and (bounds or "correction" in given) and full["correction"] != "off":
        yield (
            f"correction = {full['correction']!r} does nothing with trainer.proximal = 'generation': "
            "proximal / generation is 1. Leave it out, or recompute the proximal logprobs"
        )
    if full["importance_floor"] > full["importance_cap"]:
        floor, cap = full["importance_floor"], full["importance_cap"]
        yield f"importance_floor = {floor} is above importance_cap = {cap}"
