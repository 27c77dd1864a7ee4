"""Runs of large models that fit a GPU of 80 GB, estimated without memory and without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grpo_core import ConfigError
from grpo_core.app import launch
from grpo_core.app.make import make
from grpo_core.config import parse_settings
from grpo_plugin_doctor.memory import SMALLER

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("_fits", ROOT / "docs" / "_fits.py")
assert SPEC is not None
assert SPEC.loader is not None
fits = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fits)

RECOMPUTE = "trainer.activations=recompute"

pytestmark = pytest.mark.long


@pytest.mark.nightly
@pytest.mark.parametrize(("title", "model", "settings"), fits.ROWS, ids=lambda value: str(value)[:20])
def test_the_document_names_the_smallest_change_with_which_a_model_fits_or_that_none_does(
    title, model, settings
):
    page = fits.PAGE.read_text()
    row = f"| {title} | {fits.cell(model, 1, settings)} | {fits.cell(model, 2, settings)} |"
    assert row in page.splitlines(), "run `make pages` (docs/_fits.py)"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "gpus", "settings", "message"),
    [
        ("0.6B", 1, ["engine.options.memory_fraction=0.85"], f"The run fits with --set {RECOMPUTE}"),
        ("4B", 2, [], f"trainer's activations .*The run fits with --set {RECOMPUTE}"),
        ("8B", 2, ["model.lora.rank=16"], f"trainer's activations .*The run fits with --set {RECOMPUTE}"),
        ("30B-A3B", 2, [], r"needs at least 4\d\d GiB of GPU"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(model, gpus, settings, message):
    with pytest.raises(ConfigError, match=message):
        fits.check(model, gpus, *settings)


@pytest.mark.parametrize("keys", SMALLER, ids=str)
def test_a_proposed_change_is_a_run_that_is_not_refused(keys):
    settings = [f"{key}={value}" for key, value in keys.items()]
    given = parse_settings(["model.dtype=bfloat16", *settings], {"tasks": launch.tasks_of(["math:sort"])})
    make(*launch.configure([], given))
