"""Judgements of behaviour: the same reply again, elsewhere and in company, and what is touched.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core import Prompt
from grpo_plugin_audit.records import Finding, Rate, Severity, Trial, spread
from grpo_plugin_audit.rewards import not_applicable

SLOW = 1.0
"""Seconds of a call with one episode from which on it is slow: a run makes thousands."""
SLOW_BATCH = 10.0
"""Seconds of a full batch from which on it is slow."""
NOISE = 0.2
"""Share of the range of rewards by which a reward may vary; RFC 008 allows a judge as much."""


def determinism(rounds: Sequence[Sequence[Trial]], whole: float) -> Finding:
    """Judge the same replies, played several times over a while.

    Args:
        rounds: the trials of each time, in the same order.
        whole: range of all rewards.
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
        told=f"{rate} replies differ in {len(rounds)} rounds, by at most {worst:.3g}"
        if moody
        else f"{len(plays)} replies, {len(rounds)} times",
        evidence=evidence,
        advice="take chance, time and state out of evaluate; of a judge, ask several times and take the mean"
        if moody
        else "",
        measured=rate.measured() | {"rounds": len(rounds), "largest_difference": worst},
    )


def compared(
    check: str, title: str, here: Sequence[Trial], there: Sequence[Trial], where: str, advice: str
) -> Finding:
    """Judge the same replies under two circumstances; steady environments give the same.

    A reply that was unscored in one of them says nothing here: ``rewards.scored`` tells of those.
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
        told=(f"{rate} replies differ {where}" if differ else f"{len(pairs) - lost} replies {where}")
        + left_out,
        evidence=f"{differ[0][0]}; {where}: {_got(differ[0][1])}" if differ else "",
        advice=advice if differ else "",
        measured=rate.measured(),
    )


def company(alone: Sequence[Trial], ways: Mapping[str, Sequence[Trial]]) -> Finding:
    """Judge whether a reward depends on the size and the order of the batch."""
    check, title = "reward.batch_independence", "the batch makes no difference"
    for how, trials in ways.items():
        found = compared(
            check,
            title,
            alone,
            trials,
            how,
            "batches are put together by chance: judge each episode by itself",
        )
        if found.severity == "failed":
            return found
    return Finding(
        check=check,
        title=title,
        severity="passed",
        told=f"{len(alone)} replies alone, {', '.join(ways)}",
        measured=Rate(0, len(alone)).measured(),
    )


def seed_control(prompts: Sequence[Prompt], again: Sequence[Prompt]) -> Finding:
    """Judge whether another process offers the same prompts for the same options."""
    differ = sum(one != other for one, other in zip(prompts, again, strict=False))
    same = len(prompts) == len(again) and not differ
    return Finding(
        check="runtime.seed_control",
        title="the same prompts each time",
        severity="passed" if same else "failed",
        told=f"{len(prompts):,}, also in another process"
        if same
        else f"{differ:,} of {len(prompts):,} prompts differ in another process, which offers {len(again):,}",
        evidence=""
        if same
        else next(
            (
                f"prompt {one.id}: {one.messages[-1].get('content')!r:.80}, then "
                f"{other.messages[-1].get('content')!r:.80}"
                for one, other in zip(prompts, again, strict=False)
                if one != other
            ),
            "",
        ),
        advice="" if same else "draw prompts with a random.Random(seed) of your own; no run could be resumed",
        measured={"prompts": len(prompts), "different": differ},
    )


def latency(calls: Sequence[float], full: float, size: int, together: float, number: int) -> Finding:
    """Judge the time of calls.

    Args:
        calls: seconds of calls with one episode each.
        full: seconds of a batch of ``size`` episodes.
        together: seconds of ``number`` calls with one episode each that are made at the same time.
    """
    ordered = sorted(calls)
    p50, p95 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    slow = p95 > SLOW or full > SLOW_BATCH
    return Finding(
        check="runtime.resource_bounds",
        title="time of a call",
        severity="warned" if slow else "passed",
        told=f"p50 {p50 * 1000:.1f} ms, p95 {p95 * 1000:.1f} ms; a batch of {size} {full * 1000:.0f} ms; "
        f"{number} calls at once {together * 1000:.0f} ms",
        advice="make evaluate faster, or async with concurrency: a run waits for it" if slow else "",
        measured={
            "p50_seconds": p50,
            "p95_seconds": p95,
            "batch_episodes": size,
            "batch_seconds": full,
            "calls_at_once": number,
            "calls_at_once_seconds": together,
        },
    )


def files(events: Sequence[Mapping[str, Any]], temporary: str, working: str) -> Finding:
    """Judge files that were written, made or removed while episodes were played.

    Args:
        events: what the process has told.
        temporary: directory for temporary files, where anybody may write.
        working: working directory, where nobody may, even if it is a temporary one.
    """
    check, title = "runtime.host_containment", "files that it writes"
    paths = sorted({str(e["what"]) for e in events if e["kind"] == "file" and e["phase"] == "play"})
    here = _within(working, temporary)
    outside = [p for p in paths if not _within(p, temporary) or (here and _within(p, working))]
    programs = sorted({str(e["what"]) for e in events if e["kind"] == "program" and e["phase"] == "play"})
    told = f"{len(outside)} outside of the directory for temporary files, {len(paths) - len(outside)} in it"
    if programs:
        told += f"; programs that it starts: {', '.join(programs[:3])}, whose files are not seen"
    return Finding(
        check=check,
        title=title,
        severity="failed" if outside else "noted" if programs else "passed",
        told=told,
        evidence=", ".join(outside[:3]),
        advice="write to a temporary directory of the session: other rollouts share this one"
        if outside
        else "",
        measured={"outside": outside[:50], "temporary": len(paths) - len(outside), "programs": programs[:50]},
    )


def network(events: Sequence[Mapping[str, Any]]) -> Finding:
    """Tell the addresses that were connected to; an environment of a server has to."""
    found = sorted({str(e["what"]) for e in events if e["kind"] == "socket"} - {"loopback"})
    local = any(e["what"] == "loopback" for e in events if e["kind"] == "socket")
    return Finding(
        check="runtime.network_policy",
        title="network connections",
        severity="noted" if found else "passed",
        told=f"{len(found)} addresses: {', '.join(found[:5])}"
        if found
        else f"none from its Python code{', but to this machine' if local else ''}",
        advice="a run needs these addresses, from each machine that evaluates" if found else "",
        measured={"addresses": found[:50]},
    )


def _within(path: str, directory: str) -> bool:
    real = os.path.realpath(path)
    return real.startswith((os.path.realpath(directory) + os.sep, "/dev/", "/proc/"))


def _got(trial: Trial) -> str:
    return f"unscored ({trial.error})" if trial.reward is None else f"{trial.reward:g}"
