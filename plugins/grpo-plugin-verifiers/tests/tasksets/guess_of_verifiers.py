"""A taskset with an environment of its own: a user tells the model whether its guess is too low."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    digit: str


class Game(vf.Task[Data]):
    @vf.metric
    async def guesses(self, trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                guess = segment.last_reply.strip()
                if segment.terminated or guess == task.data.digit or guess not in set("1234567"):
                    break
                segment = await interaction.turn("+" if guess < task.data.digit else "-")
            if interaction.trace.last_reply == "raise":
                raise ValueError("the dice are lost")
        won = interaction.trace.last_reply == task.data.digit
        interaction.trace.record_reward("won", float(won), 1.0)


class Games(vf.Taskset[Game, vf.TasksetConfig]):
    def load(self):
        for n in range(14):
            yield Game(Data(prompt=f"game {n}:", digit="1234567"[n % 7]), self.config.task)


__all__ = ["Games", "Guess"]
