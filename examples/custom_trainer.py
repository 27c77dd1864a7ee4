"""A trainer in a file: trains with Hugging Face Accelerate, in a child process.

pip install accelerate
grpo-core check ./examples/custom_trainer.py:accelerated
grpo-core train --env math:sort --set trainer.name=./examples/custom_trainer.py:accelerated \
    --set trainer.updates_per_step=1

It computes the rows of a step as one padded batch, at a constant learning rate, which is for small models.
The seams are those of any library.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpo_core as grpo
from grpo_core.kit import Child, Config, PluginHost, SharedMemoryWriter, as_table

UNKNOWN = {
    "updates_per_step": 1, "betas": (0.9, 0.95), "activations": "keep",
    "weights": "float32", "compile": False, "profile": 0, "offload": False, "gpus": [], "ranks": 1,
}  # fmt: skip
"""Keys of [trainer] that would change what other trainers do, and not this one, with their defaults."""


class Accelerated(grpo.Trainer):
    """The parent's side: starts a ``Server`` in its own process, and passes calls on to it.

    Args:
        fused: let one kernel update all parameters.
    """

    def __init__(self, setup: grpo.TrainerSetup, *, fused: bool = False) -> None:
        if setup.transport != "shm":
            raise grpo.ConfigError(
                "this trainer publishes to engines of its own machine; leave out engine.transport"
            )
        lora = any(section.name == "model.lora" for section in setup.sections)
        if lora or setup.loss.max_sequence_error:
            raise grpo.ConfigError(
                "this trainer trains all weights on all rows; leave out [model.lora] and "
                "loss.max_sequence_error"
            )
        given = {"setup": setup, "fused": fused}
        log = Path(setup.log) if setup.log else None
        self.deadline = setup.trainer.deadline
        self.child = Child(f"{__file__}:Server", given, name="trainer", environ=setup.env_vars, log=log)

    @staticmethod
    def check(config: Config, **options: Any) -> None:
        """Refuse, when the configuration is read, what this trainer does not do."""
        trainer = as_table(config)["trainer"]
        for key, default in UNKNOWN.items():
            if (given := trainer.get(key, default)) != default:
                raise grpo.ConfigError(
                    f"this trainer does not know trainer.{key} = {given!r}; leave it at {default!r}"
                )

    async def started(self) -> None:
        await self.child.started(seconds=self.deadline)

    async def step(self, batch: grpo.Batch) -> grpo.StepResult:
        return await self.call("step", batch)

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> grpo.Weights:
        return await self.call("publish", canary)

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self.call("save")
        return partial(self.call, "write", directory)

    async def watch(self) -> None:
        raise grpo.TrainerError(f"trainer: {await self.child.died()}")

    async def aclose(self) -> None:
        await self.child.aclose()

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self.child.call(method, *args, seconds=self.deadline)
        except (grpo.ChildDied, grpo.DeadlineExceeded) as error:
            raise grpo.TrainerError(f"trainer: {method} failed: {error}") from error


class Server:
    """The child's side: owns the model and the optimizer, and answers one call after the other."""

    def __init__(self, setup: grpo.TrainerSetup, *, fused: bool) -> None:
        if setup.prepare is not None:
            setup.prepare()
        import torch
        from accelerate import Accelerator
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        host = PluginHost.discover(setup.plugins, setup.block)
        self.loss = host.function("loss", setup.loss.name, **setup.loss.options)
        if missing := self.loss.needs - {"all_rows", "sequences"}:
            raise grpo.ConfigError(
                f"trainer: the loss {setup.loss.name!r} needs {', '.join(sorted(missing))}, which this "
                "trainer does not compute; choose other options of the loss"
            )
        torch.set_num_threads(setup.trainer.threads or 1)
        saved = Path(setup.resume_from) if setup.resume_from else None
        start = saved / "trainer" if saved else setup.model.path
        self.setup, self.version, self.writer = setup, 0, SharedMemoryWriter()
        self.tokenizer = AutoTokenizer.from_pretrained(start)
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        lr, decay = setup.trainer.lr, setup.trainer.weight_decay
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=fused)
        self.accelerator = Accelerator(cpu=setup.trainer.device == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if saved:
            self.restore(load_file(saved / "optimizer" / "state.safetensors"))

    @property
    def parameters(self) -> list[tuple[str, Any]]:
        """Names and parameters; tied ones once, as in the checkpoint of the model."""
        return list(self.accelerator.unwrap_model(self.model).named_parameters())

    def step(self, batch: grpo.Batch) -> grpo.StepResult:
        begun = time.perf_counter()
        metrics = self.update(batch) if batch.rows else {}
        self.version = batch.step + 1
        seconds = time.perf_counter() - begun
        tokens = sum(len(row.prompt_ids) + len(row.tokens) for row in batch.rows)
        metrics |= {
            "rows": float(len(batch.rows)),
            "time/train": seconds,
            "tokens/trained": float(tokens),
        }
        return grpo.StepResult(version=self.version, metrics=metrics)

    def update(self, batch: grpo.Batch) -> dict[str, float]:
        from grpo_core import losses

        loss = self.setup.loss
        inputs = self.inputs(batch, loss.aggregation, loss.aggregation_constant or None)
        per_token, metrics = self.loss(inputs)
        total = losses.total(per_token, inputs)
        self.optimizer.zero_grad()
        self.accelerator.backward(total)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.setup.trainer.max_grad_norm)
        self.optimizer.step()
        means = {name: values.detach().mean().item() for name, values in metrics.items()}
        return {"loss": total.item(), "grad_norm": norm.item(), **means}

    def inputs(self, batch: grpo.Batch, aggregation: str, constant: float | None) -> grpo.LossInputs:
        """Return the inputs of the loss: logprobs of all tokens but the first of each row, [B, T - 1]."""
        import torch

        from grpo_core import losses

        rows, device = batch.rows, self.accelerator.device
        width = max(len(row.prompt_ids) + len(row.tokens) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        generated, advantages = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
        for b, row in enumerate(rows):  # padded on the right: no token sees what comes after it
            first, last = len(row.prompt_ids), len(row.prompt_ids) + len(row.tokens)
            sampled = torch.from_numpy(row.tokens.sampled.copy())
            ids[b, :first] = torch.from_numpy(row.prompt_ids.copy())
            ids[b, first:last] = torch.from_numpy(row.tokens.ids.copy())
            mask[b, first:last] = sampled
            generated[b, first:last] = torch.from_numpy(row.tokens.logprobs.copy())
            given = row.advantage if row.token_advantages is None else row.token_advantages
            advantages[b, first:last][sampled] = torch.as_tensor(given, dtype=torch.float32)
        ids = ids.to(device)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1] / batch.temperature
        policy = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return losses.padded(
            policy_logprobs=policy,
            generation_logprobs=generated[:, 1:].to(device),
            mask=mask[:, 1:].to(device),
            advantages=advantages[:, 1:].to(device),
            correct=torch.tensor([row.correct for row in rows], device=device),
            prompts=[row.group for row in rows],
            aggregation=aggregation,
            constant=constant,
        )

    def publish(self, canary: Sequence[tuple[int, ...]]) -> grpo.Weights:
        from attrs import evolve

        weights = self.writer.write(self.version, [(name, each.detach()) for name, each in self.parameters])
        return evolve(weights, canary=tuple(map(self.predicted, canary)))

    def predicted(self, prompt: tuple[int, ...]) -> grpo.Canary:
        import torch

        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([prompt], device=self.accelerator.device)).logits
        best = logits[0, -1].log_softmax(-1).topk(8)
        return grpo.Canary(
            prompt_ids=prompt, token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist())
        )

    def save(self) -> None:
        """Take the copy; training may go on before it is written."""
        import torch

        self.copy = {name: each.detach().cpu().clone() for name, each in self.parameters}
        self.state = {"version": torch.tensor(self.version)}
        for place, slots in self.optimizer.state_dict()["state"].items():
            self.state |= {f"{place}.{slot}": each.detach().cpu().clone() for slot, each in slots.items()}

    def write(self, directory: Path) -> None:
        from safetensors.torch import save_file

        self.accelerator.unwrap_model(self.model).save_pretrained(directory / "trainer", state_dict=self.copy)
        self.tokenizer.save_pretrained(directory / "trainer")
        (directory / "optimizer").mkdir()
        save_file(self.state, directory / "optimizer" / "state.safetensors")

    def restore(self, state: dict[str, Any]) -> None:
        self.version = int(state.pop("version"))
        slots: dict[int, dict[str, Any]] = {}
        for name, each in state.items():
            place, slot = name.split(".")
            slots.setdefault(int(place), {})[slot] = each
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})


@grpo.hookimpl
def grpo_trainers() -> dict[str, grpo.TrainerOffer]:
    return {"accelerated": grpo.TrainerOffer(Accelerated, check=Accelerated.check)}
