"""Objectives without a ratio: REINFORCE, and RAFT's likelihood of positives.

`reinforce`: J = A · log π, whose gradient is A ∇log π (Williams 1992; for language models arXiv 2402.14740).
`likelihood`: J = [A > 0] · log π: RAFT, arXiv 2304.06767, algorithm 1, fine-tunes on the samples it accepts. With
strategy `raft` only right samples come, so the mean is theirs; other samples keep their place in the mean, as tokens
that a mask leaves out do.
Both are off-policy by the samples' age unless `loss.mismatch` weights them.

Shapes: R response tokens.
"""

import torch
from torch import Tensor

from learner.objectives.surrogate import Surrogate


def reinforce(logprobs_R: Tensor, advantages_R: Tensor) -> Surrogate:
    """A · log π at each token; logprobs float [R] with a gradient, advantages float [R]."""
    return Surrogate(advantages_R * logprobs_R, torch.zeros_like(advantages_R, dtype=torch.bool))


def likelihood(logprobs_R: Tensor, advantages_R: Tensor) -> Surrogate:
    """Logprob where A > 0, else 0; an advantage that is not a number stays one."""
    accepted_R = torch.where(advantages_R > 0, torch.ones_like(advantages_R), advantages_R * 0.0)
    return reinforce(logprobs_R, accepted_R)
