"""The laws of decoding: results that every engine must produce, tested on a running engine.

    @pytest.fixture(scope="module")
    def engine(tmp_path_factory):
        model = make_test_model(tmp_path_factory.mktemp("model"))
        with asyncio.Runner() as runner:  # an engine lives in one event loop
            engine = runner.run(start_engine(MyEngine, model))
            yield runner, EngineUnderTest(engine=engine, model=model)
            runner.run(engine.aclose())

    @pytest.mark.parametrize("law", ENGINE_LAWS)
    def test_my_engine_keeps_the_law(engine, law):
        runner, under_test = engine
        runner.run(ENGINE_LAWS[law](under_test))

Logprobs are compared with transformers' forward pass of the same weights, in float32.  The behaviour as a
part of a run is tested by the contract in ``grpo_plugin_devkit.engines``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field

from grpo_core import (
    Canary,
    Completion,
    Engine,
    EngineError,
    EngineSetup,
    GenerationRequest,
    Weights,
    WeightSyncError,
)
from grpo_core.kit import SharedMemoryWriter, checkpoint_tensors
from grpo_core.testing import make_tiny_model
from grpo_core.weights import publishing
from grpo_plugin_devkit.contracts import Clause, Contract, error_of
from grpo_plugin_devkit.engines import check_engine, ids_of

CONTEXT = 256
"""Positions of the test model."""

PATIENCE = 60.0
"""Seconds for an answer; a dead engine must be replaced within this time."""

REFUSED = "expected EngineError, see check_request of grpo_core.kit"

SMALL = GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=5, seed=3)


def load_test_model(path: Path) -> torch.nn.Module:
    """Load the small model on the CPU."""
    from transformers import AutoModelForCausalLM

    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return module.eval()


def make_test_model(directory: Path, *, width: int = 128) -> Path:
    """Write a random model with 256 positions, 4 heads and tied embeddings, and its tokenizer.

    Returns the path of the model, a directory inside of ``directory``.
    """
    make_tiny_model(directory / "m", (), width=width, layers=2, warm_start_steps=0)
    return directory / "m"


async def start_engine(factory: Callable[..., Engine], model: Path, **options: Any) -> Engine:
    """Make an engine inside of its running event loop, as the core does."""
    setup = EngineSetup(model=str(model), log_directory=str(model.parent), deadline=120.0)
    return factory(setup, **options)


@define(kw_only=True)
class EngineUnderTest:
    """An engine and its reference model."""

    engine: Engine
    model: Path
    tolerance: float = 1e-4
    """Tolerance of logprobs."""
    recomputes: bool = False
    """Whether running requests recompute all their tokens with the new weights after an update."""
    crowd: int = 3000
    """Number of requests that are cancelled at once."""
    kill: Callable[[], None] | None = None
    """Kills the decoding process; None without a separate process."""
    version: int = 0
    writer: publishing.Writer = field(factory=SharedMemoryWriter)

    @functools.cached_property
    def module(self) -> Any:
        return load_test_model(self.model)

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of a version, by their names in the model's checkpoint."""
        return list(_scaled(checkpoint_tensors(self.module), version).items())

    def publish(self, version: int, *, without: str = "") -> Weights:
        """Publish weights with a canary, except the tensor named ``without``."""
        weights = self.writer.write(version, [item for item in self.tensors(version) if item[0] != without])
        logprobs = self.logprobs((5, 6, 7), version)[-1].topk(5)
        known = Canary(
            prompt_ids=(5, 6, 7),
            token_ids=tuple(logprobs.indices.tolist()),
            logprobs=tuple(logprobs.values.tolist()),
        )
        return evolve(weights, canary=(known,))

    async def update(self) -> None:
        await self.engine.update_weights(self.publish(self.version + 1))
        self.version += 1

    async def ask(self, *requests: GenerationRequest) -> list[Completion]:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self.engine.generate(requests)
        except TimeoutError:
            longest = max(request.max_tokens for request in requests)
            call = f"{len(requests)} requests for at most {longest} tokens each"
            raise AssertionError(f"{call} took longer than {PATIENCE:g} s") from None

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], version: int, temperature: float = 1.0) -> torch.Tensor:
        """Return transformers' logprobs [T, V] of the token after each of ``ids`` with these weights."""
        weights = _scaled(dict(self.module.named_parameters()), version)
        logits = torch.func.functional_call(self.module, weights, (torch.tensor([ids]),)).logits[0]
        return torch.log_softmax(logits.float() / (temperature or 1), -1)

    def difference(self, request: GenerationRequest, completion: Completion, version: int) -> torch.Tensor:
        """Return |engine - transformers| of each token's logprob with a version's weights, [T]."""
        n, tokens = len(request.prompt_ids), completion.token_ids.tolist()
        logprobs = self.logprobs([*request.prompt_ids.tolist(), *tokens], version, request.temperature)
        scores, found = logprobs[n - 1 : -1], torch.tensor(completion.logprobs)
        at = torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)
        cuts = [_cut(scores, request, shift) for shift in (_SHIFTS if _is_cut(request) else (0.0,))]
        return torch.stack([(cut[at] - found).abs() for cut in cuts]).amin(0)


