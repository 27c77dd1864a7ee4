"""The page about scaling has the figures of its simulation, and the simulation still gives them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from attrs import asdict, evolve

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.fixture(scope="module")
def bench():
    path = ROOT / "tests" / "benchmarks" / "bench_scaling.py"
    spec = importlib.util.spec_from_file_location("bench_scaling", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_scaling"] = module  # attrs looks for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(bench):
    return json.loads(bench.FIGURES.read_text())


def test_the_tables_are_those_of_the_figures(bench, figures):
    assert bench.table(figures) in PAGE
    assert bench.costs(figures) in PAGE


@pytest.mark.long
def test_the_simulation_of_one_gpu_gives_the_figures_of_the_page(bench, figures):
    plan = bench.PLANS[0]
    now, then = asdict(bench.simulate(plan, bench.Gpu())), figures["plans"][0]
    simulated = now.keys() - {"cpu_us"}
    assert {name: now[name] for name in simulated} == {name: then[name] for name in simulated}


def test_engines_and_trainer_compute_what_their_bandwidth_and_operations_allow(bench):
    """A check of the model of the hardware, by hand, for 8 GPUs."""
    plan, gpu = bench.PLANS[1], bench.Gpu()
    decoder = bench.Decoder(plan, gpu)
    assert decoder.most == int((0.85 * 141e9 - 16.38e9) / (4608 * 147456))
    decoder.rows = [(1.0, i, None) for i in range(100)]
    assert decoder.seconds() == pytest.approx((16.38e9 + 100 * 2012 * 147456) / (0.8 * 4.8e12))
    assert bench.train_seconds(plan, 1e6, gpu) == pytest.approx(6 * 8.19e9 * 1e6 / (0.3 * 989e12 * 5))
    assert bench.sync_seconds(plan) == pytest.approx(2 * 16.38e9 / 450e9), "five ranks send to three engines"
    alone = evolve(plan, senders=1)
    assert bench.sync_seconds(alone) == pytest.approx(3 * 2 * 16.38e9 / 450e9), "one rank sends to three"
