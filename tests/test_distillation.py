"""On-policy distillation: a policy learns from a teacher's logprobs of its own tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from adapting import with_lora
from test_trainer import batch, ragged, same, save, scores, setup, weights

from grpo_core.app.make import make
from grpo_core.app.provenance import with_absolute_paths
from grpo_core.config import LossConfig, ScoreConfig, build
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ConfigError, ModelError
from grpo_core.contracts.records import Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo import tiny
from grpo_core.plugins.host import PluginHost
from grpo_core.training.microbatch import collate
from grpo_core.training.passes import Passes
from grpo_core.training.scores import FrozenModel
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_scale.lora import LoraConfig

GRPO = Path(sys.executable).with_name("grpo-core")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student, and a larger teacher of the same vocabulary."""
    directory = tmp_path_factory.mktemp("models")
    tiny.make_tiny_model(directory / "student", (), width=16, layers=1, warm_start_steps=0)
    tiny.make_tiny_model(directory / "teacher", (), width=32, layers=2, warm_start_steps=0, seed=1)
    return str(directory / "student"), str(directory / "teacher")


def taught(models: tuple[str, str], *, options: dict[str, Any] | None = None, **given: Any) -> TrainerSetup:
    student, teacher = models
    return attrs.evolve(
        setup(student, **given),
        loss=LossConfig(name="distillation", options=options or {}),
        scores={"teacher": ScoreConfig(weights=teacher)},
    )


def on_policy(model: str, rows: list[Row]) -> list[Row]:
    """The rows with the logprobs that the model gives to them, as if it had sampled them."""
    return scores(model, rows)


# ---------------------------------------------------------------------------------- what is computed


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teacher_scores_each_sampled_token_as_its_own_model_does(
    models: tuple[str, str], temperature: float
) -> None:
    rows = ragged()
    expected = scores(models[1], rows, temperature)
    found = FrozenModel(ScoreConfig(weights=models[1]), CPU, Passes()).logprobs(
        collate(rows, CPU), temperature
    )
    wanted = np.concatenate([row.tokens.logprobs[row.tokens.sampled] for row in expected])
    torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


