"""The seam of a strategy: counts of an arm in, verdict and need out. Pure; a strategy is one file and one test.

Counts come from the longest scored prefix in launch order. Exit rules read fresh samples; budgets read all of them.
A strategy is asked in this order: `budgets` when arms are opened, then `verdict` after every counted sample, and `need`
and `missing` whenever a slot is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, dataclass_transform

from engine.core.past import Past

Verdict = Literal["continue", "solved", "exhausted", "futile", "again"]
"""`solved`: the exit holds. `exhausted`: the budget is used up. `futile`: the prompt is not wanted now; the visit ends
and its counts stay. `again`: enough for now; the arm waits with its pool and goes on later."""
Selection = Literal["balanced", "uniform", "right"]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _record(cls: type[T]) -> type[T]:
    """A dataclass that only the type checker freezes: one is made for every sample, and a frozen one costs 4 x that."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_record
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
    budget: int
    """Samples that this visit may count, at most."""
    seed: int = 0
    """The arm's, for rules that throw dice: the same arm throws the same ones in any order of events."""

    @property
    def total(self) -> int:
        """Samples that count for the budget."""
        return self.right + self.wrong


class Strategy(Protocol):
    """When an arm has enough, and what is kept."""

    @property
    def group_size(self) -> int:
        """Samples kept, at most; 0 = every fresh one."""
        ...

    @property
    def n_max(self) -> int:
        """Samples that any visit may count, at most."""
        ...

    @property
    def selection(self) -> Selection:
        """`balanced`: half of each class, topped up; `uniform`: any samples of the pool; `right`: right ones only."""
        ...

    @property
    def window(self) -> int:
        """Prompts whose budgets are set together; 1 = each alone."""
        ...

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """Samples that the next visit of each of these prompts may count; 0 = not visited this time."""
        ...

    def verdict(self, counts: Counts) -> Verdict:
        """Whether the arm goes on after these counts."""
        ...

    def missing(self, counts: Counts) -> tuple[int, int]:
        """Right and wrong samples still missing for the exit; (0, 0) when it holds or none is looked for."""
        ...

    def need(self, counts: Counts) -> int:
        """Samples needed even in the best case: the width that wastes nothing. At least 1 while `continue`."""
        ...


class FullBudget:
    """The common budget: every visit may count `n_max` samples, whatever is known of the prompt."""

    __slots__ = ()
    n_max: int

    @property
    def window(self) -> int:
        """Each prompt alone."""
        return 1

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """n_max each."""
        return [self.n_max] * len(pasts)
