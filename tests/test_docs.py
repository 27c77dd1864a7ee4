"""The documents promise what the code has."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents import PAGES, name_of

from grpo_core import events
from grpo_core.app import launch
from grpo_core.config import read_toml
from grpo_core.contracts import hookspecs
from grpo_core.plugins.files import load_object
from grpo_core.plugins.host import PluginHost

ROOT = Path(__file__).parent.parent


def hooks():
    return [name for name in vars(hookspecs) if name.startswith("grpo_")]


def test_every_hook_is_documented_once_with_its_arguments():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "contracts").glob("*.md"))
    shown = [
        f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})" for hook in hooks()
    ]
    assert sorted(re.findall(r"^### (grpo_\w+\(.*\))$", pages, re.M)) == sorted(shown)


def test_every_contract_has_an_example_and_three_mistakes():
    for page in (ROOT / "docs" / "contracts").glob("*.md"):
        headings = re.findall(r"^## (.+)$", page.read_text(), re.M)
        assert headings[0] == "Example", page.name
        assert {"Signature", "What is checked", "Three mistakes"} <= set(headings), page.name


def test_every_event_is_documented():
    text = generator("records").page()
    kinds = {
        name
        for name, value in vars(events).items()
        if inspect.isclass(value) and value.__module__ == events.__name__
    }
    assert all(name in text for name in kinds - {"Event"})


GENERATED = ("configuration", "options", "records", "catalogue")
"""Pages that docs/_site.py makes when the site is built."""

WRITTEN = {
    "learning": "docs/learning.md",
    "performance": "docs/performance.md",
    "selection": "docs/samplers.md",
    "authoring": "docs/new-user.md",
    "installs": "grpo_core/plugins/installs.json",
}
"""Generator in docs/, and the page or file that it writes into."""


def generator(name):
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "page"), WRITTEN.items())
def test_a_generated_page_is_what_the_code_says(name, page):
    assert (ROOT / page).read_text() == generator(name).page(), f"run `make pages` (docs/_{name}.py)"


@pytest.mark.long
def test_the_pictures_of_the_explanations_are_what_the_code_draws():
    for name, draw in generator("pictures").PICTURES.items():
        assert (ROOT / "docs" / name).read_text() == draw(), "run `make pages` (docs/_pictures.py)"


def test_every_key_has_a_meaning():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", generator("configuration").page(), re.M)
    assert len(rows) > 150
    assert [key for key, _, meaning in rows if not meaning.strip()] == []


def test_every_option_has_a_type_and_a_meaning():
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \| (.*) \|$", generator("options").page(), re.M)
    assert len(rows) > 40
    assert [row for row in rows if not all(cell.strip("` ") for cell in row)] == []


def test_every_field_of_a_record_has_a_meaning():
    text = generator("records").page()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", text.partition("## Events")[0], re.M)
    assert len(rows) > 90
    assert [row for row in rows if not all(cell.strip("` ") for cell in row)] == []
    told = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text.partition("## Events")[2], re.M)
    assert len(told) > 15
    assert all(meaning for _, meaning in told)


def test_the_options_page_knows_every_offer_of_this_repository():
    text = generator("options").page()
    ours = {"grpo-core", *(path.name for path in (ROOT / "plugins").iterdir())}
    for plugin in PluginHost.discover().plugins:
        for kind, names in plugin.offers.items() if plugin.distribution in ours else ():
            if kind not in ("environment", "preflight"):
                named = {*names} - {each.name for each in plugin.sections} - {"pool"}  # which a run makes
                assert all(re.search(rf"^### `(\w+:)?{re.escape(name)}`$", text, re.M) for name in named)


def test_a_figure_is_marked_when_files_that_it_depends_on_have_changed(tmp_path, monkeypatch):
    performance = generator("performance")
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    file = tmp_path / "room" / "part.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    row = {"commit": "0123abcd", "files": ["room"]}
    row["digest"] = performance.digest(row["files"])
    assert performance.measured_at(row) == "0123abcd"
    file.write_text("a = 2\n")
    assert performance.measured_at(row) == "before 0123abcd"
    file.write_text("a = 1\n")
    (tmp_path / "room" / "new.py").write_text("")
    assert performance.measured_at(row).startswith("before")


def test_every_figure_names_its_machine_its_benchmark_and_files_that_exist():
    for row in json.loads((ROOT / "docs" / "performance.json").read_text()):
        assert row["machine"], row["what"]
        assert row["date"], row["what"]
        assert all((ROOT / name).exists() for name in row["files"]), row["what"]
        scripts = [word for word in row["command"].split() if word.endswith(".py")]
        assert set(scripts) <= set(row["files"]), row["what"]


# ---------------------------------------------------------------------------------- words

WORDS = {
    "all pages": 60_000,
    "ARCHITECTURE.md": 2_000,
    "CONTRIBUTING.md": 1_000,
    "README.md": 800,
    "SECURITY.md": 600,
}


@pytest.mark.parametrize("name", WORDS)
def test_the_documents_do_not_grow(name):
    words = sum(len(page.read_text().split()) for page in PAGES if name in ("all pages", name_of(page)))
    assert 0 < words <= WORDS[name], f"{name}: {words} words; what of it does a reader not need?"


# ---------------------------------------------------------------------------------- what pages name


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_path_that_a_page_names_exists(page):
    named = re.findall(
        r"`((?:grpo_core|plugins|tests|docs|examples)/[\w./-]*)[`:]", (ROOT / page).read_text()
    )
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_rooms_of_the_picture_are_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    picture = text.partition("## Rooms")[2].split("```")[1]
    rooms = {
        word
        for line in picture.splitlines()
        if "reached by hooks" not in line
        for word in re.findall(r"(?<=  )([a-z_]+)(?=/|  | ──|$)", line[17:])
    }
    assert len(rooms) > 25
    core = ROOT / "grpo_core"
    there = {path.stem for room in (core, core / "contracts", core / "loop") for path in room.iterdir()}
    assert rooms <= there


def test_every_test_that_a_page_names_exists():
    for page in PAGES:
        for path, name in re.findall(r"`([\w/.-]+\.py)::(\w+)`", page.read_text()):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{name}"


REPOSITORY = "https://github.com/grpo-core/grpo-core/blob/main/"
ANY = REPOSITORY.replace("blob", "(?:blob|tree)")
"""Links to a file or a folder of the repository."""


def anchors(text):
    """As GitHub and MkDocs make them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if "://" in target and not target.startswith(REPOSITORY):
            continue
        if target.startswith(REPOSITORY):  # README is read on a package index, too, so its links are absolute
            path, _, anchor = target.removeprefix(REPOSITORY).partition("#")
            there = ROOT / path
        else:
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there.read_text()), f"{page.name}: {target}"


