"""Every training that a page, an example or a plugin's README prints raises its validation, as the page says.

The list is made from the commands of the pages and of the heads of the examples: none can be forgotten.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import documents
import pytest
from attrs import frozen
from documents import PAGES, ROOT, blocks, name_of

from grpo_core import Run
from grpo_core.loop.metrics import headline

TOLERANCE = 0.15
"""How far below the figure of a page a run may end: seeds and machines differ."""
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".toml"))

NOT_HERE = {
    r"--resume": "the run that it continues is on the same page",
    r"smollm2": "its model is downloaded; the tests of grpo-plugin-smollm2 do that",
    r"gsm8k\.toml|gpu\.toml|lora\.toml|puzzles\.toml": "its model has to be downloaded",
    r"vllm": "needs vLLM, or a server with it; the tests of grpo-plugin-vllm train with it",
    r"--ray|transferqueue": "starts a cluster; the tests of grpo-plugin-ray train on one",
    r"tinker:": "needs a service; the tests of grpo-plugin-tinker serve one",
    r"(run|math)\.toml": "stands for a configuration of the reader",
    r"runs/sums/config\.toml|python train\.py": "its model is downloaded; test_tutorial.py has another one",
    r"my_agent\.py": "stands for an agent of the reader; the one of first-agent.md is trained",
    r"--profile|trainer\.steps=2$|trainer\.steps=2 ": "so few steps show how a key is set",
    r"words\.toml|sweets\.toml": "needs verifiers in an environment of its own; test_tutorial.py has one",
    r"python examples/nano\.py": "tests/test_nano.py trains it",
    r"--env caesar$": "the longer command of the tutorial, or a scaffold, which test_new.py trains",
    r"reasoning_gym:|five_formats": "needs reasoning-gym and gymnasium, which start slowly",
    r"math\.toml": "stands for a configuration of the reader",
}
"""Commands that are not run at their full length, and why."""


@frozen
class Printed:
    """A command that trains, or a script that does."""

    source: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def output(self) -> str:
        return self.words[self.words.index("--output") + 1] if "--output" in self.words else ""


def trains(words: tuple[str, ...]) -> bool:
    if words[:2] == ("grpo-core", "train"):
        return True
    script = ROOT / words[1] if words[0] == "python" and len(words) > 1 else None
    return script is not None and script.suffix == ".py" and words[1].startswith(("examples/", "train.py"))


def of_example(path: Path) -> list[Printed]:
    """The commands in the head of an example."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^#? *((?:grpo-core train|python examples/).*)", text, re.M)
    return [Printed(path, 0, tuple(shlex.split(line, comments=True))) for line in lines]


def of_page(page: Path) -> list[Printed]:
    return [Printed(page, command.line, command.words) for command in documents.commands(page)]


PRINTED = [
    each
    for found in (*map(of_page, PAGES), *map(of_example, EXAMPLES))
    for each in found
    if trains(each.words)
]


def why_not(printed: Printed) -> str:
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, str(printed))), "")


SOURCES = {name_of(each.source): each.source for each in PRINTED if not why_not(each)}


def claimed(printed: Printed) -> dict[str, float]:
    """Return the accuracy that the page says the run's validation reaches, by task."""
    if printed.source.suffix != ".md":
        return {}
    lines = sorted({each.line for each in PRINTED if each.source == printed.source})
    after = next((later for line, later in pairwise(lines) if line == printed.line), 10**9)
    same = [each for each in PRINTED if (each.source, each.line) == (printed.source, printed.line)]
    texts = [b.text for b in blocks(printed.source, "text") if printed.line < b.line < after]
    said = [line for text in texts for line in text.splitlines() if line.startswith("finished: ")]
    if len(same) > 1 or not said:
        said = [line for line in said if printed.output and line.rstrip().endswith(printed.output)]
    found: dict[str, float] = {}
    for line in said:
        for task, percent, value, unit in re.findall(
            r"(\w+): validation \w+ ([\d.]+%?) -> ([\d.]+)(%?)", line
        ):
            found[task] = float(value) / (100 if unit and percent else 1)
    return found


# ---------------------------------------------------------------------------------- what can be read


def test_the_printed_trainings_are_found():
    shown = {(name_of(each.source), str(each)) for each in PRINTED}
    assert ("docs/first-run.md", "grpo-core train --env math:sort --output runs/sort") in shown
    assert ("README.md", "grpo-core train --env ./examples/shout.py:Shout") in shown
    assert ("examples/train.py", "python examples/train.py") in shown
    assert ("examples/calculator.toml", "grpo-core train examples/calculator.toml") in shown
    assert "plugins/grpo-plugin-math/README.md" in {source for source, _ in shown}


