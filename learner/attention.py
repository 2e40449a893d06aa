"""Attention over a packed row, as an attention function of transformers.

Invariants: a token sees what its `AttentionLayout` says and nothing else; without a layout the row is one causal
sequence. transformers 5.19 packs for flash-attention kernels only, and a block-diagonal mask over the whole row would
cost the row's length squared, so segments are gathered into blocks and attended there. Plain matrix products with a
float32 softmax are faster than the fused CPU kernel at these lengths (3.8 against 4.5 s for a forward and backward pass
of 8 segments of 128 tokens through 135M weights on one core): its backward pass is slow. Blocks without a mask (all of
them on CUDA where nothing is shared, long ones everywhere) go to torch's fused causal attention: flash on CUDA.

Shapes: N batch of one row, H query heads, K key heads, T tokens, D head size, G segments, L padded length.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from learner.packing import AttentionBlock, AttentionLayout

ATTENTION_NAME = "adastream_packed"


def packed_attention(
    module: nn.Module,
    query_NHTD: Tensor,
    key_NKTD: Tensor,
    value_NKTD: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one packed row; `options` may hold `layout`, `scaling`, `dropout`, `sliding_window`.

    Returns:
        Output of shape [1, T, H, D], and no weights.

    Raises:
        ValueError: a mask, dropout, soft cap, several rows or a sliding window shorter than a segment: not supported.
    """
    layout = options.get("layout")
    scaling = options.get("scaling")
    scale = float(scaling) if isinstance(scaling, float) else query_NHTD.shape[-1] ** -0.5
    if attention_mask is not None or query_NHTD.shape[0] != 1 or options.get("dropout") or options.get("softcap"):
        raise ValueError("packed attention must get one row without mask, dropout and soft cap")
    if not isinstance(layout, AttentionLayout):
        layout = _one_sequence(query_NHTD.shape[2], query_NHTD.device)
    query, key, value = (part[0].transpose(0, 1) for part in (query_NHTD, key_NKTD, value_NKTD))
    outputs: list[Tensor] = []
    for block in layout.blocks:
        _check_window(options, block.rows_GL.shape[1])
        outputs.append(_attend(block, query, key, value, scale))
    return torch.cat(outputs).index_select(0, layout.places_T)[None], None


def _attend(block: AttentionBlock, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
    """Output [G * L, H, D] of one block."""
    segments, length = block.rows_GL.shape
    rows = block.rows_GL.reshape(-1)
    heads, size = query_THD.shape[1:]
    key_heads = key_TKD.shape[1]
    if block.mask_GLL is None:
        # Padding stands behind the tokens of its segment, so no token sees it.
        parts = (
            part.index_select(0, rows).unflatten(0, (segments, length)) for part in (query_THD, key_TKD, value_TKD)
        )
        query, key, value = (part.transpose(1, 2) for part in parts)
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=heads != key_heads
        )
        return output.transpose(1, 2).reshape(segments * length, heads, size)
    sharing = heads // key_heads
    # Query heads that share a key head are stacked along the token axis, so keys are not repeated.
    query = query_THD.index_select(0, rows).view(segments, length, key_heads, sharing, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(segments * key_heads, sharing * length, size)
    key = key_TKD.index_select(0, rows).view(segments, length, key_heads, size).permute(0, 2, 3, 1)
    value = value_TKD.index_select(0, rows).view(segments, length, key_heads, size).transpose(1, 2)
    scores = torch.bmm(query, key.reshape(segments * key_heads, size, length)).float()
    scores = scores.view(segments, key_heads * sharing, length, length) * scale + block.mask_GLL[:, None]
    weights = scores.softmax(-1).to(value.dtype).view(segments * key_heads, sharing * length, length)
    output = torch.bmm(weights, value.reshape(segments * key_heads, length, size))
    output = output.view(segments, key_heads, sharing, length, size).permute(0, 3, 1, 2, 4)
    return output.reshape(segments * length, heads, size)


def _one_sequence(length: int, device: torch.device) -> AttentionLayout:
    rows = torch.arange(length, device=device)
    mask = torch.full((length, length), -torch.inf, device=device).triu(1)
    return AttentionLayout([AttentionBlock(rows[None], mask[None])], rows)


def _check_window(options: dict[str, object], length: int) -> None:
    window = options.get("sliding_window")
    if isinstance(window, int) and window < length:
        raise ValueError(f"packed attention knows no sliding window: segment of {length} tokens, window {window}")


AttentionInterface.register(ATTENTION_NAME, packed_attention)
