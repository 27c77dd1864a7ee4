"""``grpo-core export``: what was trained becomes a directory that transformers or peft loads."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import attrs
import peft
import pytest
import torch
import transformers
import yaml
from cuts import pipeline_at
from safetensors.torch import load_file
from test_lora import setup as lora_setup
from test_lora import trained
from test_trainer import setup as full_setup

from grpo_core.commands import export
from grpo_core.config import Config, build
from grpo_core.config.sections import PluginSection, PluginSections
from grpo_core.contracts.errors import CheckpointError, ConfigError, ModelError
from grpo_core.demo import tiny
from grpo_core.loop import checkpoint
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.training.trainer import TorchTrainer

TASKS = {"sort": {"env": "math:sort", "options": {"length": 4}}}
IDS = torch.arange(8)[None]


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(IDS).logits


def saved_run(path: Path, trainer: TorchTrainer, config: Config, step: int = 3) -> Path:
    """A run's directory with a checkpoint of a trainer, as the pipeline writes it."""
    run = RunDirectory.create(path, config) if not path.exists() else RunDirectory.existing(path)

    async def save(directory: Path):
        trainer.save(directory)
        return lambda: asyncio.to_thread(trainer.written().result)

    async def begin() -> None:
        written = await checkpoint.begin(
            run.checkpoints, step=step, pipeline=pipeline_at(step), loaders={}, save_trainer=save, keep=9
        )
        await written()

    asyncio.run(begin())
    run.unlock()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=2, warm_start_steps=0)
    return str(directory)


def of(model: str, *, lora: bool) -> tuple[TorchTrainer, Config]:
    trainer = trained((lora_setup if lora else full_setup)(model))
    section = {"path": model, **({"lora": {"rank": 4, "alpha": 8}} if lora else {})}
    table = {"tasks": TASKS, "model": section, "trainer": {"steps": 8}}
    return trainer, build([table], PluginHost.discover().sections)


@pytest.fixture(scope="module")
def adapted(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TorchTrainer]:
    trainer, config = of(model, lora=True)
    return saved_run(tmp_path_factory.mktemp("runs") / "adapted", trainer, config), trainer


def exported(run: Path, output: Path, **chosen: bool) -> Path:
    given = {"step": None, "merged": False, "adapters": False, **chosen}
    assert export.export(run, output=output, **given) == 0
    return output


# ---------------------------------------------------------------------------------- three forms


@pytest.mark.long
def test_a_merged_model_is_an_ordinary_one_with_the_trainers_logits(adapted, tmp_path) -> None:
    run, trainer = adapted
    directory = exported(run, tmp_path / "out", merged=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(loaded), logits(trainer.model.policy.module), rtol=0, atol=1e-5)
    names = [name for path in directory.glob("*.safetensors") for name in load_file(path)]
    assert names
    assert not any("lora" in name or "base_layer" in name for name in names)
    assert not (directory / "adapter_config.json").exists()
    assert transformers.AutoTokenizer.from_pretrained(directory)("ab").input_ids == [*tiny.encode("ab")]


@pytest.mark.long
def test_adapters_are_loaded_by_peft_onto_the_model_that_they_name(adapted, model, tmp_path) -> None:
    run, trainer = adapted
    directory = exported(run, tmp_path / "out")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(loaded), logits(trainer.model.policy.module), rtol=0, atol=1e-5)
    with loaded.disable_adapter():
        start = transformers.AutoModelForCausalLM.from_pretrained(model)
        torch.testing.assert_close(logits(loaded), logits(start), rtol=0, atol=1e-6)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert size < 0.7 * sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))


