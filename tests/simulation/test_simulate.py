"""`python -m engine.simulate`: the published laws through the command's own function, its JSON, its errors."""

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.load import load_config
from engine.core.law import exact_law
from engine.policy import make_policy
from engine.simulate import main
from engine.simulation.report import Report
from engine.simulation.run import simulate
from engine.simulation.sweep import sweep, table
from engine.strategies import Balance, Positives
from engine.strategies.rounds import Rounds

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
KEYS = [
    "strategy", "prompts", "samples_per_prompt_mean", "samples_per_prompt_se", "success_rate", "zero_signal_rate",
    "kept_length_ratio_right", "kept_length_ratio_wrong", "pool_mean_bias", "implied_weight", "tokens_generated",
    "tokens_wasted", "useful_groups", "tokens_per_useful_group", "worker_busy_ratio", "learner_idle_ratio",
    "staleness_max", "staleness_mean", "groups_dropped", "virtual_s", "samples", "wall_s", "visits", "passed_over",
    "visits_lost", "visits_failed", "launches",
]  # fmt: skip
POSITIVES_8 = "strategy.name=positives strategy.k_pos=8 strategy.n_max=64 strategy.group_size=16"
BALANCE_4 = "strategy.k_pos=4 strategy.k_neg=4 strategy.n_max=64 strategy.group_size=8"
BALANCE_2 = "strategy.k_pos=2 strategy.k_neg=2 strategy.n_max=32 strategy.group_size=4"
ADA_POSITIVES = "strategy.name=positives strategy.k_pos=1 strategy.n_max=32 strategy.group_size=4"
SAMPLES = {
    POSITIVES_8: [
        (0.05, 63.878530, 0.014219),
        (0.1, 60.196746, 0.307829),
        (0.2, 39.651869, 0.957980),
        (0.5, 16.0, 1.0),
    ],
    BALANCE_4: [
        (0.05, 56.473753, 0.398591),
        (0.1, 38.445655, 0.893709),
        (0.2, 20.070283, 0.999502),
        (0.5, 10.1875, 1.0),
    ],
    BALANCE_2: [(0.05, 25.736785, 0.480038), (0.1, 18.134620, 0.843577), (0.2, 10.140386, 0.992869), (0.5, 5.5, 1.0)],
    ADA_POSITIVES: [(0.05, 16.125770, 0.806289), (0.1, 9.656632, 0.965663), (0.2, 4.996039, 0.999208), (0.5, 2.0, 1.0)],
}
"""Settings -> (pass rate, exact samples of a visit, probability of the exit)."""
ROUNDS = {0.05: 27.314658, 0.1: 20.962482, 0.2: 13.417560, 0.5: 8.566674}
CASES = [(rule, *values) for rule, rows in SAMPLES.items() for values in rows]


def play(overrides: str = "", *, learns_at_once: bool = True) -> Report:
    """A run of the preset without expiry, unless the overrides say otherwise."""
    config = load_config(PRESET, ["staleness.max=1000000", "sim.prompts=600", *overrides.split()])
    return simulate(config, step_s=0.0 if learns_at_once else None)


FIXED_4 = "strategy.name=fixed strategy.n_max=4 strategy.group_size=4"


def test_a_greedy_response_costs_a_request_and_leaves_every_prompt_the_weight_of_plain_reinforce() -> None:
    report = play(f"{FIXED_4} advantage.name=remax sim.pass_rate=[0.3,0.7] sim.prompts=2000")
    assert (report.samples, report.samples_per_prompt_mean) == (10_000, 4.0)
    assert report.implied_weight == pytest.approx({"0.3": 1.0, "0.7": 1.0}, abs=0.1)
    # Greedy wrong at 0.3 and right at 0.7: no signal where all four samples are the same.
    assert is_near(report.zero_signal_rate, 0.7**4, math.sqrt(0.7**4 * (1.0 - 0.7**4) / 2000))


