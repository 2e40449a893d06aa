"""Chunked logprobs against the plain ones, and the promise that the whole batch's logits never exist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.logprobs import CACHE_ROWS, chunked_logprobs, rows_together
from tests.support.live_memory import LiveMemory

R, D, V = 37, 16, 101


def inputs(dtype=torch.float64, rows=R, vocabulary=V):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, D, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


def plain(hidden, weight, targets, temperature):
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_the_plain_ones(chunk_tokens, temperature):
    hidden, weight, targets = inputs(torch.float32)
    outputs = chunked_logprobs(hidden, weight, targets, temperature, chunk_tokens)
    expected = plain(hidden, weight, targets, temperature)
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(R, generator=generator) for _ in range(2)]
    gradients = []
    for pair in (outputs, expected):
        total = sum((value * factor).sum() for value, factor in zip(pair, factors, strict=True))
        gradients.append(torch.autograd.grad(total, (hidden, weight)))
    for ours, theirs in zip((*outputs, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(200, 1000), (3200, 1000), (200, 16_000), (3200, 16_000)])
def test_peak_memory_has_no_term_in_tokens_times_vocabulary(dtype, rows, vocabulary):
    chunk_tokens, size = 16, dtype.itemsize
    hidden, weight, targets = inputs(dtype, rows, vocabulary)
    with LiveMemory() as memory:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, 0.9, chunk_tokens)
        (logprobs.sum() + entropy.sum()).backward()
    logits = chunk_tokens * vocabulary * size + 4 * CACHE_ROWS * vocabulary * 4
    # The weights' gradient, one chunk's share of it and its float32 sum; the hidden states' gradient; 10 floats a row.
    gradients = vocabulary * D * (2 * size + 4 + 4) + rows * D * size + 10 * rows * 4
    assert memory.peak_bytes <= logits + gradients
    if rows == 3200:
        assert logits + gradients < 0.5 * rows * vocabulary * size


def test_without_response_tokens_there_is_nothing_to_learn():
    hidden, weight, targets = inputs(torch.float32, rows=0)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0, R)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.numel() == 0
    assert not weight.grad.any()


def test_bfloat16_logits_are_reduced_in_float32():
    hidden, weight, targets = inputs(torch.float32)
    exact = plain(hidden, weight, targets, 1.0)
    ours = chunked_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, 1.0, 8)
    assert ours[0].dtype == torch.float32
    assert (ours[0] - exact[0]).abs().max() < 0.1
    assert (ours[1] - exact[1]).abs().max() < 0.05


def test_the_weights_gradient_is_summed_in_float32_over_chunks():
    # Every row adds the same: a bfloat16 sum stands still where a term is under half of its last digit.
    rows = 400
    hidden, weight, _ = inputs(torch.bfloat16, rows=1)
    targets = torch.zeros(rows, dtype=torch.long)
    chunked_logprobs(hidden.detach().expand(rows, D), weight, targets, 1.0, 1)[0].sum().backward()
    exact = weight.detach().double().requires_grad_()
    plain(hidden.detach().double().expand(rows, D), exact, targets, 1.0)[0].sum().backward()
    assert (weight.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_a_gpu_takes_more_rows_at_once_than_a_cpus_cache_holds():
    assert rows_together(torch.device("cpu")) == CACHE_ROWS < rows_together(torch.device("cuda"))


class Products(TorchDispatchMode):
    """Records the shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize(("chunk_tokens", "times"), [(R, 1), (R - 1, 2)])
def test_logits_are_computed_once_where_one_chunk_holds_all(chunk_tokens, times):
    hidden, weight, targets = inputs(torch.float32)
    with Products() as products:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, 0.6, chunk_tokens)
        (logprobs.sum() + entropy.sum()).backward()
    assert sum(rows for rows, columns in products.shapes if columns == V) == times * R


def test_a_frozen_head_costs_no_gradient():
    hidden, weight, targets = inputs(torch.float32)
    expected = torch.autograd.grad(chunked_logprobs(hidden, weight, targets, 1.0, R)[0].sum(), hidden)
    with Products() as products:
        chunked_logprobs(hidden, weight.detach(), targets, 1.0, R)[0].sum().backward()
    assert (V, D) not in products.shapes
    torch.testing.assert_close(hidden.grad, expected[0], rtol=0.0, atol=0.0)
