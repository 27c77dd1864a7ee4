"""A taskset whose reward looks into a runtime; with an image its tasks need a container."""

import verifiers.v1 as vf


class Config(vf.TasksetConfig):
    image: str | None = None


class Boxed(vf.Task[vf.TaskData]):
    @vf.reward
    async def file(self, runtime) -> float:
        return float(await runtime.read("x") == b"1")


class Boxes(vf.Taskset[Boxed, Config]):
    def load(self):
        for n in range(4):
            yield Boxed(vf.TaskData(prompt=str(n), image=self.config.image), self.config.task)


__all__ = ["Boxes"]
