"""What a step reports: sums over its response tokens that micro-batches and ranks add, and means made of them.

Invariants: `vector` holds everything that adds, `ratio_max` is the one thing that does not; all is read from the device
in one transfer.

Shapes: R response tokens.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from learner.objectives.lags import NUM_VALUES, Float64s, lag_metrics, lag_mismatch, lag_sums, lag_values
from learner.objectives.tokens import TokenBatch, bounded

_PLAIN = ("normaliser", "loss", "entropy", "masked", "kl_reference")


@dataclass(frozen=True, slots=True)
class Terms:
    """What `objective_loss` found, for the books."""

    loss: Tensor
    normaliser: Tensor
    """float64."""
    clipped_R: Tensor
    weights_R: Tensor | None
    """Mismatch weight and mask; None = 1."""
    kl_R: Tensor | None
    """Distance to the reference; None = not asked for."""


def _no_sums() -> Float64s:
    return np.zeros(len(_PLAIN) + NUM_VALUES)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSums:
    """Sums over response tokens, and what is not a sum: the largest ratio."""

    vector: Float64s = field(default_factory=_no_sums)
    """float64: the sums of `_PLAIN`, then those by staleness (learner/objectives/lags.py)."""
    ratio_max: float = 0.0
    """Largest π/μ of a token."""

    def __add__(self, other: "TokenSums") -> "TokenSums":
        """Sums of both."""
        return TokenSums(self.vector + other.vector, float(np.maximum(self.ratio_max, other.ratio_max)))

    def __eq__(self, other: object) -> bool:
        """Whether all sums are the same; not-a-number equals itself."""
        if not isinstance(other, TokenSums):
            return NotImplemented
        mine, theirs = (np.append(sums.vector, sums.ratio_max) for sums in (self, other))
        return np.array_equal(mine, theirs, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]  (arrays have none)

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self._by_lag("tokens"))

    @property
    def normaliser(self) -> float:
        """What the step's gradient is divided by."""
        return float(self.vector[_PLAIN.index("normaliser")])

    @property
    def clipped(self) -> float:
        """Tokens whose ratio a clip cut."""
        return self._by_lag("clipped")

    def means(self) -> dict[str, float]:
        """Metrics under their names on the wire (engine/wire/messages.py), without `mismatch`.

        The loss is over the normaliser, all else over tokens, each once whatever its weight.
        """
        tokens = max(1, self.tokens)
        plain = dict(zip(_PLAIN, self.vector.tolist(), strict=False))
        return {
            "loss": plain["loss"] / (plain["normaliser"] or 1.0),
            "entropy": plain["entropy"] / tokens,
            "kl_behaviour": self._by_lag("kl_k1") / tokens,
            "kl_behaviour_k3": self._by_lag("kl_k3") / tokens,
            "kl_reference": plain["kl_reference"] / tokens,
            "clip_share": self.clipped / tokens,
            "mask_share": plain["masked"] / tokens,
            "ratio_max": self.ratio_max,
            "tokens_trained": float(self.tokens),
        } | lag_metrics(self.vector[len(_PLAIN) :])

    def mismatch(self) -> dict[str, float]:
        """What sampler and learner compute differently, where these are sums of an update's first gradient.

        None without tokens of staleness 0. See `lag_mismatch` for why no later gradient will do.
        """
        return lag_mismatch(self.vector[len(_PLAIN) :])

    def _by_lag(self, name: str) -> float:
        return float(lag_sums(self.vector[len(_PLAIN) :])[name].sum())


@torch.no_grad()
def token_sums(tokens: TokenBatch, terms: Terms) -> TokenSums:
    """The sums of one micro-batch."""
    if not tokens.num_tokens:
        return TokenSums()
    log_ratio_R = bounded(tokens.logprobs_R - tokens.behaviour_logprobs_R)
    none = log_ratio_R.new_zeros((), dtype=torch.float64)
    plain = [
        terms.normaliser,
        terms.loss.double(),
        tokens.entropy_R.sum(dtype=torch.float64),
        none if terms.weights_R is None else (terms.weights_R == 0.0).sum().double(),
        none if terms.kl_R is None else terms.kl_R.sum(dtype=torch.float64),
        log_ratio_R.max().exp().double(),
    ]
    values = torch.cat([torch.stack(plain), lag_values(log_ratio_R, terms.clipped_R, tokens.staleness_R)]).cpu().numpy()
    largest = float(values[len(_PLAIN)])
    return TokenSums(np.delete(values, len(_PLAIN)), largest)
