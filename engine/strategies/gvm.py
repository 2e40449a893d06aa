"""GVM-RAFT: budgets that minimise the variance of the gradient of log p (arXiv 2505.02391, code RLHFlow/GVM).

Two stages. A prompt without a past gets n_pilot samples (the paper's n' = 8); then p̂ = right / total of its faded past
and N ∝ G/√(p̂ + α/p̂^(β-1)), 0 where p̂ = 0 or G = 0, G the mean gradient norm of its right samples.

Deviations:
- The paper pilots every prompt anew in each big iteration. Here the past of the last visits is the pilot; a prompt
  whose past faded below one sample is piloted again. So a prompt whose pilot found nothing right is left out until
  history.version_decay < 1 has faded it; with a decay of 1 it isn't visited again.
- G = 1 until the learner reports gradient norms (`gvm_weights` takes them).
- Where no prompt of a window has a weight, or those that have one are at n_max, the rest is shared equally: the batch
  keeps its size.
- Pilots come out of the window's total first. When they exceed it, prompts with a past wait for their next turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.past import Past
from engine.core.strategy import Selection
from engine.strategies.apportion import SpendsBudget, apportion, harder_first, window_total

MIN_PAST = 1.0
"""Faded samples below which nothing is known of a prompt."""


def gvm_weights(
    rates: Sequence[float], alpha: float, beta: float, gradient_norms: Sequence[float] | None = None
) -> list[float]:
    """G/√(p + α/p^(β-1)) for each prompt, written G·√(p^(β-1) / (p^β + α)) so that small p cannot overflow.

    With G = 1 and β = 2 the weight peaks at p = √α.

    Args:
        rates: Estimated pass rates in [0, 1].
        alpha: Bounds the weight of prompts that are almost never right, > 0.
        beta: How fast their weight falls with p, >= 1.
        gradient_norms: G of each prompt, >= 0; None = 1 each.
    """
    norms = [1.0] * len(rates) if gradient_norms is None else gradient_norms
    return [
        norm * (rate ** (beta - 1.0) / (rate**beta + alpha)) ** 0.5 if rate > 0.0 else 0.0
        for rate, norm in zip(rates, norms, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Gvm(SpendsBudget):
    """`strategy.name = "gvm"`."""

    samples_per_prompt: float
    window: int
    alpha: float
    beta: float
    n_pilot: int
    """Samples of a prompt without a past; n_max at most."""
    n_max: int
    group_size: int
    selection: Selection = "uniform"

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """Pilots first, then the rest by weight; 0 = left out this time."""
        pilot = min(self.n_pilot, self.n_max)
        known = [place for place, past in enumerate(pasts) if past.total >= MIN_PAST]
        rest = window_total(self.samples_per_prompt, len(pasts)) - pilot * (len(pasts) - len(known))
        rates = [pasts[place].right / pasts[place].total for place in known]
        budgets = [pilot] * len(pasts)
        for place, budget in zip(known, harder_first(rates, lambda order: self._split(order, rest)), strict=True):
            budgets[place] = budget
        return budgets

    def _split(self, rates: list[float], total: int) -> list[int]:
        return apportion(gvm_weights(rates, self.alpha, self.beta), total, 0, self.n_max)
