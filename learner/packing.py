"""Lay the samples of groups out as one row of tokens, without padding and with shared beginnings computed once.

A segment is a prompt followed by as many of its group's responses as fit in MAX_SHARED_TOKENS. Each response sees its
prompt and itself only, and its positions go on where the prompt ends. What all prompts of a row begin with (a chat
template's head) stands in the row once and belongs to every segment. Hidden states and gradients are those of separate
prompt-and-response sequences (tests/unit/test_packing.py). With 16 arithmetic prompts of 45 tokens and 4 responses of
15 each this computes about a third of the tokens. Attention inside a segment costs its length squared, hence the cap:
above it a response gets a segment alone.

Invariants: every response token that is trained is predicted exactly once (by the token before it, for the first one
the prompt's last token); prompt tokens and masked ones are never predicted; samples that train no token are left out,
groups without samples as well.

Shapes: T packed tokens, R trained response tokens, S responses, G segments of a block, L longest segment of a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.wire import Int32s, TrainGroup, TrainSample
from learner.token_values import is_trained, token_advantages, token_weights

MAX_SHARED_TOKENS = 512
"""Longest segment of several responses; there attention costs about as much as the prompts it saves."""
MAX_PADDING = 1.25
"""A block's padded size is at most this times its real size (or it has one segment)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and some responses to it."""

    prompt_token_ids: Int32s
    samples: list[TrainSample]
    train_version: int = 0
    """Learner version at whose gradient they are used."""
    group_id: int = -1
    """-1: fixed sequences, no group."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.prompt_token_ids.size + sum(sample.token_ids.size for sample in self.samples)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Segments of similar length, attended together."""

    rows_GL: Tensor
    """int64: place in the packed row of each token; padding is the segment's first token."""
    mask_GLL: Tensor | None
    """float32: 0 where the query (second axis) sees the key (third axis), -inf elsewhere. None: every token sees those
    before it, for a fused kernel (see `is_fused`)."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which tokens of a packed row see which."""

    blocks: list[AttentionBlock]
    places_T: Tensor
    """int64: place of each packed token in the blocks laid end to end."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    layout: AttentionLayout
    predictors_R: Tensor
    """int64: the packed token whose hidden state predicts each response token."""
    targets_R: Tensor
    """int64 token ids."""
    behaviour_logprobs_R: Tensor
    """float32 nats."""
    advantages_R: Tensor
    """float32."""
    weights_R: Tensor
    """float32, above 0: factor of the token's loss."""
    staleness_R: Tensor
    """int64: learner's version at the gradient minus the token's; tokens without a span count as fresh."""
    sequence_R: Tensor
    """int64: number of each token's response in this pass, 0 to S - 1, rising."""
    lengths_S: Tensor
    """int64: trained tokens of each response, none of 0."""

    @property
    def num_packed_tokens(self) -> int:
        """T."""
        return self.input_ids_T.numel()

    @property
    def num_response_tokens(self) -> int:
        """R."""
        return self.targets_R.numel()


def split_groups(
    groups: Iterable[TrainGroup], max_shared_tokens: int = MAX_SHARED_TOKENS, *, share_prefixes: bool = True
) -> list[Segment]:
    """Segments of `groups`, each of at most `max_shared_tokens` unless a single response needs more.

    Args:
        groups: What is trained on; a group with samples has a prompt.
        max_shared_tokens: Longest segment of several responses.
        share_prefixes: False gives every response a segment of its own.
    """
    segments: list[Segment] = []
    for group in groups:
        segment = Segment(group.prompt_token_ids, [], group.train_version, group.group_id)
        for sample in group.samples:
            if not is_trained(sample):
                continue
            is_full = segment.num_tokens + sample.token_ids.size > max_shared_tokens
            if segment.samples and (is_full or not share_prefixes):
                segments.append(segment)
                segment = Segment(group.prompt_token_ids, [], group.train_version, group.group_id)
            segment.samples.append(sample)
        if segment.samples:
            segments.append(segment)
    return segments


def fill_micro_batches(segments: Iterable[Segment], max_tokens: int) -> list[list[Segment]]:
    """Split `segments`, longest first, into lists of at most `max_tokens` tokens (a longer segment stands alone)."""
    batches: list[list[Segment]] = []
    room = 0
    for segment in sorted(segments, key=lambda segment: -segment.num_tokens):
        if not batches or segment.num_tokens > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(segment)
        room -= segment.num_tokens
    return batches


