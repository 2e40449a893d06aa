"""Micro-batches add up to one gradient, fit the budget, and name the groups that are not what they should be."""

import numpy as np
import pytest
import torch

from configs.training import Learner
from engine.wire import Span, TrainSample
from learner.backends.torch import TorchBackend
from learner.gradient import Gradient, GroupReport, MicroBatchLoss, micro_batches
from tests.support.learner_inputs import learner_config, random_group, tiny_policy

CPU = torch.device("cpu")


def groups(count=8):
    return [random_group(np.random.default_rng(n), n, lengths=(3, 7, n + 1)) for n in range(count)]


@pytest.mark.parametrize("max_tokens", [24, 40, 100, 1000])
def test_a_micro_batch_never_exceeds_the_budget(max_tokens):
    made = [random_group(np.random.default_rng(n), n, prompt=[5, 6, 7], lengths=(21, 2, 9, 9)) for n in range(5)]
    batches = micro_batches(made, Learner(micro_batch_tokens=max_tokens))
    assert max(sum(segment.num_tokens for segment in batch) for batch in batches) <= max_tokens
    packed = [sample for batch in batches for segment in batch for sample in segment.samples]
    assert sorted(map(id, packed)) == sorted(id(sample) for group in made for sample in group.samples)


def report_of(policy, made):
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    return MicroBatchLoss(policy, None, learner_config(), CPU)(segments)[1].groups


def test_a_report_says_how_far_tokens_of_the_learners_own_version_are_from_its_logprobs():
    policy = tiny_policy()
    old_and_own = random_group(np.random.default_rng(0), 4, lengths=(5, 3), version=6)
    [segments] = micro_batches([old_and_own], Learner(micro_batch_tokens=4096))
    exact = MicroBatchLoss(policy, None, learner_config(), CPU).response_logprobs(segments)
    first = exact[4, 0] - np.array([9.0, 9.0, 0.5, 0.25, 0.0], dtype=np.float32)
    spans = [[Span(5, 0, 2), Span(6, 2, 5)], [Span(5, 0, 3)]]
    old_and_own.samples[:] = [
        TrainSample(sample.index, sample.token_ids, logprobs, its_spans, 1.0, 0.5)
        for sample, logprobs, its_spans in zip(old_and_own.samples, (first, exact[4, 1]), spans, strict=True)
    ]
    reports = report_of(policy, [old_and_own, random_group(np.random.default_rng(1), 5, lengths=())])
    assert reports.keys() == {4}
    assert (reports[4].is_finite, reports[4].own_tokens) == (True, 3)
    assert reports[4].mismatch == pytest.approx(0.75, abs=1e-5)


def test_only_the_group_whose_logprobs_are_not_finite_is_reported_as_such():
    # Different lengths, so that segments are padded, and the broken one comes first in the row.
    made = [random_group(np.random.default_rng(n), n, prompt=[5 + n], lengths=(3, 9 - n)) for n in range(3)]
    made[0].prompt_token_ids[:] = 2
    policy = tiny_policy(tied=False)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[2] = torch.nan  # a token of group 0 alone
    assert {key: report.is_finite for key, report in report_of(policy, made).items()} == {0: False, 1: True, 2: True}


def test_parts_of_a_group_add_up():
    parts = [
        Gradient(packed_tokens=5, groups={1: GroupReport(True, 2, 0.5)}),
        Gradient(packed_tokens=7, groups={1: GroupReport(False, 3, 0.25), 2: GroupReport()}),
    ]
    whole = sum(parts, Gradient())
    assert whole.packed_tokens == 12
    assert whole.groups == {1: GroupReport(False, 5, 0.75), 2: GroupReport()}
    assert parts[0].groups == {1: GroupReport(True, 2, 0.5)}


def test_logprobs_of_responses_are_keyed_by_group_and_sample_whatever_the_packing():
    made = groups(4)
    backends = [
        TorchBackend(tiny_policy(), learner_config(learner={"micro_batch_tokens": tokens})) for tokens in (4096, 24)
    ]
    one, many = (backend.response_logprobs(made) for backend in backends)
    assert one.keys() == many.keys() == {(group.group_id, n) for group in made for n in range(3)}
    for key, values in one.items():
        np.testing.assert_allclose(values, many[key], rtol=1e-4, atol=1e-5)


def test_a_reference_moves_the_gradient_towards_itself():
    config = learner_config(loss={"kl": {"weight": 0.5}, "entropy_weight": 0.0})
    made = [random_group(np.random.default_rng(0), 0)]
    for sample in made[0].samples:
        sample.logprobs[:] = -200.0  # the ratio is at its bound: no policy gradient
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    reference = tiny_policy(seed=1).eval().requires_grad_(False)
    same = tiny_policy().eval().requires_grad_(False)
    norms = []
    for other in (same, reference):
        policy = tiny_policy()
        loss, part = MicroBatchLoss(policy, other, config, CPU)(segments)
        loss.backward()
        norms.append(sum(parameter.grad.square().sum().item() for parameter in policy.parameters()))
        assert (part.sums.means()["kl_reference"] > 1e-3) is (other is reference)
        assert all(parameter.grad is None for parameter in other.parameters())
    assert norms[0] < 1e-6 < 1e-2 < norms[1]


@pytest.mark.parametrize(("weight", "has_reference"), [(0.1, False), (0.0, True)])
def test_reference_and_weight_come_together(weight, has_reference):
    config = learner_config(loss={"kl": {"weight": weight}})
    with pytest.raises(ValueError, match=r"exactly for loss.kl.weight > 0, got"):
        MicroBatchLoss(tiny_policy(), tiny_policy() if has_reference else None, config, CPU)


def test_a_given_proximal_policy_is_taken_sample_by_sample():
    config = learner_config(loss={"objective": "decoupled", "proximal": "recompute"})
    made = [random_group(np.random.default_rng(n), n, lengths=(5, 3, 8)) for n in range(2)]
    for group in made:
        group.samples[:] = [
            TrainSample(sample.index, sample.token_ids, sample.logprobs, sample.spans, 1.0, 1.0)
            for sample in group.samples
        ]
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    loss_of = MicroBatchLoss(tiny_policy(), None, config, CPU)
    own = loss_of.response_logprobs(segments)
    lower = {key: own[key] - (5.0 if key == (1, 1) else 0.0) for key in sorted(own, reverse=True)}
    clipped = [loss_of(segments, proximal)[1].sums.clipped for proximal in (None, own, lower)]
    # e^5 is over the clip in the 3 tokens of that one sample; everywhere else the two policies are equal.
    assert clipped == [0.0, 0.0, 3.0]
