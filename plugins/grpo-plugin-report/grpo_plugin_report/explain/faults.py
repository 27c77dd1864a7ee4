"""Causes that a run tells of itself: errors, incidents, and warnings before its first step."""

from __future__ import annotations

from datetime import datetime

from grpo_plugin_report.explain.causes import Finding, percent
from grpo_plugin_report.explain.facts import Facts, Messages

SOME = 3
"""Number of incidents below which a run has survived chance."""


def _progress(facts: Facts) -> str:
    return f"the run made {facts.steps}{f' of {facts.planned}' if facts.planned else ''} steps"


def _kept(facts: Facts) -> str:
    """Return what is left of the work of a run that has ended."""
    steps, seconds = facts.lost
    newest = f"the newest checkpoint is of step {facts.saved}" if facts.saved else "there is no checkpoint"
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120.0 else f"{seconds:.0f} s"
    lost = f": {steps} {'step is' if steps == 1 else 'steps are'} lost ({time})" if steps else ""
    return f"{_progress(facts)}; {newest}{lost}"


def _moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as a date of this machine."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # no clock says that
        return f"{seconds:g} seconds since 1970"


def _often(facts: Facts, told: Messages, share: float) -> bool:
    return told.count >= SOME and told.count >= share * facts.attempts


def _per_attempt(facts: Facts, told: Messages) -> str:
    return f"{told.count:g} in {facts.attempts:g} attempts at a group, from step {told.first} to {told.last}"


def out_of_memory(facts: Facts) -> Finding | None:
    """The run ended because memory was missing."""
    if facts.error is None or "out of memory" not in facts.error.message.lower():
        return None
    return Finding(
        "A process of the run found no memory.",
        (
            f"the run ended with: {facts.error.message}",
            f"trainer.tokens_per_microbatch = {facts.setting('trainer.tokens_per_microbatch')}, "
            f"rollout.max_tokens = {facts.setting('rollout.max_tokens')}",
            _kept(facts),
        ),
        'halve trainer.tokens_per_microbatch, or set trainer.activations = "recompute"; '
        "grpo-core doctor CONFIG estimates what each process takes",
    )


def disk_full(facts: Facts) -> Finding | None:
    """The run ended because the disk was full."""
    error = facts.error
    if error is None or not any(
        mark in error.message for mark in ("No space left on device", "Disk quota exceeded")
    ):
        return None
    warned = facts.warnings.get("disk", Messages())
    return Finding(
        "The disk of the run is full.",
        (
            f"the run ended with: {error.message}",
            f"{warned.count:g} warnings about the disk came before",
            _kept(facts),
        ),
        "make room, then continue with --resume and --set tracking.files.keep=20 --set checkpoint.keep=1",
    )


def disk_nearly_full(facts: Facts) -> Finding | None:
    """The disk will soon be full."""
    if (told := facts.warnings.get("disk")) is None:
        return None
    return Finding(
        "The disk of the run will soon be full.",
        (told.message, f"the run said so {told.count:g} times, last at step {told.last}", _progress(facts)),
        "make room, or continue with --resume and --set tracking.files.keep=20",
    )


def engine_has_old_weights(facts: Facts) -> Finding | None:
    """The canary of a weight sync showed other weights than the trainer's."""
    if facts.error is None or "does not use the weights of version" not in facts.error.message:
        return None
    return Finding(
        "An engine generates with other weights than it was sent.",
        (
            f"the run ended with: {facts.error.message}",
            f"the canary failed after {facts.steps} steps in which it agreed",
            f"engine.name = {facts.setting('engine.name')!r}, engine.transport = "
            f"{facts.setting('engine.transport')!r}",
        ),
        "look for a cache of older weights or renamed tensors in the engine; if it rounds weights, set "
        "health.canary_tolerance",
    )


def environment_dies(facts: Facts) -> Finding | None:
    """The process of an environment ends again and again."""
    died = facts.incident("died", "environment")
    if not _often(facts, died, 0.02):
        return None
    lost = facts.incident("rollouts_orphaned").count + facts.incident("session_lost").count
    return Finding(
        "The process of an environment ends by itself, again and again.",
        (
            f"deaths: {_per_attempt(facts, died)}",
            f"the last one: {died.message}",
            f"{lost:g} reports of rollouts or sessions that were lost with it",
        ),
        "read the environment's file in logs/, and play it alone with grpo-core check; a crash in native "
        "code or a memory limit ends a process like this",
    )


