"""Every row and panel of the sampling-budget dashboard.

Invariants: a panel shows at least one value in a healthy run unless `EMPTY_WHEN_HEALTHY` names it.
"""

from metrics.grafana.spec import Panel, Query, Row, buckets, mean, per_minute, quantile, rate, series, spread

_TOKENS = "adastream_engine_tokens_total"
_GROUPS = "adastream_engine_groups_total"
_WASTED = f"{rate(_TOKENS, fate='aborted|failed')} / {rate(_TOKENS)}"
_REWARD = mean("adastream_engine_first_sample_reward")
_USEFUL = per_minute(_GROUPS, outcome="trained")
_BUSY = f"sum({series('adastream_engine_in_flight_requests')}) / sum({series('adastream_engine_slots')})"
_SINCE_STEP = f"time() - max({series('adastream_learner_last_step_timestamp_seconds')})"

EMPTY_WHEN_HEALTHY = ("Expired samples: share of right ones",)
"""Panels that may show nothing while nothing goes wrong."""

UNUSED = ("adastream_engine_metrics_body_bytes",)
"""Series of the catalogue that no panel draws: the size of /metrics itself."""


def _last(name: str, unit: str = "short", title: str = "", description: str = "", width: int = 6) -> Panel:
    return Panel(title, description, (Query(series(name), "{{instance}}"),), unit, width=width)


def _by_lag(name: str, title: str, description: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(series(name), "{{lag}} {{instance}}"),), unit)


