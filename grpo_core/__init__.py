"""Asynchronous GRPO for language models: domains are plugins, async RL is the core.

This is the public API: the names of ``__all__``, ``grpo_core.testing`` for tests of plugins, and
``grpo_core.kit`` for engines.  Every other module is internal.  A name is loaded on first use, so
importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core._lazy import attach

if TYPE_CHECKING:
    from grpo_core import advantages as advantages
    from grpo_core import errors as errors
    from grpo_core import events as events
    from grpo_core import rewards as rewards
    from grpo_core._version import __version__ as __version__
    from grpo_core.addresses import checked_url as checked_url
    from grpo_core.addresses import fetch_json as fetch_json
    from grpo_core.api.calls import session as session
    from grpo_core.api.calls import train as train
    from grpo_core.api.calls import validate as validate
    from grpo_core.api.run import Run as Run
    from grpo_core.app.session import Session as Session
    from grpo_core.data.samplers import TaskSampler as TaskSampler
    from grpo_core.data.samplers import WeightedTaskSampler as WeightedTaskSampler
    from grpo_core.data.samplers import take_prompts as take_prompts
    from grpo_core.environments.tools import tools_of as tools_of
    from grpo_core.errors import ChildDied as ChildDied
    from grpo_core.errors import ConfigError as ConfigError
    from grpo_core.errors import DataPlaneError as DataPlaneError
    from grpo_core.errors import DeadlineExceeded as DeadlineExceeded
    from grpo_core.errors import EngineError as EngineError
    from grpo_core.errors import GrpoError as GrpoError
    from grpo_core.errors import ModelError as ModelError
    from grpo_core.errors import PluginError as PluginError
    from grpo_core.errors import SessionLost as SessionLost
    from grpo_core.errors import TrainerError as TrainerError
    from grpo_core.errors import Unavailable as Unavailable
    from grpo_core.errors import WeightSyncError as WeightSyncError
    from grpo_core.errors import did_you_mean as did_you_mean
    from grpo_core.hookspecs import Command as Command
    from grpo_core.hookspecs import Offer as Offer
    from grpo_core.hookspecs import Transport as Transport
    from grpo_core.hookspecs import hookimpl as hookimpl
    from grpo_core.limits import Limits as Limits
    from grpo_core.loading import load_object as load_object
    from grpo_core.loss import LossInputs as LossInputs
    from grpo_core.loss import needs as needs
    from grpo_core.playing import Play as Play
    from grpo_core.playing import Player as Player
    from grpo_core.playing import PlayerSetup as PlayerSetup
    from grpo_core.plugins.host import make_environment as make_environment
    from grpo_core.protocols import AdvantageFunction as AdvantageFunction
    from grpo_core.protocols import Engine as Engine
    from grpo_core.protocols import Environment as Environment
    from grpo_core.protocols import Filter as Filter
    from grpo_core.protocols import Loader as Loader
    from grpo_core.protocols import LossFunction as LossFunction
    from grpo_core.protocols import OptimizerFunction as OptimizerFunction
    from grpo_core.protocols import ParameterGroup as ParameterGroup
    from grpo_core.protocols import Renderer as Renderer
    from grpo_core.protocols import Sampler as Sampler
    from grpo_core.protocols import TextEngine as TextEngine
    from grpo_core.protocols import Tool as Tool
    from grpo_core.protocols import Tracker as Tracker
    from grpo_core.protocols import Trainer as Trainer
    from grpo_core.protocols import ValidationContext as ValidationContext
    from grpo_core.protocols import ValidationStrategy as ValidationStrategy
    from grpo_core.records import AgentClient as AgentClient
    from grpo_core.records import Batch as Batch
    from grpo_core.records import Canary as Canary
    from grpo_core.records import Completion as Completion
    from grpo_core.records import EndReason as EndReason
    from grpo_core.records import EngineLoad as EngineLoad
    from grpo_core.records import EngineSetup as EngineSetup
    from grpo_core.records import Episode as Episode
    from grpo_core.records import Feedback as Feedback
    from grpo_core.records import FinishReason as FinishReason
    from grpo_core.records import GenerationRequest as GenerationRequest
    from grpo_core.records import Group as Group
    from grpo_core.records import MemoryPart as MemoryPart
    from grpo_core.records import Message as Message
    from grpo_core.records import Prompt as Prompt
    from grpo_core.records import Recording as Recording
    from grpo_core.records import Reply as Reply
    from grpo_core.records import Rollout as Rollout
    from grpo_core.records import Row as Row
    from grpo_core.records import RunInfo as RunInfo
    from grpo_core.records import SampleRequest as SampleRequest
    from grpo_core.records import Segment as Segment
    from grpo_core.records import SessionStart as SessionStart
    from grpo_core.records import StateDigest as StateDigest
    from grpo_core.records import StepResult as StepResult
    from grpo_core.records import TensorInfo as TensorInfo
    from grpo_core.records import TensorPart as TensorPart
    from grpo_core.records import Weights as Weights
    from grpo_core.reporting.stored import stored_rollouts as stored_rollouts
    from grpo_core.text.thoughts import split_thought as split_thought
    from grpo_core.tokens import Tokens as Tokens
    from grpo_core.training.setup import TrainerSetup as TrainerSetup
    from grpo_core.validation.estimates import mean_with_interval as mean_with_interval
    from grpo_core.validation.strategies import ScoringStrategy as ScoringStrategy

__getattr__, __dir__, __all__ = attach(__name__)
