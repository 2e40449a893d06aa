"""Splitting a window: sums and bounds hold, order does not matter, and the greedy split is the optimal one."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.past import Past
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts
from engine.strategies.apportion import apportion, harder_first, shares, spend, window_total
from engine.strategies.estimate import Estimate
from engine.strategies.gvm import Gvm
from engine.strategies.knapsack import Knapsack
from engine.strategies.vip import Vip
from tests.support.event_driver import Driver, bernoulli

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def paper(mean=8.0, window=8, n_min=2, n_max=32):
    return Estimate(mean, window, n_min, n_max, "inverse_sqrt", 1.0, 16.0, 0)


def code(mean=8.0, window=8, n_min=2, n_max=32):
    return Estimate(mean, window, n_min, n_max, "inverse", 1.0, 16.0, 0)


def knapsack(mean=8.0, window=8, n_min=2, n_max=32):
    return Knapsack(mean, window, n_min, n_max, 0)


def drgrpo(mean=8.0, window=8, n_min=2, n_max=32):
    return Vip(mean, window, n_min, n_max, 0, "drgrpo")


def rloo(mean=8.0, window=8, n_min=2, n_max=32):
    return Vip(mean, window, n_min, n_max, 0, "rloo")


def gvm(mean=8.0, window=8, n_min=0, n_max=32):
    return Gvm(mean, window, 1e-3, 2.0, round(mean), n_max, 0)


BOUNDED = [paper, code, knapsack, drgrpo, rloo]
ALL = [*BOUNDED, gvm]
COUNTS = st.floats(0.0, 40.0).map(lambda count: round(count, 3))
PASTS = st.lists(st.builds(Past, COUNTS, COUNTS, st.just(1)), min_size=1, max_size=12)
RATES = st.lists(st.integers(0, 15), min_size=1, max_size=12)
"""Right samples of 15: no two give the same estimate, nor one that a prompt without a past has."""


@pytest.mark.parametrize("make", BOUNDED)
@QUICK
@given(PASTS, st.floats(0.5, 20.0), st.integers(2, 4), st.integers(0, 20))
def test_every_budget_is_in_bounds_and_the_window_has_its_sum(make, pasts, mean, n_min, room) -> None:
    n_max = n_min + room
    budgets = make(mean, 8, n_min, n_max).budgets(pasts)
    assert all(n_min <= budget <= n_max for budget in budgets)
    size = len(pasts)
    assert sum(budgets) == min(max(round(mean * size), n_min * size), n_max * size)


@pytest.mark.parametrize("make", ALL)
@QUICK
@given(RATES, st.integers(0, 3), st.floats(2.0, 12.0), st.randoms(use_true_random=False))
def test_budgets_follow_their_prompts_through_any_order(make, rights, num_new, mean, rng) -> None:
    pasts = [Past(float(right), 15.0 - right, 1) for right in rights] + [Past()] * num_new
    shuffled = rng.sample(pasts, len(pasts))
    strategy = make(mean)
    before = Counter(zip(pasts, strategy.budgets(pasts), strict=True))
    assert Counter(zip(shuffled, strategy.budgets(shuffled), strict=True)) == before


@pytest.mark.parametrize("make", ALL)
def test_prompts_that_were_never_seen_share_equally(make) -> None:
    assert make(8.0).budgets([Past()] * 6) == [8] * 6


@pytest.mark.parametrize("make", BOUNDED)
def test_an_odd_sum_differs_by_one_sample_between_equal_prompts(make) -> None:
    assert sorted(make(7.5).budgets([Past()] * 5)) == [7, 7, 8, 8, 8]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("past", [Past(), Past(0.0, 8.0, 1), Past(1.0, 15.0, 1), Past(8.0, 0.0, 1)])
def test_a_window_of_one_gets_the_mean_budget_within_the_bounds(make, past) -> None:
    assert make(8.0, 1).budgets([past]) == [8]
    assert make(8.0, 1, 2, 5).budgets([past]) == [5]


@pytest.mark.parametrize("make", ALL)
def test_no_prompts_have_no_budgets(make) -> None:
    assert make().budgets([]) == []


@pytest.mark.parametrize("make", ALL)
def test_the_visit_ends_when_its_budget_is_counted_and_not_before(make) -> None:
    strategy = make()
    early, done = Counts(1, 2, 1, 2, 5), Counts(0, 0, 5, 0, 5)
    assert (strategy.verdict(early), strategy.need(early)) == ("continue", 2)
    assert (strategy.verdict(done), strategy.need(done)) == ("solved", 0)
    assert strategy.missing(early) == strategy.missing(done) == (0, 0)
    assert (strategy.window, strategy.selection, strategy.group_size) == (8, "uniform", 0)


@pytest.mark.parametrize("make", ALL)
def test_the_dispatcher_counts_each_budget_exactly_and_the_last_short_window_too(make) -> None:
    policy = Policy(make(6.0, 8), Bound(1_000_000, 4))
    out = Driver(policy, bernoulli(0.5)).run(21)
    assert out.counts() == [6] * 21
    assert out.num_launched == 126
    assert all(len(group.kept) == 6 for group, _ in out.groups)


@pytest.mark.parametrize("make", BOUNDED)
def test_bounds_that_leave_no_room_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"allocation\.n_min must be in \[0, strategy\.n_max = 4\], got 5"):
        make(8.0, 8, 5, 4)


def test_the_total_of_a_window_is_rounded_to_the_nearest_sample() -> None:
    assert [window_total(7.6, 3), window_total(7.5, 3), window_total(8.0, 0)] == [23, 22, 0]


def test_prompts_are_split_in_the_order_of_their_rates() -> None:
    seen: list[list[float]] = []

    def split(rates: list[float]) -> list[int]:
        seen.append(rates)
        return [1, 2, 3, 4]

    assert harder_first([0.3, 0.1, 0.9, 0.2], split) == [3, 1, 4, 2]
    assert seen == [[0.1, 0.2, 0.3, 0.9]]


def test_shares_beyond_a_bound_are_pinned_and_the_rest_keep_their_proportion() -> None:
    assert shares([1.0, 1.0, 8.0], 12, 1, 6) == pytest.approx([3.0, 3.0, 6.0])
    # The third is below 3 at first and above it once the fourth is pinned: pinning both ends at once would lose one.
    assert shares([1.0, 2.0, 3.0, 30.0], 20, 3, 10) == pytest.approx([3.0, 3.0, 4.0, 10.0])


def test_the_smallest_weight_takes_all_when_it_is_alone_with_room() -> None:
    assert shares([5e-324], 5, 0, 10) == [5.0]
    assert shares([5e-324, 100.0], 15, 0, 10) == [5.0, 10.0]


def test_a_weight_of_zero_gets_the_minimum_until_the_others_are_full() -> None:
    assert shares([0.0, 1.0, 3.0], 8, 0, 10) == pytest.approx([0.0, 2.0, 6.0])
    assert shares([0.0, 0.0, 1.0], 16, 1, 10) == pytest.approx([3.0, 3.0, 10.0])
    assert shares([0.0, 0.0], 6, 0, 10) == pytest.approx([3.0, 3.0])


@QUICK
@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=15),
    st.floats(0.0, 200.0),
    st.integers(0, 4),
    st.integers(0, 20),
)
def test_shares_are_clipped_multiples_of_the_weights_with_one_common_factor(weights, total, low, room) -> None:
    high = low + room
    found = shares(weights, total, low, high)
    assert math.fsum(found) == pytest.approx(min(max(total, low * len(weights)), high * len(weights)), abs=1e-6)
    below = [share / weight for share, weight in zip(found, weights, strict=True) if share < high - 1e-9]
    above = [share / weight for share, weight in zip(found, weights, strict=True) if share > low + 1e-9]
    # Those with room upwards have the factor or more than it, those with room downwards the factor or less.
    assert not (below and above) or min(below) >= max(above) * (1 - 1e-6)


@QUICK
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=15), st.integers(0, 200), st.integers(0, 20))
def test_integer_budgets_are_less_than_one_sample_from_their_shares(weights, total, high) -> None:
    budgets = apportion(weights, total, 0, high)
    assert sum(budgets) == min(total, high * len(weights))
    pairs = zip(budgets, shares(weights, total, 0, high), strict=True)
    assert all(abs(budget - share) < 1 + 1e-6 and 0 <= budget <= high for budget, share in pairs)


def test_equal_remainders_go_to_the_earlier_prompt() -> None:
    assert apportion([1.0, 1.0, 1.0], 11, 0, 20) == [4, 4, 3]
    assert apportion([0.1, 0.7, 0.2], 10, 0, 20) == [1, 7, 2]
    # Thirds each, but in floats the second remainder is the largest.
    assert apportion([0.1, 0.4, 0.1], 14, 0, 20) == [3, 9, 2]


def best(gains: list[list[float]], total: int) -> float:
    """The largest sum of gains that `total` samples can have, by a full dynamic program."""
    found = {0: 0.0}
    for steps in gains:
        values = [math.fsum(steps[:count]) for count in range(len(steps) + 1)]
        merged: dict[int, float] = {}
        for spent, worth in found.items():
            for count, value in enumerate(values[: total - spent + 1]):
                merged[spent + count] = max(merged.get(spent + count, -math.inf), worth + value)
        found = merged
    return found[min(total, sum(map(len, gains)))]


def worth(gains: list[list[float]], counts: list[int]) -> float:
    return math.fsum(gain for steps, count in zip(gains, counts, strict=True) for gain in steps[:count])


STEPS = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda steps: sorted(steps, reverse=True))


@QUICK
@given(st.lists(STEPS, max_size=6), st.integers(0, 30))
def test_falling_gains_are_spent_as_a_full_dynamic_program_spends_them(gains, total) -> None:
    counts = spend(gains, total)
    assert sum(counts) == min(total, sum(map(len, gains)))
    assert worth(gains, counts) == pytest.approx(best(gains, total), abs=1e-12)


@pytest.mark.parametrize("seed", range(300))
def test_gains_with_a_weak_first_step_are_spent_as_a_full_dynamic_program_spends_them(seed) -> None:
    rng = random.Random(seed)
    first, second = sorted(rng.random() for _ in range(2))
    later = sorted((rng.random() * (first + second) / 2 for _ in range(rng.randrange(6))), reverse=True)
    scales = [rng.choice((rng.random(), 0.5)) for _ in range(rng.randrange(1, 6))]
    gains = [[scale * step for step in (first, second, *later)] for scale in scales]
    total = rng.randrange(sum(map(len, gains)) + 2)
    counts = spend(gains, total)
    assert sum(counts) == min(total, sum(map(len, gains)))
    assert worth(gains, counts) == pytest.approx(best(gains, total), abs=1e-12)


def scaled(steps: tuple[float, ...], *scales: float) -> list[list[float]]:
    return [[scale * step for step in steps] for scale in scales]


def test_a_single_sample_that_gains_nothing_is_doubled_or_given_away_or_kept() -> None:
    doubled = scaled((0.0, 2.0, 1.0, 0.5, 0.25), 1.0, 0.9)
    assert spend(doubled, 4) == [2, 2]
    given_away = scaled((0.0, 2.0, 1.0, 0.5, 0.25), 1.0, 0.3)
    assert spend(given_away, 5) == [5, 0]
    kept = scaled((0.9, 1.0, 0.5), 1.0, 0.9)
    assert spend(kept, 3) == [2, 1]
    assert spend(scaled((0.0, 1.0), 1.0), 1) == [1]
