"""The trainer ``tinker``: the service computes updates and stores weights and optimizer."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from tinker import types
from tinker.lib.public_interfaces import TrainingClient

from grpo_core import (
    Batch,
    Canary,
    ConfigError,
    Row,
    StepResult,
    Trainer,
    TrainerError,
    TrainerSetup,
    Unavailable,
    Weights,
    did_you_mean,
)
from grpo_core.kit import aio, rate
from grpo_core.losses import row_weights
from grpo_plugin_tinker.checks import service_loss
from grpo_plugin_tinker.model import FILES, STATE
from grpo_plugin_tinker.section import TinkerConfig
from grpo_plugin_tinker.service import FAILURES, Session, said

T = TypeVar("T")
Floats = NDArray[np.float64]

A_DAY = 24 * 3600
"""Lifetime of a snapshot in seconds, if the run could not delete it."""
LARGEST_LOG_RATIO = 20.0


class TinkerTrainer(Trainer):
    """A ``Trainer`` of LoRA adapters at the service.

    Args:
        base_model: name of the model at the service.
        rank: inner dimension of the adapters.
    """

    def __init__(self, setup: TrainerSetup, *, base_model: str = "", rank: int = 32) -> None:
        self._setup, self._base_model, self._rank = setup, base_model, rank
        self._config = setup.section(TinkerConfig)
        self._deadline = setup.trainer.deadline
        self._session = Session(self._config, "trainer")
        self._version = 0
        self._snapshots: list[str] = []
        self._states: set[str] = set()
        self._models: list[TrainingClient] = []
        """The trained model, and possibly a second model for sampling its weights."""

    async def started(self) -> None:
        client, name, seed = await self._session.client(self._deadline), self._base_model, self._setup.seed
        offered = await self._call("get_server_capabilities", client.get_server_capabilities_async)
        names = {each.model_name or "" for each in offered.supported_models}
        if names and name not in names:
            raise ConfigError(
                f"trainer.options.base_model = {name!r}: the service trains {', '.join(sorted(names))}."
                f"{did_you_mean(name, names)}"
            )
        for _ in range(2 if self._config.server == "skyrl-jax" else 1):
            made = await self._call(
                f"create_model {name!r}",
                lambda: client.create_lora_training_client_async(name, rank=self._rank, seed=seed % 2**31),
            )
            self._models.append(made)
        if self._setup.resume_from:
            saved = await asyncio.to_thread(_read, Path(self._setup.resume_from, "trainer", STATE))
            await self._call("load_state", lambda: self._training.load_state_with_optimizer(saved["state"]))
            self._version = saved["version"]
            self._states.add(saved["state"])

    async def step(self, batch: Batch) -> StepResult:
        began = time.perf_counter()
        rows = [row for row in batch.rows if row.tokens.n_sampled]
        metrics = await self._update(rows) if rows else {}
        self._version = batch.step + 1
        seconds = time.perf_counter() - began
        tokens = float(sum(len(row.prompt_ids) + len(row.tokens) for row in rows))
        metrics |= {
            "rows": float(len(rows)),
            "time/train": seconds,
            "tokens/trained": tokens,
        }
        return StepResult(version=self._version, metrics=metrics)

    async def _update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Train rows in one update; return its metrics."""
        setup, trainer = self._setup, self._setup.trainer
        name, options = service_loss(setup.loss.options, trainer.proximal)
        scored = _scored(rows, setup, means=self._config.server == "skyrl-jax")
        lr = rate(trainer, self._version)
        first, second = trainer.betas
        adam = types.AdamParams(
            learning_rate=lr,
            beta1=first,
            beta2=second,
            eps=1e-8,
            weight_decay=trainer.weight_decay,
            grad_clip_norm=trainer.max_grad_norm,
        )
        # send both before awaiting the first, so that a service with clock cycles runs them in one
        data, training = [each.datum for each in scored], self._training
        passed = self._call("forward_backward", lambda: training.forward_backward(data, name, options))
        updated = self._call("optim_step", lambda: training.optim_step(adam))
        passes, update = await asyncio.gather(passed, updated)
        policy = [
            np.asarray(output["logprobs"].data)[each.indices]
            for each, output in zip(scored, passes.loss_fn_outputs, strict=True)
        ]
        given = {name.rpartition("/")[2]: value for name, value in (update.metrics or {}).items()}
        return {
            "lr": lr,
            **({"grad_norm": given["grad_norm"]} if "grad_norm" in given else {}),
            **_off_policy(np.concatenate(policy), np.concatenate([each.generation for each in scored])),
        }

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        name, sampled = f"v{self._version}", self._models[-1]
        if sampled is not self._training:
            state = (await self._call("save_state", lambda: self._training.save_state(name, A_DAY))).path
            await self._call("load_state", lambda: sampled.load_state(state))
            await self._delete([state])
        saved = await self._call(
            "save_weights_for_sampler", lambda: sampled.save_weights_for_sampler(name, A_DAY)
        )
        path = saved.path
        self._snapshots.append(path)
        await self._delete(self._snapshots[: -self._config.snapshots])
        self._snapshots = self._snapshots[-self._config.snapshots :]
        measured = await self._canary(path, canary) if canary and self._config.canary else ()
        return Weights(version=self._version, location=path, nbytes=0, tensors=(), canary=measured)

    async def _canary(self, path: str, contexts: Sequence[tuple[int, ...]]) -> tuple[Canary, ...]:
        """Return the trainer's logprobs of the sampler's likeliest tokens.

        The protocol's forward pass does not return the likeliest tokens, so they come from a sampler of the
        snapshot.
        """
        client = await self._session.client(self._deadline)
        sampler = await self._call("the snapshot", lambda: client.create_sampling_client_async(path))
        greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
        inputs = [types.ModelInput.from_ints(list(context)) for context in contexts]
        answers = await aio.gather(
            self._call("a sample", partial(sampler.sample_async, each, 1, greedy)) for each in inputs
        )
        tokens = [answer.sequences[0].tokens[0] for answer in answers]
        data = [
            types.Datum(
                model_input=each,
                loss_fn_inputs=_tensors(
                    target_tokens=np.array([*context[1:], token]),
                    weights=np.array([0.0] * (len(context) - 1) + [1.0]),
                ),
            )
            for each, context, token in zip(inputs, contexts, tokens, strict=True)
        ]
        passes = await self._call("forward", lambda: self._training.forward(data, "cross_entropy"))
        return tuple(
            Canary(prompt_ids=context, token_ids=(token,), logprobs=(output["logprobs"].data[-1],))
            for context, token, output in zip(contexts, tokens, passes.loss_fn_outputs, strict=True)
        )

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        name = f"step{self._version}-{time.time_ns()}"
        state = (await self._call("save_state", lambda: self._training.save_state(name))).path
        about = {
            "state": state,
            "version": self._version,
            "base_model": self._base_model,
            "rank": self._rank,
        }

        async def write() -> None:
            await asyncio.to_thread(self._write, directory / "trainer", about)
            kept = {_read(path)["state"] for path in directory.parent.glob(f"*/trainer/{STATE}")}
            await self._delete(self._states - kept)
            self._states = {*(self._states & kept), state}

        return write

    def _write(self, directory: Path, about: dict[str, object]) -> None:
        directory.mkdir(parents=True)
        for pattern in FILES:
            for path in Path(self._setup.model.path).glob(pattern):
                shutil.copy(path, directory)
        (directory / STATE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    async def aclose(self) -> None:
        await self._delete(self._snapshots[:-1])
        await aio.gather(self._session.unload(model.model_id) for model in self._models)
        self._session.close()

    async def _delete(self, paths: Iterable[str]) -> None:
        await aio.gather(self._session.delete(path) for path in paths)

    @property
    def _training(self) -> TrainingClient:
        return self._models[0]

    async def _call(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._session.call(what, ask, self._deadline)
        except FAILURES as error:
            raise TrainerError(f"trainer: {what} failed: {said(error)}") from error
        except Unavailable as error:
            raise TrainerError(str(error)) from error


def _read(path: Path) -> dict[str, Any]:
    """Read the service's state from a checkpoint."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@frozen
class _Scored:
    """A row in the service's format."""

    datum: types.Datum
    indices: NDArray[np.int64]
    """Indices of the sampled tokens in the targets."""
    generation: Floats
    """The engine's logprobs of the sampled tokens."""


def _scored(rows: Sequence[Row], setup: TrainerSetup, *, means: bool) -> list[_Scored]:
    """Convert rows, with the weights of ``loss.aggregation`` multiplied into the advantages.

    Args:
        means: whether the service averages over the tokens of a row and over rows, instead of summing.
    """
    weights = row_weights(
        [row.tokens.n_sampled for row in rows],
        sequences=[-1 - place if row.rollout is None else row.rollout for place, row in enumerate(rows)],
        prompts=[row.group for row in rows],
        aggregation=setup.loss.aggregation,
        constant=setup.loss.aggregation_constant or None,
    )
    found = []
    for row, weight in zip(rows, weights, strict=True):
        sampled = np.flatnonzero(row.tokens.sampled)
        ids = np.concatenate([row.prompt_ids, row.tokens.ids[: sampled[-1] + 1]])
        indices = len(row.prompt_ids) - 1 + sampled
        targets = len(ids) - 1
        if means:
            weight *= targets * len(rows)
        advantages, logprobs = np.zeros(targets, np.float32), np.zeros(targets, np.float32)
        given = row.advantage if row.token_advantages is None else row.token_advantages
        advantages[indices] = weight * np.asarray(given)
        logprobs[indices] = row.tokens.logprobs[sampled]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs=_tensors(target_tokens=ids[1:], logprobs=logprobs, advantages=advantages),
        )
        found.append(_Scored(datum, indices, logprobs[indices].astype(np.float64)))
    return found


def _tensors(**arrays: NDArray[Any]) -> dict[str, types.TensorData]:
    return {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}


def _off_policy(policy: Floats, generation: Floats) -> dict[str, float]:
    """Return metrics of the distance between policy and generation; see docs/metrics.md."""
    log_ratio = policy - generation
    ratio = np.exp(log_ratio.clip(max=LARGEST_LOG_RATIO))
    return {
        "logprob_diff_mean": float(np.abs(log_ratio).mean()),
        "mismatch_kl": float((ratio - 1 - log_ratio).mean()),
        "importance_ratio_mean": float(ratio.mean()),
        "importance_ratio_max": float(ratio.max()),
        "effective_sample_size": min(1.0, float(ratio.mean() ** 2 / np.square(ratio).mean())),
    }
