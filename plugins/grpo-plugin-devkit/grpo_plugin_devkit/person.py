"""A person as an engine: replies are typed, or are lines of standard input."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TextIO

from grpo_core import GenerationRequest, Message, Reply, TextEngine
from grpo_core.processes import interrupts
from grpo_core.text.response_formats import assistant_message

HELP = """\
  a reply is a line; a line that ends with \\ continues in the next one
  /call add {"a": 1}   calls a tool; /call add a=1 does the same
  /solve               says what solve() of the environment returns
  /quit                ends; a reply that begins with / begins with //"""


class InputEnded(Exception):  # noqa: N818 - nothing is wrong
    """Raised at the end of the input."""


class Person(TextEngine):
    """A ``TextEngine`` that reads each reply from a terminal or from any stream of lines.

    Args:
        source: standard input.
        say: prints a line to the person.
    """

    solve: Callable[[Sequence[Message]], Awaitable[str | None]]
    """Returns the environment's solution at this place of the conversation, or None."""

    def __init__(self, source: TextIO, say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self.typed = source.isatty()
        """Whether the source is a terminal, which echoes the input."""
        if self.typed:
            import readline  # noqa: F401 - gives input() a line that can be edited

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: GenerationRequest
    ) -> Reply:
        while (reply := self.reply(tools=bool(tools))) is None:
            if (reply := await self.solve(messages)) is not None:
                break
            self._say("  the environment knows no solution here")
        return Reply(message=assistant_message(reply, tools=bool(tools)), completion_tokens=len(reply))

    async def aclose(self) -> None:
        return None

    def reply(self, *, tools: bool) -> str | None:
        """Return the next reply, or None for the solution.  Raises InputEnded."""
        while True:
            line = self._lines()
            command, _, rest = line.partition(" ")
            match command:
                case "/quit":
                    raise InputEnded("/quit")
                case "/help":
                    self._say(HELP)
                case "/solve":
                    return None
                case "/call" if not tools:
                    self._say("  this environment has no tools")
                case "/call":
                    if (call := _call(rest)) is not None:
                        return call
                    self._say('  expected /call NAME {"key": value} or /call NAME key=value')
                case _ if command.startswith("/") and not command.startswith("//"):
                    self._say(f"  there is no command {command}; /help lists them")
                case _:
                    return line[1:] if line.startswith("//") else line

    def _lines(self) -> str:
        said: list[str] = []
        while (line := self._line("you> " if not said else "...> ")).endswith("\\"):
            said.append(line[:-1])
        return "\n".join([*said, line])

    def _line(self, prompt: str) -> str:
        if not self.typed:
            line = self._source.readline()
            if not line:
                raise InputEnded("the input has ended")
            return line.rstrip("\r\n")
        with interrupts.received(_interrupt):  # input() blocks the event loop
            try:
                return input(prompt)
            except EOFError:
                raise InputEnded("the input has ended") from None


def _interrupt(name: str) -> None:
    raise KeyboardInterrupt(name)


def _call(text: str) -> str | None:
    """Format a tool call like a model's, from a name and arguments; None if it cannot be parsed."""
    name, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    arguments: Mapping[str, Any] = {}
    try:
        if rest.startswith("{"):
            arguments = json.loads(rest)
        elif rest:
            pairs = [word.partition("=") for word in rest.split()]
            if not all(equals for _, equals, _ in pairs):
                return None
            arguments = {key: _value(value) for key, _, value in pairs}
    except ValueError:
        return None
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" if name else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
