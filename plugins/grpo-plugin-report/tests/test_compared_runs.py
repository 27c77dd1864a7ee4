"""Several runs on one page: arms, charts, and refusals."""

from __future__ import annotations

import errno
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from statistics import fmean

import pytest
import recording
import webdriver

from grpo_core import ConfigError, Group, Prompt, Rollout, Segment, Tokens
from grpo_core.cli import make_app
from grpo_core.config import Config, TaskConfig, TrackingConfig, TrainerConfig
from grpo_core.contracts.events import GroupsReady, RunEnded, StepEnded, Validated, ValidationPlayed
from grpo_plugin_report import arms, browsing, comparison, overlay
from grpo_plugin_report.charts import MARK_HEIGHT, Series, chart
from grpo_plugin_report.overlay import Overlay
from grpo_plugin_report.report import Files

HOSTILE = '{{ 7*7 }}</script><script>window.hurt=1</script><img src=x onerror="window.hurt=2">&amp;\u202e'


class Page(HTMLParser):
    """The tags and the text of a page, without its scripts."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._data = [], "", True
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._data = tag not in ("script", "style")

    def handle_endtag(self, tag):
        self._data = True

    def handle_data(self, data):
        self.text += data if self._data else ""


def group(task, question, replies, step):
    def rollout(reply, reward):
        tokens = Tokens.generated([2, 3], [-0.5, -0.25], [step, step])
        messages = ({"role": "user", "content": question}, {"role": "assistant", "content": reply})
        segment = Segment(prompt_ids=(1,), tokens=tokens)
        return Rollout(segments=[segment], messages=messages, reward=reward, finish_reason="stop", turns=1)

    return Group(
        prompt=Prompt(messages=question, id="p", environment=task, answer="42"),
        rollouts=tuple(rollout(reply, reward) for reply, reward in replies.items()),
        generation_version=step,
        target_version=step,
    )


def story(*tasks, steps=3, learnt=0.5, question="question p", reply="so"):
    """Yield the events of a run that reaches the accuracy ``learnt`` on its tasks."""
    for step in range(steps):
        yield GroupsReady(
            step=step, groups=tuple(group(t, question, {reply: 1.0, "no": 0.0}, step) for t in tasks)
        )
        by_task = {f"reward/{task}": learnt * (step + 1) / steps for task in tasks}
        by_task |= {f"groups/{task}": 4.0 for task in tasks}
        yield StepEnded(step=step + 1, metrics={"time/step": 2.0, "entropy": 1.0, **by_task})
    for version in (0, steps) if steps else ():
        value = learnt * version / steps
        results = {"accuracy": value, "accuracy_low": value - 0.1, "accuracy_high": value + 0.1}
        yield Validated(step=version, version=version, results=dict.fromkeys(tasks, results))
        played = tuple(group(task, question, {f"{reply} at {version}": value}, version) for task in tasks)
        yield ValidationPlayed(step=version, version=version, groups=played)
    yield RunEnded(step=steps, reason="finished")


def run(path, seed=0, *, tasks=("sort",), lr=1e-3, **told):
    config = Config(
        seed=seed,
        tasks={task: TaskConfig(env="math:sort") for task in tasks},
        trainer=TrainerConfig(lr=lr, steps=3),
        tracking=TrackingConfig(trackers=["files"]),
    )
    recording.record(path, story(*tasks, **told), config)
    return path


def page_of(*paths):
    return comparison.render(comparison.read(paths))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Three seeds of one setting, and one run of another."""
    home = tmp_path_factory.mktemp("runs")
    slow = [run(home / f"slow-{seed}", seed, learnt=0.1 * seed + 0.2) for seed in (1, 2, 3)]
    return [*slow, run(home / "fast", 1, lr=0.5, learnt=0.9, reply="another")]


@pytest.fixture(scope="module")
def html(paths):
    return page_of(*paths)


def cells(html, heading):
    """Return the rows of the first table after a heading, as texts."""
    begin = html.index(heading)
    table = html[begin : html.index("</table>", begin)]
    rows = re.findall(r"<tr>(<td.*?)</tr>", table, re.S)
    return [
        [" ".join(Page(cell).text.split()) for cell in re.findall(r"<td.*?</td>", row, re.S)] for row in rows
    ]


# ---------------------------------------------------------------------------------- arms


