"""Every advantage rule's implied prompt weight w(p) equals the exact table, and the engine's groups carry it."""

import math
import statistics

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.group import Group
from engine.core.law import exact_law, implied_weight
from engine.core.past import EMPTY, Past
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Strategy
from engine.strategies import Balance, Fixed, Positives
from tests.support.event_driver import Driver, bernoulli
from tests.support.exact_tables import cells, in_rounds, printed

RATES = (0.05, 0.1, 0.2, 0.5, 0.8, 0.95)
ADA_BALANCE = in_rounds(Balance(2, 2, 32, 4), 8)
ADA_POS = in_rounds(Positives(1, 32, 4), 8)
POOL, KEPT = AdvantageRule(), AdvantageRule(baseline="kept")
STD = AdvantageRule(baseline="kept", divides_by_std=True)
RLOO = AdvantageRule(baseline="leave_one_out")
MAXRL = AdvantageRule(weight="maxrl")
INVERSE = AdvantageRule(weight="inverse", max_weight=1e9)
REMAX = AdvantageRule(baseline="greedy")
ROWS: list[tuple[str, Strategy, AdvantageRule, str]] = [
    ("drgrpo4", Fixed(4, 4), KEPT, ".7500 .7500 .7500 .7500 .7500 .7500"),
    ("rloo4", Fixed(4, 4), RLOO, "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000"),
    ("rloo16", Fixed(16, 16), RLOO, "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000"),
    ("remax1", Fixed(1, 1), REMAX, "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000"),
    ("remax4", Fixed(4, 4), REMAX, "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000"),
    ("grpo4", Fixed(4, 4), STD, "1.4809 1.4638 1.4357 1.3995 1.4357 1.4809"),
    ("grpo8", Fixed(8, 8), STD, "2.3133 2.1773 1.9707 1.7358 1.9707 2.3133"),
    ("grpo16", Fixed(16, 16), STD, "3.1633 2.7574 2.2717 1.8727 2.2717 3.1633"),
    ("maxrl16", Fixed(16, 16), MAXRL, "10.7342 7.9411 4.8241 1.9999 1.2500 1.0526"),
    ("ada-balance", ADA_BALANCE, POOL, "5.8570 3.9464 2.0447 1.0000 2.0447 5.8570"),
    ("ada-balance-kept", ADA_BALANCE, KEPT, "3.8143 2.5976 1.5588 1.0000 1.5588 3.8143"),
    ("ada-balance-inverse", ADA_BALANCE, INVERSE, "96.75 41.36 11.44 2.242 2.708 6.475"),
    ("ada-balance-std", ADA_BALANCE, AdvantageRule(divides_by_std=True), "23.13 12.62 5.055 1.982 5.055 23.13"),
    ("ada-pos", ADA_POS, POOL, "4.2673 2.8023 1.6557 .9726 1.3517 1.6792"),
    ("ada-balance-unbiased", ADA_BALANCE, AdvantageRule(baseline="unbiased"), "6.012"),
]


def weight(
    strategy: Strategy, pass_rate: float, rule: AdvantageRule, past: Past = EMPTY, greedy_rate: float = 0.5
) -> float:
    return implied_weight(exact_law(strategy, pass_rate, strategy.n_max), rule, past, greedy_rate)


@pytest.mark.parametrize(
    ("strategy", "rule", "pass_rate", "text"),
    [
        pytest.param(strategy, rule, rate, text, id=f"{name}-{rate}")
        for name, strategy, rule, row in ROWS
        for rate, text in cells(RATES, row)
    ],
)
def test_the_implied_weight_equals_the_exact_value(strategy, rule, pass_rate, text) -> None:
    assert weight(strategy, pass_rate, rule) == printed(text)


