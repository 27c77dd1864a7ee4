"""A language model of 90,000 parameters, made on the spot: nothing is downloaded, and a step takes 0.1 s.

A two-layer Llama with a character tokenizer in an ordinary transformers directory.  A short supervised
warm start on an environment's own solutions raises it from noise to a few percent of right answers: enough
signal for reinforcement learning, with most of the task left to learn.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import Row
from grpo_core.contracts.tokens import NOT_SAMPLED, Tokens
from grpo_core.demo.demonstrations import LONGEST, POSITIONS
from grpo_core.training.microbatch import collate
from grpo_core.training.model import Scorer

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
CHARACTERS = "\n" + "".join(c for c in map(chr, range(32, 127)) if c in string.printable)
BATCH = 128
STEPS, MOST_STEPS = 40, 200
"""Numbers of steps that the warm-up takes at least and at most, unless they are set."""
ENOUGH = 0.05
"""Share of right conversations at which the warm-up ends: rewards can raise it from there."""
SOME = 32
"""Number of demonstrations that measure the share."""
TOKENS = BATCH * POSITIONS
"""Largest number of tokens of a warm-up step, which bounds its memory."""
LR = 4e-3

Demonstrations = Sequence[Sequence[str]]
"""Conversations: a prompt, a reply, an answer, a reply, ..., with a reply at the end."""


def tiny_config(*, width: int, layers: int, positions: int) -> dict[str, Any]:
    """Return the contents of the model's config.json."""
    return {
        "model_type": "llama",
        "vocab_size": 3 + len(CHARACTERS),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def make_tiny_model(
    directory: Path,
    demonstrations: Demonstrations,
    *,
    width: int = 64,
    layers: int = 2,
    positions: int = POSITIONS,
    warm_start_steps: int | None = None,
    seed: int = 0,
) -> None:
    """Write config, tokenizer and warm-started weights into ``directory``; it appears complete or not at all.

    The weights are a function of the arguments.  Raises ConfigError without demonstrations.
    """
    if warm_start_steps != 0 and not demonstrations:
        raise ConfigError(
            'model.path = "tiny" starts from solved prompts, but the environment solves none within its '
            f"{LONGEST} positions: define solve(prompt), choose a model, or set "
            "model.options.warm_start_steps = 0"
        )
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**tiny_config(width=width, layers=layers, positions=positions)))
    warm_start(model, demonstrations, steps=warm_start_steps, seed=seed)
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    logging.disable_progress_bar()  # about a file that is written in a millisecond
    model.save_pretrained(beside)
    write_tokenizer(beside, positions)
    shutil.rmtree(directory, ignore_errors=True)
    beside.replace(directory)


def write_tokenizer(directory: Path, positions: int = POSITIONS) -> None:
    """A token for each printable ASCII character and newline; prompts are plain text, without a template."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))  # no merges: characters
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of a text, as the written tokenizer does."""
    return tuple(CHARACTERS.find(c) + 3 if c in CHARACTERS else 2 for c in text)


def warm_start(
    model: torch.nn.Module, demonstrations: Demonstrations, *, steps: int | None, seed: int
) -> None:
    """Take supervised steps on replies and their ends, each with demonstrations drawn by ``seed``.

    ``steps = None`` takes as many as a few right answers need.
    """
    if steps == 0:
        return
    rows = [_row(*texts) for texts in demonstrations]
    batch = min(BATCH, TOKENS // max(len(row.prompt_ids) + len(row.tokens) for row in rows))
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    policy = Scorer(model.train())
    some = random.Random(seed).sample(rows, min(SOME, len(rows)))
    for step in range(MOST_STEPS if steps is None else steps):
        if steps is None and step >= STEPS and step % 10 == 0 and _solved(policy, some) >= ENOUGH:
            break
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 5)
        micro = collate(order.choices(rows, k=batch), policy.device)
        logprobs, _ = policy.score(micro, temperature=1.0)
        torch.autograd.backward(-logprobs.mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _solved(policy: Scorer, rows: Sequence[Row]) -> float:
    """Return the mean probability of sampling a demonstration."""
    with torch.no_grad():
        scored = [policy.score(collate([row], policy.device), temperature=1.0)[0] for row in rows]
    return sum(float(logprobs.sum().exp()) for logprobs in scored) / len(rows)


def _row(prompt: str, *said: str) -> Row:
    """Encode replies and answers in turn; replies are trained, with the end of each."""
    parts: list[Tokens] = []
    for place, text in enumerate(said):
        if place % 2:
            parts.append(Tokens.context(encode(text)))
        else:
            ids = (*encode(text), 1)
            parts.append(Tokens.generated(ids, (0.0,) * len(ids), (NOT_SAMPLED,) * len(ids)))
    return Row(prompt_ids=encode(prompt), tokens=Tokens.concatenate(parts), advantage=1.0, group=0)
