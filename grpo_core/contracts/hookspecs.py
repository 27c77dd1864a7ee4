"""The hooks that a plugin may implement.

A plugin is a module of a distribution with an entry point in the group ``grpo_core``, or a single file that
is named in the configuration.  Its hooks register what it *offers*, once, synchronously, and never run in
the hot path.  Which offer is used is decided by name in the configuration, never by the order of plugins.

An offer is a factory under a name.

* An ``Offer`` holds the factory with what the core has to know before it calls it.
* The factory is a callable, or ``"module:attribute"``: then the module is imported when the offer is first
  used, so that listing a plugin stays cheap.
* A name that ends with ``*`` is a prefix: it matches every name with that prefix, and the factory receives
the rest as its first positional argument.  A plain ``"*"`` of the plugin
  ``reasoning_gym`` makes ``reasoning_gym:chain_sum`` a call of ``factory("chain_sum", **options)``.

The options of a factory are its parameters that can be given by name; an unknown option is an error before
the factory is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from attrs import field, frozen
from attrs.validators import matches_re

if TYPE_CHECKING:
    from grpo_core.contracts.protocols import (
        AdvantageFunction,
        DataPlane,
        Engine,
        Environment,
        Filter,
        LossFunction,
        OptimizerFunction,
        Sampler,
        Tracker,
        Trainer,
        ValidationStrategy,
    )

PROJECT = "grpo_core"
"""Group of the entry points, and name of the markers."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks the functions of a plugin that implement a hook."""


@frozen
class Command:
    """A command of the command line."""

    target: str = field(validator=matches_re(r"[\w.]+:\w+"))
    """The function as ``"module:function"``, or a ``cyclopts.App`` with subcommands.  The module is imported
    when the command runs or its own help is printed."""
    help: str = field(kw_only=True, validator=matches_re(r"\S[^\n]*"))
    """The first sentence of the function's docstring; ``grpo-core --help`` prints it."""


@frozen(kw_only=True)
class Transport:
    """A transport of weights from trainer to engines; its locations begin with its name: ``"NAME:..."``."""

    writer: str = field(validator=matches_re(r"[\w.]+:\w+"))
    """Function ``"module:function"`` of the trainer's process: ``(setup: TrainerSetup, device, ranks)``.  It
    returns an object with ``write(version, tensors, *, dtype) -> Weights``."""
    reader: str = field(validator=matches_re(r"[\w.]+:\w+"))
    """Function of the engine's process: ``(weights, device)``.  It returns the bytes of all tensors, as
    uint8."""
    stream: str = field(default="", validator=matches_re(r"([\w.]+:\w+)?"))
    """Function like ``reader`` that yields the bytes in the buckets of ``grpo_core.weights.layout``, for
    engines without memory for all; empty if reading makes no copy."""
    several: bool = True
    """Whether several engines may read, at their own pace."""
    remote: bool = False
    """Whether the engines, or the ranks of the trainer, may be on other machines.  It then has an option
    ``host``."""
    host: str = "127.0.0.1"
    """Address at which engines reach the trainer."""
    same_gpu: bool = False
    """Whether the engine reads the memory of the trainer's GPU, which it must see."""
    on_device: bool = False
    """Whether published weights are in the memory of the trainer's device, not in host memory."""

    def __call__(self) -> Transport:
        """Return itself: an offer is a factory."""
        return self


Role = Literal["plays_agents", "pools_engines", "crosses_machines", "is_default"]
"""The role of a player, of an engine, of a placement or transport, and of a tracker."""
Function = Callable[..., Any] | str
"""A function, or ``"module:function"``, which is imported when it is first called."""


