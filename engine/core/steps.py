"""When the step whose places are being taken has cost its tokens, and which of its places then stay vacant.

A step has B places; sealed groups take them in order. Its tokens are those generated since the step before was full.
When they reach the budget, the step gets no more groups: the places that are left are taken by groups without samples.
Invariants: a step is cut short only if it holds a group with samples, so one that has none waits for the first, however
small the budget; the decision depends on the order of events alone. Called by the dispatcher, once for the places that
are taken when groups are sealed, and once for those that are taken when they are shipped.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StepFill:
    """Tokens and places of one step."""

    groups_per_step: int
    """B."""
    max_tokens: int
    """0 = no limit."""
    tokens: int = 0
    """Generated since the step before was full."""
    _num_since_samples: int = 0
    """Places taken since the last group with samples."""

    def take(self, num_taken: int, *, has_samples: bool) -> None:
        """A group took the next place.

        Args:
            num_taken: Places taken with it, of all steps that are not done.
            has_samples: Whether the group trains anything.
        """
        self._num_since_samples = 0 if has_samples else self._num_since_samples + 1
        if num_taken % self.groups_per_step == 0:
            self.tokens = 0

    def num_vacant(self, num_taken: int) -> int:
        """Places that stay vacant now: all that are left of the step, or none while it goes on.

        Args:
            num_taken: Places taken, of all steps that are not done; groups that were dropped are not among them, so
                that later ones moved up.
        """
        if not self.max_tokens or self.tokens < self.max_tokens or not self.has_samples(num_taken):
            return 0
        return self.groups_per_step - num_taken % self.groups_per_step

    def has_samples(self, num_taken: int) -> bool:
        """Whether a place of the step, of which the last of `num_taken` belong to it, went to a group with samples."""
        return num_taken % self.groups_per_step > self._num_since_samples
