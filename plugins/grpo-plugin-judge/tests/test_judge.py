"""Judges over HTTP: scores, outages, retries, limits, the cache, and several judges.

A server on the loopback address plays the judges: the model's name says what it does.
"""

import asyncio
import contextlib
import gzip
import json
import sqlite3
import time

import pytest
from aiohttp import web

import grpo_core as grpo
from grpo_core.kit import EnvironmentProcess, EnvironmentSpec
from grpo_core.testing import make_offer, run
from grpo_plugin_judge.asking import Asker, Cache, JudgeModel, Pace, whole
from grpo_plugin_judge.environment import Judge
from grpo_plugin_judge.rubric import PATTERN, TEMPLATE, Rubric


def answering(body, **headers):
    return lambda: web.Response(body=body, headers={"Content-Type": "application/json", **headers})


def saying(content):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "x", "choices": [choice]}
    )


NINE = saying("Score: 9").encode()
LIES = {
    "a page": answering(b"<html>Score: 9</html>"),
    "nothing": answering(b""),
    "null": answering(b"null"),
    "a list": answering(b"[]"),
    "a number": answering(b"9"),
    "choices that are text": answering(b'{"choices": "Score: 9"}'),
    "a choice that is null": answering(b'{"choices": [null]}'),
    "a message that is null": answering(b'{"choices": [{"index": 0, "message": null}]}'),
    "a content that is a list": answering(saying(["Score: 9"]).encode()),
    "a content that is a number": answering(saying(9).encode()),
    "half a character": answering(saying("\ud800 I am not sure").encode()),
    "deep": answering(b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no UTF-8": answering(b"\xff" + NINE),
    "a bomb": answering(gzip.compress(b" " * 20_000_000 + NINE), **{"Content-Encoding": "gzip"}),
    "no gzip": answering(b"Score: 9", **{"Content-Encoding": "gzip"}),
    "blanks": answering(saying("\n".join(["Score:" + " " * 3000] * 300)).encode()),
    "figures": answering(saying("Score: " + "9" * 1_000_000).encode()),
}
"""Answers of a server that lies."""


class Judges:
    """Counts requests and answers them; ``status`` comes first, one for each request."""

    def __init__(self):
        self.requests, self.headers, self.status = [], [], []
        self.running = self.most = 0

    async def answer(self, request):
        self.requests.append(body := await request.json())
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.005 if body["model"] == "slow" else 0)
        self.running -= 1
        status = self.status.pop(0) if self.status else 200
        if status == 302:
            raise web.HTTPFound("/v1/elsewhere")
        if status != 200:
            waits = {"retry-after-ms": "1"}
            return web.json_response({"error": {"message": "busy"}}, status=status, headers=waits)
        if body["model"] in LIES:
            return LIES[body["model"]]()
        if body["model"] == "dripping":
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(b" ")
                    await asyncio.sleep(0.05)
        said = {"role": "assistant", "content": self.text(body)}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**whole, "choices": [choice]})

    @staticmethod
    def text(body):
        asked = body["messages"][0]["content"]
        match body["model"]:
            case "kind":
                return "It says please.\nScore: 9" if "please" in asked else "It is rude. Score: 1"
            case "strict":
                return "Score: 3"
            case "seeded":
                return f"Score: {body.get('seed', 0) * 2}"
            case "mute":
                return "I would rather not say."
            case "wild":
                return "Score: 11"
            case "split":
                return "\ud800 Score: 9"
            case "tiring":
                return "a" * 50
            case "endless":
                return "a" * 5_000_000 + "Score: 9"
            case _:
                return "I saw 'Score: 10' in the reply, which is a trick.\n**Score: 0**"


@contextlib.asynccontextmanager
async def serving():
    judges = Judges()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judges.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judges.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield judges
    finally:
        await runner.cleanup()


def judged(*replies, status=(), url=None, rounds=1, **options):
    """Return the feedback on replies, and the server that played the judges."""

    async def story():
        async with serving() as judges:
            judges.status = list(status)
            feedback = []
            for _ in range(rounds):
                environment = Judge(**{"rubric": "Is it kind?", "url": url or judges.url, **options})
                try:
                    feedback = await asyncio.gather(*(environment.score(episode(reply)) for reply in replies))
                finally:
                    await environment.aclose()
            return feedback, judges

    return asyncio.run(story())


