"""A second set of a running model's weights: filled beside generation, then exchanged for the first between two steps.

Why: loading SmolLM2-135M takes 0.35 s of one core (half of it repacking matrices for oneDNN), and all of it would be a
pause. The twin shares everything with the model but weights and what is derived from them, so it costs the weights'
memory once more. For CPUs only: captured CUDA graphs refer to the addresses of one set.

Invariants: the model in use is untouched until `exchange`; an exchange moves no bytes. Written for vLLM 0.32.
"""

from typing import cast

from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo


class Twin:
    """The other set of weights of `model`."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the weights, and share everything else."""
        modules: dict[int, nn.Module] = {}
        self.model = _copy_module(model, modules, {})
        self._pairs = [(module, modules[id(module)]) for module in model.modules()]

    def exchange(self) -> None:
        """Give the model the twin's weights and the twin the model's; no step may be running."""
        for ours, theirs in self._pairs:
            here, there = ours.__dict__, theirs.__dict__
            here["_modules"], there["_modules"] = there["_modules"], here["_modules"]
            object.__setattr__(ours, "__dict__", there)
            object.__setattr__(theirs, "__dict__", here)


def _copy_module(module: nn.Module, modules: dict[int, nn.Module], parameters: dict[int, nn.Parameter]) -> nn.Module:
    """`module` with its own parameters; modules and tensors that it holds twice stay one (a tied head)."""
    if id(module) in modules:
        return modules[id(module)]
    twin = modules[id(module)] = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {name: _copy_parameter(parameter, parameters) for name, parameter in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    twin._modules = {
        name: child if child is None else _copy_module(child, modules, parameters)
        for name, child in module._modules.items()
    }
    info = get_layerwise_info(module)
    LAYERWISE_INFO[twin] = LayerReloadingInfo(info.restore_metadata, info.restore_device)
    return twin


def _copy_parameter(parameter: nn.Parameter | None, copies: dict[int, nn.Parameter]) -> nn.Parameter | None:
    """A parameter of the same class and with the same attributes: vLLM keeps its weight loaders there."""
    if parameter is None:
        return None
    if id(parameter) not in copies:
        copy = parameter.data.clone()
        copy.__class__ = parameter.__class__
        vars(copy).update(vars(parameter))
        copies[id(parameter)] = cast("nn.Parameter", copy)
    return copies[id(parameter)]
