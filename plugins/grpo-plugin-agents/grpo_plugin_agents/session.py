"""The session of a rollout: its requests on their way to the engine, and its recording.

Long work on JSON, chat templates and tokens runs in the renderer's thread; the event loop awaits it and the
engine.  A request is completed even if its client disconnects: the completion is recorded, and a retry
receives it.
"""

from __future__ import annotations

import asyncio
import bisect
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
from grpo_core.kit import aio, read_json, report
from grpo_core.text import thoughts
from grpo_plugin_agents.dialects import Answer, BadRequest, ChatRequest, Dialect, encoded, event
from grpo_plugin_agents.recorder import Conversations, Node, Recorder, Turn
from grpo_plugin_agents.repeats import Attempt, Call, KeyReused, Repeats

MOST_COMPLETIONS = 64
"""Largest ``n`` of a request."""
_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for the opening tag of thinking."""
MIXED_UP_ADVICE = (
    "Rollouts of one process share its environment variables, its working directory and all globals, such as "
    "a module's client. Give each client its address and its key in run, as in AsyncOpenAI(base_url="
    "client.base_url, api_key=client.api_key), and keep a rollout's state in local variables. Or leave out "
    "`concurrency` and environment.concurrency: then a process plays one rollout at a time"
)
"""Advice for the author of an agent whose rollouts are mixed up."""
PING = 2.0
"""Seconds between keep-alive comments in a stream; clients time out on silence."""


@frozen(kw_only=True)
class Reply:
    """A reply to a client: JSON, or the events of a stream."""

    body: bytes
    status: int = 200
    stream: bool = False
    failure: bytes = b""
    """The error of ``body`` as an event, for a stream that began before the request failed."""


class Refused(Exception):  # noqa: N818 - named after the outcome
    """Raised for a request without a completion.

    Attributes:
        status: HTTP status of the reply.
        code: machine-readable reason.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@frozen(eq=False)
class Pending:
    """A request that is being answered."""

    task: asyncio.Task[Reply]
    streams: asyncio.Future[None]
    """Done when the engine starts the completions of a stream."""


