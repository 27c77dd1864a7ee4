"""Environments in their own child processes.

    EnvironmentProcess (here)   ------>   EnvironmentHost (child, main thread)   ------>   plugin code

Plugin code that evaluates may hang, crash, or call C code that holds the interpreter: its process is killed
at the deadline and started anew.  A batch that raises, dies or overruns is tried again one episode at a
time (one group at a time if the environment compares the rollouts of a group), so that only the culprit
loses its verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import pickle
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from grpo_core.config import EnvironmentConfig
from grpo_core.errors import ChildDied, DeadlineExceeded, GrpoError, PluginError
from grpo_core.plugins import PluginHost
from grpo_core.processes import Child, RemoteTraceback
from grpo_core.protocols import Environment
from grpo_core.records import Episode, Prompt, Verdict

LARGEST_REWARD = 1e300
"""A reward of this magnitude or more is refused: squared in an advantage it would overflow."""

MOST_PROMPTS = 100_000
"""Of an environment that yields its prompts: they are all drawn once, since an epoch has to have a length."""

GIVE_UP_AFTER = 20
"""Failures in a row after which the environment, not an episode, is to blame."""

# ---------------------------------------------------------------------------------- the child's side


class EnvironmentHost:
    """Makes the environment by name and holds it to its contract.  Lives in the child process."""

    def __init__(
        self,
        task: str,
        spec: str,
        options: Mapping[str, Any],
        allow: Sequence[str] | None = None,
        block: Sequence[str] = (),
    ) -> None:
        host = PluginHost.discover(allow, block)
        self._task = task
        self._who = f"task {task!r}: {host.find('environment', spec)}"
        self._environment = host.make("environment", spec, **options)
        self._runner = asyncio.Runner()
        for method in ("prompts", "evaluate"):
            if not callable(getattr(self._environment, method, None)):
                raise PluginError(f"{self._who}: {type(self._environment).__name__} has no method {method!r}")
        self._refuse_what_is_not_called()

    def description(self) -> dict[str, Any]:
        turns = getattr(self._environment, "max_turns", Environment.max_turns)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise PluginError(f"{self._who}: max_turns is {turns!r}, expected a whole number of at least 1")
        return {
            "who": self._who,
            "max_turns": turns,
            "needs_group": bool(getattr(self._environment, "needs_group", False)),
        }

    def prompts(self, split: str) -> bytes:
        """The prompts of a split, complete and checked; pickled here, so that an error has a name."""
        try:
            given = self._environment.prompts(split)
            prompts = (
                [given[index] for index in range(len(given))]
                if hasattr(given, "__len__")
                else list(itertools.islice(given, MOST_PROMPTS + 1))
            )
        except Exception as error:
            raise PluginError(f"{self._who}: prompts({split!r}) raised {_named(error)}") from error
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
            raise PluginError(f"{where}: {_UNREADABLE}: {_named(error)}") from error

    def evaluate(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict for each episode.  Raises PluginError for a result that is none."""
        try:
            results = self._environment.evaluate(list(episodes))
            if inspect.isawaitable(results):
                results = self._wait_for(results)
        except Exception:
            raise
        except BaseException as error:  # sys.exit(), or a library's timeout: no reason to lose the process
            raise PluginError(f"{self._who}: evaluate raised {_named(error)}") from error
        return verdicts(results, len(episodes), self._who)

    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """For each prompt a reply worth full marks, if one is known."""
        solve = getattr(self._environment, "solve", None)
        try:
            return [solve(prompt) for prompt in prompts] if solve else [None] * len(prompts)
        except Exception as error:
            raise PluginError(f"{self._who}: solve raised {_named(error)}") from error

    def _refuse_what_is_not_called(self) -> None:
        """An environment that counts on sessions or tools would run without them and learn nonsense."""
        kind = type(self._environment)
        wanted = [
            name
            for name in ("open", "close")
            if getattr(kind, name, None) not in (None, getattr(Environment, name))
        ]
        wanted += ["tools"] if getattr(self._environment, "tools", ()) else []
        if wanted:
            raise PluginError(
                f"{self._who}: {kind.__name__} defines {' and '.join(wanted)}, but sessions and tools are "
                "not supported yet; keep what a rollout needs in its messages"
            )

    def _wait_for(self, results: Awaitable[Any]) -> Any:
        try:
            return self._runner.run(_awaited(results))
        except Exception:
            raise
        except BaseException:  # it went through the loop and left tasks behind, which would raise it again
            with contextlib.suppress(BaseException):
                self._runner.close()
            self._runner = asyncio.Runner()
            raise

    def _complete(self, prompt: Any, index: int, where: str) -> Prompt:
        if not isinstance(prompt, Prompt):
            raise PluginError(f"{where}[{index}] is {type(prompt).__name__}, expected grpo_core.Prompt")
        if not prompt.messages or not all(_is_message(message) for message in prompt.messages):
            raise PluginError(
                f"{where}[{index}]: messages is {prompt.messages!r}, expected text or at least one message "
                "such as {'role': 'user', 'content': '...'}"
            )
        return attrs.evolve(prompt, id=prompt.id or str(index), environment=self._task)