_SHIFTS = (0.0, -1e-4, 1e-4)
"""Relative shifts of top_p and min_p, because rounding decides about a token at the threshold."""


def _is_cut(request: GenerationRequest) -> bool:
    return request.temperature > 0 and (request.top_p, request.top_k, request.min_p) != (1.0, 0, 0.0)


def _cut(logprobs: torch.Tensor, request: GenerationRequest, shift: float) -> torch.Tensor:
    """Truncate distributions [T, V] with transformers' warpers, with shifted thresholds."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if not _is_cut(request):
        return logprobs
    warpers: list[Any] = []
    if request.top_k:
        warpers.append(TopKLogitsWarper(request.top_k))
    if request.top_p < 1:
        warpers.append(TopPLogitsWarper(min(1.0, request.top_p * (1 + shift))))
    if request.min_p:
        warpers.append(MinPLogitsWarper(min(1.0, request.min_p * (1 + shift))))
    for warper in warpers:
        logprobs = warper(None, logprobs)
    return torch.log_softmax(logprobs, -1)


def _scaled(tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, scaled so that logprobs of two versions differ by whole units."""
    factor = 1.5 + 0.75 * (version % 3) + 0.01 * version
    return {
        name: tensor if isinstance(tensor, torch.nn.Buffer) else tensor * factor
        for name, tensor in tensors.items()
    }


def mixed(n: int) -> list[GenerationRequest]:
    """Return ``n`` requests in groups of four; prompts, lengths and temperatures differ, some are greedy."""
    rng = random.Random(0)
    made = []
    for i in range(n):
        if i % 4 == 0:
            prompt = tuple(rng.randrange(3, 90) for _ in range(rng.choice([1, 5, 40, 70])))
        made.append(
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=rng.choice([1, 4, 12, 40]),
                temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
                stop_token_ids=(17, 18),
                seed=i,
            )
        )
    return made


def endless(n: int) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_ids=(5, i % 90), max_tokens=CONTEXT - 2, seed=i) for i in range(n)]


def of_one(completion: Completion, version: int) -> None:
    found = set(completion.versions.tolist())
    assert found == {version}, f"tokens of the versions {found}, expected {version} alone"


def exact(
    tried: EngineUnderTest,
    request: GenerationRequest,
    completion: Completion,
    version: int | None = None,
    part: slice = slice(None),
) -> None:
    """Compare the logprobs of some tokens with transformers'."""
    named = tried.version if version is None else version
    off = tried.difference(request, completion, named)[part]
    assert not len(off) or off.max() <= tried.tolerance, (
        f"logprobs of version {named} at temperature {request.temperature:g} differ from transformers' by up "
        f"to {off.max():.3g}, expected at most {tried.tolerance:g}"
    )


# ---------------------------------------------------------------------------------- the laws


async def logprobs_are_those_of_the_model(tried: EngineUnderTest) -> None:
    await tried.update()
    requests = mixed(64)
    completions = await tried.ask(*requests)
    for request, completion in zip(requests, completions, strict=True):
        stopped = completion.token_ids[-1] in request.stop_token_ids
        early = set(completion.token_ids[:-1]) & set(request.stop_token_ids)
        assert not early, f"tokens follow the stop token {early}"
        assert completion.finish_reason == ("stop" if stopped else "length"), (
            f"finish reason {completion.finish_reason!r} after the token {completion.token_ids[-1]}; the "
            f"stop tokens are {request.stop_token_ids}"
        )
        n = len(completion.token_ids)
        assert stopped or n == request.max_tokens, f"{n} tokens for max_tokens={request.max_tokens}"
        of_one(completion, tried.version)
        exact(tried, request, completion)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


async def tokens_do_not_depend_on_what_else_is_decoded(tried: EngineUnderTest) -> None:
    requests = mixed(24)
    crowd = await tried.ask(*requests)
    alone = [(await tried.ask(request))[0] for request in requests[::5]]
    assert ids_of(crowd[::5]) == ids_of(alone), "requests in one call have other tokens than each alone"
    sampled = await tried.ask(*(evolve(SMALL, seed=seed, max_tokens=12) for seed in range(6)))
    assert len(set(map(tuple, ids_of(sampled)))) == 6, "six seeds do not sample six completions"
    greedy = await tried.ask(*(evolve(SMALL, seed=seed, temperature=0.0) for seed in range(6)))
    assert len(set(map(tuple, ids_of(greedy)))) == 1, "at temperature 0 the seed changes the completion"


