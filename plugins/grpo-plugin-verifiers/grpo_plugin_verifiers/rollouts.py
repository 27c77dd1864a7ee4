"""Rollouts played by verifiers' environment, agents and tools, with the run's model.

verifiers requests completions at an address.  A rollout passes the address of the core's endpoint, with the
key of the rollout, so each token is recorded there, whatever the environment does with the replies.

verifiers gives each agent a separate address, where it intercepts requests and calls the model with a client
from a configuration.  Creating a client reads all certificates of the machine, which takes longer than a
short rollout, and clients are kept until the end of the run.  So one client is shared by all rollouts.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpo_core as grpo
from grpo_plugin_verifiers import chat
from grpo_plugin_verifiers.tasksets import Tasks, imported

CHATS = ("bash", "null")
"""Agents of verifiers that ``grpo_chat`` replaces; "bash" is only verifiers' default."""

STOPPING = 1.5
"""Seconds before a stopping server is killed.  verifiers waits 5 s, which is the core's limit for the whole
cleanup of a cancelled rollout or a closed environment."""


class Stage:
    """Plays the tasks of a taskset.

    Args:
        tasks: the taskset.
        config: fields of its configuration.
        environment: fields of the configuration of verifiers' environment, such as id and agents.

    Raises ConfigError if an agent, a tool or a task needs an unsupported feature.
    """

    def __init__(self, tasks: Tasks, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self._tasks = tasks
        self._loaders = imported("verifiers.v1.utils.loaders")
        self._agents = imported("verifiers.v1.configs.agent")
        self._clients = imported("verifiers.v1.clients")
        imported("verifiers.v1.runtimes.subprocess")._BACKGROUND_STOP_TIMEOUT = STOPPING
        self._env = self._made(config, environment)
        self._players = self._checked()
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Relay] | None = None
        self._end = asyncio.Event()

    async def play(self, task: Any, client: grpo.AgentClient) -> grpo.Feedback:
        """Play a rollout; return its reward.  Raises RuntimeError if verifiers fails."""
        relay = await self._begin()
        with relay.rollout(client) as endpoint:
            context = self._clients.ModelContext(model=client.model, client=endpoint)
            episode = await self._env.run_episode(task, context)
        if not self._env.complete(episode):
            raise RuntimeError(f"verifiers: {self._tasks.name}: {_why(episode)}")
        played = [trace for trace in episode.traces if trace.agent.name in self._players]
        if len(played) != 1 or not played[0].agent.trainable:
            return grpo.Feedback(
                error=f"verifiers: {self._tasks.name} let the model play {len(played)} times in one rollout; "
                "a rollout has one reward, so exactly one agent that is trained may play, once"
            )
        return self._tasks.feedback(played[0])

    async def aclose(self) -> None:
        """Stop the tool servers, including starting ones."""
        if self._serving is None:
            return
        self._end.set()
        if self._ready is not None and not self._ready.done():
            self._serving.cancel()
        await asyncio.wait([self._serving])

    # ------------------------------------------------------------------------------ serving

    async def _begin(self) -> Relay:
        """Wait until the taskset's servers run; after a failure the next rollout retries."""
        if self._serving is None or self._serving.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready), name="servers of verifiers")
        assert self._ready is not None
        await asyncio.wait([self._ready])  # not cancelled with this rollout, since others wait for it
        return self._ready.result()

    async def _serve(self, ready: asyncio.Future[Relay]) -> None:
        try:
            async with self._env.serving():
                secrets = [tools.state_secret for tools in self._env._shared_tools.values()]
                async with Relay(filter(None, secrets)) as relay:
                    self._env._interception = relay
                    ready.set_result(relay)
                    await self._end.wait()
        except (Exception, asyncio.CancelledError) as error:
            if ready.done():
                raise
            ended = isinstance(error, asyncio.CancelledError)
            reason = "its servers were ended while they started" if ended else error
            ready.set_exception(RuntimeError(f"verifiers: {self._tasks.name}: {reason}"[:1000]))
            ready.exception()  # avoids a warning if all waiting rollouts were cancelled

    # ------------------------------------------------------------------------------ checks

    def _made(self, config: Mapping[str, Any], environment: Mapping[str, Any]) -> Any:
        name, harness = self._tasks.name, chat.install()
        try:
            found = self._loaders.resolve_env_config({**environment, "taskset": {**config, "id": name}})
            default = self._loaders.default_harness_id(name)
            retries = imported("verifiers.v1.configs.retries").RetryConfig()
            local = imported("verifiers.v1.runtimes").SubprocessConfig()
            updates: dict[str, Any] = {"retries": retries}  # the run retries lost rollouts
            for role, agent in self._agents.agent_config_fields(found).items():
                update: dict[str, Any] = {"retries": retries}
                if "runtime" not in agent.model_fields_set:  # verifiers' default is a hosted model
                    update["runtime"] = local
                if (agent.harness is None and default in CHATS) or (
                    agent.harness is not None and agent.harness.id == "null"
                ):
                    given = {} if agent.harness is None else agent.harness.model_dump()
                    kind = self._loaders.harness_config_type(harness)
                    update["harness"] = kind.model_validate({**given, "id": harness})
                updates[role] = agent.model_copy(update=update)
            return self._loaders.load_environment(found.model_copy(update=updates))
        except grpo.ConfigError:
            raise
        except Exception as error:  # the module may raise any error
            reason = f"{type(error).__name__}: {error}"
            raise grpo.ConfigError(
                f"verifiers: the environment of {name!r} cannot be made: {reason}"[:1000]
            ) from error

    def _checked(self) -> set[str]:
        """Validate the agents; return the names of those with the trained model."""
        refuse, players = self._tasks.refuse, set()
        for role, agent in self._agents.agent_config_fields(self._env.config).items():
            harness = self._env._harnesses[role]
            if agent.runtime.type != "subprocess":
                refuse(f"its agent {role!r} runs in {agent.runtime.type}, and there are no containers here")
            if harness.NEEDS_CONTAINER or harness.EXECUTES_CODE:
                refuse(
                    f"its agent {role!r} is played by {harness.config.id!r}, which runs what the model "
                    "writes, here or in a container; only agents that talk and call tools are played here"
                )
            if agent.client is None and agent.model is not None:
                refuse(
                    f"its agent {role!r} names the model {agent.model!r} and no client, so that the model of "
                    f"the run would play it: give environment.{role}.client the address of that model"
                )
            if agent.client is not None and not isinstance(agent.client, self._clients.EvalClientConfig):
                refuse(f"its agent {role!r} has a client that does not use OpenAI's API")
            if agent.client is None:
                players.add(role)
        if len(players) != 1:
            named = ", ".join(sorted(players))
            refuse(
                f"the model of the run would play {len(players)} of its agents ({named}): a rollout has "
                "one reward; give all but one a model and a client (environment.NAME.client)"
            )
        self._check_tools(self._env.taskset.toolsets(self._env.taskset.config))
        for task in self._tasks.tasks:
            self._check(task)
        if type(self._env) is imported("verifiers.v1.envs.single_agent").SingleAgentEnv:
            self._tasks.check_rewards()
        return players

    def _check(self, task: Any) -> None:
        single = imported("verifiers.v1.envs.single_agent").SingleAgentEnv
        data, refuse = task.data, self._tasks.refuse
        if data.agent_user is not None or data.skills or "*" not in data.network_allow or data.network_block:
            refuse("its tasks need a container: they name a user, skills, or rules for the network")
        if type(self._env) is single and data.prompt is None:
            refuse("a task has no prompt, and it has no environment that begins the conversation")
        self._check_tools(task.toolsets(task.config))

    def _check_tools(self, toolsets: Any) -> None:
        for toolset in toolsets:
            if not toolset.config.url and toolset.config.runtime.type != "subprocess":
                self._tasks.refuse(
                    f"its tools {type(toolset).__name__} run in {toolset.config.runtime.type}, and there are "
                    "no containers here"
                )


