"""The command line as a user meets it: whole runs of real processes, and what mistakes look like."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from forks import GRPO, grpo

from grpo_core import stored_rollouts
from grpo_core.app.build import Outcome
from grpo_core.commands.complaints import NEXT, complain, say
from grpo_core.commands.running import _summary
from grpo_core.loop import checkpoint
from grpo_core.reporting.verification import verified

SMALL = [
    "--set", "trainer.steps=4", "--set", "trainer.prompts_per_step=4", "--set", "trainer.updates_per_step=1",
    "--set", "rollout.group_size=4", "--set", "validation.prompts=10", "--set", "validation.every=2",
    "--set", "checkpoint.every=2",
]  # fmt: skip
SORT = ["--env", "math:sort", "--set", "tasks.sort.options.length=3"]

ENVIRONMENTS = '''
import os, sys, time
import grpo_core as grpo

class Words(grpo.Environment):
    """Replies are judged by what the class is called."""
    def prompts(self, split):
        n = 40 if split == "train" else 4
        return [grpo.Prompt(messages=f"{split[0]}{i}=", answer=str(i % 10)) for i in range(n)]
    def evaluate(self, episodes):
        return [self.judge(e) for e in episodes]
    def judge(self, e):
        return float(e.reply == e.prompt.answer)

class Digits(Words):
    def judge(self, e):
        return sum(c.isdigit() for c in e.reply) / 8

class Declared(Digits):
    success = 0.5

class WrongCount(Words):
    def evaluate(self, episodes):
        return [1.0] * (len(episodes) + 1)

class BreaksLater(Digits):
    seen = 0
    def evaluate(self, episodes):
        self.seen += len(episodes)
        return super().evaluate(episodes) + [1.0] * (self.seen > 60)

class Loaded(grpo.Tracker):
    """Tells at its end which large libraries this process has imported."""
    def __init__(self, run): ...
    def close(self):
        print("LOADED", *sorted({"torch", "transformers", "torchdata"} & set(sys.modules)))
'''


@pytest.fixture
def here(tmp_path):
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return tmp_path


def refused(cwd, *arguments):
    """A command that fails with one message; returns it."""
    done = grpo(cwd, *arguments)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr.split("The first of them:")[0], done.stderr
    return " ".join(done.stderr.split())


def events(run, kind):
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def rollouts(run, name):
    packed = (run / f"{name}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


ONCE = """
def Once(split):
    if split == "train":
        return ({"prompt": f"{n}>", "answer": f"{n}"} for n in range(100))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small run without the plugin of pages, whose learning rate and data are given."""
    cwd = tmp_path_factory.mktemp("plain")
    (cwd / "once.py").write_text(ONCE)
    given = ["--set", "trainer.lr=1e-3", "--no-plugin", "report", "--data", "./once.py:Once"]
    given += ["--set", "tasks.sort.data_options.exact=false"]
    done = grpo(cwd, "train", *SORT, *SMALL, *given, "--output", "run")
    assert done.returncode == 0, done.stderr
    return cwd / "run", done


@pytest.mark.slow
def test_a_run_without_the_plugin_of_pages_says_how_to_get_its_page_and_whose_position_is_not_exact(plain):
    run, done = plain
    *_, result, page, following = done.stdout.splitlines()
    assert result.endswith("; position not exact: sort; run: run")
    assert page == "page: pip install grpo-plugin-report, then grpo-core report run"
    assert following == "next: grpo-core export run"
    assert not (run / "report.html").exists()


@pytest.mark.slow
def test_the_first_line_says_what_trains_and_the_defaults_of_the_model_are_in_the_configuration(plain):
    run, done = plain
    assert done.stdout.splitlines()[0] == "training tiny on math:sort, 4 steps: a toy model"
    trainer = tomllib.loads((run / "config.toml").read_text())["trainer"]
    assert (trainer["threads"], trainer["lr"]) == (1, 1e-3)
    assert "trainer.threads" not in done.stdout


def test_a_terminal_wraps_lines_at_words_and_leaves_commands_whole(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    result, command = (
        "finished: sort: validation accuracy 10.0% -> 90.0%; run: run",
        f"{NEXT}a {'long ' * 20}end",
    )
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    say(f"{result}\n{command}")
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    complain(result)
    wrapped = ["finished: sort: validation accuracy", "10.0% -> 90.0%; run: run"]
    assert out.getvalue().splitlines() == [*wrapped, command]
    assert err.getvalue().splitlines() == wrapped
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    say(result)
    assert out.getvalue() == f"{result}\n"


# ---------------------------------------------------------------------------------- mistakes before any work


TWO_ENGINES = ["--env", "math:sort", "--set", "engine.workers=2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "math:sorting"], "there is no environment 'math:sorting'"),
        (["--env", "math:sort", "--engine", "loca"], "Did you mean 'local'?"),
        (["--env", "math:sort", "--sampler", "mixx"], "Did you mean 'mix'?"),
        (["--env", "math:sort", "--validation", "greed"], "Did you mean 'greedy'?"),
        (["--env", "math:sort", "--set", "trainer.lrr=1"], "key 'trainer.lrr'. Did you mean 'lr'?"),
        (["--env", "math:sort", "--set", "trainer.lr"], "expected section.key=value"),
        (["--env", "math:sort", "--set", "trainer.lr=fast"], "'trainer.lr': expected a number, got 'fast'"),
        ([*TWO_ENGINES, "--set", "engine.transport=cuda_ipc"], '"cuda_ipc" is for one engine'),
        (["--env", "math:sort", "--set", 'tracking.trackers=["wand"]'], "there is no tracker 'wand'"),
        (["--env", "math:sort", "--set", "tracking.files.gzip=true"], "has no option 'gzip'"),
        (["nowhere.toml"], "nowhere.toml: no such file"),
        ([], "no task to train on: give an environment with --env NAME"),
        (["--env", "./nowhere.py:X"], "nowhere.py"),
        (["--env", "./envs.py:Wrods"], "Did you mean 'Words'?"),
        (["--resume", "nowhere"], "nowhere is not a run"),
        (["--resume"], "there is no run with a checkpoint in runs/"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_message_before_any_work(here, arguments, message):
    assert message in refused(here, "train", *arguments)
    assert not (here / "runs").exists()


@pytest.mark.long
def test_an_output_directory_that_holds_another_run_is_left_alone(here):
    (here / "out").mkdir()
    (here / "out" / "config.toml").write_text("seed = 1\n")
    text = refused(here, "train", *SORT, "--output", "out")
    assert (
        "--output out holds another run; give another directory, or continue that run with --resume" in text
    )
    assert [path.name for path in (here / "out").iterdir()] == ["config.toml"]


@pytest.mark.long
def test_a_broken_plugin_is_listed_and_fatal_only_when_selected(here, monkeypatch):
    info = here / "grpo_plugin_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-plugin-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpo_core]\nbroken = grpo_plugin_broken\n")
    (here / "grpo_plugin_broken.py").write_text("import no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", str(here))
    listed = grpo(here, "plugins")
    assert listed.returncode == 0
    assert (
        "broken  (grpo-plugin-broken 1.0)\n  broken: ModuleNotFoundError: No module named 'no_such_module'"
        in (listed.stdout)
    )
    assert "no_such_module" in refused(here, "train", "--env", "broken:any")


@pytest.mark.long
def test_one_plugin_is_listed_by_its_name(here):
    assert grpo(here, "plugins", "math").stdout.startswith("math  (grpo-plugin-math")
    text = refused(here, "plugins", "mth")
    assert "plugin 'mth' is not installed. Did you mean 'math'? Installed: " in text


@pytest.mark.long
def test_plugins_as_json(here):
    rows = json.loads(grpo(here, "plugins", "--json").stdout)
    (math,) = [row for row in rows if row["name"] == "math"]
    assert {"sort", "addition", "gsm8k"} <= set(math["offers"]["environment"])


def test_the_version(here):
    assert grpo(here, "--version").stdout.strip() == "0.1.0"


@pytest.mark.long
def test_a_directory_without_a_model_is_refused(here):
    (here / "empty").mkdir()
    text = refused(here, "train", *SORT, "--set", "model.path=empty")
    assert "model" in text
    assert "empty" in text


@pytest.mark.long
@pytest.mark.parametrize(
    "setting", ['tracking.trackers=["wand"]', "tracking.files.gzip=true", "tracking.x.y=1"]
)
def test_a_wrong_tracker_is_a_wrong_configuration(here, setting):
    assert grpo(here, "train", "--env", "math:sort", "--set", setting).returncode == 2


# ---------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run that others look at, and must not change."""
    cwd = tmp_path_factory.mktemp("trained")
    done = grpo(cwd, "train", *SORT, *SMALL, "--output", "run")
    assert done.returncode == 0, done.stderr
    return cwd / "run", done


