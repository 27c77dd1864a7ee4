"""A taskset with tools, a setup and a finalize: the model looks a price up, and says it."""

import verifiers.v1 as vf

PRICES = {"tea": "12", "jam": "34", "ink": "56", "oil": "78"}


class Prices(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str) -> str:
        """Looks a price up."""
        return PRICES[item]


class Data(vf.TaskData):
    answer: str


class Question(vf.Task[Data]):
    async def setup(self, trace, runtime):
        await runtime.write("asked", self.data.prompt.encode())

    async def finalize(self, trace, runtime):
        trace.info["asked"] = (await runtime.read("asked")).decode()

    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def looked(self, trace, runtime) -> float:
        if trace.last_reply == "raise":
            raise ConnectionError("the till is away")
        return float(trace.info["asked"] == self.data.prompt and len(trace.tool_messages) == 1)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Config(vf.TasksetConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Shop(vf.Taskset[Question, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(config.tools)]

    def load(self):
        for item, price in PRICES.items():
            yield Question(Data(prompt=f"{item}?", answer=price), self.config.task)


__all__ = ["Shop"]

if __name__ == "__main__":
    Prices.run()
