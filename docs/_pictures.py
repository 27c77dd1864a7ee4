"""Draws the pictures of the explanations from the code itself: staleness.svg, corrections.svg, laws.svg.

    python docs/_pictures.py

The real pipeline runs on virtual time for most of them; corrections.svg asks the function that a loss asks.
The same code gives the same pictures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from grpo_core import events
from grpo_core.app import launch
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.values import classes_of
from grpo_plugin_algorithms.corrections import Correction, Off
from grpo_plugin_replay.forecast import forecast
from grpo_plugin_replay.times import read_times

DOCS = Path(__file__).parent
WIDTH = 640
"""Width of every picture, in its own units."""
KINDS = classes_of(Correction)
"""The corrections, by name."""
COLOURS = ("blue", "red", "green", "violet")
STYLE = """
svg { font: 12px sans-serif; }
.paper { fill: #fff; } text { fill: #222; } .grid { stroke: #ddd; fill: none; }
.blue { stroke: #1f6fb4; } .red { stroke: #c9303e; } .green { stroke: #2f7d3b; } .violet { stroke: #7d5a94; }
.f-blue { fill: #1f6fb4; } .f-red { fill: #c9303e; } .f-green { fill: #2f7d3b; } .f-violet { fill: #7d5a94; }
.line { fill: none; stroke-width: 2; } .dash { stroke-dasharray: 5 4; }
.small { font-size: 11px; } .head { font-weight: bold; }
.step { fill: #bbb; stroke: #777; }
@media (prefers-color-scheme: dark) {
.paper { fill: #1e2129; } text { fill: #e3e5e8; } .grid { stroke: #3a3f4b; }
.blue { stroke: #6cb2f0; } .red { stroke: #f2808b; } .green { stroke: #74c47f; } .violet { stroke: #c3a0dc; }
.f-blue { fill: #6cb2f0; } .f-red { fill: #f2808b; } .f-green { fill: #74c47f; } .f-violet { fill: #c3a0dc; }
.step { fill: #5a606c; stroke: #9aa0ab; } }
"""
"""Pictures have a background of their own, so that they can be read whichever colors the page has."""


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """A picture with a title for those who cannot see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" class="{kind}"/>'
    )


# ------------------------------------------------------------------------------ a simulated run


@define
class Watched:
    """Events of a simulated run, with their times."""

    dispatched: dict[int, float] = field(factory=dict)
    finished: dict[int, float] = field(factory=dict)
    trained: dict[int, tuple[float, int]] = field(factory=dict)
    """By slot: when its step began, and with which staleness."""
    steps: list[tuple[float, float]] = field(factory=list)
    """When each step began and ended."""
    versions: dict[int, int] = field(factory=dict)
    counts: list[tuple[float, int, int, int]] = field(factory=list)
    """Time, groups in flight, groups that are ready, groups that are being trained."""

    def receive(self, event: Any) -> None:
        now = asyncio.get_running_loop().time()
        match event:
            case events.Dispatched():
                for slot in event.slots:
                    self.dispatched.setdefault(slot.id, now)
                    self.versions[slot.id] = slot.generation_version
            case events.GroupFinished():
                self.finished[event.slot] = now
            case events.GroupsReady():
                for group in event.groups:
                    self.trained[group.slot] = (now, event.step - self.versions[group.slot])
                self.steps.append((now, now))
            case events.StepEnded():
                self.steps[-1] = (self.steps[-1][0], now)
            case _:
                return
        ready = len(self.finished.keys() - self.trained.keys())
        training = len(event.groups) if isinstance(event, events.GroupsReady) else 0
        if self.counts and not isinstance(event, events.GroupsReady | events.StepEnded):
            training = self.counts[-1][-1]
        self.counts.append((now, len(self.dispatched) - len(self.finished), ready, training))


def simulated(steps: int, prompts: int, max_staleness: int, *times: str) -> Watched:
    """Run the real pipeline on virtual time."""
    config = launch.configure(
        [
            {
                "tasks": {"task": {"env": "math:sort"}},
                "trainer": {"steps": steps, "prompts_per_step": prompts},
                "pipeline": {"max_staleness": max_staleness},
                "rollout": {"group_size": 4, "max_tokens": 2000},
                "checkpoint": {"every": 0},
            }
        ],
        {},
    )[0]
    watched = Watched()
    forecast(config, read_times(None, times), PluginHost.discover(), emit=watched.receive)
    return watched


# ------------------------------------------------------------------------------ staleness

LEFT, RIGHT, ROW = 88, 12, 11
"""Margins of the lanes, and the height of one place in which a group is generated."""


def lanes(watched: Watched, top: float, seconds: float, title: str) -> tuple[list[str], float]:
    """The groups of a run, each on the first line that is free, above the steps that train them."""
    scale = (WIDTH - LEFT - RIGHT) / seconds
    free: list[float] = []
    parts = [text(8, top + 12, title, "head")]
    for slot, begun in sorted(watched.dispatched.items(), key=lambda item: item[1]):
        if slot not in watched.trained:
            continue
        ended = watched.finished[slot]
        line = next((number for number, end in enumerate(free) if end <= begun + 1e-9), len(free))
        free[line:] = [ended, *free[line + 1 :]]
        kind = f"f-{COLOURS[watched.trained[slot][1]]}"
        y = top + 22 + line * ROW
        parts.append(rectangle(LEFT + begun * scale, y, (ended - begun) * scale - 1.5, ROW - 4, kind))
    bottom = top + 22 + len(free) * ROW + 2
    parts += [text(8, top + 32, "generation", "small"), text(8, bottom + 10, "training", "small")]
    for begun, ended in watched.steps:
        parts.append(rectangle(LEFT + begun * scale, bottom, (ended - begun) * scale, 12, "step"))
    return parts, bottom + 26


def staleness() -> str:
    """Six steps with three bounds, on one scale of time."""
    settings = (
        "engine.token=0.02",
        "rollout.tokens=250",
        "rollout.spread=0.6",
        "trainer.step=4",
        "engine.sync=0.3",
    )
    runs = {bound: simulated(6, 4, bound, *settings) for bound in (0, 1, 2)}
    seconds = max(run.steps[-1][1] for run in runs.values())
    parts: list[str] = []
    top = 6.0
    for bound, run in runs.items():
        title = f"max_staleness = {bound}: 6 steps in {run.steps[-1][1]:.0f} s"
        more, top = lanes(run, top, seconds, title)
        parts += more
    for number, words in enumerate(
        ("trained on the weights that generated it", "one step later", "two steps later")
    ):
        x = 8 + (0, 262, 390)[number]
        parts += [
            rectangle(x, top + 2, 12, 9, f"f-{COLOURS[number]}"),
            text(x + 17, top + 11, words, "small"),
        ]
    return svg(top + 22, "Generation and training of six steps with three bounds of staleness", parts)


# ------------------------------------------------------------------------------ corrections


def curve(points: Sequence[tuple[float, float]], place: Callable[[float, float], tuple[float, float]]) -> str:
    return "M" + "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)


def weights(correction: str, ratio: float, tokens: int) -> float:
    """The weight of each token of a sequence whose tokens all have this ratio."""
    there = torch.full((tokens,), math.log(ratio))
    sequence = torch.zeros(tokens, dtype=torch.long)
    kind = KINDS[correction]
    made = kind() if kind is Off else kind(floor=0.5, cap=2.0)
    return float(made.weights(there, sequence)[0])


def panel(left: float, title: str, tokens: int, kinds: Sequence[str], low: float, high: float) -> list[str]:
    """The weight by the ratio of a token, for sequences of so many tokens."""
    width, top, bottom = 270, 40, 232

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - low) / (high - low) * width, bottom - min(y, 2.4) / 2.4 * (bottom - top)

    parts = [text(left, 18, title, "head")]
    for weight in (0, 0.5, 1, 1.5, 2):
        (x, y), (end, _) = place(low, weight), place(high, weight)
        parts += [
            f'<path class="grid" d="M{x:.1f} {y:.1f}H{end:.1f}"/>',
            text(x - 5, y + 4, f"{weight:g}", "small", "end"),
        ]
    for tick in range(5):
        ratio = low + (high - low) * tick / 4
        parts.append(text(place(ratio, 0)[0], bottom + 16, f"{ratio:.2g}", "small", "middle"))
    for number, kind in enumerate(kinds):
        drawn = [(low + (high - low) * i / 400, 0.0) for i in range(401)]
        path = curve([(x, weights(kind, x, tokens) + 0.012 * number) for x, _ in drawn], place)
        parts.append(f'<path class="line {COLOURS[number]}" d="{path}"/>')
        y = bottom + 54 + 17 * number
        parts += [f'<path class="line {COLOURS[number]}" d="M{left} {y - 4}h18"/>', text(left + 24, y, kind)]
    parts.append(text(left + width / 2, bottom + 33, "ratio o / g of each token", "small", "middle"))
    return parts


def corrections() -> str:
    by_token = ("off", "token_truncate", "token_mask")
    by_sequence = ("sequence_truncate", "sequence_mask", "geometric_mask")
    assert {*KINDS} == {*by_token, *by_sequence}, "each correction is in the picture"
    parts = panel(40, "Weight of a token, by its own ratio", 1, by_token, 0.01, 4.0)
    parts += panel(360, "Weight in a sequence of 8 tokens", 8, by_sequence, 0.4, 2.4)
    return svg(345, "Weights of the corrections by the ratio of trainer to generator", parts)


# ------------------------------------------------------------------------------ laws


def laws() -> str:
    """Groups on their way to the trainer, and the bound that law 4 gives them."""
    prompts, bound = 8, 2
    run = simulated(
        12, prompts, bound, "rollout.tokens=250", "rollout.spread=0.9", "trainer.step=3", "engine.sync=0.3"
    )
    left, top, bottom, most = 40, 42, 240, prompts * (bound + 1)
    seconds = run.counts[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / seconds * (WIDTH - left - 14), bottom - y / (most + 2) * (bottom - top)

    parts = [
        text(left, 18, f"Groups on their way: max_staleness = {bound}, prompts_per_step = {prompts}", "head")
    ]
    for number in range(0, most + 1, prompts):
        (x, y), (end, _) = place(0, number), place(seconds, number)
        parts += [
            f'<path class="grid" d="M{x:.1f} {y:.1f}H{end:.1f}"/>',
            text(x - 5, y + 4, str(number), "small", "end"),
        ]
    kinds = {
        "f-blue": "being generated",
        "f-green": "finished, and not yet trained",
        "f-violet": "being trained",
    }
    for number, (kind, words) in enumerate(kinds.items()):
        stairs, before = [(0.0, 0.0)], 0
        for now, *counts in run.counts:
            count = sum(counts[number:])
            stairs += [(now, before), (now, count)]
            before = count
        parts.append(f'<path class="{kind}" d="{curve([*stairs, (seconds, 0)], place)}Z"/>')
        x = left + (0, 130, 340)[number]
        parts += [
            rectangle(x, bottom + 28, 12, 9, kind),
            text(x + 17, bottom + 37, words, "small"),
        ]
    (x, y), (end, _) = place(0, most), place(seconds, most)
    parts += [
        f'<path class="line red dash" d="M{x:.1f} {y:.1f}H{end:.1f}"/>',
        text(end, y - 6, f"law 4: at most ({bound} + 1) x {prompts} = {most}", "", "end"),
    ]
    for second in range(0, int(seconds) + 1, 10):
        parts.append(text(place(second, 0)[0], bottom + 16, f"{second} s", "small", "middle"))
    return svg(bottom + 48, "Groups in flight and ready during twelve steps, below the bound", parts)


PICTURES = {
    "staleness.svg": staleness,
    "corrections.svg": corrections,
    "laws.svg": laws,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())
        print(f"drawn: {DOCS / name}")


if __name__ == "__main__":
    main()