@pytest.mark.long
def test_a_run_trains_validates_saves_and_prints_a_summary(trained):
    run, done = trained
    *_, result, page, following = done.stdout.splitlines()
    assert "finished: sort: validation" in result
    assert "4 of 4 steps" in result
    assert result.endswith("run: run")
    assert (page, following) == ("page: run/report.html", "next: grpo-core export run")
    assert "proved" not in done.stdout, "4 steps raise no doubt about the weight sync"
    rows = metrics(run)
    assert [row["step"] for row in rows if "time/step" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation/sort/accuracy" in row] == [0, 2, 4]
    steps = [row for row in rows if "time/step" in row]
    assert all(row["staleness_max"] <= 1 for row in steps)
    assert steps[0]["logprob_diff_mean"] < 1e-4, "the engine's logprobs are the trainer's"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert len(rollouts(run, "rollouts/step-000001")) == 16
    assert len(rollouts(run, "validation/step-000004")) > 0


@pytest.mark.long
def test_the_last_line_of_a_resumed_run_counts_its_own_steps(trained):
    run, _ = trained
    outcome = Outcome(reason="finished", step=4, steps=4, directory=run, seconds=2.0, began=2)
    assert "; 4 of 4 steps, 2 of them now in 2 s; " in _summary(outcome)


@pytest.mark.slow
def test_accuracy_is_claimed_only_where_a_success_is_declared(here):
    """By its environment, or by the configuration; the other task has rewards alone."""
    tasks = {"tasks.plain.env": "./envs.py:Digits", "tasks.declared.env": "./envs.py:Declared",
             "tasks.set.env": "./envs.py:Digits", "tasks.set.success": "0.5"}  # fmt: skip
    chosen = [part for key, value in tasks.items() for part in ("--set", f"{key}={value}")]
    done = grpo(here, "train", *chosen, *SMALL, "--sampler", "round_robin", "--output", "run",
                "--set", "trainer.steps=2",
                "--set", 'tracking.trackers=["files", "./envs.py:Loaded"]')  # fmt: skip
    assert done.returncode == 0, done.stderr
    if not version("transformers").startswith("5.0."):  # which imports it for a tokenizer
        assert "LOADED transformers\n" in done.stdout, "the main process imports no torch"
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("finished: "))
    rows = metrics(here / "run")
    names = {key for row in rows for key in row}
    for task, headline in {"plain": "reward", "declared": "accuracy", "set": "accuracy"}.items():
        claimed = {f"accuracy/{task}", f"validation/{task}/accuracy", f"validation/{task}/accuracy_low"}
        assert names & claimed == (claimed if headline == "accuracy" else set()), task
        first, last = (row[f"validation/{task}/{headline}"] for row in (rows[0], rows[-1]))
        shown = "{:.1%} -> {:.1%}" if headline == "accuracy" else "{:.4g} -> {:.4g}"
        assert f"{task}: validation {headline} {shown.format(first, last)}" in said


