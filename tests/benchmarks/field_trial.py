"""Defects of published environments that the field trial of ``grpo-core audit`` confirmed: see docs/audit.md.

    python tests/benchmarks/field_trial.py reasoning_gym
    python tests/benchmarks/field_trial.py textarena
    python tests/benchmarks/field_trial.py nemo_gym

Each line shows a reply, the reward that the library gives to it, and what would be right.  Nothing of
grpo-core is used, so that each library can have a Python of its own; nemo-gym needs 3.12 or newer, and
xmltodict, toml and openapi-schema-validator for two of its servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from statistics import mean
from typing import Any

Line = tuple[str, str, object, str]
"""A name, what is done, the reward, and what it should be."""

GAMES = 100
"""Seeds over which the reward of a constant reply is averaged."""


# ------------------------------------------------------------------------------ reasoning-gym


def reasoning_gym() -> Iterator[Line]:
    import reasoning_gym as library

    def average(task: str, reply: Callable[[dict[str, Any]], str | None], size: int = 200) -> str:
        """Return the mean reward of replies to the task's prompts, and how many get full marks."""
        dataset = library.create_dataset(task, size=size, seed=7)
        replies = [(reply(entry), entry) for entry in dataset]
        rewards = [float(dataset.score_answer(text, entry)) for text, entry in replies if text is not None]
        return f"{mean(rewards):.2f}, full marks {sum(r >= 1 for r in rewards)}/{len(rewards)}"

    def shifted(entry: dict[str, Any]) -> str:
        return json.dumps([str(float(x) + 0.9) for x in json.loads(entry["answer"].replace("'", '"'))])

    def composite(entry: dict[str, Any]) -> str | None:
        held = entry["metadata"]
        return str(held["number"]) if len(held["factors"]) > 1 else None

    def filled(entry: dict[str, Any]) -> str:
        return "\n".join(" ".join(str(cell or 1) for cell in row) for row in entry["metadata"]["puzzle"])

    def both(entry: dict[str, Any]) -> str:
        name, first, second = re.findall(r'like: "(\w+) is an? (\w+)/(\w+)', entry["question"])[0]
        return f"{name} is a {first}, and {name} is a {second}"

    def by_form(entry: dict[str, Any]) -> str:
        days = {"date": "50 days", "datetime": "50 days, 12:00", "datetime_tz": "50 days, 12:00"}
        return days.get(entry["metadata"]["task_type"], "12:00")

    yield "number_sorting", "each number 0.9 too large", average("number_sorting", shifted), "0"
    yield "prime_factorization", "the number itself", average("prime_factorization", composite), "0"
    yield "mini_sudoku", "the puzzle with 1 in each blank", average("mini_sudoku", filled, 60), "about 0"
    yield "sudoku", "the puzzle with 1 in each blank", average("sudoku", filled, 30), "about 0"
    yield "knights_knaves", "'A is a knight, and A is a knave'", average("knights_knaves", both), "0"
    yield "time_intervals", "one constant for each form", average("time_intervals", by_form), "about 0"
    yield "rectangle_count", "'5'", average("rectangle_count", lambda entry: "5", 100), "about 0.1"
    wrong = average("gcd", lambda entry: None if entry["answer"] == "12" else "12")
    yield "gcd", "'12', where it is wrong", wrong, "0"
    yield "polynomial_equations", "'0'", average("polynomial_equations", lambda entry: "0", 300), "about 0"


# ------------------------------------------------------------------------------ TextArena


Moves = Callable[[Any], Iterable[str]]


def played(name: str, moves: Moves, seed: int = 1) -> object:
    """Return the reward of a game, or what it raises; ``moves`` gets the game and gives the replies."""
    library = importlib.import_module("textarena")
    game = library.make(f"{name}-raw")
    game.reset(num_players=1, seed=seed)
    inner = game
    while hasattr(inner, "env"):
        inner = inner.env
    with contextlib.redirect_stdout(io.StringIO()):
        for move in moves(inner):
            try:
                done, _ = game.step(move)
            except Exception as error:
                return f"raises {type(error).__name__}: {error}"
            if done:
                return game.state.rewards[0]
    return "not over"


def always(move: str) -> Moves:
    return lambda game: [move] * 300


def average_game(name: str, moves: Moves) -> str:
    return f"{mean(float(str(played(name, moves, seed))) for seed in range(GAMES)):.2f}"


def bandit(place: int) -> Moves:
    def moves(game: Any) -> list[str]:
        chances = game.state.game_state["ground_truth"]
        return ["[red]"] * 20 + [f"[{sorted(chances, key=chances.get)[place]}]"]

    return moves


def dithering(game: Any) -> Iterator[str]:
    """Give seven of eight letters any digit, then change one to and fro."""
    yield from (f"[{letter} {digit}]" for letter, digit in zip("SENDMOR", "9876543", strict=True))
    yield from ["[R 2]", "[R 3]"] * 60


