import random

from datasets import Dataset
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Guess(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.digit = extras["reward_spec"]["ground_truth"]
        self.max_turns = 3

    def step(self, action):
        self.turns += 1
        guess = action.strip()
        won = guess == self.digit
        done = won or guess not in set("1234567") or self.turns >= self.max_turns
        hint = [] if done else [{"role": "user", "content": "+" if guess < self.digit else "-"}]
        return BaseTextEnvStepOutput(observations=hint, reward=float(won), done=done, metadata={})


register(id="guess", entry_point=Guess)


def rows(games):
    return [
        {
            "prompt": [{"role": "user", "content": f"game {n}:"}],
            "env_class": "guess",
            "reward_spec": {"method": "rule", "ground_truth": random.Random(n).choice("1234567")},
        }
        for n in games
    ]


if __name__ == "__main__":
    Dataset.from_list(rows(range(800))).to_parquet("game_train.parquet")
    Dataset.from_list(rows(range(800, 900))).to_parquet("game_validation.parquet")
