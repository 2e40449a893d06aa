"""A window's samples as integer budgets: in proportion to weights, or one by one to whoever gains most.

Invariants:
- Every budget lies within its bounds, and the budgets sum to the total, or to the nearest sum that the bounds allow.
- Budgets depend on the pass rates, not on the order of the prompts: prompts are split in the order of their rates, and
  what cannot be split evenly goes to the harder prompt. Only prompts of equal rate are told apart by their place.
- A window of one has nothing to compare with: its prompt gets the mean budget, within the bounds.

Called by the strategies that set budgets from what is known: estimate, gvm, knapsack, vip.
"""

import heapq
import math
from collections.abc import Callable, Sequence

from engine.core.strategy import Counts, Verdict


class SpendsBudget:
    """The exit of strategies that only set budgets: a visit ends when its budget is counted, whatever came out."""

    __slots__ = ()

    def verdict(self, counts: Counts) -> Verdict:
        """Solved at the budget."""
        return "solved" if counts.total >= counts.budget else "continue"

    def missing(self, counts: Counts) -> tuple[int, int]:
        """No class is looked for."""
        return 0, 0

    def need(self, counts: Counts) -> int:
        """All samples not counted yet."""
        return counts.budget - counts.total


def check_bounds(n_min: int, n_max: int) -> None:
    """The bounds of a budget leave room.

    Raises:
        ValueError: n_min is negative or above n_max.
    """
    if not 0 <= n_min <= n_max:
        raise ValueError(f"allocation.n_min must be in [0, strategy.n_max = {n_max}], got {n_min}")


def window_total(samples_per_prompt: float, num_prompts: int) -> int:
    """Samples of a window (the last one may be short); halves are rounded to the even number."""
    return round(samples_per_prompt * num_prompts)


def harder_first(rates: Sequence[float], split: Callable[[list[float]], list[int]]) -> list[int]:
    """Budgets of prompts with these pass rates, by a rule that sees the rates in rising order."""
    order = sorted(range(len(rates)), key=lambda place: rates[place])
    budgets = [0] * len(rates)
    for place, budget in zip(order, split([rates[place] for place in order]), strict=True):
        budgets[place] = budget
    return budgets


def shares(weights: Sequence[float], total: float, low: int, high: int) -> list[float]:
    """Real-valued budgets in proportion to weights, within bounds, with the sum kept.

    The result is clip(c·weight, low, high) with the one c that gives the sum: prompts are pinned to the bound whose
    violation outweighs the other, since the c of the rest can only move further that way, until none is violated. A
    weight of 0 gets `low` while any other prompt has room; what is left then is shared equally.

    Args:
        weights: One a prompt, >= 0, finite.
        total: Sum wanted; moved into [low, high] x prompts.
        low: Smallest share, >= 0.
        high: Largest share, >= low.
    """
    found = [float(low)] * len(weights)
    rest = min(max(total, low * len(weights)), high * len(weights)) - low * len(weights)
    for is_free in (True, False):
        free = [place for place, weight in enumerate(weights) if (weight > 0) == is_free]
        amount = min(rest, (high - low) * len(free))
        filled = _fill([weights[place] if is_free else 1.0 for place in free], amount + low * len(free), low, high)
        for place, share in zip(free, filled, strict=True):
            found[place] = share
        rest -= amount
    return found


def _fill(weights: list[float], total: float, low: int, high: int) -> list[float]:
    """`shares` for weights above 0 and a total that the bounds allow."""
    found = [0.0] * len(weights)
    free: list[int] = list(range(len(weights)))
    rest = total
    while free:
        largest = max(weights[place] for place in free)
        # Relative to the largest, so that the smallest positive weights neither overflow nor vanish from the sum.
        relative = {place: weights[place] / largest for place in free}
        scale = rest / math.fsum(relative.values())
        wanted: dict[int, float] = {place: weight * scale for place, weight in relative.items()}
        below = {place: low - share for place, share in wanted.items() if share < low}
        above = {place: share - high for place, share in wanted.items() if share > high}
        is_low = math.fsum(below.values()) >= math.fsum(above.values())
        pinned: set[int] = set(below) if is_low else set(above)
        bound = low if is_low else high
        for place, share in wanted.items():
            found[place] = float(bound) if place in pinned else share
        if not pinned:
            break
        rest -= bound * len(pinned)
        free = [place for place in free if place not in pinned]
    return found


