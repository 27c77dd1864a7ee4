"""``grpo-core score`` judges stored rollouts again and shows the changes."""

from __future__ import annotations

import importlib.util
import json
import random
import re

import pytest
from attrs import evolve
from recording import record

import grpo_core as grpo
from grpo_core.cli import make_app
from grpo_core.config import Config, TaskConfig, ValidationConfig, ValidationSetConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.events import GroupsReady, ValidationPlayed
from grpo_core.contracts.records import Weights
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.reporting.stored import files_of_texts
from grpo_core.testing import FakeEngine, FakeRenderer, HostedEnvironment, run
from grpo_plugin_audit import score
from grpo_plugin_audit.rejudging import judge

GAME = '''
import grpo_core as grpo

class Game(grpo.Environment):
    """Three turns; a session remembers what was said; a tool answers; info holds what counts."""
    max_turns = 3
    success = 1.0

    def __init__(self, factor: float = 1.0, word: str = "next", stops: bool = False):
        self.factor, self.word, self.stops = factor, word, stops

    def prompts(self, split):
        start = 0 if split == "train" else 100
        return [grpo.Prompt(messages=f"p{i}:", answer=str(i), info={"counts": "ab"[i % 2]})
                for i in range(start, start + 6)]

    def open(self, prompt):
        return Seen()

    def evaluate(self, episodes):
        return [self._one(episode) for episode in episodes]

    def _one(self, episode):
        episode.session.said.append(episode.reply)
        assert len(episode.session.said) + episode.session.asked == episode.turn + 1
        counted = sum(said == episode.prompt.info["counts"] for said in episode.session.said)
        done = self.stops or episode.turn == 2
        reward = self.factor * (counted - 1) / 2 + episode.completion_tokens / 1000
        return grpo.Feedback(reward=reward if done else 0.0, done=done, metrics={"counted": counted},
                             state=f"room {episode.turn}", answer=episode.reply[:1],
                             messages=() if done else ({"role": "user", "content": self.word},))

class Seen:
    def __init__(self):
        self.said, self.asked = [], 0

    def look(self) -> str:
        """Look."""
        self.asked += 1
        return f"saw {self.asked}"

class Broken(Game):
    def _one(self, episode):
        raise RuntimeError("the judge is out")

class Fewer(Game):
    def prompts(self, split):
        one, two, *others = super().prompts(split)
        return [grpo.Prompt(messages="something else", id="0"), *(grpo.Prompt(
            messages=p.messages, answer=p.answer, info=p.info, id=str(i)) for i, p in enumerate(others, 2))]

class Rank(grpo.Environment):
    """Compares the rollouts of a group."""
    needs_group = True

    def prompts(self, split):
        return [grpo.Prompt(messages=f"p{i}:") for i in range(6)]

    def evaluate(self, episodes):
        longest = {e.group: max(len(o.reply) for o in episodes if o.group == e.group) for e in episodes}
        return [float(len(e.reply) == longest[e.group]) for e in episodes]
'''


def loaded(path):
    spec = importlib.util.spec_from_file_location("game", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(request, rng):
    return rng.choice(["a", "b", '<tool_call>{"name": "look", "arguments": {}}</tool_call>'])


def rank_said(request, rng):
    return "c" * rng.randint(1, 4)


def groups_of(environment, split="train", reply=said, task="game"):
    """Groups of four rollouts, as the loop plays them."""
    hosted = HostedEnvironment(environment, task=task)

    async def story():
        engine = FakeEngine(reply=reply)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        prompts = await hosted.prompts(split)
        made = []
        for prompt in prompts:
            rollouts = await play(
                [
                    RolloutRequest(
                        prompt=prompt, seed=random.Random(f"{prompt.id} {i}").getrandbits(30), group="g"
                    )
                    for i in range(4)
                ],
                engine=engine,
                environments={task: hosted},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=200),
            )
            made.append(
                grpo.Group(
                    prompt=prompt,
                    rollouts=tuple(rollouts),
                    generation_version=0,
                    target_version=0,
                    slot=len(made),
                )
            )
        return tuple(made)

    return run(story())


