"""A real chat model behind vLLM's own OpenAI server, as any hosted model is met."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import vllm_server

from grpo_plugin_smollm2 import source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
    ),
]
GRPO = str(Path(sys.executable).parent / "grpo-core")
ARGUMENTS = [
    *("--served-model-name", "smollm2", "--generation-config", "vllm", "--max-model-len", "2048"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(512 << 20)),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    threads = {"OMP_NUM_THREADS": "2"}
    with vllm_server(source.cached(), ARGUMENTS, log, threads, seconds=300.0) as server:
        yield f"{server}/v1"


def measured(directory, url, env, prompts):
    given = (
        f"engine.options.base_url={url}",
        "engine.options.model=smollm2",
        f"validation.prompts={prompts}",
        "rollout.max_tokens=48",
    )
    settings = [part for each in given for part in ("--set", each)]
    done = subprocess.run(
        [GRPO, "validate", "--env", env, "--engine", "openai", *settings, "--json"],
        capture_output=True, text=True, timeout=300, cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = directory.glob("runs/*/validation/*.jsonl.gz")
    rollouts = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    return json.loads(done.stdout)["results"], rollouts


@pytest.mark.nightly
def test_a_chat_model_behind_a_server_is_measured(url, tmp_path):
    env = f"{Path(__file__).parents[3]}/examples/capitals.py:Capitals"
    results, rollouts = measured(tmp_path, url, env, 8)
    (task,) = results.values()
    assert task["errors"] == 0
    assert all(each["messages"][-1]["content"] for each in rollouts)


def test_it_is_shown_the_tools_of_an_environment(url, tmp_path):
    results, rollouts = measured(tmp_path, url, "math:calculator", 4)
    assert results["calculator"]["errors"] == 0
    assert all(each["turns"] >= 1 for each in rollouts)


def test_it_keeps_the_contract_of_engines_that_give_text(url, tmp_path):
    """Among others: a conversation with a call of a tool and its result gets a reply."""
    settings = ["--set", f"base_url={url}", "--set", "model=smollm2", "--set", "replies=''"]
    done = subprocess.run(
        [GRPO, "check", "openai:openai", *settings], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert "6 passed, 0 failed" in done.stdout, done.stdout + done.stderr
