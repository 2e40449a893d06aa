"""What the dispatcher decides: which sample is asked for, and what became of an arm. Pure records."""

from dataclasses import dataclass
from typing import Literal

from engine.core.arm import Arm, Reason
from engine.core.group import Group
from engine.core.rng import derive

Outcome = Literal["sealed", "zero_signal", "declined", "deferred", "dropped_expired", "dropped_failed"]
"""`declined`: the strategy wants no group of this prompt now. `deferred`: no group, and the prompt should come back
soon (the rule of futility stopped it, or it stayed without signal and those are deferred)."""


@dataclass(slots=True)
class Launch:
    """Ask for this sample now. Not frozen: one is made for every sample, and freezing triples its cost."""

    arm: Arm
    index: int
    retry: int

    @property
    def seed(self) -> int:
        """The same for every try."""
        return derive(self.arm.seed, self.index)

    @property
    def is_greedy(self) -> bool:
        """Whether the arm's greedy response is asked for (temperature 0)."""
        return self.index < self.arm.first_index


@dataclass(frozen=True, slots=True)
class Retirement:
    """An arm ended."""

    arm: Arm
    reason: Reason
    outcome: Outcome
    group: Group | None
    expired_right: int
    """Right samples that counted but were too old to be kept."""
    expired_wrong: int
