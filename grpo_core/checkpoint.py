"""Checkpoints: one consistent cut, written beside and renamed; no pickle, ever.

    checkpoints/step-000120/
        manifest.json                 sha256 and size of each of the other files; written last
        trainer/ optimizer/           the trainer's own files (safetensors, JSON)
        pipeline.json                 buffer, prompts in flight, sampler
        train_dataloader_TASK.json    position of each loader

A directory whose name ends in ``.partial`` was never finished.  A complete one is verified before it is
used; the newest that holds is taken, and the others are named with the reason.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import cattrs
from attrs import asdict, frozen

from grpo_core.buffer import Buffer, Slot
from grpo_core.errors import CheckpointError
from grpo_core.loaders import TaskLoader
from grpo_core.protocols import Sampler
from grpo_core.records import Group, Prompt, Rollout

FORMAT = 1
_MANIFEST = "manifest.json"
_REPLACED = ".replaced"
_NAME = re.compile(rf"step-(\d{{6,}})({_REPLACED})?")


# ---------------------------------------------------------------------------------- writing


class Storage(Protocol):
    """Where checkpoints are written.  What a method did survives a power cut when it has returned."""

    async def write(self, path: Path, data: bytes) -> None:
        """A new file, with the directories above it."""
        ...

    async def fingerprints(self, directory: Path) -> dict[str, dict[str, Any]]:
        """sha256 and size of each file below, by relative name; whoever wrote them need not have synced."""
        ...

    async def rename(self, partial: Path, final: Path) -> None:
        """Replaces ``final``."""
        ...


class Disk:
    """The file system, in threads."""

    async def write(self, path: Path, data: bytes) -> None:
        await asyncio.to_thread(write_file, path, data)

    async def fingerprints(self, directory: Path) -> dict[str, dict[str, Any]]:
        return await asyncio.to_thread(fingerprints, directory)

    async def rename(self, partial: Path, final: Path) -> None:
        await asyncio.to_thread(rename, partial, final)


async def write(
    parent: Path,
    *,
    step: int,
    pipeline: Mapping[str, Any],
    loaders: Mapping[str, Mapping[str, Any]],
    save_trainer: Callable[[Path], Awaitable[None]],
    keep: int,
    storage: Storage | None = None,
) -> Path:
    """Write ``parent/step-NNNNNN`` completely or not at all, then remove all but the newest ``keep``.

    ``pipeline`` and ``loaders`` are the state at the cut; they are on the way before the first await.
    Raises CheckpointError; what was there before is then untouched.
    """
    storage = storage or Disk()
    final = parent / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    states = {"pipeline.json": _json({"format": FORMAT, "step": step, **pipeline})}
    states |= {_loader_file(task): _json(dict(state)) for task, state in loaders.items()}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, state in states.items():
            await storage.write(partial / name, state)
        await save_trainer(partial)
        manifest = {"format": FORMAT, "step": step, "files": await storage.fingerprints(partial)}
        await storage.write(partial / _MANIFEST, _json(manifest))
        await storage.rename(partial, final)
    except BaseException as error:
        written = sum(path.stat().st_size for path in _files(partial))
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(_explain(error, final, written)) from error
        raise
    for _, old in complete_names(parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fingerprints(directory: Path) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(directory)): _fingerprint(path) for path in _files(directory)}


def rename(partial: Path, final: Path) -> None:
    _sync_directory(partial)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():  # saved again, by a run that was stopped before its next step
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _explain(error: OSError, final: Path, written: int) -> str:
    text = f"checkpoint {final}: cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(final.parent).free
        text += f" ({written:,} bytes were written, {free:,} are free now); make room and --resume"
    return text + "; the checkpoints before it are untouched"


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"sha256": digest, "size": path.stat().st_size}


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _loader_file(task: str, *, safe: str = "") -> str:
    return f"train_dataloader_{quote(task, safe=safe)}.json"


# ---------------------------------------------------------------------------------- reading


@frozen(kw_only=True)
class Found:
    """The newest checkpoint that holds, and why newer ones were passed over."""

    directory: Path
    step: int
    passed_over: tuple[str, ...]


def complete_names(parent: Path) -> list[tuple[int, Path]]:
    """Steps and directories of the checkpoints that were finished, oldest first; not verified."""
    found = [(_NAME.fullmatch(path.name), path) for path in parent.glob("step-*") if path.is_dir()]
    complete = [(int(match[1]), path) for match, path in found if match]
    return sorted(complete, key=lambda item: (item[0], not item[1].name.endswith(_REPLACED)))


def newest(parent: Path) -> Found | None:
    """The newest checkpoint whose every file is what was written; None if there is none at all.

    Raises CheckpointError if there are checkpoints but none of them holds.
    """
    passed_over = [f"{path.name}: was never finished" for path in sorted(parent.glob("step-*.partial"))]
    for step, directory in reversed(complete_names(parent)):
        fault = _fault(directory)
        if fault is None:
            return Found(directory=directory, step=step, passed_over=tuple(passed_over))
        passed_over.append(f"{directory.name}: {fault}")
    if not complete_names(parent):
        return None
    raise CheckpointError(f"{parent}: no checkpoint can be used:\n    " + "\n    ".join(passed_over))


def _fault(directory: Path) -> str | None:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"written in format {manifest['format']}, this version reads format {FORMAT}"
        for name, expected in manifest["files"].items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if _fingerprint(path) != expected:
                return f"{name} is not what was written (its sha256 differs)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return None


def read_pipeline(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / "pipeline.json").read_text(encoding="utf-8"))
    return state


def read_loader(directory: Path, task: str) -> dict[str, Any] | None:
    """The loader's state, or None if the task was not part of the run."""
    path = directory / _loader_file(task)
    if not path.exists():
        return None
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