_UNREADABLE = "a prompt cannot be sent to the trainer's process; put plain data into answer and info"


def verdicts(results: Any, expected: int, who: str) -> list[Verdict]:
    """What ``evaluate`` returned, as verdicts.

    Raises PluginError if it is not a sequence of as many floats, Verdicts and Nones as there were episodes.
    A reward that is no number is not an error of the batch: its episode has no verdict.
    """
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        raise PluginError(
            f"{who}: evaluate returned {type(results).__name__}, expected one result per episode"
        )
    results = list(results)
    if len(results) != expected:
        raise PluginError(f"{who}: evaluate returned {len(results)} results for {expected} episodes")
    return [_verdict(result, who) for result in results]


def _verdict(result: Any, who: str) -> Verdict:
    if result is None:
        return Verdict()
    if not isinstance(result, Verdict):
        return Verdict(**_reward(result, who))
    if not all(_is_message(message) for message in result.messages):
        raise PluginError(f"{who}: evaluate returned messages {result.messages!r}, expected role and content")
    metrics = {str(name): float(value) for name, value in result.metrics.items()}
    reward = {} if result.reward is None else _reward(result.reward, who)
    if result.error is not None:  # an error is never a reward, whatever stands beside it
        reward = {"reward": None, "error": str(result.error)}
    elif reward.get("error"):
        reward |= {"done": True, "messages": ()}
    return attrs.evolve(result, metrics=metrics, **reward)


def _reward(given: Any, who: str) -> dict[str, Any]:
    if isinstance(given, str | bytes) or not hasattr(given, "__float__"):
        raise PluginError(
            f"{who}: evaluate returned {given!r} ({type(given).__name__}), "
            "expected a float, a Verdict or None"
        )
    try:
        reward = float(given)
    except OverflowError:
        reward = math.inf
    if math.isfinite(reward) and abs(reward) < LARGEST_REWARD:
        return {"reward": reward}
    return {
        "reward": None,
        "error": f"reward is {reward}, expected a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}",
    }


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


async def _awaited(results: Awaitable[Any]) -> Any:
    return await results


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------- the parent's side


