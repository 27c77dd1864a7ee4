"""The session of a rollout: its requests on their way to the engine, and its recording.

Long work on JSON, chat templates and tokens is done in the renderer's thread; the event loop waits for it and
for the engine.  A request is answered to its end even if its client goes away meanwhile: what is sampled is
recorded, and a retry gets it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core import (
    AgentClient,
    ChildDied,
    Completion,
    DeadlineExceeded,
    EngineError,
    Feedback,
    Message,
    ModelError,
    Play,
    PluginError,
    Recording,
    errors,
)
from grpo_core.kit import MIXED_UP_ADVICE, aio, read_json, thoughts
from grpo_plugin_agents.dialects import Answer, BadRequest, ChatRequest, Dialect, encoded, event
from grpo_plugin_agents.recorder import Node, Recorder, Talks, Turn
from grpo_plugin_agents.repeats import Attempt, Call, KeyReused, Repeats

MOST_COMPLETIONS = 64
"""Largest ``n`` of a request."""
_TAIL = 16
"""Tokens at the end of a prompt in which the tag that begins thinking is looked for."""
PING = 2.0
"""Seconds between the signs of life of a stream; clients have time-outs for silence."""


@frozen(kw_only=True)
class Reply:
    """A reply to a client: JSON, or the events of a stream."""

    body: bytes
    status: int = 200
    stream: bool = False
    failure: bytes = b""
    """The event that says the same as ``body``, for a stream that has begun before the request failed."""


class Refused(Exception):  # noqa: N818 - it is what it is
    """Raised for a request without a completion.

    Attributes:
        status: of the reply.
        code: the reason, for programs.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@frozen(eq=False)
class Asked:
    """A request on its way to its reply."""

    task: asyncio.Task[Reply]
    streams: asyncio.Future[None]
    """Done when the engine begins with the completions of a stream."""


