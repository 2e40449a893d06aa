"""Draws, books, learner and driver of the simulator, each alone."""

import math
import statistics
from itertools import islice

import pytest

from configs.simulation import Simulation
from engine.core.arm import Arm, Prompt
from engine.core.decisions import Launch
from engine.core.dispatcher import Dispatcher
from engine.core.errors import RunError
from engine.core.policy import Policy
from engine.core.prior import of_rates, tiers
from engine.core.staleness import Bound
from engine.simulation.books import Books
from engine.simulation.driver import Driver, Speed
from engine.simulation.law import BLOCK, CHUNK, Laws, visit_of
from engine.simulation.pace import measure_step_s
from engine.simulation.report import make_report
from engine.strategies import Balance, Fixed
from tests.support.event_driver import Outcome, Recorder, prompt

FOREVER = Bound(1_000_000, 1)


def laws(pass_rate: float | None = None, **choices) -> Laws:
    prior = tiers() if pass_rate is None else of_rates([pass_rate])
    return Laws(Simulation(**choices), prior)


def arm(prompt: Prompt) -> Arm:
    return Arm(0, prompt, 0, Fixed(8, 8), 8)


def test_a_draw_depends_on_seed_prompt_and_launch_only_not_on_the_order_of_asking() -> None:
    forward = [[p.token_ids.draw(i) for i in range(100)] for p in islice(laws().prompts(), 300)]
    for number, p in reversed(list(enumerate(islice(laws().prompts(), 300)))):
        for index in (99, 0, 40, 31, 32):
            assert p.token_ids.draw(index) == forward[number][index]


def test_another_seed_gives_other_draws() -> None:
    first, other = (next(laws(seed=seed).prompts()).token_ids for seed in (0, 1))
    assert [first.draw(i) for i in range(20)] != [other.draw(i) for i in range(20)]


def test_prompts_of_one_chunk_and_blocks_of_one_prompt_share_no_draws() -> None:
    rows = [tuple(p.token_ids.draw(i)[1] for i in range(2 * BLOCK)) for p in islice(laws(0.5).prompts(), 2 * CHUNK)]
    halves = [row[:BLOCK] for row in rows] + [row[BLOCK:] for row in rows]
    assert len(set(halves)) == 4 * CHUNK


def test_labels_have_the_pass_rate_and_lengths_the_mean_of_their_label() -> None:
    law = laws(0.2, tokens_mean=50.0, length_ratio_wrong=3.0, tokens_sigma=0.5)
    draws = [p.token_ids.draw(i) for p in islice(law.prompts(), 500) for i in range(100)]
    share = statistics.fmean(is_right for is_right, _ in draws)
    assert abs(share - 0.2) < 3.0 * math.sqrt(0.2 * 0.8 / len(draws))
    for label, mean in ((True, 50.0), (False, 150.0)):
        lengths = [tokens for is_right, tokens in draws if is_right is label]
        assert law.mean_tokens(is_right=label) == pytest.approx(mean)
        assert abs(statistics.fmean(lengths) - mean) < 3.0 * statistics.stdev(lengths) / math.sqrt(len(lengths))


def test_sigma_zero_gives_equal_lengths_and_short_ones_are_one_token() -> None:
    assert {next(laws(1.0, tokens_sigma=0.0, tokens_mean=7.0).prompts()).token_ids.draw(i) for i in range(99)} == {
        (True, 7)
    }
    tokens = {next(laws(0.0, tokens_mean=0.01).prompts()).token_ids.draw(i)[1] for i in range(99)}
    assert tokens == {1}


def test_pass_rates_follow_their_law() -> None:
    rates = [p.token_ids.pass_rate for p in islice(laws().prompts(), 20_000)]
    shares = [0.197, 0.617, 0.174, 0.013]
    for share, low, high in zip(shares, (0.0, 0.1, 0.3, 0.5), (0.1, 0.3, 0.5, 1.0), strict=True):
        inside = [rate for rate in rates if low <= rate < high]
        expected = share / sum(shares)
        assert abs(len(inside) / 20_000 - expected) < 3.0 * math.sqrt(expected * (1.0 - expected) / 20_000)
        spread = (high - low) / math.sqrt(12.0 * len(inside))
        assert abs(statistics.fmean(inside) - (low + high) / 2.0) < 3.5 * spread


def test_failures_have_their_rate_and_are_drawn_anew_for_each_try() -> None:
    law = laws(0.5, failure_rate=0.3)
    arms = [arm(p) for p in islice(law.prompts(), 200)]
    shares = [law.fails_after(Launch(one, index, retry)) for one in arms for index in range(20) for retry in (0, 1)]
    failed = [share for share in shares if share is not None]
    assert abs(len(failed) / 8000 - 0.3) < 3.0 * math.sqrt(0.3 * 0.7 / 8000)
    assert abs(statistics.fmean(failed) - 0.5) < 0.03
    assert [s is None for s in shares[::2]] != [s is None for s in shares[1::2]]


def test_a_prompt_of_another_source_is_an_error() -> None:
    with pytest.raises(TypeError, match="Visit"):
        visit_of(arm(prompt(0)))


def scripted(labels: str, tokens: list[int], policy: Policy, speed: Speed, num_prompts: int = 1) -> tuple:
    """A run in which launch i of every prompt has label i and tokens i."""
    out = Outcome()
    dispatcher = Dispatcher(policy)
    driver = Driver(
        dispatcher,
        speed,
        lambda launch: (labels[launch.index] == "+", tokens[launch.index]),
        map(prompt, range(num_prompts)),
        Recorder(out),
    )
    driver.run()
    return driver, out


