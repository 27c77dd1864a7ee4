"""Finds, checks and loads plugins; makes what they offer, by name.

A plugin that does not import, or that implements its hooks wrongly, is listed as broken and takes nobody
down: it is fatal only if something that it offers is asked for.

How an offer is spelled (see ``grpo_core.hookspecs`` for what an offer is):

    sort                        if exactly one plugin offers it
    math:sort                   plugin:name, always valid
    reasoning_gym:chain_sum     the rest of a prefix
    grpo-plugin-math/math:sort  if two distributions call their plugin "math"
    ./file.py:Reverse           a factory, or an offer of the hooks, of a file that is not installed
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pluggy
from attrs import define, field, frozen

import grpo_core
from grpo_core import hookspecs
from grpo_core.errors import ConfigError, PluginError, did_you_mean

if TYPE_CHECKING:
    from grpo_core.events import Event

Kind = Literal["environment", "sampler", "validation_strategy", "engine", "loss", "advantage"]

HOOKS: Mapping[Kind, str] = {
    "environment": "grpo_environments",
    "sampler": "grpo_samplers",
    "validation_strategy": "grpo_validation_strategies",
    "engine": "grpo_engines",
    "loss": "grpo_losses",
    "advantage": "grpo_advantages",
}
EVENT_HOOK = "grpo_event"
BUILT_IN = "core"
"""Name of the plugin that the core itself is; it is always there."""

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
    """Its ``grpo_event`` hooks; emptied when one of them raises."""
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
        return f"{_spaced(self.kind)} {self.name!r} of {self.plugin}"

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


class PluginHost:
    """The plugins of this process."""

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []
        self.left_out: dict[str, str] = {}
        """Installed plugins that were not imported, and why."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    @classmethod
    def discover(cls, allow: Sequence[str] | None = None, block: Sequence[str] = ()) -> PluginHost:
        """Load the built-in plugin and those that are installed.

        Args:
            allow: names of plugins or distributions that may be loaded; None: those of the environment
                variable ``GRPO_PLUGINS`` (separated by commas, empty: none) or, without it, all.
            block: names of plugins or distributions that are not imported.

        Raises:
            ConfigError: ``allow`` or ``block`` names a plugin that is not installed.
        """
        host = cls()
        core = Plugin(
            name=BUILT_IN,
            distribution="grpo-core",
            version=grpo_core.__version__,
            module="grpo_core.builtins",
        )
        host._load(core, lambda: importlib.import_module(core.module))
        found = _installed()
        source = "the list of plugins"
        if allow is None and "GRPO_PLUGINS" in os.environ:
            source = "the environment variable GRPO_PLUGINS"
            allow = [name.strip() for name in os.environ["GRPO_PLUGINS"].split(",") if name.strip()]
        known = {name for plugin, entry in found for name in _names(plugin, entry)} | {BUILT_IN}
        _check_known(allow or (), known, source)
        _check_known(block, known - {BUILT_IN}, "the list of plugins to leave out")
        for plugin, entry in found:
            names = _names(plugin, entry)
            if allow is not None and names.isdisjoint(allow):
                host.left_out[plugin.name] = f"not in {source}"
            elif not names.isdisjoint(block):
                host.left_out[plugin.name] = "left out on request"
            else:
                host._load(plugin, functools.partial(_import, entry))
        return host

    # ------------------------------------------------------------------------------ using

    def factory(self, kind: Kind, name: str) -> Factory:
        """The factory that is offered as ``name``.

        Raises PluginError if there is none, if there are several, or if its plugin is broken.
        """
        offer = self.find(kind, name)
        return functools.partial(offer.load(), *offer.args) if offer.args else offer.load()

    def make(self, kind: Kind, name: str, *args: Any, **options: Any) -> Any:
        """Call the factory.  Raises PluginError for unknown or missing options and if the factory raises."""
        offer = self.find(kind, name)
        factory = offer.load()
        args = (*offer.args, *args)
        _check_options(offer, _signature(factory), options, given=len(args))
        try:
            return factory(*args, **options)
        except Exception as error:
            raise PluginError(f"{offer}: cannot be made: {_describe(error)}") from error

    def function(self, kind: Kind, name: str, **options: Any) -> Factory:
        """A loss or advantage with its options, which are its keyword-only parameters, filled in."""
        offer = self.find(kind, name)
        function = offer.load()
        _check_options(offer, _signature(function), options, given=None)
        return functools.partial(function, **options)

    def find(self, kind: Kind, name: str) -> Offer:
        """What is offered as ``name``, not yet imported if it is offered as a string."""
        if (spelled := re.fullmatch(r"(.+\.py)(?::(.*))?", name)) is not None:
            return self._find_in_file(kind, name, Path(spelled[1]), spelled[2] or "")
        for plugin in self.plugins:
            if name.startswith(f"{plugin.name}:"):
                if plugin.fault is not None:
                    raise self._broken(kind, name, plugin)
                if (
                    match := _match(plugin.offers.get(kind, {}), name.removeprefix(f"{plugin.name}:"))
                ) is not None:
                    return Offer(kind, name, plugin, *match)
        bare = [
            Offer(kind, name, plugin, *match)
            for plugin in self.plugins
            if (match := _match(plugin.offers.get(kind, {}), name, bare=True)) is not None
        ]
        if len(bare) == 1:
            return bare[0]
        if bare:
            spellings = " or ".join(repr(f"{offer.plugin.name}:{name}") for offer in bare)
            raise PluginError(
                f"{_spaced(kind)} {name!r} is offered by " + " and ".join(str(o.plugin) for o in bare) + f"; "
                f"write {spellings}"
            )
        raise self._unknown(kind, name)

    def emit(self, event: Event) -> None:
        """Tell all listeners.  One that raises is reported in the log, once, and not called again."""
        for plugin in self.plugins:
            try:
                for listener in plugin.listeners:
                    listener(event)
            except Exception:
                import logging

                plugin.listeners = []
                logging.getLogger(__name__).warning(
                    "%s: its %s hook raised on %s; it is not called again",
                    *(plugin, EVENT_HOOK, type(event).__name__),
                    exc_info=True,
                )

    # ------------------------------------------------------------------------------ loading

    def _load(self, plugin: Plugin, load: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        module = None
        try:
            module = load()
            self._register(plugin, module)
        except KeyboardInterrupt:
            raise
        except (
            BaseException
        ) as error:  # whatever a foreign module does, SystemExit included, is its own fault
            if module is not None and self._manager.get_name(module) == plugin.name:
                self._manager.unregister(module)
            plugin.fault, plugin.offers, plugin.listeners = error, {}, []
        plugin.seconds = time.perf_counter() - begin
        self.plugins.append(plugin)

    def _register(self, plugin: Plugin, module: Any) -> None:
        self._check_hooks(module)
        self._manager.register(module, plugin.name)
        for kind, hook in HOOKS.items():
            for function, _ in self._implementations(hook, module):
                plugin.offers.setdefault(kind, {}).update(_offers(hook, function()))
        for function, arguments in self._implementations(EVENT_HOOK, module):
            plugin.listeners.append(function if arguments else _without_event(function))

    def _implementations(self, hook: str, module: Any) -> Iterable[tuple[Factory, tuple[str, ...]]]:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin is module:
                yield implementation.function, implementation.argnames

    def _check_hooks(self, module: Any) -> None:
        """What pluggy accepts silently: misspelt, unmarked, asynchronous and wrapping hooks."""
        known = {*HOOKS.values(), EVENT_HOOK}
        for attribute in dir(module):
            function = inspect.getattr_static(module, attribute)
            if not inspect.isroutine(function):
                continue
            marked = self._manager.parse_hookimpl_opts(module, attribute)
            hook = (marked["specname"] if marked else None) or attribute
            if marked is None:
                if attribute in known:
                    raise PluginError(f"hook {attribute!r} is not marked with @grpo_core.hookimpl")
                if attribute.startswith("grpo_") and (near := did_you_mean(attribute, known)):
                    raise PluginError(f"unknown hook {attribute!r}.{near}")
            elif hook not in known:
                raise PluginError(f"unknown hook {hook!r}.{did_you_mean(hook, known)}")
            elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise PluginError(
                    f"hook {hook!r} is async; hooks are plain functions (evaluate may be async)"
                )
            elif marked["wrapper"] or marked["hookwrapper"]:
                raise PluginError(f"hook {hook!r} is a wrapper; each plugin only speaks for itself")

    # ------------------------------------------------------------------------------ files

    def _find_in_file(self, kind: Kind, name: str, path: Path, wanted: str) -> Offer:
        plugin = next((p for p in self.plugins if p.module == str(path.expanduser().resolve())), None)
        if plugin is None:
            plugin = Plugin(
                name=str(path), distribution="a file", version="", module=str(path.expanduser().resolve())
            )
            self._load(plugin, lambda: _import_file(Path(plugin.module)))
        if plugin.fault is not None:
            raise self._broken(kind, name, plugin)
        if (match := _match(plugin.offers.get(kind, {}), wanted)) is not None:
            return Offer(kind, name, plugin, *match)
        module = sys.modules[_module_name(Path(plugin.module))]
        factory = getattr(module, wanted, None) if wanted else None
        if callable(factory):
            return Offer(kind, name, plugin, factory)
        here = {
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        defined = {*here, *(plugin.offers.get(kind) or ())} - {*HOOKS.values(), EVENT_HOOK}
        raise PluginError(
            f"{_spaced(kind)} {name!r}: {path} has no {wanted!r}.{did_you_mean(wanted, defined)} "
            f"Write {path}:NAME with one of: {', '.join(sorted(defined)) or 'nothing is defined there'}"
        )

    # ------------------------------------------------------------------------------ errors

    def _broken(self, kind: Kind, name: str, plugin: Plugin) -> PluginError:
        error = PluginError(f"{_spaced(kind)} {name!r}: {plugin} is broken: {plugin.error}")
        error.__cause__ = plugin.fault
        return error

    def _unknown(self, kind: Kind, name: str) -> PluginError:
        head, _, rest = name.partition(":")
        twins = [f"{p.name}:{rest}" for p in self.plugins if rest and p.name.endswith(f"/{head}")]
        if twins:
            return PluginError(
                f"{_spaced(kind)} {name!r}: {len(twins)} distributions have a plugin {head!r}; "
                f"write {' or '.join(map(repr, twins))}"
            )
        offered = [(p.name, offer) for p in self.plugins for offer in p.offers.get(kind, {})]
        spellings = {f"{plugin}:{offer}" for plugin, offer in offered}
        bare = {offer for _, offer in offered}
        lines = [f"there is no {_spaced(kind)} {name!r}.{did_you_mean(name, spellings | bare)}"]
        lines.append(f"  installed: {', '.join(sorted(spellings)) or 'none'}")
        lines += [f"  left out: plugin {plugin!r} ({why})" for plugin, why in self.left_out.items()]
        lines += [f"  broken: {p}: {p.error}" for p in self.plugins if p.fault is not None]
        return PluginError("\n".join(lines))


def listing(host: PluginHost) -> list[dict[str, Any]]:
    """The plugins as plain data, as ``grpo-core plugins --json`` prints them."""
    return [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "module": plugin.module,
            "offers": {kind: sorted(offers) for kind, offers in plugin.offers.items()},
            "listens": bool(plugin.listeners),
            "error": plugin.error,
            "note": plugin.note,
            "seconds": round(plugin.seconds, 4),
        }
        for plugin in host.plugins
    ]


# ---------------------------------------------------------------------------------- entry points


def _installed() -> list[tuple[Plugin, EntryPoint]]:
    """Every entry point of the group; those of one name are told apart by their distribution."""
    entries = [(entry, _distribution(entry)) for entry in entry_points(group=hookspecs.PROJECT)]
    uses = Counter([BUILT_IN, *(entry.name for entry, _ in entries)])
    found = []
    for entry, distribution in sorted(entries, key=lambda pair: (pair[0].name, pair[1].name)):
        plugin = Plugin(
            name=entry.name,
            distribution=distribution.name,
            version=distribution.version,
            module=entry.value,
        )
        if uses[entry.name] > 1:
            plugin.name = f"{distribution.name}/{entry.name}"
            plugin.note = f"another distribution has a plugin {entry.name!r} too, so this is {plugin.name!r}"
        found.append((plugin, entry))
    return found


def _distribution(entry: EntryPoint) -> Distribution:
    assert entry.dist is not None, "entry_points() tells the distribution of each"
    return entry.dist


def _names(plugin: Plugin, entry: EntryPoint) -> set[str]:
    """What a plugin may be called in a list of plugins."""
    return {plugin.name, entry.name, plugin.distribution}


def _check_known(names: Iterable[str], known: set[str], source: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{source}: plugin {name!r} is not installed.{did_you_mean(name, known)} "
                f"Installed: {', '.join(sorted(known))}"
            )


def _import(entry: EntryPoint) -> Any:
    """Check the requirement on grpo-core, which an installation may have ignored, and import the module."""
    for line in _distribution(entry).requires or ():
        if re.match(r"grpo[-_.]core\b(?![-_.]?\w)", line, re.IGNORECASE) and not _plainly_met(line):
            from packaging.requirements import Requirement

            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and not requirement.specifier.contains(grpo_core.__version__, prereleases=True):
                raise PluginError(
                    f"it needs grpo-core{requirement.specifier}, this is {grpo_core.__version__}"
                )
    return entry.load()


def _plainly_met(requirement: str) -> bool:
    """True for what needs no second look, as ``grpo-core<1,>=0.1``: importing packaging takes 15 ms."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.sub(r"(\.0+)+$", "", version).split(".")))

    bounds = re.findall(r"(>=|<)(\d+(?:\.\d+)*)(?:,|$)", requirement)
    plain = "".join(re.split(r"[<>=]", requirement, maxsplit=1)[:1])
    if not bounds or "," .join(map("".join, bounds)) != requirement.removeprefix(plain):
        return False
    if re.fullmatch(r"[\d.]+", grpo_core.__version__) is None:
        return False
    ours = numbers(grpo_core.__version__)
    return all(ours >= numbers(v) if sign == ">=" else ours < numbers(v) for sign, v in bounds)


def _import_file(path: Path) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    if not path.is_file():
        raise PluginError(f"there is no file {path}")
    spec = spec_from_file_location(_module_name(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    return "grpo_file_" + re.sub(r"\W", "_", str(path.with_suffix("")))


# ---------------------------------------------------------------------------------- offers and options


def _without_event(function: Factory) -> Callable[[Event], Any]:
    return lambda event: function()


def _offers(hook: str, returned: Any) -> dict[str, Factory | str]:
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


def _match(
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


def _signature(factory: Factory) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):  # some callables of C have none
        return None


def _check_options(
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
            raise PluginError(
                f"{offer} has no option {name!r}.{did_you_mean(name, set(known))} "
                f"Its options: {spelled or 'none'}"
            )
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        raise PluginError(f"{offer} needs the option {missing[0]!r}. Its options: {spelled}")


def _spaced(kind: Kind) -> str:
    return kind.replace("_", " ")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, PluginError | ConfigError) else f"{type(error).__name__}: {error}"
