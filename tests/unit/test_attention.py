"""Attention of a packed row: exactly what a dense mask computes, by every kernel, and nothing left out in silence."""

import numpy as np
import pytest
import torch
from torch import nn

from learner import attention_layout
from learner.attention import packed_attention
from learner.attention_layout import MAX_PADDING, SPARE_SCORES, Stretch, is_fused
from learner.packing import pack, split_groups
from tests.support.learner_inputs import random_group

HEADS, KEY_HEADS, SIZE = 4, 2, 8
SHARED = np.array([11, 12, 13, 14, 15], dtype=np.int32)


def packed_segments(lengths, prompts):
    """A segment of each prompt length after a shared beginning."""
    rng = np.random.default_rng(0)
    made = [np.concatenate([SHARED, [20 + n], rng.integers(3, 97, prompt)]) for n, prompt in enumerate(prompts)]
    return split_groups([random_group(rng, n, prompt, lengths) for n, prompt in enumerate(made)])


def visible(segments):
    """bool [T, T]: by definition, token by token, what each token of the packed row sees."""
    shared = list(range(SHARED.size))
    place, seen = SHARED.size, {token: shared[: token + 1] for token in shared}
    for segment in segments:
        before = shared
        for part in (segment.prompt_token_ids[SHARED.size :], *(sample.token_ids for sample in segment.samples)):
            own = list(range(place, place + part.size))
            seen |= {token: [*before, *own[: index + 1]] for index, token in enumerate(own)}
            before = before if before is not shared else [*shared, *own]
            place += part.size
    mask = torch.zeros(place, place, dtype=torch.bool)
    for token, others in seen.items():
        mask[token, others] = True
    return mask


