"""Sessions at servers of OpenEnv: observations, actions, rewards, outages.

A scripted server answers as OpenEnv 0.10 does.  With ``GRPO_OPENENV_PYTHON``, an interpreter that has
openenv, the same story is played at OpenEnv's own server, too.
"""

import contextlib
import json
import os
import pickle
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from serving import serving

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, make_offer
from grpo_plugin_openenv.actions import Actions
from grpo_plugin_openenv.environment import OpenEnv

PYTHON = os.environ.get("GRPO_OPENENV_PYTHON", "")
ECHO = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}
MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


class Server:
    """Echoes messages as the environment of ``openenv init`` does; ``words`` say what else happens.

    A word is a message that is answered in another way; "deaf" answers nothing, "gone" ends the connection.
    """

    def __init__(self, *, full=0, seeded=False, schema=ECHO):
        self.full, self.seeded, self.schema = full, seeded, schema
        self.sessions, self.open, self.most, self.closed, self.headers, self.resets = 0, 0, 0, 0, [], []
        self.app = web.Application()
        self.app.router.add_get("/schema", self.describe)
        self.app.router.add_get("/ws", self.session)

    async def describe(self, request):
        return web.json_response({"action": self.schema} if self.schema else {"detail": "hello"})

    async def session(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.headers.append(request.headers)
        self.sessions += 1
        if self.full:
            self.full -= 1
            await socket.send_json(error("all 1 sessions are taken", "CAPACITY_REACHED"))
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        async for message in socket:
            told = json.loads(message.data)
            if told["type"] == "close":
                self.closed += 1
                break
            if (answer := self.answer(told)) is None:
                if told["data"].get("message") == "gone":
                    break
                continue
            await socket.send_json(answer)
        self.open -= 1
        await socket.close()
        return socket

    def answer(self, told):
        if told["type"] == "reset":
            self.resets.append(told["data"])
            seen = f" seed {told['data'].get('seed')}" if self.seeded else ""
            if self.seeded == "badly":
                seen = f" {len(self.resets)}"
            return observation(f"Echo environment ready!{seen}", 0.0)
        match said := told["data"].get("message"):
            case "deaf" | "gone":
                return None
            case "broken":
                return {"type": "observation"}
            case "boom":
                return error("boom", "EXECUTION_ERROR")
            case "unpaid" | "unpaid done":
                return observation(said, None, done=said.endswith("done"))
            case "true":
                return observation(said, True)
            case "session":
                return error("lost", "SESSION_ERROR")
            case None:
                errors = [{"loc": ["message"], "msg": "Field required"}]
                return error("Invalid message", "VALIDATION_ERROR", errors=errors)
        return observation(said, min(0.1 * len(said), 1.0), done=said == "done")


def error(message, code, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def observation(text, reward, done=False):
    shown = {"echoed_message": text, "message_length": len(text)}
    return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("grpo_core.processes.services.FIRST_PAUSE", 0.01)


@contextlib.contextmanager
def hosted(url, **options):
    environment = OpenEnv(url, **{"retries": 0, "prompts": 2, "observation": "echoed_message", **options})
    host = HostedEnvironment(environment).host
    host.openenv = environment
    try:
        yield host
    finally:
        host.end()


def played(host, *replies, prompt=None, session="s"):
    """Play one rollout; return the answers to the model, and the feedback on each reply."""
    prompt = prompt or host.openenv.prompts("train")[0]
    (start,) = host.call("open", [(session, prompt)])
    if start.error:
        return [], [grpo.Feedback(error=start.error)]
    messages, feedback = list(prompt.messages), []
    for reply in replies:
        messages.append({"role": "assistant", "content": reply})
        feedback += host.call("evaluate", [grpo.Episode(prompt=prompt, messages=messages, session=session)])
        messages += feedback[-1].messages
        if feedback[-1].done:
            break
    host.call("close", [session])
    return [each.messages[0]["content"] for each in feedback if each.messages], feedback


# ---------------------------------------------------------------------------------- the story


def echoes(url):
    with hosted(url) as host:
        prompt = host.openenv.prompts("train")[0]
        answers, feedback = played(host, "hi", "a longer message", prompt=prompt)
    assert prompt.messages[0]["content"].endswith("nvironment ready!")
    assert answers == ["hi", "a longer message"]
    assert [each.reward for each in feedback] == pytest.approx([0.2, 1.0])
    assert not any(each.done for each in feedback)


def test_a_reply_is_a_step_and_its_observation_and_reward_come_back():
    server = Server()
    with serving(server.app) as url:
        echoes(url)
    assert (server.closed, server.open) == (server.sessions, 0), "each session is closed by us"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="GRPO_OPENENV_PYTHON names no interpreter with openenv 0.10")
def test_the_server_of_openenv_answers_the_same():
    folder = Path(__file__).parents[3] / "tests" / "benchmarks"
    command = [PYTHON, "serve_openenv.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        try:
            grpo.fetch_json(f"{url}/health", seconds=60.0)
            echoes(url)
            with hosted(url) as host:
                answers, feedback = played(host, "x" * 100_000)
                assert (answers, feedback[0].reward) == (["x" * 100_000], 1.0)
        finally:
            process.terminate()


def test_the_end_of_an_episode_ends_the_rollout():
    with serving(Server().app) as url, hosted(url) as host:
        _, feedback = played(host, "go", "done", "more")
    assert [each.done for each in feedback] == [False, True]


def test_each_rollout_has_its_own_connection():
    server = Server()
    with serving(server.app) as url, hosted(url) as host:
        prompt = host.openenv.prompts("train")[0]
        host.call("open", [(str(number), prompt) for number in range(20)])
        assert server.most == 20
        host.call("close", [str(number) for number in range(20)])


# ---------------------------------------------------------------------------------- prompts


def test_a_prompt_is_a_seed_and_begins_with_what_reset_returns():
    server = Server(seeded=True)
    with serving(server.app) as url, hosted(url, prompts=4, seed=10, instruction="Echo.") as host:
        train, held_out = host.openenv.prompts("train"), host.openenv.prompts("validation")
        played(host, "hi", prompt=held_out[0])
    assert [prompt.info["reset"]["seed"] for prompt in [*train, *held_out]] == [10, 11, 12, 13, 14]
    assert train[1].messages[0]["content"] == "Echo.\n\nEcho environment ready! seed 11"
    assert server.resets[-1] == {"seed": 14}


def test_the_columns_of_a_row_are_arguments_of_reset():
    server = Server(seeded=True)
    with serving(server.app) as url, hosted(url, reset={"level": "easy"}) as host:
        go = grpo.Prompt(messages="Go.").messages
        rows = [{"prompt": go, "id": str(seed), "seed": seed} for seed in range(7, 27)]
        prompts = pickle.loads(host.call("convert", rows))
        (alone,) = pickle.loads(host.call("convert", [{"id": "0", "seed": 30}]))
        played(host, "hi", prompt=prompts[0])
    said = [f"Go.\nEcho environment ready! seed {seed}" for seed in range(7, 27)]
    assert [prompt.messages[0]["content"] for prompt in prompts] == said
    assert alone.messages[0]["content"].endswith("Echo environment ready! seed 30")
    assert server.resets[-1] == {"level": "easy", "seed": 7}


def test_rollouts_that_do_not_begin_alike_are_refused():
    with serving(Server(seeded="badly").app) as url, hosted(url) as host:
        _, (feedback,) = played(host, "hi")
    assert "the rollouts of a prompt begin alike" in feedback.error


# ---------------------------------------------------------------------------------- actions


def test_a_reply_is_the_only_required_text_of_an_action_or_json():
    assert Actions(ECHO).of("hello") == {"message": "hello"}
    assert Actions(MOVE).of('I move. {"x": 1, "y": 2}') == {"x": 1, "y": 2}
    assert Actions(MOVE).instruction() == (
        "Reply with an action as a JSON object with the fields x (integer), y (integer)."
    )
    assert Actions({**MOVE, "required": ["x"]}, "x").of(" 3 ") == {"x": 3}


@pytest.mark.parametrize("reply", ["", "no", "{", "[1]", '{"x": ', "}{"])
def test_a_reply_that_is_not_an_action_gets_the_form_of_an_action(reply):
    with pytest.raises(ValueError, match="expected a JSON object with the fields x"):
        Actions(MOVE).of(reply)


def test_the_model_reads_why_its_action_was_refused_and_continues():
    with serving(Server(schema={**ECHO, "required": []}).app) as url:
        with hosted(url, action="message", wrong_action=-0.5, raises_are_wrong=True) as host:
            answers, feedback = played(host, "boom", "hi")
        assert answers == ["error: boom (EXECUTION_ERROR)", "hi"]
        assert [each.reward for each in feedback] == [-0.5, 0.2]
        assert [each.metrics["wrong_action"] for each in feedback] == [1.0, 0.0]
        with hosted(url, wrong_action=-0.5) as host:
            answers, feedback = played(host, "nonsense", '{"other": 1}')
    assert answers[0].startswith("error: no action: expected a JSON object")
    assert answers[1] == "error: Invalid message: message: Field required (VALIDATION_ERROR)"
    assert [each.reward for each in feedback] == [-0.5, -0.5]


def test_thinking_is_not_part_of_the_action():
    with serving(Server().app) as url, hosted(url) as host:
        answers, _ = played(host, "<think>hm, a < b</think>\n\nhello", " as it is ")
    assert answers == ["hello", " as it is "]
    assert Actions(MOVE).of('<think>{"x": 1}</think>{"x": 2}') == {"x": 2}
    with pytest.raises(ValueError, match="no action"):
        Actions(MOVE).of('<think>perhaps {"x": 1}, or')


# ---------------------------------------------------------------------------------- rewards


def test_an_episode_that_ends_without_any_reward_is_unscored():
    with serving(Server().app) as url, hosted(url) as host:
        _, feedback = played(host, "unpaid", "unpaid done")
    assert [each.reward for each in feedback] == [None, None]
    assert feedback[-1].error == "openenv: the episode ended, and no step gave a reward"


def test_a_last_step_without_a_reward_adds_nothing_to_the_earlier_ones():
    with serving(Server().app) as url, hosted(url) as host:
        _, feedback = played(host, "unpaid", "hi", "unpaid done")
    assert [each.reward for each in feedback] == [None, 0.2, 0.0]
    assert (feedback[-1].done, feedback[-1].error) == (True, None)


def test_a_truth_value_is_not_a_reward():
    with serving(Server().app) as url, hosted(url) as host:
        _, (feedback,) = played(host, "true")
    assert (feedback.reward, feedback.error) == (None, "openenv: step gave the reward True")


def test_an_observation_of_several_fields_is_shown_as_json():
    with serving(Server().app) as url, hosted(url, observation="") as host:
        answers, _ = played(host, "hé")
    assert answers == ['{"echoed_message": "hé", "message_length": 2}']


# ---------------------------------------------------------------------------------- outages


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("deaf", "no answer to 'step' within 0.2 s"),
        ("gone", "the server ended the session (close) instead of answering 'step'"),
        ("broken", "the answer to 'step' is"),
        ("boom", "step: boom (EXECUTION_ERROR)"),
        ("session", "step: lost (SESSION_ERROR)"),
    ],
)
def test_an_outage_is_unscored_and_never_zero(reply, told):
    timeout = 0.2 if reply == "deaf" else 20.0
    with serving(Server().app) as url, hosted(url, timeout=timeout) as host:
        _, feedback = played(host, "hi", reply)
    assert (feedback[-1].reward, feedback[-1].done) == (None, True)
    assert told in feedback[-1].error