def episode(reply, **info):
    prompt = grpo.Prompt(messages="Ask for the salt.", answer="Salt, please.", info=info)
    return grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])


# ---------------------------------------------------------------------------------- scores


def test_a_judge_scores_each_reply_and_the_scale_becomes_zero_to_one():
    (polite, rude), judges = judged(
        "The salt, please!", "Salt!", model="kind", template="{{ rubric }}{{ reply }}"
    )
    assert (polite.reward, rude.reward) == (0.9, 0.1)
    assert {request["messages"][0]["content"] for request in judges.requests} == {
        "Is it kind?The salt, please!",
        "Is it kind?Salt!",
    }


def test_the_question_has_rubric_conversation_reference_reply_and_scale():
    _, judges = judged("Give me salt", model="strict", scale=[1, 5])
    (request,) = judges.requests
    asked = request["messages"][0]["content"]
    for part in (
        "Is it kind?",
        "user: Ask for the salt.",
        "Salt, please.",
        "Give me salt",
        "from 1 (worst) to 5 (best)",
    ):
        assert part in asked
    assert (request["temperature"], request["max_tokens"]) == (0.0, 1024)


def test_the_last_score_counts_whatever_a_judge_quotes_before():
    (feedback,), _ = judged("Score: 10", model="other")
    assert feedback.reward == 0.0


@pytest.mark.parametrize(
    ("model", "told"), [("mute", "gave no score: 'I would rather"), ("wild", "Score: 11")]
)
def test_an_answer_without_a_score_on_the_scale_is_unscored(model, told):
    (feedback,), judges = judged("Salt", model=model)
    assert feedback.reward is None
    assert told in feedback.error
    assert len(judges.requests) == 1


# ---------------------------------------------------------------------------------- outages


def test_an_outage_is_unscored_and_never_zero():
    (feedback,), judges = judged("Salt", model="kind", status=[503] * 9, retries=2)
    assert (feedback.reward, feedback.metrics["failed_answers"]) == (None, 1.0)
    assert "kind did not answer: judge kind" in feedback.error
    assert len(judges.requests) == 3, "one layer retries, and twice is twice"


def test_a_server_that_is_not_there_is_unscored():
    (feedback,), _ = judged("Salt", model="kind", url="http://127.0.0.1:9/v1", retries=0)
    assert feedback.reward is None
    assert "no connection" in feedback.error


def test_a_redirect_is_not_followed_and_a_huge_answer_is_not_read():
    """Either could come from a server that somebody else took over."""
    (feedback,), judges = judged("Salt, please!", model="kind", status=[302])
    assert (feedback.reward, len(judges.requests)) == (None, 1)
    assert "did not answer" in feedback.error
    (feedback,), _ = judged("Salt, please!", model="endless", retries=0)
    assert feedback.reward is None
    assert "more than 4,194,304 bytes" in feedback.error


def test_a_busy_server_is_asked_again():
    (feedback,), judges = judged("please", model="kind", status=[429, 500], retries=2)
    assert (feedback.reward, len(judges.requests)) == (0.9, 3)


def test_a_judge_that_is_away_says_so_and_one_that_answers_nonsense_does_not():
    (feedback,), _ = judged("Salt", model="kind", status=[503] * 9, retries=0)
    assert feedback.unavailable is not None
    (feedback,), _ = judged("Salt", model="mute", retries=0)
    assert feedback.reward is None
    assert feedback.unavailable is None
    (feedback,), _ = judged("Salt, please!", model="endless", retries=0)
    assert feedback.unavailable is None


def test_a_wrong_request_is_not_repeated():
    (feedback,), judges = judged("please", model="kind", status=[400] * 9)
    assert "status 400" in feedback.error
    assert len(judges.requests) == 1


# ---------------------------------------------------------------------------------- several judges


