"""Checkpoints: one consistent cut, written to a temporary directory and renamed; never a pickle.

    checkpoints/step-000120/
        manifest.json                 sha256 and size of each of the other files; written last
        trainer/ optimizer/           the trainer's own files (safetensors, JSON), and trainer/published.json:
                                      the weights as the engine of training held them
        pipeline.json                 buffer, prompts in flight, sampler
        pipeline.safetensors          tokens of the rollouts that wait to be trained, if any
        train_dataloader_TASK.json    position of each loader; of a plugin's dataloader its state, and the
                                      prompts in use
        trackers.json                 states of the trackers that have one, by name

Training waits only for the cut: the state of the pipeline, and the trainer's copy of its own state.  It
continues while they are written.  Weights that are not finite are refused.  A directory whose name ends in
``.partial`` was never finished.  A checkpoint is verified before use; a run resumes from the newest intact
one, and the damaged ones are reported with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import attrs
import numpy as np
from attrs import Factory, evolve, field, frozen
from cattrs.gen import make_dict_structure_fn, override
from numpy.typing import NDArray

from grpo_core._version import __version__
from grpo_core.config import TrainerConfig
from grpo_core.contracts import typed
from grpo_core.contracts.errors import CheckpointError, ConfigError, GrpoError, describe, wrong_input
from grpo_core.contracts.incidents import report
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment, Slot
from grpo_core.contracts.typed import Count
from grpo_core.data import states
from grpo_core.data.loaders import LookAhead
from grpo_core.data.samplers import PromptStream
from grpo_core.data.streams import Mark
from grpo_core.loop.buffer import Buffer, BufferStatistics
from grpo_core.loop.endings import Failure
from grpo_core.loop.schedule import KEYS as SCHEDULE
from grpo_core.loop.segments import segment_arrays, segments_of
from grpo_core.models.files import not_finite
from grpo_core.storage.disk import REPLACED, Disk, files, fingerprint, put, seal
from grpo_core.storage.published import Published

# ---------------------------------------------------------------------------------- its JSON files


@frozen(kw_only=True)
class SavedFile:
    """A file of the checkpoint."""

    sha256: str
    size: Count


@frozen(kw_only=True)
class SavedManifest:
    """``manifest.json``."""

    format: int
    step: Count
    files: Mapping[str, SavedFile]


@frozen(kw_only=True)
class SavedSlot:
    """A ``Slot`` with the task and the id of its prompt."""

    id: Count
    generation_version: Count
    target_version: Count
    attempts: Count
    prompt: tuple[str, str]


@frozen(kw_only=True)
class SavedBuffer:
    """``Buffer.state_dict()``."""

    step: Count
    dispatched: Count
    skipped: Count
    filtered: Count
    attempts: Count
    retrying: Sequence[SavedSlot]
    ready: Sequence[tuple[SavedSlot, Sequence[Rollout]]]


@frozen(kw_only=True)
class SavedRun:
    """Values that a later start of the run is compared with."""

    grpo_core: str = __version__
    fixed: Mapping[str, Any] = field(factory=dict)
    schedule: TrainerConfig = field(factory=TrainerConfig)
    """The keys on which the learning rate depends."""
    start: str = ""
    scores: Mapping[str, str] = field(factory=dict)
    files: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class SavedPipeline:
    """``pipeline.json``."""

    format: int
    step: Count
    buffer: SavedBuffer
    sampler: Any
    sampler_name: str
    validation: Mapping[str, tuple[str, Any]] = field(factory=dict)
    """Name and state of each strategy."""
    validated: int = field(default=Factory(lambda self: self.step, takes_self=True))
    goal: Mapping[str, float] = field(factory=dict)
    failure: Failure | None = None
    run: SavedRun = field(factory=SavedRun)


@frozen(kw_only=True)
class SavedPosition:
    """The position of rows by index, or of a stream."""

    prompts: Count = 0
    fingerprint: str = ""
    seed: Count = 0
    mark: Mark | None = None
    behind: Mark | None = None
    ahead: Sequence[Any] = ()
    since: Sequence[Any] = ()
    without: Sequence[str] = ()


@frozen(kw_only=True)
class SavedLoader:
    """``train_dataloader_TASK.json``, as ``grpo_core.data.states`` writes it."""

    dataloader: str
    rows: Count
    unfinished: Mapping[str, Any]
    position: SavedPosition


FORMAT = 10
_MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_ARRAYS = "pipeline.safetensors"
_TRACKERS = "trackers.json"
_APART = ("segments", "fault", "tools", "token_advantages")
"""Fields of a rollout that are stored elsewhere, or that a group without advantages or an error lacks."""
_STAMPS = ("id", "generation_version", "target_version", "attempts")
_NAME = re.compile(rf"step-(\d{{6,}})({re.escape(REPLACED)})?")


attrs.resolve_types(Rollout, localns={"NDArray": NDArray, "np": np})  # its module imports no numpy
_ROLLOUT = tuple(each.name for each in attrs.fields(Rollout) if each.name not in _APART)
_OMITTED: Any = dict.fromkeys(_APART, override(omit=True))
typed.converter().register_structure_hook(
    Rollout, make_dict_structure_fn(Rollout, typed.converter(), **_OMITTED)
)
typed.REQUIRED.update({Rollout: _ROLLOUT, TrainerConfig: SCHEDULE})


# ---------------------------------------------------------------------------------- writing


async def begin(
    parent: Path,
    *,
    step: int,
    pipeline: Mapping[str, Any],
    loaders: Mapping[str, Mapping[str, Any]],
    trackers: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    save_trainer: Callable[[Path], Awaitable[Callable[[], Awaitable[None]]]],
    published: Published | None = None,
    keep: int | None,
    spared: Callable[[Collection[int]], Collection[int]] = lambda steps: (),
    disk: Disk | None = None,
) -> Callable[[], Awaitable[Path]]:
    """Begin ``parent/step-NNNNNN``; return when training may continue.  The result writes the rest.

    The checkpoint is written completely or not at all; then all but the newest ``keep`` and those that
    ``spared`` names are removed, or none if ``keep`` is None.  Both functions raise CheckpointError, and
    leave older checkpoints untouched.

    Args:
        pipeline: the result of ``cut``.
        loaders: state of each loader, by task.
        trackers: waits for the states of the trackers, by name.
        save_trainer: ``Trainer.save`` of the trainer.
        published: what the engine of training held.
    """
    disk = disk or Disk()
    streams: dict[str, bytes] = {}
    for task, state in loaders.items():
        plain = states.packed(state, f"the state of the loader of task {task!r}")
        streams[_loader_file(task)] = as_json(plain)
    final = parent / f"step-{step:06d}"
    partial = final.with_name(final.name + _PARTIAL)

    async def failed(error: Exception) -> CheckpointError:
        return await disk.run(lambda: _failed(error, disk, partial))

    async def finish() -> Path:
        try:
            await written()
            await disk.run(lambda: _check_weights(partial))
            if published is not None:
                await disk.run(lambda: published.write(disk, partial / "trainer"))
            if trackers is not None and (tracked := await trackers()):
                streams[_TRACKERS] = as_json(tracked)
            await disk.run(lambda: _write(disk, partial, step, pipeline, streams))
            await disk.run(lambda: put(disk, partial, final))
        except (
            OSError,
            TypeError,
            ValueError,
            CheckpointError,
        ) as error:  # two of them: a value without JSON
            raise await failed(error) from error
        try:
            left = await disk.run(lambda: _tidy(disk, parent, step, keep, spared))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final}: it is complete, but newer ones, from before this run went back, "
                f"cannot be removed: {error}"
            ) from error
        if left is not None:
            report("not_removed", "checkpoint", f"old ones cannot be removed, and use disk space: {left}")
        return final

    try:
        await disk.run(lambda: disk.remove(partial))
        written = await save_trainer(partial)
    except OSError as error:
        raise await failed(error) from error
    return finish


def _check_weights(partial: Path) -> None:
    """Raise CheckpointError for weights that are not finite: they would replace good ones."""
    for path in sorted((partial / "trainer").rglob("*.safetensors")):
        if tensor := not_finite(path):
            raise CheckpointError(
                f"the weights are not finite: {tensor} in {path.relative_to(partial)} has NaN or an infinity"
            )


def _write(
    disk: Disk, partial: Path, step: int, pipeline: Mapping[str, Any], streams: Mapping[str, bytes]
) -> None:
    """Write everything but the trainer's files, and then the manifest."""
    disk.write(partial / "pipeline.json", as_json({"format": FORMAT, "step": step, **pipeline}))
    mode = (partial / "pipeline.json").stat().st_mode
    if ready := pipeline.get("buffer", {}).get("ready"):
        disk.write(partial / _ARRAYS, segments_as_bytes(ready))
    for name, state in streams.items():
        disk.write(partial / name, state)
    for path in files(partial):
        path.chmod(mode)  # safetensors makes files that only their owner may read
    manifest = {"format": FORMAT, "step": step, "files": seal(disk, partial)}
    disk.write(partial / _MANIFEST, as_json(manifest))
    disk.sync(partial / _MANIFEST)
    disk.sync(partial)


