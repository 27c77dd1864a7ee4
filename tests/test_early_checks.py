"""A choice that cannot be made ends the command before a process starts or a model is read."""

from __future__ import annotations

import subprocess
import sys

import pytest
from forks import grpo

pytestmark = pytest.mark.long

FILE = """
import os
from pathlib import Path
import grpo_core as grpo

class Marked(grpo.Environment):
    def __init__(self):
        Path("started").touch()
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(10)]
    def evaluate(self, episodes):
        return [0.0 for _ in episodes]
    def solve(self, prompt):
        return prompt.answer

@grpo.hookimpl
def grpo_engines():
    return {"unreadable": grpo.EngineOffer(Unreadable, requires={"no_such_module": "pip install no-such"})}

class Unreadable:
    def __init__(self, setup):
        Path("started").touch()
"""
ENV = ["--env", "./file.py:Marked"]
NO_PLUGINS = """
import importlib.metadata as metadata
find = metadata.entry_points
metadata.entry_points = lambda **which: [] if which == {"group": "grpo_core"} else find(**which)
"""
NO_VLLM = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "vllm" else find(name, *rest)
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    model = tmp_path / "huge"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    return tmp_path


def refused(cwd, command, *arguments, **environ):
    """The one line on standard error of a command that fails and has started nothing."""
    done = grpo(cwd, command, *arguments, **environ)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert not (cwd / "runs").exists()
    assert not (cwd / "started").exists()
    return done.stderr.rstrip()


def option(key, value="1"):
    return ["--set", f"{key}={value}"]


CHOICES = [
    (["--sampler", "mixx"], "there is no sampler 'mixx'. Did you mean 'mix'?"),
    (option("sampler.options.weight"), "has no option 'weight'"),
    (["--sampler", "curriculum", *option("sampler.options.low", "2")], "low"),
    (option("engine.options.max_row"), "has no option 'max_row'. Did you mean 'max_rows'?"),
    (option("loss.name", "grpoo"), "there is no loss 'grpoo'. Did you mean 'grpo'?"),
    (option("loss.options.clip_hi"), "has no option 'clip_hi'. Did you mean 'clip_high'?"),
    (option("advantage.name", "grup"), "there is no advantage 'grup'. Did you mean 'group'?"),
    (option("advantage.options.scal"), "has no option 'scal'"),
    (option("validation.options.max_token"), "has no option 'max_token'. Did you mean 'max_tokens'?"),
    (["--validation", "pass_at_k", *option("validation.options.k", "0")], "k is 0"),
    (option("validation.engine.name", "locl"), "there is no engine 'locl'. Did you mean 'local'?"),
    (option("validation.engine.options.max_row"), "has no option 'max_row'"),
    ([*option("trainer.ranks", "2"), *option("optimizer.name", "muon")], "'muon' computes with whole"),
    (
        [*option("trainer.ranks", "2"), *option("model.lora.rank", "4"),
         *option("scores.reference.weights", "ema"), *option("scores.reference.mix", "1.0"),
         *option("loss.options.kl.coefficient", "0.1")],
        "with [model.lora] only the weights of the start are kept",
    ),
    (["--trainer", "torhc"], "there is no trainer 'torhc'. Did you mean 'torch'?"),
    (["--engine", "./file.py:unreadable"], "no_such_module is not installed: pip install no-such"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [("huge", *each) for each in CHOICES] + [("./nowhere", *each) for each in CHOICES[:2]],
    ids=str,
)
def test_a_choice_that_cannot_be_made_starts_nothing(here, model, arguments, message):
    assert message in refused(here, "train", *ENV, *option("model.path", model), *arguments)


@pytest.mark.parametrize(("arguments", "message"), CHOICES[3:4] + CHOICES[8:9], ids=str)
def test_validate_checks_as_early(here, arguments, message):
    assert message in refused(here, "validate", "huge", *ENV, *arguments)


@pytest.mark.parametrize("chosen", [["--model", "./nowhere"], option("model.path", "./nowhere")], ids=str)
def test_a_model_that_does_not_exist_starts_nothing(here, chosen):
    text = refused(here, "train", *ENV, *chosen)
    assert "model './nowhere': there is no such directory" in text


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--engine", "vllm"], "there is no engine 'vllm': pip install 'grpo-core[vllm]'"),
        (["--engine", "vllm:http"], "there is no engine 'vllm:http': pip install grpo-plugin-vllm"),
        (["--model", "smollm2"], "there is no model 'smollm2': pip install grpo-plugin-smollm2"),
        (["--env", "math:sort"], "there is no environment 'math:sort': pip install grpo-plugin-math"),
        (["--ray"], "there is no placement that crosses machines: pip install 'grpo-core[ray]'"),
        (["--env", "reasoning_gym:gcd"], "pip install grpo-plugin-reasoning-gym"),
    ],
    ids=str,
)
def test_a_known_plugin_that_is_not_installed_is_named_with_its_command(here, arguments, hint):
    (here / "sitecustomize.py").write_text(NO_PLUGINS)
    assert hint in refused(here, "train", *ENV, *arguments, PYTHONPATH=str(here))


