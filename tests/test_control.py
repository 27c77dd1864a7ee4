"""Text never becomes control: what a text spells is text, and ids are those of ``apply_chat_template``.

The oracle is a tokenizer whose control tokens have other names, with a template of these names: no text
spells them, so that ``apply_chat_template`` alone is right.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_cli import refused
from test_rollout import SAMPLING, VERSION_0, prompts
from test_segments import GIVEN, ends_of, make_tokenizer, said, user

from grpo_core.contracts.errors import ControlInText, ModelError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Feedback, Prompt
from grpo_core.diagnosis.conventions import missing_start
from grpo_core.diagnosis.first_look import spelling
from grpo_core.loop.rollout import RolloutRequest, play
from grpo_core.models.files import chat_template
from grpo_core.testing import FakeEngine, FakeEnvironment
from grpo_core.text.rendering import Renderer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
OTHER = ["<tool_response>", "<|file|>"]
"""Added tokens that are no control tokens."""
CORPUS = ["user assistant system tool\n what does it mean in a text? im_end think call </ <| |> >"] * 20
CHATML = chat_template("chatml")
TRIMS = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
"""Trims texts as Llama 3's, and opens a thought."""


def added(content, special):
    from transformers import AddedToken

    return AddedToken(content, special=special, normalized=False)


def tokenizer_of(kind, rename=lambda name: name):
    """Train a tokenizer of one kind, whose control tokens have the given names."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    control = [rename(name) for name in SPECIAL]
    characters = sorted({chr(c) for c in range(32, 127)} | {"\n", "▁"})
    if kind == "byte BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=control, unk_token=control[0], initial_alphabet=characters
        )
    else:
        made = Tokenizer(models.BPE(unk_token=control[0], byte_fallback=kind == "byte fallback"))
        if kind == "byte fallback":  # as that of Llama 2
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.decoder = decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
            control = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            made.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(
            vocab_size=len(control) + 300, special_tokens=control, initial_alphabet=characters
        )
    made.train_from_iterator(CORPUS, trainer)
    if kind == "byte fallback":
        settings = json.loads(made.to_str())
        settings["added_tokens"] = settings["added_tokens"][: len(SPECIAL)]
        made = Tokenizer.from_str(json.dumps(settings))
    made.add_special_tokens(control[: len(SPECIAL)])
    made.add_tokens([added(rename(name), special=False) for name in TAGS])
    made.add_tokens([added(name, special=False) for name in OTHER])
    bos = control[1]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=control[0], bos_token=bos, eos_token=rename("<|im_end|>")
    )


def renamed(name):
    return name if name in OTHER else f"[{name.strip('<|>').replace('/', 'end')}*]"


def with_names(template):
    for name in [*SPECIAL, *TAGS]:
        template = template.replace(name, renamed(name))
    return template


def other_names(tokenizer):
    """Return a tokenizer with other names of its control tokens; training would give another vocabulary."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = tokenizer.backend_tokenizer.to_str()
    for name in [*SPECIAL, *TAGS]:
        text = text.replace(f'"{name}"', f'"{renamed(name)}"')
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        unk_token=renamed("<unk>"), bos_token=renamed("<s>"), eos_token=renamed("<|im_end|>"),
    )  # fmt: skip


KINDS = ["byte BPE", "metaspace", "byte fallback", "unigram"]
MADE = {}


def pair(kind, template):
    """Return a renderer, and the oracle: a tokenizer of the same vocabulary with other control tokens."""
    if kind not in MADE:
        made = tokenizer_of(kind)
        MADE[kind] = made, tokenizer_of(kind, renamed) if kind != "unigram" else other_names(made)
    tokenizer, oracle = MADE[kind]
    tokenizer.chat_template, oracle.chat_template = template, with_names(template)
    return Renderer(tokenizer), oracle


WORDS = st.sampled_from(
    [*SPECIAL, *TAGS, *OTHER, "<|im_", "end|>", "<", " ", "  ", "\n", "what", "é", "qControlq", "3q"]
)
TEXT = st.lists(WORDS, max_size=7).map("".join)
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "system", "tool"]),
    TEXT,
)
TOOLS = st.lists(
    st.builds(
        lambda name, about: {"type": "function", "function": {"name": name, "description": about}}, TEXT, TEXT
    ),
    max_size=1,
)


def oracle_ids(oracle, messages, tools=(), *, generation=True):
    text = oracle.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=generation, tokenize=False
    )
    return tuple(oracle.encode(text, add_special_tokens=False))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, TRIMS], ids=["chatml", "trims"])
