"""The order in which prompts are visited: epochs over a fixed list, each in its own seeded random order.

The order depends on the seed and the number of prompts only, so a run can be told again from any position.
"""

from collections.abc import Iterator

from engine.core.rng import SplitMix, derive

_ORDER_STREAM = 0x6F72646572


def visit_order(num_prompts: int, seed: int, max_epochs: int) -> Iterator[tuple[int, int]]:
    """(epoch, row) of every visit; each epoch visits every row once."""
    for epoch in range(max_epochs):
        for row in SplitMix(derive(seed, _ORDER_STREAM, epoch)).shuffled(range(num_prompts)):
            yield epoch, row