def test_what_is_in_flight_at_retirement_is_aborted_with_the_tokens_it_had_and_its_slot_is_free_at_once() -> None:
    policy = Policy(Balance(1, 1, 8, 2), FOREVER, fixed_width=4)
    driver, out = scripted("+--+++++", [10, 20, 100, 50, 9, 9, 9, 9], policy, Speed(slots=4, latency_s=2.0))
    # The pair is complete at 22 s. Launch 4 began in the free slot at 12 s and had come to 8 tokens (2 s of latency).
    assert [len(r.arm.counted) for r in out.retirements] == [2]
    assert driver.now == 22.0
    assert out.tokens_lost == 20 + 20 + 8
    assert driver.busy_s == 12.0 + 22.0 + 22.0 + 22.0 + 10.0


def test_versions_are_those_at_the_start_and_come_after_the_update() -> None:
    policy = Policy(Fixed(1, 1), Bound(5, 1), unresolved="keep")
    _, out = scripted("+", [10], policy, Speed(slots=1, step_s=4.0, update_s=13.0), num_prompts=6)
    # Steps end at 14, 24, 34, ..; versions 1, 2, 3 are used by what starts at 30, 40, 50.
    assert [group.min_version for group, _ in out.groups] == [0, 0, 0, 1, 2, 3]
    assert [trained_at for _, trained_at in out.groups] == [0, 1, 2, 3, 4, 5]


def test_the_learner_is_idle_from_its_first_step_on_only() -> None:
    policy = Policy(Fixed(1, 1), Bound(5, 1), unresolved="keep")
    driver, _ = scripted("+", [10], policy, Speed(slots=1, step_s=4.0), num_prompts=5)
    # Steps at 10, 20, .., 50, four seconds each; the run ends with the last at 54.
    assert driver.now == 54.0
    assert driver.learner.idle_ratio(54.0) == pytest.approx(1.0 - 20.0 / 44.0)


@pytest.mark.parametrize(("slots", "batch"), [(64, 16), (640, 160), (6400, 1600)])
def test_a_step_takes_what_its_groups_cost_the_slots_over_the_ratio(slots, batch) -> None:
    def laws_for(seed: int) -> Laws:
        return laws(0.5, seed=seed, tokens_mean=10.0, tokens_sigma=0.0, learner_ratio=1.25)

    policy = Policy(Fixed(4, 4), Bound(1_000_000, batch), unresolved="keep")
    # A group costs four samples of 10 tokens and 2 s; ten slots for each group of a step.
    step_s = measure_step_s(policy, Speed(slots, latency_s=2.0), laws_for)
    assert step_s == pytest.approx(batch * 4 * 12.0 / (1.25 * slots), rel=0.02)


def test_a_strategy_without_groups_has_a_learner_without_steps() -> None:
    policy = Policy(Balance(2, 2, 4, 4), FOREVER)
    assert measure_step_s(policy, Speed(), lambda seed: laws(0.0, seed=seed)) == 0.0


def test_busy_and_idle_are_measured_while_the_queue_is_full_not_while_the_last_answer_is_awaited() -> None:
    policy = Policy(Fixed(2, 2), FOREVER)
    driver, _ = scripted("++", [10, 90], policy, Speed(slots=2), num_prompts=1)
    # The queue ends at 10 s, when a slot is free and no prompt is left; until then both slots were in use.
    assert driver.now == 90.0
    assert (driver.full.seconds, driver.full.busy_ratio) == (10.0, 1.0)
    assert driver.busy_s == 100.0


def test_a_run_that_cannot_go_on_says_so() -> None:
    policy = Policy(Fixed(1, 1), Bound(0, 2), unresolved="keep")
    out = Outcome()
    dispatcher = Dispatcher(policy)
    dispatcher.generation_version = -1
    driver = Driver(dispatcher, Speed(), lambda _: (True, 1), map(prompt, range(4)), Recorder(out))
    with pytest.raises(RunError, match="stands still at 0 s"):
        driver.run()


def test_prompts_without_a_budget_are_told_to_the_observer() -> None:
    class Sparing(Fixed):
        @property
        def window(self) -> int:
            return 3

        def budgets(self, pasts) -> list[int]:
            return [0, 2, 0][: len(pasts)]

    _, out = scripted("++", [5, 5], Policy(Sparing(2, 2), FOREVER), Speed(), num_prompts=7)
    assert [p.prompt_id for p in out.skipped] == ["p0", "p2", "p3", "p5", "p6"]
    assert [r.arm.prompt.prompt_id for r in out.retirements] == ["p1", "p4"]


def test_the_standard_error_is_that_of_the_counts() -> None:
    law = laws(0.3)
    books = Books(200)
    driver = Driver(Dispatcher(Policy(Balance(2, 2, 32, 4), FOREVER)), Speed(), law.draw, law.prompts(), books)
    driver.run()
    report = make_report("balance", books, driver, law, 1.0)
    counts = []
    for p in islice(law.prompts(), 200):
        labels = [p.token_ids.draw(i)[0] for i in range(32)]
        counts.append(next((n for n in range(32) if sum(labels[:n]) >= 2 and n - sum(labels[:n]) >= 2), 32))
    assert report.samples_per_prompt_mean == statistics.fmean(counts)
    assert report.samples_per_prompt_se == pytest.approx(statistics.stdev(counts) / math.sqrt(200))