def test_runs_that_differ_only_in_their_seed_and_their_trackers_are_one_arm():
    base = {"trainer": {"lr": 1.0, "betas": [0.9, 0.95]}, "tasks": {"a": {"options": {}}}}
    histories = [
        [base | {"seed": 1}],
        [base | {"seed": 2, "tracking": {"wandb": {"name": "second"}}}],
        [base | {"trainer": {"lr": 2.0, "betas": [0.9, 0.95]}}],
        [base | {"trainer": {"lr": 3.0}}, base],
        [],
        [],
    ]
    found = arms.grouped(histories, list("uvwxyz"))
    assert [(arm.mark, arm.runs) for arm in found] == [
        ("A", (0, 1)),
        ("B", (2,)),
        ("C", (3,)),
        ("D", (4,)),
        ("E", (5,)),
    ]


def test_an_arm_is_named_by_few_settings_or_by_its_runs():
    first, second = {"a": 1, "b": {"c": 2}}, {"a": 5, "b": {"c": 2}}
    assert [arm.label for arm in arms.grouped([[first], [second]], ["x", "y"])] == ["a = 1", "a = 5"]
    other = {"a": 5, "b": {"c": 3, "d": 4}}
    assert [arm.label for arm in arms.grouped([[first], [first], [other]], ["x", "y", "z"])] == [
        "x, y (2 runs)",
        "z",
    ]
    assert arms.differing([first, other]) == [("a", ["1", "5"]), ("b.c", ["2", "3"]), ("b.d", ["", "4"])]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (9, 2.2622),
        (10, 2.2281),
        (25, 2.0595),
    ],
)
def test_quantiles_are_those_of_the_tables_of_student_s_t(freedom, quantile):
    assert arms.t_quantile(freedom) == pytest.approx(quantile, abs=5e-5)


def test_intervals_of_seeds_are_those_of_student_and_of_welch():
    found = arms.estimate([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (found.mean, found.interval) == (2.0, pytest.approx((2 - half, 2 + half), abs=1e-5))
    assert arms.estimate([1.0]).interval is None
    assert arms.estimate([]) is None
    gap = arms.difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])  # equal variances: 4 degrees of freedom
    half = 2.776445 * math.sqrt(2 / 3)
    assert (gap.mean, gap.interval) == (4.0, pytest.approx((4 - half, 4 + half), abs=1e-5))
    assert arms.difference([5.0], [1.0, 2.0]).interval is None


# ---------------------------------------------------------------------------------- curves


def rows(metric, *values):
    return [{"step": step, metric: value} for step, value in enumerate(values, 1)]


def drawn(*runs, arms_of, metric="reward/a"):
    found = [arms.Arm(mark=chr(65 + i), index=i, runs=its, label=f"arm {i}") for i, its in enumerate(arms_of)]
    every = [Files(None, None, steps=rows(metric, *values)) for values in runs]
    return Overlay(found, every).steps("reward", metric)


def test_an_arm_is_a_mean_with_its_interval_over_thin_lines_of_its_seeds():
    made = drawn([1.0, 2.0], [3.0, 6.0], [9.0, 9.0], arms_of=[(0, 1), (2,)])
    assert [one.style for one in made.series] == ["thin", "thin", "line", "line"]
    mean, single = made.series[2:]
    assert [*mean.points] == [(1, 2.0), (2, 4.0)]
    assert [*single.points] == [(1, 9.0), (2, 9.0)]
    assert mean.band[0] == (1, pytest.approx(2 - 12.7062, abs=1e-3), pytest.approx(2 + 12.7062, abs=1e-3))
    assert not single.band
    assert (mean.name, mean.mark, single.name, single.mark) == ("A arm 0", "A", "B arm 1", "B")


def test_a_mean_ends_where_the_first_of_its_seeds_ends():
    made = drawn([1.0, 2.0, 3.0], [3.0], arms_of=[(0, 1)])
    assert [one.points[-1][0] for one in made.series] == [3, 1, 1]


def test_long_curves_are_means_of_the_same_parts_in_all_runs():
    values = [float(step % 7) for step in range(1, 602)]
    made = drawn(values, values[:300], arms_of=[(0,), (1,)])
    long, short = made.series
    assert len(long.points) == 55, "of eleven steps, the last of seven"
    assert long.points[0] == (6.0, pytest.approx(fmean(values[:11]), abs=1e-4))
    assert [x for x, _ in short.points] == [x for x, _ in long.points][: len(short.points)]


