"""Whole runs whose tokens are in a data plane of a Ray cluster: what must hold for each such plane."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from forks import grpo
from killing import SETTINGS, Run, left_after

LENGTH = """
import grpo_core as grpo

class Length(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(40)]

    def evaluate(self, episodes):
        if len(episodes[0].prompt.answer) == UNTRAINED:
            return [1.0] * len(episodes)
        return [len(episode.reply) + ord(episode.reply[-1:] or "a") / 256 for episode in episodes]
"""
"""Rollouts of a group have different rewards, but those whose answers have UNTRAINED digits."""
IN_ORDER = [
    "--env", "./length.py:Length", "--set", "trainer.steps=2", "--set", "trainer.prompts_per_step=2",
    "--set", "trainer.updates_per_step=1", "--set", "rollout.group_size=2", "--set", "validation.every=0",
    "--set", "checkpoint.every=2", "--set", "model.options.warm_start_steps=5",
    "--set", "pipeline.policy=in_order", "--set", "pipeline.max_staleness=0",
    "--set", "engine.options.max_rows=1", "--set", "rollout.max_tokens=6", "--set", "trainer.threads=1",
    "--set", "trainer.ranks=2", "--set", "trainer.device=cpu",
]  # fmt: skip
PATIENCE = 240.0
"""Seconds for a run to start its cluster and to train some steps, on a machine that others use, too."""


def on(plane: str) -> list[str]:
    """Arguments of a run with a plane of a Ray cluster."""
    return ["--ray", "--set", f"data_plane.name={plane}"]


def train(cwd: Path, name: str, *more: str, untrained: int = 0) -> Path:
    """Train two ranks in order, and return the directory of the run."""
    (cwd / "length.py").write_text(LENGTH.replace("UNTRAINED", str(untrained)))
    done = grpo(cwd, "train", *IN_ORDER, *more, "--output", name, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"rows": 0.0' not in (cwd / name / "metrics.jsonl").read_text()
    return cwd / name


def the_same_is_trained_with(planes: Sequence[str], cwd: Path) -> None:
    """Compare checkpoints and stored rollouts with those of the plane ``memory``, byte by byte."""
    here = train(cwd, "memory")
    there = [train(cwd, plane, *on(plane)) for plane in planes]
    made = sorted((here / "checkpoints" / "step-000002").rglob("*.safetensors"))
    assert len(made) >= 3, "of the model, and of the optimizer in each rank"
    for path in (*made, *(here / "rollouts").glob("*.safetensors")):
        for other in there:
            assert path.read_bytes() == (other / path.relative_to(here)).read_bytes(), path.name


class PlaneRun(Run):
    """A run whose tokens are in a plane of a Ray cluster."""

    def __init__(self, cwd: Path, plane: str) -> None:
        self._plane = plane
        super().__init__(cwd, settings=SETTINGS | {"trainer.steps": 20})

    def _start(self, *arguments: str) -> None:
        super()._start(*arguments, *(on(self._plane) if "--env" in arguments else []))

    def environ(self) -> dict[str, str]:
        """Return nothing: below the test's folder, names of Ray's sockets would have over 107 characters."""
        return {}

    def named(self, actor: str) -> list[int]:
        """Return the processes of a class of actors."""
        found = []
        for pid in self.everything():
            with suppress(OSError):
                if actor in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found


def nothing_is_lost_or_left(cwd: Path, plane: str, keeper: str, *others: str) -> None:
    """Kill a plane's actor that keeps the tokens, then the run's process, and continue each time.

    Args:
        cwd: an empty directory.
        plane: its name.
        keeper: class of the actor.
        others: classes of the plane's other actors.
    """
    run = PlaneRun(cwd, plane)
    try:
        run.wait(lambda: run.steps >= 2, PATIENCE)
        (pid,) = run.named(keeper)
        assert [len(run.named(other)) for other in others] == [1] * len(others)
        everybody = run.everything()
        os.kill(pid, signal.SIGKILL)
        said = run.end()
        assert "the tokens of finished rollouts are lost" in said, said
        assert "--resume" in said
        assert left_after(everybody, 20.0) == []
        run.resume()
        at = run.steps
        run.wait(lambda: run.steps >= at + 2, PATIENCE)
        everybody = [pid for pid in run.everything() if not is_of_ray_alone(pid)]
        assert run.named(keeper)
        assert set(run.named(keeper)) < set(everybody)
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
        assert left_after(everybody, 20.0) == []
        run.resume()
        said = run.end(PATIENCE)
        assert run.finished, said
    finally:
        if run.running:
            os.killpg(run.process.pid, signal.SIGKILL)
    checked = grpo(".", "verify", run.directory)
    assert checked.returncode == 0, checked.stdout


def is_of_ray_alone(pid: int) -> bool:
    """Whether it looks for Ray's head for a minute after its driver was killed together with it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().startswith(("ray::DashboardAgent", "ray::RuntimeEnv"))
    return True
