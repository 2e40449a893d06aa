"""Distance to a reference model at the sampled tokens: three estimates of KL(π‖π_ref).

With r = log π - log π_ref: k1 = r, k2 = r²/2, k3 = exp(-r) - 1 + r (J. Schulman, "Approximating KL divergence", 2020).
k3 is GRPO's penalty (arXiv 2402.03300, equation 4). As a penalty that is differentiated, the gradient of k2 is that of
the exact divergence in expectation on policy, that of k3 its first order, and that of k1 has mean zero. Deviation: the
exponent of k3 is cut at ±20 nats.

Shapes: R response tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.objectives.tokens import bounded


def reference_kl(logprobs_R: Tensor, reference_R: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """The estimate at each token, nats, float [R], with the gradient of `logprobs_R`."""
    difference_R = logprobs_R - reference_R
    match estimator:
        case "k1":
            return difference_R
        case "k2":
            return 0.5 * difference_R.square()
        case "k3":
            return torch.expm1(bounded(-difference_R)) + difference_R