def _tidy(
    disk: Disk,
    parent: Path,
    step: int,
    keep: int | None,
    spared: Callable[[Collection[int]], Collection[int]],
) -> OSError | None:
    """Remove checkpoints that are too old, were never finished, or are newer than the step.

    Newer ones remain when a run resumes from an older one.  Raises OSError if one of these cannot be removed,
    because a resume would choose it as the newest.  Returns the last error of the others, which only take
    space: a file system may keep a file that is open.
    """
    failed: OSError | None = None
    complete = complete_names(parent)
    newer = [path for at, path in complete if at > step]
    kept = spared({at for at, _ in complete if at <= step})
    old = [] if keep is None else [(at, path) for at, path in complete if at <= step][:-keep]
    for path in newer:
        disk.remove(path)
    for path in (*(path for at, path in old if at not in kept), *parent.glob(f"step-*{_PARTIAL}")):
        try:
            disk.remove(path)
        except OSError as error:
            failed = error
    disk.sync(parent)  # otherwise a power cut could bring a newer checkpoint back
    return failed


def _failed(error: Exception, disk: Disk, partial: Path) -> CheckpointError:
    """Remove the partial directory, since space may be short, and return the error to raise."""
    written = sum(path.stat().st_size for path in files(partial))
    with contextlib.suppress(OSError):  # the error that is raised comes from the same disk
        disk.remove(partial)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    why = (error.strerror or error) if isinstance(error, OSError) else describe(error)
    text = f"checkpoint {final}: cannot be written: {why}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(final.parent).free
        text += f" ({written:,} bytes were written, {free:,} are free now); make room and --resume"
    return CheckpointError(text + "; the checkpoints before it are untouched")


