"""What a training backend offers: gradients, optimizer steps, weights by name. One implementation a library.

Invariants: gradients are unnormalised sums until `optimizer_step` divides them by the step's normaliser; weights change
only there, and all at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.wire import Fingerprint, Float32s, Int32s, TrainGroup
from learner.gradient import Gradient, SampleKey


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an optimizer step did."""

    grad_norm: float
    """Global norm of the divided gradient, before clipping."""
    lr: float
    is_skipped: bool
    """The gradient was not finite: the weights are as they were."""


class Backend(Protocol):
    """One model and its optimizer."""

    @property
    def vocabulary_size(self) -> int:
        """V: token ids are below it."""
        ...

    def accumulate(
        self, groups: Sequence[TrainGroup], proximal: Mapping[SampleKey, Float32s] | None = None
    ) -> Gradient:
        """Add the gradient of `groups`.

        Args:
            groups: Some of the step's, each past `check_group`; any may be without samples or tokens.
            proximal: Logprobs of the proximal policy, nats; None = those of the policy as it is.
        """
        ...

    def response_logprobs(self, groups: Sequence[TrainGroup]) -> dict[SampleKey, Float32s]:
        """Logprobs of every response token under the policy as it is, at the sampling temperature, nats."""
        ...

    def optimizer_step(self, normaliser: float) -> StepReport:
        """Divide the gradient by `normaliser`, clip it, step, and clear it.

        A gradient that is not finite is cleared and changes nothing: no weight, no moment, no warm-up.

        Args:
            normaliser: The step's `TokenSums.normaliser`, above 0 (response tokens, under the default aggregation).
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter under its HF name as it is now; a tied head too, as the same tensor."""
        ...

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        ...

    def fingerprint(self) -> Fingerprint:
        """What must be the same before `load_states` makes sense."""
        ...

    def save_states(self, folder: Path) -> None:
        """Write each rank's training state into `folder`: master weights, optimizer, random numbers."""
        ...

    def load_states(self, folder: Path) -> None:
        """Take over what `save_states` wrote, weights included; the fingerprints were found equal.

        Raises:
            DataError: it does not fit.
        """
        ...

    def save_model(self, folder: Path) -> None:
        """Write weights, configuration and generation configuration in HF format."""
        ...
