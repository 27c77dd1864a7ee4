"""A step of grpo-core next to one of TRL's GRPOTrainer: generation and training on the same work.

    make bench-peers        (installs the peer into .venv-peers)
    python tests/benchmarks/bench_peers.py [--work tiny larger] [--threads 2] [--scale 1]

The runs alternate.  Here generation and training take turns (max_staleness 0), so nothing is gained by
running them beside each other; both sides have the same weights, threads and numbers of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from attrs import evolve, frozen

from grpo_core.advantages import group
from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.engines.local import LocalEngine
from grpo_core.records import Batch, EngineSetup, GenerationRequest, Row
from grpo_core.trainer import ProcessTrainer, TrainerSetup

HERE = Path(__file__).parent
PEER = HERE.parent.parent / ".venv-peers" / "bin" / "python"
PROMPT_TOKENS = 8


@frozen(kw_only=True)
class Work:
    name: str
    prompts: int
    group_size: int
    max_tokens: int
    vocabulary: int
    width: int
    layers: int
    microbatch: int
    """Rows of the peer's micro-batch, the fastest that was found."""


WORKS = {
    "tiny": Work(
        name="tiny",
        prompts=16,
        group_size=8,
        max_tokens=16,
        vocabulary=100,
        width=256,
        layers=4,
        microbatch=128,
    ),
    "larger": Work(
        name="larger",
        prompts=64,
        group_size=8,
        max_tokens=64,
        vocabulary=32000,
        width=384,
        layers=4,
        microbatch=64,
    ),
}


def make_model(directory: Path, work: Work) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<unknown>"]
    words = [*special, *(f"w{i}" for i in range(work.vocabulary - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=work.vocabulary, hidden_size=work.width, intermediate_size=8 * work.width // 3,
            num_hidden_layers=work.layers, num_attention_heads=work.width // 64,
            num_key_value_heads=work.width // 64, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        )
    ).save_pretrained(directory)  # fmt: skip


async def ours(directory: Path, work: Work, *, dtype: str, threads: int, steps: int) -> tuple[float, float]:
    """Seconds of the best step, and its tokens per second."""
    config = TrainerConfig(threads=threads, device="cpu", lr=1e-6)
    trainer = ProcessTrainer(
        TrainerSetup(model=ModelConfig(path=str(directory), dtype=dtype), trainer=config)
    )  # type: ignore[arg-type]
    engine = LocalEngine(EngineSetup(model=str(directory), threads=threads))
    chance = random.Random(0)
    best, rate = float("inf"), 0.0
    try:
        await trainer.started()
        await engine.update_weights(await trainer.publish())
        for step in range(steps):
            known = range(3, work.vocabulary)
            prompts = [tuple(chance.choices(known, k=PROMPT_TOKENS)) for _ in range(work.prompts)]
            begun = time.perf_counter()
            requests = [
                GenerationRequest(
                    prompt_ids=prompt,
                    max_tokens=work.max_tokens,
                    stop_token_ids=(1,),
                    seed=chance.getrandbits(32),
                )
                for prompt in prompts
                for _ in range(work.group_size)
            ]
            completions = await engine.generate(requests)
            rewards = [[chance.random() for _ in range(work.group_size)] for _ in prompts]
            advantages = [a for each in group(rewards) for a in each]
            rows = tuple(
                Row(
                    prompt_ids=request.prompt_ids,
                    token_ids=completion.token_ids,
                    sampled=(True,) * len(completion.token_ids),
                    logprobs=completion.logprobs,
                    versions=completion.versions,
                    advantage=advantage,
                    group=i // work.group_size,
                )
                for i, (request, completion, advantage) in enumerate(
                    zip(requests, completions, advantages, strict=True)
                )
            )
            await trainer.step(Batch(step=step, rows=rows, temperature=1.0))
            await engine.update_weights(await trainer.publish())
            seconds = time.perf_counter() - begun
            if step and seconds < best:  # the first is a warm-up
                best, rate = seconds, sum(len(c.token_ids) for c in completions) / seconds
    finally:
        await engine.aclose()
        await trainer.aclose()
    return best, rate


def theirs(directory: Path, work: Work, *, dtype: str, threads: int, steps: int) -> tuple[float, float]:
    arguments = {
        "prompts": work.prompts, "group-size": work.group_size, "prompt-tokens": PROMPT_TOKENS,
        "max-tokens": work.max_tokens, "microbatch": work.microbatch, "threads": threads, "steps": steps,
    }  # fmt: skip
    command = [str(PEER), str(HERE / "peer_trl.py"), str(directory)]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    command += ["--bf16"] if dtype == "bfloat16" else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"peer_trl.py failed:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return min((s, t / s) for s, t in list(zip(told["seconds"], told["tokens"], strict=True))[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="how often both are run in turn")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--scale", type=int, default=1, help="divides the number of prompts")
    arguments = parser.parse_args()
    if not PEER.exists():
        raise SystemExit("the peer is not installed: run `make bench-peers`")
    for name in arguments.work:
        work = evolve(WORKS[name], prompts=WORKS[name].prompts // arguments.scale)
        options = {"dtype": arguments.dtype, "threads": arguments.threads, "steps": arguments.steps}
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), work)
            pairs = [
                (
                    asyncio.run(ours(Path(directory), work, **options)),
                    theirs(Path(directory), work, **options),
                )
                for _ in range(arguments.rounds)
            ]
        mine, peer = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        ratio = mine[0] / peer[0]
        print(f"{work.name}: grpo-core, one step{mine[0]:>42.3f} s   {mine[1]:.0f} tokens/s")
        print(f"{work.name}: TRL, one step{peer[0]:>48.3f} s   {peer[1]:.0f} tokens/s")
        print(
            f"{work.name}: grpo-core / TRL, seconds{ratio:>37.3f}     <= 1  {'ok' if ratio <= 1 else 'short'}"
        )


if __name__ == "__main__":
    main()
