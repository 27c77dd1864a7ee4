import json
import random


def rows(games):
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"game {n}:"}]},
            "digit": random.Random(n).choice("1234567"),
            "agent_ref": {"type": "responses_api_agents", "name": "guess_agent"},
        }
        for n in games
    ]


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    write("game_train.jsonl", rows(range(800)))
    write("game_validation.jsonl", rows(range(800, 900)))
