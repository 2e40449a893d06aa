"""Uniform and Beta draws from the core's own generator, exact in law.

Beta(a, b) = X / (X + Y) of Gamma variables X, Y of shapes a and b, which are drawn by the method of Marsaglia and Tsang
(ACM TOMS 26(3), 2000): d = a - 1/3, v = (1 + x / √(9d))³ with x standard normal (Box-Muller), accepted when
ln u < x²/2 + d - dv + d ln v; a shape a < 1 is that of a + 1 times u^(1/a). With a or b = 1 the distribution function
is inverted instead, which is ten times cheaper and serves every prompt that was never visited, always right or always
wrong under a prior of 1.
"""

import math

from engine.core.rng import SplitMix


def uniform(rng: SplitMix) -> float:
    """A number in (0, 1), both ends excluded."""
    # 52 bits and a half: more bits would round to 1.0.
    return ((rng.next() >> 12) + 0.5) * 2.0**-52


def beta(rng: SplitMix, right: float, wrong: float) -> float:
    """A draw of Beta(right, wrong), both at least 0.1 (below that a Gamma variable may underflow)."""
    if right == 1.0:
        return 1.0 - uniform(rng) ** (1.0 / wrong)
    if wrong == 1.0:
        return uniform(rng) ** (1.0 / right)
    share = _gamma(rng, right)
    return share / (share + _gamma(rng, wrong))


def _gamma(rng: SplitMix, shape: float) -> float:
    if shape < 1.0:
        return _gamma(rng, shape + 1.0) * uniform(rng) ** (1.0 / shape)
    scale = shape - 1.0 / 3.0
    step = 1.0 / math.sqrt(9.0 * scale)
    while True:
        normal = _normal(rng)
        cube = (1.0 + step * normal) ** 3
        if cube > 0.0 and math.log(uniform(rng)) < normal * normal / 2.0 + scale * (1.0 - cube + math.log(cube)):
            return scale * cube


def _normal(rng: SplitMix) -> float:
    radius = math.sqrt(-2.0 * math.log(uniform(rng)))
    return radius * math.cos(math.tau * uniform(rng))
