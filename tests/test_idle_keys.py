"""A key that does nothing where it stands, or works against another one, is refused before a run starts."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from grpo_core.app.make import make
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.plugins.host import PluginHost


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover()


def checked(host: PluginHost, table: dict[str, Any]) -> None:
    start = {"model": {"path": "tiny"}, "tasks": {"sort": {"env": "math:sort"}}}
    make(build([start, table], host.sections), host)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"trainer": {"lr_end": 0.5}},
            r"trainer\.lr_end = 0\.5 does nothing with .*lr_schedule = \"constant\"",
        ),
        (
            {"shaping": {"overlong_limit": 10}},
            r"shaping\.overlong_limit = 10 does nothing with .*_buffer = 0",
        ),
        (
            {"shaping": {"overlong_penalty": 2.0}},
            r"overlong_penalty = 2\.0 does nothing with .*_buffer = 0",
        ),
        (
            {"dynamic_sampling": {"tolerance": 0.1}},
            r"tolerance = 0\.1 does nothing with .*enabled = false",
        ),
        (
            {"dynamic_sampling": {"tolerance": 0.1}, "filters": {"pass_rate": {"high": 0.9}}},
            r"tolerance = 0\.1 does nothing with .*enabled = false: change that, or leave out tolerance",
        ),
        (
            {"dynamic_sampling": {"max_extra_groups": 5}},
            r"max_extra_groups = 5 does nothing with dynamic_sampling\.enabled = false: change that",
        ),
        (
            {"dynamic_sampling": {"enabled": False, "max_extra_groups": 5}},
            r"max_extra_groups = 5 does nothing with .*or leave out max_extra_groups",
        ),
        (
            {"advantage": {"name": "turns"}, "dynamic_sampling": {"enabled": True}},
            r"dynamic_sampling\.enabled = true .*advantage\.name = 'turns' learns from.* leave it out",
        ),
        (
            {"advantage": {"name": "gigpo"}, "filters": {"equal_rewards": {}}},
            r"\[filters\.equal_rewards\] .*advantage\.name = 'gigpo' learns from",
        ),
        (
            {"trainer": {"reference_every": 5, "reference_mix": 0.5}},
            r"score now; write\n\[scores.reference\]\nweights = \"ema\"\nevery = 5\nmix = 0\.5$",
        ),
        (
            {"teacher": {"path": "some/model"}},
            r"score now; write\n\[scores.teacher\]\nweights = \"some/model\"$",
        ),
        (
            {"scores": {"reference": {}}},
            r"\[scores\.reference\] does nothing: with its options the loss 'grpo' reads no",
        ),
        (
            {"scores": {"reference": {"mix": 0.5}}, "loss": {"options": {"kl": {"coefficient": 0.1}}}},
            r"mix does nothing with weights = 'start'",
        ),
        (
            {"tasks": {"sort": {"data_options": {"a": 1}}}},
            r"tasks\.sort\.data_options = {\"a\": 1} does nothing with tasks\.sort\.data = \"\"",
        ),
        (
            {"tasks": {"sort": {"player_options": {"a": 1}}}},
            r"tasks\.sort\.player_options = {\"a\": 1} does nothing with tasks\.sort\.player = \"\"",
        ),
        (
            {"validation": {"top_p": 0.9}},
            r"validation\.top_p = 0\.9 does nothing with validation\.name = 'greedy', which takes the",
        ),
        (
            {"validation": {"sets": {"other": {"task": "sort", "min_p": 0.1}}}},
            r"validation\.sets\.other\.min_p = 0\.1 does nothing with",
        ),
        ({"advantage": {"clip_low": nan}}, r"'advantage\.clip_low': expected a number, got nan"),
        ({"advantage": {"clip_high": nan}}, r"'advantage\.clip_high': expected a number, got nan"),
        ({"shaping": {"weights": {"a": nan}}}, r"'shaping\.weights\.a': expected a number, got nan"),
        ({"shaping": {"weights": {"a": inf}}}, r"'weights' must be finite numbers"),
        ({"shaping": {"source": [nan, 1.0]}}, r"'shaping\.source\[0\]': expected a number, got nan"),
        ({"engine": {"placement": "spread"}}, r"engine\.placement = \"spread\" does nothing without workers"),
        (
            {"validation": {"engine": {"gpus_per_worker": 1}}},
            r"a cluster \(--ray\): change that, or name the GPUs in validation\.engine\.gpus$",
        ),
        (
            {"validation": {"engine": {"transport_options": {"host": "10.0.0.1"}}}},
            r"validation\.engine\.transport: weights come to all engines by engine\.transport",
        ),
        (
            {"sampler": {"name": "round_robin"}, "tasks": {"sort": {"weight": 0.1}}},
            r"tasks\.sort\.weight = 0\.1 does nothing without a sampler that weighs tasks",
        ),
        ({"validation": {"pause": True, "every": 0}}, r"validation\.pause = true does nothing without valid"),
        ({"checkpoint": {"keep_best": 3}}, r"keep_best = 3 does nothing with checkpoint\.best = \"\""),
    ],
    ids=str,
)
def test_a_key_without_effect_is_refused(host: PluginHost, table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(host, table)


@pytest.mark.parametrize(
    "table",
    [
        {"trainer": {"lr_schedule": "cosine", "lr_end": 0.5}},
        {"shaping": {"overlong_buffer": 5, "overlong_limit": 10, "overlong_penalty": 2.0}},
        {"dynamic_sampling": {"enabled": True, "tolerance": 0.1, "max_extra_groups": 5}},
        {
            "scores": {"reference": {"weights": "ema", "every": 5, "mix": 0.5}},
            "loss": {"options": {"kl": {"coefficient": 0.1}}},
        },
        {"dynamic_sampling": {"max_extra_groups": 5}, "filters": {"pass_rate": {"high": 0.9}}},
        {"advantage": {"name": "turns"}, "filters": {"pass_rate": {"high": 0.9}}},
        {"advantage": {"name": "group"}, "filters": {"equal_rewards": {}}},
        {"advantage": {"clip_low": -inf, "clip_high": inf}},
        {"validation": {"name": "pipelined", "top_p": 0.9, "top_k": 5}},
        {"validation": {"pause": True}},
        {"engine": {"transport": "collective", "transport_options": {"ports": [29500, 29510]}}},
        {"tasks": {"sort": {"weight": 0.5}}},
        {"validation": {"top_p": 0.9, "sets": {"other": {"task": "sort", "name": "pass_at_k"}}}},
    ],
    ids=str,
)
def test_the_same_key_is_taken_where_it_has_an_effect(host: PluginHost, table: dict[str, Any]) -> None:
    checked(host, table)


@pytest.mark.parametrize(
    ("name", "options", "betas", "message"),
    [
        ("adamw", {"eps": nan}, [0.9, 0.95], "eps is nan"),
        ("muon", {"momentum": nan}, [0.9, 0.95], "momentum is nan"),
    ],
)
def test_an_optimizer_that_could_not_be_made_is_refused(
    host: PluginHost, name: str, options: dict[str, Any], betas: list[float], message: str
) -> None:
    table = {"optimizer": {"name": name, "options": options}, "trainer": {"betas": betas}}
    with pytest.raises(PluginError, match=message):
        checked(host, table)


OPTIMIZER = """
import grpo_core

def sgd(groups, *, nesterov=False):
    raise NotImplementedError

def check(*, nesterov=False):
    if nesterov:
        raise ValueError("nesterov is true")

@grpo_core.hookimpl
def grpo_optimizers():
    return {"checked": grpo_core.OptimizerOffer(sgd, check=check)}
"""


def test_a_check_gets_only_the_arguments_that_it_names(host: PluginHost, tmp_path: Any) -> None:
    """An optimizer whose check does not name the betas is checked without them."""
    (tmp_path / "mine.py").write_text(OPTIMIZER)
    name = f"{tmp_path}/mine.py:checked"
    checked(host, {"optimizer": {"name": name}})
    with pytest.raises(PluginError, match="nesterov is true"):
        checked(host, {"optimizer": {"name": name, "options": {"nesterov": True}}})
