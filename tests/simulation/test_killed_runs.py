"""Whole runs under virtual time that are killed and resumed: no prompt lost, none trained twice, versions go on."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from learner.checkpoint import checkpoints, read_record
from tests.simulation.test_whole_run import config
from tests.support.whole_run import WholeRun

NUM_PROMPTS, B = 150, 4


def settings(seed: int, resume: str = "auto", **sections):
    """Every prompt once, each visit a group."""
    base = {
        "run": {"seed": seed, "max_steps": 10_000, "resume": resume},
        "data": {"train": f"simulated:{NUM_PROMPTS}", "max_epochs": 1},
        "strategy": {"name": "fixed", "n_max": 4, "unresolved": "keep"},
        "staleness": {"max": 50},
        "simulated": {"tokens_per_s": 100.0, "step_s": 1.0, "failure_rate": 0.02},
        "learner": {"kind": "simulated", "groups_per_step": B},
        "checkpoint": {"every_steps": 2, "keep": 1},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return config(**base)


def lives(folder: Path, seed: int, *killed_after_s: float, **sections) -> list[WholeRun]:
    """A run that is killed so many times and then ends by itself."""
    runs = []
    for number, seconds in enumerate([*killed_after_s, None]):
        run = WholeRun(settings(seed, **sections), folder, crashes=2, seed=seed + number, killed_after_s=seconds)
        run.summary = run.run()
        assert bool(run.summary) == (seconds is None)
        runs.append(run)
    return runs


def events(folder: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def committed_steps(folder: Path, runs: list[WholeRun]) -> list:
    """(run, step) of every step that a checkpoint or the end of the run kept."""
    begins = [0, *(event["version"] for event in events(folder, "resumed"))]
    begins = [0] * (len(runs) - len(begins)) + begins  # lives that found no checkpoint start anew
    ends = [*begins[1:], 10_000]
    return [
        (run, step) for run, end in zip(runs, ends, strict=True) for step in run.steps if step.policy_version <= end
    ]


@pytest.mark.parametrize("seed", range(8))
def test_after_kills_every_prompt_is_trained_once_and_none_is_lost(tmp_path: Path, seed: int) -> None:
    runs = lives(tmp_path, seed, 12.0 + seed, 15.0)
    committed = committed_steps(tmp_path, runs)
    versions = [step.policy_version for _, step in committed]
    assert versions == list(range(1, len(versions) + 1))
    groups = [group_id for _, step in committed for group_id in step.group_ids]
    assert groups == sorted(set(groups))
    turns = [run.shipped[group_id].turn for run, step in committed for group_id in step.group_ids]
    assert len(turns) == len(set(turns))
    # The last groups do not fill a step; all others are there.
    assert len(turns) == NUM_PROMPTS - NUM_PROMPTS % B
    assert set(turns) <= set(range(NUM_PROMPTS))
    prompts = {run.shipped[group_id].prompt_id for run, step in committed for group_id in step.group_ids}
    assert len(prompts) == len(turns)
    last = runs[-1].summary
    assert last["tokens_missing"] == 0
    assert last["resumed_at"] == events(tmp_path, "resumed")[-1]["version"] > 0
    assert last["resumed_at"] + last["steps"] == versions[-1]


def test_rows_of_a_resumed_run_follow_the_earlier_ones_and_no_sample_is_there_twice(tmp_path: Path) -> None:
    lives(tmp_path, 3, 14.0)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    keys = [(row["arm"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys))
    (resumed,) = events(tmp_path, "resumed")
    before = [row for row in rows if row["arm"] < resumed["first_arm"]]
    assert rows[: len(before)] == before
    assert 0 < len(before) < len(rows)
    assert resumed["in_flight"] > 0
    steps = [row["version"] for row in events(tmp_path, "step")]
    assert steps.count(resumed["version"] + 1) in (1, 2)


def test_the_bound_holds_after_a_resume(tmp_path: Path) -> None:
    runs = lives(
        tmp_path, 1, 25.0, 20.0,
        staleness={"max": 1}, run={"max_steps": 30, "seed": 1, "resume": "auto"}, strategy={"name": "balance"},
        data={"max_epochs": 50}, simulated={"step_s": 2.0},
    )  # fmt: skip
    for run in runs:
        for step in run.steps:
            assert step.metrics["max_staleness"] <= 1
    last = runs[-1].summary
    assert last["max_staleness_seen"] <= 1
    assert last["tokens_missing"] == 0
    assert last["resumed_at"] + last["steps"] == 30
    versions = [step.policy_version for run in runs for step in run.steps]
    assert all(after == before + 1 or after <= before for before, after in pairwise(versions))
    oldest = min(span.version for group in runs[-1].shipped.values() for s in group.samples for span in s.spans)
    assert oldest == last["resumed_at"]


def test_auto_without_a_checkpoint_starts_anew_and_says_so(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    runs = lives(tmp_path, 0, 3.0)
    assert len(runs[0].steps) == 1
    assert f"no whole checkpoint under {tmp_path}" in caplog.text
    assert runs[1].steps[0].policy_version == 1
    assert events(tmp_path, "resumed") == []


def test_other_prompts_under_a_checkpoint_start_their_order_anew_with_a_warning(tmp_path: Path, caplog) -> None:
    WholeRun(settings(0), tmp_path, killed_after_s=12.0).run()
    run = WholeRun(settings(0, data={"train": "simulated:40"}), tmp_path)
    summary = run.run()
    assert "other prompts or another run.seed" in caplog.text
    assert summary["resumed_at"] > 0
    turns = {group.turn for group in run.shipped.values()}
    assert turns == set(range(40))


def test_a_run_that_had_reached_its_last_step_trains_nothing_more(tmp_path: Path, caplog) -> None:
    limited = settings(0, run={"max_steps": 3, "resume": "auto", "seed": 0})
    assert WholeRun(limited, tmp_path).run()["steps"] == 3
    again = WholeRun(limited, tmp_path)
    assert again.run()["steps"] == 0
    assert "run.max_steps = 3 was reached before this start" in caplog.text
    (newest,) = checkpoints(tmp_path / "checkpoints")
    assert read_record(newest).milestone.policy_version == 3


def test_an_evaluation_before_training_is_not_taken_for_the_time_between_versions(tmp_path: Path) -> None:
    assert WholeRun(settings(0, run={"max_steps": 2, "resume": "auto", "seed": 0}), tmp_path).run()["steps"] == 2
    sections = {"run": {"max_steps": 4, "resume": "auto", "seed": 0}, "data": {"test": "simulated:240"}}
    run = WholeRun(settings(0, **sections), tmp_path)
    assert run.run()["resumed_at"] == 2
    evaluated = events(tmp_path, "evaluated")
    assert [event["when"] for event in evaluated] == ["before", "after"]
    # Steps of 1 s and the wait for groups; the evaluation takes some 20 s.
    assert 1.0 < run.coordinator.exchange.scheduler.dispatcher.pace.version_s < 5.0
