"""The loop of an engine's child process: calls, requests, errors and weights, with a decoder that counts."""

import asyncio
import functools
from collections import deque

import pytest

from grpo_core import Canary, Completion, EngineError, GenerationRequest, Weights, WeightSyncError
from grpo_core.contracts.hookspecs import EngineOffer
from grpo_core.engines import wire
from grpo_core.kit import DecodingServer, check_request
from grpo_core.processes.served import Call
from grpo_core.testing import FakeEngine
from grpo_plugin_devkit.engines import check_engine


class Counting(DecodingServer):
    """Each step adds one token to every running request; a fault is raised by the method of its name."""

    name = "counting"

    def __init__(self, *, steps_to_load=0):
        super().__init__()
        self.running: dict[int, tuple[GenerationRequest, int]] = {}
        self.faults: dict[str, Exception] = {}
        self.steps_to_load, self.version, self.steps, self.turns = steps_to_load, -1, 0, []

    def _fault(self, method):
        if method in self.faults:
            raise self.faults.pop(method)

    def load(self, weights):
        for _ in range(self.steps_to_load):
            yield
        self._fault("load")
        self.version, self.positions = weights.version, 256

    def check(self, request):
        check_request(request, engine="counting", vocabulary=60, positions=self.positions)

    def add(self, key, request):
        assert request.max_tokens > 0
        if request.seed != 12:
            self._fault("add")
        self.running[key] = (request, 0)

    def step(self):
        self.steps += 1
        self._fault("step")
        for key, (request, n) in list(self.running.items()):
            self.running[key] = (request, n + 1)
            if n + 1 == request.max_tokens:
                del self.running[key]
                yield (
                    key,
                    EngineError("not finite") if request.seed == 13 else completion(n + 1, self.version),
                )

    def forget(self, keys):
        assert keys <= set(self.running), "only what is running is forgotten"
        for key in keys:
            del self.running[key]

    def rest(self):
        self.turns.append(f"rest after {self.steps} steps")

    def wake(self):
        self.turns.append(f"wake after {self.steps} steps")


def completion(n, version):
    return Completion(
        token_ids=(7,) * n, logprobs=(-1.0,) * n, versions=(version,) * n, finish_reason="length"
    )


class Line:
    """A connection whose calls are given; it hangs up when there are no more and nothing is decoded.

    A number among the calls lets so many decoding steps pass before the next call arrives.
    """

    def __init__(self, server, *calls):
        self.server, self.calls = server, deque(calls)
        self.waits: list[bool] = []
        self.replies: dict[int, object] = {}
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []
        self.held: dict[int, int] = {}
        """The server's version when each call was answered."""

    def receive(self, *, wait=True):
        self.waits.append(wait)
        if not self.calls:
            if wait is False:
                return None
            raise EOFError
        if isinstance(self.calls[0], int):
            self.calls[0] -= 1
            if not self.calls[0]:
                self.calls.popleft()
            return None
        return self.calls.popleft()

    def reply(self, id, result):
        assert id not in self.order, "each call is answered once"
        self.replies[id] = result
        self.held[id] = self.server.version
        self.order.append(id)

    def fail(self, id, error):
        assert id not in self.order, "each call is answered once"
        self.errors[id] = error
        self.order.append(id)

    def answer(self, call, target):
        self.reply(call.id, getattr(target, call.method)(*call.args))


def generate(id, *requests):
    packed = wire.pack_requests(
        [r if isinstance(r, GenerationRequest) else request(max_tokens=r) for r in requests]
    )
    return Call(id, "generate", (id, packed))


def request(**given):
    return GenerationRequest(**{"prompt_ids": (1, 2), "max_tokens": 3} | given)


def update(id, version=0):
    return Call(id, "update_weights", (Weights(version=version, location="", nbytes=0, tensors=()),))


def served(*calls, server=None):
    """The line after all calls, and its server."""
    server = server or Counting()
    line = Line(server, *calls)
    with pytest.raises(EOFError):
        server.serve(line)
    assert not server.busy
    assert not server.running
    return line, server


