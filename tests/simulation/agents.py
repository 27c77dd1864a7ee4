"""Simulated agents: they talk to the real sessions of their rollouts, without a socket, as agents do.

    AgentLedger          keeps account of what the engine said to each session, to compare what is trained
    SimulatedEndpoint    opens real sessions (of ``grpo_plugin_agents``), whose engine the ledger overhears
    SimulatedAgent       a client that goes on, forks, edits, asks twice, retries, vanishes and hangs

What an agent does depends on the seed of its rollout alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field

from grpo_core.contracts import playing
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import (
    AgentClient,
    Completion,
    GenerationRequest,
    Message,
    Recording,
    Rollout,
)
from grpo_core.processes.aio import cancel
from grpo_plugin_agents.dialects import CHAT
from grpo_plugin_agents.recorder import Conversations
from grpo_plugin_agents.repeats import Attempt
from grpo_plugin_agents.session import Refused, Reply, Session, attempt_digest, played

Law = Callable[[bool, int, str], None]
Said = tuple[bytes, bytes, bytes]
"""Ids, logprobs and versions of a completion."""

TRIES = 3
"""Attempts at a request that the engine does not complete."""
PATIENCE = 2.0
"""Seconds after which a client that vanishes has gone, at most."""


@define(eq=False)
class Play:
    """A rollout of an agent, as seen from the engine and by the agent."""

    given: playing.Play
    said: list[Completion] = field(factory=list)
    """Completions in the order in which the session got them."""
    asked: int = 0
    """Number of requests that reached the engine."""
    running: int = 0
    peak: int = 0
    """Largest number of completions that the session had or waited for."""
    failing: bool = False
    """Whether the engine's last answer was an error."""
    limited: bool = False
    """Whether the agent was refused a completion because of a limit."""
    claims: float | None = None
    """The agent's own result."""
    closed: bool = False
    outcome: str = ""
    """"kept" or "lost", once the rollout has ended."""

    @property
    def slot(self) -> str:
        return self.given.group


class AgentLedger:
    """Account of all sessions: each completion is trained once, or its rollout is recorded as lost."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self.plays: dict[int, Play] = {}
        """The last play of each rollout, by its seed."""
        self._cuts: dict[int, dict[int, Play]] = {0: {}}
        """The plays at each cut: a life that continues from an older one trains what was played before it."""
        self._settled: set[str] = set()
        """Slots whose groups were trained, filtered or skipped in this life."""
        self._of_this_life: list[Play] = []

    def saving(self, step: int) -> None:
        self._cuts[step] = dict(self.plays)

    def begin_life(self, step: int) -> None:
        """Continue from the cut of a step."""
        self.plays = dict(self._cuts[step])
        self._of_this_life.clear()
        self._settled.clear()

    def opened(self, given: playing.Play) -> Play:
        self.plays[given.seed] = play = Play(given)
        self._of_this_life.append(play)
        return play

    def settled(self, slot: int) -> None:
        self._settled.add(str(slot))

    def ended(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Rollouts of agents have ended: all that the engine said is in them, or they are lost."""
        for rollout in rollouts:
            play = self.plays.get(rollout.seed)
            if play is None:  # its session could not be opened
                self._law(rollout.error is not None, step, "a rollout of an agent had no session")
                continue
            self._law(play.closed, step, "the session of a rollout that has ended is open")
            play.outcome = "kept" if rollout.error is None else "lost"
            if rollout.error is None:
                self.complete(step, rollout)
            else:
                self._law(rollout.reward is None, step, "a rollout that failed has a reward")
                spoilt = play.claims is not None and not play.failing
                self._law(not spoilt, step, f"an agent that has won is not trained: {rollout.error}")
                blamed = play.failing and not rollout.lost
                self._law(not blamed, step, f"the engine failed, and the agent is blamed: {rollout.error}")

    def complete(self, step: int, rollout: Rollout) -> Play:
        """Check that a rollout has each completion of its session once."""
        play = self.plays[rollout.seed]
        said = Counter(
            (done.token_ids.tobytes(), done.logprobs.tobytes(), done.versions.tobytes()) for done in play.said
        )
        found = Counter(part for segment in rollout.segments for part in _sampled(segment.tokens))
        self._law(
            found == said, step, f"of {said.total()} completions of a session {found.total()} are kept once"
        )
        self._law(rollout.turns == len(play.said), step, "a rollout counts other turns than its session had")
        self._law(len(said) == len(play.said), step, "a session sampled twice with one seed")
        most = play.given.limits.max_turns
        self._law(len(play.said) <= most, step, f"a session had {len(play.said)} of {most} completions")
        return play

    def finished(self, step: int) -> None:
        """A run has ended: the completions of each session were trained, or are recorded as lost."""
        for play in self._of_this_life:
            self._law(play.closed, step, "a session is open after the end of the run")
            if play.slot.startswith("validation"):
                continue
            done = play.outcome == "lost" or (play.outcome == "kept" and play.slot in self._settled)
            self._law(done, step, f"what a session of slot {play.slot} sampled has vanished")


