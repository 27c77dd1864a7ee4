"""What plugins are and what they offer: records, names and options."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from attrs import define, field, frozen

from grpo_core.errors import ConfigError, PluginError, SelectionError, did_you_mean

if TYPE_CHECKING:
    from grpo_core.events import Event

Kind = Literal[
    "environment", "sampler", "validation_strategy", "engine", "loss", "advantage", "placement", "model"
]

HOOKS: Mapping[Kind, str] = {
    "environment": "grpo_environments",
    "sampler": "grpo_samplers",
    "validation_strategy": "grpo_validation_strategies",
    "engine": "grpo_engines",
    "loss": "grpo_losses",
    "advantage": "grpo_advantages",
    "placement": "grpo_placements",
    "model": "grpo_models",
}
Factory = Callable[..., Any]


@define(kw_only=True)
class Plugin:
    """What is known of a plugin."""

    name: str
    distribution: str
    version: str
    module: str
    offers: dict[Kind, dict[str, Factory | str]] = field(factory=dict)
    listeners: list[Callable[[Event], Any]] = field(factory=list)
    """Its ``grpo_event`` hooks."""
    fault: BaseException | None = None
    """Why it is broken."""
    note: str = ""
    seconds: float = 0.0
    """To import and check it."""

    @property
    def error(self) -> str:
        """Why it is broken, in one line; empty if it is not."""
        if self.fault is None:
            return ""
        text = " ".join(str(self.fault).split())
        return text if isinstance(self.fault, PluginError) else f"{type(self.fault).__name__}: {text}"

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"


@frozen
class Offer:
    """A factory that somebody asked for by name."""

    kind: Kind
    name: str
    plugin: Plugin
    given: Factory | str
    args: tuple[str, ...] = ()
    """The rest of the name, if the plugin offers a prefix."""

    def __str__(self) -> str:
        return f"{spaced(self.kind)} {self.name!r} of {self.plugin}"

    def load(self) -> Factory:
        """The factory itself.  Raises PluginError if its module does not import."""
        if not isinstance(self.given, str):
            return self.given
        module, _, attribute = self.given.partition(":")
        try:
            return cast("Factory", getattr(importlib.import_module(module), attribute))
        except Exception as error:
            raise PluginError(
                f"{self}: {self.given} cannot be loaded: {type(error).__name__}: {error}"
            ) from error


def check_requirements(offer: Offer, factory: Factory) -> None:
    """Raises ConfigError if a module that the factory needs is not installed; imports none of them.

    A factory names them in ``requires``: ``{module: command that installs it}``.
    """
    requires: Mapping[str, str] = getattr(factory, "requires", {})
    for module, command in requires.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{offer}: {module} is not installed: {command}")


def checked_offers(hook: str, returned: Any) -> dict[str, Factory | str]:
    if not isinstance(returned, Mapping):
        raise PluginError(f"{hook}() returned {type(returned).__name__}, expected a dict of name: factory")
    for name, factory in returned.items():
        if not isinstance(name, str) or not name:
            raise PluginError(f"{hook}() offers {name!r}: a name is a string")
        if not callable(factory) and not (isinstance(factory, str) and re.fullmatch(r"[\w.]+:\w+", factory)):
            raise PluginError(
                f'{hook}() offers {name!r} as {factory!r}: expected a callable or "module:attribute"'
            )
    return dict(returned)


def matching(
    offers: Mapping[str, Factory | str], name: str, *, bare: bool = False
) -> tuple[Factory | str, tuple[str, ...]] | None:
    """The offer of that name, or the longest prefix of it; ``"*"`` alone only matches behind its plugin."""
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
    except (TypeError, ValueError):  # some callables of C have none
        return None


def check_options(
    offer: Offer, signature: inspect.Signature | None, options: Mapping[str, Any], *, given: int | None
) -> None:
    """``given`` positional arguments come from the core; None: only keyword-only parameters are options."""
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
    for name in options:
        if name not in known:
            raise SelectionError(
                f"{offer} has no option {name!r}.{did_you_mean(name, set(known))} "
                f"Its options: {spelled or 'none'}"
            )
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        raise SelectionError(f"{offer} needs the option {missing[0]!r}. Its options: {spelled}")


def spaced(kind: Kind) -> str:
    return kind.replace("_", " ")
