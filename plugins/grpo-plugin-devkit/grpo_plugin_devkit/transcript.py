"""Prints a rollout while it runs: each message, tool call and reward, as the environment sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from grpo_core import AgentClient, Episode, Message, Prompt, Rollout
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import SessionStart
from grpo_core.kit import Judgement
from grpo_core.processes.secrets import inert

STYLES = {"user": "cyan", "system": "magenta", "tool": "yellow", "assistant": "green"}


class Transcript:
    """Prints the events of a rollout.

    Args:
        console: console to print to.
        echo: whether to print replies; typed replies are visible already.
    """

    def __init__(self, console: Console, *, echo: bool) -> None:
        self._console, self._echo = console, echo
        self._begun = ""
        """The text of the reply being sampled, as far as it is printed."""

    def line(self, text: str, style: str = "") -> None:
        """Print a line that is not part of the conversation."""
        self._console.print(Text(inert(text), style=style))

    def message(self, message: Message) -> None:
        """Print a message with its tool calls."""
        role = str(message.get("role"))
        name = f" {message['name']}" if role == "tool" and message.get("name") else ""
        self._console.print(Text(inert(f"{role}{name}"), style=f"bold {STYLES.get(role, '')}".strip()))
        if content := message.get("content"):
            self._block(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
        for call in message.get("tool_calls") or ():
            self._block(f"calls {_spelled(call)}", "yellow")

    def grow(self, text: str, end: str = "") -> None:
        """Print what a reply has more than before, while it is sampled."""
        more = text[len(self._begun) :].replace("\n", "\n  ")
        if not self._begun:
            self._console.print(Text("assistant", style=f"bold {STYLES['assistant']}"))
            more = f"  {more}"
        self._console.print(Text(inert(more)), end=end, soft_wrap=True)
        self._begun = text

    def reply(self, message: Message) -> None:
        """Print a reply, or the rest of it; for typed replies, only the parsed tool calls."""
        said, begun = str(message.get("content")), self._begun
        if begun:  # thoughts and calls are no content: then the whole message follows
            self.grow(said if said.startswith(begun) else begun, end="\n")
            self._begun = ""
        if self._echo and not (begun and said.startswith(begun)):
            self.message(message)
        else:
            for call in message.get("tool_calls") or ():
                self._block(f"calls {_spelled(call)}", "yellow")

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Print the tools that the model may call."""
        if tools:
            self._console.print(Text("tools", style="bold yellow"))
        for tool in tools:
            function = tool.get("function", tool)
            given = function.get("parameters", {}).get("properties", {})
            named = ", ".join(f"{key}: {value.get('type', 'any')}" for key, value in given.items())
            about = " ".join(str(function.get("description", "")).split())
            self._block(f"{function.get('name')}({named})  {about}".rstrip())

    def feedback(self, feedback: Judgement) -> None:
        """Print the feedback on a turn that does not end the rollout."""
        if feedback.reward:
            metrics = "".join(f", {name} {value:.4g}" for name, value in feedback.metrics.items())
            self.line(f"reward of this turn: {feedback.reward:.4g}{metrics}", "dim")
        for message in feedback.messages:
            self.message(message)

    def end(self, rollout: Rollout) -> None:
        """Print the reward with its parts, and the reason for the end."""
        reward = "unscored" if rollout.reward is None else f"reward {rollout.reward:.4g}"
        success = {True: ", a success", False: ", no success", None: ""}[rollout.success]
        good = rollout.success if rollout.success is not None else bool(rollout.reward)
        self.line(f"{reward}{success}", f"bold {'green' if good else 'red'}")
        for name, value in rollout.metrics.items():
            self.line(f"  {name}: {value:.4g}")
        for name, text in rollout.left_out.items():
            self.line(f"  {name}: {text}, left out: it is not a finite number", "yellow")
        if len(rollout.turn_rewards) > 1 and any(rollout.turn_rewards):
            self.line("  by turn: " + ", ".join(f"{reward:.4g}" for reward in rollout.turn_rewards))
        if rollout.answer is not None:
            self.line(f"  answer that was read: {rollout.answer}")
        if rollout.error is not None:
            self.line(f"  {rollout.error}", "red")
        calls = f", {_counted(rollout.tool_calls, 'tool call')}" if rollout.tool_calls else ""
        ended = _ENDS.get(rollout.finish_reason, rollout.finish_reason)
        self.line(f"  {_counted(rollout.turns, 'turn')}{calls}, {ended}", "dim")

    def _block(self, text: str, style: str = "") -> None:
        self._console.print(Padding(Text(inert(text), style=style), (0, 0, 0, 2), expand=False))


_ENDS = {
    "stop": "ended by the environment",
    "length": "cut off at max_tokens",
    "tokens": "cut off at the largest number of tokens",
    "turns": "ended at the largest number of turns",
    "tool_calls": "ended at the largest number of tool calls",
    "deadline": "ended at its deadline",
    "": "not played",
}


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _spelled(call: Mapping[str, Any]) -> str:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not function.get("name"):
        return f"(this cannot be read as a call) {arguments}"
    if isinstance(arguments, Mapping):
        named = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
        return f"{function['name']}({named})"
    return f"{function['name']}({arguments})"


class ShownEnvironment(EnvironmentClient):
    """An environment that prints its rollouts while they run, one at a time."""

    def __init__(self, environment: EnvironmentClient, transcript: Transcript) -> None:
        self._environment, self._transcript = environment, transcript
        self.about, self.player = environment.about, environment.player
        self._prompt = Prompt(messages="")

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        opened = await self._environment.open(prompts)
        for prompt, start in zip(prompts.values(), opened, strict=True):
            self._prompt = prompt
            for message in prompt.messages:
                self._transcript.message(message)
            self._transcript.tools(start.tools)
        return opened

    async def solve(self, messages: Sequence[Message]) -> str | None:
        """Return the solution of the prompt that is played, after these messages."""
        solving: Any = self._environment
        found: list[str | None] = await solving.solve([evolve(self._prompt, messages=tuple(messages))])
        return found[0]

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        for episode in episodes:
            if self.player is None:
                self._transcript.reply(episode.messages[-1])
        feedback = await self._environment.evaluate(episodes)
        for each in feedback:
            if not each.done:
                self._transcript.feedback(each)
        return feedback

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        return await self._environment.run(session, prompt, client)

    async def close(self, sessions: Sequence[str]) -> None:
        await self._environment.close(sessions)
