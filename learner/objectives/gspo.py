"""GSPO: one length-normalised ratio a response, clipped as a whole.

s_i = exp(1/|a_i| Σ_t log π_t/μ_t) for all tokens of response i; J = min(s_i A, clip(s_i, 1 - ε_low, 1 + ε_high) A).
Source: arXiv 2507.18071, equations 5 to 7, which average J over responses: that is aggregation `sequence_mean`; under
`token_mean` a response weighs as much as it is long. s counts each token once, whatever its weight. Deviations: log s
is cut at ±20 nats, and the dual clip bounds negative advantages as it does for ppo.

Shapes: R response tokens.
"""

from torch import Tensor

from learner.objectives.ppo import ppo
from learner.objectives.surrogate import Clip, Surrogate
from learner.objectives.tokens import TokenBatch, bounded


def gspo(tokens: TokenBatch, difference_R: Tensor, clip: Clip) -> Surrogate:
    """The clipped objective of whole responses, repeated at each of their tokens.

    Args:
        tokens: Advantages and the responses' bounds.
        difference_R: log π - log μ, not cut, float [R], with a gradient.
        clip: Bounds of s.
    """
    means_R = tokens.sequence_sums(difference_R) / tokens.token_lengths()
    return ppo(bounded(means_R), tokens.advantages_R, clip)
