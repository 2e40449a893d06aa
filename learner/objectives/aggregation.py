"""From tokens to one number: the weight of a token, and what the step's sum is divided by.

- `token_mean`: weight 1, divided by all response tokens of the step (DAPO, arXiv 2503.14476, equation 8).
- `sequence_mean`: weight 1/|a|, divided by the responses (GRPO, arXiv 2402.03300, equation 3).
- `constant`: weight 1, divided by responses x a constant length (Dr. GRPO, arXiv 2503.20783).
The divisor of a micro-batch is its part of the step's divisor: divisors add up as the sums do, and a token that a mask
leaves out keeps its place in them.

Shapes: R response tokens.
"""

from torch import Tensor

from configs.loss import Loss
from learner.objectives.tokens import TokenBatch


def weighted_sum(values_R: Tensor, tokens: TokenBatch, config: Loss) -> Tensor:
    """Sum of float `values_R` [R] with the weight of each token: a scalar."""
    if config.aggregation_rule == "sequence_mean":
        values_R = values_R / tokens.token_lengths()
    return values_R.sum()


def normaliser(tokens: TokenBatch, config: Loss) -> float:
    """This micro-batch's part of what the step's sum is divided by."""
    match config.aggregation_rule:
        case "token_mean":
            return float(tokens.num_tokens)
        case "sequence_mean":
            return float(tokens.num_sequences)
        case "constant":
            return float(tokens.num_sequences * config.constant_tokens)
