"""Which counts a stopping rule reaches, and the estimate of p that the rule does not bias. Pure; exact integers.

A pool's mean is biased when the labels decide where sampling stops: with 2/2 of at most 32 samples its mean is 0.077 at
p = 0.05. Let k(x, y) be the number of label orders that stop at x right and y wrong samples, and k*(x, y) those among
them whose first sample is right. Then k*/k has mean Σ k* p^x q^y = P(the first sample is right) = p.
Source: Girshick, Mosteller, Savage, Annals of Mathematical Statistics 17 (1946), pages 13 to 23.

Holds for every rule that reads the counts of an arm and nothing else, without expiry (every sample fresh). Rounds are
such a rule: between two tests it goes on. `again` counts as `continue`: the arm waits, and samples on from its counts.
A rule that throws dice is walked with the dice of seed 0; its table then holds for arms with that seed only.
engine/core/law.py walks the same states; `Estimates` keeps the tables of a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.arm import Arm
from engine.core.strategy import Counts, Strategy, Verdict

State = tuple[int, int]
"""Right and wrong samples."""
GivesUp = Callable[[Counts], bool]
"""Whether an arm that would go on stops here as futile."""


def never(counts: Counts) -> bool:
    """No arm is given up."""
    return False


def visited(strategy: Strategy, budget: int, gives_up: GivesUp = never) -> dict[State, Verdict]:
    """The verdict at all counts that some order of labels reaches; `continue` where sampling goes on.

    The verdict is asked after each sample, as the dispatcher does, so never at (0, 0).

    Args:
        strategy: Asked once for each state.
        budget: Samples that the visit may count, >= 1.
        gives_up: Asked where the strategy says `continue`.

    Returns:
        States by ascending total, so that each comes after all that lead to it.

    Raises:
        ValueError: The budget is below 1, or the strategy goes on past it.
    """
    if budget < 1:
        raise ValueError(f"budget must be >= 1, got {budget}")
    verdicts: dict[State, Verdict] = {(0, 0): "continue"}
    going_on: list[int] = [0]
    for total in range(1, budget + 1):
        reached = sorted({right + more for right in going_on for more in (0, 1)})
        going_on = []
        for right in reached:
            verdict = _verdict(strategy, right, total - right, budget, gives_up)
            verdicts[right, total - right] = verdict
            if verdict == "continue":
                going_on.append(right)
    if going_on:
        right = going_on[0]
        raise ValueError(
            f"{type(strategy).__name__}.verdict must end an arm at its budget of {budget} samples, "
            f"got 'continue' or 'again' at {right} right and {budget - right} wrong"
        )
    return verdicts


def _verdict(strategy: Strategy, right: int, wrong: int, budget: int, gives_up: GivesUp) -> Verdict:
    counts = Counts(right, wrong, right, wrong, budget)
    verdict = strategy.verdict(counts)
    if verdict == "again":
        return "continue"
    return "futile" if verdict == "continue" and gives_up(counts) else verdict


def unbiased_table(strategy: Strategy, budget: int, gives_up: GivesUp = never) -> dict[State, float]:
    """The unbiased estimate of p at each state where the rule stops.

    For "until the K-th right one" it is (K - 1)/(N - 1) on success and X/N at the budget; rounds that end in the first
    one keep X/M. States that only expiry or a second budget can lead to are not in the table: use the pool's mean.

    Args:
        strategy: Reads counts only.
        budget: Samples that the visit may count, >= 1.
        gives_up: As in `visited`; leave it out for rules that depend on a prompt's past.

    Returns:
        (right, wrong) -> estimate in [0, 1].

    Raises:
        ValueError: As `visited`.
    """
    paths: dict[State, int] = {(0, 0): 1}
    starting_right: dict[State, int] = {(1, 0): 1}
    table: dict[State, float] = {}
    for state, verdict in visited(strategy, budget, gives_up).items():
        right, wrong = state
        num_paths, num_starting_right = paths.pop(state), starting_right.pop(state, 0)
        if verdict != "continue":
            table[state] = num_starting_right / num_paths
            continue
        for after in ((right + 1, wrong), (right, wrong + 1)):
            paths[after] = paths.get(after, 0) + num_paths
            starting_right[after] = starting_right.get(after, 0) + num_starting_right
    return table


@dataclass(slots=True)
class Estimates:
    """Estimates for the arms of a run; a table is made when its first arm asks."""

    _tables: dict[tuple[int, int], dict[State, float]] = field(
        default_factory=dict[tuple[int, int], dict[State, float]]
    )
    """(identity of the strategy, budget) -> table; strategies live as long as the run."""

    def of(self, arm: Arm) -> float:
        """For an arm that has ended, at the counts where it first stopped: what it drained came after its rule decided.

        The pool's mean where only expiry or a budget given again could end the visit there: the rule's paths never do.

        Args:
            arm: With at least one counted sample.
        """
        key = (id(arm.strategy), arm.budget)
        if key not in self._tables:
            self._tables[key] = unbiased_table(arm.strategy, arm.budget)
        right, total = arm.stop or (arm.num_right, len(arm.counted))
        return self._tables[key].get((right, total - right), arm.num_right / len(arm.counted))
