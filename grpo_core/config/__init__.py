"""The configuration of a run: the keys of CONFIG.toml and of ``--set section.key=value``.

Every key has a default.  An unknown key is an error that names the nearest known key.  Each part of the
program receives its own section and no other.
"""

from grpo_core.config.choices import PluginChoice as PluginChoice
from grpo_core.config.generation import CUTS as CUTS
from grpo_core.config.generation import EngineConfig as EngineConfig
from grpo_core.config.generation import RolloutConfig as RolloutConfig
from grpo_core.config.model import ModelConfig as ModelConfig
from grpo_core.config.model import TeacherConfig as TeacherConfig
from grpo_core.config.operation import DataPlaneConfig as DataPlaneConfig
from grpo_core.config.operation import PlacementConfig as PlacementConfig
from grpo_core.config.operation import TrackingConfig as TrackingConfig
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
from grpo_core.config.run import Config as Config
from grpo_core.config.tasks import EnvironmentConfig as EnvironmentConfig
from grpo_core.config.tasks import RowOptions as RowOptions
from grpo_core.config.tasks import TaskConfig as TaskConfig
from grpo_core.config.training import GOAL as GOAL
from grpo_core.config.training import ActivationsChoice as ActivationsChoice
from grpo_core.config.training import LossConfig as LossConfig
from grpo_core.config.training import OptimizerConfig as OptimizerConfig
from grpo_core.config.training import ParameterGroupConfig as ParameterGroupConfig
from grpo_core.config.training import PipelineConfig as PipelineConfig
from grpo_core.config.training import TrainerConfig as TrainerConfig
from grpo_core.config.validation import ValidationConfig as ValidationConfig
from grpo_core.config.validation import ValidationSetConfig as ValidationSetConfig
