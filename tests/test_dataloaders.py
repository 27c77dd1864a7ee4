"""A plugin's dataloader gives a task its prompts: any form, on a thread, resumed exactly."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import tomllib
from itertools import islice

import pytest
import torch
import torchdata.nodes
from drawing import NoEnvironment
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_core.app import making
from grpo_core.app.data import Source, TaskData, check_data
from grpo_core.config import Config, RowOptions, TaskConfig, TrainerConfig, build
from grpo_core.contracts.errors import CheckpointError, ConfigError, GrpoError, PluginError
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.data.rows import readable
from grpo_core.data.samplers import Mix, PromptStream
from grpo_core.data.states import packed, unpacked
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.plugins.files import import_file
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import make_offer
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts


def row(i):
    return {"id": f"r{i}", "prompt": f"{i}=", "answer": str(i), "level": i % 3}


class Counted:
    """Rows that are computed when they are read, which are counted."""

    def __init__(self, n, **more):
        self.n, self.read, self.more = n, 0, more

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read += 1
        return row(i) | self.more


class MapStyle(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return row(i)


class IterStyle(IterableDataset):
    def __iter__(self):
        return map(row, range(7))


class Own:
    """An iterable whose state is its own."""

    def __init__(self, end=None):
        self.at, self.end = 0, end

    def __iter__(self):
        while self.end is None or self.at < self.end:
            self.at += 1
            yield row(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


FORMS = {
    "a list": lambda: [row(i) for i in range(7)],
    "a torch Dataset": MapStyle,
    "an IterableDataset": IterStyle,
    "a StatefulDataLoader": lambda: StatefulDataLoader(IterStyle(), batch_size=None),
    "a shuffled StatefulDataLoader": lambda: StatefulDataLoader(
        MapStyle(), batch_size=None, sampler=list(reversed(range(7)))
    ),
    "a node": lambda: torchdata.nodes.IterableWrapper([row(i) for i in range(7)]),
    "a prefetched node": lambda: torchdata.nodes.Prefetcher(
        torchdata.nodes.IterableWrapper([row(i) for i in range(7)]), prefetch_factor=3
    ),
    "a Loader of a node": lambda: torchdata.nodes.Loader(torchdata.nodes.IterableWrapper([row(5), row(6)])),
    "an endless iterable": Own,
    "a finite iterable": lambda: Own(5),
    "prompts": lambda: [Prompt(messages=f"{i}=", id=str(i), answer=i) for i in range(4)],
}


class Opened:
    """A loader that is asked from outside of an event loop."""

    def __init__(self, runner, loader):
        self.runner, self.loader = runner, loader

    def take(self, n):
        self.runner.run(self.loader.first(n))
        return self.loader.take(n)

    def __getattr__(self, name):
        return getattr(self.loader, name)


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def opened(runner):
    """Makes loaders, which are closed at the end."""
    made = []

    def make(rows, *, task="t", name="mine:rows", deadline=20.0, convert=None, **options):
        source = Source(
            task,
            name,
            lambda split: rows() if callable(rows) else rows,
            RowOptions(**options),
            seed=3,
            deadline=deadline,
            convert=convert,
        )
        made.append(Opened(runner, runner.run(source.training())))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def texts(prompts):
    return [prompt.messages[0]["content"] for prompt in prompts]


def through_files(state):
    return unpacked(json.loads(json.dumps(packed(state))))


# ---------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_prompts_and_continues_where_it_was(opened, form):
    rows = FORMS[form]
    wanted = opened(rows).take(18)
    assert {prompt.environment for prompt in wanted} == {"t"}
    for cut in (1, 4, 5, 6, 7, 8, 14):
        before = opened(rows)
        taken = before.take(cut)
        after = opened(rows)
        after.load_state_dict(through_files(before.state_dict()))
        assert taken + after.take(18 - cut) == wanted, cut


def test_a_sized_one_is_shuffled_each_epoch_and_a_stream_comes_as_it_is(opened):
    epochs = [texts(opened(FORMS["a list"]).take(14))[begin : begin + 7] for begin in (0, 7)]
    assert [sorted(epoch) for epoch in epochs] == [[f"{i}=" for i in range(7)]] * 2
    assert epochs[0] != epochs[1]
    assert texts(opened(FORMS["a node"]).take(9)) == [f"{i % 7}=" for i in range(9)]


def test_a_billion_rows_are_read_when_they_are_needed(opened):
    rows = Counted(10**9)
    dataloader = opened(rows)
    assert len({prompt.id for prompt in dataloader.take(10)}) == 10
    assert dataloader.size == len(dataloader.loader) == 10**9
    dataloader.take(10)
    dataloader.state_dict()
    assert rows.read <= 30, "as many as were taken, and as many ahead"


def test_a_stream_without_ids_numbers_its_rows_through_all_epochs(opened):
    dataloader = opened(lambda: torchdata.nodes.IterableWrapper([{"prompt": "a"}, {"prompt": "b"}]))
    assert [prompt.id for prompt in dataloader.take(5)] == list("01234")


def test_prompts_of_the_look_ahead_that_do_not_fit_are_left_out(opened):
    loader = opened(Own)
    loader.runner.run(loader.first(3))
    loader.keep(lambda prompt: prompt.id != "r1")
    assert [prompt.id for prompt in loader.take(3)] == ["r0", "r2", "r3"]
    assert loader.left_out == 1


def test_an_environment_makes_the_prompts_of_rows(opened):
    async def convert(rows):
        return [Prompt(messages=f"level {row['level']}", id=row["id"], environment="t") for row in rows]

    for form in (Own, FORMS["a list"], MapStyle):
        loader = opened(form, convert=convert)
        assert {text[:6] for text in texts(loader.take(2))} == {"level "}


# ---------------------------------------------------------------------------------- waiting


def test_a_slow_dataloader_never_holds_up_the_event_loop(opened):
    go = threading.Event()

    class Slow(Own):
        def __iter__(self):
            go.wait()
            return super().__iter__()

    loader = opened(Slow)

    async def story():
        changed = asyncio.Event()
        assert not loader.ready(2, changed.set)
        go.set()
        while not loader.ready(2, changed.set):
            await changed.wait()
            changed.clear()
        return loader.loader.take(2)

    assert [prompt.id for prompt in loader.runner.run(story())] == ["r0", "r1"]


@pytest.mark.parametrize("hangs", ["made", "read"])
def test_a_dataloader_that_hangs_ends_the_run_with_a_message(opened, hangs):
    never = threading.Event()

    class Hangs(Own):
        def __iter__(self):
            yield from islice(super().__iter__(), 3)
            never.wait()

    def make():
        if hangs == "made":
            never.wait()
        return Hangs()

    with pytest.raises(PluginError, match=r"'mine:rows' gave no .* within 0.2 s .*start_deadline\)"):
        opened(make, deadline=0.2).take(4)
    never.set()


RAISED = r"it raised test_dataloaders\.py:\d+ in \w+: OSError: no such table"


def test_a_dataloader_that_raises_is_named_with_the_error(opened):
    def fails():
        raise OSError("no such table")

    with pytest.raises(PluginError, match=rf"task 't': dataloader 'mine:rows': {RAISED}"):
        opened(fails)

    class Fails(Own):
        def __iter__(self):
            yield row(0)
            raise OSError("no such table")

    loader = opened(Fails)
    assert [prompt.id for prompt in loader.take(1)] == ["r0"]
    for _ in range(2):
        with pytest.raises(PluginError, match=RAISED):
            loader.take(1)


def test_all_streams_are_ready_before_anything_is_drawn(opened, runner):
    loaders = {task: opened(Own, task=task).loader for task in "ab"}
    stream = PromptStream(sampler=Mix(), loaders=loaders, name="mix")
    request = SampleRequest(generation_version=0, target_version=0, current_version=0, expected_prompts=6)

    async def story():
        changed = asyncio.Event()
        while not stream.ready(6, changed.set):
            await changed.wait()
            changed.clear()
        return stream.draw(request)

    assert len(runner.run(story())) == 6


def test_a_buffer_knows_how_many_prompts_it_will_ask_for():
    buffer: Buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=3)
    assert buffer.wanted == 4
    slots = buffer.assign(buffer.reserve(), list("abcd"))
    assert buffer.wanted == 0
    buffer.fail(slots[0])
    assert buffer.wanted == 0, "the prompt that failed comes first"
    assert [slot.prompt for slot in buffer.reserve()] == ["a"]


# ---------------------------------------------------------------------------------- what is refused


class OfALibrary(IterableDataset):
    """Its loader knows how many rows the loader's workers have given."""

    def __iter__(self):
        return (row(i) for i in range(9))

    def state_dict(self, num_samples_yielded, num_workers):
        return {"read": num_samples_yielded}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda: (row(i) for i in range(9)),
            r"a generator, without state_dict and load_state_dict: .*exact = false",
        ),
        (
            lambda: DataLoader(MapStyle()),
            "without state_dict .*: torchdata.*StatefulDataLoader takes",
        ),
        (lambda: {"a": 1}, "of type dict; expected a sequence, a torch Dataset"),
        (lambda: None, "it is None for 'train'; expected rows"),
        (lambda: "rows.jsonl", "of type str; expected"),
        (list, "is empty; expected at least one row"),
        (lambda: Own(0), "it ended without a row"),
        (OfALibrary, r"state_dict\(\) of OfALibrary needs arguments, .*: return that loader"),
        (lambda: [3], r"row 1 is 3 of type int, expected a Prompt or a mapping"),
        (lambda: StatefulDataLoader([row(1)], collate_fn=list), "row 1 is .* of type list.*batch_size=None"),
        (lambda: [{"text": "a"}], "dataloader 'mine:rows', row 1: has no field 'prompt' or 'messages'"),
        (lambda: Counted(1, answer=object()), r"row 1\['answer'\] is <object.*no checkpoint can"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(opened, rows, message):
    with pytest.raises(GrpoError, match=message):
        opened(rows).take(1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
def test_workers_are_started_by_a_server_and_import_their_data_set(tmp_path):
    """A process with threads that forks may hang, and a worker cannot import a single file."""
    (tmp_path / "alone.py").write_text(
        "from torch.utils.data import IterableDataset\nclass Rows(IterableDataset):\n    __iter__ = None\n"
    )
    with pytest.raises(PluginError, match="num_workers = 1: its dataset Rows is defined in a single file"):
        readable(lambda: StatefulDataLoader(import_file(tmp_path / "alone.py").Rows(), num_workers=1), "it")
    loader = readable(lambda: StatefulDataLoader(MapStyle(), num_workers=1), "it")
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_a_stream_has_no_length_and_no_places(opened):
    stream, sized = opened(Own), opened(FORMS["a list"])
    (prompt,) = stream.take(1)
    for ask in (
        lambda: len(stream.loader),
        lambda: stream.place(prompt),
        lambda: stream.skip(prompt, "easy"),
    ):
        with pytest.raises(PluginError, match="is a stream, and the sampler selects prompts by index"):
            ask()
    (prompt,) = sized.take(1)
    assert texts([prompt]) == [f"{sized.place(prompt)}="]


@pytest.mark.parametrize(
    ("change", "sampler", "message"),
    [
        ({"epochs": 2.0}, Mix(), "trainer.epochs = 2 needs it: set trainer.steps"),
        ({}, LearnablePrompts(), "selects prompts by index: choose a sampler"),
    ],
)
def test_a_stream_is_refused_where_the_number_of_prompts_is_needed(opened, change, sampler, message):
    stream, sized = opened(Own), opened(FORMS["a list"])
    config = Config(tasks={}, trainer=TrainerConfig(**change))
    making.check_loaders(config.trainer.epochs, {"t": sized.loader}, sampler, "s")
    with pytest.raises(ConfigError, match=message):
        making.check_loaders(config.trainer.epochs, {"t": stream.loader}, sampler, "s")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"data_options": {"tabel": "a"}}, r"has no option 'tabel'. Did you mean 'table'\?"),
        ({"data": "{file}:rosw"}, r"has no 'rosw'. Did you mean 'rows'\?"),
        (
            {"data": "{file}:mine"},
            r"tasks.t: the dataloader .* has an option 'answer', which is a key",
        ),
        ({"data_options": {"exact": "no"}}, r"'tasks.t.data_options.exact': expected true or false"),
        ({"data": "none.jsonl"}, r"tasks.t.data = 'none.jsonl': there is no such file"),
        ({"validation_data": "openai/gsm8k"}, r"tasks.t.validation_data .* is written hub:openai/gsm8k"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_start(tmp_path, task, message):
    file = tmp_path / "mine.py"
    file.write_text("def rows(split, table='x'):\n    return []\ndef mine(split, answer=1): ...\n")
    given = {"env": "x", "data": "{file}:rows", **task}
    given["data"] = given["data"].format(file=file)
    config = build([{"tasks": {"t": given}}])
    with pytest.raises(GrpoError, match=message):
        check_data("tasks.t", "t", config.tasks["t"], PluginHost.discover())


OLD = """
[tasks.t]
env = "x"
[tasks.t.source]
path = "train.jsonl"
validation_path = "org/held_out"
prompt = "question"
where = "level > 1"
"""
NEW = """
[tasks.t]
env = "x"
data = "train.jsonl"
validation_data = "hub:org/held_out"

[tasks.t.data_options]
prompt = "question"
"""


def test_old_keys_are_one_error_that_prints_the_new_lines():
    with pytest.raises(ConfigError) as raised:
        build([tomllib.loads(OLD)])
    assert NEW in str(raised.value)
    assert str(raised.value).count("tasks.t.source") == 1
    assert "where" in str(raised.value).splitlines()[-1]
    build([tomllib.loads(NEW)])
    old = {"env": "x", "dataloader": "mine:rows", "dataloader_options": {"n": 3}}
    with pytest.raises(ConfigError, match=r'(?s)data = "mine:rows".*\[tasks.t.data_options\]\nn = 3'):
        build([{"tasks": {"t": old}}])


@pytest.mark.parametrize("form", ["a list", "a torch Dataset", "an endless iterable", "a node"])
@pytest.mark.parametrize("key", ["prompt", "answer", "id"])
def test_a_named_field_that_no_row_has_is_refused_for_every_kind(opened, form, key):
    lacks = "(no row has a value in|has no field) 'missing'"
    with pytest.raises(ConfigError, match=f"{lacks}, which data_options.{key} names; columns: id, "):
        opened(FORMS[form], **{key: "missing"}).take(1)


def test_held_out_rows_are_the_first_of_a_stream_and_none_if_there_are_none(runner):
    def held_out(made):
        return runner.run(Source("t", "mine", lambda split: made, RowOptions()).held_out(3))

    assert texts(held_out(Own())) == ["0=", "1=", "2="]
    assert held_out(None) is None


# ---------------------------------------------------------------------------------- checkpoints


def test_prompts_in_use_of_a_stream_come_back_from_a_checkpoint(opened, runner, tmp_path):
    async def trainer(directory):
        directory.mkdir()

        async def written():
            (directory / "trainer.json").write_text("{}")

        return written

    def parts():
        loaders = {"t": opened(Own).loader}
        buffer: Buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=3)
        return buffer, loaders, PromptStream(sampler=Mix(), loaders=loaders, name="mix")

    buffer, loaders, stream = parts()

    async def story():
        await loaders["t"].first(4)
        buffer.assign(buffer.reserve(), loaders["t"].take(4))
        cut = checkpoint.snapshot(buffer, stream)
        finish = await checkpoint.begin(
            tmp_path,
            step=1,
            pipeline=cut,
            loaders=checkpoint.loader_states(loaders, cut["buffer"]),
            save_trainer=trainer,
            keep=1,
        )
        return await finish()

    directory = runner.run(story())
    assert checkpoint.fault(directory) is None
    buffer, loaders, stream = parts()
    assert checkpoint.restore(directory, buffer, loaders, stream) == []
    assert [buffer.reserve()[0].prompt.id for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    assert [prompt.id for prompt in runner.run(loaders["t"].first(2))] == ["r4", "r5"]


def test_a_state_of_something_else_is_refused(opened):
    state = opened(Own).state_dict()
    with pytest.raises(CheckpointError, match=r"'other:rows' is new: .* prompts came from 'mine:rows'"):
        opened(Own, name="other:rows").load_state_dict(state)
    sized = opened(FORMS["a list"])
    with pytest.raises(
        CheckpointError, match=r"of another kind of dataloader or version \(KeyError: 'without'"
    ):
        opened(Own).load_state_dict(sized.state_dict())
    sized.take(1)
    for form in ("a list", "a torch Dataset"):
        sized = opened(FORMS[form])
        with pytest.raises(CheckpointError, match=r"prompts is 8, in the checkpoint 7"):
            opened([row(i) for i in range(8)] if form == "a list" else Counted(8)).load_state_dict(
                sized.state_dict() if form == "a list" else {**sized.state_dict()}
            )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
def test_a_worker_reads_rows_of_a_file(tmp_path):
    """It opens the file again."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    rows = make_offer("dataloader", f"file:{tmp_path}/rows.jsonl", "train")
    loader = readable(lambda: StatefulDataLoader(rows, batch_size=None, num_workers=1), "it")
    assert [dict(row) for row in loader] == [{"prompt": "1"}, {"prompt": "2"}]


def test_a_state_that_no_file_holds_is_an_error_at_once(opened):
    class Bad(Own):
        def state_dict(self):
            return {"cursor": object()}

    with pytest.raises(PluginError, match=r"state_dict\(\)\['cursor'\] is <object"):
        opened(Bad).take(1)


BAD = """
import concurrent.futures
class Rows:
    def __iter__(self):
        yield {"prompt": "1"}
        raise OSError("no route to host")
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

class Raises(Rows):
    def __init__(self, split):
        pass

class StateIsAnObject(Raises):
    def state_dict(self):
        return {"cursor": object()}

class EndsEarly(Raises):
    def __iter__(self):
        return iter(())

class Cancelled:
    def __init__(self, split):
        pass

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise concurrent.futures.CancelledError("a shard")

def RaisesAtOnce(split):
    raise KeyError("shards")
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Raises", "no route to host"),
        ("StateIsAnObject", "state_dict()['cursor'] is <object"),
        ("EndsEarly", "it ended without a row"),
        ("Cancelled", "CancelledError: a shard"),
        ("RaisesAtOnce", "KeyError: 'shards'"),
    ],
)
def test_a_dataloader_that_fails_at_the_start_is_wrong_input(runner, tmp_path, monkeypatch, kind, said):
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    task = TaskConfig(env="none", data=f"./bad.py:{kind}")
    data = TaskData.of("t", task, PluginHost.discover(), NoEnvironment())
    with pytest.raises(GrpoError) as raised:
        runner.run(data.prompts("train", 4))
    data.close()
    assert raised.value.exit_status == 2
    assert f"dataloader './bad.py:{kind}'" in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------------- objects of a program


