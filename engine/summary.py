"""summary.json: what a run did, for people and other tools. Keys are a contract: add, never rename.

Token ledger: tokens_generated = tokens_trained + tokens_counted + tokens_aborted + tokens_failed + tokens_in_flight,
where counted means in an arm's statistics but in no gradient, and in_flight what was open when training ended.
`tokens_missing` is the difference and must be 0. Evaluation tokens are apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.core.ledger import TokenLedger
from engine.evaluate import Accuracy
from engine.tally import Tally
from engine.weight_update import UpdateLog

SummaryValue = str | int | float | bool | None | dict[str, float] | list[float]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the run's phases."""

    wall_s: float
    setup_s: float
    """From the start to the first live worker and a ready learner."""
    train_s: float


def summarize(
    tally: Tally, updates: UpdateLog, before: Accuracy | None, after: Accuracy | None, times: Times, held_tokens: int
) -> dict[str, SummaryValue]:
    """The summary as plain values."""
    ledger = tally.ledger
    return {
        "accuracy_before": before.sampled if before else None,
        "accuracy_after": after.sampled if after else None,
        "accuracy_greedy_before": before.greedy if before else None,
        "accuracy_greedy_after": after.greedy if after else None,
        "accuracy_by_level": after.by_level if after else {},
        "accuracy_by_level_before": before.by_level if before else {},
        "steps": tally.steps,
        "resumed_at": tally.resumed_at,
        "wall_s": times.wall_s,
        "setup_s": times.setup_s,
        "train_s": times.train_s,
        "groups_trained": tally.groups_trained,
        "groups_useful": tally.groups_useful,
        "groups_zero_signal": tally.groups_zero_signal,
        "groups_dropped": tally.groups_dropped,
        "vacant_places": tally.vacant_places,
        "samples_launched": tally.samples_launched,
        "samples_counted": tally.samples_counted,
        "samples_aborted": tally.samples_aborted,
        "samples_failed": tally.samples_failed,
        "prompts_quarantined": tally.prompts_quarantined,
        "prompts_passed_over": tally.prompts_passed_over,
        "prompts_skipped": tally.prompts_skipped,
        **_ledger(tally.ledger, held_tokens),
        "useful_groups_per_min": _rate(60.0 * tally.groups_useful, times.train_s),
        "max_staleness_seen": tally.max_staleness,
        "expired_samples": tally.expired_samples,
        "weight_updates": len(updates.update_s),
        "weight_updates_fenced": updates.num_fenced,
        "weight_pause_s_p50": _median(updates.pause_s),
        "weight_load_s_p50": _median(updates.load_s),
        "weight_update_s_p50": _median(updates.update_s[1:]),
        "canary_max_nats": updates.canary_max_nats,
        "canary_noise_nats": updates.noise_nats,
        "learner_tokens_per_s": _rate(tally.learner_tokens, tally.learner_busy_s),
        "generation_tokens_per_s": _rate(ledger.generated, times.train_s),
        "first_sample_reward_by_step": tally.step_rewards,
    }


def _ledger(ledger: TokenLedger, held_tokens: int) -> dict[str, SummaryValue]:
    return {
        "tokens_generated": ledger.generated,
        "tokens_trained": ledger.trained,
        "tokens_counted": ledger.counted,
        "tokens_aborted": ledger.aborted,
        "tokens_failed": ledger.failed,
        "tokens_in_flight": held_tokens,
        "tokens_missing": ledger.missing(held_tokens),
        "tokens_evaluated": ledger.evaluated,
    }


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
