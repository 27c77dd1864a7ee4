"""Resources servers of NeMo Gym: sessions, tools, rewards, outages, and rollouts that NeMo Gym recorded.

A scripted server judges here.  With ``GRPO_NEMO_GYM_PYTHON``, an interpreter that has nemo-gym 0.4, the
recorded rollouts are played at NeMo Gym's own servers, too; ``tests/benchmarks/bench_nemo_gym.py`` plays all
that NeMo Gym has recorded.

``recorded.jsonl`` has rollouts of two servers of nemo-gym 0.4.0, "example_session_state_mgmt" and
"example_mcp_weather" (Copyright (c) 2025 NVIDIA CORPORATION & AFFILIATES, Apache-2.0), without the fields
that say nothing here.
"""

import contextlib
import json
import os
import pickle
import subprocess
from pathlib import Path

import forks
import pytest
from aiohttp import web
from serving import serving

import grpo_core as grpo
from grpo_core.kit import EnvironmentProcess, EnvironmentSpec
from grpo_core.testing import HostedEnvironment, make_offer
from grpo_plugin_nemo_gym.environment import NeMoGym
from grpo_plugin_nemo_gym.responses import messages_of, response_of

HERE = Path(__file__).parent
RECORDED = [json.loads(line) for line in (HERE / "recorded.jsonl").read_text().splitlines()]
PYTHON = os.environ.get("GRPO_NEMO_GYM_PYTHON", "")


class Server:
    """Keeps a counter for each session, as NeMo Gym's example does, and the weather over MCP.

    ``failing`` names routes with the statuses that they answer first; 0 ends the connection.
    """

    def __init__(self, *, steps=False, failing=None, routes=True):
        self.counters, self.cities, self.requests, self.headers = {}, {}, [], []
        self.failing = {path: list(statuses) for path, statuses in (failing or {}).items()}
        posts = {"/reset": self.reset, "/step": self.step} if steps else {
            "/seed_session": self.seed, "/verify": self.verify, "/increment_counter": self.increment,
            "/get_counter_value": self.value, "/mcp": self.mcp,
        }  # fmt: skip
        self.app, self.handlers = web.Application(), posts if routes else {"/other": self.value}
        self.app.router.add_get("/openapi.json", self.describe)
        self.app.router.add_post("/{path}", self.answer)

    async def describe(self, request):
        self.headers.append(request.headers)
        return web.json_response({"paths": {path: {} for path in self.handlers}})

    async def answer(self, request):
        body, session = await request.json(), request.cookies.get("session") or f"s{len(self.requests)}"
        self.requests.append((request.path, body))
        self.headers.append(request.headers)
        if self.failing.get(request.path):
            if (status := self.failing[request.path].pop(0)) == 0:
                request.transport.abort()
            said = request.headers.get("Authorization")
            return web.Response(status=status or 500, text=f"broken, said {said}")
        response = web.json_response(await self.handlers[request.path](session, body, request.headers))
        response.set_cookie("session", session)
        return response

    async def seed(self, session, body, headers):
        self.counters[session] = body.get("initial_count", 0)
        if "verifier_metadata" not in body:
            return {}
        return {"mcp": {"url_path": "/mcp", "headers": {"X-Token": session}}}

    async def increment(self, session, body, headers):
        self.counters[session] += body["count"]
        return {"success": True}

    async def value(self, session, body, headers):
        return {"count": self.counters[session]}

    async def mcp(self, session, body, headers):
        assert "application/json" in headers["Accept"]
        if body["method"] == "tools/list":
            schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
            return {"result": {"tools": [{"name": "get_weather", "inputSchema": schema}]}}
        city = body["params"]["arguments"]["city"]
        self.cities[headers["X-Token"]] = city
        return {
            "result": {"content": [{"type": "text", "text": f"The weather in {city} is sunny and 72 F."}]}
        }

    async def verify(self, session, body, headers):
        text = "".join(
            p["text"] for i in body["response"]["output"] if i["type"] == "message" for p in i["content"]
        )
        if "verifier_metadata" in body:
            city = body["verifier_metadata"]["expected_city"]
            right = self.cities.get(session) == city and f"{city} is sunny" in text
        else:
            right = self.counters[session] == body["expected_count"]
        given = {"reward": float(right), "seen": True, "note": "text", "count": self.counters[session]}
        return {**body, **given} if body.get("judge") != "silent" else {"reward": None}

    async def reset(self, session, body, headers):
        self.counters[session] = 0
        seen = f" ({len(self.requests)})" if body.get("fickle") else ""
        return {"observation": f"Guess{seen}." if body.get("observes", True) else None, "info": {}}

    async def step(self, session, body, headers):
        self.counters[session] += 1
        (item,) = body["response"]["output"]
        over = self.counters[session] == 3
        return {
            "reward": 0.5,
            "terminated": over,
            "observation": None if over else f"not {item['content'][0]['text']}",
        }


