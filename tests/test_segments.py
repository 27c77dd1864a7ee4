"""A rollout continues in a new segment where a chat template rewrites history.

The templates here write conversations as models of several families do.  With ``GRPO_CORE_TEMPLATES`` set
to a folder, every ``*.jinja`` in it is tried as well: all 72 of TRL 1.16 pass, and 104 of 106 of axolotl
0.19 and llama.cpp.  Kimi K2 Thinking adds an empty thought to the one of an earlier turn, and Apriel 1.5
writes ids into calls only before the model's next turn: there the row keeps what was sampled.  Those that
vLLM brings are tried wherever it is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from forks import grpo
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.app import making
from grpo_core.config import Config, ModelConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.tokens import as_ids
from grpo_core.models.files import chat_template
from grpo_core.text.rendering import Renderer

PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Only appends."""

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"

FORGETS = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].strip() %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}" + CALLS + "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Drops reasoning once a user goes on, and keeps it while tools answer; a last turn always shows some."""

OPENS = FORGETS.replace("<|start|>assistant\n{% if", "<|start|>assistant\n<think>\n{% if")
"""Opens the reasoning for the model."""

TOOLS_LAST = (
    "{% for m in messages %}{% if m.role == 'user' and tools and loop.index0 == (messages | length - 1) %}"
    "<|tools|>{{ tools | tojson }}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Shows the tools before the last message of a user only."""

NO_END = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Has no token that ends a turn: the next role ends it."""

OTHER_END = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|over|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""A last turn ends with another token than earlier ones."""

JSON_ARGUMENTS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}{% endfor %}",
)
"""Takes the arguments of calls as text."""

