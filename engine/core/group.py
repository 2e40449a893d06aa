"""Groups: which samples of a retired arm are kept, their advantages, and the exchange of kept samples that grew stale.

Invariants:
- Kept samples are drawn at random within class (seeded per arm), never by arrival, length or logprob.
- Advantages come from the whole pool (engine/core/advantage.py), not from the kept samples.
- A kept sample is exchanged only for an unkept fresh one of its class, so advantages change by no more than
  the two samples' shaping (a length penalty).
- A pool without signal makes no group, unless `Unresolved` says "keep" (its samples are trained at zero advantage, as
  the authors' code does) or "shrink" (a group without samples takes its place in the step). Selection `right` finds
  signal in right samples, the others in pools of both classes. Shaping is no signal: DAPO filters by verdict too, and
  the exact laws (engine/core/law.py) count classes.
- A pool with signal makes no group when its fresh samples do not carry it any more: leftovers of one class would pull
  one way. Nor does any pool without a fresh sample: if filtered prompts never expired, steps would hold more of them
  than their share.
"""

from dataclasses import dataclass

from engine.core.advantage import AdvantageRule, Factors, Pool
from engine.core.arm import Arm, Sample
from engine.core.kept import balanced
from engine.core.policy import Unresolved
from engine.core.rng import SplitMix, derive

NO_TOKENS = 1 << 62
"""Version of the oldest of no tokens: newer than any, as the minimum over nothing is."""
_NO_ADVANTAGE = Factors(0.0, 0.0, 0.0)
_KEEP_STREAM = 0x6B656570
"""Separates the seed of the kept set from the seeds of the arm's samples."""


@dataclass(slots=True)
class Group:
    """A retired arm's kept samples; none in a group that only takes a place in its step."""

    group_id: int
    arm: Arm
    kept: list[Sample]
    factors: Factors
    num_exchanged: int = 0

    def advantage(self, sample: Sample) -> float:
        """By the run's rule, from the pool's statistics."""
        return self.factors.advantage(sample.reward, is_right=sample.is_right)

    @property
    def is_useful(self) -> bool:
        """Whether a kept sample has an advantage, that is whether the group adds to the gradient."""
        return any(self.advantage(sample) != 0.0 for sample in self.kept)

    @property
    def min_version(self) -> int:
        """Version of the oldest kept token, `NO_TOKENS` when nothing is kept."""
        return min((s.min_version for s in self.kept), default=NO_TOKENS)


def seal(
    group_id: int,
    arm: Arm,
    oldest_fresh: int,
    rule: AdvantageRule,
    unresolved: Unresolved = "drop",
    estimate: float = 0.0,
) -> Group | None:
    """The group of a retired arm, or None when it makes none (`has_signal` tells the two causes apart).

    Args:
        group_id: Number in the order of sealing.
        arm: The retired arm.
        oldest_fresh: Smallest version that may be kept.
        rule: Makes the advantages.
        unresolved: What becomes of a pool without signal; only `keep` and `shrink` make a group of it.
        estimate: The stopping rule's unbiased estimate of p (baseline `unbiased`).
    """
    is_signal = has_signal(arm)
    if not is_signal and unresolved not in ("keep", "shrink"):
        return None
    order = [s for s in arm.counted if s.min_version >= oldest_fresh]
    if not order:
        return None
    if not is_signal and unresolved == "shrink":
        return Group(group_id, arm, [], _NO_ADVANTAGE)
    order = SplitMix(derive(arm.seed, _KEEP_STREAM)).shuffled(order)
    kept = _select(arm, order)
    lost_a_class = arm.strategy.selection == "balanced" and len({s.is_right for s in kept}) < 2
    if not kept or (is_signal and lost_a_class):
        return None
    factors = rule.factors(_pool(arm, kept, estimate)) if is_signal else _NO_ADVANTAGE
    return Group(group_id, arm, kept, factors)


def _select(arm: Arm, order: list[Sample]) -> list[Sample]:
    """The strategy's choice of fresh samples in random order."""
    size = arm.strategy.group_size or len(order)
    match arm.strategy.selection:
        case "balanced":
            return _balanced(order, size)
        case "right":
            return [s for s in order if s.is_right][:size]
        case "uniform":
            return order[:size]


def _pool(arm: Arm, kept: list[Sample], estimate: float) -> Pool:
    right, kept_right = arm.num_right, sum(s.is_right for s in kept)
    return Pool(right, len(arm.counted) - right, kept_right, len(kept) - kept_right, arm.past, estimate)


def has_signal(arm: Arm) -> bool:
    """Whether the counted samples can carry a gradient at all."""
    return arm.num_right > 0 if arm.strategy.selection == "right" else has_spread(arm)


def has_spread(arm: Arm) -> bool:
    """Whether samples of both classes were counted; without, every advantage over a group baseline is 0 or shaping."""
    return 0 < arm.num_right < len(arm.counted)


def _balanced(order: list[Sample], size: int) -> list[Sample]:
    """As many of each class as `balanced` says."""
    right = [s for s in order if s.is_right]
    wrong = [s for s in order if not s.is_right]
    num_right, num_wrong = balanced(size, len(right), len(wrong))
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
