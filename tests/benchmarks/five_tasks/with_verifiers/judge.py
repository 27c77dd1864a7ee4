import json
import re
from pathlib import Path

import verifiers.v1 as vf


class Polite(vf.Judge[float]):
    prompt = (
        "The reply is a polite letter of at most five sentences.\n\n"
        "Question: {question}\nReply: {response}\n\nEnd with Score: N, from 0 to 10."
    )

    def parse(self, response):
        return min(int(re.findall(r"Score: (\d+)", response.text)[-1]), 10) / 10


class LetterConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(base_url="http://127.0.0.1:8000/v1", model="judge")


class Letter(vf.Task[vf.TaskData, vf.State, LetterConfig]):
    @vf.reward
    async def polite(self, trace) -> float:
        judged = await Polite(self.config.judge).evaluate(
            trace=trace, question=self.data.prompt_text, response=trace.last_reply
        )
        return judged.parsed


class LettersConfig(vf.TasksetConfig):
    task: LetterConfig = LetterConfig()


class Letters(vf.Taskset[Letter, LettersConfig]):
    def load(self):
        for line in Path("letters.jsonl").read_text().splitlines():
            yield Letter(vf.TaskData(prompt=json.loads(line)["prompt"]), self.config.task)


__all__ = ["Letters"]
