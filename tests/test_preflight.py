"""Plugins check a run before anything of it starts, and watch it by a tracker of their section."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
from test_cli import GRPO, events
from test_plugins import install, plugin  # noqa: F401

from grpo_core.app.launch import configure
from grpo_core.app.make import preflight
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.plugins.host import PluginHost
from grpo_plugin_devkit.modules import check_preflight

BUDGET = '''
    import grpo_core as grpo
    from attrs import frozen

    @frozen(kw_only=True)
    class Budget:
        """A limit of what a run may cost."""

        steps: int = 2
        """Largest number of steps."""

    class Watch(grpo.Tracker):
        def __init__(self, run, steps):
            self.run, self.steps = run, steps

        def metrics(self, step, values):
            if step >= self.steps:
                self.run.stop("budget spent")

    def check(config, host):
        budget = config.section(Budget, None)
        if budget is None:
            return []
        if budget.steps < 1:
            raise grpo.ConfigError(f"budget.steps is {budget.steps}; expected at least 1")
        return [f"the run ends after {budget.steps} steps"] if budget.steps < config.trainer.steps else []

    @grpo.hookimpl
    def grpo_config_sections():
        return {"budget": Budget | None}

    @grpo.hookimpl
    def grpo_trackers():
        return {"budget": Watch}

    @grpo.hookimpl
    def grpo_preflight():
        return {"budget": check}
'''


def checked(**table):
    config, host = configure([{"plugins": ["budget"], **table}], {})
    return asyncio.run(preflight(config, host))


def test_a_plugin_warns_of_a_run_or_refuses_it(install):  # noqa: F811
    install("budget", BUDGET)
    assert checked() == []
    assert checked(budget={}) == [("budget", "the run ends after 2 steps")]
    with pytest.raises(ConfigError, match=r"budget\.steps is 0"):
        checked(budget={"steps": 0})


def test_a_check_is_called_once_what_it_needs_is_there(install, tmp_path):  # noqa: F811
    install("budget", BUDGET.replace("def check(config, host):", "def check(config, model, host=None):"))
    assert checked(budget={}) == []
    config, host = configure([{"plugins": ["budget"], "budget": {}}], {})
    assert asyncio.run(preflight(config, host, model=tmp_path)) == [("budget", "the run ends after 2 steps")]
    install("other", BUDGET.replace("def check(config, host):", "def check(config, plugins):"))
    with pytest.raises(PluginError, match=r"no run has its parameter 'plugins'; expected some of config, h"):
        asyncio.run(preflight(*configure([{"plugins": ["other"]}], {})))


def test_a_check_that_fails_is_a_fault_of_its_plugin(install):  # noqa: F811
    install("budget", BUDGET.replace("if budget is None:", "if budget.none:"))
    with pytest.raises(
        PluginError, match=r"preflight 'budget' of plugin 'budget'.* raised .*: AttributeError"
    ):
        checked()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("return []", "return 'fine'", "returned 'fine'; expected a list of warnings"),
        ("return []", "return [1]", "expected a list of warnings"),
        ("return []", "raise KeyError(1)", "raised KeyError: 1; expected ConfigError"),
        ("return []", "config.sampler.options['x'] = 1; return []", "changed the configuration"),
    ],
    ids=["it is kept", "a text", "numbers", "another error", "a change"],
)
def test_the_contract_finds_what_is_wrong(install, old, new, message):  # noqa: F811
    install("budget", BUDGET.replace(old, new, 1))
    PluginHost.discover(allow=["budget"])
    module = sys.modules["budget_module"]
    if not message:
        return check_preflight(module)
    with pytest.raises(AssertionError, match=message):
        check_preflight(module)


@pytest.mark.slow
def test_a_run_is_checked_warned_of_and_stopped_by_the_plugin_of_its_section(install, tmp_path):  # noqa: F811
    install("budget", textwrap.dedent(BUDGET))

    def train(name, *settings):
        small = ["trainer.steps=50", "validation.every=0", "model.options.warm_start_steps=1", *settings]
        words = [word for setting in small for word in ("--set", setting)]
        command = [GRPO, "train", "--env", "math:sort", "--output", name, *words]
        path = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=240)

    done = train("refused", "budget.steps=0")
    assert done.returncode == ConfigError.exit_status
    assert "budget.steps is 0; expected at least 1" in done.stderr
    assert not (tmp_path / "refused").exists()
    done = train("run", "budget.steps=3")
    assert done.returncode == 0, done.stderr
    (warning,) = [each for each in events(tmp_path / "run", "WarningRaised") if each["cause"] == "budget"]
    assert warning["message"] == "the run ends after 3 steps"
    (ended,) = events(tmp_path / "run", "RunEnded")
    assert ended["reason"] == "budget spent"
    assert 3 <= ended["step"] < 50
