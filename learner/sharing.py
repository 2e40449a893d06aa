"""Share the groups of a gradient out over ranks, so that all finish their passes at about the same time.

Invariants: every group goes to exactly one rank; the shares depend on the groups and their order only, so they are the
same on every machine; a rank's groups keep their order.

Called by `learner.ranked` on rank 0.
"""

from collections.abc import Sequence

from engine.wire import TrainGroup
from learner.packing import split_groups


def group_cost(group: TrainGroup) -> int:
    """Queries times keys of the group's attention, tokens²: a response's squared length, less what it shares."""
    return sum(segment.num_scores for segment in split_groups([group]))


def share_out(groups: Sequence[TrainGroup], num_ranks: int) -> list[list[TrainGroup]]:
    """The groups of each rank.

    The costliest group first, each to the rank with the least so far (the lower one of equals). The costliest share
    is then at most 4/3 - 1/(3 num_ranks) times the best possible one (Graham, SIAM J. Appl. Math. 17, 1969).

    Example:
        Costs 9, 4, 4, 1 over two ranks give 9 and 4 + 4 + 1.
    """
    costs = [group_cost(group) for group in groups]
    loads = [0] * num_ranks
    owners = [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda index: -costs[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return [[group for group, owner in zip(groups, owners, strict=True) if owner == rank] for rank in range(num_ranks)]
