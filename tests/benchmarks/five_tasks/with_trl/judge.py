import asyncio
import re

from datasets import load_dataset
from openai import AsyncOpenAI
from trl import GRPOTrainer

JUDGE = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1")
RUBRIC = "The reply is a polite letter of at most five sentences."
LIMIT = asyncio.Semaphore(16)


async def score(prompt, reply):
    question = f"{RUBRIC}\n\nQuestion: {prompt}\nReply: {reply}\n\nEnd with Score: N, from 0 to 10."
    async with LIMIT:
        answer = await JUDGE.chat.completions.create(
            model="judge", messages=[{"role": "user", "content": question}]
        )
    found = re.findall(r"Score: (\d+)", answer.choices[0].message.content)
    return min(int(found[-1]), 10) / 10 if found else None


async def polite(prompts, completions, **kwargs):
    return await asyncio.gather(*map(score, prompts, completions))


if __name__ == "__main__":
    data = load_dataset("json", data_files={"train": "letters.jsonl", "test": "held_out.jsonl"})
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=polite,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    ).train()
