"""Causes that the run reported: errors, incidents and warnings."""

from __future__ import annotations

import math
import shutil
from datetime import datetime

from grpo_plugin_report.explain.causes import Finding, percent
from grpo_plugin_report.explain.facts import Facts, Messages

SOME = 3
"""Number of incidents below which they count as chance."""


def _kept(facts: Facts) -> str:
    """Describe the saved and the lost work of an ended run."""
    steps, seconds = facts.lost
    newest = f"the newest checkpoint is of step {facts.saved}" if facts.saved else "there is no checkpoint"
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120.0 else f"{seconds:.0f} s"
    lost = f": {steps} {'step is' if steps == 1 else 'steps are'} lost ({time})" if steps else ""
    planned = f" of {facts.planned}" if facts.planned else ""
    return f"the run made {facts.steps}{planned} steps; {newest}{lost}"


def _moment(seconds: float) -> str:
    """Format seconds since 1970 as a local date."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # out of range
        return f"{seconds:g} seconds since 1970"


def _often(facts: Facts, found: Messages, share: float) -> bool:
    return found.count >= SOME and found.count >= share * facts.attempts


def _per_attempt(facts: Facts, found: Messages) -> str:
    return (
        f"{found.count:g} in {facts.attempts:g} attempts at a group, from step {found.first} to {found.last}"
    )


REMEDIES = (
    (
        ("out of memory",),
        "A process of the run ran out of memory.",
        'set trainer.tokens_per_microbatch = 4096, or set trainer.activations = "recompute"; '
        "grpo-core doctor CONFIG estimates what each process takes",
    ),
    (
        ("no space left on device", "disk quota exceeded"),
        "The disk of the run is full.",
        "make room, then continue with --resume and --set tracking.files.keep=20 --set checkpoint.keep=1",
    ),
    (
        ("does not use the weights of version",),
        "An engine generates with weights that it was not sent.",
        "look for a cache of older weights or renamed tensors in the engine; if it rounds weights, set "
        "health.canary_tolerance",
    ),
)
"""Substrings of error messages, in lower case, with meaning and remedy."""


def known_error(facts: Facts) -> Finding | None:
    """The run ended with a known error, such as a lack of memory or disk space."""
    if facts.error is not None:
        for marks, title, fix in REMEDIES:
            if any(mark in facts.error.message.lower() for mark in marks):
                return Finding.of(title, *_ended(facts, facts.error), fix)
    return None


def run_failed(facts: Facts) -> Finding | None:
    """The run ended with an error that no other cause explains."""
    if facts.error is None:
        return None
    return Finding.of(
        "The run ended with an error.",
        *_ended(facts, facts.error),
        f"do what the message says, then: grpo-core train --resume {facts.path}",
    )


def _ended(facts: Facts, error: Messages) -> tuple[str, str, str]:
    kind = f"its class: {facts.error_type or 'unknown'}; the traceback is in events.jsonl (ErrorRaised)"
    return f"the run ended with: {error.message}", kind, _kept(facts)


RANKED = (
    "disk",
    "no_stop",
    "no_turn_end",
    "long_solutions",
    "tools_unseen",
    "long_prompts",
    "leak",
    "off_policy",
)
"""Causes of warnings about definite problems; other warnings are about possible ones."""
OF_STEPS = ("rows", "truncated", "accuracy_finished", "gamed", "signal", "never")
"""Causes of warnings about single steps, which count if they are repeated until the end."""
STILL = 5
"""Number of last steps that count as the end of a run."""


def warned(facts: Facts) -> Finding | None:
    """The run warned about a problem, such as too long prompts or a disk that fills up."""
    newest = max(facts.of("time/step").steps, default=0)
    lasting = {name for name, kind in facts.warnings.items() if kind.count > 1 and kind.last > newest - STILL}
    kinds = {name: name.partition("/")[0] for name in facts.warnings}
    found = [name for name in kinds if kinds[name] in RANKED]
    found += [name for name in kinds if kinds[name] in OF_STEPS and name in lasting]
    if not found:
        return None
    first = facts.warnings[found[0]]
    return Finding.of(
        "The run has warned of what is wrong.",
        first.message,
        f"it warned {first.count:g} times, last at step {first.last}",
        f"further warnings of this kind: {', '.join(found[1:]) or 'none'}",
        "do what the warning says, then start anew or continue with --resume",
    )


def process_dies(facts: Facts) -> Finding | None:
    """The process of an environment or engine dies repeatedly."""
    for part, least, share in (("environment", SOME, 0.02), ("engine", 2 * SOME, 0.05)):
        died = facts.incident("died", part)
        if died.count < least or not _often(facts, died, share):
            continue
        kinds = ("rollouts_orphaned", "session_lost", "rollouts_lost", "retried")
        lost = sum(facts.incident(kind).count for kind in kinds)
        return Finding.of(
            f"The process of an {part} dies again and again.",
            f"deaths: {_per_attempt(facts, died)}",
            f"the last one: {died.message}",
            f"{lost:g} reports of requests, rollouts or sessions that were lost with it",
            f"read the {part}'s file in logs/, and try it with grpo-core check; a crash in native code or "
            "a memory limit ends a process like this, and exit status -9 is the OOM killer",
        )
    return None


def environment_hangs(facts: Facts) -> Finding | None:
    """Calls of an environment take longer than their deadline."""
    late = facts.incident("deadline", "environment")
    if not _often(facts, late, 0.01):
        return None
    lanes = [key for key in facts.lanes if key[0].startswith("environment")]
    busy = max((facts.lane(lane, what) for lane, what in lanes), default=0.0)
    return Finding.of(
        "Calls of an environment hang until their deadline.",
        f"deadlines: {_per_attempt(facts, late)}",
        f"the last one: {late.message}",
        f"its calls took {percent(busy)} of the run's time",
        "set timeouts for the calls inside evaluate, or move slow judging to more processes with "
        "environment.workers",
    )


def environment_raises(facts: Facts) -> Finding | None:
    """Calls of an environment raise errors."""
    failed = facts.incident("call_failed", "environment")
    if not _often(facts, failed, 0.01):
        return None
    return Finding.of(
        "An environment raises an error for many rollouts.",
        f"failed calls: {_per_attempt(facts, failed)}",
        f"the last one: {failed.message}",
        f"{facts.settings('environment.max_error_rate')}; the run ended: {facts.ended or 'not yet'}",
        "correct evaluate; grpo-core check ENV calls it with hostile replies, grpo-core try ENV shows one",
    )


def prompts_never_scored(facts: Facts) -> Finding | None:
    """The same prompts fail at all of their attempts."""
    messages, skipped = facts.incident("unscored", "rollouts"), facts.incident("skipped")
    retries = facts.number("rollout.max_retries", 3.0)
    others = ("rollouts_late", "rollouts_lost", "rollouts_orphaned")
    failures = messages.count + skipped.count + sum(facts.incident(kind).count for kind in others)
    if messages.count < SOME or skipped.count < SOME or skipped.count * (retries + 1) < 0.6 * failures:
        return None
    task, first = next(iter(facts.skipped.items()), ("", Messages()))
    return Finding.of(
        "Some prompts never get a reward, and are skipped.",
        f"{skipped.count:g} prompts were skipped after {retries + 1:g} attempts each",
        f"these are {percent(min(1.0, skipped.count * (retries + 1) / failures))} of all failed "
        "attempts: other prompts rarely fail",
        f"the last error, of task {task!r}: {first.message}",
        "grep PromptSkipped in events.jsonl for their ids, then correct or leave out these rows "
        "(a dataloader of a few lines does)",
    )


def rollouts_unscored(facts: Facts) -> Finding | None:
    """Many rollouts of many prompts have no reward, or one that is not a finite number."""
    messages = facts.incident("unscored", "rollouts")
    if not _often(facts, messages, 0.08):
        return None
    errors = sum(facts.of(f"errors/{task}").total for task in facts.tasks)
    (reason, _), *_ = messages.reasons.most_common(1) or [(messages.message, 0)]
    return Finding.of(
        "An environment gives no reward to many rollouts.",
        f"unscored: {_per_attempt(facts, messages)}",
        f"the most frequent reason: {reason}",
        f"{errors:g} rollouts had no reward and were played again",
        "read the reason, then let evaluate score such replies: one that cannot be parsed is usually a 0, "
        "and a reward that is NaN comes from a division by zero or an empty mean",
    )


def _timed_out(facts: Facts) -> Messages:
    """Return the replacements of engines after timeouts, without those after deaths."""
    messages = facts.incident("replaced")
    count = sum(count for reason, count in messages.reasons.items() if "no answer" in reason)
    return Messages(count, messages.first, messages.last, messages.message) if count else Messages()


def engine_is_late(facts: Facts) -> Finding | None:
    """An engine of a pool does not take new weights in time."""
    late, replaced = facts.incident("late"), _timed_out(facts)
    loading = {
        lane: facts.lane(lane, "update weights") for lane, what in facts.lanes if what == "update weights"
    }
    slow = max(loading.values(), default=0.0) > 0.5 > 10.0 * min(loading.values(), default=1.0)
    if late.count + replaced.count < max(1 if slow else 2, 0.005 * facts.steps):
        return None
    messages = late if late.count else replaced
    member = messages.message.partition(":")[0]
    return Finding.of(
        "An engine of the pool takes new weights much later than the others.",
        f"{late.count:g} times late and {replaced.count:g} times replaced, from step {messages.first} on",
        f"the last one: {messages.message}",
        f"loading weights took {percent(facts.lane(member, 'update weights'))} of the time in {member}",
        "look at that engine's machine and network, raise engine.deadline, or run with fewer engine.workers",
    )


def rollouts_exceed_deadline(facts: Facts) -> Finding | None:
    """Rollouts take longer than rollout.deadline."""
    late = facts.incident("rollouts_late")
    if not _often(facts, late, 0.04):
        return None
    return Finding.of(
        "Rollouts take longer than rollout.deadline, and are played again.",
        f"late: {_per_attempt(facts, late)}",
        f"{facts.settings('rollout.deadline')} s, a step takes {facts.of('time/step').median:.3g} s",
        f"the last one: {late.message}",
        "raise rollout.deadline, or lower rollout.max_tokens or rollout.max_in_flight",
    )


def gradients_not_finite(facts: Facts) -> Finding | None:
    """Losses or gradients are not finite."""
    updates, rows = facts.of("non_finite_updates"), facts.of("non_finite_rows")
    error = facts.error.message if facts.error is not None else ""
    ended = "is not finite" in error
    if not ended and len(updates) + len(rows) < max(2, 0.02 * facts.steps):
        return None
    return Finding.of(
        "Losses or gradients are not finite.",
        f"updates left out in {len(updates)} steps, rows left out in {len(rows)} steps",
        f"the run ended with: {error}" if ended else "the run continued without these updates",
        f"{facts.settings('trainer.lr', 'model.dtype')}, largest grad_norm {facts.of('grad_norm').most:.3g}",
        'lower trainer.lr tenfold, or set model.dtype = "float32"',
    )


NO_ROOM = 2**20
"""Bytes of free space below which a run cannot record its end."""


def _room(facts: Facts) -> float:
    """Return the free bytes of the run's disk; infinity if they are unknown."""
    try:
        return shutil.disk_usage(facts.path).free
    except OSError:
        return math.inf


def killed(facts: Facts) -> Finding | None:
    """The process was killed, or could not write its end."""
    if facts.ended or facts.running or facts.error is not None or "events.jsonl" in facts.missing:
        return None
    if "disk" in facts.warnings or _room(facts) < NO_ROOM:
        evidence = "events.jsonl has no end of the last start", f"{_room(facts):,.0f} bytes are free"
        return Finding.of(REMEDIES[1][1], *evidence, _kept(facts), REMEDIES[1][2])
    times = facts.of("time").values
    last = f"its last metrics are of {_moment(times[-1])}" if times else "it has no metrics"
    return Finding.of(
        "The process of the run was killed: it recorded no end.",
        "events.jsonl has no end of the last start, and no error"
        if facts.started
        else "events.jsonl records neither a start nor an end of the run",
        "no process of this machine holds the run",
        f"{_kept(facts)}; {last}",
        f"look for the OOM killer (dmesg) or a time limit of the queue, then: grpo-core train --resume "
        f"{facts.path}",
    )