@pytest.mark.parametrize("pass_rate", RATES)
def test_maxrl_and_one_over_the_pool_mean_are_one_rule_below_the_cap(pass_rate) -> None:
    q = 1.0 - pass_rate
    closed_form = (1.0 - q**16) / pass_rate - q**15
    assert weight(Fixed(16, 16), pass_rate, MAXRL) == pytest.approx(closed_form, rel=1e-12)
    assert weight(Fixed(16, 16), pass_rate, INVERSE) == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_right_samples_only_weigh_the_chance_of_one_over_p(pass_rate) -> None:
    q, raft = 1.0 - pass_rate, AdvantageRule(baseline="zero")
    for strategy in (Fixed(8, 8, "right"), Positives(4, 8, 4, "right")):
        assert weight(strategy, pass_rate, raft) == pytest.approx((1.0 - q**8) / pass_rate, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_signed_rewards_with_one_sided_groups_rejected_have_their_closed_form(pass_rate) -> None:
    q, signed = 1.0 - pass_rate, AdvantageRule(baseline="signed")
    closed_form = 2.0 - pass_rate**7 - q**7
    assert weight(Fixed(8, 8), pass_rate, signed) == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_zero_baseline_teaches_from_right_samples_of_mixed_groups_only(pass_rate) -> None:
    closed_form = 1.0 - pass_rate**7
    assert weight(Fixed(8, 8), pass_rate, AdvantageRule(baseline="zero")) == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_a_blind_choice_of_the_kept_samples_leaves_the_weight_of_the_pool(pass_rate) -> None:
    assert weight(Fixed(16, 4), pass_rate, POOL) == pytest.approx(15 / 16, rel=1e-12)
    assert weight(Fixed(16, 4), pass_rate, RLOO) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
@pytest.mark.parametrize("greedy_rate", [0.0, 0.3, 1.0])
def test_a_greedy_response_leaves_plain_reinforce_whatever_it_is(pass_rate, greedy_rate) -> None:
    # The last one always counts and keeps two, also two of one class.
    for strategy in (Fixed(4, 4), Fixed(16, 4), Balance(1, 1, 2, 2)):
        assert weight(strategy, pass_rate, REMAX, greedy_rate=greedy_rate) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_right_samples_only_teach_where_the_greedy_response_is_wrong(pass_rate) -> None:
    raft = weight(Fixed(8, 8, "right"), pass_rate, AdvantageRule(baseline="zero"))
    for greedy_rate in (0.0, 0.25, 1.0):
        found = weight(Fixed(8, 8, "right"), pass_rate, REMAX, greedy_rate=greedy_rate)
        assert found == pytest.approx((1.0 - greedy_rate) * raft, rel=1e-12)


def test_a_whitened_rule_has_no_weight_of_its_own() -> None:
    with pytest.raises(ValueError, match="depends on the step's other prompts"):
        weight(Fixed(4, 4), 0.5, AdvantageRule(baseline="zero", whiten=True))


@pytest.mark.parametrize("pass_rate", RATES)
def test_anchored_centring_changes_nothing_where_the_whole_pool_is_kept(pass_rate) -> None:
    anchored = AdvantageRule(centring="anchor_pos")
    assert weight(Fixed(8, 8), pass_rate, anchored) == pytest.approx(weight(Fixed(8, 8), pass_rate, POOL), rel=1e-12)


@pytest.mark.parametrize("pass_rate", RATES)
def test_anchored_centring_of_balanced_groups_follows_the_kept_right_samples(pass_rate) -> None:
    def kept_right_share(stop) -> float:
        return min(stop.right, max(2, 4 - stop.wrong)) / 4

    law = exact_law(ADA_BALANCE, pass_rate, 32)
    mean = law.mean(lambda s: kept_right_share(s) * s.wrong / s.total if s.right and s.wrong else 0.0)
    found = implied_weight(law, AdvantageRule(centring="anchor_pos"))
    assert found == pytest.approx(mean / (pass_rate * (1.0 - pass_rate)), rel=1e-12)


def test_a_long_true_past_makes_plain_reinforce_with_the_true_mean() -> None:
    past = Past(right=0.2e12, wrong=0.8e12, num_visits=9)
    rule = AdvantageRule(baseline="history")
    zero_signal = exact_law(Fixed(8, 8), 0.2, 8).zero_signal_rate
    missing = 0.2**8 * 0.8 / 0.2 + 0.8**8 * 0.2 / 0.8
    assert 0.0 < missing < zero_signal
    assert weight(Fixed(8, 8), 0.2, rule, past) == pytest.approx(1.0 - missing, rel=1e-9)


def test_giving_up_hard_arms_takes_weight_from_them() -> None:
    strategy = Balance(2, 2, 32, 4)
    stopped = exact_law(strategy, 0.05, 32, lambda counts: counts.total == 12 and counts.right == 0)
    assert implied_weight(stopped, POOL) < 0.8 * weight(strategy, 0.05, POOL)


@pytest.mark.parametrize("p", RATES)
def test_arms_given_up_with_spread_add_nothing(p) -> None:
    q = 1.0 - p
    law = exact_law(Fixed(4, 4), p, 4, lambda counts: counts.total == 2 and counts.right == 1)
    assert law.group_rate == pytest.approx(2 * p * q * (p * q + p * p + q * q), rel=1e-12)
    assert implied_weight(law, POOL) == pytest.approx((8 * p * q + 6 * p * p + 6 * q * q) / 16, rel=1e-12)
    # Orders that begin with right and wrong never reach four samples: estimates are 1/2 at two of each, else 0 or 1.
    unbiased = implied_weight(law, AdvantageRule(baseline="unbiased"))
    assert unbiased == pytest.approx((p * q + p**3 + q**3) / 2, rel=1e-12)


@pytest.mark.parametrize("pass_rate", [0.0, 1.0])
def test_a_certain_label_has_no_implied_weight(pass_rate) -> None:
    with pytest.raises(ValueError, match=r"pass_rate must be inside \(0, 1\)"):
        weight(ADA_BALANCE, pass_rate, POOL)


def gradient_weight(group: Group | None, rate: float) -> float:
    """One visit's share of w: (ΣA+/p - ΣA-/q) / n."""
    if group is None:
        return 0.0
    right, wrong = (sum(group.advantage(s) for s in group.kept if s.is_right == label) for label in (True, False))
    return (right / rate - wrong / (1.0 - rate)) / len(group.kept)


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [(ADA_BALANCE, POOL), (Balance(2, 2, 32, 4), STD), (Positives(1, 32, 4), KEPT), (Fixed(8, 4), MAXRL),
     (Fixed(4, 4), REMAX), (Balance(2, 2, 32, 4), REMAX)],
)  # fmt: skip
def test_the_engines_groups_carry_the_implied_weight(strategy, rule) -> None:
    rate = 0.2
    policy = Policy(strategy, Bound(1_000_000, 16), rule=rule, seed=5)
    out = Driver(policy, bernoulli(rate, mean_wrong=200), slots=32).run(1500)
    weights = [gradient_weight(retirement.group, rate) for retirement in out.retirements]
    assert len(weights) == 1500
    error = statistics.stdev(weights) / math.sqrt(len(weights))
    assert abs(statistics.fmean(weights) - weight(strategy, rate, rule, greedy_rate=rate)) < 3.0 * error
