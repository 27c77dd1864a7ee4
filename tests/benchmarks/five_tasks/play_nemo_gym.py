"""Plays the tasks that are written for NeMo Gym: a right and a wrong reply to each; prints the rewards.

    PYTHON_WITH_NEMO_GYM tests/benchmarks/five_tasks/play_nemo_gym.py

Each resources server answers its own routes, without NeMo Gym's head server, agents and models.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

HERE = Path(__file__).parent / "with_nemo_gym"
sys.path.insert(0, str(HERE))

import exact  # noqa: E402
import exact_data  # noqa: E402
import game  # noqa: E402
import game_data  # noqa: E402
import judge  # noqa: E402
import tool  # noqa: E402
import tool_data  # noqa: E402
import yaml  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from nemo_gym.server_utils import ServerClient  # noqa: E402


def config_of(name):
    """The configuration of the resources server in the task's YAML file."""
    parts = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    (server,) = (part["resources_servers"] for part in parts.values() if "resources_servers" in part)
    ((called, found),) = server.items()
    return {"host": "127.0.0.1", "port": 1, "name": called, **found}


def client(name, kind, told=None):
    config = kind.model_fields["config"].annotation.model_validate(config_of(name))
    server = kind(config=config, server_client=told or MagicMock(spec=ServerClient))
    return TestClient(server.setup_webserver())


def response(reply):
    text = {"type": "output_text", "text": reply, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    fixed = {"id": "r", "object": "response", "created_at": 0, "model": "m", "tools": []}
    return {**fixed, "output": [message], "parallel_tool_calls": False, "tool_choice": "auto"}


def verified(server, row, reply):
    answer = server.post("/verify", json={**row, "response": response(reply)})
    assert answer.status_code == 200, answer.text
    return answer.json()["reward"]


def guessed(row, guesses):
    server = client("game", game.Guess)
    server.post("/reset", json=row)
    for guess in guesses:
        step = server.post("/step", json={**row, "response": response(guess)}).json()
        if step["terminated"]:
            return step["reward"]
    raise AssertionError("the episode goes on")


class JudgeClient(ServerClient):
    """Answers for the server of the judge's model."""

    async def post(self, server_name, url_path, json):
        assert (server_name, url_path) == ("judge_model", "/v1/responses")
        score = 8 if "please" in str(json.input) else 2
        return score


async def scored(score):
    return response(f"Score: {score}")


def mixed():
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        runpy.run_path(str(HERE / "mixed_data.py"), run_name="__main__")
        rows = [json.loads(line) for line in Path("mixed_train.jsonl").read_text().splitlines()]
        os.chdir("/")
    return sorted({row["agent_ref"]["name"] for row in rows})


def main():
    shop = client("tool", tool.Shop)
    price = shop.post("/price", json={"item": "ab"}).json()["price"]
    letter = {"responses_create_params": {"input": [{"role": "user", "content": "Write a letter."}]}}
    judge.get_response_json = scored
    letters = client("judge", judge.Letters, JudgeClient.model_construct())
    round_ = next(row for row in game_data.rows(range(20)) if row["digit"] == "6")
    told = {
        "exact": [
            verified(client("exact", exact.Capitals), exact_data.rows(["abc"])[0], r) for r in ("ABC", "abc")
        ],
        "game": [guessed(round_, each) for each in ("46", "9")],
        "tool": [verified(shop, tool_data.rows(["ab"])[0], reply) for reply in (price, "1")],
        "judge": [verified(letters, letter, reply) for reply in ("please", "now")],
        "mixed": mixed(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
