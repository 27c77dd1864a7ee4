"""A trainer of several ranks computes what a trainer of one computes, and fails as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from adapting import with_lora
from test_cli import grpo, steps_done
from test_trainer import batch, in_bfloat16, ragged, setup, with_tokens

from grpo_core.config import ScoreConfig
from grpo_core.contracts.errors import CheckpointError, DeadlineExceeded, TrainerError, WeightSyncError
from grpo_core.contracts.records import Batch
from grpo_core.demo import tiny
from grpo_core.training.state_files import read_state
from grpo_core.weights.reading import read_weights
from grpo_plugin_scale.lora import LoraConfig
from grpo_plugin_scale.training.process import ScaledProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return str(directory)


@pytest.fixture(scope="module")
def untied(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "untied"
    config = transformers.AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return str(directory)


def with_row(given: Batch, place: int, *, logprob: float | None = None, advantage: float = 1.0) -> Batch:
    """The batch with another row at this place."""
    row = given.rows[place]
    if logprob is not None:
        row = with_tokens(row, logprobs=[logprob] * len(row.tokens.logprobs))
    rows = list(given.rows)
    rows[place] = attrs.evolve(row, advantage=advantage)
    return attrs.evolve(given, rows=tuple(rows))


def with_a_rollout_of_two_rows(given: Batch) -> Batch:
    """The batch whose last two rows are one rollout, which is right."""
    last = given.rows[-1]
    whole = [
        attrs.evolve(each, rollout=7, group=last.group, advantage=last.advantage, correct=True)
        for each in given.rows[-2:]
    ]
    return attrs.evolve(given, rows=(*given.rows[:-2], *whole))


@contextlib.asynccontextmanager
async def running(trainer: ScaledProcess) -> AsyncIterator[ScaledProcess]:
    """A trainer that has started, and is closed in the end."""
    try:
        await trainer.started()
        yield trainer
    finally:
        await trainer.aclose()


async def trained(
    given: Any, batches: list[Any], *, before: Path | None = None, save: Path | None = None
) -> tuple[Any, list[Any]]:
    """The published weights, and the results of the steps; saves the state before them and after them."""
    async with running(ScaledProcess(given)) as trainer:
        if before is not None:
            await (await trainer.save(before))()
        results = [await trainer.step(each) for each in batches]
        weights = await trainer.publish()
        if save is not None:
            await (await trainer.save(save))()
        return dict(read_weights(weights)), results


def run(story: Any) -> Any:
    return asyncio.run(asyncio.wait_for(story, 120))


def batches(steps: int = 5) -> list[Any]:
    return [batch(ragged(groups=3, size=2, seed=step), step=step) for step in range(steps)]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], atol=tolerance, rtol=0), name


PLAIN: dict[str, Any] = {}
FULL: dict[str, Any] = {
    "loss": {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}, "mask": {"top_entropy": 0.5}},
    "reference": ScoreConfig(weights="ema", every=2, mix=1.0),
}
"""A loss that needs a reference that moves, entropies, and all entropies of an update."""


BY_SEQUENCE: dict[str, Any] = {
    "name": "gspo",
    "loss": {"correction": "sequence_truncate", "entropy": {"target": 4.7}},
    "aggregation": "sequence",
}
"""A rollout of two rows is scored as a whole, and all ranks have the same factor of the entropy."""
TAUGHT: dict[str, Any] = {
    "name": "distillation",
    "loss": {"nll_coefficient": 0.2, "teacher": {"reward_coefficient": 0.5}},
}
"""A teacher scores the rows of each rank, and the tokens of right rollouts are counted over all ranks."""
LEAN: dict[str, Any] = {"activations": "recompute", "packing": True, "aggregation": "constant"}
ADAPTERS: dict[str, Any] = {
    "lora": LoraConfig(rank=4, alpha=8),
    "loss": {"kl": {"coefficient": 0.1}},
    "aggregation": "sequence",
}
"""The rows of an adapter are not a multiple of three, and its reference is the model without adapters."""


def configured(model: str, kind: dict[str, Any], **options: Any) -> Any:
    chosen = {**kind, **options}
    aggregation = chosen.pop("aggregation", "token")
    lora, name = chosen.pop("lora", None), chosen.pop("name", "grpo")
    teacher = chosen.pop("teacher", "")
    given = attrs.evolve(setup(model, updates_per_step=2, **chosen), max_non_finite=0.5)
    given = attrs.evolve(
        with_lora(given, lora),
        scores={
            **given.scores,
            **({"teacher": ScoreConfig(weights=teacher)} if name == "distillation" else {}),
        },
        loss=attrs.evolve(
            given.loss,
            name=name,
            aggregation=aggregation,
            aggregation_constant=8 if aggregation == "constant" else 0,
        ),
    )
    if kind is not FULL:
        return given
    loss = attrs.evolve(given.loss, aggregation="prompt", max_sequence_error=1e4)
    return attrs.evolve(given, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "tied"),
    [
        (2, PLAIN, True),
        pytest.param(4, PLAIN, True, marks=pytest.mark.nightly),
        pytest.param(3, FULL, False, marks=pytest.mark.nightly),
        pytest.param(2, LEAN, True, marks=pytest.mark.nightly),
        pytest.param(2, ADAPTERS, False, marks=pytest.mark.nightly),
        pytest.param(2, BY_SEQUENCE, False, marks=pytest.mark.nightly),
        pytest.param(2, TAUGHT, True, marks=pytest.mark.nightly),
        pytest.param(3, ADAPTERS, True, marks=pytest.mark.nightly),
    ],
)
def test_several_ranks_train_the_weights_that_one_trains(
    model: str, untied: str, ranks: int, kind: dict[str, Any], tied: bool
) -> None:
    """An update has three or four rows, so that with four ranks one has nothing to compute.

    A row whose loss is not a number is left out of step 1 by all ranks, and so is an update of step 2 whose
    gradient is infinite.
    """
    path, teacher = (model, untied) if tied else (untied, model)
    given = [with_a_rollout_of_two_rows(each) for each in batches()]
    given[1] = with_row(given[1], 0, logprob=float("nan"))
    given[2] = with_row(given[2], 0, advantage=1e38)
    alone, one = run(trained(configured(path, kind, teacher=teacher), given))
    together, several = run(trained(configured(path, kind, teacher=teacher, ranks=ranks), given))
    same(alone, together, 1e-6)
    assert one[1].metrics["sequence_error_masked" if kind is FULL else "non_finite_rows"] == 1
    for left, right in zip(one, several, strict=True):
        assert left.metrics.keys() == right.metrics.keys()
        for name, value in left.metrics.items():
            if not name.startswith(("time", "tokens")):
                assert right.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-4, nan_ok=True), name


@pytest.mark.nightly
@pytest.mark.parametrize("copies", [False, True])
def test_ranks_share_adapters_of_a_model_in_bfloat16(model: str, tmp_path: Path, copies: bool) -> None:
    path, weights = in_bfloat16(model, tmp_path), {"weights": "bfloat16"} if copies else {}
    given = [configured(path, {}, lora=LoraConfig(rank=4, alpha=8), ranks=n, **weights) for n in (1, 2)]
    given = [attrs.evolve(each, model=attrs.evolve(each.model, dtype="bfloat16")) for each in given]
    (alone, _), (together, results) = (run(trained(each, batches(3))) for each in given)
    assert {name: tensor.dtype for name, tensor in together.items()} == {n: t.dtype for n, t in alone.items()}
    same(alone, together, 4e-3)
    assert all(math.isfinite(each.metrics["grad_norm"]) for each in results)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_prompts_train_the_weights_that_one_trains(model: str, ranks: int) -> None:
    given = [
        batch(
            [attrs.evolve(each, prompt_ids=tiny.encode("abcdefgh"[each.group :] * 3)) for each in rows], step
        )
        for step, rows in enumerate(ragged(groups=5, size=4, seed=seed) for seed in range(2))
    ]
    alone, one = run(trained(configured(model, PLAIN, packing=True), given))
    together, several = run(trained(configured(model, PLAIN, packing=True, ranks=ranks), given))
    same(alone, together, 1e-6)
    for left, right in zip(one, several, strict=True):
        assert left.metrics["tokens/trained"] == right.metrics["tokens/trained"]


@pytest.mark.nightly
def test_ranks_of_a_model_that_cannot_be_packed_all_pad_its_rows(model: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=98, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    _, (result,) = run(trained(configured(str(tmp_path), PLAIN, ranks=2), batches(1)))
    assert result.version == 1


@pytest.fixture(scope="module")
def of_three(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which three ranks have saved their state; tests leave it as it is."""
    saved = tmp_path_factory.mktemp("saved") / "of three"
    run(trained(configured(model, FULL, ranks=3), batches()[:2], save=saved))
    return saved


