"""Checks a run: its events against the laws, and its checkpoints against the manifests in its events.

The events are read once, line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.typed import checked
from grpo_core.loop import checkpoint
from grpo_core.loop.laws import Laws, summary
from grpo_core.models.files import command_hint
from grpo_core.storage.disk import REPLACED
from grpo_core.storage.run_directory import numbered_events

EVENTS = "events.jsonl"
MOST = 50
"""Largest number of findings that are listed."""


@frozen
class Verification:
    """Findings about a run, and a summary of what was compared."""

    findings: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        if not self.findings:
            return self.summary
        more = len(self.findings) - MOST
        return "\n".join([*self.findings[:MOST], *([f"... and {more:,} more"] if more > 0 else [])])


def verified(path: Path) -> Verification:
    """Check the run in a directory.  Raises ConfigError if it has no events."""
    events = path / EVENTS
    if not events.is_file():
        hint = command_hint(str(path))
        raise ConfigError(f"{path} is not a run (there is no {EVENTS} in it).{hint}")
    size = events.stat().st_size
    laws, checkpoints, broken = Laws(), Checkpoints(path), []
    for number, event in numbered_events(events):
        where = f"{EVENTS}, line {number}"
        if event is None:
            broken.append(f"{where}: is not an event")
            continue
        laws.observe(event)
        try:
            checkpoints.observe(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            broken.append(f"{where}: lacks a field of its kind: {type(error).__name__}: {error}")
    laws.close()
    found = [*broken, *map(str, laws.violations)]
    if events.stat().st_size != size:
        comparison = "the run is still running, so its checkpoints were not compared with its events"
    else:
        found += checkpoints.compare()
        comparison = checkpoints.summary()
    return Verification(tuple(found), f"{summary(laws)}\n{comparison}")


@define
class Checkpoints:
    """Compares the checkpoints of a run with its events, by their manifests."""

    path: Path
    _saved: dict[int, list[str]] = field(init=False, factory=dict)
    """Digests of the manifests by step; a step that was reached again is saved again."""
    _needed: set[int] = field(init=False, factory=set)
    """Steps whose checkpoints no resume has discarded."""
    _saving: int | None = None
    """Step of a checkpoint that may be complete without an event, because its process was killed."""

    def observe(self, event: Mapping[str, Any]) -> None:
        """Account for an event."""
        name = event["event"]
        if name not in ("Opened", "Saving", "RunStarted", "Saved"):
            return
        step = checked(event["step"], int, "step")
        manifest = checked(event.get("manifest", ""), str, "manifest")
        if name == "Opened":
            self._needed = {each for each in self._needed if each <= step}
        elif name == "Saving":
            self._saving = step
        elif manifest or name == "Saved":
            # a run may start from one that was saved by a process that was killed before the event
            self._saved.setdefault(step, []).append(manifest)
            self._needed.add(step)
            self._saving = None if name == "Saved" else self._saving

    def summary(self) -> str:
        """Return what was compared, in one line."""
        number = len(checkpoint.complete_names(self.path / "checkpoints"))
        return f"{number} checkpoints are as the run wrote them"

    def compare(self) -> Iterator[str]:
        """Yield the differences."""
        folder = self.path / "checkpoints"
        found = checkpoint.complete_names(folder)
        for step, directory in found:
            name = f"checkpoints/{directory.name}"
            expected = self._saved.get(step, [])
            if expected and step not in self._needed:
                continue  # the run was continued from an earlier one, because this one was damaged
            if (fault := checkpoint.fault(directory)) is not None:
                yield f"{name}: {fault}"
                continue
            known = expected if directory.name.endswith(REPLACED) else expected[-1:]
            fits = checkpoint.manifest_digest(directory) in known
            if not fits and (step != self._saving or checkpoint.read_step(directory) != step):
                yield (
                    f"{name} is not the one that the run saved"
                    if expected
                    else f"{name} was not saved by the run"
                )
        if self._needed and not any(step >= max(self._needed) for step, _ in found):
            yield f"checkpoints/step-{max(self._needed):06d}, the newest one, is missing"
