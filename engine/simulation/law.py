"""The laws that a simulated run draws from: pass rate of a prompt, then label, length and failure of each launch.

Invariants: a draw is a pure function of (seed, turn, launch index), whatever the order, width or strategy, and a prompt
has the same pass rate at each of its turns; a failed launch that is asked for again has the same label and length, but
may pass. Labels are Bernoulli(p), lengths lognormal with a mean by label, so that content given its label never depends
on anything else. A greedy response is right where p > 1/2, as a policy whose likeliest answer has probability p would
be; its length has the law of its label.

Draws are made for `CHUNK` turns and `BLOCK` launches at once (numpy's Philox, keyed by seed, stream, chunk and
block): one draw alone would cost more than the rest of the simulated sample.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from configs.simulation import Simulation
from engine.core.arm import Arm, Prompt
from engine.core.decisions import Launch
from engine.core.prior import Prior
from engine.core.prompts import visit_order
from engine.core.rng import derive

CHUNK: Final = 256
"""Turns drawn together."""
BLOCK: Final = 32
"""Launches of each drawn together."""
_RATE_STREAM, _SAMPLE_STREAM, _FAIL_STREAM = 1, 2, 3
_ULP: Final = 2.0**-32


@dataclass(slots=True)
class Visit:
    """One turn of a prompt, carried in its `Prompt.token_ids`."""

    number: int
    """Of the turn: 0, 1, 2, ... in the order of the queue."""
    pass_rate: float
    chunk: "Chunk"
    tokens: list[int]
    """Response tokens by launch index, negative for wrong responses; grows by blocks."""

    def draw(self, index: int) -> tuple[bool, int]:
        """Label and response tokens of a launch."""
        while index >= len(self.tokens):
            self.tokens += self.chunk.row(self.number % CHUNK, len(self.tokens) // BLOCK)
        tokens = self.tokens[index]
        return (True, tokens) if tokens > 0 else (False, -tokens)


@dataclass(slots=True)
class Chunk:
    """Pass rates and launches of `CHUNK` turns in a row."""

    number: int
    config: Simulation
    pass_rates: list[float]
    _blocks: dict[int, NDArray[np.int64]] = field(default_factory=dict[int, NDArray[np.int64]])

    def row(self, row: int, block: int) -> list[int]:
        """Signed tokens of one turn's launches in a block."""
        drawn = self._blocks.get(block)
        if drawn is None:
            drawn = self._blocks[block] = self._draw(block)
        return drawn[row].tolist()

    def _draw(self, block: int) -> NDArray[np.int64]:
        config = self.config
        rng = _generator(config.seed, _SAMPLE_STREAM, self.number, block)
        shape = (CHUNK, BLOCK)
        is_right = rng.random(shape) < np.array(self.pass_rates)[:, None]
        # The mean of exp(sigma * normal) is exp(sigma^2 / 2).
        spread = np.exp(config.tokens_sigma * rng.standard_normal(shape) - config.tokens_sigma**2 / 2.0)
        mean = np.where(is_right, config.tokens_mean, config.tokens_mean * config.length_ratio_wrong)
        # Rounded without bias, at least one token.
        tokens = np.maximum(1.0, np.floor(mean * spread + rng.random(shape))).astype(np.int64)
        return np.where(is_right, tokens, -tokens)


@dataclass(slots=True)
class Laws:
    """All draws of a run."""

    config: Simulation
    prior: Prior
    """Law of the pass rate over prompts."""

    def prompts(self) -> Iterator[Prompt]:
        """The queue: `sim.epochs` turns of each of the `sim.prompts` prompts, then new prompts without end.

        The first epoch has them by number, each later one in a seeded order of its own.
        """
        turns = self._turns()
        for number in count():
            among = list(islice(turns, CHUNK))
            chunk = Chunk(number, self.config, [pass_rate for _, pass_rate in among])
            for place, (prompt, pass_rate) in enumerate(among):
                visit = Visit(number * CHUNK + place, pass_rate, chunk, chunk.row(place, 0))
                yield Prompt(f"p{prompt}", "", "", visit, 0)

    def _turns(self) -> Iterator[tuple[int, float]]:
        """Number and pass rate of the prompt at each turn."""
        num_prompts, epochs = self.config.prompts, self.config.epochs
        rates = enumerate(self._pass_rates())
        if epochs > 1:
            known = array("d", (rate for _, rate in islice(rates, num_prompts)))
            yield from enumerate(known)
            for _, prompt in islice(visit_order(num_prompts, self.config.seed, epochs), num_prompts, None):
                yield prompt, known[prompt]
        yield from rates

    def draw(self, launch: Launch) -> tuple[bool, int]:
        """Label and response tokens of a launch."""
        visit, index = visit_of(launch.arm), launch.index
        if not index and launch.is_greedy:
            return self._greedy(visit)
        if index >= len(visit.tokens):
            return visit.draw(index)
        tokens = visit.tokens[index]
        return (True, tokens) if tokens > 0 else (False, -tokens)

    def _greedy(self, visit: Visit) -> tuple[bool, int]:
        """Launch 0 under the greedy response's label: where that differs, the length is scaled to the other mean."""
        is_right = visit.pass_rate > 0.5
        was_right, tokens = visit.draw(0)
        scale = self._scale(is_right=is_right) / self._scale(is_right=was_right)
        return is_right, max(1, round(scale * tokens))

    def fails_after(self, launch: Launch) -> float | None:
        """Share of the response after which this try fails; None = it does not."""
        number = visit_of(launch.arm).number
        bits = derive(self.config.seed, _FAIL_STREAM, number, launch.index, launch.retry)
        if (bits >> 31) * _ULP >= self.config.failure_rate:
            return None
        return (bits & 0x7FFFFFFF) * 2.0**-31

    def mean_tokens(self, *, is_right: bool) -> float:
        """Mean length of right or wrong responses as they are drawn: E[max(1, floor(mS + U))].

        S is lognormal with mean 1. E[floor(mS + U)] = m, and the maximum adds a token where that is 0, with probability
        E[max(0, 1 - mS)]: the put of Black and Scholes (1973), Φ(σ - d) - m·Φ(-d) with d = (ln m + σ²/2)/σ.
        """
        mean, sigma = self._scale(is_right=is_right), self.config.tokens_sigma
        if not sigma:
            return max(1.0, mean)
        place = (math.log(mean) + sigma * sigma / 2.0) / sigma
        return mean + _below(sigma - place) - mean * _below(-place)

    def _scale(self, *, is_right: bool) -> float:
        """m: the mean before lengths are whole numbers of at least one."""
        return self.config.tokens_mean * (1.0 if is_right else self.config.length_ratio_wrong)

    def _pass_rates(self) -> Iterator[float]:
        """Of prompt 0, 1, 2, ..."""
        for number in count():
            rng = _generator(self.config.seed, _RATE_STREAM, number, 0)
            for place, within in rng.random((CHUNK, 2)).tolist():
                yield self.prior.draw(place, within)


def visit_of(arm: Arm) -> Visit:
    """The simulated visit behind an arm."""
    visit = arm.prompt.token_ids
    if not isinstance(visit, Visit):
        raise TypeError(f"a simulated prompt must carry a Visit, got {type(visit).__name__}")
    return visit


def _below(place: float) -> float:
    """P(Z < place), Z standard normal; exact far below 0 too."""
    return math.erfc(-place / math.sqrt(2.0)) / 2.0


def _generator(seed: int, stream: int, chunk: int, block: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derive(seed, stream, chunk, block)))