@pytest.mark.slow
def test_a_run_that_cannot_learn_says_so_at_its_start_and_again_after_five_steps(here):
    done = grpo(here, "train", *SORT, *SMALL, "--output", "run", "--set", "trainer.steps=5",
                "--set", "rollout.max_tokens=2", "--set", "validation.every=0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    start, later = (line for line in done.stdout.splitlines() if line.startswith("warning, step "))
    assert start.startswith(
        "warning, step 0: task 'sort': 16 of 16 of its own solutions are longer than rollout.max_tokens = 2"
    )
    assert later.startswith(
        "warning, step 5: the last 5 steps trained nothing: 100% of the groups of task 'sort'"
    )
    assert "no reply was rewarded, also none of the" in later, "some end by themselves, and are wrong as well"
    assert grpo(here, "verify", "run").returncode == 0


@pytest.mark.long
def test_a_task_with_training_data_only_is_told_what_to_set(here):
    (here / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (here / "judge.py").write_text(
        "import grpo_core as grpo\nclass Judge(grpo.Environment):\n"
        "    def evaluate(self, episodes):\n        return [0.0 for _ in episodes]\n"
    )
    only = ["--env", "./judge.py:Judge", *SMALL, "--set", "tasks.judge.data=rows.jsonl"]
    message = refused(here, "train", *only)
    assert message.startswith(
        f"grpo-core: task 'judge': it has no held-out prompts: its data {str(here / 'rows.jsonl')!r} "
        "has training prompts only, and its environment offers none. Set tasks.judge.validation_data, or "
        "validation.every=0. ("
    )
    assert "Judge does not define prompts(split)" in message


@pytest.mark.long
def test_a_task_without_prompts_is_told_so(here):
    (here / "none.py").write_text(
        "import grpo_core as grpo\nclass Empty(grpo.Environment):\n"
        "    def prompts(self, split):\n        return []\n"
        "    def evaluate(self, episodes):\n        return [0.0 for _ in episodes]\n"
    )
    message = refused(here, "train", "--env", "./none.py:Empty", *SMALL)
    assert (
        "task 'empty': prompts('train') of its environment is empty; expected at least one prompt" in message
    )


@pytest.mark.long
def test_a_field_of_answers_that_no_row_has_ends_the_start(here):
    (here / "rows.jsonl").write_text('{"prompt": "1+1=", "gold": "2"}\n')
    message = refused(here, "train", *SORT, "--set", "tasks.sort.data=rows.jsonl",
                      "--set", "tasks.sort.data_options.answer=answr")  # fmt: skip
    assert "no row has a value in 'answr', which data_options.answer names" in message


@pytest.mark.slow
def test_a_checkpoint_can_be_validated_and_is_an_ordinary_transformers_directory(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = trained
    done = grpo(run.parent, "validate", "run", "--set", "validation.prompts=20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run, version 4, measured by batched\n")
    (stored,) = (run / "validated").iterdir()
    assert f"results and rollouts: {stored.relative_to(run.parent)}" in done.stderr
    assert json.loads((stored / "results.json").read_text())["results"]["sort"]["reward"] >= 0
    read = [each for group in stored_rollouts(stored, 4, validation=True) for each in group.rollouts]
    assert len(read) == 20
    assert {version for each in read for version in each.segments[0].tokens.versions.tolist()} == {4}
    assert not verified(run).findings
    directory = run / "checkpoints" / "step-000004" / "trainer"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    assert model(**tokenizer("321=", return_tensors="pt")).logits.shape[-1] == len(tokenizer)


@pytest.mark.slow
def test_a_run_that_fails_says_where_it_is_and_how_to_continue(here):
    said = refused(here, "train", "--env", "./envs.py:BreaksLater", *SMALL, "--set", "checkpoint.every=1",
                   "--set", "trainer.steps=50", "--output", "run")  # fmt: skip
    assert "evaluate returned" in said
    assert said.endswith("run: run next: grpo-core train --resume run")


@pytest.mark.long
def test_a_finished_run_says_how_to_continue(trained):
    run, _ = trained
    for more, said in [
        ([], "run: finished all of its 4 steps; for more, add --set trainer.steps=8\n"),
        (["--set", "trainer.steps=2"], "run: finished 4 steps; for more, add --set trainer.steps=8\n"),
    ]:
        done = grpo(run.parent, "train", "--resume", "run", *more)
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    for change in ("rollout.max_tokens=9", "model.path=smollm2"):
        key, _, value = change.partition("=")
        said = refused(run.parent, "train", "--resume", "run", "--set", change)
        assert key in said, "a change without an effect is not ignored"
        assert value in said


@pytest.mark.slow
def test_the_weights_of_a_trained_directory_are_trained_further(trained, here):
    directory = trained[0] / "checkpoints" / "step-000004" / "trainer"
    done = grpo(here, "train", *SORT, *SMALL, "--set", f"model.path={directory}", "--set", "trainer.lr=1e-3",
                "--set", "rollout.max_tokens=8", "--output", "more")  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_any_architecture_with_a_chat_template_is_trained(here):
    """GPT-2 has neither rotary positions nor gated layers: transformers' own forward decodes it."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from grpo_core.demo.tiny import write_tokenizer

    model = here / "gpt2"
    model.mkdir()
    write_tokenizer(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(model)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128,
                   bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    ).save_pretrained(model)  # fmt: skip
    done = grpo(here, "train", "--env", "./envs.py:Digits", *SMALL, "--set", "model.path=gpt2",
                "--set", "rollout.max_tokens=8", "--set", "trainer.lr=1e-3", "--output", "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [row for row in metrics(here / "run") if "loss" in row]
    assert steps[0]["logprob_diff_mean"] < 1e-4
    (row, *_) = rollouts(here / "run", "rollouts/step-000001")
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]


OBJECTIVES = """
def raises(inputs):
    return inputs.nothing_like_it, {}

def one_short(groups):
    return [[0.0] * (len(group.rollouts) - 1) for group in groups]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("loss", "raises", "loss '{file}:raises' of plugin 'objectives.py' (a file) raised objectives.py:"),
        pytest.param(
            "advantage", "one_short", "advantage '{file}:one_short' of plugin 'objectives.py' (a file) "
            "returned groups of sizes [3, 3, 3, 3]; expected one number or None for each rollout: "
            "[4, 4, 4, 4]",
            marks=pytest.mark.nightly,  # test_pipeline.py has one in a pipeline
        ),
    ],
)  # fmt: skip
def test_a_broken_loss_or_advantage_is_one_line_that_names_it(here, part, name, message):
    (here / "objectives.py").write_text(OBJECTIVES)
    done = grpo(
        here, "train", *FORTY, *LONG, "--set", f"{part}.name=./objectives.py:{name}", "--output", "run"
    )
    line, *hint = [line for line in done.stderr.splitlines() if line]
    known = ("run: run", "next: grpo-core train --resume run", "step ")
    assert all(each.startswith(known) for each in hint), "where it is and what is saved, if it has trained"
    assert line.startswith("grpo-core: " + message.format(file=here / "objectives.py"))
    assert done.returncode == 1
    log = (here / "run" / "logs" / "trainer.log").read_text()
    assert ("Traceback" in log and "nothing_like_it" in log) == (part == "loss"), "where it was raised"


# ---------------------------------------------------------------------------------- ends of all kinds


STARTED = []


def start(cwd, *arguments):
    process = subprocess.Popen(
        [GRPO, "train", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A process that a failed test leaves would fail the next test, when Python collects it."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def wait_for(condition, process, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_done(run):
    path = run / "metrics.jsonl"
    return sum('"time/step"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def trained_prompts(run, steps):
    """Prompts of the steps that count: of each step the last time it was trained."""
    last = {}
    for event in events(run, "GroupsReady"):
        last[event["step"]] = [(group["task"], group["prompt"]) for group in event["groups"]]
    assert sorted(last) == list(range(steps))
    return Counter(prompt for step in last.values() for prompt in step)


LONG = [*SMALL, "--set", "trainer.steps=30", "--set", "checkpoint.every=1", "--set", "validation.every=0"]
FORTY = ["--env", "./envs.py:Words"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),  # test_kill.py kills runs again and again
    ],
)
def test_a_run_that_is_ended_continues_where_it_was(here, how):
    """40 prompts an epoch, 30 steps of 4: three whole epochs, each prompt once an epoch."""
    run = here / "run"
    process = start(here, *FORTY, *LONG, "--output", "run")
    wait_for(lambda: steps_done(run) >= 5, process)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    if how != signal.SIGKILL:
        assert process.returncode == 130, err
        assert out.splitlines()[-1] == "next: grpo-core train --resume run"
    assert "Traceback" not in err
    again = grpo(here, "train", "--resume", "run")
    assert again.returncode == 0, again.stderr
    assert "continuing run after step" in again.stdout
    assert steps_done(run) == 30
    assert set(trained_prompts(run, 30).values()) == {3}, "each prompt once an epoch: none lost, none doubled"
    assert len(list((run / "checkpoints").iterdir())) == 2


@pytest.mark.nightly
def test_a_run_that_died_before_its_first_checkpoint_starts_again(here):
    process = start(here, *FORTY, *LONG, "--output", "run")
    wait_for(lambda: (here / "run" / "model").exists(), process)
    process.kill()
    process.communicate()
    again = grpo(here, "train", "--resume", "run", "--set", "trainer.steps=2")
    assert again.returncode == 0, again.stderr
    assert "run has no checkpoint yet: starting from the beginning" in again.stdout
    assert steps_done(here / "run") == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_second_ctrl_c_ends_it_at_once(here, how):
    """The step never ends, so that the first signal alone would not end the run."""
    hangs = here / "hangs"
    (here / "losses.py").write_text(
        "import pathlib, time\n\n"
        f"def hangs(inputs):\n    pathlib.Path({str(hangs)!r}).touch()\n    time.sleep(3600)\n"
    )
    process = start(here, *FORTY, *LONG, "--set", "loss.name=./losses.py:hangs", "--output", "run")
    wait_for(hangs.exists, process)  # a step whose rewards are equal calls no loss
    process.send_signal(how)
    assert any(f"{how.name}: ending after this step" in line for line in process.stdout)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == 130
    end = time.monotonic() + 10
    while found := descendants_of(process.pid):  # the watcher looks three times more, and then ends
        assert time.monotonic() < end, found
        time.sleep(0.02)


def descendants_of(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(pid) in (path.parent / "cmdline").read_text().split("\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_checkpoint_with_one_byte_changed_is_passed_over(trained, here):
    import shutil

    shutil.copytree(trained[0], here / "run")
    weights = here / "run" / "checkpoints" / "step-000004" / "trainer" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = grpo(here, "train", "--resume", "run")
    assert done.returncode == 0, done.stderr
    why = "passed over step-000004: trainer/model.safetensors has changed since it was written"
    assert f"survived, step 2: checkpoints: {why} (its sha256 differs)" in done.stdout
    assert "continuing run after step 2" in done.stdout
    events = map(json.loads, (here / "run" / "events.jsonl").read_text().splitlines())
    (told,) = [event for event in events if event["event"] == "IncidentReported"]
    assert (told["kind"], told["step"]) == ("passed_over", 2)
    assert told["message"].startswith(why), "the tensor and its element follow"
    rows = map(json.loads, (here / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "incidents/passed_over" in row] == [3]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3.2 megabytes: room for a tiny model and two checkpoints of it, not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3200k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.nightly
def test_a_disk_that_fills_up_during_a_checkpoint_costs_nothing_that_was_saved(here, small_disk):
    run = small_disk / "run"
    text = refused(here, "train", *SORT, *SMALL, "--set", "checkpoint.every=1", "--output", run)
    assert "step-000003: cannot be written: No space left on device" in text
    assert "make room and --resume; the checkpoints before it are untouched" in text
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert checkpoint.newest(run / "checkpoints").step == 2
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    again = grpo(here, "train", "--resume", run)
    assert again.returncode == 0, again.stderr
    assert "after step 2" in again.stdout


def test_a_reader_that_stops_reading_is_not_an_error(here):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [GRPO, "plugins", "--json"], cwd=here, stdout=writing, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writing)
    assert done.stderr == b""
