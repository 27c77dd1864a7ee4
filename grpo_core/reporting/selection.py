"""Checks and makes the trackers that a configuration selects."""

from __future__ import annotations

from collections.abc import Callable

from grpo_core.config import Config, TrackingConfig
from grpo_core.contracts.errors import ConfigError, PluginError, did_you_mean
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import RunInfo
from grpo_core.plugins.host import PluginHost


def selected(config: TrackingConfig, host: PluginHost) -> list[str]:
    """Return the names of the selected trackers; ``"*"`` is those that plugins offer by default."""
    every = {"*": host.in_role("tracker", "is_default")}
    return list(dict.fromkeys(each for name in config.trackers for each in every.get(name, [name])))


def check_trackers(config: TrackingConfig, host: PluginHost) -> None:
    """Check names and options without making a tracker.

    Raises ConfigError if a tracker is not installed, is selected twice, or has no such option, and for
    options of a tracker that is not selected.
    """
    names = selected(config, host)
    for name in names:
        try:
            host.check_options("tracker", name, config.options.get(name, {}))
        except PluginError as error:
            raise ConfigError(f"tracking.trackers: {error}") from error
    for name in config.options:
        if name not in names:
            near = did_you_mean(name, set(names))
            raise ConfigError(
                f"tracking.{name}: options of a tracker that tracking.trackers does not select.{near} "
                f"It selects: {', '.join(names) or 'no tracker'}"
            )


def make_trackers(config: Config, host: PluginHost, run: Callable[[str], RunInfo]) -> dict[str, Tracker]:
    """Make the selected trackers and the trackers of sections, by name; each gets ``run(name)``.

    Raises PluginError if one cannot be made, after closing the others.
    """
    chosen = {name: config.tracking.options.get(name, {}) for name in selected(config.tracking, host)}
    own = {each.name: each.values for each in config.sections if host.offers("tracker", each.name)}
    made: dict[str, Tracker] = {}
    try:
        for name, options in (chosen | own).items():
            tracker = host.make("tracker", name, run(name), **options)
            if not isinstance(tracker, Tracker):
                raise PluginError(
                    f"{host.find('tracker', name)}: its factory returned {type(tracker).__name__}; expected "
                    "a subclass of grpo_core.Tracker"
                )
            made[name] = tracker
    except PluginError:
        for tracker in made.values():
            tracker.close()
        raise
    return made
