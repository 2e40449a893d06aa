"""VIP: budgets that minimise the summed variance of the prompts' gradient estimates (arXiv 2602.01601).

With p̂ of a prompt, q̂ = 1 - p̂ and N samples the variance is ∝ p̂q̂·(N - 1)/N² for Dr.GRPO's advantage (r - r̄) and
p̂q̂/(N - 1) for RLOO's; minimised under a fixed total and n_min <= N <= n_max.

Deviations: p̂ = (right + 1)/(total + 2) of the prompt's faded past (uniform prior) in place of the authors' Gaussian
process over prompt embeddings, so a prompt never seen counts as p̂ = 1/2 and none has variance 0. The authors solve the
relaxed problem by bisection and round it greedily; giving each sample to the prompt whose variance it lowers most has
the exact integer optimum, one pass less. n_min must be 2 or more: with one sample Dr.GRPO's variance is 0 only because
the estimate always is, and RLOO has none. From 2 to 3 samples Dr.GRPO's variance falls less than from 3 to 4 (2/4, 2/9,
3/16); `spend` is exact there too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.core.past import Past
from engine.core.strategy import Selection
from engine.strategies.apportion import SpendsBudget, check_bounds, harder_first, spend, window_total

Form = Literal["drgrpo", "rloo"]


def variance(num_samples: int, rate: float, form: Form) -> float:
    """Of a prompt's gradient estimate, up to a factor that is the same for all; `num_samples` >= 2."""
    spread = rate * (1.0 - rate)
    if form == "rloo":
        return spread / (num_samples - 1)
    return spread * (num_samples - 1) / num_samples**2


@dataclass(frozen=True, slots=True)
class Vip(SpendsBudget):
    """`strategy.name = "vip"`."""

    samples_per_prompt: float
    window: int
    n_min: int
    n_max: int
    group_size: int
    form: Form = "drgrpo"
    """The advantage whose variance counts."""
    selection: Selection = "uniform"

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: n_min is below 2 or above n_max.
        """
        if self.n_min < 2:
            raise ValueError(f"allocation.n_min must be >= 2 for vip, a variance needs two samples, got {self.n_min}")
        check_bounds(self.n_min, self.n_max)

    def rate(self, past: Past) -> float:
        """Posterior mean p̂ under a uniform prior, in (0, 1)."""
        return (past.right + 1.0) / (past.total + 2.0)

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """More samples the nearer p̂ is to 1/2."""
        rest = window_total(self.samples_per_prompt, len(pasts)) - self.n_min * len(pasts)
        return harder_first([self.rate(past) for past in pasts], lambda rates: self._split(rates, rest))

    def _split(self, rates: list[float], rest: int) -> list[int]:
        sizes = range(self.n_min, self.n_max + 1)
        gains = [_falls([variance(size, rate, self.form) for size in sizes]) for rate in rates]
        return [self.n_min + more for more in spend(gains, rest)]


def _falls(values: list[float]) -> list[float]:
    return [before - after for before, after in pairwise(values)]
