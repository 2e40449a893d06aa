"""Never give up: the law of the chain, its throws, what is kept of it and how it is centred."""

import math
import statistics
from collections import defaultdict

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.arm import Sample
from engine.core.decisions import Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts
from engine.strategies.giveup import GiveUp
from tests.support.event_driver import Driver, Outcome, bernoulli, prompt

FOREVER = Bound(1_000_000, 16)
UNCAPPED = 1_000_000
FOUR, SIXTEEN = GiveUp(4, 0.95, UNCAPPED), GiveUp(16, 0.875, UNCAPPED)
EXACT = [
    (FOUR, {0.05: 17.682, 0.1: 10.618, 0.2: 6.548, 0.5: 4.2525, 0.0: 80.0}),
    (SIXTEEN, {0.05: 26.021, 0.1: 19.096, 0.2: 16.404, 0.5: 16.0002, 0.0: 128.0}),
]
"""Expected samples of a chain, K / (1 - p_requeue·q^K); at p = 0 the cap of a prompt that is never solved."""
CASES = [(strategy, rate, exact) for strategy, table in EXACT for rate, exact in table.items()]


def all_fresh(right: int, wrong: int, budget: int = UNCAPPED, seed: int = 0) -> Counts:
    return Counts(right, wrong, right, wrong, budget, seed)


def verdicts(strategy: GiveUp, right: int, wrong: int) -> dict[str, float]:
    """Verdicts on these counts with their probabilities over the arms' seeds."""
    found = set()
    for seed in range(2000):
        found.add(strategy.verdict(all_fresh(right, wrong, strategy.n_max, seed)))
        if found == {"again", "exhausted"}:
            return {"again": strategy.p_requeue, "exhausted": 1.0 - strategy.p_requeue}
        if found & {"continue", "solved"}:
            break
    (verdict,) = found
    return {verdict: 1.0}


def law(strategy: GiveUp, pass_rate: float) -> tuple[float, float]:
    """Expected samples and the probability of `solved`, over all label sequences and throws."""
    weights = {(0, 0): 1.0}
    samples = solved = 0.0
    while weights:
        drawn: dict[tuple[int, int], float] = defaultdict(float)
        for (right, wrong), weight in weights.items():
            samples += weight
            drawn[right + 1, wrong] += weight * pass_rate
            drawn[right, wrong + 1] += weight * (1.0 - pass_rate)
        weights = defaultdict(float)
        for state, weight in drawn.items():
            if weight < 1e-10:
                continue
            for verdict, share in verdicts(strategy, *state).items():
                if verdict in ("continue", "again"):
                    weights[state] += weight * share
                solved += weight * share * (verdict == "solved")
    return samples, solved


@pytest.mark.parametrize(("strategy", "pass_rate", "exact"), CASES)
def test_all_label_sequences_together_cost_the_closed_form(strategy, pass_rate, exact) -> None:
    samples, solved = law(strategy, pass_rate)
    wrong_round = (1.0 - pass_rate) ** strategy.round_size
    assert samples == pytest.approx(strategy.round_size / (1.0 - strategy.p_requeue * wrong_round), abs=1e-4)
    assert samples == pytest.approx(exact, abs=6e-4)
    assert solved == pytest.approx((1.0 - wrong_round) / (1.0 - strategy.p_requeue * wrong_round), abs=1e-6)


@pytest.mark.parametrize(("strategy", "pass_rate", "exact"), CASES)
def test_mean_samples_of_a_prompt_equal_the_exact_value(strategy, pass_rate, exact) -> None:
    out = Driver(Policy(strategy, FOREVER), bernoulli(pass_rate)).run(1000)
    counts = out.counts()
    assert len(counts) == 1000
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    assert abs(statistics.fmean(counts) - exact) < max(3.0 * error, 1e-3)


