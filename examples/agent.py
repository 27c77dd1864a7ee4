"""An ordinary agent: a loop around OpenAI's package, with a tool.  `pip install openai`.

grpo-core train --env ./examples/agent.py
"""

import random

from openai import AsyncOpenAI

import grpo_core as grpo

MODEL = AsyncOpenAI(base_url="http://unused", api_key="unused")  # one, since making it takes 50 ms
concurrency = 64  # rollouts at once in a process: run keeps its state in local variables


def prompts(split):
    pairs = [(a, b) for a in range(2, 40) for b in range(2, 10)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[50:] if split == "train" else pairs[:50]  # no prompt is in both
    return [grpo.Prompt(messages=f"{a}*{b}=", answer=str(a * b)) for a, b in chosen]


async def run(prompt, client):
    model = MODEL.with_options(base_url=client.base_url, api_key=client.api_key)
    messages = list(prompt.messages)
    for attempt in range(3):
        reply = await model.chat.completions.create(model=client.model, messages=messages)
        said = reply.choices[0].message
        if (said.content or "").strip() == prompt.answer:  # a reply may be a call alone
            return 1.0 - 0.25 * attempt
        messages += [said, {"role": "user", "content": "\nno, "}]
    return 0.0


def solve(prompt):
    return prompt.answer
