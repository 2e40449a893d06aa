"""The path-count estimate has mean p under every stopping rule, and the printed values."""

import pytest

from engine.core.law import exact_law
from engine.core.strategy import Strategy
from engine.core.unbiased import unbiased_table, visited
from engine.strategies import Balance, Fixed, Positives
from tests.support.exact_tables import in_rounds, printed

BAL2 = Balance(2, 2, 32, 4)
ROUNDS2 = in_rounds(BAL2, 8)
RULES: list[Strategy] = [
    Fixed(16, 4),
    Positives(1, 32, 4),
    Positives(8, 64, 16),
    BAL2,
    Balance(4, 4, 64, 8),
    Balance(3, 1, 20, 4),
    ROUNDS2,
    in_rounds(Positives(1, 32, 4), 8),
    in_rounds(Balance(8, 8, 128, 16), 16),
]


@pytest.mark.parametrize("strategy", RULES)
@pytest.mark.parametrize("pass_rate", [0.05, 0.1, 0.2, 0.5, 0.8, 0.95])
def test_its_mean_is_the_pass_rate(strategy, pass_rate) -> None:
    table = unbiased_table(strategy, strategy.n_max)
    law = exact_law(strategy, pass_rate, strategy.n_max)
    assert law.mean(lambda stop: table[stop.right, stop.wrong]) == pytest.approx(pass_rate, abs=1e-12)


def test_its_mean_is_the_pass_rate_with_arms_given_up() -> None:
    def hopeless(counts) -> bool:
        return counts.right == 0 and counts.total >= 12

    table = unbiased_table(BAL2, 32, hopeless)
    law = exact_law(BAL2, 0.1, 32, hopeless)
    assert law.mean(lambda stop: table[stop.right, stop.wrong]) == pytest.approx(0.1, abs=1e-12)
    without = unbiased_table(BAL2, 32)
    assert law.mean(lambda stop: without.get((stop.right, stop.wrong), 0.0)) != pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(("k_pos", "budget"), [(1, 32), (2, 20), (8, 64)])
def test_until_the_kth_right_one_it_is_k_minus_1_over_n_minus_1(k_pos, budget) -> None:
    for (right, wrong), estimate in unbiased_table(Positives(k_pos, budget, 4), budget).items():
        total = right + wrong
        expected = right / total if right < k_pos else (k_pos - 1) / (total - 1) if total > 1 else 1.0
        assert estimate == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("right", "total", "text"),
    [(2, 16, ".08696"), (3, 16, ".1000"), (4, 16, ".10811"), (2, 32, ".03636"), (3, 32, ".03846")],
)
def test_two_of_each_in_rounds_of_eight_has_the_exact_values(right, total, text) -> None:
    assert unbiased_table(ROUNDS2, 32)[right, total - right] == printed(text)


def test_exits_in_the_first_round_keep_the_pool_mean() -> None:
    table = unbiased_table(ROUNDS2, 32)
    first = {right: table[right, 8 - right] for right in range(2, 7)}
    assert first == {right: right / 8 for right in range(2, 7)}


def test_a_first_positive_after_the_first_round_says_nothing() -> None:
    table = unbiased_table(in_rounds(Positives(1, 32, 4), 8), 32)
    later = [estimate for (right, wrong), estimate in table.items() if right + wrong > 8]
    assert len(later) == 8 + 8 + 9
    assert set(later) == {0.0}


def test_a_fixed_number_of_samples_keeps_the_pool_mean() -> None:
    table = unbiased_table(Fixed(16, 4), 16)
    assert table == {(right, 16 - right): right / 16 for right in range(17)}


def test_estimates_are_probabilities_and_stand_at_the_stops_only() -> None:
    for strategy in RULES:
        table = unbiased_table(strategy, strategy.n_max)
        assert all(0.0 <= estimate <= 1.0 for estimate in table.values())
        stops = [state for state, verdict in visited(strategy, strategy.n_max).items() if verdict != "continue"]
        assert list(table) == stops


def test_the_visited_states_come_by_ascending_total_and_none_follows_a_stop() -> None:
    verdicts = visited(BAL2, 32)
    totals = [right + wrong for right, wrong in verdicts]
    assert totals == sorted(totals)
    assert (2, 3) in verdicts
    assert (3, 3) not in verdicts
    assert verdicts[2, 2] == "solved"
    assert verdicts[1, 31] == "exhausted"
