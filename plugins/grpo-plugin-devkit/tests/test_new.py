"""``grpo-core new``: each kind of plugin, made, installed, linted, checked, and trained with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from grpo_core import ConfigError, EngineSetup, Rollout, Run, load_object
from grpo_core.loop.metrics import headline
from grpo_core.plugins.files import import_file
from grpo_plugin_devkit import new as scaffold
from grpo_plugin_devkit import wheels
from grpo_plugin_devkit.adding import with_offer, with_requirements

MADE = [(sort, "") for sort in scaffold.SORTS] + [("environment", variant) for variant in scaffold.VARIANTS]
IN_CI = ("environment", "agent", "loss", "sampler")
"""Kinds whose contracts CI runs as well: one of each way in which the core calls a plugin."""
NAMES = [f"{sort}_{variant}".rstrip("_") for sort, variant in MADE]
SMALL = {
    "trainer.steps": 2,
    "trainer.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_tokens": 16,
    "model.options.warm_start_steps": 8,
    "validation.prompts": 4,
}


def made(where, sort, variant=""):
    """A plugin ``my_KIND``, as if it were installed: with the metadata that pip would write."""
    name = f"my_{variant or sort}"
    project = scaffold.write(sort, name, [variant] if variant else [], where)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = project / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in metadata["dependencies"])
    )
    points = metadata["entry-points"]["grpo_core"].items()
    (info / "entry_points.txt").write_text("[grpo_core]\n" + "".join(f"{k} = {v}\n" for k, v in points))
    return name, project


def done(command, project, where, *more, seconds=240):
    """Run a command that a page of the plugin names."""
    words = [*shlex.split(command), *more]
    path = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-m", {"grpo-core": "grpo_core"}.get(words[0], words[0])]
    ended = subprocess.run(
        [*program, *words[1:]],
        cwd=where,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def commands_of(project):
    """The commands of ours in the plugin's README."""
    return re.findall(r"^grpo-core .*", (project / "README.md").read_text(), re.M)


@pytest.mark.parametrize("written", ["scaffold", "example"])
def test_a_strategy_asks_the_environment_what_a_success_is(written, tmp_path):
    """An environment may call a reward of 0.5 a success, or pay more than 1 for what is none."""
    name, project = made(tmp_path, "validation")
    scaffolded = project / f"grpo_plugin_{name}" / "validation.py"
    example = Path(__file__).parents[3] / "examples" / "custom_validation.py"
    right = import_file(example if written == "example" else scaffolded).right
    assert right(Rollout(reward=0.5, success=True))
    assert not right(Rollout(reward=1.5, success=False))
    assert right(Rollout(reward=1.0))


@pytest.mark.parametrize(("sort", "variant"), MADE, ids=NAMES)
def test_a_new_plugin_is_whole_and_clean(sort, variant, tmp_path):
    _, project = made(tmp_path, sort, variant)
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "."], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "--check", "."], cwd=project, check=True)
    workflow = yaml.safe_load((project / ".github/workflows/test.yml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert commands_of(project)[1] in steps, "what CI checks is what the README says"
    assert "license" not in tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert [path.name for path in tmp_path.iterdir()] == [project.name], "nothing else is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sort", "variant"),
    [
        pytest.param(*one, marks=() if name in IN_CI else pytest.mark.nightly, id=name)
        for one, name in zip(MADE, NAMES, strict=True)
    ],
)
def test_a_new_plugin_keeps_its_contract_unedited(sort, variant, tmp_path):
    pytest.importorskip("openai" if sort == "agent" else "hypothesis")
    name, project = made(tmp_path, sort, variant)
    _, check = commands_of(project)
    told = done(check, project, tmp_path)
    assert f"{name!r} of plugin {name!r}" in told
    assert " 0 failed" in told
    if sort != "engine":  # its test asks the same again, for half a minute
        assert "1 passed" in done("pytest -q -p no:cacheprovider", project, project)


def test_a_new_engine_refuses_to_promise_what_its_batches_cannot_keep(tmp_path):
    name, project = made(tmp_path, "engine")
    (file,) = project.glob("grpo_plugin_*/engine.py")
    engine = load_object(f"{file}:MyEngine", who="test")
    with pytest.raises(ConfigError, match=f"engine {name}: rows that are decoded together"):
        engine(EngineSetup(model="m", reproducible=True))


