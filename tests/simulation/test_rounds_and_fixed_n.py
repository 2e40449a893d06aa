"""Strategies that end by rounds or at a fixed n, run by the dispatcher: costs, steps and kept sets, in any order."""

import math
import statistics
from collections import Counter

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.strategies.balance import Balance
from engine.strategies.fixed import Fixed
from engine.strategies.positives import Positives
from engine.strategies.raft import Raft
from engine.strategies.rounds import Rounds
from tests.support.event_driver import Driver, Outcome, bernoulli

RATES = (0.05, 0.1, 0.2, 0.5)
FOREVER = Bound(1_000_000, 16)
NUM_PROMPTS = 400


def run(strategy, rate: float, num_prompts: int = NUM_PROMPTS, **choices) -> Outcome:
    """Wrong answers twice as long as right ones."""
    return Driver(Policy(strategy, FOREVER, **choices), bernoulli(rate, 100, 200)).run(num_prompts)


def goes_on(total: int, rate: float, k_pos: int, k_neg: int) -> float:
    """u(t): P(the exit does not hold after t samples)."""
    return 1.0 - sum(
        math.comb(total, right) * rate**right * (1.0 - rate) ** (total - right)
        for right in range(k_pos, total - k_neg + 1)
    )


def cost_in_rounds(rate: float, k: tuple[int, int], round_size: int, rounds: int) -> tuple[float, float]:
    """Mean and standard deviation of the samples of an arm, from P(more than j rounds) = u(jM)."""
    tail = [goes_on(number * round_size, rate, *k) for number in range(rounds)]
    mean = round_size * sum(tail)
    square = round_size**2 * sum((2 * number + 1) * more for number, more in enumerate(tail))
    return mean, math.sqrt(max(0.0, square - mean * mean))


ROUNDS = [
    (Rounds(Positives(8, 64, 16), 8, 8), (8, 0), "63.921682 61.193991 42.978770 19.447467"),
    (Rounds(Balance(4, 4, 64, 8), 8, 8), (4, 4), "57.808667 41.536312 23.580819 13.984904"),
    (Rounds(Balance(2, 2, 32, 4), 8, 4), (2, 2), "27.314658 20.962482 13.417560 8.566674"),
    (Rounds(Positives(1, 32, 4), 8, 4), (1, 0), "19.164289 13.564285 9.605136 8.031373"),
    (Rounds(Balance(8, 8, 128, 16), 16, 8), (8, 8), "122.085 86.180 47.515 28.892"),
]
"""Rule, what its exit needs of each class, exact mean samples of an arm at RATES."""
CASES = [
    (strategy, k, rate, float(text))
    for strategy, k, row in ROUNDS
    for rate, text in zip(RATES, row.split(), strict=True)
]


@pytest.mark.parametrize(("strategy", "k", "rate", "exact"), CASES)
def test_arms_in_rounds_cost_and_succeed_as_computed(strategy, k, rate, exact) -> None:
    mean, deviation = cost_in_rounds(rate, k, strategy.round_size, strategy.rounds)
    assert mean == pytest.approx(exact, abs=5e-4)
    num_prompts = NUM_PROMPTS if exact < 40 else NUM_PROMPTS // 4
    out = run(strategy, rate, num_prompts)
    assert abs(statistics.fmean(out.counts()) - exact) <= 3.0 * deviation / math.sqrt(num_prompts)
    success = 1.0 - goes_on(strategy.n_max, rate, *k)
    solved = sum(retirement.reason == "solved" for retirement in out.retirements)
    spread = math.sqrt(num_prompts * success * (1.0 - success))
    assert abs(solved - num_prompts * success) <= 3.0 * spread + 0.01
    assert out.num_launched == sum(out.counts()), "rounds launch nothing that does not count"


@pytest.mark.parametrize("rule", [ROUNDS[2][0], ROUNDS[3][0]])
def test_rounds_count_and_keep_the_same_samples_at_any_width_and_slot_count(rule) -> None:
    def pools(slots: int, width: int) -> dict[str, tuple[list[int], list[int], float]]:
        policy = Policy(rule, FOREVER, fixed_width=width, unresolved="keep")
        out = Driver(policy, bernoulli(0.2, 100, 200), slots=slots).run(200)
        return {
            r.arm.prompt.prompt_id: (
                [sample.num_tokens for sample in r.arm.counted],
                [sample.index for sample in r.group.kept],
                r.group.factors.baseline,
            )
            for r in out.retirements
        }

    base = pools(slots=1, width=0)
    assert len(base) == 200
    for slots, width in ((64, 0), (7, 3), (64, 12), (200, 40)):
        assert pools(slots, width) == base


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_rounds_keep_every_bound_and_all_arms_end(max_staleness) -> None:
    policy = Policy(ROUNDS[2][0], Bound(max_staleness, 16))
    out = Driver(policy, bernoulli(0.3), slots=64, step_s=300.0).run(600)
    assert len(out.retirements) == 600
    assert len(out.groups) > 200
    assert out.max_staleness <= max_staleness
    assert all(len(retirement.arm.counted) % 8 == 0 for retirement in out.retirements)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("rate", RATES)
