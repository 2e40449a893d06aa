"""The training objectives: tensors of response tokens in, the loss to differentiate and sums to report out.

Invariants: everything is an unnormalised sum over tokens, and what it is divided by is a sum too, so micro-batches and
ranks add up and the division happens once, at the end of the step. No loop over sequences: a few passes over [R].
Called by a backend for every micro-batch, which always holds whole responses.
"""

from learner.objectives.objective import objective_loss
from learner.objectives.sums import TokenSums
from learner.objectives.tokens import TokenBatch, token_batch

__all__ = ["TokenBatch", "TokenSums", "objective_loss", "token_batch"]
