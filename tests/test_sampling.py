"""Sampling: a token is where the cumulative distribution crosses the row's own uniform."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_core.engines.local import sampling

SMALL, LARGE = 90, 5000
"""Vocabularies that are sampled flat and in two levels (5000 is not a multiple of the block)."""


def splitmix64(key: int, position: int) -> int:
    """The published algorithm in Python's integers."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64_of_seed_and_position() -> None:
    seeds = [0, 1, 12345, 2**63 + 5, 2**64 - 1, -7]
    counters = sampling.counters(seeds)
    for position in range(3):
        expected = [(splitmix64(splitmix64(seed, 0), position) >> 11) * 2.0**-53 for seed in seeds]
        assert sampling.next_uniforms(counters).tolist() == expected


def test_the_published_first_numbers_of_seed_zero() -> None:
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF
    assert splitmix64(0, 1) == 0x6E789E6AA1B965F4


def test_neighbouring_seeds_are_unrelated() -> None:
    counters = sampling.counters(range(4000))
    first, second = sampling.next_uniforms(counters), sampling.next_uniforms(counters)
    assert abs(float(first.mean()) - 0.5) < 0.02
    for a, b in ((first[1:], first[:-1]), (first, second), (first[1:], second[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.06


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [1, 2, SMALL, LARGE])
def test_evenly_spread_uniforms_give_each_token_its_share(vocabulary: int) -> None:
    n = 4096
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = sampling.sample(logits.repeat(n, 1), uniforms)
    expected = torch.log_softmax(logits, -1)
    counts = tokens.bincount(minlength=vocabulary)
    assert (counts - expected.exp() * n).abs().max() < 1.01
    assert (logprobs - expected[tokens]).abs().max() < 1e-5
    assert (tokens.diff() >= 0).all()


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(temperature: float) -> None:
    logits = torch.randn(50, SMALL, generator=torch.Generator().manual_seed(1))
    uniforms = sampling.next_uniforms(sampling.counters(range(50)))
    tokens, logprobs = sampling.sample(logits.clone(), uniforms, torch.full((50,), 1 / temperature))
    expected = torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-5


@settings(max_examples=60)
@given(data=st.data(), vocabulary=st.sampled_from([7, SMALL, LARGE]))
def test_a_token_of_probability_0_is_never_sampled(data: st.DataObject, vocabulary: int) -> None:
    possible = data.draw(st.sets(st.integers(0, vocabulary - 1), min_size=1, max_size=5))
    logits = torch.full((1, vocabulary), -math.inf)
    for token in possible:
        logits[0, token] = data.draw(st.floats(-80, 80, width=32))
    below_one = math.nextafter(1, 0)
    uniform = data.draw(st.sampled_from([0.0, below_one]) | st.floats(0, below_one))
    (token,), (logprob,) = sampling.sample(logits, torch.tensor([uniform], dtype=torch.float64))
    assert int(token) in possible
    assert math.isfinite(logprob)


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
def test_rows_that_hold_no_distribution_say_so(vocabulary: int) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[1, 3] = math.nan
    tokens, logprobs = sampling.sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert math.isfinite(logprobs[0])
    assert math.isnan(logprobs[1])
    assert 0 <= int(tokens[1]) < vocabulary


@pytest.mark.long
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.001, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_distributions_are_cut_as_by_the_warpers_of_transformers(
    seed, top_k, top_p, min_p, temperature
) -> None:
    warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or SMALL)]
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)]
    logits = torch.randn(3, SMALL, generator=torch.Generator().manual_seed(seed)) * 3
    expected = logits.clone()
    for warper in warpers:
        expected = warper(None, expected)
    cuts = torch.tensor([sampling.truncation(top_k=top_k, top_p=top_p, min_p=min_p)] * 3, dtype=torch.float64)
    found = sampling.truncate_(logits / temperature, cuts)
    assert torch.equal(found.isinf(), expected.isinf())
    tokens, logprobs = sampling.sample(
        logits.clone(),
        sampling.next_uniforms(sampling.counters(range(3))),
        torch.full((3,), 1 / temperature),
        cuts,
    )
    known = torch.log_softmax(expected, -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - known).abs().max() < 1e-5


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
def test_a_row_that_is_not_cut_is_the_same_bit_for_bit_next_to_one_that_is(vocabulary: int) -> None:
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(2))
    uniforms = sampling.next_uniforms(sampling.counters(range(64)))
    cuts = torch.zeros(64, 3, dtype=torch.float64)
    cuts[::2] = torch.tensor(sampling.truncation(top_k=2, top_p=1.0, min_p=0.0), dtype=torch.float64)
    mixed, whole = (sampling.sample(logits.clone(), uniforms, None, each) for each in (cuts, None))
    assert all(torch.equal(one[1::2], other[1::2]) for one, other in zip(mixed, whole, strict=True))
    assert (logits.argsort(descending=True)[::2, :2] == mixed[0][::2, None]).any(1).all()


def test_greedy_takes_the_likeliest_and_its_logprob_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (token,), (logprob,) = sampling.greedy(logits)
    assert int(token) == 1
    assert float(logprob) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))
