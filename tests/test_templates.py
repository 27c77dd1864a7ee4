"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

import pytest
from test_segments import (
    FORGETS,
    JSON_ARGUMENTS,
    NO_END,
    OPENS,
    PLAIN,
    TOOL,
    TOOLS_LAST,
    make_renderer,
    make_tokenizer,
    said,
    user,
)

from grpo_core.errors import ModelError
from grpo_core.loop import templates
from grpo_core.models import chat_template

LOOPS = (
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{{ loop.previtem.role if not loop.first }}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{{ loop.cycle('a', 'b') }}{% else %}nobody{% endfor %}"
    "{% for name in missing %}x{% else %}none{% endfor %}"
)
RECURSIVE = "{% for p in tools or [] recursive %}{{ p }}({{ loop([p.function]) if p.function }}){% endfor %}"
MACROS = (
    "{% macro show(m, mark='-') %}{{ mark * 3 }}{{ m.content | trim | upper }}{{ caller() if caller }}"
    "{% endmacro %}{% for m in messages %}{{ show(m) }}{% call show(m, mark='+') %}!{% endcall %}{% endfor %}"
    "{{ 2 ** 10 }} {{ 3 * 4 }} {{ 'a' ~ 1 }} {{ messages[::-1] | map(attribute='role') | join(', ') }}"
)
GENERATION = (
    "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
JSON = (
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages[0] | tojson(separators=(',', ':')) }}"
)
TOKENS = "{{ bos_token }}{% if documents %}{{ documents }}{% endif %}{{ strftime_now('%Y') }}{{ eos_token }}"

SAME = {
    "plain": PLAIN, "forgets": FORGETS, "opens": OPENS, "tools last": TOOLS_LAST, "no end": NO_END,
    "json arguments": JSON_ARGUMENTS, "chatml": chat_template("chatml"), "loops": LOOPS,
    "recursive": RECURSIVE, "macros": MACROS, "generation": GENERATION, "json": JSON, "tokens": TOKENS,
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_template_is_rendered_as_transformers_renders_it(name):
    tokenizer = make_tokenizer(SAME[name])
    renderer = make_renderer(SAME[name])
    talk = [user(" what\nis it "), said("<think>\nso\n</think>\n\nyes <&>\N{SNOWMAN}"), user("again")]
    for messages in (talk[:1], talk, talk + talk, [{"role": "system", "content": "be good"}, *talk]):
        for tools in ([], [TOOL]):
            theirs = tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
            assert renderer._text(messages, generation=True, tools=tools) == theirs


def test_what_a_template_raises_is_told_as_before():
    renderer = make_renderer("{{ raise_exception('only users, please') }}")
    with pytest.raises(ModelError, match="cannot render messages of user: only users, please"):
        renderer.prompt_ids([user("hi")])


def test_a_turn_renders_what_is_new_and_a_fork_what_it_continues():
    renderer = make_renderer(PLAIN)
    rendered = []
    text = renderer._text
    renderer._text = lambda messages, **options: rendered.append(len(messages)) or text(messages, **options)
    asked, reply = [user("what")], said("yes")
    end = renderer.stop_token_ids[0]

    def goes_on(before, *messages):
        rendered.clear()
        return renderer.continuation_ids(list(messages), before=before, said=reply, end=end)

    first, again = user("again"), said("no")
    once = goes_on(asked, first)
    assert rendered == [1, 3], "the beginning, and the whole"
    assert goes_on([*asked, reply, first], user("why")) is not None
    assert rendered == [5], "the beginning is what was rendered last"
    assert goes_on(asked, first) == once
    goes_on([*asked, again, first], user("why"))
    assert rendered == [3, 5], "another reply makes another conversation"


def test_only_so_many_texts_are_kept():
    kept = templates.Rendered(most=10)
    talks = [(user(str(i)),) for i in range(5)]
    for talk in talks:
        kept.keep(talk, (), "1234")
    assert [kept.find(talk, ()) for talk in talks] == [None, None, None, "1234", "1234"]
    assert kept.find(talks[-1], (TOOL,)) is None
    kept.keep(talks[-1], (TOOL,), "12")
    assert (kept.find(talks[-1], (TOOL,)), kept.find(talks[-2], ())) == ("12", "1234")


def test_a_template_that_tells_the_time_is_rendered_anew(monkeypatch):
    """Its text of a minute ago is not how the conversation begins now, which would end the segment."""
    minute = ["1"]
    monkeypatch.setattr(templates, "_now", lambda form: minute[0])
    renderer = make_renderer("{{ strftime_now('%M') }}" + PLAIN)
    asked, reply, first = [user("what")], said("yes"), user("again")
    assert renderer.continuation_ids([first], before=asked, said=reply, end=None) is not None
    minute[0] = "2"
    before = [*asked, reply, first]
    assert renderer.continuation_ids([user("why")], before=before, said=reply, end=None) is not None
