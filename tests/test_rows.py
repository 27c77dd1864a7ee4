"""A row is what the file says (law B3), whichever program wrote it."""

from __future__ import annotations

import csv
import datetime
import decimal
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_core.contracts.errors import ConfigError
from grpo_core.data.files import check_apart, file

TEXTS = [
    "007",
    "1e5",
    "2024-01-05",
    "2024-01-05T10:00:00Z",
    "NA",
    "null",
    "True",
    " x ",
    "",
    "日本",
    "a\u2028b",
]
"""Texts that readers which infer types change."""


def rows_of(path, split="train", **options):
    rows = file(path, split, **options)
    found = [dict(row) for row in rows]
    assert found == [rows[n] for n in range(len(rows))]
    return found


def wrong(path, **options):
    with pytest.raises(ConfigError) as raised:
        rows_of(path, **options)
    return str(raised.value)


# ---------------------------------------------------------------------------------- delimited text

INCHES = ['"Tis the season', "second", 'third 5" question', '"fourth" is quoted', '""']


def test_quotation_marks_of_a_tsv_are_text(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\tanswer\n" + "".join(f"{text}\t{n}\n" for n, text in enumerate(INCHES)))
    assert [(row["prompt"], row["answer"]) for row in rows_of(path)] == [
        (text, str(n)) for n, text in enumerate(INCHES)
    ]


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ('a,"fourth" is quoted', 1),
        ('ok,"yes"\na,"b"c', 2),
        ('ok,1\na,"never closed\nb,2\n', 2),
        ("a,b,c", 1),
        ("ok,1\na", 2),
        ('"a"\n', 1),
        ("ok,1\na\rb,2", 2),
        ("ok,1\n\xff,2".encode("latin-1"), 2),
    ],
)
def test_a_cell_that_is_not_rfc_4180_and_a_row_of_other_length_are_refused_with_the_row(tmp_path, lines, row):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,answer\n" + (lines if isinstance(lines, bytes) else lines.encode()))
    assert f"rows.csv', row {row}: " in wrong(path)


def test_a_quoted_tsv_is_refused_where_its_cells_have_tabs_or_line_ends(tmp_path):
    for number, cell in enumerate(["a\tb", "a\nb"]):
        path = tmp_path / f"rows{number}.tsv"
        with open(path, "w", newline="") as file:
            csv.writer(file, dialect="excel-tab").writerows([["prompt", "answer"], [cell, "1"]])
        assert ", row 1: " in wrong(path)
    quoted = tmp_path / "quoted.csv"
    quoted.write_text((tmp_path / "rows0.tsv").read_text())
    assert rows_of(quoted, delimiter="\t") == [{"prompt": "a\tb", "answer": "1"}]


