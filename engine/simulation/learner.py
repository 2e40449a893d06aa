"""The simulated learner: takes groups oldest first, steps when it has B, and publishes its weights a little later.

Invariants: a step starts with exactly B groups and lasts `step_s`; no group is taken while a step is under way; new
samples start from a version `update_s` after its step has ended, and the learner does not wait for that. Groups that
would break the bound when they are taken are dropped, as in the real engine; a taken group over it is an error.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.dispatcher import Dispatcher
from engine.core.errors import StalenessError
from engine.core.group import Group


@dataclass(slots=True)
class Learner:
    """State of the learner; instants are virtual seconds."""

    dispatcher: Dispatcher
    step_s: float
    update_s: float
    on_taken: Callable[[Group, int], None]
    """Called with each group and the version at whose gradient it is used."""
    on_dropped: Callable[[Group], None]
    on_published: Callable[[float], None]
    """Called with the instant from which new samples have the newest weights."""
    next_at: float = math.inf
    """Instant of the next end of a step or publication."""
    is_stepping: bool = False
    busy_s: float = 0.0
    started_at: float = math.inf
    """Start of the first step."""
    _step_ends_at: float = math.inf
    _num_taken: int = 0
    _publications: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """(instant, version) of weights under way."""

    def take(self, now: float) -> None:
        """Take waiting groups; start a step with the B-th."""
        dispatcher, batch = self.dispatcher, self.dispatcher.policy.bound.groups_per_step
        while not self.is_stepping:
            found = dispatcher.outbox.next_group()
            if found is None:
                return
            if isinstance(found, Group):
                self.on_dropped(found)
                continue
            group, trained_at = found
            self._check(group, trained_at)
            self.on_taken(group, trained_at)
            self._num_taken += 1
            if self._num_taken == batch:
                self._start(now)

    def advance(self, now: float) -> None:
        """Do what is due at `now` = `next_at`."""
        if self._step_ends_at <= now:
            self._step_ends_at, self.is_stepping = math.inf, False
            version = self.dispatcher.outbox.learner_version + 1
            self.dispatcher.outbox.step_done(version, self._num_taken)
            self._num_taken = 0
            self._publications.append((now + self.update_s, version))
        while self._publications and self._publications[0][0] <= now:
            _, self.dispatcher.generation_version = self._publications.popleft()
            self.on_published(now)
        self._plan()

    def idle_ratio(self, now: float) -> float | None:
        """Share of the time since its first step in which it waited for groups; None before the first."""
        if self.started_at >= now:
            return None
        running_s = self.busy_s - max(0.0, self._step_ends_at - now if self.is_stepping else 0.0)
        return max(0.0, 1.0 - running_s / (now - self.started_at))

    def _start(self, now: float) -> None:
        self.is_stepping = True
        self.started_at = min(self.started_at, now)
        self._step_ends_at = now + self.step_s
        self.busy_s += self.step_s
        self._plan()

    def _plan(self) -> None:
        published_at = self._publications[0][0] if self._publications else math.inf
        self.next_at = min(self._step_ends_at, published_at)

    def _check(self, group: Group, trained_at: int) -> None:
        bound = self.dispatcher.policy.bound.max_staleness
        if trained_at != self.dispatcher.outbox.learner_version or trained_at - group.min_version > bound:
            raise StalenessError(
                f"group {group.group_id} was taken for version {trained_at} with tokens of version {group.min_version};"
                f" the learner is at {self.dispatcher.outbox.learner_version}, staleness.max is {bound}"
            )
