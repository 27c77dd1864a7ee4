"""The options of the engine `vllm` become arguments of vLLM, for a CPU and for a GPU."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from grpo_core import EngineSetup, PluginError
from grpo_core.config import build
from grpo_core.kit import PluginHost
from grpo_plugin_vllm import server
from grpo_plugin_vllm.engine import VllmEngine
from grpo_plugin_vllm.options import BATCHED_TOKENS, Options, arguments

FOUND = importlib.util.find_spec("vllm")


def options(**chosen):
    parameters = inspect.signature(VllmEngine).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in ("setup", "vllm")}
    return Options(**{**defaults, "vllm": {}, **chosen})


def given(*, device="cuda", dtype="bfloat16", **chosen):
    return arguments(options(**chosen), EngineSetup(model="m"), device=device, dtype=dtype)


def test_a_rounded_model_computes_its_logits_in_float32():
    assert given()["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in given(dtype="float32")


def test_the_users_arguments_win():
    chosen = given(vllm={"hf_overrides": {"head_dtype": "model"}, "max_num_batched_tokens": 4096})
    assert chosen["hf_overrides"] == {"head_dtype": "model"}
    assert chosen["max_num_batched_tokens"] == 4096


def test_on_a_gpu_a_step_may_have_as_many_tokens_as_in_vllms_offline_class():
    assert given()["max_num_batched_tokens"] == BATCHED_TOKENS
    assert "max_num_batched_tokens" not in given(device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("shares", "given", "taken"), [(True, None, 0.4), (False, None, 0.85), (True, 0.7, 0.7)]
)
def test_an_engine_leaves_the_larger_part_of_a_gpu_to_the_trainer_on_it(shares, given, taken):
    setup = EngineSetup(model="m", shares_gpu=shares)
    asked = arguments(options(memory_fraction=given), setup, device="cuda", dtype="bfloat16")
    assert asked["gpu_memory_utilization"] == taken


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert server._resolve("auto") == ("cuda" if there else "cpu")
        assert server._resolve("cpu") == "cpu"


def test_replicas_are_refused_since_only_the_first_would_get_weights():
    with pytest.raises(ValueError, match=r"data_parallel_size = 2: only the first replica.*engine\.workers"):
        options(vllm={"data_parallel_size": 2})
    options(vllm={"data_parallel_size": 1})


@pytest.mark.skipif(FOUND is None, reason="vLLM is not installed: make install-vllm")
def test_every_argument_for_a_gpu_is_one_of_vllms():
    """vLLM's code is read and not imported, which takes seconds."""
    assert FOUND is not None
    tree = ast.parse((Path(FOUND.origin).parent / "engine" / "arg_utils.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    known = {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}
    asked = given(in_turn=True, cache_mib=64, tensor_parallel=2)
    assert {"gpu_memory_utilization", "enable_sleep_mode"} <= asked.keys() <= known


@pytest.mark.parametrize("engine", [{"workers": 2}, {"gpus_per_worker": 0.5}], ids=str)
def test_only_one_engine_of_this_machine_takes_turns_with_the_trainer(engine):
    """A pool does not let its engines rest: the step would find their memory taken."""
    host = PluginHost.discover()
    config = build([{"model": {"path": "tiny"}, "engine": engine}], host.sections)
    with pytest.raises(PluginError, match=r"in_turn = true is for one engine of this machine"):
        host.check_values("engine", "vllm", {"in_turn": True}, config=config)
    host.check_values("engine", "vllm", {}, config=config)


def test_vllm_is_refused_to_compute_adapters_where_the_weight_syncs_send_none():
    host = PluginHost.discover()

    def check(options, **model):
        config = build([{"model": {"path": "tiny", **model}}], host.sections)
        host.check_values("engine", "vllm", options, config=config)

    needs = r"native_lora = true needs adapters: a section \[model\.lora\] with publish = \"adapters\""
    for model in ({}, {"lora": {"publish": "merged"}}):
        with pytest.raises(PluginError, match=needs):
            check({"native_lora": True}, **model)
    check({"native_lora": True}, lora={})
    check({})