@given(messages=st.lists(MESSAGE, min_size=1, max_size=3), tools=TOOLS)
def test_what_a_text_spells_is_encoded_as_by_a_tokenizer_that_has_other_names(
    kind, template, messages, tools
):
    renderer, oracle = pair(kind, template)
    assert renderer.prompt_ids(messages, tools) == oracle_ids(oracle, messages, tools)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@given(content=TEXT, answer=TEXT, said=st.text("ab <>|", max_size=5))
def test_an_answer_is_text_as_well_and_a_row_is_the_rendering_of_the_conversation(
    kind, content, answer, said
):
    renderer, oracle = pair(kind, CHATML)
    (end,) = renderer.stop_token_ids
    asked, reply = [{"role": "user", "content": content}], {"role": "assistant", "content": said}
    answers = [{"role": "user", "content": answer}]
    row = renderer.prompt_ids(asked)
    whole = oracle_ids(oracle, [*asked, reply, *answers])
    known = oracle_ids(oracle, [*asked, reply], generation=False)
    assume(known[: len(row)] == row)  # else a token joins the prompt and the reply
    sampled = known[len(row) :]
    sampled = sampled[: sampled.index(end) + 1]
    row += sampled + renderer.continuation_ids(answers, before=asked, said=reply, end=end)
    assert row == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_a_spelling_has_the_ids_of_apply_chat_template(kind):
    renderer, _ = pair(kind, TRIMS)
    tokenizer = renderer.tokenizer
    messages = [{"role": "user", "content": " what <tool_response> é <|file|>\n"}]
    assert renderer.prompt_ids(messages) == tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


def test_a_reply_keeps_its_tags_and_spells_no_turn():
    renderer, _ = pair("byte BPE", CHATML)
    token = renderer.tokenizer.convert_tokens_to_ids
    said = {"role": "assistant", "content": "<think>no</think><|im_end|>yes"}
    user = {"role": "user", "content": "<think>a</think>"}
    ids = renderer.prompt_ids([user, said, user])
    assert (ids.count(token("<think>")), ids.count(token("</think>"))) == (1, 1)
    assert ids.count(token("<|im_end|>")) == 3
    assert renderer.whole(ids) == renderer.tokenizer.apply_chat_template(
        [user, said, user], add_generation_prompt=True, tokenize=False
    )


def test_a_token_that_appears_only_when_letters_are_normalised_is_text_too():
    """The vocabulary of a unigram model has the names of control tokens."""
    renderer, _ = pair("unigram", CHATML)
    end = renderer.tokenizer.convert_tokens_to_ids("</s>")
    wide = "what \uff1c/s\uff1e it"
    plain = renderer.tokenizer.encode(wide, add_special_tokens=False)
    ids = renderer.prompt_ids([{"role": "user", "content": wide}])
    assert end in plain, "else this test shows nothing"
    assert end not in ids


def test_stop_tokens_that_are_not_special_and_turn_tokens_of_the_template_are_control():
    tokenizer = tokenizer_of("byte BPE")
    tokenizer.add_tokens([added("<eot>", special=False), added("<User>", special=False)])
    tokenizer.chat_template = "{% for m in messages %}<User>{{ m.content }}<eot>{% endfor %}"
    stop, turn = tokenizer.convert_tokens_to_ids(["<eot>", "<User>"])
    renderer = Renderer(tokenizer, extra_stop=[stop])
    ids = renderer.prompt_ids([{"role": "user", "content": "a <eot> b <User> c"}])
    assert (ids.count(stop), ids.count(turn)) == (1, 1)
    assert renderer.text([*tokenizer.encode("yes", add_special_tokens=False), stop], ids) == "yes"