def as_json(value: Any) -> bytes:
    """Convert records, mappings and sequences to JSON values."""
    return json.dumps(
        value, allow_nan=False, check_circular=False, separators=(",", ":"), default=_plain
    ).encode()


def _plain(value: Any) -> Any:
    """Replace prompts by task and id (answers may be any object), and leave out the segments of rollouts."""
    match value:
        case Slot(prompt=Prompt() as prompt):
            return {name: getattr(value, name) for name in _STAMPS} | {
                "prompt": [prompt.environment, prompt.id]
            }
        case Group():
            return value.rollouts
        case Rollout():
            return {name: getattr(value, name) for name in _ROLLOUT}
        case Mapping():
            return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be saved as JSON: {value!r}")


def segments_as_bytes(ready: Iterable[tuple[Slot[Prompt], Group]]) -> bytes:
    """Return the contents of ``pipeline.safetensors``."""
    from safetensors.numpy import save

    data: bytes = save(segment_arrays([rollout for _, group in ready for rollout in group.rollouts]))
    return data


def _loader_file(task: str, *, safe: str = "") -> str:
    return f"train_dataloader_{quote(task, safe=safe)}.json"


# ---------------------------------------------------------------------------------- reading


@frozen(kw_only=True)
class IntactCheckpoint:
    """A checkpoint whose files are all intact."""

    directory: Path
    step: int
    passed_over: tuple[str, ...]
    """Why newer ones cannot be used."""


def complete_names(parent: Path) -> list[tuple[int, Path]]:
    """Return steps and directories of the finished checkpoints, oldest first; they are not verified."""
    found = [(_NAME.fullmatch(path.name), path) for path in parent.glob("step-*") if path.is_dir()]
    complete = [(int(match[1]), path) for match, path in found if match]
    return sorted(complete, key=lambda item: (item[0], not item[1].name.endswith(REPLACED)))


def newest(parent: Path) -> IntactCheckpoint | None:
    """Return the newest checkpoint whose files are all intact, or None if there is no checkpoint.

    Raises CheckpointError if there are checkpoints but all are damaged.
    """
    passed_over = [f"{path.name}: was never finished" for path in sorted(parent.glob(f"step-*{_PARTIAL}"))]
    for step, directory in reversed(complete_names(parent)):
        reason = fault(directory)
        if reason is None:
            return IntactCheckpoint(directory=directory, step=step, passed_over=tuple(passed_over))
        passed_over.append(f"{directory.name}: {reason}")
    if not complete_names(parent):
        return None
    raise CheckpointError(f"{parent}: no checkpoint can be used:\n    " + "\n    ".join(passed_over))


