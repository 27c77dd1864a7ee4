"""Describes a run's current activity, and the checkpoint that is being written."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import define, field

from grpo_core.contracts import events
from grpo_core.storage.run_directory import planned_steps

WAITS = "wait for groups"
"""The stage in which the number of ready groups is shown."""
WORDS = {
    "start": "starting",
    "first weight sync": "giving the engine the weights of version {version}",
    "first validation": "validating version {version} before the first step",
    "wait for validation": "training waits for a validation",
    "step": "training step {next}",
    "publish": "publishing the weights of step {next}",
    "wait for the weight sync": "waiting until the engine has the newest weights",
    "wait for the checkpoint": "waiting until a checkpoint is written",
    "cut of the checkpoint": "taking a checkpoint of step {version}",
    "last validation": "validating the last version",
    "end": "finishing",
}
"""Stages as the loop names them (``timeline.stage``), in words; others are shown as they are."""
BRIEF = ("account",)
"""Stages that are too short to show."""
SHOWN_FROM = 2.0
"""Seconds after which the duration of an activity is shown."""


@define
class Now:
    """Follows the events of a run, and describes its current activity."""

    steps: int = 0
    """Number of steps of the run; 0 if unknown."""
    clock: Callable[[], float] = time.monotonic
    _text: str = field(init=False, default="starting")
    part: float | None = field(init=False, default=None)
    """Share of the current activity that is done, if it is known."""
    _since: float = field(init=False, default=0.0)
    """Start of the current activity."""
    _waits: bool = field(init=False, default=False)
    """Whether it waits for groups."""
    _ready: int = field(init=False, default=0)
    """Number of groups that wait to be trained."""
    _wanted: int = field(init=False, default=0)
    """Number of groups of a step; 0 while unknown."""
    _in_order: bool = field(init=False, default=False)
    """Whether a step trains specific groups instead of the first ready ones."""
    _version: int = field(init=False, default=0)
    _saving: tuple[int, float] | None = field(init=False, default=None)
    """Version of the checkpoint that is being written, and the time of its start."""
    _ended: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._since = self.clock()

    def receive(self, event: events.Event) -> None:
        """Record the changes of an event."""
        match event:
            case events.StatusChanged():
                self._is(event.message)
                self.part = event.part
            case events.RunStarted():
                self._version = event.step
                self.steps = planned_steps(None, event.config) or self.steps
                self._ready = event.buffer.get("ready", 0)
                wanted = event.config.get("trainer", {}).get("prompts_per_step", 0)
                self._wanted = wanted if isinstance(wanted, int) else 0
                self._in_order = event.config.get("pipeline", {}).get("policy") == "in_order"
                self._is("starting")
            case events.StageBegan() if event.stage == WAITS:
                self._wait()
            case events.StageBegan() if event.stage not in BRIEF:
                words = WORDS.get(event.stage, event.stage.replace("{", "{{").replace("}", "}}"))
                self._is(words.format(version=self._version, next=self._version + 1))
            case events.GroupFinished():
                self._ready += 1
            case events.GroupsReady():
                self._ready = max(0, self._ready - len(event.groups))
                self._is(f"training step {event.step + 1}")
            case events.StepEnded():
                self._version = event.step
                self._ready = int(event.metrics.get("buffer/ready", self._ready))
                if event.step < self.steps or not self.steps:
                    self._wait()
                else:
                    self._is("finishing")
            case events.Saving():
                self._saving = event.step, self.clock()
            case events.Saved():
                self._saving = None
            case events.ErrorRaised():
                self._is("failed")
                self._ended = True
            case events.RunEnded() if not self._ended:
                self._is("")

    def text(self) -> str:
        """Describe the current activity; "" if the run has ended."""
        seconds = self.clock() - self._since
        text = self._of_groups() if self._waits else self._text
        return text if self._ended or not text or seconds < SHOWN_FROM else f"{text} ({seconds:.0f} s)"

    def checkpoint(self) -> str:
        """Name the checkpoint that is written in the background, or ""."""
        saving = self._saving  # another thread asks
        if saving is None:
            return ""
        version, since = saving
        seconds = self.clock() - since
        return f"writing step {version}" + (f" ({seconds:.0f} s)" if seconds >= SHOWN_FROM else "")

    def _is(self, text: str) -> None:
        if text != self._text or self._waits:
            self._text, self._since, self._waits, self.part = text, self.clock(), False, None

    def _wait(self) -> None:
        if not self._waits:
            self._waits, self._since, self.part = True, self.clock(), None

    def _of_groups(self) -> str:
        ready, wanted = self._ready, self._wanted
        if not wanted:
            return f"waiting for the groups of step {self._version + 1}"
        if ready < wanted or not self._in_order:
            return f"waiting for groups: {min(ready, wanted)} of {wanted} are ready"
        return f"waiting for groups: {ready} are ready, but not all of the next {wanted}"
