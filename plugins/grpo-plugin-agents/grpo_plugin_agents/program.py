"""The environments ``agent:COMMAND``: each rollout is played by a program."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_core import AgentClient, ConfigError, Environment, Episode, Feedback, PluginError, Prompt, errors
from grpo_core.kit import PluginHost, evaluate_of, read_json
from grpo_core.plugins.files import import_file
from grpo_core.processes import orphans

LAST_WORDS = 1 << 20
"""Number of bytes read from the end of a program's output."""
LONGEST_PROMPT = 100_000
"""Largest size of ``GRPO_PROMPT`` in bytes; Linux allows about 128,000 in a variable."""
PROGRAMS = 64
"""Default number of programs that run at once."""


class AgentProgram(Environment):
    """Plays each rollout with a program, or with the function ``run(prompt, client)`` of a Python file.

    A program finds the model by ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` (or ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY``) and its name by ``GRPO_MODEL``.  Its standard input is the text of the prompt's
    last message, and ``GRPO_PROMPT`` has all messages as JSON.  The last line of its standard output may be
    its result, such as ``{"reward": 1.0, "metrics": {"steps": 3}}``.

    Args:
        command: a Python file, or a program with its arguments.
        reward: name of the environment that judges the conversation, such as ``math:sort``; it also offers
            the prompts if the task has no data.  Without it, the agent's own result is the reward.
    """

    def __init__(self, command: str, *, reward: str = "") -> None:
        words = shlex.split(command)
        if not words:
            raise ConfigError("agent: the command is empty; write agent:./my_agent.py or agent:PROGRAM")
        self._command = command
        self._words = [sys.executable, *words] if words[0].endswith(".py") else words
        self._module = _module(words)
        judge = PluginHost.current().make("environment", reward) if reward else None
        self._judge: Any = judge or self._module
        self._evaluate = evaluate_of(self._judge)
        for name in ("success", "needs_group", "deadline"):
            if hasattr(self._judge, name):
                setattr(self, name, getattr(self._judge, name))
        at_once = getattr(self._module or self._judge, "concurrency", None)
        self.concurrency = at_once if self._module else at_once or PROGRAMS
        turns = getattr(self._module, "max_turns", None)  # the turns of the judge do not limit the agent
        if turns is not None:
            self.max_turns = turns

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return the prompts of the file, or of the environment that judges."""
        if not hasattr(self._judge, "prompts"):
            raise PluginError(
                f"agent {self._command!r} offers no prompts: name the data of its task (tasks.NAME.data), or "
                "set the option reward to the name of an environment"
            )
        prompts: Sequence[Prompt] = self._judge.prompts(split)
        return prompts

    def evaluate(self, episodes: Sequence[Episode]) -> Any:
        """Judge conversations with the file, or with the environment of the option ``reward``."""
        if self._evaluate is None:
            raise PluginError(
                f"agent {self._command!r} returned no reward; return a number, or set the option reward to "
                "the name of an environment that judges"
            )
        return self._evaluate(episodes)

    def solve(self, prompt: Prompt) -> str | None:
        """Return the judge's solution of the prompt."""
        solve = getattr(self._judge, "solve", super().solve)
        reply: str | None = solve(prompt)
        return reply

    async def run(self, prompt: Prompt, client: AgentClient) -> float | Feedback | None:
        """Play a rollout.  Raises RuntimeError if the program fails."""
        if self._module is not None:
            result: float | Feedback | None = await self._module.run(prompt, client)
            return result
        output = await self._output(prompt, client)
        found = _result(output)
        if found is None and self._evaluate is None:
            last = (output.strip().splitlines() or [""])[-1]
            raise RuntimeError(
                f"{self._command!r} ended with the line {errors.shortened(last, 200)!r}; expected "
                '{"reward": NUMBER}, or the option reward'
            )
        return found

    async def _output(self, prompt: Prompt, client: AgentClient) -> str:
        """Run the program until it ends or this is cancelled; then kill all its descendants."""
        messages = json.dumps([dict(message) for message in prompt.messages], ensure_ascii=False)
        given = {"GRPO_PROMPT": messages} if len(messages.encode()) <= LONGEST_PROMPT else {}
        mark = secrets.token_hex(16)
        variables = {**client.env_vars(), "GRPO_MODEL": client.model, orphans.PROGRAM: mark, **given}
        # files instead of pipes: a process that the program leaves behind would keep a pipe open
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            last = prompt.messages[-1].get("content")
            stdin.write((last if isinstance(last, str) else json.dumps(last, ensure_ascii=False)).encode())
            stdin.seek(0)
            # the program stays in this process group, so that killing the group ends it, too
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=stdin, stdout=stdout, env={**os.environ, **variables}
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                await asyncio.to_thread(orphans.end_marked, mark, name=orphans.PROGRAM)
                await process.wait()
            stdout.seek(max(0, stdout.seek(0, os.SEEK_END) - LAST_WORDS))
            output = stdout.read()
        if process.returncode:
            raise RuntimeError(f"{self._command!r} ended with exit status {process.returncode}")
        return output.decode(errors="replace")


def _module(words: Sequence[str]) -> ModuleType | None:
    """Return the module of a Python file that defines ``async def run``; None for any other command."""
    path = Path(os.path.expanduser(words[0]))
    if len(words) > 1 or path.suffix != ".py":
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"agent: {path} cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise PluginError(f"agent: {path}, line {error.lineno}: {error.msg}") from error
    if not any(isinstance(node, ast.AsyncFunctionDef) and node.name == "run" for node in tree.body):
        return None
    module: ModuleType = import_file(path.resolve())
    return module


def _result(output: str) -> Feedback | None:
    """Return the result in the last line of a program's output, or None if it has none."""
    lines = output.strip().splitlines()
    try:
        found = read_json(lines[-1], dict) if lines else {}
    except ValueError:
        return None
    if "reward" not in found:
        return None
    return Feedback(reward=found["reward"], metrics=found.get("metrics") or {})