def environment_hangs(facts: Facts) -> Finding | None:
    """Calls of an environment take longer than their deadline."""
    late = facts.incident("deadline", "environment")
    if not _often(facts, late, 0.01):
        return None
    lanes = [key for key in facts.lanes if key[0].startswith("environment")]
    busy = max((facts.lane(lane, what) for lane, what in lanes), default=0.0)
    return Finding(
        "Calls of an environment hang until their deadline.",
        (
            f"deadlines: {_per_attempt(facts, late)}",
            f"the last one: {late.message}",
            f"its calls took {percent(busy)} of the run's time",
        ),
        "give the calls inside evaluate timeouts of their own, or move slow judging to more processes with "
        "environment.workers",
    )


def environment_raises(facts: Facts) -> Finding | None:
    """Calls of an environment raise errors."""
    failed = facts.incident("call_failed", "environment")
    if not _often(facts, failed, 0.01):
        return None
    return Finding(
        "An environment raises an error for many rollouts.",
        (
            f"failed calls: {_per_attempt(facts, failed)}",
            f"the last one: {failed.message}",
            f"environment.max_error_rate = {facts.setting('environment.max_error_rate')}; "
            f"the run ended: {facts.ended or 'not yet'}",
        ),
        "correct evaluate; grpo-core check ENV calls it with hostile replies, grpo-core try ENV shows one",
    )


def _unscored(facts: Facts) -> Messages:
    told = facts.incident("unscored", "rollouts")
    return told if _often(facts, told, 0.08) else Messages()


def _count_unscored(facts: Facts) -> str:
    errors = sum(facts.of(f"errors/{task}").total for task in facts.tasks)
    return f"{errors:g} rollouts had no reward and were played again"


def rewards_not_numbers(facts: Facts) -> Finding | None:
    """Rewards are NaN or infinite."""
    told = _unscored(facts)
    marks = tuple(f"reward is {what}" for what in ("nan", "inf", "-inf"))
    broken = sum(count for reason, count in told.reasons.items() if any(mark in reason for mark in marks))
    if not told.count or broken < 0.5 * told.count:
        return None
    return Finding(
        "An environment returns rewards that are no finite numbers.",
        (
            f"unscored: {_per_attempt(facts, told)}",
            f"the last one: {told.message}",
            _count_unscored(facts),
        ),
        "find the division by zero or the empty mean in evaluate; return None for what cannot be judged",
    )


def prompts_never_scored(facts: Facts) -> Finding | None:
    """The same prompts fail at all of their attempts."""
    told, skipped = facts.incident("unscored", "rollouts"), facts.incident("skipped")
    retries = facts.number("rollout.max_retries", 3.0)
    others = ("rollouts_late", "rollouts_lost", "rollouts_orphaned")
    failures = told.count + skipped.count + sum(facts.incident(kind).count for kind in others)
    if told.count < SOME or skipped.count < SOME or skipped.count * (retries + 1) < 0.6 * failures:
        return None
    task, first = next(iter(facts.skipped.items()), ("", Messages()))
    return Finding(
        "Some prompts never get a reward, and are skipped.",
        (
            f"{skipped.count:g} prompts were skipped after {retries + 1:g} attempts each",
            f"these are {percent(min(1.0, skipped.count * (retries + 1) / failures))} of all failed "
            "attempts: other prompts rarely fail",
            f"the last error, of task {task!r}: {first.message}",
        ),
        "grep PromptSkipped in events.jsonl for their ids, then correct or leave out these rows "
        "(tasks.TASK.source.where)",
    )


def rollouts_unscored(facts: Facts) -> Finding | None:
    """Many rollouts of many prompts have no reward."""
    told = _unscored(facts)
    if not told.count:
        return None
    return Finding(
        "An environment gives no reward to many rollouts.",
        (
            f"unscored: {_per_attempt(facts, told)}",
            f"the last one: {told.message}",
            _count_unscored(facts),
        ),
        "read the message, then let evaluate score such replies (one that cannot be parsed is usually a 0)",
    )


