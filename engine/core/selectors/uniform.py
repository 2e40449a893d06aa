"""Every prompt once an epoch, in seeded order: no selection."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.selectors.base import Candidate, Draw


@dataclass(frozen=True, slots=True)
class Uniform:
    """`selector.name = "uniform"`."""

    pool: int = 0

    def choose(self, candidates: Sequence[Candidate], draw: Draw) -> int:
        """The next one in order."""
        return 0

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        """Nothing is remembered."""
