"""The same conversation from every kind of data, from environments, samplers and agents: one prompt.

Rows are written as their authors write them: with parts, with arguments as JSON text, and as tables, which
fill the keys that an object never had with null.
"""

import json
from pathlib import Path

import pytest

import grpo_core
from grpo_core import Environment, Feedback, Prompt
from grpo_core.config import RowOptions
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.protocols import Tool
from grpo_core.contracts.records import Episode, SampleRequest
from grpo_core.data.files import file as read_file
from grpo_core.data.rows import ReadRows, RowReader
from grpo_core.data.samplers import PromptStream
from grpo_core.demo.tiny import write_tokenizer
from grpo_core.environments.host import EnvironmentHost
from grpo_core.testing import HostedEnvironment, MemoryLoader, finished
from grpo_core.text.rendering import Renderer
from grpo_plugin_agents.dialects import CHAT

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% if 'tool_calls' in m %}"
    "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endif %}{% if m.name is defined %}[{{ m.name }}]{% endif %};{% endfor %}"
)
"""A template that asks which keys there are, as many do."""


def talk(name, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "on"}]},
    ]


ROWS = [
    {
        "prompt": talk("price", {"item": "tea"}),
        "answer": "a",
        "id": "price",
        "info": {"of": [{"x": 1}, {"y": 2}]},
    },
    {"prompt": talk("open", {"path": "x"}), "id": "open", "hint": "b"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "plain"}]}], "answer": "c"},
]
READ = [
    'user:go;assistant:(price {"item": "tea"});tool:7[price];user:on;',
    'user:go;assistant:(open {"path": "x"});tool:7[open];user:on;',
    "user:plain;",
]


def as_text(rows):
    """The rows with arguments as OpenAI's API writes them."""
    return json.loads(
        json.dumps(rows)
        .replace('{"item": "tea"}', '"{\\"item\\": \\"tea\\"}"')
        .replace('{"path": "x"}', '"{\\"path\\": \\"x\\"}"')
    )


def written(rows, kind, directory):
    """The path of a file or data set with these rows, or the rows themselves as a program has them."""
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    if kind == "data set":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(_padded(rows)).save_to_disk(path)
    if kind in ("parquet", "arrow", "rows of a table", "rows of pandas"):
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(_padded(rows))
        if kind == "rows of a table":
            return table.to_pylist()
        if kind == "rows of pandas":
            pytest.importorskip("pandas")
            return table.to_pandas().to_dict("records")
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
    return rows if kind == "rows" else str(path)