@pytest.fixture
def game(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(GAME)
    return path


@pytest.fixture
def a_run(tmp_path, game):
    """A run of two steps, with a validation of a set."""
    module = loaded(game)
    trained = groups_of(module.Game())
    held_out = groups_of(module.Game(), "validation", task="set")
    config = Config(
        tasks={"game": TaskConfig(env=f"{game}:Game")},
        validation=ValidationConfig(sets={"set": ValidationSetConfig(task="game")}),
    )
    events = [
        GroupsReady(step=0, groups=trained[:3]),
        GroupsReady(step=1, groups=trained[3:]),
        ValidationPlayed(version=2, groups=held_out),
    ]
    return record(tmp_path / "run", events, config).path


def scored(capsys, *arguments, status=0):
    assert make_app()([*map(str, ("score", *arguments, "--json"))], result_action="return_value") == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_an_environment_that_did_not_change_gives_the_same_rewards_in_training_and_validation(a_run, capsys):
    before = {path: path.read_bytes() for path in a_run.rglob("step-*")}
    for more in ([], ["--validation"]):
        report = scored(capsys, a_run, *more)
        (found,) = report["tasks"].values()
        assert (found["judged"], found["changed"], found["answers_differ"]) == (24, 0, 0)
        assert found["reward"]["before"] == found["reward"]["after"] != 0
        assert 0 < found["groups_with_different_rewards"]["after"] <= 6
    assert {path: path.read_bytes() for path in before} == before
    assert set(a_run.rglob("step-*")) == set(before), "nothing is written among the run's rollouts"


@pytest.mark.long
def test_an_environment_that_counts_tokens_judges_rollouts_whose_tokens_are_not_stored(a_run, capsys):
    for path in (a_run / "rollouts").glob("*.safetensors"):
        path.unlink()
    (found,) = scored(capsys, a_run)["tasks"].values()
    assert (found["judged"], found["changed"]) == (24, 0)


@pytest.mark.long
def test_all_that_an_environment_says_of_a_rollout_is_in_the_line_that_a_fork_reads(a_run, tmp_path, capsys):
    scored(capsys, a_run, "--output", tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    groups = [g for step in (1, 2) for g in grpo.stored_rollouts(a_run, step)]
    stored = [rollout for g in groups for rollout in g.rollouts]
    assert any(len(each.turn_rewards) > 1 for each in stored)
    for line, rollout in zip(lines, stored, strict=True):
        for name in ("reward", "success", "metrics", "turn_rewards", "turn_states", "answer", "train"):
            its = line["reply_answer" if name == "answer" else name]
            assert (tuple(its) if isinstance(its, list) else its) == getattr(rollout, name), name


@pytest.mark.long
def test_a_corrected_reward_is_compared_by_rollout_and_written_into_the_run(a_run, tmp_path, capsys):
    report = scored(capsys, a_run, "--set", "tasks.game.options.factor=3", "--output", tmp_path / "out")
    found = report["tasks"]["game"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    moved = [line for line in lines if abs(line["reward"] - line["stored_reward"]) > 1e-9]
    assert found["judged"] == len(lines) == 24
    assert found["higher"] + found["lower"] == found["changed"] == len(moved) > 0
    assert found["reward"]["after"] == pytest.approx(sum(line["reward"] for line in lines) / 24)
    assert found["accuracy"]["before"] == sum(line["stored_success"] for line in lines) / 24
    assert found["accuracy"]["after"] == sum(line["success"] for line in lines) / 24
    sizes = [abs(each["after"] - each["before"]) for each in found["largest_changes"]]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) == pytest.approx(max(abs(e["reward"] - e["stored_reward"]) for e in moved))
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report


@pytest.mark.long
def test_one_file_is_judged_by_another_environment_which_may_answer_otherwise(a_run, game, capsys):
    file = files_of_texts(a_run / "rollouts")[2]
    report = scored(capsys, file, "--env", f"game={game}:Game", "--set", "tasks.game.options.word='go on'")
    found = report["tasks"]["game"]
    assert report["steps"] == [2]
    assert (found["judged"], found["changed"]) == (12, 0)
    assert found["answers_differ"] > 0


@pytest.mark.long
def test_prompts_that_are_gone_or_have_another_text_are_named_and_not_judged(a_run, game, capsys):
    (found,) = scored(capsys, a_run, "--env", f"{game}:Fewer")["tasks"].values()
    assert (found["prompts_missing"], found["prompts_with_other_text"]) == (["1"], ["0"])
    assert found["judged"] == 16
    make_app()(["score", str(a_run), "--env", f"{game}:Fewer"], result_action="return_value")
    said = capsys.readouterr().out
    assert "not judged: 1 prompt (1) no longer in the task" in said
    assert "not judged: 1 prompt (0) with another text now" in said


@pytest.mark.long
def test_an_environment_that_fails_ends_with_its_error_and_status_one(a_run, game, capsys):
    (found,) = scored(capsys, a_run, "--step", 1, "--env", f"{game}:Broken", status=1)["tasks"].values()
    assert (found["failed"], found["now_unscored"], found["reward"]["after"]) == (12, 12, None)
    ((error, times),) = found["errors"].items()
    assert times == 12
    assert re.fullmatch(r"game\.py:\d+ in _one: RuntimeError: the judge is out", error)
    assert make_app()(["score", str(a_run), "--env", f"{game}:Broken"], result_action="return_value") == 1
    assert f"24 times: {error}" in capsys.readouterr().out


def test_groups_that_are_compared_are_judged_as_whole_groups(game):
    module = loaded(game)
    groups = groups_of(module.Rank(), reply=rank_said)
    hosted = HostedEnvironment(module.Rank(), task="game")
    judged = run(judge(list(enumerate(groups)), {"game": hosted}))
    assert [each.reward for each in judged] == [each.reward for group in groups for each in group.rollouts]
    assert len({each.reward for each in judged}) == 2


def test_a_conversation_that_would_end_earlier_or_later_is_judged_as_far_as_it_goes(game):
    module = loaded(game)
    groups = groups_of(module.Game(), reply=lambda request, rng: rng.choice("ab"))
    shorter = run(
        judge(list(enumerate(groups)), {"game": HostedEnvironment(module.Game(stops=True), task="game")})
    )
    assert all(each.answers_differ and each.error is None for each in shorter)
    ended = groups_of(module.Game(stops=True), reply=lambda request, rng: rng.choice("ab"))
    longer = run(judge(list(enumerate(ended)), {"game": HostedEnvironment(module.Game(), task="game")}))
    assert all(each.unfinished and each.reward == 0.0 for each in longer)


def test_a_rollout_whose_turns_are_not_stored_is_left_unscored_with_the_reason(game):
    module = loaded(game)
    (group, *_) = groups_of(module.Game(), reply=lambda request, rng: rng.choice("ab"))
    first, *others = group.rollouts
    group = evolve(group, rollouts=(evolve(first, turns=7), *others))
    judged = run(judge([(0, group)], {"game": HostedEnvironment(module.Game(), task="game")}))
    assert "its 7 turns cannot be found in its 6 messages" in judged[0].error
    assert [each.changed for each in judged] == [True, False, False, False]


def test_wrong_input_is_named_before_anything_starts(a_run, tmp_path):
    with pytest.raises(ConfigError, match=r"--step 9: .*the steps are 1 to 2"):
        score.find(a_run, [9], validation=False)
    with pytest.raises(ConfigError, match=r"is not a run \(there is no config\.toml"):
        score.find(tmp_path, [], validation=False)
    with pytest.raises(
        ConfigError, match=r"is not a file of rollouts; expected a name that ends in \.jsonl\.gz"
    ):
        score.find(a_run / "config.toml", [], validation=False)
    file = tmp_path / "alone.jsonl.gz"
    file.write_bytes(files_of_texts(a_run / "rollouts")[1].read_bytes())
    found = score.find(file, [], validation=False)
    with pytest.raises(
        ConfigError, match="nothing says which environment judges task 'game'; name it, as in"
    ):
        score._configured(found, ["game"], [], [], [])
    with pytest.raises(ConfigError, match="--env other=math:sort: no rollout is of task 'other'"):
        score._configured(found, ["game"], ["other=math:sort"], [], [])


@pytest.mark.parametrize(
    "key", ["trainer.lr=1", "tasks.game.weight=2", "tasks.other.env='x'", "rollout.max_tokens=9", "seed=1"]
)
def test_a_key_that_no_judgement_depends_on_is_refused(key, a_run):
    found = score.find(a_run, [], validation=False)
    name = key.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"^--set {name}: stored .*; it reads tasks\.game\.\*, environment"
    ):
        score._configured(found, ["game"], [], [key], [])


def test_another_environment_gets_the_options_that_it_takes(a_run, tmp_path, game):
    found = score.find(a_run, [], validation=False)
    found = evolve(found, table={"tasks": {"game": {"env": "x", "options": {"factor": 2.0, "old": 1}}}})
    _, tasks, _, notes = score._configured(found, ["game"], [f"game={game}:Game"], [], [])
    assert tasks["game"].options == {"factor": 2.0}
    assert "has no option 'old': it is left out" in notes[0]
