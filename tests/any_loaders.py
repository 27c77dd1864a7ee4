"""Dataloaders of public libraries, and mixtures of them, with 400 rows each.

``test_any_loader`` kills processes that draw from them.  Each is a factory as a plugin has it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from indexed_rows import N, Rows, row

FACTORIES: dict[str, Callable[[str], Any]] = {}
OPTIONS: dict[str, Mapping[str, Any]] = {}
"""``data_options`` of a loader, by name."""


def rows(n: int = N) -> list[dict[str, Any]]:
    return [row(i) for i in range(n)]


def loader(function: Callable[[Path], Any]) -> Callable[[str], Any]:
    """Return the factory of a dataloader; the function may write files into the directory that it gets."""

    def made(split: str) -> Any:
        return function(Path(os.environ["ANY_LOADERS"])) if split == "train" else None

    FACTORIES[function.__name__] = made
    return made


# ---------------------------------------------------------------------------------- datasets


def _iterable(n: int = N, shards: int = 4) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows(n)).to_iterable_dataset(num_shards=shards)


@loader
def datasets_map(_: Path) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows())


@loader
def datasets_iterable(_: Path) -> Any:
    return _iterable()


@loader
def datasets_shuffled_20(_: Path) -> Any:
    return _iterable().shuffle(seed=0, buffer_size=20)


@loader
def datasets_shuffled_1000(_: Path) -> Any:
    return _iterable(shards=1).shuffle(seed=0, buffer_size=1_000)


@loader
def datasets_shuffled_10000(_: Path) -> Any:
    return _iterable().shuffle(seed=1, buffer_size=10_000)


@loader
def datasets_interleaved(_: Path) -> Any:
    import datasets

    parts = [_iterable(N // 2), _iterable(N // 2).map(_renamed)]
    return datasets.interleave_datasets(parts)


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"other {given['prompt']}"}


@loader
def datasets_interleaved_at_random(_: Path) -> Any:
    import datasets

    parts = [_iterable(N // 2), _iterable(N // 2).map(_renamed)]
    return datasets.interleave_datasets(parts, probabilities=[0.7, 0.3], seed=3)


@loader
def datasets_concatenated(_: Path) -> Any:
    import datasets

    return datasets.concatenate_datasets([_iterable(N // 2), _iterable(N // 2).map(_renamed)])


@loader
def datasets_of_a_shard(_: Path) -> Any:
    return _iterable(2 * N, 8).shard(num_shards=2, index=1)


@loader
def datasets_of_files_shuffled(folder: Path) -> Any:
    import datasets

    for part in range(4):
        lines = (json.dumps(row(i)) + "\n" for i in range(part, N, 4))
        (folder / f"part-{part}.jsonl").write_text("".join(lines))
    files = sorted(map(str, folder.glob("part-*.jsonl")))
    made = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder)
    )
    return made.shuffle(seed=0, buffer_size=30)


@loader
def datasets_in_a_loader_with_two_workers(_: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(_iterable(), batch_size=None, num_workers=2)


# ---------------------------------------------------------------------------------- torch


def _iterable_of_torch() -> Any:
    from whole_iterable import Whole

    return Whole()


def _as_it_is(given: Any) -> Any:
    return given


def _stateful(data: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=None, collate_fn=_as_it_is, **options)


def _generator(seed: int = 3) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


@loader
def torch_dataset(_: Path) -> Any:
    return Rows()


@loader
def torch_concatenated_and_split(_: Path) -> Any:
    from torch.utils.data import ConcatDataset, random_split

    return random_split(ConcatDataset([Rows(), Rows()]), [N, N], generator=_generator())[0]


@loader
def torch_iterable(_: Path) -> Any:
    return _iterable_of_torch()


@loader
def torch_loader(_: Path) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(_iterable_of_torch(), batch_size=None)


# ---------------------------------------------------------------------------------- torchdata


@loader
def stateful_in_order(_: Path) -> Any:
    return _stateful(Rows())


@loader
def stateful_shuffled(_: Path) -> Any:
    return _stateful(Rows(), shuffle=True, generator=_generator())


@loader
def stateful_shuffled_without_generator(_: Path) -> Any:
    return _stateful(Rows(), shuffle=True)


@loader
def stateful_with_two_workers(_: Path) -> Any:
    return _stateful(Rows(), shuffle=True, generator=_generator(), num_workers=2)


@loader
def stateful_weighted(_: Path) -> Any:
    from torch.utils.data import WeightedRandomSampler

    weights = [1.0 + i % 3 for i in range(N)]
    return _stateful(Rows(), sampler=WeightedRandomSampler(weights, N, generator=_generator()))


@loader
def stateful_of_an_iterable(_: Path) -> Any:
    return _stateful(_iterable_of_torch())


@loader
def nodes_of_an_iterable(_: Path) -> Any:
    from torchdata.nodes import IterableWrapper

    return IterableWrapper(rows())


@loader
def nodes_mapped_and_prefetched(_: Path) -> Any:
    from torchdata.nodes import IterableWrapper, ParallelMapper, Prefetcher

    mapped = ParallelMapper(IterableWrapper(range(N)), row, num_workers=2, method="thread", in_order=True)
    return Prefetcher(mapped, prefetch_factor=8)


@loader
def nodes_of_a_shuffled_sampler(_: Path) -> Any:
    from torchdata.nodes import Mapper, SamplerWrapper
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=True, seed=42)
    return Mapper(SamplerWrapper(sampler), row)


@loader
def nodes_weighted(_: Path) -> Any:
    from torchdata.nodes import IterableWrapper, Mapper, MultiNodeWeightedSampler

    parts = {"a": IterableWrapper(rows(N // 2)), "b": Mapper(IterableWrapper(rows(N // 2)), _renamed_whole)}
    return MultiNodeWeightedSampler(parts, {"a": 0.6, "b": 0.4}, seed=5)


def _renamed_whole(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, **_renamed(given)}


# ---------------------------------------------------------------------------------- tables and databases


@loader
def list_of_rows(_: Path) -> Any:
    return rows()


@loader
def pandas_records(_: Path) -> Any:
    import pandas

    return pandas.DataFrame(rows()).to_dict("records")


@loader
def polars_dicts(_: Path) -> Any:
    import polars

    return polars.DataFrame(rows()).to_dicts()


@loader
def polars_iterator(_: Path) -> Any:
    import polars

    return polars.DataFrame(rows()).iter_rows(named=True)


@loader
def pyarrow_rows(_: Path) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(rows()).to_pylist()


@loader
def pyarrow_batches(_: Path) -> Any:
    import pyarrow

    batches = pyarrow.Table.from_pylist(rows()).to_batches(max_chunksize=32)
    return (each for batch in batches for each in batch.to_pylist())


class Query:
    """The rows of a table of sqlite, by their number."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path)

    def __len__(self) -> int:
        return int(self._base.execute("select count(*) from t").fetchone()[0])

    def __getitem__(self, i: int) -> dict[str, Any]:
        prompt, answer = self._base.execute("select prompt, answer from t where n = ?", (i,)).fetchone()
        return {"prompt": prompt, "answer": answer}


