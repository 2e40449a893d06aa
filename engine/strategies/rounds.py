"""Reinforce-Ada-Seq as its authors run it: M samples a round, the exit tested after each round, R rounds at most.

Source: arXiv 2510.04996, section 3; the authors' code has M = 8, R = 4 and the exits `Balance(2, 2)` or `Positives(1)`.
With u(t) = P(the exit does not hold after t samples), E[samples] = M·Σ_{j<R} u(jM).

What is kept is the exit rule's own choice (engine/core/kept.py): half of each class, topped up from the other one. The
authors' code does the same with arms that end without success (`Unresolved` "keep": without spread they are trained at
zero advantage); the paper's text filters these ("shrink").

Deviations: kept samples are drawn, not the first ones seen. The rounds of two arms never wait for each other, so there
is no barrier over the batch; and samples live through several policy versions here, so the exit reads the fresh ones,
while rounds and budget count all. Within an arm the barrier stays: nothing of a round is launched before the exit was
tested on the round before. (A fixed width or one raised by deadline launches across it; what is launched beyond the
last round is aborted and does not count.)
"""

from dataclasses import dataclass, field

from engine.core.strategy import Counts, FullBudget, Selection, Strategy, Verdict


@dataclass(frozen=True, slots=True)
class Rounds(FullBudget):
    """`strategy.name = "rounds"`."""

    exit: Strategy
    """The rule that is tested after each round; its n_max is round_size x rounds."""
    round_size: int
    """M."""
    rounds: int
    """R."""
    n_max: int = field(init=False)
    """M x R."""

    def __post_init__(self) -> None:
        """Derive n_max.

        Raises:
            ValueError: the exit has another budget.
        """
        product = self.round_size * self.rounds
        if self.exit.n_max != product:
            raise ValueError(f"round_size x rounds must be the exit's n_max = {self.exit.n_max}, got {product}")
        object.__setattr__(self, "n_max", product)

    @property
    def group_size(self) -> int:
        """The exit's."""
        return self.exit.group_size

    @property
    def selection(self) -> Selection:
        """The exit's."""
        return self.exit.selection

    def verdict(self, counts: Counts) -> Verdict:
        """The exit's at the end of a round, also of one that the budget cuts short."""
        is_end = counts.total % self.round_size == 0 or counts.total >= counts.budget
        return self.exit.verdict(counts) if is_end else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """What the exit misses."""
        return self.exit.missing(counts)

    def need(self, counts: Counts) -> int:
        """The samples left of the round, within the budget."""
        return min(self.round_size - counts.total % self.round_size, counts.budget - counts.total)
