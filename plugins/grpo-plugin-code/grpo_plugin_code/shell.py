"""The environment ``code:shell``: a model runs commands, and tests judge the resulting files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

import grpo_core as grpo
from grpo_plugin_code.cases import Tested, parsed, stripped
from grpo_plugin_code.commands import Commands, Ran, packed, room_of
from grpo_plugin_code.sandbox import MIB, Limits

PLACE = "/work"
"""Working directory of commands."""
SHAPES = '{"run": "python main.py", "output": "4"} or {"file": "answer.txt", "content": "4"}'


class Shell:
    """The session of a rollout, whose public method is the model's tool."""

    def __init__(self, commands: Commands, tree: str, seconds: float = 0.0) -> None:
        self._commands, self._tree, self._number, self._seconds = commands, tree, 0, seconds
        self._state = ""

    async def run(self, command: str) -> str:
        """Run a command with bash, and return what it prints.

        The files of the first command's directory, the current directory, and exported variables last from
        command to command; processes and other variables do not. There is no network.

        Args:
            command: the command, which may have several lines.
        """
        ran = await self._commands.run(command, self._tree, state=self._state, seconds=self._seconds)
        self._tree, self._state, self._number = ran.tree, ran.state, self._number + 1
        return tool_result(ran)


class ShellTask(Tested):
    """Lets the model work with commands in a sandbox, and judges the files that it leaves.

    The model has the tool ``run``.  When it calls it no more, its files are tested in a new sandbox, in which
    none of its processes is left.  What a test prints is compared outside of the sandbox.  Metrics:
    ``passed`` (the share of tests) and ``commands``.

    Args:
        tests: field of the source's row with the tests.
        files: field of the row with the files at the beginning: an object of paths and texts.
        reward: "all" is 1 if all tests pass, else 0; "share" is the share of tests that pass.
        max_turns: largest number of completions.
        seconds: limit of wall time for each command and test.
        cpu_seconds: limit of each process's computing time.
        memory: limit of each process's address space in MiB.
        space: limit of the files in MiB.
        processes: limit of processes and threads.
        output: limit of what a command prints in KiB; the model sees no more of it.
        at_once: number of commands that run at once; 0 is one for each core.
        ready: number of sandboxes that are started ahead.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        files: str = "files",
        reward: Literal["all", "share"] = "all",
        max_turns: int = 12,
        seconds: float = 20.0,
        cpu_seconds: int = 10,
        memory: int = 1024,
        space: int = 16,
        processes: int = 64,
        output: int = 16,
        at_once: int = 0,
        ready: int = 2,
    ) -> None:
        limits = Limits(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            memory=memory,
            files=space,
            processes=processes,
            output=output,
        )
        cores = at_once or len(os.sched_getaffinity(0))
        self._commands = Commands(limits, directory=PLACE, at_once=cores, ready=ready)
        self._tests, self._files, self._share, self._space = tests, files, reward == "share", space
        self.max_turns = max_turns
        self.concurrency, self.deadline = 2 * cores, 120.0 + 20 * seconds

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        """Return the prompt of a row after validating its tests and files."""
        prompt = attrs.evolve(super().prompt(row), id=row["id"])
        self._parts(prompt)
        return prompt

    def solve(self, prompt: grpo.Prompt) -> str | None:
        return None

    def open(self, prompt: grpo.Prompt) -> Shell:
        _, files = self._parts(prompt)
        return Shell(self._commands, packed(files))

    async def aclose(self) -> None:
        await self._commands.aclose()

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        tests, _ = self._parts(episode.prompt)
        shell: Shell = episode.session
        passed = await asyncio.gather(*(self._passes(test, shell._tree) for test in tests))
        share = sum(passed) / len(passed)
        return grpo.Feedback(
            reward=share if self._share else float(share == 1.0),
            metrics={"passed": share, "commands": float(shell._number)},
        )

    async def _passes(self, test: Mapping[str, str], tree: str) -> bool:
        if "run" in test:
            ran = await self._commands.run(test["run"], tree, keeps=False)
            return ran.status == 0 and stripped(ran.output) == stripped(test["output"])
        path = f"{PLACE}/{test['file']}"
        ran = await self._commands.run("true", tree, keeps=False, reads=[path])
        return path in ran.files and stripped(ran.files[path]) == stripped(test["content"])

    def _parts(self, prompt: grpo.Prompt) -> tuple[Sequence[Mapping[str, str]], Mapping[str, str]]:
        """Return the tests and files of a prompt.  Raises PluginError if they are invalid."""
        tests = parsed(prompt.info.get(self._tests))
        files = parsed(prompt.info.get(self._files) or {})
        good = isinstance(tests, list | tuple) and tests and all(map(_is_test, tests))
        if not good:
            raise grpo.PluginError(
                f"code: prompt {prompt.id!r}: {self._tests} is {tests!r:.100}; expected a list of {SHAPES}"
            )
        if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
            raise grpo.PluginError(
                f"code: prompt {prompt.id!r}: {self._files} is {files!r:.100}; expected an object of paths "
                "and texts"
            )
        if (room := room_of(packed(files))) > self._space * MIB:
            raise grpo.PluginError(
                f"code: prompt {prompt.id!r}: {self._files} take {room / MIB:.1f} MiB, and the option space "
                f"allows {self._space}; raise space"
            )
        return tests, files


def tool_result(ran: Ran) -> str:
    """Return the tool result of a command, as the model reads it."""
    if ran.lost:
        return f"error: the command ended the sandbox ({ran.lost}); the files are as they were before it"
    if ran.full:
        return f"{ran.output}\nerror: the files have become too large; they are as they were before".strip()
    if ran.status is None:
        return f"{ran.output}\nerror: the command was ended: it took too long, or printed too much".strip()
    return f"{ran.output}\nexit status {ran.status}".strip() if ran.status else ran.output


def _is_test(test: Any) -> bool:
    return (
        isinstance(test, Mapping)
        and set(test) in ({"run", "output"}, {"file", "content"})
        and all(isinstance(text, str) for text in test.values())
    )
