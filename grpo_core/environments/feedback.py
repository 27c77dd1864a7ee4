"""Converts the results of environments to feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from grpo_core.contracts.errors import Fault, PluginError, describe, shortened, shown
from grpo_core.contracts.records import Feedback, Judgement
from grpo_core.contracts.unicode import well_formed
from grpo_core.text.messages import MessageError, check_turn, normalised

LARGEST = 1e300
"""Rewards and metrics of this magnitude or more are invalid: their sums and squares would overflow."""

NO_REWARD, BAD_REWARD = "no reward", "bad reward"
"""Kinds of faults of results: None, and a reward that is not a finite number."""


def as_feedback(
    results: Any,
    expected: int,
    who: str,
    method: str = "evaluate",
    *,
    mask: Callable[[str], str] = str,
    ids: Sequence[str] = (),
) -> list[Judgement]:
    """Convert the results of ``evaluate`` to feedback.

    Args:
        mask: hides secrets in errors.
        ids: of the prompts, for errors.

    Raises PluginError unless there is one float, Feedback or None for each episode.  A reward that is not a
    finite number makes only its episode unscored; a metric that is not one is left out.  Texts are made valid
    UTF-8.
    """
    if isinstance(results, (str, bytes, Mapping)) or not isinstance(results, Iterable):
        forgot = "; is a `return` missing?" if results is None else ""
        raise PluginError(
            f"{who}: {method} returned {type(results).__name__}, expected one result per episode{forgot}"
        )
    results = list(results)
    if len(results) != expected:
        raise PluginError(f"{who}: {method} returned {len(results)} results for {expected} episodes")
    sources = [f"{who}: {method} of prompt {id!r}" for id in ids] or [f"{who}: {method}"] * expected
    return [
        _feedback(_readable(result, source), who, method, mask)
        for result, source in zip(results, sources, strict=True)
    ]


def _readable(result: Any, place: str) -> Any:
    """Return a result with normalized messages.  Raises PluginError."""
    if not isinstance(result, Feedback) or not result.messages:
        return result
    try:
        messages = normalised(result.messages)
        if not result.done:
            check_turn(messages)
    except MessageError as error:
        raise PluginError(f"{place} returned messages that no model can read: {error}") from None
    return attrs.evolve(result, messages=messages)


def _feedback(result: Any, who: str, method: str, mask: Callable[[str], str]) -> Judgement:
    if result is None:
        return Judgement(fault=Fault(NO_REWARD, f"{method} returned None"))
    if not isinstance(result, Feedback):
        return Judgement(**_reward(result, who, method))
    result = Judgement.of(result)
    metrics, left_out = _metrics(result.metrics, mask)
    reward = {} if result.reward is None else _reward(result.reward, who, method)
    if result.unavailable is not None and result.error is None:
        result = Judgement(error=str(result.unavailable), unavailable=result.unavailable)
    if result.error is not None:  # an error has no reward, even if one comes with it
        reward = {"reward": None, "error": shortened(mask(_text(result.error, "an error", who, method)))}
    elif reward.get("error"):
        reward |= {"done": True, "messages": ()}
    elif result.done and not reward:
        reward = {"fault": Fault(NO_REWARD, f"{method} returned no reward")}
    messages = tuple(map(well_formed, result.messages))
    answer = None if result.answer is None else _text(result.answer, "an answer", who, method)
    known = {
        "metrics": metrics,
        "left_out": {**result.left_out, **left_out},
        "messages": messages,
        "answer": answer,
        "hint": None if result.hint is None else well_formed(result.hint),
        "state": _text(result.state, "a state", who, method),
    }
    made: Judgement = attrs.evolve(result, **{**known, **reward})
    return made


def _metrics(given: Any, mask: Callable[[str], str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics that are numbers, and the values of the others as text."""
    if not isinstance(given, Mapping):
        return {}, {"metrics": mask(shown(given))}
    metrics, left_out = {}, {}
    for key, value in given.items():
        try:
            name = well_formed(str(key))
        except Exception:  # of an object without a text
            left_out[shown(key)] = "under a name without a text"
            continue
        if (number := as_number(value)) is not None:
            metrics[name] = number
        else:
            left_out[name] = well_formed(mask(_said(value)))
    return metrics, left_out


def _said(value: Any) -> str:
    try:
        return f"{_float(value)}"
    except Exception:
        return shown(value)


def _reward(given: Any, who: str, method: str) -> dict[str, Any]:
    try:
        reward = _float(given)
    except Exception:  # a tensor with several values raises RuntimeError
        said = f"{shown(given)} ({type(given).__name__})"
        raise PluginError(f"{who}: {method} returned {said}, expected a float, a Feedback or None") from None
    if (number := as_number(reward)) is not None:
        return {"reward": number}
    said = f"reward is {reward}, expected a number between -{LARGEST:g} and {LARGEST:g}"
    return {"reward": None, "error": said, "fault": Fault(BAD_REWARD, said)}


def as_number(given: Any) -> float | None:
    """Return a plugin's value as a finite number, or None if it is not one.

    Numbers of other libraries and bools count; texts do not.
    """
    try:
        number = _float(given)
    except Exception:  # whatever the conversion of another library raises
        return None
    return number if math.isfinite(number) and abs(number) < LARGEST else None


def _float(given: Any) -> float:
    if isinstance(given, (str, bytes)):
        raise TypeError
    try:
        return float(given)
    except OverflowError:
        return math.inf


def _text(given: Any, what: str, who: str, method: str) -> str:
    """Return the text of a value.  Raises PluginError if it has none."""
    try:
        text: str = well_formed(given if isinstance(given, str) else str(given))
    except Exception as error:
        raise PluginError(f"{who}: {method} returned {what} without a text: {describe(error)}") from None
    return text
