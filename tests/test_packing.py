"""Rows without padding: each is trained as if it were alone, and models that cannot do that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from adapting import with_lora
from test_trainer import batch, ragged, row, setup, weights

from grpo_core.config import ModelConfig, OptimizerConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.records import Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo import tiny
from grpo_core.training import packing
from grpo_core.training.batching import length
from grpo_core.training.microbatch import MicroBatch, collate
from grpo_core.training.model import FullModel, ModelSource, load
from grpo_core.training.passes import Passes
from grpo_core.training.plan import shares as divided
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_scale.lora import LoraConfig

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return str(directory)


def saved(directory: Path, tokenizer: str, config: Any) -> str:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    return str(directory)


def trained(given: Any, steps: int = 2) -> TorchTrainer:
    """The trainer after some steps in float64, in which two ways to compute the same differ by nothing."""
    trainer = TorchTrainer(given)
    trainer.model.policy.module.double()
    for step in range(steps):
        trainer.step(batch(ragged(seed=step), step))
    return trainer


def micros(trainer: TorchTrainer) -> list[MicroBatch]:
    """The micro-batches of a step, which is not made."""
    (share,) = divided(batch(ragged(), trainer.version), updates=1, layout=trainer.layout)
    return trainer._microbatches(share, share.updates[0])


def agree(one: TorchTrainer, other: TorchTrainer, tolerance: float = 1e-9) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("budget", [1, 30, 8192], ids=["a row each", "some rows", "all rows"])
def test_packed_rows_train_the_weights_of_padded_rows(model: str, budget: int) -> None:
    """A row that is longer than the budget is trained in a separate micro-batch."""
    padded = trained(setup(model, updates_per_step=2))
    packed = trained(setup(model, updates_per_step=2, packing=True, tokens_per_microbatch=budget))
    agree(padded, packed)


def test_auto_packs_on_a_cpu_and_on_a_gpu_that_has_a_kernel(model: str) -> None:
    (micro,) = micros(TorchTrainer(setup(model)))
    assert micro.packed
    gpu = torch.device("cuda")
    assert packing.packs_well("auto", gpu)
    assert packing.packs_well("bfloat16", gpu)
    assert not packing.packs_well("float32", gpu)


def test_packed_rows_have_no_padding(model: str) -> None:
    given = setup(model, packing=True, tokens_per_microbatch=30)
    assert TorchTrainer(given).step(batch(ragged())).metrics["tokens/padding"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SHAPE, head_dim=8),
        transformers.MistralConfig(**SHAPE, sliding_window=4),
        transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=4),
        transformers.Qwen3MoeConfig(
            **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
    ],
    ids=["qwen3", "mistral, a window", "gemma3, windows in some layers", "qwen3, experts"],
)
def test_packed_rows_of_other_models_have_the_logprobs_of_padded_rows(
    model: str, tmp_path: Path, config: Any
) -> None:
    path = saved(tmp_path, model, config)
    rows = [*ragged(groups=4), *with_one_prompt(["x", "yz", "abcdefgh"])]
    found = []
    for packed in (False, True):
        source = ModelSource(
            start=path, saved=None, config=ModelConfig(path=path), device=CPU, passes=Passes(packing=packed)
        )
        made = FullModel.build(source)
        found.append(made.score(collate(rows, CPU, packed=packed), 1.0)[0])
        if packed:  # what is not packed is computed as before: the canary's prompts
            assert made.next_tokens([(5, 6, 7), (8, 9)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)


UNSUITABLE = {
    "soft-capped scores": transformers.Gemma2Config(**SHAPE, head_dim=8),
    "a state instead of attention": transformers.MambaConfig(
        vocab_size=98, hidden_size=32, num_hidden_layers=1
    ),
    "layers that divide a row": transformers.Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=64
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("config", UNSUITABLE.values(), ids=UNSUITABLE)
def test_a_model_that_cannot_keep_rows_apart_is_refused(model: str, tmp_path: Path, config: Any) -> None:
    path = saved(tmp_path, model, config)
    with pytest.raises(ModelError, match=r"trainer\.packing = true does not work with this model") as caught:
        TorchTrainer(setup(path, packing=True))
    assert "\n" not in str(caught.value)


def test_it_is_trained_with_padding_unless_packing_is_asked_for(model: str, tmp_path: Path) -> None:
    path = saved(tmp_path, model, UNSUITABLE["soft-capped scores"])
    chosen, padded = (trained(setup(path, **options)) for options in ({}, {"packing": False}))
    agree(chosen, padded, tolerance=0)
    assert not any(micro.packed for micro in micros(chosen))


def test_a_model_with_attention_of_its_own_kind_is_refused(model: str) -> None:
    """Both rows see all of their tokens, and the same ones packed as alone."""
    module = load(model, device=CPU)
    for part in module.modules():
        if hasattr(part, "is_causal"):
            part.is_causal = False  # type: ignore[assignment]
    with pytest.raises(ModelError, match="the outputs of two packed rows differ from each row alone"):
        packing.use_packing(module)


@pytest.mark.long
def test_packed_rows_are_trained_with_adapters_a_reference_and_recomputed_layers(model: str) -> None:
    lora = LoraConfig(rank=4, publish="merged")
    given = setup(model, loss={"kl": {"coefficient": 0.1}}, activations="recompute")
    given = with_lora(given, lora)
    packed = attrs.evolve(given, trainer=attrs.evolve(given.trainer, packing=True))
    one, other = TorchTrainer(given), TorchTrainer(packed)
    for trainer in (one, other):
        for step in range(2):
            trainer.step(batch(ragged(seed=step), step))
    agree(one, other, 1e-6)


def test_rows_of_a_rollout_that_a_loss_wants_together_are_packed(model: str) -> None:
    rows = [
        attrs.evolve(row("abc", "defgh", 1.0), rollout=1),
        attrs.evolve(row("b", "efghij", 1.0), rollout=1),
        row("cd", "fgh", -1.0),
    ]
    found = []
    for packed in (False, True):
        given = setup(model, loss={"ratio": "sequence"}, packing=packed, updates_per_step=1)
        trainer = TorchTrainer(given)
        trainer.step(batch(rows))
        found.append(trainer)
    agree(*found, tolerance=1e-6)


def with_one_prompt(replies: Sequence[str], prompt: str = "abcdefg") -> list[Row]:
    return [row(prompt, reply, (-1.0) ** i, group=0) for i, reply in enumerate(replies)]


def moved_by_gradient(model: str, rows: Sequence[Row], **options: Any) -> TorchTrainer:
    """A trainer after an update that is nearly its gradient, which of AdamW's is only its direction."""
    plain = OptimizerConfig(options={"eps": 1.0})
    trainer = TorchTrainer(attrs.evolve(setup(model, lr=1.0, **options), optimizer=plain))
    trainer.model.policy.module.double()
    assert trainer.step(batch(rows)).metrics["tokens/padding"] >= 0
    return trainer