def lengths(answer):
    return [len(completion.token_ids) for completion in wire.unpack_completions(answer)]


def test_each_call_gets_its_completions_in_the_order_of_its_requests():
    line, _ = served(update(1), generate(2, 5, 0, 2), 2, generate(3, 1), generate(4))
    assert {id: lengths(line.replies[id]) for id in (2, 3, 4)} == {2: [5, 0, 2], 3: [1], 4: []}
    assert line.order == [1, 4, 3, 2], "what is complete first is answered first"
    assert line.replies[1] == 256, "the largest number of tokens of a request, to which rollouts keep"


def test_generate_before_the_first_weights_is_refused():
    line, _ = served(generate(1, 3))
    assert str(line.errors[1]) == "engine counting: generate before the first update_weights"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "needs at least one"),
        ({"prompt_ids": (60,)}, "a prompt has tokens from 60 to 60; the model has 60 tokens"),
        ({"prompt_ids": (-1,)}, "from -1 to -1"),
        ({"max_tokens": 255}, "exceed the model's 256 positions"),
        ({"max_tokens": -1}, "max_tokens=-1, temperature=1.0: below 0"),
        ({"temperature": -1.0}, "below 0"),
    ],
)
def test_a_request_that_cannot_be_completed_fails_its_own_call(change, message):
    line, server = served(update(1), generate(2, 4), generate(3, 3, request(**change)), 1)
    assert message in str(line.errors[3])
    assert isinstance(line.errors[3], EngineError)
    assert lengths(line.replies[2]) == [4]
    assert server.steps == 4, "nothing of the refused call was decoded"


def test_a_request_that_the_decoder_refuses_fails_its_own_call():
    server = Counting()
    server.faults["add"] = EngineError("no room")
    line, _ = served(update(1), generate(2, 4), generate(3, 4), server=server)
    assert str(line.errors[2]) == "no room"
    assert lengths(line.replies[3]) == [4]


def test_a_call_is_taken_whole_or_not_at_all():
    server = Counting()
    server.faults["add"] = EngineError("no room")
    first = request(max_tokens=4, seed=12)  # for which there is room
    line, _ = served(update(1), generate(2, first, 4), generate(3, 4), server=server)
    assert str(line.errors[2]) == "no room"
    assert not server.running
    assert lengths(line.replies[3]) == [4]


def test_a_request_that_fails_takes_the_rest_of_its_call_along():
    line, _ = served(update(1), generate(2, request(max_tokens=1, seed=13), 200), generate(3, 4))
    assert str(line.errors[2]) == "not finite"
    assert lengths(line.replies[3]) == [4]


def test_a_failed_step_fails_the_running_requests_and_others_continue():
    server = Counting()
    server.faults["step"] = EngineError("out of memory")
    line, _ = served(update(1), generate(2, 4), generate(3, 4), 2, generate(4, 4), server=server)
    assert [str(line.errors[id]) for id in (2, 3)] == ["out of memory"] * 2
    assert lengths(line.replies[4]) == [4]


