"""What earlier visits of a prompt found: right and wrong samples, faded by visit and by policy version.

Invariants: a prompt that was never visited has an empty past; every counted sample of a visit is recorded once, also
those of visits that gave up; a past only fades, it never grows by itself. Memory grows with the visited prompts only.

With decay λ a visit and decay μ a version: N ← N·λ·μ^(versions since the last record) + n, the same for right ones
(Reinforce-Ada-Est's EMA, arXiv 2510.04996 v3, algorithm 1, has μ = 1).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Past:
    """Faded counts of a prompt's earlier visits."""

    right: float = 0.0
    wrong: float = 0.0
    num_visits: int = 0

    @property
    def total(self) -> float:
        """Faded samples."""
        return self.right + self.wrong


EMPTY = Past()


@dataclass(slots=True)
class History:
    """The past of every visited prompt."""

    visit_decay: float = 1.0
    """λ in [0, 1]."""
    version_decay: float = 1.0
    """μ in [0, 1]."""
    _records: dict[str, tuple[float, float, int, int]] = field(default_factory=dict[str, tuple[float, float, int, int]])
    """prompt -> (right, wrong, visits, version of the last record)."""

    def __len__(self) -> int:
        """Prompts with a past."""
        return len(self._records)

    def past(self, prompt_id: str, version: int) -> Past:
        """What is known of a prompt at a policy version."""
        record = self._records.get(prompt_id)
        if record is None:
            return EMPTY
        right, wrong, visits, recorded = record
        fade = self.version_decay ** max(0, version - recorded)
        return Past(right * fade, wrong * fade, visits)

    def record(self, prompt_id: str, right: int, wrong: int, version: int) -> None:
        """A visit ended with these counted samples."""
        past = self.past(prompt_id, version)
        decay = self.visit_decay
        self._records[prompt_id] = (
            past.right * decay + right,
            past.wrong * decay + wrong,
            past.num_visits + 1,
            version,
        )