def into_a_hole(game: Any) -> Iterator[str]:
    """Walk straight into the hole that is farthest from the start."""
    grid, ways = game.state.game_state["grid"], {game.player_pos: ()}
    frontier, deaths = [game.player_pos], []
    while frontier:
        place = frontier.pop(0)
        for name, (down, right) in game.actions.items():
            there = place[0] + down, place[1] + right
            if there in ways or not all(0 <= x < game.size for x in there):
                continue
            ways[there] = (*ways[place], f"[{name}]")
            if grid[there[0]][there[1]] == "H":
                deaths.append(ways[there])
            elif grid[there[0]][there[1]] == " ":
                frontier.append(there)
    yield from max(deaths, key=len)


def mines_first(game: Any) -> Iterator[str]:
    """Step on a mine before each step on a safe cell."""
    yield "[0 0]"
    while True:
        cells = [(r, c) for r in range(game.rows) for c in range(game.cols)]
        mines = [(r, c) for r, c in cells if game.grid[r][c] == -1]
        safe = [(r, c) for r, c in cells if game.grid[r][c] != -1 and not game.revealed[r][c]]
        yield from (f"[{r} {c}]" for r, c in [mines[0], safe[0]])


def all_crossed(game: Any) -> list[str]:
    marks = [f"[{r} {c} X]" for grid in game.game_board.values() for r, row in grid.items() for c in row]
    return [" ".join(marks)] * 3


def one_from_solved(game: Any) -> list[str]:
    game.board[:] = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, None, 15]]
    return ["[left]"]


def lost_with_half(game: Any) -> list[str]:
    """Leave a board without a further move, whose largest tile is 1024, after one merge."""
    game.state.game_state["board"][:] = [[1024, 2, 8, 16], [2, 8, 16, 32], [8, 16, 32, 64], [16, 32, 4, 4]]
    game.state.game_state["score"] = 9300
    return ["[left]"] * 3


def solvable() -> str:
    """Count the openings of the 15 puzzle that can be solved at all: those of even parity."""
    library, count = importlib.import_module("textarena"), 0
    for seed in range(GAMES):
        game = library.make("FifteenPuzzle-v0-raw")
        game.reset(num_players=1, seed=seed)
        tiles = [tile or 16 for row in game.state.game_state["board"] for tile in row]
        pairs = sum(tiles[i] > tiles[j] for i in range(16) for j in range(i + 1, 16))
        blank = tiles.index(16)
        count += (pairs + (3 - blank // 4) + (3 - blank % 4)) % 2 == 0
    return f"{count} of {GAMES} can be solved"


def textarena() -> Iterator[Line]:
    yield "Set-v0", "'[1, 1, 1]' in each of 20 turns", played("Set-v0", always("[1, 1, 1]")), "0"
    yield "Set-v0", "'[12, 12, 12]'", played("Set-v0", always("[12, 12, 12]")), "an invalid move"
    for place, what in ((-1, "best"), (-2, "second best"), (0, "worst")):
        yield (
            "Bandit-v0",
            f"the {what} button at the end",
            played("Bandit-v0", bandit(place)),
            "more if better",
        )
    for name in ("Countdown-v0", "Cryptarithm-v0", "ThreeCardMonte-v0", "Slitherlink-v0"):
        yield name, "'x' twice", repr(played(name, always("x"))), "a number"
    yield "Countdown-v0", "'[0 1 -]' five times", played("Countdown-v0", always("[0 1 -]")), "about 0"
    yield "Cryptarithm-v0", "7 of 8 letters anyhow, no end", played("Cryptarithm-v0", dithering), "0"
    yield "2048-v0", "lost with a tile of 1024", played("2048-v0", lost_with_half), "below 1"
    yield "FifteenPuzzle-v0", "the move that solves it", played("FifteenPuzzle-v0", one_from_solved), "1"
    yield "FifteenPuzzle-v0", "openings", solvable(), "all"
    yield "PegJump-v0", "'[11 13]', a jump over 12", jumped("[11 13]"), "13 left"
    yield "PegJump-v0", "'[7 13]', over 11 and round a corner", jumped("[7 13]"), "invalid, 14 left"
    lake = max(float(str(played("FrozenLake-v0", into_a_hole, seed))) for seed in range(12))
    yield "FrozenLake-v0", "into a hole, the best of 12 games", round(lake, 2), "0"
    yield "GuessTheNumber-v0", "'[10]' always", average_game("GuessTheNumber-v0", always("[10]")), "about 0"
    yield "Mastermind-v0", "'[1 2 3 4]' always", average_game("Mastermind-v0", always("[1 2 3 4]")), "about 0"
    yield "LogicPuzzle-v0", "X in each cell", played("LogicPuzzle-v0", all_crossed), "about 0"
    yield (
        "Minesweeper-v0-small",
        "a mine before each safe cell",
        played("Minesweeper-v0-small", mines_first),
        "0",
    )


def jumped(move: str) -> str:
    """Return the number of pegs after a jump into hole 13, the only empty one."""
    game = importlib.import_module("textarena").make("PegJump-v0-raw", initial_empty=13)
    game.reset(num_players=1, seed=0)
    game.step(move)
    return f"{game.state.game_state['board'].count(True)} left"


# ------------------------------------------------------------------------------ NeMo Gym


def verified(server: str, row: dict[str, Any], *said: Any) -> Any:
    """Return the reward that the class of a resources server gives; a text is a message, a pair is a call."""
    module = importlib.import_module(f"resources_servers.{server}.app")
    base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
    kinds: list[Any] = [
        kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base)
    ]
    kind = next(kind for kind in reversed(kinds) if kind.__module__ == module.__name__)
    common = {"host": "", "port": 0, "entrypoint": "app.py", "name": server, "domain": "other"}
    more = {"tool_call_comparator_config": {"word_count_similarity_threshold": 0.5}}
    config = kind.model_fields["config"].annotation.model_validate(common | more)
    items = [message(each) if isinstance(each, str) else call(*each) for each in said]
    response = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": items}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    body = {
        "responses_create_params": {"input": [{"role": "user", "content": ""}]},
        **row,
        "response": response,
    }
    wanted = next(
        value for key, value in inspect.get_annotations(kind.verify, eval_str=True).items() if key == "body"
    )
    server_of_it = kind.model_construct(config=config)
    return asyncio.run(server_of_it.verify(body=wanted.model_validate(body))).reward


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}


