"""The environment ``openenv:URL``: each rollout is a session at a server of OpenEnv, over one WebSocket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

import grpo_core as grpo
from grpo_core.kit import services, typed
from grpo_plugin_openenv.actions import Actions
from grpo_plugin_openenv.connection import FULL, LARGEST, RAISED, WRONG_ACTION, Connection, Rejected

SPARE = 10.0
"""Margin of a call's time limit over its messages, in seconds."""
LONGEST_WAIT = 8.0
"""Longest wait before a retry in seconds."""
RISK = "It sees all replies, and decides all rewards."
STARTS_AT_ONCE = 8
"""Number of concurrent sessions for loading prompts; a server may have a small capacity."""
HIDDEN = ("done", "reward", "metadata")
"""Fields of an observation that the model does not see."""


@frozen
class Schema:
    """The relevant part of the JSON schema of actions."""

    properties: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    required: Sequence[str] = ()


@define(eq=False)
class Session:
    """The session of a rollout; public methods would be tools, so it has none.

    Attributes:
        rewarded: whether a step had a reward.
    """

    connection: Connection
    rewarded: bool = False


class OpenEnv(grpo.Environment):
    """An environment whose rollouts are sessions of an OpenEnv server.

    A rollout starts with ``reset``, each reply is a ``step``, and the rewards of the steps are added.  A
    prompt is a seed and shows the observation of ``reset(seed=...)``.  With the data of a task, a prompt is a
    row, whose columns are the arguments of ``reset``.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        instruction: text before the first observation.
        action: field of an action that receives the reply; empty uses the only required text field, or
            parses actions as JSON.
        observation: field of an observation to show; empty shows the only field, or all.
        reset: further arguments of each ``reset``.
        max_turns: largest number of steps of a rollout.
        prompts: number of seeds for training; validation has a fourth as many others.
        seed: the first seed.
        wrong_action: reward of a rejected action; the model gets the error and continues.
        raises_are_wrong: treat any exception of the environment in a step as a wrong action.  The server
            reports wrong moves and outages in the same way; False leaves such rollouts unscored.
        remote: allow a server on another machine.
        key_variable: environment variable with a key, which is sent as a bearer token.
        timeout: seconds for each answer.
        retries: number of attempts to connect after the first.
        requests_at_once: number of concurrent messages of each worker.
    """

    def __init__(
        self,
        url: str,
        *,
        instruction: str = "",
        action: str = "",
        observation: str = "",
        reset: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        prompts: int = 200,
        seed: int = 0,
        wrong_action: float = 0.0,
        raises_are_wrong: bool = False,
        remote: bool = False,
        key_variable: str = "OPENENV_KEY",
        timeout: float = 60.0,
        retries: int = 4,
        requests_at_once: int = 256,
    ) -> None:
        if timeout <= 0 or retries < 0 or requests_at_once < 1 or prompts < 1:
            raise grpo.ConfigError(
                f"openenv: timeout = {timeout}, retries = {retries}, requests_at_once = {requests_at_once}, "
                f"prompts = {prompts}; expected more than 0, at least 0, at least 1, and at least 1"
            )
        self._url = grpo.checked_url(
            url, who="openenv", remote=remote, risk=RISK, option="tasks.NAME.options.remote"
        )
        key = os.environ.get(key_variable, "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout, self._retries = timeout, retries
        self._actions = Actions(self._schema(), action)
        self._instruction = "\n".join(filter(None, [instruction, self._actions.instruction()]))
        self._observation, self._reset, self._wrong = observation, dict(reset or {}), wrong_action
        self._blamed = {WRONG_ACTION, RAISED} if raises_are_wrong else {WRONG_ACTION}
        self._prompts, self._seed = prompts, seed
        self._http = self._client()
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self.max_turns, self.combine = max_turns, {"wrong_action": "mean"}
        self.concurrency = requests_at_once
        self.deadline = (retries + 1) * timeout + retries * LONGEST_WAIT + SPARE

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        number = self._prompts if split == "train" else max(1, self._prompts // 4)
        first = self._seed + (0 if split == "train" else self._prompts)
        resets = [{**self._reset, "seed": seed} for seed in range(first, first + number)]
        return [
            self._prompt(reset, said)
            for reset, said in zip(resets, asyncio.run(self._begun(resets)), strict=True)
        ]

    async def prompt(  # type: ignore[override]
        self, row: Mapping[str, Any]
    ) -> grpo.Prompt:
        """Use the row's columns as arguments of ``reset``, and append its observation to the prompt."""
        named = ("prompt", "answer", "id")
        columns = {name: value for name, value in row.items() if name not in named and value is not None}
        reset = {**self._reset, **columns}
        async with self._starting:
            said = await self._begins(self._http, reset)
        if "prompt" not in row:
            return self._prompt(reset, said)
        *before, last = (dict(message) for message in row["prompt"])
        last["content"] = "\n".join(filter(None, [str(last.get("content") or ""), said]))
        info = {"reset": reset, "observation": said}
        return grpo.Prompt(messages=(*before, last), answer=row.get("answer"), info=info)

    def solve(self, prompt: grpo.Prompt) -> str | None:
        return None

    async def open(self, prompt: grpo.Prompt) -> Session:
        connection, said = await self._connected(self._http, prompt.info["reset"])
        if said != prompt.info["observation"]:
            await connection.close()
            raise grpo.PluginError(
                f"openenv: reset({prompt.info['reset']}) begins with {said!r:.100}, and began with "
                f"{prompt.info['observation']!r:.100} before: the rollouts of a prompt begin alike. If the "
                "environment takes no seed, name the field to show in options.observation"
            )
        return Session(connection)

    async def close(self, session: Session) -> None:
        await session.connection.close()

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [await self._stepped(episode) for episode in episodes]

    async def aclose(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------------------ steps

    async def _stepped(self, episode: grpo.Episode) -> grpo.Feedback:
        session: Session = episode.session
        try:
            answer = await session.connection.ask("step", self._actions.of(episode.reply))
        except grpo.Unavailable as error:
            return grpo.Feedback(error=str(error))
        except (Rejected, ValueError) as error:
            if isinstance(error, Rejected) and error.code not in self._blamed:
                return grpo.Feedback(error=f"openenv: step: {error}")
            return grpo.Feedback(
                done=False, reward=self._wrong, messages=f"error: {error}", metrics={"wrong_action": 1.0}
            )
        reward = answer.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float | None):
            return grpo.Feedback(error=f"openenv: step gave the reward {reward!r:.100}")
        session.rewarded |= reward is not None
        metrics = {"wrong_action": 0.0}
        if not answer.get("done"):
            return grpo.Feedback(
                done=False, reward=reward, messages=self._shown(answer) or "ok", metrics=metrics
            )
        if not session.rewarded:
            return grpo.Feedback(
                error="openenv: the episode ended, and no step gave a reward", metrics=metrics
            )
        return grpo.Feedback(reward=reward or 0.0, metrics=metrics)  # a last step may have none

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Format an observation for the model."""
        observation = answer.get("observation")
        if not isinstance(observation, Mapping):
            return "" if observation is None else str(observation)
        fields = {name: value for name, value in observation.items() if name not in HIDDEN}
        if self._observation:
            if self._observation not in fields:
                near = grpo.did_you_mean(self._observation, set(fields))
                raise grpo.ConfigError(
                    f"openenv: an observation has no field {self._observation!r}.{near} Its fields: "
                    f"{', '.join(fields)}"
                )
            fields = {self._observation: fields[self._observation]}
        if len(fields) == 1:
            (value,) = fields.values()
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(fields, ensure_ascii=False) if fields else ""

    # ------------------------------------------------------------------------------ the start

    def _prompt(self, reset: Mapping[str, Any], said: str) -> grpo.Prompt:
        text = "\n\n".join(filter(None, [self._instruction, said]))
        return grpo.Prompt(messages=text or "Begin.", info={"reset": dict(reset), "observation": said})

    async def _begun(self, resets: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the initial observation for each of these arguments."""
        gate = asyncio.Semaphore(STARTS_AT_ONCE)
        client = self._client()

        async def one(reset: Mapping[str, Any]) -> str:
            async with gate:
                return await self._begins(client, reset)

        try:
            return await asyncio.gather(*map(one, resets))
        finally:
            await client.aclose()

    async def _begins(self, client: services.Client, reset: Mapping[str, Any]) -> str:
        connection, said = await self._connected(client, reset)
        await connection.close()
        return said

    async def _connected(self, client: services.Client, reset: Mapping[str, Any]) -> tuple[Connection, str]:
        """Open and reset a session; return it and its observation.  Raises Unavailable, PluginError."""
        try:
            return await services.retried(lambda: self._once(client, reset), self._retries)
        except services.ServiceError as error:
            raise grpo.PluginError(str(error)) from error

    async def _once(self, client: services.Client, reset: Mapping[str, Any]) -> tuple[Connection, str]:
        socket = await client.connect("/ws")
        connection = Connection(socket, self._timeout)
        try:
            return connection, self._shown(await connection.ask("reset", reset))
        except BaseException as error:
            await connection.close()
            if isinstance(error, Rejected) and error.code == FULL:
                raise services.NotSent(
                    f"{error}; max_concurrent_envs of the server is its number of sessions"
                ) from error
            if isinstance(error, Rejected):
                raise grpo.PluginError(f"openenv: reset({dict(reset)}): {error}") from error
            raise

    def _client(self) -> services.Client:
        return services.Client(
            self._url, who="openenv", headers=self._headers, seconds=self._timeout, largest=LARGEST
        )

    def _schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of actions.  Raises ConfigError if no server of OpenEnv answers."""
        try:
            described = grpo.fetch_json(f"{self._url}/schema", headers=self._headers)
            action: Mapping[str, Any] = described["action"]
            typed.checked(action, Schema)
        except grpo.Unavailable as error:
            raise grpo.ConfigError(
                f"openenv: no server answers at {self._url} ({error}). Start it (python -m server.app in the "
                "environment's directory), or correct the address"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise grpo.ConfigError(
                f"openenv: {self._url}/schema names no actions, so it is not a server of OpenEnv"
            ) from error
        return action
