"""Converts the results of environments to feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from grpo_core.errors import PluginError, shortened
from grpo_core.messages import MessageError, check_turn, normalised
from grpo_core.records import Feedback
from grpo_core.unicode import well_formed

LARGEST_REWARD = 1e300
"""Rewards of this magnitude or more are refused: their squares would overflow in an advantage."""


def as_feedback(
    results: Any,
    expected: int,
    who: str,
    method: str = "evaluate",
    *,
    mask: Callable[[str], str] = str,
    ids: Sequence[str] = (),
) -> list[Feedback]:
    """Convert the results of ``evaluate`` to feedback.

    Args:
        mask: hides secrets in errors.
        ids: of the prompts, for errors.

    Raises PluginError unless there is one float, Feedback or None for each episode.  A reward or a metric
    that is not a finite number makes only its own episode unscored.  Texts become such as UTF-8 can write.
    """
    if isinstance(results, (str, bytes, Mapping)) or not isinstance(results, Iterable):
        raise PluginError(
            f"{who}: {method} returned {type(results).__name__}, expected one result per episode"
        )
    results = list(results)
    if len(results) != expected:
        raise PluginError(f"{who}: {method} returned {len(results)} results for {expected} episodes")
    places = [f"{who}: {method} of prompt {id!r}" for id in ids] or [f"{who}: {method}"] * expected
    return [_feedback(_readable(result, place), who, method, mask) for result, place in zip(results, places)]


def _readable(result: Any, place: str) -> Any:
    """Return a result whose messages are in the form that models read.  Raises PluginError."""
    if not isinstance(result, Feedback) or not result.messages:
        return result
    try:
        messages = normalised(result.messages)
        if not result.done:
            check_turn(messages)
    except MessageError as error:
        raise PluginError(f"{place} returned messages that no model reads: {error}") from None
    return attrs.evolve(result, messages=messages)


def _feedback(result: Any, who: str, method: str, mask: Callable[[str], str]) -> Feedback:
    if result is None:
        return Feedback()
    if not isinstance(result, Feedback):
        return Feedback(**_reward(result, who, method))
    given: Any = result.metrics
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise PluginError(f"{who}: {method} returned metrics as {kind}, expected names with their numbers")
    metrics = {
        well_formed(str(name)): _number(value, f"metric {name!r}", who, method)
        for name, value in given.items()
    }
    reward = {} if result.reward is None else _reward(result.reward, who, method)
    if bad := {name: value for name, value in metrics.items() if not math.isfinite(value)}:
        name, value = next(iter(bad.items()))
        reward = {"reward": None, "error": f"{who}: the metric {name!r} is {value}, expected a finite number"}
    if result.error is not None:  # an error is never a reward, whatever reward comes with it
        reward = {"reward": None, "error": shortened(mask(well_formed(str(result.error))))}
    elif reward.get("error"):
        reward |= {"done": True, "messages": ()}
    messages = tuple(map(well_formed, result.messages))
    answer = None if result.answer is None else well_formed(result.answer)
    known = {
        "metrics": metrics,
        "messages": messages,
        "answer": answer,
        "state": well_formed(str(result.state)),
    }
    return attrs.evolve(result, **{**known, **reward})


def _reward(given: Any, who: str, method: str) -> dict[str, Any]:
    reward = _number(given, "", who, method)
    if math.isfinite(reward) and abs(reward) < LARGEST_REWARD:
        return {"reward": reward}
    return {
        "reward": None,
        "error": f"reward is {reward}, expected a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}",
    }


def _number(given: Any, what: str, who: str, method: str) -> float:
    try:
        if isinstance(given, (str, bytes)):
            raise TypeError
        return float(given)
    except OverflowError:
        return math.inf
    except Exception:  # a tensor with several values raises RuntimeError
        shown, kind = repr(given), type(given).__name__
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        told = f"returned {shown} ({kind}), expected a float, a Feedback or None"
        if what:
            told = f"returned {what} = {shown} ({kind}), expected a number"
        raise PluginError(f"{who}: {method} {told}") from None
