"""Fixed numbers of samples: which prompts make a group, what they keep, and how the books count them."""

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.decisions import Retirement
from engine.core.group import seal
from engine.core.law import exact_law
from engine.core.policy import Unresolved
from engine.core.strategy import Counts, Strategy
from engine.settlement import Settlement
from engine.strategies.fixed import Fixed
from engine.strategies.raft import Raft
from engine.tally import Tally
from metrics.recorder import Recorder
from tests.support.event_driver import prompt
from tests.support.exact_tables import cells, printed

RATES = (0.05, 0.1, 0.2, 0.5)
ZERO_SIGNAL = {4: ".8145 .6562 .4112 .1250", 8: ".6634 .4305 .1678 .0078"}
SAMPLES_PER_KEPT_PROMPT = {4: "21.565 11.635 6.793 4.571", 16: "28.578 19.639 16.463 16.0005"}


def arm_of(labels: str, strategy: Strategy, arm_id: int = 0) -> Arm:
    arm = Arm(arm_id, prompt(arm_id), 1, strategy, strategy.n_max)
    for index, label in enumerate(labels):
        arm.launch()
        arm.score(Sample(index, float(label == "+"), label == "+", 0, 10, None))
        arm.take_next()
    return arm


@pytest.mark.parametrize(
    ("size", "rate", "text"), [(size, *cell) for size, row in ZERO_SIGNAL.items() for cell in cells(RATES, row)]
)
def test_groups_without_spread_are_as_frequent_as_computed(size, rate, text) -> None:
    law = exact_law(Fixed(size, size), rate, size)
    assert law.zero_signal_rate == printed(text)
    assert law.expected_samples == pytest.approx(size)


@pytest.mark.parametrize(
    ("size", "rate", "text"),
    [(size, *cell) for size, row in SAMPLES_PER_KEPT_PROMPT.items() for cell in cells(RATES, row)],
)
def test_refilling_costs_the_exact_number_of_samples_a_kept_prompt(size, rate, text) -> None:
    law = exact_law(Fixed(size, size), rate, size)
    assert law.expected_samples / law.group_rate == printed(text)


def test_raft_needs_all_samples_and_ends_at_its_budget_whatever_they_are() -> None:
    raft = Raft(4, 0)
    assert raft.need(Counts(0, 0, 0, 0, 4)) == 4
    assert raft.missing(Counts(0, 1, 0, 1, 4)) == (0, 0)
    assert raft.verdict(Counts(3, 0, 3, 0, 4)) == "continue"
    assert raft.verdict(Counts(0, 4, 0, 4, 4)) == "solved"


def test_raft_keeps_every_right_sample_at_its_reward_and_no_wrong_one() -> None:
    group = seal(0, arm_of("+-++---+", Raft(8, 0)), 0, AdvantageRule(baseline="zero"))
    assert sorted(sample.index for sample in group.kept) == [0, 2, 3, 7]
    assert [group.advantage(sample) for sample in group.kept] == [1.0] * 4


def test_raft_keeps_as_many_right_samples_as_the_group_holds() -> None:
    group = seal(0, arm_of("+-++---+", Raft(8, 2)), 0, AdvantageRule(baseline="zero"))
    assert [sample.is_right for sample in group.kept] == [True, True]


def test_raft_trains_a_prompt_that_is_always_right_and_none_that_never_is() -> None:
    group = seal(0, arm_of("++++", Raft(4, 0)), 0, AdvantageRule(baseline="zero"))
    assert group.is_useful
    assert seal(0, arm_of("----", Raft(4, 0)), 0, AdvantageRule(baseline="zero")) is None


@pytest.mark.parametrize("rate", RATES)
def test_raft_has_signal_unless_every_sample_is_wrong(rate) -> None:
    assert exact_law(Raft(4, 0), rate, 4).zero_signal_rate == pytest.approx((1.0 - rate) ** 4)


def test_reinforce_rej_is_fixed_with_signed_rewards() -> None:
    rule = AdvantageRule(baseline="signed")
    group = seal(0, arm_of("+--+", Fixed(4, 4)), 0, rule)
    assert sorted(group.advantage(sample) for sample in group.kept) == [-1.0, -1.0, 1.0, 1.0]
    assert seal(0, arm_of("++++", Fixed(4, 4)), 0, rule) is None
    assert seal(0, arm_of("----", Fixed(4, 4)), 0, rule) is None


def retire(books: Settlement, group_id: int, labels: str, unresolved: Unresolved) -> None:
    arm = arm_of(labels, Fixed(4, 4), arm_id=group_id)
    books.tally.ledger.generated += 10 * len(labels)
    group = seal(group_id, arm, 0, AdvantageRule(), unresolved)
    books.retired(Retirement(arm, "solved", "sealed" if group else "zero_signal", group, 0, 0))


def num_groups(books: Settlement, outcome: str) -> float | None:
    return books.recorder.registry.get_sample_value("adastream_engine_groups_total", {"outcome": outcome})


@pytest.mark.parametrize(("unresolved", "trained_tokens"), [("keep", 80), ("shrink", 40)])
def test_only_groups_with_an_advantage_count_as_useful(unresolved, trained_tokens) -> None:
    books = Settlement(Tally(), Recorder())
    retire(books, 0, "+---", unresolved)
    retire(books, 1, "----", unresolved)
    assert books.held_tokens == 80
    for group_id in (0, 1):
        books.trained(group_id, learner_version=0)
    tally = books.tally
    tally.step(0.0, 2)
    assert (tally.groups_trained, tally.groups_useful, tally.step_useful_groups) == (2, 1, 1)
    assert (tally.groups_zero_signal, num_groups(books, "zero_signal")) == (1, 1.0)
    assert (num_groups(books, "sealed"), num_groups(books, "trained")) == (1.0, 1.0)
    assert (tally.ledger.trained, tally.ledger.counted) == (trained_tokens, 80 - trained_tokens)
    assert tally.ledger.missing(books.held_tokens) == 0


def test_useful_groups_of_a_step_are_those_of_that_step() -> None:
    books = Settlement(Tally(), Recorder())
    for group_id, labels in enumerate(("+---", "++--", "----")):
        retire(books, group_id, labels, "shrink")
    useful = []
    for step in ([0, 1], [2]):
        for group_id in step:
            books.trained(group_id, learner_version=0)
        books.tally.step(0.0, len(step))
        useful.append(books.tally.step_useful_groups)
    assert useful == [2, 0]
    books.tally.started_at, books.tally.ended_at = 10.0, 70.0
    assert books.tally.useful_groups_per_min(70.0) == 2.0


def test_a_dropped_group_is_neither_trained_nor_useful() -> None:
    books = Settlement(Tally(), Recorder())
    retire(books, 0, "+---", "drop")
    books.dropped(0)
    assert (books.tally.groups_useful, books.tally.groups_dropped, books.tally.ledger.counted) == (0, 1, 40)
