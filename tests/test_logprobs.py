"""Fused logprobs equal log_softmax in a fraction of the memory."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.training import logprobs as fused
from grpo_core.training.logprobs import token_logprobs


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make(n: int, d: int, v: int, dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> tuple:
    chance = torch.Generator().manual_seed(seed)
    hidden, weight, offset = (
        torch.randn(*shape, generator=chance, dtype=dtype) for shape in ((n, d), (v, d), (v,))
    )
    targets = torch.randint(v, (n,), generator=chance)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        targets,
        offset.requires_grad_() if bias else None,
    )


def cases(rows):
    """Run a test on shapes of up to ``rows`` rows, with and without the memory that keeps probabilities."""
    shapes = given(
        n=st.integers(1, rows),
        v=st.integers(1, 30),
        chunk=st.integers(1, 50),
        bias=st.booleans(),
        temperature=st.sampled_from([1.0, 0.7, 2.0]),
        seed=st.integers(0, 99),
    )
    kept = pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["computed again", "kept"])
    return lambda test: kept(settings(max_examples=25)(shapes(test)))


@pytest.mark.long
@cases(rows=40)
def test_values_and_gradients_are_those_of_log_softmax(
    keep_bytes: int, n: int, v: int, chunk: int, bias: bool, temperature: float, seed: int
) -> None:
    hidden, weight, targets, offset = make(n, 7, v, torch.float64, bias=bias, seed=seed)
    learned = [each for each in (hidden, weight, offset) if each is not None]
    upstream = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    wanted, wanted_entropy = naive(hidden, weight, targets, offset, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KEEP_BYTES", keep_bytes)
        found, entropy = token_logprobs(
            hidden, weight, targets, bias=offset, temperature=temperature, chunk=chunk
        )
        found_gradients = torch.autograd.grad(found @ upstream, learned)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, wanted_entropy.detach())
    torch.testing.assert_close(found_gradients, torch.autograd.grad(wanted @ upstream, learned))
    assert not entropy.requires_grad


@pytest.mark.long
@cases(rows=20)
def test_the_gradient_of_the_entropy_is_that_of_log_softmax(
    keep_bytes: int, n: int, v: int, chunk: int, bias: bool, temperature: float, seed: int
) -> None:
    hidden, weight, targets, offset = make(n, 7, v, torch.float64, bias=bias, seed=seed)
    learned = [each for each in (hidden, weight, offset) if each is not None]
    chance = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, dtype=torch.float64, generator=chance) for _ in range(2))
    wanted, wanted_entropy = naive(hidden, weight, targets, offset, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KEEP_BYTES", keep_bytes)
        found, entropy = token_logprobs(
            hidden, weight, targets, bias=offset, temperature=temperature, chunk=chunk, entropy_gradient=True
        )
        found_gradients = torch.autograd.grad(found @ a + entropy @ b, learned)
    torch.testing.assert_close(entropy, wanted_entropy)
    torch.testing.assert_close(found_gradients, torch.autograd.grad(wanted @ a + wanted_entropy @ b, learned))


def test_the_entropy_of_a_certain_distribution_has_a_finite_gradient() -> None:
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    _, entropy = token_logprobs(hidden, weight, torch.tensor([0]), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert entropy.item() == 0
    assert not gradient.any()


def test_float32_logprobs_are_right_to_a_millionth() -> None:
    hidden, weight, targets, _ = make(64, 32, 500, torch.float32)
    weight = (weight.detach() * 0.1).requires_grad_()
    wanted, _ = naive(hidden.double(), weight.double(), targets, None, 1.0)
    found, _ = token_logprobs(hidden, weight, targets, chunk=10)
    assert (found - wanted).abs().max() < 2e-6


def test_the_same_pass_can_be_differentiated_twice() -> None:
    hidden, weight, targets, _ = make(8, 4, 6, torch.float64)
    found, _ = token_logprobs(hidden, weight, targets)
    first = torch.autograd.grad(found.sum(), weight, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(found.sum(), weight))


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, targets, _ = make(8, 4, 6, torch.float64)
    weight.requires_grad_(False)
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["computed again", "kept"])
def test_in_bfloat16_the_factors_are_rounded_and_the_sums_are_not(
    keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "KEEP_BYTES", keep_bytes)
    hidden, weight, targets, _ = make(200, 32, 50, torch.float32)
    with torch.no_grad():
        hidden, weight = (factor.bfloat16().float().requires_grad_() for factor in (hidden, weight))
    exact, _ = token_logprobs(hidden, weight, targets, temperature=0.7)
    unrounded_hidden = (hidden.detach() * (1 + 1e-4)).requires_grad_()
    fast, _ = token_logprobs(unrounded_hidden, weight, targets, temperature=0.7, product_dtype=torch.bfloat16)
    assert torch.equal(exact, fast)
    for wanted, found in zip(
        torch.autograd.grad(exact.sum(), (hidden, weight)),
        torch.autograd.grad(fast.sum(), (unrounded_hidden, weight)),
        strict=True,
    ):
        assert (wanted - found).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["computed again", "kept"])
def test_in_bfloat16_the_gradient_of_each_token_is_that_of_float64_however_sure_it_is(
    monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    """In bfloat16 a probability of 0.999 is 1, in float32 one of 1 - 1e-8: nothing would be left of 1 - p."""
    monkeypatch.setattr(fused, "KEEP_BYTES", keep_bytes)
    n, d, v = 512, 128, 2048
    chance = torch.Generator().manual_seed(0)
    weight = (torch.randn(v, d, generator=chance) / d**0.5).bfloat16().float()
    targets = torch.randint(v, (n,), generator=chance)
    surer = torch.linspace(0.2, 3.2, n)[:, None] * weight[targets] * d**0.5
    hidden = (0.7 * torch.randn(n, d, generator=chance) + surer).bfloat16().float().requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    wanted, _ = token_logprobs(exact, weight.double(), targets)
    found, _ = token_logprobs(hidden, weight, targets, product_dtype=torch.bfloat16)
    wanted.sum().backward()
    found.sum().backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    error = (hidden.grad - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    left = -wanted.detach().expm1()
    for high, low in pairwise([1, 0.5, 0.1, 0.01, 2e-3, 5e-4, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 0]):
        inside = error[(left > low) & (left <= high)]
        assert len(inside) > 10
        assert inside.max() <= 0.03, f"1 - p from {low} to {high}: {float(inside.max()):.2f}"


def test_scoring_no_position_is_allowed() -> None:
    hidden, weight, targets, _ = make(0, 4, 6, torch.float32)
    found, _ = token_logprobs(hidden, weight, targets)
    found.sum().backward()
    assert found.shape == (0,)


@pytest.mark.parametrize("given", [16, None])
def test_no_tensor_of_all_logits_is_ever_made(given: int | None) -> None:
    n, v, chunk = 512, 1000, 16 if given else 20
    hidden, weight, targets, _ = make(n, 8, v, torch.float32)
    with pytest.MonkeyPatch.context() as patch, _LargestTensor() as largest:
        patch.setattr(fused, "KEEP_BYTES", 0)
        patch.setattr(fused, "CHUNK_BYTES", 20 * v * 4)
        token_logprobs(hidden, weight, targets, chunk=given)[0].sum().backward()
    assert chunk * v <= largest.numel <= 2 * chunk * v


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Observes the elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return result
