"""Prompts from files and data sets: every row is a prompt, or an error that says where and why."""

import asyncio
import json
from pathlib import Path

import pytest

from grpo_core.app.data import AT_ONCE
from grpo_core.app.make import make
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, RowOptions, TaskConfig, build
from grpo_core.contracts.errors import CheckpointError, ConfigError, PluginError
from grpo_core.contracts.records import Episode
from grpo_core.data.files import file as read_file
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.rows import ReadRows, RowReader, SomePrompts
from grpo_core.plugins.host import PluginHost

MANY = 10_000
ROWS = [{"question": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(7)]


@pytest.fixture
def file(tmp_path):
    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write


def source(path, **options):
    who = f"task 'sums': data {str(path)!r}"
    return ReadRows(read_file(Path(path), "train"), RowReader("sums", who, RowOptions(**options)))


# ---------------------------------------------------------------------------------- rows are prompts


def test_rows_become_prompts_with_everything_else_as_info(file):
    prompts = source(file(ROWS))
    assert len(prompts) == 7
    third = prompts[2]
    assert third.messages == ({"role": "user", "content": "2+1="},)
    assert (third.answer, third.id, third.environment, third.info) == ("3", "2", "sums", {"level": 2})
    assert prompts[-1].id == "6"
    assert [prompt.id for prompt in prompts[1:3]] == ["1", "2"]


def test_fields_are_configurable(file):
    rows = [{"text": "2*3=", "gold": 6, "key": "x7", "answer": "kept"}]
    (prompt,) = source(file(rows), prompt="text", answer="gold", id="key", system="Be brief.")
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2*3="},
    )
    assert (prompt.answer, prompt.id, prompt.info) == (6, "x7", {"answer": "kept"})


def test_a_field_of_answers_that_no_row_has_is_an_error_and_a_missing_answer_is_counted(file):
    rows = [{"prompt": "a", "gold": 1}, {"prompt": "b"}, {"prompt": "c", "gold": None}]
    with pytest.raises(ConfigError) as raised:
        source(file(rows), answer="answr")
    assert str(raised.value).endswith(
        "no row has a value in 'answr', which data_options.answer names; columns: prompt, gold"
    )
    some = source(file(rows), answer="gold")
    assert some.without_answer == 2, "null is no answer either"
    nobody_asked = source(file(rows))
    assert [prompt.answer for prompt in nobody_asked] == [None] * 3


def test_a_field_of_ids_that_no_row_has_is_an_error(file):
    rows = [{"prompt": "a", "name": "x"}, {"prompt": "b", "name": "y"}]
    with pytest.raises(
        ConfigError, match=r"no row has a value in 'nme', which data_options\.id names; columns: prompt, name"
    ):
        source(file(rows), id="nme")
    assert [prompt.id for prompt in source(file(rows), id="name")] == ["x", "y"]


@pytest.mark.parametrize(("split", "more"), [("test", {}), ("train", {"subset": "main"})])
def test_a_file_has_no_splits_and_subsets(file, split, more):
    path = Path(file([{"prompt": "a"}]))
    assert read_file(path, "validation") is None
    with pytest.raises(ConfigError, match=r"is a file, which has no .* leave out data_options\.s"):
        read_file(path, split, **more)


def test_messages_stay_messages(file):
    said = [("user", "hi"), ("assistant", "yes?"), ("user", "no")]
    messages = [{"role": role, "content": text} for role, text in said]
    (prompt,) = source(file([{"messages": messages}]))
    assert list(prompt.messages) == messages


def test_blank_lines_and_other_line_ends_do_not_count(file):
    assert [p.id for p in source(file(['{"prompt": "a"}\r', "", "  ", '{"prompt": "ü"}', ""]))] == ["0", "1"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty; expected at least one row"),
        ([ROWS[0], "{nonsense"], "row 2: not valid JSON: "),
        ([ROWS[0], [1]], "row 2: [1], expected an object"),
        (
            [ROWS[0], '{"prompt": "a", "x": ' + "[" * 9_999 + "]" * 9_999 + "}"],
            "row 2: not valid JSON: ",
        ),
        ([ROWS[0], {"text": "x"}], "row 2: has no field 'prompt' or 'messages' or 'question', only 'text'"),
        ([{"prompt": 7}], "row 1: 'prompt' is 7, expected text or messages such as"),
        ([{"prompt": ""}], "row 1: 'prompt' is '', expected text"),
        (
            [{"messages": [{"role": "user", "content": 3}]}],
            "row 1: message 1 (user): its content is 3; expected text",
        ),
        (
            [{"messages": [{"role": "user", "content": True}]}],
            "row 1: message 1 (user): its content is True; expected",
        ),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], "row 2: has the id '1', as row 1; ids must"),
    ],
)
def test_an_invalid_row_is_found_before_the_run_begins(file, rows, message):
    path = file(rows)
    with pytest.raises(ConfigError) as caught:
        source(path)
    assert str(caught.value).startswith(("task 'sums': data", f"data {path!r}"))
    assert message in str(caught.value)


