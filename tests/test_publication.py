"""The ranks of a trainer publish the parts that they hold, and engines get whole tensors from them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from test_cli import grpo, steps_done
from test_ranks import ADAPTERS, PLAIN, batches, configured, model, run, same, trained, untied
from test_trainer import setup

from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.records import EngineSetup, GenerationRequest, TensorInfo, TensorPart, Weights
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.weights import layout
from grpo_core.weights.layout import checksum, laid_out, load_tensors, slices
from grpo_core.weights.reading import read_buckets, read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_scale.lora import LoraConfig
from grpo_plugin_scale.training.process import ScaledProcess
from grpo_plugin_scale.weights import collective
from grpo_plugin_scale.weights.collective import CollectiveWriter

model, untied = model, untied  # fixtures of the tests of ranks
CPU = torch.device("cpu")


def told(given: TrainerSetup, look: Any, steps: int = 0) -> Any:
    """Return what ``look`` finds in the published weights of a trainer, while it lives."""

    async def story() -> Any:
        trainer = ScaledProcess(given)
        try:
            await trainer.started()
            for each in batches(steps):
                await trainer.step(each)
            return look(await trainer.publish())
        finally:
            await trainer.aclose()

    return run(story())


def copied(weights: Weights) -> tuple[Weights, dict[str, torch.Tensor]]:
    return weights, {name: tensor.clone() for name, tensor in read_weights(weights).items()}


def by(transport: str, given: TrainerSetup, dtype: Any = "auto") -> TrainerSetup:
    return attrs.evolve(given, transport=transport, engine_dtype=dtype, plugins=("scale",))


# ---------------------------------------------------------------------------------- what engines get


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "tied", "transport", "dtype"),
    [
        (2, False, "shm", "bfloat16"),
        (3, False, "collective", "auto"),
        (2, True, "shm", "auto"),
        (4, False, "shm", "bfloat16"),
        (4, True, "shm", "auto"),
        (2, False, "shm", "auto"),
        (4, True, "collective", "bfloat16"),
        (2, True, "collective", "auto"),
    ],
)
def test_engines_get_from_several_ranks_the_bytes_that_one_process_publishes(
    model: str, untied: str, ranks: int, tied: bool, transport: str, dtype: str
) -> None:
    path = model if tied else untied
    alone, one = told(by("shm", configured(path, PLAIN), dtype), copied)
    together, several = told(by(transport, configured(path, PLAIN, ranks=ranks), dtype), copied)
    collective._hang_up()
    assert one.keys() == several.keys()
    expected = torch.float32 if dtype == "auto" else torch.bfloat16
    assert {tensor.dtype for tensor in several.values()} == {expected}
    for name, tensor in one.items():
        assert torch.equal(tensor, several[name]), name
    assert [attrs.evolve(info, parts=()) for info in together.tensors] == list(alone.tensors)
    for info in together.tensors:
        assert sum(part.checksum for part in info.parts) % 2**64 == info.checksum
        rows = [row for part in info.parts for row in range(part.first, part.first + part.rows)]
        assert rows == list(range(info.shape[0])), "each row is published once"
    assert {part.rank for info in together.tensors for part in info.parts} == set(range(ranks))


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_what_ranks_publish_after_steps_is_what_they_save(model: str, tmp_path: Path, transport: str) -> None:
    given = by(transport, configured(model, PLAIN, ranks=3))
    published, _ = run(trained(given, batches(2), save=tmp_path))
    collective._hang_up()
    saved = dict(load_tensors(tmp_path / "trainer"))
    assert saved.keys() == published.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, published[name]), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "publish"),
    [
        ("llama", "merged"),
        ("llama", "adapters"),
        ("gpt2", "merged"),
        ("gpt2", "adapters"),
    ],
)
def test_adapters_of_several_ranks_are_those_of_one(
    model: str, tmp_path: Path, kind: str, publish: Any
) -> None:
    """GPT-2 keeps its weights transposed, so that its factors are divided along their other dimension."""
    path = model
    if kind == "gpt2":
        path = str(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=18, n_layer=1, n_head=2, n_positions=64,
            bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    lora = {**ADAPTERS, "lora": LoraConfig(rank=4, alpha=8, publish=publish)}
    one, _ = run(trained(configured(path, lora), batches(2)))
    several, _ = run(trained(configured(path, lora, ranks=3), batches(2)))
    same(one, several)
    start = dict(load_tensors(Path(path)))
    assert any(not torch.equal(start[name], tensor) for name, tensor in several.items() if name in start)


async def greedy(given: TrainerSetup) -> list[int]:
    """The tokens that an engine generates with the weights of a trainer."""
    trainer = ScaledProcess(given)
    engine = LocalEngine(EngineSetup(model=given.model.path), device="cpu", max_rows=1)
    try:
        await trainer.started()
        await engine.update_weights(await trainer.publish())
        request = GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=12, temperature=0.0)
        return (await engine.generate([request]))[0].token_ids.tolist()
    finally:
        await asyncio.gather(trainer.aclose(), engine.aclose())


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.nightly), "collective"])
def test_an_engine_generates_with_the_weights_of_two_ranks(model: str, transport: str) -> None:
    expected = run(greedy(configured(model, PLAIN)))
    assert len(expected) == 12
    assert run(greedy(by(transport, configured(model, PLAIN, ranks=2)))) == expected


# ---------------------------------------------------------------------------------- what they refuse


@pytest.mark.slow
def test_a_flipped_bit_in_a_part_is_refused_with_its_tensor_its_rows_and_its_rank(model: str) -> None:
    def spoilt(weights: Weights) -> None:
        info = next(info for info in weights.tensors if len(info.parts) == 3)
        row = torch.Size(info.shape[1:]).numel() * 4
        for part in info.parts:
            place = info.offset + part.first * row + row // 2
            last = part.first + part.rows - 1
            flip(weights.location, place)
            message = rf"'{info.name}' .* in rows {part.first} to {last}, which rank {part.rank} published"
            with pytest.raises(WeightSyncError, match=message):
                read_weights(weights)
            with pytest.raises(WeightSyncError, match=message):
                list(read_buckets(weights))
            flip(weights.location, place)
        read_weights(weights)

    told(configured(model, PLAIN, ranks=3), spoilt)


def flip(location: str, place: int) -> None:
    with open(location, "r+b") as memory:
        memory.seek(place)
        byte = memory.read(1)[0]
        memory.seek(place)
        memory.write(bytes([byte ^ 16]))


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_weights_that_the_ranks_have_published_over_are_refused(model: str, transport: str) -> None:
    async def story() -> None:
        trainer = ScaledProcess(by(transport, configured(model, PLAIN, ranks=2)))
        try:
            await trainer.started()
            first = await trainer.publish()
            read_weights(first)
            collective._hang_up()  # another engine, which has nothing yet
            await trainer.step(batches(1)[0])
            second = await trainer.publish()
            with pytest.raises(WeightSyncError, match="version 0"):
                list(read_buckets(first))
            assert sum(map(len, read_buckets(second))) == len(second.tensors)
        finally:
            await trainer.aclose()
            collective._hang_up()

    run(story())


# ---------------------------------------------------------------------------------- what it takes

HIDDEN, VOCABULARY = 512, 4096


def kilobytes(pid: int, name: str) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def forget_peak(pid: int) -> None:
    """Reset the peak of a process's memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_no_rank_takes_more_memory_to_publish_than_its_part_and_one_tensor(
    model: str, tmp_path: Path, transport: str
) -> None:
    """A model of 21 million parameters, of which each of three ranks holds 29 MB.

    A rank has the memory of what it publishes from its first publication on, so the next one takes none.
    """
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1408, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)

    async def story() -> tuple[list[list[float]], Weights]:
        trainer = ScaledProcess(by(transport, setup(str(tmp_path), ranks=3)))
        try:
            await trainer.started()
            pids, grown = [child.pid for child in trainer.process.ranks], []
            for _ in range(2):
                before = [kilobytes(pid, "VmRSS:") for pid in pids]
                for pid in pids:
                    forget_peak(pid)
                weights = await trainer.publish()
                peaks = [kilobytes(pid, "VmHWM:") for pid in pids]
                grown.append([(peak - was) * 1024 for peak, was in zip(peaks, before, strict=True)])
            return grown, weights
        finally:
            await trainer.aclose()

    (first, second), weights = run(story())
    part, largest = weights.nbytes / 3, VOCABULARY * HIDDEN * 4
    assert weights.nbytes > 80e6
    assert max(first) < 1.1 * part + largest, f"first publication: {first}"
    assert max(second) < 0.1 * part + largest, f"second publication: {second}"


