"""Law 12: a resumed dataloader gives the row that it would have given, or the run is refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import threading
import time

import pytest
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_core.app.data import Source
from grpo_core.config import RowOptions
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import IndexedLoader, StreamLoader
from grpo_core.data.positions import fingerprint
from grpo_core.data.states import packed, unpacked
from grpo_core.data.streams import compare, loses_state, read


class Rows:
    """A stream of ``n`` rows whose order depends on ``set_epoch``; its state is that of the next row."""

    def __init__(self, n=50, seed=0):
        self.n, self.seed, self.at, self.epoch = n, seed, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(f"{self.seed}/{self.epoch}").sample(range(self.n), self.n)
        while self.at < self.n:
            self.at += 1
            yield self.row(order[self.at - 1])
        self.at = 0

    def row(self, i):
        return {"id": f"{self.epoch}/{i}", "prompt": f"{i}=", "answer": str(i)}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class StateBehind(Rows):
    """Its state is that of the row after the next one."""

    def state_dict(self):
        return {"at": self.at + 1}


class NoState(Rows):
    """Its state is the beginning."""

    def load_state_dict(self, state):
        pass


class LostBuffer(Rows):
    """Rows wait in a buffer, which the state lacks."""

    def __iter__(self):
        waiting = []
        for row in super().__iter__():
            waiting.append(row)
            if len(waiting) == 5:
                yield waiting.pop(0)
        yield from waiting


class RaisesOnLoad(Rows):
    def load_state_dict(self, state):
        raise KeyError("version")


class RaisesOnIter(Rows):
    """Its state is accepted, and reading fails, as where torchdata skips more rows than there are."""

    restored = False

    def load_state_dict(self, state):
        self.restored = True

    def __iter__(self):
        if self.restored:
            raise StopIteration
        return super().__iter__()


class OneGenerator(Rows):
    """The order of an epoch depends on those before it, and the state lacks this."""

    def __init__(self, n=50):
        super().__init__(n)
        self.random = random.Random(7)

    set_epoch = None

    def __iter__(self):
        order = self.random.sample(range(self.n), self.n)
        while self.at < self.n:
            self.at += 1
            yield self.row(order[self.at - 1])
        self.at = 0


KINDS = [Rows, StateBehind, NoState, LostBuffer, RaisesOnLoad, RaisesOnIter]


def inline(loader):
    """Let a loader read without a thread: virtual time knows none."""

    async def call(work):
        return work()

    call.close = lambda: None
    loader.thread = call
    return loader


def stream(make, **options):
    return inline(StreamLoader("t", "rows", make, RowOptions(**options)))


async def drawn(loader, n):
    await loader.first(n)
    return [prompt.id for prompt in loader.take(n)]


def through_files(state):
    return unpacked(json.loads(json.dumps(packed(state))))


async def resumed(make, state, **options):
    """A loader that continues; as in a run, its first rows have been read before the checkpoint is."""
    loader = stream(make, **options)
    with contextlib.suppress(PluginError):
        await loader.first(8)
    loader.load_state_dict(state)
    return loader


# ---------------------------------------------------------------------------------- killed anywhere


@settings(max_examples=30, deadline=None)
@example(kind=Rows, n=50, takes=[4, 4], kills=[0], ahead=0)  # before the first row is taken
@given(
    kind=st.sampled_from(KINDS),
    n=st.sampled_from([1, 3, 31, 32, 33, 50]),
    takes=st.lists(st.integers(1, 9), min_size=2, max_size=24),
    kills=st.lists(st.integers(0, 23), max_size=4),
    ahead=st.integers(0, 20),
)
def test_a_stream_that_is_killed_anywhere_gives_the_rows_of_one_that_is_not(kind, n, takes, kills, ahead):
    """Also where the state is wrong: then the rows are counted."""

    async def story(kills):
        loader, ids = stream(lambda: kind(n)), []
        for nth, take in enumerate(takes):
            if nth in kills:
                await loader.first(ahead + 1)
                state = through_files(loader.state_dict())
                loader = await resumed(lambda: kind(n), state)
                if nth % 2:  # killed again before a row is read
                    assert through_files(loader.state_dict()) == state
            ids += await drawn(loader, take)
        return ids

    expected = [f"{epoch}/" for epoch in range(sum(takes)) for _ in range(n)]
    calm = asyncio.run(story([]))
    assert [id.partition("/")[0] + "/" for id in calm] == expected[: len(calm)]
    assert asyncio.run(story(kills)) == calm


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_where_the_state_of_a_later_mark_does_not_help(kind):
    async def story():
        loader = stream(kind)
        await drawn(loader, 120)
        other = stream(kind)
        other.load_state_dict(through_files(loader.state_dict()))
        assert await drawn(other, 80) == await drawn(loader, 80)

    asyncio.run(story())


def test_a_state_that_breaks_after_its_epoch_is_found_where_the_epoch_ends_among_the_rows():
    async def story(cut):
        loader, ids = stream(OneGenerator), []
        ids += await drawn(loader, cut)
        if cut:
            state = through_files(loader.state_dict())
            loader = stream(OneGenerator)
            loader.load_state_dict(state)
        return ids + await drawn(loader, 200 - cut) if cut else await drawn(loader, 200)

    calm = asyncio.run(story(0))
    for cut in (52, 60, 101, 110):
        assert asyncio.run(story(cut)) == calm, cut


# ---------------------------------------------------------------------------------- refused


class Changed(Rows):
    def row(self, i):
        return {**super().row(i), "answer": f"another {i}"}


@pytest.mark.parametrize(("cut", "first"), [(4, 1), (100, 65)])
def test_rows_that_have_changed_are_refused_with_row_field_and_both_texts(cut, first):
    async def story():
        loader = stream(Rows)
        await drawn(loader, cut)
        other = stream(Changed)
        other.load_state_dict(through_files(loader.state_dict()))
        await other.first(1)

    with pytest.raises(ConfigError) as raised:
        asyncio.run(story())
    told = str(raised.value)
    assert f"task 't': dataloader 'rows' does not give the rows that it gave: row {first} has 'ano" in told
    assert "'answer'" in told
    assert "data_options.exact = false" in told
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("kind", [Rows, LostBuffer, Changed])
@pytest.mark.parametrize("exact", [True, False])
def test_the_proof_may_be_given_up_or_begin_when_a_run_is_resumed(kind, exact):
    async def story():
        loader = stream(kind, exact=exact)
        await drawn(loader, 40)
        await loader.first(9)
        ids, last = [], loader
        for takes in (3, 6, 1, 40, 30):
            make = Rows if kind is Changed and exact else kind
            other = await resumed(make, through_files(last.state_dict()), exact=not exact)
            ids += await drawn(other, takes)
            await other.first(2)
            last = other
        return await drawn(loader, 80), ids

    expected, found = asyncio.run(story())
    if kind is not LostBuffer:
        assert found == expected


def test_fewer_rows_than_before_are_refused():
    async def story():
        loader = stream(lambda: Rows(50))
        await drawn(loader, 45)
        other = stream(lambda: Rows(3))
        other.load_state_dict(loader.state_dict())
        await other.first(1)

    with pytest.raises(ConfigError, match="does not give the rows that it gave"):
        asyncio.run(story())


class Transformed:
    """Rows by index that differ each time they are read."""

    def __init__(self, salt):
        self.salt = salt

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"prompt": f"{i} {self.salt}"}


def test_rows_by_index_that_have_changed_are_refused_too():
    def indexed(salt, **options):
        rows, chosen = Transformed(salt), RowOptions(**options)
        return inline(IndexedLoader("t", rows, seed=0, name="rows", options=chosen, at_hand=False))

    async def story(salt, **options):
        loader, other = indexed(1), indexed(salt, **options)
        before = await drawn(loader, 5)
        other.load_state_dict(through_files(loader.state_dict()))
        return before, await drawn(loader, 30), await drawn(other, 30)

    _, expected, found = asyncio.run(story(1))
    assert expected == found
    with pytest.raises(ConfigError, match=r"row 1 has '\d+ 2' in its field 'prompt', expected '\d+ 1'"):
        asyncio.run(story(2))
    assert asyncio.run(story(2, exact=False))[2] == expected

    async def given_up():
        loader, other, last = indexed(1), indexed(2, exact=False), indexed(2)
        await drawn(loader, 5)
        other.load_state_dict(through_files(loader.state_dict()))
        await drawn(other, 8)
        last.load_state_dict(through_files(other.state_dict()))
        assert await drawn(last, 30) == await drawn(other, 30)

    asyncio.run(given_up())


@pytest.mark.parametrize("row", [Prompt(messages="1 = ?", id=3), None])
def test_what_cannot_be_read_names_its_dataloader(row):
    async def broken(rows):
        raise ValueError("it cannot be converted")

    rows, convert = (Transformed(1), broken) if row is None else ([row], None)
    loader = IndexedLoader(
        "t", rows, seed=0, name="rows", options=RowOptions(), at_hand=False, convert=convert
    )
    with pytest.raises(PluginError, match=r"task 't': dataloader 'rows': it raised "):
        asyncio.run(drawn(inline(loader), 1))


def test_a_prompt_of_another_class_is_saved_as_a_prompt():
    @frozen
    class Tagged(Prompt):
        tag: str = ""

    async def story():
        rows = [Tagged(messages=f"{i} = ?", hint="one", tag="x") for i in range(9)]
        loader = inline(IndexedLoader("t", rows, seed=0, name="rows", options=RowOptions(), at_hand=False))
        await loader.first(2)
        prompt, _ = loader.take(2)
        state = through_files(loader.state_dict({7: prompt}))
        loader.load_state_dict(state)
        assert loader.prompt(prompt.id, 7) == prompt
        assert type(prompt) is Prompt

    asyncio.run(story())


def test_what_proves_rows_by_index_does_not_grow_from_life_to_life():
    async def story():
        state = None
        for _ in range(30):
            loader = inline(IndexedLoader("t", Transformed(1), seed=0, name="rows", at_hand=False))
            if state:
                loader.load_state_dict(state)
            await drawn(loader, 5)
            state = through_files(loader.state_dict())
        return len(state["position"]["since"])

    assert asyncio.run(story()) == 32


@pytest.mark.parametrize("source", ["generator", "queue"])
def test_a_source_that_can_be_read_once_is_refused_unless_its_position_need_not_be_exact(source):
    given = ({"prompt": f"{i}=", "id": str(i)} for i in range(100))
    read = []

    def once(split):
        class Once:
            def __iter__(self):
                for row in given:
                    read.append(row)
                    yield row

        return given if source == "generator" else Once()

    async def story(**options):
        loader = await Source("t", "rows", once, RowOptions(**options)).training()
        ids = await drawn(loader, 5)
        await loader.first(9)
        again = await Source("t", "rows", once, RowOptions(**options)).training()
        again.load_state_dict(through_files(loader.state_dict()))
        loader.close()
        ids += await drawn(again, 20)
        again.close()
        return ids

    with pytest.raises(PluginError, match=r"without state_dict and load_state_dict: .*exact = false"):
        asyncio.run(story())
    assert read == [], "it is refused before it is read"
    assert asyncio.run(story(exact=False)) == [str(i) for i in range(25)], "rows read ahead are kept"


def test_a_stream_that_ends_and_cannot_begin_again_says_so():
    rows = iter([{"prompt": "a"}, {"prompt": "b"}])

    async def story():
        await drawn(inline(StreamLoader("t", "rows", lambda: rows, RowOptions(exact=False))), 3)

    with pytest.raises(PluginError, match="it ended without a row after 2 rows: it cannot be read twice"):
        asyncio.run(story())


# ---------------------------------------------------------------------------------- what is said


class Slow(NoState):
    """Reading a row takes some work, once ``slow`` is set."""

    slow = False

    def row(self, i):
        if Slow.slow:
            hashlib.sha256(bytes(400_000)).digest()
        return super().row(i)


@pytest.mark.long
def test_progress_is_said_while_rows_are_counted_and_no_deadline_ends_it(monkeypatch):
    monkeypatch.setattr("grpo_core.data.loaders.SAYS_EVERY", 0.0)
    monkeypatch.setattr(Slow, "slow", False)

    async def story():
        loader = stream(lambda: Slow(3000))
        await drawn(loader, 2000)
        state = through_files(loader.state_dict())
        expected, Slow.slow, said = await drawn(loader, 8), True, []
        other = StreamLoader("t", "rows", lambda: Slow(3000), RowOptions(), deadline=0.2)
        other.status = said.append
        other.load_state_dict(state)
        began = time.monotonic()
        assert await drawn(other, 8) == expected
        assert time.monotonic() - began > 0.2
        other.close()
        return said

    said = asyncio.run(story())
    assert len(said) == 1952
    assert said[-1] == "task 't': dataloader 'rows': counting its rows: 1,951 of 1,952"


class Same(Rows):
    set_epoch = None

    def row(self, i):
        return {"prompt": f"{i}="}


@pytest.mark.parametrize(("kind", "n", "times"), [(Same, 50, 1), (Rows, 50, 0), (Same, 7, 0)])
def test_a_stream_that_repeats_its_order_is_said_once(kind, n, times):
    async def story():
        loader, said = stream(lambda: kind(n)), []
        loader.warn = lambda cause, message: said.append((cause, message))
        for _ in range(30):
            await drawn(loader, 10)
        return said

    said = asyncio.run(story())
    assert [cause for cause, _ in said] == ["same_order/t"] * times


# ---------------------------------------------------------------------------------- the trial


class Timed(Rows):
    clock = iter(range(10**9))

    def row(self, i):
        return {**super().row(i), "at": next(self.clock)}


def test_a_field_that_differs_each_time_is_left_out_and_the_others_prove_the_position():
    tried = compare(read(Timed, "rows"), Timed, "rows")
    assert tried.without == {"at"}

    async def story():
        loader = inline(StreamLoader("t", "rows", Timed, RowOptions(), without=tried.without))
        await drawn(loader, 60)
        other = inline(StreamLoader("t", "rows", Timed, RowOptions()))
        other.load_state_dict(through_files(loader.state_dict()))
        assert await drawn(other, 80) == await drawn(loader, 80)

    asyncio.run(story())


class OnlyTime:
    """Every field differs, but one that says nothing."""

    clock = iter(range(10**9))

    def __iter__(self):
        while True:
            yield {"prompt": f"{next(self.clock)}", "answer": "1"}

    def state_dict(self):
        return {}

    load_state_dict = state_dict


@pytest.mark.parametrize("kind", [OnlyTime, StateBehind, NoState])
def test_a_trial_refuses_a_stream_that_does_not_give_the_same_rows(kind):
    with pytest.raises(ConfigError, match="does not give the rows that it gave"):
        compare(read(kind, "rows"), kind, "rows")


def test_a_trial_crosses_the_end_of_an_epoch():
    with pytest.raises(ConfigError, match="its state was restored behind"):
        compare(read(OneGenerator, "rows"), OneGenerator, "rows")
    assert compare(read(Rows, "rows"), Rows, "rows").lost == ""


@pytest.mark.long
@pytest.mark.parametrize("buffer", [20, 1000])
def test_a_shuffle_buffer_of_datasets_is_known_and_no_row_is_lost(buffer):
    datasets = pytest.importorskip("datasets")

    def shuffled():
        rows = [{"prompt": f"q{i}", "id": str(i)} for i in range(200)]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
        return stream.shuffle(seed=42, buffer_size=buffer)

    assert loses_state(shuffled()) == f"a shuffle buffer of {buffer:,} rows"

    async def story(cut):
        loader = stream(shuffled)
        ids = await drawn(loader, cut)
        other = stream(shuffled)
        other.load_state_dict(through_files(loader.state_dict()))
        return ids + await drawn(other, 400 - cut)

    for cut in (30, 230):
        ids = asyncio.run(story(cut))
        assert [sorted(ids[part : part + 200], key=int) for part in (0, 200)] == [
            [str(i) for i in range(200)]
        ] * 2
        assert ids[:200] != ids[200:], "set_epoch chooses another order"


# ---------------------------------------------------------------------------------- values


def test_fingerprints_compare_values_and_not_objects():
    np = pytest.importorskip("numpy")
    one = {"a": 1, "b": [1.0, "x"], "c": {"k": b"12"}, "d": np.arange(3), "e": {3, 1, 2}, "f": np.float32(2)}
    same = {"a": 1.0, "b": (1, "x"), "c": {"k": bytearray(b"12")}, "d": np.arange(3), "e": {1, 2, 3}, "f": 2}
    assert {k: v[0] for k, v in fingerprint(one).items() if k != "f"} == {
        k: v[0] for k, v in fingerprint(same).items() if k != "f"
    }
    for key, other in {
        "a": "1",
        "b": [1.0, "y"],
        "c": {"k": b"13"},
        "d": np.arange(3) + 1,
        "e": {1, 2},
    }.items():
        assert fingerprint(one)[key][0] != fingerprint({key: other})[key][0], key
    assert len(fingerprint({"long": "x" * 1000})["long"][1]) == 60


@pytest.mark.parametrize("made", [None, [], KINDS[1]], ids=["nothing", "no rows", "refused by its trial"])
def test_a_dataloader_that_is_refused_leaves_no_thread(made):
    async def trial(thread):
        raise ConfigError("it is refused")

    async def story():
        make = made if callable(made) else lambda: made
        await Source("t", "refused", lambda split: make(), RowOptions()).training(trial)

    with pytest.raises((ConfigError, PluginError)):
        asyncio.run(story())
    left = [each for each in threading.enumerate() if "dataloader 'refused'" in each.name]
    for each in left:
        each.join(10)
    assert not any(each.is_alive() for each in left)
