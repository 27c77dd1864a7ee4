"""The declared memory of the engine ``vllm``, against numbers computed by hand."""

from __future__ import annotations

from attrs import evolve

from grpo_core import EngineLoad
from grpo_core.kit import PluginHost

LOAD = EngineLoad(parameters=1000, config={}, dtype="bfloat16", requests=8, tokens=100)
ON_GPU = EngineLoad(parameters=1000, config={}, dtype="bfloat16", requests=8, tokens=100, gpu_bytes=1_000_000)


def told(load, **options):
    selected = PluginHost.discover().find("engine", "vllm")
    return [(p.name, p.nbytes, p.device) for p in selected.loaded(selected.offer.memory)(load, **options)]


def test_on_a_gpu_vllm_takes_its_share_whatever_the_model_needs():
    assert told(ON_GPU) == [("weights, keys and values", 850_000, "cuda:0")]
    assert told(evolve(ON_GPU, shares_gpu=True)) == [("weights, keys and values", 400_000, "cuda:0")]
    assert told(ON_GPU, memory_fraction=0.4) == [("weights, keys and values", 400_000, "cuda:0")]
    own = {"gpu_memory_utilization": 0.5}
    assert told(ON_GPU, vllm=own) == [("weights, keys and values", 500_000, "cuda:0")]


def test_an_engine_in_turn_keeps_its_weights_on_the_host():
    """One copy of all shards; on a CPU it never rests."""
    asleep = ("weights while it sleeps", 2000, "host")
    assert told(ON_GPU, in_turn=True) == [asleep, ("weights, keys and values", 850_000, "cuda:0")]
    assert told(ON_GPU, in_turn=True, tensor_parallel=2, cache_mib=2).count(asleep) == 1
    assert told(ON_GPU, in_turn=True, dtype="float32")[0][1] == 4000
    assert asleep not in told(LOAD, in_turn=True)


def test_a_cache_of_a_given_size_replaces_the_share():
    assert told(ON_GPU, cache_mib=2) == [("weights", 2000, "cuda:0"), ("keys and values", 2 << 20, "cuda:0")]
    shards = told(ON_GPU, cache_mib=2, tensor_parallel=2)
    assert [part for part in shards if part[0] == "weights"] == [
        ("weights", 1000, "cuda:0"),
        ("weights", 1000, "cuda:1"),
    ]


def test_on_a_cpu_it_holds_weights_and_a_cache():
    assert told(LOAD) == [("weights", 2000, "host"), ("keys and values", 256 << 20, "host")]
    assert told(LOAD, dtype="float32")[0] == ("weights", 4000, "host")
    assert told(ON_GPU, device="cpu")[0] == ("weights", 2000, "host")
