"""The scores that a loss compares with: logprobs of the sampled tokens by other weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from grpo_core.config import ModelConfig, ScoreConfig
from grpo_core.contracts.errors import ConfigError, ModelError, one_line
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.model import Model, Scorer, compute_dtype, load
from grpo_core.training.packing import use_packing
from grpo_core.training.passes import Passes
from grpo_core.weights.names import read_held


class Scores:
    """Computes the scores of a loss.

    Args:
        chosen: the scores by name.
        model: the model that is trained.
        models: the other models, by the names of the scores.
    """

    def __init__(
        self, chosen: Mapping[str, ScoreConfig], model: Model, models: Mapping[str, FrozenModel]
    ) -> None:
        self.chosen, self._model, self.models = chosen, model, models
        self.signal = any(each.model or each.hint for each in chosen.values())
        """Whether a score by another model or in the hinted context is learnt from."""

    @torch.no_grad()
    def logprobs(self, name: str, micro: MicroBatch, temperature: float) -> Tensor:
        """Return the score [N] of the sampled tokens."""
        weights = self.chosen[name].weights
        if name in self.models:
            return self.models[name].logprobs(micro, temperature)
        if weights == "current":
            return self._model.score(micro, temperature)[0]
        return self._model.kept_logprobs(weights if weights == "start" else name, micro, temperature)

    def due(self, version: int) -> list[str]:
        """Return the names of the weights that move after the step that made a version."""
        moving = (name for name, each in self.chosen.items() if each.weights == "ema")
        return [name for name in moving if version % self.chosen[name].every == 0]

    def refresh(self, names: Iterable[str]) -> None:
        """Move weights toward the trained ones."""
        for name in names:
            self._model.refresh(name, self.chosen[name].mix)


class FrozenModel:
    """A model that scores the policy's tokens; its weights have the dtype of their products.

    Raises ModelError if it cannot be loaded.
    """

    def __init__(self, config: ScoreConfig, device: torch.device, passes: Passes) -> None:
        dtype = compute_dtype(config, device)
        module = load(
            config.weights, device=device, trust_remote_code=config.trust_remote_code, dtype=dtype
        ).requires_grad_(False)
        read_held(module, config.weights)
        if passes.packing:
            use_packing(module)
        self._scorer = Scorer(module, dtype)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        """Return logprobs [N] of the sampled tokens.

        The embeddings of a model family are padded to different sizes: a token beyond this model's embedding
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


def check_vocabulary(model: ModelConfig, name: str, score: ScoreConfig) -> None:
    """Check that the tokenizers of the model and of one that scores give the same number to each token.

    Raises ConfigError if they do not, ModelError if one cannot be loaded.
    """
    mine = _vocabulary(model.path, model.trust_remote_code)
    theirs = _vocabulary(score.weights, score.trust_remote_code)
    differing = sorted(token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ConfigError(
            f"scores.{name}.weights is {score.weights!r}: its vocabulary differs from that of the trained "
            f"model {model.path!r}: {len(differing)} tokens differ, such as {token!r}, which is "
            f"{_number(theirs, token)} there and {_number(mine, token)} here. A model scores token ids: "
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
