"""Selects rollouts of a run for its report, and packs them for the page's browser of rollouts.

The size of a page is bounded.  Some steps are read, spread evenly over the run, and from each the groups
whose prompts come first in an order that is the same in all steps, so that a prompt can be compared between
steps.  The newest step and validation get more space, and start with the best and the worst rollout of each
task.
"""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attrs import define, field

from grpo_core import Run
from grpo_core.contracts.errors import shortened
from grpo_core.processes.secrets import inert
from grpo_core.text import thoughts
from grpo_plugin_report.values import is_number, table, tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Row = Mapping[str, Any]
Pieces = dict[str, int]
"""The indices of the different token texts of a page, in their order."""
_Sized = tuple[dict[str, Any], list[int], int]
"""A group of the page, the indices of its rollouts in their file, and its size in bytes."""

MOST_FILES = {"rollouts": 200, "validation": 50}
"""Largest number of steps, and of validations, to read."""
MOST_ROLLOUTS = 4096
"""Largest number of rollouts of a step to read."""
MOST_BYTES = 16_000_000
"""Largest number of bytes of text files to read; fewer steps are read if their files are large."""
TEXT_ROOM, TOKEN_ROOM = 1_100_000, 600_000
"""Bytes of the page for texts, and for tokens."""
NEWEST = 8
"""Fraction of the space, as 1 / NEWEST, for the newest step and the newest validation."""
LEAST = 4
"""Smallest number of rollouts that a step should have space for; fewer steps are read otherwise."""
LONGEST = 12_000
"""Largest number of characters of a message; longer ones are cut in the middle."""
MOST_PIECES = 2**16
"""Largest number of different tokens: a token is a 16-bit index into a list of texts."""


@define
class Selection:
    """The rollouts of a page as JSON values, and counts of what was left out."""

    groups: list[dict[str, Any]] = field(factory=list)
    pieces: Pieces = field(factory=dict)
    kept: int = 0
    seen: int = 0
    """Number of rollouts in the files read."""
    files: int = 0
    of_files: int = 0
    tokens: int = 0
    """Number of rollouts with their tokens."""

    def rule(self) -> str:
        """Return a sentence about the selection."""
        if not self.kept:
            return ""
        kept = f"{self.kept:,}"
        if self.files < self.of_files:
            text = f"{kept} rollouts of {self.files:,} of the {self.of_files:,} stored steps and validations"
            text += ", evenly spread, those of the same prompts"
        elif self.kept < self.seen:
            text = f"{kept} of the {self.seen:,} stored rollouts, those of the same prompts where they fit"
        else:
            text = f"All {kept} stored rollouts"
        if self.tokens < self.kept:
            text += f"; {self.tokens:,} of them with their tokens" if self.tokens else "; without tokens"
        if self.kept < self.seen or self.files < self.of_files:
            text += "; the run's folders rollouts and validation have all"
        return f"{text}."


