"""A plugin's dataloader gives a task its prompts: any form, on a thread, resumed exactly."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import islice

import pytest
import torchdata.nodes
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_core.app.parts import check_dataloaders
from grpo_core.app.preflight import check_dataloader as refuse
from grpo_core.config import Config, SourceConfig, TaskConfig, TrainerConfig, build
from grpo_core.contracts.errors import CheckpointError, ConfigError, GrpoError, PluginError
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.data.dataloaders import Dataloader
from grpo_core.data.loaders import TaskLoader
from grpo_core.data.rows import readable
from grpo_core.data.samplers import Mix, PromptStream
from grpo_core.data.states import from_safetensors, packed, to_safetensors, unpacked
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import import_file
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts


def row(i):
    return {"id": f"r{i}", "prompt": f"{i}=", "answer": str(i), "level": i % 3}


class Counted:
    """Rows that are computed when they are read, which are counted."""

    def __init__(self, n):
        self.n, self.read = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read += 1
        return row(i)


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


@pytest.fixture
def opened():
    """Makes dataloaders, which are closed at the end."""
    made = []

    def make(rows, *, task="t", name="mine:rows", deadline=20.0, workers=0, adopt=None, **source):
        dataloader = Dataloader(
            task,
            name,
            lambda split: rows() if callable(rows) else rows,
            SourceConfig(**source, workers=workers),
            seed=3,
            deadline=deadline,
            adopt=adopt,
        )
        made.append(dataloader)
        return dataloader

    yield make
    for dataloader in made:
        dataloader.close()


def texts(prompts):
    return [prompt.messages[0]["content"] for prompt in prompts]


def through_files(state):
    plain, arrays = packed(state)
    return unpacked(json.loads(json.dumps(plain)), from_safetensors(to_safetensors(arrays)))


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
    assert dataloader.size == len(dataloader) == 10**9
    dataloader.take(10)
    dataloader.state_dict()
    assert rows.read <= 30, "as many as were taken, and as many ahead"


def test_a_stream_without_ids_numbers_its_rows_through_all_epochs(opened):
    dataloader = opened(lambda: torchdata.nodes.IterableWrapper([{"prompt": "a"}, {"prompt": "b"}]))
    assert [prompt.id for prompt in dataloader.take(5)] == list("01234")


def test_rows_that_where_leaves_out_or_that_do_not_fit_are_passed_over(opened):
    dataloader = opened(Own, where="level != 1")
    dataloader.keep(lambda prompt: prompt.id != "r3")
    assert [prompt.id for prompt in dataloader.take(4)] == ["r0", "r2", "r5", "r6"]


def test_prompts_of_the_look_ahead_that_do_not_fit_are_passed_over(opened):
    dataloader = opened(Own)

    async def story():
        await dataloader.first(3)
        dataloader.keep(lambda prompt: prompt.id != "r1")

    asyncio.run(story())
    assert [prompt.id for prompt in dataloader.take(3)] == ["r0", "r2", "r3"]


def test_an_environment_makes_prompts_of_those_of_the_rows(opened):
    async def story():
        dataloader = opened(Own, adopt=adopt)
        return await dataloader.first(2)

    async def adopt(prompts):
        return [Prompt(messages="new", id=prompt.id, environment="t") for prompt in prompts]

    assert [(prompt.id, texts([prompt])) for prompt in asyncio.run(story())] == [
        ("r0", ["new"]),
        ("r1", ["new"]),
    ]


# ---------------------------------------------------------------------------------- waiting


def test_a_slow_dataloader_never_holds_up_the_event_loop(opened):
    go = threading.Event()

    class Slow(Own):
        def __iter__(self):
            go.wait()
            return super().__iter__()

    async def story():
        dataloader = opened(Slow)
        changed = asyncio.Event()
        assert not dataloader.ready(2, changed.set)
        go.set()
        while not dataloader.ready(2, changed.set):
            await changed.wait()
            changed.clear()
        return dataloader.take(2)

    assert [prompt.id for prompt in asyncio.run(story())] == ["r0", "r1"]


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

    dataloader = opened(make, deadline=0.2)
    told = "it is not made yet" if hangs == "made" else "it has read 3 rows"
    with pytest.raises(
        PluginError, match=rf"'mine:rows' gave no prompt within 0.2 s .*start_deadline\); {told}"
    ):
        asyncio.run(dataloader.first(4))
    never.set()


def test_a_dataloader_that_raises_is_named_with_the_error(opened):
    def fails():
        raise OSError("no such table")

    dataloader = opened(fails)
    message = (
        r"task 't': dataloader 'mine:rows': it raised test_dataloaders.py:\d+ in fails: OSError: no such"
    )
    with pytest.raises(PluginError, match=message):
        asyncio.run(dataloader.first(1))
    with pytest.raises(PluginError, match="no such table"):
        dataloader.take(1)


def test_all_streams_are_ready_before_anything_is_drawn(opened):
    loaders = {task: opened(Own, task=task) for task in "ab"}
    stream = PromptStream(sampler=Mix(), loaders=loaders, name="mix")
    request = SampleRequest(generation_version=0, target_version=0, current_version=0, expected_prompts=6)

    async def story():
        changed = asyncio.Event()
        while not stream.ready(6, changed.set):
            await changed.wait()
            changed.clear()
        return stream.draw(request)

    assert len(asyncio.run(story())) == 6


def test_a_buffer_knows_how_many_prompts_it_will_ask_for():
    buffer: Buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=3)
    assert buffer.wanted == 4
    slots = buffer.assign(buffer.reserve(), list("abcd"))
    assert buffer.wanted == 0
    buffer.fail(slots[0])
    assert buffer.wanted == 0, "the prompt that failed comes first"
    assert [slot.prompt for slot in buffer.reserve()] == ["a"]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda: (row(i) for i in range(9)),
            r"a generator, without state_dict and load_state_dict: .*Iter",
        ),
        (
            lambda: DataLoader(MapStyle()),
            "without state_dict .*: torchdata.*StatefulDataLoader takes",
        ),
        (lambda: {"a": 1}, "of type dict; expected a sequence, a torch Dataset"),
        (lambda: None, "it is None, of type NoneType; expected"),
        (lambda: "rows.jsonl", "of type str; expected"),
        (list, "it has no rows"),
        (lambda: Own(0), "it ended without a row"),
        (lambda: [3], r"row 1 is 3 of type int, expected a Prompt or a mapping"),
        (lambda: StatefulDataLoader([row(1)], collate_fn=list), "row 1 is .* of type list.*batch_size=None"),
        (lambda: [{"text": "a"}], "dataloader 'mine:rows', row 1: has no field 'prompt' or 'messages'"),
        (lambda: [Prompt(messages="a", answer=object())], r"row 1\['answer'\] is <object.*no checkpoint can"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(opened, rows, message):
    with pytest.raises(GrpoError, match=message):
        opened(rows).take(1)


def test_workers_read_rows_by_index_alone(opened):
    with pytest.raises(ConfigError, match=r"tasks.t.source.workers = 2 reads rows by index, and this is"):
        opened(Own, workers=2).take(1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
def test_workers_are_started_by_a_server_and_import_their_data_set(tmp_path):
    """A process with threads that forks may hang, and a worker cannot import a single file."""
    (tmp_path / "alone.py").write_text(
        "from torch.utils.data import IterableDataset\nclass Rows(IterableDataset):\n    __iter__ = None\n"
    )
    with pytest.raises(PluginError, match="num_workers = 1: its dataset Rows is defined in a single file"):
        readable(StatefulDataLoader(import_file(tmp_path / "alone.py").Rows(), num_workers=1), "it")
    loader = readable(StatefulDataLoader(MapStyle(), num_workers=1), "it")
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_a_stream_has_no_length_and_no_places(opened):
    stream, sized = opened(Own), opened(FORMS["a list"])
    stream.take(1)
    with pytest.raises(PluginError, match="does not know its number of rows"):
        len(stream)
    with pytest.raises(PluginError, match="is a stream, and the sampler selects prompts by index"):
        stream.offer(1)
    places = sized.offer(3)
    sized.pass_over(places[1], "too easy")
    assert texts(sized.prompts_at([places[0], places[2]])) == [f"{places[0]}=", f"{places[2]}="]


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
    for dataloader in (stream, sized):
        dataloader.take(1)
    check_dataloaders(config, {"t": sized}, sampler)
    with pytest.raises(ConfigError, match=message):
        check_dataloaders(config, {"t": stream}, sampler)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"source": {"path": "a.jsonl"}},
            r"tasks.t.source.path = 'a.jsonl': the prompts come from tasks",
        ),
        ({"source": {"validation_split": "test"}}, r"tasks.t.source.validation_split = 'test'"),
        ({"source": {"deduplicate": True}}, r"tasks.t.source.deduplicate = True"),
        ({"dataloader_options": {"tabel": "a"}}, r"has no option 'tabel'. Did you mean 'table'\?"),
        ({"dataloader": "{file}:rosw"}, r"has no 'rosw'. Did you mean 'rows'\?"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_start(tmp_path, task, message):
    file = tmp_path / "mine.py"
    file.write_text("def rows(split, table='x'):\n    return []\n")
    given = {"env": "x", "dataloader": "{file}:rows", "dataloader_options": {"table": "a"}, **task}
    given["dataloader"] = given["dataloader"].format(file=file)
    config = build([{"tasks": {"t": given}}])
    with pytest.raises(GrpoError, match=message):
        refuse("t", config.tasks["t"], PluginHost.discover())


# ---------------------------------------------------------------------------------- checkpoints


def test_prompts_in_use_of_a_stream_come_back_from_a_checkpoint(opened, tmp_path):
    async def trainer(directory):
        directory.mkdir()

        async def written():
            (directory / "trainer.json").write_text("{}")

        return written

    def parts():
        loaders = {"t": opened(Own)}
        buffer: Buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=3)
        return buffer, loaders, PromptStream(sampler=Mix(), loaders=loaders, name="mix")

    async def story():
        buffer, loaders, stream = parts()
        buffer.assign(buffer.reserve(), loaders["t"].take(4))
        cut = checkpoint.cut(buffer, stream)
        finish = await checkpoint.begin(
            tmp_path,
            step=1,
            pipeline=cut,
            loaders=checkpoint.loader_states(loaders, cut["buffer"]),
            save_trainer=trainer,
            keep=1,
        )
        return await finish()

    directory = asyncio.run(story())
    assert checkpoint.fault(directory) is None
    buffer, loaders, stream = parts()
    assert checkpoint.restore(directory, buffer, loaders, stream) == []
    assert [buffer.reserve()[0].prompt.id for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    assert [prompt.id for prompt in loaders["t"].take(2)] == ["r4", "r5"]


def test_a_state_of_something_else_is_refused(opened):
    state = opened(FORMS["a list"]).state_dict()
    with pytest.raises(CheckpointError, match=r"'other:rows' is new: .* prompts came from 'mine:rows'"):
        opened(FORMS["a list"], name="other:rows").load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"came from 'its environment or source'"):
        opened(Own).load_state_dict(TaskLoader("t", [Prompt(messages="a", id="0")], seed=0).state_dict())
    longer = opened(FORMS["a list"])
    longer.take(1)
    with pytest.raises(CheckpointError, match=r"prompts is 8, in the checkpoint 7"):
        opened(lambda: [row(i) for i in range(8)]).load_state_dict(longer.state_dict())


def test_a_state_that_no_file_holds_is_an_error_at_once(opened):
    class Bad(Own):
        def state_dict(self):
            return {"cursor": object()}

    with pytest.raises(PluginError, match=r"state_dict\(\)\['cursor'\] is <object"):
        opened(Bad).take(1)


def test_a_task_says_what_its_dataloader_is():
    task = build([{"tasks": {"t": {"env": "x", "dataloader": "a:b", "dataloader_options": {"n": 1}}}}]).tasks[
        "t"
    ]
    assert task == TaskConfig(env="x", dataloader="a:b", dataloader_options={"n": 1})
