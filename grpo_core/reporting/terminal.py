"""The tracker ``terminal``: shows a run as a live view, as lines, as JSON, or only its problems."""

from __future__ import annotations

import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal
from urllib.parse import unquote

from attrs import define, field
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_core.contracts import events
from grpo_core.contracts.errors import shortened
from grpo_core.contracts.incidents import IncidentCounts, by_kind, line_of
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import RunInfo
from grpo_core.loop.metrics import OF, headline
from grpo_core.processes.secrets import inert
from grpo_core.reporting.files import plain
from grpo_core.reporting.stored import as_json
from grpo_core.storage.run_directory import metrics_rows, planned_steps, validations
from grpo_core.validation.results import as_line, number_of_prompts, score

# ---------------------------------------------------------------------------------- what the run does now

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

    clock: Callable[[], float] = time.monotonic
    _text: str | None = field(init=False, default="starting")
    """The current activity; None waits for groups."""
    part: float | None = field(init=False, default=None)
    """Share of the current activity that is done, if it is known."""
    _since: float = field(init=False, default=0.0)
    """Start of the current activity."""
    _ready: int = field(init=False, default=0)
    """Number of groups that wait to be trained."""
    _wanted: int = field(init=False, default=0)
    """Number of groups of a step; 0 while unknown."""
    _in_order: bool = field(init=False, default=False)
    """Whether a step trains specific groups instead of the first ready ones."""
    _version: int = field(init=False, default=0)
    """The version that the groups train."""
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
                self._ready = event.buffer.get("ready", 0)
                wanted = event.config.get("trainer", {}).get("prompts_per_step", 0)
                self._wanted = wanted if isinstance(wanted, int) else 0
                self._in_order = event.config.get("pipeline", {}).get("policy") == "in_order"
                self._is("starting")
            case events.StageBegan() if event.stage == WAITS:
                self._version = event.step
                self._is(None)
            case events.StageBegan() if event.stage not in BRIEF:
                words = WORDS.get(event.stage, event.stage.replace("{", "{{").replace("}", "}}"))
                self._is(words.format(version=event.step, next=event.step + 1))
            case events.GroupFinished():
                self._ready += 1
            case events.GroupsReady():
                self._ready = max(0, self._ready - len(event.groups))
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
        text = self._of_groups() if self._text is None else self._text
        return text if self._ended or not text or seconds < SHOWN_FROM else f"{text} ({seconds:.0f} s)"

    def checkpoint(self) -> str:
        """Name the checkpoint that is written in the background, or ""."""
        saving = self._saving  # another thread asks
        if saving is None:
            return ""
        version, since = saving
        seconds = self.clock() - since
        return f"writing step {version}" + (f" ({seconds:.0f} s)" if seconds >= SHOWN_FROM else "")

    def _is(self, text: str | None) -> None:
        if text != self._text:
            self._text, self._since, self.part = text, self.clock(), None

    def _of_groups(self) -> str:
        ready, wanted = self._ready, self._wanted
        if not wanted:
            return f"waiting for the groups of step {self._version + 1}"
        if ready < wanted or not self._in_order:
            return f"waiting for groups: {min(ready, wanted)} of {wanted} are ready"
        return f"waiting for groups: {ready} are ready, but not all of the next {wanted}"


# ---------------------------------------------------------------------------------- the tracker

View = Literal["live", "lines", "quiet", "json"]
_AS_JSON = (
    *(events.StatusChanged, events.RunStarted, events.StepEnded, events.Validated, events.Saved),
    *(events.WarningRaised, events.IncidentReported, events.ErrorRaised, events.RunEnded),
)
"""Events that are printed as JSON; the others are about single prompts and rollouts."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_SAMPLE_WIDTH, _PROMPT_WIDTH = 32, 16
"""Characters of the reply that is shown, and of the end of its prompt."""
_TASK_WIDTH = 16
"""Columns of a task's picture, next to its numbers."""
_WIDE = 80
"""Smallest number of terminal columns for a live view; a narrower one shows lines."""
_PACE = 20
"""Number of steps from which the remaining time is estimated."""
_RECENT = 10
"""Steps that shown rates are averaged over: groups are finished in bursts."""
_CELL_PACE, _CELL_WIDTH = 0.5, 100
"""Seconds between two pictures in a notebook, and their columns."""
_PARTS = 3
"""Number of parts of a reward that are shown next to it."""
_NAMED = 6
"""Number of tasks whose rewards the line of a step names."""


