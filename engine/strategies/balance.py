"""Reinforce-Ada-Seq, balanced: sample until k_pos right and k_neg wrong ones (arXiv 2510.04996, section 3).

Deviation from the paper: the exit is tested after every sample in launch order, not after rounds.
Need = (k_pos - x)+ + (k_neg - y)+, x and y the fresh right and wrong samples.
"""

from dataclasses import dataclass

from engine.core.strategy import Counts, FullBudget, Selection, Verdict


@dataclass(frozen=True, slots=True)
class Balance(FullBudget):
    """`strategy.name = "balance"`."""

    k_pos: int
    k_neg: int
    n_max: int
    group_size: int
    selection: Selection = "balanced"

    def verdict(self, counts: Counts) -> Verdict:
        """Solved with enough of both classes, exhausted at the budget."""
        if counts.fresh_right >= self.k_pos and counts.fresh_wrong >= self.k_neg:
            return "solved"
        return "exhausted" if counts.right + counts.wrong >= counts.budget else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """Samples missing of each class."""
        right, wrong = self.k_pos - counts.fresh_right, self.k_neg - counts.fresh_wrong
        return right if right > 0 else 0, wrong if wrong > 0 else 0

    def need(self, counts: Counts) -> int:
        """Both classes' missing samples, within the budget."""
        right, wrong = self.missing(counts)
        return min(right + wrong, counts.budget - counts.right - counts.wrong)
