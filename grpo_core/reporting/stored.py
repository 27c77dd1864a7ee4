"""Rollouts as files: their texts as JSON lines, their tokens as arrays in safetensors, and both read back.

A file of texts has a line for each rollout.  The file of tokens next to it has the arrays of
``grpo_core.loop.segments`` and these, where rollout r is line r of the texts:

    advantages         float64 [R]     advantage of each rollout; NaN if it is masked or was not trained
    trained            bool [R]        whether the step made rows of the rollout
    token_advantages   float32 [K]     advantages of the sampled tokens of rollouts whose tokens differ
    token_rollouts     int32 [K]       the rollout of each of them
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import fields

from grpo_core.contracts.errors import ConfigError, shortened
from grpo_core.contracts.records import Group, Prompt, Rollout
from grpo_core.loop.segments import segment_arrays, segments_of
from grpo_core.processes.secrets import masked
from grpo_core.storage.disk import Disk, replace_file
from grpo_core.storage.run_directory import ROLLOUTS, VALIDATION, rollouts_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

GZIP_LEVEL = 4
"""Level of the compression; level 6 takes four times as long for a ninth of the size."""
TEXTS, TOKENS = (".jsonl", ".jsonl.gz"), ".safetensors"
LARGEST = 100_000
"""Number of JSON characters above which an answer, or a value of ``Prompt.info``, is not stored."""
OF_ROLLOUT = {
    each.name: "reply_answer" if each.name == "answer" else each.name  # "answer" is the prompt's answer
    for each in fields(Rollout)
    if each.name not in ("segments", "token_advantages", "fault", "tools")
}
"""Fields of a rollout that a line of texts has, with their names there: the arrays have the others, and
``error`` says what the fault does."""


def texts(groups: Sequence[Group]) -> bytes:
    """Return the lines of a file of texts."""
    lines = []
    for place, group in enumerate(groups):
        of_prompt = _of_prompt(group.prompt)
        for rollout in group.rollouts:
            lines.append(as_json(_line(place, group, rollout, of_prompt)) + "\n")
            of_prompt = {"answer": of_prompt["answer"]}  # info may be large, and is stored once
    return "".join(lines).encode(errors="replace")


def packed(data: bytes) -> bytes:
    """Compress bytes deterministically."""
    return gzip.compress(data, GZIP_LEVEL, mtime=0)


def tokens(groups: Sequence[Group]) -> bytes:
    """Return the file of tokens that belongs to the texts of the same groups."""
    import numpy as np
    from safetensors.numpy import save

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantages = [math.nan if rollout.advantage is None else rollout.advantage for rollout in rollouts]
    data: bytes = save(
        {
            **segment_arrays(rollouts),
            "advantages": np.array(advantages, np.float64),
            "trained": np.array([rollout.trained for rollout in rollouts], np.bool_),
            **_token_advantages(rollouts),
        }
    )
    return data


def as_json(value: Mapping[str, Any]) -> str:
    """Return a value as JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=lambda name: None))


def stored_rollouts(run: Path | str, step: int, *, validation: bool = False) -> list[Group]:
    """Read the stored groups that trained version ``step``.

    The rollouts have their texts, rewards, advantages and, unless ``tracking.files.tokens`` was false, their
    segments with the tokens as they were trained.  An answer, or a value of ``Prompt.info``, that is not
    JSON-serializable or is very large is replaced by ``NotStored``.

    Args:
        run: directory of the run, or a directory that ``grpo-core validate`` made.
        step: the version that the groups trained, from 1; for a validation the version that was measured.
        validation: read the rollouts of the validation of that version.

    Raises ConfigError if they are not there, or are damaged.
    """
    name = Path(run) / (VALIDATION if validation else ROLLOUTS) / f"step-{step:06d}"
    found = next((path for end in TEXTS if (path := Path(f"{name}{end}")).is_file()), None)
    if found is None:
        raise ConfigError(f"{name}{TEXTS[1]}: does not exist; the run has stored no rollouts of this step")
    return groups_in(found)


def groups_in(file: Path, *, tokens: bool = True) -> list[Group]:
    """Read a file of texts, and with ``tokens`` the file of them next to it if there is one.

    Raises ConfigError if they are not there, or are damaged.
    """
    with _readable(file):
        lines = _lines(file)
        ending = next((end for end in TEXTS if file.name.endswith(end)), "")
        path = Path(f"{str(file).removesuffix(ending)}{TOKENS}")
        arrays = _loaded(path) if tokens and path.is_file() else None
        segments = segments_of(arrays, len(lines)) if arrays else [[] for _ in lines]
        by_token: dict[int, NDArray[np.float64]] = {}
        if arrays:
            values, of = arrays["token_advantages"].astype("float64"), arrays["token_rollouts"]
            by_token = {r: values[of == r] for r in set(of.tolist())}
        rollouts: dict[int, list[Rollout]] = {}
        first: dict[int, Mapping[str, Any]] = {}
        for r, (line, own) in enumerate(zip(lines, segments, strict=True)):
            fields = {field: line[name] for field, name in OF_ROLLOUT.items()}
            fields |= {"messages": tuple(line["messages"])}
            rollout = Rollout(**fields, segments=own, token_advantages=by_token.get(r))
            rollouts.setdefault(line["group"], []).append(rollout)
            first.setdefault(line["group"], line)
        return [
            Group(
                prompt=_prompt(line),
                rollouts=tuple(rollouts[place]),
                generation_version=line["generation_version"],
                target_version=line["target_version"],
                slot=line["slot"],
            )
            for place, line in first.items()
        ]


