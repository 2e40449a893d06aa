"""Switch off what makes a pass in training mode random: ratios compare with logprobs that were drawn without it.

transformers reads probabilities from `nn.Dropout`, from plain attributes of modules, or from the configuration while it
computes; all three are set. What draws in another way is seen by the self-check, which runs in training mode.
"""

from torch import nn
from transformers import PreTrainedModel

_WORDS = ("drop", "jitter")
"""In names: attn_pdrop, attention_dropout, layerdrop, drop_path_rate, router_jitter_noise."""


def remove_dropout(model: PreTrainedModel) -> dict[str, float]:
    """Set every probability of dropping and every jitter of `model` to 0.

    Returns:
        What was above 0, by its name in the configuration or in its module. A checkpoint's configuration has the zeros.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            found |= _clear(module.config)
        if isinstance(module, nn.Dropout) and module.p:
            found[path.rpartition(".")[2]] = module.p
            module.p = 0.0
        found |= _clear(module)
    return found


def _clear(owner: object) -> dict[str, float]:
    found = {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, float) and value > 0.0 and any(word in name for word in _WORDS)
    }
    for name in found:
        setattr(owner, name, 0.0)
    return found
