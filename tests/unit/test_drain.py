"""Draining: an arm whose exit holds asks for nothing more, and all that it launched counts before it retires."""

from dataclasses import dataclass

from engine.core.advantage import AdvantageRule
from engine.core.arm import Sample
from engine.core.decisions import Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.futility import first_stop
from engine.core.past import Past
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts, Strategy
from engine.strategies import Balance, GiveUp, Pilot, Positives, Rounds
from tests.support.event_driver import prompt

FOREVER = Bound(1_000_000, 4)
ONE_EACH = Balance(1, 1, 8, 2)


def new(strategy: Strategy = ONE_EACH, width: int = 4, bound: Bound = FOREVER, **choices) -> Dispatcher:
    """One arm, its first requests launched."""
    dispatcher = Dispatcher(Policy(strategy, bound, fixed_width=width, at_exit="drain", **choices))
    dispatcher.admit(prompt(0))
    assert launches(dispatcher) == list(range(width))
    return dispatcher


def launches(dispatcher: Dispatcher) -> list[int]:
    return [launch.index for launch in iter(dispatcher.next_launch, None)]


def score(dispatcher: Dispatcher, index: int, label: str, version: int = 0) -> Retirement | None:
    return dispatcher.score(0, Sample(index, float(label == "+"), label == "+", version, 5, None))


def score_all(dispatcher: Dispatcher, labels: str, first: int = 0, version: int = 0) -> Retirement | None:
    """Score launches in a row; only the last may retire the arm."""
    for index, label in enumerate(labels, first):
        retirement = score(dispatcher, index, label, version)
        assert retirement is None or index == first + len(labels) - 1
    return retirement


def test_a_draining_arm_asks_for_nothing_and_retires_with_all_it_launched() -> None:
    dispatcher = new()
    score_all(dispatcher, "+-")
    assert launches(dispatcher) == []
    assert dispatcher.has_work
    assert score(dispatcher, 3, "-") is None
    retirement = score(dispatcher, 2, "-")
    assert (retirement.reason, retirement.outcome) == ("solved", "sealed")
    assert [sample.index for sample in retirement.arm.counted] == [0, 1, 2, 3]
    assert retirement.group.factors.baseline == 0.25
    assert dispatcher.history.past("p0", 0).total == 4
    assert dispatcher.arms == {}


def test_what_was_scored_behind_the_stopping_sample_counts_too() -> None:
    dispatcher = new()
    for index in (3, 2, 1):
        assert score(dispatcher, index, "-") is None
    retirement = score(dispatcher, 0, "+")
    assert retirement is not None
    assert len(retirement.arm.counted) == 4
    assert list(retirement.arm.uncounted()) == []


def test_an_arm_that_aborts_counts_up_to_its_stopping_sample() -> None:
    dispatcher = Dispatcher(Policy(ONE_EACH, FOREVER, fixed_width=4))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    retirement = score_all(dispatcher, "+-")
    assert len(retirement.arm.counted) == 2
    assert sorted(retirement.arm.in_flight) == [2, 3]


def test_width_by_need_leaves_nothing_to_drain() -> None:
    dispatcher = Dispatcher(Policy(ONE_EACH, FOREVER, at_exit="drain"))
    dispatcher.admit(prompt(0))
    assert launches(dispatcher) == [0, 1]
    assert score_all(dispatcher, "+-").reason == "solved"


def test_completion_accounting_drains_in_any_order() -> None:
    dispatcher = new(accounting="completion")
    for index, label in ((3, "+"), (1, "-"), (2, "+")):
        assert score(dispatcher, index, label) is None
    assert launches(dispatcher) == []
    assert [sample.index for sample in score(dispatcher, 0, "-").arm.counted] == [3, 1, 2, 0]


def test_a_launch_that_fails_while_its_arm_drains_is_asked_for_again() -> None:
    dispatcher = new()
    score_all(dispatcher, "+-")
    assert score(dispatcher, 3, "-") is None
    assert dispatcher.fail(0, 2) is None
    assert launches(dispatcher) == [2]
    assert dispatcher.is_open(0, 2, retry=1)
    assert len(score(dispatcher, 2, "+").arm.counted) == 4


