"""What an objective reads: the response tokens of one micro-batch as flat tensors, and sums over a response.

Masked tokens are not among them. Shapes: R response tokens, S responses. Logprobs are nats.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.packing import MicroBatch

MAX_LOG_RATIO = 20.0
"""Nats; e^20 is far outside every clip and far inside float32."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Response tokens of whole responses, one response after the other.

    Example: responses of 2 and 1 tokens have sequence_R [0, 0, 1] and lengths_S [2, 1].
    """

    logprobs_R: Tensor
    """float: learner's logprobs; with a gradient."""
    entropy_R: Tensor
    """float: entropy of the learner's distribution there, nats; with a gradient where the bonus is used."""
    behaviour_logprobs_R: Tensor
    """float: logprobs under the distribution that was sampled."""
    advantages_R: Tensor
    """float: of each token."""
    weights_R: Tensor
    """float, above 0: factor of each token's loss; 1 where nothing else was asked for."""
    staleness_R: Tensor
    """int64: learner's version at the gradient minus the token's, >= 0."""
    sequence_R: Tensor
    """int64: number of each token's response, 0 to S - 1."""
    lengths_S: Tensor
    """int64: tokens of each response, >= 1."""
    proximal_R: Tensor | None = None
    """float: logprobs of the proximal policy; None = the learner's own at this gradient."""
    reference_R: Tensor | None = None
    """float: logprobs of the reference model; None where the KL weight is 0."""

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.logprobs_R.numel()

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.lengths_S.numel()

    def sequence_sums(self, values_R: Tensor) -> Tensor:
        """For each token the sum of `values_R` over its response; gradients flow through it."""
        sums_S = values_R.new_zeros(self.num_sequences).index_add(0, self.sequence_R, values_R)
        return sums_S.index_select(0, self.sequence_R)

    def token_lengths(self) -> Tensor:
        """For each token the length of its response, in the dtype of the logprobs."""
        return self.lengths_S.to(self.logprobs_R.dtype).index_select(0, self.sequence_R)


def token_batch(
    batch: MicroBatch, logprobs_R: Tensor, entropy_R: Tensor, reference_R: Tensor | None = None
) -> TokenBatch:
    """The tokens of a packed micro-batch with what a forward pass found of them.

    Args:
        batch: Packed segments; its response tokens stand one response after the other.
        logprobs_R: Learner's logprobs, float [R].
        entropy_R: Entropies, float [R].
        reference_R: Logprobs of the reference model, float [R]; None without a KL penalty.
    """
    return TokenBatch(
        logprobs_R=logprobs_R,
        entropy_R=entropy_R,
        behaviour_logprobs_R=batch.behaviour_logprobs_R,
        advantages_R=batch.advantages_R,
        weights_R=batch.weights_R,
        staleness_R=batch.staleness_R,
        sequence_R=batch.sequence_R,
        lengths_S=batch.lengths_S,
        reference_R=reference_R,
    )


def bounded(log_ratio_R: Tensor) -> Tensor:
    """Log ratios within ±MAX_LOG_RATIO; beyond it they have no gradient."""
    return torch.clamp(log_ratio_R, -MAX_LOG_RATIO, MAX_LOG_RATIO)
