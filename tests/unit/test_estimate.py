"""Reinforce-Ada-Est: the paper's and the authors' budgets, exactly."""

import math

import pytest

from engine.core.past import Past
from engine.strategies.apportion import shares
from engine.strategies.estimate import Estimate

PASTS = [Past(), Past(0.0, 8.0, 1), Past(4.0, 4.0, 1), Past(8.0, 0.0, 1)]


def make(mean=8.0, n_min=1, n_max=32, power="inverse_sqrt", prior=(1.0, 16.0)) -> Estimate:
    return Estimate(mean, 4, n_min, n_max, power, *prior, 0)


def test_the_estimate_is_the_posterior_mean_of_the_past() -> None:
    rates = [make().rate(past) for past in PASTS]
    assert rates == pytest.approx([0.05882, 0.04, 0.2, 0.36], abs=1e-5)


def test_the_authors_code_gives_one_each_and_the_rest_by_one_over_p() -> None:
    assert make(power="inverse").budgets(PASTS) == [11, 15, 4, 2]


def test_the_paper_gives_budgets_by_one_over_the_root_of_p() -> None:
    weights = [1.0 / math.sqrt(make().rate(past)) for past in PASTS]
    assert shares(weights, 32, 1, 32) == pytest.approx([10.129, 12.283, 5.493, 4.094], abs=5e-4)
    assert make().budgets(PASTS) == [10, 12, 6, 4]


def test_what_is_clipped_at_one_prompt_is_given_to_the_others() -> None:
    # 10.129 and 12.283 are cut to 10; the other 12 are split 6.876 to 5.124.
    assert make(n_max=10).budgets(PASTS) == [10, 10, 7, 5]
    # 4.094 is raised to 6 and 5.493 too; the other 20 are split 9.039 to 10.961.
    assert make(n_min=6).budgets(PASTS) == [9, 11, 6, 6]


def test_the_minimum_of_the_authors_power_is_the_base_of_every_prompt() -> None:
    # 32 - 4 x 4 = 16 by 17 : 25 : 5 : 2.778 is 5.464, 8.036, 1.607, 0.893.
    assert make(n_min=4, power="inverse").budgets(PASTS) == [9, 12, 6, 5]


@pytest.mark.parametrize("power", ["inverse_sqrt", "inverse"])
def test_budgets_never_rise_with_the_pass_rate(power) -> None:
    pasts = [Past(float(right), 24.0 - right, 1) for right in range(25)]
    budgets = Estimate(8.0, 25, 1, 32, power, 1.0, 16.0, 0).budgets(pasts)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 2 * budgets[-1]
    assert sum(budgets) == 200


def test_a_heavier_prior_levels_the_budgets() -> None:
    light, heavy = make().budgets(PASTS), make(prior=(100.0, 1600.0)).budgets(PASTS)
    assert max(light) - min(light) > 6
    assert max(heavy) - min(heavy) <= 1
