"""Slots, a heap of events and the real dispatcher under a virtual clock: no loop, no sockets, no real time.

Invariants: deterministic, since equal instants are served in the order in which they were planned; a slot is busy from
launch to answer, failure or abort; a request's version is the one that new samples start from when it is launched (its
oldest token's); what an arm has in flight when it retires is aborted at once. Cost of an event: O(log slots), whatever
the number of prompts.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.arm import Arm, Prompt, Sample
from engine.core.decisions import Launch, Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.errors import RunError
from engine.core.group import Group
from engine.core.selectors import Selection
from engine.core.width import Pace
from engine.simulation.learner import Learner

Draw = Callable[[Launch], tuple[bool, int]]
"""Label and response tokens of a launch."""
_Event = tuple[float, int, Launch, int, bool | None, int]
"""(end, order of planning, launch, version, label or None = fails then, response tokens until then)."""
_SMOOTHING = 0.9
"""Weight of the past in the moving mean of the version interval, as in the real scheduler."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast everything is."""

    slots: int = 64
    """Requests under way at once, over all workers."""
    tokens_per_s: float = 1.0
    """Of one slot."""
    latency_s: float = 0.0
    """Of a request besides its tokens."""
    step_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Full:
    """The run until its queue of prompts ended: what comes after only waits for the last answers."""

    seconds: float
    busy_ratio: float
    """Share of the slots' time in use."""
    idle_ratio: float | None
    """Share of the learner's time, from its first step on, in which it waited for groups; None before that."""


class Observer(Protocol):
    """Who keeps the books of a run."""

    @property
    def is_done(self) -> bool:
        """Whether the run may end."""
        ...

    def retired(self, retirement: Retirement) -> None:
        """An arm ended."""
        ...

    def skipped(self, prompt: Prompt) -> None:
        """A prompt was given no samples."""
        ...

    def lost(self, arm: Arm, tokens: int) -> None:
        """A request of an arm was aborted or failed after so many tokens."""
        ...

    def taken(self, group: Group, trained_at: int) -> None:
        """The learner has a group for the gradient at this version."""
        ...

    def dropped(self, group: Group) -> None:
        """A sealed group would have broken the bound."""
        ...


