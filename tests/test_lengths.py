"""Too long prompts are reported before a run starts, or left out of it."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_cli import events, grpo, refused
from test_first_look import SHOWS_TOOLS, Sums, Tools, letters, looked
from test_resume import QUICK

from grpo_core import Prompt
from grpo_core.app.prompts import short_enough
from grpo_core.config import EnvironmentConfig, RowOptions, ValidationConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.data.files import file as read_file
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.prompts import UNBOUNDED, size
from grpo_core.data.rows import ReadRows, RowReader
from grpo_core.diagnosis.first_look import LOOKED_AT
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.testing import HostedEnvironment
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import HeldOut

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def prompts(*lengths):
    return [Prompt(messages="a" * length, id=f"p{length}") for length in lengths]


def renderer(template=None, *, positions=100):
    """A renderer with a token for each character, for a model of so many positions."""
    made = letters(template)
    made.context = positions
    return made


class Counting(Renderer):
    """A renderer that remembers how long the prompts were that it has encoded."""

    def __init__(self, of):
        self.__dict__.update(of.__dict__)
        self.encoded = []

    def prompt_ids(self, messages, tools=()):
        ids = super().prompt_ids(messages, tools)
        self.encoded.append(len(ids))
        return ids


def kept(found, most, renderer, environment=None):
    async def story():
        pool = EnvironmentPool([HostedEnvironment(environment or Sums(), task="sums")], EnvironmentConfig())
        await pool.start()
        config = ValidationConfig()
        held = HeldOut(config=config, prompts={"sums": found[:3]}, environments={"sums": pool})
        left, (held,), told = await short_enough(most, {"sums": found}, [held], {"sums": pool}, renderer)
        return left["sums"], held.prompts["sums"], told

    return asyncio.run(story())


def ids(found):
    return [prompt.id for prompt in found]


# ---------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    "messages",
    [
        "short",
        "naïve ﬁancée 漢字 🙂",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * 50}],
        [{"role": role, "content": "?", "name": "n"} for role in ("user", "assistant", "user")],
    ],
)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_prompt_has_no_more_tokens_than_its_size_and_what_the_template_always_writes(messages, template):
    """Also where each character is a token."""
    prompt, made = Prompt(messages=messages), letters(template)
    always = len(made.prompt_ids([{"role": "user", "content": "?"}]))
    assert len(made.prompt_ids(prompt.messages)) <= size(prompt) + always


def test_what_a_template_may_write_in_any_way_has_no_bound():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    image = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    for message in (call, image):
        assert size(Prompt(messages=[message])) == UNBOUNDED


# ---------------------------------------------------------------------------------- left out


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_with_more_tokens_are_left_out_and_counted(template):
    given, made = prompts(5, 90, 10, 50, 51), renderer(template)
    around = len(made.prompt_ids([{"role": "user", "content": ""}]))
    left, held, told = kept(given, 50 + around, made)
    assert (ids(left), ids(held)) == (["p5", "p10", "p50"], ["p5", "p10"])
    key, such = f"rollout.max_prompt_tokens = {50 + around}", f"such as 'p90' with {90 + around} tokens"
    assert told == {
        "prompts_left_out/sums": f"task 'sums': {key} leaves out 2 of its 5 prompts, {such}",
        "held_out_left_out/sums": f"validation of 'sums': {key} leaves out 1 of its 3 prompts, {such}",
    }


def test_the_tools_that_a_prompt_shows_count_as_well():
    made = renderer(SHOWS_TOOLS)
    assert ids(kept(prompts(5, 10), 20, made)[0]) == ["p5", "p10"]
    with pytest.raises(ConfigError, match=r"all of its 2 prompts .* the shortest, 'p5', has \d{3}"):
        kept(prompts(5, 10), 20, made, Tools())


def test_prompts_that_are_certainly_short_are_not_encoded():
    made = Counting(renderer())
    kept(prompts(*range(1, 60), 90), 80, made)
    assert sorted(length for length in made.encoded if length > 1) == [90, *range(80 - 16, 60)]


def test_no_prompt_is_looked_at_without_a_limit():
    found = prompts(5, 90)
    assert kept(found, 0, None) == (found, found, {})


def test_a_source_without_its_long_rows_is_another_source(tmp_path):
    rows = [{"prompt": "a" * length, "id": f"p{length}"} for length in (5, 90, 10, 50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def opened():
        rows = read_file(tmp_path / "rows.jsonl", "train")
        source = ReadRows(rows, RowReader("sums", "rows", RowOptions()))
        return source

    whole, (left, _, told) = opened(), kept(opened(), 50, renderer())
    assert ids(left) == ["p5", "p10", "p50"]
    assert list(told) == ["prompts_left_out/sums", "held_out_left_out/sums"]
    assert list(left.digests) == [whole.digests[place] for place in (0, 2, 3)]
    assert list(left.sizes) == [whole.sizes[place] for place in (0, 2, 3)]
    same, *others = (IndexedLoader("sums", each, seed=0).state_dict() for each in (left, left, whole))
    assert same == others[0] != others[1], "a run cannot go on with the others"


# ---------------------------------------------------------------------------------- unplayable


def warned(found, *, positions=100, **rollout):
    return looked(Sums(), renderer(positions=positions), prompts=found, **{"max_tokens": 20, **rollout})


def test_prompts_that_cannot_be_played_are_reported_before_the_run_begins():
    assert warned(prompts(5, 80)) == {}
    assert warned(prompts(5, 90, 81)) == {
        "long_prompts/sums": "task 'sums': no rollout can play 2 of its 3 prompts, such as 'p90' with 90 "
        "tokens: the model has 100 positions, of which rollout.max_tokens = 20 leaves 80 to a prompt. Such a "
        "prompt is skipped whenever it is drawn; rollout.max_prompt_tokens = 80 leaves it out"
    }
    assert warned(prompts(5, 29), max_total_tokens=30) == {}
    (message,) = warned(prompts(5, 30), max_total_tokens=30).values()
    assert (
        "no rollout can play 1 of its 2 prompts, such as 'p30' with 30 tokens: rollout.max_total_tokens = 30 "
        in message
    )
    assert " = 30 allows 29. Such a prompt" in message
    assert warned(prompts(5, 99), max_total_tokens=500) == {}
    (message,) = warned(prompts(5, 100), max_total_tokens=500).values()
    assert "the model has 100 positions, fewer than rollout.max_total_tokens = 500. Such a" in message


def test_only_the_longest_prompts_are_encoded_for_a_warning():
    many = [Prompt(messages="a" * 90, id=f"p{i}") for i in range(LOOKED_AT + 50)]
    (message,) = warned([*many, *prompts(5)]).values()
    assert f"can play at least {LOOKED_AT} of its {LOOKED_AT + 51} prompts" in message


def test_a_task_without_a_prompt_that_can_be_played_is_refused():
    with pytest.raises(
        ConfigError, match=r"no prompt is short enough .* even 'p81' has 81 tokens: the model"
    ):
        warned(prompts(90, 81))


# ---------------------------------------------------------------------------------- a whole run

LONG = """
import grpo_core as grpo