def row(**fields):
    count = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    nothing = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "name": "increment_counter", "parameters": count},
        {"type": "function", "name": "get_counter_value", "parameters": nothing},
    ]
    params = {"input": "Count.", "tools": tools}
    return {"responses_create_params": params, "initial_count": 2, "expected_count": 5, **fields}


def call(name, **arguments):
    tool_call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


@contextlib.contextmanager
def hosted(url, **options):
    environment = NeMoGym(url, **{"retries": 0, **options})
    host = HostedEnvironment(environment).host
    host.nemo = environment
    try:
        yield host
    finally:
        host.end()


def prompt_of(host, given):
    return of_row(host, grpo.Prompt(messages="-", info=given))


def of_row(host, given):
    row = {**given.info, "prompt": given.messages, "answer": given.answer, "id": given.id or "0"}
    (prompt,) = pickle.loads(host.call("convert", [row]))
    return prompt


def played(host, given, *script, session="s", finish_reason="stop"):
    """Play one rollout; return what opening it gave, the answers to the model, and the last feedback."""
    prompt = given if isinstance(given, grpo.Prompt) else prompt_of(host, given)
    (start,) = host.call("open", [(session, prompt)])
    messages, answers, feedback = list(prompt.messages), [], grpo.Feedback(error=start.error)
    for message in script if start.error is None else ():
        messages.append({"role": "assistant", "content": message} if isinstance(message, str) else message)
        episode = grpo.Episode(prompt=prompt, messages=messages, session=session, finish_reason=finish_reason)
        (feedback,) = host.call("evaluate", [episode])
        messages += feedback.messages
        answers += [each["content"] for each in feedback.messages]
        if feedback.done:
            break
        assert not feedback.metrics, "/verify sees the whole conversation, once"
    host.call("close", [session])
    return start, answers, feedback


# ---------------------------------------------------------------------------------- recorded rollouts


def replayed(url, server):
    """Return the rewards and answers of tools, as recorded and as they come now."""
    with hosted(url, retries=1) as host:
        for number, each in enumerate(RECORDED):
            if each["server"] != server:
                continue
            script = [call(said["name"], **json.loads(said["arguments"])) if "name" in said else said["text"]
                      for said in each["said"]]  # fmt: skip
            _, answers, feedback = played(host, each["row"], *script, session=str(number))
            yield (each["reward"], each["answers"]), (feedback.reward, answers)


def told(answers):
    return [json.loads(answer) if answer.startswith("{") else answer for answer in answers]


@pytest.mark.parametrize("server", ["example_session_state_mgmt", "example_mcp_weather"])
def test_recorded_rollouts_get_the_rewards_and_answers_that_were_recorded(server):
    with serving(Server().app) as url:
        pairs = list(replayed(url, server))
    assert len(pairs) == 5
    for (reward, answers), (again, answers_again) in pairs:
        assert (again, told(answers_again)) == (reward, told(answers))


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="GRPO_NEMO_GYM_PYTHON names no interpreter with nemo-gym 0.4")
@pytest.mark.parametrize("server", ["example_session_state_mgmt", "example_mcp_weather"])
def test_recorded_rollouts_get_these_rewards_from_the_servers_of_nemo_gym(server):
    script = HERE.parents[2] / "tests" / "benchmarks" / "serve_nemo_gym.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([PYTHON, script], text=True, **pipes) as process:
        print(server, file=process.stdin, flush=True)
        port = json.loads(process.stdout.readline())["port"]
        pairs = list(replayed(f"http://127.0.0.1:{port}", server))
        process.stdin.close()
    assert len(pairs) == 5
    for (reward, answers), (again, answers_again) in pairs:
        assert (again, told(answers_again)) == (reward, told(answers))


