"""Steps of TRL's GRPOTrainer on the work that its arguments describe; prints JSON.  Run by bench_peers.py.

Settings are the fastest that were found for it on a CPU: float32 or bfloat16 autocast, fused AdamW, no
gradient checkpointing, no reference model, and as many optimizer steps for each batch of rollouts as asked.
"""

import argparse
import json
import random
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in (
        "prompts",
        "group-size",
        "prompt-tokens",
        "max-tokens",
        "microbatch",
        "updates",
        "threads",
        "steps",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    work = parser.parse_args()
    torch.set_num_threads(work.threads)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    chance = random.Random(0)
    vocabulary = tokenizer.get_vocab()
    plain = [token for token in vocabulary if not token.startswith("<")]
    # with a byte-level tokenizer these words are one token each, after a space
    words = [token[1:] for token in plain if token[0] == "Ġ" and token[1:].isalpha()] or plain
    prompts = [
        " ".join(chance.choices(words, k=work.prompt_tokens)) for _ in range(work.prompts * work.steps)
    ]
    rollouts = work.prompts * work.group_size
    microbatch = min(work.microbatch, rollouts // work.updates)
    times = StepTimes()
    tokens: list[int] = []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [chance.random() for _ in completion_ids]

    with tempfile.TemporaryDirectory() as directory:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[times],
            args=GRPOConfig(
                output_dir=directory,
                max_steps=work.steps * work.updates,
                per_device_train_batch_size=microbatch,
                gradient_accumulation_steps=rollouts // work.updates // microbatch,
                steps_per_generation=rollouts // microbatch,
                num_generations=work.group_size,
                max_completion_length=work.max_tokens,
                temperature=1.0,
                beta=0.0,
                learning_rate=1e-6,
                optim="adamw_torch_fused",
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=work.bf16,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                generation_kwargs={"min_new_tokens": work.max_tokens},  # both sides make as many tokens
            ),
        ).train()
    updates = [times.seconds[i : i + work.updates] for i in range(0, len(times.seconds), work.updates)]
    print(json.dumps({"seconds": [sum(each) for each in updates], "tokens": tokens}))


if __name__ == "__main__":
    main()
