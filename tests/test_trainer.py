"""The trainer: what a step does to the weights, what it may not depend on, and how it continues."""

import asyncio
import json
import math
import pickle
import random
import re
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from killing import killed
from safetensors.torch import load_file, save_file
from scaled import KEYS, scaled
from test_pipeline import Run

from grpo_core.app import making
from grpo_core.app.make import make
from grpo_core.config import (
    Config,
    EngineConfig,
    LossConfig,
    ModelConfig,
    ScoreConfig,
    TrainerConfig,
    ValidationConfig,
    build,
)
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import CheckpointError, ConfigError, ModelError, PluginError, TrainerError
from grpo_core.contracts.loss import needs_of
from grpo_core.contracts.records import Batch, Feedback, Group, Prompt, Rollout, Row, Segment, Weights
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo import tiny
from grpo_core.loop.rows import make_batch, with_advantages
from grpo_core.loop.schedule import schedule
from grpo_core.models import files
from grpo_core.plugins.host import PluginHost
from grpo_core.processes import cpu
from grpo_core.processes.memory import thread_count
from grpo_core.testing import FakeEngine, FakeEnvironment
from grpo_core.training import microbatch
from grpo_core.training.budget import fitting, token_budget
from grpo_core.training.logprobs import KEEP_BYTES
from grpo_core.training.model import FullModel, ModelSource, compute_dtype
from grpo_core.training.process import ProcessTrainer
from grpo_core.training.trainer import TorchTrainer, create
from grpo_core.weights.reading import read_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    return str(directory)


def copied(every: int) -> ScoreConfig:
    """A score by weights that are copied every few steps."""
    return ScoreConfig(weights="ema", every=every, mix=1.0)


def setup(
    model: str,
    *,
    loss: dict | None = None,
    resume_from: Path | None = None,
    reference: ScoreConfig | None = None,
    **options: object,
) -> TrainerSetup:
    defaults = {"steps": 8, "lr": 1e-3, "threads": 1, "warmup_updates": 0}
    sections = scaled(**{key: options.pop(key) for key in KEYS if key in options})
    return TrainerSetup(
        model=ModelConfig(path=model),
        trainer=TrainerConfig(**{**defaults, **options}),
        loss=LossConfig(options=loss or {}),
        scores={"reference": reference} if reference else {},
        resume_from=str(resume_from) if resume_from else None,
        plugins=("algorithms",),
        sections=sections,
    )


def row(prompt: str, reply: str, advantage: float = 1.0, group: int = 0, logprob: float = -4.0) -> Row:
    ids = tiny.encode(reply)
    n = len(ids)
    tokens = Tokens.generated(ids, (logprob,) * n, (0,) * n)
    return Row(prompt_ids=tiny.encode(prompt), tokens=tokens, advantage=advantage, group=group)


def with_tokens(row: Row, **changes: Any) -> Row:
    return attrs.evolve(row, tokens=attrs.evolve(row.tokens, **changes))


def batch(rows: Sequence[Row], step: int = 0, temperature: float = 1.0) -> Batch:
    return Batch(step=step, rows=tuple(rows), temperature=temperature)


def ragged(groups: int = 4, size: int = 2, seed: int = 0) -> list[Row]:
    chance = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(chance.choices("abcdefgh", k=chance.randint(1, longest)))

    return [
        row(text(9), text(12), chance.uniform(-1, 1), group) for group in range(groups) for _ in range(size)
    ]


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in read_weights(trainer.publish()).items()}