@pytest.mark.usefixtures("impatient")
def test_a_server_without_room_is_asked_again():
    server = Server()
    with serving(server.app) as url, hosted(url, retries=2) as host:
        prompt = host.openenv.prompts("train")[0]
        server.full = 2
        assert played(host, "hi", prompt=prompt)[1][0].reward == pytest.approx(0.2)
        server.full = 3
        _, (feedback,) = played(host, "hi", prompt=prompt)
    assert "max_concurrent_envs" in feedback.error
    assert "(3 attempts)" in feedback.error


def test_a_server_that_has_gone_is_unscored():
    with serving(Server().app) as url:
        environment = OpenEnv(url, retries=0, prompts=1, observation="echoed_message")
        (prompt,) = environment.prompts("train")
    host = HostedEnvironment(environment).host
    (start,) = host.call("open", [("s", prompt)])
    host.end()
    assert "no connection" in start.error


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_session_follows_no_redirect_to_another_server(status):
    async def elsewhere(request):
        return web.Response(status=status, headers={"Location": f"{other_url}/ws"})

    other, app = Server(), web.Application()
    app.router.add_get("/schema", other.describe)
    app.router.add_get("/ws", elsewhere)
    with serving(other.app) as other_url, serving(app) as url:
        environment = OpenEnv(url, retries=0, prompts=1, observation="echoed_message")
        with pytest.raises(grpo.PluginError, match=rf"status {status}: a redirect.*not followed"):
            environment.prompts("train")
    assert other.sessions == 0