@define(eq=False)
class Session:
    """A rollout of an agent while it is played.

    Args:
        client: what the agent gets to know.
        ended: called once, when the session ends.
        ignored: called with the names of a request's fields that have no effect.
        talks: the conversations of all sessions.
    """

    client: AgentClient
    play: Play
    ended: Callable[[], object] = lambda: None
    ignored: Callable[[Sequence[str]], None] = lambda names: None
    talks: Talks = field(factory=Talks)
    recorder: Recorder = field(init=False)
    _repeats: Repeats[Asked] = field(init=False, factory=Repeats)
    _replies: dict[str, Node] = field(init=False, factory=dict)
    """Completions by the id of their reply."""
    _running: set[asyncio.Task[Reply]] = field(init=False, factory=set)
    _fault: asyncio.Event = field(init=False, factory=asyncio.Event)
    _why: Exception | None = field(init=False, default=None)
    _error: str | None = field(init=False, default=None)
    """The engine's last error; None once it has completed a request after it."""
    _closed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.recorder = Recorder(self.play.limits, self.play.group, self.talks)

    async def broken(self) -> Exception:
        """Wait until a request fails by no fault of the agent, such as a broken engine; return the error."""
        await self._fault.wait()
        assert self._why is not None
        return self._why

    async def aclose(self) -> Recording:
        """End the session, and the requests that still run; return what was sampled."""
        if not self._closed:
            self._closed = True
            self.ended()
        await aio.cancel(list(self._running))
        self.recorder.end()
        return await self.play.renderer.run(lambda: self.recorder.recording(self._error), 0)

    # ------------------------------------------------------------------------------ requests

    async def reply(
        self,
        dialect: Dialect,
        body: bytes,
        attempt: Attempt,
        *,
        alive: Callable[[], Awaitable[None]] | None = None,
        every: float = PING,
    ) -> tuple[Call[Asked], Reply]:
        """Answer a request, or give it the answer of the one that it repeats.

        ``alive`` is called when the engine begins with a stream, and again after each ``every`` seconds.
        Cancelling this does not cancel the request: a client that has gone may ask again.  Raises Refused if
        the session has ended, or the client repeats the key of another request.
        """
        try:
            call = self._repeats.repeated(attempt)
        except KeyReused:
            told = (
                f"the Idempotency-Key {attempt.key[:80]!r} is that of another request; use a new key for each"
            )
            raise Refused(422, told, "idempotency_key_reused") from None
        if call is None:
            if self._closed:
                raise Refused(401, "this rollout has ended", "ended")
            streams = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._answer(dialect, body, streams), name="request of an agent")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            call = self._repeats.begin(attempt, Asked(task, streams))
        task = call.answer.task
        if alive is not None:
            either: list[asyncio.Future[Any]] = [task, call.answer.streams]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            while not task.done():
                await alive()
                await asyncio.wait([task], timeout=every)
        await asyncio.wait([task])
        if task.cancelled():
            raise Refused(401, "this rollout has ended", "ended")
        reply = task.result()
        if reply.status != 200:
            self._repeats.forget(call)
        return call, reply

    def delivered(self, call: Call[Asked], attempt: Attempt) -> None:
        """Remember that a client got its reply."""
        self._repeats.delivered(call, attempt)

    async def count_tokens(self, dialect: Dialect, body: bytes) -> Reply:
        """Return the number of tokens of a request, as Anthropic's clients ask for it."""
        try:
            _, turn = await self.play.renderer.run(lambda: self._read(dialect, body), len(body))
        except Refused as refused:
            return refusal(dialect, refused)
        return Reply(body=json.dumps({"input_tokens": len(turn.context)}).encode())

    async def _answer(self, dialect: Dialect, body: bytes, streams: asyncio.Future[None]) -> Reply:
        try:
            request, turn = await self.play.renderer.run(lambda: self._read(dialect, body), len(body))
            completions = await self._generate(request, turn, streams)
            tokens = sum(len(completion.tokens) for completion in completions)
            return await self.play.renderer.run(
                lambda: self._recorded(dialect, request, turn, completions), tokens
            )
        except Refused as refused:
            return refusal(dialect, refused)
        except Exception as error:
            self._why = error
            self._fault.set()
            return refusal(dialect, Refused(500, errors.describe(error), "internal"))

    def _read(self, dialect: Dialect, body: bytes) -> tuple[ChatRequest, Turn]:
        """Read a request and encode what is new in it.  Raises Refused, and PluginError as the recorder."""
        try:
            request = dialect.read(read_json(body, dict), self._history)
            turn = self.recorder.turn(request.messages, request.tools, self.play.renderer)
        except PluginError as error:
            raise PluginError(f"{error}. {MIXED_UP_ADVICE}") from error
        except (BadRequest, ModelError) as error:
            raise Refused(400, str(error), "bad_request") from error
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is unreadable: {error}", "bad_request") from error
        if not len(turn.context):
            raise Refused(400, "the messages have no tokens; a model needs one to begin with", "bad_request")
        if request.n > MOST_COMPLETIONS:
            raise Refused(400, f"n is {request.n}; expected at most {MOST_COMPLETIONS}", "bad_request")
        return request, turn

    async def _generate(
        self, request: ChatRequest, turn: Turn, streams: asyncio.Future[None]
    ) -> list[Completion]:
        """Return the completions of a request.  Raises Refused."""
        if request.ignored:
            self.ignored(request.ignored)
        n = request.n
        if (limit := self.recorder.admit(turn, n)) is not None:
            raise Refused(400, self._over(limit, len(turn.context)), _CODES.get(limit, f"max_{limit}"))
        if request.stream:  # what is refused above has a status of its own, which a stream hides
            streams.set_result(None)
        completed = False
        try:
            completions = await self.play.generate(
                turn.context, n=n, max_tokens=request.max_tokens or 0, stop=request.stop
            )
            completed = True
        except (EngineError, ChildDied, DeadlineExceeded) as error:
            self._error = errors.describe(error)
            raise Refused(503, f"the engine did not complete this request: {error}", "engine") from error
        finally:
            if not completed:
                self.recorder.dismiss(n)
        self._error = None
        return completions

    def _over(self, limit: str, tokens: int) -> str:
        limits = self.play.limits
        return {
            "turns": f"this rollout has had its {limits.max_turns} completions (max_turns)",
            "tool_calls": f"this rollout has made its {limits.max_tool_calls} tool calls (max_tool_calls)",
        }.get(
            limit,
            f"the conversation has {tokens} tokens; the maximum context length is {limits.room(0)} tokens",
        )

    def _recorded(
        self, dialect: Dialect, request: ChatRequest, turn: Turn, completions: Sequence[Completion]
    ) -> Reply:
        """Record completions, and write the reply."""
        texts = self.play.renderer.texts([completion.token_ids.tolist() for completion in completions])
        (end,) = self.play.renderer.texts([turn.context[-_TAIL:].tolist()])
        thinking = end.rstrip().endswith(thoughts.THOUGHT_OPENS)  # as some templates write it
        answers = []
        for completion, text in zip(completions, texts, strict=True):
            message = self._message(request, turn, completion, text)
            node = self.recorder.record(turn, completion, message)
            answers.append(self._answered(node, thinking and thoughts.THOUGHT_ENDS not in text))
        return Reply(body=encoded(dialect, request, answers), stream=request.stream)

    def _message(self, request: ChatRequest, turn: Turn, completion: Completion, text: str) -> Message:
        """Return the message of a completion; garbled calls are text, since no client could run them."""
        message = self.play.renderer.message(
            text, token_ids=completion.token_ids, before=turn.context, tools=turn.tools
        )
        calls = message.get("tool_calls") or ()
        if any(not call["function"]["name"] for call in calls):
            message = {"role": "assistant", "content": text}
        content = str(message.get("content") or "")
        if completion.finish_reason == "stop":
            for stop in request.stop:
                content = content.removesuffix(stop)
        return {**message, "content": content}

    def _answered(self, node: Node, thinking: bool) -> Answer:
        id = f"{len(self._replies):08d}"
        answer = Answer(
            id=id,
            message=node.said,
            finish_reason=node.finish_reason,
            prompt_tokens=node.prompt_tokens,
            completion_tokens=len(node.tokens),
            thinking=thinking,
        )
        self._replies[f"resp_{id}"] = node
        return answer

    def _history(self, id: str) -> tuple[Message, ...] | None:
        node = self._replies.get(id)
        return None if node is None else node.conversation()


