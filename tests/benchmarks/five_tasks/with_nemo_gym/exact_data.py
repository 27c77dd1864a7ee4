import itertools
import json
import random

WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
HELD_OUT = random.Random(0).sample(WORDS, 64)


def rows(words):
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{word}:"}]},
            "answer": word.upper(),
            "agent_ref": {"type": "responses_api_agents", "name": "capitals_agent"},
        }
        for word in words
    ]


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    write("exact_train.jsonl", rows([word for word in WORDS if word not in HELD_OUT]))
    write("exact_validation.jsonl", rows(HELD_OUT))
