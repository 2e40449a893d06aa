"""Cost, success, zero signal and bias of every exit rule equal the exact tables, at every pass rate printed."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.group import seal
from engine.core.kept import balanced, kept_law
from engine.core.law import Law, exact_law, implied_weight
from engine.core.strategy import Counts, Strategy, Verdict
from engine.strategies import Balance, Fixed, Positives
from tests.support.event_driver import prompt
from tests.support.exact_tables import cells, in_rounds, printed

RATES = (0.05, 0.1, 0.2, 0.5)
POS1, POS8, POS16 = Positives(1, 32, 4), Positives(8, 64, 16), Positives(16, 128, 32)
BAL2, BAL4, BAL8 = Balance(2, 2, 32, 4), Balance(4, 4, 64, 8), Balance(8, 8, 128, 16)


def law(strategy: Strategy, pass_rate: float) -> Law:
    return exact_law(strategy, pass_rate, strategy.n_max)


def table(*rows: tuple[Strategy, str]) -> list[tuple[Strategy, float, str]]:
    return [(strategy, rate, text) for strategy, row in rows for rate, text in cells(RATES, row)]


@pytest.mark.parametrize(
    ("strategy", "pass_rate", "text"),
    table(
        (POS8, "63.878530 60.196746 39.651869 16.000000"),
        (in_rounds(POS8, 8), "63.921682 61.193991 42.978770 19.447467"),
        (BAL4, "56.473753 38.445655 20.070283 10.187500"),
        (in_rounds(BAL4, 8), "57.808667 41.536312 23.580819 13.984904"),
        (BAL2, "25.736785 18.134620 10.140386 5.500000"),
        (in_rounds(BAL2, 8), "27.314658 20.962482 13.417560 8.566674"),
        (POS1, "16.125770 9.656632 4.996039 2.000000"),
        (in_rounds(POS1, 8), "19.164289 13.564285 9.605136 8.031373"),
        (POS16, "127.993320 124.597715 79.910680 32.000000"),
        (BAL8, "119.915 79.122 40.011 19.142"),
        (in_rounds(BAL8, 16), "122.085 86.180 47.515 28.892"),
    ),
)
def test_expected_samples_equal_the_exact_value(strategy, pass_rate, text) -> None:
    assert law(strategy, pass_rate).expected_samples == printed(text)


@pytest.mark.parametrize(
    ("strategy", "pass_rate", "text"),
    table(
        (POS8, ".014219 .307829 .957980 1.000000"),
        (BAL4, ".398591 .893709 .999502 1.000000"),
        (BAL2, ".480038 .843577 .992869 1.000000"),
    ),
)
def test_success_equals_the_exact_value_and_rounds_do_not_change_it(strategy, pass_rate, text) -> None:
    assert law(strategy, pass_rate).solved_rate == printed(text)
    assert law(in_rounds(strategy, 8), pass_rate).solved_rate == printed(text)


@pytest.mark.parametrize(
    ("strategy", "pass_rate", "text"),
    [
        *table(
            (Fixed(4, 4), ".8145 .6562 .4112 .1250"),
            (Fixed(8, 8), ".6634 .4305 .1678 .0078"),
            (in_rounds(BAL2, 8), ".1937 .0343 .0008 .0000"),
        ),
        (in_rounds(POS1, 8), 0.8, ".1678"),
        (in_rounds(POS1, 8), 0.95, ".6634"),
    ],
)
def test_zero_signal_equals_the_exact_value(strategy, pass_rate, text) -> None:
    assert law(strategy, pass_rate).zero_signal_rate == printed(text)


@pytest.mark.parametrize(
    ("strategy", "pass_rate", "text"),
    table(
        (POS8, ".05023 .10526 .22096 .53101"),
        (in_rounds(POS8, 8), ".05015 .10393 .21712 .51923"),
        (in_rounds(BAL2, 8), ".06632 .13213 .23773 .50000"),
        (BAL2, ".07691 .15415 .27123"),
        (in_rounds(POS1, 8), ".07757 .12969 .21889 .50098"),
        (POS1, ".154 .255 .402 .693"),
    ),
)
def test_the_stopping_bias_of_the_pool_mean_equals_the_exact_value(strategy, pass_rate, text) -> None:
    assert law(strategy, pass_rate).pool_mean == printed(text)


@pytest.mark.parametrize(("pass_rate", "text"), [(0.1, ".2558"), (0.5, ".6931")])
def test_the_mean_of_an_uncapped_first_positive_pool_is_its_closed_form(pass_rate, text) -> None:
    value = law(Positives(1, 300, 4), pass_rate).pool_mean
    assert value == printed(text)
    assert value == pytest.approx(-pass_rate * math.log(pass_rate) / (1.0 - pass_rate), rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "in_flight", "pass_rate", "text"),
    [
        (strategy, in_flight, rate, text)
        for strategy, in_flight, row in (
            (POS8, 8, "63.948 61.940 46.173 23.0"),
            (POS8, 16, "63.984 63.148 52.953 31.0"),
            (BAL4, 8, "58.943 44.477 27.063 17.1875"),
            (BAL4, 16, "61.083 50.731 35.031 25.1875"),
            (BAL2, 8, "28.615 23.612 17.024 12.5"),
        )
        for rate, text in cells(RATES, row)
    ],
)
def test_a_fixed_width_issues_the_exact_number_of_samples(strategy, in_flight, pass_rate, text) -> None:
    issued = law(strategy, pass_rate).mean(lambda stop: min(stop.total - 1 + in_flight, strategy.n_max))
    assert issued == printed(text)


@pytest.mark.parametrize(
    ("size", "pass_rate", "text"),
    [
        *((4, rate, text) for rate, text in cells(RATES, "21.565 11.635 6.793 4.571")),
        *((16, rate, text) for rate, text in cells(RATES, "28.578 19.639 16.463 16.0005")),
    ],
)
def test_samples_of_a_useful_group_under_dynamic_sampling_equal_the_exact_value(size, pass_rate, text) -> None:
    fixed = law(Fixed(size, size), pass_rate)
    assert fixed.expected_samples / fixed.group_rate == printed(text)


@pytest.mark.parametrize(
    ("strategy", "pass_rate", "shares"),
    [(BAL2, 0.2, (9, 18, 31)), (BAL4, 0.2, (19, 32, 47)), (BAL4, 0.5, (10, 13, 18))],
)
def test_quantiles_of_the_counted_samples_equal_the_exact_values(strategy, pass_rate, shares) -> None:
    found = law(strategy, pass_rate)
    for share, expected in zip((0.5, 0.9, 0.99), shares, strict=True):
        below = found.mean(lambda stop, at=expected: stop.total < at)
        assert below < share <= below + found.mean(lambda stop, at=expected: stop.total == at)


@pytest.mark.parametrize(
    ("strategy", "last", "text"), [(BAL2, 2, "22.03"), (POS1, 2, "14.67"), (BAL2, 5, "15.93"), (POS1, 5, "11.30")]
)
def test_the_mean_cost_of_the_papers_prompt_sets_equals_the_exact_value(strategy, last, text) -> None:
    costs = [law(in_rounds(strategy, 8), k / 16).expected_samples for k in range(1, last + 1)]
    assert sum(costs) / last == printed(text)


def test_eight_samples_of_a_class_in_eight_rounds_cost_the_cap_at_32_and_much_less_at_64() -> None:
    assert law(in_rounds(Positives(8, 32, 16), 4), 0.2).expected_samples == printed("30.76")
    assert law(in_rounds(POS8, 8), 0.2).expected_samples == printed("42.98")
    assert law(in_rounds(Balance(8, 8, 32, 16), 4), 0.5).expected_samples == printed("20.57")
    assert law(in_rounds(Balance(8, 8, 64, 16), 8), 0.5).expected_samples / 64 == printed(".36")


@pytest.mark.parametrize("strategy", [POS8, BAL4, in_rounds(BAL2, 8), Fixed(16, 16)])
@pytest.mark.parametrize("pass_rate", [0.05, 0.37, 0.8])
def test_probabilities_sum_to_one_and_right_samples_obey_walds_identity(strategy, pass_rate) -> None:
    found = law(strategy, pass_rate)
    assert found.mean(lambda stop: 1.0) == pytest.approx(1.0, abs=1e-12)
    right = found.mean(lambda stop: stop.right)
    assert right == pytest.approx(pass_rate * found.expected_samples, rel=1e-12)


def at_most(successes: int, draws: int, pass_rate: float) -> float:
    return sum(
        math.comb(draws, k) * pass_rate**k * (1.0 - pass_rate) ** (draws - k) for k in range(min(successes, draws) + 1)
    )


@pytest.mark.parametrize("pass_rate", [0.05, 0.3, 0.9])
def test_the_walk_agrees_with_binomial_tails(pass_rate) -> None:
    found = law(POS8, pass_rate)
    assert found.expected_samples == pytest.approx(sum(at_most(7, t, pass_rate) for t in range(64)), rel=1e-12)
    assert found.solved_rate == pytest.approx(1.0 - at_most(7, 64, pass_rate), rel=1e-9)


def test_balance_costs_the_same_with_right_and_wrong_exchanged() -> None:
    assert law(BAL4, 0.05).expected_samples == pytest.approx(law(BAL4, 0.95).expected_samples, rel=1e-12)


@pytest.mark.parametrize(("pass_rate", "stops"), [(0.0, (0, 32)), (1.0, (32, 0))])
def test_a_certain_label_has_one_stop(pass_rate, stops) -> None:
    certain = [(s.right, s.wrong) for s in law(BAL2, pass_rate).stops if s.probability]
    assert certain == [stops]


def sealed_counts(strategy: Strategy, right: int, wrong: int, seed: int) -> tuple[int, int] | None:
    arm = Arm(0, prompt(0), seed, strategy, strategy.n_max)
    for index in range(right + wrong):
        arm.launch()
        arm.score(Sample(index, float(index < right), index < right, 0, 1, None))
        arm.take_next()
    group = seal(0, arm, 0, AdvantageRule())
    return None if group is None else (sum(s.is_right for s in group.kept), sum(not s.is_right for s in group.kept))


@pytest.mark.parametrize("size", [0, 2, 3, 4, 8])
@pytest.mark.parametrize("selection", ["balanced", "right"])
def test_the_law_keeps_what_sealing_keeps(size, selection) -> None:
    strategy = Balance(2, 2, 32, size, selection)
    for right in range(1, 7):
        for wrong in range(1, 7):
            ((kept_right, kept_wrong, probability),) = kept_law(strategy, right, wrong)
            assert probability == 1.0
            assert sealed_counts(strategy, right, wrong, seed=3) == (kept_right, kept_wrong)


@pytest.mark.parametrize(
    ("size", "right", "wrong", "kept"),
    [
        (4, 9, 9, (2, 2)),
        (3, 9, 9, (1, 2)),
        (4, 1, 31, (1, 3)),
        (4, 31, 1, (3, 1)),
        (4, 0, 9, (0, 4)),
        (4, 1, 1, (1, 1)),
    ],
)
def test_half_of_each_class_is_kept_and_the_odd_one_is_wrong(size, right, wrong, kept) -> None:
    assert balanced(size, right, wrong) == kept


def test_a_blind_choice_keeps_right_samples_as_often_as_sealing_does() -> None:
    strategy = Fixed(8, 4)
    seen = Counter(sealed_counts(strategy, 3, 5, seed) for seed in range(4000))
    exact = kept_law(strategy, 3, 5)
    assert sum(share for *_, share in exact) == pytest.approx(1.0)
    assert [kept for kept, *_ in exact] == [0, 1, 2, 3]
    assert [kept for kept, *_ in kept_law(strategy, 5, 3)] == [1, 2, 3, 4]
    for kept_right, kept_wrong, share in exact:
        error = math.sqrt(share * (1.0 - share) / 4000)
        assert abs(seen[kept_right, kept_wrong] / 4000 - share) < 4 * error


def test_a_balanced_group_of_one_sample_has_one_class_only_and_is_not_made() -> None:
    strategy = Positives(1, 32, 1)
    assert sealed_counts(strategy, 1, 3, seed=3) is None
    assert implied_weight(law(strategy, 0.3), AdvantageRule()) == 0.0


@dataclass(frozen=True)
class Waits(Balance):
    """Answers `again` where `then` says go on."""

    then: Verdict = "again"

    def verdict(self, counts: Counts) -> Verdict:
        verdict = Balance.verdict(self, counts)
        return self.then if verdict == "continue" else verdict


def test_an_arm_that_waits_goes_on_from_its_counts() -> None:
    waits = Waits(2, 2, 32, 4)
    assert [s.probability for s in law(waits, 0.3).stops] == [s.probability for s in law(BAL2, 0.3).stops]


def test_given_up_arms_stop_as_futile_and_make_no_group() -> None:
    found = exact_law(BAL2, 0.2, 32, lambda counts: counts.total == 8 and counts.right == 0)
    futile = [stop for stop in found.stops if stop.verdict == "futile"]
    assert [(stop.right, stop.wrong) for stop in futile] == [(0, 8)]
    assert futile[0].probability == pytest.approx(0.8**8)
    assert found.expected_samples < law(BAL2, 0.2).expected_samples
    assert found.group_rate == pytest.approx(1.0 - 0.8**8 - 0.2**32)


def test_a_strategy_that_goes_on_past_its_budget_is_named() -> None:
    @dataclass(frozen=True)
    class Endless(Fixed):
        def verdict(self, counts: Counts) -> Verdict:
            return "continue"

    with pytest.raises(ValueError, match=r"Endless\.verdict must end an arm at its budget of 4 samples"):
        exact_law(Endless(4, 4), 0.5, 4)


@pytest.mark.parametrize("pass_rate", [-0.1, 1.1, math.nan])
def test_a_pass_rate_outside_the_unit_interval_is_refused(pass_rate) -> None:
    with pytest.raises(ValueError, match=r"pass_rate must be in \[0, 1\]"):
        exact_law(BAL2, pass_rate, 32)


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="budget must be >= 1, got 0"):
        exact_law(BAL2, 0.5, 0)
