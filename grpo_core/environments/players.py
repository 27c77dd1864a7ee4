"""Makes the players of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.errors import ConfigError, PluginError, SelectionError
from grpo_core.playing import Player, PlayerSetup
from grpo_core.plugins.host import PluginHost


def make_player(host: PluginHost, name: str, setup: PlayerSetup, options: Mapping[str, Any]) -> Player | None:
    """Make a player; None plays turn by turn.

    Raises PluginError or ConfigError if there is no such player, or it does not fit the environments.
    """
    runs = [task for task, defined in setup.tasks.items() if defined]
    try:
        player = host.make("player", name, setup, **options)
    except SelectionError as error:
        who = f"task {runs[0]!r}: its environment defines run; " if runs else ""
        raise SelectionError(f"{who}{error}") from error
    if player is None and runs:
        raise ConfigError(
            f"task {runs[0]!r}: its environment defines run, which the player {name!r} does not call; leave "
            f"out tasks.{runs[0]}.player"
        )
    if player is not None and not isinstance(player, Player):
        raise PluginError(
            f"player {name!r} is {type(player).__name__}, expected a subclass of grpo_core.Player"
        )
    return player
