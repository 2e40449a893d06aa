"""The threshold rule is the beta-binomial law; the optimal table is the best of all stopping rules."""

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from configs.load import load_config
from engine.core.arm import Sample
from engine.core.dispatcher import Dispatcher
from engine.core.futility import PAST_CAP, OptimalTable, Threshold, exit_probability, first_stop
from engine.core.past import EMPTY, Past
from engine.core.policy import Policy
from engine.core.prior import of_rates, tiers
from engine.core.staleness import Bound
from engine.core.strategy import Counts
from engine.futility_table import MAX_BUDGET, measure, solve
from engine.policy import make_policy
from engine.strategies import Balance, Fixed, Positives
from engine.strategies.rounds import Rounds
from tests.support.event_driver import prompt

BALANCE = Balance(2, 2, 32, 4)
FOREVER = Bound(1_000_000, 16)


def counts(right: int, wrong: int, budget: int = 32, expired: tuple[int, int] = (0, 0)) -> Counts:
    return Counts(right - expired[0], wrong - expired[1], right, wrong, budget)


@dataclass(frozen=True)
class Rule:
    """Stops in the listed states."""

    states: frozenset[tuple[int, int]]

    def stops(self, counts: Counts, past: Past) -> bool:
        return (counts.right, counts.wrong) in self.states


# ---- threshold


@cache
def by_urn(alpha: float, beta: float, num_left: int, right: int, wrong: int) -> float:
    """P(exit), sample by sample from a Pólya urn: no closed form."""
    if not (right or wrong):
        return 1.0
    if not num_left:
        return 0.0
    rate = alpha / (alpha + beta)
    if_right = by_urn(alpha + 1, beta, num_left - 1, max(0, right - 1), wrong)
    return rate * if_right + (1 - rate) * by_urn(alpha, beta + 1, num_left - 1, right, max(0, wrong - 1))


def by_sum(alpha: float, beta: float, num_left: int, right: int, wrong: int) -> float:
    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    return math.fsum(
        math.comb(num_left, x) * math.exp(log_beta(alpha + x, beta + num_left - x) - log_beta(alpha, beta))
        for x in range(right, num_left - wrong + 1)
    )


@pytest.mark.parametrize("alpha", [0.5, 1.0, 7.25])
@pytest.mark.parametrize("beta", [0.5, 2.0, 40.0])
@pytest.mark.parametrize("num_left", [1, 4, 31])
def test_the_exit_probability_is_the_beta_binomial_sum(alpha, beta, num_left) -> None:
    for right, wrong in itertools.product(range(5), repeat=2):
        found = exit_probability(alpha, beta, num_left, (right, wrong))
        assert found == pytest.approx(by_sum(alpha, beta, num_left, right, wrong), abs=1e-12)
        assert found == pytest.approx(by_urn(alpha, beta, num_left, right, wrong), abs=1e-12)


def test_the_exit_probability_has_its_limits() -> None:
    assert exit_probability(0.5, 2.0, 3, (2, 2)) == 0.0
    assert exit_probability(0.5, 2.0, 0, (0, 0)) == 1.0
    assert exit_probability(1e6, 1e6, 2048, (1024, 0)) == pytest.approx(0.5, abs=0.01)  # P(X = 0) is below any float


def test_the_threshold_stops_just_where_the_exit_is_too_unlikely() -> None:
    rule = Threshold(BALANCE, 0.2, 0.5, 2.0)
    for right in range(3):
        for wrong in range(32 - right):
            if not (right >= 2 and wrong >= 2) and right + wrong:
                missing = BALANCE.missing(counts(right, wrong))
                expected = by_urn(0.5 + right, 2.0 + wrong, 32 - right - wrong, *missing) < 0.2
                assert rule.stops(counts(right, wrong), EMPTY) is expected
    assert [rule.stops(counts(0, wrong), EMPTY) for wrong in range(1, 32)].count(True) > 5