def shuffled(**more):
    return StatefulDataLoader(
        MapStyle(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3), **more
    )


class Behind(Own):
    """Its state is one row behind."""

    def state_dict(self):
        return {"at": max(0, self.at - 1)}


class Once(Own):
    """Its rows come once."""

    def __iter__(self):
        while self.at < self.end:
            self.at += 1
            yield row(self.at - 1)


def first_of(runner, given, *, tries, needs=0):
    host = PluginHost.discover()
    host.add({"dataloader": {"rows": given if callable(given) else lambda split: given}})
    task = TaskConfig(env="none", data="program:rows")
    data = TaskData.of("t", task, host, NoEnvironment(), tries=tries, needs=needs)
    try:
        return [prompt.id for prompt in runner.run(data.prompts("train", 20))]
    finally:
        data.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
@pytest.mark.parametrize(
    "make",
    [
        Own,
        lambda: Own(50),
        lambda: Once(50),
        lambda: Once(20),
        shuffled,
        lambda: torchdata.nodes.Loader(torchdata.nodes.IterableWrapper(list(map(row, range(30))))),
    ],
    ids=["endless", "epochs", "once", "once and short", "shuffled", "nodes"],
)
def test_an_object_of_a_program_that_is_tried_gives_the_same_rows_as_one_that_is_not(runner, make):
    assert first_of(runner, make(), tries=True) == first_of(runner, make(), tries=False)


