"""Sessions of agents: what is sampled is trained once, whatever the agent does with its conversation."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import sys

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_segments import FORGETS, JSON_ARGUMENTS, NO_END, OPENS, OTHER_END, PLAIN, TOOL, TOOLS_LAST
from test_segments import make_renderer as renderer_of

from grpo_core import AgentClient, Completion, EngineError, Feedback, Limits, Play, Prompt
from grpo_core.kit import reported_to
from grpo_core.testing import FakeRenderer, run
from grpo_plugin_agents.dialects import CHAT
from grpo_plugin_agents.repeats import Attempt
from grpo_plugin_agents.session import Session, attempt_digest, played

CLIENT = AgentClient(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")
MANY = Limits(max_tokens=100, max_turns=1000, context=100_000)


class Says:
    """An engine that says each text once, in tokens that are known by their logprobs."""

    def __init__(self, renderer, *texts, seconds=lambda: 1.0, fault=lambda: False):
        self.renderer, self.texts, self.seconds, self.fault = renderer, itertools.cycle(texts), seconds, fault
        self.said = []
        self.count = itertools.count(1)
        self.version = 0

    async def generate(self, requests):
        await asyncio.sleep(self.seconds())
        if self.fault():
            raise EngineError("engine fake: asked again, please")
        return [self.say(request) for request in requests]

    def say(self, request):
        ids = self.encoded(next(self.texts), request)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        completion = Completion(
            token_ids=ids,
            logprobs=[-next(self.count) / 1e6 for _ in ids],
            versions=[self.version + i // 2 for i, _ in enumerate(ids)],
            finish_reason="length" if cut else "stop",
        )
        self.said.append((request, completion))
        return completion

    def encoded(self, text, request):
        if isinstance(self.renderer, FakeRenderer):
            return tuple(map(ord, text))
        return (*self.renderer.encode(text), self.renderer.stop_token_ids[0])


async def at_once(work, size):
    """Stand in for the renderer's thread, which virtual time does not wait for."""
    return work()


def make_session(engine, renderer, limits=MANY, **options):
    return Session(client=CLIENT, play=a_play(engine, renderer, limits=limits), **options)


def a_play(engine, renderer, **given):
    """Return a rollout as a player gets it."""
    given = {"seed": 1, "group": "g", "limits": MANY, **given}
    return Play(prompt=Prompt(messages="?"), engine=engine, renderer=renderer, run=None, **given)


async def ask(session, body, *, dialect=CHAT, key="", retries=None, gone=lambda: False):
    raw = json.dumps(body).encode()
    attempt = Attempt(body=attempt_digest("/", raw), key=key, retries=retries, gone=gone)
    call, reply = await session.reply(dialect, raw, attempt)
    if not gone():
        session.delivered(call, attempt)
    return reply.status, json.loads(reply.body)


def check(recording, engine):
    """Each sampled token is in one segment, after the tokens that the model read when it was sampled."""
    made = {
        bytes(done.logprobs.tobytes()): (request, done) for request, done in engine.said if len(done.tokens)
    }
    found = []
    for segment in recording.segments:
        tokens, place = segment.tokens, 0
        whole = [*segment.prompt_ids.tolist(), *tokens.ids.tolist()]
        while place < len(tokens):
            if not tokens.sampled[place]:
                place += 1
                continue
            before = whole[: len(segment.prompt_ids) + place]
            end = place
            while end < len(tokens) and tokens.sampled[end]:
                end += 1
            key = tokens.logprobs[place:end].tobytes()
            assert key in made, "a run of sampled tokens is one completion"
            request, done = made[key]
            assert request.prompt_ids.tolist() == before
            assert tokens.ids[place:end].tolist() == done.token_ids.tolist()
            assert tokens.versions[place:end].tolist() == done.versions.tolist()
            found.append(key)
            place = end
    assert sorted(found) == sorted(made), "every completion is trained once"
    assert sum(map(bool, recording.turn_tokens)) == len(made)


# ---------------------------------------------------------------------------------- what a session keeps


def kept_by(*roots):
    """Return the bytes of all objects that these lead to, and the messages among them."""
    size, messages, seen, left = 0, 0, set(), list(roots)
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        size += each.nbytes if isinstance(each, np.ndarray) else sys.getsizeof(each)
        messages += isinstance(each, dict) and "role" in each
        left += gc.get_referents(each)
    return size, messages


