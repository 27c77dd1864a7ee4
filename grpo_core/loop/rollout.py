"""Play rollouts: prompts to their ends, turn by turn.

There is one ``play``; training calls it for a group, validation for a set of prompts or for one prompt.

    open       one environment call for all rollouts of a task
    generate   a completion
    evaluate   tools answer a completion that calls some, the environment answers the others
    close      the sessions, whatever happened

A plugin's player may play each rollout instead (``EnvironmentClient.player``); the core opens its session,
has it judged, and closes it.

Rollouts do not wait for each other: each generates and is evaluated at its own pace.  There are three
exceptions.  Rollouts of one turn share their engine call and their environment call, since no later turn
could begin earlier.  Where an environment compares the rollouts of a group (``needs_group``), it sees the
group once no rollout of it calls a tool.  And a caller may set ``lockstep``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve

from grpo_core.contracts.errors import (
    ChildDied,
    ControlInText,
    DeadlineExceeded,
    EngineError,
    plugin_errors,
)
from grpo_core.contracts.events import IncidentKind
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import EnvironmentClient, completed, derive_seed
from grpo_core.contracts.protocols import Engine, Renderer
from grpo_core.contracts.records import EndReason, Judgement, Limits, Message, Prompt, Rollout, SessionStart
from grpo_core.contracts.tokens import Ids, as_ids
from grpo_core.loop.timeline import during
from grpo_core.loop.turns import RolloutRequest, RolloutState, SamplingParams
from grpo_core.processes.aio import Limit, gather

T = TypeVar("T")

_LOST = EngineError, ChildDied, DeadlineExceeded
"""Errors by which an engine or an environment loses rollouts: they end unscored, and are played again."""

__all__ = ["LostBudget", "RolloutRequest", "SamplingParams", "cause", "derive_seed", "play"]


async def play(
    requests: Sequence[RolloutRequest],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    renderer: Renderer,
    sampling: SamplingParams,
    deadline: float | Limit | None = None,
    lockstep: bool = False,
) -> list[Rollout]:
    """Play rollouts to their ends, each at its own pace; the result has the order of the requests.

    With ``lockstep`` they wait for each other at each turn: the environment of a task is called once a turn.

    A rollout that ends unscored (its environment failed, the engine lost it, or ``deadline`` seconds have
    passed) has ``reward=None`` and the reason in ``error``.  Waits for an unavailable service, or for a
    process that plays an agent, do not count.  Each session that was opened is closed once, also if this call
    is cancelled.

    Raises ModelError if the chat template cannot keep the tokens of earlier turns.
    """
    states, players = [], []
    tasks: dict[str, list[RolloutState]] = defaultdict(list)
    context = min(renderer.context, getattr(engine, "positions", 0) or renderer.context)
    limits: dict[str, Limits] = {}
    for request in requests:
        task = request.prompt.environment
        if task not in limits:
            limits[task] = sampling.limits(environments[task], context)
        states.append(RolloutState(request, environments[task], sampling, limits[task]))
        tasks[task].append(states[-1])
    timer = deadline if isinstance(deadline, Limit) else Limit(deadline)
    for task, some in tasks.items():
        kind = _Turns if environments[task].player is None else _Played
        players.append(kind(some, engine, environments[task], renderer, timer, lockstep=lockstep))
    try:
        async with timer:
            await _together([player.play() for player in players])
    except TimeoutError:
        if not timer.expired:  # the engine or the environment raised it
            raise
        _give_up_late(states, timer)
    finally:
        for player in players:
            await player.close()
    return [state.rollout() for state in states]


class _Turns:
    """The rollouts of one task, played turn by turn."""

    def __init__(
        self,
        states: Sequence[RolloutState],
        engine: Engine,
        environment: EnvironmentClient,
        renderer: Renderer,
        timer: Limit,
        *,
        lockstep: bool,
    ) -> None:
        self._states, self._engine, self._timer = states, engine, timer
        self._lane = f"environment {states[0].request.prompt.environment}"
        self._environment, self._renderer = environment, renderer
        self._lockstep = lockstep
        self._one_turn = states[0].limits.max_turns == 1 and environment.player is None
        self._unclosed = {state.session for state in states}

    async def play(self) -> None:
        """Play all to their ends."""
        try:
            await self._open()
            await _together([self._play_part(part) for part in self._parts()])
        except _LOST as error:
            _give_up(self._states, str(error))

    def _parts(self) -> list[Sequence[RolloutState]]:
        """Return the parts to evaluate together: all, compared groups, or single rollouts."""
        if self._lockstep or (self._one_turn and not self._environment.about.needs_group):
            return [self._states]
        parts: dict[str, list[RolloutState]] = defaultdict(list)
        for state in self._states:
            parts[state.request.group if self._environment.about.needs_group else state.session].append(state)
        return list(parts.values())

    async def _play_part(self, part: Sequence[RolloutState]) -> None:
        try:
            while live := [state for state in part if not state.done]:
                await self._reply(live, part)
                if shown := self._to_evaluate(part):
                    await self._evaluate(shown)
        except _LOST as error:
            _give_up(part, str(error))
        await self._close(part)

    def _reply(self, live: Sequence[RolloutState], part: Sequence[RolloutState]) -> Awaitable[Any]:
        """Let the model reply in the rollouts of a part that have not ended."""
        if self._lockstep or self._one_turn:
            return self._complete(live)
        return _together([self._complete([state]) for state in live])

    async def _complete(self, states: Sequence[RolloutState]) -> None:
        """Generate a completion for each; in a compared group, until no rollout calls a tool."""
        while states:
            await self._generate(states)
            if not self._environment.about.needs_group:
                return
            calling = [state for state in states if state.calls_tools]
            if calling:
                await self._evaluate(calling)
            states = [state for state in calling if not state.done]

    def _to_evaluate(self, part: Sequence[RolloutState]) -> list[RolloutState]:
        """Return the rollouts that await a reward; a compared group includes its ended rollouts."""
        awaiting = [state for state in part if state.awaiting_reward]
        if not self._environment.about.needs_group:
            return awaiting
        groups = {state.request.group for state in awaiting}
        return [state for state in part if state.error is None and state.request.group in groups]

    async def _open(self) -> None:
        """Open the sessions, and begin the rollouts."""
        with during(self._lane, "open"):
            opened = await self._environment.open({s.session: s.request.prompt for s in self._states})
        await self._begin(opened)

    async def _begin(self, opened: Sequence[SessionStart]) -> None:
        """Render the prompts; a shared one is rendered once."""
        renderer = self._renderer
        prompts = [state.request.prompt for state in self._states]
        keys = [
            (id(prompt), repr(begun.tools) if begun.tools else "")
            for prompt, begun in zip(prompts, opened, strict=True)
        ]
        starts = dict(zip(keys, zip(prompts, opened, strict=True), strict=True))
        if self._environment.about.max_turns > 1:
            for _, begun in starts.values():
                renderer.check_turns(tools=bool(begun.tools))

        def ids_of(prompt: Prompt, begun: SessionStart) -> Ids:
            return as_ids(renderer.prompt_ids(prompt.messages, begun.tools))

        def render() -> dict[tuple[int, str], Ids | ControlInText]:
            return {key: _or_refusal(ids_of, *start) for key, start in starts.items()}

        rendered = await renderer.run(render, sum(_size(prompt.messages) for prompt, _ in starts.values()))
        for state, begun, key in zip(self._states, opened, keys, strict=True):
            if isinstance(ids := rendered[key], ControlInText):
                self._refuse(state, ids)
            else:
                state.begin(begun, ids)

    def _refuse(self, state: RolloutState, error: ControlInText) -> None:
        """Fail a rollout with a text that spells a control token."""
        prompt = state.request.prompt
        report(
            "control_in_text", f"rollouts of task {prompt.environment!r}", f"prompt {prompt.id!r}: {error}"
        )
        state.give_up(str(error))

    async def _generate(self, states: Sequence[RolloutState]) -> None:
        """Add one completion to each; a request that fails ends its own rollout, or its compared group."""
        renderer = self._renderer
        requests = [state.generation_request(renderer.stop_token_ids) for state in states]
        try:
            with during("engine", "generate"):
                completions = await completed(self._engine, requests, renderer)
        except EngineError:
            if len(states) == 1 or self._environment.about.needs_group:
                raise
            await _together([self._generate_alone(state) for state in states])
            return

        def read() -> list[Message]:
            replies = renderer.texts(
                [completion.token_ids.tolist() for completion in completions],
                [request.prompt_ids.data for request in requests],  # long: only their ends are read
            )
            return [
                renderer.message(
                    text, token_ids=completion.token_ids, before=request.prompt_ids, tools=state.tools
                )
                for state, request, completion, text in zip(
                    states, requests, completions, replies, strict=True
                )
            ]

        tokens = sum(len(completion.tokens) for completion in completions)
        messages = await renderer.run(read, tokens)
        for state, completion, message in zip(states, completions, messages, strict=True):
            state.take_completion(completion, message)

    async def _generate_alone(self, state: RolloutState) -> None:
        try:
            await self._generate([state])
        except _LOST as error:
            _give_up([state], str(error))

    async def _evaluate(self, states: Sequence[RolloutState]) -> None:
        feedback = await self._judged(states)
        going = [
            (state, each.messages)
            for state, each in zip(states, feedback, strict=True)
            if state.apply_feedback(each)
        ]
        if not going:
            return
        renderer = self._renderer
        encoded = await renderer.run(
            lambda: [_or_refusal(state.continuation, messages, renderer) for state, messages in going],
            sum(_size((*state.messages, *messages)) for state, messages in going),
        )
        for (state, _), continuation in zip(going, encoded, strict=True):
            if isinstance(continuation, ControlInText):
                self._refuse(state, continuation)
            else:
                state.go_on(continuation)

    async def _judged(self, states: Sequence[RolloutState]) -> list[Judgement]:
        with during(self._lane, "evaluate"):
            return await self._environment.evaluate([state.episode() for state in states])

    async def close(self) -> None:
        """Close the sessions of rollouts that were interrupted."""
        if self._unclosed:
            await self._close([state for state in self._states if state.session in self._unclosed])

    async def _close(self, states: Sequence[RolloutState]) -> None:
        sessions = [state.session for state in states]
        self._unclosed.difference_update(sessions)
        with during(self._lane, "close"):
            await self._environment.close(sessions)


class _Played(_Turns):
    """The rollouts of one task, each played to its end by a plugin's player."""

    async def _begin(self, opened: Sequence[SessionStart]) -> None:
        for state, begun in zip(self._states, opened, strict=True):
            state.begin(begun, None)

    async def _reply(self, live: Sequence[RolloutState], part: Sequence[RolloutState]) -> None:
        await _together([self._play_one(state) for state in live])
        if self._environment.about.needs_group:
            _fail_together(part)

    async def _play_one(self, state: RolloutState) -> None:
        """Play a rollout within its own deadline: others may wait for a process while it plays."""
        timer = Limit(None)
        try:
            async with self._timer.part() as timer:
                await self._play_to_the_end(state)
        except TimeoutError:
            if not timer.expired:
                raise
            _give_up_late([state], timer)

    async def _play_to_the_end(self, state: RolloutState) -> None:
        player = self._environment.player
        assert player is not None
        who = f"task {state.request.prompt.environment!r}: play() of player {type(player).__name__}"
        while True:
            with during(self._lane, "agent"), plugin_errors(who):
                recording = await player.play(state.play(self._engine, self._renderer))
            feedback = recording.feedback
            if recording.error is not None or feedback is None or feedback.unavailable is None:
                break
            # a service that it needs is unavailable: it is played from the start when the service answers
            await self._environment.close([state.session])
            (opened,) = await self._environment.open({state.session: state.request.prompt})
            state.begin(opened, None)
            if state.done:
                return
        state.take_recording(recording)

    async def _judged(self, states: Sequence[RolloutState]) -> list[Judgement]:
        return [evolve(each, done=True) for each in await super()._judged(states)]


