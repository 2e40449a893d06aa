"""How many requests an arm may have in flight.

Zero-waste width is the need: the samples needed even in the best case; where arms may be given up, no more of them than
count whatever they turn out to be. It is raised only when the scarce samples of a class that is not complete yet would
expire before the missing ones are expected: with m missing samples of pass rate p (posterior mean under a uniform
prior), latency L and time T until the oldest scarce sample expires, m/p samples are expected, one after another width
at a time, so width >= (m/p)·L/T. The raise is capped at `MAX_RAISE` times the zero-waste width.
"""

import math
from dataclasses import dataclass

from engine.core.arm import Arm
from engine.core.policy import Futility
from engine.core.strategy import Counts

MAX_RAISE = 4
"""Times the need: past it the expected waste outgrows what an expired scarce sample costs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured speed of the run; 0 = not known yet (then nothing is raised)."""

    latency_s: float = 0.0
    """Mean seconds from launch to verdict."""
    version_s: float = 0.0
    """Mean seconds between two published versions."""

    @property
    def is_known(self) -> bool:
        """Whether both were measured."""
        return self.latency_s > 0.0 and self.version_s > 0.0


UNKNOWN = Pace()
"""Nothing measured: the width is the need."""


def width(arm: Arm, oldest_fresh: int, pace: Pace, futility: Futility | None = None) -> int:
    """Launched and uncounted samples that `arm` should have now, at least the need, within its budget."""
    strategy, counts = arm.strategy, arm.counts(oldest_fresh)
    wanted = strategy.need(counts)
    if wanted < 1:
        # When fewer groups are ahead, expired samples are fresh again, and an exit that is only tested at the next
        # counted sample may hold already.
        wanted = 1
    if wanted > 1 and futility is not None:
        wanted = futility.num_sure(counts, arm.past, wanted)
    if pace.is_known:
        right, wrong = strategy.missing(counts)
        raised = 0
        if right and counts.fresh_right:
            raised = _raised(arm, right, pace, right=True, oldest_fresh=oldest_fresh, counts=counts)
        if wrong and counts.fresh_wrong:
            raised = max(raised, _raised(arm, wrong, pace, right=False, oldest_fresh=oldest_fresh, counts=counts))
        if raised > wanted:
            wanted = min(raised, MAX_RAISE * wanted)
    return min(wanted, counts.budget - counts.right - counts.wrong)


def _raised(arm: Arm, missing: int, pace: Pace, *, right: bool, oldest_fresh: int, counts: Counts) -> int:
    """Width at which the missing samples of a class come before its oldest fresh one expires."""
    versions_left = arm.oldest_fresh_version(right=right) - oldest_fresh + 0.5
    rate = ((counts.right if right else counts.wrong) + 1) / (counts.right + counts.wrong + 2)
    return math.ceil(missing / rate * pace.latency_s / (versions_left * pace.version_s))
