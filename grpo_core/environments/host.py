"""The child process's side of an environment: its results, tools and sessions.

Sessions exist only here; the core knows their names.  Calls whose code is async run at the same time, see
``grpo_core.environments.calls``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import itertools
import math
import pickle
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import attrs

from grpo_core.contracts.errors import (
    CodeError,
    PluginError,
    SessionLost,
    Unavailable,
    describe,
    fault_of,
    shown,
)
from grpo_core.contracts.protocols import Description, Environment, Tool
from grpo_core.contracts.records import AgentClient, Episode, Judgement, Prompt, SessionStart
from grpo_core.contracts.rewards import COMBINED, EVERY
from grpo_core.contracts.unicode import lone_surrogate, unreadable, well_formed
from grpo_core.environments.calls import Begun, Calls
from grpo_core.environments.feedback import as_feedback
from grpo_core.environments.outages import unavailable
from grpo_core.environments.tools import Toolbox, message, tools_of
from grpo_core.plugins.files import FILE_PREFIX
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import ALL_PLUGINS, PluginSelection
from grpo_core.processes.aio import gather
from grpo_core.processes.memory import resident
from grpo_core.processes.served import Call, Connection
from grpo_core.text.credentials import NOTHING_HIDDEN
from grpo_core.text.messages import readable

SESSION_ENDED = "its session ended with the process that held it"
"""The error of a rollout that is lost."""

MOST_PROMPTS = 100_000
"""Limit for a generator of prompts: all are drawn at once, because an epoch needs a length."""

COUNTED = 2.0
"""Seconds after which the number of prompts that were read so far is printed again."""

UNREADABLE = "a prompt cannot be sent to the trainer's process; put plain data into answer and info"


CONCURRENCY = 0
"""Default number of calls at once."""

SCORES = 8
"""Default number of calls of an async ``score`` at once."""

DEADLINE = 30.0
"""Default deadline of a call in seconds."""

GRACE = 2.0
"""Seconds after a deadline to report that an async call was cancelled."""

AGENT_TURNS = 1000
"""Largest number of completions of an agent that declares no limit: it ends by itself."""


@attrs.define(eq=False)
class OpenSession:
    """The result of ``open``, and the tools of its rollout."""

    value: Any
    tools: Toolbox
    idle: asyncio.Event
    """Set while no call uses it."""
    calls: int = 0
    """Number of calls that use it."""

    def __attrs_post_init__(self) -> None:
        self.idle.set()


class EnvironmentHost:
    """Calls an environment for the core.

    Args:
        task: name of the task, which is set on its prompts.
        who: name of the environment in messages.
        concurrency, deadline: see ``config.EnvironmentConfig``; None uses the environment's.
    """

    def __init__(
        self,
        environment: Any,
        *,
        task: str = "task",
        who: str = "",
        concurrency: int | None = None,
        deadline: float | None = None,
    ) -> None:
        kind = type(environment).__name__
        who = who or f"environment {kind}"
        self._task, self._who, self._environment = task, who, environment
        self._mask = NOTHING_HIDDEN
        if not callable(getattr(environment, "prompts", None)):
            raise PluginError(f"{who}: {kind} has no method 'prompts'")
        runs_agents, scores, evaluates = (defines(environment, each) for each in ("run", "score", "evaluate"))
        if runs_agents and not inspect.iscoroutinefunction(environment.run):
            raise PluginError(
                f"{who}: run is not async, and would block all other rollouts; write async def run, and "
                "await asyncio.to_thread(...) for blocking calls"
            )
        if scores and evaluates:
            raise PluginError(f"{who}: {kind} has both 'evaluate' and 'score'; keep the one that judges")
        evaluate = evaluate_of(environment)
        if not (runs_agents or scores or evaluates) or not evaluate:
            raise PluginError(
                f"{who}: {kind} has no method 'evaluate'; define evaluate(episodes), which returns a reward "
                "for each episode, or async score(episode), which returns the reward of one"
            )
        self._evaluate_all, self._judge = evaluate, "score" if scores else "evaluate"
        if name := getattr(environment, "judged_by", ""):
            self._who, self._judge = f"task {task!r}", f"reward function {name}"
        wanted = "a whole number of at least 1"
        self._max_turns = self._declared("max_turns", lambda n: n > 0, wanted, whole=True)
        kinds = [each for each in type(environment).__mro__ if each is not Environment]
        if runs_agents and not any("max_turns" in vars(each) for each in (environment, *kinds)):
            self._max_turns = AGENT_TURNS
        if concurrency is None:
            wanted = "a whole number of at least 0"
            concurrency = self._declared("concurrency", lambda n: n >= 0, wanted, whole=True)
        at_once = getattr(evaluate, "concurrency", CONCURRENCY) if concurrency is None else concurrency
        if deadline is None:
            deadline = self._declared("deadline", lambda s: s > 0, "a number of seconds above 0")
        self._tools = self._toolbox(list(getattr(environment, "tools", ())))
        is_async = inspect.iscoroutinefunction(evaluate)
        self.about = Description(
            who=self._who,
            max_turns=self._max_turns,
            needs_group=bool(getattr(environment, "needs_group", False)),
            success=self._declared("success", math.isfinite, "a finite number or None"),
            combine=self._rules(),
            slots=("all" if is_async else "tools") if at_once else "none",
            concurrency=at_once,
            deadline=float(DEADLINE if deadline is None else deadline),
            grace=GRACE if at_once or is_async else 0.0,
            agents=(concurrency or 1) if runs_agents else 0,
            has_aclose=defines(environment, "aclose"),
            has_sessions=defines(environment, "open"),
            tools=self._tools.schemas,
        )
        self._sessions: dict[str, OpenSession] = {}
        self._opening: dict[str, asyncio.Event] = {}
        """Sessions that are being opened; the event is set when they are open or failed."""
        self._calls = calls = Calls(f"environment of task {task!r}", self._begin, at_once)
        self.serve, self.release, self.interrupt = calls.serve, calls.close, calls.interrupt
        self._alongside: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "evaluate": self._evaluate,
            "open": self._open,
            "close": self._close,
            "convert": self._convert,
            "run": self._run_agent,
            "end": self._end,
        }

    def _begin(self, call: Call, connection: Connection) -> Begun | None:
        """Begin a call of the core; secrets in errors are masked."""
        self._mask = connection.mask
        connection.own_errors_only = True
        if call.method not in self._alongside:
            connection.answer(call, self)
            return None
        # what calls the others has a deadline: the dataloader, the rollout, the end of the process
        late = self.about.deadline if call.method in ("evaluate", "open", "close") else None
        return self._alongside[call.method](*call.args), late

    def call(self, method: str, *args: Any) -> Any:
        """Make a call, and nothing else meanwhile: "evaluate", "open", "close", "convert" or "run"."""
        return self._calls.run(self._alongside[method](*args))

    def end(self) -> None:
        """Close all sessions and the environment; no call follows."""
        self.call("end")
        self.release()

    def description(self) -> Description:
        return attrs.evolve(self.about, memory=resident())

    def prompts(self, split: str) -> bytes:
        """Return the checked prompts of a split, pickled here so that an error names its prompt."""
        where = f"{self._who}: prompts({split!r})"
        complete: dict[str, Prompt] = {}
        due = time.monotonic() + COUNTED
        for index, prompt in enumerate(self._offered(split, where)):
            made = self._complete(prompt, str(index), f"{where}[{index}]")
            if made.id in complete:
                raise PluginError(f"{where}: two prompts have the id {made.id!r}; ids must be unique")
            complete[made.id] = made
            if time.monotonic() > due:
                print(f"{where}: {index + 1:,} prompts so far", flush=True)
                due += COUNTED
        return _pickled(list(complete.values()), where)

    def _offered(self, split: str, where: str) -> Iterator[Any]:
        """Yield what the environment offers.  Raises PluginError, also for an endless generator."""
        more = False
        try:
            given = self._environment.prompts(split)
            if hasattr(given, "__len__"):
                yield from (given[index] for index in range(len(given)))
            else:
                drawn = iter(given)
                yield from itertools.islice(drawn, MOST_PROMPTS)
                more = next(drawn, None) is not None
        except (Exception, SystemExit) as error:
            raise self._raised(where, error) from error
        if more:
            raise PluginError(
                f"{where}: yields more than {MOST_PROMPTS:,} prompts; return a sequence, which may be longer "
                "and compute its items on access, or end the iteration"
            )

    async def _convert(self, rows: Sequence[Mapping[str, Any]]) -> bytes | None:
        """Return the pickled prompts of rows, or None if the environment does not make them.

        Ids come from the rows.
        """
        if not defines(self._environment, "prompt"):
            return None
        made = []
        results = await self._calls.each(self._environment.prompt, rows)
        for row, given in zip(rows, results, strict=True):
            id = row["id"]
            where = f"{self._who}: prompt of row {id!r}"
            if isinstance(given, BaseException):
                raise self._raised(where, given) from given
            made.append(attrs.evolve(self._complete(given, id, where), id=id))
        return _pickled(made, f"{self._who}: prompt")

    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return a reply with a full reward for each prompt, or None if unknown."""
        solve = getattr(self._environment, "solve", None)
        try:
            replies = [well_formed(solve(prompt)) for prompt in prompts] if solve else [None] * len(prompts)
        except (Exception, SystemExit) as error:
            raise self._raised(f"{self._who}: solve", error) from error
        for reply in replies:
            if not isinstance(reply, (str, type(None))):
                raise PluginError(
                    f"{self._who}: solve returned {shown(reply)} ({type(reply).__name__}), expected text or "
                    "None"
                )
        return replies

    # ------------------------------------------------------------------------------ sessions

    async def _open(self, prompts: Sequence[tuple[str, Prompt]]) -> list[SessionStart]:
        """Open a session under each name; a failed one reports its error and is not closed."""
        opened = asyncio.Event()
        names = [name for name, _ in prompts]
        self._opening |= dict.fromkeys(names, opened)
        try:
            some = [prompt for _, prompt in prompts]
            values = await self._calls.each(self._environment.open, some, completes=True)
            starts: list[SessionStart] = []
            for name, value in zip(names, values, strict=True):
                starts.append(await self._opened(name, value))
            return starts
        finally:
            for name in names:
                del self._opening[name]
            opened.set()

    async def _close(self, names: Sequence[str]) -> None:
        """Close open sessions.  Errors of ``close`` are printed; the session is gone anyway."""
        busy = [self._opening[name] for name in names if name in self._opening]
        busy += [self._sessions[name].idle for name in names if name in self._sessions]
        if waits := [event.wait() for event in busy if not event.is_set()]:
            # their callers are gone, and the cancelled code may still clean up
            await self._calls.gathered(waits, completes=True)
        sessions = [self._sessions.pop(name) for name in names if name in self._sessions]
        if close := getattr(self._environment, "close", None):
            results = await self._calls.each(close, [each.value for each in sessions], completes=True)
            _print_errors(results)

    async def _end(self) -> None:
        """Close all open sessions, and the environment; no call follows."""
        await self._calls.end_others()
        await self._close(list(self._sessions))
        if self.about.has_aclose:
            _print_errors(await self._calls.each(lambda made: made.aclose(), [self._environment]))

    async def _opened(self, name: str, value: Any) -> SessionStart:
        if isinstance(value, BaseException):
            fault = fault_of(value, self._mask)
            said = f"open raised {fault}"
            return SessionStart(error=said, fault=fault, unavailable=self._away(value))
        try:
            tools = self._toolbox([*getattr(self._environment, "tools", ()), *tools_of(value)])
        except Exception as error:
            if close := getattr(self._environment, "close", None):
                _print_errors(await self._calls.each(close, [value], completes=True))
            if isinstance(error, PluginError):
                raise
            return SessionStart(error=f"the tools of the session cannot be read: {self._describe(error)}")
        self._sessions[name] = OpenSession(value, tools, asyncio.Event())
        return SessionStart(tools=tools.schemas)

    def _toolbox(self, tools: Sequence[Callable[..., Any] | Tool]) -> Toolbox:
        if tools and self._max_turns == 1:
            raise PluginError(
                f"{self._who}: {type(self._environment).__name__} has tools, but max_turns is 1: a model "
                "that calls one needs another turn; set max_turns to the largest number of completions"
            )
        return Toolbox(tools, self._who)

    # ------------------------------------------------------------------------------ agents

    async def _run_agent(self, given: tuple[str, Prompt, AgentClient]) -> Judgement | None:
        """Let the agent play a rollout; return its result, or None if ``evaluate`` judges it."""
        name, prompt, client = given
        session = self._sessions.get(name)
        if self.about.has_sessions and session is None:
            return Judgement(error=SESSION_ENDED, lost=True)
        with _used([] if session is None else [session]):
            value = None if session is None else session.value
            run = self._environment.run(prompt, attrs.evolve(client, session=value))
            (result,) = await self._calls.gathered([run])
        if isinstance(result, Exception) and urlsplit(client.base_url).netloc in str(unavailable(result)):
            raise result  # that is the model
        if self._returned("run", result) is None:
            return None
        return as_feedback([result], 1, self._who, method="run", mask=self._mask, ids=[prompt.id])[0]

    def ping(self) -> None:
        """Do nothing: an answer shows that no call blocks the others."""

    # ------------------------------------------------------------------------------ evaluation

    async def _evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Return feedback for each episode.  Raises PluginError for an invalid result.

        The environment evaluates before any tool runs: if it raises, the episodes are tried again, and no
        tool may run twice.
        """
        results: dict[int, Judgement] = {}
        judged: dict[int, Episode] = {}
        called: dict[int, Episode] = {}
        for i, episode in enumerate(episodes):
            session = self._sessions.get(str(episode.session))
            if self.about.has_sessions and session is None:
                results[i] = Judgement(error=SESSION_ENDED, lost=True)
                continue
            calls = not self.about.runs_agents and calls_of(episode)  # an agent answers its own calls
            (called if calls else judged)[i] = attrs.evolve(episode, session=session)
        with _used([e.session for e in (*judged.values(), *called.values()) if e.session is not None]):
            if judged:
                shown = [attrs.evolve(e, session=e.session and e.session.value) for e in judged.values()]
                try:
                    found = self._evaluate_all(shown)
                except BaseException as error:  # sys.exit(), or a library's timeout: the process survives
                    found = error
                if inspect.isawaitable(found):
                    (found,) = await self._calls.gathered([found])
                found = self._returned(self._judge, found)
                ids = [episode.prompt.id for episode in shown]
                feedback = as_feedback(found, len(ids), self._who, self._judge, mask=self._mask, ids=ids)
                results |= zip(judged, feedback, strict=True)
            results |= zip(called, await self._answers(list(called.values())), strict=True)
        return [results[i] for i in range(len(episodes))]

    def _returned(self, method: str, result: Any) -> Any:
        """Return what a method returned, or raise what it raised: as Unavailable if a service is away."""
        if isinstance(result, Exception):
            away = unavailable(result)
            if away is None or away is result:
                raise result
            raise away from result
        if isinstance(result, BaseException):
            raise self._raised(f"{self._who}: {method}", result, CodeError) from result
        return result

    def _raised(
        self, what: str, error: BaseException, kind: type[PluginError | CodeError] = PluginError
    ) -> PluginError | CodeError:
        """Return the error that says which method raised another one, without secrets."""
        fault = fault_of(error, self._mask)
        return kind(f"{what} raised {fault}").carrying(fault)

    def _describe(self, error: BaseException) -> str:
        """Describe an error without secrets."""
        return describe(self._mask.error(error))

    def _away(self, error: BaseException) -> Unavailable | None:
        """Return the Unavailable behind an error, without secrets, or None."""
        away = unavailable(error)
        hidden = None if away is None else self._mask.error(away)
        return hidden if isinstance(hidden, Unavailable) else None

    async def _answers(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Return the tools' answers; the calls of one message run in order.

        If a tool's service is unavailable, the answers of earlier tools are returned: no tool runs twice.
        """
        answers: list[list[Any]] = [[] for _ in episodes]
        failed: dict[int, Judgement] = {}
        for place in range(max((len(calls_of(episode)) for episode in episodes), default=0)):
            here = [
                i for i, episode in enumerate(episodes) if len(calls_of(episode)) > place and i not in failed
            ]
            calls = [calls_of(episodes[i])[place] for i in here]
            boxes = [self._tools if (s := episodes[i].session) is None else s.tools for i in here]
            pairs = list(zip(boxes, calls, strict=True))
            results = await self._calls.each(lambda pair: pair[0].call(pair[1]), pairs)
            for i, call, result in zip(here, calls, results, strict=True):
                # a service that the call names may be the model's choice
                kind = Unavailable if "://" in str(call["function"]["arguments"]) else BaseException
                away = self._away(result) if isinstance(result, kind) else None
                if away is not None:
                    failed[i] = Judgement(error=self._describe(result), messages=answers[i], unavailable=away)
                elif isinstance(result, SessionLost):
                    failed[i] = Judgement(error=self._describe(result))
                answers[i].append(message(call, result, self._mask))
        return [failed.get(i) or Judgement(done=False, messages=each) for i, each in enumerate(answers)]

    # ------------------------------------------------------------------------------ declarations

    def _declared(self, name: str, fits: Callable[[Any], bool], expected: str, *, whole: bool = False) -> Any:
        """Return a number that the environment declares, or None.  Raises PluginError if it does not fit."""
        value = getattr(self._environment, name, getattr(Environment, name, None))
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (number and fits(value)) and (value is not None or name == "max_turns"):
            raise PluginError(f"{self._who}: {name} is {value!r}, expected {expected}")
        return value

    def _rules(self) -> dict[str, str]:
        rules = getattr(self._environment, "combine", Environment.combine)
        if not isinstance(rules, Mapping) or not all(isinstance(n, str) and n != EVERY for n in rules):
            raise PluginError(
                f"{self._who}: combine is {rules!r:.200}, expected a rule for each of some metrics by its "
                'name, as in {"moves": "sum"}; the others are the mean'
            )
        for name, rule in rules.items():
            if not isinstance(rule, str) or rule not in COMBINED:
                raise PluginError(
                    f"{self._who}: combine has {rule!r:.200} for the metric {name!r}, expected one of "
                    f"{', '.join(COMBINED)}"
                )
        return dict(rules)

    def _complete(self, prompt: Any, id: str, where: str) -> Prompt:
        if not isinstance(prompt, Prompt):
            raise PluginError(f"{where} is {type(prompt).__name__}, expected grpo_core.Prompt")
        named = attrs.evolve(prompt, id=prompt.id or id, environment=self._task)
        complete = readable(named, where)
        if found := lone_surrogate([complete.id, complete.messages]):
            raise PluginError(f"{where}: prompt {complete.id!r} {unreadable(found)}")
        return complete


