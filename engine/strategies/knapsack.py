"""Knapsack-RL: the window's samples go where they most probably make a group with signal (arXiv 2509.25849).

Maximises Σ V(N, p̂) with V(N, p) = (1 - p^N - q^N)·p·q² (probability of a mixed group times what it teaches) under a
fixed total and n_min <= N <= n_max; p̂ = right / total of the prompt's faded past.

Sample N + 1 adds (p^N·q + q^N·p)·p·q², which falls with N from N = 1 on, so taking the best next sample is exact where
the authors run a dynamic program. Only from 0 to 1 it isn't: no sample and one sample are both worth 0 (the formula's
-1 at N = 0 is not meant). `spend` is exact there too.

Left-over budget goes to prompts with p̂ = 0, whose value is 0: as in the authors' code, what is left when every prompt
with 0 < p̂ < 1 has n_min + ln(1 - 0.9)/ln(max(p̂, q̂)) samples (both outcomes seen with probability about 0.9).

Deviations: a prompt without a past counts as p̂ = 1/2, the mean of a uniform prior (the authors give it the mean
budget); without any p̂ = 0 in the window, prompts with 0 < p̂ < 1 take the left-over before those with p̂ = 1 (the
authors give it to p̂ = 1). n_min = 0 leaves prompts with p̂ = 0 or 1 out for good when nothing is left over for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.past import Past
from engine.core.strategy import Selection
from engine.strategies.apportion import SpendsBudget, apportion, check_bounds, harder_first, spend, window_total

PRIOR_RATE = 0.5
"""Of a prompt without a past."""
CONFIDENCE = 0.9
"""Probability of a mixed group after which the budget of a prompt counts as left over (the authors' alpha)."""


def value(num_samples: int, rate: float) -> float:
    """V(N, p) = (1 - p^N - q^N)·p·q²; 0 without samples."""
    wrong = 1.0 - rate
    return (1.0 - rate**num_samples - wrong**num_samples) * rate * wrong * wrong if num_samples else 0.0


def _gains(rate: float, n_min: int, n_max: int) -> list[float]:
    """What each sample above n_min adds to V."""
    wrong = 1.0 - rate
    worth = rate * wrong * wrong
    gains = [(rate**num * wrong + wrong**num * rate) * worth for num in range(max(1, n_min), n_max)]
    return [0.0, *gains] if n_min == 0 < n_max else gains


def _wanted(rate: float, room: int) -> int:
    """Samples above n_min after which a prompt's budget counts as left over."""
    likelier = max(rate, 1.0 - rate)
    if likelier >= 1.0:
        return room
    return min(room, int(math.log(1.0 - CONFIDENCE) / math.log(likelier)))


@dataclass(frozen=True, slots=True)
class Knapsack(SpendsBudget):
    """`strategy.name = "knapsack"`."""

    samples_per_prompt: float
    window: int
    n_min: int
    n_max: int
    group_size: int
    selection: Selection = "uniform"

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: n_min is negative or above n_max.
        """
        check_bounds(self.n_min, self.n_max)

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """The most valuable split of the window's samples."""
        total = window_total(self.samples_per_prompt, len(pasts))
        rates = [past.right / past.total if past.total > 0.0 else PRIOR_RATE for past in pasts]
        return harder_first(rates, lambda order: self._split(order, total))

    def _split(self, rates: list[float], total: int) -> list[int]:
        """`rates` rise, so prompts with p̂ = 0 come first and those with p̂ = 1 last."""
        num_zeros, num_ones = rates.count(0.0), rates.count(1.0)
        mixed = rates[num_zeros : len(rates) - num_ones]
        room = self.n_max - self.n_min
        extra = min(max(0, total - self.n_min * len(rates)), room * len(rates))
        wanted = sum(_wanted(rate, room) for rate in mixed)
        to_zeros = min(extra - min(extra, wanted), room * num_zeros)
        to_mixed = min(extra - to_zeros, room * len(mixed))
        more = [
            *apportion([1.0] * num_zeros, to_zeros, 0, room),
            *spend([_gains(rate, self.n_min, self.n_max) for rate in mixed], to_mixed),
            *apportion([1.0] * num_ones, extra - to_zeros - to_mixed, 0, room),
        ]
        return [self.n_min + budget for budget in more]