@pytest.mark.long
def test_a_prompt_that_rows_share_is_computed_once_and_trains_the_same(model: str) -> None:
    """One reply has a single token, and another prompt begins like the shared one."""
    rows = [*with_one_prompt(["x", "yz", "abcd", "yzw"]), row("abcdef", "gh", 0.5, group=1)]
    micro = collate(rows, CPU, packed=True)
    assert micro.input_ids.numel() == 7 + (0 + 1 + 3 + 2) + (6 + 1)
    assert micro.n_tokens == sum(map(length, rows))
    agree(*(moved_by_gradient(model, rows, packing=packed) for packed in (False, True)), tolerance=2e-6)


def test_rows_of_several_turns_share_their_first_prompt(model: str) -> None:
    """Tokens of the environment stand between those that were sampled."""
    said = Tokens.concatenate(
        [row("a", "bc").tokens, Tokens.context(tiny.encode("de")), row("a", "fg").tokens]
    )
    rows = [attrs.evolve(each, tokens=said) for each in with_one_prompt(["bc", "bc"])]
    rows.append(with_one_prompt(["hij"])[0])
    agree(*(moved_by_gradient(model, rows, packing=packed) for packed in (False, True)), tolerance=2e-6)


def test_the_kernel_for_gpus_is_asked_for_parts_and_for_what_is_before_them(monkeypatch: Any) -> None:
    """The arguments are what torch documents: tensors [T, H, D], ends of the parts, and a window behind.

    The last queries of a part have its last keys, as flash attention has it.
    """
    asked: dict[str, Any] = {}

    def varlen_attn(query: Any, key: Any, value: Any, *given: Any, **named: Any) -> Any:
        asked.update(shapes=[tuple(each.shape) for each in (query, key, value)], given=given, **named)
        asked["keys"] = key[:, 0, 0].tolist()
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    parts = [packing.Part(length=3), packing.Part(length=1, before=0), packing.Part(length=2, before=0)]
    query, key = torch.zeros(6, 4, 16), torch.arange(6.0)[:, None, None].expand(6, 2, 16)
    packing._by_flash(query, key, key, packing.Packed(parts, CPU), 0.25, None)
    assert asked["shapes"] == [(6, 4, 16), (12, 2, 16), (12, 2, 16)]
    assert asked["keys"] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5]
    given = [each.tolist() if torch.is_tensor(each) else each for each in asked["given"]]
    assert given == [[0, 3, 4, 6], [0, 3, 7, 12], 3, 5]
    assert asked["window_size"] == (-1, 0)  # causal
    assert asked["scale"] == 0.25
    assert asked["enable_gqa"] is True
    packing._by_flash(query, key, key, packing.Packed(parts, CPU), 0.25, 4)
    assert asked["window_size"] == (3, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_packed_rows_have_the_logprobs_and_gradients_of_padded_rows(
    model: str, tmp_path: Path, dtype: str
) -> None:
    path = saved(tmp_path, model, transformers.Qwen3Config(**{**SHAPE, "head_dim": 64}))
    found = []
    rows = [*ragged(groups=8), *with_one_prompt(["x", "yz", "abcdefgh"])]
    for packed in (False, True):
        config = ModelConfig(path=path, dtype=dtype)  # type: ignore[arg-type]
        device = torch.device("cuda")
        passes = Passes(packing=packed)
        made = FullModel.build(
            ModelSource(start=path, saved=None, config=config, device=device, passes=passes)
        )
        logprobs, _ = made.score(collate(rows, device, packed=packed), 1.0)
        torch.autograd.backward(logprobs.sum())
        found.append((logprobs.detach(), [parameter.grad for _, parameter in made.trainable()]))
    (one, gradients), (other, others) = found
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    for mine, theirs in zip(gradients, others, strict=True):
        assert (mine - theirs).norm() <= tolerance * mine.norm()