class EnvironmentProcess:
    """A ``Judge`` whose environment lives in a killable child process without CUDA.

    One call at a time.  Everything but ``aclose`` starts the process if it does not run.

    Args:
        task: name of the task; what its prompts are marked with.
        spec: the environment's name, as in ``math:sort``.
        options: of the environment's factory.
        allow, block: see ``PluginHost.discover``.
        log: file that receives what the environment prints.
    """

    def __init__(
        self,
        task: str,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        config: EnvironmentConfig | None = None,
        allow: Sequence[str] | None = None,
        block: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.task = task
        self.max_turns = Environment.max_turns
        self.needs_group = Environment.needs_group
        self.starts = 0
        self.first_traceback = ""
        """Of the first evaluation that failed."""
        self._made_with = {
            "task": task,
            "spec": spec,
            "options": dict(options or {}),
            "allow": allow,
            "block": tuple(block),
        }
        self._config = config or EnvironmentConfig()
        self._log = log
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._who = f"task {task!r}"

    async def start(self) -> None:
        """Make the environment, or find out why that cannot be done: PluginError, ConfigError."""
        async with self._turn:
            await self._started()

    async def prompts(self, split: str) -> list[Prompt]:
        """The prompts of ``"train"`` or ``"validation"``; each has an id and the task's name."""
        pickled = await self._call("prompts", split)
        try:
            prompts: list[Prompt] = pickle.loads(pickled)
        except Exception as error:
            raise PluginError(f"{self._who}: prompts({split!r}): {_UNREADABLE}: {_named(error)}") from error
        return prompts

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """For each prompt a reply worth full marks, if the environment knows one."""
        replies: list[str | None] = await self._call("solve", list(prompts))
        return replies

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """A verdict for each episode, in order; without a reward and with an error where there is none."""
        attempt = await self._attempt(episodes) if episodes else []
        if not isinstance(attempt, Exception):
            return attempt
        units = _units(episodes, whole_groups=self.needs_group)
        results: list[Verdict] = []
        in_a_row = 0
        for unit in units:
            if len(units) > 1 and in_a_row < GIVE_UP_AFTER:
                attempt = await self._attempt(unit)
            if isinstance(attempt, Exception):
                self.first_traceback = self.first_traceback or _traceback(attempt)
                results += [Verdict(error=_named(attempt))] * len(unit)
                in_a_row += 1
            else:
                results += attempt
                in_a_row = 0
        return results

    async def aclose(self) -> None:
        """End the process; what waits for it gets ChildDied."""
        if self._child is not None:
            child, self._child = self._child, None
            await child.aclose()

    async def _attempt(self, episodes: Sequence[Episode]) -> list[Verdict] | Exception:
        """The verdicts, or why there are none.  Raises only if the environment cannot be made."""
        async with self._turn:
            child = await self._started()
            try:
                results: list[Verdict] = await _ask(child, "evaluate", list(episodes), self._config.deadline)
            except Exception as error:
                return error
            return results

    async def _call(self, method: str, argument: Any) -> Any:
        async with self._turn:
            return await _ask(await self._started(), method, argument, self._config.start_deadline)

    async def _started(self) -> Child:
        """The running child, or a new one.  Raises PluginError if the environment cannot be made."""
        if self._child is not None and self._child.alive:
            return self._child
        await self.aclose()
        self.starts += 1
        child = Child(
            "grpo_core.environments:EnvironmentHost",
            self._made_with,
            name=f"environment of task {self.task!r}",
            environ={"CUDA_VISIBLE_DEVICES": ""},
            log=self._log,
        )
        try:
            description = await child.started(seconds=self._config.start_deadline)
        except BaseException as error:
            await child.aclose(seconds=0)
            if isinstance(error, ChildDied | DeadlineExceeded):
                raise PluginError(
                    f"task {self.task!r}: the environment cannot be started: {error}"
                ) from error
            raise
        self._child = child
        self._who = description["who"]
        self.max_turns = description["max_turns"]
        self.needs_group = description["needs_group"]
        return child


async def _ask(child: Child, method: str, argument: Any, seconds: float) -> Any:
    try:
        return await child.call(method, argument, seconds=seconds)
    except asyncio.CancelledError:
        child.kill()  # it may be busy for long, and the next caller's time would run meanwhile
        raise


def _units(episodes: Sequence[Episode], *, whole_groups: bool) -> list[list[Episode]]:
    """What may be evaluated apart from the rest: episodes, or runs of episodes of one group."""
    if not whole_groups:
        return [[episode] for episode in episodes]
    return [list(run) for _, run in itertools.groupby(episodes, key=lambda episode: episode.group)]


def _traceback(error: BaseException) -> str:
    """Of the child if the error comes from there."""
    cause = error.__cause__
    return str(cause) if isinstance(cause, RemoteTraceback) else _named(error)


class ErrorBudget:
    """Tells when so many episodes of a task have no verdict that its environment must be at fault.

    Args:
        task: named in the message.
        max_error_rate: share of the last ``window`` episodes that may be without a verdict; it is not
            judged before ``in_a_row`` episodes have been seen.
        in_a_row: so many without a verdict, one after the other, are too many at any rate below 1.
    """

    def __init__(
        self, task: str, max_error_rate: float, *, window: int = 200, in_a_row: int = GIVE_UP_AFTER
    ) -> None:
        self._task = task
        self._max_error_rate = max_error_rate
        self._failed: deque[bool] = deque(maxlen=window)
        self._in_a_row = in_a_row
        self._streak = 0
        self._first = ""

    def observe(self, verdict: Verdict, traceback: str = "") -> None:
        """Count a verdict that ends an episode; one that only continues it is not counted.

        Args:
            verdict: what the environment said.
            traceback: shown instead of the first error, if given.

        Raises:
            PluginError: too many episodes had no verdict.
        """
        if not verdict.done and verdict.error is None:
            return
        failed = verdict.error is not None or verdict.reward is None
        self._failed.append(failed)
        self._streak = self._streak + 1 if failed else 0
        if not failed:
            return
        self._first = self._first or traceback or verdict.error or "the environment returned None"
        count, seen = sum(self._failed), len(self._failed)
        too_many = seen >= self._in_a_row and count > self._max_error_rate * seen
        if too_many or (self._streak >= self._in_a_row and self._max_error_rate < 1):
            raise PluginError(
                f"task {self._task!r}: {count} of the last {seen} episodes had no verdict "
                f"({self._streak} in a row); environment.max_error_rate is {self._max_error_rate:g}. "
                f"The first of them:\n{self._first}"
            )
