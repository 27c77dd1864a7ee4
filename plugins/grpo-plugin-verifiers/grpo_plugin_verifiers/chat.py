"""A harness of verifiers that plays tasksets: requests completions and runs the model's tool calls.

verifiers' own agents are programs that it starts for each rollout after downloading packages, and its default
agent gives the model a shell on this machine.  This one runs in the environment's process, needs no
downloads, and has only the taskset's tools.
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
"""Id of the harness, and the module name that verifiers imports it by."""

LIMITS = ("context_length_exceeded", "max_turns", "max_tool_calls")
"""Error codes for limits of the run, which end the conversation; it is still scored."""


def install() -> str:
    """Register the harness as a module, where verifiers finds it; return its name."""
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
            """Run the conversation until a reply without tool calls; ``data`` has the messages so far."""
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
    """Raised for a request without a completion."""


@define
class _Talk:
    """A conversation with the model, with the address and key from verifiers."""

    model: str
    endpoint: str
    key: str
    gate: str | None
    """Address that approves tool calls; None approves all."""
    http: Any = None
    tools: Any = ()
    dispatch: Any = None
    servers: Any = None

    async def connect(self, servers: Mapping[str, Any], stack: AsyncExitStack) -> None:
        """Connect to the tool servers, and list their tools."""
        http = importlib.import_module("httpx")
        # no certificates: the address is local, and reading them takes 20 ms
        client = http.AsyncClient(timeout=None, verify=False, trust_env=False)  # the rollout has a deadline
        self.http = await stack.enter_async_context(client)
        self.tools, self.dispatch, self.servers = await _mcp().connect_mcp({"mcpServers": servers}, stack)

    async def play(self, messages: list[dict[str, Any]]) -> None:
        """Run the conversation until a reply without tool calls, or a limit of the run."""
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
        """Return the result message of a tool call."""
        name, given = call["function"]["name"], call["function"]["arguments"] or "{}"
        try:
            arguments: Any = read_json(given, object)
        except ValueError:
            arguments = given
        if self.gate is not None:
            request = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            status, said = await self._post(self.gate, request)
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
    """Return verifiers' client of tool servers, which reconnects."""
    return imported("verifiers.v1.harnesses.utils.mcp")


def _bounded(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Shorten a result like verifiers, which keeps both ends of a long text."""
    cut: Mapping[str, Any] = imported("verifiers.v1.harnesses.utils.compaction").bound_tool_message(
        dict(message)
    )
    return cut
