"""Plugins are found, checked and used by name; a broken one harms no other."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_core
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.plugins.files import FILE_PREFIX, module_name
from grpo_core.plugins.host import HOOKS, Plugin, PluginHost, listing
from grpo_core.plugins.installed import install_command
from grpo_plugin_devkit.objectives import a_group

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
        if name.endswith("_module") or name.startswith(FILE_PREFIX):
            del sys.modules[name]


def plugin(host, name):
    return next(plugin for plugin in host.plugins if plugin.name == name)


# ---------------------------------------------------------------------------------- finding


def test_an_installed_plugin_is_listed_with_its_offers(install):
    install("grpo-plugin-words", WORDS, entry="words")
    host = PluginHost.discover(allow=["words"])
    core, words = listing(host)
    assert core["name"] == "core"
    assert core["distribution"] == "grpo-core"
    assert core["offers"]["sampler"] == ["mix", "round_robin"]
    assert words["seconds"] > 0
    assert {**words, "seconds": 0} == {
        "name": "words",
        "distribution": "grpo-plugin-words",
        "version": "1.2",
        "module": "grpo_plugin_words_module",
        "offers": {"environment": ["words"]},
        "error": "",
        "note": "",
        "seconds": 0,
    }
    assert json.loads(json.dumps(listing(host))) == listing(host)


def test_a_plugin_that_is_installed_or_removed_while_the_program_runs_is_noticed(install, tmp_path):
    install("grpo-plugin-words", WORDS, entry="words")
    assert "late" not in [each.name for each in PluginHost.discover().plugins]
    install("late", "raise SystemExit('I came late')")
    assert plugin(PluginHost.discover(), "late").error == "SystemExit: I came late"
    shutil.rmtree(tmp_path / "site" / "late-1.2.dist-info")
    assert "late" not in [each.name for each in PluginHost.discover().plugins]


def test_an_option_may_have_any_name(tmp_path):
    file = tmp_path / "named.py"
    file.write_text("def words(name, kind='x'):\n    return [name, kind]\n")
    made = PluginHost.discover().make("environment", f"{file}:words", name="a", kind="b")
    assert made == ["a", "b"]


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
        "another distribution has a plugin 'words', so this one is 'first/words'"
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
        "import grpo_core as g\n@g.hookimpl\ndef grpo_trackers(run): return {}",
        "PluginValidationError: Plugin 'odd' for hook 'grpo_trackers'",
    ),
    "not a dict": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_samplers(): return ['mix']",
        "grpo_samplers() returned list, expected a dict of name: factory",
    ),
    "not a factory": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_samplers(): return {'mix': 3}",
        "grpo_samplers() offers 'mix' as 3: expected a callable",
    ),
    "offer of another kind": (
        "import grpo_core as g\n@g.hookimpl\ndef grpo_engines(): return {'mine': g.Offer('a:b')}",
        "grpo_engines() offers 'mine' as Offer: use EngineOffer",
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


def test_an_offer_is_found_by_its_role_which_one_plugin_may_have():
    host = PluginHost()
    assert host.in_role("player", "plays_agents") == []
    with pytest.raises(PluginError, match="no player that plays agents: pip install grpo-plugin-agents"):
        host.the_one("player", "plays_agents")
    for name in ("one", "other"):
        offers = {name: grpo_core.Offer(print, role="plays_agents"), "plain": grpo_core.Offer(print)}
        host.plugins.append(
            Plugin(name=name, distribution="", version="", module="", offers={"player": offers})
        )
        assert host.in_role("player", "plays_agents")[-1] == name
    with pytest.raises(PluginError, match="each of one, other is a player that plays agents; leave out"):
        host.the_one("player", "plays_agents")


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


def test_an_unknown_name_suggests_the_nearest_and_lists_the_known(install):
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
    install("puzzles", code)
    host = PluginHost.discover(allow=["puzzles"])
    assert host.make("environment", "puzzles:chain_sum", size=4) == ("chain_sum", 4)
    assert host.factory("environment", "puzzles:chain_sum")(size=2) == ("chain_sum", 2)
    assert host.make("environment", "set/y") == {"y"}
    assert host.make("environment", "puzzles:set/x") == "x"
    with pytest.raises(PluginError, match="there is no environment 'chain_sum'"):
        host.make("environment", "chain_sum")
    with pytest.raises(PluginError, match=r"no option 'rest'. Its options: size=1"):
        host.make("environment", "puzzles:chain_sum", rest="x")


def test_a_file_finds_modules_of_its_directory_and_hides_no_installed_one(install, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_module.py").write_text("LENGTH = 7\n")
    install("grpo-plugin-words", WORDS)
    (tmp_path / "grpo_plugin_words_module.py").write_text("raise RuntimeError('not the installed one')\n")
    file = tmp_path / "my_env.py"
    uses = "import grpo_plugin_words_module\nfrom beside_module import LENGTH\n"
    file.write_text(f"{textwrap.dedent(WORDS)}\n{uses}def seven(): return Words(LENGTH)\n")
    host = PluginHost.discover(allow=[])
    assert host.make("environment", f"{file}:seven").length == 7


def test_a_host_remembers_left_out_plugins_for_other_processes(install):
    install("grpo-plugin-words", WORDS, entry="words")
    assert PluginHost.discover(block=["words"]).selection.block == ("words",)


def test_a_file_is_a_plugin_that_is_not_installed(install, tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text(textwrap.dedent(WORDS) + "\nclass Other(Words): pass\n")
    host = PluginHost.discover(allow=[])
    assert type(host.make("environment", f"{file}:Other")).__name__ == "Other"
    assert host.make("environment", f"{file}:words", length=9).length == 9
    assert [p.name for p in host.plugins] == ["core", file.name], "it is loaded once"
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
            return {"strict": strict, "open": dict, "judge": lambda reply, answer: 1.0}
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
    with pytest.raises(
        PluginError, match=r"For a reward function: grpo_core.train\(reward=...\), or trl:jud"
    ):
        host.make("sampler", "judge")
    with pytest.raises(PluginError, match=r"no option 'beta'.* Did you mean 'kl'\?"):
        PluginHost.discover(allow=["algorithms"]).check_options("loss", "grpo", {"beta": 0.1})
    with pytest.raises(PluginError, match="no option 'seed'"):
        host.make("sampler", "strict", 1, seed=2)
    with pytest.raises(PluginError, match="cannot be made: ValueError: not today") as caught:
        host.make("sampler", "strict", 1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert host.make("sampler", "open", anything=1) == {"anything": 1}


def test_the_options_of_a_function_are_its_keyword_only_parameters():
    host = PluginHost.discover(allow=[])
    advantages = host.function("advantage", "group", scale="none")
    assert advantages([a_group([0.0, 1.0])]) == [[-0.5, 0.5]]
    with pytest.raises(PluginError, match=r"advantage 'group' of plugin 'core' .* has no option 'rewards'"):
        host.function("advantage", "group", rewards=[])


@pytest.mark.parametrize("kind", ["loss", "advantage", "optimizer", "filter"])
@pytest.mark.parametrize(
    "signature",
    ["", "first, second", "*, groups", "*, optional=1"],
    ids=["none", "two", "by name", "options"],
)
def test_a_function_of_a_file_that_cannot_be_called_is_refused_before_it_is_called(tmp_path, kind, signature):
    (tmp_path / "parts.py").write_text(f"def mine({signature}): ...\ndef other(given, *, k=1): ...\n")
    host = PluginHost.discover()
    host.check_options(kind, f"{tmp_path}/parts.py:other", {"k": 2})
    with pytest.raises(PluginError, match=f"{kind} .*parts.py:mine' .*(cannot be called|needs the option)"):
        host.check_options(kind, f"{tmp_path}/parts.py:mine", {})


OPTIONS = """
    from typing import Literal, TYPE_CHECKING
    from attrs import frozen
    import grpo_core as grpo
    if TYPE_CHECKING:
        from nowhere import Unknown

    @frozen
    class Strategy:
        n: int = 4
        share: float = 0.5
        mode: Literal["fast", "slow"] = "fast"
        names: tuple[str, ...] | None = None
        flag: bool = False
        table: dict = {}
        other: "Unknown" = None

        async def validate(self, context):
            return {}

    def raises(groups, *, value: int = 0):
        raise KeyError(value)

    @grpo.hookimpl
    def grpo_validation_strategies():
        return {"attrs": Strategy}

    @grpo.hookimpl
    def grpo_advantages():
        return {"raises": raises}
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"n": 3, "share": 1, "mode": "slow", "names": ["a"], "flag": True, "table": {"a": 1}, "other": 7},
            "",
        ),
        ({"n": 2.5}, "option 'n' is 2.5; expected int"),
        ({"n": True}, "option 'n' is True; expected int"),
        ({"share": "half"}, "option 'share' is 'half'; expected float"),
        ({"mode": "medium"}, "option 'mode' is 'medium'; expected 'fast' or 'slow'"),
        ({"names": "a"}, "option 'names' is 'a'; expected"),
        ({"names": [1]}, "option 'names' is [1]; expected"),
        ({"flag": 1}, "option 'flag' is 1; expected bool"),
        ({"table": []}, "option 'table' is []; expected dict"),
        ({"nn": 1}, "has no option 'nn'. Did you mean 'n'?"),
    ],
)
def test_options_are_checked_by_name_and_type_also_those_of_an_attrs_class(install, options, expected):
    install("typed", OPTIONS)
    host = PluginHost.discover(allow=["typed"])
    if not expected:
        host.check_options("validation_strategy", "attrs", options)
        assert host.make("validation_strategy", "attrs", **options).mode == "slow"
        return
    with pytest.raises(PluginError) as caught:
        host.check_options("validation_strategy", "attrs", options)
    assert expected in str(caught.value)