def continue_bit_for_bit(
    model: str, kind: dict[str, Any], saved: Path, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """Saved again by so many ranks, the state is the same; trained further, the weights are, too.

    The states of random numbers are as many as the ranks, and all continue with the first rank's.
    """
    ends = []
    for ranks in counts:
        again = tmp_path / f"of {ranks}"
        given = configured(model, kind, ranks=ranks, resume_from=saved)
        ends.append(run(trained(given, batches()[2:4], before=again))[0])
        state, expected = (
            {name: t for name, t in read_state(each / "optimizer") if not name.startswith("rng/")}
            for each in (again, saved)
        )
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
    for end in ends[1:]:
        same(ends[0], end)


@pytest.mark.nightly
def test_one_rank_and_two_continue_bit_for_bit_from_a_checkpoint_of_three(
    model: str, of_three: Path, tmp_path: Path
) -> None:
    assert len(list((of_three / "trainer").glob("model-*.safetensors"))) == 3
    assert transformers.AutoModelForCausalLM.from_pretrained(of_three / "trainer") is not None
    continue_bit_for_bit(model, FULL, of_three, tmp_path, (1, 2))


@pytest.mark.long
@pytest.mark.nightly
def test_what_four_ranks_have_saved_one_and_two_and_three_continue_bit_for_bit(
    model: str, tmp_path: Path
) -> None:
    saved = tmp_path / "of four"
    run(trained(configured(model, FULL, ranks=4), batches()[:2], save=saved))
    assert len(list((saved / "trainer").glob("model-*.safetensors"))) == 4
    continue_bit_for_bit(model, FULL, saved, tmp_path, (1, 2, 3))


@pytest.mark.long
@pytest.mark.nightly
def test_adapters_that_three_ranks_have_saved_one_and_two_continue_bit_for_bit(
    model: str, tmp_path: Path
) -> None:
    saved = tmp_path / "of three"
    run(trained(configured(model, ADAPTERS, ranks=3), batches()[:2], save=saved))
    assert len(list((saved / "trainer").glob("adapter_model*"))) == 1
    continue_bit_for_bit(model, ADAPTERS, saved, tmp_path, (1, 2))


@pytest.mark.nightly
def test_ranks_whose_adapters_have_dropout_continue_bit_for_bit(model: str, tmp_path: Path) -> None:
    """Each draws masks for its own rows, so that their states of random numbers differ."""
    lora = LoraConfig(rank=4, alpha=8, dropout=0.5)
    given = configured(model, PLAIN, ranks=2, lora=lora)

    async def unbroken() -> dict[str, torch.Tensor]:
        async with running(ScaledProcess(given)) as trainer:
            for each in batches()[:2]:
                await trainer.step(each)
            await (await trainer.save(tmp_path / "saved"))()
            for each in batches()[2:4]:
                await trainer.step(each)
            return dict(read_weights(await trainer.publish()))

    expected = run(unbroken())
    again = attrs.evolve(given, resume_from=tmp_path / "saved")
    same(expected, run(trained(again, batches()[2:4]))[0], tolerance=0)
    run(trained(with_lora(attrs.evolve(again, sections=()), lora), batches()[2:3]))


@pytest.mark.slow
def test_a_checkpoint_without_the_file_of_a_rank_is_refused(
    model: str, of_three: Path, tmp_path: Path
) -> None:
    shutil.copytree(of_three, tmp_path / "less")
    next((tmp_path / "less" / "optimizer").glob("state-00002*")).unlink()
    with pytest.raises(CheckpointError, match="there are 2 of 3 files"):
        run(trained(configured(model, FULL, resume_from=tmp_path / "less"), []))


async def killed_in_a_call(
    trainer: ScaledProcess, method: str, tmp_path: Path, *, stopped: int, killed: int, reason: str
) -> None:
    """Kill a process while the trainer, which holds version 1, is in a call: it ends with the reason."""
    calls = {
        "step": lambda: trainer.step(batch(ragged(groups=60, size=8), step=1)),
        "publish": trainer.publish,
        "save": lambda: trainer.save(tmp_path / "new"),
    }
    os.kill(stopped, signal.SIGSTOP)
    call = asyncio.create_task(calls[method]())
    await asyncio.sleep(0.2)
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TrainerError, match=reason):
        await call
    assert time.monotonic() - began < 5