async def talked(turns, renderer):
    """Return a session of so many turns; each adds 100 tokens."""
    renderer.run = at_once
    session = make_session(Says(renderer, "y" * 50, seconds=lambda: 0.0), renderer)
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": "x" * 50})
        status, reply = await ask(session, {"messages": messages})
        assert status == 200
        messages.append(reply["choices"][0]["message"])
    return session


def test_a_session_keeps_what_was_said_once_however_often_it_is_sent():
    async def kept(turns):
        session = await talked(turns, FakeRenderer())
        assert len(session.recorder.recording().turn_tokens) == turns
        return kept_by(session.recorder, session._replies)

    (few, _), (many, messages) = run(kept(30), seed=0), run(kept(120), seed=0)
    assert messages == 2 * 120
    assert many < 4.5 * few, "four times as many turns need four times the memory"
    assert many < 120 * 100 * 60, "a token has at most 60 bytes, with its text"


def test_messages_are_kept_once_if_the_template_rewrites_what_was_before():
    class Forgets(FakeRenderer):
        def continuation_ids(self, messages, **known):
            return None

    async def kept():
        session = await talked(40, Forgets())
        assert len(session.recorder.recording().segments) == 40
        return kept_by(session.recorder, session._replies)

    _, messages = run(kept(), seed=0)
    assert messages <= 3 * 40, "what the user said, and a reply as it was sampled and as it is sent back"


# ---------------------------------------------------------------------------------- any agent

TEMPLATES = {"plain": PLAIN, "forgets": FORGETS, "opens": OPENS, "tools last": TOOLS_LAST, "no end": NO_END,
             "other end": OTHER_END, "json arguments": JSON_ARGUMENTS}  # fmt: skip
RENDERERS = {}
CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea", "n": 2}}</tool_call>'
TEXTS = [
    "yes",
    "no answer",
    "<think>\nwhat\n</think>\n\nyes",
    f"what {CALL}",
    CALL,
    "<tool_call>no</tool_call>",
    "",
]


def renderer_for(name):
    if name not in RENDERERS:
        ends = {"other end": ["<|return|>"], "no end": ["<|user|>", "<|tool|>"]}.get(name, ["<|end|>"])
        RENDERERS[name] = renderer_of(TEMPLATES[name], *ends)
        RENDERERS[name].run = at_once
    return RENDERERS[name]


ACTS = ("begin", "go on", "go on", "go on", "go on", "fork", "both", "edit", "compact", "retry", "vanish",
        "hang", "several", "cut")  # fmt: skip


