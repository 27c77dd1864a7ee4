"""Stream a table of SQLite to a task, by ``torchdata.nodes``.

    grpo-core check examples/sqlite_stream.py:questions --set data_options.prompt=word

The configuration of a task that uses it is in docs/contracts/dataloader.md.  The table is made in a
temporary file the first time; ``data_options = { path = "questions.db" }`` names another one.
"""

import random
import sqlite3
import tempfile
from pathlib import Path

from torchdata.nodes import BaseNode, Mapper, Prefetcher

import grpo_core as grpo


def make_table(path, rows):
    """Write words and the same words with their letters in order."""
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdef", k=3)) for _ in range(rows))
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with sqlite3.connect(unfinished) as database:
        database.execute("CREATE TABLE questions (id INTEGER PRIMARY KEY, word TEXT, sorted TEXT)")
        database.executemany(
            "INSERT INTO questions (word, sorted) VALUES (?, ?)", ((w, "".join(sorted(w))) for w in words)
        )
    unfinished.rename(path)


class Table(BaseNode):
    """The rows of a table in the order of their ids, from the place that a state names."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.last = (initial_state or {"last": 0})["last"]
        database = sqlite3.connect(self.path, check_same_thread=False)  # read by the thread of Prefetcher
        self.rows = database.execute("SELECT * FROM questions WHERE id > ? ORDER BY id", (self.last,))

    def next(self):
        id, word, answer = next(self.rows)
        self.last = id
        return id, word, answer

    def get_state(self):
        return {"last": self.last}


def as_prompt(row):
    """Make the prompt of a row."""
    id, word, answer = row
    return {"id": str(id), "word": f"{word}>", "sorted": answer}


def questions(split: str, path: Path | None = None, rows: int = 100_000):
    """Return a pipeline: rows are read and made into prompts while others are trained."""
    if split != "train":
        return None  # the environment has the held-out prompts
    if path is None:
        path = Path(tempfile.gettempdir()) / f"grpo_core_{rows}_questions.db"
        if not path.exists():
            make_table(path, rows)
    return Prefetcher(Mapper(Table(path), as_prompt), prefetch_factor=8)


class Exact:
    """The reply has to be the answer; the held-out prompts are words that no table needs."""

    def prompts(self, split):
        rng = random.Random(split)
        words = ["".join(rng.choices("abcdef", k=3)) for _ in range(40)]
        return [grpo.Prompt(messages=f"{word}>", answer="".join(sorted(word))) for word in words]

    def evaluate(self, episodes):
        return [float(episode.reply.strip() == episode.prompt.answer) for episode in episodes]

    def solve(self, prompt):
        return prompt.answer


@grpo.hookimpl
def grpo_dataloaders():
    return {"questions": questions}