def test_the_prompt_of_an_arm_that_keeps_failing_while_it_drains_is_quarantined() -> None:
    dispatcher = new(max_failures=2)
    score_all(dispatcher, "+-")
    dispatcher.fail(0, 2)
    launches(dispatcher)
    retirement = dispatcher.fail(0, 2)
    assert (retirement.reason, retirement.outcome) == ("failed", "dropped_failed")
    assert list(retirement.arm.in_flight) == [3]


def test_an_exit_that_expired_during_the_drain_holds_no_more_and_the_arm_goes_on() -> None:
    dispatcher = new(bound=Bound(1, 1))
    score_all(dispatcher, "+-")
    dispatcher.outbox.step_done(2, 0)
    dispatcher.generation_version = 2
    assert score(dispatcher, 2, "+") is None
    assert launches(dispatcher) == [], "one more is under way"
    assert score(dispatcher, 3, "+") is None
    assert launches(dispatcher) == [4, 5, 6, 7]
    assert score_all(dispatcher, "+-", first=4, version=2) is None
    retirement = score_all(dispatcher, "--", first=6, version=2)
    assert retirement.reason == "solved"
    assert len(retirement.arm.counted) == 8
    assert min(sample.min_version for sample in retirement.group.kept) == 2


def test_an_exit_that_expired_with_the_budget_used_up_is_exhausted() -> None:
    dispatcher = new(Balance(1, 1, 4, 2), bound=Bound(1, 1))
    score_all(dispatcher, "+-")
    dispatcher.outbox.step_done(2, 0)
    retirement = score_all(dispatcher, "++", first=2)
    assert (retirement.reason, retirement.outcome) == ("exhausted", "dropped_expired")


def test_an_exit_of_a_round_stands_although_the_drain_ends_inside_the_next_round() -> None:
    retirement = score_all(new(Rounds(ONE_EACH, 2, 4), width=3), "+--")
    assert retirement.reason == "solved"
    assert len(retirement.arm.counted) == 3


def test_a_pilot_that_was_turned_down_stays_so() -> None:
    retirement = score_all(new(Pilot(2, 4, 0.25, 0.75), width=3), "--+")
    assert (retirement.reason, retirement.outcome) == ("futile", "declined")
    assert len(retirement.arm.counted) == 3


def test_a_hopeless_chain_whose_drained_samples_are_right_makes_a_group() -> None:
    for width, reason in ((3, "exhausted"), (4, "solved")):
        retirement = score_all(new(GiveUp(2, 0.0, 8), width=width), "--++"[:width])
        assert (retirement.reason, retirement.outcome) == (reason, "sealed")


@dataclass
class NoRightInTwo:
    """Gives an arm up while it has at least two wrong samples and no right one."""

    def num_sure(self, counts: Counts, past: Past, need: int) -> int:
        return first_stop(self, counts, past, need)

    def stops(self, counts: Counts, past: Past) -> bool:
        return counts.wrong >= 2 and not counts.right


def test_futility_is_asked_again_when_the_drain_is_over() -> None:
    dispatcher = new(Positives(2, 8, 2), width=3, futility=NoRightInTwo())
    retirement = score_all(dispatcher, "---")
    assert (retirement.reason, retirement.outcome) == ("futile", "deferred")
    dispatcher = new(Positives(2, 8, 2), width=3, futility=NoRightInTwo())
    assert score_all(dispatcher, "--+") is None
    assert launches(dispatcher) == [3, 4, 5]
    assert score_all(dispatcher, "+--", first=3).reason == "solved"


def test_the_unbiased_baseline_is_that_of_the_stopping_sample() -> None:
    choices = {"rule": AdvantageRule(baseline="unbiased")}
    retirement = score_all(new(Positives(2, 8, 4), width=4, **choices), "++--")
    assert retirement.group.factors.baseline == 1.0
    dispatcher = new(Positives(2, 8, 4), width=4, **choices)
    score(dispatcher, 0, "+")
    score(dispatcher, 1, "-")
    assert launches(dispatcher) == [4, 5]
    retirement = score_all(dispatcher, "+---", first=2)
    assert len(retirement.arm.counted) == 6
    # (K - 1) / (T - 1) with T = 3; the pool's mean is 2/6.
    assert retirement.group.factors.baseline == 0.5
