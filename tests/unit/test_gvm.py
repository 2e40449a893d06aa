"""GVM-RAFT: weights as published, a pilot first, and prompts without a right sample left out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.past import Past
from engine.strategies.gvm import Gvm, gvm_weights

ALPHA, BETA = 1e-3, 2.0


def make(mean=8.0, n_pilot=8, n_max=32) -> Gvm:
    return Gvm(mean, 4, ALPHA, BETA, n_pilot, n_max, 0)


def seen(right: float, wrong: float) -> Past:
    return Past(right, wrong, 1)


def test_weights_have_their_exact_values_and_peak_at_the_root_of_alpha() -> None:
    rates = [ALPHA**0.5, 0.05, 0.1, 0.2, 0.5]
    exact = [3.9764, 3.7796, 3.0151, 2.2086, 1.4114]
    assert gvm_weights(rates, ALPHA, BETA) == pytest.approx(exact, abs=5e-5)
    around = gvm_weights([0.030, ALPHA**0.5, 0.033], ALPHA, BETA)
    assert around[1] == max(around)


def test_gradient_norms_multiply_the_weights() -> None:
    assert gvm_weights([0.5, 0.5], ALPHA, BETA, [0.5, 2.0]) == pytest.approx([0.7057, 2.8228], abs=1e-4)


def test_no_right_sample_or_no_gradient_has_no_weight() -> None:
    assert gvm_weights([0.0, 0.3], ALPHA, BETA, [1.0, 0.0]) == [0.0, 0.0]
    assert gvm_weights([0.0], ALPHA, 1.0) == [0.0]


def test_the_smallest_rates_neither_overflow_nor_divide_by_zero() -> None:
    assert gvm_weights([1e-300], ALPHA, 4.0) == [0.0]
    assert gvm_weights([1e-300], ALPHA, 1.0) == pytest.approx([ALPHA**-0.5])


def test_a_prompt_without_a_past_gets_the_pilot_and_the_others_share_the_rest() -> None:
    # 32 - 8 = 24 by 3.0151 : 2.2086 : 1.4114 is 10.906, 7.989, 5.105.
    pasts = [seen(4, 4), Past(), seen(1, 9), seen(2, 8)]
    assert make().budgets(pasts) == [5, 8, 11, 8]


def test_a_prompt_whose_pilot_found_nothing_right_is_left_out_until_its_past_has_faded() -> None:
    assert make().budgets([seen(0, 8), seen(4, 4)]) == [0, 16]
    assert make().budgets([seen(0, 0.9), seen(4, 4)]) == [8, 8]


def test_a_window_in_which_nothing_was_right_keeps_its_size() -> None:
    assert make().budgets([seen(0, 8)] * 4) == [8, 8, 8, 8]


def test_what_full_prompts_cannot_take_goes_to_those_without_weight() -> None:
    assert make(n_max=10).budgets([seen(0, 8), seen(4, 4), seen(4, 4)]) == [4, 10, 10]


def test_pilots_that_use_up_the_window_leave_the_others_for_the_next() -> None:
    assert make(n_pilot=16).budgets([Past(), Past(), seen(4, 4)]) == [16, 16, 0]


def test_a_pilot_is_no_larger_than_a_visit_may_be() -> None:
    assert make(n_pilot=16, n_max=12).budgets([Past()]) == [12]


def test_budgets_fall_with_the_pass_rate_above_the_peak() -> None:
    budgets = make().budgets([seen(right, 24 - right) for right in range(1, 25)])
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 2 * budgets[-1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12),
    st.floats(0.5, 20.0),
    st.integers(1, 24),
)
def test_pilots_and_the_rest_have_the_sum_of_the_window_within_the_bounds(counts, mean, n_max) -> None:
    pasts = [seen(right, wrong) for right, wrong in counts]
    budgets = make(mean, 8, n_max).budgets(pasts)
    pilots = [budget for budget, past in zip(budgets, pasts, strict=True) if past.total == 0]
    assert pilots == [min(8, n_max)] * len(pilots)
    rest = round(mean * len(pasts)) - sum(pilots)
    assert sum(budgets) - sum(pilots) == min(max(0, rest), n_max * (len(pasts) - len(pilots)))
    assert all(0 <= budget <= n_max for budget in budgets)
