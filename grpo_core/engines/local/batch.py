"""Rows that are decoded together.

A batch advances in columns (``grpo_core.engines.local.columns``): a step fills one column with a token and
its logprob for every row, without any Python code per row.  A finished row stays in place, dead, until enough
rows are dead; then the others move together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_core.contracts.errors import EngineError
from grpo_core.contracts.records import Completion, GenerationRequest
from grpo_core.contracts.tokens import Ids
from grpo_core.engines.local import sampling
from grpo_core.engines.local.columns import Columns
from grpo_core.engines.local.stopping import StopStrings

DEAD_SHARE = 0.1
"""Fraction of finished rows at which the others move together."""

Finished = tuple[int, "Completion | EngineError"]
Entry = tuple[int, GenerationRequest]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their names."""


class Cache(Protocol):
    """The keys and values of a batch's rows."""

    def prefill(self, ids: Tensor, lengths: Tensor, of: Tensor) -> Tensor:
        """Append rows; row i continues prompt ``of[i]``.

        Args: ids [P, T] prompts padded on the left; lengths [P]; of [n] indices into the prompts.
        Returns: logits [n, V] float32 of the tokens after the prompts; the caller may overwrite them, as the
        next call does.
        """
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Append a token [R] to each row; return the logits [R, V] float32 of the next one, as above."""
        ...

    def select(self, order: Tensor) -> None:
        """Keep the rows ``order`` [n], in that order."""
        ...


class EngineModel(Protocol):
    """A model architecture with its weights."""

    vocabulary: int
    max_positions: int
    device: torch.device
    rows_join: bool
    """Whether a cache accepts more rows after it has decoded; if not, they form another batch."""
    description: str

    def check(self, shapes: Shapes) -> None:
        """Raise WeightSyncError unless tensors of these names and shapes are the model's."""
        ...

    def load(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        """Copy all weights, which arrive in buckets."""
        ...

    def new_cache(self) -> Cache: ...


class DecodingBatch:
    """Rows that are decoded together.  Attributes in the plural are tensors with one value for each row."""

    def __init__(self, model: EngineModel, stops: StopStrings) -> None:
        self._device = model.device
        self._cache = model.new_cache()
        self._stop_strings = stops
        self._entries: list[Entry | None] = []
        """The entry of each row; None for a dead row."""
        self.alive = 0
        """Number of rows that are not finished."""
        self._history = Columns([((), torch.int64), ((), torch.float32)], model.device)
        self._versions: list[int] = []
        """The weight version of each column of the history, from time ``_versions_from`` on."""
        self._versions_from = 0
        empty = torch.empty(0, dtype=torch.int64, device=self._device)
        self._tokens = empty
        self._counters = empty
        self._births = empty
        """The time of each row's first token."""
        self._ends = empty
        """The time of each row's last token, unless it stops earlier."""
        self._alive = empty.bool()
        self._inverse_temperatures = empty.float()
        self._cuts = torch.empty(0, 3, dtype=torch.float64, device=self._device)
        """Limits of the tokens that each row samples from, [R, 3]; see ``sampling.truncation``."""
        self._greedy = empty.bool()
        self._stops = torch.empty(0, 0, dtype=torch.int64, device=self._device)
        """Token ids that end a row, [K, R]; -1 where a row has fewer than K."""
        self._summarise()

    def sampled(self) -> list[list[int]]:
        """Return the tokens that each unfinished row has so far."""
        ids, end = self._history.tensors[0], self._history.end
        begins = (self._births - self._history.offset).tolist()
        return [ids[begins[row] : end, row].tolist() for row, entry in enumerate(self._entries) if entry]

    def cancel(self, keys: set[int]) -> None:
        dead = [i for i, entry in enumerate(self._entries) if entry is not None and entry[0] in keys]
        self._retire(dead)

    def step(self, entries: Sequence[Entry], version: int) -> list[Finished]:
        """Decode one token of each row; ``entries`` join and get their first token."""
        n = len(self._entries)
        if n and (entries or self.alive <= (1 - DEAD_SHARE) * n):
            self.compact()
            n = len(self._entries)
        sampled = [self._sample(self._cache.decode(self._tokens), slice(0, n))] if n else []
        if entries:
            logits = self._join(entries)
            sampled.append(self._sample(logits, slice(n, None)))
        tokens, logprobs = (torch.cat(parts) for parts in zip(*sampled, strict=True))
        return self._record(tokens, logprobs, version)

    # ------------------------------------------------------------------------------ joining

    def _join(self, entries: Sequence[Entry]) -> Tensor:
        requests = [request for _, request in entries]
        index: dict[bytes, int] = {}
        of = [index.setdefault(request.prompt_ids.tobytes(), len(index)) for request in requests]
        prompts = [np.frombuffer(packed, np.int32) for packed in index]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(ids.numpy(), prompts, strict=True):
            row[len(row) - len(prompt) :] = prompt
        now = self._history.time
        self._entries.extend(entries)
        self.alive += len(entries)
        self._births = self._joined(self._births, [now] * len(requests))
        self._ends = self._joined(self._ends, [now + request.max_tokens - 1 for request in requests])
        self._counters = self._joined(self._counters, sampling.counters([r.seed for r in requests]))
        self._alive = self._joined(self._alive, [True] * len(requests))
        self._greedy = self._joined(self._greedy, [r.temperature == 0 for r in requests])
        self._inverse_temperatures = self._joined(
            self._inverse_temperatures, [1 / r.temperature if r.temperature else 1.0 for r in requests]
        )
        cuts = [sampling.truncation(top_k=r.top_k, top_p=r.top_p, min_p=r.min_p) for r in requests]
        self._cuts = torch.cat([self._cuts, torch.tensor(cuts, dtype=torch.float64).to(self._device)])
        self._join_stops([request.stop_token_ids for request in requests])
        self._summarise()
        return self._cache.prefill(
            ids.to(self._device), lengths.to(self._device), torch.tensor(of, device=self._device)
        )

    def _joined(self, old: Tensor, new: Tensor | Sequence[int] | Sequence[float]) -> Tensor:
        return torch.cat([old, torch.as_tensor(new, dtype=old.dtype).to(self._device)])

    def _join_stops(self, stop_ids: Sequence[tuple[int, ...]]) -> None:
        most = max(len(self._stops), max(map(len, stop_ids)))
        new = torch.tensor([ids + (-1,) * (most - len(ids)) for ids in stop_ids], dtype=torch.int64)
        old = torch.nn.functional.pad(self._stops, (0, 0, 0, most - len(self._stops)), value=-1)
        self._stops = torch.cat([old, new.t().to(self._device)], 1)

    def _summarise(self) -> None:
        """Precompute what all rows share, so that a step does not loop over rows."""
        self._warm = bool((self._inverse_temperatures != 1).any())
        self._any_cut = bool(self._cuts.any())
        self._any_greedy = bool(self._greedy.any())
        self._all_greedy = bool(self._greedy.all())
        self._any_stop_strings = any(entry is not None and entry[1].stop for entry in self._entries)

    # ------------------------------------------------------------------------------ sampling

    def _sample(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        uniforms = sampling.next_uniforms(self._counters[rows])
        if self._any_greedy:
            likeliest = sampling.greedy(logits)
            if self._all_greedy:
                return likeliest
        drawn = sampling.sample(
            logits,
            uniforms,
            self._inverse_temperatures[rows] if self._warm else None,
            self._cuts[rows] if self._any_cut else None,
        )
        if self._any_greedy:
            greedy = self._greedy[rows]
            return torch.where(greedy, likeliest[0], drawn[0]), torch.where(greedy, likeliest[1], drawn[1])
        return drawn

    def _record(self, tokens: Tensor, logprobs: Tensor, version: int) -> list[Finished]:
        history, n = self._history, len(tokens)
        now = history.time
        history.rows = min(history.rows, n)
        history.make_room(rows=n)
        history.rows = n
        history.tensors[0][history.end, :n] = tokens
        history.tensors[1][history.end, :n] = logprobs
        history.end += 1
        self._versions.append(version)
        self._tokens = tokens
        ended = torch.logical_or(self._ends <= now, logprobs.isnan())
        if len(self._stops):
            ended |= (self._stops == tokens).any(0)
        if self._any_stop_strings:
            ended |= self._hit_stop_strings(tokens)
        done: list[int] = ended.logical_and_(self._alive).nonzero()[:, 0].tolist()
        return self._finish(done) if done else []

    def _hit_stop_strings(self, tokens: Tensor) -> Tensor:
        hit = torch.zeros(len(tokens), dtype=torch.bool)
        sampled, start_steps, now = tokens.tolist(), self._births.tolist(), self._history.time - 1
        for row, entry in enumerate(self._entries):
            if entry is None or not (stop := entry[1].stop):
                continue
            if self._stop_strings.may_end(stop, sampled[row]):
                length = min(now + 1 - start_steps[row], self._stop_strings.window(stop))
                tail = self._history.tensors[0][self._history.end - length : self._history.end, row]
                hit[row] = self._stop_strings.ended(stop, tail.tolist())
        return hit.to(self._device)

    # ------------------------------------------------------------------------------ leaving

    def _finish(self, rows: list[int]) -> list[Finished]:
        history, index = self._history, torch.tensor(rows, device=self._device)
        start_steps = self._births[index].tolist()
        begin = min(start_steps)
        window = slice(begin - history.offset, history.end)
        tokens = history.tensors[0][window].index_select(1, index).t().int().cpu().numpy()
        logprobs = history.tensors[1][window].index_select(1, index).t().cpu().numpy()
        versions = np.array(self._versions[begin - self._versions_from :], np.int32)
        finished: list[Finished] = []
        for i, row in enumerate(rows):
            entry = self._entries[row]
            assert entry is not None
            key, request = entry
            skip = start_steps[i] - begin
            outcome = self._outcome(request, tokens[i, skip:], logprobs[i, skip:], versions[skip:])
            finished.append((key, outcome))
        self._retire(rows)
        return finished

    def _outcome(
        self, request: GenerationRequest, ids: Ids, logprobs: NDArray[np.float32], versions: Ids
    ) -> Completion | EngineError:
        if np.isnan(logprobs[-1]):
            return EngineError(
                f"engine local: the logits of version {versions[-1]} are not finite: training has diverged"
            )
        stopped = int(ids[-1]) in request.stop_token_ids or (
            bool(request.stop) and self._stop_strings.ended(request.stop, ids.tolist())
        )
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason="stop" if stopped else "length",
        )

    def _retire(self, rows: list[int]) -> None:
        for row in rows:
            self._entries[row] = None
        self.alive -= len(rows)
        self._alive[torch.tensor(rows, dtype=torch.int64, device=self._device)] = False

    def compact(self) -> None:
        """Move rows from the end into the places of dead ones."""
        n = self.alive
        if n == len(self._entries):
            return
        keep = self._alive.nonzero()[:, 0]
        order = torch.arange(n, device=self._device)
        order[~self._alive[:n]] = keep[keep >= n]
        self._entries = [self._entries[i] for i in order.tolist()]
        for name in (
            "_tokens",
            "_counters",
            "_births",
            "_ends",
            "_alive",
            "_greedy",
            "_inverse_temperatures",
            "_cuts",
        ):
            setattr(self, name, getattr(self, name)[order])
        self._stops = self._stops[:, order]
        self._cache.select(order)
        self._history.select(order)
        first = int(self._births.min()) if n else 0  # time restarts with the next row
        self._history.evict_before(first)
        del self._versions[: first - self._versions_from if n else None]
        self._versions_from = first
        self._summarise()
