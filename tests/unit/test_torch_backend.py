"""The torch backend: the optimizer's arithmetic and skipped steps."""

import numpy as np
import pytest
import torch

from configs import Config
from configs.training import Optimizer
from engine.wire import TrainSample
from learner.backends.torch import TorchBackend
from tests.support.learner_inputs import random_group, tiny_policy


def backend_of(policy, **optimizer):
    return TorchBackend(policy, Config(optimizer=Optimizer(**optimizer)))


def weights(backend):
    return {name: tensor.clone() for name, tensor in backend.weights()}


def poisoned(group):
    sample = group.samples[0]
    bad = TrainSample(0, sample.token_ids, sample.logprobs, sample.spans, 1.0, float("nan"))
    group.samples[0] = bad
    return group


def test_a_step_is_that_of_plain_adamw_on_the_clipped_token_mean_gradient():
    backend = backend_of(tiny_policy(), lr=1e-2, max_grad_norm=0.5, weight_decay=0.1)
    reference = {name: tensor.detach().clone().requires_grad_() for name, tensor in backend.policy.named_parameters()}
    plain = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(3):
        sums, _ = backend.accumulate([random_group(np.random.default_rng(step))])
        start = 0
        for tensor in reference.values():
            tensor.grad = backend._grads_N[start : start + tensor.numel()].view_as(tensor) / sums.tokens
            start += tensor.numel()
        norm = torch.nn.utils.clip_grad_norm_(reference.values(), 0.5)
        plain.step()
        report = backend.optimizer_step(sums.tokens)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for name, tensor in backend.policy.named_parameters():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-4, atol=1e-6, msg=name)


def test_updates_below_bfloat16_add_up_in_the_master_copy():
    backend = backend_of(tiny_policy(dtype=torch.bfloat16), lr=1e-5)
    before = weights(backend)["model.norm.weight"]
    changed_after = []
    for step in range(200):
        backend._grads_N.fill_(1.0)
        backend.optimizer_step(1)
        if not torch.equal(weights(backend)["model.norm.weight"], before):
            changed_after.append(step)
    # 1 - 1e-5 rounds to 1 in bfloat16 (spacing 2^-8 below 1): only the sum of about 200 steps shows.
    assert changed_after
    assert changed_after[0] > 100


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_forgotten():
    backend = backend_of(tiny_policy(), lr=1e-2)
    before = weights(backend)
    sums, _ = backend.accumulate([poisoned(random_group(np.random.default_rng(0)))])
    assert backend.optimizer_step(sums.tokens).is_skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    sums, _ = backend.accumulate([random_group(np.random.default_rng(1))])
    report = backend.optimizer_step(sums.tokens)
    assert not report.is_skipped
    assert np.isfinite(report.grad_norm)
    assert all(torch.isfinite(tensor).all() for _, tensor in backend.weights())


def test_warm_up_raises_the_learning_rate_linearly():
    backend = backend_of(tiny_policy(), lr=1.0, warmup_steps=4)
    rates = []
    for _ in range(6):
        backend._grads_N.fill_(1e-3)
        rates.append(backend.optimizer_step(1).lr)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_groups_without_samples_add_nothing_to_a_gradient():
    rng = np.random.default_rng(0)
    empty, full = random_group(rng, 0, lengths=()), random_group(rng, 1)
    beside, alone = backend_of(tiny_policy()), backend_of(tiny_policy())
    assert beside.accumulate([empty, full, empty]) == alone.accumulate([full])
    assert torch.equal(beside._grads_N, alone._grads_N)
    assert beside.accumulate([empty])[0].tokens == 0
    assert torch.equal(beside._grads_N, alone._grads_N)
