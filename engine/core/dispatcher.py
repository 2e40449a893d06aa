"""Which arm asks for the next sample, when an arm retires, and which group ships next: the scheduler's decisions.

Pure: events in, decisions out; no clock, task or message. Invariants:
- A free slot goes to the oldest arm that is below its width; when none is, a new arm is wanted. So slots never idle
  because one prompt is slow.
- Nothing is launched that could not be trained within the bound if it were sealed now, nor while more than one step's
  worth of groups waits to ship (the learner is the slower side).
- Groups ship oldest first; each is checked against the bound when sealed and when shipped.
- Every launch ends exactly once: scored, failed, or aborted with its arm's retirement.
The scheduler (engine/scheduler.py) feeds it; the simulator runs it under a virtual clock.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from engine.core.arm import Accounting, Arm, Prompt, Reason, Sample
from engine.core.group import Group, has_spread, refresh, seal
from engine.core.rng import derive
from engine.core.staleness import Bound
from engine.core.strategy import Strategy
from engine.core.width import Pace, width

Outcome = Literal["sealed", "zero_signal", "dropped_expired", "dropped_failed"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Fixed choices of a run."""

    strategy: Strategy
    bound: Bound
    seed: int = 0
    accounting: Accounting = "launch"
    fixed_width: int = 0
    """Requests in flight an arm; 0 = by need."""
    raise_by_deadline: bool = True
    max_failures: int = 3
    """Failures of one launch before its prompt is quarantined."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Ask for this sample now."""

    arm: Arm
    index: int
    retry: int
    seed: int


@dataclass(frozen=True, slots=True)
class Retirement:
    """An arm ended."""

    arm: Arm
    reason: Reason
    outcome: Outcome
    group: Group | None
    expired_right: int
    """Right samples that counted but were too old to be kept."""
    expired_wrong: int


@dataclass(slots=True)
class Dispatcher:
    """Arms, their order, and the groups that wait to ship."""

    policy: Policy
    learner_version: int = 0
    generation_version: int = 0
    """Version that new samples will start from (the oldest of the live workers)."""
    num_shipped: int = 0
    """Groups shipped and not trained yet."""
    pace: Pace = field(default_factory=Pace)
    arms: dict[int, Arm] = field(default_factory=dict[int, Arm])
    ready: deque[Group] = field(default_factory=deque[Group])
    _hungry: list[int] = field(default_factory=list[int])
    """Heap of arm numbers that may be below their width (checked again when taken)."""
    _queued: set[int] = field(default_factory=set[int])
    _num_arms: int = 0
    _num_groups: int = 0
    _seen_cutoff: int = 0

    @property
    def cutoff(self) -> int:
        """Oldest version that a group sealed now may contain."""
        return self.policy.bound.oldest_fresh(self.learner_version, self.num_shipped + len(self.ready))

    @property
    def may_launch(self) -> bool:
        """Whether a sample launched now can be trained, and the learner keeps up."""
        return self.generation_version >= self.cutoff and len(self.ready) <= self.policy.bound.groups_per_step

    def admit(self, prompt: Prompt) -> Arm:
        """Open an arm for one visit of `prompt`."""
        arm = Arm(self._num_arms, prompt, derive(self.policy.seed, self._num_arms), self.policy.accounting)
        self._num_arms += 1
        self.arms[arm.arm_id] = arm
        self._queue(arm)
        return arm

    def next_launch(self) -> Launch | None:
        """The next request of an admitted arm, or None: paused, or every arm has its width in flight."""
        if not self.may_launch:
            return None
        self._notice_cutoff()
        while self._hungry:
            arm = self.arms.get(self._hungry[0])
            if arm is not None and self._lacks(arm):
                index, retry = arm.launch()
                return Launch(arm, index, retry, derive(arm.seed, index))
            self._queued.discard(heapq.heappop(self._hungry))
        return None

    def is_open(self, arm_id: int, index: int, retry: int) -> bool:
        """Whether this try of this launch is still awaited."""
        arm = self.arms.get(arm_id)
        return arm is not None and arm.in_flight.get(index, -1) == retry

    def score(self, arm_id: int, sample: Sample) -> Retirement | None:
        """A launch was scored; returns the retirement it caused."""
        arm = self.arms[arm_id]
        arm.score(sample)
        while arm.take_next() is not None:
            verdict = self.policy.strategy.verdict(arm.counts(self.cutoff))
            if verdict != "continue":
                return self._retire(arm, verdict)
        self._queue(arm)
        return None

    def fail(self, arm_id: int, index: int) -> Retirement | None:
        """A launch failed: it is asked for again, or its prompt is quarantined after `max_failures`."""
        arm = self.arms[arm_id]
        if arm.fail(index) >= self.policy.max_failures:
            return self._retire(arm, "failed")
        self._queue(arm)
        return None

    def next_group(self) -> tuple[Group, int] | Group | None:
        """The oldest waiting group with the version it will be trained at; a bare group = dropped, over the bound."""
        if not self.ready:
            return None
        group = self.ready.popleft()
        trained_at = self.policy.bound.trained_at(self.learner_version, self.num_shipped)
        if not refresh(group, trained_at - self.policy.bound.max_staleness):
            return group
        self.num_shipped += 1
        return group, trained_at

    def step_done(self, version: int, num_groups: int) -> None:
        """The learner took a step with (or dropped) `num_groups` shipped groups."""
        self.learner_version = version
        self.num_shipped -= num_groups

    def _lacks(self, arm: Arm) -> bool:
        if arm.num_failed_launches:
            return True
        if len(arm.counted) + arm.num_pending >= self.policy.strategy.n_max:
            return False
        if self.policy.fixed_width:
            # Waiting samples hold no slot: a fixed width counts requests, as an engine without launch order would.
            return len(arm.in_flight) < self.policy.fixed_width
        pace = self.pace if self.policy.raise_by_deadline else Pace()
        return arm.num_pending < width(arm, self.policy.strategy, self.cutoff, pace)

    def _queue(self, arm: Arm) -> None:
        if arm.arm_id not in self._queued and self._lacks(arm):
            self._queued.add(arm.arm_id)
            heapq.heappush(self._hungry, arm.arm_id)

    def _notice_cutoff(self) -> None:
        """Samples expired: arms that had enough in flight may need more."""
        if self.cutoff != self._seen_cutoff:
            self._seen_cutoff = self.cutoff
            for arm in self.arms.values():
                self._queue(arm)

    def _retire(self, arm: Arm, reason: Reason) -> Retirement:
        cutoff = self.cutoff
        arm.retired = reason
        del self.arms[arm.arm_id]
        counts = arm.counts(cutoff)
        expired = (counts.right - counts.fresh_right, counts.wrong - counts.fresh_wrong)
        if reason == "failed":
            return Retirement(arm, reason, "dropped_failed", None, *expired)
        group = seal(self._num_groups, arm, self.policy.strategy, cutoff)
        if group is None:
            outcome: Outcome = "dropped_expired" if has_spread(arm) else "zero_signal"
            return Retirement(arm, reason, outcome, None, *expired)
        self._num_groups += 1
        self.ready.append(group)
        return Retirement(arm, reason, "sealed", group, *expired)
