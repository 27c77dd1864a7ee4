"""Records the completions of an agent's rollout as a tree, and divides them into segments.  Pure.

An agent sends the whole conversation with each request.  The recorder compares it with the recorded
conversations: the request continues the longest one that is a prefix of it, and only the messages after this
prefix are encoded.

    request   u1                     row   u1 | a1
              u1 a1 u2                     u1 | a1 | u2 | a2                      the agent continues
              u1 a1 u3               new   u1 a1 u3 | a3                          the agent branches
              u1' a1 u4              new   u1' a1 u4 | a4                         its history was edited

A completion that continues the end of a row extends this row.  Any other begins a new row: the agent
repeated a request, returned to an earlier point, shortened or edited its history, or the chat template
rewrites it.  The prompt of the new row is the whole context of the model, so a row never trains tokens that
were sampled in another row: each sampled token is trained in exactly one row.

A completion is stored as an index into its row, and a conversation as its difference to an earlier one.
Memory grows with the length of the conversation, not with the number of requests that repeat it.

Messages are compared by meaning, because clients rewrite them: the comparison ignores how a text is split
into parts, white space around a reply, the order of a call's arguments, ids of calls, and reasoning.
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
from grpo_core.text import thoughts
from grpo_core.text.messages import parsed
from grpo_core.text.response_formats import numbered

Tools = Sequence[Mapping[str, Any]]


@define(eq=False)
class _Row:
    """A segment that grows while the agent continues its conversation."""

    prompt_ids: NDArray[np.int32]
    parts: list[Tokens]
    tip: Node | None = None
    """The last completion of the row."""

    def segment(self) -> Segment:
        return Segment(prompt_ids=self.prompt_ids, tokens=Tokens.concatenate(self.parts))


@define(eq=False)
class Node:
    """A recorded completion."""

    parent: Node | None
    """The completion that the request continued."""
    added: tuple[Message, ...]
    """The messages between ``parent`` and this completion (without a parent: all before it), as sent."""
    message: Message
    """The message of the completion, as the agent receives it."""
    row: _Row
    index: int
    """Index of the completion in ``row.parts``."""
    prompt_tokens: int
    """Number of tokens of the context."""
    finish_reason: EndReason

    @property
    def tokens(self) -> Tokens:
        """The sampled tokens."""
        return self.row.parts[self.index]

    def conversation(self) -> tuple[Message, ...]:
        """Return all messages up to this completion, inclusive."""
        parts, node = [], self
        while True:
            parts.append((*node.added, node.message))
            if node.parent is None:
                return tuple(message for part in reversed(parts) for message in part)
            node = node.parent

    def whole(self) -> NDArray[np.int32]:
        """Return the context and the sampled tokens, as ids."""
        return np.concatenate([self.row.prompt_ids, *(part.ids for part in self.row.parts[: self.index + 1])])


@frozen(eq=False)
class Turn:
    """A request that is ready for the engine."""

    added: tuple[Message, ...]
    """The messages after ``parent``, or all messages without one."""
    tools: Tools
    key: bytes
    context: NDArray[np.int32]
    """Tokens of the context."""
    parent: Node | None = None
    """The completion that the request continues."""
    new: NDArray[np.int32] | None = None
    """Tokens between ``parent`` and the next completion."""


@define(eq=False)
class Conversations:
    """The conversations of all running rollouts, and the groups whose rollouts sampled their last reply."""

    _groups: dict[bytes, list[str]] = field(init=False, factory=dict)

    def add(self, key: bytes, group: str) -> None:
        self._groups.setdefault(key, []).append(group)

    def remove(self, key: bytes, group: str) -> None:
        self._groups[key].remove(group)
        if not self._groups[key]:
            del self._groups[key]

    def is_of_others(self, key: bytes, group: str) -> bool:
        """Whether the last reply of a conversation was sampled by rollouts of other groups only."""
        groups = self._groups.get(key)
        return groups is not None and group not in groups


@define(eq=False)
class Recorder:
    """Records the completions of one rollout of an agent.

    Args:
        group: identifier of the rollout's group.
        conversations: the conversations of all running rollouts.
    """

    limits: Limits
    group: str = ""
    conversations: Conversations = field(factory=Conversations)
    turns: int = 0
    tool_calls: int = 0
    limit: EndReason | None = None
    """The limit that refused a turn."""
    _known: dict[bytes, list[Node]] = field(init=False, factory=dict)
    """Completions by the key of the conversation that they end."""
    _rows: list[_Row] = field(init=False, factory=list)
    """Rows in the order of their newest completions, so that a recording ends with the turn played last."""
    _last: Node | None = field(init=False, default=None)
    _sent: dict[bytes, Message] = field(init=False, factory=dict)
    """Messages of requests without a parent, by the key of the conversation that they end."""
    _completed: set[bytes] = field(init=False, factory=set)
    """Keys of the conversations that were completed."""
    _sampled: list[bytes] = field(init=False, factory=list)
    """Keys of the conversations that end with a sampled reply, until the rollout ends."""

    def turn(self, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Turn:
        """Encode the new part of a request.

        Raises ModelError if the chat template cannot render it, and PluginError if it continues the
        conversation of another prompt's rollout.
        """
        conversation = tuple(messages)
        # a digest of each prefix; the first one covers the tools alone
        keys = [blake2b(_canonical(list(tools)).encode(), digest_size=16).digest()]
        for message in conversation:
            keys.append(_key(keys[-1], message))
        self._check_owner(conversation, keys)
        for index in range(len(conversation) - 1, 0, -1):
            nodes = self._known.get(keys[index])
            if nodes and _is_reply(conversation[index - 1]):
                node = _nearest(nodes, conversation[index - 1])
                if (turn := _continued(node, conversation[index:], tools, renderer)) is not None:
                    return evolve(turn, key=keys[-1])
                break
        ids = np.asarray(renderer.prompt_ids(conversation, tools), np.int32)
        added = tuple(map(self._once, keys[1:], conversation))
        return Turn(added=added, tools=tools, key=keys[-1], context=ids)

    def _check_owner(self, conversation: Sequence[Message], keys: Sequence[bytes]) -> None:
        """Raise PluginError if the conversation has a reply that another prompt's rollout sampled.

        No error if this rollout sampled a reply at the same point: the agent may have edited it.
        """
        for index in range(len(conversation), 0, -1):
            if not _is_reply(conversation[index - 1]):
                continue
            if keys[index] in self._known or keys[index - 1] in self._completed:
                return
            if self.conversations.is_of_others(keys[index], self.group):
                reply = errors.shortened(str(conversation[index - 1].get("content") or ""), 80)
                raise PluginError(
                    f"agents: a rollout continues a reply that another prompt's rollout sampled: {reply!r}"
                )

    def end(self) -> None:
        """End the rollout; rollouts of other prompts may continue its conversations from now on."""
        while self._sampled:
            self.conversations.remove(self._sampled.pop(), self.group)

    def _once(self, key: bytes, message: Message) -> Message:
        """Return the stored object of an equal message, so that repeated messages are in memory once."""
        kept = self._sent.setdefault(key, message)
        return kept if kept == message else message

    def admit(self, turn: Turn, n: int = 1) -> EndReason | None:
        """Return the limit that forbids ``n`` completions of this turn; None counts the turn as played."""
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
        """Uncount admitted turns that the engine did not complete."""
        self.turns -= n

    def record(self, turn: Turn, completion: Completion, message: Message) -> Node:
        """Add a completion of an admitted turn; the node's message is the one that the agent receives."""
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": numbered(calls, self.tool_calls)}
            self.tool_calls += len(calls)
        row = self._row(turn)
        row.parts.append(completion.tokens)
        room = self.limits.room(len(turn.context) + len(completion.tokens))
        reason: EndReason = completion.finish_reason
        node = Node(
            parent=turn.parent,
            added=turn.added,
            message=message,
            row=row,
            index=len(row.parts) - 1,
            prompt_tokens=len(turn.context),
            finish_reason="tokens" if reason == "length" and room <= 0 else reason,
        )
        row.tip = self._last = node
        key = _key(turn.key, message)
        self._known.setdefault(key, []).append(node)
        self._completed.add(turn.key)
        self._sampled.append(key)
        self.conversations.add(key, self.group)
        return node

    def _row(self, turn: Turn) -> _Row:
        """Return the row that a completion extends; a completion is in exactly one row."""
        parent = turn.parent
        if parent is not None and turn.new is not None and len(turn.new) and parent.row.tip is parent:
            parent.row.parts.append(Tokens.context(turn.new))
            self._rows.remove(parent.row)
            self._rows.append(parent.row)
            return parent.row
        row = _Row(prompt_ids=turn.context, parts=[])
        self._rows.append(row)
        return row

    def recording(self, error: str | None = None) -> Recording:
        """Return the recording so far."""
        last = self._last
        return Recording(
            segments=tuple(row.segment() for row in self._rows),
            messages=() if last is None else last.conversation(),
            tool_calls=self.tool_calls,
            finish_reason=self.limit or ("stop" if last is None else last.finish_reason),
            limited=self.limit is not None,
            error=error,
        )


def _is_reply(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _continued(node: Node, messages: Sequence[Message], tools: Tools, renderer: Renderer) -> Turn | None:
    """Return the turn after a completion, or None if the template rewrites the history."""
    last = next(iter(node.tokens.ids[-1:].tolist()), None)
    new = renderer.continuation_ids(
        messages,
        before=node.conversation()[:-1],
        said=node.message,
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
    """Return the completion that an agent continues, of several with the same meaning.

    Prefers the same text and thinking, then the end of a row, then the newest.
    """
    return max(
        enumerate(nodes),
        key=lambda pair: (
            thoughts.parted(pair[1].message) == thoughts.parted(sent),
            pair[1].row.tip is pair[1],
            pair[0],
        ),
    )[1]


# ---------------------------------------------------------------------------------- comparing


def _key(before: bytes, message: Message) -> bytes:
    return blake2b(before + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def meaning(message: Message) -> str:
    """Return a canonical text, equal for messages with the same meaning."""
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
