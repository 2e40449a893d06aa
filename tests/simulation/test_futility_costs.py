"""Giving up in the real dispatcher costs what the solver says, and takes weight from hard prompts."""

import math
import random
import statistics

import pytest

from engine.core.advantage import AdvantageRule
from engine.core.decisions import Launch
from engine.core.futility import Threshold
from engine.core.law import exact_law, implied_weight
from engine.core.past import EMPTY
from engine.core.policy import Futility, Policy
from engine.core.prior import of_rates, tiers
from engine.core.rng import derive
from engine.core.staleness import Bound
from engine.core.strategy import Counts
from engine.futility_table import Cost, measure, solve
from engine.strategies import Balance
from tests.support.event_driver import Driver, Outcome

FOREVER = Bound(1_000_000, 16)
BALANCE = Balance(2, 2, 32, 4)
OPTIMAL = solve(BALANCE, tiers())
PRIOR = tiers()


def tier_law(launch: Launch) -> tuple[bool, int]:
    """p of a prompt from the tiers, length from a skewed law that depends on the label."""
    own = random.Random(derive(21, launch.arm.arm_id))
    rate = PRIOR.draw(own.random(), own.random())
    rng = random.Random(launch.seed)
    is_right = rng.random() < rate
    return is_right, max(1, round((100 if is_right else 200) * rng.lognormvariate(-0.32, 0.8)))


def run(futility: Futility | None, num_prompts: int, width: int = 0) -> Outcome:
    return Driver(Policy(BALANCE, FOREVER, futility=futility, fixed_width=width), tier_law).run(num_prompts)


def z_scores(out: Outcome, exact: Cost) -> list[float]:
    """Of samples a visit, useful groups a visit, and samples a useful group (by the delta method)."""
    samples = [float(len(r.arm.counted)) for r in out.retirements]
    useful = [float(r.reason == "solved") for r in out.retirements]
    balance = [n - exact.per_useful * u for n, u in zip(samples, useful, strict=True)]
    cases = ((samples, exact.samples), (useful, exact.useful), (balance, 0.0))
    return [
        abs(statistics.fmean(values) - mean) / (statistics.stdev(values) / math.sqrt(len(values)))
        for values, mean in cases
    ]


THRESHOLD = Threshold(BALANCE, 0.7, 0.5, 2.0)
PAYS = measure(BALANCE, PRIOR, THRESHOLD)
CASES = {
    "optimal": (OPTIMAL.table, OPTIMAL.cost, 5000, 0),
    "optimal, 8 in flight": (OPTIMAL.table, OPTIMAL.cost, 2000, 8),
    "threshold": (THRESHOLD, PAYS, 2000, 0),
    "none": (None, OPTIMAL.cost_without, 2000, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_dispatcher_pays_what_the_solver_says(case) -> None:
    futility, exact, num_prompts, width = CASES[case]
    out = run(futility, num_prompts, width)
    scores = z_scores(out, exact)
    assert max(scores) < 3.0, f"samples, groups, ratio: {scores} against {exact}, {exact.per_useful}"
    outcomes = {r.outcome for r in out.retirements if r.reason == "futile"}
    assert outcomes == (set() if futility is None else {"deferred"})


def gives_up(counts: Counts) -> bool:
    return OPTIMAL.table.stops(counts, EMPTY)


WEIGHTS = {
    0.02: (7.1045, 0.2592, 0.1340, 0.0134),
    0.05: (5.7566, 0.4801, 0.4800, 0.0634),
    0.10: (3.8486, 0.6174, 0.8436, 0.1681),
    0.20: (1.9819, 0.6383, 0.9929, 0.3563),
    0.30: (1.3237, 0.6346, 0.9998, 0.5094),
    0.50: (1.0000, 0.7422, 1.0000, 0.7422),
    0.70: (1.3237, 1.0940, 0.9998, 0.8253),
}
"""p: implied weight of a visit without and with the optimal table, P(useful group) without and with it.

Above 0.7 the share falls again (0.95: 0.23): prompts that are nearly always right are rare in the tiers, and dear.
"""


def test_hard_prompts_lose_weight_and_the_harder_the_more() -> None:
    rows = {
        p: (
            implied_weight(exact_law(BALANCE, p, 32), AdvantageRule()),
            implied_weight(exact_law(BALANCE, p, 32, gives_up), AdvantageRule()),
            measure(BALANCE, of_rates([p]), None).useful,
            measure(BALANCE, of_rates([p]), OPTIMAL.table).useful,
        )
        for p in WEIGHTS
    }
    table = "\n".join(f"{p}: " + ", ".join(f"{value:.4f}" for value in row) for p, row in rows.items())
    assert {p: pytest.approx(row, abs=1e-4) for p, row in rows.items()} == WEIGHTS, table
    shares = [after / before for before, after, _, _ in rows.values()]
    assert shares == sorted(shares), table
    assert shares[0] < 0.1 * shares[-1], table
