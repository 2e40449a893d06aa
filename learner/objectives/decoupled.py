"""Decoupled PPO: the clip is around a proximal policy, and a weight without a gradient corrects for the sampler.

J = k · PPO-clip of π/π_prox, k = bounded(π_prox/μ): AReaL, arXiv 2505.24298, section 5.2, with the bound of
k from `loss.mismatch` (theirs leaves tokens with a large k out). k holds the engine/learner mismatch, hence `tis` and
`icepop` say how it is bounded and are no second factor.

The proximal policy is one of
- `recompute`: given as a tensor, taken before the first of several mini-batches (`learner.update`); or the learner's
  own logprobs at this gradient: with one mini-batch the two are equal, so there is no extra pass, and π/π_prox = 1.
- `loglinear`: log π_prox = log μ + α (log π - log μ), α = (v_prox - v_μ)/(v_π - v_μ) with v_prox = v_π - 1, that is
  (d - 1)/d at staleness d >= 1 and 0 at d = 0: A-3PO, arXiv 2512.06547, and AReaL's documentation of it. So the clipped
  log ratio is 1/d of the whole one: the trust region is one version wide whatever the age.

Shapes: R response tokens.
"""

from typing import Literal

from torch import Tensor

from learner.objectives.tokens import TokenBatch


def proximal_logprobs(tokens: TokenBatch, rule: Literal["loglinear", "recompute"]) -> Tensor:
    """Logprobs of the proximal policy, nats, float [R], without a gradient."""
    logprobs_R = tokens.logprobs_R.detach()
    if rule == "recompute":
        return logprobs_R if tokens.proximal_R is None else tokens.proximal_R
    age_R = tokens.staleness_R.clamp(min=1).to(logprobs_R.dtype)
    part_R = (age_R - 1.0) / age_R
    return tokens.behaviour_logprobs_R + part_R * (logprobs_R - tokens.behaviour_logprobs_R)
