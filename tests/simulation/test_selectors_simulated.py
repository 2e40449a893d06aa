"""Selectors in `engine.simulate`: turns are kept, pasts are used, the figures of docs/strategies.md are measured."""

import math
import re
import statistics
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

from configs.load import load_config
from configs.simulation import Simulation
from engine.core.prior import tiers
from engine.simulation.law import Laws, Visit
from engine.simulation.report import Report
from engine.simulation.run import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
NUM_DOC_SEEDS, SEEDS = 16, range(4)
"""The page's figures are means over seeds from 100 on."""


def play(overrides: str, seed: int = 0) -> Report:
    common = ["staleness.max=1000000", "strategy.futility=none", f"sim.seed={seed}"]
    return simulate(load_config(ROOT / "configs" / "sim.toml", [*common, *overrides.split()]), step_s=0.0)


def measured(selector: str) -> tuple[float, float]:
    """Mean and standard error in a selector's row."""
    found = re.search(rf"^\| `{selector}` \|.*\| ([0-9.]+) ± ([0-9.]+) [a-z ]+\|$", PAGE, re.MULTILINE)
    assert found is not None, selector
    return float(found[1]), float(found[2])


def assert_near(values: list[float], mean: float, error: float) -> None:
    """Within three standard errors, the spread being that of the page's own runs."""
    spread = error * math.sqrt(NUM_DOC_SEEDS)
    assert abs(statistics.fmean(values) - mean) < 3.0 * math.sqrt(error**2 + spread**2 / len(values)), values


def late_cost(selector: str, seed: int) -> tuple[float, float]:
    """Samples a useful group in epochs 1 to 48 and 49 to 96."""
    whole, half = (play(f"selector.name={selector} sim.prompts=200 sim.epochs={n}", seed) for n in (96, 48))
    late = (whole.samples - half.samples) / (whole.useful_groups - half.useful_groups)
    return half.samples / half.useful_groups, late


@pytest.mark.parametrize("selector", ["mopps", "curriculum"])
def test_choosing_by_the_past_halves_the_samples_of_a_useful_group_on_the_tiers(selector) -> None:
    mean, error = measured(selector)
    costs = [late_cost(selector, seed) for seed in SEEDS]
    assert_near([late for _, late in costs], mean, error)
    assert mean + 3.0 * error < 14.87 / 1.9
    assert all(late < early < 14.87 for early, late in costs), costs


def test_skipping_cuts_the_share_of_visits_without_signal_on_the_tiers() -> None:
    prior = tiers()
    exact = math.fsum(w * (p**8 + (1.0 - p) ** 8) for w, p in zip(prior.weights, prior.nodes, strict=True))
    setting = "strategy.name=fixed strategy.n_max=8 sim.prompts=300 sim.epochs=16"
    mean, error = measured("greso")
    assert f"14.87 samples a useful group; {exact:.3f} without signal" in PAGE
    runs = [play(f"{setting} selector.name=greso", seed) for seed in SEEDS]
    assert_near([run.zero_signal_rate for run in runs], mean, error)
    assert mean + 3.0 * error < 0.85 * exact
    assert all(run.visits + run.passed_over == 300 * 16 and run.passed_over > 300 for run in runs)
    plain = play(setting)
    # Visits of one prompt are not independent: the spread of p^8 + q^8 over prompts does not shrink with epochs.
    spread = math.fsum(w * (p**8 + (1 - p) ** 8 - exact) ** 2 for w, p in zip(prior.weights, prior.nodes, strict=True))
    assert abs(plain.zero_signal_rate - exact) < 3.0 * math.sqrt(spread / 300 + exact / 4800)
    assert (plain.visits, plain.passed_over) == (4800, 0)


