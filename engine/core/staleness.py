"""Freshness of samples and the hard bound η on staleness.

A sample's age is that of its oldest token. A group sealed now waits behind `num_ahead` groups and will be trained by
the step that starts from version `trained_at = learner_version + num_ahead // B`: groups are trained in the order they
are sealed, B a step, so the estimate can only be too late (a dropped group ahead moves it to an earlier step), never
too early. A sample is fresh while trained_at - min_version <= η, that is min_version >= `oldest_fresh`.
Hence a group sealed fresh and never delayed is within the bound at the gradient; the learner checks it again there.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """η (`staleness.max`) and B (`learner.groups_per_step`)."""

    max_staleness: int
    groups_per_step: int

    @property
    def max_waiting(self) -> int:
        """Groups that may wait to be shipped before launching pauses.

        One step's worth is next; an eighth more lets bursts pass (simulated, 64 slots, B = 16, η = 4: slots busy 0.993
        -> 0.996). Half a step more gives 0.9999, but behind a slow learner it makes groups 0.3 versions older.
        """
        return self.groups_per_step + self.groups_per_step // 8

    def trained_at(self, learner_version: int, num_ahead: int) -> int:
        """Learner version at whose gradient a group with `num_ahead` groups before it is used."""
        return learner_version + num_ahead // self.groups_per_step

    def oldest_fresh(self, learner_version: int, num_ahead: int) -> int:
        """Smallest token version that such a group may contain."""
        return self.trained_at(learner_version, num_ahead) - self.max_staleness
