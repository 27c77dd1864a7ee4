"""Figures of random models with the shapes of Qwen3, for `gpu_check.py`: each kind in a process of its own.

    python tests/benchmarks/gpu_figures.py KIND --shape 0.6B|4B|tiny --device cuda|cpu

A KIND is `trainer`; `engine`, and vLLM `alone` for the same requests; `local`; or how vLLM itself computes:
`eager`, with `graphs`, or `compiled`.

The last line of the output is a JSON object of figures by name.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' helpers

from adapting import with_lora
from scaled import scaled

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Batch, Completion, EngineSetup, GenerationRequest, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo.tiny import write_tokenizer
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.training.model import load
from grpo_core.weights.names import checkpoint_tensors
from grpo_core.weights.publishing import Writer
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_scale.lora import LoraConfig
from grpo_plugin_scale.training.trainer import ScaledTrainer
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_scale.weights.cuda_ipc import CudaIpcWriter

H100 = 989e12
"""Operations of 16 bits a second, without sparsity."""
STEPS = 3
REPEATED = 3
"""Times that requests are decoded; the fastest counts, since other work on a machine slows one down."""
ROUNDS = 12
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {},
}
"""Options with which vLLM computes a step of decoding, by name."""
GIB = 1 << 30


@frozen(kw_only=True)
class Shape:
    """A model of Qwen3's kind, and how much work its figures are of."""

    layers: int
    width: int
    inner: int
    heads: int
    keys: int = 8
    head: int = 128
    vocabulary: int = 151_936
    rows: int = 8
    tokens: int = 8192
    """Tokens of a row in training."""
    requests: int = 256
    context: int = 1536
    """Tokens of a request, half of them sampled."""
    options: dict[str, Any]
    """Settings of the trainer."""
    weights: str = "float32"
    """Weights of the trainer's passes."""
    rank: int = 0
    """Inner dimension of the adapters that are trained instead of the weights; 0 trains the weights."""

    @property
    def config(self) -> Any:
        import transformers

        return transformers.Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.keys,
            head_dim=self.head,
            max_position_embeddings=2 * self.tokens,
            tie_word_embeddings=True,
        )

    def operations(self, parameters: int) -> float:
        """Return those of a token in training: all weights, and causal attention over a row.

        Frozen weights get no gradient, which is a third less.
        """
        return (
            4.0 if self.rank else 6.0
        ) * parameters + 6.0 * self.layers * self.heads * self.head * self.tokens


SHAPES = {
    "tiny": Shape(
        layers=2, width=64, inner=128, heads=2, keys=1, head=32, vocabulary=256,
        rows=4, tokens=128, requests=8, context=64, options={},
    ),
    "0.6B": Shape(layers=28, width=1024, inner=3072, heads=16, options={}),
    "0.6B, rows of 16k": Shape(
        layers=28, width=1024, inner=3072, heads=16, rows=4, tokens=16_384, options={},
    ),
    "0.6B, rows of 65k": Shape(
        layers=28, width=1024, inner=3072, heads=16, rows=2, tokens=65_536,
        options={"activations": "recompute"},
    ),
    "4B": Shape(
        layers=36, width=2560, inner=9728, heads=32,
        options={"activations": "recompute"}, weights="bfloat16",
    ),
    "4B, LoRA": Shape(
        layers=36, width=2560, inner=9728, heads=32, options={"activations": "recompute"}, rank=16,
    ),
    "tiny, LoRA": Shape(
        layers=2, width=64, inner=128, heads=2, keys=1, head=32, vocabulary=256,
        rows=4, tokens=128, requests=8, context=64, options={}, rank=16,
    ),
}  # fmt: skip


def make(shape: Shape, directory: Path) -> Path:
    """Write a random model."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.Qwen3ForCausalLM(shape.config).save_pretrained(directory)
    finally:
        torch.set_default_dtype(torch.float32)
    write_tokenizer(directory)
    return directory


# ---------------------------------------------------------------------------------- trainer


def of_trainer(shape: Shape, device: str, model: Path) -> dict[str, float]:
    """Train rows of one length."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    given = TrainerSetup(
        model=ModelConfig(path=str(model), dtype=dtype),  # type: ignore[arg-type]
        trainer=TrainerConfig(steps=STEPS, device=device, **shape.options),
        sections=scaled(weights=shape.weights),
    )
    made = ScaledTrainer(with_lora(given, LoraConfig(rank=shape.rank) if shape.rank else None))
    ids = torch.randint(5, shape.vocabulary, (shape.rows, shape.tokens)).tolist()
    rows = tuple(
        Row(
            prompt_ids=each[:64],
            tokens=Tokens.generated(each[64:], [-11.0] * (shape.tokens - 64), [0] * (shape.tokens - 64)),
            advantage=1.0 if i % 2 else -1.0,
            group=i // 4,
        )
        for i, each in enumerate(ids)
    )
    metrics: dict[str, float] = {}
    for step in range(STEPS):  # the first ones choose kernels
        metrics = made.step(Batch(step=step, rows=rows, temperature=1.0)).metrics
    speed = metrics["tokens/trained"] / metrics["time/train"]
    found = {"tokens/s": speed, "MFU": speed * shape.operations(made.model.parameters) / H100}
    if device == "cuda":
        found["peak GiB"] = metrics["memory_gpu/trainer"] / 1024  # a step resets torch's own count
    return found


