"""Pilot, then commit: the band and its bounds, the cost, what is launched when, and what is trained."""

import math
import statistics

import pytest

from engine.core.arm import Sample
from engine.core.dispatcher import Dispatcher
from engine.core.law import exact_law
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts
from engine.strategies.pilot import Pilot
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 16)
COMMIT, SPEED = Pilot(16, 48, 0.125, 0.75), Pilot(4, 20, 0.01, 0.99)


def all_fresh(right: int, wrong: int, strategy: Pilot = COMMIT) -> Counts:
    return Counts(right, wrong, right, wrong, strategy.n_max)


def judged(strategy: Pilot) -> list[str]:
    """Verdicts on 0, 1, ... right pilots."""
    n = strategy.n_pilot
    return [strategy.verdict(all_fresh(right, n - right, strategy)) for right in range(n + 1)]


@pytest.mark.parametrize(
    ("strategy", "committed"),
    [
        (COMMIT, range(2, 13)),
        (SPEED, range(1, 4)),
        (Pilot(10, 5, 0.3, 0.7), range(3, 8)),
        (Pilot(8, 8, 0.0, 0.5), range(5)),
        (Pilot(8, 8, 0.25, 1.0), range(2, 8)),
        (Pilot(8, 8, 0.0, 1.0), range(8)),
    ],
)
def test_pilots_on_the_bounds_or_between_them_are_committed(strategy, committed) -> None:
    expected = ["continue" if right in committed else "futile" for right in range(strategy.n_pilot + 1)]
    assert judged(strategy) == expected


def test_without_a_commitment_the_pilots_are_the_group() -> None:
    assert judged(Pilot(4, 0, 0.25, 0.75)) == ["futile", "solved", "solved", "solved", "futile"]


def test_the_decision_falls_at_the_last_pilot_and_never_again() -> None:
    assert {COMMIT.verdict(all_fresh(right, 0)) for right in range(1, 16)} == {"continue"}
    assert {COMMIT.verdict(all_fresh(2, wrong)) for wrong in range(14, 62)} == {"continue"}
    assert COMMIT.verdict(all_fresh(2, 62)) == "solved"
    assert COMMIT.verdict(all_fresh(62, 2)) == "solved"


def test_expired_pilots_count_for_the_decision() -> None:
    assert COMMIT.verdict(Counts(0, 0, 2, 14, 64)) == "continue"
    assert COMMIT.verdict(Counts(0, 14, 1, 15, 64)) == "futile"


def test_nothing_is_needed_beyond_the_pilots_before_the_decision() -> None:
    needs = [COMMIT.need(all_fresh(0, n)) for n in range(64)]
    assert needs == list(range(16, 0, -1)) + list(range(48, 0, -1))
    assert COMMIT.missing(all_fresh(0, 3)) == (0, 0)
    assert COMMIT.n_max == 64


def formula(strategy: Pilot, pass_rate: float) -> float:
    n = strategy.n_pilot
    inside = sum(
        math.comb(n, right) * pass_rate**right * (1.0 - pass_rate) ** (n - right)
        for right in range(n)
        if strategy.p_low * n <= right <= strategy.p_high * n
    )
    return n + strategy.n_commit * inside


RATES = (0.05, 0.1, 0.2, 0.5, 0.8, 0.95)


@pytest.mark.parametrize("strategy", [COMMIT, SPEED])
@pytest.mark.parametrize("pass_rate", [0.0, *RATES, 1.0])
def test_all_label_sequences_together_cost_the_formula(strategy, pass_rate) -> None:
    assert exact_law(strategy, pass_rate, strategy.n_max).expected_samples == pytest.approx(
        formula(strategy, pass_rate), abs=1e-9
    )


@pytest.mark.parametrize(("pass_rate", "no_spread"), [(0.05, 0.8145), (0.1, 0.6562), (0.2, 0.4112), (0.5, 0.1250)])
def test_speed_commits_what_four_samples_do_not_leave_without_spread(pass_rate, no_spread) -> None:
    assert formula(SPEED, pass_rate) == pytest.approx(4 + 20 * (1 - no_spread), abs=2e-3)


@pytest.mark.parametrize("strategy", [COMMIT, SPEED])
@pytest.mark.parametrize("pass_rate", RATES)
def test_mean_samples_of_a_prompt_equal_the_exact_value(strategy, pass_rate) -> None:
    counts = Driver(Policy(strategy, FOREVER), bernoulli(pass_rate)).run(1000).counts()
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    assert abs(statistics.fmean(counts) - formula(strategy, pass_rate)) < max(3.0 * error, 1e-6)
    assert set(counts) <= {strategy.n_pilot, strategy.n_max}


def score(dispatcher: Dispatcher, labels: str):
    retirement = None
    for label in labels:
        launch = dispatcher.next_launch()
        sample = Sample(launch.index, float(label == "R"), label == "R", 0, 5, None)
        retirement = dispatcher.score(launch.arm.arm_id, sample)
    return retirement


def test_the_commitment_is_launched_after_the_last_pilot_was_scored() -> None:
    dispatcher = Dispatcher(Policy(Pilot(4, 3, 0.25, 0.75), FOREVER))
    dispatcher.admit(prompt(0))
    launches = [dispatcher.next_launch() for _ in range(4)]
    assert [launch.index for launch in launches] == [0, 1, 2, 3]
    assert dispatcher.next_launch() is None
    for index in (3, 1, 0):
        dispatcher.score(0, Sample(index, 1.0, True, 0, 5, None))
        assert dispatcher.next_launch() is None
    dispatcher.score(0, Sample(2, 0.0, False, 0, 5, None))
    assert [dispatcher.next_launch().index for _ in range(3)] == [4, 5, 6]


@pytest.mark.parametrize(("labels", "right"), [("RRRR", 4), ("WWWW", 0)])
def test_pilots_outside_the_band_make_no_group_and_are_remembered(labels, right) -> None:
    dispatcher = Dispatcher(Policy(Pilot(4, 3, 0.25, 0.75), FOREVER))
    dispatcher.admit(prompt(0))
    retirement = score(dispatcher, labels)
    assert (retirement.reason, retirement.group) == ("futile", None)
    past = dispatcher.history.past("p0", 0)
    assert (past.right, past.total, past.num_visits) == (right, 4, 1)
    assert not dispatcher.has_work


@pytest.mark.parametrize("group_size", [0, 4])
def test_a_committed_arm_trains_on_the_union(group_size) -> None:
    dispatcher = Dispatcher(Policy(Pilot(4, 3, 0.25, 0.75, group_size), FOREVER))
    dispatcher.admit(prompt(0))
    group = score(dispatcher, "RWRWWWR").group
    kept = {s.index for s in group.kept}
    assert len(kept) == (group_size or 7)
    assert kept <= set(range(7))
    assert group.factors.baseline == 3 / 7


def test_a_smaller_group_is_drawn_from_pilots_and_commitment_alike() -> None:
    out = Driver(Policy(Pilot(4, 4, 0.01, 0.99, 4), FOREVER), bernoulli(0.5)).run(400)
    kept = [s.index for r in out.retirements if r.group for s in r.group.kept]
    assert len(kept) > 1000
    share = sum(index < 4 for index in kept) / len(kept)
    assert abs(share - 0.5) < 3 * math.sqrt(0.25 / len(kept))