ViewRow = tuple[str, str, Text]
"""A line of the live view: its name, its value, and a picture or an explanation."""


def sparkline(
    values: Sequence[float | None], low: float = 0.0, high: float = 1.0, width: int = _WIDTH
) -> str:
    """Draw the last values, at most ``width``, as bars between ``low`` and ``high``; None is a gap."""
    span = (high - low) or 1.0
    heights = [None if v is None else min(max((v - low) / span, 0.0), 1.0) for v in values[-width:]]
    return "".join(" " if height is None else _BARS[round(height * (len(_BARS) - 1))] for height in heights)


def write(console: Console, text: str, style: str = "", *, wrap: bool = True) -> None:
    """Print a line that may quote a model; on a terminal it is wrapped at words, and no word is broken."""
    lines = [inert(text)]
    if wrap and console.is_terminal:
        lines = textwrap.wrap(lines[0], console.width, break_long_words=False, break_on_hyphens=False)
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)


class TerminalTracker(Tracker):
    """Shows the run on standard output.

    Args:
        view: "live" redraws a few lines in a terminal of at least 80 columns or in the cell of a notebook,
            and prints lines elsewhere; "lines" prints a line for each step and each validation; "quiet"
            prints warnings and incidents; "json" prints the events of ``events.jsonl``, except events of
            single prompts.
    """

    def __init__(self, run: RunInfo, *, view: View = "live") -> None:
        self._view = view
        self.console = self.make_console()
        self._steps = planned_steps(run.config)
        """Number of steps of the run; 0 while unknown."""
        self._started = time.monotonic()
        """The start of the program, as in the summary."""
        self._now = Now()
        self._ended = 0.0
        """Time of the end of the last step, in seconds since 1970; of the start before the first."""
        self._heard = self._started
        """The same moment on the monotonic clock."""
        self._seconds: deque[float] = deque(maxlen=_PACE)
        """Seconds between the ends of the last steps, validations and checkpoints included."""
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._tasks = set(run.config.get("tasks", ()))
        """Names of the tasks; no mean over several is shown, since it would move with their shares."""
        self._rewards: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=_TASK_WIDTH))
        """The last rewards of each task."""
        self._validation: dict[str, deque[float | None]] = defaultdict(partial(deque, maxlen=_WIDTH))
        """The last values of the metric that represents each task; None where a validation has none."""
        self._scores: dict[str, str] = {}
        """The last value of each as text."""
        self._step = run.resumed_from or 0
        self._warned: set[str] = set()
        self._time = 0.0
        """When the last incident was emitted, in seconds."""
        self._incidents = IncidentCounts(self._say_incident, lambda: self._time)
        """Counts the incidents of the run; a line stands for those of a minute."""
        self._shown: dict[str, str] = {}
        """Lines of trackers, by name."""
        self._sample: tuple[str, str, float] | None = None
        if run.resumed_from is not None:
            self._refill(run)
        console, live = self.console, view == "live"
        drawn = console.is_terminal and console.width >= _WIDE and not console.is_dumb_terminal
        self._live = (
            Live(get_renderable=self._picture, console=console, refresh_per_second=8)
            if live and drawn
            else None
        )
        self._cell = _Cell(self._picture) if live and console.is_jupyter else None

    @staticmethod
    def make_console() -> Console:
        """Return the console for the view."""
        return Console(stderr=False)

    def close(self) -> None:
        """Leave the last view on the screen."""
        if self._live:
            self._live.stop()
        if self._cell:
            self._cell.draw()

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        write(self.console, text)

    def event(self, event: events.Event) -> None:
        """Show what the event changes."""
        self._receive(event)
        if self._cell:
            self._cell.changed()

    def _receive(self, event: events.Event) -> None:
        if self._view == "json":
            if isinstance(event, _AS_JSON):
                print(as_json({"time": event.time, **plain(event)}), file=self.console.file, flush=True)
            return
        if self._live and not self._live.is_started:
            self._live.start()
        self._now.receive(event)
        match event:
            case events.StatusChanged():
                self._line(event.message)
            case events.RunStarted():
                self._step, self._steps = event.step, planned_steps(None, event.config) or self._steps
                self._heard, self._ended = time.monotonic(), event.time
            case events.GroupsReady():
                group = event.groups[0]
                scored = [r for r in group.rollouts if r.reward is not None]
                if not scored:
                    return
                best = max(scored, key=lambda r: r.reward or 0.0)
                self._sample = (_said(group.prompt.messages), _said(best.messages), best.reward or 0.0)
            case events.StepEnded():
                self._count(event)
                self._line(self._of_step())
            case events.Validated():
                for task, metrics in event.results.items():
                    self._keep_validation(task, metrics)
                    self._line(f"validation of version {event.version}: {task}: {as_line(metrics)}")
            case events.Saved():
                self._line(f"saved {event.directory}")
            case events.LineShown():
                self._shown = self._shown | {event.name: event.text}
                self._line(f"{event.name}: {event.text}")
            case events.WarningRaised() if event.cause not in self._warned:
                self._warned.add(event.cause)
                self.say(f"warning, step {event.step}: {event.message}")
            case events.IncidentReported():
                self._time = event.time
                self._incidents.receive(event)
            case events.RunEnded() if survived := self._incidents.counts:
                self.say(f"recovered in this run from {by_kind(survived)} (events.jsonl has each)")

    def _say_incident(self, event: events.IncidentReported) -> None:
        what = "waits" if event.kind == "unavailable" else "survived"
        self.say(f"{what}, step {event.step}: {line_of(event)}")

    def _count(self, event: events.StepEnded) -> None:
        """Keep the time and the numbers of a step."""
        self._step = event.step
        self._seconds.append(event.time - self._ended)
        self._ended, self._heard = event.time, time.monotonic()
        self._recent.append(event.metrics)
        self._keep_rewards(event.metrics)

    def _keep_rewards(self, metrics: Mapping[str, Any]) -> None:
        for task in _tasks_of(metrics):
            self._tasks.add(task)
            if (reward := metrics.get(f"reward/{task}")) is not None:
                self._rewards[task].append(reward)

    def _keep_validation(self, task: str, metrics: Mapping[str, Any]) -> None:
        name = headline(metrics)
        if name is not None or "unscored" in metrics:
            self._validation[task].append(metrics.get(name or ""))
            part = f" on {number_of_prompts(metrics)}" if OF in metrics else ""
            self._scores[task] = score(name or "", metrics) + part

    def _refill(self, run: RunInfo) -> None:
        """Keep what a resumed run has done before."""
        rows = [row for row in metrics_rows(run.directory / "metrics.jsonl") if row["step"] <= self._step]
        for row in rows:
            self._keep_rewards(row)
        for row in validations(rows):
            if row["step"] <= (run.validated or 0):  # later ones are made again
                known = {key: value for key, value in row.items() if value is not None}
                self._keep_validation(known.pop("task"), known)

    def _line(self, text: str) -> None:
        """Print a line, except in a live or quiet view."""
        if not self._live and not self._cell and self._view != "quiet":
            self.say(text)

    # ------------------------------------------------------------------------------ drawing

    def _mean(self, name: str) -> float:
        """Return the mean of a metric over the last steps, weighted by their times."""
        recent = list(self._recent)  # another thread draws
        times = [m.get("time/step", 0.0) for m in recent]
        weighed = sum(time * m.get(name, 0.0) for time, m in zip(times, recent, strict=True))
        return weighed / (sum(times) or 1.0)

    def _share(self, name: str) -> float:
        """Return a metric of seconds as a share of the last steps' time."""
        recent = list(self._recent)  # another thread draws
        times = sum(m.get("time/step", 0.0) for m in recent)
        return min(1.0, sum(m.get(name, 0.0) for m in recent) / (times or 1.0))

    @property
    def _place(self) -> str:
        return f"step {self._step}/{self._steps}" if self._steps else f"step {self._step}"

    def _of_step(self) -> str:
        return (
            f"{self._place}  {_rewards_of(self._recent[-1], several=len(self._tasks) > 1)}"
            f"staleness {self._recent[-1].get('staleness_mean', 0):.2f}  "
            f"{self._mean('tokens_per_second/generation'):,.0f} tok/s generated, "
            f"{self._mean('tokens_per_second/training'):,.0f} trained  "
            f"{self._recent[-1].get('time/step', 0):.2f} s{self._left(since=0.0)}"
        )

    def _left(self, *, since: float) -> str:
        """Estimate the remaining time of the run from the mean of the last steps.

        Args:
            since: seconds since the last step ended.
        """
        left = max(0, self._steps - self._step)
        seconds = list(self._seconds)  # another thread draws
        if not seconds or not left:
            return ""
        return f", about {_clock(max(0.0, fmean(seconds) * left - since))} left"

    def _picture(self) -> RenderableType:
        return Group(self._head(), _beside(self._rows()))

    def _head(self) -> RenderableType:
        now = time.monotonic()
        times = _clock(now - self._started) + self._left(since=now - self._heard)
        bar = ProgressBar(total=self._steps or None, completed=self._step, width=_WIDTH)
        head = Table.grid(padding=(0, 1))
        head.add_row(Text("grpo-core", style="bold"), bar, self._place, Text(times, style="dim"))
        return head

    def _rows(self) -> list[ViewRow]:
        """Return the lines below the head."""
        rows: list[ViewRow] = []
        if text := self._now.text():
            part = self._now.part
            rows.append(("now", text, Text("" if part is None else _bar(part), style="green")))
        if text := self._now.checkpoint():
            rows.append(("checkpoint", text, Text()))
        for task, values in sorted(self._validation.items()):
            picture = Text(sparkline(list(values)), style="green")
            rows.append((f"validation {task}", self._scores[task], picture))
        if self._recent:
            rows += [*self._learning(), *self._speeds()]
        rows += [(name, text, Text()) for name, text in self._shown.items()]
        if survived := dict(self._incidents.counts):  # another thread draws
            rows.append(("recovered", "", Text(f"from {by_kind(survived)}", style="dim")))
        if self._sample:
            prompt, reply, reward = self._sample
            shown = f"{prompt[-_PROMPT_WIDTH:]} → {shortened(reply or 'no text', _SAMPLE_WIDTH)}"
            rows.append(("sample", f"{reward:g}", Text(shown)))
        return rows

    def _speeds(self) -> list[ViewRow]:
        """Return the lines about staleness, waits and tokens."""
        newest = self._recent[-1]
        training, playing = self._share("time/train"), self._share("time/generate")
        waits = f"for replies; at work: engine {playing:.0%}, trainer {training:.0%}"
        rates = f"generated, {self._mean('tokens_per_second/training'):,.0f} trained with prompts"
        return [
            (
                "staleness",
                f"{newest.get('staleness_mean', 0):.2f}",
                Text(f"steps, at most {newest.get('staleness_max', 0):.0f}", style="dim"),
            ),
            ("waiting", f"{self._share('time/wait_for_groups'):.0%}", Text(waits, style="dim")),
            ("tokens/s", f"{self._mean('tokens_per_second/generation'):,.0f}", Text(rates, style="dim")),
        ]

    def _learning(self) -> list[ViewRow]:
        """Return a line about the rewards of each task, with its other numbers."""
        recent, rows = list(self._recent), list[ViewRow]()  # another thread draws
        for task in sorted({task for metrics in recent for task in _tasks_of(metrics)}):
            last = next(metrics for metrics in reversed(recent) if f"groups/{task}" in metrics)
            rewards = list(self._rewards[task])
            bars = sparkline(rewards, min([0.0, *rewards]), max([1.0, *rewards]), _TASK_WIDTH)
            picture = Text.assemble(bars.ljust(_TASK_WIDTH), "  ", (_numbers_of(task, last), "dim"))
            rows.append((f"reward {task}", f"{rewards[-1]:.3f}" if rewards else "", picture))
        return rows