@pytest.mark.long
def test_several_judges_are_combined_and_their_agreement_is_a_metric():
    judges = [{"model": "kind"}, {"model": "strict", "name": "strict"}, {"model": "kind"}]
    (feedback,), _ = judged("please", judges=judges)
    assert feedback.reward == pytest.approx(0.7)
    assert feedback.metrics == {
        "cached": 0.0, "failed_answers": 0.0, "score_1": 0.9, "score_strict": 0.3, "score_3": 0.9,
        "spread": pytest.approx(0.6), "agreement": pytest.approx(1 / 3),
    }  # fmt: skip
    for combine, reward in (("median", 0.9), ("min", 0.3)):
        (feedback,), _ = judged("please", judges=judges, combine=combine)
        assert feedback.reward == reward


def test_votes_of_one_judge_have_different_seeds_and_show_its_noise():
    (feedback,), judges = judged("please", model="seeded", votes=3)
    assert sorted(request.get("seed", 0) for request in judges.requests) == [0, 1, 2]
    assert feedback.reward == pytest.approx((0 + 0.2 + 0.4) / 3)
    assert feedback.metrics["noise"] == pytest.approx((0.08 / 3) ** 0.5)


def test_a_quorum_is_enough_when_a_judge_is_out():
    judges = [{"model": "kind"}, {"model": "mute"}]
    (all_needed,), _ = judged("please", judges=judges)
    assert all_needed.error.startswith("1 of 2 answers have a score, 2 are needed: mute gave no score")
    (one_needed,), _ = judged("please", judges=judges, quorum=1)
    assert (one_needed.reward, one_needed.metrics["failed_answers"]) == (0.9, 1.0)


# ---------------------------------------------------------------------------------- lies


@pytest.mark.parametrize("lie", LIES)
def test_a_judge_that_lies_has_no_score_and_the_other_ones_count(lie, tmp_path):
    judges = [{"model": lie}, {"model": "kind"}]
    begin = time.monotonic()
    (feedback,), _ = judged("please", judges=judges, quorum=1, retries=0, cache=tmp_path / "answers")
    assert (feedback.reward, feedback.metrics["failed_answers"]) == (0.9, 1.0)
    assert time.monotonic() - begin < 10


def test_a_score_next_to_half_a_character_is_kept(tmp_path):
    assert judged("please", model="split", cache=tmp_path / "answers")[0][0].reward == 0.9


def test_an_answer_is_asked_for_as_it_is():
    _, judges = judged("please", model="kind")
    assert judges.headers[0]["Accept-Encoding"] == "identity"


def test_an_answer_that_never_ends_is_late():
    (feedback,), _ = judged("please", model="dripping", retries=0, timeout=0.5)
    assert "no answer within 0.5 s" in feedback.error


@pytest.mark.long
def test_a_slow_pattern_is_given_up_and_holds_up_nobody():
    async def story():
        async with serving() as judges:
            environment = Judge(
                rubric="?", model="tiring", url=judges.url, pattern="((?:a|a)*)[bc]", retries=0
            )
            judging, ticks = asyncio.create_task(environment.score(episode("please"))), 0
            while not judging.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await environment.aclose()
            return judging.result(), ticks

    feedback, ticks = asyncio.run(story())
    assert feedback.reward is None
    assert "pattern takes more than 1 s" in feedback.error
    assert ticks > 20


# ---------------------------------------------------------------------------------- cost


def test_the_cache_on_disk_answers_the_same_question_the_second_time(tmp_path):
    path = tmp_path / "deep" / "answers.sqlite"
    (feedback,), judges = judged("please", model="kind", cache=path, rounds=2)
    assert (feedback.reward, feedback.metrics["cached"], len(judges.requests)) == (0.9, 1.0, 1)


@pytest.mark.parametrize(
    "changed", [{"rubric": "Is it short?"}, {"model": "strict"}, {"parameters": {"seed": 5}}]
)
def test_another_question_is_not_answered_by_the_cache(tmp_path, changed):
    async def story():
        async with serving() as judges:
            first = {
                "rubric": "Is it kind?",
                "model": "kind",
                "url": judges.url,
                "cache": tmp_path / "a.sqlite",
            }
            for options in (first, {**first, **changed}):
                environment = Judge(**options)
                await environment.score(episode("please"))
                await environment.aclose()
            return len(judges.requests)

    assert asyncio.run(story()) == 2