def _base(folder: Path) -> Path:
    path = folder / "rows.sqlite"
    if not path.exists():
        with sqlite3.connect(path) as base:
            base.execute("create table t(n integer primary key, prompt text, answer text)")
            base.executemany("insert into t values (?, ?, ?)", [(i, f"row {i}", str(i)) for i in range(N)])
        base.close()
    return path


@loader
def sqlite_by_number(folder: Path) -> Any:
    return Query(_base(folder))


@loader
def sqlite_cursor(folder: Path) -> Any:
    base = sqlite3.connect(_base(folder))
    base.row_factory = sqlite3.Row
    return map(dict, base.execute("select prompt, answer from t order by n"))


@loader
def duckdb_rows(_: Path) -> Any:
    import duckdb

    found = duckdb.sql(f"select 'row ' || i as prompt, i::varchar as answer from range({N}) r(i)")
    return [dict(zip(found.columns, each, strict=True)) for each in found.fetchall()]


@loader
def duckdb_batches(_: Path) -> Any:
    import duckdb

    found = duckdb.sql(f"select 'row ' || i as prompt, i::varchar as answer from range({N}) r(i)")
    return iter(lambda: found.fetchone(), None)


# ---------------------------------------------------------------------------------- others


@loader
def generator(_: Path) -> Any:
    return (row(i) for i in range(N))


class Counted:
    """A stream whose state is the number of its rows."""

    def __init__(self) -> None:
        self._read = 0

    def __iter__(self) -> Any:
        while self._read < N:
            self._read += 1
            yield row(self._read - 1)
        self._read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self._read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._read = state["read"]


@loader
def own_state(_: Path) -> Any:
    return Counted()


class Behind(Counted):
    """A stream with a wrong state: it is one row behind."""

    def state_dict(self) -> dict[str, int]:
        return {"read": max(0, self._read - 1)}


@loader
def own_state_that_is_wrong(_: Path) -> Any:
    return Behind()


def _tar(folder: Path) -> str:
    path = folder / "rows.tar"
    if not path.exists():
        with tarfile.open(path, "w") as tar:
            for i in range(N):
                for suffix, text in (("prompt.txt", f"row {i}"), ("answer.txt", str(i))):
                    info = tarfile.TarInfo(f"{i:05}.{suffix}")
                    info.size = len(text)
                    tar.addfile(info, BytesIO(text.encode()))
    return str(path)


def _of_tar(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": sample["prompt.txt"].decode(), "answer": sample["answer.txt"].decode()}


@loader
def webdataset(folder: Path) -> Any:
    import webdataset as wds

    return wds.WebDataset(_tar(folder), shardshuffle=False).map(_of_tar)


@loader
def webdataset_shuffled(folder: Path) -> Any:
    import webdataset as wds

    return wds.WebDataset(_tar(folder), shardshuffle=False).shuffle(50, seed=2).map(_of_tar)


@loader
def webdataset_in_a_stateful_loader(folder: Path) -> Any:
    import webdataset as wds

    return _stateful(wds.WebDataset(_tar(folder), shardshuffle=False).map(_of_tar))


OPTIONS["stateful_weighted"] = {"repeats": True}


# ---------------------------------------------------------------------------------- litdata


def _chunks(folder: Path) -> str:
    """Write the rows as chunks of 50, once."""
    from litdata.streaming.writer import BinaryWriter

    chunks = folder / "chunks"
    if not (chunks / "index.json").exists():
        writer = BinaryWriter(str(chunks), chunk_size=50)
        for i, given in enumerate(rows()):
            writer[i] = given
        writer.done()
        writer.merge()
    return str(chunks)


@loader
def litdata_rows(folder: Path) -> Any:
    from litdata import StreamingDataset

    return StreamingDataset(_chunks(folder))


@loader
def litdata_in_its_loader(folder: Path) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    shuffled = StreamingDataset(_chunks(folder), shuffle=True, seed=3)
    return StreamingDataLoader(shuffled, batch_size=1, collate_fn=_only)


def _only(batch: list[Any]) -> Any:
    (one,) = batch
    return one
