"""Asynchronous GRPO on one page: only the algorithm of ``grpo-core train``.

    pip install grpo-core grpo-plugin-math
    python examples/nano.py

A tiny model learns to sort digits.  The engine generates the groups of later steps while the trainer trains;
no trained token is older than ``MAX_STALENESS`` versions.  Read from the top: prompts, rollouts, advantages,
loss, update, and the loop at the end.  With the same seed, ``grpo-core train`` trains the same weights
(``tests/test_nano.py``).

It takes from grpo-core the tiny model, and the engine ``local``, which is another process and
reads the weights from shared memory.  ``grpo-core train`` has what is left out here:

    several tasks and turns, tools, agents, and environments in processes that can be killed
    retries of rollouts that were lost, filters, and groups trained as they finish (``policy = "deadline"``)
    weights that are loaded while requests run (``pipeline.in_flight_updates``)
    rows in several micro-batches, packing, bfloat16, GPUs, other losses, a reference model
    checkpoints and exact resume, validation, metrics, alarms, and the canary that checks each weight sync
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from grpo_core import Completion, EngineSetup, Environment, Episode, GenerationRequest, Prompt, Weights
from grpo_core.kit import LocalEngine, SharedMemoryWriter, checkpoint_tensors
from grpo_core.testing import make_tiny_model
from grpo_plugin_math.exercises import sort

SEED = 0
STEPS = 100
PROMPTS_PER_STEP = 64
GROUP_SIZE = 8
MAX_TOKENS = 16
MAX_STALENESS = 1
UPDATES_PER_STEP = 4
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
IMPORTANCE_CAP = 2.0


# ---------------------------------------------------------------------------------- prompts and rollouts


def shuffled(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """Yield the prompts for ever, in another order in each epoch."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(prompts, len(prompts))


@dataclass
class Rollout:
    """A completion of a prompt, and the reward that the environment gives it."""

    prompt_ids: list[int]
    completion: Completion
    reward: float


