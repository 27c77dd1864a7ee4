"""The setup of a trainer: plain data, which can be sent to another process."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from grpo_core.config import LossConfig, ModelConfig, TrainerConfig


@frozen(kw_only=True)
class TrainerSetup:
    """The argument of a trainer's factory, in addition to the options that the user chose."""

    model: ModelConfig = field(factory=ModelConfig)
    """The model that the run starts from; ``path`` is a directory, a hub id, or "tiny"."""
    trainer: TrainerConfig = field(factory=TrainerConfig)
    """The ``[trainer]`` section."""
    loss: LossConfig = field(factory=LossConfig)
    """Name and options of the loss, for ``PluginHost.function``."""
    seed: int = 0
    """Seed of the run."""
    colocated: bool = True
    """Whether engines generate on this machine while the trainer trains, so that it leaves them cores."""
    model_directory: str = ""
    """Directory in which the model is made if ``model.path`` is "tiny"; see ``start_model``."""
    demonstrations: tuple[tuple[str, ...], ...] = ()
    """Prompts and replies worth full marks, for the warm start of "tiny"."""
    resume_from: str | None = None
    """A directory that ``Trainer.save`` wrote; None: start from ``model``."""
    async_save: bool = True
    """Write checkpoints while training goes on; see ``CheckpointConfig``."""
    transport: Literal["shm", "cuda_ipc", "collective"] = "shm"
    """Transport of weights to engines; see ``EngineConfig``.  From a CPU, ``cuda_ipc`` is ``shm``."""
    collective_host: str = "127.0.0.1"
    """Address at which engines reach the trainer, for ``collective``."""
    max_non_finite: float = 0.1
    """Share of an update's rows whose loss may be not finite; see ``HealthConfig``."""
    plugins: tuple[str, ...] | None = None
    """Allow-list of the plugins that a loss may come from; None allows all."""
    block: tuple[str, ...] = ()
    """Plugins that are not imported."""
    log: str | None = None
    """File for the trainer's output; None means standard error."""
