"""What happens to the tokens and counts of an arm once its fate is known: trained, counted, aborted, failed.

Invariants: every token that a worker reported is settled exactly once; until then it is held (live arms, samples being
scored, groups not trained yet). A retired arm's counted samples stay held while its group is open, because a kept
sample may still be exchanged. A greedy response ends as counted: in its arm's statistics, never in a gradient.
"""

from dataclasses import dataclass, field

from engine.core.decisions import Retirement
from engine.core.group import Group
from engine.tally import Tally
from metrics.catalogue import tier_of
from metrics.recorder import Recorder


@dataclass(slots=True)
class Settlement:
    """Books of the run."""

    tally: Tally
    recorder: Recorder
    open_groups: dict[int, Group] = field(default_factory=dict[int, Group])
    """Sealed groups that are neither trained nor dropped; vacant ones once they are shipped."""

    @property
    def held_tokens(self) -> int:
        """Response tokens of open groups and the arms behind them."""
        return sum(group.arm.num_tokens for group in self.open_groups.values())

    def arrived(self, worker: str, tokens: int) -> None:
        """A worker returned a sample."""
        self.recorder.generated(worker, tokens, 1)
        self.tally.ledger.generated += tokens

    def aborted(self, tokens: int) -> None:
        """A sample beyond its arm's stopping sample, or left over at the end."""
        self.tally.samples_aborted += 1
        self.tally.ledger.aborted += tokens
        self.recorder.tokens("aborted", tokens)

    def failed(self, tokens: int) -> None:
        """A sample without a verdict, or lost by its worker."""
        self.tally.ledger.failed += tokens
        self.recorder.tokens("failed", tokens)

    def retired(self, retirement: Retirement) -> None:
        """An arm ended; its group, if any, stays open. A group without an advantage counts as `zero_signal`."""
        arm, tally, recorder = retirement.arm, self.tally, self.recorder
        num_right = arm.num_right
        tally.samples_counted += len(arm.counted)
        tally.expired_samples += retirement.expired_right + retirement.expired_wrong
        recorder.expired_samples(retirement.expired_right, "right")
        recorder.expired_samples(retirement.expired_wrong, "wrong")
        tier = tier_of(num_right, len(arm.counted))
        recorder.arm_retired(retirement.reason, tier, len(arm.counted), arm.num_tokens)
        group = retirement.group
        outcome = "zero_signal" if group is not None and not group.is_useful else retirement.outcome
        recorder.group(outcome)
        tally.groups_zero_signal += outcome == "zero_signal"
        for sample in arm.uncounted():
            self.aborted(sample.num_tokens)
        if group is not None:
            self.open_groups[group.group_id] = group
            return
        self._counted(arm.num_tokens)
        tally.groups_dropped += retirement.outcome in ("dropped_expired", "dropped_failed")
        if retirement.outcome == "dropped_failed":
            tally.prompts_quarantined += 1
            recorder.prompts(quarantined=1)

    def shipped(self, group: Group) -> None:
        """A group is on its way to the learner."""
        if group.is_vacant:
            self.open_groups[group.group_id] = group
        else:
            self.recorder.group("shipped")

    def trained(self, group_id: int, learner_version: int) -> None:
        """A group was in the step that started from `learner_version`; a useful one in its gradient."""
        group = self.open_groups.pop(group_id)
        if group.is_vacant:
            self.tally.vacant_places += 1
            self.recorder.group("vacant")
            return
        kept = sum(s.num_tokens for s in group.kept)
        self.tally.ledger.trained += kept
        self.recorder.tokens("trained", kept)
        self._counted(group.arm.num_tokens - kept)
        if group.is_useful:
            self.tally.groups_useful += 1
            self.recorder.group("trained")
        for sample in group.kept:
            self.recorder.staleness(learner_version - sample.min_version, 1)

    def dropped(self, group_id: int) -> None:
        """A group would have broken the bound."""
        self._counted(self.open_groups.pop(group_id).arm.num_tokens)
        self.tally.groups_dropped += 1
        self.recorder.group("dropped_expired")

    def _counted(self, tokens: int) -> None:
        self.tally.ledger.counted += tokens
        self.recorder.tokens("counted", tokens)
