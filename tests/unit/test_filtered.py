"""filter, dapo and reject: a visit is solved when its samples differ; fixed is solved at its budget."""

from pathlib import Path

import pytest

from configs.load import load_config
from engine.core.advantage import AdvantageRule
from engine.core.law import exact_law
from engine.core.strategy import Counts
from engine.policy import make_policy
from engine.simulation.run import simulate
from engine.strategies import Filtered, Fixed
from tests.support.exact_tables import cells, printed

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
RATES = (0.05, 0.1, 0.2, 0.5)
SAMPLES_PER_KEPT_PROMPT = {4: "21.565 11.635 6.793 4.571", 16: "28.578 19.639 16.463 16.0005"}


def counts(right: int, wrong: int) -> Counts:
    return Counts(0, 0, right, wrong, 4)


def test_a_visit_is_judged_at_its_budget_by_all_counted_samples_fresh_or_not() -> None:
    strategy = Filtered(4, 0)
    assert [strategy.verdict(counts(x, 3 - x)) for x in range(4)] == ["continue"] * 4
    assert [strategy.verdict(counts(x, 4 - x)) for x in range(5)] == ["exhausted", *["solved"] * 3, "exhausted"]


def test_what_is_missing_is_the_first_sample_of_a_class_and_all_samples_are_needed() -> None:
    strategy = Filtered(4, 0)
    assert [strategy.missing(counts(*state)) for state in ((0, 0), (2, 0), (0, 1), (1, 1))] == [
        (1, 1), (0, 1), (1, 0), (0, 0),
    ]  # fmt: skip
    assert [strategy.need(counts(x, 0)) for x in range(5)] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("size", "rate", "text"),
    [(size, *cell) for size, row in SAMPLES_PER_KEPT_PROMPT.items() for cell in cells(RATES, row)],
)
def test_samples_over_success_are_those_of_a_kept_prompt(size, rate, text) -> None:
    law = exact_law(Filtered(size, 0), rate, size)
    assert law.expected_samples / law.solved_rate == printed(text)
    assert law.solved_rate == pytest.approx(1.0 - rate**size - (1.0 - rate) ** size)
    assert exact_law(Fixed(size, 0), rate, size).solved_rate == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["dapo", "filter", "reject"])
@pytest.mark.parametrize(("rate", "valid"), [(0.0, 0.0), (0.2, 0.5888), (0.5, 0.875), (1.0, 0.0)])
def test_the_simulator_reports_the_share_of_valid_visits_as_success(name, rate, valid) -> None:
    setting = [f"strategy.name={name}", "strategy.n_max=4", f"sim.pass_rate={rate}", "sim.prompts=600"]
    report = simulate(load_config(PRESET, ["staleness.max=1000000", *setting]), step_s=0.0)
    assert abs(report.success_rate - valid) <= 3.0 * (valid * (1.0 - valid) / 600) ** 0.5
    assert report.success_rate == pytest.approx(1.0 - report.zero_signal_rate)
    assert report.useful_groups == round(600 * report.success_rate)


def test_fixed_stays_solved_at_its_budget() -> None:
    setting = ["strategy.name=fixed", "strategy.n_max=4", "sim.pass_rate=0.0", "sim.prompts=50"]
    assert simulate(load_config(PRESET, setting), step_s=0.0).success_rate == 1.0


@pytest.mark.parametrize("unresolved", ["drop", "requeue"])
def test_a_filter_that_gives_the_budget_again_finds_more_valid_visits(unresolved) -> None:
    setting = ["strategy.name=dapo", "strategy.n_max=4", "sim.pass_rate=0.2", "sim.prompts=600"]
    overrides = ["staleness.max=1000000", f"strategy.unresolved={unresolved}", *setting]
    report = simulate(load_config(PRESET, overrides), step_s=0.0)
    assert (report.success_rate > 0.75) == (unresolved == "requeue")


def test_advantages_and_the_fate_of_invalid_visits_are_those_of_each_name() -> None:
    found = {name: make_policy(load_config(PRESET, [f"strategy.name={name}"])) for name in ("dapo", "filter", "reject")}
    assert {name: policy.unresolved for name, policy in found.items()} == {
        "dapo": "drop", "filter": "shrink", "reject": "drop",
    }  # fmt: skip
    assert found["reject"].rule == AdvantageRule(baseline="signed")
    assert {policy.strategy for policy in found.values()} == {Filtered(32, 0)}