def choose_checkpoint(run: Path, step: int | None = None) -> IntactCheckpoint:
    """Return a checkpoint of a run; without a step the newest one that is intact.

    Raises ConfigError if there is none, CheckpointError if it is damaged.
    """
    if step is None:
        if (found := newest(run / "checkpoints")) is None:
            raise ConfigError(f"{run}: has no checkpoint yet")
        return found
    there = dict(complete_names(run / "checkpoints"))
    if step not in there:
        known = ", ".join(map(str, there)) or "none"
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {known}")
    if (wrong := fault(there[step])) is not None:
        raise CheckpointError(f"{there[step]}: {wrong}; choose another step")
    return IntactCheckpoint(directory=there[step], step=step, passed_over=())


def fault(directory: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None if all its files are intact."""
    try:
        for path in (directory, *directory.rglob("*")):
            if path.is_symlink():  # the run writes none, and its target is not the run's
                name = directory.name if path == directory else path.relative_to(directory)
                return f"{name} is a symbolic link; put the original in its place"
        manifest = typed.read(directory / _MANIFEST, SavedManifest)
        if manifest.format != FORMAT:
            return f"written in format {manifest.format}, this version reads format {FORMAT}"
        there = {str(path.relative_to(directory)) for path in files(directory)}
        for name, expected in manifest.files.items():
            if name not in there:
                return f"{name} is missing"
            if fingerprint(directory / name) != attrs.asdict(expected):
                return f"{name} has changed since it was written (its sha256 differs)"
    except OSError as error:
        name = Path(error.filename).relative_to(directory) if error.filename else _MANIFEST
        return f"{name} cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        return str(error)
    return None


def manifest_digest(directory: Path) -> str:
    """Return the sha256 of a checkpoint's manifest, which names all its files; empty if there is none."""
    path = directory / _MANIFEST
    return str(fingerprint(path)["sha256"]) if path.is_file() else ""


def read_step(directory: Path) -> int:
    """Return the step that an intact checkpoint's manifest names."""
    return typed.read(directory / _MANIFEST, SavedManifest).step


def read_pipeline(directory: Path) -> SavedPipeline:
    return typed.read(directory / "pipeline.json", SavedPipeline)


def read_trackers(directory: Path) -> Mapping[str, Any]:
    """Return the states of the trackers, by name."""
    path = directory / _TRACKERS
    return typed.read(path, dict[str, Any]) if path.exists() else {}


def read_loaders(directory: Path) -> dict[str, Mapping[str, Any]]:
    """Return the state of each loader, by task."""
    found = {}
    for file in directory.glob(_loader_file("*", safe="*")):
        task = unquote(file.name.removeprefix("train_dataloader_").removesuffix(".json"))
        values, _ = typed.read_both(file, SavedLoader)
        found[task] = states.unpacked(values)
    return found


# ---------------------------------------------------------------------------------- a cut, and back


class Stateful(Protocol):
    """A part with a state of JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a state; return messages about what changed since."""


def snapshot(
    buffer: Buffer[Prompt, Group],
    stream: PromptStream,
    validation: Stateful | None = None,
    failure: Failure | None = None,
) -> dict[str, Any]:
    """Return the contents of ``pipeline.json`` as of now: immutable records and copies."""
    return {
        "buffer": buffer.state_dict(),
        "sampler": stream.state_dict(),
        "sampler_name": stream.name,
        **({} if validation is None else {"validation": validation.state_dict()}),
        **({} if failure is None else {"failure": attrs.asdict(failure)}),
    }


def loader_states(loaders: Mapping[str, LookAhead], buffer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state of each loader, by task, at the cut of a buffer (its ``state_dict``)."""
    slots: list[Slot[Prompt]] = [*buffer["retrying"], *(slot for slot, _ in buffer["ready"])]
    unfinished: dict[str, dict[int, Prompt]] = {task: {} for task in loaders}
    for slot in slots:
        if slot.prompt is not None and slot.prompt.environment in unfinished:
            unfinished[slot.prompt.environment][slot.id] = slot.prompt
    return {task: loader.state_dict(unfinished[task]) for task, loader in loaders.items()}


def restore(
    directory: Path,
    buffer: Buffer[Prompt, Group],
    loaders: Mapping[str, LookAhead],
    stream: PromptStream,
    validation: Stateful | None = None,
) -> list[str]:
    """Continue from a checkpoint; return messages about tasks, samplers and strategies that have changed.

    A new task starts at the beginning of its stream, and a new sampler without a state.  A task may be
    removed unless prompts of it are unfinished.  Raises CheckpointError in that case, if a task's prompts
    differ from the checkpoint's, and if the files have invalid contents.
    """
    with reading(directory):
        state = read_pipeline(directory)
        saved = read_loaders(directory)
        messages = _compare_tasks(directory, set(loaders), set(saved), state.buffer)
        for task, loader in loaders.items():
            if task in saved:
                loader.load_state_dict(saved[task])
        if (drew := state.sampler_name) == stream.name:
            stream.load_state_dict(state.sampler)
        else:
            messages.append(f"sampler {stream.name!r} is new since the checkpoint, which is of {drew!r}")
        segments = read_segments(directory / _ARRAYS, state.buffer)
        load_buffer(buffer, state.buffer, segments, lambda task, *slot: loaders[task].prompt(*slot))
        if validation is not None:
            messages += validation.load_state_dict(state.validation)
    return messages


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Raise any error from using a checkpoint's contents as CheckpointError, as wrong input."""
    with wrong_input():
        try:
            yield
        except GrpoError:
            raise
        except Exception as error:  # its files may hold anything that has their checksums
            raise CheckpointError(
                f"{directory}: its contents cannot be used ({type(error).__name__}: {error}), although its "
                "files match its manifest: another program or version wrote it. Remove it to continue "
                "from the checkpoint before"
            ) from error


def _compare_tasks(directory: Path, tasks: set[str], saved: set[str], buffer: SavedBuffer) -> list[str]:
    """Return messages about added and removed tasks.  Raises CheckpointError if prompts are left over."""
    prompts = [slot.prompt for slot in (*buffer.retrying, *(slot for slot, _ in buffer.ready))]
    for gone in sorted({task for task, _ in prompts} - tasks):
        ids = [repr(id) for task, id in prompts if task == gone]
        more = ", ..." if len(ids) > 10 else ""
        raise CheckpointError(
            f"{directory}: task {gone!r} is no longer part of the run, but {len(ids)} of its prompts are in "
            f"flight or wait to be trained: {', '.join(ids[:10])}{more}; keep the task with weight = 0 until "
            "they are trained, or start a new run"
        )
    return [
        *(
            f"task {new!r} is new since the checkpoint; it starts with its first prompt"
            for new in sorted(tasks - saved)
        ),
        *(f"task {gone!r} of the checkpoint is no longer part of the run" for gone in sorted(saved - tasks)),
    ]


# ---------------------------------------------------------------------------------- the buffer


def load_buffer(
    buffer: Buffer[Prompt, Group],
    state: SavedBuffer,
    segments: Iterable[Sequence[Segment]],
    prompt: Callable[[str, str, int], Prompt],
) -> None:
    """Load a saved state into a buffer.

    Args:
        segments: the segments of each rollout that waits to be trained.
        prompt: looks a prompt up by its task, its id and its slot.
    """

    def slot(saved: SavedSlot) -> Slot[Prompt]:
        stamps = {name: getattr(saved, name) for name in _STAMPS}
        return Slot(**stamps, prompt=prompt(*saved.prompt, saved.id))

    ready, each = [], iter(segments)
    for saved, rollouts in state.ready:
        full = slot(saved)
        assert full.prompt is not None
        group = Group(
            prompt=full.prompt,
            rollouts=tuple(evolve(rollout, segments=next(each)) for rollout in rollouts),
            generation_version=full.generation_version,
            target_version=full.target_version,
            slot=full.id,
        )
        ready.append((full, group))
    retrying = [slot(saved) for saved in state.retrying]
    buffer.load_state_dict({**attrs.asdict(state, recurse=False), "retrying": retrying, "ready": ready})


def read_segments(path: Path, state: SavedBuffer) -> list[list[Segment]]:
    """Return the segments of each rollout that waits to be trained; the file exists only if there are any."""
    from safetensors.numpy import load_file

    number = sum(len(rollouts) for _, rollouts in state.ready)
    return segments_of(load_file(path), number) if number else []


def statistics(state: SavedBuffer, prompts_per_step: int) -> BufferStatistics:
    """Return the counts of a buffer's saved state."""
    return BufferStatistics(
        reserved=0,
        in_flight=0,
        retrying=len(state.retrying),
        ready=len(state.ready),
        trained=state.step * prompts_per_step,
        dispatched=state.dispatched,
        skipped=state.skipped,
        filtered=state.filtered,
        attempts=state.attempts,
    )
