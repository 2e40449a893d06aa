"""A sealed group as the learner gets it.

Token advantages and weights stay empty: responses are single-turn texts, every token of which the policy drew, and an
advantage belongs to the whole response.
"""

from typing import cast

import numpy as np

from engine.core.arm import Arm, Sample
from engine.core.group import Group
from engine.wire import Int32s, Position, SampleDone, TrainGroup, TrainSample

_NO_TOKEN_IDS: Int32s = np.empty(0, dtype=np.int32)


def train_group(group: Group, trained_at: int, max_staleness: int, position: Position | None) -> TrainGroup:
    """The message of a group that is shipped.

    Args:
        group: Its kept samples hold what workers sent.
        trained_at: Learner version at whose gradient it is used.
        max_staleness: The bound, checked again there.
        position: Where a run stands that has trained it, for the last group of a step.
    """
    return TrainGroup(
        group_id=group.group_id,
        prompt_id=group.arm.prompt.prompt_id,
        prompt_token_ids=_NO_TOKEN_IDS if group.is_vacant else token_ids(group.arm),
        samples=[_train_sample(group, sample) for sample in group.kept],
        train_version=trained_at,
        max_staleness=max_staleness,
        turn=group.arm.prompt.turn,
        position=position,
    )


def token_ids(arm: Arm) -> Int32s:
    """Of an arm's prompt, [T]."""
    return cast("Int32s", arm.prompt.token_ids)  # opaque to the core; PromptFeed put it there


def _train_sample(group: Group, sample: Sample) -> TrainSample:
    response = sample.response
    if not isinstance(response, SampleDone):
        raise TypeError(f"a sample's response must be a SampleDone, got {type(response).__name__}")
    return TrainSample(
        index=sample.index,
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        spans=response.spans,
        reward=sample.reward,
        advantage=group.advantage(sample),
    )
