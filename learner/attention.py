"""Attention over a packed row, as an attention function of transformers.

Invariants: a token sees what its `AttentionLayout` says and nothing else; without a layout the row is one causal
sequence; what a model asks for beyond that is refused, never left out. transformers 5.19 packs for flash-attention
kernels only, and a block-diagonal mask over the whole row would cost the row's length squared, so stretches are
gathered into blocks and attended there. Plain matrix products with a float32 softmax are faster than the fused CPU
kernel at short lengths (3.8 against 4.5 s for a forward and backward pass of 8 segments of 128 tokens through 135M
weights on one core): its backward pass is slow. Blocks without a mask go to torch's fused causal attention: flash on
CUDA.

Shapes: N batch of one row, H query heads, K key heads, T tokens, D head size;
of a block G stretches, L queries, M keys.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import AttentionInterface

from learner.attention_layout import AttentionBlock, AttentionLayout

ATTENTION_NAME = "adastream_packed"

HARMLESS = {"layout", "scaling", "position_ids", "cache_position", "use_cache", "output_router_logits"}
"""Options that change nothing here, or are read."""


def packed_attention(
    module: nn.Module,
    query_NHTD: Tensor,
    key_NKTD: Tensor,
    value_NKTD: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one packed row; `options` may hold `layout` and `scaling`, else only what changes nothing.

    Returns:
        Output of shape [1, T, H, D], and no weights.

    Raises:
        ValueError: a mask, several rows, dropout, a soft cap, a sliding window shorter than a stretch, attention that
            is not causal or any other option that is set: not supported.
    """
    if attention_mask is not None or query_NHTD.shape[0] != 1:
        raise ValueError("packed attention must get one row without a mask")
    layout = options.get("layout")
    if not isinstance(layout, AttentionLayout):
        layout = _one_sequence(query_NHTD.shape[2], query_NHTD.device)
    _check_options(options, max(block.keys_GM.shape[1] for block in layout.blocks))
    scaling = options.get("scaling")
    scale = float(scaling) if isinstance(scaling, float | int) else query_NHTD.shape[-1] ** -0.5
    query, key, value = (part[0].transpose(0, 1) for part in (query_NHTD, key_NKTD, value_NKTD))
    outputs = [_attend(block, query, key, value, scale) for block in layout.blocks]
    return torch.cat(outputs).index_select(0, layout.places_T)[None], None


def _attend(block: AttentionBlock, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
    """Output [G * L, H, D] of one block."""
    (stretches, num_queries), num_keys = block.queries_GL.shape, block.keys_GM.shape[1]
    heads, size = query_THD.shape[1:]
    key_heads = key_TKD.shape[1]
    query_GLHD = query_THD.index_select(0, block.queries_GL.reshape(-1)).view(stretches, num_queries, heads, size)
    key_GMKD, value_GMKD = (
        part.index_select(0, block.keys_GM.reshape(-1)).view(stretches, num_keys, key_heads, size)
        for part in (key_TKD, value_TKD)
    )
    if block.mask_GLM is None:
        # Padding stands behind the tokens of its stretch, so no token sees it.
        is_square = num_queries == num_keys
        output = functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query_GLHD, key_GMKD, value_GMKD)),
            attn_mask=None if is_square else causal_lower_right(num_queries, num_keys),
            is_causal=is_square,
            scale=scale,
            enable_gqa=heads != key_heads,
        )
        return output.transpose(1, 2).reshape(stretches * num_queries, heads, size)
    sharing = heads // key_heads
    # Query heads that share a key head are stacked along the token axis, so keys are not repeated.
    query = query_GLHD.view(stretches, num_queries, key_heads, sharing, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(stretches * key_heads, sharing * num_queries, size)
    key = key_GMKD.permute(0, 2, 3, 1).reshape(stretches * key_heads, size, num_keys)
    value = value_GMKD.transpose(1, 2).reshape(stretches * key_heads, num_keys, size)
    scores = torch.bmm(query, key).view(stretches, heads, num_queries, num_keys)
    # The mask is float32, so the sum is too, in one pass.
    weights = torch.add(block.mask_GLM[:, None], scores, alpha=scale).softmax(-1).to(value.dtype)
    output = torch.bmm(weights.view(stretches * key_heads, sharing * num_queries, num_keys), value)
    output = output.view(stretches, key_heads, sharing, num_queries, size).permute(0, 3, 1, 2, 4)
    return output.reshape(stretches * num_queries, heads, size)


def _one_sequence(length: int, device: torch.device) -> AttentionLayout:
    rows_T = torch.arange(length, device=device)
    return AttentionLayout([AttentionBlock(rows_T[None], rows_T[None], None)], rows_T)


def _check_options(options: dict[str, object], longest: int) -> None:
    """Refuse what this attention would leave out.

    Args:
        options: As a model passes them.
        longest: Keys of the longest stretch, padding included.
    """
    window = options.get("sliding_window")
    if isinstance(window, int) and window < longest:
        raise ValueError(f"packed attention knows no sliding window: stretch of {longest} tokens, window {window}")
    if options.get("dropout"):
        raise ValueError(f"packed attention knows no dropout, got {options['dropout']}")
    if options.get("softcap") is not None:
        raise ValueError(f"packed attention knows no soft cap of scores, got softcap {options['softcap']}")
    if options.get("is_causal") is False:
        raise ValueError("packed attention is causal, got is_causal false")
    known = HARMLESS | {"sliding_window", "dropout", "softcap", "is_causal"}
    other = sorted(name for name, value in options.items() if name not in known and not _is_unset(value))
    if other:
        raise ValueError(f"packed attention knows no {', '.join(other)}: this architecture is not supported")


def _is_unset(value: object) -> bool:
    return value is None or value is False


AttentionInterface.register(ATTENTION_NAME, packed_attention)
