"""GRPO's fixed allocation: n_max samples for every prompt (arXiv 2402.03300, section 4.1), advantage without std.

The kept set is any group_size of them, at random, all when group_size = n_max.
"""

from dataclasses import dataclass

from engine.core.strategy import Counts, FullBudget, Selection, Verdict


@dataclass(frozen=True, slots=True)
class Fixed(FullBudget):
    """`strategy.name = "fixed"`."""

    n_max: int
    group_size: int
    selection: Selection = "uniform"

    def verdict(self, counts: Counts) -> Verdict:
        """Solved at n_max samples, whatever they are."""
        return "solved" if counts.total >= counts.budget else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """No class is looked for."""
        return 0, 0

    def need(self, counts: Counts) -> int:
        """All samples not counted yet."""
        return counts.budget - counts.total