def test_the_delimiter_is_named_and_not_guessed(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt;answer\na,b;1\n")
    assert "2 cells, expected 1 columns" in wrong(path)
    assert rows_of(path, delimiter=";") == [{"prompt": "a,b", "answer": "1"}]
    for delimiter in ("", ";;", '"', "\n"):
        if delimiter:
            assert "expected one character" in wrong(path, delimiter=delimiter)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("{}")
    assert "has no delimiter" in wrong(lines, delimiter=";")


def test_byte_order_marks_line_ends_and_blank_lines_are_no_cells(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffprompt,answer\r\n"a\r\nb",1\r\n\r\nc,2'.encode())
    assert rows_of(path) == [{"prompt": "a\r\nb", "answer": "1"}, {"prompt": "c", "answer": "2"}]
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes('\ufeff{"prompt": "a"}\r\n\r\n{"prompt": "b"}'.encode())
    assert rows_of(lines) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_cell_may_be_longer_than_the_limit_of_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt\n{'x' * 200_000}\n")
    assert [len(row["prompt"]) for row in rows_of(path)] == [200_000]


# ---------------------------------------------------------------------------------- JSON


def test_texts_of_json_stay_texts_and_numbers_stay_numbers(tmp_path):
    rows = [{"prompt": text, "n": n, "x": n + 0.1, "o": {"b": [text, None]}} for n, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    for name in ("rows.jsonl", "rows.json", "lines.json"):
        assert rows_of(tmp_path / name) == rows
        assert [type(row["n"]) for row in rows_of(tmp_path / name)] == [int] * len(rows)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ('[{"a": 1} {"a": 2}]', 1),
        ('[{"a": 1}, {"a": 2]', 2),
        ('[{"a": 1}, {"a": "2}]', 2),
        ('[{"a": 1}, 7]', 2),
        ('[{"a": 1},]', 2),
        ('[{"a": 1}', 1),
        ('[{"a": 1}] x', None),
        ('{"a": 1}\n{"a": 1, "a": 2}', 2),
        ('[{"a": 1}, {"o": {"a": 1, "a": 2}}]', 2),
    ],
)
def test_a_list_that_is_not_json_and_a_key_that_comes_twice_are_refused(tmp_path, text, row):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert (f"rows.json', row {row}: " if row else "rows.json': ") in wrong(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=OBJECTS, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_any_objects_come_back_equal_from_json(tmp_path, rows, ascii, indent):
    (tmp_path / "rows.json").write_text(
        json.dumps(rows, ensure_ascii=ascii, indent=indent), "utf-8", "replace"
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rows_of(tmp_path / "rows.jsonl") == rows
    read = (tmp_path / "rows.json").read_text()
    assert rows_of(tmp_path / "rows.json") == json.loads(read)


# ---------------------------------------------------------------------------------- tables of random cells

CELLS = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))
FLAT = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(INCHES)
"""Cells without tabs and line ends, which .tsv cannot hold."""
NUMBERS = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
}


def tables(cells, size=5):
    """Lists of rows with the columns a and b."""
    return st.lists(st.tuples(cells, cells), min_size=1, max_size=size)


def _texts(rows):
    return [{"a": a, "b": b} for a, b in rows]


def by_csv(dialect):
    def write(path, rows):
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, **dialect).writerows([("a", "b"), *rows])

    return write


def by_pandas(path, rows):
    import pandas

    pandas.DataFrame(rows, columns=["a", "b"]).to_csv(path, index=False)


def by_pyarrow(path, rows):
    import pyarrow
    import pyarrow.csv

    pyarrow.csv.write_csv(pyarrow.table({"a": [a for a, _ in rows], "b": [b for _, b in rows]}), path)


def by_duckdb(path, rows):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as base:
        base.execute("create table t(a varchar, b varchar)")
        base.executemany("insert into t values (?, ?)", rows)
        base.execute(f"copy t to '{path}' (header)")


@pytest.mark.parametrize(
    ("write", "delimiter"),
    [
        pytest.param(by_csv({}), "", id="csv"),
        pytest.param(by_csv({"delimiter": ";", "quoting": csv.QUOTE_ALL}), ";", id="csv-semicolon"),
        pytest.param(by_csv({"dialect": "excel-tab"}), "\t", id="csv-tab"),
        pytest.param(by_pandas, "", id="pandas"),
        pytest.param(by_pyarrow, "", id="pyarrow"),
        pytest.param(by_duckdb, "", id="duckdb"),
    ],
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables(CELLS))
def test_texts_come_back_equal_from_csv(tmp_path, write, delimiter, rows):
    path = tmp_path / "rows.csv"
    write(path, rows)
    assert rows_of(path, delimiter=delimiter) == _texts(rows)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables(FLAT))
def test_texts_come_back_equal_from_tsv(tmp_path, rows):
    path = tmp_path / "rows.tsv"
    path.write_text("a\tb\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8", newline="")
    assert rows_of(path) == _texts(rows)


def parquet_by_pandas(path, columns):
    import pandas

    made = {name: pandas.Series(values, dtype=kind or "str") for name, (kind, values) in columns.items()}
    pandas.DataFrame(made).to_parquet(path)


