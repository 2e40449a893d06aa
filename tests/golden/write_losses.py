"""`python -m tests.golden.write_losses` writes losses.json: the losses of fixed batches.

A commit that changes them says why.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from configs.loss import Loss
from learner.logprobs import chunked_logprobs
from learner.objectives import objective_loss
from tests.support.loss_configs import LOSSES
from tests.support.objective_reference import Inputs, random_inputs, token_values

PATH = Path(__file__).with_name("losses.json")
LENGTHS = (6, 1, 9, 4, 12)
TEMPERATURES = (0.6, 1.0, 1.4)


def golden(config: Loss) -> dict[str, float]:
    """Losses, gradients and metrics of one configuration, float64."""
    inputs = random_inputs(lengths=LENGTHS, seed=2510)
    means, gradient, entropy_gradient = _gradients(inputs, config)
    own_means, own_gradient, own_entropy_gradient = _gradients(token_values(inputs), config)
    return {
        "loss": means["loss"],
        "gradient_sum": gradient.sum().item(),
        "gradient_norm": gradient.norm().item(),
        "entropy_gradient_norm": entropy_gradient.norm().item(),
        "clip_share": means["clip_share"],
        "mask_share": means["mask_share"],
        "loss, token values": own_means["loss"],
        "gradient_norm, token values": own_gradient.norm().item(),
        "entropy_gradient_norm, token values": own_entropy_gradient.norm().item(),
    }


def golden_at(temperature: float) -> dict[str, float]:
    """Loss and gradients down to hidden states and head, float32."""
    rng, count, size = np.random.default_rng(2510), sum(LENGTHS), 16
    hidden, head = (
        torch.tensor(rng.normal(size=(rows, size)), dtype=torch.float32).requires_grad_() for rows in (count, 101)
    )
    targets = torch.from_numpy(rng.integers(0, 101, count))
    logprobs, entropy = chunked_logprobs(hidden, head, targets, temperature, 8)
    values = logprobs.detach().double().numpy()
    inputs = random_inputs(lengths=LENGTHS, seed=2510)
    behaviour, reference = (values + rng.normal(0.0, 0.3, (2, count))).tolist()
    fixed = replace(inputs, logprobs=values.tolist(), behaviour=behaviour, reference=reference)
    tokens = fixed.tokens(torch.float32)
    config = Loss(entropy_weight=0.05, kl={"weight": 0.3})
    loss, sums = objective_loss(replace(tokens, logprobs_R=logprobs, entropy_R=entropy), config)
    loss.backward()
    means = sums.means()
    return {
        "loss": means["loss"],
        "entropy": means["entropy"],
        "hidden_gradient_norm": hidden.grad.norm().item(),
        "head_gradient_norm": head.grad.norm().item(),
    }


def _gradients(inputs: Inputs, config: Loss) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    tokens = inputs.tokens()
    loss, sums = objective_loss(tokens, config)
    loss.backward()
    none = torch.zeros_like(tokens.entropy_R)
    return sums.means(), tokens.logprobs_R.grad, none if tokens.entropy_R.grad is None else tokens.entropy_R.grad


def all_golden() -> dict[str, dict[str, float]]:
    """Everything that the file holds, by name."""
    objectives = {name: golden(config) for name, config in LOSSES.items()}
    return objectives | {f"temperature {value:g}": golden_at(value) for value in TEMPERATURES}


if __name__ == "__main__":
    PATH.write_text(json.dumps(all_golden(), indent=1) + "\n")
