"""From Python: ``grpo_core.train``, ``grpo_core.validate`` and ``grpo_core.Run``."""

from __future__ import annotations

import _thread
import asyncio
import functools
import json
import random
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from documents import ROOT, blocks

import grpo_core
from grpo_core import ConfigError, Feedback, GrpoError, PluginError, Prompt, Tracker, cli
from grpo_core.api.reward import added
from grpo_core.config import EnvironmentConfig, merge
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Episode
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.host import PluginHost

SMALL = {
    "trainer": {"steps": 2, "prompts_per_step": 4},
    "rollout": {"group_size": 4, "max_tokens": 8},
    "model": {"path": "tiny", "options": {"warm_start_steps": 5}},
    "tracking": {"trackers": ["files"]},
    "checkpoint": {"every": 1},
}
"""Settings of runs that take seconds."""


def rows(split, n=40):
    drawn = random.Random(split)
    words = dict.fromkeys("".join(drawn.sample("abcdef", 3)) for _ in range(n))
    return [{"prompt": f"{word}>", "answer": "".join(sorted(word)), "level": "easy"} for word in words]


DATA = {"train": rows("train"), "validation": rows("validation", 5)}


def ordered(reply, answer):
    return float(reply.strip() == answer) + 0.5 * (len(reply.strip()) == 3)


