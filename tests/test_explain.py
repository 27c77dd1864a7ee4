"""``grpo-core explain``: each cause is named on a run that has it, and none on a run that has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from simulation.broken import BREAKS, write

from grpo_core.errors import ConfigError
from grpo_core.explain import command
from grpo_core.explain.decisions import CAUSES, explained
from grpo_core.explain.facts import Facts

SEED = 58
"""A seed whose runs are small."""
QUICK = (
    "rewards_all_zero",
    "rollouts_unscored",
    "prompts_too_long",
    "few_different_prompts",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "engine_logprobs_differ",
    "engine_has_old_weights",
    "environment_dies",
    "environment_is_the_bottleneck",
    "checkpoints_block",
    "disk_full",
    "killed",
)
"""Causes of every kind; `make test-fast` leaves the others out, which take a third of a second each."""
SIMULATED = [pytest.param(cause, marks=() if cause in QUICK else pytest.mark.long) for cause in BREAKS]


def named(path: Path) -> list[str]:
    return [finding.cause for finding in explained(Facts.read(path))]


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nothing is wrong."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    write(path, "healthy", SEED)
    return path


@pytest.mark.parametrize("cause", SIMULATED)
def test_a_run_that_is_broken_on_purpose_is_explained(cause: str, tmp_path: Path) -> None:
    write(tmp_path / "run", cause, SEED)
    assert named(tmp_path / "run")[0] == cause


def test_a_healthy_run_has_no_cause(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.explain(healthy, as_json=False) == 0
    assert "nothing found" in capsys.readouterr().out


def test_each_cause_has_three_different_lines_of_evidence_and_a_fix(tmp_path: Path) -> None:
    write(tmp_path / "run", "rewards_all_zero", SEED)
    (finding, *_) = explained(Facts.read(tmp_path / "run"))
    assert len(set(finding.evidence)) == 3
    assert "grpo-core" in finding.fix


def test_the_list_names_each_cause_once_and_can_name_all_that_are_simulated() -> None:
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names) >= 30
    assert set(BREAKS) <= set(names)


def test_the_text_shows_three_causes_and_json_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", "no_stop_token", SEED)
    command.explain(tmp_path / "run", as_json=False)
    text = capsys.readouterr().out
    command.explain(tmp_path / "run", as_json=True)
    table = json.loads(capsys.readouterr().out)
    assert text.startswith("1. ")
    assert "fix: " in text
    assert table["findings"][0]["cause"] == "no_stop_token"
    assert len(table["findings"][0]["evidence"]) == 3


# ---------------------------------------------------------------------------------- damaged directories


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy run, to be damaged."""
    return shutil.copytree(healthy, tmp_path / "run")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        command.explain(tmp_path, as_json=False)


def test_a_directory_with_nothing_but_a_configuration_is_refused(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        (run / name).unlink()
    with pytest.raises(ConfigError, match="are missing, empty or damaged"):
        command.explain(run, as_json=False)


def test_half_lines_and_rubbish_are_counted_and_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (run / name).open("ab") as file:
            file.write(
                b'[1, 2]\n\xff\xfe{"step": \n{"step": "x", "lane": 3, "busy": "no", "time/step": true}\n{"a'
            )
    assert command.explain(run, as_json=False) == 0
    said = capsys.readouterr()
    assert "nothing found" in said.out
    assert "3 lines of metrics.jsonl cannot be read" in said.err


def test_events_of_odd_types_do_no_harm(run: Path) -> None:
    events = (
        {"event": "Dispatched", "slots": [3, {"task": None, "prompt": []}]},
        {"event": "IncidentReported", "kind": None, "count": -5, "message": ["x"]},
        {"event": "WarningRaised", "cause": {}, "step": 1e400},
        {"event": "PromptSkipped"},
    )
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    assert named(run) == []


def test_a_configuration_of_odd_types_does_no_harm(run: Path) -> None:
    (run / "config.toml").write_text('trainer = 3\npipeline = "x"\n[rollout]\ngroup_size = "many"\n')
    assert named(run) == []


def test_a_configuration_that_cannot_be_read_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.toml").write_text("[[[")
    assert command.explain(run, as_json=False) == 0
    assert "config.toml cannot be read" in capsys.readouterr().err


def test_a_run_without_events_is_explained_by_its_metrics(tmp_path: Path) -> None:
    write(tmp_path / "run", "rewards_all_zero", SEED)
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "timeline.jsonl").unlink()
    assert named(tmp_path / "run")[0] == "rewards_all_zero"


def test_text_that_a_plugin_wrote_does_nothing_to_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"event": "ErrorRaised", "step": 3, "message": "\x1b[2Jgone", "traceback": ""}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    command.explain(run, as_json=False)
    said = capsys.readouterr().out
    assert "run_failed" in said
    assert "\x1b" not in said


def test_the_page_has_a_line_for_each_cause() -> None:
    page = (Path(__file__).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")
    missing = [
        cause.name
        for cause in CAUSES
        if f"| `{cause.name}` | {(cause.condition.__doc__ or '').strip()} |" not in page
    ]
    assert missing == []
