"""A step of grpo-core next to one of TRL's GRPOTrainer: generation and training on the same work.

    make bench-peers        (installs the peer into .venv-peers)
    python tests/benchmarks/bench_peers.py [--work demo tiny larger smollm2] [--dtype float32 bfloat16]
    python tests/benchmarks/bench_peers.py --size     (growth of time and memory; about an hour)

The runs alternate, each in processes of its own.  Here generation and training take turns (max_staleness 0),
so nothing is gained by running them beside each other; both sides have the same weights, threads and numbers
of tokens.  Memory is that of all processes of a side together, where a page that several share counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attrs import evolve, frozen

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.advantages import normalize
from grpo_core.contracts.records import Batch, EngineSetup, GenerationRequest, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.training.process import ProcessTrainer
from grpo_plugin_smollm2.source import cached

HERE = Path(__file__).parent
PEER = HERE.parent.parent / ".venv-peers" / "bin" / "python"
PAGE = HERE.parent.parent / "docs" / "performance.json"

Told = dict[str, list[float]]
"""A side's report of its steps: seconds and tokens of each."""


@frozen(kw_only=True)
class Work:
    prompts: int
    group_size: int = 8
    prompt_tokens: int = 8
    max_tokens: int
    turns: int = 1
    """Calls of the engine for a rollout; the tokens are divided among them."""
    updates: int = 1
    vocabulary: int
    width: int
    heads: int
    layers: int
    microbatch: int
    """Rows of the peer's micro-batch, the fastest that was found."""
    pretrained: bool = False
    """Whether the model is that of grpo-plugin-smollm2, with its width, heads and layers."""
    alone: bool = False
    """Whether the peer is left out."""


WORKS = {
    "demo": Work(
        prompts=64, prompt_tokens=7, max_tokens=6, updates=4, vocabulary=98, width=64, heads=4, layers=2,
        microbatch=128,
    ),
    "tiny": Work(
        prompts=16, max_tokens=16, vocabulary=100, width=256, heads=4, layers=4, microbatch=128
    ),
    "larger": Work(
        prompts=64, max_tokens=64, vocabulary=32000, width=384, heads=6, layers=4, microbatch=64
    ),
    "smollm2": Work(
        prompts=8, prompt_tokens=40, max_tokens=48, vocabulary=49152, width=576, heads=9, layers=30,
        microbatch=16, pretrained=True,
    ),
}  # fmt: skip
SIZED = WORKS["larger"]
FOUR_ROWS = evolve(SIZED, prompts=1, group_size=4, max_tokens=32, microbatch=4)
SIZES = {
    **{f"prompt-{n}": evolve(FOUR_ROWS, prompt_tokens=n - 32) for n in (512, 2048, 8192)},
    **{f"rollouts-{n}": evolve(SIZED, prompts=n // 8, alone=n > 256) for n in (64, 256, 1024)},
    **{f"turns-{n}": evolve(SIZED, prompts=8, max_tokens=512, turns=n, alone=True) for n in (1, 8)},
}


def page_limits(name: str) -> list[float]:
    """Return the limits of the page: of a step's time, of memory, and of memory with ``--microbatch``."""
    rows = json.loads(PAGE.read_text(encoding="utf-8"))
    texts = [row["limit"] for row in rows if "tests/benchmarks/peer_trl.py" in row["files"]]
    text = dict(zip(WORKS, texts, strict=True)).get(name, "")  # sizes have none
    return [float(number) for number in re.findall(r"[\d.]+", text)]


def make_model(directory: Path, work: Work) -> None:
    if work.pretrained:
        shutil.copytree(cached(), directory, dirs_exist_ok=True)
        return
    import torch  # the process that trains and generates needs it, and not the one that waits for both
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
            num_hidden_layers=work.layers, num_attention_heads=work.heads,
            num_key_value_heads=work.heads, max_position_embeddings=8192,
            tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        )
    ).save_pretrained(directory)  # fmt: skip


