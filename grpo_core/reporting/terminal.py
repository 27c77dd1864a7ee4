"""The tracker ``terminal``: shows a run as a live view, as lines, as JSON, or shows only what went wrong."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Literal, get_args

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_core.errors import PluginError, cut
from grpo_core.events import (
    ErrorRaised,
    Event,
    GroupsReady,
    IncidentReported,
    RunEnded,
    RunStarted,
    Saved,
    StatusChanged,
    StepEnded,
    Validated,
    WarningRaised,
)
from grpo_core.incidents import Lines, by_kind
from grpo_core.inert import inert
from grpo_core.loop.metrics import headline
from grpo_core.protocols import Tracker
from grpo_core.records import RunInfo
from grpo_core.reporting.eta import Remaining, remaining
from grpo_core.reporting.files import plain
from grpo_core.reporting.stored import as_json
from grpo_core.run_directory import planned_steps
from grpo_core.validation.results import interval, measured, shown

View = Literal["live", "lines", "quiet", "json"]
_AS_JSON = (
    *(StatusChanged, RunStarted, StepEnded, Validated, Saved),
    *(WarningRaised, IncidentReported, ErrorRaised, RunEnded),
)
"""Events that are printed as JSON; the others are of single prompts and rollouts."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_RECENT = 10
"""Steps that shown rates are averaged over: groups are finished in bursts."""


def sparkline(values: list[float], low: float = 0.0, high: float = 1.0) -> str:
    """Draw the last values as bars between ``low`` and ``high``."""
    span = (high - low) or 1.0
    places = [min(max((value - low) / span, 0.0), 1.0) for value in values[-_WIDTH:]]
    return "".join(_BARS[round(place * (len(_BARS) - 1))] for place in places)


