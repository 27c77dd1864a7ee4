import re

from datasets import load_dataset
from openai import OpenAI
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

JUDGE = OpenAI(base_url="http://127.0.0.1:8000/v1")
RUBRIC = "The reply is a polite letter of at most five sentences."


class Letter(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def init(self, prompt):
        self.question = prompt[-1]["content"]
        return prompt, {}

    def step(self, action):
        asked = f"{RUBRIC}\n\nQuestion: {self.question}\nReply: {action}\n\nEnd with Score: N, from 0 to 10."
        answer = JUDGE.chat.completions.create(model="judge", messages=[{"role": "user", "content": asked}])
        found = re.findall(r"Score: (\d+)", answer.choices[0].message.content)
        reward = min(int(found[-1]), 10) / 10 if found else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register(id="letter", entry_point=Letter)


def row(line):
    return {
        "prompt": [{"role": "user", "content": line["prompt"]}],
        "env_class": "letter",
        "reward_spec": {"method": "judge", "ground_truth": ""},
    }


if __name__ == "__main__":
    data = load_dataset("json", data_files={"train": "letters.jsonl", "test": "held_out.jsonl"})
    data["train"].map(row).to_parquet("judge_train.parquet")
    data["test"].map(row).to_parquet("judge_validation.parquet")
