"""The rollouts in a report: their selection, and browsing them on the page."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from html import unescape

import numpy as np
import pytest
import recording
import webdriver
from attrs import evolve

from grpo_core import Group, Prompt, Rollout, Run, Segment, Tokens
from grpo_core.config import Config, TaskConfig, TrackingConfig
from grpo_core.contracts.events import GroupsReady, RunEnded, StepEnded, ValidationPlayed
from grpo_core.demo.tiny import write_tokenizer
from grpo_plugin_report import browsing, report
from grpo_plugin_report.watch import WatchServer

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror='window.hurt=2'><!--\u2028\u202e&amp;"
MASKED = Tokens(
    ids=[3, 4, 5, 6],
    sampled=[True, True, False, True],
    logprobs=[-0.25, -3.0, 0.0, -70.0],
    versions=[1, 2, -1, 2],
)


def rollout(question, reply, reward, **more):
    messages = ({"role": "user", "content": question}, *([reply] if isinstance(reply, dict) else reply))
    segment = Segment(prompt_ids=(1, 2), tokens=MASKED)
    given = {"finish_reason": "stop", "turns": 1, "advantage": reward - 0.5, "trained": True} | more
    return Rollout(segments=[segment], messages=messages, reward=reward, **given)


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def group(task, name, rollouts, step):
    prompt = Prompt(messages=f"question {name}", id=name, environment=task, answer="42")
    return Group(prompt=prompt, rollouts=tuple(rollouts), generation_version=step, target_version=step)


CALLED = [
    said("", reasoning_content="I should ask", tool_calls=[
        {"type": "function", "id": "1", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}]),
    {"role": "tool", "name": "multiply", "content": "42", "tool_call_id": "1"},
    said("it is 42"),
]  # fmt: skip


def story():
    """Two steps of two tasks, and two validations with the same prompt."""
    for step in (0, 1):
        q, r = "question p", "question r"
        yield ValidationPlayed(step=step, version=step, groups=(
            group("sort", "v", [rollout("question v", said(f"version {step} said"), step, advantage=None,
                                        trained=False)], step),
        ))  # fmt: skip
        yield GroupsReady(step=step, groups=(
            group("sort", "p", [rollout(q, CALLED, 1.0), rollout(q, said(HOSTILE), 0.0)], step),
            group("chat", f"r{step}", [
                rollout(r, said("Needle in it"), 0.25, finish_reason="length"),
                rollout(r, said("no"), 0.75, error="<b>broke</b>"),
            ], step),
        ))  # fmt: skip
        yield StepEnded(step=step + 1, metrics={"time/step": 1.0, "reward/sort": 0.5, "groups/sort": 1.0})
    yield RunEnded(step=2, reason="finished")


def record(path, events, **options):
    tracking = TrackingConfig(trackers=["files", "report"], options={"files": options} if options else {})
    config = Config(tasks={task: TaskConfig(env="math:sort") for task in ("sort", "chat")}, tracking=tracking)
    recording.record(path, events, config)
    return (path / report.REPORT).read_text(encoding="utf-8")


def stored(html):
    """Return what the page holds for its browser."""
    begin = html.index('<section id="browser"')
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html[begin:], re.S)[1])


# ---------------------------------------------------------------------------------- what the page holds


def test_the_page_holds_each_rollout_with_its_messages_calls_and_reasoning(tmp_path):
    html = record(tmp_path / "run", story())
    groups = stored(html)["groups"]
    assert "All 10 stored rollouts." in html
    assert [(g["set"], g["step"]) for g in groups].count(("training", 1)) == 2
    (sort,) = (g for g in groups if (g["step"], g["prompt"]) == (1, "p"))
    assert sort["messages"] == [{"role": "user", "text": "question p"}], "once for the group"
    first, second = sort["rollouts"]
    assert first["messages"] == [
        {"role": "assistant", "thoughts": "I should ask", "calls": [["multiply", '{"a": 6, "b": 7}']]},
        {"role": "tool", "name": "multiply", "text": "42"},
        {"role": "assistant", "text": "it is 42"},
    ]
    assert (first["reward"], first["advantage"], second["reward"]) == (1.0, 0.5, 0.0)


def test_tokens_are_packed_with_logprobs_versions_and_mask(tmp_path):
    page = stored(record(tmp_path / "run", story()))
    (one,) = (g for g in page["groups"] if (g["step"], g["prompt"]) == (1, "p"))
    tokens = one["rollouts"][0]["tokens"]
    ids = np.frombuffer(b64decode(tokens["ids"]), "<u2")
    assert [page["pieces"][place] for place in ids] == ["#3", "#4", "#5", "#6"], "there is no tokenizer"
    assert np.frombuffer(b64decode(tokens["logprobs"]), "<u2").tolist() == [250, 3000, 0, 65535]
    assert tokens["mask"] == [0, 2, 1, 1]
    assert tokens["versions"] == [1, 1, 2, 2]


def test_the_tokenizer_of_the_run_gives_the_texts_of_tokens(tmp_path):
    run = tmp_path / "run"
    record(run, story())
    (run / "model").mkdir()
    write_tokenizer(run / "model")
    text = browsing.token_texts(run, None)
    assert len(text(4)) == 1
    assert text(10**6) == "#1000000"
    (run / "model" / "tokenizer.json").write_text("{")
    assert browsing.token_texts(run, None)(4) == "#4"


def test_what_is_not_stored_is_said_and_not_invented(tmp_path):
    without = stored(record(tmp_path / "without", story(), tokens=False))
    assert {one["untold"] for g in without["groups"] for one in g["rollouts"]} == {"none"}
    run = tmp_path / "damaged"
    record(run, story())
    for path in run.glob("rollouts/*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])
    html = report.write(run).read_text(encoding="utf-8")
    told = {
        one.get("untold") for g in stored(html)["groups"] if g["set"] == "training" for one in g["rollouts"]
    }
    assert told == {"damaged"}
    assert "2 lines could not be read" in html


def test_a_step_whose_rollouts_all_failed_has_no_tokens_and_is_not_damaged(tmp_path):
    failed = evolve(rollout("question v", said("lost"), 0.0), segments=())
    html = record(tmp_path / "run", [ValidationPlayed(groups=(group("sort", "v", [failed], 0),), version=0)])
    (one,) = stored(html)["groups"][0]["rollouts"]
    assert one["untold"] == "none"
    assert "All 1 stored rollouts; without tokens." in html
    assert "could not be read" not in html


def test_a_page_has_a_bounded_size_and_keeps_the_same_prompts_of_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(browsing, "TEXT_ROOM", 40_000)
    monkeypatch.setattr(browsing, "TOKEN_ROOM", 3_000)

    def long():
        for step in range(6):
            names = [f"p{i}" for i in range(20)]
            yield GroupsReady(step=step, groups=tuple(
                group("sort", name, [rollout("question", said("x" * 400), r) for r in (0.0, 1.0)], step)
                for name in (names if step % 2 else reversed(names))
            ))  # fmt: skip

    html = record(tmp_path / "run", long())
    page = stored(html)
    assert len(json.dumps(page["groups"])) < 60_000
    kept = [frozenset(g["prompt"] for g in page["groups"] if g["step"] == step) for step in range(1, 7)]
    assert 1 < len(frozenset.intersection(*kept)) < 20
    told = [one.get("untold") for g in page["groups"] for one in g["rollouts"]]
    assert {None, "room"} == set(told)
    assert re.search(
        r"\d+ of the 240 stored rollouts, .*; \d+ of them with their tokens; the run's folders",
        unescape(html),
    )


def test_of_a_group_that_does_not_fit_the_best_and_the_worst_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(browsing, "TEXT_ROOM", 1700)
    rewards = (0.5, 0.25, 1.0, 0.5, 0.0, 0.75)
    rollouts = [rollout("question", said("x" * 400), reward) for reward in rewards]
    page = stored(record(tmp_path / "run", [GroupsReady(step=0, groups=(group("sort", "p", rollouts, 0),))]))
    (one,) = page["groups"]
    assert [(each["place"], each["reward"]) for each in one["rollouts"]] == [(2, 1.0), (4, 0.0)]


def test_a_long_message_loses_its_middle():
    told = browsing.message({"role": "user", "content": "a" * 20_000 + "b" * 20_000})["text"]
    assert "[... 28,000 characters ...]" in told
    assert told.startswith("aaa")
    assert told.endswith("bbb")


@pytest.mark.parametrize(
    "line",
    [{}, {"messages": 3}, {"messages": [{"tool_calls": [1, {"function": 2}]}]},
     {"reward": True, "metrics": [1]},
     {"prompt_messages": "x", "messages": [{"content": [1, {"text": 2}, {"image": {}}]}]}],
)  # fmt: skip
def test_lines_of_any_shape_are_shown_as_far_as_they_can_be(tmp_path, line):
    (tmp_path / "config.toml").touch()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text(json.dumps(line) + "\n")
    assert len(stored(report.write(tmp_path).read_text())["groups"]) == 1


def test_texts_end_no_script(tmp_path):
    html = record(tmp_path / "run", story())
    begin = html.index('<section id="browser"')
    packed = re.search(r'<script type="application/json">(.*?)</script>', html[begin:], re.S)[1]
    assert "<" not in packed
    assert "window.hurt" in packed


# ---------------------------------------------------------------------------------- in a browser

in_chromium = [pytest.mark.long, pytest.mark.skipif(bool(webdriver.absent()), reason=webdriver.absent())]


@pytest.fixture(scope="module")
def chromium():
    with webdriver.browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    record(path, story())
    return path


def opened(chromium, page, fragment=""):
    chromium.said()
    chromium.open(f"file://{page}/report.html{fragment}")
    return chromium


def current(chromium):
    return chromium.run("return document.querySelector('[aria-current]').dataset.key")


def listed(chromium):
    return chromium.run("return [...document.querySelectorAll('.list button')].map(one => one.dataset.key)")


@pytest.mark.parametrize(
    ("fragment", "number"),
    [("", 10), ("#task=chat", 4), ("#set=validation", 2), ("#from=2&set=training", 4), ("#to=0", 1),
     ("#low=0.5&high=0.8", 2), ("#finish=length", 2), ("#text=NEEDLE", 2), ("#text=multiply", 2),
     ("#text=should+ask", 2), ("#task=chat&finish=length&from=2", 1), ("#text=nowhere", 0),
     ("#text=broke", 2), ("#text=42", 10)],
)  # fmt: skip
class TestFilters:
    pytestmark = in_chromium

    def test_show_what_fits_them(self, chromium, page, fragment, number):
        opened(chromium, page, fragment)
        assert len(listed(chromium)) == number
        assert chromium.run("return document.querySelector('output').value") == f"{number} of 10 rollouts"
        assert chromium.said() == []


class TestReading:
    pytestmark = in_chromium

    def test_no_text_of_a_rollout_becomes_markup(self, chromium, page):
        opened(chromium, page, "#show=t1.0.1")
        assert "window.hurt=1" in chromium.run("return document.querySelector('.rollout').textContent")
        assert chromium.run("return window.hurt") is None
        assert chromium.run("return document.querySelectorAll('img, .pane b').length") == 0
        assert chromium.said() == []

    def test_a_rollout_shows_its_messages_tools_and_reasoning(self, chromium, page):
        opened(chromium, page, "#show=t1.0.0")
        told = chromium.run("return document.querySelector('.rollout').innerText")
        for text in ("question p", "reasoning\nI should ask", 'calls multiply {"a": 6, "b": 7}',
                     "tool multiply", "it is 42", "expected answer 42"):  # fmt: skip
            assert text in told, text

    def test_filters_work_by_hand_and_are_kept_in_the_address(self, chromium, page):
        opened(chromium, page)
        chromium.run("document.forms[0].elements.text.focus()")
        chromium.press(*"needle")
        assert listed(chromium) == ["t2.1.0", "t1.1.0"]
        assert "text=needle" in chromium.run("return location.hash")
        chromium.run("document.querySelector('.list button').focus()")
        chromium.press("\ue015", "\ue007")  # down, enter
        assert "show=t1.1.0" in chromium.run("return location.hash")
        assert current(chromium) == "t1.1.0"

    def test_the_newest_rollout_is_shown_and_the_shown_one_fits_the_filters(self, chromium, page):
        opened(chromium, page)
        chromium.run("sessionStorage.clear()")
        opened(chromium, page)
        assert current(chromium) == listed(chromium)[0] == "t2.0.0"
        for steps, first in (("1", "v1.0.0"), ("0", "v0.0.0")):
            chromium.run(f"const to = document.forms[0].elements.to; to.value = {steps};"
                         "to.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
            assert current(chromium) == listed(chromium)[0] == first
        assert "show" not in chromium.run("return location.hash"), "a page loaded again shows the newest"

    def test_the_best_and_the_worst_of_the_newest_validation_are_at_the_top(self, chromium, page):
        opened(chromium, page)
        told = chromium.run("return document.querySelector('.Learning .ends').innerText")
        for text in ("version 1", "sort, all alike: reward 1", "question v", "version 1 said", "expected 42"):
            assert text in told, text
        for text in ("at step 0: reward", "version 0 said"):
            assert text in told, f"the reply before training: {text}"
        chromium.run("document.querySelector('.ends button').click()")
        heading = "document.querySelector('.rollout h3').textContent"
        shown = chromium.run(f"return new Promise(done => setTimeout(() => done({heading})))")
        assert "Validation of version 1, rollout 1" in shown

    def test_a_run_without_a_validation_has_those_of_its_newest_step(self, chromium, tmp_path):
        record(tmp_path / "run", [event for event in story() if not isinstance(event, ValidationPlayed)])
        opened(chromium, tmp_path / "run")
        told = chromium.run("return document.querySelector('.Learning .ends').innerText")
        for text in ("newest step, 2", "chat, best: reward 0.75", "chat, worst: reward 0.25", HOSTILE[:20]):
            assert text in told, text

    def test_a_menu_leads_to_each_section_and_leaves_the_address_as_it_is(self, chromium, page):
        opened(chromium, page, "#task=chat")
        heads = "return [...document.querySelectorAll('h2')].map(one => one.firstChild.textContent.trim())"
        assert chromium.run("return [...document.querySelectorAll('nav a')].map(one => one.textContent)") == (
            chromium.run(heads)
        )
        before = chromium.run("return location.hash")
        chromium.run("[...document.querySelectorAll('nav a')].at(-2).click()")
        assert chromium.run("return document.querySelector('#browser h2').getBoundingClientRect().top") < 100
        assert chromium.run("return location.hash") == before

    def test_a_curve_is_zoomed_by_keys_buttons_and_a_mouse(self, chromium, tmp_path):
        steps = [StepEnded(step=n, metrics={"loss": n / 100}) for n in range(1, 101)]
        record(tmp_path / "run", [*steps, RunEnded(step=100, reason="finished")])
        opened(chromium, tmp_path / "run")
        figure = "[...document.querySelectorAll('.Health figure')].at(-1)"
        shown = f"return [...{figure}.querySelectorAll('.steps text')].map(one => one.textContent)"
        clip = f"return {figure}.querySelector('.plot').getAttribute('clip-path')"
        path = f"return {figure}.querySelector('.line').getAttribute('d')"
        whole, drawn = chromium.run(shown), chromium.run(path)
        chromium.run(f"{figure}.querySelector('svg').focus()")
        chromium.press("\ue010", "+", "+", "+")  # the last step
        assert (chromium.run(shown)[0], chromium.run(shown)[-1]) == ("90", "100")
        assert chromium.run(clip).startswith("url(#plot-")
        assert chromium.run(path) != drawn
        chromium.press("\ue011")  # the first step, to which it moves
        assert "step 1\n" in chromium.run(f"return {figure}.querySelector('.tip').textContent")
        assert int(chromium.run(shown)[-1]) < 20
        chromium.press("-", "-", "-")
        assert (chromium.run(shown), chromium.run(clip), chromium.run(path)) == (whole, None, drawn)
        chromium.run(f"{figure}.querySelector('.zoom button').click()")
        assert chromium.run(clip)
        chromium.press("\ue00c")  # escape
        assert chromium.run(clip) is None
        chromium.run(f"{figure}.scrollIntoView({{block: 'center'}})")
        left, top, width = chromium.run(
            f"const box = {figure}.querySelector('svg').getBoundingClientRect();"
            "return [box.left, box.top + box.height / 2, box.width]"
        )
        chromium.drag(left + width / 2, left + width * 0.75, top)
        labels = [int(one) for one in chromium.run(shown)]
        assert 40 < labels[0] < labels[-1] < 80
        assert not chromium.said()

    @pytest.mark.parametrize(
        ("colour", "classes"),
        [("logprob", ["logprob-1", "logprob-4", "unsampled", "logprob-5"]),
         ("advantage", ["advantage-1", "advantage-1", "unsampled", "advantage-1"]),
         ("version", ["version-0", "version-1", "unsampled", "version-1"]),
         ("mask", ["mask-0", "mask-0", "unsampled", "mask-0"])],
    )  # fmt: skip
    def test_tokens_are_marked_by_a_number_of_theirs(self, chromium, page, colour, classes):
        opened(chromium, page, f"#show=t1.0.0&colour={colour}")
        spans = "return [...document.querySelectorAll('.coloured > span')].map(one => one.className)"
        assert chromium.run(spans) == classes
        assert chromium.run("return document.querySelector('input:checked').value") == colour

    def test_the_arrow_keys_read_the_numbers_of_a_token(self, chromium, page):
        opened(chromium, page, "#show=t1.0.0")
        chromium.run("document.querySelector('.coloured').focus()")
        reading = "return document.querySelector('.reading').textContent"
        chromium.press("\ue014")
        assert chromium.run(reading) == 'token 1 of 4, "#3": logprob -0.25, advantage 0.5, version 1'
        chromium.press("\ue014", "\ue014")
        assert "not sampled by the engine" in chromium.run(reading)
        chromium.press("\ue010")  # end
        assert "logprob -65.5 or less" in chromium.run(reading)

    def test_two_versions_are_compared_on_the_same_prompt(self, chromium, page):
        opened(chromium, page, "#show=v0.0.0")
        options = "return [...document.querySelectorAll('.compare option')].map(one => one.value)"
        assert chromium.run(options) == ["", "v1.0.0"]
        chromium.run("document.querySelector('.compare select').focus()")
        chromium.press("\ue015")  # down
        heads = "return [...document.querySelectorAll('.rollout h3')].map(one => one.firstChild.textContent)"
        assert chromium.run(heads) == [
            "Validation of version 0, rollout 1",
            "Validation of version 1, rollout 1",
        ]
        assert chromium.run("return document.querySelectorAll('.two .rollout').length") == 2
        times = chromium.run("return document.querySelector('.compare ul').textContent")
        assert "validation of version 1: mean reward 1 of 1 rollout" in times

    def test_a_watched_page_keeps_what_is_read_when_it_is_loaded_again(self, chromium, page):
        async def main():
            server = WatchServer(Run(page), refresh=0)
            url = await server.start()
            try:
                await asyncio.to_thread(chromium.open, url + "#task=chat&show=t1.1.0")
                await asyncio.to_thread(chromium.open, url)
                return await asyncio.to_thread(listed, chromium), chromium.said()
            finally:
                await server.aclose()

        chromium.said()
        assert asyncio.run(main()) == (["t2.1.0", "t2.1.1", "t1.1.0", "t1.1.1"], [])


@pytest.mark.long
@pytest.mark.skipif(bool(webdriver.absent()), reason=webdriver.absent())
def test_nothing_is_wider_than_a_phone(page):
    with webdriver.browser() as phone:
        phone.narrow(420)
        opened(phone, page, "#show=t1.0.1")
        assert phone.run("return innerWidth") == 420
        assert phone.run("return document.documentElement.scrollWidth") == 420
        assert phone.run("return document.querySelector('.pane').offsetWidth") > 300
