"""Players play rollouts in their own way, through a hook."""

from __future__ import annotations

import json
import re

import forks
import pytest
from documents import ROOT

import grpo_core
import grpo_core as grpo
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import Tasks, make_player
from grpo_core.config import Config, TaskConfig
from grpo_core.contracts.errors import ConfigError, GrpoError, PluginError
from grpo_core.contracts.playing import PlayerSetup
from grpo_core.plugins.host import PluginHost
from grpo_plugin_devkit.players import check_player

PAGE = (ROOT / "docs/contracts/player.md").read_text()
(DRAFTS,) = re.findall(r'```python title="drafts.py"\n(.*?)```', PAGE, re.S)
namespace: dict = {}
exec(DRAFTS, namespace)
Drafts = namespace["Drafts"]

SMALL = {
    "trainer.steps": 2, "trainer.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_turns": 2,
    "validation.prompts": 4, "model.options.warm_start_steps": 0,
}  # fmt: skip


def settings(given):
    return [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.mark.slow
def test_a_player_of_a_file_plays_a_whole_run(tmp_path):
    (tmp_path / "drafts.py").write_text(
        DRAFTS + "\n\n@grpo.hookimpl\ndef grpo_players():\n    return {'drafts': Drafts}\n"
    )
    (tmp_path / "words.py").write_text(
        "import grpo_core as grpo\n\n\nclass Words(grpo.Environment):\n    max_turns = 2\n\n"
        "    def prompts(self, split):\n        return [grpo.Prompt(messages=f'{i}=') for i in range(8)]\n\n"
        "    def evaluate(self, episodes):\n        return [float(len(e.reply)) for e in episodes]\n"
    )
    (tmp_path / "run.toml").write_text(
        '[tasks.words]\nenv = "./words.py:Words"\nplayer = "./drafts.py:drafts"\n'
    )
    done = forks.grpo(tmp_path, "train", "run.toml", "--output", "run", *settings(SMALL), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = grpo_core.Run(tmp_path / "run")
    rollouts = [rollout for step in (1, 2) for group in run.rollouts(step) for rollout in group.rollouts]
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert (rollout.turns, len(rollout.segments)) == (2, 2)
        assert [message["role"] for message in rollout.messages] == ["user", "assistant", "assistant"]
    verified = forks.grpo(tmp_path, "verify", "run")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_player_of_the_docs_keeps_its_contract():
    check_player(Drafts)


class Forgets(Drafts):
    async def play(self, play):
        recording = await super().play(play)
        return grpo.Recording(
            segments=recording.segments[:1],
            messages=recording.messages,
        )


class Talks(Drafts):
    async def play(self, play):
        ids = play.renderer.prompt_ids(play.prompt.messages)
        said = [(await play.generate(ids))[0] for _ in range(3)]
        return grpo.Recording(
            segments=tuple(grpo.Segment(prompt_ids=ids, tokens=each.tokens) for each in said),
        )


class Mixes(Drafts):
    turn = 0

    async def play(self, play):
        self.turn += 1
        recording = await super().play(play)
        return grpo.Recording(
            segments=recording.segments,
            messages=({"role": "user", "content": str(self.turn)}, *recording.messages[1:]),
        )


class Silent(Drafts):
    async def play(self, play):
        return grpo.Recording()


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (Forgets, "the engine sampled 24 tokens, and the recordings have 12"),
        (Talks, "3 completions of a rollout with max_turns = 1"),
        (Mixes, "keep a rollout's state in variables of play"),
        (Silent, "its player sampled no completion"),
        (dict, "expected a subclass of grpo_core.Player"),
    ],
)
def test_a_player_that_breaks_its_contract_is_found(broken, told):
    make = (lambda setup: {}) if broken is dict else broken
    with pytest.raises((AssertionError, PluginError), match=re.escape(told)):
        check_player(make)


def started(tmp_path, code, **task):
    """Start and end the environment of a file with its player; returns the player."""
    import asyncio

    (tmp_path / "env.py").write_text(code)
    host = PluginHost.discover(block=task.pop("block", []))
    tasks = {"words": TaskConfig(env=f"{tmp_path}/env.py:Words", **task)}

    async def story():
        around = Tasks.start(Config(tasks=tasks), host, LocalPlacement(host))
        async with around as running:
            return running.environments["words"].player

    return asyncio.run(story())


PLAIN = """
import grpo_core as grpo

class Words(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages="?")]
    def evaluate(self, episodes):
        return [1.0 for _ in episodes]
"""
RUNS = PLAIN + "    async def run(self, prompt, client):\n        return 1.0\n"


def test_an_environment_with_run_takes_agents_and_any_other_takes_turns(tmp_path):
    assert started(tmp_path, PLAIN) is None
    assert type(started(tmp_path, RUNS)).__name__ == "AgentServer"


def test_agents_are_refused_where_the_player_cannot_play_them(tmp_path):
    with pytest.raises(
        ConfigError, match="task 'words': its environment defines run, which the player 'turns'"
    ):
        started(tmp_path, RUNS, player="turns")
    with pytest.raises(GrpoError, match="task 'words': its environment defines no async def run"):
        started(tmp_path, PLAIN, player="agents")


def test_an_unknown_player_is_refused_with_the_known_ones():
    with pytest.raises(PluginError, match=r"there is no player 'turnz'\. Did you mean 'turns'"):
        make_player(PluginHost.discover(), "turnz", PlayerSetup(tasks={"words": False}), {})


def test_a_player_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch):
    host = PluginHost.discover()
    host.plugins = [plugin for plugin in host.plugins if plugin.name != "agents"]
    expected = (
        "task 'words': its environment defines run; there is no player that plays agents: "
        "pip install grpo-plugin-agents"
    )
    with pytest.raises(PluginError, match=re.escape(expected)):
        make_player(host, None, PlayerSetup(tasks={"words": True}), {})
