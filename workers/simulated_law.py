"""The laws that a simulated worker draws from: pass rate of a prompt, then label, length and failure of a request.

Invariants: pure; a draw depends only on the law's seed, the prompt's token ids, the request's seed and (failures only)
its retry number, so the same launch has the same result whatever the order, worker or concurrency; a failed request
that is asked for again has the same label and length, but may pass.

Texts are their own tokens, one a UTF-8 byte, so a prompt can be read back from its ids: a prompt `Reply with X.` has
the right answer X, any other prompt has `right`; a wrong response is always `wrong`.
"""

import hashlib
import math
import re
import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from configs.processes import Simulated
from engine.wire import Int32s, SamplingParams

TIERS: Final = ((0.197, 0.0, 0.1), (0.617, 0.1, 0.3), (0.174, 0.3, 0.5), (0.013, 0.5, 1.0))
"""(share, lowest, highest pass rate) of the four published difficulty tiers; shares are relative, they sum to 1.001."""
RIGHT: Final = "right"
WRONG: Final = "wrong"
_ULP: Final = 2.0**-53
_REQUEST = re.compile(r"Reply with (\S+)\.\s*\Z")


@dataclass(frozen=True, slots=True)
class Draw:
    """What one request will become."""

    is_right: bool
    num_tokens: int
    """Response length before the request's own cap."""
    fails_after: float | None
    """Share of the response after which the request fails; None = it does not."""


class SimulatedLaw:
    """Pass rates, lengths and failures under one seed."""

    def __init__(self, config: Simulated, seed: int) -> None:
        self._config = config
        self._seed = seed

    def pass_rate(self, prompt_token_ids: Int32s) -> float:
        """Pass rate of this prompt: one of `simulated.pass_rate`, or uniform within a tier drawn by its share."""
        place, within, *_ = self._uniforms("prompt", prompt_token_ids)
        rates = self._config.pass_rate
        if rates:
            return rates[int(place * len(rates))]
        ends = list(accumulate(share for share, _, _ in TIERS))
        _, lowest, highest = TIERS[bisect_right(ends, place * ends[-1])]
        return lowest + within * (highest - lowest)

    def mean_tokens(self, is_right: bool) -> float:
        """Mean length of right or wrong responses, before the cap."""
        return self._config.tokens_mean * (1.0 if is_right else self._config.length_ratio_wrong)

    def draw(self, prompt_token_ids: Int32s, params: SamplingParams, retry: int = 0) -> Draw:
        """Label ~ Bernoulli(p), length ~ lognormal(sigma) with the label's mean, rounded without bias, at least 1.

        At temperature 0 the label is p > 1/2 and the length depends on the prompt alone.
        """
        is_greedy = params.temperature == 0.0
        seed = "greedy" if is_greedy else str(params.seed)
        label, radius, angle, rounding = self._uniforms(seed, prompt_token_ids)
        p = self.pass_rate(prompt_token_ids)
        is_right = p > 0.5 if is_greedy else label < p
        sigma = self._config.tokens_sigma
        normal = math.sqrt(-2.0 * math.log(1.0 - radius)) * math.cos(2.0 * math.pi * angle)  # Box-Muller
        # The mean of exp(mu + sigma * normal) is exp(mu + sigma^2 / 2).
        length = self.mean_tokens(is_right) * math.exp(sigma * normal - sigma * sigma / 2.0)
        fails_after = None
        if self._config.failure_rate > 0.0:
            luck, share, *_ = self._uniforms(f"{params.seed} retry {retry}", prompt_token_ids)
            fails_after = share if luck < self._config.failure_rate else None
        return Draw(is_right, max(1, math.floor(length + rounding)), fails_after)

    def _uniforms(self, what: str, token_ids: Int32s) -> tuple[float, float, float, float]:
        """Four independent draws from [0, 1) that belong to `what` and these tokens."""
        head = f"{self._seed} {what} ".encode()
        digest = hashlib.blake2b(head + token_ids.astype("<i4", copy=False).tobytes(), digest_size=32).digest()
        first, second, third, fourth = (word >> 11 for word in struct.unpack("<4Q", digest))  # 53 bits each
        return first * _ULP, second * _ULP, third * _ULP, fourth * _ULP


def encode_text(text: str) -> Int32s:
    """Token ids of `text`: its UTF-8 bytes."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def decode_text(token_ids: Int32s) -> str:
    """The text again; ids that are no bytes become replacement characters."""
    return bytes(int(i) if 0 <= i < 256 else 0xFF for i in token_ids).decode(errors="replace")


def response_text(prompt_token_ids: Int32s, is_right: bool) -> str:
    """Text of a whole response to this prompt."""
    if not is_right:
        return WRONG
    match = _REQUEST.search(decode_text(prompt_token_ids))
    return match[1] if match else RIGHT