class Sorting(grpo_core.Environment):
    """Remembers in this process what it was asked."""

    def __init__(self, bonus: float = 0.0):
        self.bonus, self.seen = bonus, []

    def prompts(self, split):
        return [Prompt(messages=row["prompt"], answer=row["answer"]) for row in rows(split)]

    def evaluate(self, episodes):
        self.seen += [episode.reply for episode in episodes]
        return [ordered(episode.reply, episode.prompt.answer) + self.bonus for episode in episodes]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a reward function, and the events that a listener got."""
    heard = []
    path = tmp_path_factory.mktemp("api") / "run"
    run = grpo_core.train(env=ordered, data=DATA, listeners=[heard.append], output=path, **SMALL)
    return run, heard


# ---------------------------------------------------------------------------------- training


@pytest.mark.long
def test_a_function_is_trained_on_and_the_run_shows_what_happened(made):
    run, heard = made
    assert [event.step for event in heard if isinstance(event, grpo_core.events.StepEnded)] == [1, 2]
    assert run.steps() == [1, 2]
    assert [row["step"] for row in run.metrics() if "reward/ordered" in row] == [1, 2]
    (group, *_), last = run.rollouts(1), run.validations()[-1]
    assert {rollout.reward for rollout in group.rollouts} <= {0.0, 0.5, 1.0, 1.5}
    assert group.prompt.answer in {row["answer"] for row in DATA["train"]}
    assert (last["step"], last["task"]) == (2, "ordered")
    assert run.config["tasks"]["ordered"]["env"] == "program:ordered"
    assert run.verify() == []
    assert [event["step"] for event in run.events("StepEnded")] == [1, 2]
    assert {"loop", "trainer"} <= {span["lane"] for span in run.timeline()}
    assert len([*run.rows(run.texts()[2])]) == len([r for group in run.rollouts(2) for r in group.rollouts])
    assert (run.state, run.damaged) == ("finished", {})
    assert "ordered" in run._repr_html_()


@pytest.mark.slow
def test_rewards_are_added_with_their_weights_and_common_keys_stand_alone(tmp_path):
    def short(reply):
        return float(len(reply) < 5)

    table = {name: SMALL[name] for name in ("model", "tracking")}
    run = grpo_core.train(
        reward=[ordered, (short, 0.1)], data=DATA, steps=1, prompts_per_step=2, group_size=4, max_tokens=8,
        output=tmp_path / "run", **table,
    )  # fmt: skip
    assert run.steps() == [1]
    assert run.config["rollout"]["max_tokens"] == 8
    rollouts = [rollout for group in run.rollouts(1) for rollout in group.rollouts]
    assert len(rollouts) == 8
    for each in rollouts:
        assert each.reward == pytest.approx(each.metrics["ordered"] + 0.1 * each.metrics["short"])


def test_reward_functions_of_one_name_are_added_and_have_separate_metrics():
    judge = added([lambda reply: 1.0, (lambda reply: 10.0, 0.5)])
    prompt = grpo_core.Prompt(messages="hi")
    feedback = asyncio.run(judge(grpo_core.Episode(prompt=prompt, messages=prompt.messages)))
    assert feedback.reward == 6.0
    assert sorted(feedback.metrics.values()) == [1.0, 10.0]


def lines(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def killed(tmp_path):
    """The directory of a run that was killed while it wrote, and in which a line was damaged."""
    (tmp_path / "config-10.toml").write_text("seed = 3")
    (tmp_path / "config-9.toml").write_text("seed = 2")
    (tmp_path / "config.toml").write_text("seed = 4")
    lines(tmp_path / "metrics.jsonl", {"step": 1, "time": 5.0, "loss": 0.5}, "{damaged}\n", '{"step": 2, "ti')
    opened = {"time": 1.0, "event": "Opened", "step": -1}
    lines(tmp_path / "events.jsonl", opened, *({"event": e, "step": 1} for e in ("RunStarted", "StepEnded")))
    return tmp_path


def test_a_reading_that_is_not_strict_leaves_out_what_is_damaged_and_says_so(killed):
    run = grpo_core.Run(killed, strict=False)
    assert [row["loss"] for row in run.metrics()] == [0.5]
    assert run.damaged == {"metrics.jsonl": {2, 3}}
    assert [event["event"] for event in run.events("StepEnded", "RunStarted")] == ["RunStarted", "StepEnded"]
    (killed / "config.toml").write_text("seed = ")
    assert (run.config, run.damaged["config.toml"]) == ({}, {0})
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2"):
        grpo_core.Run(killed).metrics()


def test_a_strict_reading_takes_half_a_line_at_the_end_for_what_a_killed_process_was_writing(killed):
    run = grpo_core.Run(killed)
    lines(killed / "timeline.jsonl", {"lane": "loop"}, '{"la')
    assert [*run.timeline()] == [{"lane": "loop"}]
    lines(killed / "timeline.jsonl", "[]\n", {"lane": "loop"})
    with pytest.raises(ConfigError, match=r"timeline\.jsonl, line 1: cannot be read"):
        [*run.timeline()]


def test_a_run_knows_its_configurations_and_how_it_ended(killed):
    run = grpo_core.Run(killed)
    assert [table["seed"] for table in run.configs] == [2, 3, 4]
    assert (run.state, run.started.timestamp()) == ("killed", 1.0)
    warned = {"event": "WarningRaised", "step": 2}
    lines(killed / "events.jsonl", {"time": 1.0, "event": "RunEnded", "reason": "failed"}, warned)
    assert run.state == "failed", "a tracker may warn after the end"
    lines(killed / "events.jsonl", {"event": "RunEnded", "reason": "finished"}, {"event": "RunStarted"})
    assert run.state == "killed", "it was continued"


@pytest.mark.long
def test_the_model_of_a_checkpoint_is_loaded_with_its_tokenizer(made):
    run, _ = made
    assert list(run.checkpoints) == [1, 2]
    first, last = run.model(step=1), run.model()
    token_ids = run.tokenizer()("cab>", return_tensors="pt").input_ids
    assert not np.array_equal(first(token_ids).logits.detach(), last(token_ids).logits.detach())


@pytest.mark.nightly
def test_a_run_is_continued_with_the_same_objects_and_cannot_be_without(made, tmp_path, capsys, monkeypatch):
    run, _ = made
    more = {"trainer": {"steps": 3}}
    with pytest.raises(GrpoError, match="'program:ordered' here: a Python program gave it"):
        grpo_core.train(resume=run, **more)
    command = ["grpo-core", "train", "--resume", str(run.path), "--set", "trainer.steps=3"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "a Python program gave it" in capsys.readouterr().err
    again = grpo_core.train(resume=run, env=ordered, data=DATA, **more)
    assert again.steps() == [1, 2, 3]
    capsys.readouterr()
    assert grpo_core.train(resume=run, env=ordered, data=DATA).path == run.path
    said = f"{run.path}: finished all of its 3 steps; for more, add trainer.steps=6\n"
    assert capsys.readouterr().out == said, "options of the command line are arguments here"
    measured = grpo_core.validate(run, env=ordered, data=DATA, validation={"prompts": 3})
    assert measured["ordered"]["prompts"] == 3


@pytest.mark.slow
def test_objects_of_all_kinds_are_used_in_a_running_event_loop(tmp_path):
    """The environment is an instance, whose state this process sees."""
    environment, used = Sorting(bonus=0.25), set()

    def first_come(loaders, request):
        used.add("sampler")
        return next(iter(loaders.values())).take(request.expected_prompts)

    async def share(context):
        used.add("validation")
        (task,) = context.prompts
        rollouts = await context.rollout(context.prompts[task][:2])
        return {task: {"share": sum(rollout.reward > 1 for rollout in rollouts) / 2}}

    def centred(groups):
        used.add("advantage")
        return [[r.reward - np.mean([r.reward for r in g.rollouts]) for r in g.rollouts] for g in groups]

    class Steps(Tracker):
        def metrics(self, step, values):
            used.add(("metrics", step))

    async def inside():
        return grpo_core.train(
            env={"abc": environment},
            sampler=first_come,
            validation=share,
            advantage=centred,
            listeners=[Steps()],
            output=tmp_path / "run",
            **SMALL,
        )

    run = asyncio.run(inside())
    assert used >= {"sampler", "validation", "advantage", ("metrics", 2)}
    assert len(environment.seen) >= 2 * 4 * 4
    assert set(run.validations()[-1]) == {"step", "task", "share", "errors"}


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_a_checkpoint_and_is_raised(tmp_path):
    def interrupt(event):
        if isinstance(event, grpo_core.events.StepEnded) and event.step == 1:
            _thread.interrupt_main()

    async def inside():
        settings = {**SMALL, "trainer": {"steps": 500, "prompts_per_step": 4}}
        grpo_core.train(env=Sorting, listeners=[interrupt], output=tmp_path / "run", **settings)

    with pytest.raises(KeyboardInterrupt, match=r"train\(resume=.*\) continues it"):
        asyncio.run(inside())
    run = grpo_core.Run(tmp_path / "run")
    assert 0 < max(run.checkpoints) < 500


@pytest.mark.slow
def test_a_notebook_trains_and_shows_the_run(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    cells = [
        f"import grpo_core\nSMALL = {SMALL!r}\nrows = {DATA!r}",
        "def ordered(reply, answer):\n    return float(reply.strip() == answer)",
        "SMALL['tracking']['trackers'].append('terminal')\n"
        "run = grpo_core.train(env=ordered, data=rows, output='run', **SMALL)\nrun",
        "print(run.steps(), len(run.validations()))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=120).execute()
    *_, shown, printed = notebook.cells
    assert "<table>" in shown.outputs[-1]["data"]["text/html"]
    drawn = [each for each in shown.outputs if each["output_type"] == "display_data"]
    (text,) = [each["data"]["text/plain"] for each in drawn]
    assert "step 2/2" in text, "one output, as the last update has left it"
    assert printed.outputs[0]["text"] == "[1, 2] 2\n"


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [slice(1, -1), pytest.param(slice(0), marks=pytest.mark.nightly)])
def test_the_blocks_of_the_document_run_in_their_order(tmp_path, monkeypatch, left_out):
    """Their runs are as small as those of the other tests; the first block is the example.

    CI leaves out blocks that train with arguments which tests above give, too.
    """
    first, *others = [block.text for block in blocks(ROOT / "docs" / "python.md", "python")]
    del others[left_out]
    example = (ROOT / "examples" / "train.py").read_text()
    assert example.endswith(first)
    real = grpo_core.train

    def small(**given):
        settings = {key: merge({"trainer": given.get("trainer", {})}, SMALL).get(key) for key in SMALL}
        return real(**{**given, **settings})

    monkeypatch.setattr(grpo_core, "train", small)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in (first, *others):
        exec(block, names)


# ---------------------------------------------------------------------------------- wrong input


def test_what_cannot_be_trained_on_is_refused_at_once(tmp_path):
    def unnamed(*replies):
        return 0.0

    def of_trl(completions, **kwargs):
        return [0.0 for _ in completions]

    train = functools.partial(grpo_core.train, output=tmp_path / "run")
    for told, arguments in {
        "env is int; expected the name of an environment": {"env": 3},
        "ordered is a reward function, which has no prompts: give data": {"env": ordered},
        "unnamed takes \\*replies, which has no name": {"env": unnamed, "data": DATA},
        "data\\[1\\] is int; expected a text, a dict": {"env": ordered, "data": ["a", 1]},
        "data has 'tset'; expected the keys 'train' and 'validation'": {"env": ordered, "data": {"tset": []}},
        "use env or reward, not both": {"env": Sorting, "reward": ordered},
        "reward contains 3; expected functions, or pairs": {"reward": [ordered, 3], "data": DATA},
        "two tasks would be called 'sorting'": {"env": [Sorting, Sorting()]},
        "data is for one environment.*train\\(reward=\\[ordered, sorting\\], data=rows": {
            "env": [ordered, Sorting],
            "data": DATA,
        },
        "listeners\\[0\\] is int; expected a function": {"env": Sorting, "listeners": [1]},
        "listeners\\[0\\] is a class; expected a function": {"env": Sorting, "listeners": [Tracker]},
        "one object is given for two tasks": {"env": dict.fromkeys("ab", Sorting())},
        "'program:sorting' is one object; give its class": {
            "env": Sorting(),
            "environment": {"workers": 2},
        },
        "loss: task is computed in the trainer's process": {"env": Sorting, "loss": lambda inputs: 0},
        "sampler: object has no method 'sample'": {"env": Sorting, "sampler": object()},
        "config is int; expected the path": {"config": 3},
        "resume continues a run as it was configured": {"config": {}, "resume": tmp_path},
        "'trainer.step'": {"env": Sorting, "trainer": {"step": 3}},
        "which the interpreter .* does not have": {"env": Sorting, "environment": {"python": sys.executable}},
    }.items():
        with pytest.raises(ConfigError, match=told):
            train(**arguments)
    with pytest.raises(
        PluginError, match="takes 'completions', as reward functions of TRL do; write env='trl:"
    ):
        train(reward=of_trl, data=DATA)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="is not a run"):
        grpo_core.Run(tmp_path)


def test_errors_name_arguments_and_no_options_of_the_command_line(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError) as wrong:
        grpo_core.train(env="math:sort", output=tmp_path / "full")
    assert str(wrong.value) == (
        f"output={tmp_path}/full is not empty; give another directory, or continue that run with "
        f"resume={tmp_path}/full"
    )
    with pytest.raises(ConfigError, match=r"give an environment with env=NAME, or \[tasks.NAME\]"):
        grpo_core.train(output=tmp_path / "new")


def test_without_held_out_prompts_nothing_is_validated_unless_that_is_asked_for():
    from grpo_core.api.arguments import arguments

    plain = arguments(ordered, iter(["a"]), {})
    assert plain.defaults({}) == {"validation": {"every": 0}}
    assert plain.defaults({"validation": {"sets": {"a": {"env": "math:sort"}}}}) == {}
    assert plain.defaults({"tasks": {"sort": {"env": "math:sort"}}}) == {}
    both = arguments(ordered, {"train": iter(["a"]), "validation": iter(["b"])}, {})
    assert both.defaults({}) == {}


@pytest.mark.slow
def test_the_handlers_of_the_program_come_back_and_ctrl_c_ends_a_validation(made, tmp_path):
    run, _ = made
    before = signal.signal(signal.SIGTERM, lambda *signals: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        grpo_core.train(resume=run, env=ordered, data=DATA, trainer={"steps": 1})
        grpo_core.train(resume=run, env=ordered, data=DATA, trainer={"steps": 4})
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)

    async def interrupt(reply):
        _thread.interrupt_main()
        await asyncio.Event().wait()

    async def inside():
        grpo_core.validate(run, env=interrupt, data=["a>"] * 5)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(inside())


def test_a_loss_is_named_by_its_file():
    from grpo_core.api.arguments import arguments
    from grpo_core.losses import grpo

    named = arguments(None, None, {"loss": grpo}).table["loss"]["name"]
    assert named.endswith(".py:grpo")


@pytest.mark.long
def test_a_script_that_trains_when_it_is_imported_says_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import grpo_core

            def mine(inputs):
                return inputs

            SMALL = {SMALL!r}
            grpo_core.train(env="math:sort", loss=mine, output="run", **SMALL)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert 'put the call under if __name__ == "__main__":' in done.stderr


# ---------------------------------------------------------------------------------- the thread


def episodes(*replies):
    prompt = Prompt(messages="cab>", answer="abc", id="0", environment="t", info={"level": "easy", "more": 1})
    return [
        Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])
        for reply in replies
    ]


def played(environment, story, **config):
    """Play a story with the environment on a thread; return its result and what was reported."""
    incidents = []

    async def main():
        host = PluginHost.discover(allow=[])
        host.add({"environment": {"t": lambda: environment}})
        spec = EnvironmentSpec(task="t", env="program:t", config=EnvironmentConfig(**config))
        client = EnvironmentProcess(spec, host=host)
        try:
            return await story(client)
        finally:
            await client.aclose()

    with reported_to(incidents.append):
        return asyncio.run(main()), [incident.kind for incident in incidents]


def test_an_async_function_judges_several_replies_at_once_and_gets_what_it_names():
    from grpo_core.api.reward import environment_of

    together, running = asyncio.Event(), []

    async def judge(reply, level, answer="", missing="default", **others):
        running.append((reply, level, answer, missing, sorted(others)))
        if len(running) == 2:
            together.set()
        await together.wait()
        return Feedback(reward=len(reply)) if reply else None

    async def story(client):
        return await client.evaluate(episodes("abc", ""))

    (first, second), _ = played(environment_of(judge, "judge"), story)
    assert (first.reward, second.reward) == (3.0, None)
    assert running[0] == ("abc", "easy", "abc", "default", ["more"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"listeners": print}, "listeners is 'print'; expected a list of functions or trackers"),
        ({"data": 5}, "data['train'] is int; expected rows, a dataloader or a function"),
        ({"no_plugins": "math"}, "no_plugins is 'math'; expected a list of names"),
        ({"engine": object()}, "engine is object; expected a name, or a table of settings as a dict"),
        ({"rollout": object()}, "rollout is object; expected a table of settings as a dict"),
        ({"config": object()}, "config is object; expected the path of a TOML file, or a dict"),
    ],
)
def test_an_argument_of_another_kind_is_one_clear_message(arguments, told):
    with pytest.raises(ConfigError) as wrong:
        grpo_core.train(**{"env": lambda reply: 1.0, "data": ["1+1="], **arguments})
    assert told in str(wrong.value)


def test_names_to_measure_are_a_list():
    with pytest.raises(ConfigError, match="only is 'sort'; expected a list of names"):
        grpo_core.validate("tiny", env="math:sort", only="sort")


def test_a_field_that_a_row_lacks_is_an_error_before_the_run():
    def judge(reply, colour):
        return 1.0

    rows = [{"prompt": "sky", "colour": "blue"}, {"prompt": "grass"}]
    with pytest.raises(PluginError, match="judge takes 'colour', and row 2 has no such field"):
        grpo_core.train(env=judge, data=rows)
    with pytest.raises(PluginError, match="judge takes 'colour', and row 2 has no such field"):
        grpo_core.train(reward=[ordered, judge], data=rows)


def test_a_function_that_asks_for_a_field_that_is_not_there_ends_the_run():
    from grpo_core.api.reward import environment_of

    def judge(reply, colour):
        return 1.0

    async def story(client):
        await client.evaluate(episodes("abc"))

    with pytest.raises(PluginError, match="judge takes 'colour', and prompt '0' has no such field"):
        played(environment_of(judge, "judge"), story)


@pytest.mark.long
def test_code_that_hangs_is_left_behind_and_the_next_call_is_answered():
    free = threading.Event()

    class Hangs(Sorting):
        def evaluate(self, episodes):
            if episodes[0].reply == "hang":
                free.wait()
            return [1.0] * len(episodes)

    async def story(client):
        (lost,) = await client.evaluate(episodes("hang"))
        (kept,) = await client.evaluate(episodes("abc"))
        return lost, kept

    (lost, kept), told = played(Hangs(), story, deadline=0.3)
    free.set()
    assert "no answer to 'evaluate' within 0.3 s" in lost.error
    assert kept.reward == 1.0
    assert told[0] == "deadline"


def test_code_that_leaves_the_interpreter_ends_its_thread_only():
    class Leaves(Sorting):
        def evaluate(self, episodes):
            if episodes[0].reply == "leave":
                sys.exit("enough")
            return [1.0] * len(episodes)

    async def story(client):
        (lost,) = await client.evaluate(episodes("leave"))
        (kept,) = await client.evaluate(episodes("abc"))
        return lost, kept

    (lost, kept), _ = played(Leaves(), story)
    assert lost.error
    assert kept.reward == 1.0


# ---------------------------------------------------------------------------------- playing without training


@pytest.mark.slow
def test_a_session_plays_as_a_validation_does_and_the_same_seed_gives_the_same(tmp_path):
    trained = grpo_core.train(env={"sorting": Sorting(bonus=0.5)}, output=tmp_path / "run", **SMALL)
    said = []

    async def story():
        async with grpo_core.session(
            env={"sorting": Sorting(bonus=0.5)}, model=trained, status=said.append
        ) as session:
            held_out = await session.prompts(split="validation")
            once = await session.play(held_out[:2], group_size=3, seed=1)
            again = await session.play(held_out[:2], group_size=3, seed=1)
            greedy = await session.play(held_out[:1], group_size=2, temperature=0.0)
            with pytest.raises(ConfigError, match="there is no task 'sort'; there are sorting"):
                await session.prompts("sort")
            return once, again, greedy

    once, again, ((one, other),) = asyncio.run(story())
    assert [len(group) for group in once] == [3, 3]
    assert [[rollout.messages for rollout in group] for group in once] == [
        [rollout.messages for rollout in group] for group in again
    ]
    assert one.messages == other.messages, "without temperature nothing is drawn"
    assert all(rollout.reward is not None for group in once for rollout in group)
    assert {segment.tokens.sampled_versions.tolist()[0] for segment in once[0][0].segments} == {2}
    assert "loading the model" in said


@pytest.mark.slow
def test_a_session_without_a_model_plays_the_one_that_training_would_start_from():
    said = []

    async def story():
        async with grpo_core.session(SMALL, env={"sorting": Sorting()}, status=said.append) as session:
            with pytest.raises(
                grpo_core.ConfigError, match=r"is of task ''.*has sorting; play the prompts that"
            ):
                await session.play([grpo_core.Prompt(messages="not from session.prompts()")])
            return await session.play((await session.prompts())[:2], group_size=2)

    rollouts = [rollout for group in asyncio.run(story()) for rollout in group]
    assert [rollout.reward is not None for rollout in rollouts] == [True] * 4
    assert {
        segment.tokens.sampled_versions.tolist()[0] for each in rollouts for segment in each.segments
    } == {0}
    assert "making a tiny model and warming it up" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "maths:sort"}, "maths"),
        ({"env": "math:sort", "model": "nowhere/at/all"}, "nowhere"),
        ({}, "tasks"),
    ],
)
def test_a_session_of_nothing_is_refused_before_anything_starts(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def story():
        async with grpo_core.session(**settings):
            pass

    with pytest.raises(GrpoError, match=message):
        asyncio.run(story())