def qkv(tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, SIZE, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def dense(query, key, value, mask, scale):
    """Output [1, T, H, D]."""
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def attend(query, key, value, **options):
    return packed_attention(nn.Module(), query, key, value, None, **options)[0]


@pytest.mark.parametrize("max_plain_scores", [0, 200, 1_000_000], ids=["fused", "both", "plain"])
@pytest.mark.parametrize("lengths", [(5, 1, 9, 9), (7,)], ids=["several responses", "one response"])
def test_outputs_and_gradients_are_those_of_a_dense_mask(monkeypatch, lengths, max_plain_scores):
    monkeypatch.setattr(attention_layout, "MAX_PLAIN_SCORES", max_plain_scores)
    monkeypatch.setattr(attention_layout, "SPARE_SCORES", 0)
    segments = packed_segments(lengths, (3, 0, 30, 31))
    batch = pack(segments)
    kernels = {block.mask_GLM is None for block in batch.layout.blocks}
    assert kernels == {0: {True}, 200: {True, False}, 1_000_000: {False}}[max_plain_scores]
    ours, theirs = qkv(batch.num_packed_tokens), qkv(batch.num_packed_tokens)
    outputs = (
        attend(*ours, layout=batch.layout, scaling=0.7),
        dense(*theirs, visible(segments), 0.7),
    )
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        (output**3).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("prompt", [600, 1000])
def test_long_prompts_are_exact_too(prompt):
    segments = packed_segments((10, 3, 300), (prompt, prompt + 7))
    batch = pack(segments)
    ours, theirs = qkv(batch.num_packed_tokens), qkv(batch.num_packed_tokens)
    outputs = attend(*ours, layout=batch.layout), dense(*theirs, visible(segments), SIZE**-0.5)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        (output**3).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_no_response_pays_for_another():
    def scores(samples):
        blocks = pack(packed_segments((50,) * samples, (700,))).layout.blocks
        return sum(block.queries_GL.numel() * block.keys_GM.shape[1] for block in blocks)

    prompt = SHARED.size + 1 + 700
    assert [scores(samples) for samples in (2, 4, 16)] == [
        prompt**2 + samples * 50 * (prompt + 50) for samples in (2, 4, 16)
    ]


def test_padding_stays_small_and_blocks_few():
    rng = np.random.default_rng(4)
    lengths = [(int(rng.integers(1, 200)),) * (1 + n % 3) for n in range(60)]
    segments = split_groups([random_group(rng, n, lengths=length) for n, length in enumerate(lengths)])
    blocks = pack(segments).layout.blocks
    padded = sum(block.queries_GL.numel() * block.keys_GM.shape[1] for block in blocks)
    assert len(blocks) < 30
    assert padded <= MAX_PADDING * sum(segment.num_scores for segment in segments) + len(blocks) * SPARE_SCORES


def test_fused_attention_is_chosen_on_cuda_where_causality_says_it_all_and_for_large_stretches():
    def stretch(queries, keys):
        return Stretch(np.arange(keys - queries, keys), np.arange(keys))

    assert is_fused(stretch(9, 9), "cuda")
    assert not is_fused(stretch(9, 20), "cuda")
    assert is_fused(stretch(300, 1000), "cuda")
    assert not is_fused(stretch(512, 512), "cpu")
    assert is_fused(stretch(513, 513), "cpu")
    assert not is_fused(stretch(100, 1100), "cpu")
    assert is_fused(stretch(300, 1000), "cpu")


@pytest.mark.parametrize(("scaling", "scale"), [(None, SIZE**-0.5), (0.31, 0.31), (1, 1.0)])
def test_scores_are_scaled_as_the_model_says(scaling, scale):
    inputs = qkv(6)
    expected = dense(*inputs, torch.ones(6, 6, dtype=torch.bool).tril(), scale)
    torch.testing.assert_close(attend(*inputs, scaling=scaling), expected, rtol=1e-12, atol=1e-12)
    layout = pack(packed_segments((2, 1), (0,))).layout
    ours, inputs = attend(*qkv(9), layout=layout, scaling=scaling), qkv(9)
    expected = dense(*inputs, visible(packed_segments((2, 1), (0,))), scale)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dropout": 0.1}, r"no dropout, got 0\.1"),
        ({"softcap": 50.0}, r"no soft cap of scores, got softcap 50\.0"),
        ({"sliding_window": 5}, "no sliding window: stretch of 6 tokens, window 5"),
        ({"is_causal": False}, "is causal"),
        ({"s_aux": torch.zeros(HEADS)}, "no s_aux: this architecture"),
        ({"position_bias": torch.zeros(1), "head_mask": 0.0}, "no head_mask, position_bias: "),
    ],
)
def test_what_it_would_leave_out_is_refused_by_name(option, message):
    with pytest.raises(ValueError, match=f"packed attention .*{message}"):
        attend(*qkv(6), **option)


def test_a_window_is_measured_against_the_longest_stretch_and_not_against_the_row():
    batch = pack(packed_segments((4, 4), (0, 0)))
    longest = SHARED.size + 1 + 4
    assert batch.num_packed_tokens > longest
    attend(*qkv(batch.num_packed_tokens), layout=batch.layout, sliding_window=longest)
    with pytest.raises(ValueError, match=f"stretch of {longest} tokens, window {longest - 1}"):
        attend(*qkv(batch.num_packed_tokens), layout=batch.layout, sliding_window=longest - 1)


def test_options_that_change_nothing_are_accepted():
    plain = attend(*qkv(6))
    options = {
        "dropout": 0.0, "softcap": None, "sliding_window": None, "s_aux": None, "is_causal": True, "use_cache": False,
        "position_ids": torch.arange(6)[None], "output_attentions": False,
    }  # fmt: skip
    assert torch.equal(attend(*qkv(6), **options), plain)


@pytest.mark.parametrize("rows", [2, "mask"])
def test_several_rows_and_a_mask_are_refused(rows):
    inputs = [part.expand(2, -1, -1, -1) if rows == 2 else part for part in qkv(6)]
    with pytest.raises(ValueError, match="one row without a mask"):
        packed_attention(nn.Module(), *inputs, torch.zeros(1, 1, 6, 6) if rows == "mask" else None)
