"""The cost of a token in the main process: memory, the way from an engine, and all that is done with it.

    python tests/benchmarks/bench_tokens.py

Arrays (``contracts.tokens``) against tuples of Python numbers, which records held before, in the same run.
CPU time of this process, the least of several repetitions.  Texts are not decoded here: the tokenizer does
that, and it is the same for both.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from attrs import frozen

from grpo_core.contracts.playing import check_completions
from grpo_core.contracts.records import Batch, Completion, GenerationRequest, Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens, as_ids
from grpo_core.engines import wire
from grpo_core.loop.metrics import Meter, task_metrics
from grpo_core.loop.rows import check_staleness, make_batch, with_advantages
from grpo_core.loop.rows import group as group_advantages
from grpo_core.reporting import stored

TOKENS, GROUP = 8192, 8
PROMPT = tuple(range(1000, 1256))
REPEATS = 7
STEP = 3


def completions(n: int) -> list[Completion]:
    """An engine's answer to a group, sampled by two versions."""
    chance = np.random.default_rng(0)
    return [
        Completion(
            token_ids=chance.integers(0, 150_000, n),
            logprobs=-chance.random(n),
            versions=np.repeat([STEP - 1, STEP], [n // 2, n - n // 2]),
            finish_reason="length",
        )
        for _ in range(GROUP)
    ]


# ---------------------------------------------------------------------------------- with arrays


def sent(said: Sequence[Completion]) -> bytes:
    return pickle.dumps(wire.pack_completions(said), pickle.HIGHEST_PROTOCOL)


def received(frame: bytes) -> list[Completion]:
    return wire.unpack_completions(pickle.loads(frame))


def trained(frame: bytes) -> bytes:
    """From the engine's answer to the batch for the trainer's process, by the core's own functions."""
    prompt = as_ids(PROMPT)
    requests = [GenerationRequest(prompt_ids=prompt, max_tokens=TOKENS) for _ in range(GROUP)]
    said = received(frame)
    check_completions(said, requests)
    meter = Meter()
    rollouts = tuple(
        Rollout(
            segments=[Segment(prompt_ids=prompt, tokens=Tokens.concatenate([each.tokens]))],
            reward=float(i % 2),
            turns=1,
        )
        for i, each in enumerate(said)
    )
    for rollout in rollouts:
        meter.count("task", rollout)
    groups = [
        Group(
            prompt=Prompt(messages="x", environment="task"),
            rollouts=rollouts,
            generation_version=STEP - 1,
            target_version=STEP,
        )
    ]
    check_staleness(groups, step=STEP, max_staleness=1)
    task_metrics(groups, step=STEP)
    batch = make_batch(with_advantages(groups, group_advantages), step=STEP, temperature=1.0)
    return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)


def stored_bytes(said: Sequence[Completion]) -> float:
    """Bytes of a group in the file of tokens of a step, which has 8 groups of these completions."""
    groups = [
        Group(
            prompt=Prompt(messages="x"),
            rollouts=tuple(
                Rollout(segments=[Segment(prompt_ids=np.array(PROMPT) + place, tokens=each.tokens)])
                for each in said
            ),
            generation_version=STEP,
            target_version=STEP,
        )
        for place in range(8)
    ]
    return len(stored.tokens(groups)) / len(groups)


# ---------------------------------------------------------------------------------- with tuples


@frozen(kw_only=True)
class TupleRollout:
    """A completion, a rollout and a row as they were."""

    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...] = ()
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def tuples_sent(said: Sequence[Completion]) -> bytes:
    packed = [
        (tuple(c.token_ids.tolist()), tuple(c.logprobs.tolist()), tuple(c.versions.tolist())) for c in said
    ]
    return pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)


def tuples_received(frame: bytes) -> list[TupleRollout]:
    return [
        TupleRollout(token_ids=ids, logprobs=logprobs, versions=versions)
        for ids, logprobs, versions in pickle.loads(frame)
    ]