@frozen(kw_only=True)
class Offer:
    """A factory, and what the core has to know before it calls it.

    A hook may return it instead of a bare factory.  The functions receive the options that the configuration
    gives, by name; they must load neither torch nor a model.
    """

    factory: Function = field(kw_only=False)
    """The factory, or ``"module:attribute"``."""
    requires: Mapping[str, str] = field(factory=dict)
    """Modules that have to be installed, each with the command that installs it.  They are not imported
    before the factory is called."""
    check: Function | None = None
    """Raises ValueError or ConfigError for invalid options.  It may also have the parameters ``config`` (the
    whole configuration), ``host`` (the ``PluginHost``), ``group_size`` (an advantage, a filter) and ``betas``
    (an optimizer)."""
    role: Role | None = None
    """The purpose for which the core takes it where the configuration names no offer."""
    parts: Function | None = None
    """Returns, for the options of an advantage function, the metrics that it reads as parts of the reward:
    those of a rollout's turns are added.  ``("*",)`` is all of them."""
    single_use: bool = False
    """Whether the factory returns one object, which workers cannot share."""
    extends_core: bool = False
    """Whether it replaces the core's offer of this name wherever the plugin is installed.  It has all of that
    offer's options and gives the same results with them.  ``core:NAME`` is still the core's."""


@frozen(kw_only=True)
class EngineOffer(Offer):
    """The offer of an engine."""

    output: Literal["tokens", "text"] = "tokens"
    """Whether it returns tokens with their logprobs, or is a ``TextEngine``, which needs no model."""
    transports: tuple[str, ...] = ("shm",)
    """Transports that it supports; an engine that reads weights with ``grpo_core.kit.read_weights`` supports
    all: ``("*",)``."""
    memory: Function | None = None
    """Returns ``MemoryPart``s for an ``EngineLoad``, its first argument."""
    workers: Function | None = None
    """Returns the number of engines that the options describe."""


@frozen(kw_only=True)
class TrainerOffer(Offer):
    """The offer of a trainer."""

    memory: Function | None = None
    """Returns ``MemoryPart``s of all processes; ``grpo_core.training.memory`` has its arguments."""
    workers: Function | None = None
    """Returns the number of its processes for ``(config, host)``."""
    placement: str = ""
    """Name of the placement whose workers run its processes."""
    scores: Collection[str] = ()
    """Weights by which it can score the sampled tokens, of "start", "current", "ema" and "model"; see
    ``[scores.NAME]``."""


@frozen(kw_only=True)
class OptimizerOffer(Offer):
    """The offer of an optimizer."""

    elementwise: bool = False
    """Whether it computes each number by itself, so that ranks may give it parts of parameters."""
    state: Function | None = None
    """Returns shape and dtype of each slot of its state, for the name and shape of a parameter."""
    restored: Function | None = None
    """Makes a slot of its state from the slot's name and the tensors in it, if it consists of several."""


OFFERS: Mapping[str, type[Offer]]
OFFERS = {"engine": EngineOffer, "trainer": TrainerOffer, "optimizer": OptimizerOffer}
"""Offers of the kinds of which the core has to know more."""


@hookspec
def grpo_commands() -> Mapping[str, Command]:  # type: ignore[empty-body]
    """Offer commands: ``{name: Command("module:function", help=...)}``.

    The hook is in a module that an entry point of the group ``grpo_core.commands`` names.
    ``grpo-core --help`` imports this module, so it should import little.
    """


@hookspec
def grpo_config_sections() -> Mapping[str, object]:  # type: ignore[empty-body]
    """Add sections to the configuration: ``{name: attrs class}``.

    The name is a new table, ``"budget"``, which may be below a core table, ``"model.lora"``; or it is a core
    table, ``"trainer"``, to which the class adds its fields as keys.  ``Class | None`` is a table that is off
    unless the configuration has it.  Each field has a type, a default, and a docstring.
    """


@hookspec
def grpo_environments() -> Mapping[str, Callable[..., Environment] | Offer | str]:  # type: ignore[empty-body]
    """Offer environments: ``{name: factory(**options)}``.

    The factory is called in the environment's own process, on its main thread.  A class will do.
    """


@hookspec
def grpo_dataloaders() -> Mapping[str, Callable[..., object] | Offer | str]:  # type: ignore[empty-body]
    """Offer dataloaders: ``{name: factory(split, **options)}``.

    The factory is called with ``"train"`` on a thread of the run's process, and again whenever a stream has
    ended.  It returns a sequence, a torch ``Dataset``, a torchdata ``StatefulDataLoader`` or
    ``torchdata.nodes`` pipeline, or an iterable with ``state_dict`` and ``load_state_dict``, of prompts or of
    mappings.  For ``"validation"`` it may return None: then the environment's held-out prompts are used.
    """


