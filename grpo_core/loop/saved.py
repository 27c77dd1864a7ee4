"""The contents of a checkpoint's JSON files."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from grpo_core.contracts.typed import Count


class SavedFile(TypedDict):
    """A file of the checkpoint."""

    sha256: str
    size: Count


class SavedManifest(TypedDict):
    """``manifest.json``."""

    format: int
    step: Count
    files: dict[str, SavedFile]


class SavedSlot(TypedDict):
    """A ``Slot`` with the task and the id of its prompt."""

    id: Count
    generation_version: Count
    target_version: Count
    attempts: Count
    prompt: tuple[str, str]


class SavedMessage(TypedDict):
    """A message; what an environment or a tool adds may have any type."""

    role: str


class SavedRollout(TypedDict):
    """A ``Rollout`` without its segments."""

    messages: list[SavedMessage]
    reward: float | None
    success: bool | None
    metrics: dict[str, float]
    left_out: dict[str, str]
    turn_rewards: list[float]
    turn_tokens: list[Count]
    turn_states: list[str]
    answer: str | None
    turns: Count
    tool_calls: Count
    train: bool
    seed: Count
    advantage: float | None
    token_advantages: None
    trained: bool
    finish_reason: str
    error: str | None
    lost: bool


class SavedBuffer(TypedDict):
    """``Buffer.state_dict()``."""

    step: Count
    dispatched: Count
    skipped: Count
    filtered: Count
    attempts: Count
    retrying: list[SavedSlot]
    ready: list[tuple[SavedSlot, list[SavedRollout]]]


class SavedSchedule(TypedDict):
    """The keys of ``[trainer]`` on which the learning rate depends."""

    steps: Count
    epochs: float
    updates_per_step: Count
    lr: float
    lr_schedule: str
    lr_end: float
    warmup_updates: Count


class SavedRun(TypedDict, total=False):
    """Values that a later start of the run is compared with."""

    grpo_core: str
    fixed: dict[str, Any]
    schedule: SavedSchedule
    start: str
    teacher: str
    files: dict[str, str]


class SavedStrategy(TypedDict):
    """A validation strategy."""

    strategy: str
    state: Any


class SavedFailure(TypedDict):
    """A ``Failure``."""

    error: str
    proved: Count | None


class SavedPipeline(TypedDict):
    """``pipeline.json``."""

    format: int
    step: Count
    buffer: SavedBuffer
    sampler: Any
    sampler_name: NotRequired[str]
    validation: NotRequired[dict[str, SavedStrategy]]
    measured: NotRequired[int]
    goal: NotRequired[dict[str, float]]
    failure: NotRequired[SavedFailure]
    run: NotRequired[SavedRun]


class SavedMark(TypedDict):
    """A ``Mark`` of a stream."""

    row: Count
    epoch: Count
    of_epoch: Count
    own: Any


class SavedPosition(TypedDict, total=False):
    """The position of rows by index, or of a stream."""

    prompts: Count
    fingerprint: str
    seed: Count
    mark: SavedMark
    behind: SavedMark
    ahead: list[Any]
    since: list[Any]
    without: list[str]


class SavedLoader(TypedDict):
    """``train_dataloader_TASK.json``, as ``grpo_core.data.states`` writes it."""

    dataloader: str
    rows: Count
    unfinished: dict[str, Any]
    position: SavedPosition