_NO_CALL = (
    "its agent asked for no completion; it finds the model at client.base_url with client.api_key, and a "
    "program by the variables OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY"
)


async def played(session: Session) -> Recording:
    """Let the environment's agent play a session to its end, and close it.

    Raises what broke the session by no fault of the agent.
    """
    running = asyncio.ensure_future(session.play.run(session.client))
    broken = asyncio.create_task(session.broken())
    try:
        await asyncio.wait([running, broken], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            raise broken.result()
        feedback = running.result()
    finally:
        try:
            await aio.cancel([running, broken])
        finally:  # also if this is cancelled a second time
            recording = await session.aclose()
    if not recording.turns and (feedback is None or feedback.error is None):
        feedback = Feedback(error=_NO_CALL)
    return evolve(recording, feedback=feedback)


_CODES = {"tokens": "context_length_exceeded"}


def refusal(dialect: Dialect, refused: Refused) -> Reply:
    """Return the reply that says why there is no completion."""
    told = refused.status, str(refused), refused.code
    body = json.dumps(dialect.error(*told), ensure_ascii=False).encode()
    return Reply(body=body, status=refused.status, failure=event(*dialect.failure(*told)))


def attempt_digest(path: str, body: bytes) -> bytes:
    """Return a digest that is equal for requests with the same path and body."""
    return blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