async def hung(trainer: ScaledProcess, rank: int, told: str) -> None:
    """Stop the process of a rank: the trainer ends at its deadline, and says so."""
    trainer._deadline = 3.0
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=told):
        await trainer.step(batch(ragged(groups=3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "ranks", "method"),
    [
        pytest.param(1, 3, "step", marks=pytest.mark.nightly),
        pytest.param(1, 3, "publish", marks=pytest.mark.nightly),
        pytest.param(1, 3, "save", marks=pytest.mark.nightly),  # test_power_cut_ranks.py, too
        pytest.param(0, 3, "step", marks=pytest.mark.nightly),
        (0, 2, "publish"),
        pytest.param(0, 3, "save", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_killed_ends_the_trainer_with_its_name(
    model: str, tmp_path: Path, rank: int, ranks: int, method: str
) -> None:
    """Rank 0 makes the block of shared memory in which all ranks publish: it leaves none behind."""

    async def story() -> None:
        async with running(ScaledProcess(setup(model, ranks=ranks, updates_per_step=1))) as trainer:
            await trainer.step(batch(ragged(groups=3)))
            published = await trainer.publish()
            pids = [child.pid for child in trainer.process.ranks]
            reason = rf"trainer rank {rank} died \(killed by SIGKILL\)"
            await killed_in_a_call(
                trainer, method, tmp_path, stopped=pids[rank], killed=pids[rank], reason=reason
            )
            for pid in pids:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
        with pytest.raises(WeightSyncError):
            read_weights(published)

    run(story())


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_trainer_at_its_deadline(model: str) -> None:
    async def story() -> None:
        async with running(ScaledProcess(setup(model, ranks=2))) as trainer:
            told = r"trainer rank \d: no answer to 'train' within 3 s"
            await hung(trainer, trainer.process.ranks[1].pid, told)

    run(story())


@pytest.mark.slow
def test_a_run_of_two_ranks_is_continued_by_one_and_keeps_all_laws(tmp_path: Path) -> None:
    options = ["--set", "trainer.prompts_per_step=8", "--set", "validation.every=0"]
    done = grpo(
        tmp_path,
        *("train", "--env", "math:sort", "--output", "run", "--set", "trainer.ranks=2", *options),
        *("--set", "trainer.steps=4", "--set", "checkpoint.every=2"),
    )
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-000004").rglob("*.safetensors")}
    assert {"model-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"} <= files
    again = grpo(tmp_path, "train", "--resume", "run", "--set", "trainer.ranks=1", "--set", "trainer.steps=6")
    assert again.returncode == 0, again.stderr
    assert steps_done(tmp_path / "run") == 6
    verified = grpo(tmp_path, "verify", "run")
    assert verified.returncode == 0, verified.stderr
