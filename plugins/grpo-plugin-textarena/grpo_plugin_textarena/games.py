"""Loads games of TextArena, and refuses unsuitable ones.

TextArena's games draw from the global generators of ``random`` and numpy.  Many games run interleaved in one
process, so each has a separate random state to be independent of the others.

The list of refused games was measured with TextArena 0.7.4; the tests of this plugin measure it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define

import grpo_core as grpo

INSTALL = "pip install 'textarena>=0.7.4,<0.8'"

REFUSED: Mapping[str, str] = {
    "GuessWho": "another model, behind a network, answers its questions",
    "Sokoban": "making one of its boards can take minutes",
    "TwentyQuestions": "another model, behind a network, answers its questions",
}
"""Names of refused games without version, with reasons."""

MORE = "textarena:{} is refused: it is not a game for one player"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACES = ("corpora/{}", "corpora/{}.zip", "taggers/{}", "taggers/{}.zip", "tokenizers/{}")
"""Relative paths of nltk's downloads."""
States = tuple[Any, Any]
"""States of the generators of ``random`` and numpy; None without numpy."""


@define(eq=False)
class Chance:
    """The random state of one game, which continues from turn to turn."""

    states: States

    @classmethod
    def of(cls, seed: int) -> Chance:
        with _restored():
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)
            return cls(_states())


@contextlib.contextmanager
def drawing_from(chance: Chance) -> Iterator[None]:
    """Swap this state into the global generators during the block."""
    with _restored():
        _set(chance.states)
        try:
            yield
        finally:
            chance.states = _states()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = _states()
    try:
        yield
    finally:
        _set(before)


def _states() -> States:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _set(states: States) -> None:
    ours, of_numpy = states
    random.setstate(ours)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


@define(eq=False)
class Play:
    """A running game."""

    game: Any
    chance: Chance
    opening: str
    """The first text for the player."""
    position: str
    """A digest of the initial state, including hidden parts."""


