"""Which arm asks for the next sample, and when an arm retires: the scheduler's decisions.

Pure: events in, decisions out; no clock, task or message. Invariants:
- A free slot goes to the oldest arm that is below its width; when none is, a new arm is wanted. So slots never idle
  because one prompt is slow.
- Nothing is launched that could not be trained within the bound if it were sealed now, nor while more than a step's
  worth of groups and an eighth waits to ship (the learner is the slower side).
- A sealed group goes to the outbox (engine/core/outbox.py), which ships it.
- Prompts are admitted in windows (of one, for most strategies) whose budgets are set together. A parked arm goes on
  before a new prompt is admitted, once `requeue_after` prompts were admitted since it was parked.
- Every counted sample of a visit is recorded in its prompt's past when the visit ends, whatever ended it.
- Every launch ends exactly once: scored, failed, or aborted with its arm's retirement. An arm that drains asks for
  nothing new and retires when nothing that it launched is open any more, so nothing of it is aborted.
The scheduler (engine/scheduler.py) feeds it; the simulator runs it under a virtual clock.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.core.arm import Arm, Ending, Prompt, Reason, Sample
from engine.core.decisions import Launch, Outcome, Retirement
from engine.core.endings import decide, decide_after_drain
from engine.core.errors import RunError
from engine.core.group import has_signal, seal
from engine.core.outbox import Outbox
from engine.core.past import History
from engine.core.policy import Policy
from engine.core.rng import derive
from engine.core.unbiased import Estimates
from engine.core.width import UNKNOWN, Pace, width


def _named(arm: Arm | None, error: RunError) -> RunError:
    """The failure of an arm's strategy, with the arm."""
    return error if arm is None else RunError(f"arm {arm.arm_id}, prompt {arm.prompt.prompt_id}: {error}")