@pytest.mark.nightly
def test_every_kind_of_plugin_works_with_every_other_kind(tmp_path):
    """One run with a new plugin of each kind: all pairs of them, before and after a resume."""
    pytest.importorskip("openai")
    names, projects = zip(*(made(tmp_path, *one) for one in MADE), strict=True)
    name = dict(zip(NAMES, names, strict=True))
    chosen = {**SMALL, "trainer.steps": 1, "trainer.prompts_per_step": 8}
    chosen |= {"validation.prompts": 2, "validation.every": 1, "model.options.warm_start_steps": 80}
    for kind in ("environment", "environment_multi_turn", "environment_tools", "environment_judge", "agent"):
        chosen[f"tasks.{kind}.env"] = name[kind]
        if kind not in ("agent", "environment_judge"):  # an agent's prompts are its own
            chosen[f"tasks.{kind}_rows"] = f'{{env = "{name[kind]}", data = "{name["dataloader"]}"}}'
    for key in ("sampler", "validation", "engine", "loss", "advantage"):
        chosen[f"{key}.name"] = name[key]
    chosen[f"filters.{name['filter']}"] = "{share = 1.0}"
    chosen["tracking.trackers"] = f'["files", "terminal", "*", "{name["tracker"]}"]'
    settings = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    paths = os.pathsep.join(map(str, projects))
    told = done("grpo-core train --output run", paths, tmp_path, *settings)
    assert "1 of 1 steps" in told
    assert "survived" not in told
    more = done("grpo-core train --resume run --set trainer.steps=2", paths, tmp_path)
    assert "2 of 2 steps" in more
    assert "laws hold over 2 steps" in done("grpo-core verify run", paths, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert any("clipped" in line for line in steps), "the metric of the loss"
    tasks = [key.removeprefix("tasks.").removesuffix(".env") for key in chosen if key.startswith("tasks.")]
    assert {f"validation/{task}/always" for task in tasks} <= set().union(*lines), "of the strategy"
    assert {f"reward/{task}" for task in tasks} <= set().union(*steps), "of the sampler and dataloader"
    table = (tmp_path / "run" / f"{name['tracker']}.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in table] == ["step", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("", marks=pytest.mark.nightly), "tools"])
def test_a_new_environment_trains_at_once(variant, tmp_path):
    """Tests of each kind train with the others; this one is about the files around them."""
    _, project = made(tmp_path, "environment", variant)
    train, _ = commands_of(project)
    small = [f"{key}={value}" for key, value in SMALL.items() if key != "rollout.max_tokens"]
    told = done(train, project, tmp_path, *(word for each in small for word in ("--set", each)))
    assert "2 of 2 steps" in told
    assert "of its own solutions are longer" not in told


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("sort", "variant"), MADE, ids=NAMES)
def test_a_new_plugin_raises_the_validation_unedited(sort, variant, tmp_path):
    """With the command of its README, in forty steps; an environment passes the audit before."""
    pytest.importorskip("openai" if sort == "agent" else "grpo_core")
    name, project = made(tmp_path, sort, variant)
    if sort == "environment":
        done(f"grpo-core audit {name}", project, tmp_path)
    train, _ = commands_of(project)
    done(train, project, tmp_path, "--set", "trainer.steps=40", "--output", "run", seconds=3000)
    measured = Run(tmp_path / "run").validations()
    names = [name for name in measured[0] if name not in ("step", "task")]
    assert measured[-1][headline(names)] > measured[0][headline(names)]


READ = {
    "stock.csv": "apple,3\n",
    "data/prices.json": "{}",
    "data/deep/words.txt": "word\n",
    "more/rows.jsonl": "",
}
"""Files that an environment may read, by their paths in its package."""


def with_files(project, name):
    package = project / f"grpo_plugin_{name}"
    for path, text in {**READ, "more/__init__.py": "", "__pycache__/old.pyc": "", ".hidden/x": ""}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    return package


def wheel_of(project, where):
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(where),
    ]
    subprocess.run([*build, str(project)], check=True)
    (wheel,) = where.glob("*.whl")
    return wheel


