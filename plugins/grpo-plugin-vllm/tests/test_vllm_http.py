"""A real vLLM server on this machine's CPU, as docs/engines.md says to start it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapted import AdaptedEngine
from transformers import AutoTokenizer
from vllm_server import vllm_server

import grpo_core
from grpo_core.testing import make_offer
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model, start_engine
from grpo_plugin_devkit.engines import check_engine
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_vllm.http import HttpEngine
from grpo_plugin_vllm.transfer import PLAIN_LINEAR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
    ),
]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", PLAIN_LINEAR: "1"}
ARGUMENTS = [
    "--enable-scale-out",
    *("--generation-config", "vllm"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--weight-transfer-config", '{"backend": "grpo_core"}'),
    *("--load-format", "dummy"),
    *("--chat-template", "{{ messages[0].content }}"),  # the model has none; only a judge's questions need it
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--block-size", "32", "--no-enable-chunked-prefill"),
]
NOT_THERE = {
    "a dead engine is replaced and holds the last weights",  # the server is somebody else's to start again
    "weights of another model are refused and change nothing",  # its tokens are refused until the next
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_test_model(tmp_path_factory.mktemp("model"))
    with vllm_server(model, ARGUMENTS, model.parent / "server.log", ENVIRONMENT) as url:
        yield url, model


@pytest.mark.nightly
def test_a_server_keeps_the_contract_of_engines(server):
    url, model = server

    async def story():
        engine = await start_engine(HttpEngine, model, url=url)
        await check_engine(engine, EngineUnderTest(engine=engine, model=model).publish, prompt_ids=(5, 8, 2))
        assert engine.dtype == "float32", "the server was asked"

    asyncio.run(story())


def test_a_judge_may_ask_the_server_of_the_engine_while_rollouts_run(server):
    """The policy judges itself; a bias lets a random model say a number, which is its score."""
    url, model = server
    seven = AutoTokenizer.from_pretrained(model).encode("7")[0]
    # a verdict that a limit cuts off is none: the server stops at the number
    parameters = {"max_tokens": 4, "logit_bias": {str(seven): 100}, "stop": ["7"]}
    parameters["include_stop_str_in_output"] = True
    judge = make_offer(
        "environment", "judge:openai", plugins=["judge"], rubric="?", template="{{ reply }}", pattern=r"(\d)",
        url=f"{url}/v1", model=str(model), parameters=parameters,
    )  # fmt: skip
    prompt = grpo_core.Prompt(messages="1+1=")
    replies = [[*prompt.messages, {"role": "assistant", "content": str(number)}] for number in range(8)]
    request = grpo_core.GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=64)

    async def story():
        engine = await start_engine(HttpEngine, model, url=url)
        await engine.update_weights(EngineUnderTest(engine=engine, model=model).publish(0))
        completions, *feedback = await asyncio.gather(
            engine.generate([request] * 8),
            *(judge.score(grpo_core.Episode(prompt=prompt, messages=reply)) for reply in replies),
        )
        await judge.aclose()
        await engine.aclose()
        return completions, feedback

    completions, feedback = asyncio.run(story())
    assert [each.reward for each in feedback] == [0.7] * 8, feedback[0].error
    assert len(completions) == 8
    assert all(set(each.versions) == {0} for each in completions)


@pytest.mark.parametrize("kind", [EngineUnderTest, AdaptedEngine], ids=["weights", "adapters"])
def test_a_server_that_shares_no_files_takes_the_weights_that_are_sent(server, kind):
    url, model = server

    async def story():
        writer = CollectiveWriter(torch.device("cpu"), "127.0.0.1")
        engine = await start_engine(HttpEngine, model, url=url)
        tried = kind(engine=engine, model=model, recomputes=True, writer=writer)
        await tried.engine.update_weights(tried.publish(0))
        await tried.update()
        await ENGINE_LAWS["logprobs are those of the model"](tried)
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.parametrize("kind", [EngineUnderTest, AdaptedEngine], ids=["weights", "adapters"])
def test_a_server_keeps_the_laws_of_decoding_with_weights_from_a_file(server, kind, tmp_path):
    url, model = server

    async def story():
        engine = await start_engine(HttpEngine, model, url=url, directory=tmp_path / "weights")
        tried = kind(engine=engine, model=model, recomputes=True, crowd=400)
        for law in ENGINE_LAWS:
            if law not in NOT_THERE:
                print(law)
                await ENGINE_LAWS[law](tried)
        await engine.aclose()

    asyncio.run(story())


@pytest.mark.nightly
def test_what_two_servers_measure_is_in_the_metrics_of_a_run(server, tmp_path):
    url, model = server
    with vllm_server(model, ARGUMENTS, tmp_path / "server.log", ENVIRONMENT) as other:
        command = (
            f"train --env math:sort --engine vllm:http --output run --set model.path={model} "
            f"--set engine.options.url=['{url}','{other}'] --set engine.max_requests=8 "
            "--set tasks.sort.options.length=2 --set rollout.max_tokens=8 --set trainer.steps=3 "
            "--set trainer.prompts_per_step=2 --set validation.prompts=4 --set validation.engine.threads=1"
        )
        program = Path(sys.executable).with_name("grpo-core")
        done = subprocess.run(
            [program, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row}
    assert {"engine_cache_use/engine_0", "engine_cache_use/engine_1"} <= written