def test_a_template_that_goes_by_a_spelling_refuses_it():
    renderer, _ = pair("byte BPE", "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    with pytest.raises(ControlInText, match="'</think>'"):
        renderer.prompt_ids([{"role": "user", "content": "a</think>b"}])


@given(st.lists(st.sampled_from(["<|im_", "end|>", "<s>", "a", " "]), min_size=2, max_size=6))
def test_without_a_template_messages_are_text_and_rendered_prompts_are_not(parts):
    tokenizer = tokenizer_of("byte BPE") if "bare" not in MADE else MADE["bare"]
    MADE["bare"] = tokenizer
    tokenizer.chat_template = None
    messages = [{"role": "user", "content": part} for part in parts]
    ids = Renderer(tokenizer).prompt_ids(messages)
    start, control = tokenizer.bos_token_id, set(tokenizer.all_special_ids)
    assert ids[0] == start
    assert control.isdisjoint(ids[1:])
    assert tokenizer.decode(ids[1:]) == "".join(parts)
    tokenizer.chat_template = CHATML
    rendered = Renderer(tokenizer, rendered=True).prompt_ids(messages)
    whole = tokenizer.encode("".join(parts), add_special_tokens=False)
    assert rendered == tuple(whole if whole[0] == start else [start, *whole]), "also a stop token at its end"


@pytest.mark.parametrize(("template", "missing"), [(CHATML, "<s>"), (TRIMS, ""), (None, "")])
def test_a_start_that_the_template_lacks_is_named(template, missing):
    assert missing_start(pair("byte BPE", template or "")[0]) == missing


# ---------------------------------------------------------------------------------- in runs


class Asked(FakeEnvironment):
    """Answers the first turn with a text, and ends with the second."""

    def __init__(self, answer):
        super().__init__(
            lambda episode: Feedback(reward=1.0, done=episode.turn == 1, messages=answer(episode.prompt)),
            max_turns=2,
        )


def test_an_answer_that_cannot_stay_text_fails_its_rollout_alone_and_is_counted():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    renderer, _ = pair("byte BPE", template)
    incidents = []

    async def story():
        engine = FakeEngine(reply=lambda request, rng: "yes")
        await engine.update_weights(VERSION_0)
        return await play(
            [RolloutRequest(prompt=each, seed=1, group=each.id) for each in prompts(3)],
            engine=engine,
            environments={"task": Asked(lambda prompt: "a</think>b" if prompt.id == "1" else "a<|im_end|>b")},
            renderer=renderer,
            sampling=SAMPLING,
        )

    with reported_to(incidents.append):
        rollouts = asyncio.run(story())
    assert [rollout.reward for rollout in rollouts] == [2.0, None, 2.0]
    assert "'</think>'" in rollouts[1].error
    assert not rollouts[1].lost, "the engine lost nothing"
    assert [incident.kind for incident in incidents] == ["control_in_text"]


def test_prompts_that_spell_control_tokens_are_counted_and_said_with_the_first():
    renderer, _ = pair("byte BPE", CHATML)
    some = [
        Prompt(
            messages=f"what {'<|im_end|>' if number % 16 == 7 else number}", id=str(number), environment="t"
        )
        for number in range(200)
    ]
    found = partial(spelling, held_out=[], prompts={"t": some}, environments={"t": FakeEnvironment()})
    messages = asyncio.run(found(renderer))
    (message,) = messages.values()
    assert "13 of 200 prompts spell control tokens (first: id 7, <|im_end|>); they are text" in message
    rendered = Renderer(renderer.tokenizer, rendered=True)
    assert not asyncio.run(found(rendered))


ENVIRONMENT = """
import grpo_core as grpo

class Any(grpo.Environment):
    def evaluate(self, episodes):
        return [float(len(each.reply) % 2) for each in episodes]
"""


@pytest.mark.slow
def test_a_prompt_that_cannot_stay_text_is_refused_before_the_run_with_its_id_and_the_token(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_of("byte BPE")
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes)
    ).save_pretrained(tmp_path / "model")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    rows = [{"prompt": text, "id": f"row{i}"} for i, text in enumerate(["hello", "a</think>b", "bye"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "goes_by_it.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    )
    message = refused(
        tmp_path, "train", "--output", "run", "--set", "tasks.t.env=./env.py:Any", "--set",
        "tasks.t.data=rows.jsonl", "--set", "model.path=model", "--set",
        "model.chat_template=goes_by_it.jinja", "--set", "trainer.steps=1", "--set", "validation.every=0",
    )  # fmt: skip
    assert "'row1'" in message
    assert "'</think>'" in message


# ---------------------------------------------------------------------------------- templates from outside

OUTSIDE = st.lists(
    st.sampled_from(
        [" ", "\n", "what", "<|im_end|>", "</think>", "<|eot_id|>", "</s>", "<think>", "[/INST]"]
    ),
    max_size=5,
).map("".join)


@pytest.mark.nightly
@settings(max_examples=40)
@given(contents=st.tuples(OUTSIDE, OUTSIDE))
@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in GIVEN.items()])
def test_templates_from_outside_write_no_control_token_that_a_text_spells(template, contents):
    """Control tokens are as many as with a word in place of each spelling, and the text is what it was."""
    tokenizer = make_tokenizer(template, (*ends_of(template), "<|im_end|>", "</think>", "<think>"))
    renderer = Renderer(tokenizer)
    control = set(tokenizer.all_special_ids)
    talk = [user("what" + contents[0]), said("yes"), user(contents[1] + "why")]
    words = [
        user(re.sub(r"<[^>]*>|\[/INST]", "word", each["content"])) if each["role"] == "user" else each
        for each in talk
    ]
    try:
        ids, others = renderer.prompt_ids(talk), renderer.prompt_ids(words)
    except ControlInText:
        REFUSED.add(template)
        return
    except ModelError:
        return
    assert [each for each in ids if each in control] == [each for each in others if each in control]
    shown = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == shown


REFUSED = set()
"""Templates that go by a spelling."""
