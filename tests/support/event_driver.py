"""Runs the real dispatcher against a label and length law under a heap of events: no loop, no sockets, no real time."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.arm import Prompt, Sample
from engine.core.dispatcher import Dispatcher, Launch, Policy, Retirement
from engine.core.group import Group

Law = Callable[[Launch], tuple[bool, int]]
"""(is right, length) of a launch; a function of the launch's seed."""


def bernoulli(pass_rate: float, mean_right: int = 100, mean_wrong: int = 100, sigma: float = 0.8) -> Law:
    """Labels with one pass rate, lognormal lengths with a mean by class."""

    def draw(launch: Launch) -> tuple[bool, int]:
        rng = random.Random(launch.seed)
        is_right = rng.random() < pass_rate
        mean = mean_right if is_right else mean_wrong
        return is_right, max(1, round(mean * rng.lognormvariate(-sigma * sigma / 2, sigma)))

    return draw


def prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", "right", "all", (), 8)


@dataclass
class Outcome:
    retirements: list[Retirement] = field(default_factory=list)
    groups: list[tuple[Group, int]] = field(default_factory=list)
    """Shipped groups with the version they were to be trained at."""
    dropped: list[Group] = field(default_factory=list)
    busy: float = 0.0
    """Slot-seconds in use."""
    seconds: float = 0.0
    num_launched: int = 0
    max_staleness: int = 0

    def counts(self) -> list[int]:
        return [len(r.arm.counted) for r in self.retirements]


@dataclass
class Driver:
    """Slots, a law, and a learner that takes a step whenever B groups are there."""

    policy: Policy
    law: Law
    slots: int = 64
    step_s: float = 0.0
    learns: bool = True

    def run(self, num_prompts: int, seed: int = 0) -> Outcome:
        self.rng = random.Random(seed)
        self.dispatcher = Dispatcher(self.policy)
        self.out = Outcome()
        self.events: list[tuple[float, int, str, object]] = []
        self.free, self.now, self.admitted, self.tick = self.slots, 0.0, 0, 0
        self.batch: list[tuple[Group, int]] = []
        self.is_learning = False
        self.num_prompts = num_prompts
        self.fill()
        while self.events:
            before = self.now
            self.now, _, kind, item = heapq.heappop(self.events)
            self.out.busy += (self.slots - self.free) * (self.now - before)
            if kind == "step":
                self.finish_step()
            else:
                self.finish_sample(item)
            self.ship()
            self.fill()
        self.out.seconds = self.now
        return self.out

    def push(self, after: float, kind: str, item: object) -> None:
        self.tick += 1
        heapq.heappush(self.events, (self.now + after, self.tick, kind, item))

    def fill(self) -> None:
        while self.free:
            launch = self.dispatcher.next_launch()
            if launch is None:
                if self.admitted == self.num_prompts or not self.dispatcher.may_launch:
                    return
                self.dispatcher.admit(prompt(self.admitted))
                self.admitted += 1
                continue
            self.free -= 1
            self.out.num_launched += 1
            is_right, length = self.law(launch)
            version = self.dispatcher.generation_version
            self.push(float(length), "sample", (launch, is_right, length, version))

    def finish_sample(self, item: object) -> None:
        launch, is_right, length, version = item
        self.free += 1
        if not self.dispatcher.is_open(launch.arm.arm_id, launch.index, launch.retry):
            return
        sample = Sample(launch.index, float(is_right), is_right, version, length, None)
        retirement = self.dispatcher.score(launch.arm.arm_id, sample)
        if retirement is not None:
            self.out.retirements.append(retirement)

    def ship(self) -> None:
        batch_size = self.policy.bound.groups_per_step
        while self.learns and not self.is_learning:
            found = self.dispatcher.next_group()
            if found is None:
                return
            if isinstance(found, Group):
                self.out.dropped.append(found)
                continue
            self.batch.append(found)
            self.out.groups.append(found)
            if len(self.batch) == batch_size:
                for group, trained_at in self.batch:
                    assert trained_at == self.dispatcher.learner_version
                    self.out.max_staleness = max(self.out.max_staleness, trained_at - group.min_version)
                self.is_learning = True
                self.push(self.step_s, "step", None)

    def finish_step(self) -> None:
        self.dispatcher.step_done(self.dispatcher.learner_version + 1, len(self.batch))
        self.dispatcher.generation_version = self.dispatcher.learner_version
        self.batch, self.is_learning = [], False
