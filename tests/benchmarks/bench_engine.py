"""How fast the engine `local` decodes, against transformers' ``generate`` in the same process.

    python tests/benchmarks/bench_engine.py [--threads 1] [--demo]

Prints one line per figure: name, value, limit, ok or short.  Both sides get the same weights, prompts,
lengths and threads, and sample at temperature 1; the ratio uses the better of transformers' dynamic and
static cache where both take seconds only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen

from grpo_core.contracts.records import EngineSetup, GenerationRequest
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.weights.shm import SharedMemoryWriter

warnings.simplefilter("ignore")


@frozen(kw_only=True)
class Workload:
    name: str
    prompts: int
    group_size: int
    max_tokens: int
    ragged: bool
    limit: float

    def requests(self, vocabulary: int) -> list[GenerationRequest]:
        rng = random.Random(0)
        prompts = [tuple(rng.randrange(vocabulary) for _ in range(7)) for _ in range(self.prompts)]
        lengths = [self.max_tokens] * (self.prompts * self.group_size)
        if self.ragged:  # of mean a third of the longest, which is there
            lengths = [
                min(self.max_tokens, 1 + int(rng.expovariate(2.75 / self.max_tokens))) for _ in lengths
            ]
            lengths[0] = self.max_tokens
        return [
            GenerationRequest(prompt_ids=prompts[i // self.group_size], max_tokens=length, seed=i)
            for i, length in enumerate(lengths)
        ]


def model(vocabulary: int, width: int, layers: int, heads: int, mlp: int, tied: bool):  # type: ignore[no-untyped-def]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def best(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of ``times`` runs, after one that does not count if there are several."""
    seconds = []
    for _ in range(times + (times > 1)):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[times > 1 :])


def ours(decoder: Decoder, requests: list[GenerationRequest]) -> None:
    decoder.add(enumerate(requests))
    while decoder.busy:
        decoder.step()


def theirs(hf, requests: list[GenerationRequest], cache: str) -> None:  # type: ignore[no-untyped-def]
    from transformers import StoppingCriteriaList

    ids = torch.tensor([r.prompt_ids.tolist() for r in requests])
    ends = torch.tensor([len(r.prompt_ids) + r.max_tokens for r in requests])
    longest = max(r.max_tokens for r in requests)
    hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        cache_implementation=cache,
        disable_compile=True,
        stopping_criteria=StoppingCriteriaList([lambda input_ids, _scores, **_: input_ids.shape[1] >= ends]),
    )


def matmul_rate(shape: Shape, rows: int) -> float:
    """FLOP/s of the model's own products alone, as many rows at once."""
    s = shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes = [(q + 2 * kv, s.width), (s.width, q), (2 * s.mlp, s.width), (s.width, s.mlp)] * s.layers
    pairs = [(torch.randn(o, i), torch.randn(i, rows)) for o, i in [*sizes, (s.vocabulary, s.width)]]
    outs = [torch.empty(a.shape[0], rows) for a, _ in pairs]

    def run() -> None:
        for (a, b), out in zip(pairs, outs, strict=True):
            torch.mm(a, b, out=out)

    return flops(shape) * rows / best(run, 20)


def flops(s: Shape) -> int:
    """Count the floating-point operations of a token's matrix products."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return 2 * (s.layers * s.width * (2 * q + 2 * kv + 3 * s.mlp) + s.vocabulary * s.width)


def line(name: str, value: float, limit: float | None, unit: str = "") -> None:
    feedback = "" if limit is None else f"  limit {limit:g}  {'ok' if value >= limit else 'short'}"
    print(f"{name:<52} {value:>12,.2f}{unit}{feedback}", flush=True)


def compare(name: str, hf, workloads: list[Workload], times: int) -> None:  # type: ignore[no-untyped-def]
    shape = Shape.of(json.loads(hf.config.to_json_string()))
    assert shape is not None
    decoder = Decoder(Llama(shape, device=torch.device("cpu"), dtype=torch.float32))
    decoder.load([dict(hf.named_parameters())], 0)
    known: dict[tuple[int, int], float] = {}
    for load in workloads:
        requests = load.requests(shape.vocabulary)
        rows = len(requests)
        tokens = sum(r.max_tokens for r in requests)
        mine = best(lambda r=requests: ours(decoder, r), times)
        if (rows, load.max_tokens) not in known:  # it decodes finished rows to the end: ragged costs the same
            caches = ["dynamic", "static"] if times > 1 else ["dynamic"]
            known[rows, load.max_tokens] = min(
                best(lambda r=requests, c=c: theirs(hf, r, c), times) for c in caches
            )
        line(f"{name}, {load.name}: tokens/s", tokens / mine, None)
        line(f"{name}, {load.name}: times transformers", known[rows, load.max_tokens] / mine, load.limit)
        if not load.ragged:
            share = flops(shape) * tokens / mine / matmul_rate(shape, rows)
            line(f"{name}, {load.name}: share of the matmul rate", share, None)


def through_child(hf, load: Workload, threads: int) -> None:  # type: ignore[no-untyped-def]
    shape = Shape.of(json.loads(hf.config.to_json_string()))
    assert shape is not None
    decoder = Decoder(Llama(shape, device=torch.device("cpu"), dtype=torch.float32))
    decoder.load([dict(hf.named_parameters())], 0)
    requests = load.requests(shape.vocabulary)
    direct = best(lambda: ours(decoder, requests), 5)

    async def run(directory: str) -> float:
        engine = LocalEngine(EngineSetup(model=directory, threads=threads, log_directory=directory))
        await engine.update_weights(SharedMemoryWriter().write(0, hf.named_parameters()))
        seconds = []
        for _ in range(6):
            begin = time.perf_counter()
            await engine.generate(requests)
            seconds.append(time.perf_counter() - begin)
        await engine.aclose()
        return min(seconds)

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(hf.config.to_json_string())
        child = asyncio.run(run(directory))
    tokens = sum(r.max_tokens for r in requests)
    line(f"child, {load.name}: tokens/s", tokens / child, None)
    line(f"child, {load.name}: speed of the decoder's own", direct / child, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--demo", action="store_true", help="the demo model only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    demo = model(100, 64, 2, 4, 128, tied=True)
    equal = Workload(name="512 equal", prompts=64, group_size=8, max_tokens=6, ragged=False, limit=1.3)
    compare(
        "demo",
        demo,
        [
            Workload(name="512 ragged", prompts=64, group_size=8, max_tokens=24, ragged=True, limit=3.0),
            Workload(name="64 equal", prompts=64, group_size=1, max_tokens=6, ragged=False, limit=2.0),
            equal,
        ],
        times=5,
    )
    through_child(demo, equal, options.threads)
    if not options.demo:
        compare(
            "19M",
            model(32000, 256, 6, 4, 1024, tied=False),
            [
                Workload(name="64 equal", prompts=64, group_size=1, max_tokens=64, ragged=False, limit=2.0),
                Workload(name="512 ragged", prompts=64, group_size=8, max_tokens=64, ragged=True, limit=3.0),
                Workload(name="512 equal", prompts=64, group_size=8, max_tokens=64, ragged=False, limit=1.3),
            ],
            times=1,
        )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's threads need not be waited for