class Relay:
    """The ``Interception`` of an environment of verifiers: each rollout calls the model with its own key.

    Args:
        secrets: keys of the shared tool servers.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._server = imported("verifiers.v1.interception").InterceptionServer(
            state_service_secrets=tuple(secrets)
        )
        self._stack = AsyncExitStack()
        self._http: Any = None
        self._clients: dict[str, Any] = {}
        """The client of each running rollout, by its placeholder configuration."""
        self._numbers = iter(range(2**63))

    async def __aenter__(self) -> Relay:
        http = importlib.import_module("httpx")
        client = http.AsyncClient(
            timeout=None,  # the rollout has a deadline
            limits=http.Limits(max_connections=None, max_keepalive_connections=100),
            verify=False,  # the run's endpoint is plain HTTP
            trust_env=False,
        )
        self._http = await self._stack.enter_async_context(client)
        await self._stack.enter_async_context(self._server)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._stack.aclose()

    @contextmanager
    def rollout(self, client: grpo.AgentClient) -> Any:
        """Yield the configuration with which the agents of a rollout call its model."""
        clients = imported("verifiers.v1.clients")
        name = f"GRPO_ROLLOUT_{next(self._numbers)}"  # unset: the key is in no environment
        config = clients.EvalClientConfig(base_url=client.base_url, api_key_var=name)
        self._clients[config.model_dump_json()] = self._client(client)
        try:
            yield config
        finally:
            self._server.clients.pop(config.model_dump_json(), None)
            del self._clients[config.model_dump_json()]

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        """Yield address and secrets of an agent, in the interface of verifiers."""
        config = session.ctx.client.model_dump_json()
        if config in self._clients:  # agents with other models keep verifiers' client
            self._server.clients[config] = self._clients[config]
        async with self._server.acquire(session) as slot:
            yield slot

    def _client(self, client: grpo.AgentClient) -> Any:
        base = imported("verifiers.v1.clients").EvalClient
        made = base.__new__(base)  # skip the constructor, which reads the certificates
        made.base_url, made.api_key, made.headers, made.client = (
            client.base_url,
            client.api_key,
            {},
            self._http,
        )
        return made


def _why(episode: Any) -> str:
    """Return the error of an episode."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}"[:1000] if errors else "the rollout did not end well"
