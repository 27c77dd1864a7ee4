"""Reward functions for TRL's GRPOTrainer, used by examples/five_formats.toml."""


def repeated(completions, digit, times, **kwargs):
    """Pay for each place of the reply that is right: the given digit, the given number of times."""
    wanted = [one * int(n) for one, n in zip(digit, times, strict=True)]
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
        for said, right in zip(completions, wanted, strict=True)
    ]


def brief(completions, **kwargs):
    """Pay for replies of one to three characters."""
    return [float(1 <= len(said) <= 3) for said in completions]
