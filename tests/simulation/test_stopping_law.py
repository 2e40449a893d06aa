"""The number of counted samples and the kept lengths obey one-by-one sampling, whatever the concurrency."""

import math
import statistics

import pytest

from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.strategies import Balance, Positives
from tests.support.event_driver import Driver, Outcome, bernoulli

FOREVER = Bound(1_000_000, 16)
EXACT = [
    (Balance(2, 2, 32, 4), {0.05: 25.736785, 0.1: 18.134620, 0.2: 10.140386, 0.5: 5.5}),
    (Balance(4, 4, 64, 8), {0.05: 56.473753, 0.1: 38.445655, 0.2: 20.070283, 0.5: 10.1875}),
    (Positives(8, 64, 16), {0.05: 63.878530, 0.1: 60.196746, 0.2: 39.651869, 0.5: 16.0}),
    (Positives(1, 32, 4), {0.05: 16.125770, 0.1: 9.656632, 0.2: 4.996039, 0.5: 2.0}),
]
"""Expected samples of a prompt, exact (truncated negative binomial and its two-sided form)."""
CASES = [(strategy, p, exact) for strategy, table in EXACT for p, exact in table.items()]


def run(strategy, pass_rate: float, num_prompts: int, **choices) -> Outcome:
    law = bernoulli(pass_rate, mean_right=100, mean_wrong=200, sigma=0.8)
    return Driver(Policy(strategy, FOREVER, **choices), law).run(num_prompts)


def z_score(counts: list[int], exact: float) -> float:
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    return abs(statistics.fmean(counts) - exact) / max(error, 1e-9)


@pytest.mark.parametrize(("strategy", "pass_rate", "exact"), CASES)
@pytest.mark.parametrize("width", [0, 8])
def test_mean_samples_of_a_prompt_equal_the_exact_value(strategy, pass_rate, exact, width) -> None:
    counts = run(strategy, pass_rate, 1000, fixed_width=width).counts()
    assert z_score(counts, exact) < 3.0 or abs(statistics.fmean(counts) - exact) < 1e-6


def kept_length_ratios(out: Outcome) -> tuple[float, float]:
    kept = [s for r in out.retirements if r.group for s in r.group.kept]
    right = statistics.fmean(s.num_tokens for s in kept if s.is_right)
    wrong = statistics.fmean(s.num_tokens for s in kept if not s.is_right)
    return right / 100, wrong / 200


def test_kept_lengths_have_the_law_they_were_drawn_from_with_eight_in_flight() -> None:
    ratios = kept_length_ratios(run(Balance(2, 2, 32, 4), 0.2, 8000, fixed_width=8))
    assert ratios == pytest.approx((1.0, 1.0), abs=0.02)


def test_completion_accounting_fails_both_checks() -> None:
    out = run(Balance(2, 2, 32, 4), 0.2, 1500, fixed_width=8, accounting="completion")
    right, wrong = kept_length_ratios(out)
    assert right < 0.9
    assert wrong < 0.8
    assert z_score(out.counts(), 10.140386) > 3.0


def test_one_seed_gives_the_same_counted_samples_and_kept_sets_at_any_width_and_slot_count() -> None:
    def pools(out: Outcome) -> dict[str, tuple[list[int], list[int]]]:
        return {
            r.arm.prompt.prompt_id: (
                [s.num_tokens for s in r.arm.counted],
                sorted(s.index for s in r.group.kept) if r.group else [],
            )
            for r in out.retirements
        }

    law = bernoulli(0.3)
    base = pools(Driver(Policy(Balance(2, 2, 32, 4), FOREVER), law, slots=1).run(400))
    for width, slots in ((0, 64), (8, 64), (32, 100), (3, 7)):
        policy = Policy(Balance(2, 2, 32, 4), FOREVER, fixed_width=width)
        assert pools(Driver(policy, law, slots=slots).run(400)) == base


def test_width_by_need_launches_nothing_that_does_not_count() -> None:
    out = run(Balance(2, 2, 32, 4), 0.2, 2000)
    assert out.num_launched == sum(out.counts())
