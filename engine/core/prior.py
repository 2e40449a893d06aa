"""What is believed of a prompt's pass rate p before its first visit: a mixture of atoms and of uniform pieces.

Invariants: the weights sum to 1; every node is in [0, 1]; a prior never changes, a posterior is computed from counts.
A uniform piece stands as 64 Gauss-Legendre nodes, an atom as itself. The rule with n nodes is exact for polynomials up
to degree 2n - 1, so every expectation of p^x·q^y is exact (to rounding) while x + y <= 127; beyond that, and for counts
that are no integers, tests/unit/test_prior.py bounds the error.
Called by the solver of the optimal futility table and by whoever draws pass rates from the same law.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

NUM_NODES = 64
"""Of one uniform piece."""
MAX_ATOMS = 512
"""Distinct rates that are kept as they are; more are merged into cells 1/512 wide, each standing at its mean."""
TINY = 1e-300
"""Stands for a rate of 0 inside logarithms: counts that an atom at 0 or 1 excludes still have a posterior."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A share of the prompts with p uniform in [low, high]; an atom where the two are equal."""

    share: float
    """Relative to the other pieces."""
    low: float
    high: float


TIERS = (Piece(0.197, 0.0, 0.1), Piece(0.617, 0.1, 0.3), Piece(0.174, 0.3, 0.5), Piece(0.013, 0.5, 1.0))
"""Difficulty tiers of the published prompt sets; the shares are relative, they sum to 1.001."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A law of p, made by `mixture`, `tiers` or `of_rates`."""

    pieces: tuple[Piece, ...]
    nodes: tuple[float, ...]
    """Quadrature nodes in [0, 1]."""
    weights: tuple[float, ...]
    """Of the nodes; they sum to 1."""
    ends: tuple[float, ...]
    """Running sum of the pieces' shares."""

    def posterior(self, right: float, wrong: float) -> list[float]:
        """Weights of the nodes after these counts (Bayes: w·p^right·q^wrong, normalised)."""
        logs = [
            math.log(weight) + right * math.log(max(node, TINY)) + wrong * math.log(max(1.0 - node, TINY))
            for node, weight in zip(self.nodes, self.weights, strict=True)
        ]
        largest = max(logs)
        masses = [math.exp(value - largest) for value in logs]
        total = math.fsum(masses)
        return [mass / total for mass in masses]

    def next_right(self, right: float = 0.0, wrong: float = 0.0) -> float:
        """Probability that the next sample is right after these counts; the mean of p without any."""
        return math.fsum(w * p for w, p in zip(self.posterior(right, wrong), self.nodes, strict=True))

    def draw(self, place: float, within: float) -> float:
        """The pass rate that two uniform numbers in [0, 1) stand for: the first picks the piece."""
        piece = self.pieces[min(bisect_right(self.ends, place * self.ends[-1]), len(self.pieces) - 1)]
        return piece.low + within * (piece.high - piece.low)


def mixture(pieces: Sequence[Piece]) -> Prior:
    """The prior with these pieces.

    Raises:
        ValueError: no piece, a share that is not above 0, or bounds that are not 0 <= low <= high <= 1.
    """
    if not pieces:
        raise ValueError("a prior needs at least one piece, got none")
    nodes: list[float] = []
    weights: list[float] = []
    total = math.fsum(_checked(piece).share for piece in pieces)
    for piece in pieces:
        share, span = piece.share / total, piece.high - piece.low
        if span == 0.0:
            nodes.append(piece.low)
            weights.append(share)
            continue
        for place, weight in gauss_legendre(NUM_NODES):
            nodes.append(piece.low + span * (1.0 + place) / 2.0)
            weights.append(share * weight / 2.0)
    return Prior(tuple(pieces), tuple(nodes), tuple(weights), tuple(accumulate(piece.share for piece in pieces)))


def tiers() -> Prior:
    """The published difficulty tiers, p uniform within each."""
    return mixture(TIERS)


def of_rates(rates: Iterable[float]) -> Prior:
    """Prompts with these pass rates, all equally frequent: one number, a list, or a measured profile.

    Raises:
        ValueError: no rate, or one outside [0, 1].
    """
    given = [_rate(rate) for rate in rates]
    merges = len(set(given)) > MAX_ATOMS
    cells: dict[float, list[float]] = {}
    for rate in sorted(given):
        cells.setdefault(math.floor(rate * MAX_ATOMS) if merges else rate, []).append(rate)
    means = ((len(cell), min(1.0, math.fsum(cell) / len(cell))) for cell in cells.values())
    return mixture([Piece(share, mean, mean) for share, mean in means])


def _checked(piece: Piece) -> Piece:
    if not 0.0 < piece.share < math.inf:
        raise ValueError(f"a piece's share must be > 0 and finite, got {piece.share:g}")
    if _rate(piece.low) > _rate(piece.high):
        raise ValueError(f"a piece must have low <= high, got {piece.low:g} > {piece.high:g}")
    return piece


def _rate(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"a pass rate must be in [0, 1], got {value:g}")
    return value


@cache
def gauss_legendre(num_nodes: int) -> tuple[tuple[float, float], ...]:
    """Nodes in (-1, 1), each with its weight; the weights sum to 2.

    Roots of the Legendre polynomial P_n by Newton's method from cos(π(4i + 3)/(4n + 2)), i = 0, 1, ..; weights
    2/((1 - x²)·P_n'(x)²) (Abramowitz and Stegun, 22.16.6 and 25.4.29).
    """
    rule: list[tuple[float, float]] = []
    for i in range(num_nodes):
        place, slope = math.cos(math.pi * (4 * i + 3) / (4 * num_nodes + 2)), 1.0
        for _ in range(8):  # Quadratic convergence from a start that is right to 1/n²: 5 reach the last bit.
            before, value = 1.0, place
            for degree in range(2, num_nodes + 1):
                before, value = value, ((2 * degree - 1) * place * value - (degree - 1) * before) / degree
            slope = num_nodes * (place * value - before) / (place * place - 1.0)
            place -= value / slope
        rule.append((place, 2.0 / ((1.0 - place * place) * slope * slope)))
    return tuple(rule)
