"""The run with the newest versions of the dependencies: ``make test-newest`` (``tests/newest.py``)."""

from __future__ import annotations

from pathlib import Path

import newest

ROOT = Path(__file__).parent.parent


def test_versions_that_differ_from_the_constraints_are_named():
    pins = newest.pinned(
        "ast_serialize==0.13.1\ntorch==2.13.0\nnumpy==2.3.5 ; python_version > '3'\n# none\n"
    )
    assert pins == {"ast-serialize": "0.13.1", "torch": "2.13.0", "numpy": "2.3.5"}
    installed = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "ast-serialize": "0.13.1", "unpinned": "1.0"}
    assert newest.differing(installed, pins) == ["numpy 2.4.6, pinned 2.3.5"]


def test_every_project_but_ray_is_installed_from_this_repository():
    named = [Path(word).name for word in newest.projects() if word != "-e"]
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert named[0].endswith("[dev]")
    assert set(named[1:]) == plugins - {"grpo-plugin-ray"}


def test_the_constraints_are_read_and_make_has_the_target():
    assert "torch" in newest.pinned((ROOT / "constraints.txt").read_text())
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert "tests/newest.py" in lines[lines.index("test-newest:") + 1]
