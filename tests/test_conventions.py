"""Replies, reasoning and tool calls are read by the response format as the chat template writes them."""

from __future__ import annotations

import asyncio
import sys

import pytest
from test_first_look import Tools
from test_response_formats import QWEN3
from test_segments import OPENS, PLAIN, make_tokenizer

from grpo_core import Environment, Prompt
from grpo_core.config import Config, EnvironmentConfig, ValidationConfig
from grpo_core.diagnosis.conventions import REPLIES, WITH_CALLS, misread, unstopped_end
from grpo_core.diagnosis.first_look import first_look
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.models.files import chat_template
from grpo_core.testing import HostedEnvironment
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import HeldOut

SHOWN = "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"


def calling(call, join="", thought=""):
    """A template that writes each call of a tool like this, and reasoning if there is a way."""
    calls = (
        f"{{% for c in m.tool_calls or [] %}}{{% if not loop.first %}}{join}{{% endif %}}{call}{{% endfor %}}"
    )
    return SHOWN + PLAIN.replace("{{ m.content }}", thought + "{{ m.content }}" + calls)


JSON = calling("<tool_call>\n{{ c.function | tojson }}\n</tool_call>")
THINKS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
XML = calling(
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    thought=THINKS,
)
"""Calls as those of Qwen3.5."""
TOGETHER = calling("{% if loop.first %}<tool_call>{% endif %}{{ c.function | tojson }}", join="\n").replace(
    "{% endfor %}<|end|>", "{% endfor %}{% if m.tool_calls %}</tool_call>{% endif %}<|end|>"
)
"""All calls of a message between one pair of tags."""
ONE_CALL = (
    "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
    + JSON
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def renderer(template, response_format="auto", *, ends=("<|end|>", "<|im_end|>")):
    tokenizer = make_tokenizer(template or PLAIN, ends)
    tokenizer.chat_template = template
    tokenizer.add_tokens([*QWEN3, *VISION])
    stops = tokenizer.convert_tokens_to_ids(list(ends))
    return Renderer(tokenizer, extra_stop=stops, response_format=response_format)


READ = {
    "plain": PLAIN,
    "opens the reasoning": OPENS.replace("call>", "tool_call>"),
    "json": JSON,
    "one call": ONE_CALL,
    "no calls": calling("", thought=THINKS),
    "reasoning and json": JSON.replace("{{ m.content }}", THINKS),
    "chatml": chat_template("chatml"),
    "no template": None,
}


@pytest.mark.parametrize("name", READ)
def test_a_template_that_the_format_reads_is_not_warned_about(name):
    assert misread(renderer(READ[name]), [*REPLIES, *WITH_CALLS]) == ""


def test_calls_in_xml_are_not_read_as_json_and_the_key_and_its_value_are_named():
    told = misread(renderer(XML), WITH_CALLS)
    assert told.startswith(
        "the chat template writes a tool call as '<tool_call>\\n<function=find>\\n<parameter=what>"
    )
    assert "and model.response_format = 'auto' reads that as something else" in told
    assert "'qwen3.5'" in told.partition("model.response_format; ")[2]
    assert misread(renderer(XML), REPLIES) == ""


def test_the_format_that_is_named_reads_them():
    its = renderer(XML, "qwen3.5")
    assert misread(its, WITH_CALLS) == misread(its, REPLIES) == ""
    assert "writes a tool call as" in misread(renderer(JSON, "qwen3.5"), WITH_CALLS)


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers.configs", None)
    told = misread(renderer(XML), WITH_CALLS)
    assert told.endswith("model.response_format (pip install 'grpo-core[formats]')")


def test_several_calls_in_one_message_are_read_back_too():
    assert "writes several tool calls as" in misread(renderer(TOGETHER), WITH_CALLS)


def test_reasoning_between_other_marks_is_named():
    marked = THINKS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    told = misread(renderer(calling("", thought=marked)), REPLIES)
    assert told.startswith("the chat template writes reasoning as '[THINK]\\nFirst I look.\\n[/THINK]")


def test_a_reply_that_begins_with_the_name_of_its_channel_is_named():
    template = PLAIN.replace("<|start|>assistant\n", "<|start|>assistant").replace(
        "{{ m.role }}\n", "{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final<|message|>{% endif %}"
    )
    assert "writes a reply as '<|channel|>final<|message|>It is done." in misread(renderer(template), REPLIES)


def test_a_call_after_which_no_completion_stops_is_named():
    goes_on = JSON.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}<|tool|>{% endif %}{{ m.content }}"
    ).replace(
        "<|end|>\n{% endfor %}{% if add", "{% if not m.tool_calls %}<|end|>{% endif %}\n{% endfor %}{% if add"
    )
    assert unstopped_end(renderer(JSON), [], call=True) == ""
    assert unstopped_end(renderer(goes_on), []) == ""
    assert "</tool_call>" in unstopped_end(renderer(goes_on), [], call=True)
    assert unstopped_end(renderer(goes_on), ["</tool_call>"], call=True) == ""


class Agent(Environment):
    def prompts(self, split):
        return [Prompt(messages="?", answer="x")]

    async def run(self, prompt, client):
        return 1.0


def pool_of(environment, agents=None):
    pool = EnvironmentPool([HostedEnvironment(environment, task="sums")], EnvironmentConfig())
    pool.player = agents
    return pool


def looked(environment, its, agents=None):
    async def story():
        pool = pool_of(environment, agents)
        await pool.start()
        prompts = {"sums": [Prompt(messages="1+1=", answer="2")]}
        return await first_look(Config(), its, [], prompts, {"sums": pool})

    return asyncio.run(story())


@pytest.mark.parametrize(("environment", "agents"), [(Tools(), None), (Agent(), object())])
def test_a_run_whose_tool_calls_would_all_fail_is_warned_about_before_its_first_step(environment, agents):
    told = looked(environment, renderer(XML), agents)
    assert list(told) == ["misread_calls"]
    assert told["misread_calls"].startswith(
        "the tool calls of task 'sums' fail: the chat template writes a tool call"
    )
    assert looked(environment, renderer(XML, "qwen3.5"), agents) == {}


def test_a_run_without_tools_is_not_warned_about_calls():
    class Plain(Tools):
        tools = ()
        max_turns = 1

    assert looked(Plain(), renderer(XML)) == {}


def test_a_validation_whose_tool_calls_would_all_fail_says_so_before_it_plays():
    async def story(its):
        pool = pool_of(Tools())
        await pool.start()
        prompts = {"set": [Prompt(messages="1+1=", answer="2")], "nothing": []}
        part = HeldOut(config=ValidationConfig(), prompts=prompts, environments=dict.fromkeys(prompts, pool))
        return await first_look(Config(), its, [part])

    (told,) = asyncio.run(story(renderer(XML))).values()
    assert told.startswith("the tool calls of task 'set' fail: the chat template writes a tool call")
    assert asyncio.run(story(renderer(JSON))) == {}