def test_the_past_counts_like_samples_of_this_visit_but_costs_no_budget() -> None:
    rule = Threshold(BALANCE, 0.2, 0.5, 2.0)
    assert not rule.stops(counts(0, 3), EMPTY)
    assert rule.stops(counts(0, 3), Past(0.0, 30.0, 1))
    assert not rule.stops(counts(0, 3), Past(10.0, 30.0, 1))
    assert not rule.stops(counts(0, 3), EMPTY)  # what was known without a past still stands


def test_an_expired_sample_tells_of_p_but_is_missing_again() -> None:
    rule = Threshold(BALANCE, 0.5, 0.5, 2.0)
    fresh = exit_probability(1.5, 27.0, 6, (1, 0))
    expired = exit_probability(1.5, 27.0, 6, (2, 0))
    assert expired < fresh
    between = Threshold(BALANCE, (fresh + expired) / 2, 0.5, 2.0)
    assert not between.stops(counts(1, 25), EMPTY)
    assert between.stops(counts(1, 25, expired=(1, 0)), EMPTY)
    assert not between.stops(counts(1, 25), EMPTY)
    assert rule.stops(counts(1, 25), EMPTY)


def test_where_it_needs_expiry_only_arms_that_lost_a_sample_are_stopped() -> None:
    rule = Threshold(BALANCE, 0.2, 0.5, 2.0, needs_expiry=True)
    assert not any(rule.stops(counts(0, wrong), EMPTY) for wrong in range(32))
    assert not rule.stops(counts(0, 28), Past(0.0, 50.0, 3))
    lost_its_right_one = Counts(0, 24, 1, 27, 32)
    assert rule.stops(lost_its_right_one, EMPTY)
    assert not rule.stops(Counts(1, 1, 2, 2, 32), EMPTY)


@pytest.mark.parametrize("needs_expiry", [False, True])
def test_what_a_threshold_remembers_changes_no_answer(needs_expiry) -> None:
    def new() -> Threshold:
        return Threshold(BALANCE, 0.2, 0.5, 2.0, needs_expiry)

    states = [
        counts(right, wrong, budget, expired)
        for budget in (12, 16)
        for right, wrong in itertools.product(range(5), range(8))
        for expired in itertools.product(range(right + 1), range(wrong + 1))
    ]
    rule, pasts = new(), [EMPTY, Past(1.0, 6.0, 1)]
    for state, past in itertools.product(states, pasts):
        assert rule.stops(state, past) == new().stops(state, past), (state, past)
    for state, past in itertools.product(states, pasts):
        need = BALANCE.need(state)
        assert rule.num_sure(state, past, need) == first_stop(new(), state, past, need), (state, past)
    assert {rule.num_sure(state, EMPTY, 4) for state in states} == {1, 2, 3, 4}


def test_no_probability_is_below_zero_and_a_strategy_without_an_exit_is_not_stopped() -> None:
    assert not Threshold(BALANCE, 0.0, 0.5, 2.0).stops(counts(0, 31), EMPTY)
    assert not Threshold(Fixed(32, 32), 1.0, 0.5, 2.0).stops(counts(0, 31), EMPTY)


# ---- optimal table


def test_the_known_optimum_for_the_published_tiers_is_reproduced() -> None:
    solution = solve(BALANCE, tiers())
    assert round(solution.cost.per_useful, 2) == 10.70
    assert round(solution.cost_without.per_useful, 2) == 14.87
    assert round(solution.cost.useful, 2) == 0.35
    assert round(solution.cost_without.useful, 2) == 0.87
    assert solution.table.price == pytest.approx(solution.cost.per_useful, rel=1e-12)


