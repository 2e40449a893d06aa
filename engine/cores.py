"""Which cores generation and learning get, so that their thread pools never share one.

Disjoint halves by default; with one core both take turns. Spinning OpenMP threads of two pools on the same cores slow
each other by 3 to 10 times (measured on 2 cores), hence no overlap. The one exception is on purpose: a learner waits
for groups most of the time at the start of a run, so a worker may borrow its cores at low priority (`cores.lend`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from configs.processes import Cores


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each side; empty = not pinned."""

    generation: tuple[tuple[int, ...], ...]
    """One entry a worker."""
    learning: tuple[int, ...]
    borrower: int = -1
    """Number of the worker that runs on the learner's cores; -1 = none."""

    def describe(self) -> str:
        """One line for the log."""
        if not self.learning:
            return "cores: not pinned"
        workers = "; ".join(
            f"worker-{i} {_listed(cores)}{' (while the learner waits)' if i == self.borrower else ''}"
            for i, cores in enumerate(self.generation)
        )
        return f"cores: generation {workers}; learning {_listed(self.learning)}"


def plan_cores(config: Cores, num_workers: int, available: Sequence[int] | None = None) -> CorePlan:
    """Split the available cores.

    Raises:
        ValueError: a configured core does not exist here.
    """
    cores = sorted(os.sched_getaffinity(0)) if available is None else list(available)
    if not config.pin:
        return CorePlan(((),) * num_workers, ())
    for name, wanted in (("generation", config.generation), ("learning", config.learning)):
        if unknown := set(wanted) - set(cores):
            raise ValueError(f"cores.{name} must be among {_listed(cores)}, got {_listed(sorted(unknown))}")
    half = max(1, len(cores) // 2)
    generation = config.generation or tuple(cores[:half])
    learning = config.learning or tuple(cores[half:] or cores)
    has_borrower = config.lend and num_workers > 1
    num_owners = num_workers - has_borrower
    share = max(1, len(generation) // num_owners)
    parts = tuple(generation[i * share : (i + 1) * share] or generation for i in range(num_owners))
    if not has_borrower:
        return CorePlan(parts, learning)
    return CorePlan((*parts, learning), learning, borrower=num_owners)


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
