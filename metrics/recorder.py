"""Counts what the engine tells it and renders the Prometheus text.

Invariants: synchronous, no I/O, no clock but the wall time of the last step; every child of a closed label set exists
from the start (so rates see the first increment); an unknown label value is a `ValueError`, never a new series.
Called by the scheduler (one thread); `render` may run in another thread. Hot calls cost under 2 microseconds.
"""

from collections.abc import Iterable, Mapping
from math import nan
from typing import Any, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Summary,
    disable_created_metrics,  # pyright: ignore[reportUnknownVariableType]
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from metrics.catalogue import CATALOGUE, Series

_Family = TypeVar("_Family", bound=MetricWrapperBase)
_STEP_GAUGES = {
    "loss": "adastream_learner_loss",
    "entropy": "adastream_learner_entropy_nats",
    "kl_behaviour": "adastream_learner_kl_behaviour_nats",
    "clip_share": "adastream_learner_clipped_ratio",
    "grad_norm": "adastream_learner_grad_norm",
    "lr": "adastream_learner_learning_rate",
    "ratio_max": "adastream_learner_importance_ratio_max",
    "mask_share": "adastream_learner_masked_ratio",
    "kl_reference": "adastream_learner_kl_reference_nats",
    "mismatch_nats": "adastream_learner_mismatch_nats",
    "mismatch_share": "adastream_learner_mismatch_ratio",
    "mean_staleness": "adastream_learner_staleness_mean_versions",
    "max_staleness": "adastream_learner_staleness_max_versions",
}
_LAG_GAUGES = {
    "ratio_p01": "adastream_learner_lag_ratio_p01",
    "ratio_p50": "adastream_learner_lag_ratio_p50",
    "ratio_p99": "adastream_learner_lag_ratio_p99",
    "clip_share": "adastream_learner_lag_clipped_ratio",
    "ess_share": "adastream_learner_lag_ess_ratio",
    "kl_k1": "adastream_learner_lag_kl_k1_nats",
    "kl_k3": "adastream_learner_lag_kl_k3_nats",
}