@pytest.mark.parametrize("selector", ["uniform", "mopps", "greso", "curriculum"])
@pytest.mark.parametrize(("prompts", "epochs"), [(1, 1), (7, 5), (300, 3)])
def test_every_turn_is_a_visit_or_passed_over(selector, prompts, epochs) -> None:
    report = play(f"selector.name={selector} sim.prompts={prompts} sim.epochs={epochs}")
    assert report.prompts == prompts
    assert report.visits + report.passed_over == prompts * epochs
    if selector in ("mopps", "curriculum"):
        assert report.visits == -(-prompts * epochs // 16), "one of each pool"
    if selector == "uniform" or epochs == 1 == prompts:
        assert report.passed_over == 0


def test_a_turn_without_samples_is_a_visit_too() -> None:
    never = "strategy.name=gvm history.version_decay=0.9 sim.pass_rate=0.0 sim.prompts=100 sim.epochs=4"
    report = play(f"{never} allocation.window=10 allocation.samples_per_prompt=8 strategy.round_size=8")
    assert (report.visits, report.passed_over) == (400, 0)


def test_the_law_of_a_visit_is_that_of_first_visits_in_every_epoch() -> None:
    report = play("sim.pass_rate=0.2 sim.prompts=150 sim.epochs=8")
    assert report.visits == 1200
    assert abs(report.samples_per_prompt_mean - 10.140386) < 3.0 * report.samples_per_prompt_se


def test_one_epoch_reports_what_it_did_before_and_two_begin_with_the_same_visits() -> None:
    first, both = (
        list(islice(Laws(Simulation(prompts=600, epochs=n, seed=5), tiers()).prompts(), 2000)) for n in (1, 2)
    )
    assert [p.prompt_id for p in first] == [f"p{number}" for number in range(2000)]
    assert [p.prompt_id for p in both[:600]] == [p.prompt_id for p in first[:600]]
    assert [p.prompt_id for p in both[1200:]] == [p.prompt_id for p in first[600:1400]]
    rates = {p.prompt_id: p.token_ids.pass_rate for p in first}
    assert all(p.token_ids.pass_rate == rates[p.prompt_id] for p in both), "a prompt keeps its rate"
    assert sorted(p.prompt_id for p in both[600:1200]) == sorted(p.prompt_id for p in both[:600])
    assert [p.prompt_id for p in both[600:1200]] != [p.prompt_id for p in both[:600]]

    def labels(visit: object) -> tuple:
        assert isinstance(visit, Visit)
        return tuple(visit.draw(index) for index in range(40))

    drawn = Counter(labels(p.token_ids) for p in both[:1200])
    assert len(drawn) == 1200, "each turn has draws of its own"
    assert [labels(p.token_ids) for p in both[:512]] == [labels(p.token_ids) for p in first[:512]]


def test_a_past_that_is_forgotten_at_once_is_worth_less() -> None:
    setting = "selector.name=mopps sim.prompts=100 sim.epochs=160"
    kept, forgotten = play(f"{setting} history.visit_decay=1"), play(f"{setting} history.version_decay=0")
    assert kept.visits == forgotten.visits
    assert kept.samples / kept.useful_groups < 0.85 * forgotten.samples / forgotten.useful_groups


def test_a_target_that_moves_is_followed_by_the_policy_version() -> None:
    # About 60 versions: at steps = 30 half of the visits look for hard prompts, at steps = 100,000 none.
    setting = "selector.name=curriculum sim.prompts=100 sim.epochs=160 selector.curriculum.first=0.5"
    moving, still = (
        play(f"{setting} selector.curriculum.last=0.0 selector.curriculum.steps={steps}") for steps in (30, 100_000)
    )
    assert moving.samples_per_prompt_mean > 1.3 * still.samples_per_prompt_mean


def test_one_seed_gives_one_run_with_a_selector_too() -> None:
    def values(seed: int) -> dict:
        setting = "staleness.max=2 selector.name=mopps sim.prompts=64 sim.epochs=20 sim.failure_rate=0.05"
        return {key: value for key, value in asdict(play(setting, seed)).items() if key != "wall_s"}

    assert values(1) == values(1)
    assert values(1) != values(2)


def test_the_seeds_schedule_plays_in_the_simulator() -> None:
    setting = "strategy.name=staged run.max_steps=40 sim.prompts=200 sim.epochs=8 learner.groups_per_step=8"
    report = play(setting)
    assert report.passed_over > 0
    assert report.visits < 1600 - 15 * 20, "one of each pool at the end"
    assert report.visits + report.passed_over == 1600
