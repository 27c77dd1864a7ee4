"""The tracker ``tensorboard``: event files for TensorBoard, by torch's writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import grpo_core as grpo
from grpo_plugin_trackers.examples import COLUMNS, rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(grpo.Tracker):
    """Writes event files; ``tensorboard --logdir runs`` shows all runs.

    Args:
        directory: directory of the files; the default is ``tensorboard`` in the run's directory.
        completions: number of rollouts to write as text each time.
        every: number of steps between two writes of rollouts.
    """

    def __init__(
        self, run: grpo.RunInfo, directory: Path | None = None, completions: int = 8, every: int = 20
    ) -> None:
        self._directory = directory or run.directory / "tensorboard"
        self._purge = None if run.resumed_from is None else run.resumed_from + 1
        self._completions, self._every = completions, max(1, every)
        self._made: SummaryWriter | None = None

    @property
    def _writer(self) -> SummaryWriter:
        """The writer, created on the tracker's thread, because importing it takes a second."""
        if self._made is None:
            from torch.utils.tensorboard import SummaryWriter

            # hides records of a killed run after its checkpoint
            self._made = SummaryWriter(str(self._directory), purge_step=self._purge)
        return self._made

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rollouts(self, step: int, groups: Sequence[grpo.Group]) -> None:
        if not self._completions or step % self._every:
            return
        found = rows(step, groups, self._completions)
        cells = [list(COLUMNS), *([str(cell) for cell in row] for row in found)]
        lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in cells]
        text = f"<table>{''.join(lines)}</table>".replace("\n", "<br>")
        self._writer.add_text("rollouts", text, step)

    def event(self, event: grpo.events.Event) -> None:
        if isinstance(event, grpo.events.StepEnded | grpo.events.Validated) and self._made is not None:
            self._made.flush()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