def select(run: Run, text_of: Callable[[int], str], *, pieces: Pieces, runs: int = 1) -> Selection:
    """Select the rollouts for a run's page; damaged files are recorded in ``run.damaged``.

    Args:
        run: the run.
        text_of: text of a token by its id.
        pieces: token texts of the page, to which those of the run are added.
        runs: number of runs that share the page.
    """
    folders = {"rollouts": [*run.texts().items()], "validation": [*run.texts(validation=True).items()]}
    found = Selection(of_files=sum(map(len, folders.values())), pieces=pieces)
    chosen = sorted(
        (step, folder, file)
        for folder, files in folders.items()
        for step, file in _spread(run, files, folder, runs)
    )
    words = _Words(text_of, found.pieces)
    texts, tokens = TEXT_ROOM // runs, TOKEN_ROOM // runs
    for index, (step, folder, file) in enumerate(reversed(chosen)):
        left = len(chosen) - index  # unused space goes to older steps
        newest = file == folders[folder][-1][1]
        left = min(left, NEWEST) if newest else left
        its = [*islice(run.rows(file), MOST_ROLLOUTS)]
        groups = _groups(its, folder, step, texts // left, newest=newest)
        found.files, found.seen = found.files + 1, found.seen + len(its)
        texts -= sum(size for _, _, size in groups)
        tokens -= _add_tokens(found, groups, run, file, words, tokens // left)
        found.groups += [group for group, _, _ in groups]
        found.kept += sum(len(lines) for _, lines, _ in groups)
    return found


def _add_tokens(
    found: Selection, groups: Sequence[_Sized], run: Run, texts: str, words: _Words, room: int
) -> int:
    """Add tokens to rollouts while there is space, or the reason why not; return the bytes used."""
    from safetensors import SafetensorError

    faults = (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError)
    name = texts.partition(".")[0] + ".safetensors"
    used, stored, why = 0, None, "none"
    try:
        if (run.path / name).is_file():
            stored, why = _StoredTokens(run.path / name), "room"
    except faults:
        why = "damaged"
    for group, lines, _ in groups:
        for rollout, line in zip(group["rollouts"], lines, strict=True):
            packed = None
            if stored is not None and line in stored.segments and used < room:
                try:
                    packed = stored.packed(line, words)
                except faults:
                    stored, why = None, "damaged"
            if packed is None:
                rollout["untold"] = why if stored is None or line in stored.segments else "none"
                continue
            rollout["tokens"] = packed
            used += len(json.dumps(packed))
            found.tokens += 1
    if why == "damaged":
        run.damaged[name] = {0}
    return used


def as_script(selections: Sequence[Selection], runs: Sequence[str] = ()) -> str:
    """Encode selections as JSON that is safe in a script element; several runs by name."""
    groups = [
        group | ({"run": run} if runs else {})
        for run, selection in enumerate(selections)
        for group in selection.groups
    ]
    value = {"groups": groups, "pieces": [*selections[0].pieces], **({"runs": [*runs]} if runs else {})}
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _spread(run: Run, files: Sequence[tuple[int, str]], folder: str, runs: int) -> list[tuple[int, str]]:
    """Return a run's share of the files to read: the first, the last, and some between."""
    if not files:
        return []
    mean = sum((run.path / file).stat().st_size for _, file in files) / len(files)
    some = [_size(row) for row in islice(run.rows(files[-1][1]), 100)]
    fit = TEXT_ROOM * len(some) / (LEAST * sum(some)) if some else math.inf
    most = max(5, int(min(MOST_FILES[folder], MOST_BYTES / max(1.0, mean), fit)) // runs)
    if len(files) <= most:
        return [*files]
    return [files[round(i * (len(files) - 1) / (most - 1))] for i in range(most)]


# ---------------------------------------------------------------------------------- texts


def _groups(rows: Sequence[Row], folder: str, step: int, room: int, *, newest: bool) -> list[_Sized]:
    """Return the groups that fit, each with the indices of its rollouts in the file, and its size.

    For the newest step, groups with the best and the worst rollout of each task come first.
    """
    by_group: dict[tuple[str, str, str], list[int]] = {}
    for line, row in enumerate(rows):
        name = (str(row.get("task")), str(row.get("prompt")), str(row.get("group")))
        by_group.setdefault(name, []).append(line)
    rewards = [_number(row.get("reward")) or 0.0 for row in rows]
    ranked = sorted(range(len(rows)), key=rewards.__getitem__)
    of_tasks = [{str(rows[line].get("task")): line for line in lines} for lines in (ranked, ranked[::-1])]
    first = {line for lines in of_tasks for line in lines.values()} if newest else set()
    found = []
    for number, lines in sorted(
        enumerate(by_group.values()), key=lambda one: (first.isdisjoint(one[1]), _order(rows[one[1][0]]))
    ):
        row = rows[lines[0]]
        count = row.get("prompt_messages")
        group: dict[str, Any] = {
            "set": "validation" if folder == "validation" else "training",
            "step": step,
            "group": number,
            "task": _short(row.get("task")),
            "prompt": _short(row.get("prompt")),
            "answer": _short(row.get("answer")),
            "version": _number(row.get("generation_version")),
            "messages": _messages(row)[: count if isinstance(count, int) and count >= 0 else 0],
            "rollouts": [],
        }
        size, kept = _size(group), []
        ranked = sorted(lines, key=rewards.__getitem__)
        ends = dict.fromkeys((ranked[-1], ranked[0]))  # the best and the worst first
        for line in [*ends, *(line for line in lines if line not in ends)]:
            rollout = _rollout(rows[line], group["messages"], lines.index(line))
            its = _size(rollout)
            if size + its > room:
                break
            size += its
            kept.append((line, rollout))
        kept.sort(key=lambda one: one[0])
        if kept:
            group["rollouts"] = [rollout for _, rollout in kept]
            found.append((group, [line for line, _ in kept], size))
            room -= size
        if len(kept) < len(lines):
            break
    return found


def _order(row: Row) -> bytes:
    """Return the sort key of a prompt, which is the same in every step."""
    name = f"{row.get('task')}\0{row.get('prompt')}"
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest()


def _rollout(row: Row, prompt: list[dict[str, Any]], index: int) -> dict[str, Any]:
    messages = _messages(row)
    same = messages[: len(prompt)] == prompt
    metrics = table(row.get("metrics"))
    fields = {
        "place": index,
        "messages": messages[len(prompt) :] if same else messages,
        "whole": not same or None,  # the rollout does not start with its group's prompt
        "reward": _number(row.get("reward")),
        "advantage": _number(row.get("advantage")),
        "success": row.get("success") if isinstance(row.get("success"), bool) else None,
        "trained": row.get("trained") is True or None,
        "finish": _short(row.get("finish_reason")),
        "turns": _number(row.get("turns")),
        "calls": _number(row.get("tool_calls")),
        "length": _number(row.get("tokens")),
        "answer": _short(row.get("reply_answer")),
        "hint": _short(row.get("hint")),
        "error": _short(row.get("error")),
        "metrics": {_short(name): _number(value) for name, value in [*metrics.items()][:40]},
    }
    return {name: value for name, value in fields.items() if value is not None and value not in ("", {})}


def _messages(row: Row) -> list[dict[str, Any]]:
    return [message(each) for each in tables(row.get("messages"))]


def message(given: Row) -> dict[str, Any]:
    """Convert a message to sanitised texts: role, name, thoughts, text and calls, if present."""
    thinking = next((given[key] for key in thoughts.THOUGHT_KEYS if given.get(key)), "")
    fields = {
        "role": _short(given.get("role")),
        "name": _short(given.get("name")),
        "thoughts": _short(thinking),
        "text": _short(_content(given.get("content"))),
        "calls": [_call(each) for each in tables(given.get("tool_calls"))],
    }
    return {name: value for name, value in fields.items() if value}


def _call(call: Row) -> tuple[str, str]:
    """Return the name and the arguments of a tool call."""
    given = table(call.get("function")) or call
    return _short(given.get("name")), _short(given.get("arguments"))


def _content(content: Any) -> Any:
    """Return the text of a message, or of its parts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text", part) if isinstance(part, Mapping) else part for part in content]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, default=str) for part in parts)


def _short(value: Any) -> str:
    """Convert a value to a sanitised text, shortened if it is long."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return inert(shortened(text, LONGEST))


def _number(value: Any) -> float | None:
    """Round a finite number to six digits; None for anything else."""
    if not is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _size(value: Mapping[str, Any]) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


# ---------------------------------------------------------------------------------- tokens


@define
class _Words:
    """Maps token ids to indices of their texts."""

    _text_of: Callable[[int], str]
    _pieces: Pieces
    _known: dict[int, int] = field(factory=dict)

    def numbered(self, ids: Sequence[int]) -> NDArray[np.uint16] | None:
        """Return the indices of tokens; None if there are too many different ones."""
        import numpy as np

        known = self._known
        for token in ids:
            if token not in known:
                text = inert(self._text_of(token))
                if text not in self._pieces and len(self._pieces) == MOST_PIECES:
                    return None
                known[token] = self._pieces.setdefault(text, len(self._pieces))
        return np.array([known[token] for token in ids], np.uint16)


class _StoredTokens:
    """A file of tokens that is read partially."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file = cast(Any, safe_open)(path, framework="numpy")
        self._names = {*self._file.keys()}
        read = self._file.get_tensor
        self._offsets: list[int] = read("segment_offsets").tolist()
        self.segments: dict[int, list[int]] = {}
        """First segment of each rollout that has segments."""
        for segment, rollout in enumerate(read("segment_rollouts").tolist()):
            self.segments.setdefault(rollout, []).append(segment)
        self._advantages, self._of = read("token_advantages"), read("token_rollouts")

    def packed(self, rollout: int, words: _Words) -> dict[str, Any] | None:
        """Pack the tokens of a rollout; None if they do not fit.

        Logprobs are in thousandths of a nat.  Versions and advantages of the sampled tokens are run-length
        encoded, ``[value, length, ...]``; the mask consists of run lengths, starting with unsampled tokens.
        """
        import numpy as np

        parts = [
            slice(self._offsets[segment], self._offsets[segment + 1]) for segment in self.segments[rollout]
        ]
        ids, logprobs, versions = (self._joined(name, parts) for name in ("ids", "logprobs", "versions"))
        sampled = self._joined("sampled", parts).astype(bool) if "sampled" in self._names else versions >= 0
        if (numbers := words.numbered(ids.tolist())) is None:
            return None
        logprobs = np.nan_to_num(-1000.0 * logprobs, nan=65535, posinf=65535, neginf=0)
        found: dict[str, Any] = {
            "ids": _base64(numbers),
            "logprobs": _base64(np.clip(np.rint(logprobs), 0, 65535)),
            "mask": _mask(sampled.tolist()),
            "versions": [n for run in _runs(versions[sampled].tolist()) for n in run],
            "segments": [part.stop - part.start for part in parts],
        }
        if (its := self._advantages[self._of == rollout]).size:
            found["advantages"] = [
                n for value, length in _runs(its.tolist()) for n in (_number(value), length)
            ]
        return found

    def _joined(self, name: str, parts: Sequence[slice]) -> NDArray[Any]:
        """Concatenate parts of an array."""
        import numpy as np

        array = self._file.get_slice(name)
        return np.concatenate([array[part] for part in parts])


def _base64(numbers: NDArray[Any]) -> str:
    return b64encode(numbers.astype("<u2").tobytes()).decode()


def _runs(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Run-length encode: return value and length of each run of equal values."""
    return [(value, len([*run])) for value, run in groupby(values)]


def _mask(sampled: Sequence[bool]) -> list[int]:
    runs = _runs(sampled)
    return [*([0] if runs and runs[0][0] else []), *(length for _, length in runs)]


def token_texts(run: Path, model: object) -> Callable[[int], str]:
    """Return a function from token id to text; the text is ``#ID`` without the run's tokenizer.

    The tokenizer comes from the run's newest checkpoint, its model, or the directory ``model``.
    """
    checkpoints = sorted((run / "checkpoints").glob("step-*/trainer/tokenizer.json"), reverse=True)
    indices = [*checkpoints, run / "model" / "tokenizer.json"]
    if isinstance(model, str) and Path(model).is_absolute():
        indices.append(Path(model) / "tokenizer.json")
    path = next((index for index in indices if index.is_file()), None)
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path)) if path else None
    except Exception:  # the library raises plain Exception for a damaged file
        tokenizer = None

    def text(token: int) -> str:
        if tokenizer is None or token < 0 or (piece := tokenizer.id_to_token(token)) is None:
            return f"#{token}"
        decoded = str(tokenizer.decode([token], skip_special_tokens=False)) or piece
        return f" {decoded}" if piece.startswith("▁") and not decoded.startswith(" ") else decoded

    return text
