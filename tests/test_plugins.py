"""Plugins are found, checked and used by name; a broken one takes nobody down."""

import json
import logging
import subprocess
import sys
import textwrap
import threading

import pytest

import grpo_core
from grpo_core import errors
from grpo_core.errors import ConfigError, PluginError
from grpo_core.events import RunStarted, StepEnded
from grpo_core.plugins import listening
from grpo_core.plugins.host import HOOKS, Plugin, PluginHost, listing

VERSION = grpo_core.__version__

WORDS = """
    import grpo_core as grpo

    class Words(grpo.Environment):
        def __init__(self, length=5, *, alphabet="ab"):
            self.length = length

    @grpo.hookimpl
    def grpo_environments():
        return {"words": Words}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs distributions that are made of one module each."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def install(name, code, *, entry=None, module=None, requires="grpo-core>=0.1,<1", version="1.2"):
        module = module or f"{name.replace('-', '_')}_module"
        (site / f"{module}.py").write_text(textwrap.dedent(code))
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {requires}\n"
        )
        (info / "entry_points.txt").write_text(f"[grpo_core]\n{entry or name} = {module}\n")

    monkeypatch.delenv("GRPO_PLUGINS", raising=False)
    yield install
    for name in set(sys.modules) - before:
        if name.endswith("_module") or name.startswith("grpo_file_"):
            del sys.modules[name]


def plugin(host, name):
    return next(plugin for plugin in host.plugins if plugin.name == name)


# ---------------------------------------------------------------------------------- finding


def test_an_installed_plugin_is_listed_with_what_it_offers(install):
    install("grpo-plugin-words", WORDS, entry="words")
    host = PluginHost.discover(allow=["words"])
    core, words = listing(host)
    assert core["name"] == "core"
    assert core["distribution"] == "grpo-core"
    assert core["offers"]["sampler"] == ["chosen", "curriculum", "mix", "round_robin", "schedule"]
    assert words["seconds"] > 0
    assert {**words, "seconds": 0} == {
        "name": "words",
        "distribution": "grpo-plugin-words",
        "version": "1.2",
        "module": "grpo_plugin_words_module",
        "offers": {"environment": ["words"]},
        "listens": False,
        "error": "",
        "note": "",
        "seconds": 0,
    }
    assert json.loads(json.dumps(listing(host))) == listing(host)


def test_a_plugin_that_is_left_out_is_not_imported(install, monkeypatch):
    install("grpo-plugin-words", WORDS, entry="words")
    install("bomb", "raise SystemExit('I was imported')")
    module = "bomb_module"
    assert plugin(PluginHost.discover(), "bomb").error == "SystemExit: I was imported"
    for host in (
        PluginHost.discover(block=["bomb"]),
        PluginHost.discover(allow=["grpo-plugin-words"]),
    ):
        assert "bomb" not in [plugin.name for plugin in host.plugins]
        assert host.factory("environment", "words").__name__ == "Words"
    monkeypatch.setenv("GRPO_PLUGINS", "words")
    assert [p.name for p in PluginHost.discover().plugins] == ["core", "words"]
    monkeypatch.setenv("GRPO_PLUGINS", "")
    host = PluginHost.discover()
    assert [p.name for p in host.plugins] == ["core"]
    with pytest.raises(
        PluginError, match=r"left out: plugin 'words' .not in the environment variable GRPO_PL"
    ):
        host.factory("environment", "words")
    assert [p.name for p in PluginHost.discover(allow=["words"]).plugins] == ["core", "words"]
    assert module not in sys.modules


@pytest.mark.parametrize("lists", [{"allow": ["wrods"]}, {"block": ["wrods"]}])
def test_a_list_that_names_an_unknown_plugin_is_an_error(install, lists):
    install("grpo-plugin-words", WORDS, entry="words")
    with pytest.raises(ConfigError, match=r"plugin 'wrods' is not installed\. Did you mean 'words'\?"):
        PluginHost.discover(**lists)


def test_two_distributions_that_call_their_plugin_alike_are_both_kept(install):
    install("first", WORDS, entry="words")
    install("second", WORDS, entry="words")
    host = PluginHost.discover(allow=["words"])
    assert [p.name for p in host.plugins] == ["core", "first/words", "second/words"]
    assert plugin(host, "first/words").note == (
        "another distribution has a plugin 'words' too, so this is 'first/words'"
    )
    with pytest.raises(
        PluginError,
        match="2 distributions have a plugin 'words'; write 'first/words:words' or 'second/words:words'",
    ):
        host.factory("environment", "words:words")
    assert host.factory("environment", "second/words:words").__module__ == "second_module"


# ---------------------------------------------------------------------------------- broken plugins

BROKEN = {
    "import": ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    "syntax": ("def (", "SyntaxError: "),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "misspelt": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_enviroments(): return {}",
        "unknown hook 'grpo_enviroments'. Did you mean 'grpo_environments'?",
    ),
    "misspelt and unmarked": (
        "def grpo_enviroments(): return {}",
        "unknown hook 'grpo_enviroments'. Did you mean 'grpo_environments'?",
    ),
    "unmarked": (
        "def grpo_environments(): return {}",
        "hook 'grpo_environments' is not marked with @grpo_core.hookimpl",
    ),
    "async": (
        "import grpo_core as g\n@g.hookimpl\nasync def grpo_samplers(): return {}",
        "hook 'grpo_samplers' is async; hooks are plain functions",
    ),
    "wrapper": (
        "import grpo_core as g\n@g.hookimpl(wrapper=True)\ndef grpo_samplers(): return (yield)",
        "hook 'grpo_samplers' is a wrapper",
    ),
    "extra argument": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_event(event, step): pass",
        "PluginValidationError: Plugin 'odd' for hook 'grpo_event'",
    ),
    "not a dict": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_samplers(): return ['mix']",
        "grpo_samplers() returned list, expected a dict of name: factory",
    ),
    "not a factory": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_samplers(): return {'mix': 3}",
        "grpo_samplers() offers 'mix' as 3: expected a callable",
    ),
    "raises": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_samplers(): 1 / 0",
        "ZeroDivisionError: division",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_listed_as_broken_and_fatal_only_if_selected(install, fault):
    code, message = BROKEN[fault]
    install("grpo-plugin-odd", code, entry="odd")
    install("grpo-plugin-words", WORDS, entry="words")
    host = PluginHost.discover(allow=["odd", "words"])
    assert plugin(host, "odd").error.startswith(message)
    assert plugin(host, "odd").offers == {}
    assert host.make("environment", "words").length == 5
    with pytest.raises(PluginError) as caught:
        host.make("environment", "odd:thing")
    start = "environment 'odd:thing': plugin 'odd' (grpo-plugin-odd 1.2) is broken: "
    assert str(caught.value).startswith(start + message)
    assert caught.value.__cause__ is plugin(host, "odd").fault


@pytest.mark.parametrize(
    ("requires", "error"),
    [
        ("grpo-core>=0.1,<1", ""),
        ("grpo-core>=0.1.0.0,<1", ""),
        ("grpo-core>=7", f"it needs grpo-core>=7, this is {VERSION}"),
        ("grpo-core<0.0.5", f"it needs grpo-core<0.0.5, this is {VERSION}"),
        (f"grpo-core<{VERSION}.0", f"it needs grpo-core<{VERSION}.0, this is {VERSION}"),
        ("grpo_core ; python_version < '3'", ""),
        ("grpo-core-extras>=7", ""),
        ("grpo-core>=7 ; extra == 'future'", ""),
        ("Grpo.Core[ray]>=7", f"it needs grpo-core>=7, this is {VERSION}"),
    ],
)
def test_the_requirement_on_grpo_core_is_checked_again(install, requires, error):
    install("grpo-plugin-words", WORDS, entry="words", requires=requires)
    assert plugin(PluginHost.discover(allow=["words"]), "words").error == error


# ---------------------------------------------------------------------------------- names


def test_an_offer_is_found_bare_and_behind_its_plugin(install):
    install("grpo-plugin-words", WORDS, entry="words")
    host = PluginHost.discover(allow=["words"])
    assert host.make("environment", "words", length=2).length == 2
    assert host.make("environment", "words:words", length=3).length == 3


def test_a_bare_name_that_is_offered_twice_is_an_error_with_both_spellings(install):
    install("first", WORDS, entry="one")
    install("second", WORDS, entry="two")
    host = PluginHost.discover(allow=["one", "two"])
    with pytest.raises(PluginError, match="write 'one:words' or 'two:words'"):
        host.factory("environment", "words")
    assert host.factory("environment", "two:words").__module__ == "second_module"


def test_an_unknown_name_is_answered_with_the_nearest_and_with_what_there_is(install):
    install("grpo-plugin-words", WORDS, entry="words")
    install("grpo-plugin-odd", "1 / 0", entry="odd")
    host = PluginHost.discover(allow=["odd", "words"])
    with pytest.raises(PluginError) as caught:
        host.factory("environment", "wrods")
    assert str(caught.value).startswith(
        "there is no environment 'wrods'. Did you mean 'words'? Installed: words:words; "
    )
    assert str(caught.value).endswith(
        "; broken: plugin 'odd' (grpo-plugin-odd 1.2): ZeroDivisionError: division by zero"
    )


def test_a_prefix_receives_the_rest_of_the_name(install):
    code = """
        import grpo_core as grpo

        @grpo.hookimpl
        def grpo_environments():
            return {
                "*": lambda rest, size=1: (rest, size),
                "s*": list,
                "set/*": lambda rest: {rest},
                "set/x": lambda: "x",
            }
    """
    install("gym", code)
    host = PluginHost.discover(allow=["gym"])
    assert host.make("environment", "gym:chain_sum", size=4) == ("chain_sum", 4)
    assert host.factory("environment", "gym:chain_sum")(size=2) == ("chain_sum", 2)
    assert host.make("environment", "set/y") == {"y"}
    assert host.make("environment", "gym:set/x") == "x"
    with pytest.raises(PluginError, match="there is no environment 'chain_sum'"):
        host.make("environment", "chain_sum")
    with pytest.raises(PluginError, match=r"no option 'rest'. Its options: size=1"):
        host.make("environment", "gym:chain_sum", rest="x")


def test_a_file_finds_the_modules_beside_it_and_hides_no_installed_one(install, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_module.py").write_text("LENGTH = 7\n")
    install("grpo-plugin-words", WORDS)
    (tmp_path / "grpo_plugin_words_module.py").write_text("raise RuntimeError('not the installed one')\n")
    file = tmp_path / "my_env.py"
    uses = "import grpo_plugin_words_module\nfrom beside_module import LENGTH\n"
    file.write_text(f"{textwrap.dedent(WORDS)}\n{uses}def seven(): return Words(LENGTH)\n")
    host = PluginHost.discover(allow=[])
    assert host.make("environment", f"{file}:seven").length == 7


def test_a_host_remembers_what_was_left_out_for_those_that_load_plugins_elsewhere(install):
    install("grpo-plugin-words", WORDS, entry="words")
    assert PluginHost.discover(block=["words"]).selection.block == ("words",)


def test_a_file_is_a_plugin_that_is_not_installed(install, tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text(textwrap.dedent(WORDS) + "\nclass Other(Words): pass\n")
    host = PluginHost.discover(allow=[])
    assert type(host.make("environment", f"{file}:Other")).__name__ == "Other"
    assert host.make("environment", f"{file}:words", length=9).length == 9
    assert [p.name for p in host.plugins] == ["core", str(file)], "it is loaded once"
    with pytest.raises(PluginError, match=r"has no 'Wrods'\. Did you mean 'Words'\?"):
        host.make("environment", f"{file}:Wrods")
    with pytest.raises(PluginError, match=r"my_env.py:NAME with one of: Other, Words, words"):
        host.make("environment", str(file))
    with pytest.raises(PluginError, match="is broken: there is no file"):
        host.make("environment", "./nowhere.py:Words")


def test_a_heavy_module_is_imported_when_its_offer_is_used(install):
    code = """
        import grpo_core as grpo

        @grpo.hookimpl
        def grpo_engines():
            return {"there": "colorsys:rgb_to_hsv", "gone": "nothing_of_that_name:Engine"}
    """
    install("lazy", code)
    sys.modules.pop("colorsys", None)
    host = PluginHost.discover(allow=["lazy"])
    assert "colorsys" not in sys.modules
    assert host.factory("engine", "there").__name__ == "rgb_to_hsv"
    with pytest.raises(
        PluginError, match=r"engine 'gone' of plugin 'lazy' \(lazy 1.2\): nothing_of_that_name"
    ):
        host.factory("engine", "gone")


# ---------------------------------------------------------------------------------- options


def test_options_are_checked_before_the_factory_is_called(install):
    code = """
        import grpo_core as grpo

        @grpo.hookimpl
        def grpo_samplers():
            def strict(seed, *, size=3):
                raise ValueError("not today")
            return {"strict": strict, "open": dict}
    """
    install("grpo-plugin-words", WORDS, entry="words")
    install("picky", code)
    host = PluginHost.discover(allow=["picky", "words"])
    with pytest.raises(PluginError) as caught:
        host.make("environment", "words", lenght=3)
    assert str(caught.value) == (
        "environment 'words' of plugin 'words' (grpo-plugin-words 1.2) has no option 'lenght'. "
        "Did you mean 'length'? Its options: length=5, alphabet='ab'"
    )
    with pytest.raises(PluginError, match=r"needs the option 'seed'. Its options: seed, size=3"):
        host.make("sampler", "strict")
    with pytest.raises(PluginError, match="no option 'seed'"):
        host.make("sampler", "strict", 1, seed=2)
    with pytest.raises(PluginError, match="cannot be made: ValueError: not today") as caught:
        host.make("sampler", "strict", 1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert host.make("sampler", "open", anything=1) == {"anything": 1}


def test_the_options_of_a_function_are_its_keyword_only_parameters():
    host = PluginHost.discover(allow=[])
    advantages = host.function("advantage", "group", scale="none")
    assert advantages([[0.0, 1.0]]) == [[-0.5, 0.5]]
    with pytest.raises(PluginError, match=r"advantage 'group' of plugin 'core' .* has no option 'rewards'"):
        host.function("advantage", "group", rewards=[])


# ---------------------------------------------------------------------------------- events


def test_a_listener_that_raises_is_reported_once_and_not_called_again(install, caplog):
    faulty = """
        import grpo_core as grpo
        calls = []

        @grpo.hookimpl
        def grpo_event(event):
            calls.append(event)
            raise OSError("no network")
    """
    counting = """
        import grpo_core as grpo
        calls = []

        @grpo.hookimpl
        def grpo_event():
            calls.append(1)
    """
    install("faulty", faulty)
    install("counting", counting)
    host = PluginHost.discover(allow=["faulty", "counting"])
    assert [plugin["listens"] for plugin in listing(host)] == [False, True, True]
    with caplog.at_level(logging.WARNING):
        host.emit(RunStarted(directory=".", config={}))
        host.emit(StepEnded(step=1, metrics={}))
        host.close()
    assert sys.modules["counting_module"].calls == [1, 1]
    assert len(sys.modules["faulty_module"].calls) == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        "plugin 'faulty' (faulty 1.2): its grpo_event hook raised on RunStarted; it is not called again"
    )
    assert "no network" in caplog.text


def test_a_listener_that_hangs_holds_up_neither_the_run_nor_other_listeners(monkeypatch, caplog):
    monkeypatch.setattr(listening, "PATIENCE", 1.0)
    monkeypatch.setattr(listening, "BACKLOG", 20)
    forever, heard = threading.Event(), []
    host = PluginHost()
    for name, listener in (("stuck", lambda event: forever.wait()), ("quick", heard.append)):
        host.plugins.append(
            Plugin(name=name, distribution="d", version="1", module=name, listeners=[listener])
        )
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            host.emit(StepEnded(step=step, metrics={}))
        host.close()
        assert [event.step for event in heard] == [0, 1, 2]
        assert "plugin 'stuck' (d 1): its grpo_event hook has not returned from StepEnded" in caplog.text
        for step in range(40):
            host.emit(StepEnded(step=step, metrics={}))
        assert "plugin 'stuck' (d 1): its grpo_event hook is 20 events behind" in caplog.text
    forever.set()


# ---------------------------------------------------------------------------------- the public API


def test_the_public_api_is_this():
    assert sorted(grpo_core.__all__) == [
        "Completion",
        "ConfigError",
        "Engine",
        "EngineSetup",
        "Environment",
        "Episode",
        "Feedback",
        "GenerationRequest",
        "Group",
        "GrpoError",
        "Loader",
        "Message",
        "PluginError",
        "Prompt",
        "Rollout",
        "SampleRequest",
        "Sampler",
        "ValidationContext",
        "ValidationStrategy",
        "Weights",
        "__version__",
        "errors",
        "hookimpl",
    ]
    assert grpo_core.errors is errors
    assert set(grpo_core.__all__) <= set(dir(grpo_core))
    for name in grpo_core.__all__:
        getattr(grpo_core, name)
    with pytest.raises(AttributeError, match="has no attribute 'Trajectory'"):
        grpo_core.Trajectory  # noqa: B018


def test_every_hook_has_a_kind_and_a_docstring():
    from grpo_core import hookspecs

    hooks = {name for name in vars(hookspecs) if name.startswith("grpo_")}
    assert hooks == {*HOOKS.values(), "grpo_event"}
    assert all(getattr(hookspecs, hook).__doc__ for hook in hooks)


@pytest.mark.parametrize(
    "code",
    [
        "import grpo_core",
        "from grpo_core import *",
        "from grpo_core.plugins.host import *; listing(PluginHost.discover())",
    ],
)
def test_importing_and_listing_load_nothing_heavy(code):
    heavy = ["torch", "transformers", "ray", "vllm", "numpy", "math_verify", "datasets", "jinja2"]
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; exec({code!r}); print([m for m in {heavy} if m in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "[]\n"
