"""Loads tasksets of verifiers, checks whether single replies can be scored, and scores replies."""

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


class Tasks:
    """The tasks of a taskset.

    Args:
        name: id of the taskset: the name of an installed module, or a taskset of verifiers.
        config: fields of its configuration.
        most: largest number of tasks, which an endless taskset needs.

    Raises ConfigError if it cannot be loaded or played.
    """

    def __init__(self, name: str, config: Mapping[str, Any], most: int) -> None:
        self.name = name
        self._loaders = imported("verifiers.v1.utils.loaders")
        self._trace = imported("verifiers.v1.trace")
        self._graph = imported("verifiers.v1.graph")
        self._types = imported("verifiers.v1.types")
        self._agents = imported("verifiers.v1")
        try:
            kind = self._loaders.taskset_config_type(name)
            self.taskset = self._loaders.load_taskset(kind.model_validate({**config, "id": name}))
            self.tasks = list(itertools.islice(self.taskset, most))
        except Exception as error:  # the module, or loading its data, may raise any error
            raise grpo.ConfigError(
                f"verifiers: the taskset {name!r} cannot be loaded: {type(error).__name__}: {error}"[:1000]
            ) from error
        if len(self.tasks) < 2:
            raise grpo.ConfigError(f"verifiers: {name} has {len(self.tasks)} tasks, expected at least 2")
        for task in self.tasks:
            if task.NEEDS_CONTAINER or task.data.image is not None:
                self.refuse("its tasks need a container, and there is none here")
            if not isinstance(task.data.prompt, str | None):
                self.messages(task)

    def needs_rollout(self) -> str:
        """Return the reason why a single reply cannot be scored, or an empty text."""
        environment = self._loaders.environment_class(self.name)
        if environment is not imported("verifiers.v1.envs.single_agent").SingleAgentEnv:
            return f"it has the environment {environment.__name__}"
        if self.taskset.toolsets(self.taskset.config):
            return "it has tools"
        return next(filter(None, map(self._needs_rollout, self.tasks)), "")

    def check_rewards(self) -> None:
        """Raise ConfigError if a task has no rewards."""
        if not all(task.hooks("reward") or task.plugged_judges() for task in self.tasks):
            self.refuse("its tasks have no reward")

    def messages(self, task: Any) -> list[dict[str, Any]]:
        """Return the messages of a task's prompt; its index if a user simulator starts the conversation."""
        system = task.data.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        if task.data.prompt is None:
            return [*messages, {"role": "user", "content": f"task {task.data.idx} of {self.name}"}]
        if isinstance(task.data.prompt, str):
            return [*messages, {"role": "user", "content": task.data.prompt}]
        given = [{"role": each.role, "content": each.content} for each in task.data.prompt]
        if not all(isinstance(each["content"], str) for each in given):
            self.refuse("a prompt has more than text")
        return [*messages, *given]

    def digest(self, task: Any) -> str:
        """Return a digest of a task that is the same in every process."""
        # a task may define a key without fields that differ between processes
        plain = json.dumps([task.key, self.messages(task), str(getattr(task.data, "answer", ""))])
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    async def score(self, task: Any, reply: str) -> Any:
        """Score a reply; return verifiers' trace."""
        trace = self._trace.Trace(
            task=self._trace.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            agent=self._agents.AgentInfo(config=self._agents.AgentConfig()),
        )
        thought, said = grpo.split_thought(reply)
        message = self._types.AssistantMessage(content=said, reasoning_content=thought or None)
        kinds = {"system": self._types.SystemMessage, "assistant": self._types.AssistantMessage}
        for index, each in enumerate(self.messages(task)):
            kind = kinds.get(each["role"], self._types.UserMessage)
            trace.nodes.append(self._node(index, kind(content=each["content"])))
        trace.nodes.append(self._node(len(trace.nodes), message, sampled=True))
        trace.is_completed = trace.ok = True
        await task.score(trace)
        return trace

    def feedback(self, trace: Any) -> grpo.Feedback:
        """Convert a scored trace to feedback: the reward, with its parts and metrics as metrics."""
        missing = sorted(name for name, reward in trace.rewards.items() if reward is None)
        if missing or not trace.rewards:
            return grpo.Feedback(error=f"verifiers: {self.name} gave no reward {', '.join(missing)}".strip())
        parts = {name: reward.score for name, reward in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return grpo.Feedback(reward=trace.reward, metrics={**metrics, **parts})

    def refuse(self, why: str) -> None:
        """Raise ConfigError with a reason for refusing this taskset."""
        raise grpo.ConfigError(f"verifiers: the taskset {self.name!r} is refused: {why}")

    def _node(self, index: int, message: Any, *, sampled: bool = False) -> Any:
        return self._graph.MessageNode(parent=index - 1 if index else None, message=message, sampled=sampled)

    def _needs_rollout(self, task: Any) -> str:
        base = imported("verifiers.v1.task").Task
        if task.data.prompt is None:
            return "a task has no prompt, and a simulated user begins"
        given = () if isinstance(task.data.prompt, str) else task.data.prompt
        if any(each.role == "tool" or getattr(each, "tool_calls", None) for each in given):
            return "the prompt of a task has calls of tools"
        if task.toolsets(task.config):
            return "its tasks have tools"
        hooks = ("setup", "finalize")
        if prepared := [name for name in hooks if getattr(type(task), name) is not getattr(base, name)]:
            return f"its tasks define {' and '.join(prepared)}"
        if wants := [each.__name__ for each in task.hooks("reward") if _needs_runtime(each)]:
            return f"the rewards {', '.join(wants)} look into its runtime"
        if imported("verifiers.v1.utils.decorators").discover_decorated(task, "intercept"):
            return "its tasks change what the model reads or says"
        return ""


def imported(module: str) -> Any:
    """Import a module of verifiers.  Raises ConfigError with installation advice if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise grpo.ConfigError(
            f"verifiers: {module} cannot be imported ({error}): {INSTALL}, in the Python that runs the "
            "environment (environment.python, if that is set)"
        ) from error


def _needs_runtime(function: Any) -> bool:
    """Whether verifiers skips a reward without a runtime."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
