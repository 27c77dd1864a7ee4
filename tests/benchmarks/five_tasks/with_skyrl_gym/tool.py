import itertools
import random
import re

from datasets import Dataset
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

NAMES = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=2)]
PRICES = {name: str(random.Random(name).randrange(10, 100)) for name in NAMES}
HELD_OUT = random.Random(0).sample(NAMES, 40)
SYSTEM = "Write <price>ITEM</price> to look a price up. Then reply with the price alone."


class Prices(ToolGroup):
    def __init__(self):
        super().__init__(name="Prices")

    @tool
    def price(self, item):
        return PRICES.get(item, f"error: no item {item!r}")


class Shop(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.answer = extras["reward_spec"]["ground_truth"]
        self.max_turns = 2
        self.init_tool_groups([Prices()])

    def step(self, action):
        self.turns += 1
        call = re.search(r"<price>(.*?)</price>", action, re.DOTALL)
        if call and self.turns < self.max_turns:
            found = self._execute_tool("Prices", "price", (call[1].strip(),))
            said = [{"role": "user", "content": found}]
            return BaseTextEnvStepOutput(observations=said, reward=0.0, done=False, metadata={})
        reward = float(action.strip() == self.answer)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register(id="shop", entry_point=Shop)


def rows(names):
    return [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{name}?"}],
            "env_class": "shop",
            "reward_spec": {"method": "rule", "ground_truth": PRICES[name]},
        }
        for name in names
    ]


if __name__ == "__main__":
    train = [name for name in NAMES if name not in HELD_OUT]
    Dataset.from_list(rows(train)).to_parquet("tool_train.parquet")
    Dataset.from_list(rows(HELD_OUT)).to_parquet("tool_validation.parquet")
