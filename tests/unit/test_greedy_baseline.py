"""ReMax: one greedy response an arm, first in launch order, never counted, and its reward is the baseline."""

import pytest

from configs.simulation import Simulation
from engine.core.advantage import AdvantageRule
from engine.core.arm import Accounting, Arm, Sample
from engine.core.decisions import Launch, Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.group import has_signal, seal
from engine.core.policy import Policy
from engine.core.prior import of_rates
from engine.core.staleness import Bound
from engine.core.strategy import Strategy
from engine.policy import PRESETS
from engine.settlement import Settlement
from engine.simulation.law import Laws
from engine.strategies import Balance, Fixed, Raft
from engine.tally import Tally
from metrics.recorder import Recorder
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 4)
REMAX = PRESETS["remax"]
GREEDY_TOKENS = 7


def answer(index: int, label: str, tokens: int = 10) -> Sample:
    return Sample(index, float(label == "+"), label == "+", 0, tokens, None)


def arm(greedy: str, labels: str, strategy: Strategy | None = None, arm_id: int = 0) -> Arm:
    """An arm with its greedy response and all of its samples counted."""
    strategy = strategy or Fixed(len(labels), len(labels))
    made = Arm(arm_id, prompt(arm_id), 1, strategy, strategy.n_max, first_index=1)
    for index, label in enumerate(greedy + labels):
        made.launch()
        made.score(answer(index, label, tokens=10 if index else GREEDY_TOKENS))
        made.take_next()
    return made


def new(strategy: Strategy, **choices) -> Dispatcher:
    dispatcher = Dispatcher(Policy(strategy, FOREVER, rule=REMAX, **choices))
    dispatcher.admit(prompt(0))
    return dispatcher


def launches(dispatcher: Dispatcher) -> list[Launch]:
    found = []
    while (launch := dispatcher.next_launch()) is not None:
        found.append(launch)
    return found


@pytest.mark.parametrize("accounting", ["launch", "completion"])
def test_nothing_counts_before_the_greedy_response_is_scored(accounting: Accounting) -> None:
    made = Arm(0, prompt(0), 1, Fixed(3, 3), 3, accounting, first_index=1)
    for _ in range(4):
        made.launch()
    for index in (3, 1, 2):
        made.score(answer(index, "+"))
        assert made.take_next() is None
    assert made.num_pending == 3
    made.score(answer(0, "-"))
    counted = [made.take_next().index for _ in range(3)]
    assert counted == ([1, 2, 3] if accounting == "launch" else [3, 1, 2])
    assert (made.take_next(), made.greedy.reward, made.num_pending) == (None, 0.0, 0)


def test_the_greedy_response_is_launched_first_and_on_top_of_the_width() -> None:
    found = launches(new(Balance(2, 2, 32, 4)))
    assert [(launch.index, launch.is_greedy) for launch in found] == [
        (0, True), (1, False), (2, False), (3, False), (4, False)
    ]  # fmt: skip


@pytest.mark.parametrize(("budget", "width", "at_once"), [(8, 3, 3), (1, 8, 2), (8, 1, 1)])
def test_a_fixed_width_counts_it_as_a_request_and_no_budget_does(budget, width, at_once) -> None:
    dispatcher = new(Fixed(budget, budget), fixed_width=width)
    assert [launch.index for launch in launches(dispatcher)] == list(range(at_once))
    assert dispatcher.score(0, answer(0, "-")) is None
    for index in range(1, budget + 1):
        launches(dispatcher)
        retirement = dispatcher.score(0, answer(index, "+"))
    assert [s.index for s in retirement.arm.counted] == list(range(1, budget + 1))


def test_rules_without_it_launch_none() -> None:
    dispatcher = Dispatcher(Policy(Fixed(2, 2), FOREVER))
    dispatcher.admit(prompt(0))
    assert [(launch.index, launch.is_greedy) for launch in launches(dispatcher)] == [(0, False), (1, False)]


def test_its_failure_is_asked_for_again_and_is_no_wrong_answer() -> None:
    dispatcher = new(Fixed(1, 1), max_failures=3)
    launches(dispatcher)
    assert dispatcher.score(0, answer(1, "+")) is None
    assert dispatcher.fail(0, 0) is None
    again = dispatcher.next_launch()
    assert (again.index, again.retry, again.is_greedy) == (0, 1, True)
    group = dispatcher.score(0, answer(0, "-")).group
    assert [group.advantage(sample) for sample in group.kept] == [1.0]


def test_a_greedy_response_that_always_fails_quarantines_its_prompt() -> None:
    dispatcher = new(Fixed(1, 1), max_failures=2)
    launches(dispatcher)
    dispatcher.fail(0, 0)
    launches(dispatcher)
    assert dispatcher.fail(0, 0).outcome == "dropped_failed"


@pytest.mark.parametrize(("greedy", "right", "wrong"), [("+", 0.0, -1.0), ("-", 1.0, 0.0)])
def test_its_reward_is_the_baseline(greedy, right, wrong) -> None:
    group = seal(0, arm(greedy, "+--+"), 0, REMAX)
    assert [group.advantage(s) for s in sorted(group.kept, key=lambda s: s.index)] == [right, wrong, wrong, right]
    assert [s.index for s in sorted(group.kept, key=lambda s: s.index)] == [1, 2, 3, 4]


