"""Parts for engines, trainers, placements and other plugins, in addition to the names of ``grpo_core``.

An engine:

    ChildEngine            an engine in a child process, which is replaced when it dies
    DecodingServer         base class of the loop in that process: takes calls between decoding steps
    LocalEngine            the built-in engine, to extend
    check_request          refuses requests that do not fit the model
    read_weights           returns the tensors of published weights of any transport
    read_buckets           yields them in buckets, so that an engine needs no second copy
    transport_of           the transport that published weights came by
    BackgroundMetrics      metrics of an engine that is elsewhere
    scratch_directory      makes a directory for temporary files, which a killed process does not leave behind

A trainer:

    ProcessTrainer, TrainerProcess   a trainer in processes of its own, and one of them
    Child                  a process of this machine, which makes an object and answers calls
    SharedMemoryWriter     publishes weights for the engines of this machine
    TorchTrainer, Model, ModelSource, Ranks   the trainer ``torch``, its model, and its processes' collectives
    rate                   returns the learning rate of a step
    checkpoint_tensors     names of a model's tensors in files

A placement, which runs engines and environments somewhere else, and a data plane:

    Placement, Devices, EnvironmentSpec, EnvironmentWorker   the contract of a placement
    EnvironmentProcess, PluginHost, PluginSelection   make environments and engines in a worker
    RemotePlane            base class of a plane outside of the run's process

A source of models:

    ModelRequest, StartModel   its argument, and its result
    watched                downloads on a thread, and shows how far it is
    files                  a model's files

What goes wrong:

    Service                lets calls wait while a service is unavailable
    report, reported_to    report survived faults to the run; a worker forwards them

A client or a server of others:

    services               asks a service over HTTP: bounded, without redirects (``services.Client``)
    read_json              reads data within limits; raises nothing but ValueError

An environment that is made of others:

    evaluate_of, Judgement   call another environment, and read what it returns

A player or an engine that returns text:

    aio                    awaits several calls, cancels tasks and waits until they have ended
    normalised             reads messages that others write; raises ValueError

The configuration, and states:

    Config, as_table       the whole configuration, and its table
    only_with              marks a key that needs another one: without it the run is refused
    typed                  reads what was saved, or a server said (``typed.checked``)

``examples/custom_engine.py`` is a complete engine.  Check yours with ``grpo-core check ./file.py:MyEngine``.
Tools that come with grpo-core, and are of its version, import its modules themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core.plugins.lazy import attach

if TYPE_CHECKING:
    from grpo_core.app.model_sources import ModelRequest as ModelRequest
    from grpo_core.app.model_sources import StartModel as StartModel
    from grpo_core.app.model_sources import watched as watched
    from grpo_core.app.placement import Devices as Devices
    from grpo_core.app.placement import Placement as Placement
    from grpo_core.config import Config as Config
    from grpo_core.config import as_table as as_table
    from grpo_core.config.idle import only_with as only_with
    from grpo_core.contracts import typed as typed
    from grpo_core.contracts.incidents import report as report
    from grpo_core.contracts.incidents import reported_to as reported_to
    from grpo_core.contracts.playing import check_request as check_request
    from grpo_core.contracts.records import Judgement as Judgement
    from grpo_core.contracts.unicode import read_json as read_json
    from grpo_core.engines.child import ChildEngine as ChildEngine
    from grpo_core.engines.local.decoding_server import DecodingServer as DecodingServer
    from grpo_core.engines.local.engine import LocalEngine as LocalEngine
    from grpo_core.engines.wrapped import BackgroundMetrics as BackgroundMetrics
    from grpo_core.environments.dispatcher import Service as Service
    from grpo_core.environments.host import evaluate_of as evaluate_of
    from grpo_core.environments.pool import EnvironmentWorker as EnvironmentWorker
    from grpo_core.environments.process import EnvironmentProcess as EnvironmentProcess
    from grpo_core.environments.process import EnvironmentSpec as EnvironmentSpec
    from grpo_core.loop.schedule import rate as rate
    from grpo_core.models import files as files
    from grpo_core.plugins.host import PluginHost as PluginHost
    from grpo_core.plugins.installed import PluginSelection as PluginSelection
    from grpo_core.plugins.transports import transport_of as transport_of
    from grpo_core.processes import aio as aio
    from grpo_core.processes import services as services
    from grpo_core.processes.child import Child as Child
    from grpo_core.processes.child import scratch_directory as scratch_directory
    from grpo_core.storage.planes import RemotePlane as RemotePlane
    from grpo_core.text.messages import normalised as normalised
    from grpo_core.training.model import Model as Model
    from grpo_core.training.model import ModelSource as ModelSource
    from grpo_core.training.process import ProcessTrainer as ProcessTrainer
    from grpo_core.training.process import TrainerProcess as TrainerProcess
    from grpo_core.training.ranks import Ranks as Ranks
    from grpo_core.training.trainer import TorchTrainer as TorchTrainer
    from grpo_core.weights.names import checkpoint_tensors as checkpoint_tensors
    from grpo_core.weights.reading import read_buckets as read_buckets
    from grpo_core.weights.reading import read_weights as read_weights
    from grpo_core.weights.shm import SharedMemoryWriter as SharedMemoryWriter

__getattr__, __dir__, __all__ = attach(__name__)
