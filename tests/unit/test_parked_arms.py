"""Arms that wait with their pool: when they go on, what of them counts, and that none is lost."""

from collections import Counter

import pytest

from engine.core.arm import Sample
from engine.core.decisions import Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Strategy
from engine.strategies import Balance
from engine.strategies.giveup import GiveUp
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 16)
STUBBORN = GiveUp(2, 1.0, 1_000)
"""Rounds of two; never gives up before its budget is used."""


def new(strategy: Strategy = STUBBORN, num_prompts: int = 1, **choices) -> Dispatcher:
    dispatcher = Dispatcher(Policy(strategy, FOREVER, **choices))
    for number in range(num_prompts):
        dispatcher.admit(prompt(number))
    return dispatcher


def launches(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    return [(launch.arm.arm_id, launch.index) for launch in iter(dispatcher.next_launch, None)]


def score(dispatcher: Dispatcher, arm_id: int, index: int, *, is_right: bool = False) -> Retirement | None:
    return dispatcher.score(arm_id, Sample(index, float(is_right), is_right, 0, 5, None))


def park(dispatcher: Dispatcher, *arm_ids: int) -> None:
    """Score the first round of these arms wrong."""
    for arm_id in arm_ids:
        for index in range(2):
            assert score(dispatcher, arm_id, index) is None
        assert dispatcher.arms[arm_id].is_parked


def test_a_parked_arm_asks_for_nothing() -> None:
    dispatcher = new()
    assert launches(dispatcher) == [(0, 0), (0, 1)]
    park(dispatcher, 0)
    assert launches(dispatcher) == []
    assert dispatcher.has_work


def test_a_parked_arm_goes_on_after_enough_admissions_and_before_the_next_prompt() -> None:
    dispatcher = new(requeue_after=3)
    launches(dispatcher)
    park(dispatcher, 0)
    for number in range(1, 4):
        assert not dispatcher.resume(is_last=False)
        dispatcher.admit(prompt(number))
    assert dispatcher.resume(is_last=False)
    assert not dispatcher.resume(is_last=False)
    assert launches(dispatcher) == [(0, 2), (0, 3)] + [(number, index) for number in (1, 2, 3) for index in (0, 1)]


def test_a_parked_arm_goes_on_at_once_when_no_prompt_is_left_or_none_needs_to_come_first() -> None:
    for choices, is_last in (({"requeue_after": 64}, True), ({"requeue_after": 0}, False)):
        dispatcher = new(**choices)
        launches(dispatcher)
        park(dispatcher, 0)
        assert dispatcher.resume(is_last=is_last)
        assert launches(dispatcher) == [(0, 2), (0, 3)]


def test_the_arm_that_is_parked_longest_goes_on_first_and_one_at_a_time() -> None:
    dispatcher = new(num_prompts=3)
    launches(dispatcher)
    park(dispatcher, 2, 0, 1)
    order = []
    while dispatcher.resume(is_last=True):
        order += launches(dispatcher)
    assert order == [(2, 2), (2, 3), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_an_arm_that_is_parked_again_waits_again() -> None:
    dispatcher = new(requeue_after=1)
    launches(dispatcher)
    park(dispatcher, 0)
    dispatcher.admit(prompt(1))
    assert dispatcher.resume(is_last=False)
    launches(dispatcher)
    for index in (2, 3):
        score(dispatcher, 0, index)
    assert dispatcher.arms[0].is_parked
    assert not dispatcher.resume(is_last=False)
    dispatcher.admit(prompt(2))
    assert dispatcher.resume(is_last=False)


def test_samples_in_flight_while_an_arm_is_parked_count_once() -> None:
    dispatcher = new(fixed_width=5)
    assert launches(dispatcher) == [(0, index) for index in range(5)]
    park(dispatcher, 0)
    for index in (4, 3):
        assert dispatcher.is_open(0, index, 0)
        assert score(dispatcher, 0, index) is None
    arm = dispatcher.arms[0]
    assert [s.index for s in arm.counted] == [0, 1]
    assert score(dispatcher, 0, 2) is None
    assert [s.index for s in arm.counted] == [0, 1, 2, 3, 4]
    assert launches(dispatcher) == []
    assert dispatcher.resume(is_last=True)
    assert not dispatcher.resume(is_last=True)
    assert launches(dispatcher) == [(0, index) for index in range(5, 10)]


def test_an_arm_that_is_solved_while_it_is_parked_does_not_come_back() -> None:
    dispatcher = new(fixed_width=4)
    launches(dispatcher)
    park(dispatcher, 0)
    assert score(dispatcher, 0, 2, is_right=True) is None
    retirement = score(dispatcher, 0, 3)
    assert (retirement.reason, retirement.outcome) == ("solved", "sealed")
    assert len(retirement.group.kept) == 4
    assert not dispatcher.resume(is_last=True)
    assert not dispatcher.has_work


def test_a_launch_that_failed_while_its_arm_is_parked_is_asked_for_again_at_once() -> None:
    dispatcher = new(fixed_width=4)
    launches(dispatcher)
    park(dispatcher, 0)
    assert dispatcher.fail(0, 2) is None
    assert launches(dispatcher) == [(0, 2)]


def test_a_parked_arm_whose_launch_keeps_failing_is_quarantined_and_does_not_come_back() -> None:
    dispatcher = new(fixed_width=3, max_failures=2)
    launches(dispatcher)
    park(dispatcher, 0)
    assert dispatcher.fail(0, 2) is None
    launches(dispatcher)
    assert dispatcher.fail(0, 2).outcome == "dropped_failed"
    assert not dispatcher.resume(is_last=True)


def test_a_parked_arm_does_not_launch_because_its_samples_expired() -> None:
    dispatcher = Dispatcher(Policy(STUBBORN, Bound(1, 1)))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    park(dispatcher, 0)
    dispatcher.outbox.step_done(5, 0)
    dispatcher.generation_version = 5
    assert launches(dispatcher) == []


PAIR = Balance(1, 1, 4, 2)


def wrong_until_the_end(dispatcher: Dispatcher) -> list[Retirement]:
    ended = []
    while True:
        for arm_id, index in launches(dispatcher):
            if (retirement := score(dispatcher, arm_id, index)) is not None:
                ended.append(retirement)
        if not dispatcher.resume(is_last=True) and all(arm.is_parked for arm in dispatcher.arms.values()):
            return ended


@pytest.mark.parametrize("max_requeues", [0, 1, 3])
def test_an_arm_without_signal_gets_its_budget_again_so_many_times(max_requeues) -> None:
    dispatcher = new(PAIR, unresolved="requeue", max_requeues=max_requeues)
    (retirement,) = wrong_until_the_end(dispatcher)
    assert (retirement.reason, retirement.outcome) == ("exhausted", "zero_signal")
    assert len(retirement.arm.counted) == retirement.arm.budget == 4 * (1 + max_requeues)
    assert retirement.arm.num_requeues == max_requeues
    assert dispatcher.history.past("p0", 0).wrong == 4 * (1 + max_requeues)


@pytest.mark.parametrize("unresolved", ["drop", "keep", "defer"])
def test_without_requeue_the_budget_is_given_once(unresolved) -> None:
    (retirement,) = wrong_until_the_end(new(PAIR, unresolved=unresolved))
    assert len(retirement.arm.counted) == 4
    assert retirement.arm.num_requeues == 0


def test_an_arm_with_signal_is_not_requeued_at_its_budget() -> None:
    dispatcher = new(Balance(2, 2, 4, 4), unresolved="requeue")
    launches(dispatcher)
    retirements = [score(dispatcher, 0, index, is_right=index == 0) for index in range(4)]
    assert (retirements[-1].reason, retirements[-1].outcome) == ("exhausted", "sealed")


def test_a_requeued_arm_that_is_solved_later_has_all_its_samples_in_the_pool() -> None:
    dispatcher = new(PAIR, unresolved="requeue", max_requeues=1)
    while launched := launches(dispatcher):
        for _, index in launched:
            score(dispatcher, 0, index)
    assert dispatcher.arms[0].is_parked
    assert dispatcher.resume(is_last=True)
    ((_, index),) = launches(dispatcher)
    retirement = score(dispatcher, 0, index, is_right=True)
    assert retirement.reason == "solved"
    assert retirement.group.factors.baseline == 1 / 5
    assert dispatcher.history.past("p0", 0).num_visits == 1


@pytest.mark.parametrize("slots", [1, 7, 64])
@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("requeue_after", [0, 16, 10_000])
@pytest.mark.parametrize("bound", [Bound(2, 4), FOREVER])
def test_every_prompt_of_a_run_ends_once_and_every_sample_counts_once(slots, width, requeue_after, bound) -> None:
    choices = {"fixed_width": width, "requeue_after": requeue_after}
    for policy in (
        Policy(GiveUp(3, 0.8, 30), bound, **choices),
        Policy(PAIR, bound, unresolved="requeue", max_requeues=2, **choices),
    ):
        driver = Driver(policy, bernoulli(0.15), slots=slots, step_s=200.0)
        out = driver.run(60)
        assert Counter(r.arm.prompt.prompt_id for r in out.retirements) == {f"p{number}": 1 for number in range(60)}
        assert not driver.dispatcher.has_work
        for retirement in out.retirements:
            arm = retirement.arm
            assert [s.index for s in arm.counted] == list(range(len(arm.counted)))
            assert len(arm.counted) <= arm.budget <= policy.strategy.n_max * (1 + arm.num_requeues)
            assert arm.num_requeues <= policy.max_requeues
        assert any(r.arm.num_requeues or len(r.arm.counted) > 3 for r in out.retirements)
        if not width and bound is FOREVER:
            assert out.num_launched == sum(out.counts())