def same(a: TorchTrainer, b: TorchTrainer) -> bool:
    mine, theirs = weights(a), weights(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def in_bfloat16(model: str, to: Path) -> str:
    """Write a model as most checkpoints are."""
    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(to)
    others = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(model, to, dirs_exist_ok=True, ignore=others)
    return str(to)


def scores(model: str, rows: Sequence[Row], temperature: float = 1.0) -> list[Row]:
    """The rows with the logprobs that transformers itself gives to their tokens, one row at a time."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    scored = []
    for each in rows:
        ids = torch.tensor([each.prompt_ids.tolist() + each.tokens.ids.tolist()])
        with torch.no_grad():
            log_p = torch.log_softmax(reference(ids).logits[0] / temperature, -1)
        start = len(each.prompt_ids)
        found = [log_p[start + i - 1, token].item() for i, token in enumerate(each.tokens.ids)]
        scored.append(with_tokens(each, logprobs=np.where(each.tokens.sampled, found, 0.0)))
    return scored


# ---------------------------------------------------------------------------------- one step


@pytest.mark.long
def test_a_step_makes_good_tokens_likelier_and_bad_ones_rarer(model: str) -> None:
    rows = [row("ab=", "good", 1.0), row("ab=", "evil", -1.0)]
    trainer = TorchTrainer(setup(model, lr=1e-2, updates_per_step=1))
    before = scores(model, rows)
    for step in range(3):
        result = trainer.step(batch(before, step))
    assert result.version == 3 == trainer.publish().version
    found, _ = trainer.model.score(microbatch.collate(rows, trainer.device), 1.0)
    change = found.detach() - torch.tensor([v for r in before for v in r.tokens.logprobs])
    assert change[:4].mean() > 0.02
    assert change[4:].mean() < -0.02


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_scores_exactly_the_sampled_tokens_as_the_engine_did(
    model: str, temperature: float
) -> None:
    two_turns = with_tokens(row("12+", "34=7;ok", 0.5), sampled=(True, True, False, False, True, True, False))
    rows = scores(model, [*ragged(), two_turns], temperature)
    result = TorchTrainer(setup(model)).step(batch(rows, temperature=temperature))
    assert result.metrics["logprob_diff_mean"] < 1e-6
    assert result.metrics["importance_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["tokens/trained"] == sum(map(microbatch.length, rows))


@pytest.mark.long
def test_tokens_of_the_environment_are_read_but_not_trained(model: str) -> None:
    given = with_tokens(row("12", "a<5>bc"), sampled=(True, False, False, False, True, True))
    told = with_tokens(given, logprobs=(-4.0, -9.0, 9.0, 1.0, -4.0, -4.0))
    other_text = with_tokens(given, ids=tiny.encode("a<7>bc"))
    trainers = [TorchTrainer(setup(model)) for _ in range(3)]
    for trainer, each in zip(trainers, (given, told, other_text), strict=True):
        trainer.step(batch([each]))
    assert same(trainers[0], trainers[1])
    assert not same(trainers[0], trainers[2])


@pytest.mark.long
def test_tokens_after_the_last_sampled_one_cost_nothing(model: str) -> None:
    short = row("12", "abc")
    longer = attrs.evolve(short, tokens=Tokens.concatenate([short.tokens, Tokens.context(tiny.encode("??"))]))
    a, b = TorchTrainer(setup(model)), TorchTrainer(setup(model))
    assert a.step(batch([short])).metrics["loss"] == b.step(batch([longer])).metrics["loss"]
    assert same(a, b)
    assert microbatch.length(longer) == 4


@pytest.mark.long
@pytest.mark.parametrize("tokens_per_microbatch", [1, 24, 50, 10**6])
@pytest.mark.parametrize("order", [0, 1])
def test_the_gradient_does_not_depend_on_padding_splitting_or_order(
    model: str, tokens_per_microbatch: int, order: int
) -> None:
    rows = ragged(groups=1, size=8)
    if order:
        random.Random(order).shuffle(rows)
    one, other = (
        TorchTrainer(setup(model, tokens_per_microbatch=budget, loss={"kl": {"coefficient": 0.1}}))
        for budget in (10**6, tokens_per_microbatch)
    )
    for trainer, given in ((one, ragged(groups=1, size=8)), (other, rows)):
        trainer.model.policy.module.double()
        trainer.model.kept["start"].module.double()
        trainer.step(batch(given))
    mine, theirs = weights(one), weights(other)
    start = weights(TorchTrainer(setup(model)))
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-10)
        assert not torch.equal(mine[name], start[name].double()), f"{name} was not trained"


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_activations_that_are_not_kept_change_no_gradient(model: str, activations: str) -> None:
    plain, saving = TorchTrainer(setup(model)), TorchTrainer(setup(model, activations=activations))
    for trainer in (plain, saving):
        trainer.step(batch(ragged()))
    assert same(plain, saving)


def test_bfloat16_products_keep_float32_weights_and_nearly_the_logprobs(model: str) -> None:
    rows = scores(model, ragged())
    given = setup(model)
    trainer = TorchTrainer(attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16")))
    result = trainer.step(batch(rows))
    assert 0 < result.metrics["logprob_diff_mean"] < 0.05
    assert {parameter.dtype for _, parameter in trainer.model.trainable()} == {torch.float32}


def test_weights_are_published_in_the_dtype_of_the_products_and_checksummed_as_sent(model: str) -> None:
    given = setup(model)
    whole = TorchTrainer(given)
    half = TorchTrainer(attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16")))
    published = half.publish()
    assert published.nbytes == pytest.approx(whole.publish().nbytes / 2, rel=0.02), "and some padding"
    tensors = read_weights(published)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    for_engines = TorchTrainer(attrs.evolve(given, engine_dtype="bfloat16")).publish()
    assert for_engines.nbytes == published.nbytes, "engines that hold half the bytes are sent half the bytes"
    assert {info.dtype for info in for_engines.tensors} == {"bfloat16"}
    for name, parameter in whole.model.trainable():
        assert torch.equal(tensors[name], parameter.bfloat16())


@pytest.mark.parametrize(
    ("device", "has_products", "parameters", "chosen"),
    [
        ("cuda", False, 90_000, torch.bfloat16),
        ("cpu", False, 135_000_000, torch.float32),
        ("cpu", True, 135_000_000, torch.bfloat16),
        ("cpu", True, 90_000, torch.float32),
    ],
)
def test_the_dtype_auto_is_bfloat16_where_it_is_fast(
    device: str,
    has_products: bool,
    parameters: int,
    chosen: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text("flags : fma avx512_bf16 avx" if has_products else "flags : fma avx")
    monkeypatch.setattr(files, "PROCESSOR", processor)
    assert compute_dtype(ModelConfig(), torch.device(device), parameters) is chosen


def test_the_metrics_of_a_step_have_the_names_that_everything_else_reads(model: str) -> None:
    metrics = TorchTrainer(setup(model, updates_per_step=2)).step(batch(ragged())).metrics
    assert metrics.keys() == {
        "loss", "mismatch_kl", "entropy", "grad_norm", "lr", "time/train",
        "clip_fraction_low", "clip_fraction_high", "logprob_diff_mean", "tokens/trained", "tokens/padding",
        "importance_weight_mean", "importance_weight_max", "signal",
        "importance_ratio_mean", "importance_ratio_max", "effective_sample_size",
    }  # fmt: skip
    assert all(math.isfinite(value) for value in metrics.values())
    assert 3 < metrics["entropy"] < math.log(99)
    assert 0 < metrics["effective_sample_size"] <= 1


# ---------------------------------------------------------------------------------- off-policy


@pytest.mark.long
def test_the_clip_is_relative_to_the_start_of_the_step_and_the_weight_to_the_generator(model: str) -> None:
    rows = [with_tokens(r, logprobs=r.tokens.logprobs - 0.3) for r in scores(model, ragged())]
    recomputed = TorchTrainer(setup(model, updates_per_step=2)).step(batch(rows)).metrics
    assert recomputed["importance_weight_mean"] == pytest.approx(math.exp(0.3), rel=1e-4)
    assert recomputed["clip_fraction_high"] == 0
    relative = TorchTrainer(setup(model, updates_per_step=2, proximal="generation")).step(batch(rows)).metrics
    assert relative["importance_weight_mean"] == 1
    assert relative["clip_fraction_high"] > 0.1
    for metrics in (recomputed, relative):
        assert metrics["logprob_diff_mean"] == pytest.approx(0.3, abs=1e-4)
        assert metrics["mismatch_kl"] == pytest.approx(math.exp(0.3) - 1 - 0.3, abs=1e-4)


def test_the_reference_stays_at_the_start_weights(model: str) -> None:
    trainer = TorchTrainer(setup(model, lr=1e-2, loss={"kl": {"coefficient": 0.01}}))
    divergences = [trainer.step(batch(ragged(), step)).metrics["kl"] for step in range(3)]
    assert divergences[0] == pytest.approx(0, abs=1e-9)
    assert 1e-6 < divergences[1] < divergences[2]


@pytest.mark.long
def test_a_strong_pull_to_the_reference_holds_the_policy_there(model: str) -> None:
    free, held = (
        TorchTrainer(setup(model, lr=1e-2, steps=6, loss={"kl": {"coefficient": c}})) for c in (1e-9, 30.0)
    )
    for step in range(6):
        end = [trainer.step(batch(ragged(), step)).metrics["kl"] for trainer in (free, held)]
    assert end[1] < end[0] / 3


# ---------------------------------------------------------------------------------- what a loss needs


def played(rewards: Sequence[float], replies: Sequence[str]) -> Group:
    """A group as the rollouts of the pipeline make it."""
    rollouts = []
    for reward, reply in zip(rewards, replies, strict=True):
        ids = tiny.encode(reply)
        n = len(ids)
        tokens = Tokens.generated(ids, logprobs=(-4.0,) * n, versions=(0,) * n)
        rollouts.append(
            Rollout(
                segments=[Segment(prompt_ids=tiny.encode("ab="), tokens=tokens)],
                reward=reward,
            )
        )
    prompt = Prompt(messages="ab=", id="p", environment="task")
    return Group(prompt=prompt, rollouts=tuple(rollouts), generation_version=0, target_version=0)


def as_the_pipeline_does(config: Config, groups: Sequence[Group], step: int) -> Batch:
    host = PluginHost.discover(())
    loss = host.function("loss", config.loss.name, **config.loss.options)
    scored = with_advantages(
        groups,
        host.function("advantage", config.advantage.name, **config.advantage.options),
        all_rows="all_rows" in needs_of(loss.function, loss.options),
    )
    return make_batch(scored, step=step, temperature=1.0)


@pytest.mark.long
@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_groups_with_equal_rewards_are_pulled_to_the_reference(
    model: str, tmp_path: Path, coefficient: float
) -> None:
    """They have no advantages, but a loss with a KL term has something to say about them."""
    drifted = TorchTrainer(setup(model, lr=1e-2))
    drifted.step(batch([row("ab=", "good", 1.0), row("ab=", "evil", -1.0)]))
    save(drifted, tmp_path)
    options = {"kl": {"coefficient": coefficient}}
    trainer = TorchTrainer(setup(model, lr=1e-3, loss=options, resume_from=tmp_path))
    groups = [played([1.0, 1.0], ["good", "evil"])]
    config = Config(loss=LossConfig(options=options))
    metrics = [trainer.step(as_the_pipeline_does(config, groups, step)).metrics for step in range(1, 9)]
    if coefficient == 0:
        assert [each["tokens/trained"] for each in metrics] == [0.0] * 8
        assert same(trainer, drifted)
    else:
        assert metrics[0]["tokens/trained"] > 0
        assert metrics[0]["kl"] > 1e-4
        assert metrics[-1]["kl"] < metrics[0]["kl"] / 2


LOSSES = """
import torch
from grpo_core import needs

@needs("entropy", "all_rows")
def entropy_only(inputs, *, sign=1.0):
    assert not inputs.scores
    return -sign * inputs.entropy, {}

def plain(inputs):
    assert inputs.entropy is None
    return -inputs.policy_logprobs, {}

@needs("entropy", when="coefficient")
def with_bonus(inputs, *, coefficient=0.0):
    losses = -inputs.policy_logprobs
    return (losses - coefficient * inputs.entropy if coefficient else losses), {}

def mean_of_rows(inputs):
    lengths = inputs.rows.bincount()[inputs.rows]
    no_ratio = 1 + inputs.policy_logprobs - inputs.policy_logprobs.detach()
    return no_ratio * inputs.advantages * inputs.update_tokens / (inputs.update_rows * lengths), {}

def forgets_the_policy(inputs):
    return -inputs.advantages, {}

def raises(inputs):
    return inputs.no_such_thing, {}

def one_number(inputs):
    return inputs.policy_logprobs.mean(), {}

def no_tuple(inputs):
    return -inputs.policy_logprobs

def three(inputs):
    return -inputs.policy_logprobs, {}, None

def float_metric(inputs):
    return -inputs.policy_logprobs, {"spread": 0.5}

def short_metric(inputs):
    return -inputs.policy_logprobs, {"spread": inputs.policy_logprobs.detach().mean()}

def many_lines(inputs):
    raise RuntimeError("mat1 and mat2 do not fit\\n" + "a frame of C++\\n" * 90)

def steep(inputs, *, with_the_row=True):
    # The loss of rows with advantage 7 is 0; its gradient is infinite.
    kept = (inputs.advantages != 7).to(inputs.policy_logprobs.dtype)
    losses = -kept * inputs.advantages * inputs.policy_logprobs
    nothing = inputs.policy_logprobs - inputs.policy_logprobs.detach()
    return losses + ((nothing + kept).sqrt() - kept) * (1 - kept) if with_the_row else losses, {}
"""


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path / "losses.py"


def with_loss(given: TrainerSetup, name: str, **options: object) -> TrainerSetup:
    return attrs.evolve(given, loss=LossConfig(name=name, options=options))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_loss_that_needs_the_entropy_trains_it(model: str, losses: Path, sign: float) -> None:
    trainer = TorchTrainer(with_loss(setup(model, lr=1e-2), f"{losses}:entropy_only", sign=sign))
    rows = [row("ab=", "good", 0.0), row("cd=", "evil", 0.0)]
    entropy = [trainer.step(batch(rows, step)).metrics["entropy"] for step in range(4)]
    assert (entropy[-1] - entropy[0]) * sign > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("budget", [8192, 20])
def test_a_loss_can_average_over_the_rows_of_an_update(model: str, losses: Path, budget: int) -> None:
    rows = ragged()
    given = setup(model, tokens_per_microbatch=budget)
    metrics = TorchTrainer(with_loss(given, f"{losses}:mean_of_rows")).step(batch(rows)).metrics
    mean = sum(each.advantage for each in rows) / len(rows)
    assert metrics["loss"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_entropy_has_its_gradient_in_every_architecture(kind: str, losses: Path, tmp_path: Path) -> None:
    small(kind).save_pretrained(tmp_path / "m")
    given = setup(str(tmp_path / "m"), lr=1e-2)
    rows = [
        Row(
            prompt_ids=(1, 2),
            tokens=Tokens.generated((3, 4, 5), logprobs=(-3.0,) * 3, versions=(0,) * 3),
            advantage=1.0,
            group=0,
        )
    ]
    first, plain, bonus = (
        TorchTrainer(with_loss(given, f"{losses}:{name}", **options))
        for name, options in (
            ("with_bonus", {}), ("plain", {}), ("with_bonus", {"coefficient": 3.0})
        )
    )  # fmt: skip
    for trainer in (first, plain, bonus):
        trainer.step(batch(rows))
    assert same(first, plain), "without a coefficient it needs no entropy"
    assert not same(first, bonus)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forgets_the_policy", "does not depend on policy_logprobs"),
        ("raises", "raised losses.py:.*: AttributeError: .*no_such_thing"),
        ("one_number", r"returned shape \(\); expected .* one loss for each of the 4 sampled tokens"),
        ("no_tuple", r"returned shape \(4,\); expected \(losses, metrics\), a tensor and a dict"),
        ("three", r"returned a tuple of 3; expected \(losses, metrics\)"),
        ("float_metric", "a value of type float as metric 'spread'; expected .* one number for each"),
        ("short_metric", r"returned shape \(\) as metric 'spread'; expected .* each of the 4 sampled tokens"),
        ("many_lines", r"RuntimeError: mat1 and mat2 do not fit a frame of C\+\+ "),
    ],
)
def test_a_loss_that_breaks_its_contract_is_named(model: str, losses: Path, name: str, message: str) -> None:
    trainer = TorchTrainer(with_loss(setup(model), f"{losses}:{name}"))
    with pytest.raises(PluginError, match=rf"loss '.*losses.py:{name}' of plugin .*{message}") as raised:
        trainer.step(batch([row("ab", "good")]))
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------------- other models


class OnlyTheHead(FullModel):
    """Trains the last layer's norm alone, and saves nothing else."""

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        chosen = [(name, p) for name, p in super().trainable() if name == "model.norm.weight"]
        for name, parameter in super().trainable():
            parameter.requires_grad_(name == chosen[0][0])
        return chosen

    def saved(self) -> dict[str, torch.Tensor]:
        return dict(self.trainable())

    def write(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        directory.mkdir(parents=True)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            directory / "norm.safetensors",
        )

    @classmethod
    def build(cls, source: ModelSource) -> FullModel:
        made = super().build(attrs.evolve(source, saved=None))
        if source.saved:
            made.policy.module.load_state_dict(load_file(source.saved / "norm.safetensors"), strict=False)
        return made


class HeadTrainer(TorchTrainer):
    def build(self, source: ModelSource) -> FullModel:
        return OnlyTheHead.build(source)


@pytest.mark.long
def test_a_model_decides_what_is_trained_published_and_saved(model: str, tmp_path: Path) -> None:
    """The model seam is enough for adapters and shards; the trainer knows nothing about them."""
    start = weights(TorchTrainer(setup(model)))
    trainer = HeadTrainer(setup(model, lr=1e-2))
    for step in range(3):
        trainer.step(batch(ragged(seed=step), step))
    now = weights(trainer)
    assert now.keys() == start.keys(), "engines get whole models"
    assert [name for name in now if not torch.equal(now[name], start[name])] == ["model.norm.weight"]
    save(trainer, tmp_path)
    assert [path.name for path in (tmp_path / "trainer").iterdir()] == ["norm.safetensors"]
    resumed = HeadTrainer(setup(model, lr=1e-2, resume_from=tmp_path))
    for each in (trainer, resumed):
        each.step(batch(ragged(seed=9), 3))
    assert same(trainer, resumed)


# ---------------------------------------------------------------------------------- what goes wrong


def test_a_batch_without_rows_raises_the_version_and_nothing_else(model: str) -> None:
    trainer = TorchTrainer(setup(model))
    before = weights(trainer)
    assert trainer.step(batch([])).version == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_the_step_of_another_version_is_refused(model: str) -> None:
    with pytest.raises(TrainerError, match="step 3 was requested from a trainer at version 0"):
        TorchTrainer(setup(model)).step(batch(ragged(), step=3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_step_and_names_its_rows(model: str, bad: float) -> None:
    trainer = TorchTrainer(setup(model))
    before = weights(trainer)
    rows = [row("a", "b", 1.0, 0), row("a", "c", bad, 5)]
    with pytest.raises(
        TrainerError,
        match=r"^step 0, update 0: the loss of 1 of 2 rows, in groups \[5\], is not finite \(loss 'grpo' of",
    ):
        trainer.step(batch(rows))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "bad"), [("advantage", math.nan), ("advantage", math.inf), ("logprobs", math.nan)]
)
def test_a_row_whose_loss_is_not_finite_is_left_out_and_counted(model: str, where: str, bad: float) -> None:
    rows = ragged(groups=6)
    if where == "advantage":
        wrong = attrs.evolve(rows[3], advantage=bad)
    else:
        wrong = with_tokens(rows[3], logprobs=(bad,) * len(rows[3].tokens))
    broken = [*rows[:3], wrong, *rows[4:]]
    teaches_nothing = [*rows[:3], attrs.evolve(rows[3], advantage=0.0), *rows[4:]]
    trainers = [TorchTrainer(attrs.evolve(setup(model), max_non_finite=0.1)) for _ in range(2)]
    found = trainers[0].step(batch(broken)).metrics
    trainers[1].step(batch(teaches_nothing))
    assert found["non_finite_rows"] == 1
    assert all(math.isfinite(v) for v in found.values())
    mine, theirs = map(weights, trainers)
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-7) for name in mine)