@pytest.mark.long
def test_a_step_trains_what_grpo_trains_with_the_teachers_advantages(models: tuple[str, str]) -> None:
    student, teacher = models
    rows = on_policy(student, ragged())

    def advantages(row: Row, by_teacher: Row) -> Row:
        difference = (by_teacher.tokens.logprobs - row.tokens.logprobs)[row.tokens.sampled]
        return attrs.evolve(row, token_advantages=difference.astype(np.float32))

    given = [advantages(mine, theirs) for mine, theirs in zip(rows, scores(teacher, rows), strict=True)]
    distilled, plain = TorchTrainer(taught(models, proximal="generation")), TorchTrainer(setup(student))
    metrics = distilled.step(batch(rows)).metrics
    plain.step(batch(given))
    for name, tensor in weights(distilled).items():
        torch.testing.assert_close(tensor, weights(plain)[name], rtol=1e-3, atol=1e-5)
    expected = float(np.concatenate([-row.token_advantages for row in given]).mean())  # type: ignore[operator]
    assert metrics["teacher_kl"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_a_run_that_trained_adapters_can_be_the_teacher(models: tuple[str, str], tmp_path: Path) -> None:
    student, base = models
    given = setup(base, lr=0.05)
    trainer = TorchTrainer(with_lora(given, LoraConfig(rank=2)))
    trainer.step(batch(ragged()))
    save(trainer, tmp_path)
    adapters = str(tmp_path / "trainer")
    rows = ragged()
    expected, _ = trainer.model.score(collate(rows, CPU), 1.0)
    found = FrozenModel(ScoreConfig(weights=adapters), CPU, Passes()).logprobs(collate(rows, CPU), 1.0)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    table = {
        "loss": {"name": "distillation"},
        "scores": {"teacher": {"weights": adapters}},
        "model": {"path": student},
    }
    make(build([{"tasks": {"sort": {"env": "math:sort"}}}, table]), PluginHost.discover(None))


@pytest.mark.long
def test_rewards_are_ignored_unless_they_have_a_weight(models: tuple[str, str]) -> None:
    rows = on_policy(models[0], ragged())
    worse = [attrs.evolve(row, advantage=-row.advantage) for row in rows]

    def trained(given: list[Row], options: dict[str, Any]) -> TorchTrainer:
        trainer = TorchTrainer(taught(models, options=options))
        trainer.step(batch(given))
        return trainer

    assert same(trained(rows, {}), trained(worse, {}))
    mixed = {"teacher": {"reward_coefficient": 1.0}}
    assert not same(trained(rows, mixed), trained(worse, mixed))


@torch.no_grad()
def sampled(trainer: TorchTrainer, generator: torch.Generator) -> list[Row]:
    """64 rows of 6 tokens after "ab", drawn by the policy as it is now."""
    policy = trainer.model.policy  # type: ignore[attr-defined]
    ids = torch.tensor([tiny.encode("ab")] * 64)
    for _ in range(6):
        likely = policy.module(input_ids=ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(likely, 1, generator=generator)], dim=1)

    def row(drawn: list[int], logprobs: list[float]) -> Row:
        tokens = Tokens.generated(drawn[2:], logprobs, [trainer.version] * 6)
        return Row(prompt_ids=drawn[:2], tokens=tokens, advantage=0.0, group=0)

    rows = [row(drawn, [0.0] * 6) for drawn in ids.tolist()]
    logprobs = policy.score(collate(rows, CPU), 1.0)[0].view(64, 6)
    return [row(drawn, own) for drawn, own in zip(ids.tolist(), logprobs.tolist(), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("acts_on", [pytest.param("advantage", marks=pytest.mark.nightly), "loss"])
def test_the_policy_comes_nearer_to_the_teacher_on_its_own_tokens(
    models: tuple[str, str], tmp_path: Path, acts_on: str
) -> None:
    """The teacher prefers one reply; the student knows nothing, and no row has a reward."""
    teacher = tmp_path / "teacher"
    tiny.make_tiny_model(teacher, [("ab", "cdefg")], width=32, layers=1, warm_start_steps=30)
    given = taught(
        (models[0], str(teacher)),
        options={"teacher": {"acts_on": acts_on}},
        lr=1e-2, steps=60, proximal="generation", lr_schedule="linear",
    )  # fmt: skip
    trainer, generator = TorchTrainer(given), torch.Generator().manual_seed(0)
    distances = [
        trainer.step(batch(sampled(trainer, generator), step)).metrics["teacher_kl"] for step in range(60)
    ]
    assert np.mean(distances[:5]) > 0.2
    assert np.mean(distances[-5:]) < 0.7 * np.mean(distances[:5])


@pytest.mark.long
def test_resumed_distillation_is_the_same_bit_for_bit(models: tuple[str, str], tmp_path: Path) -> None:
    straight, first = TorchTrainer(taught(models)), TorchTrainer(taught(models))
    for step in range(4):
        straight.step(batch(ragged(seed=step), step))
    for step in range(2):
        first.step(batch(ragged(seed=step), step))
    save(first, tmp_path)
    resumed = TorchTrainer(taught(models, resume_from=tmp_path))
    for step in range(2, 4):
        resumed.step(batch(ragged(seed=step), step))
    assert same(straight, resumed)


def test_a_teacher_in_bfloat16_scores_nearly_the_same(models: tuple[str, str]) -> None:
    micro = collate(ragged(), CPU)
    exact, coarse = (
        FrozenModel(ScoreConfig(weights=models[1], dtype=dtype), CPU, Passes())  # type: ignore[arg-type]
        for dtype in ("float32", "bfloat16")
    )
    assert next(coarse._scorer.module.parameters()).dtype is torch.bfloat16
    off = (exact.logprobs(micro, 1.0) - coarse.logprobs(micro, 1.0)).abs()
    assert 0 < float(off.max()) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_teacher_is_in_bfloat16_and_scores_nearly_the_same(models: tuple[str, str]) -> None:
    cuda, config = torch.device("cuda"), ScoreConfig(weights=models[1])
    here = FrozenModel(config, CPU, Passes()).logprobs(collate(ragged(), CPU), 1.0)
    teacher = FrozenModel(config, cuda, Passes())
    assert next(teacher._scorer.module.parameters()).dtype is torch.bfloat16
    there = teacher.logprobs(collate(ragged(), cuda), 1.0)
    assert float((here - there.cpu()).abs().max()) < 0.1


# ---------------------------------------------------------------------------------- what is refused


def of_another_vocabulary(directory: Path) -> str:
    """A copy of the tiny model's directory whose tokenizer has another vocabulary."""
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"ä":'))
    return str(directory)


def test_a_teacher_of_another_vocabulary_is_refused_before_any_model_is_loaded(
    models: tuple[str, str], tmp_path: Path
) -> None:
    other = of_another_vocabulary(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"2 tokens differ, such as 'a', which is missing there and number"):
        TorchTrainer(taught((models[0], other)))
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        TorchTrainer(taught((models[0], str(tmp_path / "nowhere"))))


def test_a_row_with_a_token_that_the_teacher_does_not_have_is_left_out(models: tuple[str, str]) -> None:
    """Models of a family pad their embeddings to different sizes, beyond the tokenizer's numbers."""
    setting = attrs.evolve(taught(models), max_non_finite=0.5)
    trainer = TorchTrainer(setting)
    trainer._scores.models["teacher"]._scorer.module.resize_token_embeddings(90)  # type: ignore[operator]
    rows = ragged()
    odd = attrs.evolve(
        rows[0], tokens=attrs.evolve(rows[0].tokens, ids=np.full(len(rows[0].tokens), 97, np.int32))
    )
    metrics = trainer.step(batch([odd, *rows[1:]])).metrics
    assert metrics["non_finite_rows"] == 1


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ({"loss": {"name": "distillation"}}, ConfigError, r"the score 'teacher'; write\n\[scores.teacher\]"),
        (
            {"scores": {"teacher": {"weights": "some/model"}}},
            ConfigError,
            r"teacher\] does nothing: with its",
        ),
        (
            {"loss": {"name": "distillation"}, "scores": {"teacher": {"weights": "./nowhere"}}},
            ModelError,
            "there is no such directory",
        ),
    ],
    ids=["no teacher", "no use", "nowhere"],
)
def test_a_teacher_and_a_loss_that_do_not_fit_are_refused_before_anything_starts(
    tables: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = build([{"tasks": {"sort": {"env": "math:sort"}}}, tables])
    with pytest.raises(error, match=message):
        make(config, PluginHost.discover())


def test_a_run_without_a_checkpoint_is_not_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    tables = {"tasks": {"sort": {"env": "math:sort"}}, "loss": {"name": "distillation"}}
    config = build([tables, {"scores": {"teacher": {"weights": str(tmp_path)}}}])
    with pytest.raises(ConfigError, match="a run that has no checkpoint yet"):
        make(config, PluginHost.discover())


def test_a_model_is_validated_without_its_teacher() -> None:
    tables = {"loss": {"name": "distillation"}, "scores": {"teacher": {"weights": "./gone"}}}
    config = build([{"tasks": {"sort": {"env": "math:sort"}}}, tables])
    make(config, PluginHost.discover(), trains=False)


# ---------------------------------------------------------------------------------- whole runs

TEACHER = {"trainer.steps": 1, "model.options.width": 64, "model.options.warm_start_steps": 400}
STUDENT = {"trainer.steps": 60, "trainer.lr": 1e-3, "validation.every": 60, "model.options.width": 48}


def trained(directory: Path, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of a run on sorting."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [GRPO, "train", "--env", "math:sort", "--output", directory.name, *words]
    done = subprocess.run(command, cwd=directory.parent, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_small_model_learns_from_a_larger_one_without_rewards(tmp_path: Path) -> None:
    """The teacher is a run, which stands for its newest checkpoint."""
    trained(tmp_path / "teacher", TEACHER)
    distilled = trained(
        tmp_path / "student", {**STUDENT, "loss.name": "distillation", "scores.teacher.weights": "teacher"}
    )
    accuracies = [row[key] for row in distilled if (key := "validation/sort/accuracy") in row]
    distances = [row["teacher_kl"] for row in distilled if "teacher_kl" in row]
    assert accuracies[-1] > accuracies[0] + 0.2
    assert np.mean(distances[-5:]) < 0.5 * np.mean(distances[:5])
    config = (tmp_path / "student" / "config.toml").read_text()
    assert "teacher/checkpoints/step-000001/trainer" in config


def test_the_path_of_a_teacher_is_absolute_and_a_hub_id_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    host = PluginHost.discover(["algorithms"])
    config = with_absolute_paths(build([{"scores": {"teacher": {"weights": "model"}}}]), host)
    assert config.scores["teacher"].weights == str(tmp_path / "model")
    config = with_absolute_paths(build([{"scores": {"teacher": {"weights": "org/model"}}}]), host)
    assert config.scores["teacher"].weights == "org/model"