@hookspec
def grpo_players() -> Mapping[str, Callable[..., object] | Offer | str]:  # type: ignore[empty-body]
    """Offer players: ``{name: factory(setup: PlayerSetup, **options)}``; ``tasks.NAME.player`` selects one.

    The factory returns a ``grpo_core.Player``, or None, which plays turn by turn.
    """


@hookspec
def grpo_samplers() -> Mapping[str, Callable[..., Sampler] | Offer | str]:  # type: ignore[empty-body]
    """Offer samplers: ``{name: factory(**options)}``."""


@hookspec
def grpo_validation_strategies() -> Mapping[str, Callable[..., ValidationStrategy] | Offer | str]:  # type: ignore[empty-body]
    """Offer validation strategies: ``{name: factory(**options)}``."""


@hookspec
def grpo_engines() -> Mapping[str, Callable[..., Engine] | Offer | str]:  # type: ignore[empty-body]
    """Offer engines: ``{name: factory(setup: EngineSetup, **options)}``.

    An engine that returns text, such as a hosted model, is a ``TextEngine`` and an ``EngineOffer(...,
    output="text")``.
    """


@hookspec
def grpo_trainers() -> Mapping[str, Callable[..., Trainer] | Offer | str]:  # type: ignore[empty-body]
    """Offer trainers: ``{name: factory(setup: TrainerSetup, **options)}``."""


@hookspec
def grpo_losses() -> Mapping[str, LossFunction | Offer | str]:  # type: ignore[empty-body]
    """Offer losses: ``{name: pure function}``; its keyword-only parameters are its options."""


@hookspec
def grpo_advantages() -> Mapping[str, AdvantageFunction | Offer | str]:  # type: ignore[empty-body]
    """Offer advantages: ``{name: pure function}``; its keyword-only parameters are its options."""


@hookspec
def grpo_optimizers() -> Mapping[str, OptimizerFunction | Offer | str]:  # type: ignore[empty-body]
    """Offer optimizers: ``{name: function(groups, **options) -> torch's optimizers}``."""


@hookspec
def grpo_filters() -> Mapping[str, Filter | Offer | str]:  # type: ignore[empty-body]
    """Offer filters: ``{name: function(group, **options) -> reason | None}``; ``[filters]`` selects them."""


@hookspec
def grpo_trackers() -> Mapping[str, Callable[..., Tracker] | Offer | str]:  # type: ignore[empty-body]
    """Offer trackers: ``{name: factory(run: RunInfo, **options)}``; ``tracking.trackers`` selects them."""


@hookspec
def grpo_placements() -> Mapping[str, Callable[..., object] | Offer | str]:  # type: ignore[empty-body]
    """Offer places where engines and environments run: ``{name: factory(plugins: PluginHost, **options)}``.

    The factory returns a ``grpo_core.kit.Placement``.
    """


@hookspec
def grpo_data_planes() -> Mapping[str, Callable[..., DataPlane] | Offer | str]:  # type: ignore[empty-body]
    """Offer places for the tokens of finished rollouts: ``{name: factory(placement, **options)}``."""


@hookspec
def grpo_models() -> Mapping[str, Callable[..., object] | Offer | str]:  # type: ignore[empty-body]
    """Offer models that are made: ``{name: factory(**options)}``; see ``grpo_core.app.model_sources``."""


@hookspec
def grpo_preflight() -> Mapping[str, Callable[..., object] | str]:  # type: ignore[empty-body]
    """Offer checks of a run: ``{name: function}``.  Each is called once what its parameters name is there.

    * ``config`` and ``host``, the plugins: before anything of a run starts.
    * ``model``, a directory: when it is here, before its weights are loaded.
    * ``renderer``, ``held_out``, ``prompts`` and ``environments``: before the first rollout; the function may
      be async.  ``validate`` has no ``prompts`` and no ``environments``.

    The function returns warnings: texts, whose cause is its name, or texts by their cause.  It raises
    ConfigError for a run that must not start.
    """


@hookspec
def grpo_transports() -> Mapping[str, Transport | str]:  # type: ignore[empty-body]
    """Offer transports of weights: ``{name: Transport(...)}``, or a function of its options that returns it.

    ``engine.transport`` selects one.  The writer finds the options in ``setup.transport_options``.
    """
