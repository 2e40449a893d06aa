"""Solve for the states in which giving up an arm makes useful groups cheapest, and say what any such rule costs.

Renewal-reward: visits follow one another, so the long-run cost of a useful group under a stopping rule is
E[samples of a visit] / P(useful group of a visit) (Ross, Stochastic Processes, 2nd ed., theorem 3.6.1), p drawn anew
from the prior for each. The smallest such ratio is found by Dinkelbach's method (Management Science 13(7), 1967): for
a price c, the rule that minimises E[samples] - c·P(useful) follows by dynamic programming backward over the counts
(right, wrong); c becomes the ratio of that rule, until it falls no further. At that point no rule has a lower ratio.

A useful group is one of an arm whose verdict is `solved` and whose pool has signal. Groups that an exhausted arm still
makes (one right sample of 32, say) are not counted, for any rule.
Invariants: the first sample of a visit is never given up; ties stop. Works for every strategy whose verdict is a
function of the counts. Pure, with numpy; called once, when a run is planned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.futility import PAST_CAP, OptimalTable
from engine.core.past import EMPTY
from engine.core.policy import Futility
from engine.core.prior import TINY, Prior
from engine.core.strategy import Counts, Strategy

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Decision = Callable[[int, Floats, Floats], Bools]
"""(total, samples if it goes on, useful if it goes on) -> where to stop; arrays [past, right]."""

MAX_BUDGET = 512
"""The table has 561 n_max²/2 bits: 9 MB here."""
_MAY_STOP, _MUST_GO, _USEFUL, _ENDS = range(4)
_TOLERANCE = 1e-13
"""Relative fall of the price below which it has converged."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a visit costs and brings, on average."""

    samples: float
    """Counted samples."""
    useful: float
    """Probability of a useful group."""

    @property
    def per_useful(self) -> float:
        """Samples of a useful group; infinite where there is none."""
        return self.samples / self.useful if self.useful else float("inf")


@dataclass(frozen=True, slots=True)
class Solution:
    """The optimal rule and what it changes."""

    table: OptimalTable
    cost: Cost
    """Of a first visit under the table."""
    cost_without: Cost
    """Of a first visit that never gives up."""


def solve(strategy: Strategy, prior: Prior) -> Solution:
    """The rule with the fewest expected samples per useful group.

    Args:
        strategy: Its verdict must be a function of the counts.
        prior: Law of p over the prompts.

    Raises:
        ValueError: n_max above MAX_BUDGET, or a prior under which the strategy never makes a useful group.
    """
    if strategy.n_max > MAX_BUDGET:
        raise ValueError(f"futility = optimal needs n_max <= {MAX_BUDGET}, got {strategy.n_max}")
    kinds = _kinds(strategy)
    rates = _predictive(prior, strategy.n_max - 1 + PAST_CAP)
    cost = without = _walk(kinds, rates, _never)
    if without.useful == 0.0:
        raise ValueError("futility = optimal: no pass rate of the prior can end in a useful group of this strategy")
    price = cost.per_useful
    while True:
        cost = _walk(kinds, rates, lambda _, samples, useful, price=price: samples >= price * useful)
        if cost.per_useful >= price * (1.0 - _TOLERANCE):
            return Solution(OptimalTable(strategy.n_max, price, _bits(kinds, rates, price)), cost, without)
        price = cost.per_useful


def measure(strategy: Strategy, prior: Prior, futility: Futility | None) -> Cost:
    """Exact cost of a first visit under any rule of giving up, p drawn from `prior`; an atom gives it for one p."""
    kinds, rates = _kinds(strategy), _predictive(prior, strategy.n_max - 1)
    if futility is None:
        return _walk(kinds, rates, _never)

    def asks(total: int, samples: Floats, _: Floats) -> Bools:
        stops = np.zeros(samples.shape, dtype=np.bool_)
        for right in range(total + 1):
            wrong = total - right
            stops[:, right] = futility.stops(Counts(right, wrong, right, wrong, strategy.n_max), EMPTY)
        return stops

    return _walk(kinds, rates, asks)


