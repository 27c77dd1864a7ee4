"""Models with experts: what the trainer publishes and saves, and whether engines compute the same with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from moe import FAMILIES, make_moe_model
from test_trainer import batch, ragged, setup
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations import moe as experts

from grpo_core.config import ModelConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.training.microbatch import collate
from grpo_core.training.model import Scorer, load
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.layout import load_tensors
from grpo_core.weights.names import checkpoint_tensors
from grpo_core.weights.reading import read_weights
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, start_engine

PROMPTS = ((5, 6, 7), tuple(range(20, 60)))
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def published(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in read_weights(trainer.publish()).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_each_publication_has_the_tensors_of_a_checkpoint_of_the_same_weights(
    model: Path, tmp_path: Path
) -> None:
    trainer = TorchTrainer(setup(str(model)))
    first = published(trainer)
    assert equal(first, dict(load_tensors(model)))
    trainer.step(batch(ragged()))
    second = published(trainer)
    trainer.save(tmp_path)
    trainer.written().result()
    assert equal(second, dict(load_tensors(tmp_path / "trainer")))
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert any("experts.3.w3" in name or "experts.3.up_proj" in name for name in changed)


@pytest.mark.long
def test_a_checkpoint_is_a_model_that_transformers_loads_with_the_same_logprobs(
    model: Path, tmp_path: Path
) -> None:
    trainer = TorchTrainer(setup(str(model)))
    trainer.step(batch(ragged()))
    trainer.save(tmp_path)
    trainer.written().result()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trainer")
    for known in trainer.publish(PROMPTS).canary:
        with torch.no_grad():
            logits = loaded(torch.tensor([known.prompt_ids])).logits[0, -1]
        found = torch.log_softmax(logits, -1)[list(known.token_ids)]
        assert torch.allclose(found, torch.tensor(known.logprobs), atol=1e-5)


@pytest.mark.parametrize("model", ["glm4_moe"], indirect=True)
def test_buffers_are_published_in_their_own_dtype(model: Path) -> None:
    given = setup(str(model))
    half = evolve(given, model=ModelConfig(path=str(model), dtype="bfloat16"))
    tensors = read_weights(TorchTrainer(half).publish())
    assert tensors[BIAS].dtype is torch.float32
    assert {tensor.dtype for name, tensor in tensors.items() if name != BIAS} == {torch.bfloat16}
    assert torch.equal(tensors[BIAS], dict(load_tensors(model))[BIAS])


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if "mm" in function.__name__:
            self.seen.setdefault(function.__name__.partition(".")[0], set()).add(made.dtype)
        return made


@pytest.mark.parametrize("fallback", [False, True], ids=["grouped", "one by one"])
def test_experts_multiply_in_bfloat16_as_linear_layers_do_and_as_engines_do(
    model: Path, fallback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's autocast leaves the products of stacked experts in float32, without tensor cores."""
    module: Any = load(model, device=torch.device("cpu"))
    monkeypatch.setattr(experts, "_can_use_grouped_mm", lambda *given: not fallback)
    with Products() as products:
        Scorer(module, torch.bfloat16, plain_head=True).next_tokens(PROMPTS)
        rounded, products.seen = products.seen, {}
        Scorer(module, torch.float32, plain_head=True).next_tokens(PROMPTS)
    name = "grouped_mm_fallback" if fallback else "_grouped_mm"
    assert (rounded[name], products.seen[name]) == ({torch.bfloat16}, {torch.float32})


def test_the_gradients_of_rounded_experts_are_those_of_a_linear_layer_for_each(tmp_path: Path) -> None:
    model, found = make_moe_model(tmp_path / "m", "qwen3_moe", experts=2), []  # a token is sent to both
    for way in ("grouped_mm", "eager"):
        module: Any = load(model, device=torch.device("cpu"))
        module.set_experts_implementation(way)
        micro = collate(batch(ragged()).rows, torch.device("cpu"))
        Scorer(module, torch.bfloat16, plain_head=True).score(micro, 1.0)[0].sum().backward()
        found.append(module.model.layers[1].mlp.experts.gate_up_proj.grad)
    grouped, each = found
    assert grouped.dtype is torch.float32
    assert (grouped - each).norm() < 0.02 * each.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name == "mixtral" else pytest.mark.nightly) for name in FAMILIES],
    indirect=True,
)
def test_the_local_engine_computes_the_trainers_logprobs_after_each_update(model: Path) -> None:
    async def story() -> None:
        trainer = TorchTrainer(setup(str(model), lr=1e-2))
        engine = await start_engine(LocalEngine, model)
        for step in range(2):
            weights = trainer.publish(PROMPTS)
            await engine.update_weights(weights)
            await canary.verify(engine, weights, tolerance=Tolerance(1e-4), deadline=60)
            trainer.step(batch(ragged(), step))
        tried = EngineUnderTest(engine=engine, model=model, version=5)
        await ENGINE_LAWS["logprobs are those of the model"](tried)
        await ENGINE_LAWS["weights of another model are refused and change nothing"](tried)
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_checkpoint_that_has_the_names_of_modules_is_trained_and_published_under_these(
    model: Path, tmp_path: Path
) -> None:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    loaded.save_pretrained(tmp_path / "m", save_original_format=False)
    (tmp_path / "m" / "tokenizer.json").symlink_to(model / "tokenizer.json")
    (tmp_path / "m" / "tokenizer_config.json").symlink_to(model / "tokenizer_config.json")

    async def story() -> None:
        trainer = TorchTrainer(setup(str(tmp_path / "m")))
        weights = trainer.publish(PROMPTS)
        assert "model.layers.0.mlp.experts.gate_up_proj" in {info.name for info in weights.tensors}
        engine = await start_engine(LocalEngine, tmp_path / "m")
        await engine.update_weights(weights)
        await canary.verify(engine, weights, tolerance=Tolerance(1e-4), deadline=60)
        await engine.aclose()

    asyncio.run(story())


def test_a_model_whose_checkpoint_has_other_tensors_than_parts_of_its_modules_is_refused() -> None:
    config = transformers.HrmTextConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"'hrm_text'.*gate_up_proj.*use another model"):
        checkpoint_tensors(made)


class OneWay(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **more: Any) -> Any:
        return input_dict


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_a_conversion_that_cannot_be_reverted_is_refused_with_the_family(model: Path) -> None:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    loaded._weight_conversions = [WeightConverter("q", "q_proj", [OneWay()])]
    with pytest.raises(ModelError, match="'mixtral': transformers cannot name its tensors"):
        checkpoint_tensors(loaded)