@pytest.mark.long
def test_the_wheel_of_a_new_plugin_has_the_files_that_it_reads(tmp_path):
    name, project = made(tmp_path, "environment")
    package = with_files(project, name).name
    held = set(zipfile.ZipFile(wheel_of(project, tmp_path / "wheels")).namelist())
    assert {f"{package}/{path}" for path in (*READ, "more/__init__.py", "environment.py")} <= held
    assert not [each for each in held if each.endswith(".pyc")]


def found_by_check(name):
    """Return what `check` says of the wheel of an installed plugin, here in a process of the test."""
    return list(wheels.files_in_wheel(f"grpo_plugin_{name}", f"grpo-plugin-{name.replace('_', '-')}"))


def test_check_names_the_files_that_a_wheel_would_leave_out(tmp_path, monkeypatch):
    name, project = made(tmp_path, "environment")
    with_files(project, name)
    monkeypatch.syspath_prepend(str(project))
    (whole,) = found_by_check(name)
    assert whole.outcome == "passed"
    toml = project / "pyproject.toml"
    toml.write_text(toml.read_text().replace('"*" = ["**/*"]', '"*" = ["*.json"]'))
    (part,) = found_by_check(name)
    assert part.outcome == "noted"
    assert [path for path in READ if path in part.result] == [
        "stock.csv",
        "data/deep/words.txt",
        "more/rows.jsonl",
    ]
    told = done(f"grpo-core check {name}", project, tmp_path)
    assert "stock.csv" in told
    assert " 0 failed" in told


@pytest.mark.long
def test_check_names_the_files_that_an_installed_wheel_lacks(tmp_path, monkeypatch):
    name, project = made(tmp_path, "environment")
    toml = project / "pyproject.toml"
    toml.write_text(toml.read_text().replace('"*" = ["**/*"]', '"*" = ["*.csv"]'))
    package = with_files(project, name)
    wheel = wheel_of(project, tmp_path / "wheels")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel)], check=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (whole,) = found_by_check(name)
    assert (whole.outcome, "stock.csv" in whole.result) == ("passed", False)
    (tmp_path / "site" / package.name / "by_hand.csv").write_text("")
    (part,) = found_by_check(name)
    assert part.outcome == "noted"
    assert "by_hand.csv" in part.result


