"""Where a model lies, and what is said when there is none."""

from __future__ import annotations

import pytest

from grpo_core.errors import ModelError
from grpo_core.models import local_directory


def test_a_directory_with_a_model_is_taken_as_it_is(tmp_path):
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert local_directory(str(tmp_path)) == str(tmp_path)


def test_a_directory_without_one_says_what_is_missing(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelError, match=r"there is no tokenizer_config\.json, no \*\.safetensors"):
        local_directory(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "nowhere", "a/b/c"])
def test_a_path_that_is_none(path):
    with pytest.raises(
        ModelError, match="there is no such directory; expected a transformers model directory"
    ):
        local_directory(path)


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ModelError, match=r"'no-one/nothing': there is no such directory here, and the hub did"
    ):
        local_directory("no-one/nothing")
