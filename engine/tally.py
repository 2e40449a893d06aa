"""Running totals of a run: what the live view, the summary and the ledger read.

Counts only; decides nothing. Times are the event loop's clock, seconds.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.core.ledger import TokenLedger

MEAN_STEPS = 5
"""Steps of the moving mean of first-sample rewards."""


@dataclass(slots=True)
class Tally:
    """Totals since training began."""

    ledger: TokenLedger = field(default_factory=TokenLedger)
    samples_launched: int = 0
    samples_counted: int = 0
    samples_aborted: int = 0
    samples_failed: int = 0
    expired_samples: int = 0
    groups_trained: int = 0
    """Groups of the steps taken, those without an advantage and vacant ones included."""
    groups_useful: int = 0
    """Trained groups with an advantage that is not zero."""
    step_useful_groups: int = 0
    """Useful groups of the last step."""
    groups_zero_signal: int = 0
    groups_dropped: int = 0
    vacant_places: int = 0
    """Places of the steps taken that the token budget of a step left without a group."""
    prompts_quarantined: int = 0
    prompts_passed_over: int = 0
    """Turns of prompts that the selector let pass."""
    prompts_skipped: int = 0
    """Rows whose prompt does not fit the context."""
    steps: int = 0
    resumed_at: int = 0
    """Policy version that the totals begin at."""
    max_staleness: int = 0
    staleness_mean: float = 0.0
    learner_busy_s: float = 0.0
    learner_tokens: int = 0
    """Prompt and response tokens that the learner computed."""
    started_at: float = 0.0
    ended_at: float = 0.0
    step_rewards: list[float] = field(default_factory=list[float])
    """Mean first-sample reward of each step."""
    _first_rewards: list[float] = field(default_factory=list[float])
    _useful_before: int = 0
    _recent_groups: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def first_sample(self, reward: float) -> None:
        """The first launched sample of an arm was scored: an unbiased look at the policy."""
        self._first_rewards.append(reward)

    def step(self, now: float, num_groups: int) -> float | None:
        """A step was taken.

        Args:
            now: The loop's clock, s.
            num_groups: Groups of the step; they are settled already.

        Returns:
            The mean first-sample reward since the last step, None without any.
        """
        self.steps += 1
        self.groups_trained += num_groups
        self.step_useful_groups = self.groups_useful - self._useful_before
        self._useful_before = self.groups_useful
        self._recent_groups.append((now, num_groups))
        while now - self._recent_groups[0][0] > 300.0:
            self._recent_groups.popleft()
        if not self._first_rewards:
            return None
        reward = sum(self._first_rewards) / len(self._first_rewards)
        self._first_rewards.clear()
        self.step_rewards.append(reward)
        return reward

    @property
    def reward_mean(self) -> float | None:
        """Moving mean over the last steps' first-sample rewards."""
        recent = self.step_rewards[-MEAN_STEPS:]
        return sum(recent) / len(recent) if recent else None

    def useful_groups_per_min(self, now: float) -> float:
        """Groups with non-zero advantage that were trained, a minute, since training began."""
        elapsed = (self.ended_at or now) - self.started_at
        return 60.0 * self.groups_useful / elapsed if elapsed > 0 else 0.0
