"""The first look at a group that came in: whatever would poison or crash a gradient is refused with the group's name.

Invariants: a group without samples and a sample without tokens are allowed (they add nothing); everything else that
reaches `pack` has token ids of this vocabulary, one finite logprob a token, finite advantages and weights, a known
version for every token, and fits the budget. No two samples of a group have one index, so (group id, index) names one.

Called for every group: `check_group` by `learner.update` before it is packed, `check_spans` by the simulated learner.
"""

import numpy as np

from engine.core.errors import RunError
from engine.wire import Float32s, Int32s, TrainGroup, TrainSample

MAX_LOGPROB = 1e-3
"""Nats; a logprob is at most 0, and rounding puts it no further above."""


def check_group(group: TrainGroup, vocabulary_size: int, max_tokens: int) -> None:
    """Refuse what cannot be trained.

    Args:
        group: As it came.
        vocabulary_size: Token ids are below it.
        max_tokens: Prompt and one response together, at most (`learner.micro_batch_tokens`).

    Raises:
        RunError: what is wrong, with group, prompt and sample, and what is allowed.
    """
    where = f"group {group.group_id} (prompt {group.prompt_id})"
    # A vacant place of a step has neither prompt nor samples.
    if group.samples and not group.prompt_token_ids.size:
        raise RunError(f"{where}: the prompt must have at least one token, got none")
    _check_ids(group.prompt_token_ids, vocabulary_size, f"{where}: prompt")
    seen: set[int] = set()
    for sample in group.samples:
        if sample.index in seen:
            raise RunError(f"{where}: every sample must have an index of its own, got {sample.index} twice")
        seen.add(sample.index)
    check_spans(group)
    for sample in group.samples:
        if sample.token_ids.size:
            _check_sample(sample, vocabulary_size, f"{where}, sample {sample.index}")
            tokens = group.prompt_token_ids.size + sample.token_ids.size
            if tokens > max_tokens:
                raise RunError(
                    f"{where}, sample {sample.index}: prompt and response must have at most "
                    f"learner.micro_batch_tokens = {max_tokens} tokens, got {tokens}"
                )


def check_spans(group: TrainGroup) -> None:
    """Refuse a group with tokens of unknown age, or from versions after the one that trains them.

    Raises:
        RunError: the spans of a sample do not cover its tokens one after the other, each token once.
    """
    for sample in group.samples:
        where = f"group {group.group_id} (prompt {group.prompt_id}), sample {sample.index}"
        covered = 0
        for span in sample.spans:
            if span.start != covered or span.end <= span.start:
                raise RunError(
                    f"{where}: version spans must follow each other without gaps, got [{span.start}, {span.end}) "
                    f"after [0, {covered})"
                )
            if span.version > group.train_version:
                raise RunError(
                    f"{where}: tokens must be of versions up to that which trains them, {group.train_version}, "
                    f"got {span.version} at token {span.start}"
                )
            covered = span.end
        if covered != sample.token_ids.size:
            raise RunError(
                f"{where}: version spans must cover its {sample.token_ids.size} tokens, they cover [0, {covered})"
            )


def _check_sample(sample: TrainSample, vocabulary_size: int, where: str) -> None:
    _check_ids(sample.token_ids, vocabulary_size, where)
    if sample.logprobs.size != sample.token_ids.size:
        raise RunError(
            f"{where}: must have one logprob a token, got {sample.logprobs.size} for {sample.token_ids.size}"
        )
    wrong = np.nonzero(~(np.isfinite(sample.logprobs) & (sample.logprobs <= MAX_LOGPROB)))[0]
    if wrong.size:
        got = sample.logprobs[wrong[0]]
        raise RunError(f"{where}: behaviour logprobs must be finite and <= 0, got {got:g} at token {wrong[0]}")
    if not np.isfinite(sample.advantage):
        raise RunError(f"{where}: the advantage must be finite, got {sample.advantage:g}")
    for name, values in (("advantage", sample.token_advantages), ("weight", sample.token_weights)):
        if values.size not in (0, sample.token_ids.size):
            raise RunError(
                f"{where}: must have one token {name} a token or none, got {values.size} for {sample.token_ids.size}"
            )
    _check_values(sample.token_advantages, -np.inf, f"{where}: token advantages must be finite")
    _check_values(sample.token_weights, 0.0, f"{where}: token weights must be finite and >= 0")


def _check_values(values_T: Float32s, lowest: float, rule: str) -> None:
    wrong = np.nonzero(~(np.isfinite(values_T) & (values_T >= lowest)))[0]
    if wrong.size:
        raise RunError(f"{rule}, got {values_T[wrong[0]]:g} at token {wrong[0]}")


def _check_ids(token_ids: Int32s, vocabulary_size: int, where: str) -> None:
    wrong = np.nonzero((token_ids < 0) | (token_ids >= vocabulary_size))[0]
    if wrong.size:
        raise RunError(
            f"{where}: token ids must be in [0, {vocabulary_size}), the learner's vocabulary, got "
            f"{token_ids[wrong[0]]} at token {wrong[0]}"
        )
