"""Each baseline, weight and centring of an advantage rule is its formula."""

import math
import statistics

import pytest

from engine.core.advantage import AdvantageRule, Pool
from engine.core.past import EMPTY, Past

POOL = Pool(right=2, wrong=6, kept_right=2, kept_wrong=2, past=Past(3.0, 1.0, 1), unbiased=0.125)


def pair(rule: AdvantageRule, pool: Pool = POOL) -> tuple[float, float]:
    """Advantages of a right sample with reward 1 and a wrong one with reward 0."""
    factors = rule.factors(pool)
    return factors.advantage(1.0, is_right=True), factors.advantage(0.0, is_right=False)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("pool", (0.75, -0.25)),
        ("kept", (0.5, -0.5)),
        ("leave_one_out", (6 / 7, -2 / 7)),
        ("unbiased", (0.875, -0.125)),
        ("history", (7 / 12, -5 / 12)),
        ("zero", (1.0, 0.0)),
        ("signed", (1.0, -1.0)),
    ],
)
def test_a_baseline_is_subtracted(baseline, expected) -> None:
    assert pair(AdvantageRule(baseline=baseline)) == pytest.approx(expected)


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    assert pair(AdvantageRule(baseline="leave_one_out")) == pytest.approx((1.0 - 1 / 7, 0.0 - 2 / 7))


def test_a_single_sample_has_no_others_to_compare_with() -> None:
    alone = Pool(1, 0, 1, 0, EMPTY)
    assert pair(AdvantageRule(baseline="leave_one_out"), alone) == (0.0, 0.0)


def test_std_is_that_of_the_pools_labels_with_one_degree_of_freedom_less() -> None:
    std = statistics.stdev([1.0] * 2 + [0.0] * 6)
    found = pair(AdvantageRule(divides_by_std=True))
    assert found == pytest.approx((0.75 / (std + 1e-6), -0.25 / (std + 1e-6)), rel=1e-12)


@pytest.mark.parametrize("baseline", ["pool", "kept", "leave_one_out", "history", "signed"])
@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (0, 4), (1, 0)])
def test_a_pool_without_spread_is_not_blown_up_by_its_std(baseline, right, wrong) -> None:
    pool = Pool(right, wrong, right, wrong, Past(1.0, 1.0, 1))
    assert all(abs(value) <= 2.0 for value in pair(AdvantageRule(baseline=baseline, divides_by_std=True), pool))


@pytest.mark.parametrize("baseline", ["pool", "kept", "leave_one_out"])
@pytest.mark.parametrize("weight", ["none", "inverse_sqrt", "inverse", "maxrl"])
def test_a_pool_without_spread_has_zero_advantage_under_a_mean_of_its_own(baseline, weight) -> None:
    rule = AdvantageRule(baseline=baseline, weight=weight)
    assert pair(rule, Pool(4, 0, 4, 0, EMPTY))[0] == 0.0
    assert pair(rule, Pool(0, 4, 0, 4, EMPTY))[1] == 0.0


@pytest.mark.parametrize(
    ("rule", "scale"),
    [
        (AdvantageRule(weight="inverse"), 4.0),
        (AdvantageRule(weight="inverse", epsilon=0.05), 1 / 0.3),
        (AdvantageRule(weight="inverse", max_weight=3.0), 3.0),
        (AdvantageRule(weight="inverse_sqrt"), 2.0),
        (AdvantageRule(weight="inverse_sqrt", epsilon=0.05), 1 / math.sqrt(0.3)),
        (AdvantageRule(weight="inverse_sqrt", max_weight=1.5), 1.5),
        (AdvantageRule(weight="maxrl", max_weight=1.0), 4.0),
        (AdvantageRule(baseline="unbiased", weight="inverse"), 8.0),
        (AdvantageRule(baseline="unbiased", weight="maxrl"), 8.0),
    ],
)
def test_a_prompt_weight_multiplies_both_classes(rule, scale) -> None:
    plain = pair(AdvantageRule(baseline=rule.baseline))
    assert pair(rule) == pytest.approx((scale * plain[0], scale * plain[1]), rel=1e-12)


def test_an_estimate_of_zero_weighs_the_cap_or_nothing_under_maxrl() -> None:
    pool = Pool(1, 15, 1, 3, EMPTY, unbiased=0.0)
    assert pair(AdvantageRule(baseline="unbiased", weight="inverse"), pool) == (10.0, 0.0)
    assert pair(AdvantageRule(baseline="unbiased", weight="maxrl"), pool) == (0.0, 0.0)


@pytest.mark.parametrize("baseline", ["pool", "kept", "leave_one_out", "unbiased", "history", "zero", "signed"])
@pytest.mark.parametrize(("kept_right", "kept_wrong"), [(2, 2), (1, 3), (2, 1)])
def test_anchored_centring_sums_to_zero_and_leaves_right_samples_alone(baseline, kept_right, kept_wrong) -> None:
    pool = Pool(2, 6, kept_right, kept_wrong, Past(3.0, 1.0, 1), unbiased=0.125)
    right, wrong = pair(AdvantageRule(baseline=baseline, centring="anchor_pos"), pool)
    assert right == pair(AdvantageRule(baseline=baseline), pool)[0]
    assert kept_right * right + kept_wrong * wrong == pytest.approx(0.0, abs=1e-12)
    assert wrong < 0.0


def test_anchored_centring_without_a_right_sample_is_silent() -> None:
    pool = Pool(0, 8, 0, 4, Past(3.0, 1.0, 1))
    assert pair(AdvantageRule(baseline="history", centring="anchor_pos"), pool)[1] == 0.0


def test_advantages_are_linear_in_a_shaped_reward() -> None:
    factors = AdvantageRule(weight="inverse", centring="anchor_pos").factors(POOL)
    for is_right in (True, False):
        values = [factors.advantage(reward, is_right=is_right) for reward in (0.0, 0.5, 1.0)]
        assert values[1] - values[0] == pytest.approx(2.0)
        assert values[2] - values[1] == pytest.approx(2.0)


def test_a_past_that_faded_away_leaves_the_pool_mean() -> None:
    pool = Pool(2, 6, 2, 2, EMPTY)
    assert pair(AdvantageRule(baseline="history"), pool) == pair(AdvantageRule(), pool)
