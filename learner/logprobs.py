"""Logprobs and entropies of response tokens from hidden states, without the logits of the whole batch.

Invariants: at most `chunk_tokens` rows of logits exist at once, forward and backward; the backward pass computes them
again, unless one chunk holds all: that one is kept. All reductions over the vocabulary are float32, a few rows at a
time.

log p(t) = z_t - log Σ exp z,  H = log Σ exp z - Σ p z,  z = logits / temperature;
∂log p(t)/∂z_v = [v = t] - p_v,  ∂H/∂z_v = -p_v (log p_v + H).

Shapes: R response tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

CACHE_ROWS = 8
"""Rows of float32 logits handled together on a CPU, so that they stay in its cache: 8 x 49,152 x 4 bytes = 1.5 MB."""
CUDA_ROWS = 256
"""The same on CUDA: enough to fill a GPU many times over, a fraction of a chunk's memory."""


def rows_together(device: torch.device) -> int:
    """Rows of float32 logits that exist at once on `device`."""
    return CUDA_ROWS if device.type == "cuda" else CACHE_ROWS


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (torch has no public type for it)
        hidden_RD: Tensor,
        weight_VD: Tensor,
        targets_R: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_R = torch.empty(len(targets_R), dtype=torch.float32, device=hidden_RD.device)
        entropy_R = torch.empty_like(logprobs_R)
        log_sums_R = torch.empty_like(logprobs_R)
        logits_CV = hidden_RD.new_empty(0, len(weight_VD))
        together = rows_together(hidden_RD.device)
        for start in range(0, len(targets_R), chunk_tokens):
            logits_CV = hidden_RD[start : start + chunk_tokens] @ weight_VD.T
            for first in range(0, len(logits_CV), together):
                rows = slice(start + first, start + min(first + together, len(logits_CV)))
                logits = logits_CV[first : first + together].float()
                if temperature != 1.0:
                    logits = logits / temperature  # not in place: float32 logits may be kept
                top = logits.amax(-1, keepdim=True)
                chosen = logits.gather(1, targets_R[rows, None])[:, 0]
                exps = (logits - top).exp_()
                sums = exps.sum(-1)
                log_sums = sums.log() + top[:, 0]
                mean_logit = torch.linalg.vecdot(exps, logits) / sums
                log_sums_R[rows] = log_sums
                logprobs_R[rows] = chosen - log_sums
                entropy_R[rows] = log_sums - mean_logit
        ctx.save_for_backward(hidden_RD, weight_VD, targets_R, log_sums_R, entropy_R)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        # Not saved as a tensor of the graph: the backward pass turns it into its own gradient in place.
        ctx.kept_CV = logits_CV if len(targets_R) <= chunk_tokens else None
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # noqa: ANN401
        hidden_RD, weight_VD, targets_R, log_sums_R, entropy_R = ctx.saved_tensors
        grad_logprobs_R, grad_entropy_R = gradients
        grad_hidden_RD = torch.empty_like(hidden_RD)
        # One chunk needs no sum; over several a bfloat16 sum would lose small terms.
        grad_weight_VD: Tensor | None = None
        together = rows_together(hidden_RD.device)
        for start in range(0, len(targets_R), ctx.chunk_tokens):
            hidden_CD = hidden_RD[start : start + ctx.chunk_tokens]
            logits_CV = hidden_CD @ weight_VD.T if ctx.kept_CV is None else ctx.kept_CV
            ctx.kept_CV = None
            for first in range(0, len(logits_CV), together):
                rows = slice(start + first, start + min(first + together, len(logits_CV)))
                logits = logits_CV[first : first + together].float()
                if ctx.temperature != 1.0:
                    logits.div_(ctx.temperature)
                grad_logprob, grad_entropy = grad_logprobs_R[rows, None], grad_entropy_R[rows, None]
                grad_logits = (logits - log_sums_R[rows, None]).exp_()
                # -p (g_logprob + g_entropy (z - log_sum + H)) is p times a line in z: few passes over [rows, V].
                offset = grad_logprob + grad_entropy * (entropy_R[rows, None] - log_sums_R[rows, None])
                grad_logits.mul_(logits.mul_(-grad_entropy).sub_(offset))
                grad_logits.scatter_add_(1, targets_R[rows, None], grad_logprob)
                if ctx.temperature != 1.0:
                    grad_logits.div_(ctx.temperature)
                logits_CV[first : first + together] = grad_logits
            grad_hidden_RD[start : start + ctx.chunk_tokens] = logits_CV @ weight_VD
            if not ctx.needs_input_grad[1]:
                continue
            part = logits_CV.T @ hidden_CD
            grad_weight_VD = part if grad_weight_VD is None else grad_weight_VD.float().add_(part)
        if not ctx.needs_input_grad[1]:
            return grad_hidden_RD, None, None, None, None
        if grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        return grad_hidden_RD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def chunked_logprobs(
    hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution.

    Args:
        hidden_RD: Hidden states that predict the targets, in the weights' dtype.
        weight_VD: Output embedding.
        targets_R: int64 token ids.
        temperature: Logits are divided by it.
        chunk_tokens: Rows of logits that exist at once.

    Returns:
        float32 logprobs [R] and entropies [R], nats; both differentiable once.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(hidden_RD, weight_VD, targets_R, temperature, chunk_tokens)
    return logprobs, entropy
