"""Whether an arm goes on after a counted sample, waits, or ends: the strategy's verdict, the token budget, futility.

Pure. Invariants:
- `solved` holds whatever the sample cost: the token budget only ends what would go on or wait.
- An arm that drains is asked at its stopping sample and again when everything that it launched counts. What held then
  holds still, unless samples that came late or expired since changed it: a broken exit goes on, an arm that ran out
  may have become solved, and one that futility had stopped is looked at anew.
Called by the dispatcher (engine/core/dispatcher.py).
"""

from typing import Literal

from engine.core.arm import Arm, Ending
from engine.core.policy import Futility
from engine.core.strategy import Counts

Decision = Literal["continue", "again"] | Ending


def decide(arm: Arm, counts: Counts, futility: Futility | None) -> Decision:
    """After a counted sample of an arm that is not draining.

    Args:
        arm: Its strategy, counted tokens and past.
        counts: The arm's, now.
        futility: The run's rule, None = no arm is given up.
    """
    verdict = arm.strategy.verdict(counts)
    if verdict == "continue":
        if arm.num_tokens >= arm.token_budget:
            return "exhausted"
        if futility is not None and futility.stops(counts, arm.past):
            return "hopeless"
    elif verdict == "again" and arm.num_tokens >= arm.token_budget:
        return "exhausted"
    return verdict


def decide_after_drain(arm: Arm, counts: Counts, futility: Futility | None) -> Decision:
    """When everything that a draining arm launched counts; arguments as of `decide`.

    Rules that are tested at some counts only (rounds, pilots) say `continue` at all others, so that answer alone does
    not undo an end: a solved arm goes on only where its exit misses samples.
    """
    ending = arm.ending
    if ending == "solved" and arm.strategy.missing(counts) == (0, 0):
        return "solved"
    decision = decide(arm, counts, futility)
    if decision in ("continue", "again", "hopeless") and ending in ("exhausted", "futile"):
        return ending
    return decision
