"""Small random faults in the core: how many of them do the tests find?

    python tests/benchmarks/bench_mutation_score.py [MODULE ...] [--mutants 60] [--seed HASH] [--only 3 17]

``bench_mutants.py`` has faults that somebody thought of.  Here they are drawn at random: a comparison, a
sign, a constant, a condition, a removed statement, a returned value, two arguments in the other order.  The
seed is the hash of the commit before the tests were written, so that nobody chooses the faults.  Each mutant
is written into a copy of the repository and is killed by the tests that import its module or name its
function, the nearest first, or by the simulation.  Those that survive are printed: each is a missing test, or
changes nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent.parent
SIMULATED = 60
"""Seeds of the simulation that a mutant must survive."""
SOURCE_TESTS = {
    "size",
    "layers",
    "public_api",
    "mutants",
    "packaging",
    "wheels",
    "suite",
    "documented_commands",
}
"""Tests that read the source itself, or install it: a mutant is written without comments."""
COMMON = 12
"""A name that more test files have says nothing about what they test."""
FARTHEST = 2
"""How many imports may lie between a test and the module of a mutant."""

OTHER: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LEFT_OUT = {"annotation", "returns", "type_params", "decorator_list", "bases"}
"""Fields that say nothing about what the code computes."""


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each mutant of a module: its line, what was changed, and its source."""
    tree = ast.parse(source)
    for owner, field, place in list(_places(tree)):
        node = getattr(owner, field) if place is None else getattr(owner, field)[place]
        for changed in _changes(node):
            before = _text(node, owner)
            _put(owner, field, place, changed)
            line = getattr(node, "lineno", getattr(owner, "lineno", 0))
            yield line, f"{before}  ->  {_text(changed, owner)}", ast.unparse(tree)
            _put(owner, field, place, node)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    for field, value in ast.iter_fields(node):
        if field in LEFT_OUT:
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.ImportFrom
            ):
                continue  # messages are for people
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # a check of our own code
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield node, field, place if isinstance(value, list) else None
            yield from _places(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node; its operators and constants are separate nodes."""
    if type(node) in OTHER:
        yield OTHER[type(node)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.copy_location(ast.Constant(not node.value), node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.copy_location(ast.Constant(node.value + 1), node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.copy_location(ast.Return(ast.Constant(None)), node)
    elif _removable(node):
        yield ast.copy_location(ast.Pass(), node)
    elif (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not any(map(_stays, [node.func, *node.args[:2]]))
    ):
        changed = copy.copy(node)
        changed.args = [node.args[1], node.args[0], *node.args[2:]]
        yield changed


def _removable(node: ast.AST) -> bool:
    """Whether a module still compiles, and its names exist, without this statement."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield)
    return isinstance(node, ast.AugAssign)


def _stays(argument: ast.expr) -> bool:
    """Whether arguments are not exchanged: several at once, words for people, and where it says the same."""
    if ast.unparse(argument) in ("min", "max", "math.isclose"):
        return True
    words = isinstance(argument, ast.Constant) and " " in str(argument.value)
    return words or isinstance(argument, ast.Starred | ast.JoinedStr)


def _put(owner: ast.AST, field: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(owner, field, node)
    else:
        getattr(owner, field)[place] = node


def _text(node: ast.AST, owner: ast.AST) -> str:
    shown = owner if isinstance(node, ast.operator | ast.boolop | ast.cmpop) else node
    return ast.unparse(shown).splitlines()[0][:100]


@cache
def _imported(file: Path) -> frozenset[str]:
    """Every module of the core that a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name.startswith("grpo_core."))


def tests_near(module: str, names: Sequence[str]) -> list[list[str]]:
    """The test files near a module: those that import it or name the function, then groups farther away."""
    name = "grpo_core." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]
    files = [file for file in files if file.stem.removeprefix("test_") not in SOURCE_TESTS]
    files.sort(key=lambda file: file.stat().st_size)
    naming = [[file for file in files if re.search(rf"\b{word}\b", file.read_text())] for word in names]
    named = [file for some in naming if len(some) <= COMMON for file in some]
    groups: list[list[str]] = []
    targets, seen = {name}, set[Path]()
    for _ in range(FARTHEST + 1):
        near = [file for file in files if _imported(file) & targets] + named
        groups.append([str(file.relative_to(ROOT)) for file in dict.fromkeys(near) if file not in seen])
        seen |= set(near)
        targets |= {
            "grpo_core." + ".".join(file.relative_to(ROOT / "grpo_core").with_suffix("").parts)
            for file in ROOT.glob("grpo_core/**/*.py")
            if _imported(file) & targets
        }
    return groups


def names_around(source: str, line: int) -> list[str]:
    """The public functions and classes that a line of a module lies in."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or 0)]
    return [node.name for node in around if not node.name.startswith("_")]


def killer(tree: Path, module: str, line: int, source: str, seconds: float) -> str:
    """The test that fails with this source of a module, in a copy of the repository; empty if none does."""
    path = tree / "grpo_core" / module
    original = path.read_text()
    near, *farther = tests_near(module, names_around(original, line))
    path.write_text(source)
    try:
        commands = [_pytest(near, "not slow and not nightly and not long and not gpu")]
        commands.append([sys.executable, "-m", "simulation.runs", "--quiet", "--seeds", str(SIMULATED)])
        commands.append(_pytest(near, "(slow or long) and not nightly and not gpu"))
        commands += [_pytest(files, "not slow and not nightly and not long and not gpu") for files in farther]
        return next(filter(None, (_failure(command, tree, seconds) for command in commands)), "")
    finally:
        path.write_text(original)


def _pytest(files: Sequence[str], marks: str) -> Sequence[str]:
    options = ["-xq", "-n0", "-m", marks, "-p", "no:cacheprovider", "--timeout=120"]
    return [sys.executable, "-m", "pytest", *options, *files] if files else []


def _failure(command: Sequence[str], tree: Path, seconds: float) -> str:
    if not command:
        return ""
    paths = [str(tree), str(tree / "tests"), *map(str, sorted(tree.glob("plugins/*")))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "" if "pytest" in command else "the simulation hangs"
    if process.returncode in (0, 5):  # 5: no test has these marks
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
    return failed[1] if failed else f"{command[2]}, status {process.returncode}: {output.strip()[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="as loop/buffer.py; all without any")
    parser.add_argument(
        "--mutants", type=int, default=60, help="how many are drawn, from all modules together"
    )
    parser.add_argument("--seed", default="0", help="any text, as the hash of a commit")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="one group of tests that takes longer passes"
    )
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers of drawn mutants; the others are not run"
    )
    parser.add_argument("--at-once", type=int, default=1)
    given = parser.parse_args()
    core = ROOT / "grpo_core"
    modules = given.modules or sorted(str(path.relative_to(core)) for path in core.glob("**/*.py"))
    every = [(module, *mutant) for module in modules for mutant in mutants((core / module).read_text())]
    drawn = sorted(random.Random(given.seed).sample(every, min(given.mutants, len(every))))
    print(f"{len(drawn)} of {len(every)} mutants, seed {given.seed}", flush=True)
    chosen = range(len(drawn)) if given.only is None else given.only
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.at_once) as threads:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.at_once):
            tree = Path(scratch, str(number))
            shutil.copytree(
                ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
            )
            trees.put(tree)

        def judge(number: int) -> bool:
            module, line, what, source = drawn[number]
            tree = trees.get()
            by = killer(tree, module, line, source, given.seconds)
            trees.put(tree)
            print(
                f"{number:3} {'killed  ' if by else 'SURVIVES'}  {module}:{line}: {what}  [{by}]", flush=True
            )
            return bool(by)

        survivors = sum(not dead for dead in threads.map(judge, chosen))
    print(f"{'random mutants killed, of ' + str(len(chosen)):60} {len(chosen) - survivors:10}  >= 95%")
    return 1 if survivors > 0.05 * len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
