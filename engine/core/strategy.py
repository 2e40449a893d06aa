"""The seam of a strategy: counts of an arm in, verdict and need out. Pure; a strategy is one file and one test.

Counts come from the longest scored prefix in launch order. Exit rules read fresh samples; budgets read all of them.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Verdict = Literal["continue", "solved", "exhausted"]
Selection = Literal["balanced", "uniform"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counted samples of an arm by class."""

    fresh_right: int
    """Right samples that may still be trained."""
    fresh_wrong: int
    """Wrong samples that may still be trained."""
    right: int
    """All right samples."""
    wrong: int
    """All wrong samples."""

    @property
    def total(self) -> int:
        """Samples that count for the budget."""
        return self.right + self.wrong


class Strategy(Protocol):
    """When an arm has enough, and what is kept."""

    @property
    def group_size(self) -> int:
        """Samples kept, at most."""
        ...

    @property
    def n_max(self) -> int:
        """Samples counted, at most."""
        ...

    @property
    def selection(self) -> Selection:
        """`balanced`: half of each class, topped up; `uniform`: any samples of the pool."""
        ...

    def verdict(self, counts: Counts) -> Verdict:
        """Whether the arm goes on after these counts."""
        ...

    def missing(self, counts: Counts) -> tuple[int, int]:
        """Right and wrong samples still missing for the exit; (0, 0) when it holds."""
        ...

    def need(self, counts: Counts) -> int:
        """Samples needed even in the best case: the width that wastes nothing. At least 1 while `continue`."""
        ...
