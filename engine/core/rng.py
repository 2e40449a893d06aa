"""Seeds and a small generator: every random choice of the core is a pure function of named integers.

`derive` mixes integers into a 63-bit seed; `SplitMix` is the SplitMix64 generator (Steele, Lea, Flood, OOPSLA 2014,
figure 17) with unbiased bounded draws by rejection. The same seed gives the same choices on every machine.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive(*parts: int) -> int:
    """A seed in [0, 2**63) from integers; order matters."""
    state = 0
    for part in parts:
        state = _mix((state + _GAMMA + (part & _MASK)) & _MASK)
    return state >> 1


class SplitMix:
    """SplitMix64; not for secrets."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        """The next 64-bit value."""
        self._state = (self._state + _GAMMA) & _MASK
        return _mix(self._state)

    def below(self, bound: int) -> int:
        """A uniform integer in [0, bound), bound >= 1."""
        limit = (1 << 64) - (1 << 64) % bound
        while (value := self.next()) >= limit:
            pass
        return value % bound

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a uniformly random order (Fisher-Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result
