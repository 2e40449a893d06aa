"""Every series that the engine exposes, in one table.

Invariants: names are `adastream_<component>_<what>_<unit>[_total]` in base units; every label but `worker` and those
of the run's info series has a closed set of values, listed here; no label grows with the number of prompts. The
recorder builds what it counts from this table, the dashboard's tests read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary", "info"]

ARM_STATES = ("sampling", "waiting", "training")
REASONS = ("solved", "exhausted", "futile", "expired", "failed")
TIERS = ("0", "(0,.2]", "(.2,.5]", "(.5,1)", "1", "unscored")
FATES = ("trained", "counted", "aborted", "failed", "evaluated")
GROUP_OUTCOMES = (
    "sealed", "shipped", "trained", "zero_signal", "declined", "deferred", "dropped_expired", "dropped_failed",
)  # fmt: skip
SIDES = ("right", "wrong")
VERDICTS = ("correct", "wrong", "unparsed", "timeout", "crashed")
UPDATE_OUTCOMES = ("ok", "failed")
LAGS = ("0", "1", "2", "3-4", "5+")
"""Staleness of a trained token, versions."""
REJECTIONS = ("skipped", "quarantined", "passed_over")

_ANY: tuple[str, ...] = ()
_SAMPLES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0)
_TOKENS = (16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0)
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_SHORT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_UPDATE_S = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STEP_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def _no_labels() -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Series:
    """One family of series."""

    name: str
    """Full name as Prometheus shows it, `_total` included."""
    kind: Kind
    help: str
    """Shown in /metrics."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=_no_labels)
    """Label name -> its closed set of values; an empty set = values known at run time (workers, the run's info)."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""


def tier_of(num_right: int, num_counted: int) -> str:
    """Difficulty tier of an arm from its counts; tier bounds of arXiv 2510.04996's difficulty table.

    No right answer is tier "0" and no wrong one is tier "1", whatever the number of samples. Between them the tier
    holds the posterior mean (r + 1) / (n + 2) of the pass rate under a uniform prior. An arm without a counted
    sample is "unscored": nothing is known of it.

    Args:
        num_right: counted samples with a right answer, 0 <= num_right <= num_counted.
        num_counted: counted samples.
    """
    if not 0 <= num_right <= num_counted:
        raise ValueError(f"num_right must be between 0 and num_counted = {num_counted}, got {num_right}")
    if num_counted == 0:
        return "unscored"
    if num_right == 0:
        return "0"
    if num_right == num_counted:
        return "1"
    if 5 * (num_right + 1) <= num_counted + 2:
        return "(0,.2]"
    if 2 * (num_right + 1) <= num_counted + 2:
        return "(.2,.5]"
    return "(.5,1)"


CATALOGUE: tuple[Series, ...] = (
    # engine: budget
    Series("adastream_engine_arms", "gauge", "Arms by state.", {"state": ARM_STATES}),
    Series(
        "adastream_engine_arms_retired_total",
        "counter",
        "Arms retired, by reason and difficulty tier.",
        {"reason": REASONS, "tier": TIERS},
    ),
    Series(
        "adastream_engine_arm_samples",
        "histogram",
        "Counted samples of a prompt that retired.",
        {"tier": TIERS},
        _SAMPLES,
    ),
    Series(
        "adastream_engine_arm_tokens",
        "histogram",
        "Response tokens of the counted samples of a prompt that retired.",
        {"tier": TIERS},
        _TOKENS,
    ),
    Series(
        "adastream_engine_tokens_total",
        "counter",
        "Response tokens by fate (counted = counted but not trained).",
        {"fate": FATES},
    ),
    Series("adastream_engine_prompts_rejected_total", "counter", "Prompts set aside.", {"reason": REJECTIONS}),
    # engine: signal
    Series("adastream_engine_groups_total", "counter", "Groups by outcome.", {"outcome": GROUP_OUTCOMES}),
    Series("adastream_engine_first_sample_reward", "summary", "Reward of each arm's first launched sample."),
    # engine: staleness
    Series(
        "adastream_engine_sample_staleness_versions",
        "histogram",
        "Age of trained samples: learner's version at the gradient minus their oldest token's.",
        buckets=_VERSIONS,
    ),
    Series("adastream_engine_staleness_max_versions", "gauge", "Greatest age of a trained sample since the start."),
    Series(
        "adastream_engine_expired_samples_total",
        "counter",
        "Scored samples that grew too old to be trained, by side.",
        {"side": SIDES},
    ),
    # engine: throughput
    Series("adastream_engine_in_flight_requests", "gauge", "Requests launched and not answered."),
    Series("adastream_engine_slots", "gauge", "Requests that the live workers run at once, together."),
    Series("adastream_worker_tokens_total", "counter", "Response tokens that a worker generated.", {"worker": _ANY}),
    Series("adastream_worker_samples_total", "counter", "Responses that a worker returned.", {"worker": _ANY}),
    # engine: health
    Series("adastream_engine_workers", "gauge", "Live generation workers."),
    Series("adastream_worker_restarts_total", "counter", "Restarts of a worker.", {"worker": _ANY}),
    Series(
        "adastream_engine_loop_lag_seconds",
        "histogram",
        "How late the engine's event loop ran a timer.",
        buckets=_SHORT_S,
    ),
    Series("adastream_engine_metrics_body_bytes", "gauge", "Size of the /metrics answer before this one."),
    Series(
        "adastream_engine_run_info",
        "info",
        "What runs: always 1.",
        {"version": _ANY, "strategy": _ANY, "model": _ANY},
    ),
    # verifier
    Series("adastream_verifier_verdicts_total", "counter", "Verdicts.", {"verdict": VERDICTS}),
    Series(
        "adastream_verifier_work_seconds",
        "histogram",
        "Time from the start of the work to the verdict.",
        buckets=_SHORT_S,
    ),
    Series("adastream_verifier_queue_samples", "gauge", "Samples waiting for a verifier."),
    # learner
    Series("adastream_learner_policy_version", "gauge", "Version of the learner's weights."),
    Series("adastream_learner_last_step_timestamp_seconds", "gauge", "Unix time of the last optimizer step."),
    Series("adastream_learner_tokens_trained_total", "counter", "Response tokens that reached a gradient."),
    Series("adastream_learner_tokens_packed_total", "counter", "Prompt and response tokens that the learner computed."),
    Series("adastream_learner_step_seconds", "histogram", "Compute time of an optimizer step.", buckets=_STEP_S),
    Series("adastream_learner_wait_seconds", "histogram", "Learner's wait for a step's groups.", buckets=_STEP_S),
    Series("adastream_learner_loss", "gauge", "Loss of the last step."),
    Series("adastream_learner_entropy_nats", "gauge", "Mean token entropy at the last step."),
    Series("adastream_learner_kl_behaviour_nats", "gauge", "KL of behaviour and learner's policy at the last step."),
    Series("adastream_learner_clipped_ratio", "gauge", "Share of tokens clipped at the last step."),
    Series("adastream_learner_grad_norm", "gauge", "Global gradient norm of the last step, before clipping."),
    Series("adastream_learner_learning_rate", "gauge", "Learning rate of the last step."),
    Series("adastream_learner_importance_ratio_max", "gauge", "Greatest importance ratio of a token, last step."),
    Series("adastream_learner_staleness_mean_versions", "gauge", "Mean token staleness of the last step."),
    Series("adastream_learner_staleness_max_versions", "gauge", "Greatest token staleness of the last step."),
    Series("adastream_learner_masked_ratio", "gauge", "Share of tokens left out by a mask, last step."),
    Series("adastream_learner_kl_reference_nats", "gauge", "Distance to the reference model, nats a token, last step."),
    # learner: by staleness
    Series("adastream_learner_lag_tokens_total", "counter", "Trained tokens by staleness.", {"lag": LAGS}),
    Series("adastream_learner_lag_ratio_p01", "gauge", "1st percentile of the importance ratio.", {"lag": LAGS}),
    Series("adastream_learner_lag_ratio_p50", "gauge", "Median of the importance ratio.", {"lag": LAGS}),
    Series("adastream_learner_lag_ratio_p99", "gauge", "99th percentile of the importance ratio.", {"lag": LAGS}),
    Series("adastream_learner_lag_clipped_ratio", "gauge", "Share of tokens clipped at the last step.", {"lag": LAGS}),
    Series(
        "adastream_learner_lag_ess_ratio",
        "gauge",
        "Effective sample size of the importance ratios over their number, last step.",
        {"lag": LAGS},
    ),
    Series("adastream_learner_lag_kl_k1_nats", "gauge", "Mean log of sampler over learner, last step.", {"lag": LAGS}),
    Series("adastream_learner_lag_kl_k3_nats", "gauge", "The same by an estimate never below 0.", {"lag": LAGS}),
    Series(
        "adastream_learner_mismatch_nats",
        "gauge",
        "Mean logprob difference of sampler and learner at staleness 0, last step with such tokens.",
    ),
    Series(
        "adastream_learner_mismatch_ratio",
        "gauge",
        "Share of tokens of staleness 0 with a ratio outside 0.9 to 1.1, last step with such tokens.",
    ),
    # weight updates
    Series("adastream_weights_updates_total", "counter", "Weight updates of a worker.", {"outcome": UPDATE_OUTCOMES}),
    Series("adastream_weights_stage_seconds", "histogram", "Staging and checking of an update.", buckets=_UPDATE_S),
    Series("adastream_weights_pause_seconds", "histogram", "Generation stood still for an update.", buckets=_UPDATE_S),
    Series("adastream_weights_load_seconds", "histogram", "Loading inside the pause.", buckets=_UPDATE_S),
    Series(
        "adastream_weights_update_seconds",
        "histogram",
        "From the request to the passed canary.",
        buckets=_UPDATE_S,
    ),
    Series("adastream_weights_canary_nats", "gauge", "Greatest canary logprob difference, last update."),
)
