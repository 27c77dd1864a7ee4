"""The child process's side of an environment: its results, tools and sessions.

Sessions exist only here; the core knows their names.  Async code of the environment always runs in the same
event loop, and other code runs outside of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import math
import pickle
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from grpo_core.environments.feedback import as_feedback, is_message
from grpo_core.environments.tools import TEMPLATES, Toolbox, message, methods
from grpo_core.errors import PluginError, describe
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.selection import ALL_PLUGINS, PluginSelection
from grpo_core.protocols import Environment
from grpo_core.records import Episode, Feedback, Prompt, SessionStart
from grpo_core.unicode import lone_surrogate, unreadable, well_formed

MOST_PROMPTS = 100_000
"""Limit for a generator of prompts: all are drawn at once, because an epoch needs a length."""

UNREADABLE = "a prompt cannot be sent to the trainer's process; put plain data into answer and info"


@attrs.frozen
class Session:
    """The result of ``open``, and the tools of its rollout."""

    value: Any
    tools: Toolbox


class EnvironmentHost:
    """Calls the environment for the core.

    Args:
        task: name of the task, which is set on its prompts.
        spec: name of the environment.
        options: options of its factory.
        plugins: selection of the plugins that are loaded to find it.
        concurrency: see ``config.EnvironmentConfig``.
    """

    def __init__(
        self,
        task: str,
        spec: str,
        options: Mapping[str, Any],
        plugins: PluginSelection = ALL_PLUGINS,
        concurrency: int = 0,
    ) -> None:
        host = PluginHost.of(plugins)
        who = f"task {task!r}: {host.find('environment', spec)}"
        self._adopt(task, who, host.make("environment", spec, **options), concurrency)

    @classmethod
    def around(cls, environment: Any, *, task: str = "task", concurrency: int = 0) -> EnvironmentHost:
        """Make a host in this process for an existing environment, for tests of environments."""
        host = cls.__new__(cls)
        host._adopt(task, f"environment {type(environment).__name__}", environment, concurrency)
        return host

    def _adopt(self, task: str, who: str, environment: Any, concurrency: int) -> None:
        self._task, self._who, self._environment, self._concurrency = task, who, environment, concurrency
        for method in ("prompts", "evaluate"):
            if not callable(getattr(environment, method, None)):
                raise PluginError(f"{who}: {type(environment).__name__} has no method {method!r}")
        self._max_turns = self._number_of_turns()
        self._tools = self._toolbox(list(getattr(environment, "tools", ())))
        self._needs_group = bool(getattr(environment, "needs_group", False))
        self._success = self._threshold()
        self._sessions: dict[str, Session] = {}
        self._runner = asyncio.Runner()
        if self._has_sessions:  # takes half a second, which should not count for the first rollout
            importlib.import_module(TEMPLATES)

    def description(self) -> dict[str, Any]:
        return {
            "who": self._who,
            "max_turns": self._max_turns,
            "needs_group": self._needs_group,
            "success": self._success,
            "sessions": self._has_sessions,
            "tools": self._tools.schemas,
        }

    def prompts(self, split: str) -> bytes:
        """Return the checked prompts of a split, pickled here so that an error names its prompt."""
        try:
            given = self._environment.prompts(split)
            prompts = (
                [given[index] for index in range(len(given))]
                if hasattr(given, "__len__")
                else list(itertools.islice(given, MOST_PROMPTS + 1))
            )
        except Exception as error:
            raise PluginError(f"{self._who}: prompts({split!r}) raised {describe(error)}") from error
        where = f"{self._who}: prompts({split!r})"
        if not hasattr(given, "__len__") and len(prompts) > MOST_PROMPTS:
            raise PluginError(
                f"{where}: yields more than {MOST_PROMPTS:,} prompts; return a sequence, which may be longer "
                "and compute its items on access, or end the iteration"
            )
        complete = [self._complete(prompt, index, where) for index, prompt in enumerate(prompts)]
        seen: set[str] = set()
        for prompt in complete:
            if prompt.id in seen:
                raise PluginError(f"{where}: two prompts have the id {prompt.id!r}; ids are unique in a task")
            seen.add(prompt.id)
        try:
            return pickle.dumps(complete, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise PluginError(f"{where}: {UNREADABLE}: {describe(error)}") from error

    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return a reply with a full reward for each prompt, or None where it is not known."""
        solve = getattr(self._environment, "solve", None)
        try:
            return [well_formed(solve(prompt)) for prompt in prompts] if solve else [None] * len(prompts)
        except Exception as error:
            raise PluginError(f"{self._who}: solve raised {describe(error)}") from error

    # ------------------------------------------------------------------------------ sessions

    def open(self, prompts: Sequence[tuple[str, Prompt]]) -> list[SessionStart]:
        """Open a session under each name; a failed one reports its error and is not closed."""
        values = self._each(self._environment.open, [prompt for _, prompt in prompts])
        return [self._opened(name, value) for (name, _), value in zip(prompts, values, strict=True)]

    def close(self, names: Sequence[str]) -> None:
        """Close the sessions that are open.  Errors of ``close`` are printed; the session is gone anyway."""
        sessions = [self._sessions.pop(name) for name in names if name in self._sessions]
        close = getattr(self._environment, "close", None)
        for result in self._each(close, [session.value for session in sessions]) if close else ():
            if isinstance(result, BaseException):
                traceback.print_exception(result)

    def end(self) -> None:
        """Close all open sessions; no call follows."""
        self.close(list(self._sessions))
        self._runner.close()

    @property
    def _has_sessions(self) -> bool:
        method = getattr(type(self._environment), "open", None) or getattr(self._environment, "open", None)
        return method not in (None, Environment.open)

    def _opened(self, name: str, value: Any) -> SessionStart:
        if isinstance(value, BaseException):
            return SessionStart(error=f"open raised {describe(value)}")
        self._sessions[name] = Session(value, self._tools)
        try:
            tools = self._toolbox([*getattr(self._environment, "tools", ()), *methods(value)])
        except PluginError as error:
            self.close([name])
            return SessionStart(error=str(error))
        self._sessions[name] = Session(value, tools)
        return SessionStart(tools=tools.schemas)

    def _toolbox(self, tools: Sequence[Callable[..., Any]]) -> Toolbox:
        if tools and self._max_turns == 1:
            raise PluginError(
                f"{self._who}: {type(self._environment).__name__} has tools, but max_turns is 1: a model "
                "that calls one needs a turn to answer; set max_turns to the completions of a rollout at most"
            )
        return Toolbox(tools, self._who)

    # ------------------------------------------------------------------------------ evaluation

    def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """Return feedback for each episode.  Raises PluginError for an invalid result.

        The environment evaluates before any tool runs: if it raises, the episodes are tried again, and no
        tool may run twice.
        """
        found = [self._with_session(episode) for episode in episodes]
        calling = [isinstance(e, Episode) and _calls(e) != () for e in found]
        judged = [e for e, calls in zip(found, calling, strict=True) if isinstance(e, Episode) and not calls]
        called = [e for e, calls in zip(found, calling, strict=True) if isinstance(e, Episode) and calls]
        judgements = iter(self._evaluated(judged))
        answers = iter(self._answer(called))
        return [
            e if isinstance(e, Feedback) else next(answers if calls else judgements)
            for e, calls in zip(found, calling, strict=True)
        ]

    def _with_session(self, episode: Episode) -> Episode | Feedback:
        if not self._has_sessions:
            return attrs.evolve(episode, session=None)
        session = self._sessions.get(str(episode.session))
        if session is None:
            return Feedback(error="its session ended with the process that held it", lost=True)
        return attrs.evolve(episode, session=session)

    def _evaluated(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """Return the environment's feedback."""
        if not episodes:
            return []
        if self._has_sessions:
            episodes = [attrs.evolve(episode, session=episode.session.value) for episode in episodes]
        evaluate = self._environment.evaluate
        if not (self._concurrency and inspect.iscoroutinefunction(evaluate)):
            return self._results(self._each(evaluate, [list(episodes)])[0], len(episodes))
        parts = units(episodes, whole_groups=self._needs_group)
        judged: list[Feedback] = []
        for part, results in zip(parts, self._each(evaluate, parts), strict=True):
            try:
                judged += self._results(results, len(part))
            except Exception as error:
                traceback.print_exception(error)
                judged += [Feedback(error=describe(error))] * len(part)
        return judged

    def _results(self, results: Any, expected: int) -> list[Feedback]:
        if isinstance(results, Exception):
            raise results
        if isinstance(results, BaseException):  # sys.exit(), or a library's timeout
            raise PluginError(f"{self._who}: evaluate raised {describe(results)}") from results
        return as_feedback(results, expected, self._who)

    def _answer(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """Return the tools' answers; the calls of one message run one after the other."""
        answers: list[list[Any]] = [[] for _ in episodes]
        for place in range(max((len(_calls(episode)) for episode in episodes), default=0)):
            here = [i for i, episode in enumerate(episodes) if len(_calls(episode)) > place]
            calls = [_calls(episodes[i])[place] for i in here]
            boxes = [self._tools if (s := episodes[i].session) is None else s.tools for i in here]
            pairs = list(zip(boxes, calls, strict=True))
            for i, call, result in zip(here, calls, self._each(_run, pairs), strict=True):
                answers[i].append(message(call, result))
        return [Feedback(done=False, messages=answer) for answer in answers]

    # ------------------------------------------------------------------------------ calling

    def _each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Return the result or error of ``function`` for each item; awaitables are awaited together."""
        results = [_attempt(function, item) for item in items]
        waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            try:
                awaited = self._runner.run(_all([results[i] for i in waiting], self._concurrency))
            except BaseException as error:  # it escaped from the loop and left tasks behind, which would
                with contextlib.suppress(BaseException):  # raise it again
                    self._runner.close()
                self._runner = asyncio.Runner()
                awaited = [error] * len(waiting)
            for i, result in zip(waiting, awaited, strict=True):
                results[i] = result
        return results

    def _number_of_turns(self) -> int:
        turns = getattr(self._environment, "max_turns", Environment.max_turns)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise PluginError(f"{self._who}: max_turns is {turns!r}, expected a whole number of at least 1")
        return turns

    def _threshold(self) -> float | None:
        success = getattr(self._environment, "success", Environment.success)
        if success is None:
            return None
        if isinstance(success, bool) or not isinstance(success, int | float) or not math.isfinite(success):
            raise PluginError(f"{self._who}: success is {success!r}, expected a finite number or None")
        return float(success)

    def _complete(self, prompt: Any, index: int, where: str) -> Prompt:
        if not isinstance(prompt, Prompt):
            raise PluginError(f"{where}[{index}] is {type(prompt).__name__}, expected grpo_core.Prompt")
        if not prompt.messages or not all(is_message(message) for message in prompt.messages):
            raise PluginError(
                f"{where}[{index}]: messages is {prompt.messages!r}, expected text or at least one message "
                "such as {'role': 'user', 'content': '...'}"
            )
        if found := lone_surrogate([prompt.id, prompt.messages]):
            raise PluginError(f"{where}: prompt {prompt.id or str(index)!r} {unreadable(found)}")
        return attrs.evolve(prompt, id=prompt.id or str(index), environment=self._task)


def units(episodes: Sequence[Episode], *, whole_groups: bool) -> list[list[Episode]]:
    """Split episodes into parts that may be evaluated separately: single episodes, or whole groups."""
    if not whole_groups:
        return [[episode] for episode in episodes]
    return [list(run) for _, run in itertools.groupby(episodes, key=lambda episode: episode.group)]


def _calls(episode: Episode) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of an episode that wait for an answer."""
    calls = episode.messages[-1].get("tool_calls") if episode.messages else None
    return tuple(calls or ()) if episode.finish_reason == "stop" else ()


def _run(pair: tuple[Toolbox, Mapping[str, Any]]) -> Any:
    tools, call = pair
    return tools.call(call)


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except BaseException as error:  # sys.exit(), or a library's timeout: no reason to lose the process
        return error


async def _all(awaitables: Sequence[Awaitable[Any]], at_once: int) -> list[Any]:
    gate = asyncio.Semaphore(at_once or len(awaitables))

    async def one(awaitable: Awaitable[Any]) -> Any:
        async with gate:
            try:
                return await awaitable
            except BaseException as error:
                return error

    return await asyncio.gather(*map(one, awaitables))
