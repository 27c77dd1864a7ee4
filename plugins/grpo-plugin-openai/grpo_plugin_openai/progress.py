"""Progress and token usage of a measurement, on standard error."""

from __future__ import annotations

from pathlib import Path

from rich import progress
from rich.console import Console


class Progress:
    """Counts replies, tokens and retries; a terminal shows a bar.

    Args:
        again: number of reused replies of an interrupted measurement.
    """

    def __init__(self, console: Console, model: str, *, again: int) -> None:
        self._console, self._model, self._again = console, model, again
        self._requested = self._answered = self._prompt = self._completion = self._retries = 0
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[cost]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(model, total=0, cost="")

    def requested(self) -> None:
        """Count a request."""
        if not self._requested:
            self._bar.start()
        self._requested += 1
        self._bar.update(self._task, total=self._requested)

    def answered(self, prompt_tokens: int, completion_tokens: int, retries: int) -> None:
        """Count a reply and its tokens and retries."""
        self._answered += 1
        self._prompt += prompt_tokens
        self._completion += completion_tokens
        self._retries += retries
        self._bar.update(self._task, advance=1, cost=self._cost())

    def end(self, kept: Path | None) -> None:
        """Print the totals, and the file with the replies of an incomplete measurement."""
        self._bar.stop()
        if not self._requested and not self._again:
            return
        again = f" and {self._again} of an interrupted measurement" if self._again else ""
        left = f"; the replies so far are in {kept}, and the same command continues" if kept else ""
        self._console.print(
            f"{self._model}: {self._answered} replies{again}, {self._cost()}{left}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _cost(self) -> str:
        retries = f", {self._retries} retries" if self._retries else ""
        return f"{self._prompt:,} prompt and {self._completion:,} reply tokens{retries}"
