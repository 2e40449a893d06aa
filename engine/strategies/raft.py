"""RAFT: n_max samples for every prompt, the right ones are trained at their reward (arXiv 2304.06767, algorithm 1).

With the run's clipped importance ratios this is RAFT++ (arXiv 2504.11343). Without a baseline (advantage baseline
"zero") every kept sample has advantage 1, and a group's mean gradient has weight w(p) = (1 - q^n)/p.

Deviations: all right samples are kept, or group_size of them at random when it is above 0 (RAFT keeps the best one). A
prompt without a right sample makes no group.

Reinforce-rej (arXiv 2504.11343) needs no class of its own: it is `Fixed` with the advantage baseline "signed"; groups
without spread are left out as under every strategy.
"""

from dataclasses import dataclass

from engine.core.strategy import Selection
from engine.strategies.fixed import Fixed


@dataclass(frozen=True, slots=True)
class Raft(Fixed):
    """`strategy.name = "raft"`."""

    selection: Selection = "right"
