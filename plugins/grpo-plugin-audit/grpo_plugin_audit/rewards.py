"""Judgements of rewards: for right replies, for wrong replies, and their distribution.  Pure."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from attrs import frozen

from grpo_core import advantages
from grpo_plugin_audit.records import (
    TOLERANCE,
    Check,
    Finding,
    Rate,
    Severity,
    Solution,
    Trial,
    bare,
    spread,
)
from grpo_plugin_audit.replies import LISTINGS, SURFACES

SURE = 0.10
"""Lower end of a rate's interval above which a check fails."""
LARGE, WHOLE = 0.25, 0.75
"""Shares of a solution's reward above which a wrong reply causes a warning, or a failure."""
MARGIN = 0.10
"""Smallest distance of solutions from nonsense, as a share of the range of rewards; as in RFC 008."""


@frozen(kw_only=True)
class Scale:
    """The scale of rewards from nonsense to a right reply."""

    solutions: Mapping[str, Solution]
    """Solutions by the id of their prompt."""
    success: float | None
    """Reward of a success, if the environment declares it."""
    floor: float
    """Mean reward of nonsense."""

    def best(self, trial: Trial) -> float | None:
        """Return the reward of the prompt's solution; None without a solution that exceeds nonsense."""
        known = self.solutions.get(trial.prompt.id)
        if known is None or known.reward is None:
            return None if self.success is None else max(self.success, self.floor + TOLERANCE)
        return known.reward if known.reward > self.floor + TOLERANCE else None

    def wins(self, trial: Trial) -> bool:
        """Whether a reply gets full marks; False if full marks are not known."""
        full = self.best(trial) if self.success is None else self.success
        return full is not None and trial.reward is not None and advantages.reaches(trial.reward, full)

    def share(self, trial: Trial) -> float:
        """Return the reward on a scale from 0 (nonsense) to 1 (the prompt's solution)."""
        best = self.best(trial)
        if best is None or trial.reward is None:
            return 0.0
        return (trial.reward - self.floor) / (best - self.floor)

    def deserves(self, trial: Trial) -> bool:
        known = self.solutions.get(trial.prompt.id)
        return known is not None and known.deserves(trial.said)

    def rate(self, trials: Sequence[Trial]) -> Rate:
        """Return how many replies get full marks."""
        return Rate(sum(map(self.wins, trials)), len(trials))

    @property
    def rewards(self) -> list[float]:
        """The known rewards of solutions."""
        return [one.reward for one in self.solutions.values() if one.reward is not None]

    @property
    def known(self) -> bool:
        """Whether the reward of a right reply is known."""
        return self.success is not None or bool(self.rewards)


def severity_of(rate: Rate, share: float = 0.0) -> Severity:
    """Return the severity of full marks at this rate, or of a share of them, for wrong replies."""
    if rate.interval[0] > SURE or share >= WHOLE:
        return "failed"
    if rate.successes >= 2 or share >= LARGE:
        return "warned"
    return "noted" if rate.successes else "passed"


# ---------------------------------------------------------------------------------- right replies


def oracle(trials: Sequence[Trial], success: float | None) -> Finding:
    """Judge the environment's solutions."""
    check = Check("semantic.oracle_max", "its own solutions")
    ended = [trial for trial in trials if trial.ended]
    if not ended:
        why = (
            "solve(prompt) knows how to begin, but not how to end"
            if trials
            else "solve(prompt) knows no reply"
        )
        return check.finding(
            "not applicable",
            f"{why}: false positives and negatives are only partly known",
            advice="define solve(prompt), by default the prompt's answer, so that right replies are known",
        )
    best = max((trial.reward for trial in ended if trial.reward is not None), default=None)
    full = best if success is None else success
    right = [
        t for t in ended if full is not None and t.reward is not None and advantages.reaches(t.reward, full)
    ]
    rate = Rate(len(right), len(ended))
    wrong = next((trial for trial in ended if trial not in right), None)
    what = f"at least {full:g}, which it declares as success" if success is not None else f"the most, {full}"
    return check.finding(
        "passed" if wrong is None else "failed" if success is not None else "warned",
        f"{rate} get {what}",
        wrong,
        "correct evaluate, solve or the answers: right replies are punished",
    )