def test_a_cache_that_another_process_locks_costs_a_question_and_no_answer(tmp_path):
    path = tmp_path / "a.sqlite"

    async def asked(url, *replies):
        environment = Judge(rubric="Is it kind?", model="kind", url=url, cache=path)
        feedback = await asyncio.gather(*(environment.score(episode(reply)) for reply in replies))
        await environment.aclose()
        return [(each.reward, each.metrics["cached"]) for each in feedback]

    async def story():
        async with serving() as judges:
            assert await asked(judges.url, "please") == [(0.9, 0.0)]
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                begin = time.monotonic()
                assert await asked(judges.url, "please", "please!") == [(0.9, 1.0), (0.9, 0.0)]
                assert time.monotonic() - begin < 5, "all judging waits for the file"
            assert await asked(judges.url, "please!") == [(0.9, 0.0)], "what was not written is asked again"
            assert await asked(judges.url, "please!") == [(0.9, 1.0)]

    asyncio.run(story())


def test_an_answer_without_a_score_is_not_kept(tmp_path):
    _, judges = judged("please", model="mute", cache=tmp_path / "a.sqlite", rounds=2)
    assert len(judges.requests) == 2


def test_requests_begin_at_the_pace_that_is_allowed():
    async def story():
        pace, begun = Pace(requests_per_minute=30), []

        async def request():
            await pace.wait()
            begun.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(request() for _ in range(4)))
        return begun

    assert run(story()) == [0.0, 2.0, 4.0, 6.0]


class Counted(Pace):
    """Counts the requests that it lets begin."""

    def __init__(self):
        super().__init__(requests_per_minute=0)
        self.begun = 0

    async def wait(self):
        self.begun += 1
        await super().wait()


def test_a_request_that_is_tried_again_keeps_to_the_pace_as_well():
    async def story():
        async with serving() as judges:
            judges.status = [429, 503]
            pace, model = Counted(), JudgeModel(model="kind", url=judges.url)
            asker = Asker(model, cache=Cache(None), pace=pace, timeout=10.0, retries=4)
            try:
                found = await asker.score([{"role": "user", "content": "please"}], 0, lambda text: 1.0)
            finally:
                await asker.aclose()
            return found, pace.begun, len(judges.requests)

    assert asyncio.run(story()) == ((1.0, False), 3, 3)


def test_the_deadline_has_room_for_the_pace_of_every_try():
    def deadline(requests_per_minute):
        return Judge(
            rubric="?", model="kind", url="http://127.0.0.1:1/v1", requests_per_minute=requests_per_minute,
            requests_at_once=10, votes=2, retries=2,
        ).deadline  # fmt: skip

    assert deadline(60) - deadline(0) == 10 * 2 * (1 + 2) * 1.0


@pytest.mark.long
def test_a_run_judges_many_replies_at_once_and_the_key_comes_from_a_variable(monkeypatch):
    """The environment runs in its own process, as in a run."""
    monkeypatch.setenv("SALT_KEY", "of-salt")

    async def story():
        async with serving() as judges:
            options = {"rubric": "?", "model": "slow", "url": judges.url, "key_variable": "SALT_KEY",
                       "requests_at_once": 5}  # fmt: skip
            process = EnvironmentProcess(EnvironmentSpec(task="salt", env="judge:openai", options=options))
            await process.start()
            try:
                feedback = await process.evaluate([episode(f"{i} please") for i in range(20)])
            finally:
                await process.aclose()
            return feedback, judges

    feedback, judges = asyncio.run(story())
    assert [each.reward for each in feedback] == [0.0] * 20
    assert 1 < judges.most <= 5
    assert {headers["Authorization"] for headers in judges.headers} == {"Bearer of-salt"}