@pytest.mark.long
def test_a_row_with_a_finite_loss_whose_gradient_is_infinite_is_left_out_and_not_its_update(
    model: str, losses: Path
) -> None:
    rows = ragged(groups=6)
    rows[3] = attrs.evolve(rows[3], advantage=7.0)
    trainers = [
        TorchTrainer(with_loss(setup(model), f"{losses}:steep", with_the_row=with_it))
        for with_it in (True, False)
    ]
    found, without = (trainer.step(batch(rows)).metrics for trainer in trainers)
    assert found["non_finite_rows"] == 1
    assert "non_finite_rows" not in without
    assert "non_finite_updates" not in found
    assert same(*trainers)


def not_finite_backward(trainer: TorchTrainer, steps: set[int]) -> None:
    """From now on the gradient of these steps is not a number, though the loss is."""
    hidden = trainer._named[0][1]
    hidden.register_hook(lambda gradient: gradient * math.nan if trainer.version in steps else gradient)


@pytest.mark.long
def test_an_update_whose_gradient_is_not_finite_is_left_out_and_counted(model: str) -> None:
    trainer = TorchTrainer(setup(model))
    not_finite_backward(trainer, {0, 2})
    before = weights(trainer)
    metrics = [trainer.step(batch(ragged(), step)).metrics for step in range(1)]
    assert metrics[0]["non_finite_updates"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert "non_finite_updates" not in trainer.step(batch(ragged(), 1)).metrics
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert trainer.step(batch(ragged(), 2)).metrics["non_finite_updates"] == 1


@pytest.mark.long
def test_three_gradients_in_a_row_that_are_not_finite_stop_the_run(model: str) -> None:
    trainer = TorchTrainer(setup(model))
    not_finite_backward(trainer, {0, 1, 3, 4, 5})
    for step in range(5):
        trainer.step(batch(ragged(), step))
    with pytest.raises(TrainerError, match=r"step 5, update 0: the gradient is not finite.* 3 times"):
        trainer.step(batch(ragged(), 5))


def test_a_trainer_says_whether_a_step_that_failed_has_changed_it(model: str) -> None:
    """A limit of health ends a step in its first update, before any weight moves, or in its second."""
    ends = set()
    for bad in range(6):
        rows = [
            attrs.evolve(each, advantage=math.nan) if each.group == bad else each for each in ragged(groups=6)
        ]
        trainer = TorchTrainer(setup(model, updates_per_step=2))
        before = weights(trainer)
        with pytest.raises(TrainerError, match=r"step 0, update \d: .* is not finite") as caught:
            trainer.step(batch(rows))
        first = "update 0" in str(caught.value)
        same_weights = all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
        assert trainer.unchanged() == same_weights == first
        assert trainer.version == 0
        ends.add(first)
    assert ends == {True, False}


def test_a_first_token_without_a_prompt_is_refused(model: str) -> None:
    with pytest.raises(TrainerError, match="group 0 has no prompt"):
        TorchTrainer(setup(model)).step(batch([row("", "ab")]))


def test_a_broken_model_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match="expected a directory or hub id of a transformers causal language model"
    ):
        TorchTrainer(setup(str(tmp_path)))


