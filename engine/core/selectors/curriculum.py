"""A difficulty curriculum: visit the prompt whose estimated pass rate is nearest a target that moves over training.

target(v) = first + (last - first)·min(1, v / steps), v the policy versions since it took force; from easy to hard by
default. The estimate
is the posterior mean (past.right + α₀) / (past.total + α₀ + β₀), so a prompt that was never visited counts as the
prior's mean. Equals: the first in the epoch's order, which is random. (Own rule; the idea of a moving target is that of
every easy-to-hard curriculum, with measured instead of labelled difficulty.)

The estimate does not move while a prompt is not visited (unless `history.version_decay` is below 1), so this rule alone
would never come back to a prompt far from the target: `selector.max_passes` must be above 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.past import Past
from engine.core.selectors.base import Candidate, Draw


@dataclass(frozen=True, slots=True)
class Curriculum:
    """`selector.name = "curriculum"`."""

    pool: int = 16
    first: float = 0.75
    """Target pass rate when it takes force."""
    last: float = 0.25
    """Target `steps` versions later, and from then on."""
    steps: int = 200
    prior_right: float = 1.0
    """α₀."""
    prior_wrong: float = 1.0
    """β₀."""

    def target(self, version: int) -> float:
        """Wanted pass rate so many policy versions after it took force."""
        return self.first + (self.last - self.first) * min(1.0, version / self.steps)

    def choose(self, candidates: Sequence[Candidate], draw: Draw) -> int:
        """The candidate whose estimate is nearest the target."""
        target = self.target(draw.version)
        gaps = [abs(self._mean(candidate.past) - target) for candidate in candidates]
        return gaps.index(min(gaps))

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        """Nothing: a prompt's past says it all."""

    def _mean(self, past: Past) -> float:
        return (past.right + self.prior_right) / (past.total + self.prior_right + self.prior_wrong)
