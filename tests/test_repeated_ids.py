"""Ids that rows bring come once in an epoch: a near repeat is refused, a far one is said once."""

from __future__ import annotations

import asyncio

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_core.config import RowOptions
from grpo_core.contracts.errors import PluginError
from grpo_core.data.loaders import IndexedLoader, StreamLoader
from grpo_core.data.positions import WINDOW, Ids


class Rows:
    """A stream of rows whose position is a number."""

    def __init__(self, ids):
        self.ids, self.read = ids, 0

    def __iter__(self):
        for nth in range(self.read, len(self.ids)):
            self.read = nth + 1
            yield {"prompt": "?", "id": self.ids[nth]}
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def drawn(loader, n, at_once=4):
    """The ids of the next prompts."""

    async def story():
        found = []
        while len(found) < n:
            await loader.first(at_once)
            found += [prompt.id for prompt in loader.take(at_once)]
        loader.close()
        return found

    return asyncio.run(asyncio.wait_for(story(), 60))


def stream(ids, **options):
    return StreamLoader("t", "rows", lambda: Rows(ids), RowOptions(**options))


@pytest.mark.parametrize("n", [1, 3, 31])
@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_a_small_data_set_repeats_its_ids_in_each_epoch(n, kind):
    ids = [f"id{i}" for i in range(n)]
    rows = [{"prompt": "?", "id": id} for id in ids]
    loader = stream(ids) if kind == "stream" else IndexedLoader("t", rows, seed=0, at_hand=False)
    loader.slots = 40
    found = drawn(loader, 80, at_once=40)
    assert all(sorted(found[i : i + n]) == sorted(ids) for i in range(0, 80 - n, n))


@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_an_id_that_repeats_among_the_prompts_in_use_is_refused_with_both_places(kind):
    ids = [f"id{i}" for i in range(20)]
    ids[12] = ids[9]
    rows = [{"prompt": "?", "id": id} for id in ids]
    loader = stream(ids) if kind == "stream" else IndexedLoader("t", rows, seed=0, at_hand=False)
    loader.slots = 20
    with pytest.raises(PluginError, match=r"'id9'.*repeats = true") as raised:
        drawn(loader, 40)
    if kind == "stream":
        assert "rows 10 and 13, of one epoch, have the id 'id9'" in str(raised.value)


@pytest.mark.parametrize("n", [3, 20])
@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_rows_that_a_resumed_run_reads_again_are_no_repeats(kind, n):
    """A run looks at the first rows before it continues behind its checkpoint, which may be one of them."""
    ids = [f"id{i}" for i in range(n)]

    def made():
        rows = [{"prompt": "?", "id": id} for id in ids]
        loader = stream(ids) if kind == "stream" else IndexedLoader("t", rows, seed=0, at_hand=False)
        loader.slots = 20
        return loader

    async def story():
        first, resumed = made(), made()
        await first.first(4)
        first.take(1)
        await resumed.first(4)
        resumed.load_state_dict(first.state_dict())
        await resumed.first(8)
        taken = [prompt.id for prompt in resumed.take(8)]
        first.close()
        resumed.close()
        return taken

    assert asyncio.run(story()) == drawn(made(), 12)[1:9]


def test_repeats_are_allowed_where_they_are_meant():
    assert drawn(stream(["a", "a", "b", "b"], repeats=True), 8) == ["a", "a", "b", "b"] * 2


def test_repeats_that_are_farther_apart_are_said_once():
    said = []
    loader = stream([f"id{i % 30}" for i in range(90)])
    loader.slots, loader.warn = 8, lambda cause, message: said.append((cause, message))
    assert len(drawn(loader, 84)) == 84
    ((cause, message),) = said
    assert cause == "repeated_ids/t"
    assert "rows 1 and 31, of one epoch, have the id 'id0'" in message


def test_ids_are_compared_over_the_last_rows_alone():
    ids = Ids("it")
    for row in range(WINDOW + 1):
        assert not ids.add(f"id{row}", 0, row, near=4)
    assert not ids.add("id0", 0, WINDOW + 1, near=4), "forgotten"
    assert ids.add("id2", 0, WINDOW + 2, near=4)
    assert not ids.add("id3", 0, WINDOW + 3, near=4), "said once"


class Whole(IterableDataset):
    """An iterable that does not divide its rows among workers."""

    def __init__(self, with_ids):
        self.with_ids = with_ids

    def __iter__(self):
        for i in range(50):
            yield {"prompt": f"{i}", **({"id": f"id{i}"} if self.with_ids else {})}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("with_ids", [True, False])
def test_an_iterable_that_each_worker_reads_whole_is_refused_for_what_it_is(with_ids):
    loader = StreamLoader(
        "t",
        "rows",
        lambda: StatefulDataLoader(Whole(with_ids), batch_size=None, num_workers=2),
        RowOptions(),
    )
    with pytest.raises(PluginError, match="which each of its 2 workers reads whole"):
        drawn(loader, 8)
