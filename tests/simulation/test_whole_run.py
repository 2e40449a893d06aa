"""Whole runs under virtual time, many seeds: nothing lost, nothing twice, the bound holds, whatever crashes."""

import asyncio
import json
import math
import secrets
import statistics
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import Config
from engine.core.errors import RunError, first_cause
from tests.support.whole_run import WholeRun


def config(**sections) -> Config:
    base = {
        "run": {"name": "sim", "max_steps": 12, "seed": 0},
        "model": {"max_context_tokens": 4096},
        "data": {"train": "simulated:300", "test": ""},
        "sampling": {"max_tokens": 2048},
        "worker": {"kind": "simulated", "count": 2, "slots": 16, "max_sample_failures": 100},
        "simulated": {"tokens_per_s": 100.0, "step_s": 2.0, "length_ratio_wrong": 2.0},
        "learner": {"kind": "simulated", "groups_per_step": 8},
        "server": {"live": "none"},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def assert_sound(run: WholeRun, summary: dict, first_index: int = 0) -> None:
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    keys = [(row["arm"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys)) == summary["samples_counted"]
    assert summary["tokens_missing"] == 0
    assert summary["max_staleness_seen"] <= run.config.staleness.max
    assert summary["groups_trained"] == summary["steps"] * run.config.learner.groups_per_step
    assert summary["groups_trained"] - summary["vacant_places"] >= summary["steps"]
    for arm in {row["arm"] for row in rows}:
        indices = sorted(row["index"] for row in rows if row["arm"] == arm)
        assert indices == list(range(first_index, first_index + len(indices)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_run_with_crashing_workers_and_failing_samples_is_sound(
    tmp_path: Path, seed: int, max_staleness: int
) -> None:
    chosen = config(run={"seed": seed}, staleness={"max": max_staleness}, simulated={"failure_rate": 0.05})
    run = WholeRun(chosen, tmp_path, crashes=6, seed=seed)
    summary = run.run()
    assert summary["steps"] == 12
    assert run.children.num_restarts > 0
    assert_sound(run, summary)


class LosesItsLearner(WholeRun):
    """Rank 0 of the learner leaves `lost_after_s` into the run; its launcher ends, with the cause, 5 s later."""

    lost_after_s = 0.0

    async def _chaos(self) -> None:
        await asyncio.sleep(self.lost_after_s)
        self.children.crashed.add("learner")
        await self.children.links["learner"].close()
        await asyncio.sleep(5.0)
        raise RunError("learner exited with code 1")


@pytest.mark.parametrize("lost_after_s", range(2, 12))
def test_a_lost_learner_ends_the_run_with_its_own_cause_whoever_had_a_message_for_it(
    tmp_path: Path, lost_after_s: int
) -> None:
    run = LosesItsLearner(config(simulated={"tokens_per_s": 50.0, "step_s": 0.1}), tmp_path)
    run.lost_after_s = lost_after_s
    with pytest.raises(BaseExceptionGroup) as caught:
        run.run()
    assert str(first_cause(caught.value)) == "learner exited with code 1"


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("name", ["remax", "reinforce++", "reinforce++_baseline"])
@pytest.mark.parametrize("strategy", ["fixed", "balance"])
def test_advantages_that_need_more_than_labels_keep_a_crashing_run_sound(
    tmp_path: Path, strategy: str, name: str, max_staleness: int
) -> None:
    settings = config(
        run={"seed": 3},
        staleness={"max": max_staleness},
        strategy={"name": strategy, "n_max": 6, "group_size": 4},
        advantage={"name": name},
        simulated={"failure_rate": 0.05, "pass_rate": [0.3]},
    )
    run = WholeRun(settings, tmp_path, crashes=4, seed=3)
    summary = run.run()
    assert summary["steps"] == 12
    assert_sound(run, summary, first_index=int(name == "remax"))
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    whitened = [event for event in events if event["event"] == "whitened"]
    if name == "remax":
        # A greedy response is wrong where p <= 1/2: were it the first sample, no step's reward would be above 0.
        assert statistics.fmean(run.coordinator.exchange.tally.step_rewards) > 0.1
        assert {row["advantage"] for row in rows if row["kept"]} == {0.0, 1.0}
    else:
        assert {row["advantage"] for row in rows} == {None}
        assert [event["version"] for event in whitened] == list(range(12))
        assert all(event["std"] > 0.0 and event["samples"] > 8 for event in whitened)


@pytest.mark.timeout(300)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    max_staleness=st.sampled_from([0, 1, 4]),
    width=st.sampled_from([0, 6]),
    accounting=st.sampled_from(["launch", "completion"]),
    max_tokens_per_visit=st.sampled_from([0, 1, 1500]),
    max_tokens_per_step=st.sampled_from([0, 1, 6000]),
)
def test_no_token_is_lost_with_draining_arms_and_token_budgets_whatever_crashes(
    tmp_path: Path, seed, max_staleness, width, accounting, max_tokens_per_visit, max_tokens_per_step
) -> None:
    chosen = config(
        run={"seed": seed, "max_steps": 6},
        staleness={"max": max_staleness},
        simulated={"failure_rate": 0.05},
        strategy={
            "at_exit": "drain",
            "width": width,
            "accounting": accounting,
            "max_tokens_per_visit": max_tokens_per_visit,
            # A visit of one sample has no signal: its places are left empty.
            "unresolved": "shrink",
        },
        learner={"max_tokens_per_step": max_tokens_per_step},
    )
    run = WholeRun(chosen, tmp_path / secrets.token_hex(4), crashes=3, seed=seed)
    summary = run.run()
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert summary["steps"] == 6
    assert summary["tokens_missing"] == 0
    assert summary["samples_counted"] == len({(row["arm"], row["index"]) for row in rows}) == len(rows)
    assert summary["max_staleness_seen"] <= max_staleness
    assert (summary["vacant_places"] > 0) <= (max_tokens_per_step > 0)


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_a_budget_of_one_token_trains_one_group_a_step_and_never_stands_still(
    tmp_path: Path, max_staleness: int
) -> None:
    chosen = config(staleness={"max": max_staleness}, learner={"max_tokens_per_step": 1})
    run = WholeRun(chosen, tmp_path)
    summary = run.run()
    assert_sound(run, summary)
    assert (summary["steps"], summary["vacant_places"]) == (12, 12 * 7)


def test_a_drained_run_to_the_end_of_its_prompts_aborts_nothing(tmp_path: Path) -> None:
    sections = {
        "staleness": {"max": 1_000_000},
        "data": {"max_epochs": 1, "train": "simulated:60"},
        "run": {"max_steps": 1000},
        "learner": {"groups_per_step": 1},
    }
    run = WholeRun(config(**sections, strategy={"width": 6, "at_exit": "drain"}), tmp_path, crashes=3)
    summary = run.run()
    assert_sound(run, summary)
    assert summary["samples_aborted"] == summary["tokens_aborted"] == 0
    assert len(pools(run)) == 60
    by_need = WholeRun(config(**sections), tmp_path / "need").run()
    assert by_need["samples_counted"] < summary["samples_counted"]


def pools(run: WholeRun) -> dict[int, list]:
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    by_arm: dict[int, list] = {}
    for row in sorted(rows, key=lambda row: (row["arm"], row["index"])):
        by_arm.setdefault(row["arm"], []).append((row["index"], row["reward"], row["tokens"], row["kept"]))
    return by_arm


def test_without_expiry_one_seed_counts_and_keeps_the_same_samples_at_any_concurrency(tmp_path: Path) -> None:
    found = []
    for number, (workers, slots, width) in enumerate(((1, 4, 0), (3, 16, 0), (2, 16, 6))):
        chosen = config(
            staleness={"max": 1_000_000},
            worker={"count": workers, "slots": slots},
            strategy={"width": width},
            data={"max_epochs": 1, "train": "simulated:60"},
            run={"max_steps": 1000},
            learner={"groups_per_step": 1},
        )
        run = WholeRun(chosen, tmp_path / str(number))
        run.run()
        found.append(pools(run))
    assert len(found[0]) == 60
    assert found[0] == found[1] == found[2]


PASS_RATE, EXACT_SAMPLES = 0.2, 10.140386
"""2/2, n_max 32: exact mean of samples a prompt."""


def stopping_law(tmp_path: Path, accounting: str, num_prompts: int) -> tuple[float, float, float]:
    """Whole engine, eight in flight an arm, wrong answers twice as long: z-score of samples, length ratios by class."""
    chosen = config(
        staleness={"max": 1_000_000},
        worker={"count": 4, "slots": 64},
        strategy={"width": 8, "accounting": accounting},
        data={"max_epochs": 1, "train": f"simulated:{num_prompts}"},
        simulated={"pass_rate": [PASS_RATE], "tokens_mean": 100.0, "step_s": 0.0, "tokens_per_s": 100.0},
        model={"max_context_tokens": 20_000},
        sampling={"max_tokens": 10_000},
        run={"max_steps": 1_000_000},
        learner={"groups_per_step": 1},
    )
    run = WholeRun(chosen, tmp_path)
    run.run()
    by_arm = pools(run)
    counts = [len(pool) for pool in by_arm.values()]
    assert len(counts) == num_prompts
    kept = [(reward, tokens) for pool in by_arm.values() for _, reward, tokens, is_kept in pool if is_kept]
    right = statistics.fmean(tokens for reward, tokens in kept if reward) / 100
    wrong = statistics.fmean(tokens for reward, tokens in kept if not reward) / 200
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    return abs(statistics.fmean(counts) - EXACT_SAMPLES) / error, right, wrong


@pytest.mark.timeout(300)
def test_the_whole_engine_keeps_the_length_law_and_the_exact_number_of_samples(tmp_path: Path) -> None:
    z, right, wrong = stopping_law(tmp_path, "launch", 6000)
    assert z < 3.0
    assert (right, wrong) == pytest.approx((1.0, 1.0), abs=0.02)


def test_completion_accounting_in_the_whole_engine_fails_both(tmp_path: Path) -> None:
    z, right, wrong = stopping_law(tmp_path, "completion", 1000)
    assert z > 3.0
    assert right < 0.9
    assert wrong < 0.9