def _kinds(strategy: Strategy) -> list[NDArray[np.int8]]:
    """What happens in each state: for each total, an array over the right ones."""
    return [
        np.array([_kind(strategy, right, total - right) for right in range(total + 1)], dtype=np.int8)
        for total in range(strategy.n_max + 1)
    ]


def _kind(strategy: Strategy, right: int, wrong: int) -> int:
    if right + wrong == 0:
        return _MUST_GO
    verdict = strategy.verdict(Counts(right, wrong, right, wrong, strategy.n_max))
    match verdict:
        case "continue":
            return _MAY_STOP
        case "again":
            return _MUST_GO
        case "solved":
            return _USEFUL if right and (wrong or strategy.selection == "right") else _ENDS
        case "exhausted" | "futile":
            return _ENDS


def _predictive(prior: Prior, num_samples: int) -> Floats:
    """P(next is right) at [right, wrong], for right + wrong <= num_samples; 0 beyond."""
    nodes, log_weights = np.array(prior.nodes), np.log(np.array(prior.weights))
    log_right = np.log(np.maximum(nodes, TINY))
    log_wrong = np.log(np.maximum(1.0 - nodes, TINY))
    rates = np.zeros((num_samples + 1, num_samples + 1))
    for right in range(num_samples + 1):
        wrong = np.arange(num_samples + 1 - right)[:, None]
        logs = log_weights + right * log_right + wrong * log_wrong
        masses = np.exp(logs - logs.max(axis=1, keepdims=True))
        rates[right, : len(wrong)] = masses @ nodes / masses.sum(axis=1)
    return rates


def _walk(kinds: list[NDArray[np.int8]], rates: Floats, decide: Decision) -> Cost:
    """Cost of a first visit under `decide`."""
    none = np.zeros(1, dtype=np.int64)
    samples, useful = _backward(kinds, rates, (none, none), decide)
    return Cost(float(samples[0]), float(useful[0]))


def _backward(
    kinds: list[NDArray[np.int8]], rates: Floats, pasts: tuple[Ints, Ints], decide: Decision
) -> tuple[Floats, Floats]:
    """Expected samples and P(useful) of a visit after each of `pasts`, deciding from the last sample to the first."""
    past_right, past_wrong = (counts[:, None] for counts in pasts)
    samples = np.zeros((len(past_right), len(kinds[-1])))
    useful = np.broadcast_to(kinds[-1] == _USEFUL, samples.shape).astype(np.float64)
    for total in reversed(range(len(kinds) - 1)):
        kind, right = kinds[total], np.arange(total + 1)
        rate = rates[past_right + right, past_wrong + total - right]
        samples = 1.0 + rate * samples[:, 1:] + (1.0 - rate) * samples[:, :-1]
        useful = rate * useful[:, 1:] + (1.0 - rate) * useful[:, :-1]
        stops = (kind == _MAY_STOP) & decide(total, samples, useful)
        goes = (kind <= _MUST_GO) & ~stops
        samples = np.where(goes, samples, 0.0)
        useful = np.where(goes, useful, kind == _USEFUL)
    return samples[:, 0], useful[:, 0]


def _bits(kinds: list[NDArray[np.int8]], rates: Floats, price: float) -> bytes:
    """The table at this price, for every past."""
    pasts = [(right, total - right) for total in range(PAST_CAP + 1) for right in range(total + 1)]
    right, wrong = np.array(pasts, dtype=np.int64).T
    masks: list[Bools] = []

    def decide(total: int, samples: Floats, useful: Floats) -> Bools:
        stops = (kinds[total] == _MAY_STOP) & (samples >= price * useful)
        masks.append(stops)
        return stops

    _backward(kinds, rates, (right, wrong), decide)
    return np.packbits(np.concatenate(masks[::-1], axis=1)).tobytes()


def _never(_: int, samples: Floats, useful: Floats) -> Bools:
    del useful
    return np.zeros(samples.shape, dtype=np.bool_)