@dataclass(slots=True)
class Driver:
    """One run; `prompts` may be endless, then the observer ends it."""

    dispatcher: Dispatcher
    speed: Speed
    draw: Draw
    prompts: Iterator[Prompt]
    observer: Observer
    fails_after: Callable[[Launch], float | None] | None = None
    """Share of the response after which a try fails; None = it does not."""
    selection: Selection | None = None
    """Is told of every visit that ended."""
    measures_pace: bool = True
    """Tell the dispatcher latency and version interval, so that it may raise widths by deadline."""
    now: float = 0.0
    busy_s: float = 0.0
    """Slot-seconds of requests that ended."""
    num_launched: int = 0
    full: Full | None = None
    """The time with a full queue, once that is over."""
    learner: Learner = field(init=False)
    _free: int = field(init=False)
    _events: list[_Event] = field(default_factory=list[_Event])
    _num_ended: int = 0
    _is_last: bool = False
    _window: list[Prompt] = field(default_factory=list[Prompt])
    _aborted_at: dict[int, float] = field(default_factory=dict[int, float])
    """Arm -> when it retired with requests in flight; their events are still in the heap."""
    _published_at: float = 0.0

    def __post_init__(self) -> None:
        """All slots are free."""
        self._free = self.speed.slots
        self.learner = Learner(
            self.dispatcher,
            self.speed.step_s,
            self.speed.update_s,
            self.observer.taken,
            self.observer.dropped,
            self._on_published,
        )

    def run(self) -> None:
        """Until the observer is done, or prompts and requests are at their end.

        Raises:
            RunError: nothing is under way, nothing may start, and prompts are left.
        """
        events, learner, observer = self._events, self.learner, self.observer
        ready = self.dispatcher.outbox.ready
        self._fill()
        while not observer.is_done:
            if events and events[0][0] < learner.next_at:
                self._end(heapq.heappop(events))
            elif learner.next_at < math.inf:
                self.now = learner.next_at
                learner.advance(self.now)
            else:
                break
            if ready and not learner.is_stepping:
                learner.take(self.now)
            if self._free:
                self._fill()
        if not observer.is_done and self._is_stuck:
            raise RunError(
                f"the simulation stands still at {self.now:g} s: nothing is under way and nothing may start"
                f" ({len(self.dispatcher.arms)} arms open, {len(ready)} groups waiting)"
            )
        self._close()

    @property
    def _is_stuck(self) -> bool:
        return not self._is_last or bool(self.dispatcher.arms)

    def _fill(self) -> None:
        """Give every free slot a request."""
        next_launch, draw, speed = self.dispatcher.next_launch, self.draw, self.speed
        while self._free > 0:
            launch = next_launch()
            if launch is None:
                # Prompts that are given no samples fill no slot: without this an endless queue of them has no end.
                if self.observer.is_done or not self._open_arm():
                    return
                continue
            label, tokens = draw(launch)
            if self.fails_after is not None:
                share = self.fails_after(launch)
                if share is not None:
                    label, tokens = None, int(share * tokens)
            self._free -= 1
            self.num_launched += 1
            ends_at = self.now + speed.latency_s + tokens / speed.tokens_per_s
            event = (ends_at, self.num_launched, launch, self.dispatcher.generation_version, label, tokens)
            heapq.heappush(self._events, event)

    def _open_arm(self) -> bool:
        """Let another arm ask for samples: one that was parked, else that of a new prompt."""
        dispatcher = self.dispatcher
        if not dispatcher.may_launch:
            return False
        if dispatcher.resume(is_last=self._is_last):
            return True
        prompt = None if self._is_last else next(self.prompts, None)
        num_arms = len(dispatcher.arms)
        if prompt is None:
            self._end_queue()
            if dispatcher.close_window():
                self._note_skipped(len(dispatcher.arms) - num_arms)
                return True
            return dispatcher.resume(is_last=True)
        window = dispatcher.policy.strategy_at(dispatcher.outbox.learner_version).window
        self._window.append(prompt)
        dispatcher.admit(prompt)
        if len(self._window) >= window:
            self._note_skipped(len(dispatcher.arms) - num_arms)
        return True

    def _end_queue(self) -> None:
        """No new prompt will come."""
        if not self._is_last:
            self._is_last = True
            self._measure_full()

    def _measure_full(self) -> None:
        busy_s = self.busy_s
        for ends_at, _, launch, _, _, tokens in self._events:
            until = self.now if launch.arm.retired is None else self._aborted_at[launch.arm.arm_id]
            busy_s += until - (ends_at - self._duration(tokens))
        ratio = busy_s / (self.speed.slots * self.now) if self.now else 0.0
        self.full = Full(self.now, ratio, self.learner.idle_ratio(self.now))

    def _duration(self, tokens: int) -> float:
        """Seconds of a request."""
        return self.speed.latency_s + tokens / self.speed.tokens_per_s

    def _note_skipped(self, num_opened: int) -> None:
        """A window closed: tell which of its prompts got no arm."""
        window, self._window = self._window, []
        if num_opened == len(window):
            return
        arms = reversed(self.dispatcher.arms.values())
        opened = {arm.prompt.prompt_id for arm, _ in zip(arms, range(num_opened), strict=False)}
        for prompt in window:
            if prompt.prompt_id not in opened:
                self.observer.skipped(prompt)

    def _end(self, event: _Event) -> None:
        """A request ended."""
        ends_at, _, launch, version, label, tokens = event
        arm = launch.arm
        if arm.retired is not None:
            self._settle(event)
            return
        self.now = ends_at
        self._free += 1
        self._num_ended += 1
        self.busy_s += self._duration(tokens)
        self.dispatcher.outbox.spend(tokens)
        if label is None:
            self.observer.lost(arm, tokens)
            retirement = self.dispatcher.fail(arm.arm_id, launch.index)
        else:
            sample = Sample(launch.index, 1.0 if label else 0.0, label, version, tokens, None)
            retirement = self.dispatcher.score(arm.arm_id, sample)
        if retirement is not None:
            self._retired(retirement)

    def _retired(self, retirement: Retirement) -> None:
        arm = retirement.arm
        if arm.in_flight:
            self._free += len(arm.in_flight)
            self._aborted_at[arm.arm_id] = self.now
        if self.selection is not None and retirement.outcome != "dropped_failed":
            right, version = arm.num_right, self.dispatcher.outbox.learner_version
            self.selection.observe(arm.prompt.prompt_id, right, len(arm.counted) - right, version)
        self.observer.retired(retirement)

    def _settle(self, event: _Event) -> None:
        """The books of a request that was aborted before this, its planned end."""
        ends_at, _, launch, _, _, tokens = event
        arm, speed = launch.arm, self.speed
        aborted_at = self._aborted_at[arm.arm_id]
        del arm.in_flight[launch.index]
        if not arm.in_flight:
            del self._aborted_at[arm.arm_id]
        elapsed_s = aborted_at - (ends_at - self._duration(tokens))
        self.busy_s += elapsed_s
        done = min(tokens, max(0, int((elapsed_s - speed.latency_s) * speed.tokens_per_s)))
        self.dispatcher.outbox.spend(done)
        self.observer.lost(arm, done)

    def _close(self) -> None:
        """The end of the run cuts what is under way."""
        self._end_queue()
        for event in self._events:
            ends_at, _, launch, _, _, tokens = event
            if launch.arm.retired is not None:
                self._settle(event)
            else:
                self.busy_s += self.now - (ends_at - self._duration(tokens))
        self._events.clear()

    def _on_published(self, now: float) -> None:
        """New samples start from new weights: measure the pace, as the real scheduler does."""
        if not self.measures_pace:
            return
        pace = self.dispatcher.pace
        latency_s = self.busy_s / self._num_ended if self._num_ended else 0.0
        version_s = pace.version_s
        if self._published_at:
            interval_s = now - self._published_at
            version_s = _SMOOTHING * version_s + (1.0 - _SMOOTHING) * interval_s if version_s else interval_s
        self._published_at = now
        self.dispatcher.pace = Pace(latency_s, version_s)
