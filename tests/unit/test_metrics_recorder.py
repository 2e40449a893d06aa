"""The catalogue, the recorder, and their promises to Prometheus."""

import math
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.catalogue import CATALOGUE, FATES, GROUP_OUTCOMES, LAGS, REASONS, TIERS, tier_of
from metrics.recorder import Recorder

STEP = {
    "loss": 0.5,
    "entropy": 1.5,
    "kl_behaviour": 0.01,
    "clip_share": 0.1,
    "grad_norm": 2.0,
    "lr": 1e-5,
    "ratio_max": 1.7,
    "tokens_trained": 900.0,
    "tokens_packed": 1500.0,
    "step_s": 2.5,
    "wait_s": 0.5,
    "max_staleness": 2.0,
    "mean_staleness": 0.7,
}


def series_of(recorder: Recorder) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(recorder.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def value(recorder: Recorder, name: str, **labels: str) -> float:
    text = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    return series_of(recorder)[f"{name}{{{text}}}"]


@pytest.mark.parametrize(
    ("num_right", "num_counted", "tier"),
    [
        (0, 0, "unscored"),
        (0, 1, "0"),
        (0, 64, "0"),
        (1, 1, "1"),
        (32, 32, "1"),
        (1, 8, "(0,.2]"),  # posterior mean 2/10, on the bound
        (1, 7, "(.2,.5]"),  # 2/9
        (2, 4, "(.2,.5]"),  # 3/6, on the bound
        (3, 5, "(.5,1)"),  # 4/7
        (31, 32, "(.5,1)"),
    ],
)
def test_tier_holds_the_posterior_mean_of_the_pass_rate(num_right, num_counted, tier):
    assert tier_of(num_right, num_counted) == tier


def test_every_count_has_a_tier_of_the_closed_set_that_never_falls_with_a_right_answer_more():
    order = ("0", "(0,.2]", "(.2,.5]", "(.5,1)", "1")
    for num_counted in range(1, 70):
        ranks = [order.index(tier_of(right, num_counted)) for right in range(num_counted + 1)]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(("num_right", "num_counted"), [(-1, 3), (4, 3)])
def test_impossible_counts_have_no_tier(num_right, num_counted):
    with pytest.raises(ValueError, match="num_right must be between"):
        tier_of(num_right, num_counted)


def test_names_say_application_component_and_unit():
    for row in CATALOGUE:
        component = row.name.split("_")[1]
        assert row.name.startswith("adastream_")
        assert component in ("engine", "worker", "verifier", "learner", "weights")
        assert row.name.endswith("_total") == (row.kind == "counter"), row.name
        assert row.help.endswith("."), row.name
        assert bool(row.buckets) == (row.kind == "histogram"), row.name
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)


def test_only_workers_and_the_run_have_open_labels():
    open_labels = {label for row in CATALOGUE for label, values in row.labels.items() if not values}
    assert open_labels == {"worker", "version", "strategy", "model"}


def test_closed_label_sets_are_complete_from_the_start():
    assert value(Recorder(), "adastream_engine_arms_retired_total", reason="futile", tier="(.5,1)") == 0.0
    names = series_of(Recorder())
    for row in CATALOGUE:
        if row.kind == "counter" and all(row.labels.values()):
            (first, *_) = (name for name in names if name.startswith(row.name + "{"))
            assert names[first] == 0.0


def test_series_do_not_grow_with_prompts():
    def spend(recorder: Recorder, arms: range) -> None:
        for arm in arms:
            recorder.arm_retired(REASONS[arm % 5], TIERS[arm % 6], samples=arm % 33, tokens=arm)
            recorder.group(GROUP_OUTCOMES[arm % 6])
            recorder.tokens(FATES[arm % 5], arm)
            recorder.generated(f"w{arm % 2}", tokens=arm, samples=1)
            recorder.verdict("correct", 0.001)
            recorder.staleness(arm % 3, 4)
            recorder.first_sample_reward(arm % 2)

    recorder = Recorder()
    spend(recorder, range(60))
    few = series_of(recorder)
    spend(recorder, range(60, 10_000))
    many = series_of(recorder)
    assert many.keys() == few.keys()
    retired = sum(number for name, number in many.items() if name.startswith("adastream_engine_arms_retired_total"))
    assert retired == 10_000
    assert len(recorder.render()) < 60_000


