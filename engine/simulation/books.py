"""The books of a simulated run: what the visits in the first `num_turns` turns of the queue cost and brought.

Invariants: only those visits enter, each once, however long it takes, until its group is taken or dropped; other
prompts keep the slots full behind them. So no mean is bent by visits that are cut off. Failed visits enter what was
generated, and no mean. Real numbers are summed as whole multiples of `UNIT`: a sum of floats would differ in its last
digit with the order in which visits end.
"""

from dataclasses import dataclass, field

from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Prompt
from engine.core.decisions import Retirement
from engine.core.group import Group, has_signal
from engine.simulation.law import Visit, visit_of

ENOUGH = 0.99
"""Share of the visits that must have ended before the queue may end."""
UNIT = 2.0**-60
"""Of exact sums: 2e-18 of rounding a term."""


def _exact(value: float) -> int:
    return round(value / UNIT)


@dataclass(slots=True)
class Weigher:
    """Sums of advantages at one pass rate."""

    num_visits: int = 0
    right: int = 0
    """Sum over visits of the mean over kept samples of the right ones' advantages, in `UNIT`."""
    wrong: int = 0

    def add(self, group: Group) -> None:
        """A group that is trained."""
        for sample in group.kept:
            share = _exact(group.advantage(sample) / len(group.kept))
            if sample.is_right:
                self.right += share
            else:
                self.wrong += share

    def weight(self, pass_rate: float) -> float:
        """The prompt weight E[ΣA+ / n]/p - E[ΣA- / n]/(1 - p), 0 < p < 1; engine/core/law.py has it exact."""
        right, wrong = self.right * UNIT / self.num_visits, self.wrong * UNIT / self.num_visits
        return right / pass_rate - wrong / (1.0 - pass_rate)


@dataclass(slots=True)
class Books:
    """An `Observer` that counts."""

    num_turns: int
    """Turns that are reported."""
    rule: AdvantageRule = field(default_factory=AdvantageRule)
    """Of the run: it says which pools have a signal."""
    num_passed_over: int = 0
    """Those that the selector did not make a visit."""
    num_ended: int = 0
    """Visits that ended, skipped prompts included."""
    num_open_groups: int = 0
    """Sealed groups of theirs that are neither taken nor dropped."""
    num_failed: int = 0
    """Those whose prompt failed too often: they count as ended, and enter no mean."""
    counted: int = 0
    """Samples that counted for a visit that did not fail."""
    counted_squared: int = 0
    """Sum of squares, a visit a term."""
    counted_failed: int = 0
    """Samples that counted for a failed visit."""
    greedy: int = 0
    """Greedy responses: they cost, but never count."""
    wasted: int = 0
    """Samples that never counted: aborted, failed, or scored behind the stopping sample."""
    tokens_counted: int = 0
    """Of counted samples and greedy responses."""
    tokens_wasted: int = 0
    solved: int = 0
    zero_signal: int = 0
    dropped_groups: int = 0
    """Sealed groups that would have broken the bound."""
    lost_visits: int = 0
    """Visits with a signal that made no group: the fresh samples of a class had run out."""
    trained_groups: int = 0
    """Groups that the learner took."""
    vacant_places: int = 0
    """Places of steps that the token budget of a step left without a group, over the whole run."""
    useful_groups: int = 0
    """Those of them that have an advantage and whose visit was solved."""
    bias_sum: int = 0
    """Sum of pool mean - p over visits with a pool, in `UNIT`."""
    num_pools: int = 0
    kept_right: int = 0
    kept_wrong: int = 0
    kept_right_tokens: int = 0
    kept_wrong_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    weighers: dict[float, Weigher] = field(default_factory=dict[float, Weigher])
    """By pass rate, where the law of p has few."""

    @property
    def is_done(self) -> bool:
        """Whether every turn is over, and every visit to its end."""
        return self.num_ended + self.num_passed_over >= self.num_turns and not self.num_open_groups

    @property
    def has_enough(self) -> bool:
        """Whether, after the last turn, so few visits are open that no new ones are needed to keep them company."""
        return self.num_ended >= ENOUGH * (self.num_turns - self.num_passed_over)

    def retired(self, retirement: Retirement) -> None:
        """An arm ended."""
        arm = retirement.arm
        visit = self._reported(arm)
        if visit is None:
            return
        self.num_ended += 1
        self._spend(arm)
        if retirement.reason == "failed":
            self.num_failed += 1
            self.counted_failed += len(arm.counted)
            return
        self._count(arm, visit)
        self.solved += retirement.reason == "solved"
        self.zero_signal += not has_signal(arm, self.rule)
        if retirement.group is not None:
            self.num_open_groups += 1
        self.lost_visits += retirement.outcome == "dropped_expired"
        weigher = self.weighers.get(visit.pass_rate)
        if weigher is not None:
            weigher.num_visits += 1

    def skipped(self, prompt: Prompt) -> None:
        """A prompt was given no samples."""
        visit = prompt.token_ids
        self.num_ended += isinstance(visit, Visit) and visit.number < self.num_turns

    def lost(self, arm: Arm, tokens: int) -> None:
        """A request was aborted or failed."""
        if self._reported(arm) is not None:
            self.wasted += 1
            self.tokens_wasted += tokens

    def taken(self, group: Group, trained_at: int) -> None:
        """The learner has a group."""
        if group.is_vacant:
            self.vacant_places += 1
            return
        visit = self._reported(group.arm)
        if visit is None:
            return
        self.num_open_groups -= 1
        self.trained_groups += 1
        self.useful_groups += group.arm.retired == "solved" and group.is_useful
        for sample in group.kept:
            staleness = trained_at - sample.min_version
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)
            if sample.is_right:
                self.kept_right += 1
                self.kept_right_tokens += sample.num_tokens
            else:
                self.kept_wrong += 1
                self.kept_wrong_tokens += sample.num_tokens
        weigher = self.weighers.get(visit.pass_rate)
        if weigher is not None:
            weigher.add(group)

    def dropped(self, group: Group) -> None:
        """A sealed group was over the bound."""
        if self._reported(group.arm) is not None:
            self.num_open_groups -= 1
            self.dropped_groups += 1

    def _reported(self, arm: Arm) -> Visit | None:
        visit = visit_of(arm)
        return visit if visit.number < self.num_turns else None

    def _spend(self, arm: Arm) -> None:
        self.greedy += arm.greedy is not None
        self.tokens_counted += arm.num_tokens
        for sample in arm.uncounted():
            self.wasted += 1
            self.tokens_wasted += sample.num_tokens

    def _count(self, arm: Arm, visit: Visit) -> None:
        num_counted = len(arm.counted)
        self.counted += num_counted
        self.counted_squared += num_counted * num_counted
        if num_counted:
            self.num_pools += 1
            self.bias_sum += _exact(arm.num_right / num_counted - visit.pass_rate)
