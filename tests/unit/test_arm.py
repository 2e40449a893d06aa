"""An arm counts its samples in launch order, once each."""

import pytest

from engine.core.arm import Arm, Sample
from engine.strategies import Fixed
from tests.support.event_driver import prompt


def sample(index: int, is_right: bool = True, version: int = 0) -> Sample:
    return Sample(index, float(is_right), is_right, version, 5, None)


def arm(accounting: str = "launch", launches: int = 3) -> Arm:
    made = Arm(0, prompt(0), 1, Fixed(100, 4), 100, accounting)
    for _ in range(launches):
        made.launch()
    return made


def test_a_sample_that_came_back_early_waits_for_those_launched_before_it() -> None:
    one = arm()
    one.score(sample(2))
    assert one.take_next() is None
    one.score(sample(0, is_right=False))
    assert one.take_next().index == 0
    assert one.take_next() is None
    one.score(sample(1))
    assert [one.take_next().index, one.take_next().index] == [1, 2]


def test_completion_accounting_counts_in_order_of_arrival() -> None:
    one = arm("completion")
    one.score(sample(2))
    assert one.take_next().index == 2


def test_a_failed_launch_is_asked_for_again_under_its_own_index_before_new_ones() -> None:
    one = arm()
    assert one.fail(1) == 1
    assert one.launch() == (1, 1)
    assert one.launch() == (3, 0)


def test_scoring_a_launch_twice_is_an_error() -> None:
    one = arm()
    one.score(sample(0))
    with pytest.raises(KeyError):
        one.score(sample(0))


def test_fresh_counts_follow_the_cutoff_in_both_directions() -> None:
    one = arm()
    for index, version in enumerate((1, 2, 3)):
        one.score(sample(index, is_right=index != 1, version=version))
        one.take_next()
    for cutoff, fresh in ((0, (2, 1)), (2, (1, 1)), (3, (1, 0)), (4, (0, 0)), (1, (2, 1))):
        counts = one.counts(cutoff)
        assert (counts.fresh_right, counts.fresh_wrong) == fresh
        assert (counts.right, counts.wrong, counts.total) == (2, 1, 3)


def test_fresh_counts_are_right_when_the_cutoff_moved_between_two_samples() -> None:
    one = arm()
    one.score(sample(0, version=0))
    one.take_next()
    one.counts(1)
    one.score(sample(1, version=0))
    one.take_next()
    one.score(sample(2, version=1))
    one.take_next()
    counts = one.counts(1)
    assert (counts.fresh_right, counts.right) == (1, 3)
