"""Lay the samples of groups out as one row of tokens, without padding and with shared beginnings computed once.

A segment is a prompt followed by responses of its group: all of them, unless a micro-batch's token limit splits the
group; each part then has the prompt once more. A response sees its prompt and itself only, and its positions go on
where the prompt ends. What all prompts of a row begin with (a chat template's head) stands in the row once and belongs
to every segment. Hidden states and gradients are those of separate prompt-and-response sequences
(tests/unit/test_packing.py). With 16 arithmetic prompts of 45 tokens and 4 responses of 15 each this computes about a
third of the tokens.

Invariants: every response token that is trained is predicted exactly once (by the token before it, for the first one
the prompt's last token); prompt tokens and masked ones are never predicted; samples that train no token are left out,
groups without samples as well.

Shapes: T packed tokens, R trained response tokens, S responses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.wire import Int32s, TrainGroup, TrainSample
from learner.attention_layout import AttentionLayout, Stretch, lay_out, segment_stretches
from learner.token_values import is_trained, token_advantages, token_weights


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

    @property
    def num_scores(self) -> int:
        """Queries times keys of its attention."""
        prompt = self.prompt_token_ids.size
        lengths = [sample.token_ids.size for sample in self.samples]
        if len(lengths) == 1:
            return (prompt + lengths[0]) ** 2
        return prompt**2 + sum(length * (prompt + length) for length in lengths)


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


def split_groups(
    groups: Iterable[TrainGroup], max_tokens: int | None = None, *, share_prefixes: bool = True
) -> list[Segment]:
    """Segments of `groups`, each of at most `max_tokens` unless a single response needs more.

    Args:
        groups: What is trained on; a group with samples has a prompt.
        max_tokens: Longest segment of several responses; None = no limit.
        share_prefixes: False gives every response a segment of its own.
    """
    segments: list[Segment] = []
    for group in groups:
        segment = Segment(group.prompt_token_ids, [], group.train_version, group.group_id)
        for sample in group.samples:
            if not is_trained(sample):
                continue
            is_full = max_tokens is not None and segment.num_tokens + sample.token_ids.size > max_tokens
            if segment.samples and (is_full or not share_prefixes):
                segments.append(segment)
                segment = Segment(group.prompt_token_ids, [], group.train_version, group.group_id)
            segment.samples.append(sample)
        if segment.samples:
            segments.append(segment)
    return segments


def fill_micro_batches(segments: Iterable[Segment], max_tokens: int) -> list[list[Segment]]:
    """Split `segments` into lists of at most `max_tokens` tokens (a longer segment stands alone).

    Longest first, each into the first list with room: at most 11/9 of the fewest possible lists, and one (Johnson et
    al., SIAM J. Comput. 3, 1974).
    """
    batches: list[list[Segment]] = []
    rooms: list[int] = []
    for segment in sorted(segments, key=lambda segment: -segment.num_tokens):
        place = next((place for place, room in enumerate(rooms) if segment.num_tokens <= room), len(batches))
        if place == len(batches):
            batches.append([])
            rooms.append(max_tokens)
        batches[place].append(segment)
        rooms[place] -= segment.num_tokens
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
    stretches: list[Stretch] = []
    place = shared
    for segment in segments:
        prompt_length = segment.prompt_token_ids.size
        tokens.append(segment.prompt_token_ids[shared:])
        positions.append(np.arange(shared, prompt_length))
        prompt = np.concatenate([np.arange(shared), np.arange(place, place + prompt_length - shared)])
        place += prompt_length - shared
        responses: list[np.ndarray] = []
        for sample in segment.samples:
            length = sample.token_ids.size
            tokens.append(sample.token_ids)
            positions.append(np.arange(prompt_length, prompt_length + length))
            responses.append(np.arange(place, place + length))
            predictors.append(np.concatenate([prompt[-1:], responses[-1][:-1]]))
            place += length
        stretches += segment_stretches(prompt, responses)
    samples = [sample for segment in segments for sample in segment.samples]
    weights = [token_weights(sample) for sample in samples]
    trained = np.concatenate(weights) > 0  # masked tokens are seen, and left out of everything below
    lengths = np.array([np.count_nonzero(each) for each in weights], dtype=np.int64)
    staleness = [_staleness(sample, segment.train_version) for segment in segments for sample in segment.samples]
    return MicroBatch(
        input_ids_T=_int64(tokens, device),
        position_ids_T=_int64(positions, device),
        layout=lay_out(stretches, place, device),
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


def _int64(parts: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _float32(values: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