@pytest.mark.parametrize("max_staleness", [0, 2, 1_000_000])
@pytest.mark.parametrize(("name", "zero_signal"), [("reinforce++", 0.0), ("reinforce++_baseline", 0.2482)])
def test_whitened_steps_train_every_prompt_with_a_signal_at_any_bound(name, zero_signal, max_staleness) -> None:
    overrides = f"{FIXED_4} advantage.name={name} sim.pass_rate=0.3 staleness.max={max_staleness}"
    report = play(overrides, learns_at_once=False)
    assert report.staleness_max <= max_staleness
    assert is_near(report.zero_signal_rate, zero_signal, math.sqrt(zero_signal * (1.0 - zero_signal) / 600))
    ended = report.useful_groups + report.groups_dropped + report.visits_lost
    with_signal = round(600 * (1.0 - report.zero_signal_rate))
    if name == "reinforce++" or max_staleness > 2:
        assert ended == with_signal
    else:  # where samples expired the kept ones may all be alike
        assert 0.97 * with_signal < ended <= with_signal
    again = play(overrides, learns_at_once=False)
    assert again.as_json() | {"wall_s": 0.0} == report.as_json() | {"wall_s": 0.0}


def is_near(value: float, exact: float, error: float) -> bool:
    return abs(value - exact) < max(3.0 * error, 1e-9)


@pytest.mark.parametrize(("rule", "pass_rate", "samples", "success"), CASES)
def test_samples_and_success_of_a_visit_are_the_exact_ones(rule, pass_rate, samples, success) -> None:
    report = play(f"{rule} sim.pass_rate={pass_rate}")
    assert is_near(report.samples_per_prompt_mean, samples, report.samples_per_prompt_se)
    # A rate that is 1 to six digits may well be seen as 1.
    assert is_near(report.success_rate, success, math.sqrt((success + 1e-6) * (1.0 - success + 1e-6) / 600))


@pytest.mark.parametrize(("pass_rate", "samples"), ROUNDS.items())
def test_rounds_cost_what_their_barrier_costs(pass_rate, samples) -> None:
    report = play(f"{BALANCE_2} strategy.name=rounds sim.pass_rate={pass_rate}")
    assert is_near(report.samples_per_prompt_mean, samples, report.samples_per_prompt_se)


def test_zero_signal_bias_and_weight_are_those_of_the_exact_law() -> None:
    overrides = f"{BALANCE_2} strategy.name=rounds sim.pass_rate=0.05 sim.prompts=1000"
    runs = [play(f"{overrides} sim.seed={seed}") for seed in range(8)]
    for values, exact in (
        ([run.zero_signal_rate for run in runs], 0.1937),
        ([run.pool_mean_bias for run in runs], 0.06632 - 0.05),
        ([run.implied_weight["0.05"] for run in runs], 5.8570),
    ):
        # Student's t with 7 degrees of freedom: 5.4 standard errors are as rare as 3.3 of a normal law.
        assert abs(statistics.fmean(values) - exact) < 5.4 * statistics.stdev(values) / math.sqrt(8)


def test_a_list_of_pass_rates_has_a_weight_for_each() -> None:
    report = play("sim.pass_rate=[0.2,0.5,1.0] strategy.name=fixed strategy.n_max=4 sim.prompts=3000")
    assert list(report.implied_weight) == ["0.2", "0.5"]
    assert report.implied_weight["0.5"] == pytest.approx(0.75, abs=0.06)
    assert list(play("sim.pass_rate=0.2,0.5").implied_weight) == ["0.2", "0.5"]
    assert play("sim.pass_rate=tiers").implied_weight == {}


def test_one_seed_gives_one_report_and_another_seed_another() -> None:
    def values(seed: int) -> dict:
        report = play(f"sim.seed={seed} staleness.max=1 sim.failure_rate=0.05", learns_at_once=False)
        return {key: value for key, value in asdict(report).items() if key != "wall_s"}

    assert values(1) == values(1)
    assert values(1) != values(2)


def test_what_counts_does_not_depend_on_width_slots_or_failures() -> None:
    def law(overrides: str) -> tuple:
        report = play(f"sim.pass_rate=0.3 worker.max_sample_failures=100 {overrides}")
        return (
            report.samples_per_prompt_mean,
            report.samples_per_prompt_se,
            report.success_rate,
            report.zero_signal_rate,
        )

    base = law("sim.slots=1")
    assert law("sim.width=8 sim.workers=3 sim.slots=30") == base
    assert law("sim.failure_rate=0.3") == base
    assert law("strategy.accounting=completion sim.width=8") != base


