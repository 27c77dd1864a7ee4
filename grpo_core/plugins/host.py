"""Finds, checks and loads plugins; makes their offers by name.

A plugin that cannot be imported, or that implements its hooks wrongly, is listed as broken: it is fatal only
if one of its offers is used.

How an offer is spelled (see ``grpo_core.contracts.hookspecs`` for what an offer is):

    sort                        if exactly one plugin offers it
    math:sort                   plugin:name, always valid
    reasoning_gym:chain_sum     the rest of a prefix
    grpo-plugin-math/math:sort  if two distributions call their plugin "math"
    ./file.py:Shout             a factory, or an offer of the hooks, of a file that is not installed
    ./file.py                   an agent, if the file defines ``async def run(prompt, client)``
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import evolve

from grpo_core._version import __version__
from grpo_core.contracts import hookspecs
from grpo_core.contracts.errors import (
    ConfigError,
    PluginError,
    SelectionError,
    describe,
    did_you_mean,
    fault_of,
    one_line,
    with_place,
)
from grpo_core.contracts.hookspecs import Offer, Role
from grpo_core.models.files import command_hint
from grpo_core.plugins.files import import_file, in_file, module_name
from grpo_core.plugins.installed import (
    KEYS,
    Commands,
    PluginSelection,
    allowed_names,
    import_plugin,
    install_command,
    installed,
    names_of_command_plugins,
)
from grpo_core.plugins.offers import (
    FUNCTIONS,
    HOOKS,
    SET_UP,
    Bound,
    Factory,
    Kind,
    Plugin,
    Selected,
    as_offer,
    check_options,
    check_requirements,
    checked_offers,
    matching,
    spaced,
)
from grpo_core.plugins.values import args_with_paths, with_values

if TYPE_CHECKING:
    from grpo_core.config.sections import PluginSections
    from grpo_core.contracts.protocols import Environment

__all__ = ["BUILT_IN", "HOOKS", "Kind", "Plugin", "PluginHost", "listing"]

BUILT_IN = "core"
"""Name of the core as a plugin; it is always there."""

SECTIONS = "grpo_config_sections"
"""The hook for sections of the configuration, which are classes and not offers."""

PROGRAM = "program"
"""Name of the plugin whose offers are objects of the program that called ``grpo_core.train``."""

Offers = Mapping[Kind, Mapping[str, Factory | Offer]]
"""Objects of a program, by kind and name."""
NO_OFFERS: Offers = MappingProxyType({})

_making: ContextVar[PluginHost | None] = ContextVar("plugins that make something", default=None)


class PluginHost:
    """The plugins of this process."""

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []
        self.left_out: dict[str, str] = {}
        """Installed plugins that were not imported, and why."""
        self.selection = PluginSelection()
        """The selection of plugins for other processes of the run."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    @classmethod
    def discover(
        cls, allow: Sequence[str] | None = None, block: Sequence[str] = (), *, elsewhere: bool = False
    ) -> PluginHost:
        """Load the built-in plugin and the installed ones.

        Args:
            allow: names of plugins or distributions that may be loaded; None: the names in the environment
                variable ``GRPO_PLUGINS`` (separated by commas, empty: none) or, without it, all.
            block: names of plugins or distributions that are not imported.
            elsewhere: see ``PluginSelection``.

        Raises:
            ConfigError: ``allow`` or ``block`` names a plugin that is not installed.
        """
        host = cls()
        host.selection = PluginSelection(allow=None if allow is None else tuple(allow), block=tuple(block))
        core = Plugin(
            name=BUILT_IN, distribution="grpo-core", version=__version__, module="grpo_core.plugins.builtins"
        )
        host._load(core, lambda: importlib.import_module(core.module))
        found = installed([BUILT_IN, PROGRAM])
        source = "the list of plugins"
        if allow is None and "GRPO_PLUGINS" in os.environ:
            source = "the environment variable GRPO_PLUGINS"
            allow = allowed_names()
        known = {name for each in found for name in each.names} | {BUILT_IN}
        if not elsewhere:
            if allow:
                check_known(allow, known | names_of_command_plugins(), source)
            check_known(block, known - {BUILT_IN}, "the list of plugins to leave out")
        for each in found:
            plugin, names = each.plugin, each.names
            if allow is not None and names.isdisjoint(allow):
                host.left_out[plugin.name] = f"not in {source}"
            elif not names.isdisjoint(block):
                host.left_out[plugin.name] = "left out on request"
            else:
                host._load(plugin, functools.partial(import_plugin, each))
        return host

    @classmethod
    def of(cls, selection: PluginSelection) -> PluginHost:
        """The plugins that another process of the run loads."""
        host = cls.discover(selection.allow, selection.block, elsewhere=selection.elsewhere)
        host.selection = evolve(host.selection, directory=selection.directory)
        return host

    @classmethod
    def current(cls) -> PluginHost:
        """The plugins of the host whose factory call is running; otherwise the installed ones."""
        return _making.get() or cls.discover()

    def variables(self) -> dict[str, str]:
        """Environment variables that limit other processes to these installed plugins."""
        if self.selection.allow is None and not self.selection.block:
            return {}
        names = [each.name for each in self.plugins if each.version and each.name != BUILT_IN]
        return {"GRPO_PLUGINS": ",".join(names)}

    def add(self, offers: Offers) -> None:
        """Add the offers of the program itself, which other processes do not have."""
        if not offers:
            return
        plugin = Plugin(name=PROGRAM, distribution="this program", version="", module="")
        plugin.offers = {
            kind: {name: as_offer(kind, given) for name, given in factories.items()}
            for kind, factories in offers.items()
        }
        self.plugins.append(plugin)

    @staticmethod
    def of_program(name: str) -> bool:
        """Whether an offer of that name is an object of the program."""
        return name.startswith(f"{PROGRAM}:")

    # ------------------------------------------------------------------------------ using

    def factory(self, kind: Kind, name: str) -> Factory:
        """The factory that is offered as ``name``.

        Raises PluginError if there is none, if there are several, or if its plugin is broken.
        """
        selected = self.find(kind, name)
        return functools.partial(selected.load(), *selected.args) if selected.args else selected.load()

    def make(self, kind: Kind, name: str, /, *args: Any, **options: Any) -> Any:
        """Call the factory.

        Raises PluginError for unknown, missing or mistyped options and if the factory raises.
        """
        selected = self.find(kind, name)
        factory = selected.load()
        check_requirements(selected)
        args = (*args_with_paths(selected, factory, self.selection.directory), *args)
        options = self._checked(selected, factory, options, len(args))
        making = _making.set(self)
        try:
            return factory(*args, **options)
        except (ConfigError, ValueError, TypeError) as error:
            raise SelectionError(f"{selected}: cannot be made: {describe(error)}") from error
        except (Exception, SystemExit) as error:  # a plugin's code may call sys.exit
            said = f"{selected}: cannot be made: {with_place(error)}"
            raise PluginError(said).carrying(fault_of(error)) from error
        finally:
            _making.reset(making)

    def function(self, kind: Kind, name: str, /, **options: Any) -> Bound[Any, Any]:
        """Fill in the options of a loss, advantage, filter or optimizer: its keyword-only parameters.

        Raises PluginError for unknown, missing or mistyped options.
        """
        selected = self.find(kind, name)
        function = selected.load()
        return Bound(selected, function, self._checked(selected, function, options, None))

    def check_options(self, kind: Kind, name: str, options: Mapping[str, Any]) -> None:
        """Check a choice of the configuration without making anything.

        Imports the module of the offer, but does not call the factory.

        Args:
            kind: of the offer.
            name: as the configuration spells it.
            options: as the configuration gives them.

        Raises:
            PluginError: there is no such offer, or an option is unknown, missing or mistyped.
        """
        selected = self.find(kind, name)
        factory = selected.load()
        check_requirements(selected)
        given = None if kind in FUNCTIONS else (kind in SET_UP) + len(selected.args)
        self._checked(selected, factory, options, given)

    def _checked(
        self, selected: Selected, factory: Factory, options: Mapping[str, Any], given: int | None
    ) -> dict[str, Any]:
        """Return the options of a factory with their values made; see ``check_options``."""
        made = with_values(selected, factory, options, self.selection.directory)
        # the offer of a distribution may have more options than the core's of the same name
        command = install_command(selected.kind, selected.name) if selected.plugin.name == BUILT_IN else ""
        more = f". More options: {command}" if command else ""
        check_options(selected, factory, made, given=given, more=more)
        return made

    def check_values(self, kind: Kind, name: str, options: Mapping[str, Any], **known: Any) -> None:
        """Let the offer check the values of its options, if it has a function ``check``.

        Args:
            kind: of the offer.
            name: as the configuration spells it.
            options: as the configuration gives them.
            known: other values for checks of this kind; each check gets the ones among its parameters.

        Raises PluginError with the message of the check.
        """
        selected = self.find(kind, name)
        if selected.offer.check is None:
            return
        check = selected.loaded(selected.offer.check)
        named = inspect.signature(check).parameters
        known = {key: value for key, value in known.items() if key in named}
        try:
            check(**known, **with_values(selected, selected.load(), options, self.selection.directory))
        except ValueError as error:
            raise SelectionError(f"{selected}: {one_line(error)}") from error

    def find(self, kind: Kind, name: str) -> Selected:
        """Find the offer with this name; an offer that is a string is not imported yet."""
        if (plugin := self.load_file(name)) is not None:
            return self._find_in_file(kind, name, plugin)
        for plugin in self.plugins:
            if plugin.fault is not None and name.startswith(f"{plugin.name}:"):
                raise self._broken(kind, name, plugin)
        whole, bare = self._named(kind, name)
        if whole:
            return whole[0]
        if any(selected.offer.extends_core for selected in bare):
            bare = [selected for selected in bare if selected.plugin.name != BUILT_IN]
        if len(bare) == 1:
            return bare[0]
        if bare:
            plugins = " and ".join(str(selected.plugin) for selected in bare)
            spellings = " or ".join(repr(f"{selected.plugin.name}:{name}") for selected in bare)
            raise SelectionError(f"{spaced(kind)} {name!r} is offered by {plugins}; write {spellings}")
        raise self._unknown(kind, name)

    def offers(self, kind: Kind, name: str) -> bool:
        """Whether a plugin offers something as ``name``; unlike ``find``, it reads no file."""
        return any(self._named(kind, name))

    def _named(self, kind: Kind, name: str) -> tuple[list[Selected], list[Selected]]:
        """Return the offers that are spelled so with their plugin's name, and without it."""
        whole, bare = [], []
        for plugin in self.plugins:
            offers, inner = plugin.offers.get(kind, {}), name.removeprefix(f"{plugin.name}:")
            if inner != name and (found := matching(offers, inner)) is not None:
                whole.append(Selected(kind, name, plugin, *found))
            if (found := matching(offers, name, bare=True)) is not None:
                bare.append(Selected(kind, name, plugin, *found))
        return whole, bare

    def in_role(self, kind: Kind, role: Role) -> list[str]:
        """Names of the offers that have a role."""
        every = (offer for plugin in self.plugins for offer in plugin.offers.get(kind, {}).items())
        return [name for name, offer in every if offer.role == role]

    def the_one(self, kind: Kind, role: Role) -> str:
        """Name of the offer that has a role.  Raises SelectionError if there is none, or several."""
        names = self.in_role(kind, role)
        what = f"{spaced(kind)} that {role.replace('_', ' ')}"
        if not names:
            raise self._unknown(kind, role, what)
        if len(names) > 1:
            raise SelectionError(f"each of {', '.join(names)} is a {what}; leave out a plugin (--no-plugin)")
        return names[0]

    @property
    def sections(self) -> PluginSections:
        """The sections of the configuration that the plugins add."""
        from grpo_core.config.sections import PluginSections

        return PluginSections(tuple(each for plugin in self.plugins for each in plugin.sections), KEYS)

    # ------------------------------------------------------------------------------ loading

    def load_file(self, name: str) -> Plugin | None:
        """Load the file of the offer with this name; None if it is not in a file."""
        if (place := in_file(name)) is None:
            return None
        module_file = place[0].resolve()
        plugin = next((p for p in self.plugins if p.module == str(module_file)), None)
        if plugin is None:
            plugin = Plugin(name=place[0].name, distribution="a file", version="", module=str(module_file))
            self._load(plugin, lambda: import_file(module_file))
        return plugin

    def _load(self, plugin: Plugin, load: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        module = None
        try:
            module = load()
            self._register(plugin, module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit must not end the process either
            if module is not None and self._manager.get_name(module) == plugin.name:
                self._manager.unregister(module)
            plugin.fault, plugin.offers, plugin.sections = error, {}, ()
        plugin.seconds = time.perf_counter() - begin
        self.plugins.append(plugin)

    def _register(self, plugin: Plugin, module: Any) -> None:
        self._check_hooks(module)
        self._manager.register(module, plugin.name)
        for kind, hook in HOOKS.items():
            for function in self._implementations(hook, module):
                plugin.offers.setdefault(kind, {}).update(checked_offers(kind, function()))
        for function in self._implementations(SECTIONS, module):
            # environments run where it cannot be imported
            from grpo_core.config.sections import offered_sections

            try:
                plugin.sections = offered_sections(function(), self.sections.added)
            except ValueError as error:
                raise PluginError(f"{SECTIONS}(): {error}") from error

    def _implementations(self, hook: str, module: Any) -> Iterable[Factory]:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin is module:
                yield implementation.function

    def _check_hooks(self, module: Any) -> None:
        """Refuse hooks that pluggy accepts silently: misspelt, unmarked, asynchronous and wrapping ones."""
        known = {*HOOKS.values(), SECTIONS}
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
                raise PluginError(f"hook {hook!r} is a wrapper; plugins cannot wrap each other's hooks")

    # ------------------------------------------------------------------------------ files

    def _find_in_file(self, kind: Kind, name: str, plugin: Plugin) -> Selected:
        place = in_file(name)
        assert place is not None
        path, wanted = place
        module_file = Path(plugin.module)
        if plugin.fault is not None:
            raise self._broken(kind, name, plugin)
        if (found := matching(plugin.offers.get(kind, {}), wanted)) is not None:
            return Selected(kind, name, plugin, *found)
        module = sys.modules[module_name(module_file)]
        if not wanted and kind == "environment" and inspect.iscoroutinefunction(getattr(module, "run", None)):
            return Selected(kind, name, plugin, Offer(_agent_of(module)))
        factory = getattr(module, wanted, None) if wanted else None
        if callable(factory):
            return Selected(kind, name, plugin, as_offer(kind, factory))
        here = {
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        defined = {*here, *(plugin.offers.get(kind) or ())} - {*HOOKS.values(), SECTIONS}
        fault = f"{path} has no {wanted!r}" if wanted else "the name in it is missing"
        file, choice = name.removesuffix(f":{wanted}"), ", ".join(sorted(defined))
        raise SelectionError(
            f"{spaced(kind)} {name!r}: {fault}.{did_you_mean(wanted, defined)} "
            f"Write {file}:NAME with one of: {choice or 'nothing is defined there'}"
        )

    # ------------------------------------------------------------------------------ errors

    def _broken(self, kind: Kind, name: str, plugin: Plugin) -> PluginError:
        error = PluginError(f"{spaced(kind)} {name!r}: {plugin} is broken: {plugin.error}")
        error.__cause__ = plugin.fault
        return error

    def _unknown(self, kind: Kind, name: str, what: str = "") -> SelectionError:
        what = what or f"{spaced(kind)} {name!r}"
        head, _, rest = name.partition(":")
        twins = [f"{p.name}:{rest}" for p in self.plugins if rest and p.name.endswith(f"/{head}")]
        if twins:
            return SelectionError(
                f"{what}: {len(twins)} distributions have a plugin {head!r}; "
                f"write {' or '.join(map(repr, twins))}"
            )
        offered = [(p.name, offer) for p in self.plugins for offer in p.offers.get(kind, {})]
        spellings = {f"{plugin}:{offer}" for plugin, offer in offered}
        bare = {offer for _, offer in offered}
        here = {p.name for p in self.plugins} | set(self.left_out)
        if self.of_program(name):
            return SelectionError(
                f"there is no {what} here: a Python program gave it to grpo_core.train(). "
                "In Python give it again (env=..., data=...); otherwise name a file, as in ./file.py:NAME"
            )
        if (command := install_command(kind, name)) and head not in here:
            begin = f"there is no {what}: {command}."
        else:
            known = did_you_mean(name, spellings | bare) or ("" if ":" in name else command_hint(name))
            begin = f"there is no {what}.{known}"
        parts = [f"{begin} Installed: {', '.join(sorted(spellings)) or 'none'}"]
        parts += [f"left out: plugin {plugin!r} ({why})" for plugin, why in self.left_out.items()]
        parts += [f"broken: {p}: {p.error}" for p in self.plugins if p.fault is not None]
        return SelectionError("; ".join(parts))


def _agent_of(module: ModuleType) -> type[Environment]:
    """Make an environment from a file that defines ``run`` and perhaps other members."""
    from grpo_core.contracts.protocols import Environment

    members = {name: value for name, value in vars(module).items() if hasattr(Environment, name)}
    functions = {name: staticmethod(value) for name, value in members.items() if inspect.isroutine(value)}
    public = {name: value for name, value in {**members, **functions}.items() if not name.startswith("_")}
    return type(Path(str(module.__file__)).name, (Environment,), public)


def listing(host: PluginHost, commands: Commands | None = None) -> list[dict[str, Any]]:
    """The plugins as plain data, as ``grpo-core plugins --json`` prints them."""
    rows = {plugin.name: _row(plugin) for plugin in host.plugins}
    found = commands or Commands({})
    for plugin in found.plugins:
        row = rows.setdefault(plugin.name, _row(plugin))
        row["offers"]["command"] = sorted(found.offered.get(plugin.name, ()))
        row["error"] = row["error"] or plugin.error
    return list(rows.values())


def _row(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "offers": {kind: sorted(offers) for kind, offers in plugin.offers.items()}
        | ({"config_section": sorted(each.name for each in plugin.sections)} if plugin.sections else {}),
        "error": plugin.error,
        "note": plugin.note,
        "seconds": round(plugin.seconds, 4),
    }


def check_known(names: Iterable[str], known: set[str], source: str) -> None:
    """Raise ConfigError if a name is not the name of an installed plugin."""
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{source}: plugin {name!r} is not installed.{did_you_mean(name, known)} "
                f"Installed: {', '.join(sorted(known))}"
            )


def make_environment(name: str, /, **options: Any) -> Any:
    """Make another environment by name, for the factory of an environment that wraps it.

    Raises PluginError or ConfigError if there is none, or if its options are wrong.
    """
    return PluginHost.current().make("environment", name, **options)
