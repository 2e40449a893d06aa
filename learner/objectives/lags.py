"""Statistics of the ratio π/μ by how old the token is: sums and a histogram that add up over micro-batches and ranks.

A token of staleness 0 was sampled from the very weights from which the update starts. At the update's first gradient,
whatever its ratio differs from 1 is therefore what sampler and learner compute differently (`lag_mismatch`), and what
the older buckets show above that is due to age. At the gradients of further mini-batches the update's own steps are in
every bucket.

Invariants: bins and buckets are fixed, so any two results add; quantiles are interpolated inside a bin, whose bounds
differ by a factor of 1.14 in |log ρ| (and by 2e-4 nats around 0).

Shapes: R response tokens, K = 8 sums, L = 5 lags, B bins.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.objectives.tokens import MAX_LOG_RATIO
from metrics.catalogue import LAGS

Float64s = NDArray[np.float64]

LAG_STARTS = (0, 1, 2, 3, 5)
"""First staleness of each bucket of `LAGS`."""
LAG_SUMS = ("tokens", "clipped", "kl_k1", "kl_k3", "distance", "outside", "ratio", "squared_ratio")
"""Summed over a bucket's tokens: 1; cut ratios; -log ρ; ρ - 1 - log ρ; |log ρ|; ρ outside BAND; ρ; ρ²."""
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
BAND = (0.9, 1.1)
"""Ratios further from 1 count as `outside`."""
_SIDE = np.geomspace(1e-4, MAX_LOG_RATIO, 97)
_EDGES = np.concatenate([-_SIDE[::-1], _SIDE])
NUM_BINS = _EDGES.size - 1
NUM_VALUES = len(LAGS) * (len(LAG_SUMS) + NUM_BINS)


def lag_values(log_ratio_R: Tensor, clipped_R: Tensor, staleness_R: Tensor) -> Tensor:
    """Sums and histogram of each bucket.

    Args:
        log_ratio_R: log π/μ within ±MAX_LOG_RATIO, nats.
        clipped_R: bool, ratios that a clip cut.
        staleness_R: int64, versions.

    Returns:
        float64 [NUM_VALUES]: the sums [L, K], then the histograms [L, B], on the device of the arguments.
    """
    device = log_ratio_R.device
    log_ratio_R = log_ratio_R.detach().double()
    ratio_R = log_ratio_R.exp()
    rows_KR = torch.stack(
        [
            torch.ones_like(ratio_R),
            clipped_R.double(),
            -log_ratio_R,
            torch.expm1(log_ratio_R) - log_ratio_R,
            log_ratio_R.abs(),
            ((ratio_R < BAND[0]) | (ratio_R > BAND[1])).double(),
            ratio_R,
            ratio_R.square(),
        ]
    )
    lag_R = torch.bucketize(staleness_R, torch.tensor(LAG_STARTS[1:], device=device), right=True)
    sums_KL = torch.zeros(len(LAG_SUMS), len(LAGS), dtype=torch.float64, device=device).index_add_(1, lag_R, rows_KR)
    bin_R = torch.bucketize(log_ratio_R, torch.from_numpy(_EDGES[1:-1]).to(device))
    counts = torch.bincount(lag_R * NUM_BINS + bin_R, minlength=len(LAGS) * NUM_BINS)
    return torch.cat([sums_KL.T.reshape(-1), counts.double()])


def lag_sums(values: Float64s) -> dict[str, Float64s]:
    """The sums of `lag_values`, each [L], by their names."""
    sums_LK = values[: len(LAGS) * len(LAG_SUMS)].reshape(len(LAGS), len(LAG_SUMS))
    return {name: sums_LK[:, column] for column, name in enumerate(LAG_SUMS)}


def lag_metrics(values: Float64s) -> dict[str, float]:
    """Metrics of `lag_values` for the wire; of an empty bucket only its number of tokens."""
    return dict(_lag_metrics(values))


def lag_mismatch(values: Float64s) -> dict[str, float]:
    """Mean |log ρ| and share outside BAND of the tokens of staleness 0; empty without any.

    It is the engine/learner mismatch only before the update has taken a step: later it holds those steps too.
    """
    sums = lag_sums(values)
    fresh = sums["tokens"][0]
    if not fresh:
        return {}
    return {
        "mismatch_nats": float(sums["distance"][0] / fresh),
        "mismatch_share": float(sums["outside"][0] / fresh),
    }


def _lag_metrics(values: Float64s) -> Iterator[tuple[str, float]]:
    sums = lag_sums(values)
    counts_LB = values[len(LAGS) * len(LAG_SUMS) :].reshape(len(LAGS), NUM_BINS)
    for row, lag in enumerate(LAGS):
        tokens = sums["tokens"][row]
        yield f"lag/{lag}/tokens", float(tokens)
        if not tokens:
            continue
        for name, level in QUANTILES.items():
            yield f"lag/{lag}/{name}", _ratio_quantile(counts_LB[row], level)
        yield f"lag/{lag}/clip_share", float(sums["clipped"][row] / tokens)
        # Kish's effective sample size of the weights ρ, as a share of the tokens: 1 when all are equal.
        yield f"lag/{lag}/ess_share", float(sums["ratio"][row] ** 2 / (tokens * sums["squared_ratio"][row]))
        yield f"lag/{lag}/kl_k1", float(sums["kl_k1"][row] / tokens)
        yield f"lag/{lag}/kl_k3", float(sums["kl_k3"][row] / tokens)


def _ratio_quantile(counts_B: Float64s, level: float) -> float:
    """Quantile of ρ, spread evenly in log ρ inside its bin."""
    reached_B = counts_B.cumsum()
    wanted = level * reached_B[-1]
    place = int(np.searchsorted(reached_B, wanted))
    into = (wanted - (reached_B[place] - counts_B[place])) / counts_B[place]
    return float(np.exp(_EDGES[place] + into * (_EDGES[place + 1] - _EDGES[place])))
