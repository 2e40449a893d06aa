"""The first look at a group that came in: whatever would poison or crash a gradient is refused with the group's name.

Invariants: a group without samples and a sample without tokens are allowed (they add nothing); everything else that
reaches `pack` has token ids of this vocabulary, one finite logprob a token and a finite advantage, and fits the budget.

Called by `learner.update` for every group, before it is packed.
"""

import numpy as np

from engine.core.errors import RunError
from engine.wire import Int32s, TrainGroup, TrainSample

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
    for sample in group.samples:
        if sample.token_ids.size:
            _check_sample(sample, vocabulary_size, f"{where}, sample {sample.index}")
            tokens = group.prompt_token_ids.size + sample.token_ids.size
            if tokens > max_tokens:
                raise RunError(
                    f"{where}, sample {sample.index}: prompt and response must have at most "
                    f"learner.micro_batch_tokens = {max_tokens} tokens, got {tokens}"
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


def _check_ids(token_ids: Int32s, vocabulary_size: int, where: str) -> None:
    wrong = np.nonzero((token_ids < 0) | (token_ids >= vocabulary_size))[0]
    if wrong.size:
        raise RunError(
            f"{where}: token ids must be in [0, {vocabulary_size}), the learner's vocabulary, got "
            f"{token_ids[wrong[0]]} at token {wrong[0]}"
        )
