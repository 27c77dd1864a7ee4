"""The contract of trainers, as checks for authors.

    def test_mine_keeps_the_contract():
        check_trainer(MyTrainer)

Each check raises AssertionError.  The trainer gets a small random model and is called as in a run.  Published
weights are compared with transformers' forward pass.  The checks use one trainer, in order, and at the end a
second one that continues from the first one's checkpoint.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import evolve

from grpo_core import Batch, Row, Tokens, Trainer, TrainerSetup, Weights
from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.demo.tiny import encode
from grpo_core.kit import checkpoint_tensors, read_weights
from grpo_core.testing import make_tiny_model
from grpo_plugin_devkit.contracts import Contract, Noted, within
from grpo_plugin_devkit.decoding import load_test_model

T = TypeVar("T")

PATIENCE = 120.0
"""Time limit of a trainer's call in seconds."""
METHODS = ("started", "step", "publish", "save", "watch", "aclose")
PROMPT = "ab="
GOOD, BAD = "good", "evil"
"""Replies with positive and negative advantage."""
TOLERANCE = 1e-3
"""Tolerance of logprobs in float32."""
CONTINUED = 1e-6
"""Largest difference of a weight between an uninterrupted and a resumed trainer."""


def check_trainer(make: Callable[..., Any], **options: Any) -> None:
    """Check a trainer's contract; ``make`` is its factory.  Raises AssertionError."""
    TrainerContract(lambda setup: make(setup, **options)).check()