EXACT = [
    (BALANCE, {0.05: (25.736785, 0.480038), 0.1: (18.134620, 0.843577), 0.2: (10.140386, 0.992869), 0.5: (5.5, 1.0)}),
    (Balance(4, 4, 64, 8), {0.05: (56.473753, 0.398591), 0.1: (38.445655, 0.893709), 0.2: (20.070283, 0.999502)}),
    (Fixed(4, 4), {p: (4.0, 1 - p**4 - (1 - p) ** 4) for p in (0.05, 0.5)}),
    (Rounds(BALANCE, 8, 4), {0.05: (27.314658, 0.480038), 0.2: (13.417560, 0.992869), 0.5: (8.566674, 1.0)}),
    (Positives(1, 32, 4), {0.1: (9.656632, None), 0.5: (2.0, None)}),
]


@pytest.mark.parametrize(("strategy", "table"), EXACT)
def test_the_cost_without_giving_up_has_its_exact_values(strategy, table) -> None:
    for p, (samples, useful) in table.items():
        cost = measure(strategy, of_rates([p]), None)
        assert cost.samples == pytest.approx(samples, abs=1e-6)
        assert useful is None or cost.useful == pytest.approx(useful, abs=1e-6)


def test_an_all_right_pool_is_no_useful_group() -> None:
    cost = measure(Positives(1, 32, 4), of_rates([0.25]), None)
    assert cost.useful == pytest.approx(0.75 * (1 - 0.75**31))  # a wrong one first, then a right one in time


def test_the_table_costs_what_it_says() -> None:
    solution = solve(BALANCE, tiers())
    cost = measure(BALANCE, tiers(), solution.table)
    assert (cost.samples, cost.useful) == pytest.approx((solution.cost.samples, solution.cost.useful), rel=1e-12)


def test_no_rule_at_all_beats_the_table_where_all_can_be_listed() -> None:
    strategy = Balance(1, 1, 4, 2)
    states = [(n, 0) for n in (1, 2, 3)] + [(0, n) for n in (1, 2, 3)]
    rules = [Rule(frozenset(chosen)) for k in range(7) for chosen in itertools.combinations(states, k)]
    for prior in (tiers(), of_rates([0.02, 0.5]), of_rates([0.0, 0.3, 0.999])):
        best = min(measure(strategy, prior, rule).per_useful for rule in rules)
        assert solve(strategy, prior).cost.per_useful == pytest.approx(best, rel=1e-12)


def test_no_random_rule_beats_the_table() -> None:
    solution, rng = solve(BALANCE, tiers()), random.Random(11)
    states = [(right, total - right) for total in range(1, 32) for right in range(total + 1)]
    best = {state for state in states if solution.table.stops(counts(*state), EMPTY)}
    costs = []
    for trial in range(200):
        share = rng.random() ** 3
        if trial % 2:  # any rule
            rule = {state for state in states if rng.random() < share}
        else:  # the table with some of its first states turned over
            rule = best ^ {state for state in states[:60] if rng.random() < share}
        costs.append(measure(BALANCE, tiers(), Rule(frozenset(rule))).per_useful)
    assert min(costs) >= solution.cost.per_useful * (1 - 1e-12)
    assert sum(cost < solution.cost_without.per_useful for cost in costs) > 20  # the trial reached good rules too


@pytest.mark.parametrize("past", [(0, 0), (0, 5), (3, 1), (0, PAST_CAP), (20, 12)])
def test_the_table_is_the_best_answer_at_its_price_after_any_past(past) -> None:
    strategy, prior = Balance(2, 1, 9, 4), tiers()
    table = solve(strategy, prior).table

    @cache
    def rest(right: int, wrong: int) -> float:
        """Least samples minus price times groups from here on."""
        verdict = strategy.verdict(counts(right, wrong, 9))
        if verdict != "continue":
            return -table.price if verdict == "solved" else 0.0
        return min(0.0, going_on(right, wrong))

    def going_on(right: int, wrong: int) -> float:
        rate = prior.next_right(past[0] + right, past[1] + wrong)
        return 1.0 + rate * rest(right + 1, wrong) + (1 - rate) * rest(right, wrong + 1)

    for total in range(1, 9):
        for right in range(total + 1):
            state = counts(right, total - right, 9)
            if strategy.verdict(state) == "continue":
                assert table.stops(state, Past(*past, 1)) is (going_on(right, total - right) >= 0.0)