def made(
    task: str,
    spec: str,
    options: Mapping[str, Any],
    plugins: PluginSelection = ALL_PLUGINS,
    host: PluginHost | None = None,
    **settings: Any,
) -> EnvironmentHost:
    """Make an environment.

    Args:
        spec: name of the environment.
        options: options of its factory.
        plugins: selection of the plugins to load.
        host: the loaded plugins, if this process has them.
        settings: as ``EnvironmentHost``.
    """
    host = host or PluginHost.of(plugins)
    who = f"task {task!r}: {host.find('environment', spec)}"
    return EnvironmentHost(host.make("environment", spec, **options), task=task, who=who, **settings)


@contextlib.contextmanager
def _used(sessions: Sequence[OpenSession]) -> Iterator[None]:
    """Keep sessions open while a call uses them."""
    for session in sessions:
        session.calls += 1
        session.idle.clear()
    try:
        yield
    finally:
        for session in sessions:
            session.calls -= 1
            if not session.calls:
                session.idle.set()


class _DataPickler(pickle.Pickler):
    """Pickles no object of a class of a single file: reading it would run the file elsewhere."""

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.startswith(FILE_PREFIX):
            raise pickle.PicklingError(f"{kind.__name__} is a class of a single file")
        return NotImplemented


def _pickled(prompts: Sequence[Prompt], where: str) -> bytes:
    found = io.BytesIO()
    try:
        _DataPickler(found, protocol=pickle.HIGHEST_PROTOCOL).dump(prompts)
        return found.getvalue()
    except Exception as error:
        raise PluginError(f"{where}: {UNREADABLE}: {describe(error)}") from error


