"""REINFORCE++: a step's groups ship together, with advantages whitened over their kept samples."""

import itertools
import math
import statistics

import pytest

from engine.core.advantage import STD_EPS, AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.dispatcher import Dispatcher
from engine.core.group import Group, has_signal, seal, whiten
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.whitening import measure
from engine.policy import PRESETS
from engine.strategies import Balance, Fixed
from tests.support.event_driver import Driver, bernoulli, prompt

PLAIN, BASELINE = PRESETS["reinforce++"], PRESETS["reinforce++_baseline"]
FOREVER = 1_000_000


def arm(labels: str, arm_id: int = 0) -> Arm:
    made = Arm(arm_id, prompt(arm_id), arm_id, Fixed(len(labels), len(labels)), len(labels))
    for index, label in enumerate(labels):
        made.launch()
        made.score(Sample(index, float(label == "+"), label == "+", 0, 1 + 50 * index, None))
        made.take_next()
    return made


def group(labels: str, rule: AdvantageRule, group_id: int = 0) -> Group:
    return seal(group_id, arm(labels, group_id), 0, rule, "keep")


def advantages(of: Group) -> list[float]:
    return [of.advantage(sample) for sample in sorted(of.kept, key=lambda sample: sample.index)]


def visit(dispatcher: Dispatcher, labels: str, version: int = 0) -> Group:
    """One more prompt, from its admission to its group."""
    dispatcher.admit(prompt(0))
    for _ in labels:
        launch = dispatcher.next_launch()
    for index, label in enumerate(labels):
        sample = Sample(index, float(label == "+"), label == "+", version, 5, None)
        retirement = dispatcher.score(launch.arm.arm_id, sample)
    return retirement.group


def test_rewards_are_whitened_over_the_samples_of_the_step() -> None:
    step = [group("+---", PLAIN, 0), group("++++", PLAIN, 1)]
    whitening = whiten(step)
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert (whitening.mean, whitening.std, whitening.num_samples) == (0.625, pytest.approx(std, rel=1e-14), 8)
    expected = [(reward - mean) / (std + STD_EPS) for reward in rewards]
    assert advantages(step[0]) + advantages(step[1]) == pytest.approx(expected, rel=1e-12)
    assert all(one.whitening is whitening and not one.awaits_step for one in step)


