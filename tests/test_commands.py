"""Commands come from the core and from plugins; a plugin's command costs ``--help`` nothing but its line."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from grpo_core import commands
from grpo_core.contracts.hookspecs import Command
from grpo_plugin_devkit.modules import check_commands

OFFERS = """
    from grpo_core import Command, hookimpl

    @hookimpl
    def grpo_commands():
        return {NAME: Command("greeting.work:greet", help="Greet somebody.")}
"""
WORK = '''
    import torch

    def greet(who: str, /) -> int:
        """Greet somebody.

        The greeting is printed.

        Parameters
        ----------
        who
            Name of a person.
        """
        print(f"hello {who}")
        return 0
'''


@pytest.fixture
def site(tmp_path):
    """Installs a distribution with a module for its command."""

    def install(name="greet", *, offers=OFFERS, entry="greeting"):
        package = tmp_path / "greeting"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "commands.py").write_text(textwrap.dedent(offers).replace("NAME", repr(name)))
        (package / "work.py").write_text(textwrap.dedent(WORK))
        info = tmp_path / "greeting-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[grpo_core.commands]\n{entry} = greeting.commands\n")
        return tmp_path

    return install


def grpo(site, *arguments, **variables):
    code = "import sys; from grpo_core.cli import main\ntry: main()\nfinally: print('LOADED', *sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "120", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_of_a_plugin_is_listed_without_importing_what_it_runs(site):
    done = grpo(site(), "--help")
    shown, loaded = done.stdout.split("LOADED")
    assert "greet        Greet somebody." in shown
    assert not {"greeting.work", "torch", "numpy"} & set(loaded.split())


def test_the_help_imports_no_configuration_and_no_package_of_a_plugin_but_its_commands(site):
    loaded = grpo(site(), "--help").stdout.split("LOADED")[1].split()
    assert [name for name in loaded if name.startswith(("grpo_core.config", "grpo_core.kit"))] == []
    of_plugins = {name for name in loaded if name.startswith("grpo_plugin_")}
    assert of_plugins == {
        f"grpo_plugin_{name}{end}"
        for name in ("audit", "devkit", "doctor", "replay", "report")
        for end in ("", ".commands")
    }
    assert len([name for name in loaded if name.startswith("grpo_core")]) <= 25


@pytest.mark.parametrize("name", ["greet", "greeting"], ids=["its name", "its distribution"])
def test_the_list_of_allowed_plugins_may_name_one_that_offers_commands_alone(site, name):
    done = grpo(site(entry="greet"), "plugins", GRPO_PLUGINS=name)
    assert done.returncode == 0, done.stderr
    assert "command: greet" in done.stdout


def test_a_command_of_ours_that_is_not_installed_names_what_installs_it():
    code = (
        "import sys; from grpo_core import cli, commands; from grpo_core.plugins.installed import Commands\n"
        "cli.find_commands = lambda core: Commands(commands={})\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "runs/a"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (
        2,
        "grpo-core: 'report' is not installed; pip install grpo-plugin-report\n",
    )


@pytest.mark.long
def test_it_runs_and_its_own_help_is_its_whole_documentation(site):
    where = site()
    assert grpo(where, "greet", "Ada").stdout.startswith("hello Ada")
    assert "The greeting is printed." in grpo(where, "greet", "--help").stdout


def test_it_is_listed_with_its_plugin(site):
    assert "greeting  (greeting 1.0)\n  command: greet" in grpo(site(), "plugins").stdout


def test_a_plugin_that_does_not_import_is_named_and_takes_no_command_down(site):
    where = site(offers="import no_such_module")
    assert "plugin 'greeting' (greeting 1.0) is broken: ModuleNotFoundError" in grpo(where, "--help").stdout
    assert grpo(where, "plugins").returncode == 0


@pytest.mark.long
def test_a_name_that_is_in_use_stays_with_its_owner(site):
    where = site("train")
    assert "Train a model" in grpo(where, "train", "--help").stdout
    assert "plugin 'greeting' (greeting 1.0) is broken: there is another command 'train'" in " ".join(
        grpo(where, "--help").stdout.split()
    )


def test_a_plugin_that_is_not_allowed_is_not_imported(site):
    done = grpo(site(), "--help", GRPO_PLUGINS="math")
    shown, loaded = done.stdout.split("LOADED")
    assert "Greet" not in shown
    assert "greeting.commands" not in loaded.split()


@pytest.mark.parametrize(
    ("target", "help"),
    [("greeting.work.greet", "Greet somebody."), ("greeting.work:greet", "Greet\nsomebody."), ("a:b", "")],
    ids=["no function", "two lines", "no help"],
)
def test_a_command_that_cannot_be_listed_is_refused(target, help):
    with pytest.raises(ValueError):
        Command(target, help=help)


# ---------------------------------------------------------------------------------- the contract


def test_our_commands_keep_the_contract():
    check_commands(commands)


def _offering(monkeypatch, tmp_path, *, work=WORK, help="Greet somebody.", imports=""):
    name = "offering_commands"
    (tmp_path / f"{name}.py").write_text(
        f"{imports}\nfrom grpo_core import Command\n"
        f"def grpo_commands():\n    return {{'greet': Command('{name}_work:greet', help={help!r})}}\n"
    )
    (tmp_path / f"{name}_work.py").write_text(textwrap.dedent(work))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for each in (name, f"{name}_work"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    return __import__(name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"imports": "import numpy"}, "imports numpy"),
        ({"imports": "import offering_commands_work"}, "imports .*offering_commands_work"),
        ({"help": "Greets somebody."}, "its documentation begins with 'Greet somebody.'"),
        ({"work": WORK.replace("-> int", "-> str")}, "does not return an int"),
        ({"work": WORK.replace("who\n", "whom\n")}, "does not document who"),
    ],
    ids=["a large library", "its module", "another sentence", "no status", "no documentation"],
)
def test_the_contract_finds_what_is_wrong(monkeypatch, tmp_path, wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_commands(_offering(monkeypatch, tmp_path, **wrong))


def test_a_module_without_the_hook_is_named():
    with pytest.raises(Exception, match="'empty' has no attribute 'grpo_commands'"):
        check_commands(ModuleType("empty"))
