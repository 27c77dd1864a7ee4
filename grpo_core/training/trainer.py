"""The trainer: one process that owns the model and the optimizer.

``TorchTrainer`` is synchronous and runs in a child process; ``ProcessTrainer`` is the protocol's
``Trainer`` in front of it.  A step is: rows -> updates (whole groups) -> micro-batches (padded little);
logprobs before the first update, where the loss needs them; then for each update the loss summed over its
micro-batches, weighted by ``loss.aggregation``, and one step of the optimizers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from attrs import evolve
from torch import Tensor

from grpo_core.config.run import ScoreConfig, TrainerSetup, needed_scores
from grpo_core.contracts import loss as losses
from grpo_core.contracts.errors import PluginError, TrainerError
from grpo_core.contracts.records import Batch, Row, StepResult, Weights
from grpo_core.engines.addresses import is_loopback
from grpo_core.loop.schedule import schedule
from grpo_core.losses.aggregation import row_weights
from grpo_core.losses.entropy import EntropyControl
from grpo_core.models.files import published_dtype
from grpo_core.plugins.configured import host_of
from grpo_core.plugins.files import load_object
from grpo_core.plugins.transports import find_transport
from grpo_core.processes import cpu
from grpo_core.processes.memory import thread_count
from grpo_core.training.batching import in_hinted_context, length, microbatches, of_several_rows, packs
from grpo_core.training.budget import fitting, overhead, token_budget
from grpo_core.training.building import trained_section
from grpo_core.training.digest import Digests
from grpo_core.training.loss_output import checked
from grpo_core.training.memory import kept_weights
from grpo_core.training.microbatch import MicroBatch, collate, without_rows
from grpo_core.training.model import FullModel, Model, ModelSource, compute_dtype
from grpo_core.training.optimization import Optimization, divided
from grpo_core.training.packing import PackingError, packs_well
from grpo_core.training.passes import Passes
from grpo_core.training.plan import Layout, Share, shares, with_tokens
from grpo_core.training.profiling import StepProfiler, part, take_seconds
from grpo_core.training.ranks import Alone, Ranks
from grpo_core.training.saving import Checkpointer
from grpo_core.training.scores import FrozenModel, Scores, check_vocabulary
from grpo_core.training.totals import Totals, off_policy, signal
from grpo_core.training.update import Update
from grpo_core.weights.publishing import Writer, whole

MAX_LOST_UPDATES = 3
"""Number of consecutive updates without a finite gradient after which the trainer fails."""

SWITCH = 5e-4
"""Seconds that the checkpoint's writer thread may hold the interpreter while training waits for it."""


def create(setup: TrainerSetup) -> TorchTrainer:
    """Factory for the child process."""
    return TorchTrainer.in_child(setup)


