"""What the loss takes of each response token: its advantage, its weight, and whether it is trained at all.

Invariants: a masked token (weight 0) is context and nothing else: it is never predicted, so no objective, divisor or
metric ever meets it; a sample whose tokens are all masked is left out like one without tokens.

No torch here. Used by `learner.packing`.
"""

import numpy as np

from engine.wire import Float32s, TrainSample


def token_advantages(sample: TrainSample) -> Float32s:
    """Of each response token, [n]."""
    if sample.token_advantages.size:
        return sample.token_advantages
    return np.full(sample.token_ids.size, sample.advantage, dtype=np.float32)


def token_weights(sample: TrainSample) -> Float32s:
    """Of each response token, [n]; 0 = masked."""
    if sample.token_weights.size:
        return sample.token_weights
    return np.ones(sample.token_ids.size, dtype=np.float32)


def is_trained(sample: TrainSample) -> bool:
    """Whether any of its tokens is."""
    return bool(sample.token_weights.any() if sample.token_weights.size else sample.token_ids.size)