# ---------------------------------------------------------------------------------- sessions and rewards


def test_each_rollout_has_its_own_session_and_numbers_of_its_answer_are_metrics():
    server = Server()
    with serving(server.app) as url, hosted(url) as host:
        prompt = prompt_of(host, row())
        host.call("open", [("a", prompt), ("b", prompt)])
        rewards = {}
        for session, count in (("a", 3), ("b", 1)):
            messages = [*prompt.messages, call("increment_counter", count=count)]
            episode = grpo.Episode(prompt=prompt, messages=messages, session=session)
            (feedback,) = host.call("evaluate", [episode])
            assert [json.loads(each["content"]) for each in feedback.messages] == [{"success": True}]
        for session in ("b", "a"):
            messages = [*prompt.messages, {"role": "assistant", "content": "done"}]
            episode = grpo.Episode(prompt=prompt, messages=messages, session=session)
            (rewards[session],) = host.call("evaluate", [episode])
    assert (rewards["a"].reward, rewards["b"].reward) == (1.0, 0.0)
    assert rewards["a"].metrics == {"seen": 1.0, "count": 5.0}


def test_the_server_gets_the_row_and_the_whole_conversation_as_a_response():
    server = Server()
    with serving(server.app) as url, hosted(url) as host:
        played(
            host, row(), call("increment_counter", count=3), "<think>\nwhy\n</think>\n\nIt is 5.", session="s"
        )
    path, body = server.requests[-1]
    assert (path, body["expected_count"]) == ("/verify", 5)
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "reasoning", "message"]
    assert body["response"]["output"][0]["arguments"] == '{"count": 3}'
    assert body["response"]["output"][2]["summary"][0]["text"] == "why"
    assert body["response"]["output"][3]["content"][0]["text"] == "It is 5."


def test_a_completion_that_was_cut_off_is_an_incomplete_response():
    server = Server()
    with serving(server.app) as url, hosted(url) as host:
        played(host, row(), "It is", finish_reason="length")
    assert server.requests[-1][1]["response"]["status"] == "incomplete"


def test_tools_are_those_of_the_row_and_of_the_mcp_endpoint():
    with serving(Server().app) as url, hosted(url) as host:
        start, answers, feedback = played(
            host,
            row(verifier_metadata={"expected_city": "Oslo"}),
            call("get_weather"),
            call("get_weather", city="Oslo"),
            "Oslo is sunny",
        )
    assert [tool["function"]["name"] for tool in start.tools] == [
        "get_weather", "increment_counter", "get_counter_value",
    ]  # fmt: skip
    assert answers[0] == "error: get_weather: missing a required argument: 'city'"
    assert (answers[1], feedback.reward) == ("The weather in Oslo is sunny and 72 F.", 1.0)


def test_a_server_of_steps_answers_each_completion_and_its_rewards_are_added():
    server = Server(steps=True)
    with serving(server.app) as url, hosted(url) as host:
        prompt = prompt_of(host, row())
        assert [message["content"] for message in prompt.messages] == ["Count.", "Guess."]
        _, answers, feedback = played(host, prompt, "one", "two", "three", "four")
        # the agent of NeMo Gym adds them, as total_reward
        each = [played(host, prompt, *["one", "two", "three"][:turns])[2].reward for turns in (1, 2, 3)]
    assert each == [0.5, 0.5, 0.5]
    assert (answers, feedback.reward, feedback.done) == (["not one", "not two"], 0.5, True)


def test_a_start_that_differs_between_the_rollouts_of_a_prompt_is_refused():
    with serving(Server(steps=True).app) as url, hosted(url) as host:
        _, _, feedback = played(host, row(fickle=True), "one")
    assert "the rollouts of a prompt begin alike" in feedback.error


# ---------------------------------------------------------------------------------- rows


