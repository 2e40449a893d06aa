"""Packing changes nothing but the work: hidden states and gradients are those of separate sequences."""

import numpy as np
import pytest
import torch

from configs.training import Learner
from engine.wire import Span
from learner.backends.torch import TorchBackend
from learner.gradient import micro_batches
from learner.packing import Segment, fill_micro_batches, pack, split_groups
from learner.policy import Policy
from tests.support.learner_inputs import learner_config, random_group, tiny_llama

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


def trained_gradient(groups, **learner):
    """The whole gradient that the torch backend adds up for `groups`, in float32, by parameter."""
    policy = Policy(tiny_llama(), 64)
    backend = TorchBackend(policy, learner_config(learner=learner, loss={"entropy_weight": 0.0}))
    backend.accumulate(groups)
    sizes = [parameter.numel() for parameter in policy.parameters()]
    names = [name for name, _ in policy.model.named_parameters()]
    return dict(zip(names, torch.split(backend._grads_N, sizes), strict=True))


def plain_gradient(groups):
    """The same with transformers: one padded batch, all logits, autograd."""
    model = tiny_llama(attention="eager")
    samples = [(group, sample) for group in groups for sample in group.samples if sample.token_ids.size]
    rows = [np.concatenate([group.prompt_token_ids, sample.token_ids]) for group, sample in samples]
    longest = max(row.size for row in rows)
    ids = torch.tensor(np.stack([np.pad(row, (0, longest - row.size)) for row in rows])).long()
    mask = torch.tensor([[1] * row.size + [0] * (longest - row.size) for row in rows])
    logprobs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    total = torch.zeros(())
    for line, (row, (_, sample)) in enumerate(zip(rows, samples, strict=True)):
        places = torch.arange(row.size - sample.token_ids.size, row.size)
        chosen = logprobs[line, places - 1, ids[line, places]]
        ratio = (chosen - torch.tensor(sample.logprobs)).exp()
        objective = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
        total = total - (objective.clamp(min=10 * sample.advantage) if sample.advantage < 0 else objective).sum()
    total.backward()
    return {name: parameter.grad.reshape(-1) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "learner",
    [{}, {"share_prefixes": False}, {"micro_batch_tokens": 24}, {"micro_batch_tokens": 24, "share_prefixes": False}],
    ids=["shared", "packed", "shared, several passes", "packed, several passes"],
)
def test_the_gradient_of_every_parameter_is_that_of_a_plain_padded_loop(learner):
    groups = mixed_groups()
    ours, theirs = trained_gradient(groups, **learner), plain_gradient(groups)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        # float32 in another order: 1e-4 of the parameter's largest gradient.
        tolerance = 1e-4 * theirs[name].abs().max().item()
        assert tolerance > 0
        torch.testing.assert_close(gradient, theirs[name], rtol=0.0, atol=tolerance, msg=name)


def test_without_sharing_every_response_has_its_prompt_and_positions_from_zero():
    groups = mixed_groups()
    batch = pack(split_groups(groups, share_prefixes=False), share_prefixes=False)
    samples = [(group, sample) for group in groups for sample in group.samples if sample.token_ids.size]
    rows = [np.concatenate([group.prompt_token_ids, sample.token_ids]) for group, sample in samples]
    np.testing.assert_array_equal(batch.input_ids_T, np.concatenate(rows))
    np.testing.assert_array_equal(batch.position_ids_T, np.concatenate([np.arange(row.size) for row in rows]))


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_other_logprobs_are_bit_equal_when_a_response_changes(share_prefixes):
    groups, policy = mixed_groups(), Policy(tiny_llama(), 64)

    def logprobs():
        segments = split_groups(groups, share_prefixes=share_prefixes)
        with torch.inference_mode():
            return policy(pack(segments, share_prefixes=share_prefixes), 1.0)[0]

    before = logprobs()
    groups[2].samples[0].token_ids[:] = 96
    is_own = torch.zeros(len(before), dtype=torch.bool)
    start = sum(sample.token_ids.size for group in groups[:2] for sample in group.samples)
    is_own[start : start + 12] = True
    after = logprobs()
    assert torch.equal(after[~is_own], before[~is_own])
    assert (after != before)[is_own].all()


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
    assert batch.targets_R.numel() == sum(sample.token_ids.size for sample in samples)
    np.testing.assert_array_equal(batch.targets_R, np.concatenate([sample.token_ids for sample in samples]))
    np.testing.assert_array_equal(batch.behaviour_logprobs_R, np.concatenate([sample.logprobs for sample in samples]))
    expected = np.concatenate([np.full(sample.token_ids.size, sample.advantage) for sample in samples])
    np.testing.assert_allclose(batch.advantages_R, expected, rtol=1e-6)