def _padded(rows):
    """All columns in the first row, where pyarrow looks for their names."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in columns} for row in rows]


def source(given, **options):
    rows = given if isinstance(given, list) else read_file(Path(given), "train")
    return ReadRows(rows, RowReader("sums", "rows", RowOptions(**options)))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Renderer.load(str(directory), chat_template=TEMPLATE)


KINDS = ["jsonl", "parquet", "arrow", "data set", "rows", "rows of a table", "rows of pandas"]


@pytest.mark.parametrize("form", [list, as_text], ids=["mappings", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_prompts(renderer, tmp_path, kind, form):
    prompts = list(source(written(form(ROWS), kind, tmp_path)))
    assert [renderer.text(renderer.prompt_ids(prompt.messages)) for prompt in prompts] == READ
    expected = source(written(ROWS, "jsonl", tmp_path))
    assert [(p.id, p.answer) for p in prompts] == [(p.id, p.answer) for p in expected]
    if "rows of" not in kind:  # what only the environment sees is left as a program gives it
        assert prompts == list(expected)
    assert [set(prompt.info) for prompt in prompts] == [{"info"}, {"hint"}, set()]


@pytest.mark.parametrize("kind", [*KINDS[:4], "csv"])
def test_rows_without_an_answer_are_counted_in_every_kind_of_file(tmp_path, kind):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": "c"}]
    if kind == "csv":
        pytest.importorskip("pyarrow")
        (tmp_path / "rows.csv").write_text('prompt,answer\na,1\nb,\nc,""\n')
        assert source(str(tmp_path / "rows.csv")).without_answer == 2
    else:
        assert source(written(_padded(rows), kind, tmp_path)).without_answer == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_no_model_could_read_is_named_in_every_kind_of_data(tmp_path, kind):
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    rows = [ROWS[2], {"messages": [{"role": "user", "content": [image]}], "answer": "c"}]
    with pytest.raises(
        ConfigError, match=r"row 2: message 1 \(user\): its content has the part \{.*'image_url'"
    ):
        source(written(rows, kind, tmp_path))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{{ q }}{{ hint }}", "'hint', which is"),
        ("{{ q }}!", ["a!", "b!"]),
    ],
)
def test_a_null_is_never_written_into_a_prompt(tmp_path, kind, template, texts):
    rows = [{"q": "a", "hint": "x", "meta": {"x": "1"}}, {"q": "b", "hint": None, "meta": {"x": None}}]
    given = written(rows, kind, tmp_path)
    if isinstance(texts, str):
        with pytest.raises(ConfigError, match=f"row 2: data_options.template names .*({texts})"):
            source(given, template=template)
    else:
        made = source(given, template=template)
        assert [prompt.messages[0]["content"] for prompt in made] == texts


# ---------------------------------------------------------------------------------- environments and agents


class Talks(Environment):
    """Has the rows as prompts, and answers in parts."""

    max_turns = 2

    def __init__(self, rows=(), messages=()):
        self.rows, self.messages = rows, messages

    def prompts(self, split):
        return [
            Prompt(messages=row.get("prompt") or row["messages"], id=row.get("id", "")) for row in self.rows
        ]

    def evaluate(self, episodes):
        return [Feedback(done=False, messages=self.messages) for _ in episodes]


@pytest.mark.parametrize("form", [list, as_text], ids=["mappings", "text"])
def test_an_environment_an_agent_and_a_sampler_say_the_same(renderer, form):
    rows = form(ROWS)
    prompts = finished(HostedEnvironment(Talks(_filled(rows))).prompts("train"))
    asked = [row.get("prompt") or row["messages"] for row in rows]
    requests = [CHAT.read({"messages": messages}, lambda id: None) for messages in asked]
    drawn = [Prompt(messages=messages, id=str(i), environment="a") for i, messages in enumerate(asked)]

    class Own:
        def sample(self, loaders, request):
            return drawn

    request = SampleRequest(generation_version=0, target_version=1, current_version=0, expected_prompts=3)
    stream = PromptStream(sampler=Own(), loaders={"a": MemoryLoader("a", 3)}, name="own")
    sampled = stream.draw(request)
    for each in (prompts, requests, sampled):
        assert [renderer.text(renderer.prompt_ids(one.messages)) for one in each] == READ
        assert [one.messages for one in each] == [one.messages for one in prompts]
    drawn[1] = Prompt(messages=[{"role": "user", "content": [{"type": "image"}]}], id="p1", environment="a")
    with pytest.raises(PluginError, match=r"sampler 'own': prompt 'p1': message 1 \(user\): "):
        stream.draw(request)


def _filled(rows):
    """The rows with the nulls of a table in their messages."""
    keys = ("role", "content", "tool_calls", "tool_call_id", "name", "function_call")
    return [
        {**row, field: [{key: message.get(key) for key in keys} for message in row[field]]}
        for row in rows
        for field in ("prompt" if "prompt" in row else "messages",)
    ]


def test_feedback_in_parts_is_text():
    said = [{"role": "assistant", "content": "7"}]
    episode = Episode(
        prompt=Prompt(messages="go", id="p1"), messages=[{"role": "user", "content": "go"}, *said]
    )
    parts = [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]
    (feedback,) = EnvironmentHost(Talks(messages=[{"role": "user", "content": parts, "name": None}])).call(
        "evaluate", [episode]
    )
    assert feedback.messages == ({"role": "user", "content": "go on"},)
    for messages in ([{"role": "user", "content": 7}], said):
        with pytest.raises(
            PluginError, match="evaluate of prompt 'p1' returned messages that no model can read: mess"
        ):
            EnvironmentHost(Talks(messages=messages)).call("evaluate", [episode])


@pytest.mark.parametrize("arguments", ["{garbled", "[1]", '"tea"'], ids=["no JSON", "a list", "a text"])
def test_arguments_that_are_not_an_object_are_an_error_with_the_prompts_id(tmp_path, arguments):
    rows = [{**ROWS[0], "prompt": talk("price", arguments)}]
    with pytest.raises(
        PluginError, match=r"prompt 'price': message 2 \(assistant\): the arguments of price are"
    ):
        HostedEnvironment(Talks(rows)).host.prompts("train")
    with pytest.raises(ConfigError, match=r"row 1: message 2 \(assistant\): the arguments of price are"):
        source(written(rows, "jsonl", tmp_path))


def test_the_schema_of_a_tool_has_no_key_that_a_table_has_filled():
    item = {"type": "string", "enum": ["tea", None], "items": None, "default": None}
    parameters = {"type": "object", "properties": {"item": item, "path": None}, "required": None}
    assert Tool(name="price", parameters=parameters, call=print).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"item": {"type": "string", "enum": ["tea", None], "default": None}},
    }


def test_a_frame_of_pandas_is_refused_as_data():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(
        ConfigError, match=r"data\['train'\] is a DataFrame; give its rows, as in data=frame.to_dict"
    ):
        grpo_core.train(env=lambda reply: 1.0, data=pandas.DataFrame({"prompt": ["a"]}))


@pytest.mark.nightly
def test_a_run_trains_the_same_prompts_from_lines_and_from_a_table(tmp_path):
    """The whole way: file, source, environment's process, renderer, engine, and what was stored."""
    seen, template = {}, tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    for kind in ("jsonl", "parquet"):
        run = grpo_core.train(
            env=lambda reply, answer: 0.0,
            data=written(as_text(ROWS), kind, tmp_path),
            output=tmp_path / kind,
            seed=1,
            trainer={"steps": 1, "prompts_per_step": 3},
            rollout={"group_size": 2, "max_tokens": 2},
            model={"path": "tiny", "chat_template": str(template), "options": {"warm_start_steps": 0}},
            validation={"every": 0},
            tracking={"trackers": ["files"]},
        )
        groups = grpo_core.stored_rollouts(run.path, 1)
        seen[kind] = {g.prompt.id: g.rollouts[0].segments[0].prompt_ids.tolist() for g in groups}
        events = (run.path / "events.jsonl").read_text()
        assert "1 of its 3 prompts have no answer" in events
    assert seen["jsonl"] == seen["parquet"]
    assert len({tuple(ids) for ids in seen["jsonl"].values()}) == 3