NOW = Row(
    "Now",
    (
        Panel(
            "Policy version",
            "Optimizer steps whose weights exist.",
            (Query(f"max({series('adastream_learner_policy_version')})"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "First-sample reward",
            "Mean reward of each arm's first sample: the policy's own pass rate on the prompts it meets.",
            (Query(_REWARD),),
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Useful groups a minute",
            "Groups with a gradient that reached the learner.",
            (Query(_USEFUL),),
            kind="stat",
            width=4,
        ),
        Panel("Wasted tokens", "Share of tokens aborted or failed.", (Query(_WASTED),), "percentunit", "stat", 4),
        Panel("Slots busy", "Requests in flight over slots.", (Query(_BUSY),), "percentunit", "stat", 4),
        Panel("Since the last step", "A stuck run shows here first.", (Query(_SINCE_STEP),), "s", "stat", 4),
    ),
)

BUDGET = Row(
    "Budget",
    (
        Panel(
            "Arms by state",
            "sampling: being sampled; waiting: retired, its group not shipped; training: shipped, not trained.",
            (Query(f"sum by (state) ({series('adastream_engine_arms')})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Arms retired a minute, by reason",
            "solved has what it needs; exhausted used its budget; futile, expired and failed ended without a group.",
            (Query(per_minute("adastream_engine_arms_retired_total", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Arms retired a minute, by tier",
            "Difficulty tier of the arm's counts: how hard the prompts are that the budget goes to.",
            (Query(per_minute("adastream_engine_arms_retired_total", "tier"), "{{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Samples per retired prompt, by tier",
            "Mean counted samples of a prompt when it retired.",
            (Query(mean("adastream_engine_arm_samples", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Samples per retired prompt, p90 by tier",
            "Interpolated inside the histogram's buckets.",
            (Query(quantile(0.9, "adastream_engine_arm_samples", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Samples per retired prompt",
            "Where the budget ends up: prompts by the samples they used.",
            (Query(buckets("adastream_engine_arm_samples"), "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Tokens per retired prompt, by tier",
            "Mean response tokens of a prompt when it retired.",
            (Query(mean("adastream_engine_arm_tokens", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Tokens per retired prompt",
            "Prompts by the tokens they used.",
            (Query(buckets("adastream_engine_arm_tokens"), "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Prompts set aside a minute",
            "skipped: longer than the context; quarantined: failed too often; passed_over: by the selector.",
            (Query(per_minute("adastream_engine_prompts_rejected_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Tokens a second, by fate",
            "trained: reached a gradient; counted: read by an exit rule only; aborted and failed: wasted.",
            (Query(rate(_TOKENS, by="fate"), "{{fate}}"),),
            stacked=True,
        ),
        Panel(
            "Token share, by fate",
            "The same as a share of all tokens whose fate is known.",
            (Query(f"{rate(_TOKENS, by='fate')} / ignoring (fate) group_left () {rate(_TOKENS)}", "{{fate}}"),),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Wasted token share",
            "Aborted and failed tokens over all.",
            (Query(_WASTED, "wasted"),),
            "percentunit",
        ),
    ),
)

SIGNAL = Row(
    "Signal",
    (
        Panel(
            "Useful groups a minute",
            "Groups with a gradient that were trained; sealed and shipped ones beside them.",
            (Query(per_minute(_GROUPS, "outcome", outcome="sealed|shipped|trained"), "{{outcome}}"),),
        ),
        Panel(
            "Groups without signal",
            "Share of finished groups whose rewards are all equal.",
            (
                Query(
                    f"{rate(_GROUPS, outcome='zero_signal')} / {rate(_GROUPS, outcome='sealed|zero_signal')}",
                    "zero signal",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "First-sample reward",
            "Free of adaptive sampling: one sample an arm, whatever came later.",
            (Query(_REWARD, "mean"),),
            "percentunit",
        ),
    ),
)

STALENESS = Row(
    "Staleness",
    (
        Panel(
            "Age of trained samples",
            "Versions between a sample's oldest token and the gradient; quantiles are interpolated between whole ages.",
            (
                *spread("adastream_engine_sample_staleness_versions"),
                Query(f"max({series('adastream_engine_staleness_max_versions')})", "greatest since the start"),
            ),
        ),
        Panel(
            "Trained samples by age",
            "How the age of trained samples is spread.",
            (Query(buckets("adastream_engine_sample_staleness_versions"), "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Token staleness in the last step",
            "As the learner saw it at the gradient.",
            (
                Query(series("adastream_learner_staleness_mean_versions"), "mean"),
                Query(series("adastream_learner_staleness_max_versions"), "greatest"),
            ),
        ),
        Panel(
            "Expired samples a minute",
            "Scored samples that grew too old to be trained.",
            (Query(per_minute("adastream_engine_expired_samples_total", "side"), "{{side}}"),),
        ),
        Panel(
            "Expired samples: share of right ones",
            "Far from the pass rate means that expiry favours one class.",
            (
                Query(
                    f"{rate('adastream_engine_expired_samples_total', side='right')} / "
                    f"{rate('adastream_engine_expired_samples_total')}",
                    "right",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Groups dropped a minute",
            "dropped_expired: would have broken the bound; dropped_failed: could not be completed.",
            (Query(per_minute(_GROUPS, "outcome", outcome="dropped_expired|dropped_failed"), "{{outcome}}"),),
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Generated tokens a second",
            "Response tokens by worker.",
            (Query(rate("adastream_worker_tokens_total", by="worker"), "{{worker}}"),),
            stacked=True,
        ),
        Panel(
            "Learned tokens a second",
            "packed: prompt and response tokens computed; trained: response tokens that reached a gradient.",
            (
                Query(rate("adastream_learner_tokens_packed_total"), "packed"),
                Query(rate("adastream_learner_tokens_trained_total"), "trained"),
            ),
        ),
        Panel(
            "Samples a second",
            "Responses by worker.",
            (Query(rate("adastream_worker_samples_total", by="worker"), "{{worker}}"),),
            stacked=True,
        ),
        Panel("Slots busy", "1 = no slot idles.", (Query(_BUSY, "busy"),), "percentunit"),
        Panel(
            "Requests in flight",
            "Beside the slots of all live workers.",
            (
                Query(f"sum({series('adastream_engine_in_flight_requests')})", "in flight"),
                Query(f"sum({series('adastream_engine_slots')})", "slots"),
            ),
        ),
        Panel(
            "Learner's step and wait",
            "A long wait: generation is the slower side; none: the learner is.",
            (
                Query(mean("adastream_learner_step_seconds"), "computing"),
                Query(mean("adastream_learner_wait_seconds"), "waiting for groups"),
            ),
            "s",
        ),
    ),
)

LEARNER = Row(
    "Learner",
    (
        _last("adastream_learner_loss", title="Loss", description="Of the last step."),
        _last("adastream_learner_entropy_nats", title="Entropy", description="Mean token entropy, nats."),
        _last("adastream_learner_kl_behaviour_nats", title="KL to behaviour", description="Nats a token."),
        _last("adastream_learner_clipped_ratio", "percentunit", "Clipped tokens", "Share clipped by PPO."),
        _last("adastream_learner_grad_norm", title="Gradient norm", description="Before clipping."),
        _last("adastream_learner_importance_ratio_max", title="Greatest ratio", description="Of any token."),
        _last("adastream_learner_learning_rate", "sci", "Learning rate", "Of the last step."),
        _last("adastream_learner_policy_version", title="Policy version", description="Steps taken."),
    ),
)

OFF_POLICY = Row(
    "Off-policy",
    (
        Panel(
            "Trained tokens a second, by staleness",
            "Versions between a token and the gradient that it is in.",
            (Query(rate("adastream_learner_lag_tokens_total", by="lag"), "{{lag}}"),),
            stacked=True,
        ),
        _by_lag("adastream_learner_lag_ratio_p99", "Importance ratio, 99th percentile", "Learner over sampler."),
        _by_lag("adastream_learner_lag_ratio_p50", "Importance ratio, median", "Learner over sampler."),
        _by_lag("adastream_learner_lag_ratio_p01", "Importance ratio, 1st percentile", "Learner over sampler."),
        _by_lag("adastream_learner_lag_clipped_ratio", "Clipped tokens, by staleness", "Share.", "percentunit"),
        _by_lag(
            "adastream_learner_lag_ess_ratio",
            "Effective sample size",
            "Of the ratios as weights, over their number: 1 = all alike.",
            "percentunit",
        ),
        _by_lag(
            "adastream_learner_lag_kl_k3_nats", "KL to behaviour (k3), by staleness", "Nats a token, never below 0."
        ),
        _by_lag("adastream_learner_lag_kl_k1_nats", "KL to behaviour (k1), by staleness", "Nats a token, unbiased."),
        Panel(
            "Engine and learner mismatch",
            "Tokens of the very weights of the gradient: the sampler's arithmetic, not age. Mean difference in nats.",
            (Query(series("adastream_learner_mismatch_nats"), "{{instance}}"),),
        ),
        Panel(
            "Mismatched tokens",
            "Share of those tokens with a ratio outside 0.9 to 1.1.",
            (Query(series("adastream_learner_mismatch_ratio"), "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Masked tokens",
            "Share left out by IcePop or M2PO.",
            (Query(series("adastream_learner_masked_ratio"), "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "KL to the reference model",
            "Nats a token, by the chosen estimate; 0 without the penalty.",
            (Query(series("adastream_learner_kl_reference_nats"), "{{instance}}"),),
        ),
    ),
)

WEIGHTS = Row(
    "Weight updates",
    (
        Panel(
            "Generation paused",
            "How long a worker's generation stood still.",
            spread("adastream_weights_pause_seconds"),
            "s",
        ),
        Panel(
            "Whole update",
            "From the request to the passed canary.",
            spread("adastream_weights_update_seconds"),
            "s",
        ),
        Panel(
            "Parts of an update",
            "Means: staging before the pause, loading inside it.",
            (
                Query(mean("adastream_weights_stage_seconds"), "stage"),
                Query(mean("adastream_weights_load_seconds"), "load"),
                Query(mean("adastream_weights_pause_seconds"), "pause"),
            ),
            "s",
        ),
        Panel(
            "Canary",
            "Greatest difference between a worker's and the learner's logprobs after the last update, nats.",
            (Query(f"max({series('adastream_weights_canary_nats')})", "nats"),),
            width=12,
        ),
        Panel(
            "Updates a minute",
            "A failed one fences its worker.",
            (Query(per_minute("adastream_weights_updates_total", "outcome"), "{{outcome}}"),),
            width=12,
        ),
    ),
)

HEALTH = Row(
    "Health",
    (
        Panel("Loop lag", "How late the engine's loop runs.", spread("adastream_engine_loop_lag_seconds"), "s"),
        Panel(
            "Live workers",
            "Beside the restarts since the start.",
            (
                Query(f"sum({series('adastream_engine_workers')})", "live"),
                Query(
                    f"sum by (worker) ({series('adastream_worker_restarts_total')})",
                    "restarts of {{worker}}",
                ),
            ),
        ),
        Panel(
            "Verdicts a second",
            "unparsed, timeout and crashed are no wrong answers.",
            (Query(rate("adastream_verifier_verdicts_total", by="verdict"), "{{verdict}}"),),
            stacked=True,
        ),
        Panel("Verifier's work", "From its start to the verdict.", spread("adastream_verifier_work_seconds"), "s"),
        Panel(
            "Samples waiting for a verifier",
            "Growing: verifiers are too slow or too few.",
            (Query(f"sum({series('adastream_verifier_queue_samples')})", "waiting"),),
        ),
        Panel(
            "Run",
            "Version, strategy and model.",
            (Query(series("adastream_engine_run_info")),),
            kind="table",
        ),
    ),
)

ROWS = (NOW, BUDGET, SIGNAL, STALENESS, THROUGHPUT, LEARNER, OFF_POLICY, WEIGHTS, HEALTH)