class Recorder:
    """The engine's counters. One a run; each has its own registry unless one is given.

    Args:
        registry: where the series live; None = a new one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()
        self.registry = registry or CollectorRegistry()
        build = _Builder(self.registry)
        self._build_budget(build)
        self._build_learning(build)
        build.check_all_used()

    def _build_budget(self, build: "_Builder") -> None:
        self._arms = build.children(Gauge, "adastream_engine_arms")
        retired = build.family(Counter, "adastream_engine_arms_retired_total")
        labels = build.row("adastream_engine_arms_retired_total").labels
        self._retired = {(r, t): retired.labels(r, t) for r in labels["reason"] for t in labels["tier"]}
        self._arm_samples = build.children(Histogram, "adastream_engine_arm_samples")
        self._arm_tokens = build.children(Histogram, "adastream_engine_arm_tokens")
        self._tokens = build.children(Counter, "adastream_engine_tokens_total")
        self._rejected = build.children(Counter, "adastream_engine_prompts_rejected_total")
        self._groups = build.children(Counter, "adastream_engine_groups_total")
        self._first_reward = build.family(Summary, "adastream_engine_first_sample_reward")
        self._staleness = build.family(Histogram, "adastream_engine_sample_staleness_versions")
        self._staleness_max = build.family(Gauge, "adastream_engine_staleness_max_versions")
        self._greatest_age = 0
        self._expired = build.children(Counter, "adastream_engine_expired_samples_total")
        self._in_flight = build.family(Gauge, "adastream_engine_in_flight_requests")
        self._slots = build.family(Gauge, "adastream_engine_slots")
        self._verdicts = build.children(Counter, "adastream_verifier_verdicts_total")
        self._verifier_work = build.family(Histogram, "adastream_verifier_work_seconds")
        self._verifier_queue = build.family(Gauge, "adastream_verifier_queue_samples")
        self._lag = build.family(Histogram, "adastream_engine_loop_lag_seconds")
        self._body_bytes = build.family(Gauge, "adastream_engine_metrics_body_bytes")
        self._info = build.family(Gauge, "adastream_engine_run_info")

    def _build_learning(self, build: "_Builder") -> None:
        self._workers = build.family(Gauge, "adastream_engine_workers")
        self._worker_tokens = build.family(Counter, "adastream_worker_tokens_total")
        self._worker_samples = build.family(Counter, "adastream_worker_samples_total")
        self._worker_restarts = build.family(Counter, "adastream_worker_restarts_total")
        self._by_worker: dict[str, tuple[Counter, Counter, Counter]] = {}
        self._version = build.family(Gauge, "adastream_learner_policy_version")
        self._last_step = build.family(Gauge, "adastream_learner_last_step_timestamp_seconds")
        self._trained = build.family(Counter, "adastream_learner_tokens_trained_total")
        self._packed = build.family(Counter, "adastream_learner_tokens_packed_total")
        self._step_s = build.family(Histogram, "adastream_learner_step_seconds")
        self._wait_s = build.family(Histogram, "adastream_learner_wait_seconds")
        self._step_gauges = {key: build.family(Gauge, name) for key, name in _STEP_GAUGES.items()}
        self._lag_tokens = build.children(Counter, "adastream_learner_lag_tokens_total")
        self._lag_gauges = {key: build.children(Gauge, name) for key, name in _LAG_GAUGES.items()}
        self._updates = build.children(Counter, "adastream_weights_updates_total")
        self._stage_s = build.family(Histogram, "adastream_weights_stage_seconds")
        self._pause_s = build.family(Histogram, "adastream_weights_pause_seconds")
        self._load_s = build.family(Histogram, "adastream_weights_load_seconds")
        self._update_s = build.family(Histogram, "adastream_weights_update_seconds")
        self._canary = build.family(Gauge, "adastream_weights_canary_nats")

    def render(self) -> bytes:
        """The body of /metrics, Prometheus text format 0.0.4."""
        body = generate_latest(self.registry)
        self._body_bytes.set(len(body))
        return body

    def set_arms(self, sampling: int, waiting: int, ready: int) -> None:
        """Arms by state now.

        Args:
            sampling: being sampled (state "sampling").
            waiting: retired with a group that waits to be shipped (state "waiting").
            ready: shipped to the learner and not yet trained (state "training").
        """
        self._arms["sampling"].set(sampling)
        self._arms["waiting"].set(waiting)
        self._arms["training"].set(ready)

    def arm_retired(self, reason: str, tier: str, samples: int, tokens: int) -> None:
        """An arm retired.

        Args:
            reason: solved, exhausted, futile, expired or failed.
            tier: from `metrics.catalogue.tier_of`.
            samples: counted samples.
            tokens: their response tokens.
        """
        _child(self._retired, (reason, tier), "reason and tier").inc()
        self._arm_samples[tier].observe(samples)
        self._arm_tokens[tier].observe(tokens)

    def tokens(self, fate: str, count: int) -> None:
        """`count` response tokens met their fate: trained, counted, aborted, failed or evaluated."""
        _child(self._tokens, fate, "fate").inc(count)

    def generated(self, worker: str, tokens: int, samples: int) -> None:
        """A worker returned `samples` responses of `tokens` tokens together."""
        num_tokens, num_samples, _ = self._worker(worker)
        num_tokens.inc(tokens)
        num_samples.inc(samples)

    def in_flight(self, requests: int, slots: int) -> None:
        """Requests launched and not answered, and the slots of all live workers."""
        self._in_flight.set(requests)
        self._slots.set(slots)

    def group(self, outcome: str) -> None:
        """A group reached one of `GROUP_OUTCOMES`."""
        _child(self._groups, outcome, "outcome").inc()

    def staleness(self, age: int, samples: int) -> None:
        """`samples` samples were trained at this age (versions)."""
        for _ in range(samples):
            self._staleness.observe(age)
        if age > self._greatest_age and samples:
            self._greatest_age = age
            self._staleness_max.set(age)

    def expired_samples(self, count: int, label: Literal["right", "wrong"]) -> None:
        """`count` scored samples (right or wrong ones) grew too old to be trained."""
        _child(self._expired, label, "label").inc(count)

    def first_sample_reward(self, reward: float) -> None:
        """The reward of an arm's first launched sample: the policy's own pass rate, free of adaptive sampling."""
        self._first_reward.observe(reward)

    def verdict(self, verdict: str, work_s: float) -> None:
        """A verifier answered correct, wrong, unparsed, timeout or crashed after `work_s` of work."""
        _child(self._verdicts, verdict, "verdict").inc()
        self._verifier_work.observe(work_s)

    def verifier_queue(self, samples: int) -> None:
        """Samples that wait for a verifier now."""
        self._verifier_queue.set(samples)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step made `version`; `metrics` are those of the learner's `StepDone`, absent keys are left."""
        self._version.set(version)
        self._last_step.set_to_current_time()
        for key, gauge in self._step_gauges.items():
            if key in metrics:
                gauge.set(metrics[key])
        self._trained.inc(metrics.get("tokens_trained", 0.0))
        self._packed.inc(metrics.get("tokens_packed", 0.0))
        for lag, counter in self._lag_tokens.items():
            if f"lag/{lag}/tokens" in metrics:
                self._by_lag(lag, counter, metrics)
        if "step_s" in metrics:
            self._step_s.observe(metrics["step_s"])
        if "wait_s" in metrics:
            self._wait_s.observe(metrics["wait_s"])

    def _by_lag(self, lag: str, tokens: Counter, metrics: Mapping[str, float]) -> None:
        """A step without tokens of a lag has no value there: not-a-number, which leaves a gap in a graph."""
        tokens.inc(metrics[f"lag/{lag}/tokens"])
        for key, gauges in self._lag_gauges.items():
            gauges[lag].set(metrics.get(f"lag/{lag}/{key}", nan))

    def weight_update(
        self,
        outcome: Literal["ok", "failed"],
        stage_s: float,
        pause_s: float,
        load_s: float,
        update_s: float,
        canary_max_nats: float,
    ) -> None:
        """A worker answered a weight update; a failed one counts, its times do not.

        Its canary counts where it got that far (above 0).
        """
        _child(self._updates, outcome, "outcome").inc()
        if outcome == "ok" or canary_max_nats > 0.0:
            self._canary.set(canary_max_nats)
        if outcome == "ok":
            self._stage_s.observe(stage_s)
            self._pause_s.observe(pause_s)
            self._load_s.observe(load_s)
            self._update_s.observe(update_s)

    def worker_restarted(self, worker: str) -> None:
        """A worker was started again under the same name."""
        self._worker(worker)[2].inc()

    def worker_up(self, workers: int) -> None:
        """Live workers now."""
        self._workers.set(workers)

    def loop_lag(self, seconds: float) -> None:
        """The event loop ran a timer this late."""
        self._lag.observe(seconds)

    def prompts(self, *, skipped: int = 0, quarantined: int = 0, passed_over: int = 0) -> None:
        """So many more prompts were skipped (too long), quarantined (failed too often) or let pass by the selector."""
        self._rejected["skipped"].inc(skipped)
        self._rejected["quarantined"].inc(quarantined)
        self._rejected["passed_over"].inc(passed_over)

    def info(self, version: str, strategy: str, model: str) -> None:
        """What runs; a second call replaces the first."""
        self._info.clear()
        self._info.labels(version, strategy, model).set(1)

    def _worker(self, name: str) -> tuple[Counter, Counter, Counter]:
        found = self._by_worker.get(name)
        if found is None:
            families = (self._worker_tokens, self._worker_samples, self._worker_restarts)
            found = (families[0].labels(name), families[1].labels(name), families[2].labels(name))
            self._by_worker[name] = found
        return found