def test_every_token_knows_its_response_and_its_age():
    group = random_group(np.random.default_rng(0), prompt=[7, 8], lengths=(3, 0, 1, 2), version=5)
    group.samples[0].spans[:] = [Span(3, 0, 1), Span(4, 1, 3)]
    group.samples[3].spans[:] = []
    batch = pack(split_groups([group], max_tokens=6))
    assert batch.staleness_R.tolist() == [2, 1, 1, 0, 0, 0]
    assert batch.sequence_R.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.lengths_S.tolist() == [3, 1, 2]


def test_a_group_is_split_only_where_a_pass_has_no_room_for_it():
    group = random_group(np.random.default_rng(0), prompt=[5, 6], lengths=(30, 30, 4, 200))

    def lengths(*limit):
        return [[sample.token_ids.size for sample in segment.samples] for segment in split_groups([group], *limit)]

    assert lengths() == [[30, 30, 4, 200]]
    assert lengths(64) == [[30, 30], [4], [200]]
    assert lengths(266) == [[30, 30, 4, 200]]


@pytest.mark.parametrize(
    ("prompt", "answer", "samples", "budget", "passes"),
    [
        (600, 50, 4, 2048, 1),
        (1000, 100, 4, 2048, 1),
        (500, 10, 4, 2048, 1),
        (1000, 100, 8, 16384, 1),
        (900, 100, 8, 1500, 2),
    ],
)
def test_a_prompt_of_any_length_is_computed_once_a_pass(prompt, answer, samples, budget, passes):
    rng = np.random.default_rng(0)
    group = random_group(rng, prompt=rng.integers(3, 97, prompt), lengths=(answer,) * samples)
    batches = micro_batches([group], Learner(micro_batch_tokens=budget))
    assert len(batches) == passes
    assert sum(pack(batch).num_packed_tokens for batch in batches) == passes * prompt + samples * answer
    assert all(pack(batch).num_packed_tokens <= budget for batch in batches)


@pytest.mark.parametrize("length", [600, 1000])
def test_gradients_after_a_long_prompt_are_those_of_separate_sequences(length):
    rng = np.random.default_rng(length)
    prompts = [np.concatenate([SHARED, rng.integers(3, 97, length + extra)]) for extra in (0, 9)]
    groups = [random_group(rng, n, prompt, (12, 5, 280)) for n, prompt in enumerate(prompts)]
    packed, apart = tiny_llama(), tiny_llama(attention="eager")
    batch = pack(split_groups(groups))
    assert any(block.mask_GLM is None for block in batch.layout.blocks)
    assert any(block.mask_GLM is not None for block in batch.layout.blocks)
    ours, theirs = packed_hidden(packed, batch), separate_hidden(apart, groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), apart.named_parameters(), strict=True):
        # float32 in another order: 1e-4 of the parameter's largest gradient.
        atol = 1e-4 * other[1].grad.abs().max().item()
        torch.testing.assert_close(one.grad, other[1].grad, rtol=0.0, atol=atol, msg=name)


def test_micro_batches_hold_every_segment_once_and_respect_the_limit():
    rng = np.random.default_rng(3)
    segments = split_groups([random_group(rng, n, lengths=(int(rng.integers(1, 60)),)) for n in range(40)])
    batches = fill_micro_batches(segments, 50)
    assert sorted(id(segment) for batch in batches for segment in batch) == sorted(map(id, segments))
    for batch in batches:
        assert len(batch) == 1 or sum(segment.num_tokens for segment in batch) <= 50


def segments_of(*lengths):
    """One segment of each length."""
    rng = np.random.default_rng(0)
    return [split_groups([random_group(rng, prompt=[5], lengths=(length - 1,))])[0] for length in lengths]


def test_micro_batches_are_filled_longest_first_and_each_segment_goes_where_there_is_room():
    batches = fill_micro_batches(segments_of(20, 60, 30, 70, 20), 100)
    assert [[segment.num_tokens for segment in batch] for batch in batches] == [[70, 30], [60, 20, 20]]


def test_a_group_without_tokens_makes_no_segment():
    assert split_groups([random_group(np.random.default_rng(0), lengths=(0, 0))]) == []


def test_groups_without_samples_make_no_segment_and_no_micro_batch():
    rng = np.random.default_rng(0)
    empty = [random_group(rng, number, lengths=()) for number in range(3)]
    empty.append(random_group(rng, 4, prompt=[], lengths=()))
    assert fill_micro_batches(split_groups(empty), 64) == []
    full = random_group(rng, 3)
    beside = split_groups([empty[0], full, empty[3]])
    assert [segment.samples for segment in beside] == [segment.samples for segment in split_groups([full])]


def test_a_segment_counts_its_tokens_and_scores():
    group = random_group(np.random.default_rng(0), prompt=[1, 2, 3], lengths=(4, 2))
    assert Segment(group.prompt_token_ids, group.samples[:1]).num_tokens == 7
    assert Segment(group.prompt_token_ids, group.samples[:1]).num_scores == 7**2
    assert Segment(group.prompt_token_ids, group.samples).num_tokens == 9
    assert Segment(group.prompt_token_ids, group.samples).num_scores == 3**2 + 4 * 7 + 2 * 5
