"""From tokens to one number: the factor of a token, and what the step's sum is divided by.

With w a token's own weight (1 unless the sample says otherwise; masked tokens, w = 0, are not here at all):
- `token_mean`: factor w, divided by Σ w over the step: DAPO's mean over all tokens, arXiv 2503.14476, equation 8.
- `sequence_mean`: factor w / Σ w of its response, divided by the responses (GRPO, arXiv 2402.03300, equation 3).
- `constant`: factor w, divided by responses x a constant length (Dr. GRPO, arXiv 2503.20783).
The divisor of a micro-batch is its part of the step's divisor: divisors add up as the sums do, and a token that a
mask of the objective (IcePop, M2PO) leaves out keeps its place in them.

Shapes: R response tokens.
"""

import torch
from torch import Tensor

from configs.loss import Loss
from learner.objectives.tokens import TokenBatch


def weighted_sum(values_R: Tensor, tokens: TokenBatch, config: Loss) -> Tensor:
    """Sum of float `values_R` [R] with the factor of each token: a scalar."""
    factors_R = tokens.weights_R
    if config.aggregation_rule == "sequence_mean":
        factors_R = factors_R / tokens.sequence_sums(factors_R)
    return (factors_R * values_R).sum()


def normaliser(tokens: TokenBatch, config: Loss) -> Tensor:
    """This micro-batch's part of what the step's sum is divided by: a float64 scalar, on the tokens' device."""
    match config.aggregation_rule:
        case "token_mean":
            return tokens.weights_R.sum(dtype=torch.float64)
        case "sequence_mean":
            divisor = tokens.num_sequences
        case "constant":
            divisor = tokens.num_sequences * config.constant_tokens
    return tokens.weights_R.new_full((), divisor, dtype=torch.float64)
