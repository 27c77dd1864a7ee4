"""Records what TRL's reward functions and trainer return, for tests on machines without TRL.

    python tests/record.py            # with trl and math-verify installed; writes tests/recorded.jsonl

Each line is one reply: the prompt's solution, the reply, its number of tokens, the reward of each function,
and the reward that ``GRPOTrainer`` makes of them with the weights of ``FUNCTIONS``.
"""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

FILE = Path(__file__).with_name("recorded.jsonl")
SOLUTIONS = [
    "7", "$\\frac{1}{3}$", "$x^2+1$", "\\boxed{12}", "no mathematics here", "$\\sqrt{2}$", "0.5", "$[1, 2)$"
]  # fmt: skip
REPLIES = [
    "\\boxed{7}",
    "The answer is $\\boxed{\\frac{1}{3}}$.",
    "<think>\n2/6 is 1/3\n</think>\n\\boxed{\\frac{2}{6}}",
    "<think>never ends \\boxed{7}",
    "<think>\na\n</think>\nb",
    "$x^2 + 1$",
    "\\boxed{1+x^2}",
    "",
    "\\boxed{12} or \\boxed{13}",
    "it is 0.5, so $\\boxed{\\frac12}$",
    "\\boxed{[1,2)}",
    "\\boxed{\\sqrt2}",
    "one two three one two three one two three",
    "\\boxed{",
    "<think></think> $\\boxed{7}$ </think> $\\boxed{8}$",
]
BEFORE = [
    "",
    "<think>\nshort\n</think>\n",
    "<think>so</think>",
    "<think>\nlong " + 30 * "and long " + "\n</think>\n",
]
RIGHT = [
    ("7", "\\boxed{7}"),
    ("$\\frac{1}{3}$", "The answer is $\\boxed{\\frac{1}{3}}$."),
    ("$\\frac{1}{3}$", "$\\boxed{2/6}$"),
    ("$x^2+1$", "\\boxed{1+x^2}"),
    ("0.5", "it is 0.5, so $\\boxed{\\frac12}$"),
    ("$\\sqrt{2}$", "\\boxed{\\sqrt2}"),
    ("$[1, 2)$", "\\boxed{[1,2)}"),
]
FUNCTIONS = {
    "accuracy_reward": (None, 1.0),
    "reasoning_accuracy_reward": (None, 0.5),
    "think_format_reward": (None, 0.25),
    "get_cosine_scaled_reward": ({"max_len": 40}, 2.0),
    "get_soft_overlong_punishment": ({"max_completion_len": 50, "soft_punish_cache": 20}, 0.125),
}
"""The arguments that make each function, if there are any, and its weight."""


def replies(seed=0):
    """Return 200 different replies, of which 28 are right by construction."""
    rng = random.Random(seed)
    right = [(solution, f"{before}{reply}") for before in BEFORE for solution, reply in RIGHT]
    others = set(itertools.product(SOLUTIONS, REPLIES)) - set(right)
    others |= {(solution, f"{before}{reply}") for before in BEFORE for solution, reply in others}
    chosen = right + rng.sample(sorted(others), 200 - len(right))
    return [{"solution": s, "reply": r, "tokens": rng.randint(0, 60)} for s, r in chosen]


def rewards_of_trl(rows):
    """Return the reward of each function, and their sum, as GRPOTrainer computes them."""
    import torch
    import trl.rewards
    from trl.trainer.grpo_trainer import GRPOTrainer

    functions = []
    for name, (arguments, _) in FUNCTIONS.items():
        function = getattr(trl.rewards, name)
        functions.append(function if arguments is None else function(**arguments))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=functions,
        reward_func_names=list(FUNCTIONS),
        reward_processing_classes=[None] * len(functions),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        environments=None,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
        _metrics={"train": {}},
        model=SimpleNamespace(training=True),
    )
    prompts = [[{"role": "user", "content": "?"}] for _ in rows]
    given = [
        {"prompt": prompt, "solution": row["solution"]} for prompt, row in zip(prompts, rows, strict=True)
    ]
    completions = [[{"role": "assistant", "content": row["reply"]}] for row in rows]
    ids = [[0] * row["tokens"] for row in rows]
    by_function = GRPOTrainer._calculate_rewards.__wrapped__(trainer, given, prompts, completions, ids)
    weights = torch.tensor([weight for _, weight in FUNCTIONS.values()])
    totals = (by_function * weights).nansum(dim=1)  # as _generate_and_score_completions does
    totals[by_function.isnan().all(dim=1)] = torch.nan
    return by_function.tolist(), totals.tolist()


def main():
    rows = replies()
    lines = []
    for row, parts, total in zip(rows, *rewards_of_trl(rows), strict=True):
        named = {name: None if part != part else part for name, part in zip(FUNCTIONS, parts, strict=True)}
        lines.append(json.dumps({**row, "rewards": named, "total": None if total != total else total}))
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