def parquet_by_pyarrow(path, columns):
    import pyarrow
    import pyarrow.parquet

    kinds = {"float32": pyarrow.float32(), "float64": pyarrow.float64(), "int64": pyarrow.int64()}
    arrays = {
        name: pyarrow.array(values, kinds.get(kind, pyarrow.bool_() if kind else pyarrow.string()))
        for name, (kind, values) in columns.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)


def parquet_by_duckdb(path, columns):
    duckdb = pytest.importorskip("duckdb")
    kinds = {"float32": "float", "float64": "double", "int64": "bigint", "bool": "boolean", "": "varchar"}
    with duckdb.connect() as base:
        base.execute(f"create table t({', '.join(f'{n} {kinds[k]}' for n, (k, _) in columns.items())})")
        values = list(zip(*(values for _, values in columns.values()), strict=True))
        base.executemany(f"insert into t values ({', '.join('?' * len(columns))})", values)
        base.execute(f"copy t to '{path}' (format parquet)")


@pytest.mark.parametrize("write", [parquet_by_pandas, parquet_by_pyarrow, parquet_by_duckdb])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), size=st.integers(1, 5))
def test_values_come_back_equal_from_parquet(tmp_path, write, data, size):
    def column(cells):
        return data.draw(st.lists(cells, min_size=size, max_size=size))

    columns = {f"c{kind}": (kind, column(cells)) for kind, cells in NUMBERS.items()} | {
        "t": ("", column(CELLS))
    }
    path = tmp_path / "rows.parquet"
    write(path, columns)
    expected = {
        name: [float(decimal.Decimal(shortest(value))) if kind == "float32" else value for value in values]
        for name, (kind, values) in columns.items()
    }
    found = rows_of(path)
    assert {name: [row[name] for row in found] for name in columns} == expected
    assert all(type(row["cint64"]) is int and type(row["cbool"]) is bool for row in found)


def shortest(value):
    """Shortest decimal of a 32-bit float, found by trying."""
    import struct

    packed = struct.pack("<f", value)
    return next(text for n in range(1, 18) if struct.pack("<f", float(text := f"{value:.{n}g}")) == packed)


