"""The events of a run, as trackers receive them: frozen records of plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from grpo_core.contracts.errors import Fault
    from grpo_core.contracts.records import Group, Prompt, Slot, StateDigest


@frozen(kw_only=True)
class Event:
    """Base of all events."""

    step: int = 0
    time: float = 0.0
    """Time of the event in seconds since 1970; 0 until the trackers receive it."""


@frozen(kw_only=True)
class StatusChanged(Event):
    """The run begins another activity, or has continued one, described for people: "loading the model"."""

    message: str
    part: float | None = None
    """Share of the activity that is done, if it is known."""


@frozen(kw_only=True)
class LineShown(Event):
    """A tracker has a line for the terminal, which replaces the one that it named so before; not recorded."""

    name: str
    text: str


@frozen(kw_only=True)
class StageBegan(Event):
    """The loop enters another stage; recorded only in ``timeline.jsonl``, as a span of the loop."""

    stage: str


@frozen(kw_only=True)
class RunStarted(Event):
    """The run has started: all its parts are ready."""

    directory: str
    config: Mapping[str, Any]
    resumed: bool = False
    buffer: Mapping[str, int] = field(factory=dict)
    """Statistics of the buffer, as a resumed run found them in its checkpoint."""
    manifest: str = ""
    """Digest of the manifest of the checkpoint that a resumed run continues from."""
    validated: int = -1
    """The newest version that was validated before the run started or its checkpoint was written."""


@frozen(kw_only=True)
class Dispatched(Event):
    """Slots whose prompts go to the engine, for the first time or, with ``attempts``, again."""

    slots: tuple[Slot[Prompt], ...]


@frozen(kw_only=True)
class PromptsPassedOver(Event):
    """A sampler looked at the next prompts of a task and passed some over; the others are dispatched next."""

    task: str
    size: int
    """Number of prompts in an epoch of the task."""
    offered: tuple[int, ...]
    """Places in the task's data of the prompts that the sampler looked at, in the order of the epoch."""
    drawn: tuple[str, ...]
    """Ids of the prompts that the sampler returned."""
    passed_over: tuple[tuple[int, str], ...]
    """Place of each prompt that was passed over, and the reason."""


@frozen(kw_only=True)
class GroupFinished(Event):
    """All rollouts of a prompt have a reward; the group waits to be trained."""

    slot: int
    task: str
    prompt: str


@frozen(kw_only=True)
class GroupFiltered(Event):
    """A group is not trained, because a filter has rejected it (``dynamic_sampling``, ``[filters]``)."""

    slot: int
    task: str
    prompt: str
    reward: float
    """Mean reward of its rollouts."""
    filter: str = ""
    """Name of the filter; "equal_rewards" for dynamic sampling."""
    reason: str = ""
    """The reason that the filter returned."""


@frozen(kw_only=True)
class GroupsReturned(Event):
    """The run fails, and these groups cannot be trained: a resumed run generates them again.

    They belong to an unfinished step, or their tokens are lost.
    """

    slots: tuple[int, ...]


@frozen(kw_only=True)
class GroupsReady(Event):
    """The groups that the next step trains, in the order in which they were dispatched."""

    groups: tuple[Group, ...]


@frozen(kw_only=True)
class PromptSkipped(Event):
    """A prompt whose attempts are used up."""

    task: str
    prompt: str
    error: str
    slot: int = -1
    fault: Fault | None = None
    """The exception of its environment's code in the last attempt."""


@frozen(kw_only=True)
class StepEnded(Event):
    """The end of a step; ``step`` is the version that it made."""

    metrics: Mapping[str, float]
    digest: StateDigest | None = None
    """Fingerprints of the step's result, which ``grpo-core replay`` compares; None if there are none."""


LOOP = "loop"
"""Lane of the loop's stages."""


