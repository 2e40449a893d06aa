"""Advantages of kept samples, from the statistics of their whole pool.

A(r) = scale * (r - baseline of the class) - shift. All three depend on labels only, never on content or length, so an
exchanged sample of the same class keeps its advantage, and E[gradient] = w(p)·∇p with w = E[ΣA+]/p - E[ΣA-]/q over the
kept samples (engine/core/law.py; tests/unit/test_implied_weights.py has w of every rule).

Sources and deviations:
- `pool`: Reinforce-Ada, arXiv 2510.04996 v3, algorithm 2: r - r̄ over all samples of the arm. Its text also divides by
  the pass rate (`weight = "inverse"`); its code does not, and balanced groups already carry about 1/(2p).
- `kept` without std: Dr. GRPO, arXiv 2503.20783; with std: GRPO, arXiv 2402.03300, section 4.1. Deviation: the std is
  the pool's (ddof = 1, as in verl), which differs from the kept samples' only when fewer are kept than sampled.
- `leave_one_out`: RLOO, arXiv 2402.14740: r_i - mean of the others = n/(n - 1)·(r_i - r̄), over the pool.
- `unbiased`: the stopping rule's unbiased estimate of p (engine/core/unbiased.py); prompt weights then use it as well.
- `greedy`: ReMax, arXiv 2310.10505: r - the reward of the prompt's greedy response, which is drawn apart and never
  trained. Deviation: the paper samples once a prompt; here all samples of an arm share its one greedy response.
- `history`: mean of all attempts, earlier visits included, as NGU's baseline (arXiv 2609.13443); ours fade.
- `zero`: the raw reward: RAFT, arXiv 2304.06767. `signed`: rewards as -1 and +1 without a baseline, A = 2(r - 1/2):
  Reinforce-Rej, arXiv 2504.11343 (its authors trained with ±1; with 0 and 1 wrong samples would teach nothing).
- `anchor_pos`: NGU: A+ = 1 - b, A- = -(n+/n-)·(1 - b), so that a group's advantages sum to zero for rewards 0 and 1.
- `whiten`: REINFORCE++, arXiv 2501.03262: mean 0 and std 1 over the step's samples (engine/core/whitening.py).
- `inverse_sqrt`: Reinforce-Ada-Est, algorithm 1: A = (r - r̄)/√(r̄ + ε). `maxrl`: arXiv 2602.02710, centred: (r - r̄)/r̄.
Baselines count labels, rewards may be shaped (a length penalty): then a group's mean advantage is off by the mean
penalty. The authors' code does the same.
"""

import math
from dataclasses import dataclass
from typing import Literal

from engine.core.past import Past

Baseline = Literal["pool", "kept", "leave_one_out", "unbiased", "history", "greedy", "zero", "signed"]
Weight = Literal["none", "inverse_sqrt", "inverse", "maxrl"]
Centring = Literal["none", "anchor_pos"]
STD_EPS = 1e-6
"""Added to the standard deviation, as GRPO's implementations do."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Labels of a retired arm."""

    right: int
    """Counted right samples."""
    wrong: int
    """Counted wrong samples."""
    kept_right: int
    """Right samples in the group."""
    kept_wrong: int
    """Wrong samples in the group."""
    past: Past
    """Before this visit."""
    unbiased: float = 0.0
    """The stopping rule's unbiased estimate of p; read by baseline `unbiased` only."""
    greedy_reward: float = 0.0
    """Reward of the greedy response; read by baseline `greedy` only."""

    @property
    def total(self) -> int:
        """Counted samples."""
        return self.right + self.wrong

    @property
    def mean(self) -> float:
        """Share of right samples in the pool."""
        return self.right / self.total


@dataclass(frozen=True, slots=True)
class Factors:
    """What an arm's advantages are made of; linear in the reward.

    Example: 1 right and 3 wrong samples under the pool mean give baselines 0.25 and scale 1: A = 0.75 and -0.25.
    """

    baseline: float
    """Subtracted from the rewards of right samples."""
    baseline_wrong: float
    """Subtracted from those of wrong samples; the same, unless centring moved it."""
    scale: float
    """Multiplies both."""
    shift: float = 0.0
    """Subtracted last; not zero only under whitening."""

    def advantage(self, reward: float, *, is_right: bool) -> float:
        """Of a sample with this reward."""
        return self.scale * (reward - (self.baseline if is_right else self.baseline_wrong)) - self.shift

    def whitened(self, mean: float, spread: float) -> "Factors":
        """Those of (A - mean) / spread; `spread` > 0."""
        shift = (self.shift + mean) / spread
        return Factors(self.baseline, self.baseline_wrong, self.scale / spread, shift)


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """One choice for the whole run."""

    baseline: Baseline = "pool"
    divides_by_std: bool = False
    weight: Weight = "none"
    max_weight: float = 10.0
    """Cap of 1/p and 1/√p; `maxrl` is not capped."""
    epsilon: float = 0.0
    """Added to the pass rate under 1/p and 1/√p."""
    centring: Centring = "none"
    whiten: bool = False
    """Whiten the advantages of a step's kept samples together."""

    @property
    def needs_greedy(self) -> bool:
        """Whether an arm draws a greedy response before its samples."""
        return self.baseline == "greedy"

    @property
    def compares_prompts(self) -> bool:
        """Whether rewards are compared across prompts only: then a pool without spread has a signal as well."""
        return self.whiten and self.baseline in ("zero", "signed")

    def factors(self, pool: Pool) -> Factors:
        """Baselines and scale for one pool.

        Args:
            pool: At least one sample; for baseline `kept` at least one kept.
        """
        baseline = self._baseline(pool)
        scale = self._weight(pool.unbiased if self.baseline == "unbiased" else pool.mean)
        if self.baseline == "leave_one_out":
            # A single sample has no others to compare with: no advantage.
            scale *= pool.total / (pool.total - 1) if pool.total > 1 else 0.0
        elif self.baseline == "signed":
            scale *= 2.0
        if self.divides_by_std:
            scale /= _std(pool.right, pool.wrong) + STD_EPS
        baseline_wrong = baseline
        if self.centring == "anchor_pos" and pool.kept_wrong:
            baseline_wrong = (1.0 - baseline) * pool.kept_right / pool.kept_wrong
        return Factors(baseline, baseline_wrong, scale)

    def _baseline(self, pool: Pool) -> float:
        match self.baseline:
            case "kept":
                return pool.kept_right / (pool.kept_right + pool.kept_wrong)
            case "unbiased":
                return pool.unbiased
            case "history":
                return (pool.past.right + pool.right) / (pool.past.total + pool.total)
            case "greedy":
                return pool.greedy_reward
            case "zero":
                return 0.0
            case "signed":
                return 0.5
            case "pool" | "leave_one_out":
                return pool.mean

    def _weight(self, rate: float) -> float:
        if self.weight == "none":
            return 1.0
        if self.weight == "maxrl":
            return 1.0 / rate if rate else 0.0
        shrunk = rate + self.epsilon
        if shrunk <= 0.0:
            return self.max_weight
        return min(self.max_weight, 1.0 / (math.sqrt(shrunk) if self.weight == "inverse_sqrt" else shrunk))


def _std(right: int, wrong: int) -> float:
    """Standard deviation of 0/1 labels, ddof = 1.

    1 where it is zero (deviation: verl has 1e-6 there): such a pool has advantages only from shaped rewards or a
    baseline other than its mean, and those must not be blown up a million times.
    """
    total = right + wrong
    return math.sqrt(right * wrong / (total * (total - 1))) if right and wrong else 1.0