def test_there_are_no_created_series():
    recorder = Recorder()
    recorder.first_sample_reward(1.0)
    assert b"_created" not in recorder.render()


def test_retired_arms_spend_samples_and_tokens_in_their_tier():
    recorder = Recorder()
    recorder.arm_retired("solved", "(.2,.5]", samples=7, tokens=100)
    recorder.arm_retired("exhausted", "0", samples=32, tokens=900)
    assert value(recorder, "adastream_engine_arms_retired_total", reason="solved", tier="(.2,.5]") == 1
    assert value(recorder, "adastream_engine_arm_samples_sum", tier="(.2,.5]") == 7
    assert value(recorder, "adastream_engine_arm_samples_bucket", tier="0", le="24.0") == 0
    assert value(recorder, "adastream_engine_arm_samples_bucket", tier="0", le="32.0") == 1
    assert value(recorder, "adastream_engine_arm_tokens_sum", tier="0") == 900


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda r: r.tokens("wasted", 1), "fate must be one of 'trained'"),
        (lambda r: r.group("lost"), "outcome must be one of"),
        (lambda r: r.arm_retired("bored", "0", 1, 1), "reason and tier must be one of"),
        (lambda r: r.arm_retired("solved", "0.5", 1, 1), "reason and tier must be one of"),
        (lambda r: r.verdict("right", 0.1), "verdict must be one of"),
        (lambda r: r.expired_samples(1, "correct"), "label must be one of"),
        (lambda r: r.weight_update("late", 1, 1, 1, 1, 0), "outcome must be one of"),
    ],
)
def test_an_unknown_label_is_an_error_and_never_a_series(call, text):
    recorder = Recorder()
    before = series_of(recorder)
    with pytest.raises(ValueError, match=text):
        call(recorder)
    # The body's own size is the only series that may differ between two renderings.
    after = series_of(recorder)
    assert {k: v for k, v in after.items() if "body" not in k} == {k: v for k, v in before.items() if "body" not in k}


def test_a_step_sets_the_learners_series():
    recorder = Recorder()
    recorder.step(3, STEP)
    recorder.step(4, {"loss": 0.25, "tokens_trained": 100.0})
    assert value(recorder, "adastream_learner_policy_version") == 4
    assert value(recorder, "adastream_learner_loss") == 0.25
    assert value(recorder, "adastream_learner_learning_rate") == 1e-5
    assert value(recorder, "adastream_learner_tokens_trained_total") == 1000
    assert value(recorder, "adastream_learner_tokens_packed_total") == 1500
    assert value(recorder, "adastream_learner_step_seconds_count") == 1
    assert value(recorder, "adastream_learner_last_step_timestamp_seconds") > 1.6e9


def test_a_step_sets_the_series_of_the_lags_it_had():
    recorder = Recorder()
    tokens = {f"lag/{lag}/tokens": 0.0 for lag in LAGS}
    recorder.step(1, STEP | tokens | {"lag/0/tokens": 70.0, "lag/0/ratio_p99": 1.2, "lag/0/ess_share": 0.9})
    recorder.step(2, STEP | tokens | {"lag/3-4/tokens": 5.0, "lag/3-4/ratio_p99": 1.6, "mismatch_nats": 0.02})
    assert value(recorder, "adastream_learner_lag_tokens_total", lag="0") == 70.0
    assert value(recorder, "adastream_learner_lag_tokens_total", lag="3-4") == 5.0
    assert value(recorder, "adastream_learner_lag_ratio_p99", lag="3-4") == 1.6
    assert math.isnan(value(recorder, "adastream_learner_lag_ratio_p99", lag="0"))
    assert value(recorder, "adastream_learner_mismatch_nats") == 0.02


