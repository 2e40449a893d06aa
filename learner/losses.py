"""The training loss: PPO-clip against the behaviour policy, dual clip, entropy bonus, global token-mean.

Invariants: everything here is a sum over tokens. The caller divides once, by the response tokens of the whole step, so
the gradient is the true token-mean whatever the micro-batches (a mean per micro-batch, as verl has it, is not).

L = -(1/Σ|a|) Σ_t [ J_t + w H_t ],  J = min(ρA, clip(ρ, 1-ε_low, 1+ε_high) A), and max(J, cA) where A < 0;
ρ = exp(clamp(log π - log μ, ±20)), μ the behaviour policy (arXiv 2510.04996 and its code; dual clip arXiv 1912.09729).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.training import Loss

MAX_LOG_RATIO = 20.0
"""Nats; e^20 is far outside every clip and far inside float32."""


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over response tokens, and what is not a sum: the largest ratio."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    kl_k1: float = 0.0
    """Σ log μ - log π: unbiased for KL(μ‖π), may be negative."""
    kl_k3: float = 0.0
    """Σ ρ - 1 - log ρ: the same expectation, never negative."""
    clipped: float = 0.0
    """Tokens without a policy gradient."""
    ratio_max: float = 0.0

    def __add__(self, other: "TokenSums") -> "TokenSums":
        """Sums of both."""
        return TokenSums(
            self.tokens + other.tokens,
            self.loss + other.loss,
            self.entropy + other.entropy,
            self.kl_k1 + other.kl_k1,
            self.kl_k3 + other.kl_k3,
            self.clipped + other.clipped,
            max(self.ratio_max, other.ratio_max),
        )

    def means(self) -> dict[str, float]:
        """Metrics a token, under their names on the wire."""
        tokens = max(1, self.tokens)
        return {
            "loss": self.loss / tokens,
            "entropy": self.entropy / tokens,
            "kl_behaviour": self.kl_k1 / tokens,
            "kl_behaviour_k3": self.kl_k3 / tokens,
            "clip_share": self.clipped / tokens,
            "ratio_max": self.ratio_max,
            "tokens_trained": float(self.tokens),
        }


def policy_loss(
    logprobs_R: Tensor, behaviour_logprobs_R: Tensor, advantages_R: Tensor, entropy_R: Tensor, config: Loss
) -> tuple[Tensor, TokenSums]:
    """Sum of the token losses, to differentiate, and the sums to report.

    Args:
        logprobs_R: Learner's logprobs of the response tokens, nats.
        behaviour_logprobs_R: Logprobs under the distribution that was sampled, nats.
        advantages_R: Advantage of each token's sample.
        entropy_R: Entropy of the learner's distribution there, nats.
        config: Clips and entropy weight.
    """
    log_ratio_R = (logprobs_R - behaviour_logprobs_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_R = log_ratio_R.exp()
    free_R = ratio_R * advantages_R
    bound_R = ratio_R.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_R
    objective_R = torch.minimum(free_R, bound_R)
    floor_R = config.dual_clip * advantages_R
    objective_R = torch.where(advantages_R < 0, torch.maximum(objective_R, floor_R), objective_R)
    loss = -(objective_R + config.entropy_weight * entropy_R).sum()
    with torch.no_grad():
        clipped_R = (bound_R < free_R) | ((advantages_R < 0) & (free_R < floor_R))
        sums = TokenSums(
            tokens=logprobs_R.numel(),
            loss=loss.item(),
            entropy=entropy_R.sum().item(),
            kl_k1=(-log_ratio_R).sum().item(),
            kl_k3=(ratio_R - 1.0 - log_ratio_R).sum().item(),
            clipped=clipped_R.sum().item(),
            ratio_max=ratio_R.max().item() if ratio_R.numel() else 0.0,
        )
    return loss, sums