@define(eq=False)
class Session:
    """A running rollout of an agent.

    Args:
        client: address, key and model name for the agent.
        ended: called once, when the session ends.
        ignored: called with the names of a request's fields that have no effect.
        conversations: the conversations of all sessions.
    """

    client: AgentClient
    play: Play
    ended: Callable[[], object] = lambda: None
    ignored: Callable[[Sequence[str]], None] = lambda names: None
    conversations: Conversations = field(factory=Conversations)
    recorder: Recorder = field(init=False)
    unreadable: str = field(init=False, default="")
    """Why a message of the agent cannot be encoded, which fails the rollout; or ""."""
    _repeats: Repeats[Pending] = field(init=False, factory=Repeats)
    _replies: dict[str, Node] = field(init=False, factory=dict)
    """Completions by the id of their reply."""
    _running: set[asyncio.Task[Reply]] = field(init=False, factory=set)
    _fault: asyncio.Event = field(init=False, factory=asyncio.Event)
    _why: Exception | None = field(init=False, default=None)
    _error: str | None = field(init=False, default=None)
    """The engine's last error; None after the next completed request."""
    _closed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.recorder = Recorder(self.play.limits, self.play.group, self.conversations)

    async def broken(self) -> Exception:
        """Wait until a request fails for a reason that ends the run, such as a bug; return the error."""
        await self._fault.wait()
        assert self._why is not None
        return self._why

    def fail(self, why: Exception) -> None:
        """End the run with an error that is not the rollout's."""
        self._why = why
        self._fault.set()

    async def aclose(self) -> Recording:
        """End the session and cancel its running requests; return the recording."""
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
    ) -> tuple[Call[Pending], Reply]:
        """Answer a request; a retry receives the answer of the request that it repeats.

        ``alive`` is called when the engine starts a stream, and then every ``every`` seconds.  Cancelling
        this does not cancel the request: a disconnected client may retry.  Raises Refused if the session has
        ended, or the client reuses the key of another request.
        """
        try:
            call = self._repeats.repeated(attempt)
        except KeyReused:
            error = (
                f"the Idempotency-Key {attempt.key[:80]!r} belongs to another request; use a new key for each"
            )
            raise Refused(422, error, "idempotency_key_reused") from None
        if call is None:
            if self._closed:
                raise Refused(401, "this rollout has ended", "ended")
            streams = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._answer(dialect, body, streams), name="request of an agent")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            call = self._repeats.begin(attempt, Pending(task, streams))
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

    def delivered(self, call: Call[Pending], attempt: Attempt) -> None:
        """Record that a client received its reply."""
        self._repeats.delivered(call, attempt)

    async def count_tokens(self, dialect: Dialect, body: bytes) -> Reply:
        """Return the number of tokens of a request, for Anthropic's ``count_tokens``."""
        try:
            _, turn = await self._encoded(dialect, body)
        except Refused as refused:
            return refusal(dialect, refused)
        return Reply(body=json.dumps({"input_tokens": len(turn.context)}).encode())

    async def _answer(self, dialect: Dialect, body: bytes, streams: asyncio.Future[None]) -> Reply:
        try:
            request, turn = await self._encoded(dialect, body)
            completions = await self._generate(request, turn, streams)
            tokens = sum(len(completion.tokens) for completion in completions)
            return await self.play.renderer.run(
                lambda: self._recorded(dialect, request, turn, completions), tokens
            )
        except Refused as refused:
            return refusal(dialect, refused)
        except Exception as error:
            self.fail(error)
            return refusal(dialect, Refused(500, errors.describe(error), "internal"))

    async def _encoded(self, dialect: Dialect, body: bytes) -> tuple[ChatRequest, Turn]:
        """Parse and encode a request.  Raises Refused; one that cannot be encoded fails the rollout."""
        try:
            return await self.play.renderer.run(lambda: self._read(dialect, body), len(body))
        except errors.ControlInText as error:
            self.unreadable = str(error)
            raise Refused(400, str(error), "control_in_text") from error

    def _read(self, dialect: Dialect, body: bytes) -> tuple[ChatRequest, Turn]:
        """Parse a request and encode its new messages.  Raises Refused, and PluginError like the recorder."""
        try:
            request = dialect.read(read_json(body, dict), self._history)
            turn = self.recorder.turn(request.messages, request.tools, self.play.renderer)
        except errors.ControlInText:
            raise
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
        if request.stream:  # only now: the refusals above need their HTTP status, which a stream would hide
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
        """Record completions, and encode the reply."""
        context = turn.context.tolist()
        rows = [completion.token_ids.tolist() for completion in completions]
        texts = self.play.renderer.texts(rows, [context] * len(rows))
        (end,) = self.play.renderer.texts([context[-_TAIL:]])
        thinking = end.rstrip().endswith(thoughts.THOUGHT_OPENS)  # some templates open the thinking block
        answers = []
        for completion, text in zip(completions, texts, strict=True):
            message = self._message(request, turn, completion, text)
            node = self.recorder.record(turn, completion, message)
            answer = Answer(
                id=f"{len(self._replies):08d}",
                message=node.message,
                finish_reason=node.finish_reason,
                prompt_tokens=node.prompt_tokens,
                completion_tokens=len(node.tokens),
                thinking=thinking and thoughts.THOUGHT_ENDS not in text,
                stop=next(iter(_stops(request, completion, text)), None),
            )
            self._replies[f"resp_{answer.id}"] = node
            thought = self._thought_tokens(completion, text) if answer.parts[0] else 0
            answers.append(evolve(answer, thought_tokens=thought))
        return Reply(body=encoded(dialect, request, answers), stream=request.stream)

    def _message(self, request: ChatRequest, turn: Turn, completion: Completion, text: str) -> Message:
        """Parse a completion into a message; malformed tool calls stay text, as no client could run them."""
        message = self.play.renderer.message(
            text, token_ids=completion.token_ids, before=turn.context, tools=turn.tools
        )
        calls = message.get("tool_calls") or ()
        if any(not call["function"]["name"] for call in calls):
            message = {"role": "assistant", "content": text}
        content = str(message.get("content") or "")
        for stop in _stops(request, completion, text):  # a token may have more characters behind the text
            content = content.partition(stop)[0]
        return {**message, "content": content}

    def _thought_tokens(self, completion: Completion, text: str) -> int:
        """Return the number of tokens up to the end of a completion's thinking."""
        ids = completion.token_ids.tolist()
        if not (ends := text.count(thoughts.THOUGHT_ENDS)):
            return len(ids)

        def thinks(tokens: int) -> bool:
            (part,) = self.play.renderer.texts([ids[:tokens]])
            return part.count(thoughts.THOUGHT_ENDS) == ends

        return 1 + bisect.bisect_left(range(1, len(ids)), True, key=thinks)

    def _history(self, id: str) -> tuple[Message, ...] | None:
        node = self._replies.get(id)
        return None if node is None else node.conversation()


def _stops(request: ChatRequest, completion: Completion, text: str) -> list[str]:
    """Return the stop sequences of a request that are in a completion, the one that ended it first."""
    found = [stop for stop in request.stop if stop in text] if completion.finish_reason == "stop" else []
    return sorted(found, key=lambda stop: text.index(stop) + len(stop))


_NO_CALL = (
    "its agent requested no completion; the model is at client.base_url with client.api_key, and for a "
    "program in the variables OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY"
)


async def played(session: Session) -> Recording:
    """Run the environment's agent until it ends, and close the session.

    Raises the error of ``Session.broken``.
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
    if session.unreadable:
        task = session.play.prompt.environment
        report("control_in_text", f"agents of task {task!r}", session.unreadable)
        feedback = Feedback(error=session.unreadable)
    if not recording.turn_tokens and (feedback is None or feedback.error is None):
        feedback = Feedback(error=_NO_CALL)
    return evolve(recording, feedback=feedback)


_CODES = {"tokens": "context_length_exceeded"}


def refusal(dialect: Dialect, refused: Refused) -> Reply:
    """Return the reply with the reason why there is no completion."""
    fields = refused.status, str(refused), refused.code
    body = json.dumps(dialect.error(*fields), ensure_ascii=False).encode()
    return Reply(body=body, status=refused.status, failure=event(*dialect.failure(*fields)))


def attempt_digest(path: str, body: bytes) -> bytes:
    """Return a digest of path and body."""
    return blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
