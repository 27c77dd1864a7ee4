"""Conversations that a chat template renders turn by turn."""

from __future__ import annotations

from datetime import datetime

import pytest
from test_segments import PLAIN, TOOL, make_renderer, said, user
from transformers.utils import chat_template_utils

from grpo_core.contracts.errors import ModelError
from grpo_core.text.rendering import Rendered


def test_what_a_template_raises_is_reported_as_before():
    renderer = make_renderer("{{ raise_exception('only users, please') }}")
    with pytest.raises(ModelError, match="cannot render messages of user: only users, please"):
        renderer.prompt_ids([user("hi")])


def test_a_turn_renders_what_is_new_and_a_fork_what_it_continues():
    renderer = make_renderer(PLAIN)
    rendered = []
    text = renderer.render
    renderer.render = lambda messages, **options: rendered.append(len(messages)) or text(messages, **options)
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
    kept = Rendered(most=10)
    talks = [(user(str(i)),) for i in range(5)]
    for talk in talks:
        kept.keep(talk, (), "1234")
    assert [kept.find(talk, ()) for talk in talks] == [None, None, None, "1234", "1234"]
    assert kept.find(talks[-1], (TOOL,)) is None
    kept.keep(talks[-1], (TOOL,), "12")
    assert (kept.find(talks[-1], (TOOL,)), kept.find(talks[-2], ())) == ("12", "1234")


def test_a_template_that_shows_the_time_is_rendered_again(monkeypatch):
    """Its text of a minute ago is not how the conversation begins now, which would end the segment."""
    minute = ["1"]

    class Clock(datetime):
        def strftime(self, form):
            return minute[0]

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    renderer = make_renderer("{{ strftime_now('%M') }}" + PLAIN)
    asked, reply, first = [user("what")], said("yes"), user("again")
    assert renderer.continuation_ids([first], before=asked, said=reply, end=None) is not None
    minute[0] = "2"
    before = [*asked, reply, first]
    assert renderer.continuation_ids([user("why")], before=before, said=reply, end=None) is not None