def test_need_wastes_nothing_and_a_fixed_width_pays_for_what_it_launches_beyond_the_stop() -> None:
    # Equal lengths: completions come in launch order, so that nothing runs ahead behind a slow launch.
    need, wide = (play(f"sim.pass_rate=0.2 sim.tokens_sigma=0 sim.width={width}") for width in (0, 8))
    assert need.tokens_wasted == 0
    assert need.samples == round(need.samples_per_prompt_mean * 600)
    # 2/2, N = 32, C = 8 in flight: 17.024 issued for 10.140 counted.
    issued = wide.samples / 600
    assert abs(issued - 17.024) < 3.0 * wide.samples_per_prompt_se + 1e-6
    assert wide.tokens_wasted > 0


def test_giving_up_at_the_right_moment_costs_10_70_samples_a_useful_group_and_wastes_none() -> None:
    report = play("strategy.futility=optimal sim.prompts=6000")
    assert report.tokens_wasted == 0
    # The standard error of the ratio is 0.11 at 6,000 visits.
    assert report.samples / report.useful_groups == pytest.approx(10.70, abs=0.35)
    assert report.success_rate == pytest.approx(0.35, abs=0.02)


def test_kept_lengths_follow_their_law_in_launch_order_and_not_in_order_of_completion() -> None:
    setting = "sim.pass_rate=0.2 sim.width=8 sim.length_ratio_wrong=2 sim.prompts=6000"
    fair, biased = play(setting), play(f"{setting} strategy.accounting=completion")
    assert fair.kept_length_ratio_right == pytest.approx(1.0, abs=0.025)
    assert fair.kept_length_ratio_wrong == pytest.approx(1.0, abs=0.025)
    assert biased.kept_length_ratio_right < 0.9
    assert biased.kept_length_ratio_wrong < 0.8


def test_a_token_budget_of_a_visit_costs_hard_prompts_most_and_wastes_what_was_under_way() -> None:
    setting = "sim.pass_rate=[0.05,0.5] sim.prompts=4000"
    free, capped = play(setting), play(f"{setting} strategy.max_tokens_per_visit=800")
    assert capped.samples_per_prompt_mean < free.samples_per_prompt_mean
    assert capped.success_rate < free.success_rate
    # Exact without a budget: 5.757 and 1; 2.70 and 0.99 were measured with it, over 16,000 prompts.
    assert capped.implied_weight["0.05"] == pytest.approx(2.70, abs=0.35)
    assert capped.implied_weight["0.5"] == pytest.approx(0.99, abs=0.05)
    assert free.implied_weight["0.05"] > 5.0
    assert capped.tokens_wasted > 0
    drained = play(f"{setting} strategy.max_tokens_per_visit=800 strategy.at_exit=drain")
    assert drained.tokens_wasted == 0


def test_a_token_budget_of_a_visit_keeps_wrong_answers_too_short_where_they_are_long() -> None:
    setting = "sim.pass_rate=0.2 sim.prompts=8000 sim.length_ratio_wrong=2 strategy.max_tokens_per_visit="
    capped, free = play(f"{setting}400"), play(f"{setting}0")
    # 0.944 against 0.998 at this seed; the pool's share of right ones falls from 0.27 to 0.19.
    assert capped.kept_length_ratio_wrong < 0.97 < free.kept_length_ratio_wrong
    assert capped.pool_mean_bias < 0.0 < free.pool_mean_bias


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_token_budget_of_a_step_leaves_places_vacant_and_every_visit_ends(max_staleness) -> None:
    runs = {
        budget: play(f"staleness.max={max_staleness} learner.max_tokens_per_step={budget}", learns_at_once=False)
        for budget in (0, 5_000, 1)
    }
    assert runs[0].vacant_places == 0 < min(runs[5_000].vacant_places, runs[1].vacant_places)
    # One group a step, fifteen places vacant.
    assert runs[1].vacant_places % 15 == 0
    assert f"places left vacant  {runs[1].vacant_places}" in runs[1].as_text()
    assert "vacant" not in runs[0].as_text()
    for report in runs.values():
        assert report.staleness_max <= max_staleness
        assert report.useful_groups > 0


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_sample_over_the_bound_reaches_a_gradient(max_staleness) -> None:
    report = play(f"staleness.max={max_staleness} sim.update_s=0.2", learns_at_once=False)
    assert report.staleness_max <= max_staleness
    assert report.useful_groups > 300