@pytest.mark.parametrize("pass_rate", [0.0, 0.05, 0.2])
def test_a_cap_ends_the_chain_at_its_last_round(pass_rate) -> None:
    capped = GiveUp(4, 0.95, 40)
    again = 0.95 * (1.0 - pass_rate) ** 4
    assert law(capped, pass_rate)[0] == pytest.approx(4 * (1 - again**10) / (1 - again), abs=1e-6)
    counts = Driver(Policy(capped, FOREVER), bernoulli(pass_rate)).run(200).counts()
    assert max(counts) <= 40
    assert pass_rate or max(counts) == 40


def test_the_last_round_is_short_when_the_cap_is_no_multiple_of_the_round() -> None:
    strategy = GiveUp(4, 1.0, 6)
    assert strategy.need(all_fresh(0, 4, 6)) == 2
    assert strategy.verdict(all_fresh(0, 5, 6)) == "continue"
    assert strategy.verdict(all_fresh(0, 6, 6)) == "exhausted"
    assert strategy.verdict(all_fresh(1, 5, 6)) == "solved"


def test_a_round_is_judged_at_its_end_only() -> None:
    strategy = GiveUp(4, 1.0, UNCAPPED)
    assert [strategy.verdict(all_fresh(0, n)) for n in range(1, 9)] == ["continue"] * 3 + ["again"] + [
        "continue"
    ] * 3 + ["again"]
    assert strategy.verdict(all_fresh(1, 2)) == "continue"
    assert strategy.verdict(all_fresh(1, 3)) == "solved"
    assert strategy.verdict(all_fresh(4, 4)) == "solved"


def test_the_need_is_what_is_left_of_the_round() -> None:
    assert [FOUR.need(all_fresh(0, n)) for n in range(9)] == [4, 3, 2, 1, 4, 3, 2, 1, 4]
    assert [FOUR.missing(all_fresh(right, 1)) for right in (0, 1)] == [(1, 0), (0, 0)]


@pytest.mark.parametrize("p_requeue", [0.0, 0.5, 0.75, 0.95, 1.0])
def test_an_all_wrong_arm_comes_back_as_often_as_asked(p_requeue) -> None:
    strategy = GiveUp(4, p_requeue, UNCAPPED)
    for wrong in (4, 8, 400):
        again = sum(strategy.verdict(all_fresh(0, wrong, seed=seed)) == "again" for seed in range(2000))
        error = math.sqrt(p_requeue * (1 - p_requeue) / 2000)
        assert abs(again / 2000 - p_requeue) <= 3 * error


def test_the_throws_of_one_arm_are_independent() -> None:
    strategy = GiveUp(4, 0.5, UNCAPPED)
    seeds = range(2000)
    first, second = (
        [strategy.verdict(all_fresh(0, wrong, seed=seed)) == "again" for seed in seeds] for wrong in (4, 8)
    )
    both = sum(a and b for a, b in zip(first, second, strict=True))
    assert abs(both / 2000 - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 2000)


def test_one_seed_gives_the_same_chains_at_any_width_and_slot_count() -> None:
    def chains(slots: int, width: int) -> dict[str, tuple]:
        policy = Policy(GiveUp(4, 0.8, 60), FOREVER, fixed_width=width, requeue_after=8)
        out = Driver(policy, bernoulli(0.1), slots=slots).run(200)
        return {
            r.arm.prompt.prompt_id: (
                r.reason,
                [s.num_tokens for s in r.arm.counted],
                sorted(s.index for s in r.group.kept) if r.group else [],
            )
            for r in out.retirements
        }

    base = chains(1, 0)
    assert len(base) == 200
    assert {reason for reason, _, _ in base.values()} == {"solved", "exhausted"}
    for slots, width in ((64, 0), (64, 6), (9, 16)):
        assert chains(slots, width) == base


def run(pass_rate: float, strategy: GiveUp = FOUR, num_prompts: int = 200, **choices) -> Outcome:
    rule = AdvantageRule(centring="anchor_pos")
    return Driver(Policy(strategy, FOREVER, rule=rule, **choices), bernoulli(pass_rate)).run(num_prompts)