def _or_refusal(encode: Callable[..., T], *args: Any) -> T | ControlInText:
    """Return the result of encoding, or the error about a text that spells a control token."""
    try:
        return encode(*args)
    except ControlInText as error:
        return error


def _size(messages: Sequence[Message]) -> int:
    """Return the number of characters of the messages' contents."""
    return sum(len(message.get("content") or "") for message in messages)


def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> Awaitable[Any]:
    """Run all together; a single coroutine needs no task."""
    return coroutines[0] if len(coroutines) == 1 else gather(coroutines)


def _waited_for(state: RolloutState) -> str:
    if state.awaiting_reward:
        return "; it waited for its environment"
    if not len(state.prompt_ids):  # it is not open, or a player plays it
        return ""
    return f"; it waited for the engine in turn {state.turns + 1}, or in its queue, which counts as well"


def _give_up_late(states: Sequence[RolloutState], timer: Limit) -> None:
    for state in states:
        late = f"not finished within its deadline of {timer.seconds:g} s{_waited_for(state)}"
        _give_up([state], late, "deadline")


def _give_up(states: Sequence[RolloutState], error: str, reason: EndReason | None = None) -> None:
    for state in states:
        if not state.done:
            state.finish_reason = reason or state.finish_reason
            state.give_up(error, lost=True)


def _fail_together(states: Sequence[RolloutState]) -> None:
    """Give up a group with a failed rollout: the rest cannot be compared."""
    failed = next((state for state in states if state.error is not None), None)
    for state in states:
        if failed is not None and not state.done:
            state.give_up(failed.error or "", lost=failed.lost)


def cause(rollout: Rollout) -> IncidentKind:
    """Return why a rollout is unscored, as the kind of an incident."""
    if rollout.finish_reason == "deadline":
        return "rollouts_late"
    if not rollout.lost:
        return "unscored"
    asked = rollout.turns and rollout.messages[-1]["role"] == "assistant"  # the environment, and no answer
    return "rollouts_orphaned" if asked else "rollouts_lost"


class LostBudget:
    """Raises an error when ``in_a_row`` consecutive rollouts are lost by the engine or with sessions."""

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self._streak = 0

    def observe(self, rollout: Rollout) -> None:
        """Count a rollout.  Raises EngineError if too many are lost."""
        self._streak = self._streak + 1 if rollout.lost else 0
        if self._streak >= self._in_a_row:
            raise EngineError(
                f"the last {self._streak} rollouts were lost, as many as can be in flight with all their "
                f"retries; the last one: {rollout.error}"
            )
