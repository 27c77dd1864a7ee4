"""A hosted model: a server with OpenAI's chat API that answers, refuses and disconnects."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from forks import grpo
from serving import serving

import grpo_core
from grpo_plugin_openai.engine import OpenAIEngine

pytestmark = pytest.mark.long

GRPO = str(Path(sys.executable).parent / "grpo-core")
AGENT = str(Path(__file__).parents[3] / "examples" / "agent.py")


class Hosted:
    """A server that sorts digits, writes capitals and multiplies, by a tool where it is given one.

    Args:
        faults: answers of the first requests instead; None is a right one.
    """

    def __init__(self, *faults):
        self.faults, self.requests, self.keys = list(faults), [], []
        self.held = self.victim = None

    @contextlib.contextmanager
    def running(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        with serving(app) as url:
            yield f"{url}/v1"

    async def answer(self, request):
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.held is not None and len(self.requests) > self.held:
            os.kill(self.victim, signal.SIGINT)
            self.held = None
            return status(503, **{"Retry-After": "60"})()
        fault = self.faults.pop(0) if self.faults else None
        if fault == "half":
            response = web.StreamResponse(
                headers={"Content-Length": "1000", "Content-Type": "application/json"}
            )
            await response.prepare(request)
            await response.write(b'{"choices": [')
            request.transport.close()
            return response
        if fault is not None:
            return fault() if callable(fault) else fault
        return web.json_response(
            {
                "choices": [{"message": said(body), "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5},
            }
        )


def said(body):
    last = body["messages"][-1]
    question = next(m["content"] for m in body["messages"] if m["role"] == "user")
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"]}
    if found := re.fullmatch(r"(\d+)\*(\d+)=", question):
        a, b = map(int, found.groups())
        if "tools" in body:
            call = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
            return {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": call}],
            }
        return {"role": "assistant", "content": str(a * b)}
    if question.endswith(":"):
        return {"role": "assistant", "content": question.removesuffix(":").upper()}
    return {"role": "assistant", "content": "".join(sorted(question.rstrip("=")))}


def status(code, text="not now", **headers):
    return lambda: web.json_response({"error": {"message": text}}, status=code, headers=headers)


def options(url, *more):
    given = (f"engine.options.base_url={url}", "engine.options.model=clever", *more)
    return ["--engine", "openai", *(part for each in given for part in ("--set", each))]


def validate(directory, url, *more, env="math:sort", prompts=6, **variables):
    done = grpo(
        directory,
        "validate",
        "--env",
        env,
        *options(url, f"validation.prompts={prompts}", *more),
        "--json",
        **variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"], done.stderr


def rollouts(directory):
    (file,) = directory.glob("runs/*/validation/*.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_a_hosted_model_is_measured_without_weights_and_without_tokens(tmp_path):
    hosted = Hosted()
    with hosted.running() as url:
        results, printed = validate(tmp_path, url)
    assert results["sort"]["accuracy"] == 1.0
    assert results["sort"]["completion_tokens"] == 5.0
    assert "6 replies, 60 prompt and 30 reply tokens" in printed
    stored = rollouts(tmp_path)
    assert {(each["segments"], each["tokens"], *each["turn_tokens"]) for each in stored} == {(0, 0, 5)}
    assert all(each["messages"][-1]["content"] for each in stored)
    assert not (tmp_path / "runs/openai").exists(), "a complete measurement keeps no replies"
    assert {body["temperature"] for body in hosted.requests} == {0.0}


@pytest.mark.slow
def test_it_calls_tools_and_reads_their_results(tmp_path):
    hosted = Hosted()
    with hosted.running() as url:
        results, _ = validate(tmp_path, url, env="math:calculator")
    assert results["calculator"]["accuracy"] == 1.0
    second = hosted.requests[-1]["messages"]
    assert isinstance(second[1]["tool_calls"][0]["function"]["arguments"], str), "the API takes JSON text"
    assert second[2]["tool_call_id"] == second[1]["tool_calls"][0]["id"]


def test_an_agent_plays_through_it(tmp_path):
    hosted = Hosted()
    with hosted.running() as url:
        results, _ = validate(tmp_path, url, env=AGENT)
    assert results["agent"]["reward"] == 1.0
    assert len(hosted.requests) == 6


@pytest.mark.slow
def test_try_and_audit_play_it(tmp_path):
    with Hosted().running() as url:
        tried = grpo(tmp_path, "try", "math:sort", *options(url))
        audited = grpo(tmp_path, "audit", "math:sort", "--prompts", "4", "--seconds", "5", *options(url))
    assert "reward 1, a success" in tried.stdout, tried.stdout + tried.stderr
    assert "groups that would teach openai: 0 of 4" in audited.stdout, audited.stdout + audited.stderr


def test_it_keeps_the_contract_of_engines_that_give_text(tmp_path):
    with Hosted().running() as url:
        settings = [f"base_url={url}", "model=clever", "replies=''"]
        done = grpo(
            tmp_path, "check", "openai:openai", *(part for each in settings for part in ("--set", each))
        )
    assert "5 passed, 0 failed, 1 to note" in done.stdout, done.stdout + done.stderr


def test_its_rollouts_are_judged_again(tmp_path):
    with Hosted().running() as url:
        validate(tmp_path, url)
    (file,) = tmp_path.glob("runs/*/validation/*.jsonl.gz")
    done = grpo(tmp_path, "score", str(file), "--env", "math:sort")
    assert done.returncode == 0, done.stderr
    assert "0 of 6 rollouts change" in done.stdout


def test_its_measurement_is_a_run_whose_page_shows_it(tmp_path):
    with Hosted().running() as url:
        validate(tmp_path, url, "rollout.max_tokens=24")
    (measured,) = (tmp_path / "runs").iterdir()
    run = grpo_core.Run(measured)
    assert run.state == "measured"
    assert [(row["step"], row["task"], row["accuracy"]) for row in run.validations()] == [(0, "sort", 1.0)]
    done = grpo(tmp_path, "report", str(measured))
    assert done.returncode == 0, done.stderr
    page = (measured / "report.html").read_text()
    assert "All 6 stored rollouts; without tokens." in page
    assert "sort: validation accuracy" in page
    assert "100.0%" in page
    assert "training time" not in page
    assert "could not be read" not in page


def test_the_tasks_of_a_run_are_measured_and_not_its_model(tmp_path):
    directory = tmp_path / "run"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.toml").write_text('[tasks.sort]\nenv = "math:sort"\n[engine]\nthreads = 1\n')
    with Hosted().running() as url:
        done = grpo(tmp_path, "validate", "run", *options(url, "validation.prompts=2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("engine openai, version 0, measured by greedy"), done.stdout
    assert "measuring the model" not in done.stderr


def test_no_more_requests_are_sent_at_once_than_the_option_says(tmp_path):
    class Busy(Hosted):
        now = most = 0

        async def answer(self, request):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.1)
            self.now -= 1
            return await super().answer(request)

    hosted = Busy()
    with hosted.running() as url:
        validate(tmp_path, url, "engine.options.concurrency=3", prompts=9)
    assert hosted.most == 3


def test_a_python_program_plays_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    async def story(url):
        engine = {"name": "openai", "options": {"model": "clever", "base_url": url}}
        async with grpo_core.session(env="math:sort", engine=engine) as session:
            prompts = await session.prompts(split="validation")
            return await session.play(prompts[:3], group_size=2)

    with Hosted().running() as url:
        played = asyncio.run(story(url))
    assert [[rollout.reward for rollout in group] for group in played] == [[1.0, 1.0]] * 3
    assert all(not rollout.segments for group in played for rollout in group)


def choice(reason="stop", content="2 <end", **more):
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    return {"index": 0, "message": message, "finish_reason": reason, **more}


CALLED = {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}]}
THOUGHT = {"reasoning": "is it 2"}
READ = {
    "whole": (choice(), "2 <end", "stop"),
    "no reason": (choice(None), "2 <end", "stop"),
    "as Together ends it": (choice("eos"), "2 <end", "stop"),
    "as Google spells it": (choice("STOP"), "2 <end", "stop"),
    "cut off": (choice("length"), "2 <end", "length"),
    "as Mistral cuts it off": (choice("model_length"), "2 <end", "length"),
    "cut off in its thoughts": (choice("length", None, message=THOUGHT), "", "length"),
    "cut off before a word": (choice("length", None), "", "length"),
    "thoughts alone": (choice("stop", None, message=THOUGHT), "", "stop"),
    "a call": (choice("tool_calls", None, message=CALLED), "", "stop"),
    "a stop string of vLLM": (choice(stop_reason=">"), "2 <end>", "stop"),
    "a stop string of SGLang": (choice(matched_stop=">"), "2 <end>", "stop"),
    "a stop string that is there": (choice(content="2 <end>", stop_reason=">"), "2 <end>", "stop"),
    "a stop token": (choice(stop_reason=151645), "2 <end", "stop"),
    "nothing": (choice("stop", None), None, None),
    "a filter": (choice("content_filter"), None, None),
    "a filter without a word": (choice("content_filter", None), None, None),
    "an interruption": (choice("insufficient_system_resource"), None, None),
    "a refusal": (choice(message={"refusal": "I cannot"}), None, None),
    "an error": (choice("error", ""), None, None),
}


@pytest.mark.parametrize("label", READ)
def test_an_answer_is_read_as_its_server_means_it(label, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    answer, content, reason = READ[label]
    request = grpo_core.GenerationRequest(prompt_ids=(1,), max_tokens=9, seed=1, stop=(">",))

    async def read(url):
        setup = grpo_core.EngineSetup(model="")
        engine = OpenAIEngine(setup, model="clever", base_url=url, replies="", unavailable_for=0)
        try:
            return await engine.chat([{"role": "user", "content": "1+1"}], (), request)
        finally:
            await engine.aclose()

    with Hosted(lambda: web.json_response({"choices": [answer]})).running() as url:
        if reason is None:
            with pytest.raises(grpo_core.EngineError):
                asyncio.run(read(url))
        else:
            reply = asyncio.run(read(url))
            assert (reply.message["content"], reply.finish_reason) == (content, reason)


def test_what_the_server_refuses_for_now_is_asked_again(tmp_path):
    faults = [status(429, **{"Retry-After": "1"}), status(500), status(503), "half"]
    garbage = [lambda: web.Response(text="<html>busy</html>"), lambda: web.json_response({"choices": "none"})]
    hosted = Hosted(*faults, *garbage)
    with hosted.running() as url:
        results, printed = validate(tmp_path, url)
    assert results["sort"]["accuracy"] == 1.0
    assert "unscored" not in results["sort"]
    assert "4 retries" in printed
    assert "the same command continues" not in printed, "each has a reply at last"
    assert len(hosted.requests) == 6 + len(faults) + len(garbage), "what was answered is not asked for again"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (status(401, "bad key"), "status 401: .*bad key.*check the key"),
        (status(404, "no such model"), "status 404: .*no such model.*engine.options.model"),
        (status(400, "no field seed"), "status 400: .*no field seed.*engine.options.leave_out"),
    ],
)
def test_what_no_other_try_changes_ends_with_one_message(answer, message, tmp_path):
    with Hosted(*[answer] * 6).running() as url:
        done = grpo(tmp_path, "validate", "--env", "math:sort", *options(url, "validation.prompts=6"))
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_an_answer_without_an_end_is_not_read_to_it(tmp_path):
    async def endless(body):
        yield b'{"choices": ['
        while True:
            yield b" " * (1 << 20)

    hosted = Hosted(lambda: web.Response(body=endless(None), content_type="application/json"))
    with hosted.running() as url:
        results, _ = validate(tmp_path, url, prompts=1)
    assert results["sort"]["accuracy"] == 1.0
    assert len(hosted.requests) == 2


@pytest.mark.slow
def test_a_service_that_never_answers_ends_the_measurement_and_the_same_command_continues(tmp_path):
    hosted = Hosted(*[status(503)] * 50)
    with hosted.running() as url:
        given = options(url, "validation.prompts=3", "engine.options.unavailable_for=2")
        done = grpo(tmp_path, "validate", "--env", "math:sort", *given)
    assert done.returncode == 1
    assert "clever: its service has been unavailable for 2 s (engine.options.unavailable_for" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(hosted.requests) < 10, "one request asks, and the others wait"


def test_fields_are_left_out_and_added(tmp_path):
    hosted = Hosted()
    more = (
        'engine.options.leave_out=["seed", "temperature"]',
        'engine.options.extra={reasoning_effort = "low"}',
    )
    with hosted.running() as url:
        validate(tmp_path, url, *more, prompts=1)
    (body,) = hosted.requests
    assert body["reasoning_effort"] == "low"
    assert not body.keys() & {"seed", "temperature"}


@pytest.mark.slow
def test_after_an_interrupt_nothing_is_asked_twice(tmp_path):
    hosted = Hosted()
    hosted.held = 4
    with hosted.running() as url:
        command = ["validate", "--env", "math:sort", *options(url, "engine.options.concurrency=1")]
        process = subprocess.Popen(
            [GRPO, *command, "--set", "validation.prompts=8"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        hosted.victim = process.pid
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 130, printed
        assert "4 replies" in printed
        assert "the same command continues" in printed
        results, printed = validate(tmp_path, url, "engine.options.concurrency=1", prompts=8)
    assert results["sort"]["accuracy"] == 1.0
    assert "4 replies and 4 of an interrupted measurement" in printed
    assert len(hosted.requests) == 4 + 1 + 4


def test_its_key_comes_from_the_environment_and_is_in_no_file(tmp_path):
    hosted = Hosted()
    with hosted.running() as url:
        validate(tmp_path, url, "engine.options.key=MY_KEY", MY_KEY="secret-123")
    assert set(hosted.keys) == {"Bearer secret-123"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    read = [gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in files]
    assert files
    assert not any(b"secret-123" in content for content in read)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--env", "math:sort", *options("http://127.0.0.1:1/v1")], "training needs tokens"),
        (["validate", "--env", "math:sort", "--engine", "openai"], "engine.options.model is missing"),
        (["validate", "--env", "math:sort"], "MODEL is missing: the engine 'local' needs its weights"),
        (["try", "math:sort", "--engine", "local"], "--engine is for a model that plays"),
        (
            ["validate", "--env", "math:sort", *options("https://x.org/v1", "engine.options.key=NO_KEY")],
            "the environment variable NO_KEY is not set",
        ),
        (
            ["train", "--env", "math:sort", "--set", 'validation.engine={name="openai", options={model="m", base_url="http://127.0.0.1:1"}}'],
            "validation.engine.name = 'openai': this engine returns text",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_starts(arguments, message, tmp_path):
    done = grpo(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_torch_is_not_loaded(tmp_path):
    with Hosted().running() as url:
        settings = [each for each in options(url, "validation.prompts=2")[2:] if each != "--set"]
        code = (
            "import sys; from grpo_core.commands.running import validate\n"
            f"validate(env=['math:sort'], engine='openai', set_={settings!r})\n"
            "print('loaded', [name for name in ('torch', 'transformers') if name in sys.modules])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "loaded []" in done.stdout, done.stdout + done.stderr
