"""The error budget of a task: ends a run if its environment fails too often.

It counts calls: one per episode, or one per group if the environment compares its rollouts.  A prompt's first
failure is retried and not counted, so an outage that the next attempt survives does not end a run, however
many calls it hits.  Failures of later attempts count, and all failures where nothing is retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Rollout
from grpo_core.environments.feedback import NO_REWARD

WINDOW = 200
"""Number of recent calls for the error rate."""

IN_A_ROW = 20
"""Number of failures in a row that end the run, unless ``max_error_rate`` is 1."""


def failures_of_calls(rollouts: Sequence[Rollout], *, needs_group: bool) -> list[Rollout | None]:
    """Return the failed rollout of each call behind the rollouts of a prompt, None where it succeeded.

    Lost rollouts, which are not the environment's fault, and rollouts that were not judged are left out.
    """
    failed = [
        rollout if rollout.error is not None else None
        for rollout in rollouts
        if not rollout.lost and (rollout.error is not None or rollout.reward is not None)
    ]
    if needs_group and failed:
        return [next((each for each in failed if each is not None), None)]
    return failed


class ErrorBudget:
    """Raises when too many calls of a task's environment fail.

    Args:
        task: name of the task in the message.
        max_error_rate: allowed fraction of failures in the newest ``WINDOW`` calls; 1 allows everything.
    """

    def __init__(self, task: str, max_error_rate: float) -> None:
        self._task = task
        self._max_error_rate = max_error_rate
        self._allowed = int(max_error_rate * WINDOW + 1e-9)
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._streak = 0
        self._first: Rollout | None = None

    def observe(self, failed: Rollout | None, *, last: bool = True) -> None:
        """Count a call.

        Args:
            failed: its rollout, with an error; None if it succeeded.
            last: whether a failure counts; the first of several attempts at a prompt does not.

        Raises:
            PluginError: too many calls failed.
        """
        if failed is not None:
            self._first = self._first or failed
            if not last:
                return
        self._failed.append(failed is not None)
        self._streak = 0 if failed is None else self._streak + 1
        if self._first is not None and failed is not None and (rule := self._broken_rule()):
            fault = self._first.fault
            said = f"{rule}. The first of them: {self._first.error}"
            if all(self._failed) and fault is not None and fault.kind == NO_REWARD:
                said = f"{fault.message} for every reply; is a `return` missing?"
            raise PluginError(f"task {self._task!r}: {said}").carrying(fault)

    def _broken_rule(self) -> str:
        """Return the rule that the last failure broke, or ""."""
        count, limit = sum(self._failed), f"environment.max_error_rate is {self._max_error_rate:g}"
        if self._streak >= IN_A_ROW and self._max_error_rate < 1:
            return (
                f"{self._streak} calls of its environment in a row failed, which ends a run at any "
                f"max_error_rate below 1 ({limit})"
            )
        if count > self._allowed:
            return (
                f"{count} of the last {len(self._failed)} calls of its environment failed; {limit}, which "
                f"allows {self._allowed} of {self._failed.maxlen}"
            )
        return ""
