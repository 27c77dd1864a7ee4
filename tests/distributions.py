"""Checks the distributions that ``make dist`` has built, before anybody uploads them.

    python tests/distributions.py dist

Each project has one wheel and one source distribution.  A wheel has the license, its metadata and a README
whose links work on an index.  The source distribution of grpo-core has every file of the repository, and its
tests can be collected where only the wheels are installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
URLS = {"Homepage", "Documentation", "Issues"}
NOT_SHIPPED = re.compile(r"(^|/)(tests?|simulation)/")


def relative_links(markdown: str) -> list[str]:
    """Links and images of a rendered document that an index cannot resolve."""
    rendered = MarkdownIt().render(markdown)
    return [link for link in re.findall(r'(?:href|src)="([^"]*)"', rendered) if "://" not in link]


def problems_of_wheel(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        licenses = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        texts = [wheel.read(name) for name in licenses]
        metadata = message_from_bytes(wheel.read(next(name for name in names if name.endswith("/METADATA"))))
    if texts != [(ROOT / "LICENSE").read_bytes()]:
        yield f"it has {len(licenses)} LICENSE files, expected one that is the repository's"
    if not any(name.endswith("/py.typed") for name in names):
        yield "it has no py.typed"
    if shipped := [name for name in names if NOT_SHIPPED.search(name)]:
        yield f"it has files that only developers need: {shipped[:3]}"
    if metadata["License-Expression"] != "Apache-2.0":
        yield f"its license is {metadata['License-Expression']!r}"
    if metadata["Description-Content-Type"] != "text/markdown":
        yield "its README is no Markdown"
    if missing := URLS - {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])}:
        yield f"it has no project URL {', '.join(sorted(missing))}"
    if dead := relative_links(str(metadata.get_payload())):
        yield f"its README has links that are dead on an index: {dead}"


def files_of(source: Path) -> set[str]:
    with tarfile.open(source) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def problems_of_source(path: Path) -> Iterator[str]:
    """Only the repository itself knows which files there should be."""
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    if missing := sorted({name for name in listed.stdout.split("\n") if name} - files_of(path)):
        yield f"it lacks {len(missing)} files of the repository: {missing[:5]}; adapt MANIFEST.in"


def problems_of_tests(source: Path, wheels: list[Path]) -> Iterator[str]:
    """Collect the tests of the source distribution against the wheels, which hide what is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*install, "--no-index", "--target", str(site), *map(str, wheels)], check=True)
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        tree = Path(scratch) / source.name.removesuffix(".tar.gz")
        collect = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(collect, cwd=tree, env=environ, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            yield "its tests cannot be collected:\n" + "\n".join(done.stdout.splitlines()[-15:])
        else:
            print(f"{source.name}: {done.stdout.strip().splitlines()[-1]}")


def main(folder: Path) -> int:
    found: list[str] = []
    wheels: list[Path] = []
    for project in PROJECTS:
        name = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
        built = {end: sorted(folder.glob(f"{name}-[0-9]*{end}")) for end in (".whl", ".tar.gz")}
        if [len(files) for files in built.values()] != [1, 1]:
            found.append(f"{name}: expected one wheel and one source distribution in {folder}: {built}")
            continue
        (wheel,), (source,) = built.values()
        wheels.append(wheel)
        found += [f"{wheel.name}: {problem}" for problem in problems_of_wheel(wheel)]
        if project == ROOT:
            core = source
            found += [f"{source.name}: {problem}" for problem in problems_of_source(source)]
    if len(wheels) == len(PROJECTS):
        found += [f"{core.name}: {problem}" for problem in problems_of_tests(core, wheels)]
    print("\n".join(found) or f"{len(wheels)} wheels and their source distributions are fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
