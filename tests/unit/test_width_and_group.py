"""Widths above need have a reason; kept sets are random within class and never by length or arrival."""

from collections import Counter

from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.group import NO_TOKENS, refresh, seal
from engine.core.strategy import Strategy
from engine.core.width import MAX_RAISE, Pace, width
from engine.strategies import Balance, Fixed, Positives
from tests.support.event_driver import prompt

STRATEGY = Balance(2, 2, 32, 4)
RULE = AdvantageRule()


def arm(labels: str, versions: str | None = None, seed: int = 1, strategy: Strategy = STRATEGY) -> Arm:
    made = Arm(0, prompt(0), seed, strategy, strategy.n_max)
    for index, label in enumerate(labels):
        made.launch()
        version = int(versions[index]) if versions else 0
        made.score(Sample(index, float(label == "+"), label == "+", version, 10 + index, None))
        made.take_next()
    return made


def test_without_a_known_pace_the_width_is_the_need() -> None:
    assert width(arm(""), 0, Pace()) == 4
    assert width(arm("+---"), 0, Pace()) == 1


def test_scarce_samples_about_to_expire_raise_the_width_to_the_cap_at_most() -> None:
    pressed = Pace(latency_s=10.0, version_s=10.0)
    assert width(arm("+-------"), 0, pressed) == MAX_RAISE
    relaxed = Pace(latency_s=1.0, version_s=1000.0)
    assert width(arm("+-------"), 0, relaxed) == 1


def test_only_the_age_of_the_class_that_is_missing_raises_the_width() -> None:
    pace = Pace(latency_s=1.0, version_s=4.0)
    # One right sample missing, at a rate of 2/10: five are expected, one after another, in (version + 1/2) x 4 s.
    assert width(arm("+-------", versions="40000000"), 0, pace) == 1
    assert width(arm("+-------", versions="04444444"), 0, pace) == 3
    # The first right sample expired, the others are of versions 4 and 3: the oldest fresh one counts. Two are missing.
    four_right = Balance(4, 1, 32, 4)
    assert width(arm("+++-----", versions="04300000", strategy=four_right), 3, Pace(1.0, 2.0)) == 5


def test_an_arm_with_nothing_to_lose_is_not_raised() -> None:
    pressed = Pace(latency_s=10.0, version_s=10.0)
    assert width(arm("--------"), 0, pressed) == 2


def test_no_width_exceeds_the_budget() -> None:
    pressed = Pace(latency_s=10.0, version_s=10.0)
    assert width(arm("+" + "-" * 29), 0, pressed) == 2


def test_every_sample_of_a_class_is_kept_equally_often() -> None:
    kept: Counter[int] = Counter()
    for seed in range(6000):
        group = seal(0, arm("+++---", seed=seed), 0, RULE)
        kept.update(s.index for s in group.kept)
    expected = 6000 * 2 / 3
    assert all(abs(kept[index] - expected) < 4 * (expected / 3) ** 0.5 for index in range(6))


def test_a_scarce_class_is_topped_up_from_the_other() -> None:
    group = seal(0, arm("+" + "-" * 31), 0, RULE)
    assert Counter(s.is_right for s in group.kept) == {True: 1, False: 3}
    assert group.factors.baseline == 1 / 32


def test_fixed_keeps_any_samples_and_centres_on_the_pool() -> None:
    group = seal(0, arm("+---", strategy=Fixed(4, 4)), 0, RULE)
    assert sorted(group.advantage(s) for s in group.kept) == [-0.25, -0.25, -0.25, 0.75]
    assert seal(0, arm("++++", strategy=Fixed(4, 4)), 0, RULE) is None


def test_an_arm_whose_fresh_samples_miss_a_class_makes_no_group() -> None:
    assert seal(0, arm("+---", "0111"), 1, RULE) is None
    assert seal(0, arm("++--", "1111"), 1, RULE) is not None


def test_a_stale_kept_sample_is_exchanged_for_a_fresh_one_of_its_class() -> None:
    group = seal(0, arm("++--++--", "00001111"), 0, RULE)
    before = sorted(group.advantage(s) for s in group.kept)
    assert refresh(group, 1)
    assert all(s.min_version == 1 for s in group.kept)
    assert sorted(group.advantage(s) for s in group.kept) == before
    assert len({s.index for s in group.kept}) == 4


def test_a_group_is_refused_when_its_pool_has_no_fresh_sample_of_a_class() -> None:
    group = seal(0, arm("++--", "0011", strategy=Positives(2, 8, 4)), 0, RULE)
    assert not refresh(group, 1)


def test_an_arm_without_signal_makes_a_group_only_where_it_is_trained_or_takes_a_place() -> None:
    for strategy in (STRATEGY, Fixed(4, 4), Positives(1, 8, 4)):
        for labels in ("++++", "----"):
            ended = arm(labels, strategy=strategy)
            assert all(seal(0, ended, 0, RULE, choice) is None for choice in ("drop", "requeue", "defer"))
            assert len(seal(0, ended, 0, RULE, "keep").kept) == 4
            assert seal(0, ended, 0, RULE, "shrink").kept == []


def test_an_arm_with_signal_makes_the_same_group_whatever_becomes_of_the_others() -> None:
    choices = ("drop", "keep", "shrink", "requeue", "defer")
    made = [seal(3, arm("+-+--+"), 0, RULE, choice) for choice in choices]
    assert all(group.is_useful for group in made)
    assert len({tuple(sample.index for sample in group.kept) for group in made}) == 1


def test_a_kept_group_without_signal_has_no_advantage() -> None:
    for labels in ("++++", "----"):
        group = seal(0, arm(labels, strategy=Fixed(4, 4)), 0, RULE, "keep")
        assert [group.advantage(sample) for sample in group.kept] == [0.0] * 4
        assert not group.is_useful


def test_a_group_without_samples_has_no_oldest_token_and_no_advantage() -> None:
    group = seal(0, arm("----", strategy=Fixed(4, 4)), 0, AdvantageRule(baseline="kept"), "shrink")
    assert (group.min_version, group.kept, group.is_useful) == (NO_TOKENS, [], False)
    assert refresh(group, 1_000_000)
    assert (group.kept, group.num_exchanged) == ([], 0)


def test_an_arm_without_signal_and_without_fresh_samples_takes_no_place() -> None:
    for choice in ("keep", "shrink"):
        assert seal(0, arm("----", "0000", strategy=Fixed(4, 4)), 1, RULE, choice) is None


def test_leftovers_of_one_class_make_no_group_even_where_arms_without_signal_do() -> None:
    for choice in ("drop", "keep", "shrink"):
        assert seal(0, arm("+---", "0111"), 1, RULE, choice) is None
