"""An ordinary agent: a loop around OpenAI's package, which tries three times.  `pip install openai`.

grpo-core train --env ./examples/agent.py --set trainer.steps=40 --set model.options.warm_start_steps=32
"""

import itertools
import random

from openai import AsyncOpenAI

import grpo_core as grpo

MODEL = AsyncOpenAI(base_url="http://unused", api_key="unused")  # one, since making it takes 50 ms
concurrency = 64  # rollouts at once in a process: run keeps its state in local variables
WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
HELD_OUT = random.Random(0).sample(WORDS, 100)


def prompts(split):
    chosen = HELD_OUT if split == "validation" else [word for word in WORDS if word not in HELD_OUT]
    return [grpo.Prompt(messages=f"{word}:", answer=word.upper()) for word in chosen]


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