def test_a_wide_interval_is_cut_off_at_the_edge_and_read_as_it_is():
    made = chart(
        "c", [Series(name="a", points=[(0, 1.0), (1, 2.0)], band=[(0, -100, 100), (1, 1, 3)])], clipped=True
    )
    ys = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", made.areas[0])]
    assert min(ys) == pytest.approx(10)
    assert max(ys) == pytest.approx(176)
    assert made.y_ticks[-1][1] == "2"


def test_letters_at_the_ends_of_lines_do_not_cover_each_other():
    lines = [Series(name="s", points=[(0, 1.0), (1, 1.0 + i / 1e6)], mark=chr(65 + i)) for i in range(5)]
    made = chart("c", [*lines, Series(name="far", points=[(0, 2.0)], mark="Z")])
    heights = sorted(y for (_, y), _, _ in made.letters)
    assert all(b - a >= MARK_HEIGHT - 0.11 for a, b in pairwise(heights))
    assert all(10 <= y <= 176 for y in heights)
    assert {letter for _, letter, _ in made.letters} == set("ABCDEZ")


# ---------------------------------------------------------------------------------- results


def test_the_page_shows_runs_results_and_settings_side_by_side(html):
    assert [row[:4] for row in cells(html, "<h2>Runs")] == [
        ["A1 slow-1", "1", "finished", "3"],
        ["A2 slow-2", "2", "finished", "3"],
        ["A3 slow-3", "3", "finished", "3"],
        ["B fast", "1", "finished", "3"],
    ]
    several, single = cells(html, "<h2>sort")
    assert several[:3] == ["A trainer.lr = 0.001 (3 runs)", "0.0% 0.0% to 0.0%", "40.0% 15.2% to 64.8%"]
    assert single[1:4] == ["0.0% -10.0% to 10.0%", "90.0% 80.0% to 100.0%", "+50.0 points"]
    assert (several[-1], single[-1]) == ("95%, 3 seeds", "one run, over prompts")
    assert cells(html, "<h2>Settings") == [["trainer.lr", "0.001", "0.5"]]


def test_results_are_of_versions_and_steps_that_all_runs_have(tmp_path):
    long = run(tmp_path / "long", 1, steps=6, learnt=0.6)
    short = run(tmp_path / "short", 2, steps=3, learnt=0.3)
    (found,) = [overlay.results(*_arms_and_runs(long, short), "sort")]
    assert found.versions == (0, 0), "the first one is the only one that both have"
    assert found.steps == (1, 3)
    assert found.rows[0].reward.mean == pytest.approx(0.2)


def test_of_a_task_that_a_run_lacks_the_settings_name_its_environment_only():
    task = {"env": "math:sort", "weight": 1.0, "source": {"path": ""}}
    rows = arms.differing([{"tasks": {"a": task, "b": task | {"weight": 2.0}}}, {"tasks": {"a": task}}, {}])
    assert [key for key, _ in rows] == ["tasks.a.env", "tasks.b.env"]


def test_runs_without_a_validation_are_compared_by_their_rewards(tmp_path):
    paths = [run(tmp_path / name, lr=lr) for name, lr in (("slow", 1e-3), ("fast", 0.5))]
    for path in paths:
        lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (path / "metrics.jsonl").write_text("".join(line for line in lines if "validation/" not in line))
    page = page_of(*paths)
    assert "there is no version that all runs validated with the same metric" in page
    assert [row[2] for row in cells(page, "<h2>sort")] == ["0.333", "0.333"]


def test_a_step_with_few_groups_of_a_task_counts_for_few_in_the_mean_of_a_run():
    rows = [{"step": 1, "groups/a": 1.0, "reward/a": 0.0}, {"step": 2, "groups/a": 31.0, "reward/a": 1.0}]
    (found,) = overlay.results(arms.grouped([[{}]], ["a"]), [Files(None, None, steps=rows)], "a").rows
    assert found.reward.mean == 31 / 32


def _arms_and_runs(*paths):
    files = [Files.read(path) for path in paths]
    return arms.grouped([[each.table] for each in files], [path.name for path in paths]), files


