"""Advantages, weights and masks of single tokens: what reaches the loss, and what a masked token is."""

import pickle

import numpy as np
import pytest
import torch

from configs.loss import Loss
from configs.training import Learner
from engine.wire import Span
from learner.backends.torch import TorchBackend
from learner.gradient import Gradient, MicroBatchLoss, micro_batches
from learner.packing import pack, split_groups
from learner.ranked import Accumulate
from learner.sharing import share_out
from tests.support.learner_inputs import changed, learner_config, random_group, tiny_policy, with_token_values
from tests.support.loss_configs import LOSSES

CPU = torch.device("cpu")


def floats(*values):
    return np.array(values, dtype=np.float32)


def group(lengths=(3, 2), version=5, **changes):
    """Prompt [7, 8] and responses; `changes` replace fields of the first."""
    made = random_group(np.random.default_rng(0), 4, prompt=[7, 8], lengths=lengths, version=version)
    made.samples[0] = changed(made.samples[0], **changes)
    return made


def test_without_values_of_its_own_every_token_has_its_responses_advantage_and_weight_one():
    batch = pack(split_groups([group(advantage=2.5)]))
    assert batch.advantages_R.tolist()[:3] == [2.5] * 3
    assert batch.weights_R.tolist() == [1.0] * 5


def test_values_of_tokens_come_in_place_of_the_responses():
    made = group(token_advantages=floats(1, -2, 0), token_weights=floats(0.5, 3, 1), advantage=9.0)
    batch = pack(split_groups([made]))
    assert batch.advantages_R.tolist()[:3] == [1.0, -2.0, 0.0]
    assert batch.advantages_R[3] == batch.advantages_R[4] == pytest.approx(made.samples[1].advantage)
    assert batch.weights_R.tolist() == [0.5, 3.0, 1.0, 1.0, 1.0]


def test_a_masked_token_is_seen_by_those_after_it_and_never_predicted():
    made = group(
        token_advantages=floats(1, 2, 3),
        token_weights=floats(1, 0, 2),
        spans=[Span(3, 0, 1), Span(4, 1, 2), Span(5, 2, 3)],
    )
    whole, batch = pack(split_groups([group()])), pack(split_groups([made]))
    assert torch.equal(batch.input_ids_T, whole.input_ids_T)
    assert torch.equal(batch.position_ids_T, whole.position_ids_T)
    kept = [0, 2, 3, 4]
    assert torch.equal(batch.predictors_R, whole.predictors_R[kept])
    assert torch.equal(batch.targets_R, whole.targets_R[kept])
    assert torch.equal(batch.behaviour_logprobs_R, whole.behaviour_logprobs_R[kept])
    assert batch.advantages_R.tolist()[:2] == [1.0, 3.0]
    assert batch.weights_R.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert batch.staleness_R.tolist() == [2, 0, 0, 0]
    assert batch.sequence_R.tolist() == [0, 0, 1, 1]
    assert batch.lengths_S.tolist() == [2, 2]


def loss_of(made, config):
    policy = tiny_policy()
    segments = [segment for part in micro_batches(made, Learner(micro_batch_tokens=4096)) for segment in part]
    reference = tiny_policy(seed=1) if config.kl.weight else None
    loss, part = MicroBatchLoss(policy, reference, learner_config(loss=config), CPU)(segments)
    loss.backward()
    return loss.item(), part, [parameter.grad for parameter in policy.parameters()]


@pytest.mark.parametrize("config", list(LOSSES.values()), ids=list(LOSSES))
def test_a_response_that_is_masked_from_end_to_end_is_as_if_it_was_not_there(config):
    masked = group(lengths=(3, 2, 6), token_weights=floats(0, 0, 0))
    absent = group(lengths=(3, 2, 6))
    del absent.samples[0]
    ours, theirs = loss_of([masked], config), loss_of([absent], config)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert all(torch.equal(mine, other) for mine, other in zip(ours[2], theirs[2], strict=True))


@pytest.mark.parametrize("config", list(LOSSES.values()), ids=list(LOSSES))
def test_what_a_masked_token_carries_changes_nothing(config):
    plain = group(lengths=(5, 2), token_weights=floats(1, 0, 1, 0, 2), token_advantages=floats(1, 2, -1, 1, 2))
    other = group(
        lengths=(5, 2), token_weights=floats(1, 0, 1, 0, 2), token_advantages=floats(1, -9, -1, 50, 2),
        logprobs=plain.samples[0].logprobs - floats(0, 30, 0, 90, 0),
        spans=[Span(5, 0, 1), Span(1, 1, 2), Span(5, 2, 5)],
    )  # fmt: skip
    ours, theirs = loss_of([plain], config), loss_of([other], config)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert all(torch.equal(mine, other) for mine, other in zip(ours[2], theirs[2], strict=True))


def test_values_of_tokens_reach_every_rank():
    made = [with_token_values(np.random.default_rng(n), random_group(np.random.default_rng(n), n)) for n in range(5)]

    def accumulated(groups):
        backend = TorchBackend(tiny_policy(), learner_config(loss=Loss(aggregation="sequence_mean")))
        return backend.accumulate(groups), backend._grads_N

    whole, gradient = accumulated(made)
    commands = [Accumulate(share, 1, None) for share in share_out(made, 2)]
    parts = [accumulated(pickle.loads(pickle.dumps(command)).groups) for command in commands]
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient, rtol=1e-4, atol=1e-5)
    added = sum((part for part, _ in parts), Gradient())
    assert added.sums.normaliser == whole.sums.normaliser
    assert added.sums.means() == pytest.approx(whole.sums.means(), rel=1e-4)
