"""Runs a sample through its task's solvers with given replies in place of a model.

A solver awaits completions in the middle of its code, and cannot be suspended between the turns of a rollout.
So each turn runs it from the start with the replies so far.  Solvers must be deterministic; different
messages for the same replies are an error.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

import grpo_core as grpo

MODEL = "none/none"
"""Active model of a task: Inspect's model that refuses calls."""


@frozen(kw_only=True)
class Reply:
    """A completion of the trained model."""

    text: str
    truncated: bool = False


@frozen(kw_only=True)
class Played:
    """The state of a sample after the given replies."""

    state: Any
    """Inspect's ``TaskState``."""
    waits: bool
    """Whether a solver awaits another reply."""
    messages: tuple[dict[str, Any], ...] = field(default=())
    """The conversation to continue, if it waits."""


class _Waits(BaseException):
    """Raised where a solver awaits the next reply; a BaseException, so that solvers do not catch it."""


class Player:
    """Runs the samples of a task.

    Args:
        name: name of the task, for messages.
        task: an ``inspect_ai.Task``.
        grader: name of the model that scorers and solvers get from Inspect.
    """

    def __init__(self, name: str, task: Any, grader: str) -> None:
        self._name, self._task = name, task
        self._parts = _Parts()
        self._model = self._parts.model.get_model(grader or MODEL)
        self.scorers: list[str] = []
        """Names of the scorers of the task."""
        for scorer in task.scorer:
            self.scorers.append(self._parts.scorer.unique_scorer_name(scorer, self.scorers))

    async def play(self, sample: Any, replies: Sequence[Reply]) -> Played:
        """Run a sample until it needs a further reply, or ends.

        Raises PluginError if a solver needs an unsupported feature.
        """
        state = self._begun(sample)
        left = list(replies)
        conversation: list[dict[str, Any]] = []

        async def generate(state: Any, tool_calls: str = "loop", **_: Any) -> Any:
            if state.tools:
                raise grpo.PluginError(
                    f"inspect: {self._name} is refused: its solvers give the model tools, which is not "
                    "supported"
                )
            if not left:
                conversation.extend(self._plain(state))
                raise _Waits
            state.output = self._output(left.pop(0))
            state.messages.append(state.output.message)
            return state

        try:
            for step in self._steps():
                state = await step(state, generate)
                if state.completed:
                    break
        except _Waits:
            return Played(state=state, waits=True, messages=tuple(conversation))
        return Played(state=state, waits=False)

    async def score(self, state: Any) -> dict[str, Any]:
        """Return the score of each scorer by name; None for a missing score."""
        state.completed = True
        return {
            name: await scorer(state, state.target)
            for name, scorer in zip(self.scorers, self._task.scorer, strict=True)
        }

    def _begun(self, sample: Any) -> Any:
        """Return Inspect's initial state of a sample, and set the context variables that solvers read."""
        parts, sample = self._parts, copy.deepcopy(sample)
        state = parts.solver.TaskState(
            sample_id=sample.id or 0,
            epoch=1,
            model=parts.model.ModelName(self._model),
            input=sample.input,
            target=parts.scorers.Target(sample.target),
            choices=sample.choices,
            messages=parts.util.sample_messages(sample),
            metadata=sample.metadata or {},
        )
        parts.context.init_task_context(self._model, self._task.model_roles, self._task.config)
        parts.state.set_sample_state(state)
        parts.store.init_subtask_store(state.store)
        parts.transcript.init_transcript(parts.transcript.Transcript())
        parts.scoring.init_scoring_context(self._task.scorer, state.target)
        return state

    def _steps(self) -> list[Any]:
        given = self._task.setup
        setup = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        return [*setup, self._task.solver]

    def _output(self, reply: Reply) -> Any:
        """Convert a reply to Inspect's model output, with separate reasoning."""
        text, thought = self._parts.reasoning.parse_content_with_reasoning(reply.text)
        model = self._parts.model
        content: Any = reply.text
        if thought is not None:
            content = [model.ContentReasoning(reasoning=thought.reasoning), model.ContentText(text=text)]
        stop = "max_tokens" if reply.truncated else "stop"
        return model.ModelOutput.from_content(str(self._model), content, stop)

    def _plain(self, state: Any) -> list[dict[str, Any]]:
        """Convert the messages of a state to plain data.  Raises PluginError for content other than text."""
        system = self._task.config.system_message
        messages = [{"role": "system", "content": system}] if system else []
        for message in state.messages:
            if not isinstance(message.content, str) and any(
                part.type not in ("text", "reasoning") for part in message.content
            ):
                raise grpo.PluginError(
                    f"inspect: {self._name} is refused: sample {state.sample_id!r} has more than text"
                )
            if message.role == "tool" or getattr(message, "tool_calls", None):
                raise grpo.PluginError(
                    f"inspect: {self._name} is refused: sample {state.sample_id!r} has calls of tools"
                )
            messages.append({"role": message.role, "content": message.text})
        return messages


class _Parts:
    """The modules of Inspect that run and score a sample; some are private."""

    def __init__(self) -> None:
        load = importlib.import_module
        self.model = load("inspect_ai.model")
        self.solver = load("inspect_ai.solver")
        self.scorers = load("inspect_ai.scorer")
        self.util = load("inspect_ai._eval.task.util")
        self.context = load("inspect_ai._eval.context")
        self.state = load("inspect_ai.solver._task_state")
        self.store = load("inspect_ai.util._store")
        self.transcript = load("inspect_ai.log._transcript")
        self.scoring = load("inspect_ai.scorer._score")
        self.scorer = load("inspect_ai.scorer._scorer")
        self.reasoning = load("inspect_ai.model._reasoning")
        load("inspect_ai.util._concurrency").init_concurrency()
