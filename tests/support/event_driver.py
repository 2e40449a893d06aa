"""A finite run of the real dispatcher under the simulator's driver, with everything kept for a test to look at."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.arm import Arm, Prompt
from engine.core.decisions import Launch, Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.group import Group
from engine.core.policy import Policy
from engine.simulation.driver import Driver as EventDriver
from engine.simulation.driver import Speed

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
    skipped: list[Prompt] = field(default_factory=list)
    """Prompts that were given no samples."""
    tokens_lost: int = 0
    """Of requests that were aborted."""
    busy: float = 0.0
    """Slot-seconds in use."""
    seconds: float = 0.0
    num_launched: int = 0
    max_staleness: int = 0

    def counts(self) -> list[int]:
        return [len(r.arm.counted) for r in self.retirements]


@dataclass
class Recorder:
    """An observer that keeps everything and never ends the run."""

    out: Outcome
    is_done: bool = False

    def retired(self, retirement: Retirement) -> None:
        self.out.retirements.append(retirement)

    def skipped(self, prompt: Prompt) -> None:
        self.out.skipped.append(prompt)

    def lost(self, arm: Arm, tokens: int) -> None:
        self.out.tokens_lost += tokens

    def taken(self, group: Group, trained_at: int) -> None:
        self.out.groups.append((group, trained_at))
        self.out.max_staleness = max(self.out.max_staleness, trained_at - group.min_version)

    def dropped(self, group: Group) -> None:
        self.out.dropped.append(group)


@dataclass
class Driver:
    """Slots, a law, and a learner that takes a step whenever B groups are there; one token takes one second."""

    policy: Policy
    law: Law
    slots: int = 64
    step_s: float = 0.0

    def run(self, num_prompts: int) -> Outcome:
        self.dispatcher = Dispatcher(self.policy)
        out = Outcome()
        prompts = map(prompt, range(num_prompts))
        speed = Speed(self.slots, step_s=self.step_s)
        driver = EventDriver(self.dispatcher, speed, self.law, prompts, Recorder(out), measures_pace=False)
        driver.run()
        out.busy, out.seconds, out.num_launched = driver.busy_s, driver.now, driver.num_launched
        return out
