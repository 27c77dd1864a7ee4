"""The setup of a trainer: plain data, which can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import field, frozen

from grpo_core.config import LossConfig, ModelConfig, OptimizerConfig, TeacherConfig, TrainerConfig
from grpo_core.contracts.records import WithSections

PROFILED_AFTER = 2
"""Steps of a process before the first profiled one: they allocate memory and choose kernels."""


def steps_of_profile(steps: int) -> tuple[int, int]:
    """Return the numbers of the first and the last traced step, counted from 1."""
    return PROFILED_AFTER + 1, PROFILED_AFTER + steps


@frozen(kw_only=True)
class TrainerSetup(WithSections):
    """The argument of a trainer's factory, in addition to the options that the user chose."""

    model: ModelConfig = field(factory=ModelConfig)
    """The model that the run starts from; ``path`` is its directory."""
    trainer: TrainerConfig = field(factory=TrainerConfig)
    """The ``[trainer]`` section."""
    loss: LossConfig = field(factory=LossConfig)
    """Name and options of the loss, for ``PluginHost.function``."""
    teacher: TeacherConfig = field(factory=TeacherConfig)
    """The ``[teacher]`` section; ``path`` is a directory, or empty without a teacher."""
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    """The ``[optimizer]`` section."""
    seed: int = 0
    """Seed of the run."""
    colocated: bool = True
    """Whether engines generate on this machine while the trainer trains; it then leaves them cores."""
    prepare: Callable[[], None] | None = None
    """Makes the model at ``model.path``; the trainer calls it once, in its process, before it loads the
    model."""
    resume_from: str | None = None
    """A directory that ``Trainer.save`` wrote; None: start from ``model``."""
    async_save: bool = True
    """Write checkpoints while training continues; see ``CheckpointConfig``."""
    transport: str = "shm"
    """Transport of weights to engines; see ``EngineConfig``.  From a CPU, ``cuda_ipc`` is ``shm``."""
    engine_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Dtype of the training engine's weights; they are sent in it if it is smaller than the trainer's."""
    transport_options: Mapping[str, Any] = field(factory=dict)
    """Options of the transport."""
    max_non_finite: float = 0.1
    """Share of an update's rows that may have a non-finite loss; see ``HealthConfig``."""
    plugins: tuple[str, ...] | None = None
    """Allow-list of the plugins that a loss may come from; None allows all."""
    block: tuple[str, ...] = ()
    """Plugins that are not imported."""
    env_vars: Mapping[str, str] = field(factory=dict)
    """Environment variables of the trainer's process, such as the ones that select its GPU."""
    shares_gpu: bool = False
    """Whether an engine computes on the trainer's GPU and needs the memory that is free between steps."""
    rank: int = 0
    """Rank of this process in the trainer."""
    ranks: int = 1
    """Number of the trainer's processes."""
    rendezvous: str = ""
    """Rendezvous of the ranks: a file that the first one makes, or ``tcp://address:port``, at which the first
    one listens."""
    profile: str = ""
    """Directory for the traces of ``trainer.profile`` steps."""
    log: str | None = None
    """File for the trainer's output; None means standard error."""
