"""Rollouts as files: their texts as JSON lines, their tokens as arrays in safetensors, and both read back.

A file of texts has a line for each rollout.  The file of tokens beside it has these arrays, where rollout r
is line r of the texts:

    prompt_ids         int32 [P]       prompts one after another; one that segments share is there once
    prompt_offsets     int64 [p + 1]   the beginning of each prompt in prompt_ids, and the end of the last
    ids                int32 [N]       tokens after the prompts, of all segments one after another
    sampled            bool [N]        whether the engine sampled a token
    logprobs           float32 [N]     logprob of each token when it was sampled, otherwise 0
    versions           int32 [N]       weights that sampled each token, otherwise -1
    segment_offsets    int64 [S + 1]   the beginning of each segment in ids, and the end of the last
    segment_prompts    int32 [S]       the prompt of each segment
    segment_rollouts   int32 [S]       the rollout of each segment
    advantages         float64 [R]     advantage of each rollout; NaN if it is masked or was not trained
    trained            bool [R]        whether the step made rows of the rollout
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.disk import Disk, replace_file
from grpo_core.errors import ConfigError, shortened
from grpo_core.records import Group, Prompt, Rollout, Segment
from grpo_core.run_directory import ROLLOUTS, VALIDATION, rollouts_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

GZIP_LEVEL = 4
"""Level of the compression; level 6 takes four times as long for a ninth of the size."""
TEXTS, TOKENS = (".jsonl", ".jsonl.gz"), ".safetensors"


def texts(groups: Sequence[Group]) -> bytes:
    """Return the lines of a file of texts."""
    lines = (
        as_json(_line(place, group, rollout)) + "\n"
        for place, group in enumerate(groups)
        for rollout in group.rollouts
    )
    return "".join(lines).encode(errors="replace")


def packed(data: bytes) -> bytes:
    """Return bytes compressed, the same for the same bytes."""
    return gzip.compress(data, GZIP_LEVEL, mtime=0)


def tokens(groups: Sequence[Group]) -> bytes:
    """Return the file of tokens that belongs to the texts of the same groups."""
    from safetensors.numpy import save

    data: bytes = save(_arrays([rollout for group in groups for rollout in group.rollouts]))
    return data


def as_json(value: Mapping[str, Any]) -> str:
    """Return a value as JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str)


def stored_rollouts(run: Path | str, step: int, *, validation: bool = False) -> list[Group]:
    """Read what a run has stored about the groups that trained version ``step``.

    The rollouts have their texts, rewards, advantages and, unless ``tracking.files.tokens`` was false, their
    segments with the tokens as they were trained.  Not stored are ``Prompt.info`` and ``Rollout.lost``.

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


def groups_in(file: Path) -> list[Group]:
    """Read a file of texts, and the file of tokens beside it if there is one.

    Raises ConfigError if they are not there, or are damaged.
    """
    with _readable(file):
        lines = _lines(file)
        segments = _segments(Path(f"{str(file).removesuffix(_ending(file))}{TOKENS}"), len(lines))
        return [
            _group([*some]) for _, some in groupby(zip(lines, segments, strict=True), lambda e: e[0]["group"])
        ]


def prompts_in(file: Path) -> list[Prompt]:
    """Read the prompts of a file of texts, without ``info``, one for each group.

    Raises ConfigError if it is not there, or is damaged.
    """
    with _readable(file):
        return [_prompt(next(some)) for _, some in groupby(_lines(file), lambda line: line["group"])]


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
    """Raise ConfigError for what is wrong with a file that is read."""
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


def _ending(file: Path) -> str:
    return next((end for end in TEXTS if file.name.endswith(end)), "")


# ---------------------------------------------------------------------------------- writing


def write_validation(directory: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the rollouts of a validation below a directory, where ``stored_rollouts`` finds them."""
    folder = directory / VALIDATION
    folder.mkdir(exist_ok=True)
    replace_file(Disk(), folder / f"step-{step:06d}{TEXTS[1]}", packed(texts(groups)))
    replace_file(Disk(), folder / f"step-{step:06d}{TOKENS}", tokens(groups))


