"""Compute in float32 with weights that stay as they are: rounding then hides nothing from a comparison.

In bfloat16 two right ways of attending differ by 0.3 nats at single tokens (SmolLM2-135M, transformers' own eager and
sdpa; 5e-5 in float32), as much as wrong ones do.

Invariants: at most one layer's weights (or one embedding) exist in float32 at a time, beside the model's own; after the
`with` the parameters hold the tensors that they held before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Passes of `module` are in float32 inside; for passes without a gradient, not for compiled layers."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.dtype != torch.float32 and parameter not in kept:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def put_back(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    handles = []
    for owner, parameters in _owners(module):
        handles.append(owner.register_forward_pre_hook(lambda *_, own=parameters: widen(own), prepend=True))
        handles.append(owner.register_forward_hook(lambda *_, own=parameters: put_back(own)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        put_back(list(kept))


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Layers with all that is in them, since adapters there look at each other's dtypes; else modules by themselves."""
    if isinstance(module, GradientCheckpointingLayer):
        yield module, list(module.parameters())
        return
    if own := list(module.parameters(recurse=False)):
        yield module, own
    for child in module.children():
        yield from _owners(child)
