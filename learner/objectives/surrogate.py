"""What every policy objective returns: the value to maximise at each token, and which ratios were cut.

Shapes: R response tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Clip(NamedTuple):
    """Bounds of a ratio: 1 - low, 1 + high, and c of the dual clip."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A policy objective at each token, before masks, weights and aggregation."""

    objective_R: Tensor
    """float: to be maximised; with a gradient."""
    clipped_R: Tensor
    """bool: the clip decided (no gradient; for cispo a smaller or larger weight)."""