def test_a_past_is_rounded_capped_and_joined_by_expired_samples() -> None:
    table = solve(BALANCE, tiers()).table

    def stopped(past: Past) -> list[bool]:
        return [table.stops(counts(r, t - r), past) for t in range(1, 12) for r in range(min(t, 2) + 1)]

    assert stopped(Past(0.3, 4.4, 1)) == stopped(Past(0.0, 5.0, 1)) != stopped(EMPTY)
    assert stopped(Past(60.0, 260.0, 9)) == stopped(Past(6.0, 26.0, 1)) != stopped(Past(0.0, 32.0, 1))
    assert stopped(Past(16.5, 16.5, 2)) == stopped(Past(16.0, 16.0, 2))
    found = set()
    for right, wrong in itertools.product(range(6), repeat=2):
        for state in ((0, 1), (1, 4), (0, 6), (1, 9)):
            old = table.stops(counts(state[0] + right, state[1] + wrong, expired=(right, wrong)), EMPTY)
            assert old is table.stops(counts(*state), Past(right, wrong, 1))
            found.add((state, old))
    assert len(found) > 4  # expired samples do change decisions


def test_an_arm_past_the_budget_of_the_table_goes_on() -> None:
    table = solve(BALANCE, tiers()).table
    assert table.stops(counts(0, 31, 64), EMPTY)
    assert not any(table.stops(counts(right, wrong, 64), EMPTY) for right in range(2) for wrong in range(32, 60))


@pytest.mark.parametrize("futility", [solve(BALANCE, tiers()).table, Threshold(BALANCE, 0.5, 0.5, 2.0)])
def test_a_hopeless_prompt_is_looked_at_again_at_every_visit(futility) -> None:
    dispatcher = Dispatcher(Policy(BALANCE, FOREVER, futility=futility))
    lengths = []
    for _ in range(5):
        dispatcher.admit(prompt(0))
        retirement = None
        while retirement is None:
            launch = dispatcher.next_launch()
            retirement = dispatcher.score(launch.arm.arm_id, Sample(launch.index, 0.0, False, 0, 9, None))
        assert (retirement.reason, retirement.outcome) == ("futile", "deferred")
        lengths.append(len(retirement.arm.counted))
    assert 1 < lengths[0] < 32
    assert lengths[1:] == [1, 1, 1, 1]
    assert dispatcher.history.past("p0", 0).wrong == sum(lengths)


def test_a_larger_exit_and_budget_are_solved_too() -> None:
    solution = solve(Balance(4, 4, 64, 8), tiers())
    assert solution.cost.per_useful < solution.cost_without.per_useful
    assert isinstance(solution.table, OptimalTable)


def test_giving_up_cannot_help_where_every_prompt_is_the_same() -> None:
    solution = solve(Balance(2, 2, 200, 4), of_rates([0.3]))
    assert solution.cost.per_useful == pytest.approx(solution.cost_without.per_useful, rel=1e-9)


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(ValueError, match="no pass rate of the prior"):
        solve(BALANCE, of_rates([0.0, 1.0]))
    with pytest.raises(ValueError, match=f"n_max <= {MAX_BUDGET}, got 513"):
        solve(Balance(2, 2, 513, 4), tiers())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["strategy.name=positives"], True),
        (["staleness.max=1000000"], False),
        (["strategy.name=fixed"], False),
        (["strategy.futility=none"], False),
    ],
)
def test_by_default_unlikely_arms_are_given_up_under_a_bound_on_staleness_only(overrides, expected):
    futility = make_policy(load_config(Path("configs/sim.toml"), overrides)).futility
    assert isinstance(futility, Threshold) == expected
