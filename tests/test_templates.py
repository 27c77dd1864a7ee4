"""Chat templates are rendered as transformers renders them; none computes for ever or fills the memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from jinja2.exceptions import SecurityError
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
from grpo_core.loop import sandbox, templates
from grpo_core.loop.rendering import Renderer
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
    renderer.check_time()


HOSTILE = {
    "loops": "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "loops over a list": (
        "{% set items = range(10**5) | list %}{% for a in items %}{% for b in items %}{% for c in items %}x"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "filters in a loop": "{% for a in range(10**5) %}{{ range(10**5) | list | sort | length }}{% endfor %}",
    "recursion that branches": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}"
    ),
    "a recursive loop": (
        "{% for n in [1] * 9 recursive %}{% if loop.depth < 20 %}{{ loop([1] * 9) }}{% endif %}{% endfor %}"
    ),
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of a float's digits": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "squares": (
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}"
    ),
    "a long text": "{{ 'a' * 10 ** 12 }}",
    "a long list": "{{ ([1] * 10 ** 6 * 10 ** 6) | length }}",
    "a text that doubles by *": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}"
    ),
    "a wide text": "{{ 'a' | center(10 ** 12) }}",
    "a method": "{{ 'a'.ljust(10 ** 12) }}",
    "slices": "{{ [1] | slice(10 ** 12) | list }}",
    "blind text": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_computes_for_ever_is_refused_in_time(name, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(ModelError, match="the chat template cannot render messages of user: "):
        make_renderer(HOSTILE[name]).prompt_ids([user("hi")])
    assert time.thread_time() - began < 5, "most of it makes the tokenizer"


DOUBLES = (
    "{{% set n = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set n.x = {twice} %}}{{% endfor %}}"
)
THOUSAND = "{% set a = 'a' * 1000 %}"
GREEDY = {
    "a text that doubles by +": DOUBLES.format(first="'a'", twice="n.x + n.x"),
    "a text that doubles by ~": DOUBLES.format(first="'a'", twice="n.x ~ n.x"),
    "a list that doubles": DOUBLES.format(first="[1]", twice="n.x + n.x"),
    "a list that doubles, written": DOUBLES.format(first="[1]", twice="[n.x, n.x]") + "{{ n.x }}",
    "a list that doubles, joined": DOUBLES.format(first="[1]", twice="[n.x, n.x]") + "{{ n.x ~ '' }}",
    "a list that doubles, as JSON": DOUBLES.format(first="[1]", twice="[n.x, n.x]") + "{{ n.x | tojson }}",
    "a list that doubles, as a text": DOUBLES.format(first="[1]", twice="[n.x, n.x]") + "{{ n.x | string }}",
    "a block that doubles": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}"
    ),
    "a macro that doubles": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLES.format(first="'a'", twice="f(n.x)")
    ),
    "a format that doubles": DOUBLES.format(first="'a'", twice="'{0}{0}'.format(n.x)"),
    "a % that doubles": DOUBLES.format(first="'a'", twice="'%s%s' % (n.x, n.x)"),
    "a sum of lists": THOUSAND + "{{ ([[1] * 10 ** 6] * 10 ** 6) | sum(start=[]) | length }}",
    "replace": "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
    "replace, as a filter": "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
    "replace nothing": "{{ ('a' * 10 ** 6) | replace('', 'b' * 10 ** 6) }}",
    "join": THOUSAND + "{{ ([a] * 10 ** 6) | join(a) }}",
    "join, as a method": THOUSAND + "{{ a.join([a] * 10 ** 6) }}",
    "join what is mapped": THOUSAND + "{{ range(10 ** 5) | map('string') | join(a * 100) }}",
    "indent": "{{ ('a\n' * 10 ** 5) | indent(10 ** 6) }}",
    "tabs": "{{ ('\t' * 10 ** 6).expandtabs(10 ** 6) }}",
    "JSON": "{{ ([1] * 10 ** 6) | tojson(indent=10 ** 6) }}",
    "a width": "{{ '{:999999999}'.format(1) }}",
    "a width of %": "{{ '%999999999d' % 1 }}",
    "a width that is given": "{{ '{:{w}}'.format(1, w=999999) * 1000 }}",
    "a width of % that is given": "{{ '%*d' % (999999999, 1) }}",
    "a format, as a filter": "{{ '%999999999d' | format(1) }}",
    "many slices": (
        "{% set n = namespace(x=[]) %}{% set a = 'a' * 10 ** 6 %}{% for i in range(1000) %}"
        "{% set n.x = n.x + [a[1:]] %}{% endfor %}"
    ),
    "much output": "{% set a = 'a' * 10 ** 6 %}{% for i in range(10 ** 5) %}{{ a }}{% endfor %}",
    "much output of a macro": (
        "{% macro f() %}{% set a = 'a' * 10 ** 6 %}{% for i in range(10 ** 5) %}{{ a }}{% endfor %}"
        "{% endmacro %}{% set x = f() %}"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_makes_too_much_is_refused_before_it_has_made_it(name, monkeypatch):
    monkeypatch.setattr(sandbox, "MADE", 2_000_000)
    monkeypatch.setattr(sandbox, "SECONDS", 1)  # lists within lists are counted slowly here
    template = templates.ChatTemplate(GREEDY[name])
    tracemalloc.start()
    try:
        with pytest.raises(SecurityError, match=r"2,000,000 characters|above 100$|above 999$|more than 1 s"):
            template.render({})
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_what_conversations_need_is_far_below_the_bound(monkeypatch):
    monkeypatch.setattr(sandbox, "MADE", 40_000)
    wide = "{{ '{:>12,}: {}%'.format(10 ** 6, 5) }}{{ '%8.3f' % 1.5 }}{{ {'at': 1.7} | tojson(indent=4) }}"
    talk = [user("x" * 1000), said("y" * 1000)] * 10
    text = make_renderer(wide + PLAIN)._text(talk, generation=True)
    assert text.startswith('   1,000,000: 5%   1.500{\n    "at": 1.7\n}')
    assert text.count("x") >= 10_000


@pytest.mark.long
def test_the_clock_begins_anew_with_each_rendering(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    renderer = make_renderer("{% for a in range(30000) %}{% endfor %}{{ messages[0].content }}")
    began = time.thread_time()
    while time.thread_time() - began < 0.4:
        assert renderer._text([user("hi")], generation=True) == "hi"


def test_a_model_with_a_hostile_template_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    make_tokenizer(HOSTILE["loops"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 500, "max_position_embeddings": 100}')
    with pytest.raises(ModelError, match=r"messages of user: it computes for more than 0\.2 s; use another"):
        Renderer.load(str(tmp_path))


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
    monkeypatch.setattr(sandbox, "_now", lambda form: minute[0])
    renderer = make_renderer("{{ strftime_now('%M') }}" + PLAIN)
    asked, reply, first = [user("what")], said("yes"), user("again")
    assert renderer.continuation_ids([first], before=asked, said=reply, end=None) is not None
    minute[0] = "2"
    before = [*asked, reply, first]
    assert renderer.continuation_ids([user("why")], before=before, said=reply, end=None) is not None