def test_any_other_error_of_a_step_ends_the_process():
    server = Counting()
    server.faults["step"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        server.serve(Line(server, update(1), generate(2, 4)))


def test_a_cancelled_call_is_forgotten_and_not_answered():
    line, server = served(update(1), generate(2, 200, 200), 1, Call(3, "cancel", (2,)), generate(4, 2))
    assert 2 not in line.order
    assert line.replies[3] is None
    assert lengths(line.replies[4]) == [2]
    assert server.steps < 10


def test_decoding_continues_while_weights_are_loaded():
    _, server = served(update(1))
    server.steps_to_load = 3
    line, _ = served(generate(2, 9), 2, update(3, version=1), server=server)
    (answer,) = wire.unpack_completions(line.replies[2])
    assert len(answer.token_ids) == 9
    assert line.held[3] == 1, "the update is answered when it is done"
    assert line.order == [3, 2], "the update is answered before the long request"


def test_weights_that_are_refused_leave_the_weights_before():
    server = Counting()
    line, _ = served(update(1), server=server)
    server.faults["load"] = WeightSyncError("another model's")
    line, _ = served(update(2, version=1), generate(3, 2), server=server)
    assert str(line.errors[2]) == "another model's"
    assert [c.versions.tolist() for c in wire.unpack_completions(line.replies[3])] == [[0, 0]]


def test_any_other_error_of_an_update_ends_the_process():
    server = Counting()
    server.faults["load"] = ZeroDivisionError()
    line = Line(server, update(1))
    with pytest.raises(ZeroDivisionError):
        server.serve(line)
    assert line.order == [], "the parent learns it from the death of the child"


def test_a_server_waits_for_calls_only_while_it_has_nothing_to_do():
    line, _ = served(update(1), generate(2, 2))
    assert line.waits[0] is True
    assert line.waits[-1] is True
    assert False in line.waits


def test_a_server_that_rests_makes_no_step_until_it_is_woken():
    line, server = served(update(1), generate(2, 3), 2, Call(3, "rest", ()), 5, Call(4, "wake", ()))
    assert server.turns == ["rest after 2 steps", "wake after 2 steps"]
    assert lengths(line.replies[2]) == [3], "nothing is lost"
    assert line.order == [1, 3, 4, 2]


def test_an_offer_names_the_transports_of_its_engines():
    assert EngineOffer(FakeEngine).transports == ("shm",)
    assert EngineOffer(FakeEngine, transports=("cuda_ipc", "shm")).transports == ("cuda_ipc", "shm")


def test_the_contract_of_an_engine_says_what_was_asked_when_it_fails():
    class Broken(FakeEngine):
        decoder = None

        async def generate(self, requests):
            return self.decoder(requests)

    def publish(version):
        return Weights(version=version, location="", nbytes=0, tensors=())

    with pytest.raises(
        AssertionError, match=r"generate before the first update_weights: raised TypeError: .* not callable"
    ):
        asyncio.run(check_engine(Broken(), publish, prompt_ids=(1, 2)))

    class Unclosed(FakeEngine):
        async def generate(self, requests):
            raise EngineError("no weights")

        async def aclose(self):
            raise KeyError("gone")

    with pytest.raises(AssertionError, match="aclose: raised KeyError: 'gone'"):
        asyncio.run(check_engine(Unclosed(), publish, prompt_ids=(1, 2)))


class Counted(FakeEngine):
    """Its logprobs are what the weights of its version say; those of ``ignored`` are never used."""

    def __init__(self, ignored=()):
        super().__init__(latency=lambda rng: 0.0, update_seconds=0.0)
        self.ignored, self.used = ignored, 0

    async def update_weights(self, weights):
        await super().update_weights(weights)
        self.used = self.used if weights.version in self.ignored else weights.version

    async def generate(self, requests):
        if self.version is None:
            return await super().generate(requests)
        return list(map(self._completed, requests))

    def _completed(self, request):
        stops = 1 in request.stop_token_ids
        n = 1 if stops else request.max_tokens
        return Completion(
            token_ids=[1 + request.seed] * n,
            logprobs=[-1.0 - self.used / 10] * n,
            versions=[self.version] * n,
            finish_reason="stop" if stops else "length",
        )


def counted(version, *, said=lambda version: -1.0 - version / 10):
    known = Canary(prompt_ids=(1, 2), token_ids=(1, 2), logprobs=(said(version), -5.0))
    return Weights(version=version, location="", nbytes=0, tensors=(), canary=(known,))


def test_an_engine_that_ignores_its_second_update_breaks_the_contract():
    with pytest.raises(AssertionError, match=r"while requests run: .* use the weights of version 1"):
        asyncio.run(check_engine(Counted(ignored=[1]), counted, prompt_ids=(1, 2)))


def test_weights_whose_canary_never_changes_check_no_engine():
    """Each engine would pass, also one that ignores its weights."""
    publish = functools.partial(counted, said=lambda version: -1.0)
    with pytest.raises(AssertionError, match="gives version 1 the canary of the version before"):
        asyncio.run(check_engine(Counted(ignored=range(1, 9)), publish, prompt_ids=(1, 2)))