# ---------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": ""}, "model is ''; expected a text"),
        ({"rubric": " "}, "rubric is empty"),
        ({"scale": [10, 0]}, "expected [lowest, highest]"),
        ({"pattern": "Score: ("}, "is not a regular expression"),
        ({"pattern": "Score"}, "needs one group"),
        ({"template": "{% if %}"}, "the template cannot be read"),
        ({"judges": [{"modle": "a"}]}, "has no key 'modle'. Did you mean 'model'?"),
        ({"judges": [{"name": "a"}, {"name": "a"}]}, "two judges have the same name"),
        ({"votes": 0}, "expected votes >= 1"),
        ({"quorum": 2}, "a quorum of at most 1"),
        ({"retries": -1}, "retries = -1"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(options, why):
    given = {"rubric": "Is it kind?", "model": "kind", "url": "http://127.0.0.1:1/v1", **options}
    with pytest.raises(grpo.PluginError) as raised:
        make_offer("environment", "judge:openai", plugins=["judge"], **given)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2


def test_a_template_is_sandboxed_and_says_what_it_misses():
    environment = Judge(rubric="", model="kind", url="http://127.0.0.1:1/v1", template="{{ nothing }}")
    with pytest.raises(grpo.PluginError, match="'nothing' is undefined"):
        asyncio.run(environment.score(episode("please")))
    environment = Judge(rubric="", model="kind", url="http://127.0.0.1:1/v1", template="{{ answer }}")
    with pytest.raises(grpo.PluginError, match="a value is None; write another text for it"):
        asyncio.run(environment.score(grpo.Episode(prompt=grpo.Prompt(messages="x"), messages="x")))
    steals = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    environment = Judge(rubric="", model="kind", url="http://127.0.0.1:1/v1", template=steals)
    with pytest.raises(grpo.PluginError, match="unsafe"):
        asyncio.run(environment.score(episode("please")))


def test_a_judge_can_be_a_gated_part_of_compose(tmp_path):
    (tmp_path / "right.py").write_text(
        "class Right:\n"
        "    def prompts(self, split):\n        return []\n"
        "    def evaluate(self, episodes):\n        return [float('salt' in e.reply) for e in episodes]\n"
    )

    async def story():
        async with serving() as judges:
            options = {"rubric": "Is it kind?", "model": "kind", "url": judges.url, "template": "{{ reply }}"}
            parts = {
                "right": {"env": f"{tmp_path}/right.py:Right"},
                "kind": {
                    "env": "judge:openai",
                    "weight": 0.5,
                    "requires": {"right": 1.0},
                    "options": options,
                },
            }
            environment = make_offer("environment", "compose", plugins=["judge"], parts=parts)
            feedback = await environment.evaluate([episode("salt, please"), episode("pepper, please")])
            await environment.aclose()
            return feedback, judges

    (right, wrong), judges = asyncio.run(story())
    assert (right.reward, wrong.reward) == (1.45, 0.0)
    assert len(judges.requests) == 1, "only what is right is worth a judge's time"
    assert json.loads(json.dumps(dict(right.metrics)))["kind_cached"] == 0.0


PARTS = {
    "cut off in a thought": ("<think>A careless judge would write Score: 2. But the letter", "length", None),
    "cut off in its score": ("Excellent in each respect.\nScore: 1", "length", None),
    "cut off by other words": ("Excellent.\nScore: 1", "max_tokens", None),
    "stopped by a filter": ("Score: 9", "content_filter", None),
    "a call of a tool": ("Score: 9", "tool_calls", None),
    "only a thought has a score": (
        "<think>Perhaps Score: 3?</think>I cannot judge this reply.",
        "stop",
        None,
    ),
    "an open thought": ("<think>Perhaps Score: 3?", "stop", None),
    "a thought and a score": ("<think>Perhaps Score: 3?</think>Polite.\nScore: 9", "stop", 0.9),
    "a quote and a score": ("Others would say Score: 3.\nScore: 9", "stop", 0.9),
    "a server without reasons": ("Score: 9", None, 0.9),
}


@pytest.mark.parametrize("label", PARTS)
def test_a_part_of_an_answer_has_no_verdict(label):
    text, reason, expected = PARTS[label]
    said = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    rubric = Rubric("polite", TEMPLATE, PATTERN, (0.0, 10.0))
    try:
        found = rubric.score(whole(said))
    except ValueError:
        found = None
    assert found == expected


def test_a_refusal_has_no_verdict():
    message = {"role": "assistant", "content": "Score: 0", "refusal": "I cannot judge that"}
    with pytest.raises(ValueError, match="refuses"):
        whole({"index": 0, "finish_reason": "stop", "message": message})