def test_rows_come_from_files_and_a_tenth_is_held_out(tmp_path):
    lines = [json.dumps(row(response={"output": []}, number=n)) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with serving(Server().app) as url:
        environment = NeMoGym(url, path=tmp_path / "rows.jsonl")
    train, held_out = environment.prompts("train"), environment.prompts("validation")
    assert (len(train), [prompt.info["row"]["number"] for prompt in held_out]) == (18, [0, 10])
    assert "response" not in train[0].info["row"], "what was recorded is not a part of a row"


def test_any_other_row_of_a_source_becomes_a_row():
    with serving(Server().app) as url, hosted(url, answer="expected_count") as host:
        prompt = of_row(host, grpo.Prompt(messages="Say 7.", answer=7, info={"initial_count": 7}))
        assert prompt.info["row"] == {
            "responses_create_params": {
                "input": [{"type": "message", "role": "user", "content": "Say 7."}]
            },
            "initial_count": 7, "expected_count": 7,
        }  # fmt: skip
        assert played(host, prompt, "7")[2].reward == 1.0


def test_a_prompt_may_have_instructions_history_and_tool_calls():
    texts = [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "kind."}]
    items = [
        {"role": "developer", "content": texts},
        {"type": "function_call", "name": "f", "call_id": "1", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "reasoning", "summary": []},
    ]  # fmt: skip
    messages = messages_of({"instructions": "Short.", "input": items})
    assert [message["role"] for message in messages] == ["system", "developer", "assistant", "tool"]
    assert (messages[0]["content"], messages[1]["content"]) == ("Short.", "Be\nkind.")
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    output = response_of(messages[2:], {}, id="r", truncated=False, thought="")["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output"]


def test_calls_in_the_messages_of_a_source_are_items_and_those_of_one_reply_stay_one_message():
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": id}}} for id in "12"]
    said = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Both.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "content": id, "name": "f"} for id in "12"),
    ]
    with serving(Server().app) as url, hosted(url) as host:
        prompt = of_row(host, grpo.Prompt(messages=said, info={"initial_count": 7}))
    kinds = [item["type"] for item in prompt.info["row"]["responses_create_params"]["input"]]
    assert kinds == ["message"] * 2 + ["function_call"] * 2 + ["function_call_output"] * 2
    assert list(prompt.messages) == said


def test_a_prompt_with_an_image_is_refused():
    image = [{"type": "input_image", "image_url": "data:"}]
    with pytest.raises(grpo.ConfigError, match="expected text"):
        messages_of({"input": [{"role": "user", "content": image}]})


# ---------------------------------------------------------------------------------- outages


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("grpo_core.processes.services.FIRST_PAUSE", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ({"/verify": [500]}, "/verify: status 500"),
        ({"/verify": [0]}, "/verify: ServerDisconnectedError"),
        ({"/verify": [422]}, "/verify: status 422"),
        ({"/seed_session": [500]}, "/seed_session: status 500"),
        ({"/increment_counter": [0]}, "/increment_counter: ServerDisconnectedError"),
        ({"/verify": [503, 503, 503]}, "(3 attempts)"),
    ],
)
def test_an_outage_is_unscored_and_never_zero(failing, told):
    with serving(Server(failing=failing).app) as url, hosted(url, retries=2) as host:
        _, _, feedback = played(host, row(), call("increment_counter", count=3), "5")
    assert feedback.reward is None
    assert told in feedback.error


@pytest.mark.usefixtures("impatient")
def test_only_what_has_certainly_done_nothing_is_asked_again():
    server = Server(failing={"/verify": [503, 429]})
    with serving(server.app) as url, hosted(url, retries=2) as host:
        assert played(host, row(expected_count=2), "2")[2].reward == 1.0
    assert [path for path, _ in server.requests].count("/verify") == 3
    server = Server(failing={"/verify": [500, 500]})
    with serving(server.app) as url, hosted(url, retries=2) as host:
        played(host, row(), "2")
    assert [path for path, _ in server.requests].count("/verify") == 1


def test_a_refusal_of_a_tool_is_an_answer_that_the_model_reads():
    with serving(Server(failing={"/increment_counter": [422]}).app) as url, hosted(url) as host:
        _, answers, feedback = played(host, row(expected_count=2), call("increment_counter", count=1), "2")
    assert (answers, feedback.reward) == (["broken, said None"], 1.0)


@pytest.mark.parametrize("status", [502, 504])
def test_a_tool_behind_a_server_that_is_gone_leaves_the_rollout_unscored(status):
    with serving(Server(failing={"/increment_counter": [status]}).app) as url, hosted(url) as host:
        _, answers, feedback = played(host, row(expected_count=2), call("increment_counter", count=1), "2")
    assert (answers, feedback.reward) == ([], None)
    assert f"/increment_counter: status {status}" in feedback.error