def test_every_configuration_of_the_examples_is_trained_by_a_command():
    named = {word for each in PRINTED for word in each.words}
    configurations = {name_of(path) for path in EXAMPLES if path.suffix == ".toml"}
    assert configurations - named == set()


def test_every_reason_not_to_train_is_needed():
    assert {p for p in NOT_HERE if not any(re.search(p, str(each)) for each in PRINTED)} == set()


def test_the_figures_of_pages_are_read():
    found = {str(each): claimed(each) for each in PRINTED}
    (guess,) = [figures for command, figures in found.items() if "guess.py" in command]
    assert guess.keys() == {"guess"}
    assert 0.5 < guess["guess"] <= 1.0
    curriculum, stages = (figures for command, figures in found.items() if "stages.toml" in command)
    assert curriculum.keys() == stages.keys() == {"easy", "hard"}
    assert curriculum != stages


# ---------------------------------------------------------------------------------- what is run


def prepared(source: Path, directory: Path) -> dict[str, str]:
    """Write the files that a source shows; return the environment variables of its commands."""
    shutil.copytree(ROOT / "examples", directory / "examples")
    for block in blocks(source) if source.suffix == ".md" else ():
        if block.title and not (directory / block.title).exists():
            (directory / block.title).parent.mkdir(parents=True, exist_ok=True)
            (directory / block.title).write_text(block.text)
    if (directory / "pyproject.toml").exists():  # as if it were installed
        project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
        info = directory / f"{project['name'].replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: 1\n")
        points = project["entry-points"]["grpo_core"].items()
        (info / "entry_points.txt").write_text("[grpo_core]\n" + "".join(f"{k} = {v}\n" for k, v in points))
    return {**os.environ, "PYTHONPATH": str(directory), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def ran(words: tuple[str, ...], directory: Path, environ: dict[str, str]) -> str:
    """Run a command as it is printed."""
    program = ["-m", "grpo_core"] if words[0] == "grpo-core" else []
    done = subprocess.run(
        [sys.executable, *program, *words[1:]], cwd=directory, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def measured(run: Path) -> dict[str, tuple[float, float]]:
    """The first and the last value of each task that a run validated."""
    found: dict[str, list[float]] = {}
    for row in Run(run).validations():
        names = [name for name in row if name not in ("step", "task")]
        found.setdefault(row["task"], []).append(row[headline(names)])
    return {task: (values[0], values[-1]) for task, values in found.items()}


def rises(run: Path, figures: dict[str, float]) -> None:
    found = measured(run)
    assert found, f"{run} was not validated"
    for task, (first, last) in found.items():
        assert last > first or last >= 0.99, f"{task}: {first} -> {last}"
        if task in figures:
            assert last >= figures[task] - TOLERANCE, f"{task}: {last}, and the page says {figures[task]}"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_trainings_of_a_page_raise_its_validation(source, tmp_path):
    environ = prepared(source, tmp_path)
    for printed in PRINTED:
        if printed.source != source or why_not(printed):
            continue
        before = set((tmp_path / "runs").glob("*"))
        ran(printed.words, tmp_path, environ)
        (new,) = set((tmp_path / "runs").glob("*")) - before
        rises(new, claimed(printed))


@pytest.mark.slow
def test_the_first_environment_of_the_readme_learns_in_a_few_steps(tmp_path):
    environ = prepared(ROOT / "README.md", tmp_path)
    few = ("--set", "trainer.steps=16", "--output", "runs/shout")
    ran(("grpo-core", "train", "--env", "./examples/shout.py:Shout", *few), tmp_path, environ)
    rises(tmp_path / "runs" / "shout", {})


OLD_SPLIT = """\
        chosen = words[1::2] if split == "train" else words[::100]
"""
"""Training words end in b, d, f or h, and held-out ones in a, c, e or g: no reply learns to end at an A."""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_split_that_unlearns_is_warned_of_and_explained(tmp_path):
    environ = prepared(ROOT / "README.md", tmp_path)
    example = tmp_path / "examples" / "shout.py"
    text = re.sub(r" *random\.Random\(0\).*\n *chosen = .*\n", OLD_SPLIT, example.read_text())
    assert OLD_SPLIT in text
    example.write_text(text)
    words = ("grpo-core", "train", "--env", "./examples/shout.py:Shout", "--output", "runs/old")
    told = ran(words, tmp_path, environ)
    assert "task 'shout': validation" in told
    assert "held_out/shout" in {
        event["cause"] for event in Run(tmp_path / "runs/old").events("WarningRaised")
    }
    assert "(overfitted)" in ran(("grpo-core", "explain", "runs/old"), tmp_path, environ)