def test_types_of_tables_are_kept_within_lists_and_objects(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    f32, moment = pyarrow.float32(), datetime.datetime(2024, 1, 5, 10)
    columns = {
        "texts": pyarrow.array([b"abc", "ü".encode()], pyarrow.binary()),
        "bytes": pyarrow.array([b"\xff\x00", b""], pyarrow.large_binary()),
        "half": pyarrow.array([0.1, None], pyarrow.float16()),
        "list": pyarrow.array([[0.1, None], []], pyarrow.list_(f32)),
        "deep": pyarrow.array([[{"x": 0.1, "b": b"q"}], [{"x": None, "b": b"\xff"}]]).cast(
            pyarrow.list_(pyarrow.struct([("x", f32), ("b", pyarrow.binary())]))
        ),
        "map": pyarrow.array([[("k", 0.1)], []], pyarrow.map_(pyarrow.string(), f32)),
        "day": pyarrow.array([datetime.date(2024, 1, 5), None]),
        "when": pyarrow.array([moment, None], pyarrow.timestamp("ns")),
        "money": pyarrow.array([decimal.Decimal("1.10"), None]),
        "kind": pyarrow.array([b"x", b"y"]).dictionary_encode(),
    }
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        first, second = rows_of(tmp_path / name)
        assert first == {
            "texts": "abc", "bytes": b"\xff\x00", "half": 0.1, "list": [0.1, None],
            "deep": [{"x": 0.1, "b": "q"}], "map": {"k": 0.1}, "day": datetime.date(2024, 1, 5),
            "when": moment, "money": decimal.Decimal("1.10"), "kind": "x",
        }  # fmt: skip
        assert (second["texts"], second["bytes"], second["deep"]) == ("ü", "", [{"b": b"\xff"}])
        assert type(first["when"]) is datetime.datetime


def test_a_map_with_a_key_twice_is_refused_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    maps = pyarrow.array([[("k", 1)], [("k", 1), ("k", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "map": maps}), tmp_path / "rows.parquet")
    assert "rows.parquet', row 2: " in wrong(tmp_path / "rows.parquet")


# ---------------------------------------------------------------------------------- data sets and splits


def numbered(n, **more):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {"prompt": [f"q{i}" for i in range(n)], "answer": [str(i) for i in range(n)], **more}
    )


def prompts_of(path, split, **options):
    return [row["prompt"] for row in rows_of(path, split, **options)]


@pytest.mark.long
@pytest.mark.parametrize("saved", ["one", "named", "dict"])
def test_splits_of_a_saved_data_set_are_exactly_those_that_are_named(tmp_path, saved):
    datasets = pytest.importorskip("datasets")
    rows, path = numbered(10), tmp_path / "data"
    if saved == "named":
        rows = datasets.Dataset.from_list(list(rows), split="train")
    (datasets.DatasetDict({"train": rows, "test": numbered(3)}) if saved == "dict" else rows).save_to_disk(
        path
    )
    every = [f"q{i}" for i in range(10)]
    assert prompts_of(path, "train") == every
    assert prompts_of(path, "train[:8]") == every[:8]
    assert prompts_of(path, "train[80%:]") == every[8:]
    assert prompts_of(path, "train[8:]+train[:1]") == [*every[8:], "q0"]
    assert len(prompts_of(path, "all")) == (13 if saved == "dict" else 10)
    with pytest.raises(ConfigError, match="has no split 'none'; it has 'train'"):
        file(path, "none")
    for subset, split in (("main", "train"), ("", "train[:x]")):
        with pytest.raises(ConfigError):
            file(path, split, subset=subset)
    if saved != "dict":
        with pytest.raises(ConfigError, match="has no split 'test'"):
            file(path, "test")


@pytest.mark.long
def test_values_of_a_saved_data_set_are_exact_and_images_are_not_decoded(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        prompt=datasets.Value("string"), x=datasets.Value("float32"), raw=datasets.Value("binary")
    )
    rows = [{"prompt": f"q{i}", "x": 0.1, "raw": b"abc"} for i in range(3)]
    made = datasets.Dataset.from_list(rows, features=features).select([2, 0])  # with a table of indices
    made.save_to_disk(tmp_path / "data")
    found = file(tmp_path / "data", "train")
    assert (
        [dict(row) for row in found]
        == [found[0], found[1]]
        == [{"prompt": f"q{i}", "x": 0.1, "raw": "abc"} for i in (2, 0)]
    )


@pytest.mark.long
def test_files_of_a_directory_are_read_as_files_are(tmp_path):
    pytest.importorskip("datasets")
    rows = [{"prompt": text or "-", "answer": text, "n": n} for n, text in enumerate(TEXTS)]
    for name, part in (("train-0.jsonl", rows[:4]), ("train-1.jsonl", rows[4:]), ("test.jsonl", rows[:2])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    assert rows_of(tmp_path) == rows
    assert rows_of(tmp_path, "test") == rows[:2]
    assert rows_of(tmp_path, "train[3:5]") == rows[3:5]
    (tmp_path / "cells").mkdir()
    by_csv({})(tmp_path / "cells" / "train.csv", [(text, "1") for text in TEXTS])
    assert rows_of(tmp_path / "cells") == _texts((text, "1") for text in TEXTS)


def test_rows_that_are_trained_are_not_held_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    one, other = (file(each, "train") for each in (path, link))
    with pytest.raises(ConfigError, match="2 of its 2 held-out rows are training rows"):
        check_apart(one, other, "test")


@pytest.mark.long
def test_splits_that_overlap_are_refused(tmp_path):
    numbered(10).save_to_disk(tmp_path / "data")
    parts = {split: file(tmp_path / "data", split) for split in ("train[:8]", "train[8:]")}
    check_apart(*parts.values(), "test")
    more = file(tmp_path / "data", "train[7:]+train[9:]")
    with pytest.raises(ConfigError, match="1 of its 4 held-out rows"):
        check_apart(parts["train[:8]"], more, "test")
