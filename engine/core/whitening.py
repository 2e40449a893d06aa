"""Mean and spread of the advantages of one optimizer step: what REINFORCE++ whitens with. Pure.

A = (a - mean) / (std + ε) over the kept samples of the step's groups (arXiv 2501.03262, global advantage
normalization), a being the reward itself (REINFORCE++) or the reward less its group's mean (REINFORCE++ with baseline);
engine/core/advantage.py makes both. Strategies that keep all they sample then weigh every prompt alike: 1/std with the
reward itself, (n - 1)/n of it less the mean of n.

Deviations: every sample weighs the same. The paper and the public code (OpenRLHF, verl) take mean and variance over
response tokens, so a sample weighs its length: there a KL penalty makes advantages differ from token to token, here a
response has one. With it, lengths of the other samples would move an advantage, which depends on labels only in this
engine, and a kept sample could not be exchanged. No KL penalty is in the reward. std has ddof = 1 and ε is added to it
(verl: the same variance, with ε = 1e-8 under its root; OpenRLHF: ddof = 0).

`math.fsum` is exact before its one rounding, so the order of groups and samples changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.advantage import STD_EPS

_ROUNDING = 1e-12
"""Of a step's mean, relative to its std: groups that each sum to zero must not leave 1e-17 to those without spread."""


@dataclass(frozen=True, slots=True)
class Whitening:
    """Statistics of a step's advantages before whitening."""

    mean: float
    std: float
    """ddof = 1; 0 where all are equal."""
    num_samples: int

    @property
    def spread(self) -> float:
        """What advantages are divided by, > 0.

        1 where the std is 0: every whitened advantage is 0 then, and rounding must not be blown up a million times.
        """
        return self.std + STD_EPS if self.std > 0.0 else 1.0


def measure(values: Sequence[float]) -> Whitening:
    """Mean and standard deviation; a step without samples has mean 0.

    Example: 1, 1, 0, 0 have mean 0.5 and std 0.5774, so they become 0.866, 0.866, -0.866, -0.866.
    """
    if not values or min(values) == max(values):
        return Whitening(values[0] if values else 0.0, 0.0, len(values))
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return Whitening(mean if abs(mean) > _ROUNDING * std else 0.0, std, len(values))