def spoil(model: Path, how: str) -> str:
    """Damage a model directory; returns the message that says so."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(model / "model.safetensors")
    if how == "another shape":
        tensors[name] = tensors[name].T.contiguous()
        found, expected = list(tensors[name].shape), list(tensors[name].T.shape)
        message = f"{name} has shape {found}, expected {expected}"
    else:
        gone = [key for key in sorted(tensors) if key == name or (how == "many missing" and "layers" in key)]
        message = "; ".join([f"{key} is missing" for key in gone][:3]) + ("; ..." if len(gone) > 3 else "")
        tensors = {key: tensor for key, tensor in tensors.items() if key not in gone}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return message


@pytest.mark.long
@pytest.mark.parametrize("how", ["missing", "many missing", "another shape"])
def test_a_model_that_lacks_tensors_is_refused_at_the_start_and_on_resume(
    model: str, tmp_path: Path, how: str
) -> None:
    shutil.copytree(model, tmp_path / "m")
    message = spoil(tmp_path / "m", how)
    with pytest.raises(ModelError, match=f"would be random: {re.escape(message)}.") as raised:
        TorchTrainer(setup(str(tmp_path / "m")))
    assert "\n" not in str(raised.value)
    trainer = TorchTrainer(setup(model))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path / "saved")
    spoil(tmp_path / "saved" / "trainer", how)
    with pytest.raises(ModelError, match=f"would be random: {re.escape(message)}."):
        TorchTrainer(setup(model, resume_from=tmp_path / "saved"))


@pytest.mark.long
def test_a_reference_that_lacks_tensors_is_refused(model: str, tmp_path: Path) -> None:
    """A resumed run loads the start model only for its reference."""
    trainer = TorchTrainer(setup(model))
    save(trainer, tmp_path / "saved")
    shutil.copytree(model, tmp_path / "m")
    spoil(tmp_path / "m", "missing")
    given = setup(str(tmp_path / "m"), loss={"kl": {"coefficient": 0.1}}, resume_from=tmp_path / "saved")
    with pytest.raises(ModelError, match="would be random"):
        TorchTrainer(given)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_refused_before_the_model_is_made(model: str, device: str) -> None:
    def prepare() -> None:
        raise AssertionError("the model is made already")

    given = attrs.evolve(setup(model, device=device), prepare=prepare)
    expected = rf"^trainer\.device is '{device}', which torch .*choose \"auto\""
    with pytest.raises(ConfigError, match=expected) as raised:
        TorchTrainer(given)
    assert "\n" not in str(raised.value)


def test_pickled_weights_are_not_loaded(model: str, tmp_path: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    loaded.config.save_pretrained(tmp_path)
    torch.save(loaded.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="in safetensors"):
        TorchTrainer(setup(str(tmp_path)))


def test_an_unknown_option_of_the_loss_is_refused_with_the_nearest(model: str) -> None:
    with pytest.raises(PluginError, match="Did you mean 'clip_high'"):
        TorchTrainer(setup(model, loss={"clip_hihg": 0.3}))


# ---------------------------------------------------------------------------------- other architectures


def small(kind: str) -> torch.nn.Module:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    config = {
        "qwen3": lambda: transformers.Qwen3Config(**sizes),
        "gemma2": lambda: transformers.Gemma2Config(**sizes, final_logit_softcapping=2.0),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2),
        "phi": lambda: transformers.PhiConfig(**{k: v for k, v in sizes.items() if k != "head_dim"}),
    }[kind]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fused"), [("qwen3", True), ("gemma2", False), ("gpt2", True), ("phi", True)]
)
def test_any_causal_model_is_scored_as_it_scores_itself(kind: str, fused: bool, tmp_path: Path) -> None:
    small(kind).save_pretrained(tmp_path)
    chance = random.Random(0)
    rows = [
        Row(
            prompt_ids=tuple(chance.choices(range(40), k=3 + n)),
            tokens=Tokens.generated(chance.choices(range(40), k=n), (-3.0,) * n, (0,) * n),
            advantage=1.0, group=0,
        )
        for n in (1, 4, 9)
    ]  # fmt: skip
    trainer = TorchTrainer(setup(str(tmp_path)))
    assert trainer.model.policy._plain_head is fused
    result = trainer.step(batch(scores(str(tmp_path), rows)))
    assert result.metrics["logprob_diff_mean"] < 1e-5


# ---------------------------------------------------------------------------------- files


def save(trainer: TorchTrainer, directory: Path) -> None:
    trainer.save(directory)
    trainer.written().result()


@pytest.mark.long
@pytest.mark.parametrize("updates", [1, 2])
def test_resumed_training_is_the_same_bit_for_bit(model: str, tmp_path: Path, updates: int) -> None:
    def given(**options: object) -> TrainerSetup:
        loss = {"kl": {"coefficient": 0.05}}
        return setup(model, updates_per_step=updates, lr_schedule="cosine", loss=loss, **options)  # type: ignore[arg-type]

    def train(trainer: TorchTrainer, steps: range) -> None:
        for step in steps:
            trainer.step(batch(ragged(seed=step), step))

    straight, first = TorchTrainer(given()), TorchTrainer(given())
    train(straight, range(6))
    train(first, range(3))
    save(first, tmp_path)
    resumed = TorchTrainer(given(resume_from=tmp_path))
    assert resumed.version == 3
    assert same(first, resumed)
    train(resumed, range(3, 6))
    assert same(straight, resumed)


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_the_weights_do_not_change_while_a_checkpoint_is_written_from_them(
    model: str, tmp_path: Path, again: bool
) -> None:
    trainer, twin = TorchTrainer(setup(model)), TorchTrainer(setup(model))
    for step in range(2):
        for each in (trainer, twin):
            each.step(batch(ragged(seed=step), step))
    if again:
        save(trainer, tmp_path / "first")
        for each in (trainer, twin):
            each.step(batch(ragged(seed=2), 2))
    disk = threading.Event()
    trainer._saving._thread.submit(disk.wait)
    trainer.save(tmp_path / "saved")
    computed = threading.Event()
    trainer._saving.settled, settled = (lambda: (computed.set(), settled())), trainer._saving.settled
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(trainer.step, batch(ragged(seed=8), trainer.version))
        assert computed.wait(60), "the gradient is computed meanwhile"
        assert not step.done()
        assert all(map(torch.equal, weights(trainer).values(), weights(twin).values()))
        disk.set()
        step.result()
    assert trainer.written().done()
    assert not same(trainer, twin)
    assert same(twin, TorchTrainer(setup(model, resume_from=tmp_path / "saved")))


def test_without_async_save_training_waits_until_all_is_written(model: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(attrs.evolve(setup(model), async_save=False))
    trainer.step(batch(ragged()))
    trainer.save(tmp_path)
    assert trainer.written().done()
    assert same(trainer, TorchTrainer(setup(model, resume_from=tmp_path)))


def test_a_failed_save_is_reported_and_the_next_one_is_tried(model: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(setup(model))
    (tmp_path / "file").write_text("in the way")
    trainer.save(tmp_path / "file")
    with pytest.raises(OSError, match="directory"):
        trainer.written().result()
    save(trainer, tmp_path / "saved")
    assert same(trainer, TorchTrainer(setup(model, resume_from=tmp_path / "saved")))


def test_a_saved_model_is_an_ordinary_one_without_pickles(model: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(setup(model))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trainer").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(trainer).items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "trainer")("ab").input_ids == [
        *tiny.encode("ab")
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("another shape", "model.norm.weight has .*exp_avg .*expected exp_avg .*float32"),
        ("another type", "model.norm.weight has .*exp_avg_sq .*int64"),
        ("a slot less", "model.norm.weight has .*expected .*step"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(
    model: str, tmp_path: Path, harm: str, message: str
) -> None:
    """The fused optimizer would read beyond it, and train on what it finds there."""
    trainer = TorchTrainer(setup(model))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    file = tmp_path / "optimizer" / "state.safetensors"
    state = load_file(file)
    if harm == "another shape":
        state["model.norm.weight/exp_avg"] = torch.zeros(3)
    elif harm == "another type":
        state["model.norm.weight/exp_avg_sq"] = state["model.norm.weight/exp_avg_sq"].long()
    else:
        del state["model.norm.weight/step"]
    save_file(state, file)
    with pytest.raises(CheckpointError, match=message) as raised:
        TorchTrainer(setup(model, resume_from=tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.long
@pytest.mark.parametrize("harm", ["lost", "cut", "of another model"])
def test_a_damaged_optimizer_state_is_refused(model: str, tmp_path: Path, harm: str) -> None:
    trainer = TorchTrainer(setup(model))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    state = tmp_path / "optimizer" / "state.safetensors"
    if harm == "lost":
        state.unlink()
    elif harm == "cut":
        state.write_bytes(state.read_bytes()[:-100])
    else:
        save_file({key.replace("layers.0", "layers.7"): v for key, v in load_file(state).items()}, state)
    with pytest.raises(CheckpointError, match="resume from another checkpoint"):
        TorchTrainer(setup(model, resume_from=tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", "3", 'state.json: version is "3"; expected a whole number of at least 0'),
        ("files", None, "state.json: files is null; expected a whole number of at least 0"),
        ("twins", [], "state.json: twins is []; expected a table"),
        ("entropy", [0.1, "x", 0.1], 'state.json: entropy[1] is "x"; expected a number or null'),
    ],
)
def test_a_trainer_state_of_wrong_types_is_wrong_input(
    model: str, tmp_path: Path, key: str, value: object, message: str
) -> None:
    save(TorchTrainer(setup(model)), tmp_path)
    file = tmp_path / "optimizer" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        TorchTrainer(setup(model, resume_from=tmp_path))
    assert pickle.loads(pickle.dumps(raised.value)).exit_status == 2, "as the parent process gets it"


def test_tied_weights_are_published_once(model: str) -> None:
    names = [info.name for info in TorchTrainer(setup(model)).publish().tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


# ---------------------------------------------------------------------------------- schedule and threads


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_and_ends_where_it_should(shape: str) -> None:
    config = TrainerConfig(
        steps=10, updates_per_step=4, lr=3.0, warmup_updates=4, lr_schedule=shape, lr_end=0.1
    )
    rates = [schedule(config, update) for update in range(41)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 1.0
    assert rates[40] == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert rates[22] == pytest.approx(1.0 if shape == "constant" else 0.55)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_function_of_a_file_is_a_schedule(tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text("def wsd(done):\n    return 1.0 if done < 0.75 else 4 * (1 - done)\n")
    config = TrainerConfig(steps=8, warmup_updates=0, lr_schedule=f"{tmp_path}/rates.py:wsd")
    assert [schedule(config, update) for update in (0, 5, 6, 7, 8)] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_a_schedule_may_take_the_metrics_of_its_update(model: str) -> None:
    """VCPO's sqrt(ESS / N): 4 / 5 of tokens with weights 3 and 1 are effective."""
    name = "grpo_plugin_algorithms.schedules:by_sample_size"
    given = setup(model, lr=1e-2, lr_schedule=name, warmup_updates=0)
    assert [
        schedule(given.trainer, 0, lambda: {"effective_sample_size": 0.8}),
        schedule(given.trainer, 0),
    ] == [
        math.sqrt((3 + 1) ** 2 / (3**2 + 1**2) / 2),
        1.0,
    ]
    rows = [
        with_tokens(each, logprobs=each.tokens.logprobs - i % 3)
        for i, each in enumerate(scores(model, ragged()))
    ]
    metrics = TorchTrainer(given).step(batch(rows)).metrics
    assert 0.1 < metrics["effective_sample_size"] < 0.9
    assert metrics["lr"] == pytest.approx(1e-2 * math.sqrt(metrics["effective_sample_size"]))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("def other(done): return 1.0", ConfigError, r"rates.py has no 'wsd'"),
        ("wsd = (", ConfigError, r"SyntaxError"),
        ("wsd = 1.0", PluginError, r"1.0 is not a callable object"),
        ("def wsd(done): return None", PluginError, r"returned None for 0; expected a finite number"),
        ("def wsd(done): return 1 / done", PluginError, r"ZeroDivisionError"),
    ],
)
def test_a_schedule_that_cannot_work_is_an_error_before_anything_starts(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "rates.py").write_text(text)
    table = {"trainer": {"lr_schedule": f"{tmp_path}/rates.py:wsd"}, "tasks": {"sort": {"env": "math:sort"}}}
    with pytest.raises(error, match=message):
        make(build([table]), PluginHost.discover())
    with pytest.raises(ConfigError, match=r"'lr_schedule' must be 'constant', 'linear', 'cosine', or"):
        build([{"trainer": {"lr_schedule": "cosinus"}}])


