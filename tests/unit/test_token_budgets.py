"""Token budgets: a visit ends at its counted tokens, a step at its generated ones."""

import numpy as np
import pytest

from configs import Config
from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.decisions import Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.group import vacant_group
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.steps import StepFill
from engine.core.strategy import Strategy
from engine.policy import make_policy
from engine.settlement import Settlement
from engine.strategies import Balance, Fixed, GiveUp, Positives
from engine.tally import Tally
from engine.wire import TrainGroup, decode, encode
from metrics.recorder import Recorder
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 4)
ONE_EACH = Balance(1, 1, 8, 2)


def new(strategy: Strategy = ONE_EACH, bound: Bound = FOREVER, num_prompts: int = 1, **choices) -> Dispatcher:
    dispatcher = Dispatcher(Policy(strategy, bound, **choices))
    for number in range(num_prompts):
        dispatcher.admit(prompt(number))
    return dispatcher


def launches(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    return [(launch.arm.arm_id, launch.index) for launch in iter(dispatcher.next_launch, None)]


def score(dispatcher: Dispatcher, arm_id: int, index: int, label: str, tokens: int = 5) -> Retirement | None:
    dispatcher.outbox.spend(tokens)
    return dispatcher.score(arm_id, Sample(index, float(label == "+"), label == "+", 0, tokens, None))


def visit(labels: str, tokens: int = 5, **choices) -> Retirement | None:
    """One arm with a budget of 12 tokens, its samples one after the other."""
    dispatcher = new(max_tokens_per_visit=12, **choices)
    for index, label in enumerate(labels):
        launches(dispatcher)
        retirement = score(dispatcher, 0, index, label, tokens)
        if retirement is not None:
            return retirement
    return None


# --- a visit ----------------------------------------------------------------------------------------------------------


def test_a_visit_is_exhausted_by_the_sample_that_reaches_its_tokens() -> None:
    assert visit("--") is None
    retirement = visit("-----")
    assert (retirement.reason, len(retirement.arm.counted), retirement.arm.num_tokens) == ("exhausted", 3, 15)


def test_a_visit_that_is_solved_by_that_sample_is_solved() -> None:
    assert visit("--+").reason == "solved"


def test_a_single_sample_may_cost_more_than_the_budget() -> None:
    retirement = visit("+", tokens=100)
    assert (retirement.reason, retirement.outcome) == ("exhausted", "zero_signal")


def test_an_arm_that_would_wait_is_exhausted_as_well() -> None:
    # Rounds of one that always come back: only the budget ends the chain.
    dispatcher = new(GiveUp(1, 1.0, 8), max_tokens_per_visit=12, requeue_after=0)
    for index in range(3):
        dispatcher.resume(is_last=True)
        assert launches(dispatcher) == [(0, index)]
        retirement = score(dispatcher, 0, index, "-")
    assert retirement.reason == "exhausted"


def test_a_budget_given_again_brings_its_tokens_again() -> None:
    dispatcher = new(max_tokens_per_visit=12, unresolved="requeue", max_requeues=1)
    found = []
    for _ in range(2):
        dispatcher.resume(is_last=True)
        while new_launches := launches(dispatcher):
            for _, index in new_launches:
                found.append(score(dispatcher, 0, index, "-"))
    assert [retirement is None for retirement in found] == [True] * 4 + [False]
    assert found[-1].reason == "exhausted"
    assert found[-1].arm.token_budget == 24


@pytest.mark.parametrize(("last", "reason"), [("-", "exhausted"), ("+", "solved")])
def test_a_visit_that_drains_at_its_tokens_counts_what_was_under_way(last: str, reason: str) -> None:
    dispatcher = new(max_tokens_per_visit=12, fixed_width=4, at_exit="drain")
    launches(dispatcher)
    found = [score(dispatcher, 0, index, label) for index, label in enumerate("---" + last)]
    assert found[:3] == [None] * 3
    assert (found[3].reason, found[3].arm.num_tokens) == (reason, 20)


def test_no_limit_is_the_default() -> None:
    out = Driver(Policy(ONE_EACH, FOREVER), bernoulli(0.3), slots=4).run(50)
    limited = Driver(Policy(ONE_EACH, FOREVER, max_tokens_per_visit=10**9), bernoulli(0.3), slots=4).run(50)
    assert out.counts() == limited.counts()


def test_the_unbiased_estimate_is_refused_where_tokens_may_end_a_visit() -> None:
    sections = {"strategy": {"max_tokens_per_visit": 100}, "advantage": {"name": "custom", "baseline": "unbiased"}}
    with pytest.raises(
        ValueError, match=r"max_tokens_per_visit must be 0 with advantage\.baseline = unbiased, got 100"
    ):
        Config.model_validate(sections)
    assert Config.model_validate({**sections, "strategy": {"max_tokens_per_visit": 0}})


# --- a step -----------------------------------------------------------------------------------------------------------


def seal(dispatcher: Dispatcher, arm_id: int, tokens: int = 5, labels: str = "+-") -> None:
    """Solve an arm with its first two samples."""
    launches(dispatcher)
    for index, label in enumerate(labels):
        score(dispatcher, arm_id, index, label, tokens)


def vacant(dispatcher: Dispatcher) -> list[bool]:
    return [group.is_vacant for group in dispatcher.outbox.ready]


def test_a_step_takes_the_groups_it_has_when_its_tokens_are_spent() -> None:
    dispatcher = new(num_prompts=4, max_tokens_per_step=25)
    seal(dispatcher, 0)
    seal(dispatcher, 1)
    assert vacant(dispatcher) == [False, False]
    dispatcher.outbox.spend(5)
    assert vacant(dispatcher) == [False, False, True, True]
    seal(dispatcher, 2)
    assert vacant(dispatcher) == [False, False, True, True, False]
    assert [dispatcher.outbox.next_group()[1] for _ in range(5)] == [0, 0, 0, 0, 1]


def test_a_step_that_is_full_in_time_has_no_vacant_place_and_the_next_starts_from_none() -> None:
    dispatcher = new(num_prompts=8, max_tokens_per_step=45)
    for arm_id in range(4):
        seal(dispatcher, arm_id)
    assert vacant(dispatcher) == [False] * 4
    seal(dispatcher, 4)
    dispatcher.outbox.spend(34)
    assert vacant(dispatcher) == [False] * 5
    dispatcher.outbox.spend(1)
    assert vacant(dispatcher) == [False] * 5 + [True] * 3


def test_a_step_without_a_group_waits_for_its_first() -> None:
    dispatcher = new(num_prompts=2, max_tokens_per_step=1)
    dispatcher.outbox.spend(1_000)
    assert vacant(dispatcher) == []
    seal(dispatcher, 0)
    assert vacant(dispatcher) == [False, True, True, True]
    assert launches(dispatcher) == [], "a step's worth waits"


def test_places_of_filtered_prompts_are_no_group_with_samples() -> None:
    dispatcher = new(Fixed(2, 2), num_prompts=3, max_tokens_per_step=1, unresolved="shrink")
    seal(dispatcher, 0, labels="--")
    assert vacant(dispatcher) == [False]
    assert not dispatcher.outbox.ready[0].kept
    seal(dispatcher, 1)
    assert vacant(dispatcher) == [False, False, True, True]


def test_vacant_places_follow_no_dropped_group() -> None:
    dispatcher = new(bound=Bound(0, 4), num_prompts=2, max_tokens_per_step=1)
    seal(dispatcher, 0)
    dispatcher.outbox.learner_version = 1
    dropped = dispatcher.outbox.next_group()
    assert dropped.group_id == 0
    assert dispatcher.outbox.next_group() is None
    assert not dispatcher.outbox.ready


def test_one_place_a_step_is_never_vacant() -> None:
    fill = StepFill(1, 1)
    for _ in range(3):
        fill.tokens += 5
        assert fill.num_vacant(0) == 0
        fill.take(1, has_samples=True)
        assert fill.num_vacant(1) == 0


def test_a_vacant_group_has_no_prompt_no_tokens_and_no_gradient() -> None:
    group = vacant_group(7, ONE_EACH)
    assert group.is_vacant
    assert not group.is_useful
    assert group.kept == group.arm.counted == []
    arm = Arm(0, prompt(0), 1, ONE_EACH, 8)
    assert not type(group)(0, arm, [], AdvantageRule()).is_vacant


def test_vacant_places_are_counted_when_their_step_is_taken() -> None:
    books = Settlement(Tally(), Recorder())
    books.shipped(vacant_group(0, ONE_EACH))
    assert books.tally.vacant_places == 0
    books.trained(0, learner_version=3)
    assert books.tally.vacant_places == 1
    assert books.tally.ledger.missing(books.held_tokens) == 0
    sample_value = books.recorder.registry.get_sample_value
    for outcome, count in (("vacant", 1.0), ("shipped", 0.0), ("trained", 0.0)):
        assert sample_value("adastream_engine_groups_total", {"outcome": outcome}) == count


@pytest.mark.parametrize("max_staleness", [0, 1, 1_000_000])
@pytest.mark.parametrize("budget", [1, 2_000, 10**9])
def test_every_run_ends_with_every_group_in_a_step_of_its_own_budget(max_staleness: int, budget: int) -> None:
    policy = Policy(Positives(1, 8, 2), Bound(max_staleness, 4), max_tokens_per_step=budget)
    out = Driver(policy, bernoulli(0.4), slots=16, step_s=50.0).run(300)
    assert len(out.retirements) == 300
    assert out.max_staleness <= max_staleness
    trained = [group for group, _ in out.groups]
    steps = [trained[start : start + 4] for start in range(0, len(trained) - 3, 4)]
    assert all(any(group.kept for group in step) for step in steps)
    vacancies = sum(group.is_vacant for group in trained)
    assert (vacancies > 0) == (budget < 10**9)
    if budget == 1:
        assert all(sum(bool(group.kept) for group in step) == 1 for step in steps)


def test_a_vacant_place_travels_to_the_learner() -> None:
    nothing = np.empty(0, dtype=np.int32)
    sent = TrainGroup(3, "", nothing, samples=[], train_version=2, max_staleness=0)
    _, received = decode(encode(sent, 1))
    assert isinstance(received, TrainGroup)
    assert (received.group_id, received.samples, received.prompt_token_ids.size) == (3, [], 0)


def test_the_configuration_reaches_the_dispatcher() -> None:
    config = Config.model_validate(
        {
            "strategy": {"at_exit": "drain", "max_tokens_per_visit": 300},
            "learner": {"max_tokens_per_step": 4_000},
        }
    )
    policy = make_policy(config)
    assert (policy.at_exit, policy.max_tokens_per_visit, policy.max_tokens_per_step) == ("drain", 300, 4_000)
    plain = make_policy(Config())
    assert (plain.at_exit, plain.max_tokens_per_step) == ("abort", 0)
    assert plain.max_tokens_per_visit > 10**15