def _sampled(tokens: Any) -> list[Said]:
    """Return each unbroken run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens.sampled, [False]]).astype(np.int8)))
    return [
        (tokens.ids[a:b].tobytes(), tokens.logprobs[a:b].tobytes(), tokens.versions[a:b].tobytes())
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


@define(eq=False)
class _Overheard:
    """The engine of one session; the ledger hears what it says."""

    engine: Engine
    play: Play

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        play = self.play
        play.asked += 1
        play.running += len(requests)
        play.peak = max(play.peak, play.running + len(play.said))
        try:
            said = await self.engine.generate(requests)
        except Exception:
            play.failing = True
            raise
        finally:
            play.running -= len(requests)
        play.failing = False
        play.said += said
        return said


class SimulatedEndpoint(playing.Player):
    """The player of agents of this process."""

    def __init__(self, ledger: AgentLedger) -> None:
        self._ledger = ledger
        self._keys = itertools.count()
        self._conversations = Conversations()
        self.sessions: dict[str, tuple[Session, Play]] = {}
        """The open sessions, by key."""

    async def play(self, given: playing.Play, /) -> Recording:
        return await played(self.open(given))

    def open(self, given: playing.Play) -> Session:
        play, key = self._ledger.opened(given), f"key {next(self._keys)}"

        def ended() -> None:
            play.closed = True
            del self.sessions[key]

        overheard: Any = _Overheard(given.engine, play)
        session = Session(
            client=AgentClient(base_url="", api_key=key, model="policy"),
            play=evolve(given, engine=overheard),
            ended=ended,
            conversations=self._conversations,
        )
        self.sessions[key] = session, play
        return session


class AgentError(Exception):
    """The agent ends because it got no completion."""


class LimitError(AgentError):
    """A limit refused a completion."""


Conversation = tuple[Message, ...]

ACTS = ("go on", "go on", "go on", "fork", "again", "both", "edit", "compact", "retry", "vanish", "several",
        "hang")  # fmt: skip


class SimulatedAgent:
    """Plays one rollout.

    Args:
        prompt: messages with which its conversations begin.
    """

    def __init__(self, session: Session, play: Play, law: Law, prompt: Conversation) -> None:
        self._session, self._play, self._law, self._prompt = session, play, law, prompt
        self._random = random.Random(f"agent/{play.given.seed}")
        self._known: list[Conversation] = []
        """Conversations that end with a reply."""
        self._left: list[asyncio.Task[Any]] = []
        """Requests for whose answers it does not wait."""
        self._bodies = 0

    async def play(self) -> str:
        """Talk, and return the last reply.  Raises AgentError."""
        try:
            await self._take(self._prompt)
            for _ in range(self._random.randint(0, 4)):
                await self._act(self._random.choice(ACTS))
        finally:
            await cancel(self._left)
        return str(self._known[-1][-1]["content"])

    async def _act(self, act: str) -> None:
        match act:
            case "go on":
                await self._take(self._continued(self._known[-1]))
            case "fork":
                await self._take(self._continued(self._random.choice(self._known)))
            case "again":
                await self._again()
            case "both":
                first, second = self._random.choice(self._known), self._random.choice(self._known)
                found = await asyncio.gather(
                    self._take(self._continued(first)),
                    self._take(self._continued(second)),
                    return_exceptions=True,
                )
                for error in found:
                    if error is not None:
                        raise error
            case "edit":
                first, *others = self._continued(self._known[-1])
                await self._take(({**first, "content": f"edited {first['content']}"}, *others))
            case "compact":
                await self._take((self._prompt[0], self._user("in short")))
            case "retry":
                await self._retry()
            case "vanish":
                await self._vanish()
            case "several":
                await self._take(self._continued(self._known[-1]), n=2)
            case "hang":
                request = self._ask(self._body(self._continued(self._known[-1])))
                self._left.append(asyncio.create_task(request, name="agent that does not wait"))
                await asyncio.sleep(self._random.random())

    # ------------------------------------------------------------------------------ requests

    def _user(self, text: str) -> Message:
        return {"role": "user", "content": text}

    def _continued(self, conversation: Conversation) -> Conversation:
        """Return a conversation with a question; clients write replies in other words."""
        *before, reply = conversation
        if self._random.random() < 0.3:
            reply = {
                "content": [{"type": "text", "text": f" {reply['content']}"}],
                "role": "assistant",
                "id": "x",
            }
        return (*before, reply, self._user(self._random.choice(["again", "why"])))

    def _body(self, messages: Conversation, n: int = 1) -> bytes:
        """Return a body that is equal to no other one of this agent."""
        self._bodies += 1
        return json.dumps({"messages": messages, "n": n, "user": str(self._bodies)}).encode()

    async def _take(self, messages: Conversation, n: int = 1) -> None:
        """Ask, again if the engine fails, and remember the replies."""
        body, key = self._body(messages, n), str(self._bodies) if self._random.random() < 0.3 else ""
        for attempt in range(TRIES):
            asked = self._play.asked
            reply = await self._ask(body, key=key, retries=attempt if self._random.random() < 0.7 else None)
            self._law(
                reply.status != 503 or self._play.asked > asked,
                0,
                "a request that failed was not asked again",
            )
            if reply.status == 200:
                return self._remember(messages, reply)
        raise AgentError("the engine has failed")

    def _remember(self, messages: Conversation, reply: Reply) -> None:
        for choice in json.loads(reply.body)["choices"]:
            self._known.append((*messages, choice["message"]))

    async def _ask(
        self, body: bytes, *, key: str = "", retries: int | None = 0, gone: Callable[[], bool] = lambda: False
    ) -> Reply:
        """Send a request as the HTTP server does.  Raises AgentError if it is refused."""
        attempt = Attempt(body=attempt_digest("/v1", body), key=key, retries=retries, gone=gone)
        n, play = json.loads(body)["n"], self._play
        try:
            call, reply = await self._session.reply(CHAT, body, attempt)
        except Refused as refused:
            raise AgentError(str(refused)) from refused
        if not gone():
            self._session.delivered(call, attempt)
        if reply.status == 500:
            raise AgentError("the run ends")
        if reply.status not in (200, 503):
            self._law(b"max_turns" in reply.body, 0, f"a request is refused: {reply.body!r}")
            most = play.given.limits.max_turns
            self._law(play.peak + n > most, 0, f"{play.peak} + {n} of {most} completions are too many")
            play.limited = True
            raise LimitError
        return reply

    async def _again(self) -> None:
        """Another completion for the same request."""
        body = self._body(self._continued(self._known[-1]))
        first = await self._ask(body)
        asked = self._play.asked
        second = await self._ask(body, retries=self._random.choice([0, None]))
        if (first.status, second.status) == (200, 200):
            new = self._play.asked > asked and first.body != second.body
            self._law(new, 0, "a request for another completion got the one that was there")
            self._remember(tuple(json.loads(body)["messages"]), second)

    async def _retry(self) -> None:
        """The answer was sent and did not arrive, or the client loses it."""
        body, key = self._body(self._continued(self._known[-1])), self._random.choice(["", "key"])
        key += str(self._bodies) if key else ""
        first = await self._ask(body, key=key)
        if first.status != 200:
            return
        asked = self._play.asked
        second = await self._ask(body, key=key, retries=self._random.choice([1, None]) if key else 1)
        same = second.body == first.body and self._play.asked == asked
        self._law(same, 0, "a retry sampled anew")
        self._remember(tuple(json.loads(body)["messages"]), second)

    async def _vanish(self) -> None:
        """The connection breaks while the model writes, and perhaps the client asks once more."""
        body, gone = self._body(self._continued(self._known[-1])), False
        first = asyncio.create_task(self._ask(body, gone=lambda: gone), name="agent that vanishes")
        self._left.append(first)
        await asyncio.wait([first], timeout=self._random.random() * PATIENCE)
        if first.done():
            return
        gone = True
        await cancel([first])
        if self._random.random() < 0.5:
            return
        asked, failing = self._play.asked, self._play.failing
        second = await self._ask(body, retries=self._random.choice([1, None]))
        if second.status == 200 and not (failing or self._play.failing):
            self._law(self._play.asked == asked, 0, "a client that had vanished is sampled anew")
            self._remember(tuple(json.loads(body)["messages"]), second)
