from datasets import Dataset
from exact import HELD_OUT, WORDS
from game import Game
from game import rows as games
from trl import GRPOTrainer


class Capitals:
    def reset(self, **kwargs):
        pass


def exact(completions, answer, **kwargs):
    return [
        None if right is None else float(said[-1]["content"].strip() == right)
        for said, right in zip(completions, answer)
    ]


def won(environments, **kwargs):
    return [float(each.won) if isinstance(each, Game) else None for each in environments]


def rows(words, numbers):
    capitals = [
        {
            "prompt": [{"role": "user", "content": f"{word}:"}],
            "answer": word.upper(),
            "environment": "capitals",
            "digit": None,
        }
        for word in words
    ]
    guesses = [{**row, "answer": None, "environment": "guess"} for row in games(numbers)]
    return Dataset.from_list(capitals + guesses).shuffle(seed=0)


if __name__ == "__main__":
    train = [word for word in WORDS if word not in HELD_OUT]
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=[exact, won],
        environment_factory={"capitals": Capitals, "guess": Game},
        train_dataset=rows(train, range(len(train) // 2)),
        eval_dataset=rows(HELD_OUT, range(800, 832)),
    ).train()
