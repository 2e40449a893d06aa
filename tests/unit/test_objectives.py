"""Every objective against the reference of tests/support/objective_reference.py, and at its edges."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.loss import Loss
from learner.objectives import TokenSums, objective_loss
from tests.support.loss_configs import LOSSES
from tests.support.objective_reference import (
    Inputs,
    random_inputs,
    reference_gradient,
    reference_loss,
    reference_normaliser,
    token_values,
)

EACH = pytest.mark.parametrize("config", list(LOSSES.values()), ids=list(LOSSES))


def one_token(logprob=-1.0, behaviour=-1.0, advantage=1.0, staleness=0):
    return Inputs([logprob], [behaviour], [advantage], [0.5], [staleness], [1], [-1.0])


def loss_and_gradient(inputs, config, dtype=torch.float64):
    tokens = inputs.tokens(dtype)
    loss, sums = objective_loss(tokens, config)
    loss.backward()
    return loss.item(), tokens.logprobs_R.grad, sums


@EACH
@pytest.mark.parametrize("has_token_values", [False, True], ids=["one a response", "one a token"])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.6, 2.0])
def test_loss_and_gradient_are_those_of_the_formula(config, spread, has_token_values):
    inputs = random_inputs(spread=spread)
    inputs = token_values(inputs) if has_token_values else inputs
    if not spread:
        # Central differences are taken beside every kink: a hair inside all clips.
        inputs = replace(inputs, logprobs=[lp + 1e-5 for lp in inputs.behaviour])
    tokens = inputs.tokens()
    loss, sums = objective_loss(tokens, config)
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(inputs, config), rel=1e-12)
    assert sums.normaliser == pytest.approx(reference_normaliser(inputs, config), rel=1e-12)
    np.testing.assert_allclose(tokens.logprobs_R.grad, reference_gradient(inputs, config), rtol=1e-6, atol=1e-8)
    expected = reference_gradient(inputs, config, of="entropy", step=1.0)  # it is linear in them
    ours = tokens.entropy_R.grad if config.entropy_weight else np.zeros(16)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-12)


@EACH
def test_one_token_is_a_batch(config):
    inputs = one_token(-1.0, -1.4, -0.7, 2)
    loss, gradient, sums = loss_and_gradient(inputs, config)
    assert loss == pytest.approx(reference_loss(inputs, config), rel=1e-12)
    np.testing.assert_allclose(gradient, reference_gradient(inputs, config), rtol=1e-6, atol=1e-8)
    assert sums.tokens == 1


@EACH
def test_no_tokens_are_a_loss_of_zero(config):
    loss, gradient, sums = loss_and_gradient(Inputs([], [], [], [], [], [], []), config)
    assert loss == 0.0
    assert gradient.numel() == 0
    assert sums == TokenSums()


@EACH
def test_an_advantage_of_zero_gives_no_policy_gradient(config):
    inputs = replace(random_inputs(), advantages=[0.0] * 16)
    _, gradient, _ = loss_and_gradient(inputs, config.model_copy(update={"kl": Loss().kl}))
    assert not gradient.any()


@EACH
@pytest.mark.parametrize("distance", [50.0, 500.0])
def test_a_huge_logprob_difference_stays_finite(config, distance):
    inputs = Inputs(
        [0.0, -distance, -1.0], [-distance, 0.0, -1.0], [-1.0, 1.0, 1.0], [0.0] * 3, [0, 1, 2], [1, 2], [0.0] * 3
    )
    loss, gradient, sums = loss_and_gradient(inputs, config, torch.float32)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert sums.ratio_max == pytest.approx(math.exp(20.0), rel=1e-4)
    assert all(math.isfinite(value) for value in sums.means().values())


@EACH
@pytest.mark.parametrize("name", ["logprobs", "behaviour", "advantages", "entropy", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_input_that_is_not_finite_leaves_no_half_gradient(config, name, bad):
    inputs = random_inputs()
    values = list(getattr(inputs, name))
    values[2] = bad
    loss, gradient, sums = loss_and_gradient(replace(inputs, **{name: values}), config)
    # Either the objective reads it: nothing of the gradient can be used, which the backend sees. Or it does not.
    if math.isfinite(loss):
        assert gradient.isfinite().all()
    else:
        assert gradient.isnan().all()
        assert not math.isfinite(sums.means()["loss"])


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
@EACH
def test_what_every_objective_reads_is_never_hidden(config, name):
    inputs = random_inputs()
    values = list(getattr(inputs, name))
    values[2] = math.nan
    loss, gradient, _ = loss_and_gradient(replace(inputs, **{name: values}), config)
    assert math.isnan(loss)
    assert gradient.isnan().all()


@pytest.mark.parametrize("name", [name for name, config in LOSSES.items() if not config.m2_budget])
def test_sums_of_parts_are_the_sum_of_the_whole(name):
    config = LOSSES[name]  # not M2PO: its mask reads the whole micro-batch
    whole = token_values(random_inputs())

    def part(start, end, first, last):
        cut = {name: getattr(whole, name)[start:end] for name in vars(whole) if name not in ("lengths", "frozen")}
        return Inputs(lengths=whole.lengths[first:last], **cut)

    parts = [part(0, 4, 0, 2), part(4, 11, 2, 3), part(11, 16, 3, 4)]
    loss, gradient, sums = loss_and_gradient(whole, config)
    losses, gradients, partial = zip(*(loss_and_gradient(each, config) for each in parts), strict=True)
    assert sum(losses) == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=0.0)
    added = sum(partial, TokenSums())
    np.testing.assert_allclose(added.vector, sums.vector, rtol=1e-12, atol=1e-12)
    assert added.means() == pytest.approx(sums.means())


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [(1.0, 1.0, 1.28), (-1.0, 1.0, math.exp(-1.0)), (1.0, -1.0, -math.e), (-1.0, -1.0, -0.8), (3.0, -1.0, -10.0)],
)
def test_ppo_is_clipped_where_the_paper_says(log_ratio, advantage, expected):
    config = Loss(entropy_weight=0.0)
    loss, gradient, sums = loss_and_gradient(one_token(log_ratio - 1.0, -1.0, advantage), config)
    assert loss == pytest.approx(-expected)
    is_clipped = not math.isclose(expected, math.exp(log_ratio) * advantage)
    assert sums.clipped == is_clipped
    assert (gradient.item() == 0.0) == is_clipped


@pytest.mark.parametrize(("side", "advantage"), [(0.8, -1.0), (1.28, 1.0)])
def test_a_ratio_on_the_clip_has_its_value_and_counts_as_unclipped(side, advantage):
    exact = torch.tensor([side], dtype=torch.float64).log().requires_grad_()
    side = exact.exp().item()
    config = Loss(clip_low=1.0 - side if advantage < 0 else 0.5, clip_high=side - 1.0 if advantage > 0 else 0.5)
    loss, gradient, sums = loss_and_gradient(one_token(exact.item(), 0.0, advantage), config)
    assert loss + config.entropy_weight * 0.5 == pytest.approx(-side * advantage, rel=1e-12)
    assert sums.clipped == 0
    # A one-sided derivative, or between the two: never beyond them.
    assert 0.0 <= abs(gradient.item()) <= side * (1 + 1e-12)


def test_cispo_keeps_a_gradient_where_ppo_has_none():
    inputs = one_token(0.0, -3.0, 1.0)
    cispo, ppo = Loss(objective="cispo", entropy_weight=0.0), Loss(entropy_weight=0.0)
    assert loss_and_gradient(inputs, ppo)[1].item() == 0.0
    assert loss_and_gradient(inputs, cispo)[1].item() == pytest.approx(-5.0)


def test_gspo_gives_every_token_of_a_response_the_same_gradient():
    inputs = random_inputs(lengths=(4,), spread=0.05)
    config = Loss(objective="gspo", clip_low=0.9, clip_high=0.9, aggregation="sequence_mean")
    _, gradient, _ = loss_and_gradient(inputs, config)
    mean = sum(lp - b for lp, b in zip(inputs.logprobs, inputs.behaviour, strict=True)) / 4
    expected = -math.exp(mean) * inputs.advantages[0] / 4
    np.testing.assert_allclose(gradient, [expected] * 4, rtol=1e-12)


def test_decoupled_is_ppo_for_tokens_of_age_one_and_under():
    inputs = replace(random_inputs(), staleness=[0, 1] * 8)
    config = Loss(objective="decoupled", proximal="loglinear")
    decoupled, ppo = loss_and_gradient(inputs, config), loss_and_gradient(inputs, Loss())
    assert decoupled[0] == pytest.approx(ppo[0], rel=1e-12)
    torch.testing.assert_close(decoupled[1], ppo[1])


def test_decoupled_widens_the_trust_region_with_age():
    inputs = one_token(-1.0 + 0.8, -1.0, 1.0, 4)
    _, gradient, sums = loss_and_gradient(inputs, Loss(objective="decoupled", entropy_weight=0.0))
    # log ratio to the proximal policy 0.2, inside the clip; weight e^0.6, inside the cap of 2.
    assert sums.clipped == 0
    assert gradient.item() == pytest.approx(-math.exp(0.2) * math.exp(0.6))


def test_decoupled_without_a_given_policy_recomputes_the_learners_own():
    inputs = replace(random_inputs(), proximal=None)
    config = Loss(objective="decoupled", proximal="recompute", entropy_weight=0.0)
    _, gradient, sums = loss_and_gradient(inputs, config)
    weights = [min(2.0, math.exp(lp - b)) for lp, b in zip(inputs.logprobs, inputs.behaviour, strict=True)]
    np.testing.assert_allclose(gradient, [-w * a for w, a in zip(weights, inputs.advantages, strict=True)])
    assert sums.clipped == 0


@pytest.mark.parametrize(("bound", "log_ratio", "inwards"), [("low", -0.7, 1.0), ("high", 0.7, 0.0)])
def test_icepop_trains_a_ratio_on_its_bound_and_none_beyond_it(bound, log_ratio, inwards):
    ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()

    def is_trained(limit):
        config = Loss(objective="reinforce", entropy_weight=0.0, mismatch={"rule": "icepop", bound: limit})
        return loss_and_gradient(one_token(log_ratio, 0.0), config)[1].item() != 0.0

    assert is_trained(ratio)
    assert not is_trained(np.nextafter(ratio, inwards))


def test_a_penalty_without_a_reference_says_which_key_asks_for_it():
    inputs = replace(random_inputs(), reference=None)
    with pytest.raises(ValueError, match=r"reference_R must be given for loss.kl.weight = 0.3, got None"):
        objective_loss(inputs.tokens(), LOSSES["k3"])


def test_the_gradients_of_the_penalties_are_what_the_docstring_says():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(estimator):
        logprobs = logits.log_softmax(0)
        distance = logprobs - reference
        values = {"k1": distance, "k2": distance.square() / 2, "exact": distance}[estimator]
        weight = logprobs.exp() if estimator == "exact" else logprobs.exp().detach()
        return torch.autograd.grad((weight * values).sum(), logits)[0]

    torch.testing.assert_close(gradient("k2"), gradient("exact"))
    assert gradient("k1").abs().max() < 1e-12