@pytest.mark.parametrize("of", ["data", "validation_data"])
@pytest.mark.parametrize("name", ["no.jsonl", "no/rows"])
def test_a_file_that_is_not_there_is_named_although_the_run_would_not_read_it(of, name, file):
    """Held-out rows of a run without validation, and those of a set that only ``validate`` measures."""
    task = {"env": "math:sort", "data": file(ROWS), of: name}
    unused = {"env": "math:sort", "data": name, "every": 0}
    for table, key in (
        ({"tasks": {"w": task}, "validation": {"every": 0}}, f"tasks.w.{of}"),
        (
            {"tasks": {"w": {"env": "math:sort"}}, "validation": {"sets": {"s": unused}}},
            r"validation.sets.s.\w+",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"{key} = '{name}': there is no such file"):
            make(build([{"model": {"path": "tiny"}}, table]), PluginHost.discover())


# ---------------------------------------------------------------------------------- lazy, resumed


def test_a_loader_on_a_source_is_resumed_and_a_changed_file_is_not(file):
    path = file(ROWS)
    loader = IndexedLoader("sums", source(path), seed=1)
    loader.take(10)
    state = json.loads(json.dumps(loader.state_dict()))
    again = IndexedLoader("sums", source(path), seed=1)
    again.load_state_dict(state)
    assert again.take(9) == loader.take(9)
    file([*ROWS[:-1], {"question": "other", "answer": "x"}])
    with pytest.raises(CheckpointError, match=r"task 'sums': its prompts differ from the checkpoint's"):
        IndexedLoader("sums", source(path), seed=1).load_state_dict(state)


# ---------------------------------------------------------------------------------- other kinds


@pytest.mark.long
def test_a_parquet_file_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "rows.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [(p.id, p.answer, p.info) for p in source(path)] == [
        (str(i), row["answer"], {"level": row["level"]}) for i, row in enumerate(ROWS)
    ]


CSV = '''question,answer,level
"1+1=",2,007
"a, b
and c?","say ""c""",
'''


def test_a_csv_file_is_read_with_all_values_as_texts(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.csv").write_text(CSV)
    first, second = source(str(tmp_path / "rows.csv"))
    assert (first.messages[0]["content"], first.answer, first.info) == ("1+1=", "2", {"level": "007"})
    assert (second.messages[0]["content"], second.answer) == ("a, b\nand c?", 'say "c"')
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\na,b\tc\n")
    (only,) = source(str(tmp_path / "rows.tsv"))
    assert (only.messages[0]["content"], only.answer) == ("a,b", "c")
    (tmp_path / "broken.csv").write_text("prompt,answer\na,b,c\n")
    with pytest.raises(ConfigError, match="row 1: 3 cells, expected 2 columns"):
        source(str(tmp_path / "broken.csv"))


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_column_that_occurs_twice_is_refused(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"rows.{suffix}"
    path.write_text(
        "prompt,answer,answer,level,level\na,1,2,3,4\n".replace(",", {"csv": ",", "tsv": "\t"}[suffix])
    )
    with pytest.raises(ConfigError, match=r"the columns 'answer', 'level' occur more than once; name each"):
        source(str(path))


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"the column 'answer' occurs more than once; name each"):
        source(str(tmp_path / "rows.parquet"))


def test_a_row_may_be_nested_and_have_many_lists(file):
    (prompt,) = source(file([{"prompt": "a", "many": [[0]] * 500, "text": "[" * 500}]))
    assert len(prompt.info["many"]) == 500


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.long
def test_a_file_of_arrow_is_read(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    path = str(tmp_path / "rows.arrow")
    with getattr(pyarrow.ipc, f"new_{kind}")(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert [prompt.answer for prompt in source(path)] == [row["answer"] for row in ROWS]


@pytest.mark.long
def test_the_rows_of_a_table_are_on_disk_and_not_in_memory(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "rows.parquet")
    rows = 100_000
    parquet.write_table(pyarrow.table({"prompt": [f"{i} " * 20 for i in range(rows)]}), path)
    before = pyarrow.total_allocated_bytes()
    table = read_file(Path(path), "train")
    assert (len(table), table[rows - 1]["prompt"][:6]) == (rows, f"{rows - 1} ")
    assert pyarrow.total_allocated_bytes() - before < 2**20


# ---------------------------------------------------------------------------------- templates and filters


def test_templates_make_prompt_and_answer_from_several_fields(file):
    rows = [{"a": 2, "b": 3, "options": ["x", "y"]}]
    template = "{{ a }}+{{b}}=? {% raw %} {options}\n"
    (prompt,) = made = source(file(rows), template=template, answer_template="{{ a }}/{{ b }}", system="Add.")
    assert [message["content"] for message in prompt.messages] == ["Add.", "2+3=? {% raw %} {options}\n"]
    assert (prompt.answer, prompt.info, made.without_answer) == ("2/3", rows[0], 0)


def test_repeated_prompts_are_left_out_on_request(file):
    rows = [{"prompt": text} for text in ("1+1=", "1-1=", " 1+1=\n", "A", "a")]
    assert [prompt.id for prompt in source(file(rows))] == ["0", "1", "2", "3", "4"]
    prompts = source(file(rows), deduplicate=True)
    assert ([prompt.id for prompt in prompts], prompts.repeated) == (["0", "1", "3", "4"], 1)


def test_prompts_are_repeated_only_if_all_messages_roles_and_calls_are(file):
    def said(*messages):
        return {"messages": [{"role": role, "content": text, **more} for role, text, more in messages]}

    call = {"tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": 1}}}]}
    other = {
        "tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": 2}}}]
    }
    rows = [
        said(("system", "Answer in French.", {}), ("user", "hello", {})),
        said(("system", "Answer in German.", {}), ("user", "hello", {})),
        said(("system", "Answer in French.", {}), ("user", "hello", {})),
        said(("user", "hello", {})),
        said(("user", "a b", {})),
        said(("user", "a  b", {})),
        said(("user", "a", {}), ("user", "b", {})),
        said(("user", "a", {}), ("assistant", "", call), ("user", "b", {})),
        said(("user", "a", {}), ("assistant", "", other), ("user", "b", {})),
    ]
    prompts = source(file(rows), deduplicate=True)
    assert [int(prompt.id) for prompt in prompts] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert prompts.repeated == 1