@pytest.mark.parametrize("strategy", [FOUR, GiveUp(4, 0.95, UNCAPPED, group_size=4)])
def test_anchored_advantages_of_a_group_sum_to_zero(strategy) -> None:
    groups = [r.group for r in run(0.3, strategy).retirements if r.group]
    assert len(groups) > 50
    for group in groups:
        attempts = group.arm.counted
        mean = sum(s.is_right for s in attempts) / len(attempts)
        assert {group.advantage(s) for s in group.kept if s.is_right} == {1.0 - mean}
        assert sum(group.advantage(s) for s in group.kept) == pytest.approx(0.0, abs=1e-12)
        assert len(group.kept) == (strategy.group_size or len(attempts))


def test_all_right_is_dropped_without_a_group_and_does_not_come_back() -> None:
    out = run(1.0)
    assert {(r.reason, r.outcome, len(r.arm.counted)) for r in out.retirements} == {("solved", "zero_signal", 4)}


def test_an_arm_that_was_given_up_makes_no_group() -> None:
    ended = [r for r in run(0.02).retirements if r.reason == "exhausted"]
    assert ended
    assert {(r.outcome, r.group) for r in ended} == {("zero_signal", None)}


def score(dispatcher: Dispatcher, labels: str, version: int) -> Retirement | None:
    """Launch and score one sample a letter, R or W."""
    retirement = None
    for label in labels:
        launch = dispatcher.next_launch()
        retirement = dispatcher.score(
            launch.arm.arm_id, Sample(launch.index, float(label == "R"), label == "R", version, 5, None)
        )
    return retirement


def new(bound: Bound, strategy: GiveUp) -> Dispatcher:
    dispatcher = Dispatcher(Policy(strategy, bound, rule=AdvantageRule(centring="anchor_pos")))
    dispatcher.admit(prompt(0))
    return dispatcher


def learn(dispatcher: Dispatcher, version: int) -> None:
    dispatcher.outbox.step_done(version, 0)
    dispatcher.generation_version = version


def test_old_attempts_stay_in_the_baseline_and_out_of_the_group() -> None:
    dispatcher = new(Bound(4, 16), GiveUp(4, 1.0, UNCAPPED))
    assert score(dispatcher, "WWWW", version=0) is None
    assert dispatcher.next_launch() is None
    learn(dispatcher, 5)
    assert dispatcher.resume(is_last=True)
    retirement = score(dispatcher, "WRWW", version=5)
    group = retirement.group
    assert sorted(s.index for s in group.kept) == [4, 5, 6, 7]
    assert retirement.expired_wrong == 4
    assert group.factors.baseline == 1 / 8
    assert [group.advantage(s) for s in sorted(group.kept, key=lambda s: s.index)] == pytest.approx(
        [-7 / 24, 7 / 8, -7 / 24, -7 / 24]
    )


def test_attempts_that_are_young_enough_are_trained_with_the_round_that_solved() -> None:
    dispatcher = new(Bound(4, 16), GiveUp(4, 1.0, UNCAPPED))
    score(dispatcher, "WWWW", version=0)
    learn(dispatcher, 4)
    dispatcher.resume(is_last=True)
    retirement = score(dispatcher, "WWWR", version=4)
    assert len(retirement.group.kept) == 8


def test_a_chain_whose_right_samples_expired_goes_on_without_a_throw() -> None:
    never_lucky = GiveUp(2, 0.0, 6)
    dispatcher = new(Bound(0, 1), never_lucky)
    score(dispatcher, "R", version=0)
    learn(dispatcher, 1)
    assert score(dispatcher, "W", version=1) is None
    assert dispatcher.resume(is_last=True)
    retirement = score(dispatcher, "RW", version=1)
    assert (retirement.reason, retirement.outcome) == ("solved", "sealed")
    assert sorted(s.index for s in retirement.group.kept) == [1, 2, 3]
    assert retirement.group.factors.baseline == 1 / 2


def test_at_the_cap_a_prompt_whose_right_samples_expired_is_not_trained_on_wrong_ones() -> None:
    dispatcher = new(Bound(0, 1), GiveUp(2, 1.0, 2))
    score(dispatcher, "R", version=0)
    learn(dispatcher, 1)
    retirement = score(dispatcher, "W", version=1)
    assert (retirement.reason, retirement.outcome, retirement.group) == ("futile", "declined", None)
