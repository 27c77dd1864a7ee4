"""The teacher of a distillation: a frozen model that scores the sampled tokens."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from grpo_core.config import ModelConfig, TeacherConfig
from grpo_core.contracts.errors import ConfigError, ModelError, one_line
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.model import Scorer, compute_dtype, load
from grpo_core.training.packing import use_packing
from grpo_core.training.passes import Passes
from grpo_core.weights.names import read_held


class Teacher:
    """A frozen model that scores the policy's tokens; its weights have the dtype of their products.

    Raises ModelError if it cannot be loaded.
    """

    def __init__(self, config: TeacherConfig, device: torch.device, passes: Passes) -> None:
        dtype = compute_dtype(config, device)
        module = load(
            config.path, device=device, trust_remote_code=config.trust_remote_code, dtype=dtype
        ).requires_grad_(False)
        read_held(module, config.path)
        if passes.packing:
            use_packing(module)
        self._scorer = Scorer(module, dtype)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        """Return logprobs [N] of the sampled tokens.

        The embeddings of a model family are padded to different sizes: a token beyond the teacher's embedding
        has the logprob minus infinity.
        """
        size = self._scorer.vocabulary
        known = micro.targets < size
        given = evolve(
            micro,
            input_ids=micro.input_ids.where(micro.input_ids < size, 0),
            targets=micro.targets.where(known, 0),
        )
        return self._scorer.score(given, temperature)[0].where(known, -torch.inf)


def check_vocabulary(model: ModelConfig, teacher: TeacherConfig) -> None:
    """Check that the tokenizers of model and teacher give the same number to each token.

    Raises ConfigError if they do not, ModelError if one cannot be loaded.
    """
    mine = _vocabulary(model.path, model.trust_remote_code)
    theirs = _vocabulary(teacher.path, teacher.trust_remote_code)
    differing = sorted(token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ConfigError(
            f"teacher.path is {teacher.path!r}: its vocabulary differs from that of the trained model "
            f"{model.path!r}: {len(differing)} tokens differ, such as {token!r}, which is "
            f"{_number(theirs, token)} there and {_number(mine, token)} here. A teacher scores token ids: "
            "choose one of the same family"
        )


def _number(vocabulary: dict[str, int], token: str) -> str:
    return f"number {vocabulary[token]}" if token in vocabulary else "missing"


def _vocabulary(path: str, trust_remote_code: bool) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        found: dict[str, int] = tokenizer.get_vocab()
    except Exception as error:
        raise ModelError(
            f"model {path!r}: its tokenizer cannot be loaded ({type(error).__name__}: {one_line(error)})"
        ) from error
    return found
