"""The agent that plays tasksets, as a harness of verifiers: it asks, and runs the tools that the model calls.

verifiers' own agents are programs that it starts for each rollout, with packages that it downloads first, and
the one that it takes by default gives the model a shell on this machine.  This one runs in the process of the
environment, needs nothing else, and has no tools but those of the taskset.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from attrs import define

from grpo_core.kit import read_json
from grpo_plugin_verifiers.tasksets import imported

NAME = "grpo_chat"
"""Id of the harness, and name of the module in which verifiers finds it."""

LIMITS = ("context_length_exceeded", "max_turns", "max_tool_calls")
"""Codes of the endpoint for requests beyond a limit of the run: the talk ends there, and is scored."""


def install() -> str:
    """Make the harness known to verifiers, which looks for a module of its name; return the name."""
    if NAME not in sys.modules:
        module = ModuleType(NAME, __doc__)
        vars(module).update(GrpoChat=_harness(), __all__=["GrpoChat"])
        sys.modules[NAME] = module
    return NAME


def _harness() -> Any:
    base = imported("verifiers.v1.harness").Harness[imported("verifiers.v1.configs.harness").HarnessConfig]

    class GrpoChat(base):  # type: ignore[misc, valid-type]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            """Talk until a reply calls no tool; ``data`` has the conversation so far."""
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            elif prompt is not None:
                wire = imported("verifiers.v1.dialects.chat").message_to_wire
                messages += [wire(message) for message in prompt]
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            async with AsyncExitStack() as stack:
                talk = _Talk(ctx.model, endpoint, secret, tool_interception_url)
                await talk.connect(servers, stack)
                await talk.play(messages)
            return imported("verifiers.v1.runtimes").ProgramResult(exit_code=0, stdout="", stderr="")

    return GrpoChat


class TalkError(RuntimeError):
    """Raised for a request that got no completion."""


@define
class _Talk:
    """A conversation with the model, at the address and with the key that verifiers gives."""

    model: str
    endpoint: str
    key: str
    gate: str | None
    """Address that decides whether a tool call may run; None if each may."""
    http: Any = None
    tools: Any = ()
    dispatch: Any = None
    servers: Any = None

    async def connect(self, servers: Mapping[str, Any], stack: AsyncExitStack) -> None:
        """Connect to the servers of tools, and ask which tools they have."""
        http = importlib.import_module("httpx")
        # no certificates: the address is that of this machine, and reading them takes 20 ms
        client = http.AsyncClient(timeout=None, verify=False, trust_env=False)  # the rollout has a deadline
        self.http = await stack.enter_async_context(client)
        self.tools, self.dispatch, self.servers = await _mcp().connect_mcp({"mcpServers": servers}, stack)

    async def play(self, messages: list[dict[str, Any]]) -> None:
        """Talk until a reply calls no tool, or a limit of the run is reached."""
        while True:
            body = {
                "model": self.model,
                "messages": messages,
                **({"tools": self.tools} if self.tools else {}),
            }
            status, said = await self._post(f"{self.endpoint}/chat/completions", body)
            if status == 400 and any(code in said for code in LIMITS):
                return
            if status != 200:
                raise TalkError(f"no completion: status {status}: {said[:1000]}")
            message = {k: v for k, v in json.loads(said)["choices"][0]["message"].items() if v is not None}
            messages.append(message)
            if not message.get("tool_calls"):
                return
            messages += [await self._answer(call) for call in message["tool_calls"]]

    async def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message that answers a call."""
        name, given = call["function"]["name"], call["function"]["arguments"] or "{}"
        try:
            arguments: Any = read_json(given, object)
        except ValueError:
            arguments = given
        if self.gate is not None:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            status, said = await self._post(self.gate, asked)
            verdict: Any = json.loads(said) if status == 200 else {"action": "stop", "reason": said[:1000]}
            if verdict["action"] == "stop":
                raise TalkError(f"the call of {name} was stopped: {verdict['reason']}")
            if verdict["action"] == "deny":
                return dict(_bounded(verdict["message"]))
        if not isinstance(arguments, dict):
            content: Any = "error: the arguments of a call are a JSON object; send the call again"
        elif name not in self.dispatch:
            content = f"error: there is no tool {name!r}"
        else:
            content = await _mcp().call_mcp(self.servers, self.dispatch, name, arguments)
        return dict(_bounded({"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}))

    async def _post(self, url: str, body: Any) -> tuple[int, str]:
        reply = await self.http.post(url, json=body, headers={"Authorization": f"Bearer {self.key}"})
        return reply.status_code, reply.text


def _mcp() -> Any:
    """Return verifiers' client of tool servers, which connects again if a server has gone."""
    return imported("verifiers.v1.harnesses.utils.mcp")


def _bounded(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer as verifiers shortens it: of a very long one, both ends stay."""
    cut: Mapping[str, Any] = imported("verifiers.v1.harnesses.utils.compaction").bound_tool_message(
        dict(message)
    )
    return cut
