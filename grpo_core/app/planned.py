"""The processes that a run will start on this machine, as they are known before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from grpo_core.app.gpus import choose, gpus_seen, joined_to_trainer, visible
from grpo_core.app.parts import Parts, engine_dtype
from grpo_core.config import Config, EngineConfig
from grpo_core.models.files import directory_here
from grpo_core.plugins.host import PluginHost
from grpo_core.validation.target import teacher_model
from grpo_core.weights.transports import find_transport


@frozen(kw_only=True)
class Planned:
    """The trainer and the engines of a run that are on this machine."""

    trainer: Sequence[int] | None
    """The GPUs that the trainer's processes see; None if they are in the workers of a placement."""
    ranks: int
    """Number of the trainer's processes."""
    on_device: bool
    """Whether a trainer of this machine keeps published weights on its device."""
    engines: Sequence[tuple[str, EngineConfig, Sequence[Sequence[int]]]]
    """Key and section of each engine, and the GPUs that each of its workers sees; none with a placement."""
    shared: frozenset[str]
    """Keys of the engines that compute on a GPU of the trainer."""
    engine_dtype: str
    """The 16-bit dtype in which all engines hold the weights, or "auto"."""
    needs: frozenset[str]
    """Needs of the loss, such as "reference"."""
    teacher: Path | None
    """Directory of the teacher's model; None if the loss needs none, or if it is not on this machine."""


def planned(config: Config, host: PluginHost, gpus: int) -> Planned:
    """Return what a run will start, on a machine with so many GPUs; 0 looks how many there are."""
    parts = Parts(config, host)
    placement, engines, here = parts.placement(), parts.engines(), parts.trainer_here
    on_gpus = {} if placement.remote else engines
    devices = choose(here, on_gpus, gpus or visible(), joined_to_trainer(on_gpus, host), parts.ranks)

    def seen(key: str, engine: EngineConfig) -> Sequence[Sequence[int]]:
        nothing: Sequence[Mapping[str, str]] = [{}] * engine.workers
        return [gpus_seen(each, gpus) for each in [*devices.engines.get(key, ()), *nothing][: engine.workers]]

    return Planned(
        trainer=None if here is None else gpus_seen(devices.trainer, gpus),
        ranks=parts.ranks,
        on_device=here is not None and find_transport(parts.transport(placement), host).on_device,
        engines=()
        if placement.remote
        else [(key, engine, seen(key, engine)) for key, engine in engines.items()],
        shared=devices.shared,
        engine_dtype=engine_dtype(engines.values()),
        needs=parts.needs,
        teacher=directory_here(teacher_model(config.teacher.path)) if "teacher" in parts.needs else None,
    )