class _Builder:
    """Builds families of one registry from the catalogue, each once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._rows = {row.name: row for row in CATALOGUE}
        self._used: set[str] = set()

    def row(self, name: str) -> Series:
        return self._rows[name]

    def family(self, cls: type[_Family], name: str) -> _Family:
        row = self._rows[name]
        kind = "gauge" if row.kind == "info" else row.kind
        if cls.__name__.lower() != kind:
            raise ValueError(f"{name} must be built as a {kind}, got {cls.__name__}")
        self._used.add(name)
        extra: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}
        return cls(name, row.help, tuple(row.labels), registry=self._registry, **extra)

    def children(self, cls: type[_Family], name: str) -> dict[str, _Family]:
        family = self.family(cls, name)
        (values,) = self._rows[name].labels.values()
        return {value: family.labels(value) for value in values}

    def check_all_used(self) -> None:
        if unused := self._rows.keys() - self._used:
            raise ValueError(f"every series of the catalogue must be recorded, unused: {sorted(unused)}")


_Key = TypeVar("_Key")
_Child = TypeVar("_Child")


def _child(children: Mapping[_Key, _Child], key: _Key, what: str) -> _Child:
    try:
        return children[key]
    except KeyError:
        raise ValueError(f"{what} must be one of {_listed(children)}, got {key!r}") from None


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(repr(key) for key in keys)