@pytest.mark.long
def test_all_choices_of_the_core_are_checked_without_making_or_importing_a_model():
    code = """
        import sys
        from grpo_core.contracts.errors import PluginError
        from grpo_core.plugins.host import PluginHost
        host = PluginHost.discover(allow=[])
        chosen = [("trainer", "torch"), ("loss", "grpo"), ("advantage", "group"), ("engine", "local"),
                  ("sampler", "mix"), ("validation_strategy", "greedy")]
        for kind, name in chosen:
            host.check_options(kind, name, {})
            try:
                host.check_options(kind, name, {"no_such": 1})
            except PluginError as error:
                assert f"has no option 'no_such'" in str(error), error
            else:
                raise AssertionError(kind)
        assert not {"torch", "transformers"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_function_that_raises_is_named_with_its_plugin(install):
    install("typed", OPTIONS)
    function = PluginHost.discover(allow=["typed"]).function("advantage", "raises", value=3)
    with pytest.raises(
        PluginError, match=r"^advantage 'raises' of plugin 'typed' .* raised .* in raises: KeyError: 3$"
    ):
        function([])


# ---------------------------------------------------------------------------------- hooks and imports


def test_every_hook_has_a_kind_and_a_docstring():
    from grpo_core.contracts import hookspecs

    hooks = {name for name in vars(hookspecs) if name.startswith("grpo_")}
    assert hooks == {*HOOKS.values(), "grpo_commands", "grpo_config_sections"}
    assert all(getattr(hookspecs, hook).__doc__ for hook in hooks)


@pytest.mark.parametrize(
    "code",
    [
        "import grpo_core",
        "import grpo_core.testing, grpo_core.kit",
        "from grpo_core.plugins.host import *; listing(PluginHost.discover())",
    ],
)
def test_importing_and_listing_load_nothing_heavy(code):
    assert loaded_by(code) == set()


@pytest.mark.long
def test_importing_every_name_loads_neither_torch_nor_transformers():
    """Tokens are numpy arrays."""
    assert loaded_by("from grpo_core import *") == {"numpy"}


def loaded_by(code):
    """Return the heavy packages that are loaded after this code."""
    heavy = ["torch", "transformers", "ray", "vllm", "numpy", "math_verify", "datasets", "jinja2"]
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; exec({code!r}); print(*(m for m in {heavy} if m in sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stdout.split())


# ---------------------------------------------------------------------------------- modules of files


JUDGE = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import grpo_core as grpo


def judge(text):
    return float(text == "b")


class Judged(grpo.Environment):
    def evaluate(self, episodes):
        context = multiprocessing.get_context("{context}")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return list(pool.map(judge, [each.reply for each in episodes]))
"""


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_an_environment_of_a_file_scores_in_processes_of_any_kind(tmp_path, context):
    """They import its module by its name, which contains its path."""
    from test_interpreters import run

    file = tmp_path / "a_b-c" / "judge.py"
    file.parent.mkdir()
    file.write_text(JUDGE.replace("{context}", context))

    async def story(process):
        said = [({"role": "assistant", "content": text},) for text in "ab"]
        prompt = Prompt(messages="x", id="0", environment="task")
        return await process.evaluate([Episode(prompt=prompt, messages=each) for each in said])

    assert [each.reward for each in run(f"{file}:Judged", story)] == [0.0, 1.0]


@given(st.lists(st.text("a_b/-.5fx", min_size=1), min_size=2, max_size=2, unique=True))
def test_two_files_never_share_the_name_of_a_module(paths):
    first, second = (module_name(Path(f"/{path}")) for path in paths)
    assert (first == second) == (Path(f"/{paths[0]}") == Path(f"/{paths[1]}"))
    assert first.rpartition(".")[2].isidentifier()


def test_an_engine_of_a_plugin_is_installed_without_what_it_talks_to():
    assert install_command("engine", "vllm:http") == "pip install grpo-plugin-vllm"
    assert install_command("engine", "vllm") == "pip install 'grpo-core[vllm]'"
