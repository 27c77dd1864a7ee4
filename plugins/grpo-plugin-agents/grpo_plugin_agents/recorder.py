"""Records what the model of an agent samples: a tree of completions, and the segments that they make.  Pure.

An agent sends the whole conversation with each request.  What it sends back is compared with what was
sampled: the request continues the longest recorded conversation with which it begins, and only the messages
after that are encoded.

    request   u1                     row   u1 | a1
              u1 a1 u2                     u1 | a1 | u2 | a2                      the agent goes on
              u1 a1 u3               new   u1 a1 u3 | a3                          it goes another way
              u1' a1 u4              new   u1' a1 u4 | a4                         it edited its history

A completion that continues the end of a row extends this row.  Any other begins a new one: the agent has
asked twice, has returned to an earlier point, has shortened or edited its history, or the chat template
rewrites it.  The new row begins with all that the model reads, so a row never trains what another one has
sampled: each sampled token is in the row in which it was sampled, and in no other.

A completion is kept as a place in its row, and a conversation as what it adds to an earlier one: what a
session keeps grows with what was said, and not with how often it was sent.

Messages are compared by what they mean, because clients rewrite them: the parts of a text, the spaces around
a reply, the order of a call's arguments, the ids of calls and a reply's reasoning make no difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from grpo_core import (
    Completion,
    EndReason,
    Limits,
    Message,
    PluginError,
    Recording,
    Renderer,
    Segment,
    Tokens,
    errors,
    split_thought,
)
from grpo_core.kit import numbered, parsed, thoughts

Tools = Sequence[Mapping[str, Any]]


@define(eq=False)
class _Row:
    """A segment that grows while the agent goes on."""

    prompt_ids: NDArray[np.int32]
    parts: list[Tokens]
    tip: Node | None = None
    """The completion at its end."""
    turn_tokens: list[int] = field(factory=list)
    """Number of tokens of each of its completions."""

    def segment(self) -> Segment:
        return Segment(prompt_ids=self.prompt_ids, tokens=Tokens.concatenate(self.parts))


@define(eq=False)
class Node:
    """A recorded completion."""

    parent: Node | None
    """The completion that its request continued."""
    added: tuple[Message, ...]
    """The messages after that, or all before it, as the agent wrote them."""
    said: Message
    """Its message."""
    row: _Row
    place: int
    """Its number among the parts of the row."""
    prompt_tokens: int
    """Number of tokens that the model read."""
    finish_reason: EndReason

    @property
    def tokens(self) -> Tokens:
        """Its tokens, which were sampled."""
        return self.row.parts[self.place]

    def conversation(self) -> tuple[Message, ...]:
        """Return all messages up to its own."""
        parts, node = [], self
        while True:
            parts.append((*node.added, node.said))
            if node.parent is None:
                return tuple(message for part in reversed(parts) for message in part)
            node = node.parent

    def whole(self) -> NDArray[np.int32]:
        """Return all tokens that the model read, and what was sampled."""
        return np.concatenate([self.row.prompt_ids, *(part.ids for part in self.row.parts[: self.place + 1])])


@frozen(eq=False)
class Turn:
    """A request that is ready for the engine."""

    added: tuple[Message, ...]
    """The messages after the completion that it continues, or all."""
    tools: Tools
    key: bytes
    context: NDArray[np.int32]
    """Tokens that the model reads."""
    parent: Node | None = None
    """The completion that it continues."""
    new: NDArray[np.int32] | None = None
    """Tokens between that completion and the next one."""


@define(eq=False)
class Talks:
    """The conversations of the rollouts that play now: who has sampled their ends."""

    _groups: dict[bytes, list[str]] = field(init=False, factory=dict)

    def add(self, key: bytes, group: str) -> None:
        self._groups.setdefault(key, []).append(group)

    def remove(self, key: bytes, group: str) -> None:
        self._groups[key].remove(group)
        if not self._groups[key]:
            del self._groups[key]

    def is_of_others(self, key: bytes, group: str) -> bool:
        """Whether only rollouts of other groups have sampled the end of a conversation."""
        groups = self._groups.get(key)
        return groups is not None and group not in groups


@define(eq=False)
class Recorder:
    """The completions of one rollout of an agent.

    Args:
        group: that of the rollout.
        talks: those of all rollouts.
    """

    limits: Limits
    group: str = ""
    talks: Talks = field(factory=Talks)
    turns: int = 0
    tool_calls: int = 0
    limit: EndReason | None = None
    """The limit that refused a turn."""
    _known: dict[bytes, list[Node]] = field(init=False, factory=dict)
    """Completions by the conversation that ends with them."""
    _rows: list[_Row] = field(init=False, factory=list)
    """In the order of their newest completions: the last turn of a recording is the last that was played."""
    _last: Node | None = field(init=False, default=None)
    _sent: dict[bytes, Message] = field(init=False, factory=dict)
    """Messages of requests that continue nothing, by the conversation that ends with them."""
    _completed: set[bytes] = field(init=False, factory=set)
    """Conversations after which it has sampled."""
    _said: list[bytes] = field(init=False, factory=list)
    """Conversations that end with what it has sampled, until it ends."""

    def turn(self, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Turn:
        """Encode the new part of a request.

        Raises ModelError if the chat template cannot render it, PluginError if it continues the conversation
        of another prompt's rollout.
        """
        conversation = tuple(messages)
        # a digest of each beginning; the first is that of the tools alone
        keys = [blake2b(_canonical(list(tools)).encode(), digest_size=16).digest()]
        for message in conversation:
            keys.append(_key(keys[-1], message))
        self._check_talk(conversation, keys)
        for place in range(len(conversation) - 1, 0, -1):
            nodes = self._known.get(keys[place])
            if nodes and _is_reply(conversation[place - 1]):
                node = _nearest(nodes, conversation[place - 1])
                if (turn := _continued(node, conversation[place:], tools, renderer)) is not None:
                    return evolve(turn, key=keys[-1])
                break
        ids = np.asarray(renderer.prompt_ids(conversation, tools), np.int32)
        added = tuple(map(self._once, keys[1:], conversation))
        return Turn(added=added, tools=tools, key=keys[-1], context=ids)

    def _check_talk(self, conversation: Sequence[Message], keys: Sequence[bytes]) -> None:
        """Raise PluginError if another prompt's rollout has sampled a reply in it.

        One that has asked for a reply in the same place may have edited its own.
        """
        for place in range(len(conversation), 0, -1):
            if not _is_reply(conversation[place - 1]):
                continue
            if keys[place] in self._known or keys[place - 1] in self._completed:
                return
            if self.talks.is_of_others(keys[place], self.group):
                reply = errors.shortened(str(conversation[place - 1].get("content") or ""), 80)
                raise PluginError(
                    "agents: a rollout goes on with a reply that another prompt's rollout has sampled: "
                    f"{reply!r}"
                )

    def end(self) -> None:
        """End the rollout: those of other prompts may say what it has said."""
        while self._said:
            self.talks.remove(self._said.pop(), self.group)

    def _once(self, key: bytes, message: Message) -> Message:
        """Return the object that is kept for a message, which may be sent with each request."""
        kept = self._sent.setdefault(key, message)
        return kept if kept == message else message

    def admit(self, turn: Turn, n: int = 1) -> EndReason | None:
        """Return the limit that forbids ``n`` completions of this turn, or None; the turn then counts."""
        tokens = len(turn.context)
        if not tokens:
            return None
        met = self.limits.met(turns=self.turns + n - 1, tool_calls=self.tool_calls, tokens=tokens)
        if met is None:
            self.turns += n
        else:
            self.limit = met
        return met

    def dismiss(self, n: int = 1) -> None:
        """Take back turns that were admitted: the engine did not complete them."""
        self.turns -= n

    def record(self, turn: Turn, completion: Completion, message: Message) -> Node:
        """Add a completion of an admitted turn; the result has its message as the agent receives it."""
        said = message
        if calls := message.get("tool_calls"):
            said = {**message, "tool_calls": numbered(calls, self.tool_calls)}
            self.tool_calls += len(calls)
        row = self._row(turn)
        row.parts.append(completion.tokens)
        row.turn_tokens.append(len(completion.tokens))
        room = self.limits.room(len(turn.context) + len(completion.tokens))
        reason: EndReason = completion.finish_reason
        node = Node(
            parent=turn.parent,
            added=turn.added,
            said=said,
            row=row,
            place=len(row.parts) - 1,
            prompt_tokens=len(turn.context),
            finish_reason="tokens" if reason == "length" and room <= 0 else reason,
        )
        row.tip = self._last = node
        key = _key(turn.key, said)
        self._known.setdefault(key, []).append(node)
        self._completed.add(turn.key)
        self._said.append(key)
        self.talks.add(key, self.group)
        return node

    def _row(self, turn: Turn) -> _Row:
        """Return the row that a completion extends; no completion is in two rows."""
        parent = turn.parent
        if parent is not None and turn.new is not None and parent.row.tip is parent:
            parent.row.parts.append(Tokens.context(turn.new))
            self._rows.remove(parent.row)
            self._rows.append(parent.row)
            return parent.row
        row = _Row(prompt_ids=turn.context, parts=[])
        self._rows.append(row)
        return row

    def recording(self, error: str | None = None) -> Recording:
        """Return what was recorded so far."""
        last = self._last
        return Recording(
            segments=tuple(row.segment() for row in self._rows),
            messages=() if last is None else last.conversation(),
            turn_tokens=tuple(tokens for row in self._rows for tokens in row.turn_tokens),
            tool_calls=self.tool_calls,
            finish_reason=self.limit or ("stop" if last is None else last.finish_reason),
            limited=self.limit is not None,
            error=error,
        )


def _is_reply(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _continued(node: Node, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Turn | None:
    """Return the turn after a completion, or None if the template rewrites what was before."""
    last = next(iter(node.tokens.ids[-1:].tolist()), None)
    new = renderer.continuation_ids(
        messages,
        before=node.conversation()[:-1],
        said=node.said,
        end=last if last in renderer.stop_token_ids else None,
        tools=tools,
        sampled=node.tokens.ids,
    )
    if new is None:
        return None
    ids = np.asarray(new, np.int32)
    return Turn(
        added=tuple(messages),
        tools=tools,
        key=b"",
        context=np.concatenate([node.whole(), ids]),
        parent=node,
        new=ids,
    )


def _nearest(nodes: Sequence[Node], sent: Message) -> Node:
    """Return the completion that an agent continues, of several that mean the same.

    It is the newest, if possible one with the same text and thinking, and one that ends its row.
    """
    return max(
        enumerate(nodes),
        key=lambda pair: (
            thoughts.parted(pair[1].said) == thoughts.parted(sent),
            pair[1].row.tip is pair[1],
            pair[0],
        ),
    )[1]


# ---------------------------------------------------------------------------------- comparing


def _key(before: bytes, message: Message) -> bytes:
    return blake2b(before + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def meaning(message: Message) -> str:
    """Return a text that is equal for messages that mean the same."""
    role, content = message["role"], str(message.get("content") or "")
    if role != "assistant":
        return _canonical([role, content])
    calls = [
        [call["function"]["name"], parsed(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return _canonical([role, split_thought(content)[1].strip(), calls])


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