def test_a_repeated_seed_is_reported(tmp_path, html):
    twice = [run(tmp_path / name, 4) for name in ("one", "again")]
    assert "which intervals take for an independent one: A2 again." in Page(page_of(*twice)).text
    assert "independent" not in html
    assert "The configurations differ in nothing but the seed." in page_of(*twice)


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    page = page_of(*(run(tmp_path / name / "run", seed) for seed, name in enumerate(("one", "two"))))
    assert [row[0] for row in cells(page, "<h2>Runs")] == ["A1 one/run", "A2 two/run"]


def test_a_run_that_was_continued_with_other_settings_is_not_a_seed_of_the_others(tmp_path, paths):
    changed = run(tmp_path / "changed", 9)
    (changed / "config-1.toml").write_text("seed = 9\n[trainer]\nlr = 7.0\n")
    page = page_of(paths[0], changed)
    assert [row[0] for row in cells(page, "<h2>Runs")] == ["A slow-1", "B changed"]
    assert "B changed was continued with other settings" in page


def test_tasks_that_not_all_runs_have_are_left_out_and_named(tmp_path, paths):
    both = run(tmp_path / "both", tasks=("sort", "other"))
    page = page_of(paths[0], both)
    assert "Tasks that not all of the runs have are left out: other." in page
    assert "<h2>other" not in page


# ---------------------------------------------------------------------------------- the page


def stored(html):
    begin = html.index('<section id="browser"')
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html[begin:], re.S)[1])


def test_the_page_holds_rollouts_of_each_run_and_shares_the_texts_of_tokens(html):
    page = stored(html)
    assert page["runs"] == ["A1 slow-1", "A2 slow-2", "A3 slow-3", "B fast"]
    assert [sum(g["run"] == i for g in page["groups"]) for i in range(4)] == [5, 5, 5, 5]
    assert page["pieces"] == ["#2", "#3"]


@pytest.mark.long
def test_runs_share_the_room_of_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr(browsing, "TEXT_ROOM", 12_000)
    long = [run(tmp_path / str(seed), seed, steps=20, reply="x" * 300) for seed in range(3)]
    sizes = [len(json.dumps(stored(page_of(*long[:n]))["groups"])) for n in (2, 3)]
    assert max(sizes) < 2 * 12_000
    runs = {g["run"] for g in stored(page_of(*long))["groups"]}
    assert runs == {0, 1, 2}


def test_a_page_opens_without_a_network_and_runs_only_its_script(html):
    page = Page(html)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert [attrs for tag, attrs in page.tags if tag == "script"][-1] == {}


def hostile(path, seed):
    """A run whose names, texts and settings are markup."""
    bad = HOSTILE.replace("/", "|")  # a file system has no other
    run(path / f"{bad[:60]}{seed}", seed, tasks=(HOSTILE,), lr=seed / 10, question=HOSTILE, reply=HOSTILE)
    (made,) = path.glob(f"*{seed}")
    config = (made / "config.toml").read_text()
    (made / "config.toml").write_text(f"{config}\n[plugin]\nname = {json.dumps(f'{HOSTILE}{seed}')}\n")
    return made


def test_hostile_texts_stay_texts(tmp_path, html):
    harmless = Page(html)
    page = Page(page_of(*(hostile(tmp_path, seed) for seed in (1, 2))))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags} | {
        "p",
        "details",
        "summary",
        "ul",
        "li",
    }
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert all(attrs == {"type": "application/json"} for attrs in scripts[:-1])
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert page.text.count("{{ 7*7 }}") > 5, "it is shown as it is"
    assert "\u202e" not in page.text


# ---------------------------------------------------------------------------------- the command


def told(*arguments):
    return make_app()(["report", *map(str, arguments)], result_action="return_value")


def test_the_command_writes_one_page_of_several_runs(tmp_path, paths, capsys):
    output = tmp_path / "compared.html"
    assert told(*paths, "--output", output) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert "4 runs compared" in output.read_text()
    assert told(*paths[:2], "--output", output) == 0, "a page may be made again"
    assert "2 runs compared" in output.read_text()
    assert told(paths[0], "--output", output) == 0
    assert "compared" not in Page(output.read_text()).text