def engine_dies(facts: Facts) -> Finding | None:
    """The process of an engine ends again and again."""
    died = facts.incident("died", "engine")
    if died.count < 2 * SOME or not _often(facts, died, 0.05):
        return None
    again = facts.incident("rollouts_lost").count + facts.incident("retried").count
    return Finding(
        "The process of an engine ends by itself, again and again.",
        (
            f"deaths: {_per_attempt(facts, died)}",
            f"the last one: {died.message}",
            f"{again:g} reports of requests or rollouts that were generated again",
        ),
        "read the engine's file in logs/; exit status -9 is the memory killer: lower engine.max_requests or "
        "rollout.max_tokens",
    )


def _timed_out(facts: Facts) -> Messages:
    """Return the replacements of engines that did not answer; others follow a death."""
    told = facts.incident("replaced")
    count = sum(count for reason, count in told.reasons.items() if "no answer" in reason)
    return Messages(count, told.first, told.last, told.message) if count else Messages()


def engine_is_late(facts: Facts) -> Finding | None:
    """An engine of a pool does not take new weights in time."""
    late, replaced = facts.incident("late"), _timed_out(facts)
    loading = {
        lane: facts.lane(lane, "update weights") for lane, what in facts.lanes if what == "update weights"
    }
    slow = max(loading.values(), default=0.0) > 0.5 > 10.0 * min(loading.values(), default=1.0)
    if late.count + replaced.count < max(1 if slow else 2, 0.005 * facts.steps):
        return None
    told = late if late.count else replaced
    member = told.message.partition(":")[0]
    return Finding(
        "An engine of the pool takes new weights much later than the others.",
        (
            f"{late.count:g} times late and {replaced.count:g} times replaced, from step {told.first} on",
            f"the last one: {told.message}",
            f"loading weights took {percent(facts.lane(member, 'update weights'))} of the time in {member}",
        ),
        "look at that engine's machine and network, raise engine.deadline, or run with fewer engine.workers",
    )


def rollouts_exceed_deadline(facts: Facts) -> Finding | None:
    """Rollouts take longer than rollout.deadline."""
    late = facts.incident("rollouts_late")
    if not _often(facts, late, 0.04):
        return None
    return Finding(
        "Rollouts take longer than rollout.deadline, and are played again.",
        (
            f"late: {_per_attempt(facts, late)}",
            f"rollout.deadline = {facts.setting('rollout.deadline')} s, a step takes "
            f"{facts.of('time/step').median:.3g} s",
            f"the last one: {late.message}",
        ),
        "raise rollout.deadline, or lower rollout.max_tokens or rollout.max_in_flight",
    )


def gradients_not_finite(facts: Facts) -> Finding | None:
    """Losses or gradients are not finite."""
    updates, rows = facts.of("non_finite_updates"), facts.of("non_finite_rows")
    error = facts.error.message if facts.error is not None else ""
    ended = "is not finite" in error
    if not ended and len(updates) + len(rows) < max(2, 0.02 * facts.steps):
        return None
    return Finding(
        "Losses or gradients are not finite.",
        (
            f"updates left out in {len(updates)} steps, rows left out in {len(rows)} steps",
            f"the run ended with: {error}" if ended else "the run went on without these updates",
            f"trainer.lr = {facts.setting('trainer.lr')}, model.dtype = {facts.setting('model.dtype')!r}, "
            f"largest grad_norm {facts.of('grad_norm').most:.3g}",
        ),
        'lower trainer.lr tenfold, or set model.dtype = "float32"',
    )


def killed(facts: Facts) -> Finding | None:
    """The process ended without a word."""
    if facts.ended or facts.running or facts.error is not None or "events.jsonl" in facts.missing:
        return None
    times = facts.of("time").values
    last = f"its last metrics are of {_moment(times[-1])}" if times else "it has no metrics"
    return Finding(
        "The process of the run was killed: it ended without a word.",
        (
            "events.jsonl has no end of the last start, and no error"
            if facts.started
            else "events.jsonl tells neither a start nor an end of the run",
            "no process of this machine holds the run",
            f"{_kept(facts)}; {last}",
        ),
        f"look for the memory killer (dmesg) or a time limit of the queue, then: grpo-core train --resume "
        f"{facts.path}",
    )


