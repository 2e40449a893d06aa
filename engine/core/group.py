"""Groups: which samples of a retired arm are kept, their advantages, and the exchange of kept samples that grew stale.

Invariants:
- Kept samples are drawn at random within class (seeded per arm), never by arrival, length or logprob.
- Advantage = reward - mean reward of all counted samples of the arm (pool mean, no std: arXiv 2510.04996, algorithm 2).
- A kept sample is exchanged only for an unkept fresh one of its class, so advantages do not change.
- A pool without spread carries no gradient: no group. Nor is one made when the fresh samples of one class ran out.
"""

from dataclasses import dataclass

from engine.core.arm import Arm, Sample
from engine.core.rng import SplitMix, derive
from engine.core.strategy import Strategy

_KEEP_STREAM = 0x6B656570
"""Separates the seed of the kept set from the seeds of the arm's samples."""


@dataclass(slots=True)
class Group:
    """A retired arm's kept samples."""

    group_id: int
    arm: Arm
    kept: list[Sample]
    baseline: float
    num_exchanged: int = 0

    def advantage(self, sample: Sample) -> float:
        """Reward minus the pool mean."""
        return sample.reward - self.baseline

    @property
    def min_version(self) -> int:
        """Version of the oldest kept token."""
        return min(s.min_version for s in self.kept)


def seal(group_id: int, arm: Arm, strategy: Strategy, oldest_fresh: int) -> Group | None:
    """The group of a retired arm, or None when it carries no gradient (`has_spread` tells the two causes apart)."""
    order = [s for s in arm.counted if s.min_version >= oldest_fresh]
    if not has_spread(arm):
        return None
    order = SplitMix(derive(arm.seed, _KEEP_STREAM)).shuffled(order)
    if strategy.selection == "balanced":
        kept = _balanced(order, strategy.group_size)
        is_usable = len({s.is_right for s in kept}) == 2
    else:
        kept = order[: strategy.group_size]
        is_usable = bool(kept)
    if not is_usable:
        return None
    baseline = sum(s.reward for s in arm.counted) / len(arm.counted)
    return Group(group_id, arm, kept, baseline)


def has_spread(arm: Arm) -> bool:
    """Whether the counted samples differ in reward; without spread every advantage is zero."""
    return len({s.reward for s in arm.counted}) > 1


def _balanced(order: list[Sample], size: int) -> list[Sample]:
    """Half of each class; the surplus class fills up what the other lacks (the rule of the authors' code)."""
    right = [s for s in order if s.is_right]
    wrong = [s for s in order if not s.is_right]
    num_right = min(size // 2, len(right))
    num_wrong = min(size - num_right, len(wrong))
    num_right = min(size - num_wrong, len(right))
    return right[:num_right] + wrong[:num_wrong]


def refresh(group: Group, oldest_fresh: int) -> bool:
    """Exchange kept samples older than `oldest_fresh`; False when the pool has no fresh one of a class left."""
    stale = [s for s in group.kept if s.min_version < oldest_fresh]
    if not stale:
        return True
    taken = {s.index for s in group.kept}
    spare = [s for s in group.arm.counted if s.index not in taken and s.min_version >= oldest_fresh]
    spare = SplitMix(derive(group.arm.seed, _KEEP_STREAM, oldest_fresh)).shuffled(spare)
    for old in stale:
        new = next((s for s in spare if s.is_right == old.is_right), None)
        if new is None:
            return False
        spare.remove(new)
        group.kept[group.kept.index(old)] = new
        group.num_exchanged += 1
    return True
