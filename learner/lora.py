"""LoRA adapters in a model: only they train, and what goes out is the model with them merged.

Invariants:
- Layers get peft's own modules in place, so forward pass and gradients are peft's.
- Merged weights are W + alpha / rank · B·A in float32, rounded once to the dtype of W. peft rounds the product first.
- They go out under the base model's HF names: workers, checkpoints and canaries know nothing of adapters.

Called by `learner.policy`. A resumed run must start from the same `model.path`, never from a merged checkpoint: the
adapters would count twice.

Shapes: A [r, I], B [O, r], W [O, I] of a layer with I inputs and O outputs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.lora import ALL_LINEAR, Lora
from configs.model_folder import ModelError

if TYPE_CHECKING:
    from peft.tuners.lora import Linear

ADAPTER_FOLDER = "adapter"
"""In a checkpoint: the adapters alone, as peft reads them."""
_NAME = "default"  # the one adapter, under the name peft gives it
_BASE = ".base_layer."  # what peft puts into the names of the layers it wraps


class Adapters:
    """The LoRA layers of one model; the other parameters are frozen."""

    def __init__(self, model: PreTrainedModel, config: Lora) -> None:
        """Put adapters into `model`; A random (torch's generator), B zero.

        Args:
            model: Changed in place.
            config: With a rank above 0.

        Raises:
            ModelError: peft is not installed, or `lora.target_modules` does not name linear layers below the head.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import Linear
            from peft.tuners.tuners_utils import BaseTunerLayer
        except ImportError as exc:
            raise ModelError(f"lora.rank must be 0 without peft, got {config.rank} (pip install peft): {exc}") from exc
        targets = ALL_LINEAR if config.target_modules == [ALL_LINEAR] else config.target_modules
        if targets != ALL_LINEAR:
            _check_names(model, config.target_modules)
        self._config = LoraConfig(
            r=config.rank, lora_alpha=cast("int", config.alpha), target_modules=targets, task_type="CAUSAL_LM",
            base_model_name_or_path=model.name_or_path,
        )  # fmt: skip
        self._model = model
        head = model.get_output_embeddings()
        try:
            inject_adapter_in_model(self._config, model)
        except ValueError as exc:
            raise ModelError(f"lora.target_modules must name layers of the model, got {targets}: {exc}") from exc
        self._layers: dict[str, Linear] = {}
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                base = module.base_layer if isinstance(module, Linear) else None
                # peft adapts GPT-2's Conv1D as well, whose weight lies the other way round.
                if not isinstance(module, Linear) or not isinstance(base, nn.Linear) or base is head:
                    raise ModelError(f"lora.target_modules must name linear layers below the head, got {targets}")
                self._layers[name] = module

    @property
    def alpha(self) -> float:
        """Of the scale alpha / rank."""
        return float(self._config.lora_alpha)

    def frozen_sum(self) -> str:
        """xxh3_128 over the names and bytes of the weights that do not train, hex."""
        digest = xxhash.xxh3_128()
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                digest.update(base_name(name).encode())
                digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the base model under its HF name, adapters merged; a tied head too, as the same tensor."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            layer, _, kind = name.partition(_BASE)
            if kind == "weight":
                yield base_name(name), merged(self._layers[layer])
            elif ".lora_" not in name:
                yield base_name(name), parameter.detach()

    def save(self, folder: Path) -> None:
        """Write the adapters alone into `folder`/adapter, as `peft.PeftModel.from_pretrained` reads them."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        target = folder / ADAPTER_FOLDER
        target.mkdir(parents=True)
        state = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        # PeftModel calls the model it wraps `base_model.model`. Own storage: the parameters are views of one buffer.
        named = {f"base_model.model.{name}": tensor.detach().clone() for name, tensor in state.items()}
        save_file(named, target / "adapter_model.safetensors", metadata={"format": "pt"})
        self._config.save_pretrained(str(target))


def _check_names(model: PreTrainedModel, targets: list[str]) -> None:
    """Refuse a target that no layer has: peft passes over it where another one fits, and less would train."""
    names = [name for name, _ in model.named_modules()]
    unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unknown:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        allowed = sorted({name.rpartition(".")[2] for name in linear})
        raise ModelError(
            f"lora.target_modules must name layers of the model, got {', '.join(unknown)}; allowed: {ALL_LINEAR}, "
            f"or of {', '.join(allowed)}"
        )


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def merged(layer: "Linear") -> Tensor:
    """W + alpha / rank · B·A of `layer`: [O, I] in the dtype of W, computed in float32."""
    base = cast("nn.Linear", layer.base_layer).weight
    down, up = cast("nn.Linear", layer.lora_A[_NAME]), cast("nn.Linear", layer.lora_B[_NAME])
    return (base.float() + (up.weight.float() @ down.weight.float()) * layer.scaling[_NAME]).to(base.dtype)
