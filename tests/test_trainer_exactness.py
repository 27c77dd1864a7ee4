"""The trainer in a run computes what plain torch computes, with every option that changes a weight."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from attrs import evolve
from test_pipeline import Run
from torch import Tensor

from grpo_core.config import LossConfig, ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.protocols import Trainer
from grpo_core.contracts.records import (
    Batch,
    Completion,
    Feedback,
    GenerationRequest,
    Row,
    StepResult,
    Weights,
)
from grpo_core.loop.rollout import SamplingParams
from grpo_core.testing import FakeEngine, FakeEnvironment
from grpo_core.training.trainer import TorchTrainer

TEMPERATURE, STEPS, UPDATES = 0.7, 4, 2
CLIP_LOW, CLIP_HIGH, CAP, KL = 0.05, 0.1, 1.5, 0.3
OPTIONS = TrainerConfig(
    steps=STEPS,
    prompts_per_step=4,
    updates_per_step=UPDATES,
    lr=0.01,
    warmup_updates=2,
    lr_schedule="linear",
    lr_end=0.1,
    betas=(0.7, 0.8),
    weight_decay=0.2,
    max_grad_norm=0.05,
    tokens_per_microbatch=40,
    threads=1,
)


class NearlyUniform(FakeEngine):
    """Says words of letters; its logprobs are near those of an untrained model of 128 tokens."""

    def __init__(self) -> None:
        super().__init__(reply=lambda request, rng: "".join(rng.choices("abcdef", k=rng.randint(1, 8))))

    async def _one(self, request: GenerationRequest) -> Completion:
        said = await super()._one(request)
        rng = random.Random(request.seed)
        logprobs = [-math.log(128) + rng.uniform(-0.7, 0.7) for _ in said.token_ids]
        return Completion(
            token_ids=said.token_ids, logprobs=logprobs, versions=said.versions, finish_reason="stop"
        )


class InThisProcess(Trainer):
    """A ``TorchTrainer`` in float64 that the pipeline awaits; remembers the rows and weights of each step."""

    def __init__(self, trainer: TorchTrainer) -> None:
        for scorer in (trainer.model.policy, *trainer.model.kept.values()):
            scorer.module.double()
        self.trainer = trainer
        self.rows: list[Sequence[Row]] = []
        self.weights: list[dict[str, Tensor]] = []

    async def step(self, batch: Batch) -> StepResult:
        self.rows.append(batch.rows)
        result = self.trainer.step(batch)
        named = self.trainer.model.trainable()
        self.weights.append({name: parameter.detach().clone() for name, parameter in named})
        return result

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        return self.trainer.publish(canary)

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        raise NotImplementedError


def load(path: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()


def logprobs(model: torch.nn.Module, row: Row) -> Tensor:
    ids = torch.tensor([*row.prompt_ids.tolist(), *row.tokens.ids.tolist()])
    log_p = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
    return log_p[:-1].gather(1, ids[1:, None])[len(row.prompt_ids) - 1 :, 0]


def losses(policy: Tensor, proximal: Tensor, reference: Tensor, row: Row) -> Tensor:
    generation = torch.tensor(row.tokens.logprobs).double()
    advantage = torch.tensor(row.advantage, dtype=torch.float32).double()
    ratio, weight = (policy - proximal).exp(), (proximal - generation).exp().clamp(max=CAP)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    d = reference - policy
    kl = (policy - policy.detach()).exp() * (d.exp() - d - 1)
    return -weight * torch.minimum(ratio * advantage, clipped * advantage) + KL * kl


def plain_torch(path: Path, steps: Sequence[Sequence[Row]]) -> Iterator[dict[str, Tensor]]:
    """The weights after each step, by a loop over rows and torch's own AdamW."""
    model, start = load(path), load(path)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": gains, "weight_decay": 0.0}],
        betas=(0.7, 0.8),
        foreach=False,
    )
    for step, rows in enumerate(steps):
        with torch.no_grad():
            proximal = {id(row): logprobs(model, row) for row in rows}
            reference = {id(row): logprobs(start, row) for row in rows}
        for number in range(UPDATES):
            update = [row for row in rows if row.group % UPDATES == number]
            total = sum(
                losses(logprobs(model, row), proximal[id(row)], reference[id(row)], row).sum()
                for row in update
            )
            optimizer.zero_grad()
            (total / sum(len(row.tokens) for row in update)).backward()
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
            for parameter in model.parameters():
                parameter.grad *= min(1.0, 0.05 / (norm + 1e-6))
            n = step * UPDATES + number
            left = 1 - max(0, n - 2) / (STEPS * UPDATES - 2)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (n + 1) / 3) * (0.1 + 0.9 * left)
            optimizer.step()
        yield {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices of this size several are slower
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # sharper than at the start of training, so that temperatures and clips matter
        made.lm_head.weight.mul_(4)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.long
@pytest.mark.parametrize(("packing", "tolerance"), [(False, 1e-9), (True, 1e-6)])
def test_a_run_trains_the_weights_that_plain_torch_trains(
    model: Path, packing: bool, tolerance: float
) -> None:
    """The model's norms round to float32: the sum of the gradients of a shared prompt, or each."""
    options = {
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "correction": {"cap": CAP},
        "kl": {"coefficient": KL},
    }
    setup = TrainerSetup(
        model=ModelConfig(path=str(model)),
        trainer=evolve(OPTIONS, packing=packing),
        loss=LossConfig(options=options),
        plugins=(),
    )
    trainer = InThisProcess(TorchTrainer(setup))
    run = Run(
        steps=STEPS,
        trainer=trainer,
        engine=NearlyUniform(),
        environment=FakeEnvironment(lambda episode: Feedback(reward=float(episode.reply.count("a")))),
        all_rows=True,
    )
    run.pipeline.playing.sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=8)
    assert run().result == "finished"
    expected = plain_torch(model, trainer.rows)
    for step, (mine, theirs) in enumerate(zip(trainer.weights, expected, strict=True)):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=tolerance, msg=f"step {step}: {name}")
