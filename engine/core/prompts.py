"""The order in which prompts are visited: epochs over a fixed list, each in its own seeded random order.

The order depends on the seed and the number of prompts only, so a run can be told again from any position. Turns are
numbered 0, 1, 2, ... over all epochs: turn t of n prompts is in epoch t // n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.core.rng import SplitMix, derive

_ORDER_STREAM = 0x6F72646572


@dataclass(frozen=True, slots=True)
class Turn:
    """One place in the visit order."""

    number: int
    epoch: int
    row: int


def visit_order(num_prompts: int, seed: int, max_epochs: int) -> Iterator[tuple[int, int]]:
    """(epoch, row) of every visit; each epoch visits every row once."""
    for turn in turns_from(0, num_prompts, seed, max_epochs):
        yield turn.epoch, turn.row


def turns_from(first: int, num_prompts: int, seed: int, max_epochs: int) -> Iterator[Turn]:
    """The turns numbered `first` and up, in order."""
    for epoch in range(first // num_prompts, max_epochs):
        start = epoch * num_prompts
        for place, row in enumerate(_shuffled(num_prompts, seed, epoch)):
            if start + place >= first:
                yield Turn(start + place, epoch, row)


def turns_again(numbers: Sequence[int], num_prompts: int, seed: int) -> Iterator[Turn]:
    """The turns of these numbers, which must rise."""
    order: list[int] = []
    shuffled_epoch = -1
    for number in numbers:
        epoch, place = divmod(number, num_prompts)
        if epoch != shuffled_epoch:
            order, shuffled_epoch = _shuffled(num_prompts, seed, epoch), epoch
        yield Turn(number, epoch, order[place])


def _shuffled(num_prompts: int, seed: int, epoch: int) -> list[int]:
    return SplitMix(derive(seed, _ORDER_STREAM, epoch)).shuffled(range(num_prompts))
