"""Rounds: the exit is tested at their ends only, and cost, success and bias are the exact ones."""

from collections import Counter

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.dispatcher import Dispatcher
from engine.core.group import seal
from engine.core.law import exact_law
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts, Strategy
from engine.strategies.balance import Balance
from engine.strategies.positives import Positives
from engine.strategies.rounds import Rounds
from tests.support.event_driver import prompt
from tests.support.exact_tables import cells, printed

RATES = (0.05, 0.1, 0.2, 0.5)
CODE_BALANCE = Rounds(Balance(2, 2, 32, 4), 8, 4)
CODE_POS = Rounds(Positives(1, 32, 4), 8, 4)
POS_8 = Rounds(Positives(8, 64, 16), 8, 8)
BALANCE_4 = Rounds(Balance(4, 4, 64, 8), 8, 8)
BALANCE_8 = Rounds(Balance(8, 8, 128, 16), 16, 8)


def table(rates: tuple[float, ...], rows: list[tuple[Strategy, str]]) -> list[tuple[Strategy, float, str]]:
    return [(strategy, rate, text) for strategy, row in rows for rate, text in cells(rates, row)]


@pytest.mark.parametrize(
    ("strategy", "rate", "text"),
    table(
        RATES,
        [
            (POS_8, "63.921682 61.193991 42.978770 19.447467"),
            (BALANCE_4, "57.808667 41.536312 23.580819 13.984904"),
            (CODE_BALANCE, "27.314658 20.962482 13.417560 8.566674"),
            (CODE_POS, "19.164289 13.564285 9.605136 8.031373"),
            (BALANCE_8, "122.085 86.180 47.515 28.892"),
        ],
    ),
)
def test_expected_samples_are_the_exact_ones(strategy, rate, text) -> None:
    assert exact_law(strategy, rate, strategy.n_max).expected_samples == printed(text)


@pytest.mark.parametrize(
    ("strategy", "rate", "text"),
    table(
        RATES,
        [
            (POS_8, ".014219 .307829 .957980 1.000000"),
            (BALANCE_4, ".398591 .893709 .999502 1.000000"),
            (CODE_BALANCE, ".480038 .843577 .992869 1.000000"),
        ],
    ),
)
def test_success_at_the_budget_is_exact_and_that_of_sample_by_sample_exits(strategy, rate, text) -> None:
    success = exact_law(strategy, rate, strategy.n_max).solved_rate
    assert success == printed(text)
    assert success == pytest.approx(exact_law(strategy.exit, rate, strategy.n_max).solved_rate, abs=1e-12)


@pytest.mark.parametrize("rate", RATES)
def test_one_right_sample_is_found_unless_the_whole_budget_is_wrong(rate) -> None:
    assert exact_law(CODE_POS, rate, 32).solved_rate == pytest.approx(1.0 - (1.0 - rate) ** 32, abs=1e-12)


@pytest.mark.parametrize("rate", RATES)
def test_balance_costs_the_same_for_right_and_wrong_exchanged(rate) -> None:
    mirrored = exact_law(CODE_BALANCE, 1.0 - rate, 32).expected_samples
    assert mirrored == pytest.approx(exact_law(CODE_BALANCE, rate, 32).expected_samples, abs=1e-9)


@pytest.mark.parametrize(
    ("most_of_16", "strategy", "text"),
    [(2, CODE_BALANCE, "22.03"), (2, CODE_POS, "14.67"), (5, CODE_BALANCE, "15.93"), (5, CODE_POS, "11.30")],
)
def test_mean_cost_of_the_papers_hard_and_easy_prompts_is_exact(most_of_16, strategy, text) -> None:
    costs = [exact_law(strategy, k / 16, 32).expected_samples for k in range(1, most_of_16 + 1)]
    assert sum(costs) / len(costs) == printed(text)


@pytest.mark.parametrize(
    ("strategy", "rate", "text"),
    [
        *table(RATES, [(CODE_BALANCE, ".1937 .0343 .0008 .0000")]),
        *table((0.8, 0.95), [(CODE_POS, ".1678 .6634")]),
    ],
)
def test_arms_without_signal_are_as_frequent_as_computed(strategy, rate, text) -> None:
    assert exact_law(strategy, rate, 32).zero_signal_rate == printed(text)


@pytest.mark.parametrize(
    ("strategy", "rate", "text"),
    table(
        RATES,
        [
            (POS_8, ".05015 .10393 .21712 .51923"),
            (CODE_BALANCE, ".06632 .13213 .23773 .50000"),
            (CODE_POS, ".07757 .12969 .21889 .50098"),
        ],
    ),
)
def test_the_pool_mean_is_biased_as_computed(strategy, rate, text) -> None:
    assert exact_law(strategy, rate, strategy.n_max).pool_mean == printed(text)


def counts(right: int, wrong: int, budget: int = 32) -> Counts:
    return Counts(right, wrong, right, wrong, budget)


