"""`python -m tests.golden.write_losses` writes losses.json: the losses of a fixed batch.

A commit that changes them says why.
"""

import json
from pathlib import Path

from configs.loss import Loss
from learner.objectives import objective_loss
from tests.support.loss_configs import LOSSES
from tests.support.objective_reference import random_inputs

PATH = Path(__file__).with_name("losses.json")


def golden(config: Loss) -> dict[str, float]:
    """Loss, gradient and metrics of one configuration."""
    tokens = random_inputs(lengths=(6, 1, 9, 4, 12), seed=2510).tokens()
    loss, sums = objective_loss(tokens, config)
    loss.backward()
    gradient = tokens.logprobs_R.grad
    means = sums.means()
    return {
        "loss": means["loss"],
        "gradient_sum": gradient.sum().item(),
        "gradient_norm": gradient.norm().item(),
        "clip_share": means["clip_share"],
        "mask_share": means["mask_share"],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: golden(config) for name, config in LOSSES.items()}, indent=1) + "\n")
