"""Metrics from the differences of vLLM's cumulative statistics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_SERIES = re.compile(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
"""A line of a server's metrics in Prometheus format."""


def of_page(page: str) -> dict[str, float]:
    """Parse the statistics in a server's page ``/metrics``; missing ones are 0.

    Raises ValueError for an invalid number.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in _SERIES.findall(page):
        found[name].append(float(value))
    return {
        "cache_use": max(found["kv_cache_usage_perc"], default=0.0),
        "preemptions": sum(found["num_preemptions_total"]),
        "prompt_tokens": sum(found["prefix_cache_queries_total"]),
        "cached_tokens": sum(found["prefix_cache_hits_total"]),
    }


def between(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the interval between two statistics.

    ``cache_use``: share of the key and value blocks currently in use.  ``preemptions``: requests that were
    preempted for lack of such blocks.  ``cached_prompt_tokens``: share of prompt tokens found in the prefix
    cache.
    """
    counted = {name: now[name] - before.get(name, 0.0) for name in now}
    if any(value < 0 for name, value in counted.items() if name != "cache_use"):  # the process was replaced
        counted = dict(now)
    prompts = counted["prompt_tokens"]
    return {
        "cache_use": now["cache_use"],
        "preemptions": counted["preemptions"],
        "cached_prompt_tokens": counted["cached_tokens"] / prompts if prompts else 0.0,
    }
