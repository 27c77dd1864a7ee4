"""When a simulated run generated groups and trained steps, from its events."""

from __future__ import annotations

import asyncio

from attrs import define, field, frozen

from grpo_core.events import (
    Dispatched,
    Event,
    GroupFiltered,
    GroupFinished,
    GroupsReady,
    PromptSkipped,
    StepEnded,
)


@frozen
class Step:
    """The seconds at which a step got its groups, was trained, and had ended."""

    begin: float
    trained: float
    end: float


@define
class Moments:
    """Receives the events of a simulated run, while its event loop runs."""

    steps: list[Step] = field(factory=list)
    generating: list[tuple[float, int]] = field(factory=list)
    """The number of groups that are being generated from each of these seconds on."""
    _slots: set[int] = field(init=False, factory=set)
    """Groups that are being generated."""
    _begin: float = field(init=False, default=0.0)

    def receive(self, event: Event) -> None:
        """Take an event down."""
        now = asyncio.get_running_loop().time()
        match event:
            case Dispatched():
                self._slots.update(slot.id for slot in event.slots)
            case GroupFinished() | GroupFiltered() | PromptSkipped():
                self._slots.discard(event.slot)
            case GroupsReady():
                self._begin = now
            case StepEnded():
                trained = min(now, self._begin + event.metrics["time/train"])
                self.steps.append(Step(self._begin, trained, now))
            case _:
                return
        if not self.generating or self.generating[-1][1] != len(self._slots):
            self.generating.append((now, len(self._slots)))
