"""What tests of exact values share: numbers as printed in a table, and the rules of its rows."""

import pytest

from engine.core.strategy import Strategy
from engine.strategies.rounds import Rounds


def in_rounds(rule: Strategy, round_size: int) -> Rounds:
    """`rule`, tested every `round_size` samples only."""
    return Rounds(rule, round_size, rule.n_max // round_size)


def printed(text: str) -> object:
    """Equal to a table's number within half a unit of its last digit."""
    decimals = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5001 * 10.0**-decimals)


def cells(rates: tuple[float, ...], row: str) -> list[tuple[float, str]]:
    """Pass rates with the printed values of a row; a row may be shorter than the rates."""
    return list(zip(rates, row.split(), strict=False))