@pytest.mark.parametrize(
    ("key", "value"), [("ranks", "2"), ("weights", "bfloat16"), ("offload", "true")], ids=str
)
def test_what_only_the_plugin_of_scale_can_do_is_refused_without_it(here, key, value):
    chosen = [*option(f"trainer.{key}", value), "--no-plugin", "scale"]
    expected = f"configuration key 'trainer.{key}' is not installed: pip install grpo-plugin-scale"
    assert expected in refused(here, "train", *ENV, *chosen)


def test_of_all_names_one_with_two_swapped_letters_is_the_nearest(here):
    assert "Did you mean 'grpo'?" in refused(here, "train", *ENV, *option("loss.name", "gpro"))


def test_vllms_plugin_without_vllm_names_the_command_that_installs_it(here):
    """As where the plugin was installed without its extra."""
    pytest.importorskip("grpo_plugin_vllm")
    (here / "sitecustomize.py").write_text(NO_VLLM)
    text = refused(here, "train", *ENV, "--engine", "vllm", PYTHONPATH=str(here))
    assert "vllm is not installed: pip install 'grpo-core[vllm]'" in text


def test_the_checks_load_no_heavy_package(here):
    """They take a fraction of a second, whatever the model's size."""
    program = (
        "import sys\n"
        "from grpo_core.cli import main\n"
        f"sys.argv = ['grpo-core', 'train', *{ENV!r}, '--set', 'model.path=huge',"
        " '--set', 'loss.options.clip_hi=1']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "print(*{'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True)
    assert done.stdout == "\n", (done.stdout, done.stderr)


NO_RESULTS = {
    "pass": "Env has no method 'evaluate'; define evaluate(episodes)",
    "def evaluate(self, episodes): return 1.0": "evaluate returned float, expected one result per episode",
    "def evaluate(self, episodes): return [1.0, 0.0, 1.0]": "evaluate returned 3 results for 1 episodes",
    "def evaluate(self, episodes): return ['good']": "'good'",
    "def evaluate(self, episodes): return [re.match('a', each.reply) for each in episodes]": (
        "env.py:4 in evaluate: NameError: name 're' is not defined"
    ),
    "def evaluate(self, episodes): return [float('nan')]": (
        "reply 'I do not know.': reward is nan, expected a number between -1e+300 and 1e+300"
    ),
}


@pytest.mark.parametrize(("body", "message"), NO_RESULTS.items(), ids=str)
def test_an_environment_that_cannot_judge_one_reply_ends_before_a_model_is_read(here, body, message):
    prompts = "def prompts(self, split): return [grpo.Prompt(messages='1+1=')] * 1"
    (here / "env.py").write_text(
        f"import grpo_core as grpo\nclass Env(grpo.Environment):\n    {prompts}\n    {body}\n"
    )
    done = grpo(here, "train", "--env", "./env.py:Env", "--model", "huge")
    assert done.returncode != 0
    assert message in done.stderr
    assert "huge" not in done.stderr
    assert "grpo_core/environments" not in done.stderr, "frames of the plugin alone"


def test_an_environment_that_never_hints_is_refused_by_name_for_a_loss_of_hints(here):
    (here / "env.py").write_text(
        "import grpo_core as grpo\nclass Env(grpo.Environment):\n"
        "    def prompts(self, split): return [grpo.Prompt(messages='1+1=', answer='2')]\n"
        "    def evaluate(self, episodes): return [grpo.Feedback(reward=0.0)]\n"
    )
    hinted = option("loss.name", "self_distillation")
    done = grpo(here, "train", "--env", "./env.py:Env", "--model", "huge", *hinted)
    assert done.returncode != 0
    assert "task 'env' gives no hints, from which the loss learns" in done.stderr
