"""Small random faults in the pure core and the pipeline: how many of them do the tests find?

    python tests/benchmarks/bench_mutation_score.py [MODULE ...] [--mutants 160] [--seed 0]

``bench_mutants.py`` has faults that somebody thought of.  Here they are drawn at random: a comparison, a
constant, an operator, a condition, a removed statement, two arguments in the other order.  Each mutant is a
copy of the package with one of them, and is killed by the tests of its module or by the simulation.  Those
that survive are printed: each is a missing test, or changes nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "grpo_core"
SIMULATED = 60
"""Seeds of the simulation that a mutant of the loop must survive."""
TESTS: dict[str, list[str]] = {
    "loop/buffer.py": ["buffer", "pipeline", "simulation"],
    "loop/advantages.py": ["advantages"],
    "loop/rows.py": ["rollout", "pipeline"],
    "loop/canary.py": ["canary"],
    "loop/dynamic.py": ["dynamic_sampling"],
    "loop/health.py": ["health"],
    "loop/laws.py": ["laws", "simulation"],
    "loop/metrics.py": ["metrics"],
    "loop/meter.py": ["meter", "pipeline"],
    "loop/pipeline.py": ["pipeline", "canary", "validation_beside_training", "simulation"],
    "loop/rollout.py": ["rollout", "turns", "pipeline", "simulation"],
    "loop/turns.py": ["turns", "rollout", "simulation"],
    "training/batching.py": ["batching"],
    "training/logprobs.py": ["logprobs"],
    "contracts/loss.py": ["loss", "losses"],
    **{
        f"losses/{module}.py": ["losses_as_trl", "losses_as_nemo", "losses"]
        for module in ("aggregation", "corrections", "kl", "named", "objectives", "ratios", "terms")
    },
    "contracts/tokens.py": ["tokens", "columns", "turns"],
}
"""Tests of each module by name, ``tests/test_NAME.py``, or the simulation; the quickest comes first."""

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
    """Yield what may stand in the place of a node; its operators and constants are nodes of their own."""
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


def killed(module: str, source: str, tests: Sequence[str], seconds: float) -> bool:
    """Whether one of the tests fails with this source of a module, or hangs."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(PACKAGE, Path(scratch) / "grpo_core")
        (Path(scratch) / "grpo_core" / module).write_text(source)
        paths = [scratch, str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        return any(_fails(_command(test), scratch, environ, seconds) for test in tests)


def _command(test: str) -> Sequence[str]:
    if test == "simulation":
        return [sys.executable, "-m", "simulation.runs", "--quiet", "--seeds", str(SIMULATED)]
    file = str(ROOT / "tests" / f"test_{test}.py")
    return [sys.executable, "-m", "pytest", "-xq", "-m", "not slow", "-p", "no:cacheprovider", file]


def _fails(command: Sequence[str], cwd: str, environ: dict[str, str], seconds: float) -> bool:
    try:
        return bool(
            subprocess.run(command, cwd=cwd, env=environ, capture_output=True, timeout=seconds).returncode
        )
    except subprocess.TimeoutExpired:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="as loop/buffer.py")
    parser.add_argument(
        "--mutants", type=int, default=160, help="how many are drawn, from all modules together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="a test that takes longer hangs")
    given = parser.parse_args()
    known = {module: list(mutants((PACKAGE / module).read_text())) for module in given.modules}
    every = [(module, *mutant) for module, some in known.items() for mutant in some]
    drawn = random.Random(given.seed).sample(every, min(given.mutants, len(every)))
    for test in sorted({test for module in given.modules for test in TESTS[module]}):
        if killed("contracts/loss.py", (PACKAGE / "contracts/loss.py").read_text(), [test], given.seconds):
            raise SystemExit(f"{test}: it fails, or takes too long, without any mutant")
    print(f"{len(drawn)} of {len(every)} mutants", flush=True)
    survivors = 0
    for module, line, what, source in sorted(drawn):
        dead = killed(module, source, TESTS[module], given.seconds)
        survivors += not dead
        print(f"{'killed  ' if dead else 'SURVIVES'}  {module}:{line}: {what}", flush=True)
    print(f"{'random mutants killed, of ' + str(len(drawn)):60} {len(drawn) - survivors:10}  >= 95%")
    return 1 if survivors > 0.05 * len(drawn) else 0


if __name__ == "__main__":
    sys.exit(main())