def test_on_a_cpu_a_microbatch_is_small_enough_for_the_head_to_keep_its_probabilities() -> None:
    config, cpu = TrainerConfig(), torch.device("cpu")
    assert token_budget(config, 100, cpu) == 8192
    assert 512 <= token_budget(config, 32_000, cpu) <= KEEP_BYTES / (4 * 32_000)
    assert token_budget(config, 150_000, cpu) == 512
    assert token_budget(TrainerConfig(tokens_per_microbatch=64), 150_000, cpu) == 64
    assert token_budget(config, 32_000, torch.device("cuda")) == 8192
    assert token_budget(TrainerConfig(tokens_per_microbatch=64), 150_000, torch.device("cuda")) == 64


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (0, 8192),  # what was chosen before has fitted
        (5 << 30, 8192),
        (16 << 30, 16_384),  # a GiB for 2,048 tokens, and half of the memory
        (31 << 30, 24_576),
        (139 << 30, 65_536),
    ],
)
def test_a_gpu_with_free_memory_gets_larger_microbatches(free: int, expected: int) -> None:
    assert fitting(tokens=8192, nbytes=4 << 30, free=free) == expected
    assert fitting(tokens=8192, nbytes=0, free=1) == 8192
    assert fitting(tokens=0, nbytes=0, free=free) == 8192


