"""The fixed choices of a run, as the dispatcher reads them."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.core.advantage import AdvantageRule
from engine.core.arm import UNLIMITED, Accounting
from engine.core.past import Past
from engine.core.staleness import Bound
from engine.core.strategy import Counts, Strategy

Unresolved = Literal["drop", "keep", "shrink", "requeue", "defer"]
"""Arms whose budget went without a signal. `drop`: no group, others take its place (DAPO refills the step like that).
`keep`: trained at zero advantage (GRPO). `shrink`: a group without samples takes its place, so that the step has fewer
samples (passive filtering). `requeue`: goes on later with its pool and as large a budget again. `defer`: a new visit
soon."""
AtExit = Literal["abort", "drain"]
"""What an arm still has under way when its exit holds. `abort`: it never counts. `drain`: it is finished and counts."""


class Futility(Protocol):
    """Which arms are not worth the rest of their samples."""

    def num_sure(self, counts: Counts, past: Past, need: int) -> int:
        """How many of the next `need` samples count whatever they are: no arm is stopped before the last of them."""
        ...

    def stops(self, counts: Counts, past: Past) -> bool:
        """Whether an arm that would go on stops here."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Fixed choices of a run."""

    strategy: Strategy
    bound: Bound
    seed: int = 0
    accounting: Accounting = "launch"
    fixed_width: int = 0
    """Requests in flight an arm; 0 = by need."""
    at_exit: AtExit = "abort"
    max_tokens_per_visit: int = UNLIMITED
    """Counted response tokens at which a visit ends."""
    max_tokens_per_step: int = 0
    """Generated response tokens at which a step is taken with the groups it has; 0 = no limit."""
    raise_by_deadline: bool = True
    max_failures: int = 3
    """Failures of one launch before its prompt is quarantined."""
    rule: AdvantageRule = field(default_factory=AdvantageRule)
    unresolved: Unresolved = "drop"
    max_requeues: int = 3
    """Budgets given again to one arm, under `requeue`."""
    requeue_after: int = 64
    """Prompts admitted before a parked arm goes on: time for the policy to change."""
    futility: Futility | None = None
    visit_decay: float = 1.0
    """Of a prompt's past, at each visit."""
    version_decay: float = 1.0
    """Of a prompt's past, with each policy version."""
    stages: tuple[tuple[int, Strategy], ...] = ()
    """(first version, strategy) of later stages, in order; an arm keeps the strategy that it was opened with."""

    def strategy_at(self, version: int) -> Strategy:
        """The strategy of arms that are opened at this policy version."""
        strategy = self.strategy
        for first, later in self.stages:
            if version >= first:
                strategy = later
        return strategy
