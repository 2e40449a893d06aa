"""MoPPS (arXiv 2507.04632): visit the prompt whose drawn pass rate is nearest the target.

Each prompt has a Beta(α, β) posterior of its pass rate. The paper updates it at each visit with k right and m wrong
samples: α ← λα + (1-λ)α₀ + k, β ← λβ + (1-λ)β₀ + m. So α - α₀ ← λ(α - α₀) + k, which is the faded count of right
samples in a prompt's past: α = α₀ + past.right, β = β₀ + past.wrong, with λ = `history.visit_decay` and
`history.version_decay = 1` (below 1 the posterior also widens while a prompt is not visited). The paper's λ is 1.

A Thompson draw of each candidate's rate, then the nearest to the target (0.5), or, under the band rule, any one that
was drawn inside [low, high], at random; when none was, the nearest to the band.

Deviations: the paper takes the best B of a pool of 16·B at each step; here one of each 16, since prompts are admitted
one by one. Its posterior counts the n samples of a group; ours all counted samples of the visit. (The authors' code
sets α and β to 8 when n = 1, an operator-precedence slip; not copied.)

Every candidate has a positive chance: a Beta draw has a positive density everywhere in (0, 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.rng import SplitMix
from engine.core.selectors.base import Candidate, Draw
from engine.core.selectors.draws import beta


@dataclass(frozen=True, slots=True)
class Mopps:
    """`selector.name = "mopps"`."""

    pool: int = 16
    target: float = 0.5
    """Pass rate that is worth most."""
    band: tuple[float, float] | None = None
    """Bounds of the band rule; None = the nearest to `target`."""
    prior_right: float = 1.0
    """α₀."""
    prior_wrong: float = 1.0
    """β₀."""

    def choose(self, candidates: Sequence[Candidate], draw: Draw) -> int:
        """The candidate with the best drawn rate."""
        rng = SplitMix(draw.seed)
        rates = [beta(rng, self.prior_right + c.past.right, self.prior_wrong + c.past.wrong) for c in candidates]
        if self.band is None:
            return _least([abs(rate - self.target) for rate in rates])
        low, high = self.band
        inside = [index for index, rate in enumerate(rates) if low <= rate <= high]
        if inside:
            return inside[rng.below(len(inside))]
        return _least([max(low - rate, rate - high) for rate in rates])

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        """Nothing: a prompt's past says it all."""


def _least(values: list[float]) -> int:
    return values.index(min(values))
