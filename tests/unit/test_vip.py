"""VIP: the least total variance of any split, checked against all of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.past import Past
from engine.strategies.vip import Vip, variance


def make(mean=8.0, n_min=2, n_max=32, form="rloo") -> Vip:
    return Vip(mean, 8, n_min, n_max, 0, form)


def summed(rates: list[float], budgets: tuple[int, ...] | list[int], form: str) -> float:
    return math.fsum(variance(size, rate, form) for size, rate in zip(budgets, rates, strict=True))


def test_variances_have_their_published_forms() -> None:
    assert variance(5, 0.2, "rloo") == pytest.approx(0.16 / 4)
    assert variance(5, 0.2, "drgrpo") == pytest.approx(0.16 * 4 / 25)


def test_the_estimate_is_the_posterior_mean_under_a_uniform_prior() -> None:
    strategy = make()
    assert [strategy.rate(Past()), strategy.rate(Past(0.0, 8.0, 1)), strategy.rate(Past(3.0, 1.0, 1))] == [
        1 / 2,
        1 / 10,
        4 / 6,
    ]


def test_for_rloo_samples_above_one_are_in_proportion_to_the_standard_deviation() -> None:
    # p̂ = 1/2 and 1/10: deviations 0.5 and 0.3, so of 18 - 2 samples 10 and 6.
    assert make(9.0).budgets([Past(), Past(0.0, 8.0, 1)]) == [11, 7]


def test_for_drgrpo_a_third_sample_alone_is_worth_less_than_two_more() -> None:
    # 2/9 + 2/9 is above 3/16 + 1/4.
    assert make(3.0, form="drgrpo").budgets([Past(), Past()]) == [4, 2]
    assert make(3.0, form="rloo").budgets([Past(), Past()]) == [3, 3]


@pytest.mark.parametrize("form", ["drgrpo", "rloo"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4),
    st.floats(2.0, 8.0),
    st.integers(2, 4),
    st.integers(0, 5),
)
def test_no_other_split_has_less_variance(form, counts, mean, n_min, room) -> None:
    pasts = [Past(float(right), float(wrong), 1) for right, wrong in counts]
    strategy = make(mean, n_min, n_min + room, form)
    rates, budgets = [strategy.rate(past) for past in pasts], strategy.budgets(pasts)
    sizes = range(n_min, n_min + room + 1)
    splits = [split for split in itertools.product(sizes, repeat=len(pasts)) if sum(split) == sum(budgets)]
    assert summed(rates, budgets, form) == pytest.approx(min(summed(rates, split, form) for split in splits), abs=1e-12)


@pytest.mark.parametrize("form", ["drgrpo", "rloo"])
def test_budgets_rise_towards_a_pass_rate_of_one_half(form) -> None:
    pasts = [Past(float(right), 24.0 - right, 1) for right in range(25)]
    budgets = make(8.0, 2, 32, form).budgets(pasts)
    assert budgets[:13] == sorted(budgets[:13])
    assert budgets[12:] == sorted(budgets[12:], reverse=True)
    assert budgets[12] > budgets[0]
    assert sum(budgets) == 200


def test_a_minimum_without_a_variance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"allocation\.n_min must be >= 2 for vip, .* got 1"):
        make(8.0, 1)