# ---------------------------------------------------------------------------------- engine


def requests(shape: Shape) -> list[GenerationRequest]:
    half = shape.context // 2
    prompts = torch.randint(5, shape.vocabulary, (shape.requests, half)).tolist()
    return [
        GenerationRequest(prompt_ids=ids, max_tokens=half, seed=i, stop_token_ids=())
        for i, ids in enumerate(prompts)
    ]


def make_engine(shape: Shape, device: str, model: Path) -> Any:
    """Make the engine `vllm`, or `local` where vLLM is not installed."""
    setup = EngineSetup(model=str(model), log_directory=str(model.parent), deadline=900.0)
    dtype = "bfloat16" if device == "cuda" else "float32"
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_rows": shape.requests}
    try:
        import vllm

        from grpo_plugin_vllm.engine import VllmEngine
    except ImportError:
        return LocalEngine(setup, **options)
    del vllm
    memory = {"cache_mib": 64} if device == "cpu" else {"memory_fraction": 0.5}
    return VllmEngine(setup, max_model_len=2 * shape.context, **memory, **options)


def writers(device: str) -> dict[str, Callable[[], Writer]]:
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    ways: dict[str, Callable[[], Writer]] = {
        "shm": lambda: SharedMemoryWriter(pinned=device == "cuda"),
        "collective": lambda: CollectiveWriter(where, "127.0.0.1"),
    }
    if device == "cuda":
        ways["cuda_ipc"] = lambda: CudaIpcWriter(where)
    return ways


async def of_engine(shape: Shape, device: str, model: Path) -> dict[str, float]:
    """Bring weights by each transport, generate, and compare logprobs with the trainer's."""
    module = load(model, device=torch.device(device), dtype=torch.bfloat16)
    tensors = list(checkpoint_tensors(module).items())
    engine = make_engine(shape, device, model)
    found: dict[str, float] = {}
    version = 0
    for way, writer_of in writers(device).items():
        writer = writer_of()
        for _ in range(3):  # the first ones start the engine and its connections
            began = time.perf_counter()
            weights = writer.write(version, tensors)
            published = time.perf_counter()
            await engine.update_weights(weights)
            found[f"{way}: s to publish"] = published - began
            found[f"{way}: s to update"] = time.perf_counter() - published
            version += 1
        if pauses := re.findall(r"([\d.]+) s without decoding", log_of(model)):
            found[f"{way}: s without decoding"] = float(pauses[-1])
    asked = requests(shape)
    await engine.generate([evolve(each, max_tokens=2) for each in asked])
    seconds, completions = float("inf"), []
    for _ in range(REPEATED):
        began = time.perf_counter()
        completions = await engine.generate(asked)
        seconds = min(seconds, time.perf_counter() - began)
    found["tokens/s"] = sum(len(each.token_ids) for each in completions) / seconds
    weights = writer.write(version, tensors)
    began = time.perf_counter()
    running = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(seconds / 2)
    await engine.update_weights(weights)
    await running  # their keys and values have been computed again
    found["s that an update takes from requests"] = time.perf_counter() - began - seconds
    if device == "cuda":
        free, whole = torch.cuda.mem_get_info()
        found["GiB that all processes hold"] = (whole - free) / GIB
    await engine.aclose()
    del tensors
    gc.collect()
    difference = differences(module, asked[:16], completions[:16])
    found["logprobs differ by, mean"] = float(difference.mean())
    for share in (0.5, 0.99, 0.999):
        found[f"logprobs differ by, {share:g} of them less than"] = float(difference.quantile(share))
    found["logprobs differ by, most"] = float(difference.max())
    return found


def log_of(model: Path) -> str:
    return "".join(path.read_text() for path in model.parent.glob("engine-*.log"))


