"""Loads a taskset of verifiers, refuses what a reply alone cannot be scored on, and scores replies."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
from collections.abc import Mapping
from typing import Any

import grpo_core as grpo

INSTALL = "pip install 'verifiers>=0.4,<0.5'"
ROLLOUT = "it needs a rollout by verifiers, and only replies are scored here"


class Tasks:
    """The tasks of a taskset.

    Args:
        name: its id: the name of an installed module, or one of verifiers' own.
        config: fields of its configuration.
        most: largest number of tasks that are taken, which an endless taskset needs.

    Raises ConfigError if it cannot be loaded, or if it is refused.
    """

    def __init__(self, name: str, config: Mapping[str, Any], most: int) -> None:
        self.name = name
        self._loaders = _imported("verifiers.v1.utils.loaders")
        self._trace = _imported("verifiers.v1.trace")
        self._graph = _imported("verifiers.v1.graph")
        self._types = _imported("verifiers.v1.types")
        self._agents = _imported("verifiers.v1")
        try:
            kind = self._loaders.taskset_config_type(name)
            taskset = self._loaders.load_taskset(kind.model_validate({**config, "id": name}))
            self.tasks = list(itertools.islice(taskset, most))
        except Exception as error:  # anything may go wrong in its module, or on the way to its data
            raise grpo.ConfigError(
                f"verifiers: the taskset {name!r} cannot be loaded: {type(error).__name__}: {error}"[:1000]
            ) from error
        if len(self.tasks) < 2:
            raise grpo.ConfigError(f"verifiers: {name} has {len(self.tasks)} tasks, expected at least 2")
        environment = self._loaders.environment_class(name)
        single = _imported("verifiers.v1.envs.single_agent").SingleAgentEnv
        if environment is not single:
            self._refuse(f"{ROLLOUT}: it has the environment {environment.__name__}")
        for task in self.tasks:
            self._check(task)

    def messages(self, task: Any) -> list[dict[str, Any]]:
        """Return the messages of a task's prompt."""
        system = task.data.system_prompt
        told = [{"role": "system", "content": system}] if system else []
        if isinstance(task.data.prompt, str):
            return [*told, {"role": "user", "content": task.data.prompt}]
        given = [{"role": each.role, "content": each.content} for each in task.data.prompt]
        if not all(isinstance(each["content"], str) for each in given):
            self._refuse("a prompt has more than text")
        return [*told, *given]

    def digest(self, task: Any) -> str:
        """Return a digest that is the same for the same task in every process."""
        # a task may define its key, to leave out what is another in each process, and that may be all of it
        plain = json.dumps([task.key, self.messages(task), str(getattr(task.data, "answer", ""))])
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    async def score(self, task: Any, reply: str) -> Any:
        """Return verifiers' trace of a reply, after the task has scored it."""
        trace = self._trace.Trace(
            task=self._trace.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            agent=self._agents.AgentInfo(config=self._agents.AgentConfig()),
        )
        thought, _, text = reply.rpartition("</think>")
        said = self._types.AssistantMessage(
            content=text.strip() if thought else reply,
            reasoning_content=thought.removeprefix("<think>").strip() or None,
        )
        kinds = {"system": self._types.SystemMessage, "assistant": self._types.AssistantMessage}
        for place, message in enumerate(self.messages(task)):
            kind = kinds.get(message["role"], self._types.UserMessage)
            trace.nodes.append(self._node(place, kind(content=message["content"])))
        trace.nodes.append(self._node(len(trace.nodes), said, sampled=True))
        trace.is_completed = trace.ok = True
        await task.score(trace)
        return trace

    def _node(self, place: int, message: Any, *, sampled: bool = False) -> Any:
        return self._graph.MessageNode(parent=place - 1 if place else None, message=message, sampled=sampled)

    def _check(self, task: Any) -> None:
        base = _imported("verifiers.v1.task").Task
        if task.NEEDS_CONTAINER:
            self._refuse(f"{ROLLOUT}: its tasks need a container")
        if task.data.prompt is None:
            self._refuse(f"{ROLLOUT}: a task has no prompt, and a simulated user begins")
        if task.toolsets(task.config):
            self._refuse(f"{ROLLOUT}: its tasks have tools")
        hooks = ("setup", "finalize")
        if prepared := [name for name in hooks if getattr(type(task), name) is not getattr(base, name)]:
            self._refuse(f"{ROLLOUT}: its tasks define {' and '.join(prepared)}")
        if wants := [each.__name__ for each in task.hooks("reward") if _needs_runtime(each)]:
            self._refuse(f"{ROLLOUT}: the rewards {', '.join(wants)} look into its runtime")
        if not task.hooks("reward") and not task.plugged_judges():
            self._refuse("its tasks have no reward")

    def _refuse(self, why: str) -> None:
        raise grpo.ConfigError(f"verifiers: the taskset {self.name!r} is refused: {why}")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise grpo.ConfigError(
            f"verifiers: {module} cannot be imported ({error}): {INSTALL}, in the Python that runs the "
            "environment (environment.python, if that is set)"
        ) from error


def _needs_runtime(function: Any) -> bool:
    """Return whether verifiers leaves a reward out if there is no runtime."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
