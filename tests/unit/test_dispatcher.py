"""The dispatcher: oldest arm first, width by need, the bound, back-pressure, failures."""

from dataclasses import dataclass, replace

import pytest

from engine.core.arm import Sample
from engine.core.dispatcher import Dispatcher
from engine.core.errors import RunError
from engine.core.group import Group
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts, Verdict
from engine.strategies import Balance, Fixed, Positives
from engine.strategies.estimate import Estimate
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 16)


def new(strategy=None, bound=FOREVER, **choices) -> Dispatcher:
    return Dispatcher(Policy(strategy or Balance(2, 2, 32, 4), bound, **choices))


def launches(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    found = []
    while (launch := dispatcher.next_launch()) is not None:
        found.append((launch.arm.arm_id, launch.index))
    return found


def score(dispatcher: Dispatcher, arm_id: int, index: int, is_right: bool, version: int = 0):
    return dispatcher.score(arm_id, Sample(index, float(is_right), is_right, version, 5, None))


def test_an_arm_asks_for_what_it_needs_in_the_best_case_and_no_more() -> None:
    dispatcher = new()
    dispatcher.admit(prompt(0))
    assert launches(dispatcher) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    for index in range(4):
        assert score(dispatcher, 0, index, is_right=False) is None
    assert launches(dispatcher) == [(0, 4), (0, 5)]


def test_the_oldest_arm_below_its_width_comes_first() -> None:
    dispatcher = new(Positives(1, 8, 2))
    for number in range(3):
        dispatcher.admit(prompt(number))
    assert launches(dispatcher) == [(0, 0), (1, 0), (2, 0)]
    score(dispatcher, 2, 0, is_right=False)
    score(dispatcher, 0, 0, is_right=False)
    assert launches(dispatcher) == [(0, 1), (2, 1)]


def test_a_solved_arm_makes_a_balanced_group_with_the_pool_mean_as_baseline() -> None:
    dispatcher = new()
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    for index, is_right in enumerate((False, False, True, False)):
        score(dispatcher, 0, index, is_right)
    assert launches(dispatcher) == [(0, 4)]
    retirement = score(dispatcher, 0, 4, is_right=True)
    assert retirement.reason == "solved"
    group = retirement.group
    assert sorted(s.is_right for s in group.kept) == [False, False, True, True]
    assert group.factors.baseline == 2 / 5
    assert {group.advantage(s) for s in group.kept} == {3 / 5, -2 / 5}


def test_an_exhausted_arm_without_spread_makes_no_group() -> None:
    out = Driver(Policy(Balance(2, 2, 8, 4), FOREVER), bernoulli(0.0)).run(5)
    assert [(r.reason, r.outcome, r.group) for r in out.retirements] == [("exhausted", "zero_signal", None)] * 5
    assert out.counts() == [8] * 5


def test_fixed_counts_n_max_samples_for_every_prompt() -> None:
    out = Driver(Policy(Fixed(8, 8), FOREVER), bernoulli(0.5), slots=20).run(50)
    assert out.counts() == [8] * 50
    assert all(len(r.group.kept) == 8 for r in out.retirements if r.group)


def test_slots_stay_busy_although_one_prompt_is_slow() -> None:
    out = Driver(Policy(Balance(2, 2, 32, 4), FOREVER), bernoulli(0.3), slots=8).run(600)
    assert out.busy / (8 * out.seconds) > 0.97


def test_launching_pauses_when_more_than_a_step_of_groups_waits() -> None:
    dispatcher = new(Positives(1, 8, 2), Bound(1000, 2))
    for number in range(4):
        dispatcher.admit(prompt(number))
    launches(dispatcher)
    for number in range(4):
        score(dispatcher, number, 0, is_right=False)
    launches(dispatcher)
    for number in range(4):
        score(dispatcher, number, 1, is_right=True)
    assert len(dispatcher.outbox.ready) == 4
    dispatcher.admit(prompt(9))
    assert launches(dispatcher) == []
    dispatcher.outbox.next_group()
    dispatcher.outbox.next_group()
    assert launches(dispatcher) == [(4, 0)]


def test_on_policy_launches_nothing_that_the_next_step_could_not_train() -> None:
    dispatcher = new(Positives(1, 8, 2), Bound(0, 1))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    score(dispatcher, 0, 0, is_right=False)
    launches(dispatcher)
    score(dispatcher, 0, 1, is_right=True)
    dispatcher.admit(prompt(1))
    assert launches(dispatcher) == []
    assert dispatcher.outbox.next_group()[1] == 0
    dispatcher.outbox.step_done(1, 1)
    assert launches(dispatcher) == []
    dispatcher.generation_version = 1
    assert launches(dispatcher) == [(1, 0)]


def test_every_bound_is_kept_and_nothing_deadlocks() -> None:
    for max_staleness in (0, 1, 2, 4):
        policy = Policy(Balance(2, 2, 32, 4), Bound(max_staleness, 16))
        out = Driver(policy, bernoulli(0.3), slots=64, step_s=300.0).run(1500)
        assert len(out.retirements) == 1500
        assert len(out.groups) > 500
        assert out.max_staleness <= max_staleness


def test_stale_kept_samples_are_exchanged_or_the_group_is_dropped() -> None:
    dispatcher = new(Fixed(4, 2), Bound(1, 1))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    for index, (is_right, version) in enumerate(((True, 0), (False, 0), (True, 1), (False, 1))):
        retirement = score(dispatcher, 0, index, is_right, version)
    dispatcher.outbox.step_done(2, 0)
    group, trained_at = dispatcher.outbox.next_group()
    assert trained_at == 2
    assert group is retirement.group
    assert all(s.min_version == 1 for s in group.kept)


def test_a_group_without_fresh_samples_is_dropped_not_shipped() -> None:
    dispatcher = new(Fixed(2, 2), Bound(0, 1))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    score(dispatcher, 0, 0, is_right=True)
    retirement = score(dispatcher, 0, 1, is_right=False)
    dispatcher.outbox.step_done(1, 0)
    assert dispatcher.outbox.next_group() is retirement.group
    assert dispatcher.outbox.num_shipped == 0


def test_a_failed_sample_is_asked_for_again_with_the_same_seed_until_its_prompt_is_quarantined() -> None:
    dispatcher = new(max_failures=3)
    dispatcher.admit(prompt(0))
    first = dispatcher.next_launch()
    assert dispatcher.fail(0, first.index) is None
    again = dispatcher.next_launch()
    assert (again.index, again.retry, again.seed) == (first.index, 1, first.seed)
    dispatcher.fail(0, first.index)
    dispatcher.next_launch()
    retirement = dispatcher.fail(0, first.index)
    assert (retirement.reason, retirement.outcome) == ("failed", "dropped_failed")
    assert dispatcher.arms == {}


def test_a_late_answer_to_an_older_try_is_not_open() -> None:
    dispatcher = new()
    dispatcher.admit(prompt(0))
    launch = dispatcher.next_launch()
    dispatcher.fail(0, launch.index)
    assert not dispatcher.is_open(0, launch.index, 0)
    dispatcher.next_launch()
    assert dispatcher.is_open(0, launch.index, 1)
    assert not dispatcher.is_open(7, 0, 0)


def test_expired_samples_make_an_arm_hungry_again() -> None:
    dispatcher = new(bound=Bound(1, 1))
    dispatcher.admit(prompt(0))
    launches(dispatcher)
    for index, is_right in enumerate((True, True, False, True)):
        score(dispatcher, 0, index, is_right)
    assert launches(dispatcher) == [(0, 4)]
    dispatcher.outbox.step_done(2, 0)
    dispatcher.generation_version = 2
    assert launches(dispatcher) == [(0, 5), (0, 6), (0, 7)]


@dataclass(frozen=True)
class Failing(Balance):
    """Fails when it is asked for a verdict, or for the need after some samples."""

    fails_in: str = "verdict"

    def verdict(self, counts: Counts) -> Verdict:
        if self.fails_in == "verdict":
            raise RunError("strategy failing: verdict raised")
        return "continue"

    def need(self, counts: Counts) -> int:
        if self.fails_in == "need" and counts.total:
            raise RunError("strategy failing: need raised")
        return 1


@pytest.mark.parametrize("member", ["verdict", "need"])
def test_a_failing_strategy_is_reported_with_its_arm_and_prompt(member: str) -> None:
    dispatcher = new(Failing(2, 2, 32, 4, fails_in=member))
    for number in range(2):
        dispatcher.admit(prompt(number))
    assert launches(dispatcher) == [(0, 0), (1, 0)]
    with pytest.raises(RunError, match=f"^arm 1, prompt p1: strategy failing: {member} raised"):  # noqa: PT012
        score(dispatcher, 1, 0, is_right=True)
        dispatcher.next_launch()


def test_a_dispatcher_goes_on_from_a_checkpoint_at_its_version_and_numbers() -> None:
    dispatcher = new(Positives(1, 8, 2), Bound(1, 1))
    dispatcher.begin_at(7, first_group=30, first_arm=100)
    assert (dispatcher.cutoff, dispatcher.num_arms, dispatcher.may_launch) == (6, 100, True)
    dispatcher.admit(prompt(0))
    assert launches(dispatcher) == [(100, 0)]
    score(dispatcher, 100, 0, is_right=False, version=7)
    assert launches(dispatcher) == [(100, 1)]
    score(dispatcher, 100, 1, is_right=True, version=7)
    group, trained_at = shipped(dispatcher)
    assert (group.group_id, trained_at) == (30, 7)


def shipped(dispatcher: Dispatcher) -> tuple[Group, int]:
    found = dispatcher.outbox.next_group()
    assert isinstance(found, tuple)
    return found


def test_the_turns_of_prompts_arms_and_waiting_groups_are_open_until_they_ship_or_end() -> None:
    dispatcher = new(Estimate(4.0, 2, 1, 8, "inverse_sqrt", 1.0, 16.0, 4))
    for number in range(3):
        dispatcher.admit(replace(prompt(number), turn=10 + number))
    assert sorted(dispatcher.open_turns()) == [10, 11, 12]  # two arms, and one that waits for its window
    while launch := dispatcher.next_launch():
        is_right = launch.arm.prompt.turn == 11 or launch.index > 0
        score(dispatcher, launch.arm.arm_id, launch.index, is_right)
    assert sorted(dispatcher.open_turns()) == [10, 12]  # 11 was all right, so it made no group
    shipped(dispatcher)
    assert sorted(dispatcher.open_turns()) == [12]
