"""Fixed samples with an exit: a visit is valid when its samples differ (DAPO, arXiv 2503.14476: group std > 0).

filter, dapo and reject draw as fixed does and leave out what is not valid, so for them such a visit is not solved:
P(solved) = 1 - p^N - q^N, and dapo's and reject's samples a kept prompt are N over it. What takes the place of an
invalid visit is the policy's choice (`Unresolved`), and the advantages differ (engine/policy.py).
"""

from dataclasses import dataclass

from engine.core.strategy import Counts, Verdict
from engine.strategies.fixed import Fixed


@dataclass(frozen=True, slots=True)
class Filtered(Fixed):
    """`strategy.name = "filter"`, `"dapo"` or `"reject"`."""

    def verdict(self, counts: Counts) -> Verdict:
        """At the budget: solved with both classes among all counted samples, as the filter looks at the whole group."""
        if counts.total < counts.budget:
            return "continue"
        return "solved" if counts.right and counts.wrong else "exhausted"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """The first sample of a class that has not come yet; it never widens an arm, since nothing scarce waits."""
        return int(not counts.right), int(not counts.wrong)
