"""Games of TextArena as environments: moves, random state, and refused games."""

import os
import random
import re
import subprocess
import sys

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, finished, make_offer
from grpo_plugin_devkit.environments import check_environment

textarena = pytest.importorskip("textarena", reason="needs TextArena: pip install textarena")

from grpo_plugin_textarena.environment import TextArena  # noqa: E402
from grpo_plugin_textarena.games import Chance, drawing_from  # noqa: E402

OTHER = os.environ.get("GRPO_TEXTARENA_PYTHON", "")


def offered(game, **options):
    return make_offer("environment", f"textarena:{game}", plugins=["textarena"], **options)


class Player:
    """Plays rollouts of an environment, as the core does."""

    def __init__(self, game, **options):
        self.environment = HostedEnvironment(offered(game, **{"size": 6, "validation_size": 2, **options}))
        self.prompts = finished(self.environment.prompts("train"))

    def open(self, *names, prompt=0):
        (*started,) = finished(self.environment.open(dict.fromkeys(names, self.prompts[prompt])))
        assert [one.error for one in started] == [None] * len(names)
        self.talks = {
            **getattr(self, "talks", {}),
            **{name: list(self.prompts[prompt].messages) for name in names},
        }
        self.of = {**getattr(self, "of", {}), **dict.fromkeys(names, self.prompts[prompt])}

    def say(self, name, move, *, turn=0, finish_reason="stop"):
        self.talks[name].append({"role": "assistant", "content": move})
        episode = grpo.Episode(
            prompt=self.of[name],
            messages=self.talks[name],
            turn=turn,
            session=name,
            finish_reason=finish_reason,
        )
        (feedback,) = finished(self.environment.evaluate([episode]))
        self.talks[name] += feedback.messages
        return feedback


def number_of(player, prompt=0):
    """Return the number to guess, which the player does not see."""
    play = player.environment.host._environment.open(player.prompts[prompt])
    return play.game.state.game_state["game_number"]


# ---------------------------------------------------------------------------------- moves and rewards


def test_a_game_is_played_to_its_end_and_pays_its_own_reward():
    player = Player("GuessTheNumber-v0")
    number = number_of(player)
    wrong = 1 if number > 1 else 2
    player.open("a")
    assert "guess the number between 1 and 20" in player.prompts[0].messages[0]["content"]
    first = player.say("a", f"I try [{wrong}]")
    hint = "higher" if wrong < number else "lower"
    assert (first.reward, first.done) == (None, False)
    assert first.messages == ({"role": "user", "content": f"The target number is {hint}."},)
    last = player.say("a", f"<think>not [{wrong}] again</think>[{number}]", turn=1)
    assert (last.reward, last.done) == (1.0, True)
    assert last.metrics == {"won": 1, "finished": 1, "moves": 2, "invalid_move": 0, "broken": 0}


def test_an_invalid_move_is_answered_once_and_ends_the_game_the_second_time():
    player = Player("FrozenLake-v0")
    player.open("a")
    first = player.say("a", "hello")
    assert "invalid move" in first.messages[0]["content"]
    assert "Current Board" in first.messages[0]["content"]
    last = player.say("a", "hello", turn=1)
    assert last.done
    assert (last.metrics["invalid_move"], last.metrics["won"]) == (1, 0)
    assert last.reward < 1


def test_a_game_that_a_limit_ends_has_the_reward_for_it():
    player = Player("GuessTheNumber-v0", unfinished=-0.5, max_turns=2)
    wrong = 1 if number_of(player) > 2 else 19
    player.open("turns", "tokens")
    assert not player.say("turns", f"[{wrong}]").done
    assert player.say("turns", f"[{wrong + 1}]", turn=1).reward == -0.5
    cut = player.say("tokens", f"[{wrong}]", finish_reason="length")
    assert (cut.reward, cut.done, cut.metrics["finished"]) == (-0.5, True, 0)


def test_a_game_that_raises_on_a_move_ends_and_is_counted():
    player = Player("GuessTheNumber-v0")
    player.open("a")
    play = player.environment.host._sessions["a"].value
    del play.game.env.env.guessed_numbers  # a fault of the game
    broken = player.say("a", "[3]")
    assert (broken.reward, broken.done, broken.metrics["broken"]) == (0.0, True, 1)


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "ThreeCardMonte-v0"])
def test_a_game_whose_reward_is_a_text_pays_what_an_unfinished_one_does(game):
    """In TextArena 0.7.4 they exchange the two arguments of ``set_invalid_move``."""
    player = Player(game, unfinished=-0.25)
    player.open("a")
    assert not player.say("a", "x").done
    last = player.say("a", "x", turn=1)
    assert (last.error, last.reward, last.done) == (None, -0.25, True)
    assert (last.metrics["invalid_move"], last.metrics["broken"], last.metrics["finished"]) == (1, 1, 0)


@pytest.mark.parametrize("reward", ["0.5", float("nan"), None])
def test_a_reward_that_is_not_a_number_ends_no_run(reward):
    player = Player("GuessTheNumber-v0", unfinished=0.125)
    number = number_of(player)
    player.open("a")
    state = player.environment.host._sessions["a"].value.game.state
    real = state.set_outcome
    state.set_outcome = lambda *_, **__: real(reward)
    last = player.say("a", f"[{number}]")
    assert (last.error, last.reward, last.done, last.metrics["broken"]) == (None, 0.125, True, 1)


# ---------------------------------------------------------------------------------- chance