@pytest.mark.long
def test_a_run_that_trained_all_weights_is_exported_as_it_is(model, tmp_path) -> None:
    trainer, config = of(model, lora=False)
    run = saved_run(tmp_path / "run", trainer, config)
    directory = exported(run, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(logits(loaded), logits(trainer.model.policy.module))
    with pytest.raises(ConfigError, match="trained all weights and has no adapters"):
        exported(run, tmp_path / "other", adapters=True)


# ---------------------------------------------------------------------------------- which checkpoint


@pytest.mark.long
def test_a_step_is_chosen_and_the_newest_is_the_default(model, tmp_path) -> None:
    trainer, config = of(model, lora=False)
    run = saved_run(tmp_path / "run", trainer, config, step=3)
    early = logits(trainer.model.policy.module)
    with torch.no_grad():
        for _, parameter in trainer.model.trainable():
            parameter.mul_(1.5)
    saved_run(run, trainer, config, step=7)
    assert export.export(run, step=3, output=None, merged=False, adapters=False) == 0
    assert export.export(run, step=None, output=None, merged=False, adapters=False) == 0
    for step, expected in ((3, early), (7, logits(trainer.model.policy.module))):
        found = transformers.AutoModelForCausalLM.from_pretrained(run / "exported" / f"step-00000{step}")
        assert torch.equal(logits(found), expected)
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 5; there are: 3, 7"):
        exported(run, tmp_path / "other", step=5)


@pytest.mark.long
def test_what_is_there_is_never_overwritten_and_nothing_is_left_of_a_failure(
    adapted, tmp_path, monkeypatch
) -> None:
    run, _ = adapted
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"out already exists; give another directory with --output"):
        exported(run, tmp_path / "out")
    monkeypatch.setattr(export, "card", lambda *chosen: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        exported(run, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_damaged_checkpoint_is_not_exported(model, tmp_path) -> None:
    trainer, config = of(model, lora=False)
    run = saved_run(tmp_path / "run", trainer, config)
    weights = next((run / "checkpoints" / "step-000003" / "trainer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        exported(run, tmp_path / "out", step=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_newer_checkpoint_that_is_damaged_is_named_when_an_older_one_is_exported(
    model, tmp_path, capsys
) -> None:
    trainer, config = of(model, lora=False)
    run = saved_run(tmp_path / "run", trainer, config, step=3)
    saved_run(run, trainer, config, step=7)
    weights = next((run / "checkpoints" / "step-000007" / "trainer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    assert export.export(run, step=None, output=tmp_path / "out", merged=False, adapters=False) == 0
    said = capsys.readouterr().err
    assert "note: passed over step-000007: trainer/model.safetensors has changed since it was written" in said
    assert "step 3" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_whose_model_is_gone_says_so(model, tmp_path) -> None:
    trainer, config = of(model, lora=False)
    there = attrs.evolve(config, model=attrs.evolve(config.model, path="tiny"))
    run = saved_run(tmp_path / "run", trainer, there)
    with pytest.raises(ModelError, match="run: the model that it started from is missing: model 'tiny'"):
        exported(run, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_one_line_that_names_the_option(model, tmp_path) -> None:
    trainer, config = of(model, lora=False)
    run = saved_run(tmp_path / "run", trainer, config)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: is a file; give another directory with --output"):
        exported(run, tmp_path / "file" / "out")


def test_a_directory_without_a_checkpoint_or_a_run_is_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        exported(tmp_path, tmp_path / "out")
    RunDirectory.create(tmp_path / "run", build([{"tasks": TASKS}])).unlock()
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        exported(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="use --merged or --adapters, not both"):
        exported(tmp_path / "run", tmp_path / "out", merged=True, adapters=True)


@pytest.mark.long
def test_merging_without_peft_is_one_line_and_adapters_need_none(adapted, tmp_path, monkeypatch) -> None:
    run, _ = adapted
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-core\[lora\]'"):
        exported(run, tmp_path / "merged", merged=True)
    exported(run, tmp_path / "adapters", adapters=True)


# ---------------------------------------------------------------------------------- the model card


@pytest.mark.parametrize("merged", [False, True])
def test_the_card_says_where_the_model_comes_from_and_how_it_was_trained(adapted, tmp_path, merged) -> None:
    run, _ = adapted
    text = (exported(run, tmp_path / "out", merged=merged) / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["library_name"] == ("transformers" if merged else "peft")
    assert "grpo-core" in about["tags"]
    assert "# adapted, step 3" in body
    assert "Task `sort`: `math:sort`" in body
    assert "rank = 4" in body
    assert "length = 4" in body
    for usual in ("max_staleness", "python = ", "targets = ", "dropout = "):
        assert usual not in body, "it is the default"


def test_a_hub_id_is_named_as_the_base_model(adapted, tmp_path) -> None:
    chosen = export.find(adapted[0], None, None)
    of_hub = attrs.evolve(chosen.config.model, path="Qwen/Qwen3-0.6B")
    chosen = attrs.evolve(chosen, config=attrs.evolve(chosen.config, model=of_hub))
    export.write(chosen, tmp_path / "out")
    assert "base_model: Qwen/Qwen3-0.6B" in (tmp_path / "out" / "README.md").read_text()
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"


def test_the_card_leaves_out_where_the_run_ran() -> None:
    config = build([{"tasks": TASKS, "engine": {"env_vars": {"HOST": "rack7"}}, "trainer": {"lr": 1e-4}}])
    found = export.excerpt(config)
    assert found["trainer"] == {"lr": 1e-4}
    assert "engine" not in found


@attrs.frozen
class Keys:
    warmth: float = 0.5
    depth: int = 3


@attrs.frozen
class Table:
    width: int = 2


def test_the_card_names_only_those_keys_of_plugins_that_were_changed() -> None:
    added = tuple(
        PluginSection.of(name, kind) for name, kind in {"trainer": Keys, "model.wide": Table}.items()
    )
    config = build([{"tasks": TASKS, "trainer": {"lr": 1e-4, "depth": 7}}], PluginSections(added))
    found = export.excerpt(config)
    assert found["trainer"] == {"lr": 1e-4, "depth": 7}
    assert "model" not in found
