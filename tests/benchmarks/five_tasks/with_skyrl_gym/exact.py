import itertools
import random

from datasets import Dataset
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
HELD_OUT = random.Random(0).sample(WORDS, 64)


class Capitals(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.answer = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        reward = float(action.strip() == self.answer)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register(id="capitals", entry_point=Capitals)


def rows(words):
    return [
        {
            "prompt": [{"role": "user", "content": f"{word}:"}],
            "env_class": "capitals",
            "reward_spec": {"method": "rule", "ground_truth": word.upper()},
        }
        for word in words
    ]


if __name__ == "__main__":
    train = [word for word in WORDS if word not in HELD_OUT]
    Dataset.from_list(rows(train)).to_parquet("exact_train.parquet")
    Dataset.from_list(rows(HELD_OUT)).to_parquet("exact_validation.parquet")