CUTS: Sequence[Mapping[str, Any]] = (
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 20, "top_p": 0.8},
)
"""Truncations of the distribution.  Not top_p with min_p: engines differ in their order."""


async def top_k_top_p_and_min_p_cut_the_distribution(tried: EngineUnderTest) -> None:
    for changes in CUTS:
        cuts = ", ".join(f"{name}={value}" for name, value in changes.items())
        requests = [evolve(SMALL, seed=seed, max_tokens=12, temperature=0.7, **changes) for seed in range(8)]
        for request, completion in zip(requests, await tried.ask(*requests), strict=True):
            off = tried.difference(request, completion, tried.version)
            assert off.max() <= tried.tolerance, (
                f"with {cuts} the logprob of a token differs from that of transformers' warpers by "
                f"{off.max():.3g}, expected at most {tried.tolerance:g}: the engine ignores {cuts}, or cuts "
                "the distribution in another way. A token's logprob is the one after the cut"
            )
    cut, whole = await tried.ask(*(evolve(SMALL, temperature=0.0, top_k=k) for k in (5, 0)))
    assert ids_of([cut]) == ids_of([whole]), "at temperature 0 top_k changes the completion"
    exact(tried, evolve(SMALL, temperature=0.0), cut)


async def what_cannot_be_generated_is_refused_and_harms_nobody(tried: EngineUnderTest) -> None:
    for change in (
        {"prompt_ids": ()},
        {"prompt_ids": (10**6,)},
        {"max_tokens": CONTEXT},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
    ):
        try:
            await tried.ask(evolve(SMALL, **change))
        except EngineError:
            continue
        except Exception as error:
            raise AssertionError(f"a request with {change} raised {error!r}; {REFUSED}") from error
        raise AssertionError(f"a request with {change} was completed; {REFUSED}")
    nothing, one = await tried.ask(evolve(SMALL, max_tokens=0), evolve(SMALL, max_tokens=1))
    assert (len(nothing.tokens), nothing.finish_reason) == (0, "length"), f"max_tokens=0 gives {nothing}"
    assert len(one.token_ids) == 1, f"max_tokens=1 gives {one}"


async def a_stop_string_ends_a_completion_and_stays_in_it(tried: EngineUnderTest) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tried.model / "tokenizer.json"))
    request = evolve(SMALL, max_tokens=40)
    (free,) = await tried.ask(request)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in free.token_ids.tolist()]
    stop = "".join(texts[20:22])
    end = next(i for i in range(41) if stop in "".join(texts[:i]))
    stopped, other = await tried.ask(evolve(request, stop=(stop, "\0never")), request)
    assert ids_of([stopped]) == [free.token_ids[:end].tolist()], (
        f"a request with stop={stop!r} gave {len(stopped.tokens)} tokens; expected it to end with the token "
        f"that completes the string, which is number {end}"
    )
    assert stopped.finish_reason == "stop", f"finish reason {stopped.finish_reason!r} after a stop string"
    assert ids_of([other]) == ids_of([free]), "the stop string of a request changed another one"


async def each_token_is_of_the_version_that_it_names(tried: EngineUnderTest) -> None:
    old, new = tried.version, tried.version + 1
    requests, weights = endless(64), tried.publish(new)
    running = asyncio.ensure_future(tried.ask(*requests))
    await tried.ask(evolve(SMALL, max_tokens=60))  # sixty tokens later the other requests have some as well
    await tried.engine.update_weights(weights)
    tried.version = new
    completions = await running
    assert any(len(set(completion.versions)) == 2 for completion in completions), (
        f"{len(requests)} requests for {requests[0].max_tokens} tokens ran during update_weights, and none "
        f"has tokens of both versions {old} and {new}: take weights between two tokens of running requests"
    )
    for request, completion in list(zip(requests, completions, strict=True))[::8]:
        versions = completion.versions.tolist()
        message = f"a completion's tokens have the versions {versions}, expected {old} and then {new}"
        assert versions == sorted(versions), message
        assert set(versions) <= {old, new}, message
        before = versions.count(old)
        exact(tried, request, completion, old, slice(before))
        if tried.recomputes:
            exact(tried, request, completion, new, slice(before, None))


async def nothing_of_older_weights_is_left(tried: EngineUnderTest) -> None:
    """Send long prompts twice to fill a prefix cache, with an odd number of updates, so that none repeats."""
    request = GenerationRequest(prompt_ids=tuple(range(5, 85)) * 2, max_tokens=8)
    for _ in range(3):
        await tried.update()
        for _ in range(2):
            (completion,) = await tried.ask(request)
            of_one(completion, tried.version)
            exact(tried, request, completion)


