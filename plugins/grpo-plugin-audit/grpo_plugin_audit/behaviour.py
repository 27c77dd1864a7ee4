"""Judgements of determinism and of state between rollouts.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_plugin_audit.records import Check, Finding, Rate, Trial, spread

NOISE = 0.2
"""Tolerated variation as a share of the range of rewards; RFC 008 allows a judge the same."""


def determinism(rounds: Sequence[Sequence[Trial]], whole: float) -> Finding:
    """Judge the variation of rewards over rounds with the same replies.

    Args:
        rounds: the trials of each round, in the same order.
        whole: range of all rewards of the audit.
    """
    check = Check("semantic.verifier_determinism", "the same reply gets the same reward")
    if len(rounds) < 2:
        return check.not_applicable("it was played once only")
    plays = list(zip(*rounds, strict=True))
    scored = [[trial for trial in play if trial.reward is not None] or play[:1] for play in plays]
    moody = [play for play in scored if any(play[0].differs(other) for other in play[1:])]
    if not moody:
        return check.finding("passed", f"{len(plays)} replies, {len(rounds)} times")
    rate = Rate(len(moody), len(plays))
    ranges = [spread([trial.reward for trial in play if trial.reward is not None]) for play in moody]
    worst = max(ranges)
    play = moody[ranges.index(worst)]
    return check.finding(
        "failed" if worst > NOISE * whole else "warned",
        f"{rate} replies differ in {len(rounds)} rounds, by at most {worst:.3g}",
        f"{play[0]}; later {', '.join(_got(trial) for trial in play[1:])}",
        "remove randomness, time and state from evaluate; ask a judge several times and take the mean",
    )


def compared(check: Check, here: Sequence[Trial], there: Sequence[Trial], where: str, advice: str) -> Finding:
    """Judge the same replies under two conditions, which give equal rewards in a stateless environment.

    Replies that are unscored under a condition are ignored: ``rewards.scored`` reports them.
    """
    pairs = list(zip(here, there, strict=True))
    both = [(one, other) for one, other in pairs if one.reward is not None and other.reward is not None]
    lost = sum((one.reward is None) != (other.reward is None) for one, other in pairs)
    if lost and not both:
        return check.not_applicable(f"{lost} replies are unscored {where}, or were before")
    differ = [(one, other) for one, other in both if one.differs(other)]
    rate = Rate(len(differ), len(pairs) - lost)
    left_out = f"; {lost} were unscored once and are left out" if lost else ""
    if not differ:
        return check.finding("passed", f"{len(pairs) - lost} replies {where}{left_out}")
    one, other = differ[0]
    result = f"{rate} replies differ {where}{left_out}"
    return check.finding("failed", result, f"{one}; {where}: {_got(other)}", advice)


def _got(trial: Trial) -> str:
    return f"unscored ({trial.error})" if trial.reward is None else f"{trial.reward:g}"
