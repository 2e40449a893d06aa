"""PPO-clip with two bounds and the dual clip.

J = min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high) A), and max(J, cA) where A < 0; ρ = π/μ.
Sources: PPO arXiv 1707.06347, equation 7; two bounds: DAPO arXiv 2503.14476, equation 10; dual clip: arXiv 1912.09729;
all three as Reinforce-Ada's code has them (arXiv 2510.04996). Deviation: log ρ is cut at ±20 nats.

Shapes: R response tokens.
"""

import torch
from torch import Tensor

from learner.objectives.surrogate import Clip, Surrogate


def ppo(log_ratio_R: Tensor, advantages_R: Tensor, clip: Clip) -> Surrogate:
    """The clipped objective.

    Args:
        log_ratio_R: log ρ within ±20, float [R], with a gradient.
        advantages_R: float [R].
        clip: Bounds; `high` may be infinite.
    """
    ratio_R = log_ratio_R.exp()
    free_R = ratio_R * advantages_R
    bound_R = ratio_R.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_R
    floor_R = clip.dual * advantages_R
    is_negative_R = advantages_R < 0
    objective_R = torch.minimum(free_R, bound_R)
    objective_R = torch.where(is_negative_R, torch.maximum(objective_R, floor_R), objective_R)
    clipped_R = (bound_R < free_R) | (is_negative_R & (free_R < floor_R))
    return Surrogate(objective_R, clipped_R)
