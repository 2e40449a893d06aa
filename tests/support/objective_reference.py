"""Every objective once more, token by token in Python floats, written from the papers' formulas.

The gradient is a central difference of the loss in each logprob; what the formulas hold fixed reads `frozen`, the
logprobs as they were.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from configs.loss import Loss
from learner.objectives import TokenBatch


@dataclass(frozen=True)
class Inputs:
    """Lists of one number a token, responses one after the other."""

    logprobs: list
    behaviour: list
    advantages: list
    entropy: list
    staleness: list
    lengths: list
    reference: list | None = None
    proximal: list | None = None
    frozen: list = field(default_factory=list)
    weights: list | None = None
    """None: 1 for every token."""

    def tokens(self, dtype=torch.float64) -> TokenBatch:
        """The same as tensors; logprobs and entropy with gradients."""

        def floats(values):
            return None if values is None else torch.tensor(values, dtype=dtype)

        return TokenBatch(
            floats(self.logprobs).requires_grad_(), floats(self.entropy).requires_grad_(), floats(self.behaviour),
            floats(self.advantages), floats(weights_of(self)), torch.tensor(self.staleness, dtype=torch.int64),
            torch.tensor(sequence_of(self.lengths), dtype=torch.int64),
            torch.tensor(self.lengths, dtype=torch.int64), floats(self.proximal), floats(self.reference),
        )  # fmt: skip


def weights_of(inputs) -> list[float]:
    return [1.0] * len(inputs.logprobs) if inputs.weights is None else inputs.weights


def sequence_of(lengths) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def random_inputs(lengths=(3, 1, 7, 5), spread=0.6, seed=0) -> Inputs:
    """Advantages of both signs, one response with 0; ages 0 to 6; a reference and a proximal policy."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    behaviour = -rng.exponential(2.0, count)
    by_response = rng.normal(size=len(lengths))
    if len(lengths) > 2:
        by_response[:3] = abs(by_response[0]), -abs(by_response[1]), 0.0
    return Inputs(
        logprobs=(behaviour + rng.normal(0.0, spread, count)).tolist(),
        behaviour=behaviour.tolist(),
        advantages=[float(by_response[number]) for number in sequence_of(lengths)],
        entropy=rng.exponential(1.0, count).tolist(),
        staleness=rng.integers(0, 7, count).tolist(),
        lengths=list(lengths),
        reference=(behaviour + rng.normal(0.0, spread, count)).tolist(),
        proximal=(behaviour + rng.normal(0.0, spread, count)).tolist(),
    )


def token_values(inputs: Inputs, seed=1) -> Inputs:
    """The same with an advantage, of both signs or 0, and a weight of its own for each token."""
    rng = np.random.default_rng(seed)
    count = len(inputs.logprobs)
    advantages = rng.normal(size=count) * (rng.random(count) > 0.1)
    return replace(inputs, advantages=advantages.tolist(), weights=rng.uniform(0.05, 3.0, count).tolist())


def cut(value, limit=20.0):
    return max(-limit, min(limit, value))


def clipped(ratio, advantage, low, high, dual):
    objective = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    return max(objective, dual * advantage) if advantage < 0 else objective


def proximal_of(inputs, t, config) -> float:
    frozen = inputs.frozen[t]
    if config.proximal == "recompute":
        return frozen if inputs.proximal is None else inputs.proximal[t]
    age = inputs.staleness[t]
    part = (age - 1) / age if age >= 1 else 0.0
    return (1 - part) * inputs.behaviour[t] + part * frozen


def weight_of(inputs, t, members, config) -> float:
    """Mismatch weight of token t."""
    rule = config.mismatch_rule
    if rule == "none":
        return 1.0

    def log_k(u):
        above = proximal_of(inputs, u, config) if config.objective == "decoupled" else inputs.frozen[u]
        return above - inputs.behaviour[u]

    total = sum(log_k(u) for u in members) if config.mismatch.level == "sequence" else log_k(t)
    k = math.exp(total)
    if rule == "tis":
        return min(k, config.mismatch.cap)
    return k if config.mismatch.low <= k <= config.mismatch.high else 0.0


def left_out(inputs, config) -> set[int]:
    """Tokens that M2PO masks: the largest first, one by one."""
    if not config.m2_budget:
        return set()
    moved = [f - b for f, b in zip(inputs.frozen, inputs.behaviour, strict=True)]
    harmful = [t for t, delta in enumerate(moved) if delta * inputs.advantages[t] > 0]
    harmful.sort(key=lambda t: moved[t] ** 2)
    out = set()
    while harmful and sum(moved[t] ** 2 for t in harmful) / len(harmful) > config.m2_budget:
        out.add(harmful.pop())
    return out


def objective_of(inputs, t, members, config) -> float:
    lp, mu, advantage = inputs.logprobs[t], inputs.behaviour[t], inputs.advantages[t]
    low, high = config.clips
    match config.objective:
        case "ppo":
            return clipped(math.exp(cut(lp - mu)), advantage, low, high, config.dual_clip)
        case "cispo":
            ratio = math.exp(cut(inputs.frozen[t] - mu))
            return max(1 - low, min(1 + high, ratio)) * advantage * lp
        case "gspo":
            mean = sum(inputs.logprobs[u] - inputs.behaviour[u] for u in members) / len(members)
            return clipped(math.exp(cut(mean)), advantage, low, high, config.dual_clip)
        case "decoupled":
            ratio = math.exp(cut(lp - proximal_of(inputs, t, config)))
            return clipped(ratio, advantage, low, high, config.dual_clip)
        case "reinforce":
            return advantage * lp
        case "likelihood":
            return lp if advantage > 0 else 0.0


def kl_of(inputs, t, config) -> float:
    if not config.kl.weight:
        return 0.0
    r = inputs.logprobs[t] - inputs.reference[t]
    return {"k1": r, "k2": r * r / 2, "k3": math.exp(cut(-r)) - 1 + r}[config.kl.estimator]


def reference_normaliser(inputs: Inputs, config: Loss) -> float:
    """What the loss is divided by."""
    match config.aggregation_rule:
        case "token_mean":
            return sum(weights_of(inputs))
        case "sequence_mean":
            return len(inputs.lengths)
        case "constant":
            return len(inputs.lengths) * config.constant_tokens


def reference_loss(inputs: Inputs, config: Loss) -> float:
    """Unnormalised loss."""
    inputs = inputs if inputs.frozen else replace(inputs, frozen=inputs.logprobs)
    out, loss, start = left_out(inputs, config), 0.0, 0
    weights = weights_of(inputs)
    for length in inputs.lengths:
        members = range(start, start + length)
        divisor = sum(weights[u] for u in members) if config.aggregation_rule == "sequence_mean" else 1.0
        for t in members:
            weight = 0.0 if t in out else weight_of(inputs, t, members, config)
            value = weight * objective_of(inputs, t, members, config)
            value += config.entropy_weight * inputs.entropy[t] - config.kl.weight * kl_of(inputs, t, config)
            loss -= weights[t] * value / divisor
        start += length
    return loss


def reference_gradient(inputs: Inputs, config: Loss, of="logprobs", step=1e-6) -> list[float]:
    """Derivative of the loss in each logprob, or in each entropy."""
    gradient = []
    for t in range(len(inputs.logprobs)):
        sides = []
        for sign in (1, -1):
            moved = list(getattr(inputs, of))
            moved[t] += sign * step
            sides.append(reference_loss(replace(inputs, **{of: moved}, frozen=inputs.logprobs), config))
        gradient.append((sides[0] - sides[1]) / (2 * step))
    return gradient