@pytest.mark.parametrize(
    ("template", "name", "why"),
    [
        ("{{ nothing }}", "nothing", "is missing"),
        ("{{ question | upper }}", r"question \| upper", "is missing"),
        ("{{ note }}", "note", "is null"),
    ],
)
def test_a_template_with_a_field_that_a_row_lacks_is_an_error_before_the_run(file, template, name, why):
    rows = [{"question": "1+1=", "note": None}]
    with pytest.raises(
        ConfigError, match=rf"row 1: data_options.template names the field '{name}', which {why}"
    ):
        source(file(rows), template=template)


@pytest.mark.long
def test_a_data_set_on_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "saved"))
    saved = tmp_path / "saved"
    assert [row["answer"] for row in read_file(saved, "train")] == [row["answer"] for row in ROWS]
    assert [row["answer"] for row in read_file(saved, "test")] == ["1"]
    assert read_file(saved, "validation") is None, "it has no such split"
    with pytest.raises(ConfigError, match="has no split 'none'; it has 'train', 'test'"):
        read_file(saved, "none")


# ---------------------------------------------------------------------------------- Environment.prompt


def with_environment(env, path, look, **config):
    """Call ``look(prompts, environment)`` for a task whose environment runs in its own process."""

    async def story():
        tasks = {"sums": TaskConfig(env=env, data=path, data_options=config)}
        host = PluginHost.discover()
        around = Tasks.start(Config(tasks=tasks), host, LocalPlacement(host))
        async with around as started:
            prompts = (await started.prompts("train", MANY))["sums"]
            return await look(prompts, started.environments["sums"])

    return asyncio.run(story())


def replied(prompts, texts):
    return [
        Episode(prompt=prompt, messages=[{"role": "assistant", "content": text}])
        for prompt, text in zip(prompts, texts, strict=True)
    ]


@pytest.mark.long
def test_gsm8k_judges_the_prompts_of_a_source_over_its_own_rows(file):
    rows = [
        {"question": f"Ada has {i} pens and buys {i}.", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i:,}"}
        for i in range(AT_ONCE - 20, AT_ONCE + 20)
    ]

    async def look(prompts, environment):
        replies = [await environment.solve(prompts), [row["answer"] for row in rows], ["\\boxed{7}"] * 40]
        rewards = [
            [feedback.reward for feedback in await environment.evaluate(replied(prompts, texts))]
            for texts in replies
        ]
        return prompts, rewards

    prompts, rewards = with_environment("math:gsm8k", file(rows), look, system="Be brief.")
    assert rewards == [[1.0] * 40, [1.0] * 40, [0.0] * 40]
    assert [(p.id, p.environment) for p in prompts] == [(str(n), "sums") for n in range(40)]
    assert prompts[20].answer == "2,000"
    assert prompts[20].messages[0] == {"role": "system", "content": "Be brief."}
    assert prompts[20].messages[1]["content"].endswith("in \\boxed{}.")


