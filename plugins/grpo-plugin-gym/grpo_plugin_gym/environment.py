"""The environment ``gym:NAME``: an environment of gymnasium whose actions and observations are text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import regex
from attrs import define

import grpo_core as grpo


@define(eq=False)
class Game:
    """The session of a rollout: an environment of gymnasium."""

    _environment: Any


class Gym(grpo.Environment):
    """Plays an environment of gymnasium.

    A prompt is a seed and shows the observation of ``reset(seed=...)``.  Each reply is an action, and the
    rewards of the steps are added.

    Args:
        name: an id of gymnasium such as ``FrozenLake-v1``, or ``module:Class`` or ``./file.py:Class``.
        arguments: arguments of the environment.
        instruction: text before the first observation.
        actions: names of the actions of a discrete space, in order; without names actions are numbers.
        pattern: regular expression that finds the action in a reply; the last match counts.
        show: "ansi" shows the environment's text rendering, "observation" its observations; "auto" prefers
            rendering.
        max_turns: largest number of steps of a rollout.
        prompts: number of seeds for training; validation has a fourth as many others.
        seed: the first seed.
        wrong_action: reward of a reply that is not an action; the model gets the error and continues.
        success: reward from which a rollout is a success; None declares no success.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        instruction: str = "",
        actions: Sequence[str] = (),
        pattern: str = "",
        show: Literal["auto", "ansi", "observation"] = "auto",
        max_turns: int = 32,
        prompts: int = 200,
        seed: int = 0,
        wrong_action: float = 0.0,
        success: float | None = None,
    ) -> None:
        if prompts < 1 or seed < 0:
            raise grpo.ConfigError(
                f"gym: prompts = {prompts}, seed = {seed}; expected at least 1, and at least 0"
            )
        from grpo_plugin_gym.texts import Actions

        self._name, self._arguments = name, dict(arguments or {})
        self._make = self._factory()
        self._draws = show == "ansi" or (show == "auto" and self._can_draw())
        probe = self._made()
        try:
            self._actions = Actions(probe.action_space, actions, pattern)
        except regex.error as error:
            raise grpo.ConfigError(
                f"gym: pattern {pattern!r} is not a regular expression: {error}"
            ) from error
        except ValueError as error:
            raise grpo.ConfigError(f"gym: {name} cannot be played: {error}") from error
        finally:
            probe.close()
        self._instruction = "\n".join(filter(None, [instruction, self._actions.instruction()]))
        self._prompts, self._seed, self._wrong = prompts, seed, wrong_action
        self.max_turns, self.success = max_turns, success
        self.combine = {"wrong_action": "mean"}
        self._starts: dict[int, str] = {}

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        number = self._prompts if split == "train" else max(1, self._prompts // 4)
        first = self._seed + (0 if split == "train" else self._prompts)
        environment = self._made()
        try:
            return [self._prompt(environment, seed) for seed in range(first, first + number)]
        finally:
            environment.close()

    def open(self, prompt: grpo.Prompt) -> Game:
        environment = self._made()
        said = self._begun(environment, int(prompt.info["seed"]))
        if said != prompt.info["observation"]:
            environment.close()
            raise grpo.PluginError(
                f"gym: {self._name} begins with {said!r:.100} for the seed {prompt.info['seed']}, and began "
                f"with {prompt.info['observation']!r:.100} before: reset(seed=...) has to decide that"
            )
        return Game(environment)

    def close(self, session: Game) -> None:
        session._environment.close()

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [self._stepped(episode) for episode in episodes]

    # ------------------------------------------------------------------------------ steps

    def _stepped(self, episode: grpo.Episode) -> grpo.Feedback:
        environment = episode.session._environment
        try:
            action = self._actions.of(grpo.split_thought(episode.reply)[1])
        except ValueError as error:
            said = f"error: {error}. {self._actions.instruction()}".strip()
            return grpo.Feedback(done=False, reward=self._wrong, messages=said, metrics={"wrong_action": 1.0})
        try:
            return self._step(environment, action)
        except Exception as error:  # if it propagated, the other games of the batch would step twice
            return grpo.Feedback(
                error=f"gym: {self._name}: step({action!r:.100}) failed: {type(error).__name__}: {error}"[
                    :1000
                ]
            )

    def _step(self, environment: Any, action: Any) -> grpo.Feedback:
        observation, reward, terminated, truncated, _ = environment.step(action)
        metrics = {"wrong_action": 0.0}
        if terminated or truncated:
            return grpo.Feedback(reward=float(reward), metrics=metrics)
        said = self._shown(environment, observation)
        return grpo.Feedback(done=False, reward=float(reward), messages=said, metrics=metrics)

    def _begun(self, environment: Any, seed: int) -> str:
        observation, _ = environment.reset(seed=seed)
        return self._shown(environment, observation)

    def _shown(self, environment: Any, observation: Any) -> str:
        from grpo_plugin_gym.texts import shown

        if self._draws:
            drawn = environment.render()
            return _COLOUR.sub(r"[\g<text>]", str(drawn)).strip("\n")
        return shown(observation)

    def _prompt(self, environment: Any, seed: int) -> grpo.Prompt:
        said = self._begun(environment, seed)
        text = "\n\n".join(filter(None, [self._instruction, said])) or "Begin."
        return grpo.Prompt(messages=text, id=str(seed), info={"seed": seed, "observation": said})

    # ------------------------------------------------------------------------------ making it

    def _factory(self) -> Any:
        """Return a factory of environments.  Raises ConfigError."""
        import gymnasium

        if ":" in self._name:
            return grpo.load_object(self._name, who="gym")
        if self._name not in gymnasium.registry:
            near = grpo.did_you_mean(self._name, set(gymnasium.registry))
            raise grpo.ConfigError(
                f"gym: gymnasium has no environment {self._name!r}.{near} Write gym:ID, gym:module:Class or "
                "gym:./file.py:Class"
            )
        return partial(gymnasium.make, self._name, disable_env_checker=True)

    def _made(self) -> Any:
        arguments = {"render_mode": "ansi", **self._arguments} if self._draws else self._arguments
        try:
            return self._make(**arguments)
        except Exception as error:  # an environment may raise any error
            raise grpo.ConfigError(
                f"gym: {self._name} cannot be made with {arguments}: {type(error).__name__}: {error}"
            ) from error

    def _can_draw(self) -> bool:
        """Whether the environment declares a text rendering."""
        import gymnasium

        entry = self._make if ":" in self._name else gymnasium.registry[self._name].entry_point
        found = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(found, "metadata", {})
        return isinstance(modes, Mapping) and "ansi" in modes.get("render_modes", ())


_COLOUR = re.compile(r"\x1b\[(?P<codes>[0-9;]*)m(?P<text>[^\x1b]*)\x1b\[0m")
"""ANSI colours, with which gymnasium's toy texts mark the player's position."""