@pytest.mark.parametrize(
    ("sort", "name", "told"),
    [
        ("environment", "word-count", "for example word_count"),
        ("environment", "3d", "begins with a letter"),
        ("environment", "../up", "cannot be the name"),
        ("environment", "", "cannot be the name"),
        ("environment", "class", "a keyword of Python"),
        ("environment", "x" * 33, "at most 32"),
        ("environment", "core", "installed already"),
        ("loss", "grpo", "offers the loss 'grpo'"),
        ("loss", "inputs", "files of a new loss use"),
        ("engine", "server", "files of a new engine use"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_leaves_nothing(sort, name, told, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(told)):
        scaffold.write(sort, name, [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_refused_and_kept(tmp_path):
    mine = tmp_path / "grpo-plugin-word-count"
    mine.mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        scaffold.write("environment", "word_count", [], tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    assert list(mine.iterdir()) == []


def test_a_plugin_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scaffold, "_files", lambda *given: {"a.py": "", "a.py/b.py": ""})
    with pytest.raises(OSError, match=r"a\.py"):
        scaffold.write("environment", "word_count", [], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sort", "variants"), [("loss", ["judge"]), ("environment", ["judge", "tools"])])
def test_variants_are_those_of_an_environment(sort, variants, tmp_path):
    with pytest.raises(ConfigError, match="only an environment has variants"):
        scaffold.write(sort, "mine", variants, tmp_path)


def test_the_command_says_what_comes_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert scaffold.new("sampler", "word_count") == 0
    told = capsys.readouterr().out
    assert "pip install -e './grpo-plugin-word-count[dev]'" in told
    assert "grpo-core train --env math:sort --sampler word_count" in told


# ---------------------------------------------------------------------------------- in a plugin that exists


def contents(project):
    return {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}


def test_a_plugin_gets_one_offer_of_each_kind_after_the_other(tmp_path):
    _, project = made(tmp_path, "environment")
    before = contents(project)
    for sort, variant in MADE:
        scaffold.add(sort, f"a_{variant or sort}", [variant] if variant else [], project)
    package = project / "grpo_plugin_my_environment"
    changed = {path for path, held in before.items() if path.read_bytes() != held}
    assert changed == {package / "__init__.py", project / "pyproject.toml"}
    assert {path.name for path in (project / "tests").iterdir()} == {
        "test_my_environment.py",
        *(f"test_a_{variant or sort}.py" for sort, variant in MADE),
    }
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    needs = ["grpo-core>=0.1,<1", "grpo-plugin-agents", "openai>=1.60", "aiohttp>=3.10"]
    assert metadata["dependencies"] == needs
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "."], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "--check", "."], cwd=project, check=True)
    told = done("grpo-core check a_tracker", project, tmp_path)
    assert "'a_tracker' of plugin 'my_environment'" in told
    assert " 0 failed" in told


@pytest.mark.long
def test_tests_and_wheel_of_a_plugin_hold_what_was_added(tmp_path):
    _, project = made(tmp_path, "environment")
    scaffold.add("loss", "milder", [], project)
    scaffold.add("environment", "till", ["tools"], project)
    assert "3 passed" in done("pytest -q -p no:cacheprovider", project, project)
    assert " 0 failed" in done("grpo-core check till", project, tmp_path)
    held = set(zipfile.ZipFile(wheel_of(project, tmp_path / "wheels")).namelist())
    assert {f"grpo_plugin_my_environment/{name}.py" for name in ("environment", "milder", "till")} <= held


@pytest.mark.parametrize("there", [True, False])
def test_the_command_adds_to_the_plugin_where_it_is_called(there, tmp_path, monkeypatch, capsys):
    _, project = made(tmp_path, "filter")
    monkeypatch.chdir(project if there else tmp_path)
    into = None if there else Path(project.name)
    assert scaffold.new("tracker", "shop_log", into=into) == 0
    told = capsys.readouterr().out
    assert "grpo_plugin_my_filter/shop_log.py: the tracker 'shop_log'" in told
    assert '"*", "shop_log"]' in told


HEAD = "import grpo_core as grpo\n\n\n@grpo.hookimpl\ndef grpo_losses():\n"
NEW = '"new": "p.new:new"'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    return {}\n", f"    return {{{NEW}}}\n"),
        (
            '    return {"a": "p.é:A"}  # kept\n',
            f'    return {{\n        "a": "p.é:A",\n        {NEW},\n    }}  # kept\n',
        ),
        (
            '    return {\n        "a": "p:A",  # one, two\n        # more\n    }\n',
            f'    return {{\n        "a": "p:A",  # one, two\n        # more\n        {NEW},\n    }}\n',
        ),
        (
            '    return {\n      "a": grpo.Offer("p:A", requires={"x": "y"})  # }\n    }\n\n\nX = 1\n',
            '    return {\n      "a": grpo.Offer("p:A", requires={"x": "y"}),  # }\n'
            f"      {NEW},\n    }}\n\n\nX = 1\n",
        ),
        (
            '    seen = {"x": 1}\n    return {"new": "p.new:new", **seen}\n',
            '    seen = {"x": 1}\n    return {"new": "p.new:new", **seen}\n',
        ),
    ],
    ids=["empty", "one line", "lines", "no comma", "by hand"],
)
def test_a_hook_gets_one_more_entry_and_keeps_its_form(before, after):
    assert with_offer(HEAD + before, "grpo_losses", "new", "p.new:new") == HEAD + after


def test_a_plugin_without_the_hook_gets_it_at_its_end():
    source = "from grpo_core import hookimpl\n\n\n@hookimpl\ndef grpo_filters():\n    return make()\n"
    added = f"\n\n@hookimpl\ndef grpo_losses():\n    return {{{NEW}}}\n"
    assert with_offer(source, "grpo_losses", "new", "p.new:new") == source + added


UNSAFE = {
    "called": HEAD + '    return dict(a="p:A")\n',
    "computed": HEAD + '    return {name: f"p:{name}" for name in ("a", "b")}\n',
    "unpacked": HEAD + '    return {"a": "p:A", **more()}\n',
    "twice": HEAD + "    if here:\n        return {}\n    return {}\n",
    "imported": "from p.hooks import grpo_losses\n",
    "conditional": "if here:\n    @grpo.hookimpl\n    def grpo_losses():\n        return {}\n",
    "no hook": '"""A plugin."""\n',
    "wrong": HEAD + "    return {\n",
}


@pytest.mark.parametrize("source", UNSAFE.values(), ids=UNSAFE)
def test_a_plugin_that_cannot_be_extended_safely_is_kept_and_told_the_line(source, tmp_path):
    _, project = made(tmp_path, "filter")
    (project / "grpo_plugin_my_filter" / "__init__.py").write_text(source)
    before = contents(project)
    with pytest.raises(ConfigError, match="cannot be extended safely") as raised:
        scaffold.add("loss", "new", [], project)
    assert raised.value.exit_status == 2
    line = '"new": "grpo_plugin_my_filter.new:new"'
    assert line in str(raised.value) or "__init__.py, line" in str(raised.value)
    assert contents(project) == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[project]\ndynamic = ['dependencies']\n", "add grpo-core>=0.1,<1 and openai"),
        ("project.dependencies = ['openai']\n", "add grpo-core>=0.1,<1 to"),
        ("[project]\n[tool.x]\ndependencies = []\n", "add grpo-core>=0.1,<1 and openai"),
    ],
)
def test_requirements_that_cannot_be_extended_safely_are_told(text, told):
    other = '[project]\ndependencies = ["grpo-core>=0.1,<1", "openai>=1.60"]\n'
    with pytest.raises(ValueError, match=re.escape(told)):
        with_requirements(text, other)


