"""The contract of engines that return text.  Its requests cost money at a paid service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpo_core import Completion, EngineSetup, GenerationRequest, Message, TextEngine, Tool
from grpo_core.engines.text import PlayingText, TextRenderer
from grpo_plugin_devkit.contracts import Contract, Noted

_TOOL = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    call=lambda arguments: arguments["a"] + arguments["b"],
).schema
_CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


class TextEngineContract(Contract):
    """The contract of engines with ``output="text"``.

    Args:
        make: factory of the engine.
    """

    essential = ("it can be made",)

    def __init__(self, make: Callable[[EngineSetup], TextEngine]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._renderer = TextRenderer()

    def __exit__(self, *raised: Any) -> None:
        self._runner.close()

    def it_can_be_made(self) -> None:
        async def story() -> PlayingText:
            return PlayingText(self._make(EngineSetup(model="")), self._renderer)

        self._engine = self._runner.run(story())

    def it_replies(self) -> None:
        completion = self._runner.run(self._reply({"role": "user", "content": "Say hello."}))
        (text,) = self._renderer.texts([completion.token_ids.tolist()])
        assert text, "chat() returned a reply without content to a plain question"

    def it_continues_after_the_result_of_a_tool(self) -> None:
        conversation: list[Message] = [
            {"role": "user", "content": "Add 1 and 2."},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "add"},
        ]
        self._runner.run(self._reply(*conversation, tools=True))

    def a_reply_of_one_token_is_cut_off(self) -> None:
        message: Message = {"role": "user", "content": "Count to one hundred."}
        completion = self._runner.run(self._reply(message, max_tokens=1))
        if completion.finish_reason != "length":
            raise Noted("its finish_reason should be 'length'")

    def it_replies_to_eight_conversations_at_once(self) -> None:
        async def story() -> None:
            questions = [f"Say {number}." for number in range(8)]
            await asyncio.gather(*(self._reply({"role": "user", "content": each}) for each in questions))

        self._runner.run(story())

    def it_can_be_closed(self) -> None:
        self._runner.run(self._engine.aclose())

    async def _reply(self, *messages: Message, tools: bool = False, max_tokens: int = 64) -> Completion:
        """Return the completion of a conversation."""
        ids = self._renderer.prompt_ids(messages, [_TOOL] if tools else [])
        (completion,) = await self._engine.generate(
            [GenerationRequest(prompt_ids=ids, max_tokens=max_tokens)]
        )
        return completion