HOOKS = """
import asyncio
import grpo_core as grpo

class Same(grpo.Environment):
    def evaluate(self, episodes):
        return [1.0 for _ in episodes]

class Renames(Same):
    def prompt(self, row):
        return grpo.Prompt(messages=f"level {row['level']}", answer=int(row["answer"]), id="mine")

class Raises(Same):
    def prompt(self, row):
        return {"2": row["nothing"]}[row["id"]]

class Forgets(Same):
    def prompt(self, row):
        row["id"]

class Meets(Same):
    concurrency = 3
    present = most = 0

    async def prompt(self, row):
        self.present += 1
        self.most = max(self.most, self.present)
        await asyncio.sleep(0)
        self.present -= 1
        return grpo.Prompt(messages=f"row {row['id']}", answer=self.most)

class RaisesLater(Same):
    async def prompt(self, row):
        await asyncio.sleep(0)
        return {"2": row["nothing"]}[row["id"]]

class Hides(Same):
    def prompt(self, row):
        return grpo.Prompt(messages="?", answer=lambda: 7)
"""


@pytest.fixture
def hooks(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOKS)
    return f"{tmp_path / 'hooks.py'}:"


async def prompts_alone(prompts, environment):
    return prompts


@pytest.mark.long
def test_a_source_stays_as_it_is_where_the_environment_has_no_hook(file, hooks):
    prompts = with_environment(hooks + "Same", file(ROWS), prompts_alone)
    assert isinstance(prompts, ReadRows)


@pytest.mark.long
def test_all_rows_of_a_long_source_become_prompts_in_order_with_the_ids_of_the_source(file, hooks):
    rows = [{"prompt": "?", "answer": str(i), "level": i} for i in range(2 * AT_ONCE + 1)]
    prompts = with_environment(hooks + "Renames", file(rows), prompts_alone)
    assert [prompt.answer for prompt in prompts] == list(range(len(rows)))
    assert [prompt.id for prompt in prompts] == [str(i) for i in range(len(rows))]
    assert prompts[-1].messages[0]["content"] == f"level {len(rows) - 1}"
    assert {prompt.environment for prompt in prompts} == {"sums"}


@pytest.mark.long
def test_rows_are_asked_for_at_the_same_time_where_the_hook_is_async(file, hooks):
    rows = [{"prompt": "?", "answer": "0"}] * 8
    prompts = with_environment(hooks + "Meets", file(rows), prompts_alone)
    assert [prompt.messages[0]["content"] for prompt in prompts] == [f"row {i}" for i in range(8)]
    assert max(prompt.answer for prompt in prompts) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "prompt of row '0' raised hooks.py:15 in prompt: KeyError: 'nothing'"),
        ("RaisesLater", "prompt of row '0' raised hooks.py:35 in prompt: KeyError: 'nothing'"),
        ("Forgets", "prompt of row '0' is NoneType, expected grpo_core.Prompt"),
        ("Hides", "prompt: a prompt cannot be sent to the trainer's process; put plain data"),
    ],
)
def test_a_hook_that_makes_no_prompt_is_an_error_that_names_it(file, hooks, name, message):
    with pytest.raises(PluginError) as raised:
        with_environment(hooks + name, file(ROWS), prompts_alone)
    assert message in str(raised.value)


@pytest.mark.long
def test_a_row_without_a_prompt_is_one_for_an_environment_that_makes_it(file, hooks):
    rows = [{"level": 3, "answer": "0"}]
    prompts = with_environment(hooks + "Renames", file(rows), prompts_alone)
    assert isinstance(prompts, SomePrompts)
    assert prompts[0].messages[0]["content"] == "level 3"
    with pytest.raises(ConfigError, match="row 1: has no field 'prompt'"):
        with_environment(hooks + "Same", file(rows), prompts_alone)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_all_rows_are_those_that_are_asked_for_one_by_one(tmp_path, suffix):
    texts = [f"{i}+1=" for i in range(2500)]  # several parts
    lines = texts if suffix == "csv" else [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / f"rows.{suffix}").write_text("\n".join((["prompt"] if suffix == "csv" else []) + lines))
    rows = read_file(tmp_path / f"rows.{suffix}", "train")
    assert list(rows) == [rows[i] for i in range(len(rows))] == [{"prompt": text} for text in texts]
