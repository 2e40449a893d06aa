"""What is reported by staleness: buckets, quantiles, effective sample size, divergences, and mismatch at lag 0."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.loss import Loss
from learner.objectives import TokenSums, objective_loss
from learner.objectives.lags import LAG_STARTS
from metrics.catalogue import LAGS
from tests.support.objective_reference import Inputs, random_inputs

BUCKETS = {0: "0", 1: "1", 2: "2", 3: "3-4", 4: "3-4", 5: "5+", 9: "5+"}


def means_of(inputs: Inputs, config=None) -> dict[str, float]:
    sums = objective_loss(inputs.tokens(), config or Loss())[1]
    return sums.means() | sums.mismatch()


def of_lag(inputs: Inputs, lag: str) -> list[int]:
    return [t for t, age in enumerate(inputs.staleness) if BUCKETS[age] == lag]


def big_batch(count=4000, spread=0.3, seed=1) -> Inputs:
    inputs = random_inputs(lengths=(count,), spread=spread, seed=seed)
    return replace(inputs, staleness=np.random.default_rng(2).choice(list(BUCKETS), count).tolist())


def test_every_bucket_begins_where_its_label_says():
    assert [BUCKETS[start] for start in LAG_STARTS] == list(LAGS)


def test_sums_by_lag_are_those_of_its_tokens_counted_one_by_one():
    inputs = big_batch()
    means = means_of(inputs)
    log_ratios = np.array(inputs.logprobs) - np.array(inputs.behaviour)
    ratios = np.exp(log_ratios)
    advantages = np.array(inputs.advantages)
    for lag in LAGS:
        own = of_lag(inputs, lag)
        ratio, log_ratio, advantage = ratios[own], log_ratios[own], advantages[own]
        clipped = ((ratio > 1.28) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
        expected = {
            "tokens": len(own), "clip_share": clipped.mean(), "kl_k1": -log_ratio.mean(),
            "kl_k3": (ratio - 1 - log_ratio).mean(), "ess_share": ratio.sum() ** 2 / (ratio**2).sum() / len(own),
        }  # fmt: skip
        assert {name: means[f"lag/{lag}/{name}"] for name in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
def test_quantiles_are_those_of_the_sorted_ratios_within_a_bin(spread):
    inputs = big_batch(spread=spread)
    means = means_of(inputs)
    log_ratios = np.array(inputs.logprobs) - np.array(inputs.behaviour)
    for lag in LAGS:
        for name, level in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
            exact = np.quantile(log_ratios[of_lag(inputs, lag)], level)
            assert math.log(means[f"lag/{lag}/{name}"]) == pytest.approx(exact, rel=0.14, abs=0.05 * spread)


def test_what_lag_zero_differs_by_is_reported_apart():
    inputs = big_batch()
    # Whatever happens to older tokens leaves the mismatch alone.
    shifted = [lp + (0.5 if age else 0.0) for lp, age in zip(inputs.logprobs, inputs.staleness, strict=True)]
    means, moved = means_of(inputs), means_of(replace(inputs, logprobs=shifted))
    distances = [abs(inputs.logprobs[t] - inputs.behaviour[t]) for t in of_lag(inputs, "0")]
    assert means["mismatch_nats"] == moved["mismatch_nats"] == pytest.approx(np.mean(distances))
    outside = [abs(math.exp(inputs.logprobs[t] - inputs.behaviour[t]) - 1.0) > 0.1 for t in of_lag(inputs, "0")]
    assert means["mismatch_share"] == moved["mismatch_share"] == pytest.approx(np.mean(outside))
    assert moved["lag/1/kl_k1"] == pytest.approx(means["lag/1/kl_k1"] - 0.5)


def test_an_empty_bucket_reports_that_it_is_empty_and_nothing_else():
    means = means_of(replace(random_inputs(), staleness=[1] * 16))
    assert means["lag/1/tokens"] == 16
    assert [name for name in means if name.startswith("lag/5+/")] == ["lag/5+/tokens"]
    assert means["lag/5+/tokens"] == 0.0
    assert "mismatch_nats" not in means


def test_equal_policies_have_no_divergence_no_clipping_and_the_full_sample_size():
    inputs = random_inputs(spread=0.0)
    means = means_of(inputs)
    assert (means["kl_behaviour"], means["kl_behaviour_k3"], means["clip_share"]) == (0.0, 0.0, 0.0)
    assert means["ratio_max"] == 1.0
    assert means["mismatch_nats"] == 0.0
    for lag in LAGS:
        assert means[f"lag/{lag}/ess_share"] == pytest.approx(1.0)
        assert means[f"lag/{lag}/ratio_p50"] == pytest.approx(1.0, abs=1e-4)


def test_both_divergence_estimates_agree_with_the_exact_divergence():
    generator = torch.Generator().manual_seed(0)
    behaviour, learner = (torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(behaviour.exp(), 400_000, replacement=True, generator=generator)
    count = drawn.numel()
    zeros = [0.0] * count
    means = means_of(Inputs(learner[drawn].tolist(), behaviour[drawn].tolist(), zeros, zeros, [0] * count, [count]))
    exact = (behaviour.exp() * (behaviour - learner)).sum().item()
    assert means["kl_behaviour"] == pytest.approx(exact, rel=0.03)
    assert means["kl_behaviour_k3"] == pytest.approx(exact, rel=0.03)


def test_masked_tokens_and_the_distance_to_the_reference_are_counted():
    inputs = random_inputs()
    config = Loss(objective="reinforce", mismatch={"rule": "icepop", "low": 0.8, "high": 1.5}, kl={"weight": 0.1})
    means = means_of(inputs, config)
    ratios = [math.exp(lp - b) for lp, b in zip(inputs.logprobs, inputs.behaviour, strict=True)]
    assert means["mask_share"] == sum(not 0.8 <= ratio <= 1.5 for ratio in ratios) / 16
    away = [r - lp for lp, r in zip(inputs.logprobs, inputs.reference, strict=True)]
    assert means["kl_reference"] == pytest.approx(sum(math.expm1(d) - d for d in away) / 16)
    assert (means_of(inputs)["mask_share"], means_of(inputs)["kl_reference"]) == (0.0, 0.0)


@pytest.mark.parametrize(("aggregation", "divisor"), [("token_mean", 8), ("sequence_mean", 4), ("constant", 4 * 24)])
def test_the_reported_loss_is_over_the_normaliser(aggregation, divisor):
    config = Loss(aggregation=aggregation, constant_tokens=24)
    loss, sums = objective_loss(replace(random_inputs(), weights=[0.5] * 16).tokens(), config)
    assert sums.normaliser == divisor
    assert sums.tokens == 16
    assert sums.means()["loss"] == pytest.approx(loss.item() / divisor)


def test_sums_that_differ_anywhere_are_not_equal():
    sums = objective_loss(random_inputs().tokens(), Loss())[1]
    assert sums == sums + TokenSums()
    assert sums != sums + sums
    assert sums != TokenSums(sums.vector, sums.ratio_max + 1.0)
    poisoned = TokenSums(np.full_like(sums.vector, np.nan))
    assert poisoned == TokenSums(np.full_like(sums.vector, np.nan))


def test_a_ratio_that_is_not_a_number_shows_in_the_metrics():
    inputs = random_inputs()
    means = means_of(replace(inputs, behaviour=[math.nan, *inputs.behaviour[1:]]))
    assert math.isnan(means["kl_behaviour"])
    assert math.isnan(means["ratio_max"])
    assert means["tokens_trained"] == 16
