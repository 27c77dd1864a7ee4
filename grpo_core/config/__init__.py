"""The configuration of a run: what may be written in CONFIG.toml or with ``--set section.key=value``.

Every key has a default.  An unknown key is an error that names the nearest known key.  Each part of the
program receives its own section and no other.
"""

from grpo_core.config.choices import NAMED, TASK_NAME, PluginChoice
from grpo_core.config.generation import CUTS, EngineConfig, RolloutConfig
from grpo_core.config.model import ModelConfig, TeacherConfig
from grpo_core.config.operation import (
    CheckpointConfig,
    DataPlaneConfig,
    HealthConfig,
    PlacementConfig,
    TrackingConfig,
)
from grpo_core.config.reading import (
    as_table,
    as_toml,
    build,
    check_settings,
    merge,
    parse_setting,
    parse_settings,
    read_toml,
    replace_parts,
    structured,
)
from grpo_core.config.run import Config
from grpo_core.config.tasks import (
    DynamicSamplingConfig,
    EnvironmentConfig,
    SamplerConfig,
    SourceConfig,
    TaskConfig,
)
from grpo_core.config.training import (
    GOAL,
    ActivationsChoice,
    AdvantageConfig,
    LossConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    PipelineConfig,
    TrainerConfig,
)
from grpo_core.config.validation import INHERITED, ValidationConfig, ValidationSetConfig

__all__ = [
    "CUTS",
    "GOAL",
    "INHERITED",
    "NAMED",
    "TASK_NAME",
    "ActivationsChoice",
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "DataPlaneConfig",
    "DynamicSamplingConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "HealthConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroupConfig",
    "PipelineConfig",
    "PlacementConfig",
    "PluginChoice",
    "RolloutConfig",
    "SamplerConfig",
    "SourceConfig",
    "TaskConfig",
    "TeacherConfig",
    "TrackingConfig",
    "TrainerConfig",
    "ValidationConfig",
    "ValidationSetConfig",
    "as_table",
    "as_toml",
    "build",
    "check_settings",
    "merge",
    "parse_setting",
    "parse_settings",
    "read_toml",
    "replace_parts",
    "structured",
]