def test_what_a_game_draws_does_not_depend_on_other_games():
    moves = ["[left]", "[down]", "[right]", "[down]", "[left]", "[up]"]

    def told(player, names):
        player.open(*names)
        return [[player.say(n, m, turn=t).messages for n in names] for t, m in enumerate(moves)]

    alone = [turn[0] for turn in told(Player("2048-v0"), ["a"])]
    together = told(Player("2048-v0"), ["a", "b", "c"])
    assert all(len({str(each) for each in turn}) == 1 for turn in together), "a group plays one game"
    assert [turn[0] for turn in together] == alone
    other = Player("2048-v0")
    other.open("x", prompt=1)
    assert [other.say("x", m, turn=t).messages for t, m in enumerate(moves)] != alone


def test_a_game_leaves_the_global_random_numbers_as_they_were():
    random.seed(1)
    expected = [random.random() for _ in range(2)]
    random.seed(1)
    found = [random.random()]
    player = Player("2048-v0")
    player.open("a")
    player.say("a", "[left]")
    assert [*found, random.random()] == expected


def test_chance_continues_where_it_was():
    one, other = Chance.of(3), Chance.of(3)
    with drawing_from(one):
        whole = [random.random(), random.random()]
    parts = []
    for _ in range(2):
        with drawing_from(other):
            parts.append(random.random())
        random.random()
    assert parts == whole


@pytest.mark.long
def test_openings_are_different_and_held_out_ones_are_not_trained_on():
    environment = offered("GuessTheNumber-v0", max_number=10)
    train, held_out = ({p.info["position"] for p in environment.prompts(s)} for s in ("train", "validation"))
    assert (len(train), len(held_out)) == (9, 1), "there are ten numbers"
    assert train.isdisjoint(held_out)
    assert {p.answer for p in environment.prompts("train")} == {None}, "a game has no answer"
    again = offered("GuessTheNumber-v0", max_number=10)
    assert again.prompts("train") == environment.prompts("train")
    assert offered("GuessTheNumber-v0", seed=1).prompts("train") != offered("GuessTheNumber-v0").prompts(
        "train"
    )


def test_a_game_that_draws_after_its_opening_has_many_prompts():
    environment = offered("Minesweeper-v0-small", size=5, validation_size=2)
    assert len({p.info["seed"] for s in ("train", "validation") for p in environment.prompts(s)}) == 7


# ---------------------------------------------------------------------------------- the games


@pytest.mark.long
@pytest.mark.parametrize(
    "game",
    [
        "2048",
        "Bandit-v0",
        "Crosswords-v0",
        "FrozenLake-v0",
        "GuessTheNumber-v0",
        "Mastermind-v0",
        "Secretary-v0",
    ],
)
def test_a_game_passes_the_check_of_environments(game):
    check_environment(lambda: TextArena(game, size=8, validation_size=2))


@pytest.mark.parametrize(
    ("game", "why"),
    [
        ("GuessWho", "another model, behind a network"),
        ("TwentyQuestions-v0-hardcore", "another model, behind a network"),
        ("Sokoban-v0-medium", "can take minutes"),
        ("ConnectFour-v0", "not a game for one player"),
        ("PublicGoodsGame-v0", "not a game for one player"),
        ("GuessTheNumbr-v0", "Did you mean 'GuessTheNumber-v0'"),
    ],
)
def test_games_that_cannot_be_trained_on_are_refused(game, why):
    with pytest.raises(grpo.PluginError) as raised:
        offered(game)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("game", ["Hangman-v0", "WordLadder-v0", "WordSearch-v0"])
def test_a_game_that_would_download_words_is_refused_where_they_are_missing(game, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    for module in [name for name in sys.modules if name.startswith(f"textarena.envs.{game[:-3]}")]:
        monkeypatch.delitem(sys.modules, module)
    real = nltk.download
    with pytest.raises(grpo.PluginError, match=r"python -m nltk.downloader words"):
        offered(game)
    assert nltk.download is real


def test_a_game_plays_with_the_words_that_are_on_the_disk(tmp_path, monkeypatch):
    import nltk

    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for file in ("en", "en-basic"):
        (words / file).write_text("\n".join(["apple", "banana", "cherry", "orange", "grape", "lemon"]))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    player = Player("Hangman-v0")
    player.open("a")
    assert not player.say("a", "[e]").done


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python can read it")
def test_a_game_for_a_newer_python_says_so():
    with pytest.raises(grpo.PluginError, match=r"not written for Python 3.11.*environment.python"):
        offered("Klondike-v0")


def test_an_unknown_option_names_those_of_the_game():
    with pytest.raises(grpo.PluginError, match=r"no option 'max_numbr'.*max_number"):
        offered("GuessTheNumber-v0", max_numbr=5)


@pytest.mark.parametrize("options", [{"size": 0}, {"validation_size": 0}, {"max_turns": -1}])
def test_a_number_that_cannot_be_is_refused(options):
    with pytest.raises(grpo.PluginError, match=next(iter(options))):
        offered("GuessTheNumber-v0", **options)


def test_without_textarena_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(grpo.PluginError, match=re.escape("pip install 'textarena>=0.7.4,<0.8'")):
        offered("GuessTheNumber-v0")


@pytest.mark.long
@pytest.mark.skipif(
    not OTHER, reason="needs GRPO_TEXTARENA_PYTHON: a virtual environment with textarena and without torch"
)
def test_games_run_in_a_separate_virtual_environment(tmp_path):
    command = [sys.executable, "-m", "grpo_core", "check", "textarena:GuessTheNumber-v0"]
    told = subprocess.run(
        [*command, "--set", f"environment.python={OTHER}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert told.returncode == 0, told.stdout + told.stderr
    without = subprocess.run([OTHER, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in without.stderr