def floor(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge the distance of solutions from nonsense."""
    check = Check("semantic.floor_gap", "solutions above nonsense")
    known = [one for one in scale.solutions.values() if one.reward is not None]
    if not known:
        return check.not_applicable("no solution is known")
    worst: dict[str, Trial] = {}
    for trial in trials:
        if trial.reward is not None and not scale.deserves(trial):
            best = worst.setdefault(trial.prompt.id, trial)
            if trial.reward > (best.reward or 0.0):
                worst[trial.prompt.id] = trial
    compared = [(one.reward or 0.0, worst[one.prompt.id]) for one in known if one.prompt.id in worst]
    whole = spread([reward for reward, _ in compared] + [t.reward or 0.0 for _, t in compared])
    bad = [t for reward, t in compared if reward - (t.reward or 0.0) <= max(MARGIN * whole, TOLERANCE)]
    rate = Rate(len(compared) - len(bad), len(compared))
    mean = fmean(reward for reward, _ in compared) if compared else 0.0
    return check.finding(
        "failed" if 2 * len(bad) >= max(1, len(compared)) else "warned" if bad else "passed",
        f"{rate}; solutions get {mean:.3g} on average, nonsense {scale.floor:.3g}",
        f"{bad[0]}, its solution gets {scale.solutions[bad[0].prompt.id].reward:g}" if bad else "",
        "nothing can be learned where a solution gets no more than nonsense",
    )


def surface_forms(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge right replies in other forms; false negatives are noted, not failed."""
    check = Check("reward.surface_forms", "right replies in other forms")
    by_kind = {kind: [t for t in trials if t.kind == kind] for kind in SURFACES}
    rates = {kind: scale.rate(each) for kind, each in by_kind.items() if each}
    if not rates or not scale.known:
        return check.not_applicable("no solution is known, or each turn has another one")
    refused = [kind for kind, rate in rates.items() if 2 * rate.successes < rate.trials]
    accepted = [kind for kind in rates if kind not in refused]
    total = Rate(sum(r.trials - r.successes for r in rates.values()), sum(r.trials for r in rates.values()))
    example = next((t for t in trials if t.kind in refused and not scale.wins(t)), None)
    result = f"{total} are not accepted"
    result += f"; refused: {', '.join(refused)}" if refused else ""
    result += f"; accepted: {', '.join(accepted)}" if accepted else ""
    advice = "let the prompt ask for the exact form, or accept the forms that mean the same"
    return check.finding("noted" if refused else "passed", result, example, advice)


# ---------------------------------------------------------------------------------- wrong replies


def exploits(
    trials: Iterable[Trial], scale: Scale, by: Callable[[Trial], str], *, partial: bool = True
) -> list[tuple[Rate, float, Trial]]:
    """Return full marks, mean share and an example of each set of wrong replies, the worst set first."""
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if not scale.deserves(trial):
            groups[by(trial)].append(trial)
    found = []
    for each in groups.values():
        rate = scale.rate(each)
        share = fmean(map(scale.share, each)) if partial and len(each) >= 4 else 0.0
        example = max(each, key=lambda trial: (scale.wins(trial), scale.share(trial)))
        found.append((rate, share, example))
    return sorted(found, key=lambda one: (one[0].interval[0], one[1]), reverse=True)


def panel(
    check: Check,
    trials: Sequence[Trial],
    scale: Scale,
    by: Callable[[Trial], str],
    advice: str,
    *,
    partial: bool = True,
) -> Finding:
    """Judge wrong replies, and report the worst set.

    Without ``partial``, partial credit is accepted and only full marks count.
    """
    if not trials:
        return check.not_applicable("it was not played")
    if not scale.known:
        return check.not_applicable("cannot be checked: declare success, or define solve(prompt)")
    found = exploits(trials, scale, by, partial=partial)
    if not found:
        return check.not_applicable("each of these replies is an answer")
    rate, share, example = found[0]
    severity = severity_of(rate, share)
    if severity == "passed":
        result = f"none of {len(found)} kinds of replies gets full marks: {rate} for the best of them"
        return check.finding("passed", result)
    many = sum(severity_of(*one[:2]) in ("failed", "warned") for one in found)
    result = f"{example.kind}: full marks for {rate} prompts"
    result += _part_of(share, scale) if partial else ""
    result += f"; and {many - 1} more kinds" if many > 1 else ""
    if _guessed(trials, scale) and share < WHOLE:
        severity = "noted"
        advice = "other replies win other prompts: with few options, guessing does as well"
    return check.finding(severity, result, example, advice)


def _guessed(trials: Sequence[Trial], scale: Scale) -> bool:
    """Whether, without known answers, different replies win different prompts, as lucky guesses do."""
    if scale.rewards:
        return False
    winners: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        if scale.wins(trial):
            winners[trial.prompt.id].add(bare(trial.said))
    different = {said for each in winners.values() for said in each}
    return len(different) > 1 and all(len(each) == 1 for each in winners.values())


def _part_of(share: float, scale: Scale) -> str:
    """Describe a mean reward as a share of a solution's reward, or of the declared success."""
    if scale.rewards:
        return f", {share:.0%} of a solution's reward on average"
    if scale.success is None or advantages.reaches(scale.floor, scale.success):
        return ""  # nonsense is a success already, so there is no scale
    return f", {share:.0%} of what a success gets on average"


def listing(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge lists that contain the right answer: a policy can list all candidates without knowing it."""
    check = Check("reward.listing", "listing every option")
    by_kind = {each: [trial for trial in trials if trial.kind == each.kind] for each in LISTINGS}
    rates = {each: scale.rate(given) for each, given in by_kind.items() if given}
    if not rates or not scale.known:
        return check.not_applicable("no solutions with different answers are known")
    severity: Severity = "passed"
    result = "no list of answers gets full marks"
    guilty = ""
    for formatted, named in ((False, "answers"), (True, "solutions")):
        wins = [one for one, rate in rates.items() if one.formatted == formatted and rate.interval[0] > SURE]
        tried = [one for one in rates if one.formatted == formatted]
        if wins and len(wins) == len(tried):
            severity, guilty = "failed", wins[0].kind
            result = f"a list of {named} gets full marks wherever the right one is"
            break
        if wins and severity == "passed":
            severity, guilty = "noted" if formatted else "warned", wins[0].kind
            result = f"of several {named} the {wins[0].position} one counts"
    example = next((t for t in trials if t.kind == guilty and scale.wins(t)), None)
    numbers = ", ".join(f"{one.position} {rate.successes}/{rate.trials}" for one, rate in rates.items())
    advice = "judge one answer, in a form that the prompt asks for, and do not reward a reply with several"
    return check.finding(severity, f"{result} ({numbers})", example, advice)


def length(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge whether longer nonsense gets higher rewards."""
    check = Check("reward.length", "long nonsense")
    by_kind: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.reward is not None and trial.kind.startswith("nonsense of"):
            by_kind[trial.kind].append(trial)
    means = {kind: fmean(trial.reward or 0.0 for trial in each) for kind, each in by_kind.items()}
    if len(means) < 2:
        return check.not_applicable("it was not played")
    values = list(means.values())
    whole = max(spread([*values, *scale.rewards]), TOLERANCE)
    grows = all(after >= before - TOLERANCE for before, after in itertools.pairwise(values))
    longer = grows and values[-1] - values[0] > MARGIN * whole
    result = ", ".join(f"{kind.split()[2]} characters {value:.3g}" for kind, value in means.items())
    return check.finding(
        "failed" if longer else "passed",
        f"mean rewards: {result}",
        by_kind[list(means)[-1]][0],
        "do not reward length: a policy grows its replies up to the limit",
    )


# ---------------------------------------------------------------------------------- levels


def unfinished(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge whether solutions get their reward although a token limit cut them off."""
    check = Check("reward.unfinished", "replies that a token limit cuts off")
    if not trials:
        return check.not_applicable("no solution of one turn is known")
    paid = [trial for trial in trials if scale.share(trial) >= WHOLE]
    return check.finding(
        "noted" if paid else "passed",
        f"{Rate(len(paid), len(trials))} are rewarded like the ones that end",
        next(iter(paid), None),
        "a model may learn not to end (metric accuracy_finished): look at episode.truncated in evaluate, "
        'or set rollout.truncated = "mask"',
    )


def reach(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge whether rewards of one prompt can differ: a group of equal rewards has no training signal."""
    rewards: dict[str, set[float]] = defaultdict(set)
    for trial in trials:
        if trial.reward is not None:
            rewards[trial.prompt.id].add(round(trial.reward, 9))
    rate = Rate(sum(len(each) > 1 for each in rewards.values()), len(rewards))
    levels = Counter(round(trial.reward, 6) for trial in trials if trial.reward is not None)
    total = max(1, levels.total())
    shown = ", ".join(f"{value:g} for {count / total:.0%}" for value, count in sorted(levels.most_common(5)))
    severity: Severity = "warned" if rate.share < 0.5 else "passed"
    if rate.successes == 0 and scale.rewards:
        severity = "failed"
    return Check("statistical.reward_reachability", "rewards vary within a group").finding(
        severity,
        f"for {rate} prompts; {len(levels)} levels in {total} replies: {shown}",
        next(iter(trials), None),
        "a group whose rewards are equal has no advantage: give partial credit, or use other prompts",
    )


def bounds(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge whether a reply gets more than a solution, or much more than the declared success."""
    check = Check("reward.range", "no reward above a solution's")
    scored = [trial for trial in trials if trial.reward is not None]
    if not scored:
        return check.not_applicable("no reply has a reward")
    low, high = min(t.reward or 0.0 for t in scored), max(t.reward or 0.0 for t in scored)
    known = scale.rewards
    declared = None if scale.success is None else max(1.0, scale.success)
    top = max(scored, key=lambda trial: trial.reward or 0.0)
    severity: Severity = "passed"
    advice = ""
    if known and high > max(known) + TOLERANCE:
        severity = "failed"
        advice = f"a reply gets {high:g}, a solution at most {max(known):g}: cap the reward"
    elif declared is not None and high > 2 * declared:
        severity = "warned"
        advice = (
            f"rewards reach {high:g} where {scale.success:g} is a success: scale them, or correct success"
        )
    elif not known and declared is None:
        return check.not_applicable(f"rewards from {low:g} to {high:g}; no range is declared")
    return check.finding(severity, f"rewards from {low:g} to {high:g}", top, advice)


def scored(trials: Sequence[Trial]) -> Finding:
    """Judge whether all replies are scored."""
    lost = [trial for trial in trials if trial.reward is None and trial.ended]
    rate = Rate(len(lost), len(trials))
    return Check("runtime.reward_well_formed", "every reply is scored").finding(
        "failed" if lost else "passed",
        f"{rate} are unscored" if lost else f"{len(trials):,} replies",
        next(iter(lost), None),
        "a reply that cannot be read is a wrong one: give it the lowest reward",
    )
