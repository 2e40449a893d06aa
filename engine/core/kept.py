"""How many samples of each class a group keeps: the counting rule that sealing and the exact laws share. Pure."""

from math import comb

from engine.core.strategy import Strategy


def balanced(size: int, right: int, wrong: int) -> tuple[int, int]:
    """Half of each class; the surplus class fills up what the other lacks (the rule of Reinforce-Ada's code).

    Args:
        size: Samples to keep, at most.
        right: Right samples to choose from.
        wrong: Wrong samples to choose from.

    Returns:
        Right and wrong samples to keep; an odd size keeps the odd one wrong.
    """
    num_right = min(size // 2, right)
    num_wrong = min(size - num_right, wrong)
    return min(size - num_wrong, right), num_wrong


def kept_law(strategy: Strategy, right: int, wrong: int) -> list[tuple[int, int, float]]:
    """Law of the kept right and wrong samples of a pool whose samples are all fresh.

    `balanced` and `right` keep a fixed number of each class; `uniform` draws without looking at labels, so its right
    ones are hypergeometric.

    Returns:
        (kept right, kept wrong, probability); the probabilities sum to 1.
    """
    total = right + wrong
    size = min(strategy.group_size or total, total)
    if strategy.selection == "balanced":
        return [(*balanced(size, right, wrong), 1.0)]
    if strategy.selection == "right":
        return [(min(size, right), 0, 1.0)]
    ways = comb(total, size)
    return [
        (kept, size - kept, comb(right, kept) * comb(wrong, size - kept) / ways)
        for kept in range(max(0, size - wrong), min(size, right) + 1)
    ]
