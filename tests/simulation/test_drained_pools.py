"""Draining under fixed widths: what is issued has its exact mean, lengths and labels keep their law."""

import math
import statistics
from pathlib import Path

import pytest

from configs.load import load_config
from engine.core.law import exact_law
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.unbiased import unbiased_table
from engine.policy import make_policy
from engine.simulation.report import Report
from engine.simulation.run import simulate
from engine.strategies import Balance
from tests.support.event_driver import Driver, bernoulli

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
POSITIVES_8 = "strategy.name=positives strategy.k_pos=8 strategy.n_max=64 strategy.group_size=16"
BALANCE_4 = "strategy.k_pos=4 strategy.k_neg=4 strategy.n_max=64 strategy.group_size=8"
BALANCE_2 = "strategy.k_pos=2 strategy.k_neg=2 strategy.n_max=32 strategy.group_size=4"
RATES = (0.05, 0.1, 0.2, 0.5)
ISSUED = [
    (POSITIVES_8, 8, (63.948, 61.940, 46.173, 23.0)),
    (POSITIVES_8, 16, (63.984, 63.148, 52.954, 31.0)),
    (BALANCE_4, 8, (58.943, 44.477, 27.063, 17.1875)),
    (BALANCE_4, 16, (61.083, 50.731, 35.031, 25.1875)),
    (BALANCE_2, 8, (28.615, 23.612, 17.024, 12.5)),
]
"""Settings, requests in flight C, E[min(T - 1 + C, n_max)] at each of RATES."""
CASES = [(rule, width, p, exact) for rule, width, row in ISSUED for p, exact in zip(RATES, row, strict=True)]
NUM_PROMPTS = 600


def play(overrides: str) -> Report:
    """The preset without expiry, every arm drained."""
    base = ["staleness.max=1000000", "strategy.at_exit=drain", f"sim.prompts={NUM_PROMPTS}"]
    return simulate(load_config(PRESET, [*base, *overrides.split()]), step_s=0.0)


@pytest.mark.parametrize(("rule", "width", "pass_rate", "exact"), CASES)
def test_a_drained_visit_counts_its_stopping_sample_and_what_was_in_flight(rule, width, pass_rate, exact) -> None:
    config = load_config(PRESET, rule.split())
    law = exact_law(make_policy(config).strategy, pass_rate, config.strategy.n_max)
    assert law.mean(lambda stop: min(stop.total - 1 + width, config.strategy.n_max)) == pytest.approx(exact, abs=6e-4)
    # A slot for every request: no arm waits for its width, so that C requests are in flight when it stops.
    slots = f"sim.slots={NUM_PROMPTS * width} strategy.width={width}"
    report = play(f"{rule} {slots} sim.pass_rate={pass_rate} strategy.accounting=completion")
    error = report.samples_per_prompt_se
    assert abs(report.samples_per_prompt_mean - exact) < max(3.0 * error, 1e-3)
    assert report.tokens_wasted == 0
    assert report.samples == round(report.samples_per_prompt_mean * NUM_PROMPTS)


def test_launch_accounting_issues_as_many_where_every_answer_takes_as_long() -> None:
    setting = f"{BALANCE_2} sim.slots=4800 strategy.width=8 sim.pass_rate=0.2"
    report = play(f"{setting} sim.tokens_sigma=0")
    assert abs(report.samples_per_prompt_mean - 17.024) < 3.0 * report.samples_per_prompt_se
    # With unequal lengths others run ahead behind a slow launch, and all of that is drained.
    assert play(setting).samples_per_prompt_mean > 20.0


def test_width_by_need_drains_nothing_so_its_law_is_that_of_the_exit() -> None:
    drained, aborted = (
        play(f"{BALANCE_2} sim.pass_rate=0.2"),
        play(f"{BALANCE_2} sim.pass_rate=0.2 strategy.at_exit=abort"),
    )
    assert drained.samples_per_prompt_mean == aborted.samples_per_prompt_mean
    assert drained.samples == aborted.samples
    assert abs(drained.samples_per_prompt_mean - 10.140386) < 3.0 * drained.samples_per_prompt_se


def test_what_is_issued_has_the_lengths_and_labels_of_its_law_where_what_came_back_first_has_not() -> None:
    setting = f"{BALANCE_2} sim.pass_rate=0.2 strategy.width=8 strategy.accounting=completion sim.prompts=6000"
    drained, aborted = play(setting), play(f"{setting} strategy.at_exit=abort")
    # Whether a request is made never depends on its own length (Wald): exact over the pool, 95,000 samples.
    mean_tokens = drained.tokens_generated / drained.samples / 64.0
    assert mean_tokens == pytest.approx(1.0, abs=3.0 * math.sqrt(math.expm1(0.8**2) / drained.samples))
    # Two of each class, drawn from pools that a short right answer ends early: nearly, not exactly.
    assert drained.kept_length_ratio_right == pytest.approx(0.96, abs=0.025)
    assert drained.kept_length_ratio_wrong == pytest.approx(1.0, abs=0.025)
    assert aborted.kept_length_ratio_right < 0.7
    assert aborted.kept_length_ratio_wrong < 0.6


def test_completed_only_estimates_are_far_off_where_wrong_answers_are_longer_and_drained_ones_are_not() -> None:
    setting = f"{BALANCE_2} sim.pass_rate=0.2 strategy.width=8 strategy.accounting=completion sim.prompts=4000"
    drained = play(f"{setting} sim.length_ratio_wrong=2")
    aborted = play(f"{setting} sim.length_ratio_wrong=2 strategy.at_exit=abort")
    assert 0.2 + aborted.pool_mean_bias == pytest.approx(0.35, abs=0.01)
    assert 0.20 <= 0.2 + drained.pool_mean_bias <= 0.225


def test_the_estimate_at_the_stopping_sample_has_mean_p_although_more_was_drained() -> None:
    strategy = Balance(2, 2, 32, 4)
    policy = Policy(strategy, Bound(1_000_000, 16), fixed_width=8, at_exit="drain")
    arms = [retirement.arm for retirement in Driver(policy, bernoulli(0.1), slots=64).run(3000).retirements]
    assert sum(arm.stop is not None for arm in arms) > 1000
    table = unbiased_table(strategy, 32)
    stops = [arm.stop or (arm.num_right, len(arm.counted)) for arm in arms]
    estimates = [table[right, total - right] for right, total in stops]
    assert abs(statistics.fmean(estimates) - 0.1) < 3.0 * statistics.stdev(estimates) / math.sqrt(len(estimates))


def test_failing_requests_change_nothing_that_is_drained() -> None:
    setting = f"{BALANCE_2} sim.pass_rate=0.3 strategy.width=8 worker.max_sample_failures=100"
    report = play(f"{setting} sim.failure_rate=0.3 strategy.accounting=completion")
    assert report.samples > round(report.samples_per_prompt_mean * NUM_PROMPTS), "failed requests are wasted"
    assert report.samples_per_prompt_mean > 10.0
    assert report.useful_groups == NUM_PROMPTS * report.success_rate
