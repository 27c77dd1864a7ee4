"""Plays a sample through its task's solvers, with given replies in the place of the model's.

A solver is a program that asks for completions in its middle, and cannot be kept between the turns of a
rollout.  So each turn plays it from its beginning, with the replies so far: solvers make the same messages
from the same replies, and one that does not is found by that.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

import grpo_core as grpo

MODEL = "none/none"
"""The model that a task sees if it asks for one by itself: Inspect's model that refuses to be called."""


@frozen(kw_only=True)
class Reply:
    """A completion of the model that is trained."""

    text: str
    truncated: bool = False


@frozen(kw_only=True)
class Played:
    """A sample, as far as it came with the replies that there are."""

    state: Any
    """Inspect's ``TaskState``."""
    waits: bool
    """Whether a solver asks for another reply."""
    messages: tuple[dict[str, Any], ...] = field(default=())
    """The conversation that it asks to go on with, if it waits."""


class _Waits(BaseException):
    """Leaves the solvers where the next reply is wanted; no solver catches it with ``except Exception``."""


class Player:
    """Plays the samples of a task.

    Args:
        name: of the task, for errors.
        task: an ``inspect_ai.Task``.
        grader: name of the model that scorers and solvers get when they ask Inspect for one.
    """

    def __init__(self, name: str, task: Any, grader: str) -> None:
        self._name, self._task = name, task
        self._parts = _Parts()
        self._model = self._parts.model.get_model(grader or MODEL)
        self.scorers: list[str] = []
        """Names of the task's scorers."""
        for scorer in task.scorer:
            self.scorers.append(self._parts.scorer.unique_scorer_name(scorer, self.scorers))

    async def play(self, sample: Any, replies: Sequence[Reply]) -> Played:
        """Play a sample as far as the replies reach.

        Raises PluginError if its solvers want what a rollout here cannot give.
        """
        state = self._begun(sample)
        left = list(replies)
        asked: list[dict[str, Any]] = []

        async def generate(state: Any, tool_calls: str = "loop", **_: Any) -> Any:
            if state.tools:
                raise grpo.PluginError(
                    f"inspect: {self._name} is refused: its solvers give the model tools, which is not "
                    "supported"
                )
            if not left:
                asked.extend(self._plain(state))
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
            return Played(state=state, waits=True, messages=tuple(asked))
        return Played(state=state, waits=False)

    async def score(self, state: Any) -> dict[str, Any]:
        """Return the score of each scorer of the task by its name; None where it gives no score."""
        state.completed = True
        return {
            name: await scorer(state, state.target)
            for name, scorer in zip(self.scorers, self._task.scorer, strict=True)
        }

    def _begun(self, sample: Any) -> Any:
        """Return the state that Inspect begins a sample with, and set the context that its parts look at."""
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
        """Return a reply as Inspect's providers of open models do, with the thinking apart."""
        text, thought = self._parts.reasoning.parse_content_with_reasoning(reply.text)
        model = self._parts.model
        content: Any = reply.text
        if thought is not None:
            content = [model.ContentReasoning(reasoning=thought.reasoning), model.ContentText(text=text)]
        stop = "max_tokens" if reply.truncated else "stop"
        return model.ModelOutput.from_content(str(self._model), content, stop)

    def _plain(self, state: Any) -> list[dict[str, Any]]:
        """Return the messages of a state as plain data.  Raises PluginError for one that is not a text."""
        system = self._task.config.system_message
        told = [{"role": "system", "content": system}] if system else []
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
            told.append({"role": message.role, "content": message.text})
        return told


class _Parts:
    """The modules of Inspect that play and score a sample; some of them are not public."""

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