@pytest.mark.parametrize("strategy", [Fixed(4, 4), Balance(2, 2, 4, 4)])
@pytest.mark.parametrize(
    ("greedy", "labels", "carries"),
    [
        ("-", "++++", True),
        ("+", "++++", False),
        ("+", "----", True),
        ("-", "----", False),
        ("+", "+---", True),
        ("-", "+---", True),
    ],
)
def test_a_pool_has_a_signal_where_it_differs_from_the_greedy_response(strategy, greedy, labels, carries) -> None:
    ended = arm(greedy, labels, strategy)
    assert has_signal(ended, REMAX) is carries
    group = seal(0, ended, 0, REMAX)
    assert (group is not None and group.is_useful) is carries
    kept = seal(0, ended, 0, REMAX, "keep")
    assert len(kept.kept) == 4
    assert kept.is_useful is carries


def test_right_samples_alone_teach_nothing_where_the_greedy_response_is_right() -> None:
    assert not has_signal(arm("+", "++--", Raft(4, 0)), REMAX)
    assert has_signal(arm("-", "++--", Raft(4, 0)), REMAX)
    assert not has_signal(arm("-", "----", Raft(4, 0)), REMAX)


def test_a_weight_or_centring_that_silences_a_pool_leaves_no_signal() -> None:
    assert not has_signal(arm("+", "----"), AdvantageRule(baseline="greedy", weight="maxrl"))
    assert not has_signal(arm("+", "+---"), AdvantageRule(baseline="greedy", centring="anchor_pos"))
    assert has_signal(arm("-", "+---"), AdvantageRule(baseline="greedy", centring="anchor_pos"))


def test_an_arm_without_signal_gets_its_budget_again_and_one_with_a_wrong_greedy_response_ends() -> None:
    for greedy, ends in (("+", False), ("-", True)):
        dispatcher = new(Balance(1, 1, 2, 2), unresolved="requeue")
        launches(dispatcher)
        dispatcher.score(0, answer(0, greedy))
        dispatcher.score(0, answer(1, "+"))
        launches(dispatcher)
        assert (dispatcher.score(0, answer(2, "+")) is not None) is ends


def test_a_stale_class_of_a_pool_with_both_drops_the_group_and_a_one_sided_pool_has_none_to_lose() -> None:
    mixed, one_sided = arm("-", "+++-", Balance(2, 2, 4, 4)), arm("-", "++++", Balance(2, 2, 4, 4))
    for pool in (mixed, one_sided):
        for sample in pool.counted[:3]:
            sample.min_version = 1
    assert seal(0, mixed, 1, REMAX) is None
    assert len(seal(0, one_sided, 1, REMAX).kept) == 3


@pytest.mark.parametrize("greedy", ["+", "-"])
def test_its_tokens_end_as_counted_whatever_becomes_of_the_group(greedy) -> None:
    books = Settlement(Tally(), Recorder())
    for group_id, labels in enumerate(("++--", "++++", "----")):
        ended = arm(greedy, labels, arm_id=group_id)
        books.tally.ledger.generated += 40 + GREEDY_TOKENS
        group = seal(group_id, ended, 0, REMAX)
        books.retired(Retirement(ended, "solved", "sealed" if group else "zero_signal", group, 0, 0))
        assert books.tally.ledger.missing(books.held_tokens) == 0
        if group is not None:
            books.dropped(group_id) if group_id else books.trained(group_id, learner_version=0)
    assert books.held_tokens == 0
    assert (books.tally.ledger.trained, books.tally.ledger.counted) == (40, 80 + 3 * GREEDY_TOKENS)
    assert (books.tally.samples_counted, books.tally.ledger.missing(0)) == (12, 0)


def test_every_visit_of_a_run_costs_one_launch_more() -> None:
    out = Driver(Policy(Fixed(4, 4), FOREVER, rule=REMAX), bernoulli(0.5), slots=10).run(50)
    assert out.counts() == [4] * 50
    assert out.num_launched == 250


@pytest.mark.parametrize(("pass_rate", "is_right"), [(0.2, False), (0.5, False), (0.51, True), (0.9, True)])
def test_a_simulated_greedy_response_is_right_above_one_half_and_has_the_lengths_of_its_label(
    pass_rate, is_right
) -> None:
    laws = Laws(Simulation(tokens_mean=50.0, tokens_sigma=0.0, length_ratio_wrong=3.0), of_rates([pass_rate]))
    prompts = laws.prompts()
    for number in range(200):
        visit = Arm(number, next(prompts), 0, Fixed(2, 2), 2, first_index=1)
        assert laws.draw(Launch(visit, 0, 0)) == (is_right, 50 if is_right else 150)
        visit.first_index = 0
        assert laws.draw(Launch(visit, 0, 0)) in ((True, 50), (False, 150))