class TerminalTracker(Tracker):
    """Shows the run on standard output.

    Args:
        view: "live" redraws a few lines, and prints lines where standard output is no terminal; "lines"
            prints a line for each step and each validation; "quiet" prints warnings and what was survived;
            "json" prints events as ``events.jsonl`` has them, without those of single prompts.

    Raises PluginError if there is no such view.
    """

    def __init__(self, run: RunInfo, *, view: View = "live") -> None:
        if view not in get_args(View):
            raise PluginError(
                f"tracking.terminal.view is {view!r}; expected one of {', '.join(get_args(View))}"
            )
        self._view = view
        self.console = self.make_console()
        self._steps = planned_steps(run.config)
        """Number of steps of the run; 0 as long as it is not known."""
        self._started = time.monotonic()
        self._status = "starting"
        self._ended = 0.0
        """Time of the end of the last step, in seconds since 1970; of the start before the first."""
        self._heard = self._started
        """The same moment on the monotonic clock."""
        self._seconds: list[float] = []
        """Seconds of each step so far, from the end of the one before."""
        self._told: Remaining | None = None
        """The forecast that was made when the last step ended."""
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._rewards: list[float] = []
        self._validation: dict[str, list[tuple[str, float]]] = {}
        """Name and value of the metric that represents each task, by task."""
        self._step = 0
        self._warned: set[str] = set()
        self._survived: Counter[str] = Counter()
        """Number of incidents by kind."""
        self._lines = Lines()
        self._sample: tuple[str, str, float] | None = None
        self._live = (
            Live(get_renderable=self._draw, console=self.console, refresh_per_second=8, transient=False)
            if view == "live" and self.console.is_terminal
            else None
        )

    @staticmethod
    def make_console() -> Console:
        """Return the console that the view is drawn on."""
        return Console(stderr=False)

    def close(self) -> None:
        """Leave the last view on the screen."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        self.console.print(Text(inert(text)), soft_wrap=True)

    def event(self, event: Event) -> None:
        """Show what the event changes."""
        if self._view == "json":
            if isinstance(event, _AS_JSON):
                print(as_json({"time": event.time, **plain(event)}), file=self.console.file, flush=True)
            return
        if self._live and not self._live.is_started:
            self._live.start()
        match event:
            case StatusChanged():
                self._status = event.message
                self._line(event.message)
            case RunStarted():
                self._status = "generating the first groups"
                self._step, self._steps = event.step, planned_steps(None, event.config) or self._steps
                self._started = self._heard = time.monotonic()
                self._ended = event.time
            case GroupsReady():
                self._status = f"training step {event.step + 1}"
                best = max(event.groups[0].rollouts, key=lambda r: r.reward or 0.0)
                prompt = " ".join(str(m.get("content", "")) for m in event.groups[0].prompt.messages)
                reply = str(best.messages[-1].get("content", "")) if best.messages else ""
                self._sample = (prompt, reply, best.reward or 0.0)
            case StepEnded():
                more = event.step < self._steps or not self._steps
                self._status = f"waiting for the groups of step {event.step + 1}" if more else "finishing"
                self._step = event.step
                self._seconds.append(event.time - self._ended)
                self._ended, self._heard = event.time, time.monotonic()
                self._told = remaining(self._seconds, self._steps - event.step)
                self._recent.append(event.metrics)
                self._rewards.append(_mean_of(event.metrics, "reward/"))
                self._line(self._of_step())
            case Validated():
                for task, metrics in event.results.items():
                    if (name := headline(metrics)) is not None:
                        self._validation.setdefault(task, []).append((name, metrics[name]))
                    text = ", ".join(_with_interval(name, metrics) for name in measured(metrics))
                    self._line(f"validation of version {event.version}: {task}: {text}")
            case Saved():
                self._line(f"saved {event.directory}")
            case WarningRaised() if event.cause not in self._warned:
                self._warned.add(event.cause)
                self.say(f"warning, step {event.step}: {event.message}")
            case IncidentReported():
                self._survive(event)
            case ErrorRaised():
                self._status = "failed"
            case RunEnded():
                self._end()

    def _end(self) -> None:
        if self._status != "failed":
            self._status = ""
        if self._survived:
            self.say(f"survived in this run: {by_kind(self._survived)} (the report has each)")

    def _line(self, text: str) -> None:
        """Print what a live view shows by itself, and a quiet one does not show."""
        if not self._live and self._view != "quiet":
            self.say(text)

    def _survive(self, event: IncidentReported) -> None:
        """Count incidents, and say a line of them if it is due."""
        self._survived[event.kind] += event.count
        cause = event.kind, event.component
        if line := self._lines.line(*cause, event.message, count=event.count, now=event.time):
            self.say(f"survived, step {event.step}: {line}")

    # ------------------------------------------------------------------------------ drawing

    def _mean(self, name: str) -> float:
        """Return the mean of a metric over the last steps, weighted by their times."""
        recent = list(self._recent)  # another thread draws
        times = [m.get("time/step", 0.0) for m in recent]
        weighed = sum(time * m.get(name, 0.0) for time, m in zip(times, recent, strict=True))
        return weighed / (sum(times) or 1.0)

    def _share(self, name: str) -> float:
        """Return the share of the last steps' time that a metric of seconds has."""
        recent = list(self._recent)  # another thread draws
        times = sum(m.get("time/step", 0.0) for m in recent)
        return min(1.0, sum(m.get(name, 0.0) for m in recent) / (times or 1.0))

    def _waits(self) -> Text:
        training, playing = self._share("time/train"), self._share("time/generate")
        return Text(
            f"of the time training waits for groups, {training:.0%} it computes; {playing:.0%} rollouts run",
            style="dim",
        )

    @property
    def _place(self) -> str:
        return f"step {self._step}/{self._steps}" if self._steps else f"step {self._step}"

    def _of_step(self) -> str:
        return (
            f"{self._place}  reward {self._rewards[-1]:.3f}  "
            f"staleness {self._recent[-1].get('staleness_mean', 0):.2f}  "
            f"{self._mean('tokens_per_second/generation'):,.0f} tok/s generated, "
            f"{self._mean('tokens_per_second/training'):,.0f} trained  "
            f"{self._recent[-1].get('time/step', 0):.2f} s{self._left(since=0.0)}"
        )

    def _left(self, *, since: float) -> str:
        """Say how long the run will go on, as an interval if there are enough steps to tell.

        Args:
            since: seconds since the last step ended.
        """
        left = max(0, self._steps - self._step)
        if (told := self._told) is not None:
            low, high = (_clock(max(0.0, seconds - since)) for seconds in (told.low, told.high))
            return f", {low} to {high} left" if low != high else f", about {low} left"
        if not self._seconds or not left:
            return ""
        return f", about {_clock(max(0.0, sum(self._seconds) / len(self._seconds) * left - since))} left"

    def _draw(self) -> RenderableType:
        elapsed = time.monotonic() - self._started
        left = self._left(since=time.monotonic() - self._heard)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text("grpo-core", style="bold"),
            ProgressBar(total=self._steps or None, completed=self._step, width=_WIDTH),
            self._place,
            Text(_clock(elapsed) + left, style="dim"),
        )
        rows = Table.grid(padding=(0, 2))
        for name, value, picture in self._rows():
            rows.add_row(Text(inert(name), style="dim"), Text(inert(value), style="bold"), picture)
        return Group(head, rows)

    def _rows(self) -> list[tuple[str, str, RenderableType]]:
        rows: list[tuple[str, str, RenderableType]] = []
        if self._status:
            rows.append(("now", self._status, ""))
        for task, told in sorted(self._validation.items()):
            values, last = [value for _, value in told], shown(*told[-1])
            rows.append((f"validation {task}", last, Text(sparkline(values), style="green")))
        if self._rewards:
            low, high = min(0.0, *self._rewards), max(1.0, *self._rewards)
            rows.append(("reward", f"{self._rewards[-1]:.3f}", Text(sparkline(self._rewards, low, high))))
            rows += self._tasks()
            rows.append(
                (
                    "staleness",
                    f"{self._recent[-1].get('staleness_mean', 0):.2f}",
                    Text(f"steps, at most {self._recent[-1].get('staleness_max', 0):.0f}", style="dim"),
                )
            )
            rows.append(("waiting", f"{self._share('time/wait_for_groups'):.0%}", self._waits()))
            rows.append(
                (
                    "tokens/s",
                    f"{self._mean('tokens_per_second/generation'):,.0f}",
                    Text(
                        f"generated, {self._mean('tokens_per_second/training'):,.0f} trained; "
                        f"the busier side works {self._mean('overlap'):.0%} of the time",
                        style="dim",
                    ),
                )
            )
        if self._survived:
            rows.append(("survived", f"{self._survived.total()}", Text(by_kind(self._survived), style="dim")))
        if self._sample:
            prompt, reply, reward = self._sample
            rows.append(("sample", f"{reward:g}", Text(_short(f"{prompt} → {reply}"))))
        return rows

    def _tasks(self) -> list[tuple[str, str, RenderableType]]:
        """Return a line for each task, if there are several."""
        tasks = sorted({task for metrics in self._recent for task in _tasks_of(metrics)})
        rows: list[tuple[str, str, RenderableType]] = []
        for task in tasks if len(tasks) > 1 else ():
            last = next(metrics for metrics in reversed(self._recent) if f"groups/{task}" in metrics)
            accuracy = last.get(f"accuracy/{task}")
            told = [
                *([] if accuracy is None else [f"accuracy {accuracy:.0%}"]),
                f"{last[f'groups/{task}']:.0f} groups",
                f"{last[f'completion_tokens/{task}']:.0f} tokens",
                f"staleness {last[f'staleness/{task}']:.2f}",
            ]
            if f"filtered_fraction/{task}" in last:
                told.append(f"{last[f'filtered_fraction/{task}']:.0%} filtered")
            rows.append((task, f"{last[f'reward/{task}']:.3f}", Text(", ".join(told), style="dim")))
        return rows


def _tasks_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return the tasks that were trained."""
    return [name.removeprefix("groups/") for name in metrics if name.startswith("groups/")]


def _with_interval(name: str, metrics: Mapping[str, float]) -> str:
    bounds = interval(name, metrics)
    return f"{name} {shown(name, metrics[name])}" + (f" ({bounds})" if bounds else "")


def _mean_of(metrics: Mapping[str, float], prefix: str) -> float:
    values: list[Any] = [v for k, v in metrics.items() if k.startswith(prefix)]
    return sum(values) / len(values) if values else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(text: str, width: int = 60) -> str:
    return cut(inert(" ".join(text[: 4 * width].split())), width)
