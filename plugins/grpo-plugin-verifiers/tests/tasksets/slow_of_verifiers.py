"""A taskset whose server of tools never has started; it is that of the taskset, or of each task."""

import os
import signal
import time
from pathlib import Path

import verifiers.v1 as vf


def wait():
    """Say that the server starts, and hold up its event loop."""
    Path(os.environ["SLOW_STARTS"], str(os.getpid())).touch()
    time.sleep(600)


class SlowConfig(vf.ToolsetConfig):
    stubborn: bool = False
    """Whether it goes on when it is asked to end."""


class Slow(vf.Toolset[SlowConfig, vf.State]):
    async def setup(self):
        if self.config.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()

    @vf.tool
    async def look(self) -> str:
        """Looks."""
        return "nothing"


class TaskConfig(vf.TaskConfig):
    tools: SlowConfig | None = None


class Wait(vf.Task[vf.TaskData, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [] if config.tools is None else [Slow(config.tools)]

    @vf.reward
    async def any(self, trace) -> float:
        return 1.0


class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()
    tools: SlowConfig | None = None


class Waits(vf.Taskset[Wait, Config]):
    @classmethod
    def toolsets(cls, config):
        return [] if config.tools is None else [Slow(config.tools)]

    def load(self):
        for n in range(4):
            yield Wait(vf.TaskData(prompt=f"{n}?"), self.config.task)


__all__ = ["Waits"]

if __name__ == "__main__":
    Slow.run()
