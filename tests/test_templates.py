"""Chat templates are rendered as transformers renders them, and none computes for ever."""

from __future__ import annotations

import time

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
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(ModelError, match="the chat template cannot render messages of user: "):
        make_renderer(HOSTILE[name]).prompt_ids([user("hi")])
    assert time.thread_time() - began < 5, "most of it makes the tokenizer"


@pytest.mark.long
def test_the_clock_begins_anew_with_each_rendering(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    renderer = make_renderer("{% for a in range(30000) %}{% endfor %}{{ messages[0].content }}")
    began = time.thread_time()
    while time.thread_time() - began < 0.4:
        assert renderer._text([user("hi")], generation=True) == "hi"


def test_a_model_with_a_hostile_template_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.2)
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
    monkeypatch.setattr(templates, "_now", lambda form: minute[0])
    renderer = make_renderer("{{ strftime_now('%M') }}" + PLAIN)
    asked, reply, first = [user("what")], said("yes"), user("again")
    assert renderer.continuation_ids([first], before=asked, said=reply, end=None) is not None
    minute[0] = "2"
    before = [*asked, reply, first]
    assert renderer.continuation_ids([user("why")], before=before, said=reply, end=None) is not None