class Long(grpo.Environment):
    def prompts(self, split):
        asked = {i: "0" * (40 if i % 4 == 1 else 4) + f"{i}=" for i in range(12)}
        return [grpo.Prompt(messages=asked[i], answer=str(i % 10), id=str(i)) for i in asked]
    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""


@pytest.mark.nightly
def test_a_run_leaves_long_prompts_out_also_when_it_is_continued_and_validated(tmp_path):
    (tmp_path / "long.py").write_text(LONG)
    limit = ["--set", "rollout.max_prompt_tokens=20"]
    run = ["--env", "./long.py:Long", *QUICK, "--set", "trainer.steps=2", *limit]
    done = grpo(tmp_path, "train", *run, "--output", "run")
    assert done.returncode == 0, done.stderr
    told = "rollout.max_prompt_tokens = 20 leaves out 3 of its 12 prompts, such as '1' with 42 tokens"
    assert f"task 'long': {told}" in done.stdout
    more = ["--set", "trainer.steps=4"]
    done = grpo(tmp_path, "train", "--resume", "run", *more)
    assert done.returncode == 0, done.stderr
    drawn = [slot["prompt"] for event in events(tmp_path / "run", "Dispatched") for slot in event["slots"]]
    assert {"1", "5", "9"}.isdisjoint(drawn)
    assert not list(events(tmp_path / "run", "PromptSkipped"))
    assert grpo(tmp_path, "verify", "run").returncode == 0
    looked = grpo(tmp_path, "validate", "run")
    assert f"validation of 'long': {told}" in looked.stdout + looked.stderr
    other = ["--set", "rollout.max_prompt_tokens=0", "--set", "trainer.steps=6"]
    said = refused(tmp_path, "train", "--resume", "run", *other)
    assert "rollout.max_prompt_tokens is 20 in its checkpoint and 0 now; it cannot change" in said
    epochs = ["--set", "trainer.epochs=1", *limit]
    assert "set trainer.steps instead" in refused(tmp_path, "train", "--env", "./long.py:Long", *epochs)
