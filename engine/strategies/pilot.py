"""Pilot, then commit (Pilot-Commit, arXiv 2605.26606; SPEED, arXiv 2506.09016): a few samples decide about the rest.

After n_pilot samples with pass rate p̂: all right or p̂ > p_high is too easy, p̂ < p_low is too hard; both end without
a group, and the pilots are recorded in the prompt's past. On the bounds or between them n_commit more are drawn, and
the union is trained. E[samples] = n_pilot + n_commit·P(p_low <= X/n_pilot <= p_high, X < n_pilot), X ~ Bin(n_pilot, p).
Pilot-Commit: 16, 48, 0.125, 0.75. SPEED: 4, 20, p_low in (0, 1/4], p_high in [3/4, 1).

Deviations: the pilots count in launch order, and a committed arm goes on at once (the authors keep passed prompts in a
buffer for up to 4 steps). The authors leave a prompt whose pilots were all right out of later epochs; here every prompt
that ends at its pilots comes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.past import Past
from engine.core.strategy import Counts, Selection, Verdict


@dataclass(frozen=True, slots=True)
class Pilot:
    """`strategy.name = "pilot"`."""

    n_pilot: int
    n_commit: int
    p_low: float
    p_high: float
    group_size: int = 0
    selection: Selection = "uniform"

    @property
    def n_max(self) -> int:
        """Pilots and what is committed."""
        return self.n_pilot + self.n_commit

    @property
    def window(self) -> int:
        """Each prompt alone."""
        return 1

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """Room for the commitment; the pilots decide whether it is used."""
        return [self.n_max] * len(pasts)

    def verdict(self, counts: Counts) -> Verdict:
        """Futile when the last pilot shows a prompt outside the band, solved when all is sampled."""
        if counts.total == self.n_pilot and not self._is_worth_it(counts.right):
            return "futile"
        return "solved" if counts.total >= counts.budget else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """No class is looked for."""
        return 0, 0

    def need(self, counts: Counts) -> int:
        """Pilots not counted yet, after them the commitment: nothing is launched before the decision."""
        end = self.n_pilot if counts.total < self.n_pilot else counts.budget
        return end - counts.total

    def _is_worth_it(self, right: int) -> bool:
        # Every pilot counts, also one that is too old to be trained: this is a question about the prompt.
        return right < self.n_pilot and self.p_low <= right / self.n_pilot <= self.p_high
