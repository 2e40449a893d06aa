"""The closing text of a run."""

from pathlib import Path

from metrics.report import format_summary

SUMMARY = {
    "accuracy_before": 0.103,
    "accuracy_after": 0.41,
    "accuracy_greedy_before": 0.3,
    "accuracy_greedy_after": 0.63,
    "accuracy_by_level": {"1d+1d": 0.9, "1d-1d": 0.6, "2d+1d": 0.5, "2d-1d": 0.4, "a+b+c": 0.2},
    "steps": 30,
    "wall_s": 352.4,
    "setup_s": 41.0,
    "groups_trained": 480,
    "groups_zero_signal": 12,
    "samples_launched": 9000,
    "samples_counted": 8700,
    "samples_aborted": 300,
    "tokens_generated": 120000,
    "tokens_trained": 30000,
    "tokens_aborted": 2400,
    "useful_groups_per_min": 41.26,
    "max_staleness_seen": 2,
    "expired_samples": 33,
    "weight_updates": 30,
    "weight_pause_s_p50": 0.31,
    "weight_update_s_p50": 1.2,
    "canary_max_nats": 0.0412,
    "learner_tokens_per_s": 327.2,
    "generation_tokens_per_s": 464.9,
}


def test_the_summary_is_short_and_says_where_to_look():
    text = format_summary(SUMMARY, Path("runs/quickstart"))
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines() == [
        "held-out        0.103 -> 0.410 (4.0x)   greedy 0.300 -> 0.630 (2.1x)",
        "by level        1d+1d 0.90   1d-1d 0.60   2d+1d 0.50   2d-1d 0.40",
        "                a+b+c 0.20",
        "steps           30 in 352 s (setup 41 s)",
        "groups          480 trained · 12 without signal · 41.3 useful a minute",
        "samples         9,000 launched · 8,700 counted · 300 aborted",
        "tokens          120,000 generated · trained 25.0% · aborted 2.0%",
        "staleness       max 2 versions · 33 samples expired",
        "weight updates  30 · pause 0.31 s · all 1.20 s (medians) · canary 0.041 nats",
        "tokens/s        465 generated · 327 learned",
        "",
        "look next       runs/quickstart/  (summary.json, events.jsonl, config.toml)",
        "  samples       runs/quickstart/samples.jsonl  (one row a counted sample)",
        "  checkpoint    runs/quickstart/checkpoints  (HF format)",
        "  dashboard     metrics/grafana/sampling_budget.json  (for Grafana)",
    ]


def test_levels_show_both_sides_when_both_are_known():
    text = format_summary({"accuracy_by_level": {"1d+1d": 0.9}, "accuracy_by_level_before": {"1d+1d": 0.31}})
    assert text == "by level        1d+1d 0.31->0.90\n"


def test_what_the_summary_lacks_is_left_out():
    assert format_summary({}) == ""
    assert format_summary({"steps": 3, "accuracy_before": None, "tokens_generated": 0}) == "steps           3\n"
    assert format_summary({"accuracy_after": 0.5}) == "held-out        0.500\n"
    assert format_summary({"accuracy_before": 0.0, "accuracy_after": 0.5}) == "held-out        0.000 -> 0.500\n"


def test_a_named_checkpoint_is_pointed_at():
    assert "runs/a/checkpoints/step-30  (HF" in format_summary({"checkpoint": "runs/a/checkpoints/step-30"}, Path("x"))
