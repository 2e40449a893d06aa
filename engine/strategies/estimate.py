"""Reinforce-Ada-Est: harder prompts get more samples, by an estimate of their pass rate (arXiv 2510.04996 v3, alg. 1).

p̂ = (right + α) / (total + α + β) from the prompt's faded past, before this visit; N ∝ 1/√p̂ in [n_min, n_max] with the
window's sum kept. α = 1, β = 16 in the authors' code, whose decay λ = 0.9 is history.visit_decay; a prompt never seen
counts as p̂ = 1/17.

Deviations: the paper adds ε to p̂ under the root, our prior keeps p̂ above 0 already; the sum is kept exactly, not
about. `power = "inverse"` is the authors' code (branch `hanze`): n_min samples each (1 there) and the rest ∝ 1/p̂, floor
and largest remainder. It has no cap: n_max large. The weight 1/√(r̄ + ε) of the paper's gradient, absent in that code,
is advantage.weight = "inverse_sqrt".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.core.past import Past
from engine.core.strategy import Selection
from engine.strategies.apportion import SpendsBudget, apportion, check_bounds, harder_first, window_total


@dataclass(frozen=True, slots=True)
class Estimate(SpendsBudget):
    """`strategy.name = "estimate"`.

    Example: pasts with (total, right) = (0, 0), (8, 0), (8, 4), (8, 8) and 8 samples a prompt get 11, 15, 4 and 2 with
    power "inverse", n_min = 1 and n_max = 32.
    """

    samples_per_prompt: float
    window: int
    n_min: int
    n_max: int
    power: Literal["inverse_sqrt", "inverse"]
    prior_right: float
    """α, above 0."""
    prior_wrong: float
    """β, at least 0."""
    group_size: int
    selection: Selection = "uniform"

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: n_min is negative or above n_max.
        """
        check_bounds(self.n_min, self.n_max)

    def rate(self, past: Past) -> float:
        """Posterior mean p̂ of the pass rate, in (0, 1]."""
        return (past.right + self.prior_right) / (past.total + self.prior_right + self.prior_wrong)

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """More samples the lower p̂; equal ones for prompts that were never seen."""
        total = window_total(self.samples_per_prompt, len(pasts))
        return harder_first([self.rate(past) for past in pasts], lambda rates: self._split(rates, total))

    def _split(self, rates: list[float], total: int) -> list[int]:
        if self.power == "inverse_sqrt":
            return apportion([1.0 / math.sqrt(rate) for rate in rates], total, self.n_min, self.n_max)
        rest = total - self.n_min * len(rates)
        extra = apportion([1.0 / rate for rate in rates], rest, 0, self.n_max - self.n_min)
        return [self.n_min + more for more in extra]
