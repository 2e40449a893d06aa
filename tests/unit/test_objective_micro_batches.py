"""The step's gradient through a model: the same whatever the micro-batches; and the reference model."""

import copy

import numpy as np
import pytest
import torch

from configs import Config
from configs.loss import Loss
from configs.training import Learner
from engine.wire import Span
from learner.backends.torch import TorchBackend
from learner.objectives import TokenSums
from tests.support.learner_inputs import random_group, tiny_policy

LOSSES = {
    "token_mean": Loss(),
    "sequence_mean": Loss(aggregation="sequence_mean"),
    "constant": Loss(aggregation="constant", constant_tokens=16),
    "gspo": Loss(objective="gspo", clip_low=0.5, clip_high=2.0, aggregation="sequence_mean"),
    "decoupled": Loss(objective="decoupled"),
    "sequence weights": Loss(objective="reinforce", mismatch={"rule": "tis", "level": "sequence", "cap": 4.0}),
}


def groups():
    made = [random_group(np.random.default_rng(n), n, lengths=(3, 7, n + 1), version=n % 3) for n in range(8)]
    for group in made:
        for sample in group.samples:
            sample.spans[:] = [Span(0, 0, sample.token_ids.size)]
            # Near the learner's own, so that few ratios are cut.
            sample.logprobs[:] = -4.6
    return made


def gradient(loss, micro_batch_tokens, parts, chunk_tokens=256):
    config = Config(
        loss=loss, learner=Learner(micro_batch_tokens=micro_batch_tokens, logprob_chunk_tokens=chunk_tokens)
    )
    backend = TorchBackend(tiny_policy(), config)
    whole = groups()
    sums = sum((backend.accumulate(part)[0] for part in (whole[i::parts] for i in range(parts))), TokenSums())
    return backend._grads_N / sums.normaliser, sums


@pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))
def test_the_gradient_is_the_same_in_one_or_many_micro_batches(loss):
    one, sums = gradient(loss, 4096, 1)
    assert one.norm() > 1e-3
    for micro_batch_tokens, parts in ((16, 1), (64, 1), (4096, 4), (32, 3)):
        other, other_sums = gradient(loss, micro_batch_tokens, parts)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)
        assert other_sums.normaliser == sums.normaliser
        assert other_sums.means() == pytest.approx(sums.means(), rel=1e-3, abs=1e-5)


def test_the_gradient_does_not_depend_on_the_logit_chunk():
    one, other = gradient(Loss(), 4096, 1)[0], gradient(Loss(), 4096, 1, chunk_tokens=5)[0]
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)


def test_the_step_is_divided_by_the_normaliser():
    rng = np.random.default_rng(0)
    config = Config(loss=LOSSES["sequence_mean"])
    backend = TorchBackend(tiny_policy(), config)
    sums, _ = backend.accumulate([random_group(rng, lengths=(4, 9))])
    assert (sums.normaliser, sums.tokens) == (2.0, 13)
    norm = backend._grads_N.norm().item()
    assert backend.optimizer_step(sums.normaliser).grad_norm == pytest.approx(norm / 2)


def test_the_penalty_is_the_distance_to_the_model_as_it_was_given():
    group = random_group(np.random.default_rng(0))
    model = tiny_policy()
    backend = TorchBackend(copy.deepcopy(model), Config(loss=Loss(kl={"weight": 1.0})))
    assert backend.accumulate([group])[0].means()["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    backend._grads_N.zero_()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.02)
    assert backend.accumulate([group])[0].means()["kl_reference"] > 1e-3
    for kept, given in zip(backend._reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(kept, given)
        assert kept.grad is None


def test_without_a_penalty_there_is_no_reference():
    assert TorchBackend(tiny_policy(), Config())._reference is None
