"""The configuration of a run: the keys of CONFIG.toml and of ``--set section.key=value``.

Every key has a default.  An unknown key is an error that names the nearest known key.  Each part of the
program receives its own section and no other.
"""

from grpo_core.config.reading import as_table as as_table
from grpo_core.config.reading import as_toml as as_toml
from grpo_core.config.reading import build as build
from grpo_core.config.reading import check_settings as check_settings
from grpo_core.config.reading import merge as merge
from grpo_core.config.reading import parse_setting as parse_setting
from grpo_core.config.reading import parse_settings as parse_settings
from grpo_core.config.reading import read_toml as read_toml
from grpo_core.config.reading import replace_parts as replace_parts
from grpo_core.config.reading import structured as structured
from grpo_core.config.run import GOAL as GOAL
from grpo_core.config.run import TRUNCATIONS as TRUNCATIONS
from grpo_core.config.run import ActivationsChoice as ActivationsChoice
from grpo_core.config.run import Config as Config
from grpo_core.config.run import DataPlaneConfig as DataPlaneConfig
from grpo_core.config.run import EngineConfig as EngineConfig
from grpo_core.config.run import EnvironmentConfig as EnvironmentConfig
from grpo_core.config.run import LossConfig as LossConfig
from grpo_core.config.run import ModelConfig as ModelConfig
from grpo_core.config.run import OptimizerConfig as OptimizerConfig
from grpo_core.config.run import ParameterGroupConfig as ParameterGroupConfig
from grpo_core.config.run import PipelineConfig as PipelineConfig
from grpo_core.config.run import PlacementConfig as PlacementConfig
from grpo_core.config.run import PluginChoice as PluginChoice
from grpo_core.config.run import RolloutConfig as RolloutConfig
from grpo_core.config.run import RowOptions as RowOptions
from grpo_core.config.run import ScoreConfig as ScoreConfig
from grpo_core.config.run import TaskConfig as TaskConfig
from grpo_core.config.run import TrackingConfig as TrackingConfig
from grpo_core.config.run import TrainerConfig as TrainerConfig
from grpo_core.config.run import ValidationConfig as ValidationConfig
from grpo_core.config.run import ValidationSetConfig as ValidationSetConfig
