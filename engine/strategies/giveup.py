"""Never give up (NGU, arXiv 2609.13443): rounds of K samples until one is right; all-wrong arms come back by chance.

After a round with a right sample the arm ends: mixed makes a group, all right has no spread and makes none. After a
round without one the arm is parked with probability `p_requeue` and goes on later with its pool, else it ends.
E[samples] = K / (1 - p_requeue·q^K) with q the rate of wrong samples; K / (1 - p_requeue) where none is ever right.
All samples of the chain make the baseline, only fresh ones are kept; the paper centres by anchor_pos ([advantage]).

Deviations: `giveup.max_samples` caps the chain (any large number means no cap; the last round may be short). The age
limit is the run's η. A chain whose right samples all expired before their round ended is not hopeless: it goes on
without a throw, and at the cap its prompt is visited again soon instead of being trained on wrong samples alone.
"""

from dataclasses import dataclass

from engine.core.rng import derive
from engine.core.strategy import Counts, FullBudget, Selection, Verdict

_THROW_STREAM = 0x7468726F77
"""Separates the throws of an arm from the seeds of its samples."""
_SEEDS = 1 << 63
"""Number of values that `derive` takes."""


@dataclass(frozen=True, slots=True)
class GiveUp(FullBudget):
    """`strategy.name = "giveup"`."""

    round_size: int
    """K >= 1."""
    p_requeue: float
    """In [0, 1]; 1 = never give up before `n_max`."""
    n_max: int
    group_size: int = 0

    @property
    def selection(self) -> Selection:
        """All fresh samples train, as in the paper; a smaller group holds both classes, or it would carry nothing."""
        return "balanced" if self.group_size else "uniform"

    def verdict(self, counts: Counts) -> Verdict:
        """Solved with a fresh right sample at the end of a round; else `again` by the arm's own dice."""
        if counts.total < counts.budget and counts.total % self.round_size:
            return "continue"
        if counts.fresh_right:
            return "solved"
        if counts.total >= counts.budget:
            return "futile" if counts.right else "exhausted"
        return "again" if counts.right or self._comes_back(counts) else "exhausted"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """One right sample until there is one; it never widens an arm, since nothing scarce waits for it."""
        return int(not counts.fresh_right), 0

    def need(self, counts: Counts) -> int:
        """What is left of the round, within the budget."""
        return min(self.round_size - counts.total % self.round_size, counts.budget - counts.total)

    def _comes_back(self, counts: Counts) -> bool:
        """One throw a round, the same for any order of events."""
        return derive(counts.seed, _THROW_STREAM, counts.total) < self.p_requeue * _SEEDS
