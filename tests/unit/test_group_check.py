"""The first look at a group: what cannot be trained is named with group, prompt, sample and what is allowed."""

import numpy as np
import pytest

from engine.core.errors import RunError
from engine.wire import Span
from learner.group_check import check_group
from tests.support.learner_inputs import VOCABULARY, changed, random_group

BUDGET = 40


def group(prompt=(5, 6, 7), lengths=(4, 2), **changes):
    """Group 12 of prompt "12"; `changes` replace fields of its second sample."""
    made = random_group(np.random.default_rng(0), 12, list(prompt), lengths, version=4)
    if changes:
        made.samples[1] = changed(made.samples[1], **changes)
    return made


def ids(*values):
    return np.array(values, dtype=np.int32)


def floats(*values):
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    "allowed",
    [
        group(),
        group(lengths=()),
        group(prompt=(), lengths=()),
        group(lengths=(0, 0)),
        group(lengths=(1, 1)),
        group(lengths=(BUDGET - 3, 1)),
        group(token_ids=ids(0, VOCABULARY - 1)),
        group(logprobs=floats(0.0, -200.0)),
        group(advantage=0.0),
        group(spans=[Span(2, 0, 1), Span(4, 1, 2)]),
        group(token_advantages=floats(-3.0, 0.0)),
        group(token_weights=floats(0.0, 2.5)),
        group(token_weights=floats(0.0, 0.0)),
    ],
    ids=[
        "plain",
        "no samples",
        "vacant place",
        "no tokens",
        "one token",
        "longest",
        "first and last id",
        "extreme logprobs",
        "zero",
        "two versions",
        "token advantages",
        "one masked",
        "all masked",
    ],
)
def test_what_can_be_trained_passes(allowed):
    check_group(allowed, VOCABULARY, BUDGET)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (group(prompt=()), r"group 12 \(prompt 12\): the prompt must have at least one token, got none"),
        (group(prompt=(5, 97)), r"group 12 \(prompt 12\): prompt: .* \[0, 97\), .*, got 97 at token 1"),
        (
            group(token_ids=ids(3, 97)),
            r"group 12 \(prompt 12\), sample 1: token ids .* \[0, 97\), .* got 97 at token 1",
        ),
        (group(token_ids=ids(-1, 3)), "sample 1: token ids .* got -1 at token 0"),
        (group(logprobs=floats(-1.0)), "sample 1: must have one logprob a token, got 1 for 2"),
        (group(logprobs=floats(-1.0, 0.5)), "sample 1: behaviour logprobs must be finite and <= 0, got 0.5 at token 1"),
        (group(logprobs=floats(np.nan, -1.0)), "sample 1: behaviour logprobs .* got nan at token 0"),
        (group(logprobs=floats(-np.inf, -1.0)), "sample 1: behaviour logprobs .* got -inf at token 0"),
        (group(advantage=float("nan")), "sample 1: the advantage must be finite, got nan"),
        (group(advantage=float("-inf")), "sample 1: the advantage must be finite, got -inf"),
        (group(index=0), r"group 12 \(prompt 12\): every sample must have an index of its own, got 0 twice"),
        (group(spans=[]), r"sample 1: version spans must cover its 2 tokens, they cover \[0, 0\)"),
        (group(spans=[Span(4, 0, 1)]), r"must cover its 2 tokens, they cover \[0, 1\)"),
        (group(spans=[Span(4, 0, 3)]), r"must cover its 2 tokens, they cover \[0, 3\)"),
        (group(spans=[Span(4, 1, 2)]), r"must follow each other without gaps, got \[1, 2\) after \[0, 0\)"),
        (group(spans=[Span(4, -1, 2)]), r"got \[-1, 2\) after \[0, 0\)"),
        (group(spans=[Span(3, 0, 1), Span(4, 0, 2)]), r"got \[0, 2\) after \[0, 1\)"),
        (group(spans=[Span(3, 0, 2), Span(4, 2, 1)]), r"got \[2, 1\) after \[0, 2\)"),
        (group(spans=[Span(3, 0, 0), Span(4, 0, 2)]), r"got \[0, 0\) after \[0, 0\)"),
        (
            group(spans=[Span(4, 0, 1), Span(5, 1, 2)]),
            "sample 1: tokens must be of versions up to that which trains them, 4, got 5 at token 1",
        ),
        (group(lengths=(2, 0), spans=[Span(4, 0, 1)]), r"must cover its 0 tokens, they cover \[0, 1\)"),
        (group(token_advantages=floats(1.0)), "sample 1: must have one token advantage a token or none, got 1 for 2"),
        (group(token_weights=floats(1.0, 1.0, 1.0)), "must have one token weight a token or none, got 3 for 2"),
        (group(token_advantages=floats(1.0, np.inf)), "token advantages must be finite, got inf at token 1"),
        (group(token_advantages=floats(np.nan, 1.0)), "token advantages must be finite, got nan at token 0"),
        (group(token_weights=floats(1.0, -0.5)), "token weights must be finite and >= 0, got -0.5 at token 1"),
        (group(token_weights=floats(np.inf, 1.0)), "token weights must be finite and >= 0, got inf at token 0"),
        (
            group(lengths=(2, BUDGET - 2)),
            r"sample 1: .* at most learner.micro_batch_tokens = 40 tokens, got 41",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(refused, message):
    with pytest.raises(RunError, match=message):
        check_group(refused, VOCABULARY, BUDGET)
