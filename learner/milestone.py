"""How far a run is, kept up to date group by group; the value itself is on the wire (engine/wire/record.py).

Invariant: a turn is settled in a milestone if and only if its group was trained or dropped by a finished step, or its
visit ended without a group before the last group with a position was shipped. So a resumed run trains no group twice
and passes no prompt over that an uninterrupted one would have trained.
Called by learner/stream.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.wire import Milestone, Position, TrainGroup


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a trainer that was asked to resume goes on from."""

    checkpoint: str = ""
    """Its folder; empty = there was none, the run starts anew."""
    milestone: Milestone = field(default_factory=Milestone)


def settle(milestone: Milestone, groups: Sequence[TrainGroup]) -> Milestone:
    """With these groups trained or dropped too, in the order in which they were shipped; the same version."""
    position = milestone.position
    open_turns, done_turns = set(position.open_turns), set(position.done_turns)
    for group in groups:
        if group.position is not None:
            position = group.position
            open_turns, done_turns = set(position.open_turns), set(position.done_turns)
        elif group.turn >= position.next_turn:
            done_turns.add(group.turn)
        else:
            open_turns.discard(group.turn)
    last_group_id = max([milestone.last_group_id, *(group.group_id for group in groups)])
    position = Position(position.next_turn, sorted(open_turns), sorted(done_turns), position.num_arms, position.order)
    return Milestone(milestone.policy_version, last_group_id, position)


def finish(milestone: Milestone) -> Milestone:
    """After the optimizer step."""
    return Milestone(milestone.policy_version + 1, milestone.last_group_id, milestone.position)
