"""Knapsack-RL: the most valuable split, as a full dynamic program finds it, and the rule for what is left over."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.past import Past
from engine.strategies.knapsack import Knapsack, value


def rated(*rates: float) -> list[Past]:
    return [Past(rate * 100.0, (1.0 - rate) * 100.0, 1) for rate in rates]


def make(mean=8.0, n_min=2, n_max=32) -> Knapsack:
    return Knapsack(mean, 8, n_min, n_max, 0)


def best(rates: list[float], total: int, n_min: int, n_max: int) -> float:
    """The largest sum of values with exactly `total` samples, by the dynamic program of the paper."""
    found = {0: 0.0}
    for rate in rates:
        values = [(count, value(count, rate)) for count in range(n_min, n_max + 1)]
        merged: dict[int, float] = {}
        for spent, worth in found.items():
            for count, more in values:
                if spent + count <= total:
                    merged[spent + count] = max(merged.get(spent + count, -math.inf), worth + more)
        found = merged
    return found[total]


def test_the_value_is_the_chance_of_a_mixed_group_times_what_it_teaches() -> None:
    assert value(2, 0.5) == pytest.approx(0.5 * 0.125)
    assert value(8, 0.1) == pytest.approx((1 - 0.4304672) * 0.081, abs=1e-8)
    assert [value(0, 0.3), value(1, 0.3)] == pytest.approx([0.0, 0.0], abs=1e-15)
    assert [value(8, 0.0), value(8, 1.0)] == [0.0, 0.0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.floats(0.5, 8.0), st.integers(0, 3), st.integers(0, 9))
def test_the_split_is_worth_as_much_as_the_full_dynamic_program_finds(percents, mean, n_min, room) -> None:
    rates = [percent / 100 for percent in percents]
    n_max = n_min + room
    budgets = make(mean, n_min, n_max).budgets(rated(*rates))
    worth = math.fsum(value(budget, rate) for budget, rate in zip(budgets, rates, strict=True))
    total = min(max(round(mean * len(rates)), n_min * len(rates)), n_max * len(rates))
    assert worth == pytest.approx(best(rates, total, n_min, n_max), abs=1e-12)


@pytest.mark.parametrize("n_min", [0, 2])
def test_the_split_of_a_wide_window_is_optimal_too(n_min) -> None:
    rates = [(2 * place + 1) / 48 for place in range(24)]
    budgets = make(4.0, n_min, 24).budgets(rated(*rates))
    worth = math.fsum(value(budget, rate) for budget, rate in zip(budgets, rates, strict=True))
    assert worth == pytest.approx(best(rates, 96, n_min, 24), abs=1e-12)


def test_without_a_minimum_no_prompt_gets_the_one_sample_that_can_teach_nothing() -> None:
    # Alone, the tenth sample adds nothing to 0.6; with one of 0.3 it adds 0.0152. To 0.4 it adds 0.0180.
    assert make(1.6, 0, 8).budgets(rated(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)) == [0, 0, 3, 4, 3, 0]


def test_hard_prompts_get_more_than_middling_ones_and_more_than_their_mirror_image() -> None:
    budgets = make(12.0, 2, 60).budgets(rated(0.1, 0.3, 0.5, 0.7, 0.9))
    assert budgets[0] > budgets[1] > budgets[2]
    assert budgets[0] > budgets[4]
    assert budgets[1] > budgets[3]
    assert sum(budgets) == 60


def test_a_prompt_without_a_past_counts_as_one_half() -> None:
    strategy = make()
    assert strategy.budgets([Past(), *rated(0.1, 0.9)]) == strategy.budgets(rated(0.5, 0.1, 0.9))


def test_budget_beyond_a_mixed_group_at_nine_in_ten_goes_to_prompts_that_were_never_right() -> None:
    # 48 samples: 2 each; a p̂ of 1/2 wants 3 more (ln 0.1 / ln 0.5 = 3.3); 24 are left over.
    assert make().budgets(rated(0.5, 0.5, 0.0, 0.5, 0.5, 0.0)) == [5, 5, 14, 5, 5, 14]


def test_what_prompts_that_were_never_right_cannot_take_returns_to_the_others() -> None:
    assert make(n_max=10).budgets(rated(0.5, 0.5, 0.0, 0.5, 0.5, 0.0)) == [7, 7, 10, 7, 7, 10]


def test_prompts_that_were_always_right_take_only_what_nobody_else_can() -> None:
    assert make().budgets(rated(0.5, 0.5, 1.0, 0.5, 0.5, 1.0)) == [11, 11, 2, 11, 11, 2]
    assert make(n_max=10).budgets(rated(0.5, 0.5, 1.0, 0.5, 0.5, 1.0)) == [10, 10, 4, 10, 10, 4]
    assert make().budgets(rated(1.0, 1.0, 0.0)) == [2, 2, 20]


def test_a_window_that_was_never_right_shares_equally() -> None:
    assert make().budgets(rated(0.0, 0.0, 0.0, 0.0)) == [8, 8, 8, 8]


def test_the_rarest_right_sample_is_no_reason_to_fail() -> None:
    assert sum(make().budgets([Past(1e-300, 8.0, 1), Past(8.0, 1e-300, 1), Past(0.0, 8.0, 1)])) == 24
