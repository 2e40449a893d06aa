"""Weights for what the sampler computes differently from the learner: TIS and IcePop.

k_t = π_t/μ_t, without a gradient; π the learner (for `decoupled`: the proximal policy), μ what the sampler reported.
- `tis`, truncated importance sampling: min(k, C), by token or by the product over the response (F. Yao et al., "Your
  efficient RL framework secretly brings you off-policy RL training", 2025).
- `icepop`: k where low <= k <= high, else 0 (Ring-1T, arXiv 2510.18855; its bounds 0.5 and 5).

Which objective may take them. A correction is right once: where the objective's own ratio is against μ (`ppo`,
`cispo`, `gspo`) k is in it, and a second factor would square it, so configs/loss.py refuses the pair. `reinforce` and
`likelihood` have no ratio: there k corrects for mismatch and age at once. `decoupled` is defined with k and needs it
bounded, one way or the other.
Deviation: the sources take π at the version that sampled, which only a second pass with old weights could give; ours is
the learner's at the gradient.

Shapes: R response tokens.
"""

import torch
from torch import Tensor

from configs.loss import Loss
from learner.objectives.tokens import TokenBatch


def mismatch_weights(tokens: TokenBatch, target_R: Tensor, config: Loss) -> Tensor | None:
    """Bounded k of each token, float [R], or None where nothing is weighted.

    Args:
        tokens: The sampler's logprobs and the responses' bounds.
        target_R: Logprobs of the policy above μ, float [R], without a gradient.
        config: Rule and bounds.
    """
    rule, bounds = config.mismatch_rule, config.mismatch
    if rule == "none":
        return None
    difference_R = target_R - tokens.behaviour_logprobs_R
    if bounds.level == "sequence":
        difference_R = tokens.sequence_sums(difference_R)
    weight_R = difference_R.exp()
    if rule == "tis":
        return weight_R.clamp(max=bounds.cap)
    outside_R = (weight_R < bounds.low) | (weight_R > bounds.high)
    return torch.where(outside_R, torch.zeros_like(weight_R), weight_R)
