"""docs/strategies.md: every name of the configuration is in it, and its numbers are those the code computes."""

import re
from pathlib import Path
from typing import get_args

import pytest

from configs.selection import Selector
from configs.strategy import STRATEGIES, Advantage, Strategy
from engine.core.advantage import AdvantageRule
from engine.core.futility import Threshold
from engine.core.law import exact_law, implied_weight
from engine.core.past import EMPTY, Past
from engine.core.prior import tiers
from engine.futility_table import measure
from engine.strategies import Balance, Estimate, Gvm, Knapsack, Vip

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
BALANCE = Balance(2, 2, 32, 4)


def rows(header: str) -> list[str]:
    """First cells of the table whose head starts with `header`."""
    lines = PAGE[PAGE.index(f"| {header} |") :].splitlines()[2:]
    table = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [line.split("|")[1].strip() for line in table]


def names(section: type[Strategy | Advantage | Selector], field: str) -> set[str]:
    return {f"`{name}`" for name in get_args(section.model_fields[field].annotation)}


def test_every_strategy_has_one_row() -> None:
    found = rows("name | rule | formula")
    assert sorted(found) == sorted([*(f"`{name}`" for name in STRATEGIES), "`pkg.mod:Class`"])


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("name | baseline", names(Advantage, "name") - {"`auto`"}),
        ("value | what happens", names(Strategy, "unresolved") - {"`auto`"}),
        ("rule | stops an arm when", names(Strategy, "futility")),
        ("at the exit | what becomes of what an arm still has under way", names(Strategy, "at_exit")),
        ("name | rule | source", names(Selector, "name")),
    ],
)
def test_every_value_of_a_switch_has_one_row(header, allowed) -> None:
    found = rows(header)
    assert len(found) == len(allowed)
    assert set(found) == allowed


def test_the_tables_are_what_the_snippet_prints(capsys) -> None:
    code = re.search(r"```python\n(.*?)```\n\n(.*?)\n\nWhat they say", PAGE, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "docs/strategies.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code[2].strip()


def test_the_budgets_of_known_prompts_are_those_of_the_page() -> None:
    pasts = [Past(100.0 * p, 100.0 * (1.0 - p), 9) for p in (0.0, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)]
    budgets = {
        "estimate": Estimate(8, 7, 2, 32, "inverse_sqrt", 1, 16, 0),
        'estimate, `power = "inverse"`, n_min 1, no cap': Estimate(8, 7, 1, 512, "inverse", 1, 16, 0),
        "gvm": Gvm(8, 7, 1e-3, 2, 8, 32, 0),
        "knapsack": Knapsack(8, 7, 2, 32, 0),
        "vip": Vip(8, 7, 2, 32, 0),
    }
    assert rows("share right in the past") == list(budgets)
    for name, strategy in budgets.items():
        assert f"| {name} | {' | '.join(str(budget) for budget in strategy.budgets(pasts))} |" in PAGE


def test_the_threshold_costs_and_weighs_what_the_page_says() -> None:
    for p_success in (0.2, 0.5):
        cost = measure(BALANCE, tiers(), Threshold(BALANCE, p_success, 0.5, 2.0))
        assert f"at {p_success}: {cost.per_useful:.2f}, {cost.useful * 100:.0f} %" in PAGE
    rule = Threshold(BALANCE, 0.2, 0.5, 2.0)
    for p in (0.05, 0.1):
        before = implied_weight(exact_law(BALANCE, p, 32), AdvantageRule())
        stopped = exact_law(BALANCE, p, 32, lambda counts: rule.stops(counts, EMPTY))
        assert f"w({p}) {before:.2f} → {implied_weight(stopped, AdvantageRule()):.2f}" in PAGE


def test_every_plot_is_there_and_small() -> None:
    plots = re.findall(r"\]\((plots/[a-z_]+\.png)\)", PAGE)
    assert len(plots) == 3
    for plot in plots:
        assert 10_000 < (ROOT / "docs" / plot).stat().st_size < 150_000
