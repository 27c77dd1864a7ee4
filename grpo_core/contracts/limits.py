"""The limits of a rollout.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from grpo_core.contracts.records import EndReason


@frozen(kw_only=True)
class Limits:
    """The limits at which a rollout ends, even if its environment or agent would continue."""

    max_tokens: int
    """Largest number of tokens of one completion."""
    max_turns: int
    """Largest number of completions."""
    context: int
    """Largest number of tokens that the model, and the engine, have positions for."""
    max_total_tokens: int = 0
    """Largest number of tokens that the model reads at once; 0 takes all positions."""
    max_tool_calls: int = 0
    """Largest number of tool calls; 0 means no limit."""

    def room(self, tokens: int) -> int:
        """Return how many tokens may follow the first ``tokens``."""
        return min(self.max_total_tokens or self.context, self.context) - tokens

    def met(self, *, turns: int, tool_calls: int, tokens: int) -> EndReason | None:
        """Return the limit that forbids another turn, or None.

        Args:
            turns: number of completions so far.
            tool_calls: number of tool calls so far.
            tokens: number of tokens that the model would read.
        """
        if turns >= self.max_turns:
            return "turns"
        if self.max_tool_calls and tool_calls > self.max_tool_calls:
            return "tool_calls"
        return "tokens" if self.room(tokens) <= 0 else None
