"""How fast the engine `local` decodes, against transformers' ``generate`` in the same process.

    python tests/benchmarks/bench_engine.py [--threads 1] [--demo]
    python tests/benchmarks/bench_engine.py --real bfloat16 --threads 2

``--real`` compares with vLLM and with the limit of matrix products instead, on SmolLM2-135M-Instruct (of
grpo-plugin-smollm2, which downloads it once): 64 tokens after 40, in groups of 8, the median of 3 rounds in
which both sides take turns.  The limit is the fastest of three ways to compute all products of a step.

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
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from attrs import frozen

from grpo_core.contracts.records import EngineSetup, GenerationRequest
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.engines.local.linear import Linear
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.processes import cpu
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


PROMPT, TOKENS = 40, 64
SMOLLM2 = ((64, 1.1), (8, 1.0), (1, 1.0))
"""Rows, and the least ratio to vLLM that is good enough in bfloat16."""
LEAST_SHARE = {"float32": 0.65, "bfloat16": 0.40}


def real_requests(rows: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_ids=[(31 * j + 7 * (i // 8) + 5) % 40000 for j in range(PROMPT)], max_tokens=TOKENS, seed=i
        )
        for i in range(rows)
    ]


def serve_vllm(model: str, dtype: str, threads: int) -> None:
    """Decode as many rows as each line of the input says; runs in a separate process."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=512, max_num_seqs=64)
    print("ready", file=answers, flush=True)
    for text in sys.stdin:
        rows = int(text)
        prompts = [{"prompt_token_ids": r.prompt_ids.tolist()} for r in real_requests(rows)[::8]]
        parameters = SamplingParams(n=min(8, rows), max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        begin = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        print(time.perf_counter() - begin, file=answers, flush=True)


def product_limit(shape: Shape, rows: int, dtype: torch.dtype) -> float:
    """Seconds of a step's products alone."""
    s = shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes = [(q + 2 * kv, s.width), (s.width, q), (2 * s.mlp, s.width), (s.width, s.mlp)] * s.layers
    weights = [torch.randn(o, i, dtype=dtype) for o, i in [*sizes, (s.vocabulary, s.width)]]
    pairs = [(torch.randn(rows, w.shape[1], dtype=dtype), w) for w in weights]
    packed = [(x, Linear(w)) for x, w in pairs]
    ways: list[Callable[[], object]] = [
        lambda: [x @ w.t() for x, w in pairs],
        lambda: [w @ x.t() for x, w in pairs],
        lambda: [linear(x) for x, linear in packed],
    ]
    return min(best(way, 5) for way in ways)


def compare_real(threads: int, dtype: str, rounds: int) -> None:
    from safetensors.torch import load_file

    from grpo_plugin_smollm2.source import cached

    model = str(cached())
    shape = Shape.of(json.loads(Path(model, "config.json").read_text()))
    assert shape is not None
    vllm = subprocess.Popen(
        [sys.executable, __file__, "--vllm", model, dtype, "--threads", str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert vllm.stdin is not None
    assert vllm.stdout is not None
    if not vllm.stdout.readline():
        raise SystemExit("vLLM does not start; run this script with --vllm to see why")
    kind = getattr(torch, dtype)
    weights = {name: tensor.to(kind) for name, tensor in load_file(Path(model, "model.safetensors")).items()}
    writer = SharedMemoryWriter()
    with tempfile.TemporaryDirectory() as logs, asyncio.Runner() as runner:
        engine = LocalEngine(EngineSetup(model=model, threads=threads, log_directory=logs))
        runner.run(engine.update_weights(writer.write(0, weights.items())))
        for rows, least in SMOLLM2:
            ours, theirs = [], []
            for _ in range(rounds + 1):
                print(rows, file=vllm.stdin, flush=True)
                theirs.append(float(vllm.stdout.readline()))
                begin = time.perf_counter()
                runner.run(engine.generate(real_requests(rows)))
                ours.append(time.perf_counter() - begin)
            mine, peer = median(ours[1:]), median(theirs[1:])
            name = f"SmolLM2, {dtype}, {rows} rows"
            line(f"{name}: tokens/s", rows * TOKENS / mine, None)
            line(f"{name}: times vLLM", peer / mine, least if dtype == "bfloat16" else None)
            limit = product_limit(shape, rows, kind) * TOKENS
            line(
                f"{name}: share of the matmul limit", limit / mine, LEAST_SHARE[dtype] if rows == 64 else None
            )
        runner.run(engine.aclose())
    vllm.stdin.close()
    vllm.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--demo", action="store_true", help="the demo model only")
    parser.add_argument("--real", choices=LEAST_SHARE, help="SmolLM2-135M-Instruct against vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", nargs=2, metavar=("MODEL", "DTYPE"), help="serve vLLM's side of --real")
    options = parser.parse_args()
    if options.vllm:
        path, dtype = options.vllm
        return serve_vllm(path, dtype, options.threads)
    if options.real:
        cpu.prepare(options.threads)
        return compare_real(options.threads, options.real, options.rounds)
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