def _line(place: int, group: Group, rollout: Rollout) -> dict[str, Any]:
    return {
        "task": group.prompt.environment,
        "prompt": group.prompt.id,
        "answer": _jsonable(group.prompt.answer),
        "messages": list(rollout.messages),
        "reward": rollout.reward,
        "success": rollout.success,
        "metrics": dict(rollout.metrics),
        "finish_reason": rollout.finish_reason,
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "segments": len(rollout.segments),
        "tokens": rollout.n_sampled,
        "seed": rollout.seed,
        "advantage": rollout.advantage,
        "trained": rollout.trained,
        "group": place,
        "slot": group.slot,
        "prompt_messages": len(group.prompt.messages),
        "generation_version": group.generation_version,
        "target_version": group.target_version,
        **({} if rollout.train else {"train": False}),
        **({} if rollout.answer is None else {"reply_answer": rollout.answer}),
        **({} if rollout.error is None else {"error": shortened(rollout.error)}),
    }


def _arrays(rollouts: Sequence[Rollout]) -> Arrays:
    import numpy as np

    from grpo_core.tokens import fetched

    segments = [(r, segment) for r, rollout in enumerate(rollouts) for segment in rollout.segments]
    tokens = fetched([segment.tokens for _, segment in segments])
    prompts: dict[bytes, int] = {}
    which = [prompts.setdefault(segment.prompt_ids.tobytes(), len(prompts)) for _, segment in segments]
    joined = {
        name: np.concatenate([empty, *(each.arrays()[name] for each in tokens)])
        for name, empty in Segment(prompt_ids=()).tokens.arrays().items()
    }
    return {
        "prompt_ids": np.frombuffer(b"".join(prompts), np.int32),
        "prompt_offsets": _offsets([len(prompt) // 4 for prompt in prompts]),
        **joined,
        "segment_offsets": _offsets([len(segment.tokens) for _, segment in segments]),
        "segment_prompts": np.array(which, np.int32),
        "segment_rollouts": np.array([r for r, _ in segments], np.int32),
        "advantages": np.array(
            [math.nan if rollout.advantage is None else rollout.advantage for rollout in rollouts], np.float64
        ),
        "trained": np.array([rollout.trained for rollout in rollouts], np.bool_),
    }


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _jsonable(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _finite(value: Any) -> Any:
    """Replace NaN by None, since JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---------------------------------------------------------------------------------- reading


def _segments(path: Path, rollouts: int) -> Iterator[list[Segment]]:
    """Return the segments of each rollout; no segments where no tokens are stored."""
    found: list[list[Segment]] = [[] for _ in range(rollouts)]
    if path.is_file():
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(path.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {error}") from error
        for rollout, segment in zip(arrays["segment_rollouts"].tolist(), _each_segment(arrays), strict=True):
            found[rollout].append(segment)
    return iter(found)


def _each_segment(arrays: Arrays) -> Iterator[Segment]:
    from grpo_core.tokens import Tokens

    prompts, offsets = arrays["prompt_offsets"].tolist(), arrays["segment_offsets"].tolist()
    for place, prompt in enumerate(arrays["segment_prompts"].tolist()):
        here = slice(offsets[place], offsets[place + 1])
        yield Segment(
            prompt_ids=arrays["prompt_ids"][prompts[prompt] : prompts[prompt + 1]],
            tokens=Tokens(
                **{name: arrays[name][here] for name in ("ids", "sampled", "logprobs", "versions")}
            ),
        )


def _group(found: Sequence[tuple[Mapping[str, Any], list[Segment]]]) -> Group:
    first = found[0][0]
    return Group(
        prompt=_prompt(first),
        rollouts=tuple(_rollout(line, segments) for line, segments in found),
        generation_version=first["generation_version"],
        target_version=first["target_version"],
        slot=first["slot"],
    )


def _prompt(line: Mapping[str, Any]) -> Prompt:
    return Prompt(
        messages=line["messages"][: line["prompt_messages"]],
        answer=line["answer"],
        id=line["prompt"],
        environment=line["task"],
    )


def _rollout(line: Mapping[str, Any], segments: list[Segment]) -> Rollout:
    same = (
        "reward",
        "success",
        "metrics",
        "finish_reason",
        "turns",
        "tool_calls",
        "seed",
        "advantage",
        "trained",
    )
    return Rollout(
        segments=segments,
        messages=tuple(line["messages"]),
        answer=line.get("reply_answer"),
        train=line.get("train", True),
        error=line.get("error"),
        **{name: line[name] for name in same},
    )