TOOL = {
    "type": "function",
    "function": {"name": "price", "description": "Price of an item.", "parameters": {"type": "object"}},
}
SPECIAL = re.compile(
    r"<\|[^|<>]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|</?s>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>|<turn\|>|<\|turn>"
)
ENDS = re.compile(
    r"<\|(?:end|im_end|eot|eot_id|eom_id|end_of_turn|return|call|endoftext|EOT|END_OF_TURN_TOKEN|end_of_text|user"
    r"|observation)\|>|<end_of_turn>|</s>|<turn\|>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
"""Tokens that end a turn, in many families."""


def ends_of(template):
    found = dict.fromkeys(ENDS.findall(template))
    return [end for end in found if end != "<|end|>" or "<|return|>" not in found]


def user(content):
    return {"role": "user", "content": content}


def said(content, *names):
    calls = [
        {"type": "function", "id": f"call0000{i}", "function": {"name": name, "arguments": {"item": "tea"}}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def answered(*names):
    return [
        {"role": "tool", "name": name, "tool_call_id": f"call0000{i}", "content": f"costs {i}"}
        for i, name in enumerate(names)
    ]


def make_tokenizer(template, ends=("<|end|>",)):
    """A tokenizer that merges and has the template's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted({*SPECIAL.findall(template), *ends})
    tokenizer.train_from_iterator(
        ["assistant user tool what is the answer no yes again think"] * 9,
        trainers.BpeTrainer(
            vocab_size=400 + len(special),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends[0], bos_token="<s>", extra_special_tokens=special
    )
    made.chat_template = template
    return made


def make_renderer(template, *ends):
    tokenizer = make_tokenizer(template, ends or ("<|end|>",))
    return Renderer(tokenizer, extra_stop=tokenizer.convert_tokens_to_ids(list(ends)))


class Played:
    """A conversation whose replies are tokens that the tokenizer would write.

    Attributes:
        segments: the tokens of each segment, with a flag for each that says whether it was sampled.
    """

    def __init__(self, renderer, messages, tools=()):
        self.renderer, self.tools, self.messages = renderer, tools, list(messages)
        self.segments = [[(token, False) for token in renderer.prompt_ids(self.messages, tools)]]

    def text(self, messages=None, *, generation=True):
        return self.renderer.render(messages or self.messages, generation=generation, tools=self.tools)

    def row(self):
        return self.renderer.tokenizer.decode([token for token, _ in self.segments[-1]])

    def reply(self, message, written, answers):
        """The model writes ``written``, whose message this is, and the environment answers."""
        sampled = self.renderer.encode(written)
        self.segments[-1] += [(token, True) for token in sampled]
        end = sampled[-1] if sampled[-1] in self.renderer.stop_token_ids else None
        new = self.renderer.continuation_ids(
            answers, before=self.messages, said=message, end=end, tools=self.tools, sampled=as_ids(sampled)
        )
        self.messages += [message, *answers]
        if new is None:
            new = self.renderer.prompt_ids(self.messages, self.tools)
            self.segments.append([])
        self.segments[-1] += [(token, False) for token in new]

    def sampled(self):
        return [token for segment in self.segments for token, flag in segment if flag]


def counts(renderer, *turns, tools=()):
    """Play turns, and return the number of segments after each."""
    played = Played(renderer, [user("what is it")], tools)
    found = []
    for message, written, answers in turns:
        played.reply(message, written, answers)
        found.append(len(played.segments))
    return found, played


THOUGHT = "<think>\nno no\n</think>\n\nyes"
CALL = '<call>{"name": "price", "arguments": {"item": "tea"}}</call>'


def test_a_template_that_appends_has_one_segment():
    turns = [(said(THOUGHT), THOUGHT + "<|end|>", [user("again")])] * 3
    found, played = counts(make_renderer(PLAIN), *turns)
    assert found == [1, 1, 1]
    assert played.row() == played.text()


def test_reasoning_that_a_user_makes_the_template_forget_ends_a_segment():
    turns = [(said(THOUGHT), THOUGHT + "<|end|>", [user("again")])] * 2
    found, played = counts(make_renderer(FORGETS), *turns)
    assert found == [2, 3]
    assert "no no" not in played.row()
    assert played.row() == played.text()
    assert played.renderer.tokenizer.decode(played.sampled()) == 2 * (THOUGHT + "<|end|>")


def test_a_reply_without_reasoning_continues_although_a_last_turn_would_show_some():
    found, played = counts(make_renderer(FORGETS), (said("yes"), "yes<|end|>", [user("again")]))
    assert found == [1]
    assert played.row() == played.text()


def test_while_tools_answer_reasoning_stays_and_a_user_ends_the_segment_of_all_calls():
    thinks = said(THOUGHT, "price"), f"{THOUGHT}{CALL}<|end|>", answered("price")
    found, played = counts(
        make_renderer(FORGETS), thinks, thinks, (said("tea"), "tea<|end|>", [user("again")]), tools=[TOOL]
    )
    assert found == [1, 1, 2], "the reasoning before the calls is forgotten with the next question"
    assert played.row() == played.text()


def test_reasoning_that_the_template_opens_for_the_model_ends_a_segment_at_each_turn():
    reply = "no no\n</think>\n\nyes"
    found, played = counts(make_renderer(OPENS), *[(said(reply), reply + "<|end|>", [user("again")])] * 2)
    assert found == [2, 3]
    assert played.row() == played.text()


def test_tools_that_the_template_shows_elsewhere_later_end_a_segment():
    turns = [(said("yes"), "yes<|end|>", [user("again")])] * 2
    assert counts(make_renderer(TOOLS_LAST), *turns, tools=[TOOL])[0] == [2, 3]
    assert counts(make_renderer(TOOLS_LAST), *turns)[0] == [1, 1]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_role_that_ends_a_turn_is_not_written_twice(role):
    answers, reply = (
        ([user("again")], said("yes")) if role == "user" else (answered("price"), said("yes", "price"))
    )
    written = "yes" if role == "user" else f"yes{CALL}"
    found, played = counts(
        make_renderer(NO_END, "<|user|>", "<|tool|>"), (reply, f"{written}<|{role}|>", answers), tools=[TOOL]
    )
    assert found == [1]
    assert played.row() == played.text()


def test_another_token_at_the_end_of_earlier_turns_ends_a_segment():
    found, played = counts(
        make_renderer(OTHER_END, "<|return|>"), (said("yes"), "yes<|return|>", [user("again")])
    )
    assert found == [2]
    assert played.row() == played.text()


def test_after_a_stop_string_the_template_ends_the_turn():
    found, played = counts(make_renderer(PLAIN), (said("yes"), "yes", [user("again")]))
    assert found == [1]
    assert played.row() == played.text()


OWN_END = PLAIN.replace("<|end|>", "[end]")
"""Ends a turn with a text that is not a token."""

CALLS_END = PLAIN.replace(
    "{{ m.content }}<|end|>", "{{ m.content }}" + CALLS + "{{ '<|calls|>' if m.tool_calls else '<|end|>' }}"
)
"""Ends a call with another token than other turns."""


def test_an_end_of_the_turn_that_was_sampled_is_not_written_twice():
    ended = (said("yes[end]"), "yes[end]", [user("again")])
    cut = (said("yes"), "yes", [user("again")])
    found, played = counts(make_renderer(OWN_END), ended, cut, ended)
    assert found == [1, 1, 1]
    assert played.row().count("[end]") == 7
    assert "[end][end]" not in played.row()


@pytest.mark.parametrize("ended", ["", "<|calls|>"])
def test_an_answer_is_read_although_the_first_stop_token_stands_behind_it(ended):
    reply = (said("yes", "price"), f"yes{CALL}{ended}", answered("price"))
    found, played = counts(make_renderer(CALLS_END), reply, tools=[TOOL])
    assert found == [1]
    assert "costs 0" in played.row()
    found, played = counts(make_renderer(CALLS_END), (reply[0], f"yes{CALL}<|end|>", reply[2]), tools=[TOOL])
    assert found == [2], "the model ends its calls as the template does not"
    assert played.row() == played.text()


def test_a_stop_token_in_a_later_message_does_not_hide_that_message():
    template = PLAIN.replace(
        "{{ m.content }}<|end|>", "{{ m.content }}{{ '.' if m.role == 'assistant' else '<|end|>' }}"
    )
    found, played = counts(make_renderer(template), (said("yes"), "yes", [user("again")]))
    assert found == [1]
    assert played.row() == played.text()


def test_a_template_that_takes_arguments_as_text_gets_text():
    renderer = make_renderer(JSON_ARGUMENTS)
    renderer.check_turns(tools=True)
    assert '{"item": "tea"}' in renderer.render([user("?"), said("yes", "price")], generation=False)


def test_calls_stay_as_the_model_wrote_them():
    odd = '<call>{"arguments":{"item":"tea"},"name":"price"}</call>'
    found, played = counts(
        make_renderer(FORGETS), (said("yes", "price"), f"yes{odd}<|end|>", answered("price")), tools=[TOOL]
    )
    assert found == [1]
    assert odd in played.row()


# ---------------------------------------------------------------------------------- any template

OURS = {"plain": PLAIN, "forgets": FORGETS, "opens": OPENS, "tools last": TOOLS_LAST, "no end": NO_END,
        "other end": OTHER_END, "json arguments": JSON_ARGUMENTS}  # fmt: skip
FOLDER = os.environ.get("GRPO_CORE_TEMPLATES")
VLLM = find_spec("vllm")
INSTALLED = Path(VLLM.origin).parent / "transformers_utils/chat_templates" if VLLM and VLLM.origin else None
GIVEN = {
    path.stem: path.read_text()
    for folder in (FOLDER, INSTALLED)
    if folder
    for path in sorted(Path(folder).glob("*.jinja"))
}

REPLIES = st.tuples(
    st.sampled_from(["", "<think>\nno no\n</think>\n\n"]),
    st.sampled_from(["yes", "the answer"]),
    st.booleans(),
)


def squeezed(text):
    return re.sub(r"\s+", "", text)


def written(renderer, messages, message, tools):
    """Return how the template writes a last message, up to its first stop token; None if it does not."""
    start = renderer.render(messages, generation=True, tools=tools)
    whole = renderer.render([*messages, message], generation=False, tools=tools)
    if not whole.startswith(start):
        return None
    ids = renderer.encode(whole[len(start) :])
    ends = next((i for i, token in enumerate(ids) if token in renderer.stop_token_ids), len(ids) - 1)
    return renderer.tokenizer.decode(ids[: ends + 1])


@contextlib.contextmanager
def refusals():
    """Let a template refuse a conversation, with the reason."""
    try:
        yield
    except ModelError as error:
        if not re.search("cannot render messages|does not render assistant messages", str(error)):
            raise


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in (OURS | GIVEN).items()])
def test_what_is_sampled_is_trained_once_and_what_the_model_reads_is_what_the_template_writes(template, data):
    ends = ends_of(template)
    renderer = make_renderer(template, *dict.fromkeys(ends))
    tools = [TOOL] if data.draw(st.booleans()) else []
    with refusals():
        renderer.check_turns(tools=bool(tools))
        rules = [{"role": "system", "content": "no questions"}] if data.draw(st.booleans()) else []
        played = Played(renderer, [*rules, user("what is it")], tools)
        spoken = []
        for _ in range(data.draw(st.integers(1, 4))):
            thought, content, calls = data.draw(REPLIES)
            message = said(thought + content, *(["price"] if calls and tools else []))
            answers = answered("price") if calls and tools else [user("again")]
            text = written(renderer, played.messages, message, tools) or thought + content
            if "<think>" in text and not thought:
                message = {**message, "content": "<think>\n\n</think>\n\n" + content}
            spoken += renderer.encode(text)
            played.reply(message, text, answers)
            assert squeezed(played.row()) == squeezed(played.text())
        assert played.sampled() == spoken


# ---------------------------------------------------------------------------------- from the configuration


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A small Qwen3 with random weights, whose template opens the reasoning and forgets it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model") / "qwen3"
    tokenizer = make_tokenizer(OPENS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


TALKS = """
import grpo_core as grpo

class Talks(grpo.Environment):
    max_turns = 3
    def prompts(self, split):
        return [grpo.Prompt(messages=f"what is {i}") for i in range(24)]
    def evaluate(self, episodes):
        return [
            grpo.Feedback(reward=len(e.reply) % 3 / 2, done=e.turn == 2, messages="go on") for e in episodes
        ]
"""


def train(source, model, cwd, *more, **settings):
    """Run ``grpo-core train`` with an environment of this source, made small."""
    (cwd / "environment.py").write_text(source)
    name = source.partition("class ")[2].partition("(")[0]
    chosen = {
        "model.path": model, "trainer.steps": 2, "trainer.prompts_per_step": 3, "rollout.group_size": 4,
        "rollout.max_tokens": 60, "validation.prompts": 2, "trainer.updates_per_step": 1, **settings,
    }  # fmt: skip
    sets = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    command = ["train", "--env", f"./environment.py:{name}", *sets, *more, "--output", "run"]
    return grpo(cwd, *command, timeout=280)


def run_talks(model, cwd, *more):
    stops = {"rollout.stop": '["a", "e", "i", "o", "n", "s", "t", " "]'}
    return train(TALKS, model, cwd, *more, **stops)


def segments_of(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [value for each in metrics for name, value in each.items() if name.startswith("segments/")]


@pytest.mark.nightly
def test_a_model_whose_template_forgets_is_trained_over_several_turns(qwen3, tmp_path):
    done = run_talks(qwen3, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert min(segments_of(tmp_path / "run")) > 2.0, "nearly all have three turns"
    grpo(tmp_path, "verify", "run").check_returncode()


@pytest.mark.nightly
def test_a_template_that_only_appends_makes_one_segment_and_is_saved_with_the_model(qwen3, tmp_path):
    done = run_talks(qwen3, tmp_path, "--set", "model.chat_template=chatml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert segments_of(tmp_path / "run") == [1.0, 1.0]
    saved = Renderer.load(str(next((tmp_path / "run" / "checkpoints").glob("step-*")) / "trainer"))
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert saved.render([user("hi")], generation=True) == asked


@pytest.mark.long
def test_a_template_that_is_not_there_is_named_before_anything_starts(qwen3, tmp_path):
    done = run_talks(qwen3, tmp_path, "--set", "model.chat_template=./mine.jinja")
    assert done.returncode == 2
    assert "model.chat_template is './mine.jinja', which cannot be read" in done.stderr
    assert "chatml" in done.stderr
    assert not (tmp_path / "run").exists()


def test_variables_of_the_template_come_from_the_configuration(qwen3):
    config = Config(model=ModelConfig(chat_template_kwargs={"enable_thinking": False}))
    renderer = making.load_renderer(config.model, str(qwen3), [])
    assert renderer.render([user("hi")], generation=True).endswith("<think>\n\n</think>\n\n")


def test_our_template_only_appends():
    renderer = make_renderer(chat_template("chatml"), "<|im_end|>")
    call = '\n<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>'
    turns = [
        (said(THOUGHT, "price"), f"{THOUGHT}{call}<|im_end|>", answered("price")),
        (said(THOUGHT), f"{THOUGHT}<|im_end|>", [user("again")]),
    ]
    found, played = counts(renderer, *turns, tools=[TOOL])
    assert found == [1, 1]
    assert played.row() == played.text()