def test_an_exit_that_holds_within_a_round_waits_for_its_end() -> None:
    within = [CODE_BALANCE.verdict(counts(2, wrong)) for wrong in range(2, 6)]
    assert within == ["continue"] * 4
    assert CODE_BALANCE.verdict(counts(2, 6)) == "solved"
    assert CODE_BALANCE.verdict(counts(2, 7)) == "continue"


def test_the_last_round_ends_the_arm() -> None:
    assert CODE_BALANCE.verdict(counts(1, 23)) == "continue"
    assert CODE_BALANCE.verdict(counts(1, 31)) == "exhausted"


def test_a_budget_that_is_no_multiple_of_the_round_ends_the_arm_too() -> None:
    assert CODE_BALANCE.verdict(counts(1, 9, budget=10)) == "exhausted"
    assert CODE_BALANCE.need(counts(1, 7, budget=10)) == 2


def test_exits_read_fresh_samples_and_rounds_count_all() -> None:
    expired = Counts(fresh_right=2, fresh_wrong=1, right=4, wrong=12, budget=32)
    assert CODE_BALANCE.verdict(expired) == "continue"
    assert CODE_BALANCE.missing(expired) == (0, 1)
    assert CODE_BALANCE.need(expired) == 8
    assert CODE_BALANCE.verdict(Counts(2, 1, 4, 28, 32)) == "exhausted"


def test_need_is_what_is_left_of_the_round() -> None:
    assert [CODE_POS.need(counts(0, wrong)) for wrong in (0, 1, 7, 8, 31)] == [8, 7, 1, 8, 1]


def test_what_is_kept_is_the_exits_choice() -> None:
    assert (CODE_POS.group_size, CODE_POS.selection, CODE_POS.n_max) == (4, "balanced", 32)
    assert CODE_POS.missing(counts(0, 5)) == (1, 0)


def test_another_budget_than_the_exits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"round_size x rounds must be the exit's n_max = 32, got 40"):
        Rounds(Balance(2, 2, 32, 4), 8, 5)


def new_dispatcher(strategy: Strategy) -> Dispatcher:
    dispatcher = Dispatcher(Policy(strategy, Bound(1_000_000, 16)))
    dispatcher.admit(prompt(0))
    return dispatcher


def launches(dispatcher: Dispatcher) -> list[int]:
    found = []
    while (launch := dispatcher.next_launch()) is not None:
        found.append(launch.index)
    return found


def test_nothing_of_a_round_is_launched_before_the_round_before_it_was_tested() -> None:
    dispatcher = new_dispatcher(CODE_BALANCE)
    assert launches(dispatcher) == list(range(8))
    for index in (7, 5, 3, 1, 6, 4, 2):
        assert dispatcher.score(0, Sample(index, 0.0, False, 0, 5, None)) is None
        assert launches(dispatcher) == []
    assert dispatcher.score(0, Sample(0, 0.0, False, 0, 5, None)) is None
    assert launches(dispatcher) == list(range(8, 16))


def test_a_whole_round_counts_although_its_first_samples_would_do() -> None:
    dispatcher = new_dispatcher(CODE_POS)
    launches(dispatcher)
    for index in range(8):
        retirement = dispatcher.score(0, Sample(index, float(index == 0), index == 0, 0, 5, None))
    assert retirement.reason == "solved"
    assert len(retirement.arm.counted) == 8
    assert retirement.group.factors.baseline == 1 / 8


def ended_arm(strategy: Strategy, right: int, wrong: int) -> Arm:
    arm = Arm(0, prompt(0), 1, strategy, strategy.n_max)
    for index in range(right + wrong):
        arm.launch()
        arm.score(Sample(index, float(index < right), index < right, 0, 5, None))
        arm.take_next()
    return arm


@pytest.mark.parametrize("size", [4, 5, 16])
@pytest.mark.parametrize("total", [8, 16, 32])
def test_the_kept_set_is_that_of_the_authors_code_whatever_the_pool(size, total) -> None:
    for right in range(total + 1):
        wrong = total - right
        wanted_right = min(size // 2, right)
        wanted_wrong = min(size - wanted_right, wrong)
        lacking = min(size, total) - wanted_right - wanted_wrong
        if lacking and right > wanted_right:
            wanted_right += lacking
        else:
            wanted_wrong += lacking
        for exit in (Balance(2, 2, 32, size), Positives(1, 32, size)):
            arm = ended_arm(Rounds(exit, 8, 4), right, wrong)
            group = seal(0, arm, 0, AdvantageRule(), "keep")
            kept = Counter(sample.is_right for sample in group.kept)
            assert (kept[True], kept[False]) == (wanted_right, wanted_wrong), (right, wrong)


def test_an_arm_without_a_right_sample_falls_back_to_wrong_ones_at_zero_advantage() -> None:
    group = seal(0, ended_arm(CODE_POS, 0, 32), 0, AdvantageRule(), "keep")
    assert [group.advantage(sample) for sample in group.kept] == [0.0] * 4
    assert not group.is_useful
