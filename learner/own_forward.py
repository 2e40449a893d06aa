"""What a model computes by itself: transformers' plain attention and nothing of the learner's, in float32.

The yardstick of `Policy.check_forward`. Take it before kernels, adapters or compiled layers go into the model: they
would be on both sides of the comparison. The weights are the model's own, so no second copy exists.

Shapes: N sequences, T tokens of the longest, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from configs.model_folder import ModelError
from engine.wire import Float32s, Int32s
from learner.full_precision import full_precision

OWN_ATTENTION = "eager"
"""Every architecture has it, with all of its own: sinks, soft caps, biases, windows."""


@dataclass(frozen=True, slots=True)
class OwnLogprobs:
    """One sequence as the model itself sees it."""

    tokens: Int32s
    """At least two."""
    logprobs: Float32s
    """One fewer, nats: token t + 1 given tokens 0..t at temperature 1."""


def own_logprobs(model: PreTrainedModel, sequences: Sequence[Int32s]) -> list[OwnLogprobs]:
    """The model's own logprobs of `sequences`, and of the first one's tokens turned round behind its first token.

    That one shares a prompt with the first, so that the check packs responses of one prompt as well.

    Args:
        model: Left in evaluation mode.
        sequences: int32 token ids, at least two each; at least one sequence.

    Raises:
        ModelError: it cannot say; the text names its class.
    """
    first = sequences[0]
    every = [*sequences, np.concatenate([first[:1], first[:0:-1]])]
    # Padding stands behind, where nothing sees it.
    ids_NT = torch.zeros(len(every), max(tokens.size for tokens in every), dtype=torch.int64)
    for row, tokens in zip(ids_NT, every, strict=True):
        row[: tokens.size] = torch.from_numpy(tokens)
    ids_NT = ids_NT.to(model.device)
    model.eval()
    with _own_attention(model), full_precision(model), torch.no_grad():
        logits_NTV = model(input_ids=ids_NT, use_cache=False).logits[:, :-1]
        logprobs_NT = logits_NTV.float().log_softmax(-1).gather(2, ids_NT[:, 1:, None])[:, :, 0].cpu().numpy()
    return [OwnLogprobs(tokens, row[: tokens.size - 1]) for tokens, row in zip(every, logprobs_NT, strict=True)]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attend by transformers' own function inside, by that of before outside; it is looked up at each pass."""
    before = str(model.config._attn_implementation)  # it has no public name
    model.set_attn_implementation(OWN_ATTENTION)
    if model.config._attn_implementation != OWN_ATTENTION:
        raise ModelError(f"{type(model).__name__} is not supported: its attention cannot be replaced in transformers")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
