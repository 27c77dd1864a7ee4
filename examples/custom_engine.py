"""An engine in a file: transformers' forward pass, token by token, in a child process.

grpo-core check ./examples/custom_engine.py:mine
grpo-core train --env math:sort --engine ./examples/custom_engine.py:mine
"""

import random

import grpo_core as grpo
from grpo_core.kit import (
    ChildEngine,
    DecodingServer,
    check_request,
    read_weights,
)


class MyEngine(ChildEngine):
    """The parent's side: starts a ``Server`` in its own process, and again if it dies.

    Args:
        rows: requests that are decoded together.
    """

    def __init__(self, setup: grpo.EngineSetup, *, rows: int = 64) -> None:
        if setup.reproducible:
            raise grpo.ConfigError(
                "engine mine: rows that are decoded together change each other's last bits; "
                "set pipeline.in_flight_updates = true with pipeline.max_staleness above 0"
            )
        super().__init__(setup, name="mine", server=f"{__file__}:Server", options={"rows": rows})


class Server(DecodingServer):
    """The child's side: what is admitted together is decoded together, one token for each row in a step."""

    name = "mine"

    def __init__(self, setup: grpo.EngineSetup, *, rows: int) -> None:
        super().__init__()
        self.setup, self.rows = setup, rows
        self.model = self.tokenizer = None
        self.version = -1
        self.waiting: dict[int, grpo.GenerationRequest] = {}
        self.batches: list[DecodingBatch] = []

    def load(self, weights: grpo.Weights) -> None:
        tensors = read_weights(weights)
        if self.model is None:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

            torch.set_num_threads(self.setup.threads)
            torch.set_grad_enabled(False)
            self.tokenizer = AutoTokenizer.from_pretrained(self.setup.model)
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.setup.model)).eval()
        parameters = dict(self.model.named_parameters())
        if different := parameters.keys() ^ tensors.keys():
            raise grpo.WeightSyncError(f"engine mine: these tensors are not in both models: {different}")
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
        self.positions = self.model.config.max_position_embeddings
        self.version = weights.version

    def check(self, request: grpo.GenerationRequest) -> None:
        vocabulary = self.model.config.vocab_size
        check_request(request, engine="mine", vocabulary=vocabulary, positions=self.positions)

    def add(self, key: int, request: grpo.GenerationRequest) -> None:
        self.waiting[key] = request

    def forget(self, keys: set[int]) -> None:
        for key in keys & self.waiting.keys():
            del self.waiting[key]
        for batch in self.batches:
            batch.keep([place for place, row in enumerate(batch.rows) if row.key not in keys])

    def step(self) -> list[tuple[int, grpo.Completion]]:
        room = self.rows - sum(len(batch.rows) for batch in self.batches)
        first = sorted(self.waiting, key=lambda key: self.waiting[key].max_tokens)[:room]  # short ones first
        if first:
            rows = [Row(key, self.waiting.pop(key)) for key in first]
            self.batches.append(DecodingBatch(self.model, rows))
        ended = [row for batch in self.batches for row in batch.step(self.version, self.tokenizer)]
        self.batches = [batch for batch in self.batches if batch.rows]
        return [(row.key, row.completion()) for row in ended]


class Row:
    """A request and what was sampled for it."""

    def __init__(self, key: int, request: grpo.GenerationRequest) -> None:
        self.key, self.request, self.random = key, request, random.Random(request.seed)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stopped = False

    def sample(self, logits, version: int, tokenizer) -> bool:
        """Add the next token; returns whether it is the last one."""
        scores = logits / (self.request.temperature or 1.0)
        if self.request.temperature:
            scores = cut(scores, self.request)
        logprobs = scores.log_softmax(-1)
        token = int(logprobs.argmax())
        if self.request.temperature:
            token = min(int((logprobs.exp().cumsum(-1) < self.random.random()).sum()), len(logprobs) - 1)
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.versions.append(version)
        self.stopped = token in self.request.stop_token_ids
        if self.request.stop:
            self.stopped |= any(stop in tokenizer.decode(self.tokens) for stop in self.request.stop)
        return self.stopped or len(self.tokens) == self.request.max_tokens

    def completion(self) -> grpo.Completion:
        return grpo.Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason="stop" if self.stopped else "length",
        )


def cut(scores, request: grpo.GenerationRequest):
    """Cut the distribution [V] as the request says; the order is part of the contract."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [
        *([TopKLogitsWarper(request.top_k)] if request.top_k else []),
        *([TopPLogitsWarper(request.top_p)] if request.top_p < 1 else []),
        *([MinPLogitsWarper(request.min_p)] if request.min_p else []),
    ]
    for warper in warpers:
        scores = warper(None, scores[None])[0]
    return scores


class DecodingBatch:
    """Rows that were admitted together: prompts padded on the left, and one cache of keys and values."""

    def __init__(self, model, rows: list[Row]) -> None:
        import torch
        from transformers import DynamicCache

        self.model, self.rows, self.cache = model, rows, DynamicCache()
        width = max(len(row.request.prompt_ids) for row in rows)
        pads = [width - len(row.request.prompt_ids) for row in rows]
        self.ids = torch.tensor(
            [[0] * n + list(row.request.prompt_ids) for n, row in zip(pads, rows, strict=True)]
        )
        self.mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])

    def step(self, version: int, tokenizer) -> list[Row]:
        """Decode one more token for each row; return the rows that ended."""
        import torch

        if not self.rows:
            return []
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -self.ids.shape[1] :]
        output = self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        lasts = [
            row.sample(logits, version, tokenizer)
            for row, logits in zip(self.rows, output.logits[:, -1], strict=True)
        ]
        ended = [row for row, last in zip(self.rows, lasts, strict=True) if last]
        self.ids = torch.tensor([[row.tokens[-1]] for row in self.rows])
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.keep([place for place, last in enumerate(lasts) if not last])
        return ended

    def keep(self, places: list[int]) -> None:
        """Drop the other rows."""
        import torch

        if len(places) < len(self.rows):
            chosen = torch.tensor(places, dtype=torch.long)
            self.rows = [self.rows[place] for place in places]
            self.ids, self.mask = self.ids[chosen], self.mask[chosen]
            if places:
                self.cache.batch_select_indices(chosen)


@grpo.hookimpl
def grpo_engines() -> dict[str, grpo.EngineOffer]:
    return {"mine": grpo.EngineOffer(MyEngine, transports=("*",))}
