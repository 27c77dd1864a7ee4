"""The path of a reader from ``grpo-core train`` to the first token: three files below the command."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import grpo_core

PACKAGE = Path(grpo_core.__file__).parent
COMMAND = "commands/running.py"
PATH = [
    (COMMAND, "train"),
    ("app/build.py", "train"),
    ("loop/pipeline.py", "Pipeline.run"),
    ("loop/pipeline.py", "Pipeline._run"),
    ("loop/pipeline.py", "Pipeline._collect"),
    ("loop/pipeline.py", "Pipeline._play_group"),
    ("loop/rollout.py", "play"),
    ("loop/rollout.py", "_Turns.play"),
    ("loop/rollout.py", "_Turns._play_part"),
    ("loop/rollout.py", "_Turns._reply"),
    ("loop/rollout.py", "_Turns._complete"),
    ("loop/rollout.py", "_Turns._generate"),
]
"""Each function calls the next one; the last one asks the engine by ``completed``, which players share."""
BUILT = [
    ("app/build.py", "train"),
    ("app/build.py", "started"),
    ("app/build.py", "_connected"),
]
"""The way to the pipeline, whose ``run`` is called; the last one calls ``Pipeline``."""


def source(file):
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def function(file, name):
    """The function of a module, or the method of one of its classes."""
    node = source(file)
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", "") == part)
    return node


def called(node):
    """The names of what a function calls or starts as a task, without what they belong to."""
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return {
        each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
        for each in calls
    }


def imported(file):
    """The modules of ours that a file imports, as files."""
    nodes = [each for each in ast.walk(source(file)) if isinstance(each, ast.ImportFrom)]
    names = [(each.module or "", alias.name) for each in nodes for alias in each.names]
    modules = {name for module, alias in names for name in (module, f"{module}.{alias}")}
    return {name.removeprefix("grpo_core.").replace(".", "/") + ".py" for name in modules}


def links(path, end):
    """Pairs of a function and the name that it has to call."""
    return [*zip(path, [name.rpartition(".")[2] for _, name in path[1:]], strict=False), (path[-1], end)]


def broken(path, end):
    """Where one function of a path does not call the next one, or its file does not import the next one's."""
    calls = [
        f"{file}: {name} does not call {following}"
        for (file, name), following in links(path, end)
        if following not in called(function(file, name))
    ]
    files = list(dict.fromkeys(file for file, _ in path))
    return calls + [
        f"{above} does not import {below}"
        for above, below in itertools.pairwise(files)
        if below not in imported(above)
    ]


def test_each_function_on_the_way_to_the_first_token_calls_the_next_one():
    assert broken(PATH, "completed") == []
    assert "generate" in called(function("contracts/playing.py", "completed")), (
        "the engine is asked there, and no further"
    )


def test_the_pipeline_that_runs_is_built_in_the_same_file():
    assert broken(BUILT, "Pipeline") == []
    assert {file for file, _ in BUILT} == {"app/build.py"}


def test_a_reader_opens_three_files():
    assert len({file for file, _ in PATH} - {COMMAND}) <= 3
    assert len(PATH) <= 12


def test_a_path_with_a_gap_is_seen():
    assert broken([PATH[0], PATH[3]], "run")[0] == "commands/running.py: train does not call _run"
