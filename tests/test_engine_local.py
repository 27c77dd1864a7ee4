"""The engine `local`: exact to its logprobs, whatever joins, leaves or changes on the way."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from grpo_core.contracts.errors import EngineError, ModelError, WeightSyncError
from grpo_core.contracts.events import IncidentReported
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Completion, EngineSetup, GenerationRequest
from grpo_core.engines.local.batch import EngineModel
from grpo_core.engines.local.decoder import Decoder, SeparateCalls
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.engines.local.hf import TransformersModel
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.engines.local.stopping import StopStrings
from grpo_core.processes.child import Child
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_devkit.engines import ids_of

VOCABULARY = 60
STOP = 3
FAST = ("llama", "llama-bias", "mistral", "qwen2", "qwen3")
OTHER = ("gpt2", "gemma2")


def reference(kind: str) -> Any:
    """A random tiny model of transformers, with weights large enough for peaked distributions."""
    import transformers as t

    dims: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind in ("llama", "qwen3"),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = {
        "llama": lambda: t.LlamaConfig(**dims),
        "llama-bias": lambda: t.LlamaConfig(**dims, attention_bias=True, mlp_bias=True),
        "mistral": lambda: t.MistralConfig(**dims, sliding_window=None),
        "qwen2": lambda: t.Qwen2Config(**dims),
        "qwen3": lambda: t.Qwen3Config(**dims),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=256,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        ),
        "gemma2": lambda: t.Gemma2Config(**dims, sliding_window=16, query_pre_attn_scalar=8),
    }[kind]()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def references() -> Any:
    return functools.cache(reference)


def engine_model(kind: str, hf: Any, directory: Path) -> EngineModel:
    text = hf.config.to_json_string()
    shape = Shape.of(json.loads(text))
    assert (shape is not None) == (kind in FAST)
    if shape is not None:
        return Llama(shape, device=torch.device("cpu"), dtype=torch.float32)
    (directory / "config.json").write_text(text)
    return TransformersModel(str(directory), device=torch.device("cpu"), dtype=torch.float32)


def tensors(hf: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in hf.named_parameters()}


def decoder_of(kind: str, hf: Any, directory: Path, *, max_rows: int = 512) -> Decoder:
    decoder = Decoder(engine_model(kind, hf, directory), max_rows=max_rows)
    decoder.load([tensors(hf)], 0)
    return decoder


def run(decoder: Decoder, requests: list[GenerationRequest], *, at_once: int = 10**9) -> list[Completion]:
    """Decode all; ``at_once`` new requests come before every third step."""
    results: dict[Any, Any] = {}
    coming = list(enumerate(requests))
    step = 0
    while coming or decoder.busy:
        if step % 3 == 0:
            decoder.add(coming[:at_once])
            coming = coming[at_once:]
        finished = decoder.step()
        assert not results.keys() & {key for key, _ in finished}
        results.update(finished)
        step += 1
    return [results[i] for i in range(len(requests))]


def logprobs_by(hf: Any, request: GenerationRequest, completion: Completion) -> Tensor:
    ids = torch.tensor([request.prompt_ids.tolist() + completion.token_ids.tolist()])
    with torch.no_grad():
        logits = hf(ids).logits[0, len(request.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / (request.temperature or 1), -1)
    return logprobs[torch.arange(len(completion.token_ids)), list(completion.token_ids)]


def mixed_requests(n: int = 60) -> list[GenerationRequest]:
    """Groups of ragged prompts, with different lengths and temperatures."""
    rng = random.Random(7)
    requests = []
    for i in range(n):
        if i % 4 == 0:
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 40])))
        requests.append(
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=rng.choice([1, 4, 10, 90]),
                temperature=rng.choice([0.0, 0.6, 1.0, 1.4]),
                stop_token_ids=(STOP, 11) if i % 2 else (STOP,),
                seed=i,
            )
        )
    return requests


# ---------------------------------------------------------------------------------- what is computed


@pytest.mark.long
@pytest.mark.parametrize("kind", FAST + OTHER)
def test_logprobs_are_those_of_transformers_while_rows_join_and_leave(
    kind: str, references: Any, tmp_path: Path
) -> None:
    hf, requests = references(kind), mixed_requests(60 if kind in FAST else 24)
    completions = run(decoder_of(kind, hf, tmp_path, max_rows=20), requests, at_once=7)
    for request, completion in zip(requests, completions, strict=True):
        expected = logprobs_by(hf, request, completion)
        assert (expected - torch.tensor(completion.logprobs)).abs().max() <= 1e-4
        assert set(completion.versions) == {0}
        stopped = completion.token_ids[-1] in request.stop_token_ids
        assert not set(completion.token_ids[:-1]) & set(request.stop_token_ids)
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == request.max_tokens


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_tokens_do_not_depend_on_other_rows_of_the_batch(kind: str, references: Any, tmp_path: Path) -> None:
    requests = mixed_requests(24)
    crowd = run(decoder_of(kind, references(kind), tmp_path), requests)
    late = run(decoder_of(kind, references(kind), tmp_path, max_rows=5), requests, at_once=3)
    decoder = decoder_of(kind, references(kind), tmp_path)
    alone = [run(decoder, [request])[0] for request in requests]
    assert ids_of(crowd) == ids_of(late) == ids_of(alone)


def test_other_seeds_give_other_tokens_and_greedy_ignores_the_seed(references: Any, tmp_path: Path) -> None:
    decoder = decoder_of("llama", references("llama"), tmp_path)
    request = GenerationRequest(prompt_ids=(5, 6), max_tokens=12)
    sampled = run(decoder, [attrs.evolve(request, seed=seed) for seed in range(6)])
    assert len(set(map(tuple, ids_of(sampled)))) == 6
    greedy = run(decoder, [attrs.evolve(request, seed=seed, temperature=0.0) for seed in range(6)])
    assert len(set(map(tuple, ids_of(greedy)))) == 1


def test_first_tokens_are_distributed_as_the_model_says(references: Any, tmp_path: Path) -> None:
    n, request = 4000, GenerationRequest(prompt_ids=(9, 9, 1), max_tokens=1)
    completions = run(
        decoder_of("llama", references("llama"), tmp_path), [attrs.evolve(request, seed=s) for s in range(n)]
    )
    with torch.no_grad():
        expected = references("llama")(torch.tensor([request.prompt_ids.tolist()])).logits[0, -1].softmax(-1)
    counts = torch.tensor([c.token_ids[0] for c in completions]).bincount(minlength=VOCABULARY)
    sigma = (n * expected * (1 - expected)).sqrt() + 1
    assert ((counts - n * expected).abs() < 5 * sigma).all()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_running_requests_continue_on_new_weights(kind: str, references: Any, tmp_path: Path) -> None:
    hf = references(kind)
    decoder = decoder_of(kind, hf, tmp_path)
    decoder.add([(0, GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=10))])
    for _ in range(4):
        assert decoder.step() == []
    decoder.load([{name: tensor * 1.5 for name, tensor in tensors(hf).items()}], 5)
    finished: list[Any] = []
    while decoder.busy:
        finished += decoder.step()
    ((_, completion),) = finished
    assert completion.versions.tolist() == [0] * 4 + [5] * 6
    before = run(decoder_of(kind, hf, tmp_path), [GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=10)])[0]
    assert completion.token_ids[:4].tolist() == before.token_ids[:4].tolist()
    assert completion.logprobs[4] != before.logprobs[4]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_tokens_of_running_requests_can_be_seen(kind: str, references: Any, tmp_path: Path) -> None:
    """Also of one that joins later, and when others have left."""
    decoder = decoder_of(kind, references(kind), tmp_path)
    assert decoder.sampled() == []
    decoder.add([(0, GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=3))])
    decoder.step()
    decoder.add([(1, GenerationRequest(prompt_ids=(4, 5), max_tokens=9, seed=1))])
    finished = []
    for seen in ([2, 1], [2], [3], [4]):
        finished += decoder.step()
        assert list(map(len, decoder.sampled())) == seen
    (begun,) = decoder.sampled()
    while decoder.busy:
        finished += decoder.step()
    ((_, first), (_, second)) = finished
    assert len(first.token_ids) == 3
    assert second.token_ids[:4].tolist() == begun
    assert decoder.sampled() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_call_that_is_decoded_alone_is_the_same_to_the_last_bit_whatever_else_runs(
    kind: str, references: Any, tmp_path: Path
) -> None:
    model = engine_model(kind, references(kind), tmp_path)
    calls = [list(enumerate(mixed_requests(21)))[7 * i : 7 * i + 7] for i in range(3)]

    def decoded(*order: int, steps_between: int) -> dict[Any, Completion]:
        decoder = SeparateCalls(model, max_rows=9)
        decoder.load([tensors(references(kind))], 0)
        results: dict[Any, Any] = {}
        for number in order:
            decoder.add(calls[number])
            for _ in range(steps_between):
                results.update(decoder.step())
        while decoder.busy:
            results.update(decoder.step())
        return results

    together = decoded(0, 1, 2, steps_between=3)
    assert together.keys() == set(range(21))
    for number, call in enumerate(calls):
        alone = decoded(number, steps_between=0)
        for key, _ in call:
            assert alone[key].token_ids.tolist() == together[key].token_ids.tolist()
            assert alone[key].logprobs.tobytes() == together[key].logprobs.tobytes()


def test_a_step_prefills_what_its_memory_is_meant_for(
    references: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are padded to the longest, and a prompt of several requests is there once."""
    monkeypatch.setattr("grpo_core.engines.local.decoder.PREFILL_TOKENS", 40)
    decoder = decoder_of("llama", references("llama"), tmp_path)
    prompts = [[4 + i] * n for i, n in enumerate((10, 8, 8, 8, 8, 8))]
    decoder.add(enumerate(GenerationRequest(prompt_ids=ids, max_tokens=1) for ids in prompts))
    assert [len(decoder.step()), len(decoder.step())] == [4, 2]
    decoder.add(enumerate(GenerationRequest(prompt_ids=prompts[0], max_tokens=1) for _ in range(9)))
    assert len(decoder.step()) == 9