# ---------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("127.0.0.1:8000", {}, "expected something like http://127.0.0.1:8000"),
        ("http://10.0.0.7:8000", {}, "is another machine. It sees all replies"),
        ("http://127.0.0.1:9", {}, "no server answers at http://127.0.0.1:9"),
        ("http://127.0.0.1:9", {"prompts": 0}, "prompts = 0"),
        ("OURS", {"action": "mesage"}, "has no field 'mesage'. Did you mean 'message'?"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(url, options, why):
    with serving(Server().app) as ours, pytest.raises(grpo.PluginError) as raised:
        make_offer("environment", f"openenv:{url.replace('OURS', ours)}", plugins=["openenv"], **options)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2


def test_a_server_of_something_else_is_refused():
    with serving(Server(schema=None).app) as url, pytest.raises(grpo.ConfigError, match="names no actions"):
        OpenEnv(url)


def test_a_field_that_no_observation_has_is_an_error_before_the_run():
    with serving(Server().app) as url, pytest.raises(grpo.ConfigError, match="Did you mean 'echoed_message'"):
        OpenEnv(url, observation="echoed_mesage", prompts=1).prompts("train")


def test_the_key_comes_from_a_variable(monkeypatch):
    monkeypatch.setenv("ECHO_KEY", "of-echo")
    server = Server()
    with serving(server.app) as url, hosted(url, key_variable="ECHO_KEY") as host:
        played(host, "hi")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer of-echo"}
