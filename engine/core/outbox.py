"""Sealed groups on their way to the learner: their order, the step of each, and whether it still fits the bound.

Invariants:
- Groups ship oldest first, B a step; each is checked against the bound when it is shipped, and a kept sample that would
  break it is exchanged, else the group is dropped.
- Where advantages are whitened a step's groups ship together: none before all that the step lacks wait and are fresh.
  At most one step's groups wait for that, fewer than back-pressure allows, and their samples grow no older by it: the
  learner's version stays while its step lacks groups.
- A step that has cost its tokens is taken with the groups it has; vacant groups take the places that are left.
- `cutoff` follows from the learner's version and the groups ahead (engine/core/staleness.py).
Pure; owned by the dispatcher.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from engine.core.group import Group, refresh, vacant_group, whiten
from engine.core.staleness import Bound
from engine.core.steps import StepFill
from engine.core.strategy import Strategy


@dataclass(slots=True)
class Outbox:
    """Groups between their arm's end and the learner."""

    bound: Bound
    whitens: bool
    """Whether a step's advantages are whitened together."""
    max_tokens_per_step: int
    """0 = no limit."""
    learner_version: int = 0
    num_shipped: int = 0
    """Groups shipped and not trained yet."""
    ready: deque[Group] = field(default_factory=deque[Group])
    next_id: int = 0
    """Number of the next group."""
    cutoff: int = field(init=False)
    """Oldest version that a group sealed now may contain."""
    _filling: StepFill = field(init=False)
    """The step that sealed groups fill."""
    _shipping: StepFill = field(init=False)
    """The step that shipped groups fill."""
    _max_waiting: int = field(init=False)
    """The bound's, worked out once: it is asked for at every launch."""
    _num_whitened: int = 0
    """Groups in front of `ready` that are whitened: the rest of a step that began to ship."""
    _strategy: Strategy | None = None
    """Of the last sealed group; vacant ones need one."""

    def __post_init__(self) -> None:
        """Nothing waits."""
        self._filling = StepFill(self.bound.groups_per_step, self.max_tokens_per_step)
        self._shipping = StepFill(self.bound.groups_per_step, 0)
        self._max_waiting = self.bound.max_waiting
        self._move_cutoff()

    def begin_at(self, version: int, first_group: int) -> None:
        """Go on from a checkpoint: the learner is at `version`, the next group is number `first_group`."""
        self.learner_version, self.next_id = version, first_group
        self._move_cutoff()

    @property
    def has_room(self) -> bool:
        """Whether the learner keeps up: few enough groups wait."""
        return len(self.ready) <= self._max_waiting

    def place(self, group: Group, strategy: Strategy) -> None:
        """A sealed group takes the next place of a step; `strategy` is its arm's."""
        self._strategy = strategy
        self._take_place(group)
        self._cut_step_short()

    def spend(self, tokens: int) -> None:
        """So many response tokens came back from a worker, whatever becomes of them."""
        if self.max_tokens_per_step:
            self._filling.tokens += tokens
            self._cut_step_short()

    def next_group(self) -> tuple[Group, int] | Group | None:
        """The oldest waiting group with the version it will be trained at; a bare group = dropped, over the bound.

        None when none waits, or when advantages are whitened and the step's groups are not all there.
        """
        self._drop_lone_vacancies()
        if not self.ready:
            return None
        trained_at = self.bound.trained_at(self.learner_version, self.num_shipped)
        oldest_fresh = trained_at - self.bound.max_staleness
        if self.whitens and not self._num_whitened:
            stale = self._whiten_step(oldest_fresh)
            if stale is not None or not self._num_whitened:
                return stale
        group = self.ready.popleft()
        self._num_whitened = max(0, self._num_whitened - 1)
        if not refresh(group, oldest_fresh):
            self._move_cutoff()
            return group
        self.num_shipped += 1
        self._shipping.take(self.num_shipped, has_samples=bool(group.kept))
        return group, trained_at

    def step_done(self, version: int, num_groups: int) -> None:
        """The learner took a step with (or dropped) `num_groups` shipped groups."""
        self.learner_version = version
        self.num_shipped -= num_groups
        self._move_cutoff()

    def _move_cutoff(self) -> None:
        """The learner's version or the number of groups ahead changed."""
        self.cutoff = self.bound.oldest_fresh(self.learner_version, self.num_shipped + len(self.ready))

    def _take_place(self, group: Group) -> None:
        self.next_id += 1
        self.ready.append(group)
        self._move_cutoff()
        self._filling.take(self.num_shipped + len(self.ready), has_samples=bool(group.kept))

    def _cut_step_short(self) -> None:
        """Leave the places vacant that the step being filled has no tokens for."""
        strategy = self._strategy
        if strategy is None:
            return  # nothing was sealed yet: no step holds a group that could be trained
        for _ in range(self._filling.num_vacant(self.num_shipped + len(self.ready))):
            self._take_place(vacant_group(self.next_id, strategy))

    def _drop_lone_vacancies(self) -> None:
        """A vacant group goes only into a step that something trains.

        Where groups were dropped, others moved up: their vacant places would be left without the group they were with.
        """
        while self.ready and self.ready[0].is_vacant and not self._shipping.has_samples(self.num_shipped):
            self.ready.popleft()
            self._move_cutoff()

    def _whiten_step(self, oldest_fresh: int) -> Group | None:
        """Whiten the groups that the next step lacks once they wait; a group that is over the bound is taken out."""
        batch = self.bound.groups_per_step
        lacking = batch - self.num_shipped % batch
        if len(self.ready) < lacking:
            return None
        step = list(islice(self.ready, lacking))
        for place, group in enumerate(step):
            if not refresh(group, oldest_fresh):
                del self.ready[place]
                self._move_cutoff()
                return group
        whiten(step)
        self._num_whitened = lacking
        return None