def test_a_colocated_trainer_uses_half_of_the_cores() -> None:
    alone = thread_count(0, colocated=False)
    assert thread_count(0, colocated=True) == max(1, alone // 2)
    assert thread_count(3, colocated=True) == 3


# ---------------------------------------------------------------------------------- in a process


@pytest.mark.slow
def test_a_trainer_in_a_process_trains_as_one_in_this_process(model: str, tmp_path: Path) -> None:
    given = setup(model)

    async def story() -> None:
        trainer = ProcessTrainer(attrs.evolve(given, log=str(tmp_path / "log")))
        try:
            await trainer.started()
            for step in range(2):
                result = await trainer.step(batch(ragged(seed=step), step))
            assert result.version == 2
            await (await trainer.save(tmp_path / "saved"))()
            there = {name: tensor.clone() for name, tensor in read_weights(await trainer.publish()).items()}
            with pytest.raises(TrainerError, match="was requested from a trainer at version 2"):
                await trainer.step(batch([], 7))
        finally:
            await trainer.aclose()
        here = TorchTrainer(given)
        for step in range(2):
            here.step(batch(ragged(seed=step), step))
        assert all(torch.equal(there[name], tensor) for name, tensor in weights(here).items())
        assert same(here, TorchTrainer(attrs.evolve(given, resume_from=str(tmp_path / "saved"))))

    threads, products = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    cpu.prepare(thread_count(given.trainer.threads, given.colocated))  # as the child does
    try:
        asyncio.run(story())
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = products


SHORT_OF_MEMORY = """
import torch
from grpo_core.training.trainer import TorchTrainer, create

class ShortOfMemory(TorchTrainer):
    def step(self, batch):
        return torch.empty(1 << 60, dtype=torch.uint8)

def make(setup):
    made = create(setup)
    made.__class__ = ShortOfMemory
    return made

def breaks(setup):
    raise ZeroDivisionError("a mistake\\nin two lines")
"""


@pytest.mark.slow
def test_an_error_of_torch_in_the_trainer_is_one_line_and_its_traceback_is_in_the_log(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "short.py").write_text(SHORT_OF_MEMORY)
    given = attrs.evolve(setup(model), log=str(tmp_path / "trainer.log"))

    class Short(ProcessTrainer):
        target = f"{tmp_path}/short.py:make"

    class Breaks(ProcessTrainer):
        target = f"{tmp_path}/short.py:breaks"

    async def raised(made: ProcessTrainer) -> str:
        try:
            await made.started()
            await made.step(batch([]))
        except TrainerError as error:
            return str(error)
        finally:
            await made.aclose()
        return "nothing was raised"

    said = asyncio.run(raised(Short(given)))
    assert said.startswith("trainer: step() failed: short.py:7 in step: RuntimeError: ")
    assert "allocate" in said
    assert "set trainer.tokens_per_microbatch = 4096" in said
    assert "\n" not in said
    log = (tmp_path / "trainer.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in step" in log
    said = asyncio.run(raised(Breaks(given)))
    assert said == (
        "trainer: cannot be made: short.py:15 in breaks: ZeroDivisionError: a mistake in two lines; the "
        f"traceback is in {tmp_path / 'trainer.log'}"
    )


@pytest.mark.slow
def test_a_trainer_that_dies_while_the_engine_reads_its_weights_is_named_as_the_cause(
    model: str, tmp_path: Path
) -> None:
    async def story() -> None:
        trainer = ProcessTrainer(attrs.evolve(setup(model), log=str(tmp_path / "trainer.log")))

        class Reading(FakeEngine):
            async def update_weights(self, weights: Weights) -> None:
                if weights.version == 1:
                    killed(trainer.process.pid)
                read_weights(weights)
                self.version = weights.version

        try:
            await trainer.started()
            equal = FakeEnvironment(lambda episode: Feedback(reward=1.0))  # there is nothing to train
            run = Run(trainer=trainer, engine=Reading(), environment=equal, watch=[trainer.watch])
            run.engine.latency = lambda rng: 0.0
            with pytest.raises(
                TrainerError, match=r"trainer died \(killed by SIGKILL\)[\s\S]*look for a lack of memory"
            ):
                await run.pipeline.run()
        finally:
            await trainer.aclose()

    asyncio.run(story())


@pytest.mark.slow
def test_a_trainer_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        trainer = ProcessTrainer(attrs.evolve(setup(str(tmp_path / "nothing")), log=str(tmp_path / "log")))
        try:
            with pytest.raises(ModelError, match="nothing"):
                await trainer.started()
        finally:
            await trainer.aclose()

    asyncio.run(story())


@pytest.mark.long
def test_the_child_makes_the_trainer_of_its_setup(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", (asked := []).append)
    monkeypatch.setattr(sys, "setswitchinterval", (switches := []).append)
    made = create(setup(model, threads=1))
    assert asked == [1]
    assert switches[0] < 0.005
    assert made.description()["parameters"] == 4_192


@pytest.mark.parametrize("shares", [True, False])
def test_a_trainer_that_shares_its_gpu_gives_free_memory_back_before_the_engine_takes_weights(
    model: str, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """The engine wakes up for the weights: its memory must be there by then."""
    trainer = TorchTrainer(attrs.evolve(setup(model), shares_gpu=shares))
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    trainer.publish([(5, 6)])
    assert len(given_back) == shares


@pytest.mark.parametrize(
    ("engines", "sent"),
    [(["bfloat16"], "bfloat16"), (["bfloat16", "auto"], "bfloat16"), (["auto", "bfloat16"], "float32")],
)
def test_a_run_sends_weights_as_its_engine_of_training_holds_them(
    model: str, tmp_path: Path, engines: list[str], sent: str
) -> None:
    engine, *more = (EngineConfig(options={"dtype": dtype}) for dtype in engines)
    validation = ValidationConfig(every=1, engine=more[0] if more else None)
    config = Config(model=ModelConfig(path=model), engine=engine, validation=validation)
    published = TorchTrainer(making.trainer_setup(config, PluginHost.discover(), model)).publish()
    assert {info.dtype for info in published.tensors} == {sent}


def test_a_plugin_that_is_left_out_of_a_run_is_left_out_of_the_trainer(model: str, tmp_path: Path) -> None:
    host = PluginHost.discover(block=["math"])
    given = making.trainer_setup(Config(model=ModelConfig(path=model)), host, model)
    given = attrs.evolve(given, loss=LossConfig(name="math:loss"))
    with pytest.raises(PluginError, match=r"left out: plugin 'math' \(left out on request\)"):
        TorchTrainer(given)


# ---------------------------------------------------------------------------------- attention


def test_an_attention_of_transformers_is_chosen_by_its_name(model: str) -> None:
    given = setup(model)
    norms = []
    for attention in ("", "eager", "sdpa"):
        chosen = attrs.evolve(given, model=attrs.evolve(given.model, attention=attention))
        trainer = TorchTrainer(chosen)
        assert trainer.layout.packed is not bool(attention), "packing brings its own"
        if attention:
            assert trainer.model.policy.module.config._attn_implementation == attention
        norms.append(trainer.step(batch(ragged())).metrics["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4)


def test_an_attention_that_transformers_lacks_is_an_error_with_its_name(model: str) -> None:
    given = setup(model)
    with pytest.raises(ModelError, match="flash_attention_9"):
        TorchTrainer(attrs.evolve(given, model=attrs.evolve(given.model, attention="flash_attention_9")))
