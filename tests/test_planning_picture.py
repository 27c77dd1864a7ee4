"""The picture of forecasts shows what the table says, and what the simulated runs did."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from grpo_core.config import build, structured
from grpo_core.errors import ConfigError
from grpo_core.planning import commands
from grpo_core.planning.commands import Planner
from grpo_core.planning.outcomes import DrawnOutcomes
from grpo_core.planning.picture import drawn
from grpo_core.planning.tables import Row
from grpo_core.planning.times import Times
from grpo_core.plugins.host import PluginHost

TIMES = structured(
    Times,
    {"engine": {"token": 0.1}, "rollout": {"tokens": 10, "spread": 0.0}, "trainer": {"step": 3.0}},
)
"""A completion takes 1 s, and a step 3 s."""
SETTINGS = ["trainer.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=16"]


@pytest.fixture(scope="module")
def rows():
    """Forecasts without and with staleness: a step takes 4 s, or 3 s."""
    config = build(
        [
            {
                "trainer": {"prompts_per_step": 2},
                "rollout": {"group_size": 2, "max_tokens": 16},
                "validation": {"every": 0, "at_start": False},
                "checkpoint": {"every": 0},
            }
        ]
    )
    host = PluginHost.discover(None, [])
    planner = Planner(config, TIMES, DrawnOutcomes(TIMES.rollout), host, seed=0, steps=8)
    return [
        planner.row("as configured", {}),
        *planner.rows(commands.variants_of(["pipeline.max_staleness=0,1"])),
    ]


def boxes(svg, kind):
    """The places, tops and widths of the boxes of a kind, from the left and from the top."""
    found = [
        box for box in ElementTree.fromstring(svg).iter() if box.get("class") == kind and box.get("width")
    ]
    return [tuple(float(box.get(key)) for key in ("x", "y", "width")) for box in found]


def texts(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("}text")]


def test_a_bar_is_as_long_as_the_step_and_shows_what_the_trainer_did(rows):
    svg = drawn(rows, 2)
    frames = [wide for _, _, wide in boxes(svg, "frame")]
    assert frames == [pytest.approx(wide, abs=0.2) for wide in (frames[1] * 0.75, frames[1], frames[2])]
    assert frames[2] == frames[0], "the alternative that is the configuration itself"
    of_bars = [box for box in boxes(svg, "training") if box[1] < 200][1:]  # the first is in the legend
    second = of_bars[1]
    assert second[2] == pytest.approx(frames[1] * 3 / 4, abs=0.2), "3 of 4 seconds"
    waiting = boxes(svg, "waiting")[2]
    assert waiting[:2] == pytest.approx((second[0] + second[2], second[1]), abs=0.2)
    assert waiting[2] == pytest.approx(frames[1] / 4, abs=0.2)
    assert {"4 s", "3 s", "pipeline.max_staleness=1 (best)"} <= set(texts(svg))


def test_the_steps_of_a_run_are_drawn_one_after_the_other(rows):
    (alone,) = [row for row in rows if row.settings == {"pipeline.max_staleness": 0}]
    svg = drawn([alone], 0)
    steps = [box for box in boxes(svg, "training") if box[1] > boxes(svg, "frame")[0][1] + 20]
    assert len(steps) == 6
    gap = [after[0] - before[0] for before, after in itertools.pairwise(steps)]
    assert gap == [pytest.approx(gap[0], abs=0.2)] * 5, "a step each 4 s"
    assert steps[0][2] + 1 == pytest.approx(gap[0] * 3 / 4, abs=0.3), "of which 3 s are training"


def test_no_group_is_being_generated_while_a_step_without_staleness_is_trained(rows):
    (alone,) = [row for row in rows if row.settings == {"pipeline.max_staleness": 0}]
    counts = [count for _, count in alone.moments.generating]
    assert set(counts) == {0, 1, 2}, "a step has two groups"
    for step in alone.moments.steps:
        assert [count for at, count in alone.moments.generating if step.begin <= at < step.trained][-1] == 0


def test_a_run_that_is_in_two_lines_of_the_table_is_drawn_once(rows):
    assert rows[0].moments is rows[2].moments
    assert [words for words in texts(drawn(rows, 2)) if "as configured" in words] == ["as configured"] * 2
    assert sum("max_staleness=1" in words for words in texts(drawn(rows, 2))) == 1


def test_a_name_is_text_however_it_looks(rows):
    hostile = Row(
        name='</text><script>alert("1")</script>' + "x" * 99, settings={}, forecast=rows[0].forecast
    )
    svg = drawn([hostile], 0)
    assert "<script" not in svg
    assert any(words.startswith("</text><script>") and len(words) == 60 for words in texts(svg))


def simulate(picture, **given):
    defaults = {
        "settings": SETTINGS,
        "times": None,
        "time": ["rollout.tokens=10", "trainer.step=3"],
        "sweep": ["pipeline.max_staleness=0"],
        "steps": 6,
        "seed": 0,
        "as_json": False,
    }
    return commands.simulate(**(defaults | given), picture=picture)


def test_the_command_writes_the_picture_beside_the_table(tmp_path, capsys):
    assert simulate(tmp_path / "plan.svg") == 0
    assert "as configured" in capsys.readouterr().out
    assert "pipeline.max_staleness=0 (best)" in texts((tmp_path / "plan.svg").read_text())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan.png", "give a name that ends in .svg"),
        ("missing/plan.svg", "cannot be written: No such file or directory"),
        ("folder.svg", "cannot be written: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_anything_is_read(tmp_path, name, message):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=f"--picture .*{message}"):
        simulate(tmp_path / name, time=["no such time"])
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_a_forecast_that_fails_leaves_an_earlier_picture_as_it_was(tmp_path):
    picture = tmp_path / "plan.svg"
    picture.write_text("earlier")
    with pytest.raises(ConfigError, match="service times"):
        simulate(picture, time=["no such time"])
    assert picture.read_text() == "earlier"
    with pytest.raises(ConfigError, match="service times"):
        simulate(tmp_path / "new.svg", time=["no such time"])
    assert not (tmp_path / "new.svg").exists()
