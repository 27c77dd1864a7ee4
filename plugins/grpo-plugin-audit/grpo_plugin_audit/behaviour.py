"""Judgements of determinism and of state between rollouts.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_plugin_audit.records import Finding, Rate, Severity, Trial, spread
from grpo_plugin_audit.rewards import not_applicable

NOISE = 0.2
"""Tolerated variation as a share of the range of rewards; RFC 008 allows a judge the same."""


def determinism(rounds: Sequence[Sequence[Trial]], whole: float) -> Finding:
    """Judge the variation of rewards over rounds with the same replies.

    Args:
        rounds: the trials of each round, in the same order.
        whole: range of all rewards of the audit.
    """
    check, title = "semantic.verifier_determinism", "the same reply gets the same reward"
    if len(rounds) < 2:
        return not_applicable(check, title, "it was played once only")
    plays = list(zip(*rounds, strict=True))
    scored = [[trial for trial in play if trial.reward is not None] or play[:1] for play in plays]
    moody = [play for play in scored if any(play[0].differs(other) for other in play[1:])]
    rate = Rate(len(moody), len(plays))
    ranges = [spread([trial.reward for trial in play if trial.reward is not None]) for play in moody]
    worst = max(ranges, default=0.0)
    severity: Severity = "passed"
    evidence = ""
    if moody:
        severity = "failed" if worst > NOISE * whole else "warned"
        play = moody[ranges.index(worst)]
        evidence = f"{play[0]}; later {', '.join(_got(trial) for trial in play[1:])}"
    return Finding(
        check=check,
        title=title,
        severity=severity,
        result=f"{rate} replies differ in {len(rounds)} rounds, by at most {worst:.3g}"
        if moody
        else f"{len(plays)} replies, {len(rounds)} times",
        evidence=evidence,
        advice="remove randomness, time and state from evaluate; ask a judge several times and take the mean"
        if moody
        else "",
    )


def compared(
    check: str, title: str, here: Sequence[Trial], there: Sequence[Trial], where: str, advice: str
) -> Finding:
    """Judge the same replies under two conditions, which give equal rewards in a stateless environment.

    Replies that are unscored under a condition are ignored: ``rewards.scored`` reports them.
    """
    pairs = list(zip(here, there, strict=True))
    both = [(one, other) for one, other in pairs if one.reward is not None and other.reward is not None]
    lost = sum((one.reward is None) != (other.reward is None) for one, other in pairs)
    if lost and not both:
        return not_applicable(check, title, f"{lost} replies are unscored {where}, or were before")
    differ = [(one, other) for one, other in both if one.differs(other)]
    rate = Rate(len(differ), len(pairs) - lost)
    left_out = f"; {lost} were unscored once and are left out" if lost else ""
    return Finding(
        check=check,
        title=title,
        severity="failed" if differ else "passed",
        result=(f"{rate} replies differ {where}" if differ else f"{len(pairs) - lost} replies {where}")
        + left_out,
        evidence=f"{differ[0][0]}; {where}: {_got(differ[0][1])}" if differ else "",
        advice=advice if differ else "",
    )


def _got(trial: Trial) -> str:
    return f"unscored ({trial.error})" if trial.reward is None else f"{trial.reward:g}"