def test_every_link_of_code_and_metadata_to_the_repository_leads_somewhere():
    rooms = ("grpo_core", "plugins", "examples", "docs")
    files = [path for room in rooms for path in (ROOT / room).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".toml", ".txt", ".html")]
    texts += [(ROOT / "pyproject.toml").read_text(), (ROOT / "mkdocs.yml").read_text()]
    links = {link for text in texts for link in re.findall(rf"{ANY}[\w./#-]+", text)}
    assert len(links) > 50
    for link in links:
        path, _, anchor = re.sub(f"^{ANY}", "", link.rstrip(".")).partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors((ROOT / path).read_text()), link


# ---------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path):
    assert launch.configure([read_toml(path)], {})[0].tasks


def test_the_configuration_in_the_readme_is_valid():
    shown = re.search(r"```toml\n(# gsm8k.toml.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert launch.configure([tomllib.loads(shown)], {})[0].model.path == "Qwen/Qwen3-0.6B"


def test_the_readme_shows_the_example_as_it_is_and_counts_its_lines():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"```python\n(.*?)```", readme, re.S).group(1)
    assert shown in (ROOT / "examples" / "shout.py").read_text()
    lines = [line for line in shown.splitlines() if line.strip()]
    assert f"A complete environment takes {len(lines)} lines" in readme


@pytest.mark.parametrize(
    ("name", "part"), [pytest.param("agent.py", "prompts", marks=pytest.mark.long), ("shout.py", "Shout")]
)
def test_the_examples_validate_on_no_prompt_that_they_train_on(name, part):
    if name == "agent.py":
        pytest.importorskip("openai")
    example = load_object(f"{ROOT / 'examples' / name}:{part}", who="")
    prompts = example().prompts if inspect.isclass(example) else example
    train, held_out = ({prompt.messages[0]["content"] for prompt in prompts(split)} for split in
                       ("train", "validation"))  # fmt: skip
    assert train
    assert held_out
    assert not train & held_out


def test_each_option_of_the_examples_has_its_own_line():
    options = generator("options")
    strategy = load_object(f"{ROOT / 'examples' / 'custom_validation.py'}:Reliable", who="")
    meanings = options._meanings(strategy)
    assert set(meanings) == {option.name for option in options._options(strategy)}


# ---------------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, where a proxy that does not exist is the only way out."""
    pytest.importorskip("mkdocs", reason="the site needs pip install -e .[docs]; `make docs` does both")
    directory = tmp_path_factory.mktemp("site")
    environ = os.environ | dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environ["NO_MKDOCS_2_WARNING"] = "1"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


@pytest.mark.nightly
def test_the_site_has_every_page_and_the_public_names(site):
    for page in ROOT.glob("docs/**/*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    for page in (*GENERATED, "index", "architecture", "contributing", "security"):
        assert (site / f"{page}.html").is_file()
    shown = (site / "api" / "grpo_core.html").read_text()
    assert [name for name in ("Environment", "Feedback", "EngineSetup") if f">{name}<" not in shown] == []


@pytest.mark.nightly
def test_pages_of_the_site_load_nothing_from_a_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert [address for address in loaded if "canonical" not in address] == [], page.name
