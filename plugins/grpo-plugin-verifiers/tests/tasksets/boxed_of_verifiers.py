"""A taskset whose reward looks into a runtime."""

import verifiers.v1 as vf


class Boxed(vf.Task[vf.TaskData]):
    @vf.reward
    async def file(self, runtime) -> float:
        return float(await runtime.read("x") == b"1")


class Boxes(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self):
        return [Boxed(vf.TaskData(prompt=str(n)), self.config.task) for n in range(4)]


__all__ = ["Boxes"]