async def ours(directory: Path, work: Work, *, dtype: str, threads: int, steps: int) -> Told:
    config = TrainerConfig(
        threads=threads, device="cpu", lr=1e-6, updates_per_step=work.updates, proximal="generation"
    )  # as the tiny preset has it, and as the peer does with several updates
    model = ModelConfig(path=str(directory), dtype=dtype)  # type: ignore[arg-type]
    trainer = ProcessTrainer(TrainerSetup(model=model, trainer=config))
    engine = LocalEngine(EngineSetup(model=str(directory), threads=threads))
    chance = random.Random(0)
    told: Told = {"seconds": [], "tokens": []}
    try:
        await trainer.started()
        await engine.update_weights(await trainer.publish())
        for step in range(steps):
            known = range(3, work.vocabulary)
            prompts = [tuple(chance.choices(known, k=work.prompt_tokens)) for _ in range(work.prompts)]
            begun = time.perf_counter()
            groups = [place for place in range(work.prompts) for _ in range(work.group_size)]
            replies = [Tokens.empty() for _ in groups]
            for _ in range(work.turns):
                requests = [
                    GenerationRequest(
                        prompt_ids=(*prompts[place], *reply.ids.tolist()),
                        max_tokens=work.max_tokens // work.turns,
                        seed=chance.getrandbits(32),
                    )
                    for place, reply in zip(groups, replies, strict=True)
                ]
                completions = await engine.generate(requests)
                replies = [
                    Tokens.concatenate([reply, completion.tokens])
                    for reply, completion in zip(replies, completions, strict=True)
                ]
            rewards = [[chance.random() for _ in range(work.group_size)] for _ in prompts]
            advantages = [a for each in rewards for a in normalize(each)]
            rows = tuple(
                Row(prompt_ids=prompts[place], tokens=reply, advantage=advantage, group=place)
                for place, reply, advantage in zip(groups, replies, advantages, strict=True)
            )
            await trainer.step(Batch(step=step, rows=rows, temperature=1.0))
            await engine.update_weights(await trainer.publish())
            told["seconds"].append(time.perf_counter() - begun)
            told["tokens"].append(sum(map(len, replies)))
    finally:
        await engine.aclose()
        await trainer.aclose()
    return told


@frozen(kw_only=True)
class Cost:
    seconds: float
    """Time of the best step after the first, which warms up (of the first if there is no other)."""
    tokens_per_second: float
    mebibytes: float
    """At the peak."""


