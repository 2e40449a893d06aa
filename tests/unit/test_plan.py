"""`python -m engine.plan`: the proposal, the split of the GPUs, the rules of thumb, the errors and the output."""

import json
from functools import cache
from pathlib import Path

import pytest

from configs.load import load_config
from engine.core.prior import of_rates, tiers
from engine.plan import main
from engine.planning.page import as_json, as_text, limited_by
from engine.planning.propose import STALENESS, TOLERANCE, Plan, balance, propose, tune_split
from engine.planning.question import Question, estimate_memory
from engine.planning.rules_of_thumb import BASE, HARD, median, rules_of_thumb, weight
from engine.planning.trial import NO_EXPIRY, Option, balanced_split, exact, gpu_seconds, play

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
SPEEDS = ["--generation-tokens-per-s", "2500", "--learner-tokens-per-s", "8000"]


@cache
def plan(pass_rate: str = "tiers", gpus: int = 8, learner: float = 8000.0) -> Plan:
    """A quick plan; the exact parts do not depend on how long its runs are."""
    return propose(Question(2500.0, learner, pass_rate=pass_rate, gpus=gpus, samples=1000))


def test_the_published_tiers_get_two_of_each_class_within_32_samples() -> None:
    found = plan()
    assert (found.size.k, found.size.n_max) == (2, 32)
    assert found.chosen.samples_per_useful_group == pytest.approx(14.87, abs=0.005)
    assert found.chosen.success_share == pytest.approx(0.87, abs=0.005)
    assert found.p_median == pytest.approx(0.1 + 0.2 * (0.5005 - 0.197) / 0.617)


def test_prompts_of_one_half_get_larger_groups_and_a_tighter_budget() -> None:
    found = plan("0.5")
    assert (found.size.k, found.size.n_max) == (4, 16)
    assert found.chosen.samples_per_useful_group == pytest.approx(10.36, abs=0.005)