@dataclass(slots=True)
class Dispatcher:
    """Arms, their order, and the groups that wait to ship."""

    policy: Policy
    generation_version: int = 0
    """Version that new samples will start from (the oldest of the live workers)."""
    pace: Pace = field(default_factory=Pace)
    arms: dict[int, Arm] = field(default_factory=dict[int, Arm])
    history: History = field(init=False)
    outbox: Outbox = field(init=False)
    """Groups that wait to ship, and how far the learner is."""
    _window: list[Prompt] = field(default_factory=list[Prompt])
    _parked: deque[tuple[int, Arm]] = field(default_factory=deque[tuple[int, Arm]])
    """(number of arms at which it is due, arm)."""
    _hungry: list[int] = field(default_factory=list[int])
    """Heap of arm numbers that may be below their width (checked again when taken)."""
    _queued: set[int] = field(default_factory=set[int])
    _holders: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Version -> open arms with a counted sample of it."""
    _estimates: Estimates = field(default_factory=Estimates)
    _num_arms: int = 0
    _seen_cutoff: int = 0

    def __post_init__(self) -> None:
        """Nothing is known of any prompt."""
        self.outbox = Outbox(self.policy.bound, self.policy.rule.whiten, self.policy.max_tokens_per_step)
        self.history = History(self.policy.visit_decay, self.policy.version_decay)

    def begin_at(self, version: int, first_group: int, first_arm: int) -> None:
        """Go on from a checkpoint; before the first prompt is admitted.

        Args:
            version: Policy version of the learner and of the workers.
            first_group: Number of the next group.
            first_arm: Number of the next arm.
        """
        self.generation_version, self._num_arms = version, first_arm
        self.outbox.begin_at(version, first_group)

    @property
    def num_arms(self) -> int:
        """Arms numbered so far, those before a resume included."""
        return self._num_arms

    def open_turns(self) -> Iterator[int]:
        """Turns of prompts that wait for their window, of open arms, and of groups that wait to ship."""
        for prompt in self._window:
            yield prompt.turn
        for arm in self.arms.values():
            yield arm.prompt.turn
        for group in self.outbox.ready:
            yield group.arm.prompt.turn

    @property
    def cutoff(self) -> int:
        """Oldest version that a group sealed now may contain."""
        return self.outbox.cutoff

    @property
    def may_launch(self) -> bool:
        """Whether a sample launched now can be trained, and the learner keeps up."""
        return self.generation_version >= self.cutoff and self.outbox.has_room

    @property
    def has_work(self) -> bool:
        """Whether an arm is open or a prompt waits for its window."""
        return bool(self.arms or self._window)

    def admit(self, prompt: Prompt) -> None:
        """Take in a prompt; its arm opens when its window is full."""
        self._window.append(prompt)
        if len(self._window) >= self.policy.strategy_at(self.outbox.learner_version).window:
            self.close_window()

    def close_window(self) -> bool:
        """Open the arms of the prompts that wait (the last window may be short); False when none waits."""
        prompts, self._window = self._window, []
        if not prompts:
            return False
        strategy = self.policy.strategy_at(self.outbox.learner_version)
        pasts = [self.history.past(prompt.prompt_id, self.generation_version) for prompt in prompts]
        for prompt, past, budget in zip(prompts, pasts, strategy.budgets(pasts), strict=True):
            if budget > 0:
                seed = derive(self.policy.seed, self._num_arms)
                arm = Arm(self._num_arms, prompt, seed, strategy, budget, self.policy.accounting, past)
                arm.first_index = int(self.policy.rule.needs_greedy)
                arm.token_budget = self.policy.max_tokens_per_visit
                self.arms[arm.arm_id] = arm
                self._queue(arm)
            self._num_arms += 1
        return True

    def resume(self, *, is_last: bool) -> bool:
        """Let the arm that is parked longest go on; False when none is due (`is_last`: no new prompt will come)."""
        while self._parked and (is_last or self._parked[0][0] <= self._num_arms):
            _, arm = self._parked.popleft()
            if arm.arm_id in self.arms:
                arm.is_parked = False
                self._queue(arm)
                return True
        return False

    def next_launch(self) -> Launch | None:
        """The next request of an admitted arm, or None: paused, or every arm has its width in flight."""
        cutoff, has_room = self.outbox.cutoff, self.outbox.has_room
        if self.generation_version < cutoff or not has_room:
            return None
        if cutoff != self._seen_cutoff:
            self._notice_cutoff(cutoff)
        hungry = self._hungry
        while hungry:
            arm = self.arms.get(hungry[0])
            try:
                lacking = 0 if arm is None else self._lacking(arm, cutoff)
            except RunError as exc:
                raise _named(arm, exc) from exc
            if lacking <= 1:  # nothing is left to ask for after this one
                self._queued.discard(heapq.heappop(hungry))
            if arm is not None and lacking > 0:
                index, retry = arm.launch()
                return Launch(arm, index, retry)
        return None

    def is_open(self, arm_id: int, index: int, retry: int) -> bool:
        """Whether this try of this launch is still awaited."""
        arm = self.arms.get(arm_id)
        return arm is not None and arm.in_flight.get(index, -1) == retry

    def score(self, arm_id: int, sample: Sample) -> Retirement | None:
        """A launch was scored; returns the retirement it caused.

        Raises:
            RunError: the strategy failed; the text names the arm and its prompt.
        """
        arm = self.arms[arm_id]
        arm.score(sample)
        try:
            return self._count(arm, self.outbox.cutoff)
        except RunError as exc:
            raise _named(arm, exc) from exc

    def _count(self, arm: Arm, cutoff: int) -> Retirement | None:
        """Count what is next in launch order, and decide after each sample; while the arm drains, after the last."""
        futility = self.policy.futility
        while (taken := arm.take_next()) is not None:
            if taken.min_version not in arm.versions:
                self._note_version(arm, taken.min_version)
            if arm.ending is not None:
                continue
            decision = decide(arm, arm.counts(cutoff), futility)
            if decision != "continue" and (retirement := self._conclude(arm, decision)) is not None:
                return retirement
        if arm.ending is not None:
            if arm.has_open_launches:
                return None
            decision = decide_after_drain(arm, arm.counts(cutoff), futility)
            arm.ending = None
            if decision != "continue" and (retirement := self._conclude(arm, decision)) is not None:
                return retirement
        self._queue(arm)
        return None

    def _conclude(self, arm: Arm, decision: Ending | Literal["again"]) -> Retirement | None:
        """Park an arm, let it drain, or end it."""
        if decision == "again":
            self._park(arm)
            return None
        if self.policy.at_exit == "drain" and arm.has_open_launches:
            arm.drain(decision)
            return None
        if decision == "exhausted" and self._is_given_again(arm):
            self._park(arm)
            return None
        return self._retire(arm, "futile", "deferred") if decision == "hopeless" else self._retire(arm, decision)

    def fail(self, arm_id: int, index: int) -> Retirement | None:
        """A launch failed: it is asked for again, or its prompt is quarantined after `max_failures`."""
        arm = self.arms[arm_id]
        if arm.fail(index) >= self.policy.max_failures:
            return self._retire(arm, "failed")
        self._queue(arm)
        return None

    def _lacking(self, arm: Arm, cutoff: int) -> int:
        """Requests by which an arm is below its width."""
        if arm.num_failed_launches:
            return arm.num_failed_launches + 1  # and perhaps more: it is looked at again
        if arm.is_parked or arm.ending is not None:
            return 0
        num_pending = arm.num_pending
        if arm.num_launched < arm.first_index:
            num_pending -= 1  # the greedy response comes on top
        if self.policy.fixed_width:
            # Waiting samples hold no slot: a fixed width counts requests, as an engine without launch order would.
            room = arm.budget - len(arm.counted) - num_pending
            return min(room, self.policy.fixed_width - len(arm.in_flight))
        pace = self.pace if self.policy.raise_by_deadline else UNKNOWN
        if arm.width < 0 or arm.width_at != cutoff or arm.width_for is not pace:
            arm.width, arm.width_at, arm.width_for = width(arm, cutoff, pace, self.policy.futility), cutoff, pace
        return arm.width - num_pending

    def _queue(self, arm: Arm) -> None:
        """An arm may be below its width."""
        arm_id = arm.arm_id
        if arm_id not in self._queued:
            self._queued.add(arm_id)
            heapq.heappush(self._hungry, arm_id)

    def _note_version(self, arm: Arm, version: int) -> None:
        """An arm has its first counted sample of this version."""
        arm.versions.add(version)
        self._holders.setdefault(version, set()).add(arm.arm_id)

    def _notice_cutoff(self, cutoff: int) -> None:
        """Samples expired or will soon: arms that had enough in flight may need more.

        Only arms with a counted sample that expired since, or (where that raises widths) that expires with the next
        version, can have changed: each (arm, version) is looked at a constant number of times.
        """
        end = cutoff + 2 if self.policy.raise_by_deadline and self.pace.is_known else cutoff
        for version in self._holders:
            if self._seen_cutoff <= version < end:
                for arm_id in self._holders[version]:
                    self._queue(self.arms[arm_id])
        self._seen_cutoff = cutoff

    def _is_given_again(self, arm: Arm) -> bool:
        """Whether an arm without signal gets its budget once more."""
        policy = self.policy
        if policy.unresolved != "requeue" or arm.num_requeues >= policy.max_requeues:
            return False
        if has_signal(arm, self.policy.rule):
            return False
        arm.give_budget_again()
        return True

    def _park(self, arm: Arm) -> None:
        if not arm.is_parked:
            arm.is_parked = True
            self._parked.append((self._num_arms + self.policy.requeue_after, arm))

    def _retire(self, arm: Arm, reason: Reason, futile: Outcome = "declined") -> Retirement:
        """End an arm; `futile` is what a futile one is called."""
        cutoff = self.cutoff
        arm.retired = reason
        del self.arms[arm.arm_id]
        for version in arm.versions:
            holders = self._holders[version]
            holders.discard(arm.arm_id)
            if not holders:
                del self._holders[version]
        counts = arm.counts(cutoff)
        self.history.record(arm.prompt.prompt_id, counts.right, counts.wrong, self.generation_version)
        expired = (counts.right - counts.fresh_right, counts.wrong - counts.fresh_wrong)
        if reason == "failed":
            return Retirement(arm, reason, "dropped_failed", None, *expired)
        if reason == "futile":
            return Retirement(arm, reason, futile, None, *expired)
        estimate = self._estimates.of(arm) if self.policy.rule.baseline == "unbiased" else 0.0
        group = seal(self.outbox.next_id, arm, cutoff, self.policy.rule, self.policy.unresolved, estimate)
        if group is None:
            return Retirement(arm, reason, self._without_group(arm), None, *expired)
        self.outbox.place(group, arm.strategy)
        return Retirement(arm, reason, "sealed", group, *expired)

    def _without_group(self, arm: Arm) -> Outcome:
        if has_signal(arm, self.policy.rule):
            return "dropped_expired"
        return "deferred" if self.policy.unresolved == "defer" else "zero_signal"