class Games:
    """A game of TextArena, with any number of concurrent instances.

    Args:
        name: id of the game, such as ``GuessTheNumber-v0``; ``-v0`` is optional.
        options: arguments of its class, which override the registered ones.

    Raises ConfigError if the game does not exist or is refused.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._library = _library()
        self.name = self._known(name)
        self._options = dict(options)
        with _without_downloads(self.name), self._explained():
            self._check_options()
            first, again = self._begun(1), self._begun(1)
        if not isinstance(first.game.state, self._library.SinglePlayerState):
            raise grpo.ConfigError(MORE.format(self.name))
        if (first.opening, first.position) != (again.opening, again.position):
            raise grpo.ConfigError(
                f"textarena:{self.name} is refused: it begins differently with the same seed, so that the "
                "rollouts of a prompt would not play the same game"
            )
        self.limit: int | None = first.game.state.max_turns
        """The game's limit of moves, if any."""
        self.errors: int = getattr(first.game.state, "error_allowance", None) or 0
        """Number of consecutive invalid moves that are allowed."""

    def begin(self, seed: int) -> Play:
        """Start a game; it is a function of the seed, independent of other games."""
        with _without_downloads(self.name):
            return self._begun(seed)

    def _begun(self, seed: int) -> Play:
        chance = Chance.of(seed)
        with drawing_from(chance):
            game = self._library.make(self.name, **self._options)
            game.reset(num_players=1, seed=seed)
        opening = seen(game)
        return Play(game, chance, opening, _digest(opening, game))

    def _known(self, name: str) -> str:
        games = self._registry()
        full = name if name in games else f"{name}-v0"
        kind = full.partition("-v0")[0]
        if kind in REFUSED:
            raise grpo.ConfigError(f"textarena:{name} is refused: {REFUSED[kind]}")
        if full not in games:
            raise grpo.ConfigError(
                f"TextArena has no game {name!r}.{grpo.did_you_mean(name, set(games))} "
                "grpo-plugin-textarena's README lists those for one player"
            )
        return full

    def _registry(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        return found

    def _check_options(self) -> None:
        entry = self._registry()[self.name].entry_point
        if isinstance(entry, str):
            module, _, kind = entry.partition(":")
            entry = getattr(importlib.import_module(module), kind)
        known = {
            name: parameter
            for name, parameter in inspect.signature(entry).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "seed"
        }
        for name in self._options:
            if name not in known:
                raise grpo.ConfigError(
                    f"textarena:{self.name} has no option {name!r}.{grpo.did_you_mean(name, set(known))} "
                    f"Its own options: {', '.join(known) or 'none'}"
                )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of a game's first reset to messages with advice."""
        try:
            yield
        except (grpo.ConfigError, grpo.PluginError):
            raise
        except ImportError as error:
            missing = re.search(r"No module named '([\w.]+)'", str(error))
            package = missing[1].partition(".")[0] if missing else ""
            advice = f": pip install {package}" if package else ""
            raise grpo.ConfigError(f"textarena:{self.name} cannot be imported ({error}){advice}") from error
        except SyntaxError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise grpo.ConfigError(
                f"textarena:{self.name} is not written for Python {version} ({error}); set environment.python"
                " to a newer one"
            ) from error
        except Exception as error:
            if _is_for_more(error):
                raise grpo.ConfigError(MORE.format(self.name)) from error
            raise grpo.ConfigError(
                f"textarena:{self.name} cannot be played with these options: {type(error).__name__}: {error}"
            ) from error


def seen(game: Any) -> str:
    """Return the new messages for the player, without the player's own moves.

    TextArena's wrappers repeat the whole game with each move, which a conversation does not need.
    """
    own = importlib.import_module("textarena").ObservationType.PLAYER_ACTION
    new = game.state.get_current_player_observation()
    return "\n\n".join(str(message).strip() for _, message, kind in new if kind is not own)


def _library() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise grpo.ConfigError(
            f"textarena cannot be imported ({error}): {INSTALL}, in the Python that runs the environment "
            "(environment.python, if that is set)"
        ) from error


def _is_for_more(error: Exception) -> bool:
    """Whether a game needs more than one player."""
    return isinstance(error, AssertionError | ValueError) and "player" in str(error).lower()


def _digest(opening: str, game: Any) -> str:
    """Return a digest of a game's state, independent of its seed."""
    inner = game
    while hasattr(inner, "env"):
        inner = inner.env
    held = {name: value for name, value in vars(inner).items() if name not in ("state", "seed")}
    state = repr((opening, sorted(held.items()), game.state.game_state))
    return hashlib.sha256(_ADDRESS.sub("", state).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _without_downloads(game: str) -> Iterator[None]:
    """Prevent downloads by nltk; refuse the game if its word lists are not on this disk.

    Some games call ``nltk.download`` during import or construction.
    """
    nltk: Any = importlib.import_module("nltk")

    def find(wanted: Any, *_: Any, **__: Any) -> bool:
        names = [wanted] if isinstance(wanted, str) else list(wanted or ())
        missing = [name for name in names if not _has(nltk, name)]
        if missing:
            raise grpo.ConfigError(
                f"textarena:{game} is refused: it needs the word lists {', '.join(missing)} of nltk, which "
                "are not on this machine, and an environment downloads nothing. Where there is a network: "
                f"python -m nltk.downloader {' '.join(missing)}, and set environment.env_vars.NLTK_DATA if "
                "they are not in a directory where nltk looks"
            )
        return True

    real, nltk.download = nltk.download, find
    try:
        yield
    except LookupError as error:  # raised by nltk if a game uses a list without downloading it
        if "nltk" not in str(error).lower():
            raise
        wanted = re.search(r"nltk\.download\('([\w.]+)'\)", str(error))
        find(wanted[1] if wanted else "words")
        raise
    finally:
        nltk.download = real


def _has(nltk: Any, name: str) -> bool:
    for place in _PLACES:
        with contextlib.suppress(LookupError):
            nltk.data.find(place.format(name))
            return True
    return False
