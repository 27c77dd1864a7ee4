"""The environment ``code:harbor:DIR``: directories of tasks in Harbor's format, in the sandbox."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

import grpo_core as grpo
from grpo_core.kit import read_json
from grpo_plugin_code.commands import Commands, Ran, packed_directory, room_of
from grpo_plugin_code.images import Image, ImageError, built, default_cache
from grpo_plugin_code.sandbox import MIB, Limits
from grpo_plugin_code.shell import Shell

PLACE, TESTS, LOGS, SOLUTION = "/app", "/tests", "/logs", "/solution"
OTHERS = (TESTS, LOGS, SOLUTION)
REWARDS = (f"{LOGS}/verifier/reward.txt", f"{LOGS}/verifier/rewards.json", f"{LOGS}/verifier/reward.json")
HARMLESS = {"FROM", "WORKDIR", "ENV", "LABEL", "COPY", "CMD", "ENTRYPOINT", "SHELL", "USER", "ARG", "EXPOSE"}
"""Instructions of a Dockerfile that install nothing; some of them are inspected further."""
IMAGES = re.compile(r"(debian|ubuntu|python|alpine|busybox|buildpack-deps)(:[\w.-]+)?$")
"""Base images that this machine's system can replace."""
BUILD = 'images = "podman" or "docker" builds it'
NETWORK = re.compile(r"\b(apt-get|apt|apk|dnf|curl|wget|uvx|pip3? install|npm install|git clone)\b")
"""Commands in a test that need network access."""


@frozen(kw_only=True)
class HarborTask:
    """A task, as read from its directory."""

    name: str
    instruction: str
    tree: str
    """Packed files of the working directory at the start."""
    tests: str
    solution: str
    """Packed files of ``solution/``; empty without any."""
    seconds: float
    """Time limit of the verifier."""
    image: Image | None = None
    """Root file system of the task; None is this machine's."""


class _Systems:
    """``Commands`` for each root file system: this machine's and the images'."""

    def __init__(self, limits: Limits, cores: int) -> None:
        self._limits, self._slots = limits, asyncio.Semaphore(cores)
        self._commands: dict[Path | None, Commands] = {}

    def of(self, task: HarborTask) -> Commands:
        root = task.image.root if task.image is not None else None
        if root not in self._commands:
            self._commands[root] = Commands(
                self._limits,
                directory=task.image.directory if task.image is not None else PLACE,
                others=OTHERS,
                at_once=self._slots,
                ready=1 if root is None else 0,  # there may be hundreds of images
                image=task.image,
            )
        return self._commands[root]

    async def aclose(self) -> None:
        for commands in self._commands.values():
            await commands.aclose()


