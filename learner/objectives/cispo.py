"""CISPO: the ratio is a bounded weight without a gradient, so every token keeps its gradient.

J = sg(clip(ρ, 1 - ε_low, 1 + ε_high)) · A · log π; ρ = π/μ, sg = no gradient.
Source: MiniMax-M1, arXiv 2506.13585, section 3.1 (there ε_low is so large that nothing is bounded
below, our default). Deviation: log ρ is cut at ±20 nats.

Shapes: R response tokens.
"""

from torch import Tensor

from learner.objectives.surrogate import Clip, Surrogate


def cispo(log_ratio_R: Tensor, logprobs_R: Tensor, advantages_R: Tensor, clip: Clip) -> Surrogate:
    """Weighted log-likelihood.

    Args:
        log_ratio_R: log ρ within ±20, float [R].
        logprobs_R: log π, float [R], with a gradient.
        advantages_R: float [R].
        clip: Bounds; the dual clip is not used.
    """
    ratio_R = log_ratio_R.detach().exp()
    weight_R = ratio_R.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(weight_R * advantages_R * logprobs_R, weight_R != ratio_R)
