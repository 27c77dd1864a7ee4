"""Plays the tasks that are written for SkyRL-gym: a right and a wrong reply to each; prints the rewards.

    PYTHON_WITH_SKYRL_GYM tests/benchmarks/five_tasks/play_skyrl_gym.py

Environments are made and stepped by SkyRL-gym; no model is trained.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")
HERE = Path(__file__).parent / "with_skyrl_gym"
sys.path.insert(0, str(HERE))

import exact  # noqa: E402
import game  # noqa: E402
import judge  # noqa: E402
import skyrl_gym  # noqa: E402
import tool  # noqa: E402
from judging import judge as serving  # noqa: E402


def played(row, *replies):
    environment = skyrl_gym.make(row["env_class"], env_config={}, extras=row)
    environment.init(row["prompt"])
    for reply in replies:
        step = environment.step(reply)
        if step["done"]:
            return step["reward"]
    raise AssertionError("the episode goes on")


def mixed():
    """The kinds of the rows that the file of mixed tasks writes."""
    import runpy

    from datasets import Dataset

    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        runpy.run_path(str(HERE / "mixed.py"), run_name="__main__")
        found = sorted(set(Dataset.from_parquet("mixed_train.parquet")["env_class"]))
        os.chdir("/")
    return found


def main():
    capital, shop = exact.rows(["abc"])[0], tool.rows(["ab"])[0]
    round_ = next(row for row in game.rows(range(20)) if row["reward_spec"]["ground_truth"] == "6")
    price = shop["reward_spec"]["ground_truth"]
    with serving() as url:
        judge.JUDGE.base_url = url
        letter = judge.row({"prompt": "Write a letter."})
        judged = [played(letter, reply) for reply in ("please", "now")]
    told = {
        "exact": [played(capital, reply) for reply in ("ABC", "abc")],
        "game": [played(round_, *each) for each in ("46", "9")],
        "tool": [played(shop, "<price>ab</price>", reply) for reply in (price, "1")],
        "judge": judged,
        "mixed": mixed(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