def test_a_call_that_waits_to_be_decoded_alone_can_be_cancelled(references: Any, tmp_path: Path) -> None:
    decoder = SeparateCalls(engine_model("llama", references("llama"), tmp_path), max_rows=2)
    decoder.load([tensors(references("llama"))], 0)
    entries = [(key, attrs.evolve(each, max_tokens=9)) for key, each in enumerate(mixed_requests(6))]
    decoder.add(entries[:2])
    decoder.add(entries[2:])
    found = dict(decoder.step())
    decoder.cancel({3, 4, 5})
    while decoder.busy:
        found.update(decoder.step())
    assert sorted(found) == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama-bias", "qwen3"])
def test_the_products_of_other_devices_give_the_same(
    kind: str, references: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_core.engines.local.linear._packs", lambda _: False)
    hf, requests = references(kind), mixed_requests(30)
    decoder = decoder_of(kind, hf, tmp_path, max_rows=12)
    completions = run(decoder, requests, at_once=5)
    for request, completion in zip(requests, completions, strict=True):
        assert (logprobs_by(hf, request, completion) - torch.tensor(completion.logprobs)).abs().max() <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_decodes_what_a_cpu_does(dtype: torch.dtype, references: Any) -> None:
    hf, requests = references("qwen3"), mixed_requests(30)
    shape = Shape.of(json.loads(hf.config.to_json_string()))
    assert shape is not None
    decoder = Decoder(Llama(shape, device=torch.device("cuda"), dtype=dtype), max_rows=12)
    decoder.load([tensors(hf)], 0)
    for request, completion in zip(requests, run(decoder, requests, at_once=5), strict=True):
        error = (logprobs_by(hf, request, completion) - torch.tensor(completion.logprobs)).abs()
        assert error.mean() <= (1e-3 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt_neox"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": None},
        {"sliding_window": 64},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_other_architectures_use_transformers(change: dict[str, Any], references: Any) -> None:
    config = json.loads(references("llama").config.to_json_string())
    assert Shape.of(config) is not None
    assert Shape.of(config | change) is None


# ---------------------------------------------------------------------------------- requests


def test_more_requests_than_rows_wait_in_order(references: Any, tmp_path: Path) -> None:
    decoder = decoder_of("llama", references("llama"), tmp_path, max_rows=2)
    decoder.add((i, GenerationRequest(prompt_ids=(1,), max_tokens=2, seed=i)) for i in range(6))
    order: list[Any] = []
    while decoder.busy:
        order.append({key for key, _ in decoder.step()})
    assert order == [set(), {0, 1}, set(), {2, 3}, set(), {4, 5}]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_cancelled_requests_free_their_rows(kind: str, references: Any, tmp_path: Path) -> None:
    decoder = decoder_of(kind, references(kind), tmp_path, max_rows=3)
    decoder.add((i, GenerationRequest(prompt_ids=(1,), max_tokens=50, seed=i)) for i in range(6))
    decoder.step()
    decoder.cancel({0, 1, 4, 5})
    decoder.step()
    assert {key for _ in range(60) for key, _ in decoder.step()} == {2, 3}
    assert not decoder.busy


def test_weights_that_are_not_finite_fail_the_request(references: Any, tmp_path: Path) -> None:
    decoder = decoder_of("llama", references("llama"), tmp_path)
    decoder.load([{name: tensor * float("nan") for name, tensor in tensors(references("llama")).items()}], 7)
    (result,) = run(decoder, [GenerationRequest(prompt_ids=(1, 2), max_tokens=9)])
    assert "version 7 are not finite" in str(result)
    decoder.load([tensors(references("llama"))], 8)
    assert isinstance(run(decoder, [GenerationRequest(prompt_ids=(1,), max_tokens=9)])[0], Completion)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_of_another_model_are_refused_and_change_nothing(
    kind: str, references: Any, tmp_path: Path
) -> None:
    decoder = decoder_of(kind, references(kind), tmp_path)
    requests = mixed_requests(4)
    before = run(decoder, requests)
    wrong = {name: tensor * 2 for name, tensor in tensors(references(kind)).items()}
    (first, *_, last) = wrong
    wrong["extra.weight"] = wrong.pop(first)
    wrong[last] = torch.zeros(1, 2, 3)
    with pytest.raises(WeightSyncError) as caught:
        decoder.check({name: tuple(tensor.shape) for name, tensor in wrong.items()})
    assert f"missing: {first}" in str(caught.value)
    assert "unknown: extra.weight" in str(caught.value)
    assert f"{last} is (1, 2, 3)" in str(caught.value)
    assert decoder.version == 0
    assert run(decoder, requests) == before


def character_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    characters = {chr(ord("A") + i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))


def test_a_stop_string_ends_a_completion_and_stays_in_it(references: Any, tmp_path: Path) -> None:
    character_tokenizer(tmp_path)
    model = engine_model("llama", references("llama"), tmp_path)
    decoder = Decoder(model, stops=StopStrings(str(tmp_path)))
    decoder.load([tensors(references("llama"))], 0)
    request = GenerationRequest(prompt_ids=(1, 2), max_tokens=40, seed=4)
    (free,) = run(decoder, [request])
    text = "".join(chr(ord("A") + token) for token in free.token_ids)
    stop = text[20:22]
    end = text.index(stop) + 2
    stopped, other = run(decoder, [attrs.evolve(request, stop=(stop, "never")), request])
    assert stopped.token_ids.tolist() == free.token_ids[:end].tolist()
    assert stopped.finish_reason == "stop"
    assert other.token_ids.tolist() == free.token_ids.tolist()


def test_stop_strings_without_a_tokenizer_name_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        StopStrings(str(tmp_path)).may_end(("x",), 1)


@pytest.mark.parametrize("kind", [Decoder, SeparateCalls])
def test_requests_for_one_token_come_first_and_in_the_order_in_which_they_came(
    kind: type[Decoder], references: Any, tmp_path: Path
) -> None:
    decoder = kind(engine_model("llama", references("llama"), tmp_path), max_rows=2)
    decoder.load([tensors(references("llama"))], 0)
    for key, most in enumerate((9, 9, 1, 9, 1, 1)):
        decoder.add([(key, GenerationRequest(prompt_ids=(1, key), max_tokens=most))])
    finished: list[int] = []
    while decoder.busy:
        finished += [int(key) for key, _ in decoder.step()]
    assert finished[:3] == [2, 4, 5]
    assert sorted(finished) == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------- the child process


@pytest.fixture
def setup(references: Any, tmp_path: Path) -> EngineSetup:
    (tmp_path / "config.json").write_text(references("llama").config.to_json_string())
    return EngineSetup(model=str(tmp_path), log_directory=str(tmp_path), deadline=60)


async def killed(engine: LocalEngine) -> None:
    child = engine._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_child_generates_and_changes_its_weights(setup: EngineSetup, references: Any) -> None:
    async def story() -> None:
        engine = LocalEngine(setup)
        with pytest.raises(EngineError, match="before the first update_weights"):
            await engine.generate([GenerationRequest(prompt_ids=(1,), max_tokens=1)])
        writer = SharedMemoryWriter()
        await engine.update_weights(writer.write(4, references("llama").named_parameters()))
        assert engine.positions == references("llama").config.max_position_embeddings
        requests = mixed_requests(24)
        halves = await asyncio.gather(engine.generate(requests[:9]), engine.generate(requests[9:]))
        here = run(decoder_of("llama", references("llama"), Path(setup.model)), requests)
        assert ids_of(halves[0] + halves[1]) == ids_of(here)
        assert {version for half in halves for c in half for version in c.versions} == {4}
        assert await engine.generate([]) == []

        endless = [GenerationRequest(prompt_ids=(1,), max_tokens=250, seed=i) for i in range(400)]
        long = asyncio.ensure_future(engine.generate(endless))
        await asyncio.sleep(0)
        await engine.generate([attrs.evolve(endless[0], max_tokens=3)])  # comes after the others
        await engine.update_weights(writer.write(5, references("llama").named_parameters()))
        assert {version for completion in await long for version in completion.versions} == {4, 5}
        assert "fast path (llama)" in (Path(setup.log_directory or "") / "engine-local.log").read_text()

        weights = writer.write(6, [("model.norm.weight", torch.zeros(3))])
        with pytest.raises(WeightSyncError, match="missing"):
            await engine.update_weights(weights)
        damaged = attrs.evolve(weights.tensors[0], checksum=1)
        with pytest.raises(WeightSyncError, match="checksum"):
            await engine.update_weights(attrs.evolve(weights, tensors=(damaged,)))
        (after,) = await engine.generate(requests[:1])
        assert set(after.versions) == {5}
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(requests)

    asyncio.run(story())


@pytest.mark.slow
def test_a_dead_child_is_replaced_and_holds_the_last_weights(setup: EngineSetup, references: Any) -> None:
    request = GenerationRequest(prompt_ids=(1, 2), max_tokens=3)

    async def story() -> None:
        engine = LocalEngine(setup)
        writer = SharedMemoryWriter()
        await engine.update_weights(writer.write(1, references("llama").named_parameters()))
        before = await engine.generate([request])
        endless = [attrs.evolve(request, max_tokens=250, seed=i) for i in range(400)]
        running = [asyncio.ensure_future(engine.generate(endless)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await engine.generate([]) == []
        await killed(engine)
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "retry: " in str(outcome)
        assert await engine.generate([request]) == before
        await killed(engine)
        await engine.update_weights(writer.write(2, references("llama").named_parameters()))
        assert set((await engine.generate([request]))[0].versions) == {2}
        await engine.aclose()

    incidents: list[IncidentReported] = []
    with reported_to(incidents.append):
        asyncio.run(story())
    assert [(one.kind, one.component) for one in incidents] == [("died", "engine local")] * 2, (
        "each told once"
    )
    for incident in incidents:
        assert incident.message.startswith("restarting its process: engine local died (killed by SIGKILL)")


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_at_its_deadline_and_that_is_reported(
    setup: EngineSetup, references: Any
) -> None:
    request = GenerationRequest(prompt_ids=(1, 2), max_tokens=3)

    async def story() -> None:
        engine = LocalEngine(setup)
        await engine.update_weights(SharedMemoryWriter().write(1, references("llama").named_parameters()))
        before = await engine.generate([request])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        engine._setup = attrs.evolve(setup, deadline=0.5)
        call = asyncio.ensure_future(engine.generate([request]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()  # at the deadline of its rollout
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.gather(*engine._cancelling)
        engine._setup = setup
        assert await engine.generate([request]) == before
        await engine.aclose()

    incidents: list[IncidentReported] = []
    with reported_to(incidents.append):
        asyncio.run(story())
    ((kind, message),) = [(one.kind, one.message) for one in incidents]
    assert kind == "deadline"
    assert message == ("restarting its process: engine local: no answer to 'cancel' within 0.5 s; killed")


@pytest.mark.slow
def test_calls_that_run_in_a_child_that_is_killed_at_the_deadline_of_another_call_are_asked_again(
    setup: EngineSetup, references: Any
) -> None:
    request = GenerationRequest(prompt_ids=(1, 2), max_tokens=3)

    async def story() -> None:
        engine = LocalEngine(setup)
        await engine.update_weights(SharedMemoryWriter().write(1, references("llama").named_parameters()))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        engine._setup = attrs.evolve(setup, deadline=0.5)
        waiting = asyncio.ensure_future(engine.generate([request]))
        late = asyncio.ensure_future(engine.generate([request]))
        await asyncio.sleep(0.1)
        late.cancel()  # at the deadline of its rollout: the frozen child does not answer that either
        with pytest.raises(EngineError, match=r"retry: .* no answer to 'cancel' within 0\.5 s"):
            await waiting
        await engine.aclose()

    incidents: list[IncidentReported] = []
    with reported_to(incidents.append):
        asyncio.run(story())
    assert [one.kind for one in incidents] == ["deadline"]


class Doomed(LocalEngine):
    """Its children abort as soon as they run."""

    def _start(self) -> Child:
        return Child("os:abort", name="engine local", log=self._log)


@pytest.mark.slow
def test_an_engine_whose_child_keeps_dying_gives_up(setup: EngineSetup, references: Any) -> None:
    async def story() -> None:
        engine = Doomed(setup)
        weights = SharedMemoryWriter().write(1, references("llama").named_parameters())
        with pytest.raises(WeightSyncError, match=r"died 3 times.*engine-local\.log.*SIGABRT") as caught:
            await engine.update_weights(weights)
        assert "does not hold version 1" in str(caught.value)
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.slow
def test_a_cancelled_generate_frees_its_rows(setup: EngineSetup, references: Any) -> None:
    async def story() -> None:
        engine = LocalEngine(setup, max_rows=1)
        await engine.update_weights(SharedMemoryWriter().write(1, references("llama").named_parameters()))
        endless = [GenerationRequest(prompt_ids=(1,), max_tokens=255, seed=i) for i in range(10**4)]
        task = asyncio.ensure_future(engine.generate(endless))
        await asyncio.sleep(0)
        assert await engine.generate([]) == []  # answered in order: the child has the others
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # with one row, this is answered only if the ten thousand before it are gone
        async with asyncio.timeout(20):
            await engine.generate([GenerationRequest(prompt_ids=(1,), max_tokens=1)])
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.slow
def test_a_directory_without_a_configuration_is_named(tmp_path: Path, references: Any) -> None:
    async def story() -> None:
        engine = LocalEngine(EngineSetup(model=str(tmp_path), log_directory=str(tmp_path)))
        with pytest.raises(ModelError, match=r"config\.json cannot be read"):
            await engine.update_weights(SharedMemoryWriter().write(1, references("llama").named_parameters()))
        await engine.aclose()

    asyncio.run(story())