def defines(environment: Any, name: str) -> bool:
    """Return whether an environment has a method that is not the one of the base class."""
    method = getattr(type(environment), name, None) or getattr(environment, name, None)
    return method not in (None, getattr(Environment, name))


def evaluate_of(environment: Any) -> Callable[[Sequence[Episode]], Any] | None:
    """Return ``evaluate`` of an environment, made of ``score`` if it defines that; None without either.

    What is made of an async ``score`` has the attribute ``concurrency``: how many calls may run at once.
    """
    if not defines(environment, "score"):
        evaluate: Callable[[Sequence[Episode]], Any] | None = getattr(environment, "evaluate", None)
        return evaluate
    score = environment.score
    if not inspect.iscoroutinefunction(score):
        return lambda episodes: [score(episode) for episode in episodes]

    async def gathered(episodes: Sequence[Episode]) -> list[Any]:
        return await gather(score(episode) for episode in episodes)

    gathered.concurrency = SCORES  # type: ignore[attr-defined]
    return gathered


def units(episodes: Sequence[Episode], *, whole_groups: bool) -> list[list[Episode]]:
    """Split episodes into parts that may be evaluated separately: single episodes, or whole groups.

    Tool calls are answered per episode, even if groups are compared.
    """
    parts: list[list[Episode]] = []
    for (_, calling), run in itertools.groupby(episodes, key=lambda e: (e.group, calls_of(e) != ())):
        if whole_groups and not calling:
            parts.append(list(run))
        else:
            parts += ([episode] for episode in run)
    return parts


def calls_of(episode: Episode) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of an episode that are not answered yet."""
    if not episode.messages or episode.finish_reason != "stop":
        return ()
    for answered, each in enumerate(reversed(episode.messages)):
        if each.get("role") != "tool":
            return tuple(each.get("tool_calls") or ())[answered:]
    return ()


def _print_errors(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            traceback.print_exception(type(result), result, result.__traceback__)
