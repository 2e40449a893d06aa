"""Reinforce-Ada-Seq, positives: sample until k_pos right ones (arXiv 2510.04996, section 3; ours per sample).

Need = k_pos - x, x the fresh right samples. An arm that is right at once ends with a pool of k_pos right samples and
carries no gradient: this rule never searches for wrong ones.
"""

from dataclasses import dataclass

from engine.core.strategy import Counts, FullBudget, Selection, Verdict


@dataclass(frozen=True, slots=True)
class Positives(FullBudget):
    """`strategy.name = "positives"`."""

    k_pos: int
    n_max: int
    group_size: int
    selection: Selection = "balanced"

    def verdict(self, counts: Counts) -> Verdict:
        """Solved with k_pos right samples, exhausted at the budget."""
        if counts.fresh_right >= self.k_pos:
            return "solved"
        return "exhausted" if counts.total >= counts.budget else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """Right samples missing; wrong ones are never looked for."""
        return max(0, self.k_pos - counts.fresh_right), 0

    def need(self, counts: Counts) -> int:
        """The missing right samples, within the budget."""
        return min(self.k_pos - counts.fresh_right, counts.budget - counts.total)
