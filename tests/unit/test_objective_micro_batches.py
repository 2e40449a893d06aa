"""The step's gradient through a model: the same whatever the micro-batches."""

import numpy as np
import pytest
import torch

from configs.loss import Loss
from engine.wire import Span
from learner.backends.torch import TorchBackend
from learner.gradient import Gradient
from tests.support.learner_inputs import learner_config, random_group, tiny_policy, with_token_values

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
    # Half of the groups with values of their own for each token.
    return [with_token_values(np.random.default_rng(n), group) if n % 2 else group for n, group in enumerate(made)]


def gradient(loss, micro_batch_tokens, parts, chunk_tokens=256):
    config = learner_config(loss=loss, learner={"micro_batch_tokens": micro_batch_tokens})
    backend = TorchBackend(tiny_policy(chunk_tokens=chunk_tokens), config)
    whole = groups()
    sums = sum((backend.accumulate(part) for part in (whole[i::parts] for i in range(parts))), Gradient()).sums
    return backend._grads_N / sums.normaliser, sums


@pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))
def test_the_gradient_is_the_same_in_one_or_many_micro_batches(loss):
    one, sums = gradient(loss, 4096, 1)
    assert one.norm() > 1e-2
    for micro_batch_tokens, parts in ((16, 1), (64, 1), (4096, 4), (32, 3)):
        other, other_sums = gradient(loss, micro_batch_tokens, parts)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        assert other_sums.normaliser == pytest.approx(sums.normaliser, rel=1e-12)
        assert other_sums.means() == pytest.approx(sums.means(), rel=1e-3, abs=1e-5)


def test_the_gradient_does_not_depend_on_the_logit_chunk():
    one, other = gradient(Loss(), 4096, 1)[0], gradient(Loss(), 4096, 1, chunk_tokens=5)[0]
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_the_step_is_divided_by_the_normaliser():
    rng = np.random.default_rng(0)
    backend = TorchBackend(tiny_policy(), learner_config(loss=LOSSES["sequence_mean"]))
    sums = backend.accumulate([random_group(rng, lengths=(4, 9))]).sums
    assert (sums.normaliser, sums.tokens) == (2.0, 13)
    norm = backend._grads_N.norm().item()
    assert backend.optimizer_step(sums.normaliser).grad_norm == pytest.approx(norm / 2)
