"""Tests without a service: refused settings, and the requests to the service."""

import asyncio
import inspect
import json
import typing

import numpy as np
import pytest

import grpo_core as grpo
from grpo_core import losses
from grpo_core.app import launch
from grpo_core.app.make import make
from grpo_plugin_tinker.checks import service_loss
from grpo_plugin_tinker.model import HostedModel
from grpo_plugin_tinker.section import TinkerConfig

HERE = {"tinker": {"base_url": "http://127.0.0.1:1"}}


def configured(changes=(), model="tinker:some/model"):
    tables = {"tasks": {"sort": {"env": "math:sort"}}, "model": {"path": model}, **HERE, **dict(changes)}
    return launch.configure([tables], {})


def test_a_hosted_model_selects_its_engine_and_trainer():
    config, host = configured()
    make(config, host)
    assert (config.engine.name, config.trainer.name) == ("tinker", "tinker")
    assert config.trainer.options == {"base_model": "some/model"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"name": "gspo"}}, 'loss.name = "gspo" is not a loss of the service'),
        ({"loss": {"options": {"kl": {"coefficient": 0.1}}}}, "loss.options.kl = {'coefficient': 0.1}"),
        ({"loss": {"options": {"correction": "off"}}}, 'the service has "token_truncate"'),
        ({"loss": {"max_sequence_error": 2.0}}, "loss.max_sequence_error"),
        ({"optimizer": {"name": "muon"}}, "leave out \\[optimizer\\]"),
        ({"trainer": {"updates_per_step": 2}}, "trainer.updates_per_step = 2"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature = 0.7"),
        ({"rollout": {"stop": ["\n"]}}, "rollout.stop"),
        ({"validation": {"min_p": 0.1}}, "validation.min_p"),
        ({"engine": {"name": "local"}}, 'engine.name has to be "tinker", and is "local"'),
        ({"trainer": {"name": "torch"}}, 'trainer.name is "torch"; set it to "tinker"'),
        ({"validation": {"engine": {"name": "local"}}}, "validation.engine.name has to be"),
        ({"tinker": {"base_url": "http://x", "snapshots": 2}}, "at least 3 are sampled from"),
        ({"tinker": {}}, "the environment variable TINKER_API_KEY is not set"),
    ],
)
def test_what_the_service_cannot_do_is_said_before_anything_starts(changes, message, monkeypatch):
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(grpo.ConfigError, match=message):
        make(*configured(changes))


def test_a_wrong_key_is_refused_and_not_repeated(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "sk-secret")
    with pytest.raises(grpo.ConfigError, match="which begins with") as error:
        make(*configured())
    assert "secret" not in str(error.value)


def test_a_run_needs_the_name_of_the_model_at_the_service():
    changes = {"engine": {"name": "tinker"}, "trainer": {"name": "tinker"}}
    with pytest.raises(grpo.ConfigError, match=r"trainer\.options\.base_model is missing"):
        make(*configured(changes, model="tiny"))


def test_the_model_is_a_tokenizer_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    start = asyncio.run(HostedModel("org/model/variant", tokenizer=str(tmp_path)).start_model(None))
    assert (start.path, start.positions) == (str(tmp_path), 512)


def of_the_service(name, options, policy, generation, advantages):
    """The losses of Tinker's documentation, for each token."""
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    ratio = (policy - generation).exp()
    clipped = ratio.clamp(low, high)
    if name == "cispo":
        return -clipped.detach() * policy * advantages
    return -(ratio * advantages).minimum(clipped * advantages)


@pytest.mark.parametrize("proximal", ["recompute", "generation"])
@pytest.mark.parametrize("options", [{}, {"correction": {"cap": 1.1}, "clip_low": 0.05, "clip_high": 0.1}])
def test_the_services_loss_has_the_gradient_of_ours(proximal, options):
    torch = pytest.importorskip("torch")
    random = torch.Generator().manual_seed(0)
    generation, advantages = torch.randn(6, 9, generator=random), torch.randn(6, generator=random)
    start = generation + 0.2 * torch.randn(6, 9, generator=random)
    mask = torch.ones(6, 9)
    loss = configured()[1].function("loss", "core:grpo", **options)

    def gradient(loss_of):
        policy = start.clone().requires_grad_()
        loss_of(policy).backward()
        return policy.grad

    def ours(policy):
        inputs = losses.padded(
            policy_logprobs=policy,
            mask=mask,
            advantages=advantages,
            proximal_logprobs=start if proximal == "recompute" else generation,
            generation_logprobs=generation,
        )
        return losses.total(loss(inputs)[0], inputs)

    name, chosen = service_loss(options, proximal)

    def theirs(policy):
        return of_the_service(name, chosen, policy, generation, advantages[:, None] / mask.sum()).sum()

    assert torch.allclose(gradient(ours), gradient(theirs), atol=1e-6)


