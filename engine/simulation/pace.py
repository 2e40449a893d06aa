"""How long a step of the simulated learner takes, so that its rate is a given multiple of the generators'.

The generators' rate is what full slots finish with this strategy at this η: groups over slot-seconds. Expiry makes
groups dearer and depends on the step's length in turn, so the two are found together: a warm-up with other draws sets
the length anew after each step, from what the second half of the groups so far has cost.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.core.arm import Arm, Prompt
from engine.core.decisions import Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.group import Group
from engine.core.policy import Policy
from engine.core.rng import derive
from engine.core.staleness import Bound
from engine.simulation.driver import Driver, Speed
from engine.simulation.law import Laws

WARM_UP_PROMPTS = 4000
"""Visits of the warm-up: about 2 % of standard error at the published tiers."""
WARM_UP_SLOTS = 512
"""Slots of it, at most; B shrinks with them."""
_WARM_UP_STREAM = 0x7761726D


@dataclass(slots=True)
class Pacer:
    """An observer that sets the length of the next step."""

    learner_ratio: float
    driver: Driver | None = None
    num_ended: int = 0
    cost_s: float = 0.0
    """Slot-seconds of a group; 0 = none was made."""
    _num_taken: int = 0
    _marks: list[float] = field(default_factory=list[float])
    """Slot-seconds spent at the start of each step."""

    @property
    def is_done(self) -> bool:
        """Whether the warm-up is long enough."""
        return self.num_ended >= WARM_UP_PROMPTS

    def retired(self, retirement: Retirement) -> None:
        """An arm ended."""
        self.num_ended += 1

    def skipped(self, prompt: Prompt) -> None:
        """A prompt was given no samples."""
        self.num_ended += 1

    def lost(self, arm: Arm, tokens: int) -> None:
        """A request was aborted or failed: its slot-seconds are in the driver's sum."""

    def dropped(self, group: Group) -> None:
        """A sealed group was over the bound: no group for the learner."""

    def taken(self, group: Group, trained_at: int) -> None:
        """The learner has a group; with the last one of a step, set how long it takes."""
        self._num_taken += 1
        driver = self.driver
        if driver is None:
            return
        batch = driver.dispatcher.policy.bound.groups_per_step
        if self._num_taken % batch:
            return
        self._marks.append(driver.busy_s)
        half = len(self._marks) // 2
        steps = len(self._marks) - half
        spent_s = self._marks[-1] - (self._marks[half - 1] if half else 0.0)
        self.cost_s = spent_s / (steps * batch)
        driver.learner.step_s = batch * self.cost_s / (self.learner_ratio * driver.speed.slots)


def measure_step_s(policy: Policy, speed: Speed, laws_for: Callable[[int], Laws]) -> float:
    """Virtual seconds of a step; 0 where the strategy makes no groups.

    Args:
        policy: As the run has it.
        speed: Everything but `step_s`.
        laws_for: The run's laws under another seed.
    """
    laws = laws_for(derive(policy.seed, _WARM_UP_STREAM))
    scale = min(1.0, WARM_UP_SLOTS / speed.slots)
    slots = max(1, round(speed.slots * scale))
    bound = Bound(policy.bound.max_staleness, max(1, round(policy.bound.groups_per_step * scale)))
    pacer = Pacer(laws.config.learner_ratio)
    fails_after = laws.fails_after if laws.config.failure_rate else None
    tokens = math.ceil(policy.max_tokens_per_step * scale)
    warm_policy = replace(policy, bound=bound, seed=laws.config.seed, max_tokens_per_step=tokens)
    dispatcher = Dispatcher(warm_policy)
    warm_speed = replace(speed, slots=slots)
    pacer.driver = Driver(dispatcher, warm_speed, laws.draw, laws.prompts(), pacer, fails_after)
    pacer.driver.run()
    return policy.bound.groups_per_step * pacer.cost_s / (pacer.learner_ratio * speed.slots)
