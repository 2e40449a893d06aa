"""Packing changes nothing but the work: hidden states and gradients are those of separate sequences."""

import numpy as np
import pytest
import torch

from engine.wire import Span
from learner.packing import MAX_PADDING, Segment, fill_micro_batches, pack, split_groups
from tests.support.learner_inputs import random_group, tiny_llama

SHARED = np.array([11, 12, 13, 14, 15], dtype=np.int32)


def mixed_groups(seed=0):
    """Prompts with a common beginning, one that is only that beginning, uneven and empty responses."""
    rng = np.random.default_rng(seed)
    prompts = [np.concatenate([SHARED, rng.integers(3, 97, extra)]) for extra in (3, 0, 7, 1)]
    lengths = [(5, 1, 9), (2, 2), (12, 0, 3, 4), (1,)]
    return [
        random_group(rng, n, prompt, length) for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def packed_hidden(model, batch):
    output = model.model(
        input_ids=batch.input_ids_T[None], position_ids=batch.position_ids_T[None], use_cache=False, layout=batch.layout
    )
    return output.last_hidden_state[0, batch.predictors_R]


def separate_hidden(model, groups):
    """One padded batch of ordinary sequences; hidden states that predict response tokens, in packed order."""
    sequences, cuts = [], []
    for segment in split_groups(groups):
        for sample in segment.samples:
            sequences.append(np.concatenate([segment.prompt_token_ids, sample.token_ids]))
            cuts.append((segment.prompt_token_ids.size - 1, sequences[-1].size - 1))
    longest = max(sequence.size for sequence in sequences)
    ids = torch.tensor(np.stack([np.pad(sequence, (0, longest - sequence.size)) for sequence in sequences])).long()
    mask = torch.tensor([[1] * sequence.size + [0] * (longest - sequence.size) for sequence in sequences])
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.cat([hidden[row, start:end] for row, (start, end) in enumerate(cuts)])


def test_the_documented_example_is_laid_out_as_documented():
    group = random_group(np.random.default_rng(0), prompt=[7, 8], lengths=(2, 1))
    batch = pack(split_groups([group]))
    tokens = [token for sample in group.samples for token in sample.token_ids]
    assert batch.input_ids_T.tolist() == [7, 8, *tokens]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 2]
    assert batch.predictors_R.tolist() == [1, 2, 1]
    assert batch.targets_R.tolist() == tokens


def test_packed_and_padded_passes_have_the_same_hidden_states_and_gradients():
    groups = mixed_groups()
    packed, padded = tiny_llama(), tiny_llama(attention="eager")
    batch = pack(split_groups(groups))
    ours, theirs = packed_hidden(packed, batch), separate_hidden(padded, groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_no_token_sees_another_response():
    groups = mixed_groups()
    model = tiny_llama()
    before = packed_hidden(model, pack(split_groups(groups)))
    groups[0].samples[0].token_ids[:] = 96
    after = packed_hidden(model, pack(split_groups(groups)))
    changed = (before != after).any(-1)
    # The first prediction of the changed response comes from its prompt.
    assert not changed[0]
    assert changed[1:5].all()
    assert not changed[5:].any()


def test_what_all_prompts_begin_with_is_computed_once():
    segments = split_groups(mixed_groups())
    batch = pack(segments)
    separate = sum(segment.num_tokens for segment in segments)
    assert batch.num_packed_tokens == separate - (len(segments) - 1) * SHARED.size


def test_every_response_token_is_predicted_once_with_its_own_advantage_and_logprob():
    groups = mixed_groups()
    batch = pack(split_groups(groups))
    samples = [sample for group in groups for sample in group.samples if sample.token_ids.size]
    assert batch.num_response_tokens == sum(sample.token_ids.size for sample in samples)
    np.testing.assert_array_equal(batch.targets_R, np.concatenate([sample.token_ids for sample in samples]))
    np.testing.assert_array_equal(batch.behaviour_logprobs_R, np.concatenate([sample.logprobs for sample in samples]))
    expected = np.concatenate([np.full(sample.token_ids.size, sample.advantage) for sample in samples])
    np.testing.assert_allclose(batch.advantages_R, expected, rtol=1e-6)


def test_every_token_knows_its_response_and_its_age():
    group = random_group(np.random.default_rng(0), prompt=[7, 8], lengths=(3, 0, 1, 2), version=5)
    group.samples[0].spans[:] = [Span(3, 0, 1), Span(4, 1, 3)]
    group.samples[3].spans[:] = []
    batch = pack(split_groups([group], max_shared_tokens=6))
    assert batch.staleness_R.tolist() == [2, 1, 1, 0, 0, 0]
    assert batch.sequence_R.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.lengths_S.tolist() == [3, 1, 2]


def test_long_responses_get_segments_of_their_own():
    group = random_group(np.random.default_rng(0), prompt=[5, 6], lengths=(30, 30, 4, 200))
    segments = split_groups([group], max_shared_tokens=64)
    assert [[sample.token_ids.size for sample in segment.samples] for segment in segments] == [[30, 30], [4], [200]]


def test_micro_batches_hold_every_segment_once_and_respect_the_limit():
    rng = np.random.default_rng(3)
    segments = split_groups([random_group(rng, n, lengths=(int(rng.integers(1, 60)),)) for n in range(40)])
    batches = fill_micro_batches(segments, 50)
    assert sorted(id(segment) for batch in batches for segment in batch) == sorted(map(id, segments))
    for batch in batches:
        assert len(batch) == 1 or sum(segment.num_tokens for segment in batch) <= 50


def test_padding_stays_small():
    rng = np.random.default_rng(4)
    segments = split_groups([random_group(rng, n, lengths=(int(rng.integers(1, 200)),)) for n in range(50)])
    blocks = pack(segments).layout.blocks
    real = sum(segment.num_tokens for segment in segments)
    assert sum(block.rows_GL.numel() for block in blocks) <= MAX_PADDING * real * 1.01
    assert len(blocks) < 20


def test_an_empty_prompt_is_refused():
    group = random_group(np.random.default_rng(0), prompt=[])
    with pytest.raises(ValueError, match="at least one token"):
        split_groups([group])


def test_a_group_without_tokens_makes_no_segment():
    assert split_groups([random_group(np.random.default_rng(0), lengths=(0, 0))]) == []


def test_groups_without_samples_make_no_segment_and_no_micro_batch():
    rng = np.random.default_rng(0)
    empty = [random_group(rng, number, lengths=()) for number in range(3)]
    assert fill_micro_batches(split_groups(empty), 64) == []
    full = random_group(rng, 3)
    beside = split_groups([empty[0], full, empty[1]])
    assert [segment.samples for segment in beside] == [segment.samples for segment in split_groups([full])]


def test_segment_counts_its_tokens():
    group = random_group(np.random.default_rng(0), prompt=[1, 2, 3], lengths=(4,))
    assert Segment(group.prompt_token_ids, group.samples).num_tokens == 7
