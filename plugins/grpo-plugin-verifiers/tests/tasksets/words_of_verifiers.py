"""Tasksets of verifiers; the tests of the plugin play them."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Echo(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def same(self, trace) -> float:
        if trace.last_reply == "raise":
            raise ConnectionError("the judge is away")
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 6)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def thought(self, trace) -> float:
        return float(len(trace.assistant_messages[-1].reasoning_content or ""))


class Config(vf.TasksetConfig):
    number: int = 12
    first: int = 0


class Words(vf.Taskset[Echo, Config]):
    def load(self):
        for place in range(self.config.number):
            n = (place + self.config.first) % self.config.number
            yield Echo(Data(prompt=f"Say w{n}.", system_prompt="Echo.", answer=f"w{n}"), self.config.task)


__all__ = ["Words"]