def test_only_requirements_that_are_missing_are_added():
    other = '[project]\ndependencies = ["grpo-core>=0.1,<1", "openai>=1.60"]\n'
    held = "[project]\ndependencies = ['OpenAI[x]==2', # ]\n  'grpo_core'] # kept\n"
    assert with_requirements(held, other) == held
    before = "[project]\ndependencies = [\n  'OpenAI[x]==2' # ], a\n]\n[tool.x]\n"
    after = "[project]\ndependencies = [\n  'OpenAI[x]==2', # ], a\n  \"grpo-core>=0.1,<1\",\n]\n[tool.x]\n"
    assert with_requirements(before, other) == after


@pytest.mark.parametrize(
    ("sort", "name", "told"),
    [
        ("tracker", "filter", "filter.py: exists already"),
        ("tracker", "data", "data: exists already"),
        ("loss", "my_filter", "test_my_filter.py: exists already"),
        ("filter", "mine", "grpo_filters offers 'mine' already"),
        ("tracker", "files", "offers the tracker 'files'"),
        ("tracker", "Shop", "cannot be the name"),
    ],
)
def test_a_name_that_exists_in_the_plugin_is_refused(sort, name, told, tmp_path):
    _, project = made(tmp_path, "filter")
    package = project / "grpo_plugin_my_filter"
    (package / "data").mkdir()
    init = package / "__init__.py"
    init.write_text(init.read_text().replace("{", '{"mine": "grpo_plugin_my_filter.filter:mine", '))
    before = contents(project)
    with pytest.raises(ConfigError, match=re.escape(told)):
        scaffold.add(sort, name, [], project)
    assert contents(project) == before


@pytest.mark.parametrize(
    "text", ["", "[project]\n", '[project.entry-points.grpo_core]\na = "p"\nb = "q"\n', None]
)
def test_a_directory_that_is_no_plugin_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "__init__.py").touch()
    with pytest.raises(ConfigError, match="no plugin; expected a package"):
        scaffold.add("loss", "mine", [], tmp_path)


def test_a_package_in_src_keeps_its_ends_of_lines(tmp_path):
    _, project = made(tmp_path, "filter")
    (project / "src").mkdir()
    package = (project / "grpo_plugin_my_filter").rename(project / "src" / "grpo_plugin_my_filter")
    init = package / "__init__.py"
    init.write_bytes(init.read_bytes().replace(b"\n", b"\r\n"))
    assert scaffold.add("filter", "other", [], project) == package / "other.py"
    assert init.read_bytes().count(b"\r\n") == init.read_bytes().count(b"\n") > 10
