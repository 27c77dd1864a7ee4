"""Writes docs/catalogue.md: the formats of environments that this repository takes, and what each needs.

    python docs/_catalogue.py

Each entry is a table ``[[tool.grpo-core.catalogue]]`` in the ``pyproject.toml`` of the distribution that
offers it, so a plugin describes itself; nothing is imported or asked.  ``docs/tested.json`` has what was seen
with the real libraries, by ``env``: each value has the keys ``SEEN``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTED = Path(__file__).with_name("tested.json")
PAGE = ROOT / "docs" / "catalogue.md"
GITHUB = "https://github.com/grpo-core/grpo-core/blob/main/plugins"

KEYS = ("format", "env", "library", "license", "offline", "check")
"""Keys of an entry, all of which are texts."""

SEEN = ("version", "tests", "agreement", "check")
"""Keys of what was seen with a real library, all of which are texts."""

HEAD = """\
# Environments

An environment that exists already needs no new code: the column `env` shows how a task names it.
`grpo-core plugins` lists what is installed on a machine.

* *Library* is the version that the tests run against; its licence follows.
* *Offline* says what a run needs besides the installed packages. No format asks a hub or a service by itself.
* *Check* is a command that passes without anything else, or says what such a check needs.

| format | `env` | install | library | licence | offline | check |
|---|---|---|---|---|---|---|
"""

SEEN_HEAD = """\

## Against the real libraries

What the tests saw when the libraries themselves were there. None of these needs a line of the user's code: a
table of the task names the environment. The versions are those that were installed; a test of an adapter that
needs no library counts, too.

| format | library | lines of code | licence | offline | tests | agreement | `grpo-core check` |
|---|---|---|---|---|---|---|---|
"""

RECORDED = """\

## Recorded rollouts of NeMo Gym

The wheel of nemo-gym 0.4.0 has 450 recorded rollouts with a reward, of 90 files; `bench_nemo_gym.py`
replays them at its own servers, without a model, a service or a network other than a package index:

| | recordings |
|---|---|
| the recorded reward comes out | 198, of 43 servers |
| the server asks a model, a judge, that is not there | 71 |
| the server needs code or data from a network | 70 |
| the wheel lacks the row of the recording, its fields, or the prompt | 40 |
| no answer in time (20 or 60 s), or no start (40 or 90 s), while other programs used both cores | 26 |
| the server needs a service or a sandbox whose address is not set | 15 |
| the prompt has images, which the plugin refuses | 10 |
| the server misses a further package or file (google_search, cvdp) | 10 |
| chance: blackjack deals other cards at each start | 5 |
| another reward (verifif 3, math_with_code 1, swerl_gen 1) | 5 |

The figures join several replays, since faults of the benchmark that the first one showed were mended, and
packages that servers name were installed. Servers that these changes did not concern were replayed once.
One of the five games of grl_tetris had another reward in one of two replays.
"""

FOOT = """\

A library whose requirements do not fit to those of the trainer lives in an interpreter of its own:
`tasks.NAME.python` names it ([Plugins](plugins.md#an-interpreter-of-its-own)). Servers run by themselves, in
any Python; an adapter asks one on another machine only if its option `remote` allows it.

## Five formats in one run

    grpo-core train examples/five_formats.toml

The tiny model of 90,000 parameters trains on five tasks at once, on a CPU, with the sampler `curriculum`:
150 steps of 20 prompts, 8 replies each. Validation before the first step and after the last, with 95%
intervals, for seeds 0 and 1 (`--set seed=1`):

| task | `env` | measured | seed | before | after |
|---|---|---|---|---|---|
| sort | `math:sort` | accuracy | 0 | 63.5% (56.5 to 70.0) | **89.0%** (85.0 to 93.0) |
| | | | 1 | 69.5% (62.5 to 76.0) | **87.5%** (83.0 to 92.0) |
| blackjack | `gym:Blackjack-v1` | reward | 0 | -1.32 (-1.40 to -1.24) | **-0.24** (-0.37 to -0.12) |
| | | | 1 | -1.12 (-1.23 to -1.00) | **-0.24** (-0.37 to -0.12) |
| maximum | `compose` | accuracy | 0 | 97% (93 to 100) | 96% (92 to 99) |
| | | | 1 | 95% (90 to 99) | 98% (95 to 100) |
| repeated | `trl:FILE:FUNCTION` | reward | 0 | 0.11 (0.05 to 0.16) | 0.14 (0.06 to 0.25) |
| | | | 1 | 0.13 (0.07 to 0.20) | 0.18 (0.12 to 0.24) |
| sums | `reasoning_gym:chain_sum` | accuracy | 0 | 0% (20 prompts) | 5% (0 to 15) |
| | | | 1 | 5% (0 to 15) | 5% (0 to 15) |

Two tasks are learnt: *sort*, and *blackjack*, in which the model learns to answer with an action, and then
almost always stands. *Maximum* is solved by the warm start. *Repeated*, which has no demonstrations, and
*sums* do not move beyond their intervals. The run with seed 0 took 97 seconds in all, on two cores that
other programs used, too. It warns that held-out prompts of *blackjack* are trained on: other seeds deal
other cards, but most begin with the same words.

(Written by `python docs/_catalogue.py` from the `pyproject.toml` of each distribution and from
`docs/tested.json`.)
"""


def page() -> str:
    """The whole page."""
    offered = "".join(_row(name, entry) for name, entry in entries())
    return HEAD + offered + SEEN_HEAD + "".join(map(_seen_row, seen())) + RECORDED + FOOT


def seen() -> Iterator[dict[str, str]]:
    """Yield entries with what was seen.  Raises ValueError for what no entry offers, or a wrong key."""
    offered = {entry["env"]: entry for _, entry in entries()}
    for env, found in json.loads(TESTED.read_text(encoding="utf-8")).items():
        if env not in offered or tuple(found) != SEEN:
            raise ValueError(f"{TESTED}: {env} has to be offered, and to have the keys {', '.join(SEEN)}")
        yield {**offered[env], **found}


def entries() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield distributions with their entries, those of the core first.  Raises ValueError for a wrong one."""
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        described = tomllib.loads(path.read_text(encoding="utf-8"))
        name = described["project"]["name"]
        for entry in described.get("tool", {}).get("grpo-core", {}).get("catalogue", ()):
            if tuple(entry) != KEYS or not all(isinstance(value, str) for value in entry.values()):
                raise ValueError(
                    f"{path}: an entry of the catalogue has the keys {', '.join(KEYS)}, in this order"
                )
            yield name, entry


def offers_environments(described: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a distribution's modules implement the hook of environments."""
    modules = described.get("project", {}).get("entry-points", {}).get("grpo_core", {}).values()
    return any("def grpo_environments" in (folder / name / "__init__.py").read_text() for name in modules)


def _row(name: str, entry: Mapping[str, str]) -> str:
    install = "built in" if name == "grpo-core" else f"[`{name}`]({GITHUB}/{name}/README.md)"
    env, check = f"`{entry['env']}`", entry["check"]
    cells = [entry["format"], env, install, entry["library"], entry["license"], entry["offline"], check]
    return f"| {' | '.join(cells)} |\n"


def _seen_row(row: Mapping[str, str]) -> str:
    named = (f"`{row['env']}`", row["version"], "0", row["license"], row["offline"])
    return f"| {' | '.join([*named, *(row[key] for key in SEEN[1:])])} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