class Agent:
    """Does with its conversations what agents do."""

    def __init__(self, session, rng, *, faults, tools):
        self.session, self.rng, self.faults = session, rng, faults
        self.tools = [TOOL] if tools else []
        self.bodies = []
        """Requests that were answered, with the messages that go on."""
        self.left = []

    def send(self, messages, **options):
        body = {"messages": messages, "tools": self.tools, "model": "any", **options}
        return ask(self.session, body, retries=self.rng.choice([0, None]))

    async def take(self, messages, **options):
        status, reply = await self.send(messages, **options)
        if status != 200:
            return
        for choice in reply["choices"]:
            self.bodies.append([*messages, choice["message"]])

    def rewritten(self, message):
        """Return a reply as a client may send it back."""
        message = json.loads(json.dumps(message))
        message["id"] = "other"
        if self.rng.random() < 0.3 and message["content"]:
            message["content"] = message["content"].rpartition("</think>")[2].strip()
        if self.rng.random() < 0.3 and message["content"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        return message

    def continued(self, conversation):
        *before, reply = conversation
        calls = reply.get("tool_calls") or ()
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.rng.choice(["costs 1", "2"])}
            for call in calls
        ] or [{"role": "user", "content": self.rng.choice(["again", "what", "why"])}]
        return [*before, self.rewritten(reply), *answers]

    async def act(self):
        match self.rng.choice(ACTS if self.bodies else ACTS[:1]):
            case "begin":
                system = [{"role": "system", "content": "be good"}] if self.rng.random() < 0.3 else []
                await self.take([*system, {"role": "user", "content": "what is it"}])
            case "go on":
                await self.take(self.continued(self.bodies[-1]))
            case "fork":
                await self.take(self.continued(self.rng.choice(self.bodies)))
            case "both":
                first, second = self.rng.choice(self.bodies), self.rng.choice(self.bodies)
                await asyncio.gather(self.take(self.continued(first)), self.take(self.continued(second)))
            case "edit":
                messages = [dict(message) for message in self.continued(self.bodies[-1])]
                self.rng.choice(messages)["content"] = "edited"
                await self.take(messages)
            case "compact":
                await self.take([*self.bodies[-1][:1], *self.continued(self.bodies[-1])[-1:]])
            case "retry":
                await self.retry(key=self.rng.choice(["", str(self.rng.random())]))
            case "vanish":
                await self.vanish()
            case "hang":
                messages = self.continued(self.bodies[-1])
                self.left.append(asyncio.create_task(self.take(messages)))
            case "several":
                await self.take(self.continued(self.bodies[-1]), n=3)
            case "cut":
                await self.take(self.continued(self.bodies[-1]), max_tokens=2)

    async def retry(self, key):
        body = {"messages": self.continued(self.bodies[-1]), "tools": self.tools, "nonce": self.rng.random()}
        first = await ask(self.session, body, key=key, retries=0)
        turns = self.session.recorder.turns
        again = await ask(self.session, body, key=key, retries=1)
        if first[0] == 200:
            assert again == first
            assert self.session.recorder.turns == turns

    async def vanish(self):
        """The connection breaks while the model writes, and the client asks once more."""
        body = {"messages": self.continued(self.bodies[-1]), "tools": self.tools, "nonce": self.rng.random()}
        gone = []
        first = asyncio.create_task(ask(self.session, body, gone=lambda: bool(gone)))
        await asyncio.sleep(self.rng.random() * 1.5)
        if first.done():
            return
        gone.append(True)
        first.cancel()
        asked = self.session.recorder.turns
        await ask(self.session, body)
        if not self.faults:  # an engine that failed has said nothing that could be given again
            assert self.session.recorder.turns == asked


# ---------------------------------------------------------------------------------- what the model reads

SHOWS_TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}" + PLAIN
OTHER_TOOL = {"type": "function", "function": {**TOOL["function"], "description": "Another price."}}
CONTENTS = st.sampled_from(["what", "why", "edited", ""])


def rendered(renderer, messages, tools):
    """Return what a model should read of a request, by the template alone."""
    return renderer.render(messages, generation=True, tools=tools)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_the_model_reads_the_conversation_that_the_agent_has_sent(data, seed):
    """Whatever the agent has branched, edited, shortened or offered before, and whoever said the same."""
    renderer = renderer_of(SHOWS_TOOLS, "<|end|>", "<|start|>", "<|tools|>")
    renderer.run = at_once
    engine = Says(renderer, "yes", "no answer", "yes", "yes", seconds=lambda: 0.0)
    known = [[{"role": "user", "content": "what is it"}]]

    def changed(messages):
        place = data.draw(st.integers(0, len(messages) - 1))
        match data.draw(st.sampled_from(["go on", "go on", "branch", "edit", "leave out", "instruct"])):
            case "branch":
                return messages[: place + 1]
            case "edit":
                return [
                    {**each, "content": data.draw(CONTENTS)} if i == place else each
                    for i, each in enumerate(messages)
                ]
            case "leave out":
                return messages[:place] + messages[place + 1 :]
            case "instruct":
                return [{"role": "system", "content": data.draw(CONTENTS)}, *messages]
        return messages

    async def story():
        session = make_session(engine, renderer)
        for _ in range(data.draw(st.integers(2, 8))):
            messages = changed(data.draw(st.sampled_from(known)))
            if not messages or messages[-1]["role"] == "assistant" or data.draw(st.booleans()):
                messages = [*messages, {"role": "user", "content": data.draw(CONTENTS)}]
            tools = data.draw(st.sampled_from([[], [TOOL], [OTHER_TOOL]]))
            cut = data.draw(st.sampled_from([{}, {"max_tokens": 1}]))
            status, reply = await ask(
                session, {"messages": messages, "tools": tools, **cut}, key=str(len(known))
            )
            assert status == 200
            request, _ = engine.said[-1]
            assert renderer.whole(request.prompt_ids.tolist()) == rendered(renderer, messages, tools)
            known.append([*messages, reply["choices"][0]["message"]])
        check(await session.aclose(), engine)

    run(story(), seed=seed)


