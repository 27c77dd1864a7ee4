"""A plugin adds tables and keys to the configuration, which are checked, printed and stored as the core's."""

from __future__ import annotations

import json
import sys
import textwrap
import tomllib

import pytest
from test_cli import events, grpo, refused
from test_plugins import install, plugin  # noqa: F401

from grpo_core import EngineSetup, TrainerSetup
from grpo_core.app.launch import configure, new_run
from grpo_core.app.make import make
from grpo_core.app.provenance import with_absolute_paths
from grpo_core.commands.defaults import text
from grpo_core.config import Config, as_table, as_toml, build, parse_setting
from grpo_core.config.sections import PluginSections
from grpo_core.contracts.errors import ConfigError
from grpo_core.plugins.host import PluginHost, listing
from grpo_core.plugins.installed import KEYS
from grpo_core.testing import check_config_sections

SECTIONS = '''
    from attrs import field, frozen
    from attrs.validators import ge
    from grpo_core import hookimpl
    from grpo_core.kit import only_with

    @frozen(kw_only=True)
    class Budget:
        """A limit of what a run may cost."""

        tokens: int = field(default=1000, validator=ge(0))
        """Largest number of tokens."""
        names: list[str] = field(factory=list, metadata=only_with("tokens"))
        """Names of those who pay."""
        of: str = ""
        """Function that pays, as "./file.py:name"."""

    @frozen(kw_only=True)
    class Adapters:
        """Adapters that are trained instead of the weights."""

        rank: int = 4
        """Inner dimension of an adapter."""

    @frozen(kw_only=True)
    class Cautious:
        """Keys of a cautious trainer."""

        patience: float = 2.5
        """Seconds before it gives up."""

    @hookimpl
    def grpo_config_sections():
        return {"budget": Budget, "model.adapters": Adapters | None, "trainer": Cautious}
'''
TRAINER = (
    SECTIONS
    + """
    import json
    from pathlib import Path

    from grpo_core.kit import ProcessTrainer

    def careful(setup):
        found = setup.section(Cautious).patience, setup.section(Adapters, None), setup.section(Budget).tokens
        with Path(__file__).with_name("seen.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\\n")
        return ProcessTrainer(setup)
"""
)


@pytest.fixture
def installed(install):  # noqa: F811
    """The classes of an installed plugin with three sections."""
    install("budget", SECTIONS)
    PluginHost.discover(allow=["budget"])
    return sys.modules["budget_module"]


def configured(*tables, plugins=("budget",)):
    return configure([{"plugins": list(plugins)}, *tables], {})[0]


# ---------------------------------------------------------------------------------- an installed plugin


def test_a_section_is_read_by_its_class(installed):
    config = configured({"budget": {"tokens": 5}, "trainer": {"patience": 1, "lr": 1e-4}})
    assert config.section(installed.Budget) == installed.Budget(tokens=5)
    assert config.section(installed.Cautious).patience == 1.0
    assert config.trainer.lr == 1e-4


def test_a_section_that_is_not_given_has_its_defaults_and_an_optional_one_is_off(installed):
    config = configured()
    assert config.section(installed.Budget) == installed.Budget()
    assert config.section(installed.Adapters, None) is None
    given = configured({"model": {"adapters": {}}})
    assert given.section(installed.Adapters, None) == installed.Adapters()


def test_a_model_may_change_the_defaults_of_sections(install, tmp_path):  # noqa: F811
    install(
        "small",
        SECTIONS
        + """
    class Small:
        preset = {"budget": {"tokens": 5}, "model": {"adapters": {"rank": 2}}, "trainer": {"patience": 2.5}}

        def check(self):
            pass

    @hookimpl
    def grpo_models():
        return {"small": Small}
""",
    )
    table = {
        "plugins": ["small", "math"],
        "model": {"path": "small"},
        "tasks": {"sort": {"env": "math:sort"}},
    }
    start = new_run([table], {}, output=tmp_path / "run")
    start.directory.unlock()
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (written["budget"]["tokens"], written["model"]["adapters"]["rank"]) == (5, 2)
    assert start.notes == (f"training small on math:sort, {start.setup.config.trainer.steps} steps",)


