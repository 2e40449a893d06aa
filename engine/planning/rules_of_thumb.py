"""The tuning rules and the hardware table that the project started from, as they were written. Nothing here decides.

None of them has a source: no paper, code or measurement stands behind the numbers, and the weight even takes weight
from hard prompts, against the 1/√p of Reinforce-Ada-Est (arXiv 2510.04996 v3, algorithm 1). A plan shows them beside
its own figures, so that whoever knows them can compare.
"""

import math
from dataclasses import dataclass

from engine.core.prior import Prior

SOURCE = "rule of thumb from the seed, no source"
WEIGHT_RATES = (0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One row of the table."""

    task: str
    gpu_memory_per_batch: str
    sampling_threads: str


BASE = Hardware("base task, p_median > 0.3", "12 GB", "4-6")
HARD = Hardware("hard task, p_median < 0.1", "24 GB", "8-12")


@dataclass(frozen=True, slots=True)
class RulesOfThumb:
    """What the rules say about one law of pass rates and one batch size."""

    k_init: int
    """K_init = max(2, batch_size/16)."""
    n_max: int
    """N_max = 8 K_init."""
    weights: dict[str, float]
    """w = min(1, √(p/p_median)), by p."""
    hardware: Hardware | None
    """None: p_median lies between the table's two rows."""
    source: str = SOURCE


def rules_of_thumb(p_median: float, batch_size: int) -> RulesOfThumb:
    """Apply the rules; a batch size that 16 does not divide is rounded down."""
    k_init = max(2, batch_size // 16)
    weights = {f"{rate:g}": weight(rate, p_median) for rate in WEIGHT_RATES}
    hardware = BASE if p_median > 0.3 else HARD if p_median < 0.1 else None
    return RulesOfThumb(k_init, 8 * k_init, weights, hardware)


def weight(rate: float, p_median: float) -> float:
    """min(1, √(p/p_median)); 1 where the median is 0."""
    return min(1.0, math.sqrt(rate / p_median)) if p_median > 0.0 else 1.0


def median(prior: Prior) -> float:
    """The smallest p that half of the prompts do not exceed, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if _share_up_to(prior, middle) >= 0.5:
            high = middle
        else:
            low = middle
    return high


def _share_up_to(prior: Prior, rate: float) -> float:
    """Share of the prompts with p <= rate."""
    total = math.fsum(piece.share for piece in prior.pieces)
    found = 0.0
    for piece in prior.pieces:
        if piece.high <= rate:
            found += piece.share
        elif piece.low < rate:
            found += piece.share * (rate - piece.low) / (piece.high - piece.low)
    return found / total
