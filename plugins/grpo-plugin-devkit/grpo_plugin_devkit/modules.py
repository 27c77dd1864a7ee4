"""The contracts of commands and preflight checks, as tests for authors.

from grpo_plugin_devkit.modules import check_commands, check_preflight

def test_my_commands_keep_the_contract():
check_commands(grpo_plugin_mine.commands)

def test_my_checks_keep_the_contract():
check_preflight(grpo_plugin_mine)
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from grpo_core import Command, ConfigError, errors, load_object
from grpo_core.kit import Config, PluginHost, as_table
from grpo_plugin_devkit.contracts import Contract

LARGE = ("torch", "transformers", "numpy", "ray", "vllm")
"""Libraries with a long import time, which ``grpo-core --help`` must not import."""


def check_commands(module: ModuleType) -> None:
    """Raise AssertionError if the commands of a module violate their contract.

    The contract:

    * importing the module imports no large library, and no module of a command;
    * each command exists, returns an exit status, and documents its parameters;
    * ``help`` is the first sentence of its documentation.
    """
    commands: dict[str, Command] = dict(module.grpo_commands())
    homes = {command.target.partition(":")[0] for command in commands.values()}
    code = f"import sys, {module.__name__}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    early = set(loaded.stdout.split()) & {*LARGE, *homes}
    assert not early, f"importing {module.__name__} imports {', '.join(sorted(early))}"
    for name, command in commands.items():
        home, _, attribute = command.target.partition(":")
        target = getattr(importlib.import_module(home), attribute)
        documented = inspect.getdoc(target) if inspect.isfunction(target) else target.help
        assert documented, f"{name}: {command.target} has no docstring"
        begin = " ".join(documented.split("\n\n")[0].split())
        assert begin == command.help, (
            f"{name}: its documentation begins with {begin!r}, help is {command.help!r}"
        )
        if inspect.isfunction(target):
            typing.get_type_hints(target)  # resolved by the command line as well
            signature = inspect.signature(target)
            assert signature.return_annotation in (int, "int"), (
                f"{name}: {command.target} does not return an int"
            )
            missing = [key for key in signature.parameters if f"\n{key}\n" not in documented]
            assert not missing, f"{name}: {command.target} does not document {', '.join(missing)}"


def check_preflight(module: ModuleType) -> None:
    """Raise AssertionError if the checks of a module's ``grpo_preflight`` violate their contract.

    Each does not modify the configuration, and returns texts, or texts by their cause, or raises ConfigError.
    One that needs more than ``config`` and ``host`` is called by a run alone.
    """
    for name, offered in module.grpo_preflight().items():
        function = load_object(offered, who=name) if isinstance(offered, str) else offered
        PreflightContract(name, function).check()


class PreflightContract(Contract):
    """The contract of a function of ``grpo_preflight``."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def it_warns_or_refuses(self) -> None:
        name, config = self._name, Config()
        given = {"config": config, "host": PluginHost.discover()}
        takes = inspect.signature(self._function).parameters
        if not takes.keys() <= given.keys():
            return
        try:
            messages: Any = self._function(**{each: given[each] for each in takes})
        except ConfigError:
            messages = ()
        except Exception as error:
            raise AssertionError(f"{name!r} raised {errors.describe(error)}; expected ConfigError") from error
        messages = messages.values() if isinstance(messages, Mapping) else messages
        wrong = isinstance(messages, str) or not all(isinstance(each, str) for each in messages)
        assert not wrong, f"{name!r} returned {messages!r}; expected a list of warnings"
        assert as_table(config) == as_table(Config()), f"{name!r} changed the configuration"