def test_each_budget_is_the_smallest_that_keeps_nine_tenths_of_the_groups() -> None:
    for found in (plan(), plan("0.5")):
        for size in found.sizes:
            most, kept, fewer = (
                exact(found.question, balance(size.k, n), found_prior(found)).cost.useful
                for n in (64 * size.k, size.n_max, max(2 * size.k, size.n_max // 2))
            )
            assert kept >= 0.9 * most
            assert fewer < 0.9 * most or size.n_max == 4 * size.k


def found_prior(found: Plan):
    return tiers() if found.question.pass_rate == "tiers" else of_rates([float(found.question.pass_rate)])


def test_no_allowed_k_below_the_chosen_one_is_within_the_tolerance() -> None:
    for found in (plan(), plan("0.5")):
        costs = {size.k: size.gpu_s_per_kept for size in found.sizes if size.k > 1}
        within = [k for k, cost in costs.items() if cost <= TOLERANCE * min(costs.values())]
        assert found.size.k == within[0]


def test_the_staleness_bound_is_the_first_that_costs_little() -> None:
    *tried, free = plan().etas
    limit = TOLERANCE * free.report.tokens_per_useful_group
    assert free.max_staleness == NO_EXPIRY
    assert [outcome.max_staleness for outcome in tried] == list(STALENESS[: len(tried)])
    assert all(outcome.report.tokens_per_useful_group > limit for outcome in tried[:-1])
    assert tried[-1].report.tokens_per_useful_group <= limit or len(tried) == len(STALENESS)
    assert plan().chosen.max_staleness == tried[-1].max_staleness


def test_the_slower_side_is_named_and_gets_more_gpus() -> None:
    fast, slow = plan().chosen, plan("0.5", learner=300.0).chosen
    assert (limited_by(fast), fast.split.workers) == ("generation", 7)
    assert fast.report.worker_busy_ratio > 0.98
    assert slow.split.workers <= 3
    starved = plan("0.5", gpus=2, learner=100.0).chosen
    assert (limited_by(starved), starved.split.workers) == ("learner", 1)
    assert starved.report.worker_busy_ratio < 0.5
    assert starved.report.learner_idle_ratio < 0.05
    assert "learning is the slower side" in as_text(plan("0.5", gpus=2, learner=100.0))


@pytest.mark.parametrize("learner", [50.0, 300.0, 1000.0, 8000.0])
@pytest.mark.parametrize("gpus", [2, 3, 8, 64])
def test_no_other_split_has_a_faster_slower_side(gpus, learner) -> None:
    question = Question(2500.0, learner, gpus=gpus)
    generation_s, learning_s = gpu_seconds(question, 14.87, 4)
    assert generation_s == pytest.approx(14.87 * 512 / 2500)
    assert learning_s == pytest.approx((128 + 4 * 512) / learner)
    rates = {w: min(w / generation_s, (gpus - w) / learning_s) for w in range(1, gpus)}
    split = balanced_split(question, 14.87, 4)
    assert rates[split.workers] == max(rates.values())
    assert (split.generating, split.learning) == (split.workers, gpus - split.workers)


def test_a_single_gpu_shares_its_time_so_that_neither_side_waits() -> None:
    question = Question(2500.0, 8000.0, gpus=1)
    generation_s, learning_s = gpu_seconds(question, 14.87, 4)
    split = balanced_split(question, 14.87, 4)
    assert split.workers == 1
    assert split.generating / generation_s == pytest.approx(split.learning / learning_s)
    assert split.generating + split.learning == pytest.approx(1.0)
    text = as_text(plan("0.5", gpus=1))
    assert "the one GPU generates 80% of the time" in text


def test_a_run_at_a_smaller_scale_has_the_rate_of_the_whole_machine() -> None:
    question = Question(2500.0, 8000.0, pass_rate="0.2", samples=30_000)
    outcome = play(question, of_rates([0.2]), Option("whole", balance(2, 32)), NO_EXPIRY)
    groups_per_min = 60 * 7 * 2500 / (10.140386 / 0.992869 * 512)
    assert outcome.split.workers == 7
    assert outcome.useful_groups_per_min == pytest.approx(groups_per_min, rel=0.04)
    # The same from the clock of the run: 16 of the 128 groups of a step, an eighth of all slots.
    by_clock = 60 * outcome.report.useful_groups / outcome.report.virtual_s * 128 / 16
    assert by_clock == pytest.approx(groups_per_min, rel=0.06)


def test_alternatives_show_what_width_and_giving_up_do() -> None:
    found = plan()
    rows = {outcome.label: outcome for outcome in found.alternatives}
    assert rows["width 8"].waste_share > 0.3 > 0.1 > found.chosen.waste_share
    assert rows["giving up (optimal)"].samples_per_useful_group == pytest.approx(10.70, abs=0.005)
    assert rows["giving up (optimal)"].success_share == pytest.approx(0.35, abs=0.005)
    assert found.chosen.hard_weight == pytest.approx(3.8486, abs=1e-4)
    assert rows["giving up (optimal)"].hard_weight == pytest.approx(0.6174 / 0.7422, abs=1e-3)
    assert rows["rounds 8 x 4 (paper)"].hard_weight == pytest.approx(3.9464, abs=1e-4)
    assert rows["dapo, n = 4"].hard_weight == pytest.approx(1.0)
    assert (rows["the seed's K and N_max"].strategy.k_pos, rows["the seed's K and N_max"].strategy.n_max) == (8, 64)


@pytest.mark.parametrize(("batch", "k_init"), [(1, 2), (16, 2), (32, 2), (48, 3), (128, 8), (512, 32)])
def test_the_rules_of_thumb_are_those_of_the_seed(batch, k_init) -> None:
    rules = rules_of_thumb(0.2, batch)
    assert (rules.k_init, rules.n_max) == (k_init, 8 * k_init)
    assert rules.source == "rule of thumb from the seed, no source"
    assert rules.weights == {"0.05": 0.5, "0.1": pytest.approx(0.5**0.5), "0.2": 1.0, "0.5": 1.0}


def test_the_hardware_table_has_two_rows_and_a_gap() -> None:
    assert rules_of_thumb(0.31, 16).hardware is BASE
    assert (BASE.gpu_memory_per_batch, BASE.sampling_threads) == ("12 GB", "4-6")
    assert rules_of_thumb(0.09, 16).hardware is HARD
    assert (HARD.gpu_memory_per_batch, HARD.sampling_threads) == ("24 GB", "8-12")
    assert rules_of_thumb(0.3, 16).hardware is rules_of_thumb(0.1, 16).hardware is None


def test_the_median_is_that_of_the_law() -> None:
    assert median(of_rates([0.1, 0.2, 0.7])) == pytest.approx(0.2)
    assert median(of_rates([0.4])) == pytest.approx(0.4)
    assert median(of_rates([0.0, 0.0, 1.0])) == pytest.approx(0.0, abs=1e-12)
    assert weight(0.5, 0.0) == 1.0


def test_memory_is_an_estimate_with_its_parts_named() -> None:
    memory = estimate_memory(Question(1.0, 1.0, params=1.5e9, kv_bytes_per_token=28_672))
    assert memory.generation_weights == 3.0e9
    assert memory.kv_cache == 64 * 640 * 28_672
    assert memory.learner == 27.0e9
    assert estimate_memory(Question(1.0, 1.0, params=8e9)).kv_bytes_per_token == 131_072


def test_the_overrides_are_the_proposal_and_the_engine_takes_them() -> None:
    found = plan()
    config = load_config(PRESET, found.overrides)
    assert config.strategy == found.chosen.strategy
    assert config.staleness.max == found.chosen.max_staleness
    assert (config.worker.count, config.worker.slots) == (found.chosen.split.workers, 64)
    assert config.learner.groups_per_step == 128


def test_the_text_says_what_why_and_how_to_run_it() -> None:
    text = as_text(plan())
    assert "n_max             32 = 16 K: the smallest that makes 90% of the groups of 64 K" in text
    assert "FOR COMPARISON (rule of thumb from the seed, no source)" in text
    assert "K_init = max(2, batch_size/16) = 8, N_max = 8 K = 64" in text
    assert "w = min(1, sqrt(p/p_median)) = 0.50 at p = 0.05, 0.71 at p = 0.1" in text
    assert "no row for p_median = 0.198 (base task > 0.3: 12 GB, 4-6 threads; hard < 0.1: 24 GB, 8-12)" in text
    assert "MEMORY (estimates)" in text
    assert text.splitlines()[-1].strip().startswith("python -m engine.serve --config YOURS.toml strategy.name=balance")


def test_json_has_every_part() -> None:
    found = as_json(plan())
    assert set(found) == {
        "inputs", "pass_rate_mean", "pass_rate_median", "proposal", "reasons", "costs", "staleness", "sizes",
        "rules_of_thumb", "memory_estimate", "not_counted", "overrides",
    }  # fmt: skip
    assert set(found["proposal"]) == {
        "k_pos", "k_neg", "n_max", "width", "workers", "learner_gpus", "max_staleness", "limited_by",
        "useful_groups_per_min",
    }  # fmt: skip
    assert {
        "samples_per_useful_group", "success_share", "tokens_per_useful_group", "useful_groups_per_min",
        "waste_share", "lost_share", "dropped_share", "hard_weight",
    } <= set(found["costs"][0])  # fmt: skip
    assert found["costs"][0]["label"] == "proposal"
    assert found["rules_of_thumb"]["source"] == "rule of thumb from the seed, no source"
    assert found["rules_of_thumb"]["hardware"] is None


def test_the_command_prints_text_or_json_and_one_seed_gives_one_plan(capsys) -> None:
    command = [*SPEEDS, "--samples", "1000", "--pass-rate", "0.5"]
    assert main(command) == 0
    assert capsys.readouterr().out == as_text(plan("0.5"))
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "Infinity" not in printed
    assert "NaN" not in printed
    assert json.loads(printed) == json.loads(json.dumps(as_json(plan("0.5"))))


def test_prompts_that_are_too_hard_are_said_to_be_so() -> None:
    question = Question(2500.0, 8000.0, pass_rate="0.001", samples=1000, groups_per_step=16)
    text = as_text(propose(question))
    assert "most prompts are too hard or too easy for this model" in text
    assert "> 1e6" in text


@cache
def hopeless() -> Plan:
    """A plan none of whose runs of the proposed size makes a group."""
    return propose(Question(2500.0, 8000.0, pass_rate="0.001", samples=2000))


def test_without_a_simulated_group_the_first_row_is_the_proposal_at_its_own_split() -> None:
    found = hopeless()
    assert found.chosen.report.useful_groups == 0
    assert (found.chosen.label, found.chosen.split.workers) == ("proposal", 7)
    assert [o.label for o in found.alternatives if o.label in ("proposal", "6 workers")] == ["6 workers"]


def test_without_a_simulated_group_no_bound_is_called_good_enough_and_the_text_says_why() -> None:
    found, text = hopeless(), as_text(hopeless())
    assert [outcome.max_staleness for outcome in found.etas] == [*STALENESS, NO_EXPIRY]
    assert "staleness.max     8: the largest tried; no useful group was simulated without expiry" in text
    assert "gives             unknown: no useful group was simulated; more --samples" in text
    assert "WHAT IT COSTS (20 prompts a run: no useful group was simulated)" in text
    assert " - s" not in text


def test_a_better_neighbour_of_the_split_becomes_the_proposal_and_the_start_keeps_its_row() -> None:
    question = Question(2500.0, 8000.0, pass_rate="0.2", samples=1000)
    start = play(question, of_rates([0.2]), Option("proposal", balance(2, 32), 3), NO_EXPIRY)
    chosen, others = tune_split(question, of_rates([0.2]), start)
    assert (chosen.label, chosen.split.workers) == ("proposal", 4)
    assert [(o.label, o.split.workers) for o in others] == [("3 workers", 3), ("2 workers", 2)]


def test_a_step_that_is_too_small_for_the_slots_is_named() -> None:
    question = Question(2500.0, 8000.0, pass_rate="0.2", samples=1000, gpus=2, groups_per_step=4)
    assert "more groups a step or fewer slots would help" in as_text(propose(question))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gpus 0", "--gpus must be an integer >= 1, got 0"),
        ("--groups-per-step 0", "--groups-per-step must be an integer >= 1, got 0"),
        ("--slots 0", "--slots must be an integer >= 1, got 0"),
        ("--generation-tokens-per-s 0", "--generation-tokens-per-s must be a finite number above 0, got 0"),
        ("--learner-tokens-per-s nan", "--learner-tokens-per-s must be a finite number above 0, got nan"),
        ("--params -1", "--params must be a finite number above 0, got -1"),
        ("--response-tokens inf", "--response-tokens must be a finite number above 0, got inf"),
        ("--prompt-tokens -1", "--prompt-tokens must be a finite number >= 0, got -1"),
        ("--samples 10", "--samples must be an integer >= 1000, got 10"),
        ("--seed -1", "--seed must be an integer >= 0, got -1"),
        ("--pass-rate 1.5", "a pass rate must be in [0, 1], got 1.5"),
        ("--pass-rate nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("--pass-rate hard", "--pass-rate must be tiers, numbers, or a .jsonl or .csv profile, got 'hard'"),
        ("--pass-rate 0,1", "--pass-rate 0,1: no prompt can be both right and wrong"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(flags, words, capsys) -> None:
    assert main([*SPEEDS, *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_an_empty_law_is_named_by_its_flag(capsys) -> None:
    assert main([*SPEEDS, "--pass-rate", ""]) == 2
    assert "--pass-rate must be tiers, numbers, or a .jsonl or .csv profile, got ''" in capsys.readouterr().err


def test_a_missing_speed_is_a_usage_error(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--generation-tokens-per-s", "2500"])
    assert caught.value.code == 2
    assert "--learner-tokens-per-s" in capsys.readouterr().err


def test_a_bad_profile_row_is_named_by_file_and_line(tmp_path, capsys) -> None:
    profile = tmp_path / "profile.jsonl"
    profile.write_text('{"prompt_id": "a", "rate": 0.5}\n{"prompt_id": "b", "rate": 1.5}\n', encoding="utf-8")
    assert main([*SPEEDS, "--pass-rate", str(profile)]) == 2
    assert f"{profile}:2: rate must be in [0, 1], got 1.5" in capsys.readouterr().err
