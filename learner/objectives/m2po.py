"""M2PO: leave out the tokens that push farthest, until the second moment of the log ratio is within a budget.

Only tokens whose update moves the policy further away can be left out: A > 0 with ρ > 1, or A < 0 with ρ < 1. Of those,
largest (log ρ)² first, as few as needed for the rest's mean (log ρ)² to be at most τ.
Source: arXiv 2510.01161 (τ = 0.04). Deviations: the authors' code turns the same threshold into a clip of
at least 0.3/0.5, ours is the paper's mask; equal values are left out together. Each token counts once, whatever its
weight. Like theirs the mean is over a micro-batch, so this option, and no other, depends on how a step is split.

Shapes: R response tokens.
"""

import torch
from torch import Tensor


def m2po_mask(log_ratio_R: Tensor, advantages_R: Tensor, budget: float) -> Tensor:
    """Tokens that are left out, bool [R].

    Args:
        log_ratio_R: log ρ, float [R].
        advantages_R: float [R].
        budget: τ, nats squared, above 0.
    """
    if not log_ratio_R.numel():
        return torch.zeros_like(log_ratio_R, dtype=torch.bool)
    log_ratio_R = log_ratio_R.detach()
    harmful_R = log_ratio_R * advantages_R.sign() > 0
    squares_R = torch.where(harmful_R, log_ratio_R.double().square(), 0.0)
    ascending_R = squares_R.sort().values
    # Tokens that cannot be left out sort first as zeros and count for nothing.
    count_R = (torch.arange(1, ascending_R.numel() + 1, device=ascending_R.device) - (~harmful_R).sum()).clamp(min=0)
    fits_R = ascending_R.cumsum(0) <= budget * count_R
    # Means of ascending values only rise, so what fits is a beginning.
    smallest_out = torch.where(fits_R, torch.inf, ascending_R).min()
    return harmful_R & (squares_R >= smallest_out)