class _Cell:
    """The one output of a notebook's cell that shows a run."""

    def __init__(self, picture: Callable[[], RenderableType]) -> None:
        from IPython.display import display

        self._picture, self._drawn = picture, 0.0
        self._output: Any = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def changed(self) -> None:
        """Draw, unless it was drawn just now."""
        if time.monotonic() - self._drawn >= _CELL_PACE:
            self.draw()

    def draw(self) -> None:
        console = Console(width=_CELL_WIDTH, force_jupyter=False, force_terminal=False)
        with console.capture() as text:
            console.print(self._picture())
        self._output.update({"text/plain": text.get()}, raw=True)
        self._drawn = time.monotonic()


def _bar(part: float) -> str:
    """Draw a share as a bar."""
    return "━" * round(part * _WIDTH) + "╌" * (_WIDTH - round(part * _WIDTH))


def _beside(rows: Sequence[ViewRow]) -> RenderableType:
    """Draw names, values and pictures side by side; a value without a picture uses all of the room."""
    names = max((cell_len(inert(name)) for name, _, _ in rows), default=0)
    values = max((cell_len(inert(value)) for _, value, picture in rows if picture), default=0)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=names, no_wrap=True)
    grid.add_column()
    for name, value, picture in rows:
        beside = Table.grid(padding=(0, 2))
        beside.add_row(Text(inert(value).ljust(values), style="bold"), picture)
        grid.add_row(Text(inert(name), style="dim"), beside if picture else Text(inert(value), style="bold"))
    return grid