# ---------------------------------------------------------------------------------- a cut, and back


def cut(buffer: Buffer[Prompt, Group], sampler: Sampler) -> dict[str, Any]:
    """What ``pipeline.json`` holds, as of now."""
    state = sampler.state_dict() if hasattr(sampler, "state_dict") else None
    return {"buffer": dump_buffer(buffer), "sampler": state}


def restore(
    directory: Path, buffer: Buffer[Prompt, Group], loaders: Mapping[str, TaskLoader], sampler: Sampler
) -> list[str]:
    """Continue from a checkpoint; returns what the user should know of tasks that came or went.

    A task that is new begins at its beginning.  One that is gone takes its stream along, unless prompts of it
    are unfinished.  Raises CheckpointError then, and if a task's prompts are not those of the checkpoint.
    """
    state = read_pipeline(directory)
    told = _compare_tasks(directory, loaders, state["buffer"])
    for task, loader in loaders.items():
        saved = read_loader(directory, task)
        if saved is not None:
            loader.load_state_dict(saved)
    if state["sampler"] is not None and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state["sampler"])

    load_buffer(buffer, state["buffer"], lambda task, id: loaders[task].prompt(id))
    return told


def _compare_tasks(directory: Path, tasks: Iterable[str], buffer: Mapping[str, Any]) -> list[str]:
    """What to say of tasks that came or went.  Raises CheckpointError if one left prompts behind."""
    tasks, names = set(tasks), (file.name for file in directory.glob(_loader_file("*", safe="*")))
    saved = {unquote(name.removeprefix("train_dataloader_").removesuffix(".json")) for name in names}
    slots = [*buffer["again"], *(slot for slot, _ in buffer["ready"])]
    for gone in sorted({slot["prompt"][0] for slot in slots} - tasks):
        ids = [repr(slot["prompt"][1]) for slot in slots if slot["prompt"][0] == gone]
        more = ", ..." if len(ids) > 10 else ""
        raise CheckpointError(
            f"{directory}: task {gone!r} is no longer part of the run, but {len(ids)} of its prompts are in "
            f"flight or wait to be trained: {', '.join(ids[:10])}{more}; keep the task with weight = 0 until "
            "they are trained, or start a new run"
        )
    return [
        *(
            f"task {new!r} is new since the checkpoint; it starts at its beginning"
            for new in sorted(tasks - saved)
        ),
        *(f"task {gone!r} of the checkpoint is no longer part of the run" for gone in sorted(saved - tasks)),
    ]


# ---------------------------------------------------------------------------------- the buffer as JSON


def dump_buffer(buffer: Buffer[Prompt, Group]) -> dict[str, Any]:
    """The buffer's state; prompts by task and id, since their answers may be anything."""
    state = buffer.state_dict()
    return {
        **state,
        "again": [_dump_slot(slot) for slot in state["again"]],
        "ready": [
            [_dump_slot(slot), [asdict(rollout) for rollout in group.rollouts]]
            for slot, group in state["ready"]
        ],
    }


def load_buffer(
    buffer: Buffer[Prompt, Group], state: Mapping[str, Any], prompt: Callable[[str, str], Prompt]
) -> None:
    """Put what ``dump_buffer`` gave into a buffer; ``prompt(task, id)`` finds prompts again."""

    def slot(dumped: Mapping[str, Any]) -> Slot[Prompt]:
        task, id = dumped["prompt"]
        return Slot(**{**dumped, "prompt": prompt(task, id)})

    ready = []
    for dumped, rollouts in state["ready"]:
        full = slot(dumped)
        assert full.prompt is not None
        group = Group(
            prompt=full.prompt,
            rollouts=tuple(_converter().structure(rollout, Rollout) for rollout in rollouts),
            generation_version=full.generation_version,
            target_version=full.target_version,
            slot=full.id,
        )
        ready.append((full, group))
    buffer.load_state_dict({**state, "again": [slot(dumped) for dumped in state["again"]], "ready": ready})


def _dump_slot(slot: Slot[Prompt]) -> dict[str, Any]:
    assert slot.prompt is not None
    return {
        "id": slot.id,
        "generation_version": slot.generation_version,
        "target_version": slot.target_version,
        "attempts": slot.attempts,
        "prompt": [slot.prompt.environment, slot.prompt.id],
    }


@cache
def _converter() -> cattrs.Converter:
    return cattrs.Converter()
