"""Records of plugins and their offers, and the checks of names and options."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from attrs import define, field, frozen

from grpo_core.contracts.errors import (
    ConfigError,
    PluginError,
    SelectionError,
    describe,
    did_you_mean,
    fault_of,
    plugin_errors,
    with_place,
)
from grpo_core.contracts.hookspecs import OFFERS, Function, Offer
from grpo_core.contracts.loss import needs_of
from grpo_core.contracts.typed import of_plain, wrong

if TYPE_CHECKING:
    from grpo_core.config.sections import PluginSection

Kind = Literal[
    "environment",
    "dataloader",
    "player",
    "sampler",
    "validation_strategy",
    "engine",
    "trainer",
    "loss",
    "advantage",
    "optimizer",
    "filter",
    "tracker",
    "placement",
    "data_plane",
    "transport",
    "model",
    "preflight",
]

_PLURALS = {"validation_strategy": "validation_strategies", "loss": "losses", "preflight": "preflight"}
HOOKS: Mapping[Kind, str] = {kind: f"grpo_{_PLURALS.get(kind, f'{kind}s')}" for kind in typing.get_args(Kind)}
FUNCTIONS = ("loss", "advantage", "optimizer", "filter", "preflight")
"""Kinds of functions, whose keyword-only parameters are their options."""
SET_UP = ("dataloader", "player", "engine", "trainer", "tracker", "placement", "data_plane")
"""Kinds to whose factories the core gives a positional argument."""
Factory = Callable[..., Any]
Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


@define(kw_only=True)
class Plugin:
    """A plugin that was found, with its offers or its fault."""

    name: str
    distribution: str
    version: str
    module: str
    offers: dict[Kind, dict[str, Offer]] = field(factory=dict)
    sections: tuple[PluginSection, ...] = ()
    """The sections that it adds to the configuration."""
    fault: BaseException | None = None
    """The error that makes the plugin unusable."""
    note: str = ""
    seconds: float = 0.0
    """Seconds that importing and checking the plugin took."""

    @property
    def error(self) -> str:
        """The fault in one line, or an empty string."""
        if self.fault is None:
            return ""
        return " ".join(describe(self.fault).split())

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"


@frozen
class Selected:
    """An offer that was selected by name."""

    kind: Kind
    name: str
    plugin: Plugin
    offer: Any
    """The ``Offer``, or the record of its kind."""
    args: tuple[str, ...] = ()
    """The rest of the name, if the plugin offers a prefix; it is the first argument."""

    def __str__(self) -> str:
        return f"{spaced(self.kind)} {self.name!r} of {self.plugin}"

    def load(self) -> Factory:
        """Return the factory.  Raises PluginError if its module cannot be imported."""
        return self.loaded(self.offer.factory)

    def loaded(self, function: Function) -> Factory:
        """Load a function of the offer.  Raises PluginError if its module cannot be imported."""
        if not isinstance(function, str):
            return function
        module, _, attribute = function.partition(":")
        try:
            return cast("Factory", getattr(importlib.import_module(module), attribute))
        except Exception as error:
            said = f"{self}: {function} cannot be loaded: {with_place(error)}"
            raise PluginError(said).carrying(fault_of(error)) from error


@frozen
class Bound(Generic[Argument, Returned]):
    """A function that a plugin offers (a loss, an advantage), with its options filled in."""

    selected: Selected
    function: Callable[..., Returned]
    options: Mapping[str, Any]

    @property
    def needs(self) -> frozenset[str]:
        """The needs of a loss with its options, such as "scores.reference"."""
        return needs_of(self.function, self.options)

    def __call__(self, given: Argument, /) -> Returned:
        """Raises PluginError with the plugin's name if the function raises."""
        with plugin_errors(str(self.selected)):
            return self.function(given, **self.options)

    def __str__(self) -> str:
        return str(self.selected)


def check_requirements(selected: Selected) -> None:
    """Raise ConfigError if a module that the factory needs is not installed; imports none of them."""
    for module, command in selected.offer.requires.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{selected}: {module} is not installed: {command}")