def test_a_file_that_cannot_be_read_is_not_called_one_that_cannot_be_written(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "metrics.jsonl"))

    made = [run(tmp_path / name, seed) for seed, name in enumerate(("one", "other"))]
    monkeypatch.setattr(Files, "read", forbidden)
    for given in (made[:1], [*made, "--output", tmp_path / "compared.html"]):
        with pytest.raises(PermissionError, match=r"one/metrics\.jsonl"):
            told(*given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slow-1", "slow-2"], "several runs need --output"),
        (["slow-1", "nowhere", "--output", "page.html"], "nowhere is not a run"),
        (["nowhere", "slow-1", "--output", "page.html"], "nowhere is not a run"),
        (["slow-1", "fast", "slow-1", "--output", "page.html"], "are the same run; give each run once"),
        (["slow-1", "other", "--output", "page.html"], "in common: slow-1 has sort and other has chat"),
        (["slow-1", "empty", "--output", "page.html"], "empty: has no metrics of a step or a validation yet"),
        (["slow-1", "fast", "--output", "slow-1"], "is a directory"),
        (["slow-1", "fast", "--output", "slow-1/config.toml"], "exists, and is not a report"),
        (["slow-1", "--output", "slow-1/config.toml"], "exists, and is not a report"),
        (["slow-1", "fast", "--output", "nowhere/page.html"], "there is no directory nowhere"),
        (["slow-1"] * 27 + ["--output", "page.html"], "27 runs; a page has room for 26"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(paths, monkeypatch, arguments, message):
    home = paths[0].parent
    monkeypatch.chdir(home)
    if not (home / "other").exists():
        run(home / "other", tasks=("chat",))
        run(home / "empty", steps=0, tasks=())
    with pytest.raises(ConfigError, match=re.escape(message)):
        told(*arguments)
    assert not (home / "page.html").exists()
    assert "seed" in (home / "slow-1" / "config.toml").read_text()


# ---------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chromium():
    with webdriver.browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory, paths):
    return comparison.write(paths, tmp_path_factory.mktemp("page") / "compared.html")


@pytest.mark.long
@pytest.mark.skipif(bool(webdriver.absent()), reason=webdriver.absent())
class TestInABrowser:
    def opened(self, chromium, page, fragment=""):
        chromium.said()
        chromium.open(f"file://{page}{fragment}")
        return chromium

    @pytest.mark.parametrize(
        ("fragment", "number"),
        [("", 32), ("#run=3", 8), ("#run=3&set=validation", 2), ("#shared=yes", 32), ("#text=another", 5)],
    )
    def test_rollouts_are_found_by_run(self, chromium, page, fragment, number):
        self.opened(chromium, page, fragment)
        assert chromium.run("return document.querySelector('output').value") == f"{number} of 32 rollouts"
        assert chromium.said() == []

    def test_the_same_prompt_of_two_runs_is_shown_side_by_side(self, chromium, page):
        self.opened(chromium, page, "#run=3&set=validation&from=3")
        chromium.run("document.querySelector('.list button').focus()")
        chromium.press("\ue007")  # enter
        heads = "return [...document.querySelectorAll('.two h3')].map(one => one.firstChild.textContent)"
        assert chromium.run(heads) == [
            "B fast: Validation of version 3, rollout 1",
            "A1 slow-1: Validation of version 3, rollout 1",
        ]
        assert "another at 3" in chromium.run("return document.querySelector('.two .rollout').innerText")
        assert chromium.said() == []

    def test_the_arrow_keys_read_a_chart(self, chromium, page):
        self.opened(chromium, page)
        chromium.run("document.querySelector('figure svg').focus()")
        chromium.press("\ue014")  # right
        tip = chromium.run("return document.querySelector('figure .tip').textContent").splitlines()
        assert tip[0] == "step 1"
        assert tip[1].startswith("A trainer.lr = 0.001 (3 runs)  0.133 (0.0505 to 0.216)")
        assert tip[2].startswith("B trainer.lr = 0.5  0.3")

    def test_nothing_is_wider_than_a_phone(self, page):
        with webdriver.browser() as phone:
            phone.narrow(420)
            self.opened(phone, page)
            assert phone.run("return document.documentElement.scrollWidth") == 420
            assert phone.said() == []

    def test_no_text_becomes_markup(self, chromium, tmp_path):
        page = comparison.write([hostile(tmp_path, seed) for seed in (1, 2)], tmp_path / "page.html")
        self.opened(chromium, page)
        assert "window.hurt=1" in chromium.run("return document.querySelector('.rollout').textContent")
        assert chromium.run("return window.hurt") is None
        assert chromium.run("return document.querySelectorAll('img').length") == 0
        assert chromium.said() == []
