"""Parts for engines, placements and trainers, in addition to the protocols and records of ``grpo_core``.

An engine:

    ChildEngine            an engine in a child process, which is replaced when it dies
    DecodingServer         base class of the loop in that process: takes calls between decoding steps
    read_weights           returns the tensors of published weights of any transport
    read_buckets           yields them in buckets, so that an engine needs no second copy
    check_request          refuses requests that do not fit the model
    LocalEngine            the built-in engine, to extend
    die_with               ends this process when another one ends
    scratch_directory      makes a directory for temporary files, which a killed process does not leave behind
    report, reported_to    report survived faults to the run; a worker forwards them
    Service, unavailable   let calls wait while a service is unavailable; recognise its errors

A placement, which runs engines and environments somewhere else (see ``grpo_plugin_ray``):

    Placement, Devices, EnvironmentSpec, EnvironmentWorker, Retain    its contract
    EnvironmentProcess, PluginHost, PluginSelection, offers   make environments and engines in a worker
    copies, transport_of        keep and read published weights
    interpreters                take variables that env_vars names
    engine_metrics, BackgroundMetrics   metrics of an engine that is elsewhere
    wire                        small pickles of requests and completions

A trainer whose processes are somewhere else:

    ProcessTrainer, TrainerProcess, StartProcess   its class, its process, and what starts one
    Child                          a process of this machine, which makes an object and answers calls

The trainer ``torch`` with more (see ``grpo_plugin_scale``):

    TorchTrainer, Model, ModelSource, FullModel   its class and its model, which a subclass may replace
    Ranks, plan                 collectives of the training processes, and one process's part of a step
    memory                      its memory by part
    room_for, cpu               memory of the machine for copies; settings of a process that computes on a CPU

A trainer of another library (see ``examples/custom_trainer.py``):

    SharedMemoryWriter          publishes weights for the engines of this machine
    needs_of                    returns what a loss needs with its options, such as "scores.reference"
    rate                        returns the learning rate of a step

A pool of engines (see ``grpo_plugin_scale``):

    canary, Tolerance           proves that an engine uses the weights that it was given
    reported_as, during         name an engine in incidents and in the timeline
    aio                         await several calls, or one for a limited time

A data plane, which keeps the tokens of finished rollouts outside of the run's process:

    RemotePlane                 its base class, with its contract

A source of models:

    ModelRequest, StartModel    its argument, and its result
    watched                     downloads on a thread, and shows how far it is
    build, Renderer            read its preset and its tokenizer

An environment that is made of others:

    evaluate_of, SCORES             call another environment, whichever way it judges
    as_feedback, Judgement          read what one returns
    SessionStart                    how it began
    units, DEADLINE                 divide its episodes into calls

A transport of weights (see ``grpo_plugin_scale``):

    publishing                  the trainer's side, and the ranks that publish together
    layout                      how tensors lie in a block of bytes, and the parts in which it is sent

A player (see ``grpo_plugin_agents``):

    aio                         cancels tasks and waits until they have ended
    orphans                     end all that a program has started, by a variable that it inherits
    import_file, shortened      import a Python file, and cut a long text
    normalised, MessageError, parsed, numbered    read messages and calls that clients write
    thoughts                    a model's thinking in its messages

A client or a server of others:

    Client, Answer, NotSent, ServiceError   ask a service over HTTP: bounded, without redirects
    said, retried           what a server says, as one line for a message; a call that is repeated
    read_json, read_body    read their data, within limits; raise nothing but ValueError

A section of the configuration:

    only_with       marks a key that needs another one: without it the run is refused
    options_of      marks a key with the options of an offer that another key names

A sampler, a validation strategy or a tracker with a state:

    derive_seed       returns a number that depends on names and numbers alone
    checked, Count    check what was read from a checkpoint against a ``TypedDict``

A command that plays environments, in addition to ``grpo_core.Run``:

    launch, parse_settings, check_settings   read and check a configuration, with the command line's settings
    Config, TaskConfig, check_task              check the environments that it names
    Tasks, LocalPlacement, EnvironmentClient    start the environments of a configuration
    sourced                                     one environment with the data of a task
    find_target, start_session                  let a model play
    interrupts, merge, PlayingText, TextRenderer   let a person play
    groups_in, prompts_in, as_json           read a file of rollouts, and write a line of one
    leakage, assistant_message               compare prompts, read a reply
    aio, wrong_input, lines_of_incidents        what commands share
    AsJson, Flag, Settings, Words            annotations of options of any command

A contract that ``grpo-core check`` tries (see ``grpo_plugin_devkit``):

    ModelConfig, checkpoint_tensors, encode, make_tiny_model    a small model for the contract of a trainer
    LookAhead, RowOptions, Source, states    the rows of a dataloader, and its state
    checked_sample              calls a sampler, and checks its prompts
    EnvironmentPool             merges the calls of rollouts, as in a run
    rows                        what an advantage function returns, and its check
    offers                      hooks by the kind of their offers

A command that shows runs, in addition to ``grpo_core.Run``:

    say, complain               print a result, and an error, with control characters escaped
    inert                       escapes them alone
    RunDirectory                locks the directory of a run
    Retention                   names the checkpoints to keep
    planned_steps               returns the number of steps of a whole run
    Trend, Fall                 find tasks whose validation falls while their training does not
    headline, progress, SHARES  choose a task's representative metric, and format it
    thoughts                    keys of a message with its thoughts

A command that computes steps of a run again, or reads settings:

    configured, changed, merge, structured, read_toml    make a configuration, or another table, of tables
    launch                      the keys in which two tables differ, and their values
    Parts, rows                            make the trainer of a run again, and the rows of a step
    fault, started_from         find what the trainer continues from
    Pipeline, Checks, PromptStream         the loop of a run, its checks and its prompts
    RolloutRequest, play, sampling_params  play rollouts as a run plays them
    LimitedEngine                          an engine that gets a limited number of requests at once
    clock                                  runs a coroutine on virtual time

A command that estimates a run before it starts (see ``grpo_plugin_doctor``):

    make, launch, Parts         make the parts of a configuration, and check its model
    gpus, engine_dtype, find_transport    what a run will start on this machine
    scoring_model               find a model that scores
    files, ModelFiles           find and read the files of a model
    Scorer, MicroBatch, Passes, for_training, packing    compute what training computes
    token_budget, extra_bytes_on_gpu, state_bytes    compute its memory

``examples/custom_engine.py`` is a complete engine.  Check yours with ``grpo-core check ./file.py:MyEngine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core.plugins.lazy import attach

if TYPE_CHECKING:
    from grpo_core.app import gpus as gpus
    from grpo_core.app import launch as launch
    from grpo_core.app import sourced as sourced
    from grpo_core.app.data import Source as Source
    from grpo_core.app.gpus import Devices as Devices
    from grpo_core.app.make import check_task as check_task
    from grpo_core.app.make import make as make
    from grpo_core.app.model_sources import ModelRequest as ModelRequest
    from grpo_core.app.model_sources import StartModel as StartModel
    from grpo_core.app.model_sources import find_target as find_target
    from grpo_core.app.model_sources import scoring_model as scoring_model
    from grpo_core.app.model_sources import started_from as started_from
    from grpo_core.app.model_sources import watched as watched
    from grpo_core.app.parts import Parts as Parts
    from grpo_core.app.parts import engine_dtype as engine_dtype
    from grpo_core.app.parts import sampling_params as sampling_params
    from grpo_core.app.placement import LocalPlacement as LocalPlacement
    from grpo_core.app.placement import Placement as Placement
    from grpo_core.app.placement import Retain as Retain
    from grpo_core.app.session import start_session as start_session
    from grpo_core.app.tasks import Tasks as Tasks
    from grpo_core.commands.complaints import complain as complain
    from grpo_core.commands.complaints import say as say
    from grpo_core.config import Config as Config
    from grpo_core.config import EngineConfig as EngineConfig
    from grpo_core.config import EnvironmentConfig as EnvironmentConfig
    from grpo_core.config import ModelConfig as ModelConfig
    from grpo_core.config import RowOptions as RowOptions
    from grpo_core.config import TaskConfig as TaskConfig
    from grpo_core.config import TrainerConfig as TrainerConfig
    from grpo_core.config import as_table as as_table
    from grpo_core.config import build as build
    from grpo_core.config import check_settings as check_settings
    from grpo_core.config import merge as merge
    from grpo_core.config import parse_settings as parse_settings
    from grpo_core.config import read_toml as read_toml
    from grpo_core.config import structured as structured
    from grpo_core.config.idle import only_with as only_with
    from grpo_core.config.run import options_of as options_of
    from grpo_core.contracts.completions import check_request as check_request
    from grpo_core.contracts.errors import shortened as shortened
    from grpo_core.contracts.errors import wrong_input as wrong_input
    from grpo_core.contracts.incidents import Incident as Incident
    from grpo_core.contracts.incidents import lines_of_incidents as lines_of_incidents
    from grpo_core.contracts.incidents import report as report
    from grpo_core.contracts.incidents import reported_as as reported_as
    from grpo_core.contracts.incidents import reported_to as reported_to
    from grpo_core.contracts.loss import SCORE as SCORE
    from grpo_core.contracts.loss import needs_of as needs_of
    from grpo_core.contracts.playing import EnvironmentClient as EnvironmentClient
    from grpo_core.contracts.playing import derive_seed as derive_seed
    from grpo_core.contracts.records import Judgement as Judgement
    from grpo_core.contracts.records import SessionStart as SessionStart
    from grpo_core.contracts.typed import Count as Count
    from grpo_core.contracts.typed import checked as checked
    from grpo_core.data import leakage as leakage
    from grpo_core.data import states as states
    from grpo_core.data.loaders import LookAhead as LookAhead
    from grpo_core.data.samplers import PromptStream as PromptStream
    from grpo_core.data.samplers import checked_sample as checked_sample
    from grpo_core.demo.tiny import encode as encode
    from grpo_core.demo.tiny import make_tiny_model as make_tiny_model
    from grpo_core.engines import wire as wire
    from grpo_core.engines.child import ChildEngine as ChildEngine
    from grpo_core.engines.local.decoding_server import DecodingServer as DecodingServer
    from grpo_core.engines.local.engine import LocalEngine as LocalEngine
    from grpo_core.engines.text import PlayingText as PlayingText
    from grpo_core.engines.text import TextRenderer as TextRenderer
    from grpo_core.engines.wrapped import BackgroundMetrics as BackgroundMetrics
    from grpo_core.engines.wrapped import LimitedEngine as LimitedEngine
    from grpo_core.engines.wrapped import engine_metrics as engine_metrics
    from grpo_core.environments.feedback import as_feedback as as_feedback
    from grpo_core.environments.host import DEADLINE as DEADLINE
    from grpo_core.environments.host import SCORES as SCORES
    from grpo_core.environments.host import evaluate_of as evaluate_of
    from grpo_core.environments.host import units as units
    from grpo_core.environments.outages import Service as Service
    from grpo_core.environments.outages import unavailable as unavailable
    from grpo_core.environments.pool import EnvironmentPool as EnvironmentPool
    from grpo_core.environments.pool import EnvironmentSpec as EnvironmentSpec
    from grpo_core.environments.pool import EnvironmentWorker as EnvironmentWorker
    from grpo_core.environments.process import EnvironmentProcess as EnvironmentProcess
    from grpo_core.loop import canary as canary
    from grpo_core.loop import rows as rows
    from grpo_core.loop.agreement import Tolerance as Tolerance
    from grpo_core.loop.checkpoint import fault as fault
    from grpo_core.loop.health import Fall as Fall
    from grpo_core.loop.health import Trend as Trend
    from grpo_core.loop.metrics import headline as headline
    from grpo_core.loop.pipeline import Checks as Checks
    from grpo_core.loop.pipeline import Pipeline as Pipeline
    from grpo_core.loop.retention import Retention as Retention
    from grpo_core.loop.rollout import RolloutRequest as RolloutRequest
    from grpo_core.loop.rollout import play as play
    from grpo_core.loop.schedule import rate as rate
    from grpo_core.loop.timeline import during as during
    from grpo_core.models import files as files
    from grpo_core.models.fitting import ModelFiles as ModelFiles
    from grpo_core.plugins import offers as offers
    from grpo_core.plugins.configured import changed as changed
    from grpo_core.plugins.configured import configured as configured
    from grpo_core.plugins.host import PluginHost as PluginHost
    from grpo_core.plugins.installed import import_file as import_file
    from grpo_core.plugins.options import AsJson as AsJson
    from grpo_core.plugins.options import Flag as Flag
    from grpo_core.plugins.options import Settings as Settings
    from grpo_core.plugins.options import Words as Words
    from grpo_core.plugins.selection import PluginSelection as PluginSelection
    from grpo_core.plugins.transports import find_transport as find_transport
    from grpo_core.plugins.transports import transport_of as transport_of
    from grpo_core.processes import aio as aio
    from grpo_core.processes import cpu as cpu
    from grpo_core.processes import interpreters as interpreters
    from grpo_core.processes import interrupts as interrupts
    from grpo_core.processes import orphans as orphans
    from grpo_core.processes.child import Child as Child
    from grpo_core.processes.child import scratch_directory as scratch_directory
    from grpo_core.processes.client import Answer as Answer
    from grpo_core.processes.client import Client as Client
    from grpo_core.processes.client import NotSent as NotSent
    from grpo_core.processes.client import ServiceError as ServiceError
    from grpo_core.processes.client import retried as retried
    from grpo_core.processes.client import said as said
    from grpo_core.processes.secrets import inert as inert
    from grpo_core.processes.served import RemoteTraceback as RemoteTraceback
    from grpo_core.processes.served import die_with as die_with
    from grpo_core.reporting.stored import as_json as as_json
    from grpo_core.reporting.stored import groups_in as groups_in
    from grpo_core.reporting.stored import prompts_in as prompts_in
    from grpo_core.reporting.trackers import TrackerThread as TrackerThread
    from grpo_core.storage import copies as copies
    from grpo_core.storage.planes import RemotePlane as RemotePlane
    from grpo_core.storage.run_directory import RunDirectory as RunDirectory
    from grpo_core.storage.run_directory import planned_steps as planned_steps
    from grpo_core.testing import clock as clock
    from grpo_core.text import thoughts as thoughts
    from grpo_core.text.messages import MessageError as MessageError
    from grpo_core.text.messages import normalised as normalised
    from grpo_core.text.messages import parsed as parsed
    from grpo_core.text.rendering import Renderer as Renderer
    from grpo_core.text.response_formats import assistant_message as assistant_message
    from grpo_core.text.response_formats import numbered as numbered
    from grpo_core.text.untrusted import read_body as read_body
    from grpo_core.text.untrusted import read_json as read_json
    from grpo_core.training import memory as memory
    from grpo_core.training import packing as packing
    from grpo_core.training import plan as plan
    from grpo_core.training.budget import token_budget as token_budget
    from grpo_core.training.host_block import room_for as room_for
    from grpo_core.training.logprobs import extra_bytes_on_gpu as extra_bytes_on_gpu
    from grpo_core.training.microbatch import MicroBatch as MicroBatch
    from grpo_core.training.model import FullModel as FullModel
    from grpo_core.training.model import Model as Model
    from grpo_core.training.model import ModelSource as ModelSource
    from grpo_core.training.model import Scorer as Scorer
    from grpo_core.training.optimizers import state_bytes as state_bytes
    from grpo_core.training.passes import Passes as Passes
    from grpo_core.training.passes import for_training as for_training
    from grpo_core.training.process import ProcessTrainer as ProcessTrainer
    from grpo_core.training.process import StartProcess as StartProcess
    from grpo_core.training.process import TrainerProcess as TrainerProcess
    from grpo_core.training.ranks import Ranks as Ranks
    from grpo_core.training.trainer import TorchTrainer as TorchTrainer
    from grpo_core.validation.results import SHARES as SHARES
    from grpo_core.validation.results import progress as progress
    from grpo_core.weights import layout as layout
    from grpo_core.weights import publishing as publishing
    from grpo_core.weights.names import checkpoint_tensors as checkpoint_tensors
    from grpo_core.weights.reading import read_buckets as read_buckets
    from grpo_core.weights.reading import read_weights as read_weights
    from grpo_core.weights.shm import SharedMemoryWriter as SharedMemoryWriter

__getattr__, __dir__, __all__ = attach(__name__)
