"""The memory of a run by process and part, and whether it fits on this machine.

``checked`` sums the certain parts, from the headers of the model's files; on a GPU these include the
trainer's passes, for which it imports torch.  ``footprint`` adds the estimated parts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from grpo_core import ConfigError, EngineLoad, GrpoError, MemoryPart, ModelError
from grpo_core.app import making
from grpo_core.app import placement as gpu_choice
from grpo_core.app.model_sources import scoring_model
from grpo_core.config import EngineConfig, build, parse_settings
from grpo_core.config.run import needed_scores
from grpo_core.kit import Config, PluginHost, as_table, files
from grpo_core.plugins.offers import Selected
from grpo_core.plugins.transports import find_transport
from grpo_core.processes.memory import resident
from grpo_core.training import memory as sizes
from grpo_core.training.optimizers import state_of
from grpo_plugin_doctor import Health, machine
from grpo_plugin_doctor.parameters import linear_parameters, lora_shapes, shapes_in

if TYPE_CHECKING:
    from grpo_plugin_doctor.activations import Pass

KEPT_ACTIVATIONS = 0.2
"""Overhead of the heap of a trainer on a CPU, as a share of the activations."""
HOST = "host"
PROMPT_TOKENS = 256
"""Assumed number of prompt tokens for each completion of ``rollout.max_tokens``."""
SMALLEST = 1 << 30
"""Bytes of a trainer below which the slow nvidia-smi is not run."""
STATE_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int": 0}
_RECOMPUTES = {"trainer.activations": "recompute"}
SMALLER: Sequence[Mapping[str, str]] = (
    _RECOMPUTES,
    {**_RECOMPUTES, "trainer.weights": "bfloat16"},
    {**_RECOMPUTES, "optimizer.name": "adamw_8bit"},
    {**_RECOMPUTES, "model.lora.rank": "16"},
)
"""Configuration changes that reduce the memory of a trainer on a GPU, the cheapest first."""
TURN_OFF = "if this estimate is wrong, --set health.max_memory=0 turns the check off"
TIGHT = 0.9
"""Share of the available memory above which memory is reported as tight."""


@frozen
class Case:
    """A run before it starts, with its model and its machine."""

    config: Config
    host: PluginHost
    directory: str
    """Directory with the model's config.json, or a hub id."""
    shapes: Mapping[str, Sequence[int]]
    """Shapes of the model's parameters, by name."""
    gpus: Sequence[machine.Gpu]
    """The GPUs; empty for models too small to query them."""

    @cached_property
    def placement(self) -> Any:
        chosen = self.config.placement
        return self.host.make("placement", chosen.name, self.host, **chosen.options)

    @property
    def trains_here(self) -> bool:
        """Whether the trainer's processes run on this machine."""
        return not making.place_of_trainer(self.config.trainer, self.host)

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """The section ``model.lora``; None for full fine-tuning."""
        found: Mapping[str, Any] | None = as_table(self.config)["model"].get("lora")
        return found

    @property
    def trained(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the trained parameters: the model's, or the adapters'."""
        lora = self.lora
        return self.shapes if lora is None else lora_shapes(self.shapes, lora["rank"], lora["targets"])

    @property
    def device(self) -> str:
        """Device of the trainer: a GPU, or "host"."""
        chosen = self.config.trainer.device
        if chosen == "auto":
            return "cuda" if self.gpus and machine.build_of_torch() else HOST
        return HOST if chosen == "cpu" else chosen

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(map(prod, self.shapes.values()))

    @property
    def dtype(self) -> str:
        """The dtype of the model's matrix products."""
        return files.computed_dtype(self.config.model.dtype, self.parameters, on_gpu=self.device != HOST)

    @property
    def optimizer(self) -> int | None:
        """Bytes of the optimizer's state; None if it is not declared."""
        chosen = self.config.optimizer
        return state_bytes(self.host.find("optimizer", chosen.name), chosen.options, self.trained)

    def refuses(self, capacities: Sequence[Capacity]) -> bool:
        """Whether the run cannot fit."""
        return any(each.refused(self.config.section(Health).max_memory) for each in capacities)


def state_bytes(
    selected: Selected, options: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> int | None:
    """Return the bytes that an optimizer keeps for parameters; None if it does not declare them.

    Update counters are too small to count.
    """
    states = [state_of(selected, options, name, shape) for name, shape in shapes.items()]
    known = [state for state in states if state is not None]
    if len(known) < len(states):
        return None
    slots = [slot for state in known for slot in state.values()]
    return sum(STATE_ITEMSIZE[dtype] * prod(shape) for shape, dtype in slots if shape)


@frozen(kw_only=True)
class ProcessMemory:
    """The memory of the processes of one kind."""

    name: str
    parts: tuple[MemoryPart, ...]
    count: int = 1
    """Number of processes with these parts each."""


@frozen(kw_only=True)
class Capacity:
    """A device with its memory and the run's need."""

    device: str
    needed: int
    certain: int
    """Lower bound of the need in bytes."""
    memory: machine.Memory

    def refused(self, share: float) -> bool:
        """Whether the run needs more than ``share`` of the available memory."""
        return bool(share) and self.certain > share * self.memory.available

    @property
    def tight(self) -> bool:
        return self.needed > TIGHT * self.memory.available


def capacities(processes: Sequence[ProcessMemory], gpus: Sequence[machine.Gpu]) -> list[Capacity]:
    """Return the run's need for each device with known memory."""
    found = []
    for device in dict.fromkeys(device_of(part) for process in processes for part in process.parts):
        memory = memory_of(device, gpus)
        if memory is not None:
            there = [(process.count, part) for process, part in parts_on(processes, device)]
            needed = sum(count * part.nbytes for count, part in there)
            certain = sum(count * part.nbytes for count, part in there if part.certain)
            found.append(Capacity(device=device, needed=needed, certain=certain, memory=memory))
    return found


def device_of(part: MemoryPart) -> str:
    """Return the device of a part, with an index for a GPU: torch's "cuda" is the first."""
    return "cuda:0" if part.device == "cuda" else part.device


def memory_of(device: str, gpus: Sequence[machine.Gpu]) -> machine.Memory | None:
    """Return the memory of a device, or None if unknown."""
    if device == HOST:
        return machine.host_memory()
    number = number_of(device)
    return gpus[number].memory if number is not None and number < len(gpus) else None


def parts_on(processes: Sequence[ProcessMemory], device: str) -> Iterator[tuple[ProcessMemory, MemoryPart]]:
    for process in processes:
        for part in process.parts:
            if device_of(part) == device:
                yield process, part


# ---------------------------------------------------------------------------------- parts that are certain


def checked(config: Config, host: PluginHost) -> list[str]:
    """Check that a run fits into memory; return warnings.

    Generated models and models that are not downloaded yet are not checked.

    Raises ConfigError if the run cannot fit.
    """
    path, share = config.model.path, config.section(Health).max_memory
    directory = None if host.offers("model", path) or not share else files.directory_here(path)
    shapes = None if directory is None else shapes_in(directory)
    if shapes is None:
        return []
    gpus = machine.gpus() if 4 * sizes.FLOAT32 * sum(map(prod, shapes.values())) >= SMALLEST else []
    case = Case(config, host, str(directory), shapes, gpus)
    processes = needed_parts(case)
    found = capacities(processes, gpus)
    for capacity in found:
        if capacity.refused(share):
            fits = "" if capacity.device == HOST else smallest_change(case)
            raise ConfigError(refusal(capacity, processes) + fits)
    return [
        f"memory is tight: {need(capacity)}; grpo-core doctor CONFIG estimates the other parts, too"
        for capacity in found
        if capacity.certain > TIGHT * capacity.memory.available
    ]


def slow_products(config: Config, host: PluginHost, gpus: Sequence[machine.Gpu] | None = None) -> list[str]:
    """Return warnings about a dtype of 16 bits that this processor computes slower than float32.

    On x86, torch has fast products of 16 bits with AVX512 alone.

    Args:
        gpus: the GPUs of this machine; default: nvidia-smi is asked, if they matter.
    """
    features = files.PROCESSOR.read_text() if files.PROCESSOR.exists() else ""
    keys = {"model.dtype": config.model.dtype, "engine.options.dtype": making.engine_dtype(config.engine)}
    narrow = {key: dtype for key, dtype in keys.items() if dtype in ("bfloat16", "float16")}
    if not narrow or "flags" not in features or "avx512" in features:
        return []
    case = Case(config, host, config.model.path, {}, machine.gpus() if gpus is None else gpus)
    if case.device != HOST or not case.trains_here:
        return []
    return [
        f'{key} = "{dtype}" is slow on this processor: a step of SmolLM2-135M took 9 times as long as in '
        'float32; "auto" chooses what is fast'
        for key, dtype in narrow.items()
    ]


def needed_parts(case: Case) -> list[ProcessMemory]:
    """Return the certain parts; on a GPU including the trainer's passes, if the rest fits."""
    found = certain_parts(case)
    if case.refuses(capacities(found, case.gpus)) or case.device == HOST:
        return found
    with contextlib.suppress(ModelError):  # loading the model reports the error
        return with_passes(case, found)[0]
    return found


def smallest_change(case: Case) -> str:
    """Return the first of ``SMALLER`` that makes the run fit, as the end of a message, or ""."""
    for keys in SMALLER:
        changes = parse_settings([f"{key}={value}" for key, value in keys.items()], {})
        with contextlib.suppress(GrpoError):  # a missing plugin, or conflicting keys
            smaller = evolve(case, config=build([as_table(case.config), changes], case.host.sections))
            if not smaller.refuses(capacities(needed_parts(smaller), case.gpus)):
                settings = " ".join(f"--set {key}={value}" for key, value in keys.items())
                return f". The run fits with {settings}"
    return ""


def certain_parts(case: Case) -> list[ProcessMemory]:
    """Return trainer and engines with the parts that are determined by the shapes of the parameters."""
    config, placement, engines = case.config, case.placement, making.engines_of(case.config, trains=True)
    ranks = making.ranks_of(config, case.host)
    on_gpus = {} if placement.remote else engines
    count = len(case.gpus) or gpu_choice.visible()
    local = case.host.make("placement", "local", case.host)
    devices = local.choose(config.trainer if case.trains_here else None, on_gpus, count, ranks)

    def seen(variables: Mapping[str, str]) -> tuple[int, ...]:
        """Return the indices of the known GPUs visible to a process with these environment variables."""
        shown = variables.get("CUDA_VISIBLE_DEVICES")
        seen = range(count) if shown is None else map(gpu_choice.names(count).index, shown.split(","))
        return tuple(gpu for gpu in seen if gpu < len(case.gpus))

    dtype = files.published_dtype(case.dtype, making.engine_dtype(config.engine))
    found: list[ProcessMemory] = []
    trainer = case.host.find("trainer", config.trainer.name)
    if trainer.offer.memory is not None and case.trains_here:
        own = engines.get("validation.engine")
        name = making.transport_of(config.engine, own, case.host, placement, "")
        kept = find_transport(name, case.host).on_device
        of_trainer = _trainer_parts(case, trainer.loaded(trainer.offer.memory), dtype, kept)
        found += _ranks(of_trainer, ranks, case.device, seen(devices.trainer))
    for key, engine in on_gpus.items():
        selected = case.host.find("engine", engine.name)
        if selected.offer.memory is None:
            continue
        variables: Sequence[Mapping[str, str]] = devices.engines.get(key) or [{}] * engine.workers
        for gpus, workers in Counter(map(seen, variables)).items():
            load = _load(case, dtype, engine, [case.gpus[gpu] for gpu in gpus])
            load = evolve(load, shares_gpu=key in devices.shared)
            of_engine = selected.loaded(selected.offer.memory)(load, **engine.options)
            found.append(_process(key.replace(".", " "), of_engine, gpus, key=key, count=workers))
    return found


def _trainer_parts(
    case: Case, memory: Callable[..., Sequence[MemoryPart]], dtype: str, on_device: bool
) -> Sequence[MemoryPart]:
    """Return the parts of the whole trainer.

    Args:
        memory: function of its offer that returns its memory.
        dtype: dtype of the published weights.
        on_device: whether the trainer keeps published weights on its device.
    """
    config, device, lora = case.config, case.device, case.lora
    parameters, trained = case.parameters, sum(map(prod, case.trained.values()))
    scores = needed_scores(config.scores, making.loss(config.loss, case.host).needs)

    def scoring(name: str) -> int:
        """Return the bytes of a model that scores; 0 if it is not here."""
        found = files.directory_here(scoring_model(name, scores[name].model))
        dtype = files.computed_dtype(scores[name].dtype, on_gpu=device != HOST)
        return sizes.ITEMSIZE[dtype] * sum(map(prod, (shapes_in(found) or {}).values())) if found else 0

    weights = sizes.FLOAT32 * parameters
    if lora is not None and device != HOST:  # on a host, loading needs float32 copies anyway
        weights -= 2 * _that_stay_in_bfloat16(case)
    return memory(
        config=config,
        weights=weights,
        parameters=parameters,
        trained=trained,
        published=parameters if lora is None or lora["publish"] == "merged" else trained,
        optimizer=case.optimizer,
        dtype=dtype,
        device=device,
        on_device=on_device,
        kept=len(sizes.kept_weights(scores)),
        models=sum(scoring(name) for name, score in scores.items() if score.model),
    )


def _that_stay_in_bfloat16(case: Case) -> int:
    """Count the parameters that a trainer of adapters keeps in the files' 16-bit dtype."""
    here = files.directory_here(case.directory)
    if here is None or case.dtype != "bfloat16":
        return 0
    narrow = {name for name, tensor in files.ModelFiles(here).tensors.items() if tensor.dtype == "BF16"}
    return linear_parameters({name: shape for name, shape in case.shapes.items() if name in narrow})


def _ranks(
    parts: Sequence[MemoryPart], ranks: int, device: str, seen: Sequence[int]
) -> Iterator[ProcessMemory]:
    """Yield the trainer's processes with equal shares, each on a separate GPU if there are any.

    Models that score are replicated.
    """
    shared = [own if own.name == sizes.MODELS else evolve(own, nbytes=own.nbytes // ranks) for own in parts]
    if ranks == 1 or device == HOST:
        yield _process("trainer", shared, seen, count=ranks)
        return
    for gpu in seen[:ranks]:
        yield _process("trainer", shared, [gpu])


def _process(
    name: str, parts: Sequence[MemoryPart], seen: Sequence[int], *, key: str = "engine", count: int = 1
) -> ProcessMemory:
    """Return a process, with GPU indices translated from the process's view to this machine's.

    Args:
        seen: indices of the GPUs visible to the process; its "cuda:1" is the second of them.
        key: section of the configuration that the hints of an engine refer to.
    """
    placed = []
    for part in parts:
        number = number_of(part.device)
        device = f"cuda:{seen[number]}" if number is not None and number < len(seen) else part.device
        placed.append(evolve(part, device=device, change=part.change.replace("engine.", f"{key}.")))
    return ProcessMemory(name=name, parts=tuple(placed), count=count)


def number_of(device: str) -> int | None:
    """Return the index of a GPU, 0 for "cuda", or None for another device."""
    number = device.removeprefix("cuda").removeprefix(":") or "0"
    return int(number) if number.isdigit() else None


def row_tokens(config: Config, positions: int) -> int:
    """Return the length of a long row in tokens: prompt, completions and the environment's messages."""
    rollout = config.rollout
    turns = max(1, rollout.max_turns)
    return min(positions, rollout.max_total_tokens or turns * (rollout.max_tokens + PROMPT_TOKENS))


def outstanding(config: Config) -> int:
    """Return the largest number of concurrent rollouts of an engine."""
    validation = config.validation
    held_out = validation.prompts * len(config.tasks) if validation.every else 0
    held_out += sum(validation.of_set(name).prompts for name in validation.due_sets)
    return max(config.slots * config.rollout.group_size, held_out)


def _load(case: Case, dtype: str, engine: EngineConfig, gpus: Sequence[machine.Gpu]) -> EngineLoad:
    first = gpus[0].memory if gpus and machine.build_of_torch() else None
    requests = -(-outstanding(case.config) // engine.workers)
    return EngineLoad(
        parameters=case.parameters,
        config=files.ModelFiles(Path(case.directory)).config,
        dtype=dtype,
        requests=min(requests, engine.max_requests or requests),
        tokens=row_tokens(case.config, files.size_of(case.directory, "max_position_embeddings")),
        gpu_bytes=first.total if first else 0,
    )


# ---------------------------------------------------------------------------------- everything else


@frozen(kw_only=True)
class Footprint:
    """The memory of a run by process and part."""

    processes: tuple[ProcessMemory, ...]
    parameters: int
    checkpoint: int
    """Bytes of a checkpoint: trained parameters and optimizer state."""
    capacities: tuple[Capacity, ...]
    """The run's need for each device with known memory."""
    microbatch: tuple[int, int]
    """Rows and tokens per row of the largest micro-batch."""
    missing: tuple[str, ...]
    """Reasons for unknown parts."""


def footprint(
    config: Config, host: PluginHost, directory: str, gpus: Sequence[machine.Gpu], python: int
) -> Footprint:
    """Return all parts of a run's memory.  Imports torch and the model's code into this process.

    The size of this process then measures the libraries that each process of the run imports.

    Args:
        directory: directory with the model's config.json, or a hub id.
        python: resident bytes of a process without torch.

    Raises ModelError if the configuration makes no model.
    """
    with contextlib.suppress(ImportError):  # not public; every process imports it
        import transformers.tokenization_utils_tokenizers  # noqa: F401

    main = resident()
    import torch  # noqa: F401 - imported by an engine

    with_torch = resident()
    from grpo_plugin_doctor.activations import model_shapes

    model = model_shapes(directory, trust_remote_code=config.model.trust_remote_code)
    bases = {"trainer": resident()}
    case = Case(config, host, directory, model.tensors, gpus)
    processes = certain_parts(case)
    remote = case.placement.remote
    elsewhere = ["engine"] * remote + ["trainer"] * (not case.trains_here)
    missing = _undeclared(config, processes, elsewhere)
    found = [ProcessMemory(name="main", parts=(_base(main), *_copies(config, processes)))]
    processes, work, unknown = with_passes(case, processes)
    for process in processes:
        base = _base(bases.get(process.name, with_torch))
        found.append(evolve(process, parts=(base, *process.parts)))
    if not remote:
        sets = config.validation.environments(config.validation.due_sets)
        count = (config.environment.workers or 1) * (len(config.tasks) + len(sets))
        found.append(ProcessMemory(name="environment", parts=(_base(python),), count=count))
    return Footprint(
        processes=tuple(found),
        parameters=model.parameters,
        checkpoint=_checkpoint_bytes(case),
        capacities=tuple(capacities(found, gpus)),
        microbatch=(work.rows, work.tokens),
        missing=(*missing, *unknown),
    )


def with_passes(
    case: Case, processes: Sequence[ProcessMemory]
) -> tuple[list[ProcessMemory], Pass, list[str]]:
    """Add the passes to the trainer; return the processes, the largest micro-batch, and reasons if unknown.

    Imports torch and the model's code into this process.
    """
    from grpo_plugin_doctor.activations import model_shapes, pass_bytes, trained_pass

    config, directory, on_gpu = case.config, case.directory, case.device != HOST
    trust = config.model.trust_remote_code
    vocabulary = model_shapes(directory, trust_remote_code=trust).vocabulary
    trainer = as_table(config)["trainer"]
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    work = trained_pass(
        config.trainer,
        rows=max(1, rollouts // config.trainer.updates_per_step),
        tokens=row_tokens(config, files.size_of(directory, "max_position_embeddings")),
        sampled=config.rollout.max_tokens * max(1, config.rollout.max_turns),
        vocabulary=vocabulary,
        dtype=case.dtype,
        on_gpu=on_gpu,
        copies=trainer.get("weights") == "bfloat16",
    )
    try:
        nbytes = pass_bytes(directory, work, vocabulary=vocabulary, on_gpu=on_gpu, trust_remote_code=trust)
    except ModelError as error:
        return list(processes), work, [str(error)]
    changed = sum(map(prod, case.trained.values())) // trainer.get("ranks", 1)
    found = [
        evolve(each, parts=(*each.parts, *_activations(nbytes, changed, each.parts[0].device)))
        if each.name == "trainer"
        else each
        for each in processes
    ]
    return found, work, []


def _checkpoint_bytes(case: Case) -> int:
    """Return the bytes of a checkpoint; an optimizer without a declared state counts as AdamW."""
    weights = sizes.FLOAT32 * sum(map(prod, case.trained.values()))
    kept = case.optimizer
    return weights + (2 * weights if kept is None else kept)


def _undeclared(config: Config, processes: Sequence[ProcessMemory], elsewhere: Collection[str]) -> list[str]:
    """Return a sentence for each part on this machine without a declaration of its memory."""
    declared = {process.name for process in processes}.union(elsewhere)
    return [
        f"the {each} {name!r} does not report how much memory it needs"
        for each, name in (("trainer", config.trainer.name), ("engine", config.engine.name))
        if each not in declared
    ]


def _activations(nbytes: int, trained: int, device: str) -> tuple[MemoryPart, ...]:
    """Return the memory part of the trainer's passes.

    On a CPU the heap fragments, because gradients and activations are reallocated in every step.  The
    overhead is empirical: ``tests/benchmarks/bench_doctor.py`` measures it.
    """
    change = 'trainer.tokens_per_microbatch, trainer.activations = "recompute"'
    part = MemoryPart(name="activations", nbytes=nbytes, device=device, certain=device != HOST, change=change)
    if device != HOST:
        return (part,)
    kept = sizes.FLOAT32 * trained + int(KEPT_ACTIVATIONS * nbytes)
    return part, MemoryPart(name="freed, not given back", nbytes=kept, certain=False)


def _base(nbytes: int) -> MemoryPart:
    return MemoryPart(name="Python and packages", nbytes=nbytes, certain=False)


def _copies(config: Config, processes: Sequence[ProcessMemory]) -> Iterator[MemoryPart]:
    """Yield the copy of the published weights that a pool of engines keeps."""
    held = [part for each in processes for part in each.count * each.parts if part.name == sizes.PUBLISHED]
    if config.engine.workers > 1 and held:
        nbytes = sum(part.nbytes for part in held)
        change = "engine.workers"
        yield evolve(held[0], nbytes=nbytes, name="copy of the weights", certain=False, change=change)


# ---------------------------------------------------------------------------------- messages


def need(capacity: Capacity) -> str:
    """Describe the need of a run and the memory of a device in one clause."""
    memory = capacity.memory
    place = "the host's memory" if capacity.device == HOST else f"GPU {capacity.device}"
    limit = f", the limit in {memory.limit}" if memory.limit else ""
    return (
        f"the run needs at least {size(capacity.certain)} of {place}, which has "
        f"{size(memory.available)} available (of {size(memory.total)}{limit})"
    )


def refusal(capacity: Capacity, processes: Sequence[ProcessMemory]) -> str:
    """Return the message for a run that cannot fit: its parts and possible changes."""
    there = [(process, part) for process, part in parts_on(processes, capacity.device) if part.certain]
    parts = ", ".join(
        f"{process.name}'s {part.name} {size(part.nbytes)}"
        + (f" x {process.count}" if process.count > 1 else "")
        for process, part in there
    )
    return (
        f"{need(capacity)}: {parts}. What makes it smaller: {changes(processes, capacity.device)}; {TURN_OFF}"
    )


def changes(processes: Sequence[ProcessMemory], device: str) -> str:
    """Return the changes that reduce the parts on a device, the largest parts first."""
    parts = sorted((part for _, part in parts_on(processes, device)), key=lambda part: -part.nbytes)
    return "; ".join(dict.fromkeys(part.change for part in parts if part.change))


def size(nbytes: float) -> str:
    """Format a number of bytes with three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "bytes" else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.3g} TiB" if nbytes < 1000 else f"{nbytes:,.0f} TiB"