def run_failed(facts: Facts) -> Finding | None:
    """The run ended with an error that no other cause explains."""
    if facts.error is None:
        return None
    return Finding(
        "The run ended with an error.",
        (
            f"the error: {facts.error.message}",
            f"its class: {facts.error_type or 'unknown'}; the traceback is in events.jsonl (ErrorRaised)",
            _kept(facts),
        ),
        f"do what the message says, then: grpo-core train --resume {facts.path}",
    )


# ---------------------------------------------------------------------------------- warnings


def _warned(facts: Facts, *causes: str) -> tuple[str, Messages] | None:
    for name, told in facts.warnings.items():
        if name.partition("/")[0] in causes:
            return name, told
    return None


def no_stop_token(facts: Facts) -> Finding | None:
    """Completions have no token at which they stop."""
    if (warned := _warned(facts, "no_stop", "no_turn_end")) is None:
        return None
    cut = max((facts.of(f"truncated/{task}").median for task in facts.tasks), default=0.0)
    return Finding(
        "Completions do not stop by themselves.",
        (
            warned[1].message,
            f"{percent(cut)} of the rollouts are cut off by a token limit",
            f"rollout.stop = {facts.setting('rollout.stop')}",
        ),
        "set rollout.stop, or name the end-of-turn token in eos_token_id of generation_config.json",
    )


def solutions_too_long(facts: Facts) -> Finding | None:
    """The environment's own solutions do not fit into a completion."""
    if (warned := _warned(facts, "long_solutions")) is None:
        return None
    task = warned[0].partition("/")[2]
    return Finding(
        f"The solutions of task {task!r} are longer than a completion may be.",
        (
            warned[1].message,
            f"rollout.max_tokens = {facts.setting('rollout.max_tokens')}",
            f"{percent(_or_zero(facts.of(f'truncated/{task}').median))} of its rollouts are cut off",
        ),
        "raise rollout.max_tokens above the length of the longest solution",
    )


def tools_not_in_prompt(facts: Facts) -> Finding | None:
    """The chat template leaves out the tools."""
    if (warned := _warned(facts, "tools_unseen")) is None:
        return None
    task = warned[0].partition("/")[2]
    calls = facts.of(f"tool_calls/{task}")
    return Finding(
        f"The model does not see the tools of task {task!r}.",
        (
            warned[1].message,
            f"model.chat_template = {facts.setting('model.chat_template')!r}",
            f"tool calls of a rollout: {calls.mean:.3g}" if len(calls) else "no rollout called a tool",
        ),
        "set model.chat_template to a template that shows tools, or describe them in the prompts",
    )


def prompts_too_long(facts: Facts) -> Finding | None:
    """Some prompts do not fit into the model's positions."""
    if (warned := _warned(facts, "long_prompts")) is None:
        return None
    skipped = facts.of("buffer/skipped").most
    return Finding(
        "Some prompts are too long for any rollout, and are skipped.",
        (
            warned[1].message,
            f"{_or_zero(skipped):g} of {_or_zero(facts.of('buffer/dispatched').most):g} prompts were skipped",
            f"rollout.max_prompt_tokens = {facts.setting('rollout.max_prompt_tokens')}, rollout.max_tokens = "
            f"{facts.setting('rollout.max_tokens')}",
        ),
        "set rollout.max_prompt_tokens as the warning says, or lower rollout.max_tokens",
    )


def held_out_prompts_leaked(facts: Facts) -> Finding | None:
    """The run is validated with prompts that it trains on."""
    if (warned := _warned(facts, "leak", "near_leak")) is None:
        return None
    others = sum(name.startswith(("leak/", "near_leak/")) for name in facts.warnings)
    return Finding(
        "Held-out prompts are among the training prompts.",
        (
            warned[1].message,
            f"{others} pairs of a validation and a task are concerned",
            f"validation.prompts = {facts.setting('validation.prompts')}",
        ),
        "take the validation from another split (tasks.TASK.source.validation_split), or remove these rows "
        "(tasks.TASK.source.where)",
    )


def _or_zero(value: float) -> float:
    return value if value == value else 0.0
