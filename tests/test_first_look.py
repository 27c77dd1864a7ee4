"""The first look warns of settings with which a run would learn little or nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from grpo_core import Environment, Prompt
from grpo_core.config import Config, EnvironmentConfig, RolloutConfig, RowOptions, ValidationConfig
from grpo_core.data.files import file as read_file
from grpo_core.data.rows import ReadRows, RowReader
from grpo_core.diagnosis.first_look import first_look, leaks
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.testing import HostedEnvironment
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import HeldOut

SHOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
IGNORES_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: a factor.
        b: a factor.
    """
    return a * b


class Sums(Environment):
    """Prompts whose solutions have three characters."""

    opened = closed = 0

    def prompts(self, split):
        return [Prompt(messages=f"{i}+1=", answer=f"{i + 1:03d}") for i in range(40)]

    def evaluate(self, episodes):
        return [0.0 for _ in episodes]


class Tools(Sums):
    max_turns = 2
    tools = (multiply,)

    def open(self, prompt):
        self.opened += 1

    def close(self, session):
        self.closed += 1


class Unsolvable(Sums):
    def solve(self, prompt):
        raise KeyError("gold")


def letters(template=None, *, eos=True):
    """A renderer with a token for each character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(i): i for i in range(32, 127)} | {"<end>": 127, "?": 128}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<end>"} if eos else {}))
    made.chat_template = template
    return Renderer(made)


def looked(environment, renderer, *, prompts=None, held=(), **rollout):
    """The warnings, by cause."""

    async def story():
        pool = EnvironmentPool([HostedEnvironment(environment, task="sums")], EnvironmentConfig())
        await pool.start()
        return await first_look(
            Config(rollout=RolloutConfig(**rollout)),
            renderer,
            held,
            {"sums": prompts or await pool.prompts("train")},
            {"sums": pool},
        )

    return asyncio.run(story())


def test_a_run_that_can_learn_is_not_warned_about():
    tools = Tools()
    assert looked(tools, letters(SHOWS_TOOLS), max_tokens=4) == {}
    assert tools.opened == tools.closed == 1
    assert looked(Sums(), letters(), max_tokens=4) == {}


def test_a_task_that_no_prompt_validates_is_named():
    pool = EnvironmentPool([HostedEnvironment(Sums(), task="sums")], EnvironmentConfig())
    part = HeldOut(config=ValidationConfig(), prompts={"sums": []}, environments={"sums": pool})
    assert looked(Sums(), letters(), max_tokens=4, held=[part]) == {
        "no_held_out/sums": "task 'sums' is never validated, because its environment offers no prompts for "
        "validation; offer some, or set validation.every = 0"
    }


@pytest.mark.parametrize(("max_tokens", "warned"), [(4, False), (3, True)])
def test_solutions_that_do_not_fit_into_a_completion_are_counted(max_tokens, warned):
    """Three characters and the end of the sequence."""
    told = looked(Sums(), letters(), max_tokens=max_tokens)
    assert told == (
        {
            "long_solutions/sums": "task 'sums': 16 of 16 of its own solutions are longer than "
            "rollout.max_tokens = 3 (the longest has 4 tokens), and no such reply can be sampled; raise "
            "rollout.max_tokens"
        }
        if warned
        else {}
    )


def test_a_tokenizer_without_an_end_is_a_warning_unless_there_is_a_stop_string():
    (message,) = looked(Sums(), letters(eos=False)).values()
    assert "no end-of-sequence token and rollout.stop is empty: every completion runs to" in message
    assert looked(Sums(), letters(eos=False), stop=["\n"], max_tokens=3) == {}


@pytest.mark.parametrize(
    ("ends", "stop", "warned"),
    [("<end>", [], False), ("", [], False), ("~", [], True), ("~", ["~"], False), ("~", ["+"], True)],
)
def test_an_end_of_the_turn_at_which_no_completion_stops_is_a_warning(ends, stop, warned):
    renderer = letters(f"{{% for m in messages %}}{{{{ m.content }}}}{ends} {{% endfor %}}")
    told = looked(Sums(), renderer, stop=stop, max_tokens=4)
    assert list(told) == (["no_turn_end"] if warned else [])
    assert not warned or "ends a turn with '~', which is neither a stop token" in told["no_turn_end"]


def test_tools_that_the_template_leaves_out_are_a_warning():
    told = looked(Tools(), letters(IGNORES_TOOLS))
    assert list(told) == ["tools_unseen/sums"]
    assert "its 1 tools are not in the prompt, because the chat template ignores tools" in told.popitem()[1]
    assert looked(Tools(), letters()) == {}, "without a template, prompts describe the tools"


def rows_of(path):
    read = ReadRows(read_file(path, "train"), RowReader("sums", "rows", RowOptions()))
    return read


def test_rows_without_an_answer_are_counted(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}, {"prompt": "1+3="}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = rows_of(tmp_path / "rows.jsonl")
    (message,) = looked(Sums(), letters(), prompts=source).values()
    assert message.startswith("task 'sums': 2 of its 3 prompts have no answer to compare a reply with")


def test_held_out_prompts_without_an_answer_are_counted():
    known, unknown = (
        [Prompt(messages=text, answer=answer, id=text) for text in "ab"] for answer in ("2", None)
    )
    for measured in ([known[0], unknown[1]], unknown):
        told = looked(Sums(), letters(), prompts=known, held=[held_out(measured)])
        assert list(told) == ["no_answer_held_out/sums"]
    assert looked(Sums(), letters(), prompts=unknown, held=[held_out(unknown)]) == {}, "it needs none"


def test_an_environment_that_cannot_be_asked_is_left_to_the_run():
    assert looked(Unsolvable(), letters()) == {}


def held_out(prompts, name="", most=100):
    config, task = ValidationConfig(prompts=most), name or "sums"
    environments = {task: HostedEnvironment(Sums(), task=task)}
    return HeldOut(name=name, config=config, prompts={task: prompts}, environments=environments)


def asked(*texts):
    return [Prompt(messages=text, id=str(i)) for i, text in enumerate(texts)]


def test_held_out_prompts_that_are_trained_on_are_a_warning():
    trained = {"sums": asked("1+1=", "2+2=", "3+3="), "words": asked("a", "b")}
    sets = [held_out(asked("9+9=", " 2+2= ")), held_out(asked("c", "b"), "spelling")]
    found = leaks(trained, sets)
    assert set(found) == {"leak/sums/sums", "leak/spelling/words"}
    assert found["leak/sums/sums"].startswith(
        "1 of the 2 held-out prompts of 'sums' are among the training prompts of task 'sums', such as '1'"
    )
    assert leaks(trained, [held_out(asked("9+9=", "2+2="), most=1)]) == {}, "only what is measured counts"


def test_the_rows_of_sources_are_compared_too(tmp_path):
    for name, texts in (("train", "abc"), ("held_out", "xyb")):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(f'{{"prompt": "{text}"}}' for text in texts))
    train, other = (rows_of(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    (message,) = leaks({"letters": train}, [held_out(other[:])]).values()
    assert "1 of the 3 held-out prompts" in message