def nemo_gym() -> Iterator[Line]:
    yield from structured()
    haystack = "One of the magic numbers is: 7301924. What is the number? "
    number = {"outputs": ["7301924"], "length": 100, "subset": "niah_single_1"}
    yield "ruler", "the prompt copied", verified("ruler", number, haystack), "0"
    yield (
        "ruler",
        "'I do not know.' where the answer is no",
        verified("ruler", {**number, "outputs": ["no"], "subset": "qa_1"}, "I do not know."),
        "0",
    )
    for text in ("anything but Ed Wood", "Paris or Ed Wood"):
        reply = json.dumps({"answer": text})
        yield "hotpotqa_qa", repr(text), verified("hotpotqa_qa", {"expected_answer": "Ed Wood"}, reply), "0"
    rows = {"expected_answers": [{"name": "f", "arguments": {"n": 1}}]}
    yield (
        "xlam_fc",
        "f(n=1, delete=True), for f(n=1)",
        verified("xlam_fc", rows, ("f", {"n": 1, "delete": True})),
        "0",
    )
    single = "single_step_tool_use_with_argument_comparison"
    expected = {"expected_action": {"type": "message", "content": "Which event?"}}
    yield single, "'.', where a message is expected", verified(single, expected, "."), "0"
    options = {"options": [{"A": "5"}, {"B": "12"}], "expected_answer": "A", "grading_mode": "lenient_boxed"}
    yield "mcqa", r"\boxed{15}, for the option '5'", verified("mcqa", options, r"\boxed{15}"), "0"
    strict = {**options, "grading_mode": "strict_single_letter_boxed"}
    changed = r"Perhaps \boxed{B}? No: \boxed{A}"
    yield "mcqa", repr(changed) + ", for A", verified("mcqa", strict, changed), "1"


def structured() -> Iterator[Line]:
    """Yield the lines about servers that judge JSON, CSV and so on."""
    text, server = {"type": "string"}, "structured_outputs"
    record = {"type": "object", "properties": {"name": text, "nickname": text}, "required": ["name"]}
    rows: dict[str, Any] = {"schema_str": json.dumps(record), "schema_type": "json"}
    yield server, "JSON without an optional field", verified(server, rows, '{"name": "Ada"}'), "1"
    empty = '{"name": "", "nickname": ""}'
    yield server, "each field empty, whatever the document says", verified(server, rows, empty), "0"
    table = {"schema_str": json.dumps({"type": "array", "items": record}), "schema_type": "csv"}
    yield server, "CSV: 'I do not know.'", verified(server, table, "I do not know."), "0"
    right = verified(server, {**rows, "schema_type": "csv"}, "name,nickname\nAda,A")
    yield server, "CSV, right, for a schema of an object", right, "1"
    server, row = (
        "structeval",
        {"task_id": "1", "task_name": "t", "input_type": "Text", "output_type": "JSON"},
    )
    asked = {**row, "raw_output_metric": ["person.name", "person.motto"]}
    for motto, should in (("Onwards", "1"), ('"Onwards"', "1"), (None, "0")):
        reply = json.dumps({"person": {"name": "Ada", "motto": motto}})
        yield server, f"JSON with the motto {motto!r}", verified(server, asked, reply), should


def main(library: str) -> None:
    for name, what, reward, should in globals()[library]():
        print(f"{name:22} {what:48} {reward!s:>10}   (right: {should})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] not in (["reasoning_gym"], ["textarena"], ["nemo_gym"]):
        sys.exit(__doc__)
    main(sys.argv[1])