def test_an_answer_without_a_reward_is_unscored():
    with serving(Server().app) as url, hosted(url) as host:
        feedback = played(host, row(judge="silent"), "2")[2]
    assert "gave the reward None" in feedback.error


def test_the_key_comes_from_a_variable_and_stands_in_no_message(monkeypatch):
    monkeypatch.setenv("COUNT_KEY", "of-count")
    server = Server(failing={"/verify": [500]})
    with serving(server.app) as url, hosted(url, key_variable="COUNT_KEY") as host:
        feedback = played(host, row(), "2")[2]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer of-count"}
    assert "of-count" not in feedback.error
    assert "Bearer [key]" in feedback.error


# ---------------------------------------------------------------------------------- mistakes


def offered(url, **options):
    return make_offer("environment", f"nemo_gym:{url}", plugins=["nemo_gym"], **options)


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("127.0.0.1:8000", {}, "expected something like http://127.0.0.1:8000"),
        ("http://10.0.0.7:8000", {}, "is another machine. It sees all prompts"),
        ("http://127.0.0.1:9", {}, "no resources server answers at http://127.0.0.1:9"),
        ("http://127.0.0.1:9", {"retries": -1}, "retries = -1"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(url, options, why):
    with pytest.raises(grpo.PluginError) as raised:
        offered(url, **options)
    assert why in str(raised.value)
    assert raised.value.exit_status == 2


def test_a_server_of_something_else_is_refused():
    with serving(Server(routes=False).app) as url, pytest.raises(grpo.PluginError, match="it has /other"):
        offered(url)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no rows"),
        ("{", "cannot be read"),
        ("[]", "line 1 is not an object"),
        ('{"a": 1}', "train row 1: nemo_gym"),
    ],
)
def test_a_file_that_has_no_rows_of_nemo_gym_says_so(tmp_path, text, why):
    (tmp_path / "rows.jsonl").write_text(text)
    with serving(Server().app) as url, pytest.raises(grpo.ConfigError, match=why):
        NeMoGym(url, path=tmp_path / "rows.jsonl").prompts("train")


def test_without_rows_there_are_no_prompts():
    with serving(Server().app) as url, pytest.raises(grpo.ConfigError, match="there are no rows"):
        NeMoGym(url).prompts("train")


# ---------------------------------------------------------------------------------- a run


@pytest.mark.slow
def test_a_run_trains_on_rows_of_a_server(tmp_path):
    rows = [row(expected_count=n % 3, number=n) for n in range(30)]
    for each in rows:  # the model "tiny" has no template with tools
        each["responses_create_params"]["tools"] = []
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with serving(Server().app) as url:
        settings = [
            "trainer.steps=2", "trainer.prompts_per_step=2", "rollout.group_size=2", "validation.every=0",
            f"tasks.rows.env=nemo_gym:{url}", "tasks.rows.options.path=rows.jsonl", "model.path=tiny",
            "rollout.max_tokens=8", "model.options.warm_start_steps=0",
        ]  # fmt: skip
        chosen = (part for each in settings for part in ("--set", each))
        done = forks.grpo(tmp_path, "train", "--output", "run", *chosen)
    assert done.returncode == 0, done.stderr
    assert "feedback_count/rows" in json.loads(
        (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    )


@pytest.mark.long
def test_rollouts_wait_for_the_server_at_the_same_time():
    import asyncio

    with serving(Server().app) as url:

        async def story():
            spec = EnvironmentSpec(task="count", env=f"nemo_gym:{url}", options={"retries": 0})
            process = EnvironmentProcess(spec)
            await process.start()
            try:
                prompt = grpo.Prompt(messages="-", info={"row": row(expected_count=2), "observation": ""})
                names = [str(n) for n in range(64)]
                await process.open(dict.fromkeys(names, prompt))
                said = [*prompt.messages, {"role": "assistant", "content": "2"}]
                return await process.evaluate(
                    [grpo.Episode(prompt=prompt, messages=said, session=name) for name in names]
                )
            finally:
                await process.aclose()

        assert [each.reward for each in asyncio.run(story())] == [1.0] * 64
