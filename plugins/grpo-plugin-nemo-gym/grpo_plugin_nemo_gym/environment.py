"""The environment ``nemo_gym:URL``: a resources server of NeMo Gym provides tools and rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo_core as grpo
from grpo_core.kit import services, typed
from grpo_plugin_nemo_gym.client import Client, Refused, Session
from grpo_plugin_nemo_gym.responses import items_of, messages_of, response_of, tools_of

SPARE = 10.0
"""Margin of a call's time limit over its requests, in seconds."""
LONGEST_WAIT = 8.0
"""Longest wait before a retry in seconds."""
ABSENT = frozenset({502, 504})
"""Statuses of a proxy whose server is unavailable."""
RISK = "It sees all prompts and replies, and decides all rewards."

Row = Mapping[str, Any]


class NeMoGym(grpo.Environment):
    """Rows, tools and rewards of a resources server of NeMo Gym.

    Rows come from the server's files ``data/*.jsonl`` or from the task's data.  A server with
    ``/verify`` judges finished rollouts; one with ``/reset`` and ``/step`` answers each completion.  After an
    outage a rollout is unscored; it never counts as a reward of 0.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        path: file of rows for training, as in the server's directory ``data``.
        validation_path: file of rows for validation; without it a tenth of ``path`` is held out.
        answer: field of a row that receives a prompt's answer, for rows of the task's data.
        max_turns: largest number of completions of a rollout.
        reasoning_ends: text that ends reasoning; the text before it becomes a reasoning item of the response.
            Empty sends replies unchanged.
        remote: allow a server on another machine.
        key_variable: environment variable with a key, which is sent as a bearer token.
        timeout: seconds for each attempt of a request.
        retries: number of attempts after the first.
        requests_at_once: number of concurrent requests of each worker.
    """

    def __init__(
        self,
        url: str,
        *,
        path: Path | None = None,
        validation_path: Path | None = None,
        answer: str = "answer",
        max_turns: int = 16,
        reasoning_ends: str = "</think>",
        remote: bool = False,
        key_variable: str = "NEMO_GYM_KEY",
        timeout: float = 60.0,
        retries: int = 4,
        requests_at_once: int = 64,
    ) -> None:
        if timeout <= 0 or retries < 0 or requests_at_once < 1:
            raise grpo.ConfigError(
                f"nemo_gym: timeout = {timeout}, retries = {retries}, requests_at_once = {requests_at_once}; "
                "expected more than 0, at least 0, and at least 1"
            )
        self._url = grpo.checked_url(
            url, who="nemo_gym", remote=remote, risk=RISK, option="tasks.NAME.options.remote"
        )
        self._to_server = (self._url, os.environ.get(key_variable, ""), timeout, retries)
        self._client = Client(*self._to_server)
        self._steps = self._answers_steps()
        self._rows = _files(path, validation_path)
        self._answer, self._reasoning_ends = answer, reasoning_ends
        self._numbers = itertools.count()
        self.max_turns = max_turns
        self.concurrency = requests_at_once
        self.deadline = (retries + 1) * timeout + retries * LONGEST_WAIT + SPARE

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        if split not in self._rows:
            raise grpo.ConfigError(
                "nemo_gym: there are no rows; give the options path and validation_path (files as in the "
                "server's directory data), or data of the task (tasks.NAME.data)"
            )
        rows, prompts = self._rows[split], []
        for number, (row, begun) in enumerate(zip(rows, self._begun(rows), strict=True), 1):
            try:
                prompts.append(_prompt(row, begun))
            except (grpo.ConfigError, KeyError, ValueError) as error:
                raise grpo.ConfigError(f"{split} row {number}: {error}") from error
        return prompts

    async def prompt(  # type: ignore[override]
        self, row: Mapping[str, Any]
    ) -> grpo.Prompt:
        """Keep a row of NeMo Gym, or convert any other row to one."""
        named = ("prompt", "answer", "id")
        given = {name: value for name, value in row.items() if name not in named and value is not None}
        if row.get("answer") is not None:
            given[self._answer] = row["answer"]
        if "responses_create_params" not in given:
            given = {"responses_create_params": {"input": items_of(row["prompt"])}, **given}
        row = given
        return _prompt(row, await _begins(self._client, row) if self._steps else "")

    async def open(self, prompt: grpo.Prompt) -> Session:
        row, session = prompt.info["row"], Session()
        if self._steps:
            started = await self._client.post("/reset", row, session)
            if (observation := _observation(started)) != prompt.info["observation"]:
                raise grpo.PluginError(
                    f"nemo_gym: {self._url}/reset begins with {observation!r:.100} for a row for which it "
                    f"began with {prompt.info['observation']!r:.100}: the rollouts of a prompt begin alike"
                )
        else:
            started = await self._client.post("/seed_session", row, session)
        if isinstance(started.get("mcp"), Mapping):
            mcp = started["mcp"]
            session.mcp_path = "/" + str(mcp.get("url_path", "/mcp")).strip("/")
            headers = self._part(mcp.get("headers", {}), dict[str, str], "/seed_session")
            session.mcp_headers = headers
            listed = await self._rpc("tools/list", {}, session, "tools")
            session.tools += [self._mcp_tool(tool, session) for tool in listed]
        mine = {tool.name for tool in session.tools}
        declared = [each for each in tools_of(row["responses_create_params"]) if each["name"] not in mine]
        session.tools += [self._route(tool, session) for tool in declared]
        return session

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [await self._judged(episode) for episode in episodes]

    async def aclose(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------------------------ rewards

    async def _judged(self, episode: grpo.Episode) -> grpo.Feedback:
        row, session = episode.prompt.info["row"], episode.session
        params = row["responses_create_params"]
        said = episode.messages[len(episode.prompt.messages) :]
        if self._steps:
            start = max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=0)
            said = said[start:]
        response = response_of(
            said,
            params,
            id=f"resp_{next(self._numbers)}",
            truncated=episode.truncated,
            thought=self._reasoning_ends,
        )
        where = "/step" if self._steps else "/verify"
        try:
            answer = await self._client.post(where, {**row, "response": response}, session)
        except grpo.Unavailable as error:
            return grpo.Feedback(unavailable=error)
        except (grpo.SessionLost, Refused) as error:
            return grpo.Feedback(error=str(error))
        reward = answer.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            return grpo.Feedback(error=f"nemo_gym: {self._url}{where} gave the reward {reward!r:.100}")
        if not self._steps:
            return grpo.Feedback(reward=reward, metrics=_metrics(answer, row))
        try:
            return self._stepped(answer, reward)
        except Refused as error:
            return grpo.Feedback(error=str(error))

    def _stepped(self, answer: Mapping[str, Any], reward: float) -> grpo.Feedback:
        """Return the feedback of ``/step`` on a completion, including results of tools."""
        if answer.get("terminated") or answer.get("truncated"):
            return grpo.Feedback(reward=reward)
        info = answer.get("info")
        given = info.get("tool_outputs", []) if isinstance(info, Mapping) else []
        outputs = self._part(given, list[dict[str, Any]], "/step")
        answers = [
            {"role": "tool", "tool_call_id": str(each.get("call_id", "")), "content": str(each.get("output"))}
            for each in outputs
        ]
        observation = answer.get("observation")
        said = [{"role": "user", "content": str(observation)}] if observation else []
        return grpo.Feedback(done=False, reward=reward, messages=[*answers, *said])

    # ------------------------------------------------------------------------------ tools

    def _route(self, tool: Mapping[str, Any], session: Session) -> grpo.Tool:
        async def call(arguments: Mapping[str, Any]) -> str:
            # any other status is an answer, since the model may have misused the tool
            path = f"/{tool['name']}"
            answer = await self._client.answer(path, dict(arguments), session)
            if answer.status in ABSENT:
                raise grpo.SessionLost(str(answer.refused()))
            return answer.text

        return _tool(tool["name"], tool.get("description"), tool.get("parameters"), call)

    def _mcp_tool(self, tool: Mapping[str, Any], session: Session) -> grpo.Tool:
        async def call(arguments: Mapping[str, Any]) -> str:
            params = {"name": tool.get("name"), "arguments": dict(arguments)}
            content = await self._rpc("tools/call", params, session, "content")
            return "\n".join(str(part.get("text", "")) for part in content)

        return _tool(tool.get("name", ""), tool.get("description"), tool.get("inputSchema"), call)

    async def _rpc(
        self, method: str, params: Mapping[str, Any], session: Session, key: str
    ) -> list[dict[str, Any]]:
        """Call the server's stateless MCP endpoint; return a list from its result."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = {**session.mcp_headers, "Accept": "application/json, text/event-stream"}
        answer = await self._client.answer(session.mcp_path, body, session, headers)
        try:
            said = answer.json(dict) if answer.status == 200 else {}
            found: list[dict[str, Any]] = typed.checked(said["result"].get(key, []), list[dict[str, Any]])
            return found
        except (ValueError, KeyError, AttributeError, services.ServiceError) as error:
            raise grpo.SessionLost(f"{answer.refused()} ({method})") from error

    def _part(self, value: Any, kind: Any, path: str) -> Any:
        """Return a part of an answer.  Raises Refused if it has another type."""
        try:
            return typed.checked(value, kind)
        except ValueError as error:
            raise Refused(f"nemo_gym: POST {self._url}{path}: {error}") from error

    # ------------------------------------------------------------------------------ the start

    def _begun(self, rows: Sequence[Row]) -> list[str]:
        """Return the first messages of ``/reset`` for each row; empty for a server with ``/verify``."""
        if not self._steps:
            return [""] * len(rows)

        async def collected() -> list[str]:
            client, gate = Client(*self._to_server), asyncio.Semaphore(self.concurrency or 1)

            async def one(row: Row) -> str:
                async with gate:
                    return await _begins(client, row)

            try:
                return await asyncio.gather(*map(one, rows))
            finally:
                await client.aclose()

        return asyncio.run(collected())

    def _answers_steps(self) -> bool:
        """Whether the server has ``/step`` instead of ``/verify``.  Raises ConfigError."""
        try:
            described = grpo.fetch_json(f"{self._url}/openapi.json", headers=self._client.headers)
        except grpo.Unavailable as error:
            raise grpo.ConfigError(
                f"nemo_gym: no resources server answers at {self._url} ({error}). Start it (gym env start "
                "--resources-server NAME), or correct the address"
            ) from error
        paths = described.get("paths") if isinstance(described, Mapping) else None
        routes = set(paths) if isinstance(paths, Mapping) else set()
        if {"/reset", "/step"} <= routes:
            return True
        if not {"/seed_session", "/verify"} <= routes:
            raise grpo.ConfigError(
                f"nemo_gym: {self._url} has neither /seed_session and /verify nor /reset and /step, so it "
                f"is not a resources server; it has {', '.join(sorted(routes)[:8]) or 'no routes'}"
            )
        return False


def _tool(name: str, description: Any, parameters: Any, call: Any) -> grpo.Tool:
    given = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return grpo.Tool(name=str(name), description=str(description or ""), parameters=given, call=call)


def _metrics(answer: Mapping[str, Any], row: Row) -> dict[str, float]:
    """Return the numbers in an answer that were not part of the request."""
    return {
        name: value
        for name, value in answer.items()
        if name not in row and name != "reward" and isinstance(value, int | float)
    }


async def _begins(client: Client, row: Row) -> str:
    """Return the first messages of ``/reset``, from a temporary session."""
    return _observation(await client.post("/reset", row, Session()))


def _observation(started: Mapping[str, Any]) -> str:
    return str(started.get("observation") or "")


def _prompt(row: Row, observation: str = "") -> grpo.Prompt:
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise grpo.ConfigError(f"nemo_gym: responses_create_params is {params!r:.80}; expected an object")
    messages = messages_of(params)
    if observation:
        messages.append({"role": "user", "content": observation})
    return grpo.Prompt(messages=messages, info={"row": dict(row), "observation": observation})


def _files(path: Path | None, validation_path: Path | None) -> dict[str, list[Row]]:
    """Return the rows of the splits in files; a single file has every tenth row held out."""
    if path is None:
        if validation_path is not None:
            raise grpo.ConfigError("nemo_gym: validation_path needs path; give both")
        return {}
    rows = _read(path)
    if validation_path is not None:
        return {"train": rows, "validation": _read(validation_path)}
    held_out = rows[::10] if len(rows) > 1 else []
    return {"train": [row for i, row in enumerate(rows) if i % 10 or len(rows) == 1], "validation": held_out}


def _read(path: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is not an object")
                    rows.append({key: value for key, value in row.items() if key != "response"})
    except (OSError, ValueError, RecursionError) as error:
        raise grpo.ConfigError(f"nemo_gym: {str(path)!r} cannot be read: {error}") from error
    if not rows:
        raise grpo.ConfigError(f"nemo_gym: {str(path)!r} has no rows")
    return rows