def _said(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message on one line."""
    return inert(" ".join(str(messages[-1].get("content") or "").split())) if messages else ""


def _numbers_of(task: str, metrics: Mapping[str, float]) -> str:
    """Format the numbers of a task, except its reward."""
    filtered = metrics.get(f"filtered_fraction/{task}")
    numbers = [
        *(f"{name} {value}" for name, value in _beside_reward(task, metrics).items()),
        f"{metrics[f'groups/{task}']:.0f} groups",
        f"{metrics[f'completion_tokens/{task}']:.0f} tokens",
        *([] if filtered is None else [f"{filtered:.0%} filtered"]),
    ]
    return ", ".join(numbers)


def _tasks_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return the tasks that were trained."""
    return [name.removeprefix("groups/") for name in metrics if name.startswith("groups/")]


def _beside_reward(task: str, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the accuracy of a task and the first parts of its feedback, as text by their names."""
    end = f"/{task}"
    names = [name.removesuffix(end) for name in metrics if name.endswith(end)]
    parts = [name.removeprefix("feedback_") for name in names if name.startswith("feedback_")][:_PARTS]
    shown = {unquote(part): f"{metrics[f'feedback_{part}{end}']:.3g}" for part in parts}
    right = metrics.get(f"accuracy{end}")
    known = right is None or right == metrics.get(f"reward{end}")
    return shown if known else {"accuracy": f"{right:.0%}"} | shown


def _rewards_of(metrics: Mapping[str, float], *, several: bool) -> str:
    """Format the mean reward of a step's task, or of its largest tasks with their numbers of groups."""
    by_size = sorted(_tasks_of(metrics), key=lambda task: (-metrics[f"groups/{task}"], task))
    named, rest = sorted(by_size[:_NAMED]), by_size[_NAMED:]
    rewards = []
    for task in named:
        reward, filtered = metrics.get(f"reward/{task}"), metrics.get(f"filtered_fraction/{task}")
        value = "none" if reward is None else f"{reward:.3f}"
        size = f" x {metrics[f'groups/{task}']:.0f}"
        rewards.append(
            (f"{task} {value}{size}" if several else value)
            + (f" ({filtered:.0%} filtered)" if filtered else "")
        )
    if len(named) == 1 and not several:
        rewards += [f"{name} {value}" for name, value in _beside_reward(named[0], metrics).items()]
    if rest:
        rewards.append(f"and {len(rest)} more tasks x {sum(metrics[f'groups/{task}'] for task in rest):.0f}")
    return f"reward {', '.join(rewards)}  " if rewards else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
