"""Models are found by path, hub id or name; a missing model is a clear error."""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forks
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo_core.app import model_sources
from grpo_core.contracts.errors import ModelError
from grpo_core.models.files import keep_softcapping, local_directory
from grpo_core.weights.layout import load_tensors
from grpo_plugin_devkit.decoding import make_test_model


def test_a_directory_with_a_model_is_taken_as_it_is(tmp_path):
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert local_directory(str(tmp_path)) == str(tmp_path)


def test_a_directory_without_a_model_names_the_missing_file(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelError, match=r"there is no tokenizer_config\.json, no \*\.safetensors"):
        local_directory(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "nowhere", "a/b/c"])
def test_a_missing_path_is_one_clear_error(path):
    with pytest.raises(
        ModelError, match="there is no such directory; expected a transformers model directory"
    ):
        local_directory(path)


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ModelError, match=r"'no-one/nothing': no such directory here, and it cannot be loaded"
    ):
        local_directory("no-one/nothing")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Serves a model under any name of "someone"; yields a kind of forks that ask it, and all requests."""
    directory, sha, asked = sharded(tmp_path_factory.mktemp("model")), "a" * 40, []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if "/resolve/" in self.path:
                body = (directory / self.path.rpartition("/")[2]).read_bytes()
            elif "/tree/" in self.path:
                files = sorted(path for path in directory.iterdir() if path.is_file())
                body = json.dumps(
                    [{"type": "file", "path": f.name, "oid": f.name, "size": f.stat().st_size} for f in files]
                ).encode()
            else:
                body = json.dumps({"id": self.path.partition("/models/")[2], "sha": sha}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", sha)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kind, cache = f"hub of {os.getpid()}", str(tmp_path_factory.mktemp("cache"))
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": cache}
        forks.KINDS[kind] = {**variables, "HF_HUB_OFFLINE": "0"}, forks.KINDS["command"][1]
        yield kind, asked
        server.shutdown()


TRAIN = ("train", "--set", "trainer.steps=1", "--set", "validation.every=0", "--model")
VALIDATE = ("validate", "--set", "validation.prompts=2")


def used_from(hub, tmp_path, command=TRAIN, **settings):
    """Run a command with a model that only this test uses; returns its end, and the files asked for."""
    (kind, asked), model = hub, f"someone/{tmp_path.name}"
    given = [
        word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")
    ]
    asked.clear()
    done = forks.grpo(tmp_path, *command, model, "--env", "math:sort", *given, kind=kind)
    return done, [path.rpartition("/")[2] for path in asked if f"/{model}/resolve/" in path]


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"rollout__max_tokens": 100_000}, "rollout.max_tokens is 100000"),
        ({"rollout__max_tokens": 4, "model__chat_template": "broken.jinja"}, "chat template"),
    ],
    ids=["positions", "template"],
)
@pytest.mark.parametrize("command", [TRAIN, VALIDATE], ids=lambda command: command[0])
def test_what_small_files_tell_is_refused_before_the_weights_are_downloaded(
    hub, tmp_path, command, settings, about
):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    done, files = used_from(hub, tmp_path, command, **settings)
    assert done.returncode
    assert about in done.stderr
    assert "config.json" in files
    assert not [name for name in files if name.endswith(".safetensors")]


def test_a_model_of_the_hub_is_downloaded_and_validated_whatever_another_run_would_start_from(hub, tmp_path):
    done, files = used_from(hub, tmp_path, VALIDATE, rollout__max_tokens=4, model__path="tiny")
    assert not done.returncode, done.stderr
    assert len([name for name in files if name.endswith(".safetensors")]) > 1


def test_a_model_is_downloaded_and_trained_and_checked_before_a_weight_that_was_lost_is_downloaded(
    hub, tmp_path
):
    done, files = used_from(hub, tmp_path, rollout__max_tokens=4)
    assert not done.returncode, done.stderr
    lost = next(name for name in files if name.endswith(".safetensors"))
    (downloaded,) = Path(forks.KINDS[hub[0]][0]["HF_HOME"]).rglob(f"*{tmp_path.name}/snapshots/*/{lost}")
    downloaded.unlink()
    done, files = used_from(hub, tmp_path, rollout__max_tokens=100_000)
    assert "rollout.max_tokens is 100000" in done.stderr
    assert not [name for name in files if name.endswith(".safetensors")]


@pytest.mark.parametrize("total", [20_000_000, None])
def test_a_download_shows_how_far_it_is(tmp_path, monkeypatch, total):
    monkeypatch.setattr(model_sources, "PACE", 0.01)
    (tmp_path / "older.whl").write_bytes(b"x" * 1000)
    (seen, told), continued = ([], []), threading.Event()

    def download():
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "a.whl").write_bytes(b"x" * 5_000_000)
        (tmp_path / "new" / "other.txt").write_bytes(b"x" * 7_000_000)
        assert continued.wait(30)
        return "there"

    def status(message, part=None):
        seen.append(threading.current_thread())
        told.append((message, part))
        continued.set()

    watched = model_sources.watched(download, tmp_path, status, "it", total=total, files="*.whl")
    assert asyncio.run(watched) == "there"
    assert told == [("fetching it, 5 of 20 MB", 0.25) if total else ("fetching it, 5 MB", None)]
    assert seen == [threading.current_thread()], "it belongs to the event loop"


def test_attention_keeps_its_soft_caps():
    """Without them the scores of Gemma 2, and all that follows, are another model's."""
    config = transformers.Gemma2Config(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=0.5,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    chosen = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter))
        chosen.load_state_dict(plain.state_dict())
        keep_softcapping(chosen)
        ids = torch.arange(12)[None]
        torch.testing.assert_close(chosen(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


def sharded(path):
    """Make a model whose weights are in several files."""
    directory = make_test_model(path, width=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="5KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.fixture(params=["one file", "shards"])
def two_formats(request, tmp_path):
    """A model whose directory holds its weights a second time under Mistral's names, and its shapes."""
    directory = (sharded if request.param == "shards" else functools.partial(make_test_model, width=16))(
        tmp_path
    )
    paths = sorted(directory.glob("*.safetensors"))
    shapes = {name: tuple(tensor.shape) for path in paths for name, tensor in load_file(path).items()}
    save_file({"layers.0.attention.wq.weight": torch.zeros(8, 8)}, directory / "consolidated.safetensors")
    return directory, shapes


def test_of_two_formats_in_a_directory_the_one_of_transformers_counts(two_formats):
    directory, shapes = two_formats
    assert {name: tuple(tensor.shape) for name, tensor in load_tensors(directory)} == shapes


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"weight_map": {"a": "b.safetensors"}}', None])
def test_shards_that_cannot_be_found_are_one_clear_error(tmp_path, said):
    if said is not None:
        (tmp_path / "model.safetensors.index.json").write_text(said)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model '.*safetensors") as raised:
        load_tensors(tmp_path)
    assert "\n" not in str(raised.value)
