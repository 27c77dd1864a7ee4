"""Says which options of a loss are out of range, cannot be combined, or do nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from attrs import frozen

from grpo_core.losses import IDLE_CLIP, LossSetting, Remark
from grpo_plugin_algorithms.ranges import FINITE, Range

Lack = Literal["ratio", "proximal"]
"""A thing that an objective does not have: a ratio, or a use of the proximal logprobs besides its weights."""


@frozen(kw_only=True)
class Declared:
    """The declarations of a loss about its options."""

    allowed: Mapping[str, tuple[Any, ...]]
    """The values that it allows, for those options of which it does not allow all."""
    ranges: Mapping[str, Range]
    """The numbers that options may be; the others may be all finite numbers."""
    lacks: Collection[Lack]


def problems(
    given: Mapping[str, Any], full: Mapping[str, Any], setting: LossSetting, declared: Declared
) -> Iterator[str | Remark]:
    """Return the problems of the options, and remarks about them.

    Args:
        given: the options that the configuration gives.
        full: all of them, with their defaults.
        setting: the rest of the configuration that decides.
        declared: what the loss declares.
    """
    for name, values in declared.allowed.items():
        if full[name] not in values:
            listed = " or ".join(repr(value) for value in values)
            yield f"{name} = {full[name]!r}: this loss corrects in its own way; expected {listed}"
    yield from _out_of_range(given, declared)
    yield from _of_correction(given, full, setting)
    yield from _of_updates(full, setting, declared)
    yield from _of_kl(given, full, declared)
    yield from _of_teacher(given, full)
    yield from _of_entropy(given, full)
    yield from _remarks(full, setting, declared)


def _remarks(full: Mapping[str, Any], setting: LossSetting, declared: Declared) -> Iterator[Remark]:
    """Say where neither weight nor ratio corrects for older weights, and where a clip cannot act."""
    fixed = full["on_policy"] or setting.proximal == "recompute"
    weightless = full["correction"] == "off" or (setting.proximal == "generation" and not full["on_policy"])
    corrects = declared.allowed.get("correction") == ("off",)  # in its own way
    if setting.max_staleness and weightless and (fixed or "ratio" in declared.lacks) and not corrects:
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
    if setting.updates_per_step == 1 and fixed and "clip_low" in full:
        yield IDLE_CLIP


def _out_of_range(given: Mapping[str, Any], declared: Declared) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            problem = declared.ranges.get(name, FINITE).problem(name, value)
            if problem is not None:
                yield problem


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


def _of_updates(full: Mapping[str, Any], setting: LossSetting, declared: Declared) -> Iterator[str]:
    if setting.updates_per_step == 1:
        return
    if full["on_policy"] or "ratio" in declared.lacks:
        why = "on_policy makes every ratio 1" if full["on_policy"] else "this loss has no ratio"
        yield (
            f"{why}, and nothing would bound {setting.updates_per_step} updates of a "
            "step: set trainer.updates_per_step = 1"
        )


def _of_kl(given: Mapping[str, Any], full: Mapping[str, Any], declared: Declared) -> Iterator[str]:
    of_kl = sorted(name for name in given if name.startswith("kl_") and name != "kl_coefficient")
    if of_kl and not full["kl_coefficient"]:
        yield f"{of_kl[0]} does nothing without kl_coefficient"
    if full["kl_in"] == "reward" and "kl_weight" in given:
        yield 'kl_weight weights a term of the loss, and kl_in = "reward" has none'
    elif full["kl_weight"] == "ratio" and "ratio" in declared.lacks:
        yield (
            "kl_weight = 'ratio': this loss has no ratio to weight the estimate with; expected 'score', "
            "'generation' or 'none'"
        )


def _of_teacher(given: Mapping[str, Any], full: Mapping[str, Any]) -> Iterator[str]:
    for name in ("teacher_in", "teacher_clip"):
        if name in given and not full["teacher_coefficient"]:
            yield f"{name} does nothing without teacher_coefficient"
    if not full["reward_coefficient"] and not full["teacher_coefficient"]:
        yield "reward_coefficient = 0 without teacher_coefficient leaves nothing to learn from"


def _of_entropy(given: Mapping[str, Any], full: Mapping[str, Any]) -> Iterator[str]:
    if full["entropy_target"] is None:
        for name in ("entropy_delta", "entropy_min", "entropy_max"):
            if name in given:
                yield f"{name} does nothing without entropy_target"
        return
    low, begin, high = (full[f"entropy_{name}"] for name in ("min", "coefficient", "max"))
    if not low <= begin <= high:
        yield f"entropy_coefficient = {begin} is not between entropy_min = {low} and entropy_max = {high}"