def row(prompt, ids, sampled, advantage, group=0, rollout=None):
    tokens = grpo.Tokens(
        ids=ids,
        sampled=sampled,
        logprobs=[-0.5 if each else 0.0 for each in sampled],
        versions=[0 if each else -1 for each in sampled],
    )
    return grpo.Row(prompt_ids=prompt, tokens=tokens, advantage=advantage, group=group, rollout=rollout)


def scored(rows, **options):
    pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
    from grpo_plugin_tinker.trainer import _scored

    return _scored(rows, grpo.TrainerSetup(), **options)


def test_only_sampled_tokens_are_trained_and_each_knows_its_place():
    (found,) = scored([row([1, 2, 3], [4, 5, 6, 7, 8], [True, True, False, True, False], 2.0)], means=False)
    inputs = {name: each.to_numpy() for name, each in found.datum.loss_fn_inputs.items()}
    assert found.datum.model_input.to_ints() == [1, 2, 3, 4, 5, 6]
    assert inputs["target_tokens"].tolist() == [2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(inputs["advantages"]).tolist() == [2, 3, 5] == found.indices.tolist()
    assert np.allclose(inputs["advantages"][found.indices], 2.0 / 3)
    assert inputs["logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, -0.5]


def test_a_service_that_takes_means_comes_to_the_same_sum():
    rows = [row([1] * 5, [2] * n, [True] * n, 1.0, rollout=n) for n in (1, 4, 7)]
    sums = [each.datum.loss_fn_inputs["advantages"].to_numpy() for each in scored(rows, means=False)]
    means = [each.datum.loss_fn_inputs["advantages"].to_numpy() for each in scored(rows, means=True)]
    assert sum(each.sum() for each in sums) == pytest.approx(1.0)
    for one, other in zip(sums, means, strict=True):
        assert np.allclose(one, other / len(other) / len(rows))


def test_a_checkpoint_without_weights_says_how_it_is_validated(tmp_path):
    pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
    from grpo_plugin_tinker.engine import TinkerEngine

    (tmp_path / "tinker.json").write_text('{"state": "tinker://model/weights/step2"}')
    with pytest.raises(grpo.ConfigError, match=r"weights are at the service.*validation\.every.*--resume"):
        TinkerEngine(grpo.EngineSetup(model=str(tmp_path)))


def test_the_sdk_takes_what_it_is_called_with():
    """The newest SDK is asked as well, by `make test-newest`: what is called exists, with these arguments."""
    pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
    from tinker import ServiceClient, types
    from tinker.lib.public_interfaces import SamplingClient, TrainingClient
    from tinker.lib.public_interfaces.rest_client import RestClient

    def takes(function, *given, **named):
        inspect.signature(function).bind(None, *given, **named)

    takes(ServiceClient.create_lora_training_client_async, "name", rank=8, seed=0)
    takes(ServiceClient.create_sampling_client_async, model_path="tinker://", retry_config=None)
    takes(ServiceClient.get_server_capabilities_async)
    takes(TrainingClient.forward_backward, [], "cispo", {})
    takes(TrainingClient.forward, [], "cross_entropy")
    takes(TrainingClient.optim_step, None)
    takes(TrainingClient.save_state, "name", 60)
    takes(TrainingClient.save_weights_for_sampler, "name", 60)
    takes(TrainingClient.load_state, "tinker://")
    takes(TrainingClient.load_state_with_optimizer, "tinker://")
    takes(SamplingClient.sample_async, None, 1, None)
    takes(RestClient.delete_checkpoint_from_tinker_path_async, "tinker://")
    assert {"cispo", "ppo", "cross_entropy"} <= set(typing.get_args(types.LossFnType))
    types.AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
    )
    types.SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, seed=0, stop=[2])


def test_the_section_has_a_place_for_each_server():
    with pytest.raises(grpo.ConfigError, match=r"tinker\.server"):
        configured({"tinker": {"server": "other"}})
    assert TinkerConfig().server == "tinker"
