"""How far the logprobs of engines are from the trainer's, on SmolLM2-135M-Instruct.

    python tests/benchmarks/bench_logprobs.py [--engine local vllm] [--dtype float32 bfloat16]

Samples 64 replies of 48 tokens to sums in words, at temperature 1, and computes their logprobs as the trainer
does, with the weights that were published.  Prints one line per engine and dtype: mean and quantiles of the
absolute difference of a token's logprob, and the mismatch KL (k3).  ``vllm`` needs vLLM for the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from typing import Any

import attrs
import torch
from transformers import AutoTokenizer

from grpo_core.config import LossConfig, ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Completion, EngineSetup, GenerationRequest, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.training.microbatch import collate
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_smollm2.source import cached

REPLIES, TOKENS = 64, 48


def requests(model: str) -> list[GenerationRequest]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for i in range(REPLIES):
        asked = [{"role": "user", "content": f"What is {10 + i // 8} plus {11 + i % 8}?"}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        found.append(GenerationRequest(prompt_ids=ids, max_tokens=TOKENS, seed=i, stop_token_ids=()))
    return found


def engine_of(name: str, model: str, logs: str) -> Any:
    setup = EngineSetup(model=model, threads=2, log_directory=logs, deadline=900.0)
    if name == "local":
        return LocalEngine(setup)
    from grpo_plugin_vllm.engine import VllmEngine

    return VllmEngine(setup, max_model_len=512, max_rows=REPLIES, cache_mib=512)


async def completed(
    name: str, model: str, asked: list[GenerationRequest], trainer: TorchTrainer
) -> list[Completion]:
    with tempfile.TemporaryDirectory() as logs:
        engine = engine_of(name, model, logs)
        try:
            await engine.update_weights(trainer.publish())
            return list(await engine.generate(asked))
        finally:
            await engine.aclose()


@torch.no_grad()
def differences(trainer: TorchTrainer, rows: list[Row]) -> torch.Tensor:
    """Return the trainer's logprob minus the engine's, of each sampled token."""
    found = []
    for first in range(0, len(rows), 16):
        micro = collate(rows[first : first + 16], torch.device("cpu"), packed=trainer.layout.packed)
        found.append(trainer.model.score(micro, 1.0)[0] - micro.generation_logprobs)
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", nargs="+", default=["local", "vllm"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    chosen = parser.parse_args()
    model = str(cached())
    asked = requests(model)
    for dtype in chosen.dtype:
        setup = TrainerSetup(
            model=attrs.evolve(ModelConfig(path=model), dtype=dtype),
            trainer=TrainerConfig(threads=2),
            loss=LossConfig(),
            plugins=(),
        )
        trainer = TorchTrainer(setup)
        for name in chosen.engine:
            rows = [
                Row(
                    prompt_ids=request.prompt_ids,
                    tokens=Tokens.generated(reply.token_ids, reply.logprobs, reply.versions),
                    advantage=0.0,
                    group=0,
                )
                for request, reply in zip(
                    asked, asyncio.run(completed(name, model, asked, trainer)), strict=True
                )
            ]
            difference = differences(trainer, rows)
            size = difference.abs()
            quantiles = ", ".join(
                f"{share:g}: {size.quantile(share):.3g}" for share in (0.5, 0.9, 0.99, 0.999)
            )
            kl = (difference.exp() - 1 - difference).mean()
            print(
                f"{name}, {dtype}, {len(size)} tokens: mean {size.mean():.3g}, {quantiles}, "
                f"largest {size.max():.3g}, mismatch KL {kl:.2g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