class TrainerContract(Contract):
    """The contract of a trainer.

    Args:
        make: the factory with its options filled in.
    """

    essential = ("it starts and makes the model",)

    def __init__(self, make: Callable[[TrainerSetup], Any]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._directory = tempfile.TemporaryDirectory(
            prefix="grpo-core-check-",
            ignore_cleanup_errors=True,  # a broken trainer may still write files
        )
        self._path = Path(self._directory.name)
        self._trainer: Trainer | None = None
        self._version = 0
        self._went_on: dict[str, torch.Tensor] = {}
        """Weights of the first trainer one step after its checkpoint."""

    def __exit__(self, *raised: Any) -> None:
        trainer, self._trainer = self._trainer, None
        try:
            if trainer is not None:
                self._runner.run(within(PATIENCE, trainer.aclose(), "aclose()"))
        finally:
            self._runner.close()
            self._directory.cleanup()

    # -------------------------------------------------------------------------- clauses

    def it_starts_and_makes_the_model(self) -> None:
        """Check that ``started`` calls ``setup.prepare`` once, before the model is loaded."""
        trainer = self._started(self._setup())
        assert (self._path / "m" / "config.json").is_file(), (
            "started() returned, and the model was not made: it calls setup.prepare, if there is one"
        )
        self._trainer = trainer

    def it_publishes_the_model_that_it_started_with(self) -> None:
        weights = self._publish()
        assert weights.version == 0, f"before the first step the version is {weights.version}, expected 0"
        found, expected = read_weights(weights), checkpoint_tensors(load_test_model(self._path / "m"))
        missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        assert not missing, f"it does not publish {missing[0]!r} ({len(missing)} tensors are missing)"
        assert not more, f"it publishes {more[0]!r}, which the model's checkpoint does not have"
        for name, tensor in expected.items():
            shape, wanted = tuple(found[name].shape), tuple(tensor.shape)
            assert shape == wanted, f"{name} has the shape {shape}, expected {wanted}"
            close = torch.allclose(found[name].float(), tensor.float(), atol=1e-2)
            assert close, f"{name} differs from the model at setup.model.path"

    def its_canary_is_what_its_weights_say(self) -> None:
        """Check the canary's logprobs; weights without a canary are allowed, and noted."""
        prompts = (tuple(encode("ab=")), tuple(encode("cdef=")))
        weights = self._publish(prompts)
        if not weights.canary:
            raise Noted("publish() returns none: no run can show that its engines use the weights")
        assert len(weights.canary) == len(prompts), (
            f"publish() got {len(prompts)} prompts of a canary and returned {len(weights.canary)}"
        )
        for prompt, canary in zip(prompts, weights.canary, strict=True):
            assert canary.prompt_ids == prompt, f"the canary of {prompt} is for {canary.prompt_ids}"
            said = self._logprobs(weights, prompt)[-1]
            for token, logprob in zip(canary.token_ids, canary.logprobs, strict=True):
                difference = abs(said[token].item() - logprob)
                assert difference < TOLERANCE * 100, (
                    f"its canary says {logprob:.4f} for token {token}, and its weights say "
                    f"{said[token].item():.4f}: the engine would be found at fault"
                )

    def a_step_makes_good_tokens_likelier_and_bad_ones_rarer(self) -> None:
        before = self._preference(self._publish())
        for _ in range(3):
            self._step(self._batch())
        weights = self._publish()
        assert weights.version == self._version, (
            f"after step {self._version - 1} it publishes version {weights.version}, expected {self._version}"
        )
        after = self._preference(weights)
        assert after > before + 1e-3, (
            f"{GOOD!r} with the advantage 1 and {BAD!r} with -1 were trained three times, and the difference "
            f"of their logprobs went from {before:.4f} to {after:.4f}, expected more"
        )

    def its_canary_follows_its_weights(self) -> None:
        """Check that the canary changes with the weights over three steps."""
        self.its_canary_is_what_its_weights_say()

    def a_batch_without_rows_only_raises_the_version(self) -> None:
        before = self._weights()
        self._step(evolve(self._batch(), rows=()))
        _same(before, self._weights(), "after a batch without rows", exactly=True)

    def what_it_saves_is_what_it_published_although_it_trains_on(self) -> None:
        trainer, directory = self._there(), self._path / "saved"
        directory.mkdir()
        published = self._weights()
        written = self._run(trainer.save(directory), "save()")
        assert callable(written), f"save() returned {type(written).__name__}, expected an async function"
        try:
            self._step(self._batch())
        finally:
            self._run(written(), "the function that save() returned")
        assert (directory / "trainer" / "config.json").is_file(), (
            "save() wrote no transformers model: there is no trainer/config.json"
        )
        saved = checkpoint_tensors(load_test_model(directory / "trainer"))
        _same(published, saved, "in the checkpoint", exactly=False)
        self._went_on = self._weights()

    def another_one_continues_exactly_from_what_was_saved(self) -> None:
        """Check that a checkpoint includes the optimizer and random state."""
        assert self._went_on, "nothing was saved"
        self._run(self._there().aclose(), "aclose()")
        self._trainer, went_on, self._version = None, self._version, self._version - 1
        self._trainer = self._started(evolve(self._setup(), resume_from=str(self._path / "saved")))
        weights = self._publish()
        assert weights.version == self._version, (
            f"it was saved at version {self._version}, and continues with version {weights.version}"
        )
        self._step(self._batch())
        assert self._version == went_on
        _same(self._went_on, self._weights(), "after it continued and trained the same batch", exactly=False)

    def it_is_watched_as_long_as_it_lives(self) -> None:
        async def story() -> None:
            watching = asyncio.ensure_future(self._there().watch())
            done, _ = await asyncio.wait([watching], timeout=0.05)
            if done:
                watching.result()
            watching.cancel()
            await asyncio.wait([watching])

        self._runner.run(story())

    def it_can_be_closed(self) -> None:
        trainer, self._trainer = self._there(), None
        self._run(trainer.aclose(), "aclose()")

    # -------------------------------------------------------------------------- the trainer

    def _setup(self) -> TrainerSetup:
        model = self._path / "m"
        make = partial(make_tiny_model, model, (), width=16, layers=1, warm_start_steps=0)
        return TrainerSetup(
            model=ModelConfig(path=str(model), dtype="float32"),
            trainer=TrainerConfig(
                steps=20, lr=3e-3, updates_per_step=1, warmup_updates=0, threads=1, device="cpu"
            ),
            plugins=(),
            prepare=None if model.exists() else make,
            colocated=False,
            log=str(self._path / "trainer.log"),
        )

    def _started(self, setup: TrainerSetup) -> Trainer:
        async def story() -> Any:
            made = self._make(setup)  # inside of a running event loop, as in a run
            assert not inspect.isawaitable(made), "its factory is async; it must return the trainer at once"
            for method in METHODS:
                assert callable(getattr(made, method, None)), (
                    f"{type(made).__name__} has no method {method!r}; a class that inherits from "
                    "grpo_core.Trainer need not define started, watch and aclose"
                )
            await within(PATIENCE, made.started(), "started()")
            return made

        trainer: Trainer = self._runner.run(story())
        return trainer

    def _there(self) -> Trainer:
        assert self._trainer is not None, "it did not start"
        return self._trainer

    def _run(self, awaitable: Awaitable[T], what: str) -> T:
        return self._runner.run(within(PATIENCE, awaitable, what))

    def _step(self, batch: Batch) -> None:
        result = self._run(self._there().step(batch), "step()")
        wanted = self._version + 1
        assert result.version == wanted, (
            f"step() of version {self._version} returned version {result.version}, expected {wanted}"
        )
        for name, value in result.metrics.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            assert number, f"metric {name!r} is {value!r}, expected a number"
        assert not any(map(math.isinf, result.metrics.values())), f"metrics are infinite: {result.metrics}"
        self._version = wanted

    def _publish(self, canary: tuple[tuple[int, ...], ...] = ()) -> Weights:
        return self._run(self._there().publish(canary), "publish()")

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in read_weights(self._publish()).items()}

    def _batch(self) -> Batch:
        rows = (_row(GOOD, 1.0, 0), _row(BAD, -1.0, 0), _row("abcabc", 0.5, 1), _row("c", -0.5, 1))
        return Batch(step=self._version, rows=rows, temperature=1.0)

    @torch.no_grad()
    def _logprobs(self, weights: Weights, ids: tuple[int, ...]) -> torch.Tensor:
        """Return transformers' logprobs after each token of ``ids`` with published weights."""
        module = load_test_model(self._path / "m")
        own = checkpoint_tensors(module)
        for name, tensor in read_weights(weights).items():
            own[name].copy_(tensor)
        logprobs: torch.Tensor = torch.log_softmax(module(torch.tensor([ids])).logits[0].float(), -1)
        return logprobs

    def _preference(self, weights: Weights) -> float:
        """Return the difference of the logprobs of the good and the bad reply."""
        prompt = tuple(encode(PROMPT))
        totals = []
        for reply in (GOOD, BAD):
            ids = (*prompt, *encode(reply))
            logprobs = self._logprobs(weights, ids)
            totals.append(sum(logprobs[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))))
        return totals[0] - totals[1]


def _row(reply: str, advantage: float, group: int) -> Row:
    ids = encode(reply)
    tokens = Tokens.generated(ids, (-4.0,) * len(ids), (0,) * len(ids))
    return Row(prompt_ids=encode(PROMPT), tokens=tokens, advantage=advantage, group=group)


def _same(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], when: str, *, exactly: bool
) -> None:
    for name, tensor in expected.items():
        assert name in found, f"{when} there is no tensor {name!r}"
        difference = (tensor.float() - found[name].float()).abs().max().item()
        allowed = 0.0 if exactly else CONTINUED if tensor.dtype == torch.float32 else 1e-2
        assert difference <= allowed, f"{when} {name} differs by {difference:.3g} from what it was"
