import random

from datasets import Dataset
from trl import GRPOTrainer


class Game:
    def reset(self, digit, **kwargs):
        self.digit, self.guesses, self.won = digit, 0, False

    def guess(self, digit: str) -> str:
        """Guess the digit.

        Args:
            digit: the guess, from 1 to 7

        Returns:
            "right", "+" if the digit is higher, "-" if it is lower, or "over"
        """
        self.guesses += 1
        if self.won or self.guesses > 3 or digit not in set("1234567"):
            self.guesses = 3
            return "over"
        self.won = digit == self.digit
        return "right" if self.won else "+" if digit < self.digit else "-"

    def get_reward(self):
        return float(self.won)


def rows(games):
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"game {n}: guess a digit from 1 to 7"}],
                "digit": random.Random(n).choice("1234567"),
            }
            for n in games
        ]
    )


if __name__ == "__main__":
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        environment_factory=Game,
        train_dataset=rows(range(800)),
        eval_dataset=rows(range(800, 900)),
    ).train()
