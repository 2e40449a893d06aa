"""GRPO's fixed allocation: n_max samples for every prompt (arXiv 2402.03300, section 4.1), advantage without std.

The kept set is any group_size of them, at random, all when group_size = n_max.
"""

from dataclasses import dataclass

from engine.core.strategy import FullBudget, Selection
from engine.strategies.apportion import SpendsBudget


@dataclass(frozen=True, slots=True)
class Fixed(FullBudget, SpendsBudget):
    """`strategy.name = "fixed"`."""

    n_max: int
    group_size: int
    selection: Selection = "uniform"
