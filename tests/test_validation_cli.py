"""``grpo-core validate``, and validation in a run with a separate engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import grpo
from measured import MEASURED

from grpo_core.app.model_sources import find_target, without_overridden
from grpo_core.config import as_table, as_toml, build
from grpo_core.contracts.errors import ConfigError, ModelError
from grpo_core.plugins.configured import configured
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.run_directory import RunDirectory
from grpo_plugin_devkit.strategies import check_validation_strategy

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_validation.py"


def find(name):
    return find_target(name)


# ---------------------------------------------------------------------------------- configuration


def test_an_engine_for_validation_is_written_and_read_like_any_other_table(tmp_path):
    plain, with_engine = {"tasks": {"a": {"env": "math:sort"}}}, {"engine": {"options": {"max_rows": 4}}}
    config, host = configured([plain, {"validation": with_engine}])
    assert config.validation.engine.name == "local"
    assert build([as_table(config)], host.sections) == config
    RunDirectory.create(tmp_path / "run", config)
    assert RunDirectory.open(tmp_path / "run")[1] == config
    assert build([plain]).validation.engine is None
    assert "None" not in as_toml(build([plain]))
    with pytest.raises(ConfigError, match=r"unknown configuration key 'validation\.engine\.nam'"):
        build([plain, {"validation": {"engine": {"nam": "local"}}}])


# ---------------------------------------------------------------------------------- what is measured


def a_run(path, **validation):
    table = {
        "model": {"path": "tiny"},
        "tasks": {"a": {"env": "math:sort"}},
        "validation": {"name": "batched", "options": {"temperature": 1.0}, **validation},
    }
    run = RunDirectory.create(path, build([table]))
    run.model.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (run.model / name).write_text("{}")
    return run


def test_a_run_without_a_checkpoint_is_measured_as_it_starts(tmp_path):
    run = a_run(tmp_path / "run")
    measured = find(str(run.path))
    assert (measured.model, measured.version) == (run.model, 0)
    assert "no checkpoint yet: measuring the model that it starts from" in measured.notes[0]
    (run.model / "config.json").unlink()
    assert find(str(run.path)).model is None, "it is made anew"


def test_a_model_directory_is_measured_and_anything_else_is_named(tmp_path):
    run = a_run(tmp_path / "run")
    measured = find(str(run.model))
    assert (measured.model, measured.version) == (run.model, 0)
    assert measured.table == {"model": {"path": str(run.model)}}
    checkpoint = run.checkpoints / "step-000004"
    checkpoint.mkdir(parents=True)
    run.model.rename(checkpoint / "trainer")
    with pytest.raises(
        ConfigError, match=r"neither a run .* nor a model .* this checkpoint's model is .*trainer"
    ):
        find(str(checkpoint))
    with pytest.raises(ConfigError, match=r"neither a run \(there is no config.toml in it\) nor a model"):
        find(str(tmp_path))
    with pytest.raises(ModelError, match="there is no such directory"):
        find(str(tmp_path / "no" / "thing"))


def test_a_run_that_is_not_there_is_no_model_of_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^there is no run runs/sort\. Runs there: none$"):
        find("runs/sort")
    a_run(tmp_path / "runs" / "sort-1")
    with pytest.raises(ConfigError, match=r"no run runs/sort\. Did you mean 'sort-1'\? Runs there: sort-1$"):
        find("runs/sort")


def test_options_of_another_strategy_and_other_tasks_are_left_out(tmp_path):
    measured = find(str(a_run(tmp_path / "run", engine={"name": "local"}).path))

    def replaced(tasks=False, **changes):
        return without_overridden(measured.table, changes, tasks=tasks)

    assert replaced() == measured.table
    same = replaced(validation={"name": "batched", "prompts": 3})
    assert same["validation"]["options"] == {"temperature": 1.0}
    other = replaced(validation={"name": "mine"})
    assert "options" not in other["validation"]
    assert other["validation"]["engine"]["name"] == "local"
    assert "engine" not in replaced(engine={"name": "vllm"})["validation"]
    assert "tasks" not in replaced(tasks=True)


@pytest.mark.long
def test_the_example_keeps_the_contract():
    make = PluginHost.discover(None, ()).factory("validation_strategy", f"{EXAMPLE}:Reliable")
    check_validation_strategy(lambda: make(k=2, n=3))
    check_validation_strategy(make, score="pass^4")


# ---------------------------------------------------------------------------------- by hand


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that validates on a separate engine."""
    cwd = tmp_path_factory.mktemp("validated")
    done = grpo(cwd, "train", "--env", "math:sort", "--set", "tasks.sort.options.length=3", "--output", "run",
        "--set", "trainer.steps=4", "--set", "trainer.prompts_per_step=4", "--set", "validation.every=2",
        "--set", "validation.prompts=30", "--set", "validation.engine.threads=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return cwd / "run"


@pytest.mark.nightly
def test_a_run_validates_on_a_separate_engine(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation/sort/accuracy" in row] == [0, 2, 4]
    assert (run / "logs" / "validation" / "engine-local.log").exists()
    assert "laws hold over 4 steps" in grpo(run.parent, "verify", "run").stdout
    again = json.loads(grpo(run.parent, "validate", "run", "--json").stdout)
    last = {name: value for name, value in rows[-1].items() if name.startswith("validation/")}
    assert last == {f"validation/sort/{name}": value for name, value in again["results"]["sort"].items()}
    assert (again["version"], again["validation"], again["model"]) == (4, {"sort": "batched"}, "run")


@pytest.mark.nightly
def test_what_an_engine_measures_is_written_whatever_is_around_it(tmp_path):
    (tmp_path / "mine.py").write_text(MEASURED)
    done = grpo(tmp_path, "train", "--env", "math:sort", "--set", "tasks.sort.options.length=3",
        "--output", "run", "--engine", "./mine.py:measured", "--set", "engine.max_requests=8",
        "--set", "engine.workers=2", "--set", "trainer.steps=1", "--set", "trainer.prompts_per_step=2",
        "--set", "validation.prompts=4", "--set", "validation.engine.name=./mine.py:measured",
        "--set", "validation.engine.max_requests=8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row if name.startswith("engine_cache_use/")}
    engines = {name.partition("/")[2] for name in written}
    assert engines == {"engine_0", "engine_1", "validation_engine"}


@pytest.mark.slow
def test_the_tiny_model_is_measured_as_training_starts_with_it(run):
    done = grpo(run.parent, "validate", "tiny", "--env", "math:sort", "--set", "tasks.sort.options.length=3",
        "--set", "validation.prompts=30", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["version"], told["validation"]) == ("tiny", 0, {"sort": "batched"})
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert told["results"]["sort"]["accuracy"] == first["validation/sort/accuracy"]
    assert not list(run.parent.glob("tiny*"))


DIES_ONCE = """
import os
from pathlib import Path
import grpo_core as grpo

class Dies(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(4)]
    def open(self, prompt):
        return object()
    def evaluate(self, episodes):
        if not Path("died").exists():
            Path("died").touch()
            os._exit(3)
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""


@pytest.mark.slow
def test_a_validation_says_in_a_line_what_it_has_survived(tmp_path):
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    done = grpo(tmp_path, "validate", "tiny", "--env", "./dies.py:Dies", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("survived: validation:")]
    assert "of its rollouts are played again; the first, of task 'dies': its session ended" in line
    assert json.loads(done.stdout)["results"]["dies"]["errors"] == 0


@pytest.mark.slow
def test_a_run_and_a_model_are_measured_with_another_strategy(run):
    chosen = "--validation", "pass_at_k", "--set", "validation.options.k=[1,4]"
    done = grpo(run.parent, "validate", "run", *chosen)
    assert done.returncode == 0, done.stderr
    first, empty, head, *rows = done.stdout.splitlines()
    assert (first, empty) == ("run, version 4, measured by pass_at_k", "")
    assert head.split() == ["task", "metric", "value", "interval"]
    assert [row.split()[0] for row in rows[1:4]] == ["pass@1", "pass@4", "accuracy"]
    model = "run/checkpoints/step-000004/trainer"
    options = ["--env", "math:sort", "--set", "tasks.sort.options.length=3", "--set", "validation.prompts=30",
        "--set", "rollout.max_tokens=16"]  # fmt: skip
    same = grpo(run.parent, "validate", model, *options, *chosen)
    assert same.stdout.splitlines()[2:] == done.stdout.splitlines()[2:], same.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--env", "math:sort"], "model 'nowhere': there is no such directory"),
        (["run/logs", "--env", "math:sort"], "run/logs is neither a run"),
        (["run/model"], "no task to measure: give an environment with --env NAME"),
        (["run", "--validation", "pass_at"], "there is no validation strategy 'pass_at'. Did you mean"),
        (["run", "--validation", "pass_at_k", "--set", "validation.options.k=0"], "k is 0; expected whole"),
        (["run", "--validation", "majority", "--set", "validation.options.m=2"], "'m'"),
    ],
)
def test_bad_input_gets_one_clear_message(run, arguments, message):
    done = grpo(run.parent, "validate", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
