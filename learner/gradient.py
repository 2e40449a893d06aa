"""From groups to the loss of one micro-batch: the part of a gradient that is the same in every backend.

Invariants: losses are sums over tokens, so micro-batches add up to the step whatever their sizes; the reference and the
proximal policy are only computed when the loss asks for them; nothing here changes a weight.

Called by the backends: `micro_batches` cuts groups to the token budget, `MicroBatchLoss` turns one cut into a loss.

Shapes: R trained response tokens of a micro-batch, S responses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from configs.root import Config
from configs.training import Learner
from engine.wire import Float32s, TrainGroup
from learner.objectives import TokenBatch, TokenSums, objective_loss, token_batch
from learner.packing import MicroBatch, Segment, fill_micro_batches, pack, split_groups

PolicyCall = Callable[[MicroBatch, float], tuple[Tensor, Tensor]]
"""A `Policy` or what wraps one: batch and temperature to logprobs [R] and entropies [R]."""

SampleKey = tuple[int, int]
"""(group id, launch index) of a sample."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What the forward pass showed of one group."""

    is_finite: bool = True
    """All its logprobs and entropies are, and those logprobs that the reference and the proximal policy give it."""
    own_tokens: int = 0
    """Trained response tokens drawn from the version that trains them (lag 0)."""
    mismatch: float = 0.0
    """Σ |behaviour - learner logprob| over those, nats: 0 but for rounding where engine and learner agree."""

    def __add__(self, other: "GroupReport") -> "GroupReport":
        """Both parts of one group."""
        return GroupReport(
            self.is_finite and other.is_finite, self.own_tokens + other.own_tokens, self.mismatch + other.mismatch
        )


@dataclass(frozen=True, slots=True)
class Gradient:
    """What has been added to a gradient."""

    sums: TokenSums = field(default_factory=TokenSums)
    packed_tokens: int = 0
    """Prompt and response tokens computed."""
    groups: dict[int, GroupReport] = field(default_factory=dict[int, GroupReport])
    """By group id; a group without tokens is not there."""

    def __add__(self, other: "Gradient") -> "Gradient":
        """Both parts of one gradient."""
        groups = dict(self.groups)
        for group_id, report in other.groups.items():
            groups[group_id] = groups.get(group_id, GroupReport()) + report
        return Gradient(self.sums + other.sums, self.packed_tokens + other.packed_tokens, groups)


def micro_batches(groups: Sequence[TrainGroup], learner: Learner) -> list[list[Segment]]:
    """Segments of `groups` in lists of at most `learner.micro_batch_tokens` tokens, longest first."""
    max_tokens = learner.micro_batch_tokens
    segments = split_groups(groups, max_tokens, share_prefixes=learner.share_prefixes)
    return fill_micro_batches(segments, max_tokens)


class MicroBatchLoss:
    """The loss of micro-batches under one configuration."""

    def __init__(self, policy: PolicyCall, reference: PolicyCall | None, config: Config, device: torch.device) -> None:
        """A loss of `policy`, both policies on `device`.

        Args:
            policy: What is trained.
            reference: Frozen; exactly where `loss.kl.weight` is above 0.
            config: Temperature and loss.
            device: Where batches are built.

        Raises:
            ValueError: a reference without a weight, or a weight without a reference.
        """
        if (reference is None) != (config.loss.kl.weight == 0.0):
            raise ValueError(
                f"a reference policy must be there exactly for loss.kl.weight > 0, got {config.loss.kl.weight:g} "
                f"{'without one' if reference is None else 'with one'}"
            )
        self._policy = policy
        self._reference = reference
        self._config = config
        self._device = device

    def __call__(
        self, segments: Sequence[Segment], proximal: Mapping[SampleKey, Float32s] | None = None
    ) -> tuple[Tensor, Gradient]:
        """Forward pass and loss.

        Args:
            segments: One micro-batch.
            proximal: Logprobs of the proximal policy for every sample, nats; None = the policy's own.

        Returns:
            The sum of the token losses, to differentiate, and what to report.
        """
        temperature = self._config.sampling.temperature
        batch = pack(segments, self._device, share_prefixes=self._config.learner.share_prefixes)
        logprobs_R, entropy_R = self._policy(batch, temperature)
        reference_R = None
        if self._reference is not None:
            with torch.no_grad():
                reference_R, _ = self._reference(batch, temperature)
        tokens = token_batch(batch, logprobs_R, entropy_R, reference_R)
        if proximal is not None:
            values = [proximal[key] for key in _sample_keys(segments)]
            tokens = replace(tokens, proximal_R=torch.from_numpy(np.concatenate(values)).to(self._device))
        loss, sums = objective_loss(tokens, self._config.loss)
        return loss, Gradient(sums, batch.num_packed_tokens, _group_reports(segments, tokens))

    def response_logprobs(self, segments: Sequence[Segment]) -> dict[SampleKey, Float32s]:
        """Logprobs of the trained tokens of every response at the sampling temperature, nats, without a gradient."""
        batch = pack(segments, self._device, share_prefixes=self._config.learner.share_prefixes)
        with torch.no_grad():
            logprobs_R, _ = self._policy(batch, self._config.sampling.temperature)
        parts = torch.split(logprobs_R.cpu(), batch.lengths_S.tolist())
        return {key: part.numpy().copy() for key, part in zip(_sample_keys(segments), parts, strict=True)}


def _sample_keys(segments: Sequence[Segment]) -> list[SampleKey]:
    """In packed order."""
    return [(segment.group_id, sample.index) for segment in segments for sample in segment.samples]


@torch.no_grad()
def _group_reports(segments: Sequence[Segment], tokens: TokenBatch) -> dict[int, GroupReport]:
    computed = (tokens.logprobs_R, tokens.entropy_R, tokens.reference_R, tokens.proximal_R)
    finite_R = torch.stack([values_R.isfinite() for values_R in computed if values_R is not None]).all(0)
    own_R = tokens.staleness_R == 0
    difference_R = (tokens.behaviour_logprobs_R - tokens.logprobs_R).abs()
    columns = torch.stack([~finite_R, own_R, torch.where(own_R, difference_R, 0.0)], dim=1).double()
    sums_S3 = columns.new_zeros(tokens.num_sequences, 3).index_add_(0, tokens.sequence_R, columns)
    reports: dict[int, GroupReport] = {}
    for (group_id, _), (wrong, own, mismatch) in zip(_sample_keys(segments), sums_S3.tolist(), strict=True):
        reports[group_id] = reports.get(group_id, GroupReport()) + GroupReport(wrong == 0, int(own), mismatch)
    return reports