def test_the_slower_side_is_the_busy_one() -> None:
    fast = play("staleness.max=2 sim.prompts=2500", learns_at_once=False)
    slow = play("staleness.max=2 sim.prompts=2500 sim.learner_ratio=0.7", learns_at_once=False)
    assert fast.worker_busy_ratio >= 0.99
    assert fast.learner_idle_ratio > 0.1
    assert slow.learner_idle_ratio <= 0.03
    assert slow.worker_busy_ratio < 0.9


def test_prompts_that_no_strategy_can_use_end_too() -> None:
    report = play("sim.pass_rate=0.0")
    assert (report.useful_groups, report.tokens_per_useful_group, report.implied_weight) == (0, None, {})
    assert (report.samples_per_prompt_mean, report.zero_signal_rate) == (32.0, 1.0)
    assert "without signal 1.0000" in report.as_text()


def test_the_sweep_has_every_rule_budget_and_exit_beside_its_exact_value() -> None:
    rows = list(table(load_config(PRESET, ["sim.prompts=60"]), pass_rates=(0.1, 0.5)))
    assert len(rows) == 2 * 2 * 3 * 2
    for row in rows:
        rule = Positives(8, row.n_max, 16) if row.rule == "positives" else Balance(8, 8, row.n_max, 16)
        strategy = Rounds(rule, row.n_max // 8, 8) if row.test == "round" else rule
        law = exact_law(strategy, row.pass_rate, row.n_max)
        assert row.samples_exact == pytest.approx(law.expected_samples)
        variance = law.mean(lambda stop: stop.total**2) - law.expected_samples**2
        assert is_near(row.samples_mean, row.samples_exact, math.sqrt(variance / 60)), row
    found = {(row.rule, row.test, row.n_max, row.pass_rate): row.samples_exact for row in rows}
    assert found["positives", "sample", 64, 0.1] == pytest.approx(60.196746, abs=1e-6)
    assert found["positives", "round", 64, 0.5] == pytest.approx(19.447467, abs=1e-6)
    assert found["balance", "sample", 128, 0.5] == pytest.approx(19.142, abs=1e-3)
    assert found["balance", "round", 128, 0.1] == pytest.approx(86.180, abs=1e-3)


def test_the_sweep_writes_a_table_and_a_plot_of_each_rule(tmp_path) -> None:
    paths = sweep(load_config(PRESET, ["sim.prompts=5"]), tmp_path / "new" / "folder", pass_rates=(0.2, 0.8))
    assert [path.name for path in paths] == ["sweep.csv", "sweep_positives.png", "sweep_balance.png"]
    lines = paths[0].read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("rule,test,k,n_max,pass_rate,samples_exact,samples_mean,samples_se,success_exact")
    assert len(lines) == 1 + 24
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])


def test_a_folder_of_the_sweep_that_is_a_file_is_refused_by_its_flag(tmp_path, capsys) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    for out in (tmp_path / "taken", tmp_path / "taken" / "inner"):
        assert main(["--config", str(PRESET), "--sweep", "--out", str(out), "sim.prompts=1"]) == 2
        assert f"error: --out {out}: no folder can be made there" in capsys.readouterr().err