@pytest.mark.slow
@pytest.mark.nightly  # above, an engine generates with such parts; test_ranks.py trains a run of two ranks
def test_a_run_of_two_ranks_sends_their_parts_to_its_engines(tmp_path: Path) -> None:
    done = grpo(
        tmp_path,
        *("train", "--env", "math:sort", "--output", "run", "--set", "trainer.ranks=2"),
        *("--set", "engine.transport=collective", "--set", "engine.workers=2", "--set", "trainer.steps=3"),
        *("--set", "trainer.prompts_per_step=8", "--set", "validation.every=0"),
    )
    assert done.returncode == 0, done.stderr
    assert steps_done(tmp_path / "run") == 3


# ---------------------------------------------------------------------------------- parts of a block


@pytest.mark.parametrize("size", [1, 7, 8, 21, 64, 67])
@pytest.mark.parametrize("cuts", [(0, 0), (3, 5), (1, 2), (8, 16), (5, 19)])
def test_the_checksums_of_parts_add_up_to_that_of_the_whole(size: int, cuts: tuple[int, int]) -> None:
    block = torch.randint(
        0, 256, (3 + size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    whole = block[3:]  # not at a place where torch views integers of 8 bytes
    ends = [0, *(min(cut, size) for cut in cuts), size]
    parts = [checksum(whole[a:b], a, size) for a, b in itertools.pairwise(ends)]
    assert sum(parts) % 2**64 == checksum(whole) == checksum(whole.clone())


def test_one_process_publishes_without_parts() -> None:
    named = [("a", torch.arange(12).view(4, 3)), ("b", torch.tensor(5)), ("c", torch.zeros(0, 3))]
    for writer in (SharedMemoryWriter(), CollectiveWriter(CPU, "127.0.0.1")):
        weights = writer.write(1, named)
        assert [info.parts for info in weights.tensors] == [(), (), ()]
        assert {name: tensor.tolist() for name, tensor in read_weights(weights).items()} == {
            name: tensor.tolist() for name, tensor in named
        }
    collective._hang_up()


class Ranks:
    """Threads that publish together, each with what it is given."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, said: list[Any]) -> None:
        self.rank, self.size, self._meeting, self._said = rank, size, meeting, said

    def gathered(self, value: Any) -> list[Any]:
        self._said[self.rank] = json.loads(json.dumps(value))
        self._meeting.wait(10)
        found = list(self._said)
        self._meeting.wait(10)
        return found


@pytest.mark.parametrize("kind", ["shm", "collective"])
def test_a_tensor_that_all_ranks_have_whole_comes_from_the_first(kind: str) -> None:
    """So do persistent buffers; and a rank with nothing to send disturbs nobody."""
    meeting, said, made = threading.Barrier(3), [None] * 3, {}

    def publish(rank: int) -> None:
        ranks = Ranks(rank, 3, meeting, said)
        writer: Any = SharedMemoryWriter(ranks)
        if kind == "collective":
            writer = CollectiveWriter(CPU, "127.0.0.1", ranks=ranks)
        values = torch.full((4, 3), float(rank))
        made[rank] = writer, writer.write(7, [("a", values), ("b", torch.tensor(rank))])

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weights = made[0][1]
    found = read_weights(weights)
    assert found["a"].eq(0).all()
    assert found["b"] == 0
    assert [[part.rank for part in info.parts] for info in weights.tensors] == [[0], [0]]
    collective._hang_up()


def test_the_slices_of_all_ranks_are_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BUCKET", 1000)
    sizes = [(10, 10), (3, 100), (1, 7), (0, 5), (40, 40), (2, 3)]
    offsets, nbytes = laid_out([rows * columns for rows, columns in sizes])
    infos = []
    for number, ((rows, columns), offset) in enumerate(zip(sizes, offsets, strict=True)):
        most = -(-rows // 4)
        firsts = [min(rows, rank * most) for rank in range(5)]
        parts = tuple(
            TensorPart(rank=rank, first=a, rows=b - a, checksum=0)
            for rank, (a, b) in enumerate(itertools.pairwise(firsts))
            if b > a
        )
        shape = (rows, columns)
        infos.append(
            TensorInfo(name=f"t{number}", dtype="uint8", shape=shape, offset=offset, checksum=0, parts=parts)
        )
    weights = Weights(version=0, location="", nbytes=nbytes, tensors=tuple(infos))
    covered = torch.zeros(nbytes, dtype=torch.int64)
    for rank in range(4):
        end = 0
        for bucket, held in zip(layout.buckets(weights), slices(weights, rank), strict=True):
            assert held.begin == end
            end = held.end
            for begin, place, size in held.pieces:
                assert begin >= 0
                assert begin + size <= held.end - held.begin
                covered[bucket.begin + place : bucket.begin + place + size] += 1
    for info in infos:
        size = torch.Size(info.shape).numel()
        assert covered[info.offset : info.offset + size].eq(1).all(), info.name
    assert covered.sum() == sum(rows * columns for rows, columns in sizes)


def test_a_rank_that_cannot_open_the_memory_of_the_first_says_so() -> None:
    class Second:
        rank, size = 1, 2

        def gathered(self, value: Any) -> list[Any]:
            return [f"/proc/{os.getpid()}/fd/99999", value]

    with pytest.raises(WeightSyncError, match=r"of the trainer's rank 0 cannot be written .*on one machine"):
        SharedMemoryWriter(Second()).write(1, [("a", torch.ones(3))])
