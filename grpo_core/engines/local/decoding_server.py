"""The child's side of an engine in a child process: one loop takes calls and decodes in between.

ChildEngine (parent)                     DecodingServer (child)
generate(ticket, packed requests)  --->  check, add  ...  step, step, step  --->  packed completions
cancel(ticket)                     --->  forget
update_weights(weights)            --->  load, between two steps
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from attrs import define, field, frozen

from grpo_core.contracts.errors import EngineError, GrpoError
from grpo_core.contracts.records import Completion, GenerationRequest, Weights
from grpo_core.engines import wire
from grpo_core.processes.served import Call, Connection

EMPTY = Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
"""The completion of a request for no tokens."""


@define
class _OpenCall:
    """A ``generate`` call that is not answered yet."""

    id: int
    results: list[Completion | None]
    running: dict[int, int] = field(factory=dict)
    """Key of each request that is still decoded, and its place in ``results``."""


@frozen
class _Update:
    call: int
    steps: Iterator[None]


class DecodingServer(ABC):
    """Base class of the object that a ``ChildEngine`` makes in its child process.

    A subclass decodes requests; this class separates and answers the calls, and changes weights between two
    steps.  All methods are called on the child's main thread, one after another.

    Errors: an EngineError of ``check`` or ``add`` fails that call, an EngineError of ``step`` fails all
    requests that are running.  A GrpoError of ``load`` fails the update, and the engine must then still hold
    the previous weights.  Any other exception ends the process; the parent starts another one with the last
    weights, so no token is sampled by an engine in an unknown state.
    """

    name: ClassVar[str]
    """The engine's name in messages."""
    positions: int = 0
    """Largest number of tokens of a prompt with its completion, known when the first weights are loaded; 0
    means that only the model limits it."""

    _connection: Connection

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._calls: dict[int, _OpenCall] = {}
        """Calls by ticket, which is the parent's number of a ``generate``."""
        self._tickets: dict[int, int] = {}
        """Ticket of each running request."""
        self._update: _Update | None = None
        self._has_weights = False
        self._rests = False

    # ------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def load(self, weights: Weights) -> Iterator[None] | None:
        """Read, check and apply weights; every later token must be sampled from them.

        A plain method, or a generator: each ``yield`` lets the server decode one more step meanwhile.  Raises
        WeightSyncError if the weights cannot be read or are not this model's, ModelError if the model cannot
        be used; the engine then still holds the previous weights.
        """

    @abstractmethod
    def check(self, request: GenerationRequest) -> None:
        """Raises EngineError if this engine can never complete the request (see ``check_request``)."""

    @abstractmethod
    def add(self, key: int, request: GenerationRequest) -> None:
        """Take a request for at least one token; ``key`` identifies it."""

    def add_call(self, entries: Sequence[tuple[int, GenerationRequest]]) -> None:
        """Take all requests of one call, or none; for servers that must know which came together."""
        added: set[int] = set()
        try:
            for key, request in entries:
                self.add(key, request)
                added.add(key)
        except EngineError:
            self.forget(added)
            raise

    @abstractmethod
    def step(self) -> Iterable[tuple[int, Completion | EngineError]]:
        """Decode at least one more token; return the keys of the requests that ended, and their results.

        Called only while a request is running.
        """

    @abstractmethod
    def forget(self, keys: set[int]) -> None:
        """Stop decoding these running requests; nobody needs their results."""

    def rest(self) -> None:
        """Release the memory of a GPU, even during requests: no step comes before ``wake``."""
        raise NotImplementedError

    def wake(self) -> None:
        """Reacquire the memory.  Raises EngineError if there is too little."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether requests are running."""
        return bool(self._tickets)

    # ------------------------------------------------------------------------------ the loop

    def serve(self, connection: Connection) -> None:
        """Take calls and decode until the parent is gone, which raises EOFError."""
        self._connection = connection
        while True:
            call = connection.receive(wait=self._update is None and (self._rests or not self.busy))
            while call is not None:
                self._take(call)
                call = connection.receive(wait=False)
            if self.busy and not self._rests:
                self._step()
            if self._update is not None:
                self._go_on_with(self._update)

    def _take(self, call: Call) -> None:
        match call.method:
            case "generate":
                ticket, packed = call.args
                try:
                    self._generate(call.id, ticket, wire.unpack_requests(packed))
                except EngineError as error:
                    self._cancel(ticket)
                    self._connection.fail(call.id, error)
            case "update_weights":
                self._update = _Update(call.id, self._loading(call.args[0]))
                self._go_on_with(self._update)
            case "cancel":
                self._cancel(call.args[0])
                self._connection.reply(call.id, None)
            case "rest":
                self._rests = True
                self.rest()
                self._connection.reply(call.id, None)
            case "wake":
                try:
                    self.wake()
                except EngineError as error:
                    self._connection.fail(call.id, error)
                else:
                    self._rests = False
                    self._connection.reply(call.id, None)
            case _:
                self._connection.answer(call, self)

    # ------------------------------------------------------------------------------ generation

    def _generate(self, id: int, ticket: int, requests: list[GenerationRequest]) -> None:
        if not self._has_weights:
            raise EngineError(f"engine {self.name}: generate before the first update_weights")
        for request in requests:
            self.check(request)
        call = self._calls[ticket] = _OpenCall(id, [None if r.max_tokens else EMPTY for r in requests])
        entries = [
            (place, next(self._keys), request) for place, request in enumerate(requests) if request.max_tokens
        ]
        self.add_call([(key, request) for _, key, request in entries])
        for place, key, _ in entries:
            call.running[key] = place
            self._tickets[key] = ticket
        self._answer_if_complete(ticket)

    def _step(self) -> None:
        try:
            ended = list(self.step())
        except EngineError as error:
            for running in list(self._calls):
                self._fail(running, error)
            return
        for key, result in ended:
            ticket = self._tickets.pop(key, None)
            if ticket is None:  # it was forgotten while it was decoded
                continue
            call = self._calls[ticket]
            place = call.running.pop(key)
            if isinstance(result, EngineError):
                self._fail(ticket, result)
            else:
                call.results[place] = result
                self._answer_if_complete(ticket)

    def _answer_if_complete(self, ticket: int) -> None:
        call = self._calls[ticket]
        if not call.running:
            del self._calls[ticket]
            completions = [result for result in call.results if result is not None]
            self._connection.reply(call.id, wire.pack_completions(completions))

    def _fail(self, ticket: int, error: EngineError) -> None:
        id = self._calls[ticket].id
        self._cancel(ticket)
        self._connection.fail(id, error)

    def _cancel(self, ticket: int) -> None:
        """Forget a call; it gets no answer."""
        call = self._calls.pop(ticket, None)
        if call is not None and call.running:
            for key in call.running:
                del self._tickets[key]
            self.forget(set(call.running))

    # ------------------------------------------------------------------------------ weights

    def _loading(self, weights: Weights) -> Iterator[None]:
        yield from self.load(weights) or ()

    def _go_on_with(self, update: _Update) -> None:
        try:
            loaded = next(update.steps, True)
        except GrpoError as error:
            self._update = None
            self._connection.fail(update.call, error)
        else:
            if loaded:  # otherwise a decoding step comes next
                self._update, self._has_weights = None, True
                self._connection.reply(update.call, self.positions)