@frozen(kw_only=True)
class Span:
    """A span of a run's time in which a component worked."""

    lane: str
    """The component: "loop", "trainer", "sync", "validation", "engine", or "environment TASK"."""
    what: str
    begin: float
    """Seconds on the clock of the event loop."""
    end: float
    busy: float
    """Seconds in which at least one call was running; a span includes short gaps."""
    calls: int = 1
    """Number of calls that began in it."""
    seconds: float = 0.0
    """Total seconds of its calls: more than ``busy`` if several ran at the same time."""


@frozen(kw_only=True)
class TimelineExtended(Event):
    """``timeline.jsonl`` has the spans since the last event of this kind."""

    spans: tuple[Span, ...]
    now: float
    """Time of the event on the clock of the spans."""


@frozen(kw_only=True)
class Synced(Event):
    """The engine holds the weights of version ``step``."""

    unproved: int = 0
    """Number of weight syncs since the canary last proved that the engine uses new weights; 0: this one."""


@frozen(kw_only=True)
class ValidationPlayed(Event):
    """The rollouts of a validation, grouped by prompt; its ``Validated`` follows."""

    version: int
    groups: tuple[Group, ...]


@frozen(kw_only=True)
class Validated(Event):
    """The results of a validation: ``{task: {metric: number}}``."""

    version: int
    results: Mapping[str, Mapping[str, float]]


@frozen(kw_only=True)
class Saving(Event):
    """The state that the checkpoint of ``step`` will hold is fixed; ``Saved`` may follow some steps later."""

    reason: str = ""
    """Why the run ends at once, if it does; the engine may then hold older weights."""


@frozen(kw_only=True)
class Saved(Event):
    """A checkpoint is complete."""

    directory: str


@frozen(kw_only=True)
class WarningRaised(Event):
    """A metric is beyond its soft limit, or something will keep the run from learning.

    The first kind is repeated for each such step; the second kind is raised at the start.
    """

    cause: str
    """The metric, or a name of the cause."""
    message: str
    fault: Fault | None = None
    """The exception of an author's code, such as a tracker's."""


IncidentKind = Literal[
    "batch_failed",  # a batch failed while its parts, tried one by one, succeeded
    "call_failed",  # a call of an environment failed
    "deadline",  # a call took too long, and was cancelled, or its process was killed
    "died",  # a process ended by itself
    "replaced",  # an engine of a pool was replaced
    "given_up",  # an engine of a pool is not replaced any more
    "retried",  # a request or a call was made again
    "session_lost",  # a session died with its process
    "doubted",  # an engine's answers to a canary were wrong, and right on a second call
    "late",  # an engine of a pool did not take new weights in the time that the others needed
    "rollouts_late",  # rollouts were not finished within rollout.deadline, and are played again
    "rollouts_lost",  # an engine did not finish rollouts, and they are played again
    "rollouts_orphaned",  # the sessions of rollouts ended with their process, and they are played again
    "unscored",  # rollouts have no reward, and are played again
    "skipped",  # the attempts of a prompt are used up
    "agent_option",  # an agent requested sampling that the run does not do
    "passed_over",  # a checkpoint was never finished or is damaged, and an older one is used
    "control_in_text",  # a text within a rollout spells a control token, and cannot be kept apart from it
    "textless",  # the model sampled a token for which its tokenizer has no text
    "not_removed",  # an old checkpoint cannot be removed
    "unavailable",  # a service does not answer; its callers wait and try again
    "available",  # it answers again
]
"""Kinds of what a run survives."""


@frozen(kw_only=True)
class IncidentReported(Event):
    """Something went wrong, and the run survived it; see ``grpo_core.contracts.incidents``."""

    kind: IncidentKind
    component: str
    message: str
    fault: Fault | None = None
    """The exception of an author's code that was survived."""
    count: int = 1
    """Number of incidents of this kind and component that the event stands for; ``message`` is from the last
    one."""


@frozen(kw_only=True)
class ErrorRaised(Event):
    """The error that ends the run."""

    message: str
    fault: Fault | None = None
    """The exception of an author's code behind it, or the error itself, with its traceback."""


@frozen(kw_only=True)
class RunEnded(Event):
    """The end of the run, for any reason; the last event."""

    reason: str
    """"finished", "interrupted", or "failed"."""
