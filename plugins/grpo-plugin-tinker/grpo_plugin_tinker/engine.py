"""The engine ``tinker``: samples from snapshots that the trainer published at the service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinker import types
from tinker.lib.public_interfaces import SamplingClient
from tinker.lib.retry_handler import RetryConfig

from grpo_core import (
    Completion,
    ConfigError,
    Engine,
    EngineError,
    EngineSetup,
    GenerationRequest,
    PluginError,
    Unavailable,
    Weights,
    WeightSyncError,
)
from grpo_core.kit import aio
from grpo_plugin_tinker.model import STATE
from grpo_plugin_tinker.section import TinkerConfig
from grpo_plugin_tinker.service import FAILURES, Session, said

ONCE = RetryConfig(enable_retry_logic=False)
"""Disables restarts of failed samples; the SDK's retries of single requests remain."""


class TinkerEngine(Engine):
    """An ``Engine`` whose weights are a snapshot at the service; running requests keep their snapshot."""

    dtype = "bfloat16"
    """Assumed dtype for the canary's tolerance, since the service does not report its dtype."""

    def __init__(self, setup: EngineSetup) -> None:
        if setup.reproducible:
            raise ConfigError(
                "the engine tinker cannot promise equal completions for equal seeds: leave out "
                'pipeline.policy = "in_order"'
            )
        if Path(setup.model, STATE).is_file():
            raise ConfigError(
                f"{setup.model} has the name of a state, and its weights are at the service: such a run is "
                "validated while it trains, at validation.every; grpo-core train --resume continues it"
            )
        self._deadline = setup.deadline
        self._session = Session(setup.section(TinkerConfig), "engine")
        self._sampler: tuple[SamplingClient, int] | None = None

    async def update_weights(self, weights: Weights) -> None:
        if not weights.location.startswith("tinker://"):
            raise PluginError(
                f"the engine tinker samples snapshots of the trainer tinker, and got {weights.location!r}"
            )
        client = await self._session.client(self._deadline)
        try:
            sampler = await self._session.call(
                "the snapshot",
                lambda: client.create_sampling_client_async(model_path=weights.location, retry_config=ONCE),
                self._deadline,
                again=True,
            )
        except (*FAILURES, Unavailable) as error:
            raise WeightSyncError(f"engine: {weights.location} cannot be sampled: {said(error)}") from error
        self._sampler = sampler, weights.version

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        assert self._sampler is not None
        sampler, version = self._sampler
        return await aio.gather([self._complete(sampler, version, request) for request in requests])

    async def _complete(
        self, sampler: SamplingClient, version: int, request: GenerationRequest
    ) -> Completion:
        prompt = types.ModelInput.from_ints(request.prompt_ids.tolist())
        params = types.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            seed=request.seed % 2**31,
            stop=list(request.stop_token_ids) or None,
        )
        try:
            answer = await self._session.call(
                "a sample", lambda: sampler.sample_async(prompt, 1, params), self._deadline, again=True
            )
            (sequence,) = answer.sequences
            logprobs = sequence.logprobs or []
            return Completion(
                token_ids=sequence.tokens,
                logprobs=logprobs,
                versions=[version] * len(sequence.tokens),
                finish_reason=sequence.stop_reason,
            )
        except FAILURES as error:
            raise EngineError(f"engine: the service did not complete a prompt: {said(error)}") from error

    async def aclose(self) -> None:
        self._session.close()
