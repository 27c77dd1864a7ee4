"""Judgements of prompts: leakage between splits, duplicates, and answers in the prompt.  Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from grpo_core import Prompt
from grpo_core.data.prompts import digest, leaked
from grpo_core.data.prompts import text_of as whole_text
from grpo_plugin_audit.near import nearly_leaked
from grpo_plugin_audit.records import Check, Finding, Rate, Severity, Solution, bare, short, text_of
from grpo_plugin_audit.rewards import SURE

COMPARED = 20_000
"""Number of training prompts, evenly spread, that are searched for near duplicates."""
MEASURED = 2_000
"""Number of held-out prompts that are searched for."""
MANY = 0.10
"""Share of repeated prompts that causes a warning."""
MARKS = re.compile(
    r"((answers?|solutions?|results?|keys?|labels?|gold|targets?|hints?|expected|reference|truth|secret)"
    r"( (is|was|are))?|<!--|\[\[|\{\{)\W{0,6}$",
    re.IGNORECASE,
)
"""Words before an answer that reveal it."""
ENDED = re.compile(r"\s*([.)\]}>\"'`;]|-->|\n|$)")
"""The end of a revealed answer; a list of options would continue."""


def _identity(prompt: Prompt, turns: int) -> int:
    """Return the identity of a prompt: its messages, and with several turns also answer and ``info``.

    A later turn may depend on ``info``, for example on a seed.
    """
    held = repr((prompt.answer, sorted(prompt.info.items(), key=lambda each: each[0]))) if turns > 1 else ""
    return hash((digest(prompt), held))


def split_leakage(train: Sequence[Prompt], held_out: Sequence[Prompt], turns: int) -> Finding:
    """Judge whether held-out prompts have exact or near duplicates in the training split."""
    check = Check("data.split_leakage", "held-out prompts that are trained on")
    if not held_out:
        return check.not_applicable('prompts("validation") is empty: nothing will be measured')
    some = held_out[:MEASURED]
    both = leaked([_identity(p, turns) for p in train], [_identity(p, turns) for p in some])
    compared = train[:: max(1, len(train) // COMPARED)]
    near: dict[int, int] = {}
    if turns == 1:
        found = nearly_leaked(*([whole_text(p) for p in each] for each in (compared, some)))
        near = {index: other for index, other in found.items() if index not in set(both)}
    rate, nearly = Rate(len(both), len(some)), Rate(len(near), len(some))
    begun = both if turns == 1 else leaked(map(digest, train), map(digest, some))
    alike = len(begun) - len(both)
    severity: Severity = "noted" if alike else "passed"
    evidence = ""
    advice = "look whether these rollouts differ later: where they do not, validation measures memory"
    if both or near:
        severity = "failed" if Rate(len(both) + len(near), len(some)).interval[0] > SURE else "warned"
        advice = "validation partly measures memory: split before prompts are drawn"
    if both:
        evidence = f"held-out prompt {some[both[0]].id}: {short(text_of(some[both[0]]))}"
    elif near:
        index, other = next(iter(near.items()))
        evidence = f"{short(text_of(some[index]))} is almost {short(text_of(compared[other]))}"
    result = f"{rate} exactly, {nearly} nearly; {len(train):,} prompts to train on"
    if alike:
        result += f"; {alike:,} more begin in the same way, with another answer or info"
    return check.finding(severity, result, evidence, advice)


def duplicates(train: Sequence[Prompt], turns: int) -> Finding:
    """Judge repeated prompts, and repeated prompts with different answers."""
    check = Check("data.duplicates", "repeated prompts")
    answers: dict[int, set[str]] = defaultdict(set)
    times: Counter[int] = Counter()
    first: dict[int, Prompt] = {}
    for prompt in train:
        name = _identity(prompt, turns)
        times[name] += 1
        first.setdefault(name, prompt)
        answers[name].add(repr(prompt.answer))
    rate = Rate(len(train) - len(times), len(train))
    torn = [name for name, each in answers.items() if len(each) > 1]
    severity: Severity = "passed"
    if torn or rate.share > MANY:
        severity = "warned"
    elif rate.successes:
        severity = "noted"
    shown = torn[0] if torn else times.most_common(1)[0][0] if times else 0
    result = f"{rate} repeat another one"
    if torn:
        result += f"; {len(torn):,} prompts have several answers"
    evidence = f"{short(text_of(first[shown]))}, {times[shown]} times" if first else ""
    advice = "leave out the repetitions, which count more than others"
    return check.finding(severity, result, evidence, advice)


def in_prompt(solutions: Sequence[Solution]) -> Finding:
    """Judge answers that occur in their prompt, in particular after a word such as "answer".

    Answers are searched as whole words.  Answers that occur equally often in other prompts, such as the
    letters of a multiple choice, are not counted.
    """
    check = Check("semantic.no_solution_leakage", "answers in the prompt")
    known = [one for one in solutions if one.answer is not None and bare(one.answer)]
    if len(known) < 2:
        return check.not_applicable("no answer is known")
    own = marked = other = 0
    example = ""
    for index, each in enumerate(known):
        text, answer = text_of(each.prompt), str(each.answer).strip()
        found = list(re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text))
        foreign = known[(index + 1) % len(known)]
        other += bool(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text_of(foreign.prompt)))
        own += bool(found)
        if any(MARKS.search(text[: one.start()]) and ENDED.match(text[one.end() :]) for one in found):
            marked += 1
            example = (
                example or f"prompt {short(text_of(each.prompt), 120)} has its answer {short(answer, 40)}"
            )
    rate, chance, given = Rate(own, len(known)), Rate(other, len(known)), Rate(marked, len(known))
    excess = rate.interval[0] > chance.interval[1]
    result = (
        f"{rate} contain their answer as a word, {given} after a word that gives it away; {chance} contain "
        "another prompt's"
    )
    if excess and marked < 2 and given.interval[0] <= SURE:
        return check.finding("noted", result, "", "right for tasks that pick something out of the prompt")
    severity: Severity = "passed"
    if excess:
        severity = "failed" if given.interval[0] > SURE else "warned"
    return check.finding(severity, result, example, "leave the answer out of the messages")


def majority(solutions: Sequence[Solution]) -> Finding:
    """Judge the success rate of always giving the most frequent answer."""
    check = Check("data.majority_answer", "the most frequent answer")
    given = {bare(one.answer): one.answer for one in solutions if one.answer is not None}
    answers = Counter(bare(one.answer) for one in solutions if one.answer is not None)
    if not answers:
        return check.not_applicable("no answer is known")
    answer, count = answers.most_common(1)[0]
    rate = Rate(count, answers.total())
    severity: Severity = "passed"
    if rate.trials >= 4:
        severity = "warned" if rate.share > 0.9 else "noted" if rate.share > 0.2 else "passed"
    result = f"{short(given[answer], 40)} is right for {rate}"
    return check.finding(severity, result, "", "balance the answers: a constant reply gets this reward")
