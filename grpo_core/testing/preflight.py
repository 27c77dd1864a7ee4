"""The contract of ``grpo_preflight`` as a test that authors of plugins run.

from grpo_core.testing import check_preflight
import grpo_plugin_mine

def test_my_checks_keep_the_contract():
    check_preflight(grpo_plugin_mine)
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from grpo_core.config import Config, as_table
from grpo_core.errors import ConfigError, describe
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.offers import Plugin, Selected, checked_offers


def check_preflight(module: ModuleType) -> None:
    """Raise AssertionError if the functions that a module offers by ``grpo_preflight`` break their contract.

    It holds that each takes a configuration and the plugins, changes no configuration, and returns texts or
    raises ConfigError.
    """
    plugin = Plugin(name="checked", distribution="", version="", module=module.__name__)
    for name, offered in checked_offers("grpo_preflight", module.grpo_preflight()).items():
        check_function(name, Selected("preflight", name, plugin, offered).load())


def check_function(name: str, function: Callable[..., Any]) -> None:
    """Check one function, as ``check_preflight``."""
    config = Config()
    try:
        messages = function(config, PluginHost.discover())
    except ConfigError:
        messages = ()
    except Exception as error:
        raise AssertionError(f"{name!r} raised {describe(error)}; expected ConfigError") from error
    wrong = isinstance(messages, str) or not all(isinstance(each, str) for each in messages)
    assert not wrong, f"{name!r} returned {messages!r}; expected a list of warnings"
    assert as_table(config) == as_table(Config()), f"{name!r} changed the configuration"