def seed_of(number: int, i: int) -> int:
    """Return the seed of a completion: a digest of the run's seed, its prompt, its turn and its place."""
    digest = blake2b(repr((SEED, number, 0, i)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def play(
    number: int,
    prompt: Prompt,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    engine: LocalEngine,
) -> list[Rollout]:
    """Return the group of the run's prompt ``number``: several completions of one prompt, with rewards."""
    # the tiny model is a base model: it has no chat template
    prompt_ids = tokenizer.encode("".join(message["content"] for message in prompt.messages))
    requests = [
        GenerationRequest(
            prompt_ids=prompt_ids,
            max_tokens=MAX_TOKENS,
            stop_token_ids=(tokenizer.eos_token_id,),
            seed=seed_of(number, i),
            group=str(number),
        )
        for i in range(GROUP_SIZE)
    ]
    completions = await engine.generate(requests)
    episodes = []
    for i, completion in enumerate(completions):
        content = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        reply = {"role": "assistant", "content": content}
        messages = (*prompt.messages, reply)
        episodes.append(
            Episode(
                prompt=prompt,
                messages=messages,
                turn=0,
                session=f"{number}/{i}",
                group=str(number),
                finish_reason=completion.finish_reason,
                completion_tokens=len(completion.token_ids),
            )
        )
    return [
        Rollout(prompt_ids, completion, feedback.reward)
        for completion, feedback in zip(completions, environment.evaluate(episodes), strict=True)
    ]


# ---------------------------------------------------------------------------------- advantages and rows


@dataclass
class Row:
    """A rollout that is trained: every sampled token has the advantage of its rollout."""

    prompt_ids: list[int]
    completion: Completion
    advantage: float


def rows_of(group: Sequence[Rollout]) -> list[Row]:
    """Compare the rewards of a group.  A group of equal rewards teaches nothing and has no rows."""
    rewards = [rollout.reward for rollout in group]
    if max(rewards) == min(rewards):
        return []
    mean, deviation = fmean(rewards), stdev(rewards)
    advantages = [(reward - mean) / deviation for reward in rewards]
    return [
        Row(rollout.prompt_ids, rollout.completion, advantage)
        for rollout, advantage in zip(group, advantages, strict=True)
        if advantage
    ]


# ---------------------------------------------------------------------------------- loss and update


@dataclass
class MicroBatch:
    """Rows as tensors: N sampled tokens in B rows of at most T tokens."""

    input_ids: Tensor
    """Token ids [B, T], padded on the right: attention is causal, so no token sees the padding."""
    positions: Tensor
    """Positions [N] in the flattened ids, of the tokens before the sampled ones."""
    targets: Tensor
    """Ids [N] of the sampled tokens."""
    generation_logprobs: Tensor
    """Logprobs [N] with which the engine sampled them."""
    advantages: Tensor
    """Advantages [N]."""


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows out for one forward pass, the longest first."""
    rows = sorted(rows, key=lambda row: -len(row.prompt_ids) - len(row.completion.token_ids))
    width = len(rows[0].prompt_ids) + len(rows[0].completion.token_ids) - 1
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, targets, logprobs, advantages = [], [], [], []
    for b, row in enumerate(rows):
        sampled = row.completion.token_ids.tolist()
        ids = [*row.prompt_ids, *sampled]
        input_ids[b, : len(ids) - 1] = torch.tensor(ids[:-1])  # nothing follows the last token
        first = b * width + len(row.prompt_ids) - 1
        positions += range(first, first + len(sampled))
        targets += sampled
        logprobs += row.completion.logprobs.tolist()
        advantages += [row.advantage] * len(sampled)
    return MicroBatch(
        input_ids=input_ids,
        positions=torch.tensor(positions),
        targets=torch.tensor(targets),
        generation_logprobs=torch.tensor(logprobs),
        advantages=torch.tensor(advantages),
    )


def clipped_loss(micro: MicroBatch, policy: Tensor, proximal: Tensor) -> Tensor:
    """Return a loss [N] for each token: the clipped objective, corrected for tokens of older weights.

    The clip bounds how far a step moves the policy from ``proximal``, the logprobs by the weights with which
    the step began.  The importance weight, which is capped, corrects for the weights that sampled.
    """
    weight = (proximal - micro.generation_logprobs).exp().clamp(max=IMPORTANCE_CAP)
    ratio = (policy - proximal).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -weight * torch.minimum(ratio * micro.advantages, clipped * micro.advantages)


class Trainer:
    """Owns the model and the optimizer."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._writer = SharedMemoryWriter()
        self._views = checkpoint_tensors(self.model)

    def publish(self, version: int) -> Weights:
        """Copy the weights to shared memory, where the engine reads them."""
        return self._writer.write(version, self._views.items())

    def step(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Train some groups, which are divided among the updates in turn."""
        found = [rows for rows in map(rows_of, groups) if rows]
        parts = [found[i::UPDATES_PER_STEP] for i in range(UPDATES_PER_STEP)]
        updates = [collate([row for rows in part for row in rows]) for part in parts if part]
        with torch.no_grad():
            before = [self._logprobs(micro) for micro in updates]
        for micro, proximal in zip(updates, before, strict=True):
            clipped_loss(micro, self._logprobs(micro), proximal).mean().backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the logprobs [N] of the sampled tokens by the current weights."""
        hidden = self.model.base_model(input_ids=micro.input_ids, use_cache=False)[0].flatten(0, 1)
        logits = self.model.get_output_embeddings()(hidden[micro.positions])  # of sampled tokens alone
        return logits.log_softmax(dim=1).gather(1, micro.targets[:, None])[:, 0]


# ---------------------------------------------------------------------------------- the loop


async def train(directory: Path, prompts: Iterator[Prompt], environment: Environment) -> Trainer:
    """Train the model in a directory, and return its trainer.

    Step n is trained by groups of version n - MAX_STALENESS: they begin as soon as the engine holds it.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trainer = Trainer(directory)
    engine = LocalEngine(
        EngineSetup(model=str(directory), log_directory=str(directory), seed=SEED, reproducible=True)
    )

    async def groups_for(step: int, drawn: Sequence[Prompt]) -> list[list[Rollout]]:
        first = step * PROMPTS_PER_STEP
        playing = (play(first + i, prompt, environment, tokenizer, engine) for i, prompt in enumerate(drawn))
        return await asyncio.gather(*playing)

    def begin(step: int) -> None:
        if step < STEPS:
            drawn = [next(prompts) for _ in range(PROMPTS_PER_STEP)]
            running[step] = asyncio.create_task(groups_for(step, drawn))

    running: dict[int, asyncio.Task[list[list[Rollout]]]] = {}
    try:
        await engine.update_weights(trainer.publish(0))
        for step in range(MAX_STALENESS + 1):
            begin(step)
        for step in range(STEPS):
            groups = await running.pop(step)
            await asyncio.to_thread(trainer.step, groups)  # the groups of later steps are generated meanwhile
            if running:
                await asyncio.wait(running.values())  # a completion is sampled by one version
            await engine.update_weights(trainer.publish(step + 1))
            begin(step + 1 + MAX_STALENESS)
            reward = fmean(rollout.reward for group in groups for rollout in group)
            print(f"step {step + 1:3}  reward {reward:.3f}")
    finally:
        await engine.aclose()
    return trainer


def main(directory: Path) -> Trainer:
    """Make a tiny model in a directory, warmed up on solved prompts, and train it."""
    environment = sort()
    prompts = environment.prompts("train")
    solved = [(prompt.messages[0]["content"], environment.solve(prompt)) for prompt in prompts[:500]]
    make_tiny_model(directory, solved, seed=SEED)
    return asyncio.run(train(directory, shuffled(prompts, SEED), environment))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch) / "model")