async def weights_of_another_model_are_refused_and_change_nothing(tried: EngineUnderTest) -> None:
    before = await tried.ask(SMALL)
    lost, _ = tried.tensors(0)[3]
    weights = tried.publish(tried.version + 1, without=lost)
    said = await error_of(tried.engine.update_weights(weights), WeightSyncError)
    assert said, f"update_weights without the tensor {lost!r} raised no WeightSyncError"
    assert lost in str(said), (
        f"update_weights without the tensor {lost!r} raised {said!r}, which does not name the tensor"
    )
    assert await tried.ask(SMALL) == before, "weights that were refused changed what is sampled"
    await tried.update()


async def a_cancelled_generate_frees_its_rows(tried: EngineUnderTest) -> None:
    task = asyncio.ensure_future(tried.engine.generate(endless(tried.crowd)))
    await tried.ask(evolve(SMALL, max_tokens=1))  # the engine has received the other requests by now
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    async with asyncio.timeout(PATIENCE / 4):  # in time only if the cancelled requests are gone
        assert len((await tried.ask(evolve(SMALL, max_tokens=40)))[0].token_ids) == 40


async def a_dead_engine_is_replaced_and_holds_the_last_weights(tried: EngineUnderTest) -> None:
    if tried.kill is None:
        return
    await tried.update()
    before = await tried.ask(SMALL)
    running = [asyncio.ensure_future(tried.ask(*endless(64))) for _ in range(2)]
    await tried.ask(evolve(SMALL, max_tokens=1))
    tried.kill()
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(outcome, EngineError), outcome
        assert "retry" in str(outcome), outcome
    (after,) = await tried.ask(SMALL)
    assert ids_of([after]) == ids_of(before)
    assert set(after.versions) == {tried.version}


Law = Callable[[EngineUnderTest], Coroutine[Any, Any, None]]

ENGINE_LAWS: Mapping[str, Law] = {
    law.__name__.replace("_", " "): law
    for law in (
        logprobs_are_those_of_the_model,
        tokens_do_not_depend_on_what_else_is_decoded,
        top_k_top_p_and_min_p_cut_the_distribution,
        what_cannot_be_generated_is_refused_and_harms_nobody,
        a_stop_string_ends_a_completion_and_stays_in_it,
        each_token_is_of_the_version_that_it_names,
        nothing_of_older_weights_is_left,
        weights_of_another_model_are_refused_and_change_nothing,
        a_cancelled_generate_frees_its_rows,
        a_dead_engine_is_replaced_and_holds_the_last_weights,
    )
}
"""Laws by name, in the order of the tests."""


def check_decoding(factory: Callable[..., Engine], **options: Any) -> None:
    """Check an engine with a small random model: first ``check_engine``, then each of ``ENGINE_LAWS``.

    Raises AssertionError for the first violation.
    """
    DecodingContract(lambda setup: factory(setup, **options)).check()


class DecodingContract(Contract):
    """The contract of an engine, and the laws of decoding.

    Args:
        make: the factory with its options filled in.
    """

    essential = ("it can be made",)

    def __init__(self, make: Callable[[EngineSetup], Engine]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-core-check-"))
        self._model = make_test_model(Path(directory))
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._tried: EngineUnderTest | None = None

    def __exit__(self, *raised: Any) -> None:
        with self._stack:
            if self._tried is not None:
                self.it_can_be_closed()

    def _clauses(self) -> Iterator[tuple[str, Clause]]:
        *first, last = super()._clauses()
        yield from first
        for name, law in ENGINE_LAWS.items() if self._there().version == 0 else ():
            yield name, functools.partial(self._keeps, law)
        yield last

    def it_can_be_made(self) -> None:
        self._tried = EngineUnderTest(engine=self._started(), model=self._model, version=-1)

    def it_keeps_its_contract(self) -> None:
        tried = self._there()
        self._runner.run(check_engine(tried.engine, tried.publish, prompt_ids=(5, 8, 2)))

    def it_takes_weights(self) -> None:
        tried = self._there()
        tried.engine = self._started()
        self._runner.run(tried.update())

    def it_can_be_closed(self) -> None:
        tried, self._tried = self._there(), None
        self._runner.run(tried.engine.aclose())

    def _keeps(self, law: Law) -> None:
        self._runner.run(law(self._there()))

    def _started(self) -> Engine:
        return self._runner.run(start_engine(self._make, self._model))

    def _there(self) -> EngineUnderTest:
        assert self._tried is not None, "it is closed"
        return self._tried