def test_the_command_prints_every_key_as_json(capsys) -> None:
    assert main(["--config", str(PRESET), "--json", "sim.prompts=50"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == KEYS
    assert printed["strategy"] == "balance"
    assert (printed["prompts"], printed["visits"], printed["passed_over"]) == (50, 50, 0)


def test_the_command_prints_a_short_text(capsys) -> None:
    assert main(["--config", str(PRESET), "sim.prompts=50", "sim.pass_rate=0.5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("balance: 50 prompts, 50 visits")
    assert "passed over" not in text
    assert main(["--config", str(PRESET), "sim.prompts=50", "sim.epochs=2", "selector.name=mopps"]) == 0
    assert "passed over         93 turns" in capsys.readouterr().out
    assert "implied weight      p = 0.5:" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sim.pass_rates=0.1", "unknown key 'sim.pass_rates'"),
        ("sim.pass_rate=1.5", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=[0.1,-0.2]", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=[]", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=nan", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=true", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=0.1,1.2", "sim.pass_rate must be a number in [0, 1]"),
        ("sim.pass_rate=0.1,x", "sim.pass_rate must be tiers, numbers, or a .jsonl or .csv profile, got '0.1,x'"),
        ("simulated.pass_rate=[1.5]", "simulated.pass_rate.0: Input should be less than or equal to 1, got 1.5"),
        ("sim.pass_rate=teirs", "sim.pass_rate must be tiers, numbers, or a .jsonl or .csv profile, got 'teirs'"),
        ("sim.pass_rate=0.1,", "sim.pass_rate must be tiers, numbers, or a .jsonl or .csv profile, got '0.1,'"),
        ("sim.epochs=0", "sim.epochs"),
        ("sim.prompts=0", "sim.prompts"),
        ("sim.slots=0", "sim.slots"),
        ("sim.learner_ratio=0", "sim.learner_ratio"),
        ("sim.learner_ratio=inf", "sim.learner_ratio"),
        ("sim.failure_rate=1", "sim.failure_rate"),
        ("sim.tokens_mean=-3", "sim.tokens_mean"),
        ("sim.tokens_mean=1e300", "sim.tokens_mean must be <= 2.06e+13 with tokens_sigma = 0.8"),
        ("sim.length_ratio_wrong=1e300", "length_ratio_wrong = 1e+300, got 64: responses of 2^53 tokens"),
        ("strategy.at_exit=wait", "strategy.at_exit"),
        ("strategy.max_tokens_per_visit=-1", "strategy.max_tokens_per_visit"),
        ("learner.max_tokens_per_step=-1", "learner.max_tokens_per_step"),
        ("strategy.n_max=3", "strategy.n_max must be >= k_pos + k_neg"),
        ("sim.pass_rate=nowhere.jsonl", "nowhere.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(override, words, capsys) -> None:
    assert main(["--config", str(PRESET), override]) == 2
    assert words in capsys.readouterr().err


def test_a_measured_profile_gives_the_pass_rates_and_a_bad_row_is_named(tmp_path, capsys) -> None:
    profile = tmp_path / "profile.jsonl"
    profile.write_text('{"prompt_id": "a", "rate": 0.0}\n{"prompt_id": "b", "rate": 1.0}\n', encoding="utf-8")
    report = play(f"sim.pass_rate={profile}")
    assert report.success_rate == 0.0
    assert report.samples_per_prompt_mean == 32.0
    profile.write_text('{"prompt_id": "a", "rate": 0.5}\n{"prompt_id": "b", "rate": 1.5}\n', encoding="utf-8")
    assert main(["--config", str(PRESET), f"sim.pass_rate={profile}"]) == 2
    assert f"{profile}:2: rate must be in [0, 1], got 1.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        ("1.7", "error: futility.prior '1.7': "),
        ("soft", "futility.prior must be tiers, numbers, or a .jsonl or .csv profile, got 'soft'"),
        ("0.0", "error: strategy.futility = optimal: no pass rate of the prior"),
        ("[0.2,-1]", "'0.2,-1': "),
        ("nowhere.csv", "nowhere.csv: cannot be read"),
        ("true", "valid str"),
    ],
)
def test_a_prior_of_futility_that_is_no_law_is_refused(prior, words, capsys) -> None:
    assert main(["--config", str(PRESET), "strategy.futility=optimal", f"futility.prior={prior}"]) == 2
    assert words in capsys.readouterr().err


def test_a_prior_of_futility_may_be_a_number_or_a_list() -> None:
    for prior in ("0.3", "[0.1,0.4]", "0.1,0.4"):
        assert play(f"strategy.futility=optimal futility.prior={prior} sim.prompts=50").samples > 0


def test_the_sweep_ignores_selectors_stages_and_epochs() -> None:
    plain = load_config(PRESET, ["sim.prompts=20"])
    other = load_config(PRESET, ["sim.prompts=20", "sim.epochs=3", "selector.name=mopps", "strategy.name=staged"])
    assert list(table(other, pass_rates=(0.3,))) == list(table(plain, pass_rates=(0.3,)))


def test_the_law_of_the_strategy_the_command_plays_is_the_exact_one() -> None:
    config = load_config(PRESET, BALANCE_2.split())
    law = exact_law(make_policy(config).strategy, 0.2, config.strategy.n_max)
    assert law.expected_samples == pytest.approx(10.140386, abs=1e-6)
