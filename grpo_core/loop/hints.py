"""Renders the prompts of a finished group once more with hints, for scores in that context.

A hint is a text that the policy does not see when it samples: a solution, or what a compiler said.  The
tokens that the policy reads and those that are trained stay as they are; a rollout only remembers with which
tokens its prompt begins in the other context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from attrs import define, evolve, field

from grpo_core.contracts.errors import ControlInText, PluginError
from grpo_core.contracts.protocols import Renderer
from grpo_core.contracts.records import Group, Message, Prompt, Rollout

COUNTS = ("hints", "hints_cut", "hints_left_out", "hints_quoted")


@define(kw_only=True, eq=False)
class Hints:
    """Chooses the hints of groups, and renders the prompts that have them.

    Args:
        choose: returns the hint of each rollout of a group, or None.
        who: the loss, for messages.
        place: whether a hint begins the text of the first user message, or is a message before it.
        max_tokens: tokens that a hint may add to a prompt; it loses its beginning otherwise.
    """

    choose: Callable[[Group], Sequence[str | None]]
    who: str
    place: Literal["user", "message"] = "user"
    max_tokens: int = 1024
    _counts: Counter[str] = field(init=False, factory=Counter)

    async def added(self, group: Group, renderer: Renderer) -> Group:
        """Return the group with the hints that the loss learns from.

        Raises PluginError if the loss chose anything but texts and None.
        """
        chosen = list(self.choose(group))
        if len(chosen) != len(group.rollouts) or not all(isinstance(each, str | None) for each in chosen):
            raise PluginError(f"{self.who}: hints {chosen!r:.80}; expected a text or None for each rollout")
        pairs = list(zip(group.rollouts, chosen, strict=True))

        def rendered() -> list[Rollout]:
            return [self._hinted(group.prompt, one, hint, renderer) if hint else one for one, hint in pairs]

        rollouts = await renderer.run(rendered, sum(len(hint or "") for hint in chosen))
        return evolve(group, rollouts=tuple(rollouts))

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        found = {name: float(self._counts[name]) for name in COUNTS}
        self._counts.clear()
        return found

    def _hinted(self, prompt: Prompt, rollout: Rollout, hint: str, renderer: Renderer) -> Rollout:
        """Return a rollout with the beginning of its prompt in the hinted context.

        A hint is left out if an agent wrote the prompt, if it spells a control token, or if there is no room.
        """
        messages, tools, rollout = prompt.messages, rollout.tools, evolve(rollout, hint=hint)
        try:
            plain = tuple(renderer.prompt_ids(messages, tools))
            longest = max(len(each.prompt_ids) + len(each.tokens) for each in rollout.segments)
            most = min(self.max_tokens, renderer.context - longest)

            @cache
            def rendered(characters: int) -> tuple[int, ...]:
                return tuple(renderer.prompt_ids(with_hint(messages, hint[-characters:], self.place), tools))

            def too_long(characters: int) -> bool:
                return len(rendered(characters)) - len(plain) > most

            kept = len(hint)
            if plain != tuple(rollout.segments[0].prompt_ids.tolist()):
                kept = 0
            elif too_long(kept):
                kept = bisect_left(range(1, kept + 1), True, key=too_long)
            whole = rendered(kept) if kept else ()
        except ControlInText:
            kept = 0
        if not kept:
            self._counts["hints_left_out"] += 1
            return rollout
        self._counts["hints"] += 1
        self._counts["hints_cut"] += kept < len(hint)
        said = str(rollout.messages[-1].get("content") or "")
        quoted = any(line in said for line in hint.splitlines() if len(line) >= 8)
        self._counts["hints_quoted"] += quoted and not rollout.right
        shorter = min(len(plain), len(whole))
        begin = next((i for i in range(shorter) if plain[i] != whole[i]), shorter)
        same = next((i for i in range(shorter - begin) if plain[~i] != whole[~i]), shorter - begin)
        return evolve(rollout, hint_prefix=plain[: len(plain) - same], hint_ids=whole[: len(whole) - same])


def with_hint(
    messages: Sequence[Message], hint: str, place: Literal["user", "message"]
) -> tuple[Message, ...]:
    """Return a conversation with a hint in its first user message, or before it."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    before, after = messages[:first], () if first is None else messages[first:]
    if place == "message" or not after:
        return (*before, {"role": "user", "content": f"{hint}\n\n"}, *after)
    shown = {**after[0], "content": f"{hint}\n\n{after[0].get('content') or ''}"}
    return (*before, shown, *after[1:])
