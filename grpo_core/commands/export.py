"""``grpo-core export``: a run's trained weights as a directory for others, with a model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import cattrs
import tomli_w
from attrs import evolve, frozen

from grpo_core._version import __version__
from grpo_core.api.run import Run
from grpo_core.app.model_sources import check_adapters, started_from
from grpo_core.commands.complaints import complain, say
from grpo_core.config import Config, TaskConfig, as_table
from grpo_core.contracts.errors import ConfigError
from grpo_core.loop.checkpoint import choose_checkpoint
from grpo_core.models.files import ADAPTERS, ModelFiles
from grpo_core.plugins.files import load_object
from grpo_core.plugins.options import Flag
from grpo_core.storage.run_directory import RunDirectory, planned_steps

Form = Literal["merged", "adapters"]
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SECTIONS = (
    *("tasks", "model", "rollout", "advantage", "shaping", "loss", "optimizer", "trainer", "pipeline"),
    *("sampler", "dynamic_sampling", "filters"),
)
"""Sections of the configuration that describe how a model was trained; the others describe where."""


@frozen(kw_only=True)
class Export:
    """A checkpoint of a run, and the form in which it is exported."""

    run: RunDirectory
    config: Config
    checkpoint: Path
    step: int
    form: Form | None
    """None for a run that trained all weights: it has only one form."""
    dtype: str = ""
    """Dtype of a merged model; empty: that of the engine of training."""

    @property
    def saved(self) -> Path:
        return self.checkpoint / "trainer"

    @property
    def name(self) -> str:
        return "-".join(filter(None, (f"step-{self.step:06}", self.form)))


def export(
    run: Path,
    /,
    *,
    step: int | None = None,
    output: Path | None = None,
    merged: Flag = False,
    adapters: Flag = False,
    dtype: Dtype | None = None,
) -> int:
    """Write a checkpoint of a run as a directory for transformers or peft, with a model card.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step of the checkpoint.  Default: the newest one.
    output
        Directory that is written, which must not exist.  Default: RUN/exported/step-STEP.
    merged
        Add the adapters of a run with LoRA to the weights of its model.
    adapters
        Write the adapters of a run with LoRA alone; this is the default for such a run.
    dtype
        Dtype of a merged model.  Default: the dtype of the sums in the engine of training, or float32 if it
        kept adapters apart.  Other weights are written as that engine held them.
    """
    if merged and adapters:
        raise ConfigError("use --merged or --adapters, not both")
    if dtype and not merged:
        raise ConfigError(
            f"--dtype {dtype} is for --merged; other weights have the dtype of the run's engine"
        )
    chosen = find(run, step, "merged" if merged else "adapters" if adapters else None, dtype or "")
    target = output or run / "exported" / chosen.name
    write(chosen, target)
    say(str(target))
    return 0


def find(directory: Path, step: int | None, form: Form | None, dtype: Dtype | Literal[""] = "") -> Export:
    """Choose a checkpoint of a run; without a step the newest one that is intact.

    Raises ConfigError if there is none, or it has no such form, CheckpointError if it is damaged.
    """
    run, config = RunDirectory.open(directory)
    found = choose_checkpoint(directory, step)
    for reason in found.passed_over:
        complain(f"note: passed over {reason}")
    with_adapters = (found.directory / "trainer" / ADAPTERS).is_file()
    if form == "adapters" and not with_adapters:
        raise ConfigError(f"{directory} trained all weights and has no adapters; leave out --adapters")
    form = (form or "adapters") if with_adapters else None
    return Export(run=run, config=config, checkpoint=found.directory, step=found.step, form=form, dtype=dtype)


def write(export: Export, target: Path) -> None:
    """Write the directory completely or not at all.  Raises ConfigError if it exists."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} already exists; give another directory with --output")
    part = target.with_name(f"{target.name}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
    except (PermissionError, NotADirectoryError) as error:
        raise ConfigError(
            f"{part}: cannot be written ({error.strerror}); give another directory with --output"
        ) from None
    except FileExistsError:
        if not part.parent.is_dir():
            raise ConfigError(f"{part.parent}: is a file; give another directory with --output") from None
        raise ConfigError(
            f"{part}: another export is writing it, or was interrupted; remove it, or give another --output"
        ) from None
    try:
        left = _write_weights(export, part)
        if left < 1:
            complain(f"note: {left:.0%} of the change is left in {dtypes(part)} (docs/lora.md)")
        if export.form == "adapters":  # others find their model by its hub id, if it has one
            about = json.loads((part / ADAPTERS).read_text(encoding="utf-8"))
            about["base_model_name_or_path"] = base_model(export)
            (part / ADAPTERS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (part / "README.md").write_text(card(export, dtypes(part)), encoding="utf-8")
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_weights(export: Export, part: Path) -> float:
    """Write the weights as the engine of training held them; return the share of the change that is left."""
    from grpo_core.training import building
    from grpo_core.weights.layout import write_held

    if export.form == "merged":
        start = started_from(export.run, export.config)
        check_adapters(export.run.path, export.checkpoint, start)
        return building.write_whole(start, export.saved, export.config, part, export.dtype)
    if export.form == "adapters":
        building.write_part(export.saved, export.config, part)
    else:
        write_held(export.saved, part)
    return 1.0


def dtypes(directory: Path) -> str:
    """Return the dtypes of the weights in a directory."""
    found = {each.dtype for each in ModelFiles(directory).tensors.values()}
    return ", ".join(sorted(DTYPES.get(each, each) for each in found))


def base_model(export: Export) -> str:
    """Return the hub id or the directory of the model that the run started from."""
    path, made = export.config.model.path, (export.run.model / "config.json").exists()
    if not made and path.count("/") == 1 and not Path(os.path.expanduser(path)).exists():
        return path
    if not made and path.count("/") and export.form == "adapters":
        return str(Path(os.path.expanduser(path)).absolute())  # it need not exist: adapters only name it
    return str(started_from(export.run, export.config).absolute())


# ---------------------------------------------------------------------------------- the model card


def card(export: Export, dtype: str) -> str:
    """Return the text of the model card: the origin of the weights, and how to load them."""
    base, run = base_model(export), export.run.path.resolve().name
    of_hub = not Path(base).is_absolute()
    library = "peft" if export.form == "adapters" else "transformers"
    front = [
        *([f"base_model: {base}"] if of_hub else []),
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning, grpo-core]",
    ]
    what = {
        None: "All weights of this model were trained.",
        "adapters": "This directory has adapters (LoRA), which belong to the base model.",
        "merged": "Adapters (LoRA) were trained and then added to the weights of the base model.",
    }[export.form]
    kind = "AutoPeftModelForCausalLM" if export.form == "adapters" else "AutoModelForCausalLM"
    started, results = None, {}
    for event in Run(export.run.path, strict=False).events("RunStarted", "Validated"):
        if event["event"] == "RunStarted":
            started = event.get("config")
        elif event.get("version") == export.step:
            results = event["results"]
    steps = planned_steps(as_table(export.config), started)
    scores = [
        f"* Validation of `{task}` at this step: "
        + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        for task, metrics in results.items()
    ]
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            f"# {run}, step {export.step}",
            "",
            f"Trained with GRPO by grpo-core {__version__}. {what}",
            "",
            f"* Base model: {base if of_hub else f'`{export.config.model.path}`'}",
            f"* Weights: {dtype}",
            f"* Run: `{run}`, step {export.step}{f' of {steps}' if steps else ''}",
            *(f"* Task `{name}`: `{task.env}`" for name, task in export.config.tasks.items()),
            *scores,
            "",
            "Load it:",
            "",
            f"    from {library} import {kind}",
            "",
            f'    model = {kind}.from_pretrained("THIS_DIRECTORY")',
            "",
            "Configuration, where it differs from the defaults:",
            "",
            "```toml",
            tomli_w.dumps(excerpt(export.config)).strip(),
            "```",
            "",
        ]
    )


def excerpt(config: Config) -> dict[str, Any]:
    """Return the training settings that differ from the defaults."""
    usual = Config(
        tasks=dict.fromkeys(config.tasks, TaskConfig(env="")),
        sections=[
            evolve(each, values=cattrs.unstructure(load_object(each.kind, who="section")()))
            for each in config.sections
        ],
    )
    table, defaults = as_table(config), as_table(usual)
    kept = {section: _changed(table.get(section, {}), defaults.get(section, {})) for section in SECTIONS}
    return {section: value for section, value in kept.items() if value}


def _changed(value: Any, default: Any) -> Any:
    """Return the parts of a table that differ from another one."""
    if not isinstance(value, Mapping):
        return value
    usual = default if isinstance(default, Mapping) else {}
    return {key: _changed(item, usual.get(key)) for key, item in value.items() if item != usual.get(key)}