def run(side: str, directory: Path, name: str, work: Work, *, dtype: str, threads: int, steps: int) -> Cost:
    if side == "ours":
        arguments = {"side": directory, "work": name, "dtype": dtype, "threads": threads, "steps": steps}
        command = [sys.executable, __file__, f"--prompts={work.prompts}"]
    else:
        arguments = {
            "prompts": work.prompts, "group-size": work.group_size, "prompt-tokens": work.prompt_tokens,
            "max-tokens": work.max_tokens, "microbatch": work.microbatch, "updates": work.updates,
            "threads": threads, "steps": steps,
        }  # fmt: skip
        command = [str(PEER), str(HERE / "peer_trl.py"), str(directory)]
        command += ["--bf16"] if dtype == "bfloat16" else []
    command += [f"--{key}={value}" for key, value in arguments.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        most = 0
        while process.poll() is None:
            most = max(most, resident(process.pid))
            time.sleep(0.5)  # reading the memory map slows what is measured
        output = process.stdout.read() if process.stdout else ""
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{command[1]} failed:\n{errors.read()[-2000:]}")
    told: Told = json.loads(output.strip().splitlines()[-1])
    pairs = list(zip(told["seconds"], told["tokens"], strict=True))
    seconds, tokens = min(pairs[1:] or pairs)
    return Cost(seconds=seconds, tokens_per_second=tokens / seconds, mebibytes=most / 2**20)


def resident(pid: int) -> int:
    """Bytes of a process and all below it; what is shared by several is divided among them."""
    total = 0
    try:
        below = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except OSError:
        return 0  # it has just ended
    return total + sum(resident(int(child)) for children in below for child in children)


def cheapest(costs: list[Cost]) -> Cost:
    return evolve(min(costs, key=lambda cost: cost.seconds), mebibytes=min(cost.mebibytes for cost in costs))


Best = dict[tuple[str, str], Cost]
"""The cheapest steps of each side and dtype."""


def compare(name: str, work: Work, dtypes: list[str], rounds: int, *, threads: int, steps: int) -> Best:
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), work)
        for _ in range(rounds):
            for dtype in dtypes:
                for side in ("ours", "TRL")[: 1 if work.alone else 2]:
                    cost = run(side, Path(directory), name, work, dtype=dtype, threads=threads, steps=steps)
                    costs.setdefault((side, dtype), []).append(cost)
                    print(
                        f"# {name} {dtype} {side}: {cost.seconds:.3f} s a step, "
                        f"{cost.tokens_per_second:.0f} tokens/s, {cost.mebibytes:.0f} MiB",
                        flush=True,
                    )
    best = {key: cheapest(each) for key, each in costs.items()}
    if work.alone:
        return best
    most = page_limits(name)
    for dtype in dtypes:
        mine, peer = best["ours", dtype], best["TRL", dtype]
        report(f"{name}, {dtype}: seconds of a step / TRL's", mine.seconds / peer.seconds, most[:1])
        places = most[1:2] if work.microbatch == WORKS.get(name, work).microbatch else most[2:]
        report(f"{name}, {dtype}: memory / TRL's", mine.mebibytes / peer.mebibytes, places)
    if len(dtypes) > 1:
        ratio = best["ours", "bfloat16"].seconds / best["TRL", "float32"].seconds
        report(f"{name}: seconds of a step in bfloat16 / TRL's in float32", ratio, [])
    return best


def grow(found: dict[str, Best]) -> None:
    """Print the exponents with which time and memory grow from each size to the next."""
    for (name, less), (larger, more) in itertools.pairwise(found.items()):
        (kind, small), (other, large) = (each.split("-") for each in (name, larger))
        for side, dtype in less.keys() & more.keys() if kind == other else ():
            a, b, scale = less[side, dtype], more[side, dtype], math.log(int(large) / int(small))
            print(
                f"{larger} after {small}, {dtype}, {side}: time grows with the power "
                f"{math.log(b.seconds / a.seconds) / scale:.2f}, memory with "
                f"{math.log(b.mebibytes / a.mebibytes) / scale:.2f}; time x{b.seconds / a.seconds:.2f}"
            )


def report(name: str, value: float, most: list[float]) -> None:
    limits = "".join(f"  <= {each:.3f}  {'ok' if value <= each else 'short'}" for each in most)
    print(f"{name:<66} {value:>8.3f}{limits}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=[*WORKS, *SIZES], default=list(WORKS))
    parser.add_argument("--size", dest="work", action="store_const", const=list(SIZES), help="all sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int, help="rows of the peer's, instead of the work's own number")
    parser.add_argument(
        "--steps", type=int, default=3, help="of each run; the first of several is not counted"
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often all are run in turn")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--prompts", type=int, help="in a step, instead of the work's own number")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = {"prompts": given.prompts, "microbatch": given.microbatch}
    chosen = {name: value for name, value in chosen.items() if value}
    works = {name: evolve((WORKS | SIZES)[name], **chosen) for name in given.work}
    options = {"threads": given.threads, "steps": given.steps}
    if given.side:
        print(
            json.dumps(asyncio.run(ours(given.side, works[given.work[0]], dtype=given.dtype[0], **options)))
        )
        return
    if not PEER.exists() and not all(work.alone for work in works.values()):
        raise SystemExit("the peer is not installed: run `make bench-peers`")
    grow({name: compare(name, work, given.dtype, given.rounds, **options) for name, work in works.items()})


if __name__ == "__main__":
    main()