def as_rollout(said: TupleRollout) -> TupleRollout:
    return TupleRollout(
        prompt_ids=PROMPT,
        token_ids=said.token_ids,
        sampled=(True,) * len(said.token_ids),
        logprobs=said.logprobs,
        versions=said.versions,
    )


def tuples_trained(frame: bytes) -> bytes:
    """The same with a loop in Python wherever there was one."""
    said = tuples_received(frame)
    for each in said:
        assert all(-math.inf < logprob <= 1e-3 for logprob in each.logprobs)
    rollouts = [as_rollout(each) for each in said]
    counted = [sum(rollout.sampled) for rollout in rollouts]
    for r in rollouts:
        assert not {v for v, s in zip(r.versions, r.sampled, strict=True) if s} - {STEP - 1, STEP}
    for _ in ("of the task", "of all"):
        stale = [STEP - v for r in rollouts for v, s in zip(r.versions, r.sampled, strict=True) if s]
        fmean(stale)
    max(stale)
    fmean(sum(rollout.sampled) for rollout in rollouts)
    rows = tuple(rollout for rollout in rollouts if any(rollout.sampled))
    assert sum(counted)
    return pickle.dumps(Batch(step=STEP, rows=rows, temperature=1.0), pickle.HIGHEST_PROTOCOL)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- figures


def memory(read: Callable[[bytes], Any], frame: bytes, n: int) -> float:
    """Bytes for each token of what is held."""
    tracemalloc.start()
    held = read(frame)
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held
    return now / n


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call; repeated until the clock's resolution does not matter."""
    best = math.inf
    for _ in range(REPEATS):
        began, calls = time.process_time(), 0
        while (spent := time.process_time() - began) < 0.1:
            work()
            calls += 1
        best = min(best, spent / calls)
    return best


def show(name: str, value: float, limit: float | None = None) -> bool:
    good = limit is None or value <= limit
    judged = "" if limit is None else f"<= {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:66} {value:9.4f}  {judged}", flush=True)
    return good


def holding(read: Callable[[bytes], list[TupleRollout]]) -> Callable[[bytes], list[TupleRollout]]:
    return lambda frame: [as_rollout(each) for each in read(frame)]


def main() -> int:
    fine = []
    for n in (256, TOKENS):
        said = completions(n)
        arrays, tuples = sent(said), tuples_sent(said)
        total = n * GROUP
        fine.append(show(f"bytes for a token, {n} tokens", memory(received, arrays, total), 16))
        show("  with tuples", memory(holding(tuples_received), tuples, total))
        fine.append(show(f"bytes on disk for a stored token, {n} tokens", stored_bytes(said) / total, 14))
        new = seconds(lambda said=said: received(sent(said))) / total * 1e6  # type: ignore[misc]
        fine.append(show(f"us to pickle and unpickle a token, {n} tokens", new, 0.03))
        packed = [(c.token_ids, c.logprobs, c.versions) for c in tuples_received(tuples)]
        old = seconds(lambda packed=packed: pickle.loads(pickle.dumps(packed, 5))) / total * 1e6  # type: ignore[misc]
        show("  with tuples", old)
    new, old = seconds(lambda: trained(arrays)) / GROUP, seconds(lambda: tuples_trained(tuples)) / GROUP
    show(f"us of the main process for a rollout of {TOKENS} tokens", new * 1e6)
    show("  with tuples", old * 1e6)
    fine.append(show("  ratio", new / old, 0.25))
    check_same(trained(arrays), tuples_trained(tuples))
    return 0 if all(fine) else 1


def check_same(arrays: bytes, tuples: bytes) -> None:
    """Both ways end with the same batch, to the last bit."""
    rows: Any = zip(pickle.loads(arrays).rows, pickle.loads(tuples).rows, strict=True)
    names = ("token_ids", "sampled", "logprobs", "versions")
    for row, old in rows:
        parts = row.tokens.arrays().values()
        assert all(part.tolist() == [*getattr(old, name)] for part, name in zip(parts, names, strict=True))
        assert row.prompt_ids.tolist() == [*old.prompt_ids]


if __name__ == "__main__":
    sys.exit(main())
