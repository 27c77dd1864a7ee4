import itertools
import random

import verifiers.v1 as vf

NAMES = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=2)]
PRICES = {name: str(random.Random(name).randrange(10, 100)) for name in NAMES}


class Prices(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str) -> str:
        """Looks a price up."""
        return PRICES[item]


class Data(vf.TaskData):
    answer: str


class Question(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Shop(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self):
        for name in NAMES:
            yield Question(Data(prompt=f"{name}?", answer=PRICES[name]), self.config.task)


__all__ = ["Shop"]

if __name__ == "__main__":
    Prices.run()