class TorchTrainer:
    """Trains a transformers causal language model on one device.

    A plugin's trainer may extend it: ``place``, ``join``, ``passes``, ``build`` and
    ``readable`` are for subclasses.

    Args:
        setup: what the trainer is made from.

    Raises:
        ModelError: the model or one that scores cannot be loaded.
        PluginError: the loss or the optimizer cannot be found or does not accept its options.
        CheckpointError: ``setup.resume_from`` cannot be resumed.
        ConfigError: torch cannot use the device, engines could not reach the trainer, a group of the
            optimizer has no parameter, or a model that scores has another vocabulary.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup, self._config = setup, setup.trainer
        self.device = self.place()
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # otherwise some calls would allocate on the first GPU
        host = host_of(setup, setup.block)
        transport = find_transport(setup.transport, host, setup.transport_options)
        leaves = transport.remote and not is_loopback(transport.host)
        self._ranks = self.join(leaves=leaves)
        # before the model is made: its port may be taken
        self._writer: Writer = load_object(transport.writer, who="transport")(setup, self.device, self._ranks)
        self._loss = host.function("loss", setup.loss.name, **setup.loss.options)
        self._needs = self._loss.needs
        self._entropy: EntropyControl | None = None
        if "entropy_control" in self._needs:
            self._entropy = EntropyControl.of(self._loss.function, self._loss.options)
        if setup.prepare is not None:
            self._ranks.in_turn(setup.prepare)  # the first one makes the model
        chosen_scores = needed_scores(setup.scores, self._needs)
        for name, score in chosen_scores.items():
            if score.model:
                check_vocabulary(setup.model, name, score)
        resume = Path(setup.resume_from) if setup.resume_from else None
        passes = self.passes()
        slow = self._config.packing == "auto" and not packs_well(setup.model.dtype, self.device)
        if slow or setup.model.attention:  # packing sets its own attention
            passes = evolve(passes, packing=False)
        try:
            self.model, self._scores = self._models(chosen_scores, resume, passes)
        except PackingError:
            if self._config.packing != "auto":
                raise
            passes = evolve(passes, packing=False)
            self.model, self._scores = self._models(chosen_scores, resume, passes)
        computed = compute_dtype(setup.model, self.device, self.model.parameters)
        sent = published_dtype(str(computed).removeprefix("torch."), setup.engine_dtype)
        self._published: torch.dtype = getattr(torch, sent)
        self._named = list(self.model.trainable())
        self._parameters = [parameter for _, parameter in self._named]
        self.layout = Layout(packed=passes.packing, together="sequences" in self._needs)
        self._budget = token_budget(self._config, self.model.vocabulary, self.device)
        self._overhead = overhead(self.model.parameters, self.device)
        chosen = setup.optimizer
        self.optimizers = Optimization(
            self._named,
            host.function("optimizer", chosen.name, **chosen.options),
            divided(self._named, chosen, self._config),
        )
        self._digests = Digests(self._named, self.optimizers, ranks=self._ranks, device=self.device)
        self._saving = Checkpointer(
            self.model,
            self.optimizers,
            ranks=self._ranks,
            device=self.device,
            entropy=self._entropy,
            readable=self.readable,
        )
        self._freed = cpu.FreedMemory()
        self._profiler = StepProfiler(
            setup.profile, steps=self._config.profile, rank=setup.rank, device=self.device
        )
        self._lost_updates = 0
        self._changed = False
        """Whether the newest step has changed the saved state."""
        torch.manual_seed(setup.seed)
        self.version = self._saving.resume(resume) if resume else 0

    @classmethod
    def in_child(cls, setup: TrainerSetup) -> Self:
        """Make the trainer of a process that does nothing else."""
        cpu.prepare(thread_count(setup.trainer.threads, setup.colocated, setup.ranks))
        sys.setswitchinterval(SWITCH)
        return cls(setup)

    # ------------------------------------------------------------------------------ for subclasses

    def place(self) -> torch.device:
        """Choose the device."""
        return cpu.resolve_device(self._config.device, "trainer.device")

    def join(self, *, leaves: bool) -> Ranks:
        """Join the processes that train together; ``leaves``: weights may leave this machine."""
        return Alone()

    def passes(self) -> Passes:
        """Choose how forward and backward passes are computed."""
        return Passes.of(self._config)

    def build(self, source: ModelSource) -> Model:
        """Make the model that trains all weights.  Raises ModelError."""
        return FullModel.build(source)

    def readable(self, tensor: Tensor) -> Tensor:
        """Return a readable tensor for a tensor of the model or the optimizer's state."""
        return tensor

    # ------------------------------------------------------------------------------ the parts

    def _models(
        self, scores: Mapping[str, ScoreConfig], resume: Path | None, passes: Passes
    ) -> tuple[Model, Scores]:
        """Make the model, from the setup or from a checkpoint, and what scores the sampled tokens."""
        source = ModelSource(
            start=self.setup.model.path,
            saved=resume / "trainer" if resume else None,
            config=self.setup.model,
            device=self.device,
            passes=passes,
            kept=kept_weights(scores),
            seed=self.setup.seed,
            ranks=self._ranks,
        )
        section = trained_section(self.setup)
        model = self.build(source) if section is None else section.build_model(source)
        others = {name: FrozenModel(each, self.device, passes) for name, each in scores.items() if each.model}
        cpu.return_freed_memory()  # the memory of weights that have moved to a GPU
        return model, Scores(scores, model, others)

    def description(self) -> dict[str, Any]:
        """Describe the trainer to its parent process."""
        return {
            "version": self.version,
            "parameters": self.model.parameters,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "layout": self.layout,
        }

    # ------------------------------------------------------------------------------ one step

    def step(self, batch: Batch) -> StepResult:
        """Train version ``batch.step`` into the next; a batch without rows only raises the version.

        Rows with a non-finite loss and updates with a non-finite gradient are skipped and counted.  Raises
        TrainerError if there are too many, or if the batch is for another version.
        """
        (share,) = shares(batch, updates=self._config.updates_per_step, layout=self.layout)
        return self.train(share)

    def train(self, share: Share) -> StepResult:
        """Compute this rank's share of a step; see ``step``.  All ranks return the same metrics."""
        if share.step != self.version:
            raise TrainerError(f"step {share.step} was requested from a trainer at version {self.version}")
        self._changed = False
        with self._profiler.step():
            done = self._train(share)
        self._freed.limit()
        return done

    def unchanged(self) -> bool:
        """Return whether the last call of ``step`` or ``train`` left the saved state unchanged."""
        return not self._changed

    def _train(self, share: Share) -> StepResult:
        begun = time.perf_counter()
        take_seconds()  # those of a publication
        with part("rows from the data plane"):
            share = with_tokens(share)
        totals = Totals()
        divided: Sequence[Sequence[int]] = share.updates
        if self.setup.loss.max_sequence_error:
            divided = [self._agreeing(share, indices, totals) for indices in divided]
        divided = [indices for indices in divided if indices]
        with part("rows to tensors"):
            updates = [self._microbatches(share, indices) for indices in divided]
        with part("logprobs before the update"):
            updates = [self._scored(update, i, share.temperature) for i, update in enumerate(updates)]
        for number, (indices, update) in enumerate(zip(divided, updates, strict=True)):
            self._update(Update.of(share, number, indices), update, totals)
        self.version += 1
        if due := self._scores.due(self.version):
            self._saving.settled()  # a step without a finite gradient has not waited
            self._scores.refresh(due)
        metrics = totals.metrics(self._ranks)
        with part("fingerprints"):
            digest = self._digests.current() if self._config.fingerprints else None
        seconds = time.perf_counter() - begun
        used = sum(share.facts[index].length for indices in divided for index in indices)
        sizes = [micro.n_tokens for update in updates for micro in update]
        padded = sum(self._ranks.gathered(sum(sizes)))
        metrics |= {
            "time/train": seconds,
            "tokens/trained": float(used),
            "tokens/padding": (padded - used) / padded if padded else 0.0,
            **self._gpu_memory(max(sizes, default=0)),
        }
        return StepResult(version=self.version, metrics=metrics, digest=digest, parts=take_seconds())

    def _gpu_memory(self, tokens: int) -> dict[str, float]:
        """Return the peak of allocated memory on this rank's GPU since the last call.

        ``tokens``, of the largest micro-batch, and this peak tell how large later ones may be.
        """
        if self.device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        if not self._config.tokens_per_microbatch:
            held = torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device) - held
            self._budget = max(self._budget, fitting(tokens=tokens, nbytes=peak - held, free=free))
        return {"memory_gpu/trainer": peak / 2**20}

    def _microbatches(self, share: Share, indices: Sequence[int]) -> list[MicroBatch]:
        """Divide this rank's rows of an update; a loss that needs "sequences" gets a rollout's rows together.

        All ranks have the same number of micro-batches, perhaps without rows, so that collectives match.
        """
        facts = [share.facts[index] for index in indices]
        weights = row_weights(
            [row.sampled for row in facts],
            sequences=[row.rollout for row in facts],
            prompts=[row.group for row in facts],
            aggregation=self.setup.loss.aggregation,
            constant=self.setup.loss.aggregation_constant,
        )
        mine = [i for i, index in enumerate(indices) if index in share.rows]
        rows = [share.rows[indices[i]] for i in mine]
        together = of_several_rows(rows) if self.layout.together else []
        return self._collated(rows, [weights[i] for i in mine], together)

    def _collated(
        self,
        rows: Sequence[Row],
        weights: Sequence[float] | None = None,
        together: Sequence[Sequence[int]] = (),
    ) -> list[MicroBatch]:
        """Lay rows out in micro-batches, as many as the other ranks have.

        Args:
            rows: of this rank.
            weights: factor of the losses of each row's tokens.
            together: indices of rows that are a micro-batch each time.
        """
        alone = sorted(set(range(len(rows))).difference(*together))
        lengths = [length(rows[i]) for i in alone]
        prompts = [(rows[i].prompt_ids.tobytes(), len(rows[i].prompt_ids)) for i in alone]
        if self.layout.packed:
            divided = packs(lengths, prompts, self._budget)
        else:
            divided = microbatches(lengths, self._budget, overhead=self._overhead)
        made = [
            collate(
                [rows[i] for i in part],
                self.device,
                weights=None if weights is None else [weights[i] for i in part],
                packed=self.layout.packed,
            )
            for part in [*together, *([alone[i] for i in part] for part in divided)]
        ]
        missing = max(self._ranks.gathered(len(made))) - len(made)
        return made + [without_rows(self.device)] * missing

    @torch.no_grad()
    def _agreeing(self, share: Share, indices: Sequence[int], totals: Totals) -> list[int]:
        """Return the rows of rollouts whose logprobs agree well enough between engine and trainer."""
        rollout_of = {id(share.rows[i]): share.facts[i].rollout for i in indices if i in share.rows}
        errors: dict[int, list[Tensor]] = {}
        for micro in self._microbatches(share, indices):
            logprobs = self.model.score(micro, share.temperature)[0]
            counts = [row.tokens.n_sampled for row in micro.rows]
            difference = logprobs[: sum(counts)] - micro.generation_logprobs[: sum(counts)]
            each = difference.detach().abs().clamp(max=80.0).exp()  # 1: trainer and engine agree
            for row, of_row in zip(micro.rows, torch.split(each, counts), strict=True):
                errors.setdefault(rollout_of[id(row)], []).append(of_row)
        means = torch.stack([torch.cat(parts).mean() for parts in errors.values()] or [torch.tensor(0.0)])
        limit = self.setup.loss.max_sequence_error
        mine = {
            rollout for rollout, mean in zip(errors, means.tolist(), strict=bool(errors)) if not mean <= limit
        }
        masked = set().union(*self._ranks.gathered(sorted(mine)))
        if errors and len(finite := means[means.isfinite()]):  # the others are masked
            totals.add({"sequence_error_mean": finite, "sequence_error_max": finite})
        if mine:
            right = {share.facts[index].rollout for index in indices if share.facts[index].correct}
            totals.add({"sequence_error_masked_correct": torch.tensor([float(r in right) for r in mine])})
        totals.count("sequence_error_masked", len(mine))
        return [index for index in indices if share.facts[index].rollout not in masked]

    @torch.no_grad()
    def _scored(self, update: Sequence[MicroBatch], number: int, temperature: float) -> list[MicroBatch]:
        """Return the micro-batches with logprobs by the step's first weights, and with scores.

        The first update needs no pass for the step's first weights: its forward pass uses them.
        Raises TrainerError if a score is NaN.
        """
        scores: dict[str, list[Tensor]] = {}
        for name, chosen in self._scores.chosen.items():
            scores[name], wrong = (self._hinted if chosen.hint else self._plain)(name, update, temperature)
            if total := sum(self._ranks.gathered(wrong)):
                raise TrainerError(
                    f"step {self.version}: the score {name!r} by the weights {chosen.weights!r} is NaN for "
                    f"{total} tokens; the weights are unchanged by it. Look at these weights, or resume from "
                    "an earlier checkpoint"
                )
        proximal = number > 0 and self._config.proximal == "recompute"
        return [
            evolve(
                micro,
                proximal_logprobs=self.model.score(micro, temperature)[0] if proximal else None,
                scores={name: of_update[i] for name, of_update in scores.items()},
            )
            for i, micro in enumerate(update)
        ]

    def _plain(self, name: str, update: Sequence[MicroBatch], temperature: float) -> tuple[list[Tensor], int]:
        """Return a score of each micro-batch, and its number of NaN."""
        found = [self._scores.logprobs(name, micro, temperature) for micro in update]
        return found, _nans([each for each, micro in zip(found, update, strict=True) if micro.rows])

    def _hinted(
        self, name: str, update: Sequence[MicroBatch], temperature: float
    ) -> tuple[list[Tensor], int]:
        """Return a score of each micro-batch in the hinted context, and its number of NaN.

        Rows without a hint cost no pass: their tokens are NaN, which is not counted.
        """
        contexts = ((id(row), in_hinted_context(row)) for micro in update for row in micro.rows)
        hinted = {key: context for key, context in contexts if context is not None}
        places = {id(context): key for key, context in hinted.items()}
        found: dict[int, Tensor] = {}
        for micro in self._collated(list(hinted.values())):
            scored = self._scores.logprobs(name, micro, temperature)
            if micro.rows:
                parts = torch.split(scored, [row.tokens.n_sampled for row in micro.rows])
                found |= {places[id(row)]: part for row, part in zip(micro.rows, parts, strict=True)}
        scores = []
        for micro in update:
            score = torch.full_like(micro.generation_logprobs, torch.nan)
            begin = 0
            for row in micro.rows:
                end = begin + row.tokens.n_sampled
                if id(row) in found:
                    score[begin:end] = found[id(row)]
                begin = end
            scores.append(score)
        return scores, _nans(list(found.values()))

    def _update(self, about: Update, update: Sequence[MicroBatch], totals: Totals) -> None:
        share, number = about.share, about.number
        if "update_entropies" in self._needs:
            about = evolve(about, entropies=self._entropies(update, share.temperature))
        if self._entropy is not None:
            about = evolve(about, entropy_coefficient=self._entropy.applied)
        before = totals.sum("bonus_entropy")
        keeps = self._config.activations == "keep" and self._ranks.size == 1  # what autocast rounded as well
        with torch.autocast(self.device.type, enabled=False) if keeps else nullcontext():
            bad = [self._backward(about, micro, totals) for micro in update]
        if self._entropy is not None:
            self._changed = True
            totals.add({"entropy_coefficient": torch.tensor([about.entropy_coefficient])})
            self._entropy.observe(
                sum(self._ranks.gathered(totals.sum("bonus_entropy") - before)) / about.tokens
            )
        with part("norm of the gradient"):
            norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
            self._check_rows(about, update, bad, totals)
            finite = self._gradient_is_finite(about, norm, totals)
        if finite:
            self._changed = True
            place = share.step * self._config.updates_per_step + number
            factor = schedule(self._config, place, lambda: totals.metrics(self._ranks))
            with part("wait for the checkpoint"):
                self._saving.settled()
            with part("optimizer"):
                self.optimizers.step(factor)
            totals.add({"grad_norm": norm[None], "lr": norm.new_tensor([self._config.lr * factor])})
        self.optimizers.zero_grad()

    @torch.no_grad()
    def _entropies(self, update: Sequence[MicroBatch], temperature: float) -> Tensor:
        """Return the entropies of all sampled tokens of an update by the current weights."""
        scored = [(micro, self.model.score(micro, temperature)[1]) for micro in update]
        return self._ranks.joined(torch.cat([each if micro.rows else each[:0] for micro, each in scored]))

    def _backward(self, about: Update, micro: MicroBatch, totals: Totals) -> Tensor:
        """Add the gradient of one micro-batch without the rows of non-finite loss, which are returned.

        The gradient is stopped at the model's outputs, so that non-finite values in one row reach no
        parameter.
        """
        needs_entropy = "entropy" in self._needs
        with part("forward"):
            logprobs, entropy = self.model.score(
                micro, about.share.temperature, entropy_gradient=needs_entropy
            )
        outputs = [logprobs, entropy] if needs_entropy else [logprobs]
        if not micro.rows:
            with part("backward"):
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
            return torch.zeros(0, dtype=torch.bool, device=self.device)
        leaves = [output.detach().requires_grad_() for output in outputs]
        given = leaves[1] if needs_entropy else entropy.detach() if about.entropies is not None else None
        per_token, metrics = self._token_losses(about, micro, leaves[0], given)
        if self.setup.loss.aggregation == "token":
            minimised, loss = per_token.sum() / about.tokens, per_token
        else:
            weighted = per_token * micro.weights.to(per_token.dtype)
            minimised, loss = weighted.sum(), weighted * about.tokens
        gradients = torch.autograd.grad(minimised, leaves, materialize_grads=True)
        wrong = ~per_token.detach().isfinite()
        for gradient in gradients:
            wrong = wrong | ~gradient.isfinite()
        bad = torch.zeros(len(micro.rows), device=wrong.device).index_add_(0, micro.row_of, wrong.float()) > 0
        kept = ~bad[micro.row_of]
        with part("backward"):
            torch.autograd.backward(outputs, [gradient.where(kept, 0.0) for gradient in gradients])
        metrics = {"loss": loss, "entropy": entropy, **metrics}
        if not self._scores.signal:  # it is in addition to the advantages
            metrics |= signal(gradients[0], micro.advantages, micro.weights.to(per_token.dtype))
        totals.add({name: values.detach().where(kept, 0.0) for name, values in metrics.items()})
        return bad

    def _check_rows(
        self, about: Update, update: Sequence[MicroBatch], bad: Sequence[Tensor], totals: Totals
    ) -> None:
        """Count the rows that were left out; raises TrainerError if they are too many."""
        rows = [row for micro in update for row in micro.rows]
        mine = [row.group for row, is_bad in zip(rows, torch.cat(list(bad)).tolist(), strict=True) if is_bad]
        totals.count("non_finite_rows", len(mine))
        wrong = [group for groups in self._ranks.gathered(mine) for group in groups]
        if len(wrong) > self.setup.max_non_finite * about.rows:
            raise TrainerError(
                f"step {about.share.step}, update {about.number}: the loss of {len(wrong)} of {about.rows} "
                f"rows, in groups {sorted(set(wrong))}, is not finite ({self._loss}; "
                f"health.max_non_finite = {self.setup.max_non_finite:g}); the weights are unchanged by it. "
                "Look at the rewards, advantages and logprobs of these rows, or lower trainer.lr"
            )

    def _gradient_is_finite(self, about: Update, norm: Tensor, totals: Totals) -> bool:
        """Return whether the gradient is finite; raises TrainerError after several in a row that are not."""
        if norm.isfinite():
            self._lost_updates = 0
            return True
        self._lost_updates += 1
        if self._ranks.rank == 0:
            totals.count("non_finite_updates", 1)
        if self._lost_updates >= MAX_LOST_UPDATES:
            raise TrainerError(
                f"step {about.share.step}, update {about.number}: the gradient is not finite, with finite "
                f"losses, {self._lost_updates} times in a row; these updates were left out. Lower "
                'trainer.lr, or train in model.dtype = "float32"'
            )
        return False

    def _token_losses(
        self, about: Update, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None
    ) -> losses.LossOutput:
        """Return one loss for each token, and metrics; ``entropy`` is None unless the loss needs it."""
        generation, before = micro.generation_logprobs, micro.proximal_logprobs
        start = logprobs.detach() if before is None else before
        inputs = losses.LossInputs(
            policy_logprobs=logprobs,
            proximal_logprobs=generation if self._config.proximal == "generation" else start,
            generation_logprobs=generation,
            scores=micro.scores,
            entropy=entropy,
            entropy_coefficient=about.entropy_coefficient,
            advantages=micro.advantages,
            rows=micro.row_of,
            sequences=micro.sequences,
            weights=micro.weights.to(logprobs.dtype),
            correct=micro.correct,
            step=about.share.step,
            update=about.number,
            update_tokens=about.tokens,
            update_rows=about.rows,
            update_sequences=about.sequences,
            update_prompts=about.prompts,
            update_correct_tokens=about.correct_tokens,
            update_entropies=about.entropies,
        )
        per_token, metrics = checked(self._loss(inputs), str(self._loss), len(logprobs))
        if not per_token.requires_grad:
            raise PluginError(
                f"{self._loss}: its result does not depend on policy_logprobs; nothing is trained"
            )
        if about.number == 0 or before is not None:  # both are by the weights that the step starts from
            metrics = {**metrics, **off_policy(start, generation)}
        return per_token, metrics

    # ------------------------------------------------------------------------------ weights and files

    def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        """Publish the current weights where engines read them, over the version before."""
        with part("publication"):
            weights = self._writer.write(self.version, self.model.published(), dtype=self._published)
        with part("logprobs of the canary"):
            predicted = self.model.next_tokens(canary) if canary else ()  # ranks gather layers for it
            weights = evolve(weights, canary=predicted, base=self.model.base)
        if self.setup.shares_gpu:
            torch.cuda.empty_cache()  # the step's memory, for an engine on the same GPU that loads now
        return weights

    def save(self, directory: Path) -> None:
        """Write the state needed to continue into ``directory``, until the next update of the weights."""
        self._saving.save(directory, self.version)
        if not self.setup.async_save:
            self._saving.settled()

    def written(self) -> Future[None]:
        """Done when what was saved last is written, or with the OSError for which it cannot be."""
        return self._saving.written()


def _nans(scores: Sequence[Tensor]) -> int:
    """Count NaN; a GPU is waited for once."""
    return int(torch.cat([score.isnan() for score in scores]).sum()) if scores else 0
