"""The first gradient of an update: samples of another model, and what sampler and learner compute differently."""

import math

import numpy as np
import pytest
import torch

from engine.core.errors import RunError
from learner.backends.torch import TorchBackend
from learner.update import mini_batches
from tests.support.learner_inputs import changed, learner_config, random_group, tiny_policy
from tests.support.policy_updates import update_of, weights, with_a_broken_token, without_a_finite_logprob

STRICT = {"max_first_mismatch_nats": 1.0}
ANOTHER_MODEL = r"nats = 1 .* differ by 2 nats \(group 6: 2.5\): .* another model, tokenizer or vocabulary$"


def exact(policy, group_id, version=0, shift=0.0):
    """A group of `version` whose behaviour logprobs are those of `policy`, `shift` nats lower."""
    made = random_group(np.random.default_rng(group_id), group_id, version=version)
    logprobs = TorchBackend(policy, learner_config()).response_logprobs([made])
    made.samples[:] = [
        changed(sample, logprobs=logprobs[group_id, sample.index] - np.float32(shift)) for sample in made.samples
    ]
    return made


def stale(group_id):
    """A group without a token of the version that trains it, far from any model's logprobs."""
    made = random_group(np.random.default_rng(group_id), group_id, version=0)
    made.samples[:] = [changed(sample, logprobs=sample.logprobs - 5) for sample in made.samples]
    made.train_version = 1
    return made


def test_logprobs_of_another_vocabulary_are_found_at_the_first_groups_that_come_in():
    update, backend = update_of(learner=STRICT)
    with pytest.raises(RunError, match=ANOTHER_MODEL):
        update.add([exact(tiny_policy(), 4, shift=1.5), exact(tiny_policy(), 6, shift=2.5)])
    assert len(backend.accumulated) == 1


def test_logprobs_of_another_vocabulary_are_found_at_the_first_mini_batch():
    update, backend = update_of(learner=STRICT | {"mini_batches": 2})
    update.add([exact(tiny_policy(), 4, shift=2.0), exact(tiny_policy(), 6, shift=2.0)])
    before = weights(backend)
    with pytest.raises(RunError, match=r"differ by 2 nats"):
        update.take(0)
    assert len(backend.accumulated) == 1
    assert torch.equal(weights(backend), before)


def test_right_logprobs_old_ones_and_later_groups_are_no_mismatch():
    update, _ = update_of(learner=STRICT)
    update.add([stale(1)])  # no token of its own version: nothing to compare yet
    update.add([exact(tiny_policy(), 2, shift=0.5)])
    update.add([exact(tiny_policy(), 3, shift=5.0)])
    assert update.take(0)["skipped"] == 0.0


def in_order(first, second):
    """Version whose shuffle puts the first of two groups first."""
    return next(version for version in range(99) if mini_batches([first, second], 2, (0, version))[0] == [first])


def test_what_an_updates_own_steps_moved_is_no_mismatch():
    # Far over a nat after one such step.
    update, _ = update_of(learner=STRICT | {"mini_batches": 2}, optimizer={"lr": 1.0})
    first, second = stale(1), exact(tiny_policy(), 2)
    update.add([first, second])
    metrics = update.take(in_order(first, second))
    assert metrics["ratio_max"] > math.e
    assert "mismatch_nats" not in metrics


def test_the_mismatch_that_is_reported_is_that_before_the_updates_first_step():
    update, _ = update_of(learner={"mini_batches": 2})
    update.add([exact(tiny_policy(), 1, shift=0.25), exact(tiny_policy(), 2, shift=0.25)])
    metrics = update.take(0)
    assert metrics["mismatch_nats"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["mismatch_share"] == 1.0
    # The second mini-batch's tokens are in all else, moved by the first one's step.
    assert metrics["lag/0/tokens"] == 30.0
    assert abs(metrics["lag/0/kl_k1"] + 0.25) > 1e-3


def test_a_mini_batch_that_took_no_step_hides_no_mismatch():
    policy = with_a_broken_token()
    update, _ = update_of(policy, learner={"mini_batches": 2})
    first, second = without_a_finite_logprob(1), exact(policy, 2, shift=0.25)
    update.add([first, second])
    assert update.take(in_order(first, second))["mismatch_nats"] == pytest.approx(0.25, abs=1e-4)