def test_a_learner_that_reports_no_lags_leaves_them_alone():
    recorder = Recorder()
    recorder.step(1, STEP)
    assert value(recorder, "adastream_learner_lag_ess_ratio", lag="5+") == 0.0


def test_a_failed_weight_update_counts_without_its_times():
    recorder = Recorder()
    recorder.weight_update("ok", stage_s=0.5, pause_s=0.3, load_s=0.25, update_s=1.0, canary_max_nats=0.04)
    recorder.weight_update("failed", stage_s=0.5, pause_s=0.0, load_s=0.0, update_s=0.0, canary_max_nats=3.0)
    assert value(recorder, "adastream_weights_updates_total", outcome="ok") == 1
    assert value(recorder, "adastream_weights_updates_total", outcome="failed") == 1
    assert value(recorder, "adastream_weights_pause_seconds_count") == 1
    assert value(recorder, "adastream_weights_pause_seconds_sum") == 0.3
    assert value(recorder, "adastream_weights_canary_nats") == 3.0
    recorder.weight_update("failed", stage_s=0.5, pause_s=0.0, load_s=0.0, update_s=0.0, canary_max_nats=0.0)
    assert value(recorder, "adastream_weights_canary_nats") == 3.0


def test_gauges_and_counters_hold_what_they_were_told():
    recorder = Recorder()
    recorder.set_arms(sampling=20, waiting=3, ready=16)
    recorder.in_flight(requests=30, slots=32)
    recorder.generated("w0", tokens=120, samples=5)
    recorder.expired_samples(2, "right")
    recorder.verifier_queue(9)
    recorder.worker_up(2)
    recorder.worker_restarted("w0")
    recorder.loop_lag(0.002)
    recorder.prompts(skipped=2)
    recorder.prompts(quarantined=1)
    for age, samples in ((1, 3), (2, 1), (0, 4), (5, 0)):
        recorder.staleness(age, samples)
    assert value(recorder, "adastream_engine_arms", state="sampling") == 20
    assert value(recorder, "adastream_engine_arms", state="training") == 16
    assert value(recorder, "adastream_engine_slots") == 32
    assert value(recorder, "adastream_worker_tokens_total", worker="w0") == 120
    assert value(recorder, "adastream_worker_restarts_total", worker="w0") == 1
    assert value(recorder, "adastream_engine_expired_samples_total", side="right") == 2
    assert value(recorder, "adastream_verifier_queue_samples") == 9
    assert value(recorder, "adastream_engine_workers") == 2
    assert value(recorder, "adastream_engine_prompts_rejected_total", reason="skipped") == 2
    assert value(recorder, "adastream_engine_prompts_rejected_total", reason="quarantined") == 1
    assert value(recorder, "adastream_engine_sample_staleness_versions_count") == 8
    assert value(recorder, "adastream_engine_sample_staleness_versions_sum") == 5
    assert value(recorder, "adastream_engine_staleness_max_versions") == 2


def test_the_runs_info_is_one_series():
    recorder = Recorder()
    recorder.info("0.1.0", "fixed", "a")
    recorder.info("0.1.0", "balance", "b")
    assert [name for name in series_of(recorder) if "run_info" in name] == [
        "adastream_engine_run_info{model=b,strategy=balance,version=0.1.0}"
    ]


def test_two_recorders_share_nothing():
    first, second = Recorder(), Recorder()
    first.group("sealed")
    assert value(second, "adastream_engine_groups_total", outcome="sealed") == 0


@pytest.mark.prometheus
def test_promtool_finds_nothing_to_complain_about():
    recorder = Recorder()
    recorder.info("0.1.0", "balance", "model")
    recorder.generated("w0", 1, 1)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=recorder.render(), capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