class Harbor(grpo.Environment):
    """Tasks in Harbor's format: the model works with commands, and each task's own ``tests/test.sh`` judges.

    The model has the tool ``run``.  At the end ``tests/test.sh`` runs in a new sandbox with the files that
    the model left in ``/app``; the reward is what it writes to ``/logs/verifier/reward.txt``, which is empty
    before, or the mean of ``rewards.json``.  A test that ends without a reward leaves the rollout unscored;
    one that takes too long or is killed gives 0, because a program of the model can bring that about.

    Args:
        directory: a task, or a directory of tasks.
        oracle: whether to validate each task at the start: its solution must earn 1, and the initial files
            must earn 0.
        oracle_seconds: wall time limit of this validation; ``environment.start_deadline`` must be longer.
        images: program that builds the image of each task, "podman" or "docker", with the network and the
            rights of its user; "" builds none, and refuses tasks whose Dockerfile installs something.
        image_cache: directory for the files of images; ``~/.cache/grpo-core/images`` if None.
        refused: treatment of tasks that cannot be played or fail the validation: "stop" the run, or "skip"
            them.
        validation_size: number of tasks that are held out, at most half of them; 0 is a tenth.
        seed: seed of that choice.
        max_turns: largest number of completions.
        seconds: limit of wall time for each command; the verifier has the limit of its task.
        cpu_seconds: limit of each process's computing time.
        memory: limit of each process's address space in MiB.
        space: limit of the files in MiB.
        processes: limit of processes and threads.
        output: limit of what a command prints in KiB.
        at_once: number of commands that run at once; 0 is one for each core.

    Raises:
        ConfigError: there is no task that can be played, or one cannot and ``refused`` is "stop".
    """

    success = 1.0

    def __init__(
        self,
        directory: Path,
        *,
        oracle: bool = True,
        oracle_seconds: float = 100.0,
        images: Literal["", "podman", "docker"] = "",
        image_cache: Path | None = None,
        refused: Literal["stop", "skip"] = "stop",
        validation_size: int = 0,
        seed: int = 0,
        max_turns: int = 20,
        seconds: float = 60.0,
        cpu_seconds: int = 60,
        memory: int = 2048,
        space: int = 64,
        processes: int = 128,
        output: int = 16,
        at_once: int = 0,
    ) -> None:
        found = tasks_in(directory, images, image_cache)
        self._tasks = {name: task for name, task in found.items() if isinstance(task, HarborTask)}
        self._reasons = {name: why for name, why in found.items() if isinstance(why, str)}
        for name, task in list(self._tasks.items()):
            if why := _too_large(task, space):
                self._reasons[name] = why
                del self._tasks[name]
        self._stop, self._oracle, self._oracle_seconds = refused == "stop", oracle, oracle_seconds
        self._refuse()
        longest = max(seconds, *(task.seconds for task in self._tasks.values()))
        self._limits = Limits(
            seconds=longest,
            cpu_seconds=cpu_seconds,
            memory=memory,
            files=space,
            processes=processes,
            output=output,
        )
        self._seconds, self._cores = seconds, at_once or len(os.sched_getaffinity(0))
        self._systems = self._made()
        self._validation_size, self._seed = validation_size, seed
        self.max_turns = max_turns
        self.concurrency, self.deadline = 2 * self._cores, 120.0 + 4 * longest

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self._prompts[split]

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        raise grpo.ConfigError("code: harbor brings its own tasks: leave out the task's data")

    def open(self, prompt: grpo.Prompt) -> Shell:
        task = self._tasks[prompt.id]
        return Shell(self._systems.of(task), task.tree, self._seconds)

    async def aclose(self) -> None:
        await self._systems.aclose()

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        shell: Shell = episode.session
        ran = await self._verified(self._systems, self._tasks[episode.prompt.id], shell._tree)
        rewards = rewards_of(ran)
        if isinstance(rewards, str):
            if ran.stopped_by:  # not unscored: a retry would let the model avoid a failure
                metrics = {f"failed_{ran.stopped_by}": 1.0, "commands": float(shell._number)}
                return grpo.Feedback(reward=0.0, metrics=metrics)
            return grpo.Feedback(error=f"code: harbor task {episode.prompt.id}: {rewards}")
        metrics = {**rewards, "commands": float(shell._number)}
        return grpo.Feedback(reward=_mean(rewards), metrics=metrics)

    async def _verified(self, systems: _Systems, task: HarborTask, tree: str) -> Ran:
        return await systems.of(task).run(
            f"mkdir -p {LOGS}/verifier; bash {TESTS}/test.sh",
            tree,
            others={TESTS: task.tests},
            reads=REWARDS,
            keeps=False,
            seconds=task.seconds,
        )

    def _made(self) -> _Systems:
        return _Systems(self._limits, self._cores)

    @cached_property
    def _prompts(self) -> dict[str, list[grpo.Prompt]]:
        """Return the prompts of each split, after validating the tasks."""
        if self._oracle:
            asyncio.run(self._try_all())
            self._refuse()
        everything = [
            grpo.Prompt(messages=task.instruction, id=name) for name, task in sorted(self._tasks.items())
        ]
        if len(everything) == 1:
            return {"train": everything, "validation": everything}
        wanted = self._validation_size or len(everything) // 10
        held_out = max(1, min(wanted, len(everything) // 2))
        random.Random(f"harbor {self._seed}").shuffle(everything)
        return {"validation": everything[:held_out], "train": everything[held_out:]}

    async def _try_all(self) -> None:
        systems = self._made()  # of this event loop
        try:
            async with asyncio.timeout(self._oracle_seconds):
                tried = await asyncio.gather(*(self._fault(systems, task) for task in self._tasks.values()))
        except TimeoutError as error:
            raise grpo.ConfigError(
                f"code: trying {len(self._tasks)} tasks of Harbor took longer than oracle_seconds = "
                f"{self._oracle_seconds:g}; raise it, and environment.start_deadline above it, or set "
                "oracle = false to leave this out"
            ) from error
        finally:
            await systems.aclose()
        self._reasons |= {name: why for name, why in zip(self._tasks, tried, strict=True) if why}
        self._tasks = {name: task for name, task in self._tasks.items() if name not in self._reasons}

    async def _fault(self, systems: _Systems, task: HarborTask) -> str:
        """Return the reason why a task cannot be trained on, or an empty text."""
        first = await self._verified(systems, task, task.tree)
        untouched = rewards_of(first)
        if isinstance(untouched, str):
            if not first.stopped_by:  # as a rollout it would be unscored, instead of earning 0
                return f"untouched, {untouched}"
        elif _mean(untouched) > 0:
            return f"untouched, it earns {_mean(untouched):g}, expected 0: doing nothing would be rewarded"
        if not task.solution:
            return ""
        solved = await systems.of(task).run(
            f"bash {SOLUTION}/solve.sh", task.tree, others={SOLUTION: task.solution}, seconds=task.seconds
        )
        ran = await self._verified(systems, task, solved.tree)
        rewards = rewards_of(ran)
        if isinstance(rewards, str):
            return f"with its own solution {rewards}"
        if not grpo.advantages.reaches(_mean(rewards), 1.0):
            end = (solved.output + ran.output).strip()[-200:]
            return f"its own solution earns {_mean(rewards):g}, expected 1: {end}"
        return ""

    def _refuse(self) -> None:
        """Raise ConfigError for refused tasks if ``refused`` is "stop" or no task is left."""
        if self._reasons and (self._stop or not self._tasks):
            some = "; ".join(f"{name}: {why}" for name, why in sorted(self._reasons.items())[:5])
            raise grpo.ConfigError(
                f"code: {len(self._reasons)} of {len(self._reasons) + len(self._tasks)} tasks of Harbor are "
                f'refused ({some}); set refused = "skip" to leave such tasks out'
            )


def tasks_in(directory: Path, images: str = "", cache: Path | None = None) -> dict[str, HarborTask | str]:
    """Return the tasks of a directory by name; a text is the reason why a task cannot be played.

    Args:
        directory: a task, or a directory of tasks.
        images: program that builds images; "" uses this machine's system, or refuses the task.
        cache: directory for images.

    Raises ConfigError if there are no tasks, or no such program.
    """
    if not directory.is_dir():
        raise grpo.ConfigError(f"code: there is no directory {directory}")
    directories = [directory] if (directory / "task.toml").exists() else sorted(directory.iterdir())
    directories = [each for each in directories if (each / "task.toml").exists()]
    found = {each.name: _task(each, images, cache or default_cache()) for each in directories}
    if not found:
        raise grpo.ConfigError(
            f"code: {directory} holds no task of Harbor: a task is a directory with task.toml, "
            "instruction.md and tests/test.sh"
        )
    return found


def rewards_of(ran: Ran) -> dict[str, float] | str:
    """Return the rewards that a verifier wrote, or the reason why there are none."""
    text = ran.files.get(REWARDS[0], "").strip()
    result: Any = {"reward": text} if text else None
    for path in REWARDS[1:]:
        if result is None and path in ran.files:
            try:
                result = read_json(ran.files[path], object)
            except ValueError:
                return f"the tests wrote {ran.files[path]!r:.100} as rewards"
    if result is None:
        why = ran.lost or ("their time was over" if ran.status is None else f"exit status {ran.status}")
        return f"the tests wrote no reward ({why}): {ran.output.strip()[-200:]}"
    try:
        rewards = {str(name): float(value) for name, value in dict(result).items()}
    except (TypeError, ValueError, OverflowError):
        return f"the tests wrote {result!r:.100} as rewards"
    if not rewards or not all(map(math.isfinite, rewards.values())):
        return f"the tests wrote {result!r:.100} as rewards"
    return rewards


def _too_large(task: HarborTask, space: int) -> str:
    """Return the reason why files of a task do not fit into the sandbox, or an empty text."""
    parts = {"environment": task.tree, "tests": task.tests, "solution": task.solution}
    for name, tree in parts.items():
        if (room := room_of(tree)) > space * MIB:
            return f"its files in {name} take {room / MIB:.1f} MiB, and the option space allows {space}"
    return ""


def _mean(rewards: Mapping[str, float]) -> float:
    return sum(rewards.values()) / len(rewards)


def _task(path: Path, images: str, cache: Path) -> HarborTask | str:
    source = path / "environment"
    try:
        settings = tomllib.loads((path / "task.toml").read_text())
        instruction = (path / "instruction.md").read_text().strip()
        test = (path / "tests" / "test.sh").read_text()
        has_image = (source / "Dockerfile").exists()
        docker = (source / "Dockerfile").read_text() if has_image else "FROM debian"
        seconds = float(settings.get("verifier", {}).get("timeout_sec", 600))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    image = None
    if why := _needs_more(settings, test, path) or ("" if images and has_image else _unusual(docker)):
        return why
    if not instruction:
        return "its instruction.md is empty"
    files = source if _copies(docker) else source / "nothing"
    if images and has_image:
        try:
            image = built(source, images, cache, OTHERS)
        except ImageError as error:
            return str(error)
        files = image.root / image.directory.lstrip("/")
    return HarborTask(
        name=path.name,
        instruction=instruction,
        tree=packed_directory(files),
        tests=packed_directory(path / "tests"),
        solution=packed_directory(path / "solution") if (path / "solution" / "solve.sh").exists() else "",
        seconds=seconds,
        image=image,
    )


def _needs_more(settings: Mapping[str, Any], test: str, path: Path) -> str:
    """Return an unsupported requirement of a task, or an empty text."""
    if settings.get("steps"):
        return "it has several steps"
    if (path / "environment" / "docker-compose.yaml").exists():
        return "it needs several containers (docker-compose.yaml)"
    if wanted := NETWORK.search(test):
        return f"its tests need a network ({wanted[0]})"
    return ""


def _unusual(docker: str) -> str:
    """Return a requirement of a Dockerfile that this machine's system does not meet, or an empty text."""
    for line in _instructions(docker):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word.upper() not in HARMLESS:
            return f"its Dockerfile needs more than the sandbox has: {line[:80]} ({BUILD})"
        if word.upper() == "FROM" and not IMAGES.match(rest.split(" ")[0]):
            return f"its Dockerfile begins with the image {rest[:80]} ({BUILD})"
        if word.upper() == "WORKDIR" and rest.rstrip("/") != PLACE:
            return f"its Dockerfile works in {rest[:80]}, and the sandbox has {PLACE} ({BUILD})"
    if _copies(docker) is None:
        return f"its Dockerfile copies single files, or to another place than its working directory ({BUILD})"
    return ""


def _instructions(docker: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", docker)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def _copies(docker: str) -> bool | None:
    """Whether the Dockerfile copies its directory to the working directory; None for other copies."""
    copied = [line.split()[1:] for line in _instructions(docker) if line.upper().startswith("COPY ")]
    if any(
        words[:1] not in (["."], ["./"]) or words[1:] not in (["."], ["./"], [PLACE], [f"{PLACE}/"])
        for words in copied
    ):
        return None
    return bool(copied)
