"""Which held-out prompts are measured: a choice of all of them, the same at each version, and said."""

from __future__ import annotations

import json

import forks
import pytest

import grpo_core as grpo
from grpo_core.app import making
from grpo_core.app.make import make
from grpo_core.config import ValidationConfig, build
from grpo_core.config.run import RolloutConfig
from grpo_core.contracts.events import Validated
from grpo_core.contracts.records import Prompt, RunInfo
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.terminal import TerminalTracker
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer
from grpo_core.testing import run as on_virtual_time
from grpo_core.validation.results import as_line, table
from grpo_core.validation.runner import HeldOut
from grpo_plugin_report.curves import tasks_of


def part(known, wanted, *, seed=0, **given):
    prompts = [Prompt(messages=f"{n}", id=str(n), environment="sums") for n in range(known)]
    return HeldOut(
        config=ValidationConfig(prompts=wanted, at_start=True),
        prompts={"sums": prompts},
        environments={"sums": FakeEnvironment()},
        seed=seed,
        **given,
    )


def ids(held_out):
    return [int(prompt.id) for prompt in held_out.selection()["sums"]]


def test_a_part_of_the_prompts_is_chosen_from_all_of_them_by_the_seed():
    chosen = ids(part(400, 200))
    assert len(set(chosen)) == 200
    assert chosen == sorted(chosen) == ids(part(400, 200))
    assert 60 < sum(number >= 200 for number in chosen) < 140, "a choice of all"
    assert chosen != ids(part(400, 200, seed=1))
    assert ids(part(400, 400)) == ids(part(400, 500)) == list(range(400))


def measured(held_out, versions):
    """Results of versions, and the ids of the prompts that were played for each."""

    async def story():
        played = []
        table = {"model": {"path": "tiny"}, "tasks": {"sums": {"env": "math:sort"}}}
        setup = make(build([table]), PluginHost.discover())
        engine = FakeEngine()
        playing = making.playing(RolloutConfig(), {}, FakeRenderer(), seed=0)
        validation = making.validation(setup, playing, [held_out], engine, last=9, emit=played.append)
        results = []
        for version in versions:
            engine.version = version
            results.append(await validation(version))
        return results, [[group.prompt.id for group in event.groups] for event in played if event.groups]

    return on_virtual_time(story())


def test_the_choice_is_the_same_at_each_version_and_the_results_say_of_how_many():
    held_out = part(40, 5)
    results, played = measured(held_out, [0, 9])
    assert len(played) == 2
    assert sorted(played[0], key=int) == sorted(played[1], key=int) == [str(n) for n in ids(held_out)]
    for each in results:
        assert (each["sums"]["prompts"], each["sums"]["prompts_of"]) == (5, 40)


@pytest.mark.parametrize(
    ("held_out", "text"),
    [
        (part(40, 5), "5 of 40"),
        (part(5, 5, of={"sums": 0}), "the first 5"),  # of a stream
        (part(4, 5), "4"),
    ],
)
def test_terminal_page_and_validate_say_how_many_prompts_of_how_many(held_out, text, capsys, tmp_path):
    ((result,), _) = measured(held_out, [9])
    assert f"prompts {text}," in as_line(result["sums"]) + ","
    row = next(line.split("prompts", 1)[1] for line in table(result).splitlines() if " prompts " in line)
    assert row.strip() == text
    terminal = TerminalTracker(RunInfo(name="run", directory=tmp_path, config={}), view="lines")
    terminal.event(Validated(step=9, version=9, results=result))
    terminal.close()
    assert f"prompts {text}," in capsys.readouterr().out.replace("\n", "") + ","
    metrics = {f"validation/sums/{name}": value for name, value in result["sums"].items()}
    (task,) = tasks_of([], [{"step": 9, **metrics}], {})
    assert task.prompts == ("" if text == "4" else text)


SUMS = """
import grpo_core as grpo

class Sums(grpo.Environment):
    "400 held-out sums: the first 100 have one digit, and are solved."
    success = 1.0

    def prompts(self, split):
        return [] if split == "train" else [grpo.Prompt(messages=f"{n}", id=f"{n}") for n in range(400)]

    def evaluate(self, episodes):
        return [float(each.reply == "solved") for each in episodes]

class Said(grpo.TextEngine):
    def __init__(self, setup):
        pass

    async def chat(self, messages, tools, request):
        text = "solved" if int(messages[-1]["content"]) < 100 else "?"
        return grpo.Reply(message={"role": "assistant", "content": text}, completion_tokens=2)

    async def aclose(self):
        pass

@grpo.hookimpl
def grpo_engines():
    return {"said": grpo.EngineOffer(Said, output="text")}
"""


@pytest.mark.long
def test_held_out_prompts_that_are_sorted_by_level_are_measured_by_a_choice_of_all(tmp_path, monkeypatch):
    (tmp_path / "env.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)
    results = grpo.validate(env="./env.py:Sums", engine="./env.py:said", output="validated")["sums"]
    assert results["prompts"] == 200
    assert results["prompts_of"] == 400
    assert 0.15 < results["accuracy"] < 0.35


def run_cli(*words):
    return forks.grpo(".", *words, timeout=200)


@pytest.mark.long
def test_validate_measures_the_rows_of_its_data(tmp_path, monkeypatch):
    (tmp_path / "env.py").write_text(SUMS)
    (tmp_path / "held_out.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in (1, 2, 300)))
    monkeypatch.chdir(tmp_path)
    options = ["--env", "./env.py:Sums", "--engine", "./env.py:said", "--data", "held_out.jsonl"]
    done = run_cli("validate", *options, "--json")
    results = json.loads(done.stdout)["results"]["sums"]
    assert (results["prompts"], round(results["accuracy"], 2)) == (3, 0.67)
    refused = run_cli("validate", *options, "--env", "math:sort")
    assert refused.returncode == 2
    assert refused.stderr.startswith("grpo-core: --data held_out.jsonl: it needs one --env")


@pytest.mark.long
def test_of_data_with_three_splits_the_validation_split_is_measured(tmp_path, monkeypatch):
    (tmp_path / "env.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)
    splits = {"train": 5, "validation": 3, "test": 2}
    data = {split: [{"prompt": str(n)} for n in range(rows)] for split, rows in splits.items()}
    found = grpo.validate(env="./env.py:Sums", engine="./env.py:said", data=data, output="validated")
    assert found["sums"]["prompts"] == 3
