import json
import random

from tool import NAMES, PRICES

HELD_OUT = random.Random(0).sample(NAMES, 40)
PRICE = {
    "type": "function",
    "name": "price",
    "description": "Looks a price up.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string", "description": "name of what is sold"}},
        "required": ["item"],
        "additionalProperties": False,
    },
    "strict": True,
}


def rows(names):
    return [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": f"{name}?"}],
                "tools": [PRICE],
            },
            "answer": PRICES[name],
            "agent_ref": {"type": "responses_api_agents", "name": "shop_agent"},
        }
        for name in names
    ]


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    write("tool_train.jsonl", rows([name for name in NAMES if name not in HELD_OUT]))
    write("tool_validation.jsonl", rows(HELD_OUT))