def pack(segments: Sequence[Segment], device: torch.device | str = "cpu", *, share_prefixes: bool = True) -> MicroBatch:
    """One packed row of `segments`; without `share_prefixes` what all prompts begin with stands there every time.

    Example:
        Prompt [7, 8] with responses [1, 2] and [3] gives tokens 7 8 1 2 3, positions 0 1 2 3 2,
        predictors 1 2 1, targets 1 2 3.
    """
    shared = _shared_prefix([segment.prompt_token_ids for segment in segments]) if share_prefixes else 0
    tokens: list[Int32s] = [segments[0].prompt_token_ids[:shared]]
    positions: list[np.ndarray] = [np.arange(shared)]
    predictors: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    place = shared
    for segment in segments:
        prompt_length = segment.prompt_token_ids.size
        tokens.append(segment.prompt_token_ids[shared:])
        positions.append(np.arange(shared, prompt_length))
        owner = [np.zeros(prompt_length, dtype=np.int64)]
        place += prompt_length - shared
        last_of_prompt = place - 1 if prompt_length > shared else shared - 1
        for number, sample in enumerate(segment.samples, start=1):
            length = sample.token_ids.size
            tokens.append(sample.token_ids)
            positions.append(np.arange(prompt_length, prompt_length + length))
            predictors.append(np.concatenate([[last_of_prompt], np.arange(place, place + length - 1)]))
            owner.append(np.full(length, number, dtype=np.int64))
            place += length
        owners.append(np.concatenate(owner))
    samples = [sample for segment in segments for sample in segment.samples]
    weights = [token_weights(sample) for sample in samples]
    trained = np.concatenate(weights) > 0  # masked tokens are seen, and left out of everything below
    lengths = np.array([np.count_nonzero(each) for each in weights], dtype=np.int64)
    staleness = [_staleness(sample, segment.train_version) for segment in segments for sample in segment.samples]
    return MicroBatch(
        input_ids_T=_int64(tokens, device),
        position_ids_T=_int64(positions, device),
        layout=_lay_out(owners, shared, device),
        predictors_R=_int64([np.concatenate(predictors)[trained]], device),
        targets_R=_int64([np.concatenate([sample.token_ids for sample in samples])[trained]], device),
        behaviour_logprobs_R=_float32(np.concatenate([sample.logprobs for sample in samples])[trained], device),
        advantages_R=_float32(np.concatenate([token_advantages(sample) for sample in samples])[trained], device),
        weights_R=_float32(np.concatenate(weights)[trained], device),
        staleness_R=_int64([np.concatenate(staleness)[trained]], device),
        sequence_R=_int64([np.repeat(np.arange(lengths.size), lengths)], device),
        lengths_S=_int64([lengths], device),
    )


def _staleness(sample: TrainSample, train_version: int) -> np.ndarray:
    """Versions between each response token and the gradient, int64."""
    ages = np.zeros(sample.token_ids.size, dtype=np.int64)
    for span in sample.spans:
        ages[span.start : span.end] = train_version - span.version
    return ages


def _shared_prefix(prompts: Sequence[Int32s]) -> int:
    """Tokens that all prompts begin with."""
    shared = min(prompt.size for prompt in prompts)
    for prompt in prompts[1:]:
        differs = np.nonzero(prompt[:shared] != prompts[0][:shared])[0]
        shared = int(differs[0]) if differs.size else shared
    return shared


def _lay_out(owners: Sequence[np.ndarray], shared: int, device: torch.device | str) -> AttentionLayout:
    """The layout of segments whose tokens belong to the prompt (owner 0) or to response 1, 2, ...

    The first `shared` tokens of every segment are the row's first ones.
    """
    starts = shared + np.cumsum([0, *(owner.size - shared for owner in owners)])
    places = np.empty(starts[-1], dtype=np.int64)
    blocks: list[AttentionBlock] = []
    offset = 0
    for members in _similar([owner.size for owner in owners]):
        longest = max(owners[member].size for member in members)
        rows = np.empty((len(members), longest), dtype=np.int64)
        for line, member in enumerate(members):
            owner, start = owners[member], starts[member]
            own = np.concatenate([np.arange(shared), np.arange(start, start + owner.size - shared)])
            # Padding has weight 0, but 0 times another segment's NaN would be NaN.
            rows[line] = own[0]
            rows[line, : owner.size] = own
            # Every segment computes the same output for the shared tokens; the last one's is taken.
            places[own] = offset + line * longest + np.arange(owner.size)
        offset += rows.size
        mask = _mask([owners[member] for member in members], longest, device)
        blocks.append(AttentionBlock(torch.from_numpy(rows).to(device), mask))
    return AttentionLayout(blocks, torch.from_numpy(places).to(device))


def is_fused(owners: Sequence[np.ndarray], device: torch.device | str) -> bool:
    """Whether torch's fused attention takes a block: its segments hold one response each, so causality says it all.

    On CUDA that is flash attention, faster at any length. On CPUs its backward pass is slow, so plain products are used
    up to MAX_SHARED_TOKENS: their memory grows with the length squared (0.4 GB there for 30 layers of 9 heads).

    Args:
        owners: Of each segment, as in `_lay_out`.
        device: Where attention is computed.
    """
    if any(owner.max() > 1 for owner in owners):
        return False
    return torch.device(device).type == "cuda" or max(owner.size for owner in owners) > MAX_SHARED_TOKENS


def _mask(owners: Sequence[np.ndarray], longest: int, device: torch.device | str) -> Tensor | None:
    """`mask_GLL` of segments with these owners."""
    if is_fused(owners, device):
        return None
    mask = np.full((len(owners), longest, longest), -np.inf, dtype=np.float32)
    for line, owner in enumerate(owners):
        visible = (owner[None, :] == 0) | (owner[None, :] == owner[:, None])
        mask[line, : owner.size, : owner.size][np.tril(visible)] = 0.0
        mask[line, owner.size :, 0] = 0.0  # a row that sees nothing would be NaN
    return torch.from_numpy(mask).to(device)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in runs whose padding stays under MAX_PADDING."""
    runs: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        real += lengths[index]
        if not runs or (len(runs[-1]) + 1) * lengths[runs[-1][0]] > MAX_PADDING * real:
            runs.append([])
            real = lengths[index]
        runs[-1].append(index)
    return runs


def _int64(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _float32(values: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
