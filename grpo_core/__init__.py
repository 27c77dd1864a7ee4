"""Asynchronous GRPO for language models: domains are plugins, async RL is the core.

This is the public API: the names of ``__all__``, ``grpo_core.testing`` for tests of plugins, and
``grpo_core.kit`` for engines.  Every other module is internal.  A name is loaded on first use, so
importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core.plugins.lazy import attach

if TYPE_CHECKING:
    from grpo_core._version import __version__ as __version__
    from grpo_core.api.calls import session as session
    from grpo_core.api.calls import train as train
    from grpo_core.api.calls import validate as validate
    from grpo_core.api.run import Run as Run
    from grpo_core.app.session import Session as Session
    from grpo_core.config.run import TrainerSetup as TrainerSetup
    from grpo_core.contracts import advantages as advantages
    from grpo_core.contracts import errors as errors
    from grpo_core.contracts import events as events
    from grpo_core.contracts import rewards as rewards
    from grpo_core.contracts.errors import ChildDied as ChildDied
    from grpo_core.contracts.errors import ConfigError as ConfigError
    from grpo_core.contracts.errors import DataPlaneError as DataPlaneError
    from grpo_core.contracts.errors import DeadlineExceeded as DeadlineExceeded
    from grpo_core.contracts.errors import EngineError as EngineError
    from grpo_core.contracts.errors import GrpoError as GrpoError
    from grpo_core.contracts.errors import ModelError as ModelError
    from grpo_core.contracts.errors import PluginError as PluginError
    from grpo_core.contracts.errors import SessionLost as SessionLost
    from grpo_core.contracts.errors import TrainerError as TrainerError
    from grpo_core.contracts.errors import Unavailable as Unavailable
    from grpo_core.contracts.errors import WeightSyncError as WeightSyncError
    from grpo_core.contracts.errors import did_you_mean as did_you_mean
    from grpo_core.contracts.hookspecs import Command as Command
    from grpo_core.contracts.hookspecs import EngineOffer as EngineOffer
    from grpo_core.contracts.hookspecs import Offer as Offer
    from grpo_core.contracts.hookspecs import OptimizerOffer as OptimizerOffer
    from grpo_core.contracts.hookspecs import TrainerOffer as TrainerOffer
    from grpo_core.contracts.hookspecs import Transport as Transport
    from grpo_core.contracts.hookspecs import hookimpl as hookimpl
    from grpo_core.contracts.loss import LossInputs as LossInputs
    from grpo_core.contracts.loss import needs as needs
    from grpo_core.contracts.playing import Play as Play
    from grpo_core.contracts.playing import Player as Player
    from grpo_core.contracts.playing import PlayerSetup as PlayerSetup
    from grpo_core.contracts.protocols import AdvantageFunction as AdvantageFunction
    from grpo_core.contracts.protocols import Engine as Engine
    from grpo_core.contracts.protocols import Environment as Environment
    from grpo_core.contracts.protocols import Filter as Filter
    from grpo_core.contracts.protocols import Loader as Loader
    from grpo_core.contracts.protocols import LossFunction as LossFunction
    from grpo_core.contracts.protocols import OptimizerFunction as OptimizerFunction
    from grpo_core.contracts.protocols import ParameterGroup as ParameterGroup
    from grpo_core.contracts.protocols import Renderer as Renderer
    from grpo_core.contracts.protocols import Sampler as Sampler
    from grpo_core.contracts.protocols import TextEngine as TextEngine
    from grpo_core.contracts.protocols import Tool as Tool
    from grpo_core.contracts.protocols import Tracker as Tracker
    from grpo_core.contracts.protocols import Trainer as Trainer
    from grpo_core.contracts.protocols import ValidationContext as ValidationContext
    from grpo_core.contracts.protocols import ValidationStrategy as ValidationStrategy
    from grpo_core.contracts.records import AgentClient as AgentClient
    from grpo_core.contracts.records import Batch as Batch
    from grpo_core.contracts.records import Canary as Canary
    from grpo_core.contracts.records import Completion as Completion
    from grpo_core.contracts.records import EndReason as EndReason
    from grpo_core.contracts.records import EngineLoad as EngineLoad
    from grpo_core.contracts.records import EngineSetup as EngineSetup
    from grpo_core.contracts.records import Episode as Episode
    from grpo_core.contracts.records import Feedback as Feedback
    from grpo_core.contracts.records import FinishReason as FinishReason
    from grpo_core.contracts.records import GenerationRequest as GenerationRequest
    from grpo_core.contracts.records import Group as Group
    from grpo_core.contracts.records import Limits as Limits
    from grpo_core.contracts.records import MemoryPart as MemoryPart
    from grpo_core.contracts.records import Message as Message
    from grpo_core.contracts.records import Prompt as Prompt
    from grpo_core.contracts.records import Recording as Recording
    from grpo_core.contracts.records import Reply as Reply
    from grpo_core.contracts.records import Rollout as Rollout
    from grpo_core.contracts.records import Row as Row
    from grpo_core.contracts.records import RunInfo as RunInfo
    from grpo_core.contracts.records import SampleRequest as SampleRequest
    from grpo_core.contracts.records import Segment as Segment
    from grpo_core.contracts.records import StateDigest as StateDigest
    from grpo_core.contracts.records import StepResult as StepResult
    from grpo_core.contracts.records import TensorInfo as TensorInfo
    from grpo_core.contracts.records import TensorPart as TensorPart
    from grpo_core.contracts.records import Weights as Weights
    from grpo_core.contracts.tokens import Tokens as Tokens
    from grpo_core.data.samplers import TaskSampler as TaskSampler
    from grpo_core.data.samplers import WeightedTaskSampler as WeightedTaskSampler
    from grpo_core.data.samplers import take_prompts as take_prompts
    from grpo_core.engines.addresses import checked_url as checked_url
    from grpo_core.engines.addresses import fetch_json as fetch_json
    from grpo_core.environments.tools import tools_of as tools_of
    from grpo_core.plugins.files import load_object as load_object
    from grpo_core.plugins.host import make_environment as make_environment
    from grpo_core.reporting.stored import stored_rollouts as stored_rollouts
    from grpo_core.text.thoughts import split_thought as split_thought
    from grpo_core.validation.estimates import mean_with_interval as mean_with_interval
    from grpo_core.validation.strategies import ScoringStrategy as ScoringStrategy

__getattr__, __dir__, __all__ = attach(__name__)
