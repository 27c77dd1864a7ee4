"""The configuration of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, fields, frozen
from attrs.validators import ge, lt

from grpo_core.config.choices import PluginChoice
from grpo_core.config.generation import EngineConfig, RolloutConfig
from grpo_core.config.model import ModelConfig, TeacherConfig
from grpo_core.config.operation import (
    CheckpointConfig,
    DataPlaneConfig,
    HealthConfig,
    PlacementConfig,
    TrackingConfig,
)
from grpo_core.config.tasks import (
    DynamicSamplingConfig,
    EnvironmentConfig,
    SamplerConfig,
    TaskConfig,
)
from grpo_core.config.training import (
    AdvantageConfig,
    LossConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainerConfig,
)
from grpo_core.config.validation import ValidationConfig
from grpo_core.contracts.records import WithSections


@frozen(kw_only=True)
class Config(WithSections):
    """The configuration of a run."""

    seed: int = field(default=0, validator=[ge(0), lt(2**63)])
    """Seed of everything that is random in the run."""
    plugins: list[str] | None = None
    """Names of the plugins that may be loaded; by default all installed ones may."""
    tasks: dict[str, TaskConfig] = field(factory=dict)
    """Tasks by name; each is a source of prompts with its environment. A name has up to 64 letters (a to z),
    digits and the characters `.`, `_`, `-`, since files are named after it."""
    model: ModelConfig = field(factory=ModelConfig)
    sampler: SamplerConfig = field(factory=SamplerConfig)
    dynamic_sampling: DynamicSamplingConfig = field(factory=DynamicSamplingConfig)
    engine: EngineConfig = field(factory=EngineConfig)
    environment: EnvironmentConfig = field(factory=EnvironmentConfig)
    placement: PlacementConfig = field(factory=PlacementConfig)
    data_plane: DataPlaneConfig = field(factory=DataPlaneConfig)
    rollout: RolloutConfig = field(factory=RolloutConfig)
    advantage: AdvantageConfig = field(factory=AdvantageConfig)
    filters: dict[str, dict[str, Any]] = field(factory=dict)
    """Filters by name, each with its options: `[filters.pass_rate]` and `high = 0.9` below it. A group that
    one of them rejects is not trained, and another prompt is drawn instead."""
    loss: LossConfig = field(factory=LossConfig)
    teacher: TeacherConfig = field(factory=TeacherConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    pipeline: PipelineConfig = field(factory=PipelineConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    health: HealthConfig = field(factory=HealthConfig)
    tracking: TrackingConfig = field(factory=TrackingConfig)

    def choices(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield kind, name and options of each offer that is chosen."""
        for each in fields(type(self)):
            chosen = getattr(self, each.name)
            if isinstance(chosen, PluginChoice):
                kind = "validation_strategy" if each.name == "validation" else each.name
                yield kind, chosen.name, chosen.options
        if self.validation.engine is not None:
            yield "engine", self.validation.engine.name, self.validation.engine.options
        of_sets = self.validation.environments(self.validation.sets)
        for task in (*self.tasks.values(), *of_sets.values()):
            yield "environment", task.env, task.options
            if task.player:
                yield "player", task.player, task.player_options
        for strategy in map(self.validation.of_set, self.validation.sets):
            yield "validation_strategy", strategy.name, strategy.options
        for name, options in self.filters.items():
            yield "filter", name, options
        for name in self.tracking.trackers:
            yield "tracker", name, self.tracking.options.get(name, {})