def apportion(weights: Sequence[float], total: int, low: int, high: int) -> list[int]:
    """`shares` as integers by largest remainder; equal remainders: the earlier prompt first."""
    wanted = min(max(total, low * len(weights)), high * len(weights))
    amounts = shares(weights, wanted, low, high)
    budgets = [math.floor(amount) for amount in amounts]
    # Rounded: the remainders of equal shares may differ by the noise of a sum.
    by_remainder = sorted(range(len(weights)), key=lambda place: round(budgets[place] - amounts[place], 9))
    with_room = [place for place in by_remainder if budgets[place] < high]
    for place in with_room[: wanted - sum(budgets)]:
        budgets[place] += 1
    return budgets


def spend(gains: Sequence[Sequence[float]], total: int) -> list[int]:
    """Samples for each prompt that together gain most: exact, as a full dynamic program is, in O(total·log prompts).

    With gains that never rise, taking the largest next gain each time is optimal. The first step may be weak (below the
    second): one sample of a group has no value, for example. Then the first two steps are levelled to their mean, which
    makes the gains never rise and changes no total but that of a prompt with exactly one sample. Levelled gains leave
    at most one such prompt, the one that the last sample went to. Prompts ahead of it keep two or more in some optimum,
    those behind it none, since a sample moved to or from them would not lose: so the optimum is one of three
    neighbours, and those are compared. tests/unit/test_apportion.py checks it against a full dynamic program.

    Args:
        gains: gains[i][m] = what sample m + 1 of prompt i adds. Never rising from the second on, and none of those
            above the mean of the first two; if the first is weak, then for every prompt, and prompts have the same
            order by first, second, third and mean gain.
        total: Samples to spend; more than there are steps are not spent.
    """
    counts = [0] * len(gains)
    heap = [(-_levelled(steps, 0), place) for place, steps in enumerate(gains) if steps]
    heapq.heapify(heap)
    for _ in range(total):
        if not heap:
            break
        place = heap[0][1]
        counts[place] += 1
        if counts[place] < len(gains[place]):
            heapq.heapreplace(heap, (-_levelled(gains[place], counts[place]), place))
        else:
            heapq.heappop(heap)
    for place, steps in enumerate(gains):
        if counts[place] == 1 and len(steps) > 1 and steps[0] < steps[1]:
            _settle(gains, counts, place)
            break
    return counts


def _levelled(steps: Sequence[float], step: int) -> float:
    is_weak = step < 2 <= len(steps) and steps[0] < steps[1]
    return (steps[0] + steps[1]) / 2 if is_weak else steps[step]


def _settle(gains: Sequence[Sequence[float]], counts: list[int], odd: int) -> None:
    """Leave `odd` at one sample, give it a second one of another prompt, or give its only one away: the best of these.

    Prompts with two samples give none away: they would be the next with one.
    """
    moves = [(0.0, odd, odd)]
    givers = [place for place, count in enumerate(counts) if count > 2]
    if givers:
        giver = min(givers, key=lambda place: (gains[place][counts[place] - 1], -place))
        moves.append((gains[odd][1] - gains[giver][counts[giver] - 1], giver, odd))
    takers = [place for place, count in enumerate(counts) if 2 <= count < len(gains[place])]
    if takers:
        taker = max(takers, key=lambda place: (gains[place][counts[place]], -place))
        moves.append((gains[taker][counts[taker]] - gains[odd][0], odd, taker))
    _, source, target = max(moves, key=lambda move: move[0])
    counts[source] -= 1
    counts[target] += 1