def test_with_baseline_the_groups_mean_goes_first() -> None:
    step = [group("+---", BASELINE, 0), group("++--", BASELINE, 1), group("++++", BASELINE, 2)]
    whiten(step)
    raw = [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    expected = [value / (statistics.stdev(raw) + STD_EPS) for value in raw]
    found = [value for one in step for value in advantages(one)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_group_without_spread_gets_no_advantage_from_the_rounding_of_the_others() -> None:
    step = [group("+--", BASELINE, 0), group("++-", BASELINE, 1), group("---", BASELINE, 2), group("+++", BASELINE, 3)]
    whiten(step)
    assert advantages(step[2]) == advantages(step[3]) == [0.0] * 3
    assert [one.is_useful for one in step] == [True, True, False, False]


@pytest.mark.parametrize("rule", [PLAIN, BASELINE, AdvantageRule(baseline="zero", weight="inverse", whiten=True)])
def test_the_order_of_groups_and_samples_changes_nothing_not_even_the_last_bit(rule) -> None:
    texts = ["+--", "++-+-", "-----", "+++++++"]
    found = []
    for order in itertools.permutations(range(4)):
        step = [group(texts[number], rule, number) for number in order]
        for one in step:
            one.kept.reverse()
        whiten(step)
        found.append({one.group_id: advantages(one) for one in step})
    assert all(one == found[0] for one in found)


def test_lengths_do_not_enter() -> None:
    step, longer = [group("+---", PLAIN)], [group("+---", PLAIN)]
    for sample in longer[0].kept:
        sample.num_tokens *= 1 + 9 * sample.is_right
    whiten(step)
    whiten(longer)
    assert advantages(step[0]) == advantages(longer[0])


@pytest.mark.parametrize("labels", ["+", "++", "---"])
@pytest.mark.parametrize("rule", [PLAIN, BASELINE])
def test_a_step_of_equal_rewards_has_advantages_of_exactly_zero(labels, rule) -> None:
    step = [group(labels, rule, 0)]
    whiten(step)
    assert advantages(step[0]) == [0.0] * len(labels)
    assert not step[0].is_useful


def test_values_that_are_all_alike_have_no_std_and_themselves_as_mean_not_a_rounding_error() -> None:
    assert math.fsum([0.1] * 3) / 3 != 0.1
    assert (measure([0.1] * 3).mean, measure([0.1] * 3).std) == (0.1, 0.0)
    assert (measure([]).mean, measure([]).spread) == (0.0, 1.0)


def test_without_a_baseline_of_its_own_every_pool_has_a_signal() -> None:
    for labels in ("++++", "----", "+---"):
        assert has_signal(arm(labels), PLAIN)
        made = seal(0, arm(labels), 0, PLAIN, "drop")
        assert made.is_useful, "it is not known yet what the step's mean will be"
    assert [has_signal(arm(labels), BASELINE) for labels in ("++++", "----", "+---")] == [False, False, True]
    assert seal(0, arm("++++"), 0, BASELINE, "drop") is None
    assert not group("++++", BASELINE).is_useful


def test_all_right_groups_push_up_and_all_wrong_ones_down() -> None:
    step = [group("++", PLAIN, 0), group("--", PLAIN, 1)]
    whiten(step)
    assert advantages(step[0]) == pytest.approx([math.sqrt(3.0) / 2.0] * 2, rel=1e-5)
    assert advantages(step[1]) == pytest.approx([-math.sqrt(3.0) / 2.0] * 2, rel=1e-5)
    assert all(one.is_useful for one in step)


def test_no_group_ships_before_all_of_its_step_wait_and_then_all_do() -> None:
    dispatcher = Dispatcher(Policy(Fixed(2, 2), Bound(FOREVER, 3), rule=PLAIN))
    made = [visit(dispatcher, labels) for labels in ("++", "+-")]
    assert dispatcher.outbox.next_group() is None
    assert dispatcher.may_launch
    made.append(visit(dispatcher, "--"))
    made.append(visit(dispatcher, "+-"))
    shipped = [dispatcher.outbox.next_group() for _ in range(3)]
    assert [found[0] for found in shipped] == made[:3]
    assert {found[1] for found in shipped} == {0}
    assert dispatcher.outbox.next_group() is None
    spread = statistics.stdev([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]) + STD_EPS
    assert [value for one in made[:3] for value in advantages(one)] == pytest.approx(
        [value / spread for value in (0.5, 0.5, 0.5, -0.5, -0.5, -0.5)], rel=1e-12
    )
    assert made[3].awaits_step


def test_a_step_ships_piece_by_piece_with_one_mean_whatever_comes_meanwhile() -> None:
    dispatcher = Dispatcher(Policy(Fixed(2, 2), Bound(FOREVER, 2), rule=PLAIN))
    first, second = visit(dispatcher, "++"), visit(dispatcher, "+-")
    assert dispatcher.outbox.next_group()[0] is first
    third = visit(dispatcher, "--")
    assert dispatcher.outbox.next_group()[0] is second
    assert first.whitening is second.whitening
    assert third.whitening is None
    dispatcher.outbox.step_done(1, 2)
    assert dispatcher.outbox.next_group() is None
    visit(dispatcher, "+-")
    assert dispatcher.outbox.next_group() == (third, 1)


def test_a_step_that_began_to_ship_lacks_only_the_rest() -> None:
    dispatcher = Dispatcher(Policy(Fixed(2, 2), Bound(FOREVER, 2), rule=PLAIN))
    dispatcher.outbox.num_shipped = 3
    last = visit(dispatcher, "+-")
    assert dispatcher.outbox.next_group() == (last, 1)


def test_a_group_that_expires_while_it_waits_is_dropped_and_its_place_is_filled() -> None:
    dispatcher = Dispatcher(Policy(Fixed(2, 2), Bound(0, 2), rule=PLAIN))
    stale = visit(dispatcher, "++", version=0)
    dispatcher.outbox.learner_version = dispatcher.generation_version = 1
    fresh = [visit(dispatcher, "+-", version=1)]
    assert dispatcher.outbox.next_group() is stale
    assert stale.awaits_step
    assert dispatcher.outbox.next_group() is None
    assert dispatcher.may_launch
    fresh.append(visit(dispatcher, "--", version=1))
    assert [dispatcher.outbox.next_group()[0] for _ in range(2)] == fresh
    assert fresh[0].whitening.num_samples == 4


def test_kept_samples_that_grew_stale_are_exchanged_before_the_step_is_whitened() -> None:
    dispatcher = Dispatcher(Policy(Fixed(4, 2), Bound(1, 1), rule=BASELINE))
    dispatcher.admit(prompt(0))
    for _ in range(4):
        dispatcher.next_launch()
    for index, (label, version) in enumerate((("+", 0), ("-", 0), ("+", 1), ("-", 1))):
        dispatcher.score(0, Sample(index, float(label == "+"), label == "+", version, 5, None))
    dispatcher.outbox.step_done(2, 0)
    found, _ = dispatcher.outbox.next_group()
    assert all(sample.min_version == 1 for sample in found.kept)
    assert found.whitening is not None


@pytest.mark.parametrize("rule", [PLAIN, BASELINE])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("batch", [1, 7, 16])
def test_whole_steps_ship_at_every_bound_and_nothing_stands_still(rule, max_staleness, batch) -> None:
    policy = Policy(Balance(2, 2, 32, 4), Bound(max_staleness, batch), rule=rule)
    out = Driver(policy, bernoulli(0.3), slots=24, step_s=300.0).run(200)
    assert len(out.retirements) == 200
    assert out.max_staleness <= max_staleness
    assert len(out.groups) % batch == 0
    assert len(out.groups) >= 6 * batch
    num_sealed = sum(retirement.group is not None for retirement in out.retirements)
    assert 0 <= num_sealed - len(out.groups) - len(out.dropped) < batch, "only part of a last step may be left"
    for first in range(0, len(out.groups), batch):
        step = [one for one, _ in out.groups[first : first + batch]]
        values = [one.advantage(sample) for one in step for sample in one.kept]
        assert len({id(one.whitening) for one in step}) == 1
        assert statistics.fmean(values) == pytest.approx(0.0, abs=1e-12)
        assert statistics.stdev(values) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("rule", "factor"), [(PLAIN, 1.0), (BASELINE, 3.0 / 4.0)])
def test_every_prompt_weighs_one_over_the_steps_std_times_what_its_own_mean_takes(rule, factor) -> None:
    p, batch = 0.2, 100
    policy = Policy(Fixed(4, 4), Bound(FOREVER, batch), rule=rule, unresolved="keep", seed=3)
    out = Driver(policy, bernoulli(p), slots=32).run(2000)
    weights = []
    for one, _ in out.groups:
        right, wrong = (sum(one.advantage(s) for s in one.kept if s.is_right == label) for label in (True, False))
        weights.append((right / p - wrong / (1.0 - p)) / 4.0 * one.whitening.std)
    assert len(weights) == 2000
    error = statistics.stdev(weights) / math.sqrt(len(weights))
    assert abs(statistics.fmean(weights) - factor) < 3.0 * error + 1.0 / (4 * batch)
