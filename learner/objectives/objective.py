"""The loss of a micro-batch: a policy objective, its masks and weights, the entropy bonus and the KL penalty.

L = -Σ_t u_t [ m_t k_t J_t + w_H H_t - w_KL KL_t ]; J the objective (one file each), k the mismatch weight, m M2PO's
mask, u the factor of a token (from its own weight, by the aggregation). It is a sum: the caller divides the step's
gradient once, by the step's normaliser, so the gradient is the true mean whatever the micro-batches; a mean per
micro-batch, as verl has it, isn't.

Invariants: a loss or a logprob that is not finite makes the gradient of every token not-a-number, so the step is
skipped and counted and never half taken; no tokens give a loss of 0.

Shapes: R response tokens.
"""

import torch
from torch import Tensor

from configs.loss import Loss
from learner.objectives.aggregation import normaliser, weighted_sum
from learner.objectives.cispo import cispo
from learner.objectives.decoupled import proximal_logprobs
from learner.objectives.gspo import gspo
from learner.objectives.likelihood import likelihood, reinforce
from learner.objectives.m2po import m2po_mask
from learner.objectives.mismatch import mismatch_weights
from learner.objectives.ppo import ppo
from learner.objectives.reference_kl import reference_kl
from learner.objectives.sums import Terms, TokenSums, token_sums
from learner.objectives.surrogate import Clip, Surrogate
from learner.objectives.tokens import TokenBatch, bounded


def objective_loss(tokens: TokenBatch, config: Loss) -> tuple[Tensor, TokenSums]:
    """Sum of the token losses, to differentiate, and the sums to report and to divide by.

    Args:
        tokens: Whole responses; may be none.
        config: What to compute.

    Returns:
        The loss, a scalar in the dtype of the logprobs, and its sums.

    Raises:
        ValueError: the KL penalty is on and `reference_R` is None.
    """
    target_R = tokens.logprobs_R.detach()
    if config.objective == "decoupled":
        target_R = proximal_logprobs(tokens, config.proximal)
    surrogate = _surrogate(tokens, target_R, config)
    weights_R = _weights(tokens, target_R, config)
    objective_R = surrogate.objective_R if weights_R is None else weights_R * surrogate.objective_R
    value_R = objective_R
    if config.entropy_weight:
        value_R = value_R + config.entropy_weight * tokens.entropy_R
    kl_R = _kl(tokens, config)
    if kl_R is not None:
        value_R = value_R - config.kl.weight * kl_R
    loss = -weighted_sum(value_R, tokens, config)
    # Adds exactly 0, or not-a-number to the gradient of every token: a clip alone would hide it from its own tokens.
    logprobs_sum = tokens.logprobs_R.sum()
    loss = loss + (loss + logprobs_sum).detach() * 0.0 * logprobs_sum
    terms = Terms(loss, normaliser(tokens, config), surrogate.clipped_R, weights_R, kl_R)
    return loss, token_sums(tokens, terms)


def _surrogate(tokens: TokenBatch, target_R: Tensor, config: Loss) -> Surrogate:
    clip = Clip(*config.clips, config.dual_clip)
    difference_R = tokens.logprobs_R - tokens.behaviour_logprobs_R
    match config.objective:
        case "ppo":
            return ppo(bounded(difference_R), tokens.advantages_R, clip)
        case "cispo":
            return cispo(bounded(difference_R), tokens.logprobs_R, tokens.advantages_R, clip)
        case "gspo":
            return gspo(tokens, difference_R, clip)
        case "decoupled":
            return ppo(bounded(tokens.logprobs_R - target_R), tokens.advantages_R, clip)
        case "reinforce":
            return reinforce(tokens.logprobs_R, tokens.advantages_R)
        case "likelihood":
            return likelihood(tokens.logprobs_R, tokens.advantages_R)


def _weights(tokens: TokenBatch, target_R: Tensor, config: Loss) -> Tensor | None:
    """Mismatch weight, 0 where M2PO leaves the token out; None = 1 everywhere."""
    weights_R = mismatch_weights(tokens, target_R, config)
    if not config.m2_budget:
        return weights_R
    log_ratio_R = tokens.logprobs_R.detach() - tokens.behaviour_logprobs_R
    out_R = m2po_mask(log_ratio_R, tokens.advantages_R, config.m2_budget)
    if weights_R is None:
        return (~out_R).to(log_ratio_R.dtype)
    return torch.where(out_R, torch.zeros_like(weights_R), weights_R)


def _kl(tokens: TokenBatch, config: Loss) -> Tensor | None:
    if not config.kl.weight:
        return None
    if tokens.reference_R is None:
        raise ValueError(f"reference_R must be given for loss.kl.weight = {config.kl.weight:g}, got None")
    return reference_kl(tokens.logprobs_R, tokens.reference_R, config.kl.estimator)
