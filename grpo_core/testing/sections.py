"""The contract of configuration sections, as a test for their authors.

from grpo_core.testing import check_config_sections
import grpo_plugin_mine

def test_my_sections_keep_the_contract():
    check_config_sections(grpo_plugin_mine)
"""

from __future__ import annotations

from types import ModuleType

from grpo_core.config import as_table, build, parse_setting
from grpo_core.config.meanings import meanings
from grpo_core.config.sections import PluginSections, keys_of, offered_sections
from grpo_core.contracts.errors import ConfigError


def check_config_sections(module: ModuleType) -> None:
    """Raise AssertionError if the sections that a plugin's module adds break their contract.

    It holds that

    * each name is a table's, and no key is one of the core's;
    * each key has a default that passes the section's own checks, also from a TOML file;
    * the class and each of its keys have a docstring, which ``grpo-core config`` prints.
    """
    try:
        added = offered_sections(module.grpo_config_sections())
    except ValueError as error:
        raise AssertionError(f"{module.__name__}.grpo_config_sections(): {error}") from error
    sections = PluginSections(added)
    for each in added:
        texts = meanings(each.kind)
        undocumented = [key for key in ("", *keys_of(each.kind)) if not texts.get(key)]
        assert not undocumented, f"{each.kind.__name__} has no docstring for {undocumented[0] or 'the class'}"
    given = [parse_setting(f"{each.name}={{}}") for each in added]
    try:
        config = build(given, sections)
        again = build([as_table(config)], sections)
    except ConfigError as error:
        raise AssertionError(f"a default is refused: {error}") from error
    assert again == config, "the sections differ when they are read from the run's config.toml"