def files_of_texts(folder: Path) -> dict[int, Path]:
    """Return the files of texts in a folder by their steps, in order."""
    found = {
        step: path
        for path in folder.glob("step-*")
        if path.name.endswith(TEXTS) and (step := rollouts_step(path.name)) is not None
    }
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert errors of reading a file to ConfigError."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{file}: does not exist") from None
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def _lines(file: Path) -> list[dict[str, Any]]:
    data = file.read_bytes()
    lines = (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines()
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------------------------- writing


def write_validation(directory: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the rollouts of a validation below a directory, where ``stored_rollouts`` finds them."""
    folder, groups = directory / VALIDATION, masked(groups)
    folder.mkdir(exist_ok=True)
    replace_file(Disk(), folder / f"step-{step:06d}{TEXTS[1]}", packed(texts(groups)))
    replace_file(Disk(), folder / f"step-{step:06d}{TOKENS}", tokens(groups))


def _line(place: int, group: Group, rollout: Rollout, of_prompt: Mapping[str, Any]) -> dict[str, Any]:
    of_rollout = {name: getattr(rollout, field) for field, name in OF_ROLLOUT.items()}
    return {
        "task": group.prompt.environment,
        "prompt": group.prompt.id,
        **of_prompt,
        **of_rollout,
        "error": None if rollout.error is None else shortened(rollout.error),
        "segments": len(rollout.segments),
        "tokens": rollout.n_sampled,
        "group": place,
        "slot": group.slot,
        "prompt_messages": len(group.prompt.messages),
        "generation_version": group.generation_version,
        "target_version": group.target_version,
    }


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    """Return the answer and the info of a prompt, and the names of values that JSON does not preserve."""
    info, lacks = {}, {}
    for name, value in prompt.info.items():
        if why := _not_json(value):
            lacks[name] = why
        else:
            info[name] = value
    why = _not_json(prompt.answer)
    return {
        "answer": shortened(str(prompt.answer), LARGEST) if why else prompt.answer,
        "info": info,
        "prompt_hint": prompt.hint,
        **({"not_stored": {"answer": why, "info": lacks}} if why or lacks else {}),
    }


def _not_json(value: Any) -> str:
    """Return why a value is not stored, or an empty text."""
    try:
        text = json.dumps(value)
        if json.loads(text) == value:
            return f"has {len(text):,} characters" if len(text) > LARGEST else ""
    except Exception:  # it is not JSON-serializable, or its methods fail
        pass
    return f"is of the type {type(value).__name__}, which JSON does not restore"


def _token_advantages(rollouts: Sequence[Rollout]) -> Arrays:
    """Return the advantages of single tokens, for rollouts whose tokens differ."""
    import numpy as np

    differ = [(r, its) for r, each in enumerate(rollouts) if (its := each.token_advantages) is not None]
    values = [np.zeros(0), *(its for _, its in differ)]
    of = [np.zeros(0), *(np.full(len(its), r) for r, its in differ)]
    return {
        "token_advantages": np.concatenate(values).astype(np.float32),
        "token_rollouts": np.concatenate(of).astype(np.int32),
    }


# ---------------------------------------------------------------------------------- reading


def _loaded(path: Path) -> Arrays:
    """Return the arrays of a file of tokens.  Raises OSError or ValueError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Arrays = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return arrays


def _prompt(line: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a group from its first line."""
    answer, info = line["answer"], line["info"]
    if lacks := line.get("not_stored"):
        answer = NotStored("answer", lacks["answer"]) if lacks["answer"] else answer
        info = info | {name: NotStored(f"info[{name!r}]", why) for name, why in lacks["info"].items()}
    return Prompt(
        messages=line["messages"][: line["prompt_messages"]],
        answer=answer,
        id=line["prompt"],
        environment=line["task"],
        info=info,
        hint=line["prompt_hint"],
    )


class NotStored:
    """Placeholder for a value of a prompt that was not stored; any computation with it is an error."""

    def __init__(self, name: str, why: str) -> None:
        self._text = f"Prompt.{name} of a stored rollout {why}, so it is not stored"

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(f"{self._text}, and nothing can be computed from it")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = _refuse
    __hash__ = __bool__ = __len__ = __iter__ = __int__ = __float__ = __str__ = _refuse
