"""The segments of rollouts as arrays, which safetensors files store exactly.

prompt_ids         int32 [P]       prompts one after another; one that segments share is there once
prompt_offsets     int64 [p + 1]   the beginning of each prompt in prompt_ids, and the end of the last
ids                int32 [N]       tokens after the prompts, of all segments one after another
logprobs           float32 [N]     logprob of each token when it was sampled, otherwise 0
versions           int32 [N]       weights that sampled each token, otherwise -1
sampled            bool [N]        whether the engine sampled a token; only there if not implied by versions
segment_offsets    int64 [S + 1]   the beginning of each segment in ids, and the end of the last
segment_prompts    int32 [S]       the prompt of each segment
segment_rollouts   int32 [S]       the rollout of each segment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_core.contracts.records import Rollout, Segment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

OF_TOKENS = ("ids", "sampled", "logprobs", "versions")
"""Arrays with one number per token after the prompts."""


def segment_arrays(rollouts: Sequence[Rollout]) -> Arrays:
    """Return the arrays of the rollouts' segments."""
    import numpy as np

    from grpo_core.contracts.tokens import NOT_SAMPLED, fetched

    segments = [(r, segment) for r, rollout in enumerate(rollouts) for segment in rollout.segments]
    found: list[Any] = fetched(
        [*(each.tokens for _, each in segments), *(each.prompt_ids for _, each in segments)]
    )
    tokens, prompt_ids = found[: len(segments)], found[len(segments) :]
    prompts: dict[bytes, int] = {}
    which = [prompts.setdefault(ids.tobytes(), len(prompts)) for ids in prompt_ids]
    joined = {
        name: np.concatenate([empty, *(each.arrays()[name] for each in tokens)])
        for name, empty in Segment(prompt_ids=()).tokens.arrays().items()
    }
    if np.array_equal(joined["sampled"], joined["versions"] != NOT_SAMPLED):
        del joined["sampled"]
    return {
        "prompt_ids": np.frombuffer(b"".join(prompts), np.int32),
        "prompt_offsets": _offsets([len(prompt) // 4 for prompt in prompts]),
        **joined,
        "segment_offsets": _offsets([len(each) for each in tokens]),
        "segment_prompts": np.array(which, np.int32),
        "segment_rollouts": np.array([r for r, _ in segments], np.int32),
    }


def segments_of(arrays: Mapping[str, NDArray[Any]], rollouts: int) -> list[list[Segment]]:
    """Return the segments of each rollout; ``rollouts`` is their number."""
    from grpo_core.contracts.tokens import NOT_SAMPLED, Tokens

    by_token = {"sampled": arrays["versions"] != NOT_SAMPLED} | {
        name: arrays[name] for name in OF_TOKENS if name in arrays
    }
    prompts, offsets = arrays["prompt_offsets"].tolist(), arrays["segment_offsets"].tolist()
    found: list[list[Segment]] = [[] for _ in range(rollouts)]
    pairs = zip(arrays["segment_rollouts"].tolist(), arrays["segment_prompts"].tolist(), strict=True)
    for place, (rollout, prompt) in enumerate(pairs):
        here = slice(offsets[place], offsets[place + 1])
        segment = Segment(
            prompt_ids=arrays["prompt_ids"][prompts[prompt] : prompts[prompt + 1]],
            tokens=Tokens(**{name: array[here] for name, array in by_token.items()}),
        )
        found[rollout].append(segment)
    return found


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