def test_a_file_that_a_section_names_is_found_from_any_directory(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    config, host = configure(
        [{"plugins": ["budget"], "budget": {"names": ["a"], "of": "./mine.py:Payer"}}], {}
    )
    there = with_absolute_paths(config, host)
    assert there.section(installed.Budget).of == f"{tmp_path}/mine.py:Payer"
    monkeypatch.chdir("/")
    again, host = configure([as_table(there)], {})
    assert with_absolute_paths(again, host) == again  # what a resumed run compares


def test_engines_and_trainers_receive_the_sections(installed):
    config = configured({"budget": {"tokens": 5}})
    for setup in (TrainerSetup(sections=config.sections), EngineSetup(model="m", sections=config.sections)):
        assert setup.section(installed.Budget).tokens == 5


def test_what_a_run_stores_is_read_back(installed):
    config = configured({"budget": {"names": ["a"]}, "model": {"adapters": {"rank": 2}}})
    table = tomllib.loads(as_toml(config))
    assert (table["budget"], table["model"]["adapters"]) == (
        {"tokens": 1000, "names": ["a"], "of": ""},
        {"rank": 2},
    )
    assert table["trainer"]["patience"] == 2.5
    assert configured(table) == config
    assert as_table(configured(table)) == as_table(config)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"budget": {"token": 5}}, r"unknown configuration key 'budget\.token'\. Did you mean 'tokens'\?"),
        ({"trainer": {"patienc": 5}}, r"unknown configuration key 'trainer\.patienc'\. Did .* 'patience'\?"),
        ({"budgets": {}}, r"unknown configuration key 'budgets'\. Did you mean 'budget'\?"),
        ({"rank": 5}, r"unknown configuration key 'rank'\."),
        ({"tokens": 5}, r"unknown configuration key 'tokens'\. Did you mean 'budget\.tokens'\?"),
        ({"budget": {"tokens": "5"}}, r"'budget\.tokens': expected a whole number, got '5'"),
        ({"budget": {"tokens": -1}}, "'budget': 'tokens' must be >= 0"),
        ({"budget": 5}, r"'budget': expected a table, got 5"),
        ({"model": {"adapters": {"rank": 1.5}}}, r"'model\.adapters\.rank': expected a whole number"),
        ({"sections": []}, r"unknown configuration key 'sections'"),
        ({"budget": {"api_key": "x"}}, r"'budget\.api_key' looks like a secret"),
    ],
    ids=str,
)
def test_a_wrong_key_or_value_is_refused_as_the_cores_are(installed, table, message):
    with pytest.raises(ConfigError, match=message):
        configured(table)


def test_a_key_of_a_section_that_does_nothing_is_refused(installed):
    start = {"tasks": {"sort": {"env": "math:sort"}}, "plugins": ["budget", "math"]}
    config, host = configure([start], {"budget": {"names": ["a"]}})
    message = (
        r'budget\.names = \["a"\] does nothing with budget\.tokens = 1000: change that, or leave out names'
    )
    with pytest.raises(ConfigError, match=message):
        make(config, host)
    make(*configure([start], {"budget": {"names": ["a"], "tokens": 5}}))


def test_a_section_is_unknown_where_its_plugin_is_not_loaded(installed):
    with pytest.raises(ConfigError, match="unknown configuration key 'budget'"):
        configured({"budget": {}}, plugins=["math"])


def test_a_key_of_ours_that_is_not_installed_names_what_installs_it(monkeypatch):
    monkeypatch.setattr("grpo_core.plugins.host.KEYS", {"model.adapters": "grpo-plugin-scale"})
    with pytest.raises(
        ConfigError, match=r"'model\.adapters' is not installed: pip install grpo-plugin-scale"
    ):
        configured({"model": {"adapters": {"rank": 4}}}, plugins=[])


def test_the_keys_of_ours_are_not_those_of_the_core():
    for key in KEYS:
        with pytest.raises(ConfigError, match="unknown configuration key"):
            build([parse_setting(f"{key}=1")])


def test_the_configuration_is_printed_with_the_sections(installed):
    printed = text()
    table = tomllib.loads(printed)
    assert table["budget"] == {"tokens": 1000, "names": [], "of": ""}
    assert table["trainer"]["patience"] == 2.5
    assert "adapters" not in table["model"]
    assert "# Largest number of tokens.\ntokens = 1000\n" in printed
    assert "# Adapters that are trained instead of the weights.\n#[model.adapters]\n" in printed
    (alone,) = tomllib.loads(text(["budget"]))
    assert alone == "budget"
    assert tomllib.loads(text(["trainer"]))["trainer"]["patience"] == 2.5
    assert tomllib.loads(text(["budget"], ["budget.tokens=7"])) == {
        "budget": {"tokens": 7, "names": [], "of": ""}
    }


def test_the_sections_are_listed_with_their_plugin(installed):
    (row,) = (row for row in listing(PluginHost.discover()) if row["name"] == "budget")
    assert row["offers"]["config_section"] == ["budget", "model.adapters", "trainer"]


