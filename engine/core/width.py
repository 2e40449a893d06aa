"""How many requests an arm may have in flight.

Zero-waste width is the need: the samples needed even in the best case. It is raised only when the scarce samples of a
class that is not complete yet would expire before the missing ones are expected: with m missing samples of pass rate p
(posterior mean under a uniform prior), latency L and time T until the oldest scarce sample expires, m/p samples are
expected, one after another width at a time, so width >= (m/p)·L/T. The raise is capped at `MAX_RAISE` times the need.
"""

import math
from dataclasses import dataclass

from engine.core.arm import Arm
from engine.core.strategy import Counts, Strategy

MAX_RAISE = 4
"""Times the need: past it the expected waste outgrows what an expired scarce sample costs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured speed of the run; 0 = not known yet (then nothing is raised)."""

    latency_s: float = 0.0
    """Mean seconds from launch to verdict."""
    version_s: float = 0.0
    """Mean seconds between two published versions."""


def width(arm: Arm, strategy: Strategy, oldest_fresh: int, pace: Pace) -> int:
    """Launched and uncounted samples that `arm` should have now, at least the need, within its budget."""
    counts = arm.counts(oldest_fresh)
    need = strategy.need(counts)
    raised = max(
        (
            _raised(arm, missing, pace, right=right, oldest_fresh=oldest_fresh, counts=counts)
            for missing, right in zip(strategy.missing(counts), (True, False), strict=True)
        ),
        default=0,
    )
    return min(max(need, min(raised, MAX_RAISE * need)), strategy.n_max - counts.total)


def _raised(arm: Arm, missing: int, pace: Pace, *, right: bool, oldest_fresh: int, counts: Counts) -> int:
    fresh = counts.fresh_right if right else counts.fresh_wrong
    if not (missing and fresh and pace.latency_s and pace.version_s):
        return 0
    oldest = arm.oldest_fresh_version(right=right, oldest_fresh=oldest_fresh)
    versions_left = (oldest if oldest is not None else oldest_fresh) - oldest_fresh + 0.5
    rate = ((counts.right if right else counts.wrong) + 1) / (counts.total + 2)
    return math.ceil(missing / rate * pace.latency_s / (versions_left * pace.version_s))