def checked_offers(kind: Kind, returned: Any) -> dict[str, Offer]:
    hook = HOOKS[kind]
    if not isinstance(returned, Mapping):
        raise PluginError(f"{hook}() returned {type(returned).__name__}, expected a dict of name: factory")
    offers = {name: as_offer(kind, given) for name, given in returned.items()}
    for name, offer in offers.items():
        factory, record = offer.factory, OFFERS.get(kind, Offer)
        if not isinstance(name, str) or not name:
            raise PluginError(f"{hook}() offers {name!r}: a name must be a string")
        if not callable(factory) and not (isinstance(factory, str) and re.fullmatch(r"[\w.]+:\w+", factory)):
            raise PluginError(
                f'{hook}() offers {name!r} as {factory!r}: expected a callable or "module:attribute"'
            )
        if type(offer) is not record:
            raise PluginError(f"{hook}() offers {name!r} as {type(offer).__name__}: use {record.__name__}")
    return offers


def as_offer(kind: Kind, given: Offer | Function) -> Offer:
    """Return an offer as it is, and a bare factory as an offer of its kind."""
    return given if isinstance(given, Offer) else OFFERS.get(kind, Offer)(given)


def matching(
    offers: Mapping[str, Offer], name: str, *, bare: bool = False
) -> tuple[Offer, tuple[str, ...]] | None:
    """Return the offer with this name, or with its longest prefix; ``"*"`` needs the plugin's name."""
    if name in offers and not name.endswith("*"):
        return offers[name], ()
    prefixes = (offer[:-1] for offer in offers if offer.endswith("*") and (offer != "*" or not bare))
    fitting = [prefix for prefix in prefixes if name.startswith(prefix) and name != prefix]
    if not fitting:
        return None
    prefix = max(fitting, key=len)
    return offers[f"{prefix}*"], (name.removeprefix(prefix),)


def signature_of(factory: Factory) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return None


def check_options(
    selected: Selected, factory: Factory, options: Mapping[str, Any], *, given: int | None, more: str = ""
) -> None:
    """Check names and types of options against the signature, which may be that of an attrs class.

    Args:
        selected: the offer, for messages.
        factory: the callable that will receive the options.
        options: the user's options.
        given: positional arguments that come from the core; None: only keyword-only parameters are options.
        more: end of the message about an unknown option.

    Raises:
        PluginError: an option is unknown, missing, or not of its annotated type.
    """
    signature = signature_of(factory)
    if signature is None:
        return
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][given:] if given is not None else []
    known = {p.name: p for p in [*named, *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]}
    spelled = ", ".join(
        name if p.default is p.empty else f"{name}={p.default!r}" for name, p in known.items()
    )
    for name, value in options.items():
        if name not in known:
            raise SelectionError(
                f"{selected} has no option {name!r}.{did_you_mean(name, set(known))} "
                f"Its options: {spelled or 'none'}{more}"
            )
        if any(wrong(value, hint := hint_of(factory, known[name]), is_of=is_option)):
            expected = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
            if typing.get_origin(hint) is Literal:
                expected = " or ".join(map(repr, typing.get_args(hint)))
            raise SelectionError(f"{selected}: option {name!r} is {value!r}; expected {expected}")
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        hint = f". For a reward function: grpo_core.train(reward=...), or trl:{selected.name} for TRL's"
        hint = hint if missing[0] in ("reply", "episode", "completions", "prompts") else ""
        raise SelectionError(f"{selected} needs the option {missing[0]!r}. Its options: {spelled}{hint}")
    try:
        signature.bind(*[None] * (1 if given is None else given), **options)
    except TypeError as error:
        raise SelectionError(f"{selected} cannot be called: {error}") from None


def hint_of(factory: Factory, parameter: inspect.Parameter) -> Any:
    """Return the parameter's annotation; Any without one, or if only a type checker can read it."""
    hint = parameter.annotation
    if hint is parameter.empty:
        return Any
    if isinstance(hint, str):
        module = sys.modules.get(getattr(factory, "__module__", ""))
        try:
            # what typing.get_type_hints does; many modules import Path for type checkers only
            return eval(hint, {"Path": Path, **(vars(module) if module else {})})
        except Exception:
            return Any
    return hint


def is_option(value: Any, kind: Any) -> bool:
    """Whether an option can be of its annotated type; True for unknown types."""
    if kind is None:
        return value is None
    if kind is Path:
        return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))
    return kind not in (bool, str, int, float, type(None)) or of_plain(value, kind)


def spaced(kind: Kind) -> str:
    return kind.replace("_", " ")
