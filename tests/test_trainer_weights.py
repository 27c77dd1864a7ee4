"""Layers that compute with bfloat16 copies of float32 weights, by one process and by several ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from test_cli import grpo
from test_ranks import configured, run, trained
from test_trainer import batch, copied, ragged, row, same, save
from torch.distributed.tensor import DTensor

from grpo_core.config import ModelConfig, build
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ConfigError
from grpo_core.demo import tiny
from grpo_core.plugins.host import PluginHost
from grpo_core.training import microbatch
from grpo_core.training.model import ModelSource
from grpo_core.training.passes import Passes
from grpo_core.training.state_files import read_state
from grpo_core.weights.reading import read_weights
from grpo_plugin_scale.config import check
from grpo_plugin_scale.lora import LoraConfig
from grpo_plugin_scale.training.group import Group
from grpo_plugin_scale.training.sharded import ShardedModel
from grpo_plugin_scale.training.trainer import ScaledTrainer

COPIES: dict[str, Any] = {"weights": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=32, layers=2, warm_start_steps=0)
    return str(directory)


def in_bfloat16(model: str, kind: dict[str, Any] = COPIES, **options: Any) -> TrainerSetup:
    given: TrainerSetup = configured(model, kind, **options)
    return attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16"))


def steps(first: int, end: int) -> list[Any]:
    return [batch(ragged(groups=3, size=2, seed=step), step=step) for step in range(first, end)]


@pytest.mark.long
def test_the_optimizer_has_float32_weights_and_passes_have_bfloat16_ones(model: str) -> None:
    trainer = ScaledTrainer(in_bfloat16(model))
    seen = set()
    for layer in trainer.model.policy.module.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            layer.register_forward_hook(lambda layer, given, made: seen.add((layer.weight.dtype, made.dtype)))
    trainer.step(steps(0, 1)[0])
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert {tensor.dtype for tensor in trainer.model.weights()} == {torch.float32}
    assert {tensor.dtype for tensor in trainer.optimizers.tensors()} == {torch.float32}


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all", "lora"])
def test_a_model_that_ranks_share_is_never_whole_on_their_device(model: str, lora: LoraConfig | None) -> None:
    """Its device does not exist here: whatever is moved there before ``fully_shard`` would raise an error."""
    ranks = Group(0, 1, rendezvous="", device=torch.device("cpu"), seconds=60.0)
    config = ModelConfig(path=model, dtype="float32")
    elsewhere = torch.device("cuda", 3)
    source = ModelSource(
        start=model,
        saved=None,
        config=config,
        device=elsewhere,
        passes=Passes(copies=True),
        ranks=ranks,
        kept=("start",),
    )
    built = lora.build_model(source) if lora else ShardedModel.build(source)
    assert all(isinstance(parameter, DTensor) for _, parameter in built.trainable())
    (canary,) = built.next_tokens([tuple(tiny.encode("12+34="))])
    assert canary.logprobs[0] < 0


@pytest.mark.long
def test_updates_that_bfloat16_would_round_away_add_up(model: str) -> None:
    """The learning rate moves most weights by less than half of the distance between two bfloat16 numbers."""
    trainer = ScaledTrainer(in_bfloat16(model, lr=1e-5))
    before = {name: parameter.full_tensor() for name, parameter in trainer.model.trainable()}
    before = {name: tensor.clone() for name, tensor in before.items()}
    for given in steps(0, 3):
        trainer.step(given)
    moved = unseen = total = 0
    for name, parameter in trainer.model.trainable():
        now = parameter.full_tensor()
        changed = now != before[name]
        moved += int(changed.sum())
        unseen += int((changed & (now.bfloat16() == before[name].bfloat16())).sum())
        total += now.numel()
    assert moved > 0.8 * total
    assert unseen > 0.5 * total


@pytest.mark.long
def test_engines_get_exactly_the_weights_that_the_trainer_scores_with(model: str) -> None:
    trainer = ScaledTrainer(in_bfloat16(model))
    for given in steps(0, 2):
        trainer.step(given)
    prompt = tuple(tiny.encode("12+34="))
    weights = trainer.publish([prompt])
    engine = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    published = dict(read_weights(weights))
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    engine.load_state_dict(published, strict=False)
    rows = [row("12+34=", "46"), row("7*8=", "56;ok")]
    scored, _ = trainer.model.score(microbatch.collate(rows, trainer.device), 1.0)
    place = 0
    for each in rows:
        ids = torch.tensor([each.prompt_ids.tolist() + each.tokens.ids.tolist()])
        with torch.no_grad():
            hidden = engine.base_model(ids)[0]
        logits = hidden.float() @ engine.get_output_embeddings().weight.float().T
        log_p = torch.log_softmax(logits[0], -1)
        for i, token in enumerate(each.tokens.ids.tolist()):
            expected = log_p[len(each.prompt_ids) + i - 1, token].item()
            assert scored[place].item() == pytest.approx(expected, abs=0.02)
            place += 1
    with torch.no_grad():
        hidden = engine.base_model(torch.tensor([prompt]))[0][0, -1]
    log_p = torch.log_softmax(hidden.float() @ engine.get_output_embeddings().weight.float().T, -1)
    (canary,) = weights.canary
    for token, logprob in zip(canary.token_ids, canary.logprobs, strict=True):
        assert logprob == pytest.approx(log_p[token].item(), abs=1e-5)


KINDS: list[dict[str, Any]] = [
    COPIES,
    {**COPIES, "loss": {"kl": {"coefficient": 0.1}}, "packing": True, "activations": "recompute"},
    {**COPIES, "loss": {"kl": {"coefficient": 0.1}}, "reference": copied(2)},
    {**COPIES, "loss": {"kl": {"coefficient": 0.1}}, "lora": LoraConfig(rank=4, alpha=8)},
]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_is_the_same_bit_for_bit(model: str, tmp_path: Path, kind: dict[str, Any]) -> None:
    straight, first = (ScaledTrainer(in_bfloat16(model, kind)) for _ in range(2))
    for given in steps(0, 4):
        straight.step(given)
    for given in steps(0, 2):
        first.step(given)
    save(first, tmp_path)
    resumed = ScaledTrainer(in_bfloat16(model, kind, resume_from=tmp_path))
    for given in steps(2, 4):
        resumed.step(given)
    assert same(straight, resumed)
    assert not same(straight, first)


@pytest.mark.nightly
def test_ranks_train_nearly_what_one_process_trains_and_continue_what_it_saved(
    model: str, tmp_path: Path
) -> None:
    """Each rank rounds the gradient of its own rows, so that sums differ in the last bits of bfloat16."""
    saved, again = tmp_path / "of one", tmp_path / "of two"
    alone, one = run(trained(in_bfloat16(model), steps(0, 3), save=saved))
    together, two = run(trained(in_bfloat16(model, ranks=2), steps(0, 3)))
    for left, right in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_mean"):
            assert right.metrics[name] == pytest.approx(left.metrics[name], rel=0.02, abs=1e-3), name
    for name, tensor in alone.items():
        assert torch.allclose(tensor.float(), together[name].float(), atol=2.5e-3, rtol=0.02), name
    run(trained(in_bfloat16(model, ranks=2, resume_from=saved), [], save=again))
    for name, tensor in read_state(saved / "optimizer"):
        assert torch.equal(dict(read_state(again / "optimizer"))[name], tensor), name
    plain = ScaledTrainer(configured(model, {}, resume_from=again))
    assert plain.version == 3, "the choice may change when a run is resumed"


@pytest.mark.parametrize(
    ("trainer", "others", "message"),
    [
        ({}, {"model": {"dtype": "float32"}}, r'set model\.dtype = "bfloat16"'),
        ({}, {"model": {"dtype": "auto"}}, r'set model\.dtype = "bfloat16"'),
        ({"compile": True}, {}, r"trainer\.compile = true is for one process with float32 weights"),
        ({"offload": True}, {"pipeline": {"max_staleness": 0}}, r"trainer\.offload = true: the weights of"),
        ({}, {"optimizer": {"name": "muon"}}, r"the optimizer 'muon' computes with whole parameters"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    trainer: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    table = {"model": {"dtype": "bfloat16"}, "tasks": {"sort": {"env": "math:sort"}}}
    host = PluginHost.discover()
    config = build([{**table, **others, "trainer": {**COPIES, **trainer}}], host.sections)
    with pytest.raises(ConfigError, match=message):
        check(config=config, host=host)


@pytest.mark.nightly
def test_a_run_trains_with_a_canary_and_is_continued_with_float32_weights(tmp_path: Path) -> None:
    done = grpo(
        tmp_path,
        *("train", "--env", "math:sort", "--output", "run", "--set", "trainer.weights=bfloat16"),
        *("--set", "model.dtype=bfloat16", "--set", "validation.every=0", "--set", "checkpoint.every=2"),
        *("--set", "trainer.steps=4", "--set", "trainer.prompts_per_step=8"),
    )
    assert done.returncode == 0, done.stderr
    resumed = ("train", "--resume", "run", "--set", "trainer.weights=float32", "--set", "trainer.steps=6")
    again = grpo(tmp_path, *resumed)
    assert again.returncode == 0, again.stderr
    verified = grpo(tmp_path, "verify", "run")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_process_trains_with_copies_and_its_peak_is_no_higher(tmp_path: Path, model: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=98, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    peaks = []
    for kind in ({"weights": "float32"}, COPIES):
        given = in_bfloat16(str(tmp_path), kind, device="cuda", tokens_per_microbatch=2048)
        trainer = ScaledTrainer(given)
        torch.cuda.reset_peak_memory_stats()
        peaks.append(trainer.step(batch(ragged(groups=256, size=4))).metrics["memory_gpu/trainer"])
        del trainer
        gc.collect()
    assert peaks[1] <= peaks[0]