@pytest.mark.parametrize(
    "given", [Behind(), Behind(40), lambda split: Behind()], ids=["", "epochs", "function"]
)
def test_an_object_of_a_program_whose_state_is_wrong_is_refused_at_the_start(runner, given):
    with pytest.raises(ConfigError, match=r"does not give the rows that it gave: .*its state was restored"):
        first_of(runner, given, tries=True)


def test_a_function_of_a_program_that_gives_other_rows_each_time_is_refused_at_the_start(runner):
    class Drawn(Own):
        def __iter__(self):
            return map(row, order.sample(range(90), 90))

    order = random.Random(5)
    with pytest.raises(ConfigError, match="does not give the rows that it gave"):
        first_of(runner, lambda split: Drawn(), tries=True)


def test_rows_that_come_once_are_refused_at_the_start_if_they_are_too_few(runner):
    said = r"has 30 rows and cannot be read twice; the run needs 31 \(trainer.steps x"
    with pytest.raises(ConfigError, match=said):
        first_of(runner, Once(30), tries=True, needs=31)
    assert len(first_of(runner, Once(30), tries=True, needs=30)) == 20


def test_a_field_of_an_object_that_differs_each_time_is_left_out_of_the_proof(runner):
    class Stamped(Own):
        def __iter__(self):
            return ({**each, "read_at": time.perf_counter()} for each in super().__iter__())

    assert first_of(runner, Stamped(), tries=True) == first_of(runner, Stamped(), tries=False)


def test_a_function_of_a_program_makes_its_stream_off_the_event_loop(runner):
    threads = set()

    def make(split):
        threads.add(threading.current_thread())
        return Own()

    first_of(runner, make, tries=True)
    assert threading.current_thread() not in threads