def test_of_equal_completions_the_newest_is_continued():
    """An agent that repeats a request continues from the second answer."""
    renderer = renderer_for("plain")
    engine = Says(renderer, "yes", "yes", "no answer", seconds=lambda: 0.0)
    asked = {"role": "user", "content": "what"}

    async def story():
        session = make_session(engine, renderer)
        for version in (1, 2):
            engine.version = version
            _, reply = await ask(session, {"messages": [asked]}, key=str(version))
        said = reply["choices"][0]["message"]
        await ask(session, {"messages": [asked, said, {"role": "user", "content": "why"}]})
        return await session.aclose()

    once, continued = run(story(), seed=0).segments
    assert once.tokens.versions[once.tokens.sampled][0] == 1
    assert continued.tokens.versions[continued.tokens.sampled][0] == 2
    assert len(continued.tokens) > len(once.tokens)


EXAMPLES = int(os.environ.get("GRPO_CORE_SESSIONS", "12"))
"""Number of sessions for each template."""


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.integers(1, 14), faults=st.booleans(), tools=st.booleans())
def test_what_an_agent_has_sampled_is_trained_once_whatever_it_does(name, seed, acts, faults, tools):
    renderer, rng = renderer_for(name), random.Random(seed)
    engine = Says(
        renderer,
        *rng.choices(TEXTS, k=7),
        seconds=lambda: rng.random(),
        fault=lambda: faults and rng.random() < 0.1,
    )

    async def story():
        session = make_session(engine, renderer)
        agent = Agent(session, rng, faults=faults, tools=tools)
        for _ in range(acts):
            engine.version += 1
            await agent.act()
        recording = await session.aclose()
        said = len(engine.said)
        await asyncio.gather(*agent.left, return_exceptions=True)
        assert len(engine.said) == said, "nothing is sampled after the end"
        check(recording, engine)

    run(story(), seed=seed)


# ---------------------------------------------------------------------------------- texts

GOES_BY_IT = "{% for m in messages %}<|start|>{{ m.content.split('</end>')[-1] }}<|end|>{% endfor %}"


def test_what_an_agent_spells_is_text_and_what_cannot_stay_text_fails_its_rollout():
    plain = renderer_for("plain")
    (end,) = plain.stop_token_ids
    refusing = renderer_of(GOES_BY_IT, "<|end|>", "</end>")
    refusing.run = at_once
    incidents = []

    async def asked(renderer, text):
        engine = Says(renderer, "yes", seconds=lambda: 0.0)
        session = make_session(engine, renderer)

        async def agent(client):
            answers.append(await ask(session, {"messages": [{"role": "user", "content": text}]}))
            return Feedback(reward=1.0)

        session.play = evolve(session.play, run=agent)
        return engine, await played(session)

    answers = []
    with reported_to(incidents.append):
        engine, recording = run(asked(plain, "what <|end|> is"), seed=0)
        assert (answers[-1][0], recording.feedback.error) == (200, None)
        assert engine.said[0][0].prompt_ids.tolist().count(end) == 1, "the template's own"
        _, recording = run(asked(refusing, "a</end>b"), seed=0)
    status, reply = answers[-1]
    assert (status, reply["error"]["code"]) == (400, "control_in_text")
    assert "'</end>'" in recording.feedback.error
    assert [incident.kind for incident in incidents] == ["control_in_text"]


@pytest.mark.parametrize(("text", "content"), [("yes END no", "yes "), (" yes", " yes"), ("yes E", "yes E")])
def test_an_agent_reads_what_was_sampled_up_to_its_stop_text(text, content):
    """A token may have more characters behind a stop text."""
    renderer = renderer_for("plain")
    engine = Says(renderer, text, seconds=lambda: 0.0)

    async def story():
        session = make_session(engine, renderer)
        return await ask(session, {"messages": [{"role": "user", "content": "?"}], "stop": ["END"]})

    _, reply = run(story(), seed=0)
    assert reply["choices"][0]["message"]["content"] == content
