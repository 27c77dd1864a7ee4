"""Models are found where they lie; the message says so when there is none."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from grpo_core.errors import ModelError
from grpo_core.models import keep_softcapping, local_directory


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
        ModelError, match=r"'no-one/nothing': there is no such directory here, and the hub did"
    ):
        local_directory("no-one/nothing")


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