def test_refilling_keeps_as_many_prompts_as_computed(size, rate) -> None:
    out = run(Fixed(size, size), rate)
    has_spread = 1.0 - rate**size - (1.0 - rate) ** size
    kept = sum(retirement.group is not None for retirement in out.retirements)
    spread = math.sqrt(NUM_PROMPTS * has_spread * (1.0 - has_spread))
    assert abs(kept - NUM_PROMPTS * has_spread) <= 3.0 * spread
    assert sum(out.counts()) == NUM_PROMPTS * size


def test_refilled_steps_are_full_and_the_surplus_waits_for_the_next_one() -> None:
    policy = Policy(Fixed(4, 4), Bound(1_000_000, 8))
    driver = Driver(policy, bernoulli(0.5), slots=64, step_s=2000.0)
    out = driver.run(300)
    sealed = [retirement.group.group_id for retirement in out.retirements if retirement.group is not None]
    assert [group.group_id for group, _ in out.groups] == sorted(sealed), "each sealed group ships once"
    steps = Counter(trained_at for _, trained_at in out.groups)
    assert [steps[version] for version in range(len(steps) - 1)] == [8] * (len(steps) - 1)
    assert all(group.is_useful for group, _ in out.groups)
    assert out.dropped == []


@pytest.mark.parametrize("rate", RATES)
def test_filtered_steps_shrink_by_the_groups_without_spread(rate) -> None:
    policy = Policy(Fixed(4, 4), FOREVER, unresolved="shrink")
    driver = Driver(policy, bernoulli(rate), slots=64)
    out = driver.run(NUM_PROMPTS)
    assert len(out.groups) == NUM_PROMPTS, "every prompt takes a place"
    assert driver.dispatcher.outbox.learner_version == NUM_PROMPTS // 16
    assert all(len(group.kept) == (4 if group.is_useful else 0) for group, _ in out.groups)
    without = rate**4 + (1.0 - rate) ** 4
    empty = sum(not group.kept for group, _ in out.groups)
    assert abs(empty - NUM_PROMPTS * without) <= 3.0 * math.sqrt(NUM_PROMPTS * without * (1.0 - without))


@pytest.mark.parametrize("max_staleness", [0, 1_000_000])
def test_steps_of_groups_without_samples_only_still_advance_the_version(max_staleness) -> None:
    policy = Policy(Fixed(4, 4), Bound(max_staleness, 16), unresolved="shrink")
    driver = Driver(policy, bernoulli(0.0), slots=64, step_s=100.0)
    out = driver.run(160)
    assert driver.dispatcher.outbox.learner_version == len(out.groups) // 16 >= 3
    assert sum(len(group.kept) for group, _ in out.groups) == 0
    assert out.max_staleness == 0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_expiry_does_not_change_which_prompts_a_filtered_step_is_made_of(max_staleness) -> None:
    def places(unresolved: str) -> tuple[list[tuple[str, int, bool]], int]:
        policy = Policy(Fixed(4, 4), Bound(max_staleness, 16), unresolved=unresolved)
        out = Driver(policy, bernoulli(0.2), slots=64, step_s=300.0).run(600)
        shipped = [(group.arm.prompt.prompt_id, version, group.is_useful) for group, version in out.groups]
        return shipped, len(out.retirements)

    filtered, num_ended = places("shrink")
    assert (filtered, num_ended) == places("keep")
    assert len(filtered) < num_ended, "some prompts did expire"


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_every_prompt_is_trained_when_groups_without_spread_are_kept(rate) -> None:
    out = run(Fixed(4, 4), rate, unresolved="keep")
    assert [len(group.kept) for group, _ in out.groups] == [4] * NUM_PROMPTS
    without = rate**4 + (1.0 - rate) ** 4
    useless = sum(not group.is_useful for group, _ in out.groups)
    assert abs(useless - NUM_PROMPTS * without) <= 3.0 * math.sqrt(NUM_PROMPTS * without * (1.0 - without))


@pytest.mark.parametrize("rate", RATES)
def test_raft_trains_all_right_samples_and_no_other(rate) -> None:
    out = run(Raft(8, 0), rate, rule=AdvantageRule(baseline="zero"))
    kept = [sample for group, _ in out.groups for sample in group.kept]
    assert all(sample.is_right for sample in kept)
    assert len(kept) == sum(r.arm.num_right for r in out.retirements)
    spread = math.sqrt(NUM_PROMPTS * 8 * rate * (1.0 - rate))
    assert abs(len(kept) - NUM_PROMPTS * 8 * rate) <= 3.0 * spread
