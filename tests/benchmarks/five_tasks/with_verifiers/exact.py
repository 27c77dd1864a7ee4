import itertools

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Capitals(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Words(vf.Taskset[Capitals, vf.TasksetConfig]):
    def load(self):
        for letters in itertools.product("abcdefgh", repeat=3):
            word = "".join(letters)
            yield Capitals(Data(prompt=f"{word}:", answer=word.upper()), self.config.task)


__all__ = ["Words"]