@torch.no_grad()
def differences(
    module: Any, asked: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> torch.Tensor:
    """Compare with the weights of the trainer in float32 sums, each request alone."""
    found = []
    device = next(module.parameters()).device
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=device)
        hidden = module.base_model(input_ids=ids, use_cache=False)[0][0, len(request.prompt_ids) - 1 : -1]
        logits = hidden.float() @ module.get_output_embeddings().weight.float().T
        mine = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].cpu()
        found.append((mine - torch.tensor(completion.logprobs)).abs())
    return torch.cat(found)


def mib_of(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def of_local(shape: Shape, device: str, model: Path) -> dict[str, float]:
    """Let `local` decode other lengths in each round, with new weights, and watch the host's memory."""
    module = load(model, device=torch.device(device), dtype=torch.bfloat16)
    tensors, writer = list(checkpoint_tensors(module).items()), SharedMemoryWriter(pinned=device == "cuda")
    setup = EngineSetup(model=str(model), log_directory=str(model.parent), deadline=900.0)
    engine = LocalEngine(setup, device=device, dtype="bfloat16", max_rows=64)
    resident, seconds = [], []
    for version in range(ROUNDS):
        await engine.update_weights(writer.write(version, tensors))
        asked = [evolve(each, max_tokens=32 + version) for each in requests(shape)[:64]]
        began = time.perf_counter()
        await engine.generate(asked)
        seconds.append((time.perf_counter() - began) / (32 + version))
        resident.append(mib_of(engine.pid))
    await engine.aclose()
    grown = (resident[-1] - resident[ROUNDS // 3]) / (ROUNDS - 1 - ROUNDS // 3)
    return {"ms a token": 1e3 * min(seconds), "MiB on the host that a round adds": grown}


def decoded(how: str, shape: Shape, device: str, model: Path) -> dict[str, float]:
    """Let vLLM decode in this process, and compare its logprobs with transformers'."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    module = load(model, device=torch.device(device), dtype=torch.bfloat16)
    asked, began = requests(shape), time.perf_counter()
    llm = LLM(
        str(model), dtype="bfloat16", max_model_len=2 * shape.context, max_num_seqs=shape.requests, seed=0,
        logprobs_mode="processed_logprobs", hf_overrides={"head_dtype": "float32"}, generation_config="vllm",
        kv_cache_memory_bytes=(16 << 30) if device == "cuda" else (64 << 20), **WAYS[how],
    )  # fmt: skip
    found = {"s to start": time.perf_counter() - began}
    prompts = [{"prompt_token_ids": each.prompt_ids.tolist()} for each in asked]
    outputs: list[Any] = []
    for tokens in (4, shape.context // 8, shape.context // 8):  # the first ones compile kernels
        chosen = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        began = time.perf_counter()
        outputs = [each.outputs[0] for each in llm.generate(prompts, chosen, use_tqdm=False)]
        found["tokens/s"] = sum(len(each.token_ids) for each in outputs) / (time.perf_counter() - began)
    completions = [
        SimpleNamespace(
            token_ids=list(each.token_ids),
            logprobs=[of[token].logprob for of, token in zip(each.logprobs, each.token_ids, strict=True)],
        )
        for each in outputs[:16]
    ]
    difference = differences(module, asked[:16], completions)
    found["logprobs differ by, mean"] = float(difference.mean())
    found["logprobs differ by, most"] = float(difference.max())
    return found


def alone(shape: Shape, device: str, model: Path) -> dict[str, float]:
    """Ask vLLM itself for the same: prompts are in the cache, and tokens are drawn without seeds."""
    from vllm import LLM, SamplingParams

    dtype = "bfloat16" if device == "cuda" else "float32"
    memory = {"gpu_memory_utilization": 0.5} if device == "cuda" else {"kv_cache_memory_bytes": 64 << 20}
    llm = LLM(
        str(model), dtype=dtype, max_model_len=2 * shape.context, max_num_seqs=shape.requests,
        seed=0, enforce_eager=device == "cpu", **memory,
    )  # fmt: skip
    asked = requests(shape)
    prompts = [{"prompt_token_ids": each.prompt_ids.tolist()} for each in asked]
    seconds = float("inf")
    for tokens in (2, *[shape.context // 2] * REPEATED):
        chosen = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
        began = time.perf_counter()
        llm.generate(prompts, chosen, use_tqdm=False)
        if tokens > 2:
            seconds = min(seconds, time.perf_counter() - began)
    return {"tokens/s": shape.requests * (shape.context // 2) / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = {how: partial(decoded, how) for how in WAYS}
    kinds: dict[str, Callable[..., Any]] = {
        "trainer": of_trainer,
        "alone": alone,
        "engine": of_engine,
        "local": of_local,
        **ways,
    }
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as directory:
        model = make(shape, Path(directory) / "m")
        found = kinds[options.kind](shape, options.device, model)
        if asyncio.iscoroutine(found):
            found = asyncio.run(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
