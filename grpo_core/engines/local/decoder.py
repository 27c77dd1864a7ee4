"""Decoding many requests together: rows join and leave between tokens, weights change between tokens.

waiting (FIFO)  --admit-->  rows of a DecodingBatch  --each step one token-->  finished Completions

Requests for one token have a separate queue, which comes first: they need no row after the step that they
join, so they delay no other request.

The last bits of a logprob depend on the rows that are decoded with it: kernels are chosen by the number of
rows, and angles count from the first column of a batch.  ``Decoder`` lets rows join at any time, which is
fast.  ``SeparateCalls`` decodes each call alone, so that equal calls have equal completions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_core.engines.local.batch import DecodingBatch, EngineModel, Entry, Finished, Shapes
from grpo_core.engines.local.stopping import StopStrings

PREFILL_TOKENS = 16384
"""Largest number of prompt tokens, padding included, that one step prefills (a longer prompt comes alone)."""


class Decoder:
    """Decodes all requests of one engine.  ``key``s are the caller's names for its requests."""

    def __init__(self, model: EngineModel, *, max_rows: int = 512, stops: StopStrings | None = None) -> None:
        self._model = model
        self._max_rows = max_rows
        self._stops = stops or StopStrings(None)
        self._brief: deque[Entry] = deque()
        """Waiting requests for one token."""
        self._waiting: deque[Entry] = deque()
        """All other waiting requests."""
        self._batches: list[DecodingBatch] = []
        self._rows_join = model.rows_join
        self.version = -1

    def check(self, shapes: Shapes) -> None:
        """Raise WeightSyncError unless tensors of these names and shapes are the model's."""
        self._model.check(shapes)

    @torch.inference_mode()
    def load(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Sample every later token from these weights; running rows keep their keys and values."""
        self._model.load(buckets)
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self._brief or self._waiting or any(batch.alive for batch in self._batches))

    def sampled(self) -> list[list[int]]:
        """Return the tokens that each running request has so far."""
        return [ids for batch in self._batches for ids in batch.sampled()]

    def add(self, entries: Iterable[Entry]) -> None:
        """Take requests that the model can complete, for at least one token each."""
        for key, request in entries:
            (self._brief if request.max_tokens == 1 else self._waiting).append((key, request))

    @torch.inference_mode()
    def cancel(self, keys: set[int]) -> None:
        """Forget these requests; their rows are free at the next step."""
        self._brief = deque(entry for entry in self._brief if entry[0] not in keys)
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in keys)
        for batch in self._batches:
            batch.cancel(keys)
        self._drop_empty()

    def clear(self) -> None:
        """Forget everything."""
        self._brief.clear()
        self._waiting.clear()
        self._batches.clear()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Decode one more token for every row; return the finished completions."""
        finished: list[Finished] = []
        entries = self._admitted()
        if entries and not (self._rows_join and self._batches):
            self._batches.append(DecodingBatch(self._model, self._stops))
        for batch in self._batches:
            joining = entries if batch is self._batches[-1] else []
            if joining or batch.alive:
                finished += batch.step(joining, self.version)
        self._drop_empty()
        return finished

    def _drop_empty(self) -> None:
        if not self._rows_join:
            self._batches = [batch for batch in self._batches if batch.alive]
        for batch in self._batches:
            if not batch.alive:  # it is kept for later rows
                batch.compact()

    def _admitted(self) -> list[Entry]:
        """Take the requests that fit now, the oldest of each queue first."""
        return _take_entries((self._brief, self._waiting), self._room())

    def _room(self) -> int:
        return self._max_rows - sum(batch.alive for batch in self._batches)


class SeparateCalls(Decoder):
    """Decodes each call alone: a completion depends only on its call and on the weights.

    It is slower, since calls do not share matrix products.
    """

    def __init__(self, model: EngineModel, *, max_rows: int = 512, stops: StopStrings | None = None) -> None:
        super().__init__(model, max_rows=max_rows, stops=stops)
        self._rows_join = False
        self._brief_parts: deque[Sequence[Entry]] = deque()
        self._parts: deque[Sequence[Entry]] = deque()
        """Waiting calls, split by their own requests alone; brief parts are for one token each."""

    @property
    def busy(self) -> bool:
        return bool(self._brief_parts or self._parts) or super().busy

    def add(self, entries: Iterable[Entry]) -> None:
        """Take the requests of one call."""
        call = deque(entries)
        while call:
            part = _take_entries((call,), self._max_rows)
            brief = all(request.max_tokens == 1 for _, request in part)
            (self._brief_parts if brief else self._parts).append(part)

    def cancel(self, keys: set[int]) -> None:
        self._brief_parts = _without(self._brief_parts, keys)
        self._parts = _without(self._parts, keys)
        super().cancel(keys)

    def clear(self) -> None:
        self._brief_parts.clear()
        self._parts.clear()
        super().clear()

    def _admitted(self) -> list[Entry]:
        """Take the oldest part if all of it fits."""
        parts = self._brief_parts or self._parts
        fits = parts and len(parts[0]) <= self._room()
        return list(parts.popleft()) if fits else []


def _without(parts: Iterable[Sequence[Entry]], keys: set[int]) -> deque[Sequence[Entry]]:
    """Return the parts without these requests."""
    left = ([entry for entry in part if entry[0] not in keys] for part in parts)
    return deque(part for part in left if part)


def _take_entries(queues: Sequence[deque[Entry]], room: int) -> list[Entry]:
    """Take the first entries of the queues, in order: at most ``room``, and as many as one step prefills."""
    entries: list[Entry] = []
    prompts: set[bytes] = set()
    longest = 0
    while len(entries) < room and (waiting := next(filter(None, queues), None)) is not None:
        prompt = waiting[0][1].prompt_ids
        prompts.add(prompt.tobytes())
        longest = max(longest, len(prompt))
        if entries and longest * len(prompts) > PREFILL_TOKENS:
            break
        entries.append(waiting.popleft())
    return entries