# ---------------------------------------------------------------------------------- plugins that are wrong

OTHERS = """
    from attrs import make_class
    from grpo_core.config import TrainerConfig

    Needed = make_class("Needed", ["given"])
"""


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ("[]", "returned list, expected a dict"),
        ("{'budget': int}", "section 'budget' is <class 'int'>; expected an attrs class"),
        ("{'budget': Budget | Adapters}", "expected an attrs class, or `Class | None`"),
        ("{'seed': Budget}", "the core already has a key 'seed'"),
        ("{'model.path': Budget}", r"the core already has a key 'model\.path'"),
        ("{'mine.deep': Budget}", "'mine' is not a core table with subtables"),
        ("{'tracking.mine': Budget}", "'tracking' is not a core table with subtables"),
        ("{'trainer': Adapters | None}", "is a core table, which cannot be optional"),
        ("{'Budget': Budget}", "expected lower-case letters"),
        (
            "{'loss': type(TrainerConfig())}",
            r"section 'loss': the core already has a key 'loss\.(name|options)'",
        ),
        ("{'needed': Needed}", "section 'needed': the key 'given' has no default"),
    ],
)
def test_a_plugin_whose_sections_cannot_be_is_broken(install, offered, message):  # noqa: F811
    code = SECTIONS[: SECTIONS.index("return {")] + f"return {offered}\n" + OTHERS
    install("wrong", code)
    with pytest.raises(Exception, match=message):
        raise plugin(PluginHost.discover(allow=["wrong"]), "wrong").fault


def test_the_second_of_two_plugins_that_add_the_same_key_is_broken(install):  # noqa: F811
    install("one", SECTIONS)
    install("two", SECTIONS.replace('"budget"', '"other"').replace('"model.adapters"', '"model.others"'))
    host = PluginHost.discover(allow=["one", "two"])
    assert plugin(host, "one").fault is None
    assert "another plugin adds 'trainer.patience' (one_module:Cautious)" in plugin(host, "two").error
    assert {each.name for each in host.sections.added} == {"budget", "model.adapters", "trainer"}


# ---------------------------------------------------------------------------------- a plugin in a file


@pytest.mark.nightly
def test_the_sections_of_a_file_work_in_a_run_and_when_it_is_resumed(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(TRAINER))
    command = ["train", "--env", "math:sort", "--output", "run", "--set", "trainer.name=./mine.py:careful"]
    small = ["--set", "trainer.steps=1", "--set", "validation.every=0"]
    message = refused(tmp_path, *command, "--set", "budget.token=7")
    assert "unknown configuration key 'budget.token'. Did you mean 'tokens'?" in message
    done = grpo(tmp_path, *command, *small, "--set", "budget.tokens=7", "--set", "trainer.patience=3")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    (started,) = events(run, "RunStarted")
    assert started["config"]["budget"] == {"tokens": 7, "names": [], "of": ""}
    more = ["--set", "trainer.steps=2", "--set", "budget.tokens=8"]
    done = grpo(tmp_path, "train", "--resume", "run", *more)
    assert done.returncode == 0, done.stderr
    assert "budget.tokens: 7 -> 8" in done.stdout + done.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen == [[3.0, None, 7], [3.0, None, 8]]


# ---------------------------------------------------------------------------------- the contract


@pytest.fixture
def offering(tmp_path, monkeypatch):
    """Makes a module with sections, of which one thing is changed."""

    def make(old="", new=""):
        (tmp_path / "offering_sections.py").write_text(textwrap.dedent(SECTIONS).replace(old, new, 1))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "offering_sections", raising=False)
        return __import__("offering_sections")

    return make


def test_sections_that_keep_the_contract(offering):
    check_config_sections(offering("zzz"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('    """Largest number of tokens."""\n', "", "Budget has no docstring for tokens"),
        ("default=1000", "default=-1", "must be >= 0"),
        ("rank: int = 4", "rank: int = 4.5", "expected a whole number"),
        ('"budget": Budget', '"seed": Budget', "the core already has a key 'seed'"),
    ],
    ids=["no docstring", "a default out of range", "a default of another type", "a key of the core"],
)
def test_the_contract_finds_what_is_wrong(offering, old, new, message):
    with pytest.raises((AssertionError, ValueError), match=message):
        check_config_sections(offering(old, new))


def test_a_configuration_without_plugins_has_no_sections():
    assert Config().sections == ()
    assert build([{}], PluginSections()) == Config()
