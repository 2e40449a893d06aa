"""The loss against a plain float64 reference, token by token, and its true token-mean over micro-batches."""

import math

import numpy as np
import pytest
import torch

from configs import Config
from configs.training import Learner, Loss
from learner.backends.torch import TorchBackend
from learner.losses import TokenSums, policy_loss
from tests.support.learner_inputs import random_group, tiny_policy

CONFIG = Loss()


def reference(logprobs, behaviour, advantages, entropy):
    """Sum of token losses and its gradient in logprob, by the formula, in Python floats."""
    loss, gradient, clipped = 0.0, [], 0
    for lp, b, a, h in zip(logprobs, behaviour, advantages, entropy, strict=True):
        ratio = math.exp(max(-20.0, min(20.0, lp - b)))
        inside = abs(lp - b) < 20.0
        bound = max(1 - CONFIG.clip_low, min(1 + CONFIG.clip_high, ratio))
        objective, slope = (ratio * a, ratio * a) if ratio * a <= bound * a else (bound * a, 0.0)
        if a < 0 and objective < CONFIG.dual_clip * a:
            objective, slope = CONFIG.dual_clip * a, 0.0
        clipped += slope == 0.0 and a != 0.0
        loss -= objective + CONFIG.entropy_weight * h
        gradient.append(-slope if inside else 0.0)
    return loss, gradient, clipped


def tokens(count=400, spread=1.5, seed=0):
    rng = np.random.default_rng(seed)
    behaviour = -rng.exponential(2.0, count)
    return behaviour + rng.normal(0.0, spread, count), behaviour, rng.normal(size=count), rng.exponential(1.0, count)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.5, 30.0])
def test_loss_and_gradient_are_those_of_the_formula(spread):
    values = tokens(spread=spread)
    logprobs, behaviour, advantages, entropy = (torch.tensor(value, dtype=torch.float64) for value in values)
    logprobs.requires_grad_()
    loss, sums = policy_loss(logprobs, behaviour, advantages, entropy, CONFIG)
    loss.backward()
    expected_loss, expected_gradient, expected_clipped = reference(*values)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad, expected_gradient, rtol=1e-12)
    assert sums.clipped == expected_clipped
    assert sums.loss == pytest.approx(expected_loss)


def test_negative_advantages_are_bounded_by_the_dual_clip():
    loss, sums = policy_loss(
        torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([-1.0]), torch.tensor([0.0]), CONFIG
    )
    assert loss.item() == pytest.approx(CONFIG.dual_clip)
    assert sums.clipped == 1


def test_positive_advantages_are_clipped_above_only():
    high, _ = policy_loss(torch.tensor([1.0]), torch.zeros(1), torch.ones(1), torch.zeros(1), CONFIG)
    low, _ = policy_loss(torch.tensor([-1.0]), torch.zeros(1), torch.ones(1), torch.zeros(1), CONFIG)
    assert high.item() == pytest.approx(-(1 + CONFIG.clip_high))
    assert low.item() == pytest.approx(-math.exp(-1.0))


def test_a_huge_logprob_difference_stays_finite():
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    loss, sums = policy_loss(logprobs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.zeros(2), CONFIG)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert sums.ratio_max == pytest.approx(math.exp(20.0), rel=1e-4)


def test_both_divergence_estimates_agree_with_the_exact_divergence():
    generator = torch.Generator().manual_seed(0)
    behaviour, learner = (torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(behaviour.exp(), 400_000, replacement=True, generator=generator)
    zeros = torch.zeros(drawn.numel(), dtype=torch.float64)
    _, sums = policy_loss(learner[drawn], behaviour[drawn], zeros, zeros, CONFIG)
    exact = (behaviour.exp() * (behaviour - learner)).sum().item()
    means = sums.means()
    assert means["kl_behaviour"] == pytest.approx(exact, rel=0.03)
    assert means["kl_behaviour_k3"] == pytest.approx(exact, rel=0.03)


def test_equal_policies_have_no_divergence_and_no_clipping():
    logprobs, _, advantages, entropy = (torch.tensor(value) for value in tokens())
    means = policy_loss(logprobs, logprobs.clone(), advantages, entropy, CONFIG)[1].means()
    assert (means["kl_behaviour"], means["kl_behaviour_k3"], means["clip_share"]) == (0.0, 0.0, 0.0)
    assert means["ratio_max"] == 1.0


def test_sums_of_parts_are_the_sum_of_the_whole():
    values = [torch.tensor(value) for value in tokens()]
    whole = policy_loss(*values, CONFIG)[1].means()
    parts = [policy_loss(*(value[cut] for value in values), CONFIG)[1] for cut in (slice(0, 7), slice(7, None))]
    assert sum(parts, TokenSums()).means() == pytest.approx(whole)


def gradient(micro_batch_tokens, parts, chunk_tokens=256):
    groups = [random_group(np.random.default_rng(n), n, lengths=(3, 7, n + 1)) for n in range(8)]
    config = Config(learner=Learner(micro_batch_tokens=micro_batch_tokens))
    backend = TorchBackend(tiny_policy(chunk_tokens=chunk_tokens), config)
    sums = sum((backend.accumulate(part)[0] for part in (groups[i::parts] for i in range(parts))), TokenSums())
    return backend._grads_N / sums.tokens


def test_the_gradient_is_the_same_in_one_or_many_micro_batches():
    one = gradient(4096, 1)
    assert one.norm() > 1e-3
    for micro_batch_tokens, parts in ((16, 1), (64, 1), (4096, 4), (32, 3)):
        torch.testing.assert_close(gradient(micro_batch_tokens, parts), one, rtol=1e-4, atol=1e-7)


def test_the_gradient_does_not_depend_on_the_logit_chunk():
    torch.testing.assert_close(gradient(4096, 1, chunk_tokens=5), gradient(4096, 1), rtol=1e-4, atol=1e-7)
