"""Micro-batches add up to one gradient, fit the budget, and name the groups that are not what they should be."""

import numpy as np
import pytest
import torch

from configs.training import Learner
from engine.wire import Span
from learner.backends.torch import TorchBackend
from learner.gradient import Gradient, GroupReport, MicroBatchLoss, micro_batches
from tests.support.learner_inputs import changed, learner_config, random_group, tiny_policy

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


def sample_keys(segments):
    return [(segment.group_id, sample.index) for segment in segments for sample in segment.samples]


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
        changed(sample, logprobs=logprobs, spans=its_spans)
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


@pytest.mark.parametrize("broken", ["logprobs", "entropy", "reference", "proximal"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_whatever_is_not_finite_names_its_group_alone(broken, bad):
    made = [random_group(np.random.default_rng(n), n, lengths=(3, 9 - n)) for n in range(3)]
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    numbers = {key: number for number, key in enumerate(sample_keys(segments))}

    def passes(outputs):
        """A policy whose `outputs` are broken at one token of group 1."""

        def run(batch, temperature):
            values = dict(zip(("logprobs", "entropy"), policy(batch, temperature), strict=True))
            for name in outputs:
                values[name] = values[name].clone()
                values[name][(batch.sequence_R == numbers[1, 1]).nonzero()[4]] = bad
            return values["logprobs"], values["entropy"]

        return run

    policy = tiny_policy()
    config = learner_config(loss={"kl": {"weight": 0.1}, "objective": "decoupled", "proximal": "recompute"})
    own = MicroBatchLoss(policy, policy, config, CPU).response_logprobs(segments)
    if broken == "proximal":
        own[1, 1][4] = bad
    loss_of = MicroBatchLoss(
        passes({broken} & {"logprobs", "entropy"}), passes({"logprobs"} if broken == "reference" else ()), config, CPU
    )
    _, part = loss_of(segments, own)
    assert {key: report.is_finite for key, report in part.groups.items()} == {0: True, 1: False, 2: True}


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


def test_a_step_along_the_gradient_brings_the_policy_nearer_to_its_reference():
    config = learner_config(loss={"kl": {"weight": 0.5}, "entropy_weight": 0.0})
    made = [random_group(np.random.default_rng(0), 0)]
    made[0].samples[:] = [changed(sample, advantage=0.0) for sample in made[0].samples]  # no policy gradient
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    policy, reference = tiny_policy(), tiny_policy(seed=1).eval().requires_grad_(False)
    loss_of = MicroBatchLoss(policy, reference, config, CPU)

    def distance():
        return loss_of(segments)[1].sums.means()["kl_reference"]

    before = distance()
    loss_of(segments)[0].backward()
    assert all(parameter.grad is None for parameter in reference.parameters())
    squares = sum(parameter.grad.square().sum().item() for parameter in policy.parameters())
    rate = 0.02 * before / squares
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= rate * parameter.grad
    # To first order the loss, 0.5 x 15 x the distance, falls by rate x squares.
    assert before - distance() == pytest.approx(rate * squares / (0.5 * 15), rel=0.2)


def test_a_policy_at_its_reference_is_not_pulled():
    config = learner_config(loss={"kl": {"weight": 0.5}, "entropy_weight": 0.0})
    made = [random_group(np.random.default_rng(0), 0)]
    made[0].samples[:] = [changed(sample, advantage=0.0) for sample in made[0].samples]
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    policy = tiny_policy()
    loss, part = MicroBatchLoss(policy, tiny_policy().requires_grad_(False), config, CPU)(segments)
    loss.backward()
    assert part.sums.means()["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert all(parameter.grad.abs().max() < 1e-4 for parameter in policy.parameters())


@pytest.mark.parametrize(("weight", "has_reference"), [(0.1, False), (0.0, True)])
def test_reference_and_weight_come_together(weight, has_reference):
    config = learner_config(loss={"kl": {"weight": weight}})
    with pytest.raises(ValueError, match=r"exactly for loss.kl.weight > 0, got"):
        MicroBatchLoss(tiny_policy(), tiny_policy() if has_reference else None, config, CPU)


def test_a_given_proximal_policy_is_taken_sample_by_sample():
    config = learner_config(loss={"objective": "decoupled", "proximal": "recompute"})
    made = [random_group(np.random.default_rng(n), n, lengths=(5, 3, 8)) for n in range(2)]
    for group in made:
        group.samples[:] = [changed(sample, advantage=1.0) for sample in group.samples]
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    loss_of = MicroBatchLoss(tiny_policy(), None, config, CPU)
    own = loss_of.response_logprobs(segments)
    lower = {key: own[key] - (5.0 if key == (1, 1) else 0.0) for key in sorted(own, reverse=True)}
    clipped = [loss_of(segments, proximal)[1].sums.clipped for proximal in (None, own, lower)]
    # e^5 is over the clip in the 3 tokens of that one sample; everywhere else the two policies are equal.
    assert clipped == [0.0, 0.0, 3.0]
