"""Models as users bring them: Qwen3 with reasoning and tools, base models with nothing but a vocabulary.

With ``GRPO_CORE_TEMPLATES`` set to a folder, its templates with "qwen3" in their names are trained, too.
"""

from __future__ import annotations

import json

import pytest
from forks import grpo
from test_segments import FORGETS, GIVEN, make_tokenizer, train

from grpo_core.text.rendering import Renderer

CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
QWEN3 = FORGETS.replace(
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}", CALLS
)
QWEN3 = QWEN3.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
ENDS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATES = {"ours": QWEN3} | {name: text for name, text in GIVEN.items() if "qwen3" in name.lower()}

SHOP = """
import grpo_core as grpo

class Shop(grpo.Environment):
    max_turns = 6

    def prompts(self, split):
        return [grpo.Prompt(messages=f"what is the price of tea {i}") for i in range(24)]

    def open(self, prompt):
        return Till()

    def evaluate(self, episodes):
        users = [sum(message["role"] == "user" for message in episode.messages) for episode in episodes]
        return [
            grpo.Feedback(reward=len(episode.reply) % 3 / 2, done=asked == 2, messages="and of cake")
            for episode, asked in zip(episodes, users)
        ]

class Till:
    def price(self, item: str) -> str:
        '''Look a price up.

        Args:
            item: what to buy.
        '''
        return "7"
"""


def shopping(item):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": item}}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": "no price yet", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "7"},
        {"role": "assistant", "content": "it is 7", "reasoning_content": "there it is"},
    ]


def make_qwen3(path, template):
    """A small Qwen3 that has seen a few conversations."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(template, ENDS)
    tokenizer.add_tokens(list(TAGS))  # not special: they are part of what is said
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    talks = []
    for end in (1, 3, 4):
        asked = {"role": "user", "content": "what is the price of tea 0"}
        talk = [asked, *shopping("tea"), {"role": "user", "content": "and of cake"}, *shopping("cake")][
            : end + 1
        ]
        text = tokenizer.apply_chat_template(talk[: 2 if end == 1 else 4], tokenize=False)
        talks.append(tokenizer.encode(text, add_special_tokens=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        ids = torch.tensor([talks[step % len(talks)]])
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def trained(source, model, cwd, **settings):
    """Train, verify, and return the lines of the metrics."""
    done = train(source, model, cwd, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    grpo(cwd, "verify", "run").check_returncode()
    return [json.loads(line) for line in (cwd / "run" / "metrics.jsonl").read_text().splitlines()]


def values(metrics, name):
    return [each[key] for each in metrics for key in each if key.startswith(name)]


@pytest.mark.nightly
@pytest.mark.parametrize("response_format", ["auto", pytest.param("qwen3", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in TEMPLATES.items()])
def test_a_model_that_reasons_is_trained_over_turns_and_tools(tmp_path, template, response_format):
    make_qwen3(tmp_path / "qwen3", template)
    metrics = trained(SHOP, tmp_path / "qwen3", tmp_path, **{"model.response_format": response_format})
    assert max(values(metrics, "tool_calls/")) > 0.5, metrics
    assert max(values(metrics, "segments/")) > 1.0, "the reasoning is forgotten with the second question"


TALK = """
import grpo_core as grpo

class Talk(grpo.Environment):
    max_turns = 3

    def prompts(self, split):
        return [grpo.Prompt(messages=f"WHAT IS {i}? ") for i in range(24)]

    def evaluate(self, episodes):
        return [
            grpo.Feedback(reward=len(e.reply) % 3 / 2, done=e.turn == 2, messages=" GO ON ") for e in episodes
        ]
"""


def make_base_model(path):
    """A model without a chat template and without tokens that end or pad; its tokenizer lowers all text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        ["what is this go on yes no"] * 9, trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"])
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert (made.eos_token, made.pad_token, made.chat_template) == (None, None, None)
    assert made.decode(made.encode("WHAT IS 7?")) != "WHAT IS 7?"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    made.save_pretrained(path)


@pytest.mark.slow
def test_a_base_model_without_end_and_padding_whose_text_does_not_survive_is_trained(tmp_path):
    make_base_model(tmp_path / "base")
    assert Renderer.load(str(tmp_path / "base")).stop_token_ids == ()
    metrics = trained(
        TALK,
        tmp_path / "base",
        tmp_path,
        **{"rollout.stop": '["a", "i", "o", "s"]', "rollout.max_tokens": 40},
    )
    assert max(values(metrics, "turns/")) > 1.5
    assert set(values(metrics, "segments/")) == {1.0}
