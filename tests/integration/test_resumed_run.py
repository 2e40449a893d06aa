"""Whole runs in real processes with simulated models that end, in one way or another, and are resumed."""

import json
import signal
from pathlib import Path

import pytest

from learner.checkpoint import checkpoints
from tests.support.run_process import assert_gone, engine_run

EVERY_STEP = ("run.resume=auto", "checkpoint.every_steps=1", "checkpoint.keep=3")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_engine_is_resumed_in_its_folder(tmp_path: Path) -> None:
    with engine_run(tmp_path, *EVERY_STEP, "run.max_steps=100000", "worker.heartbeat_deadline_s=4") as run:
        run.wait_for(r"no whole checkpoint under \S+, so the run starts anew")
        run.wait_for(r"step=[5-9]")
        children = run.descendants()
        run.process.send_signal(signal.SIGKILL)
        run.wait()
        assert_gone(children, deadline_s=30)
    newest = int(checkpoints(run.folder / "checkpoints")[-1].name.removeprefix("step-"))
    assert newest >= 4
    for name in ("events.jsonl", "samples.jsonl"):
        with (run.folder / name).open("a") as file:
            file.write('{"event": "step", "ver')  # the row that the kill cut
    before = (run.folder / "config.toml").read_text()
    with engine_run(tmp_path, *EVERY_STEP, f"run.max_steps={newest + 6}") as again:
        again.wait_for(rf"resumed at version {newest}, position \d+, from \S+; \d+ earlier prompts were in flight")
        again.wait_for("not resumed: what earlier visits found of each prompt")
        assert again.wait() == 0, again.output
    summary = again.summary()
    assert (summary["resumed_at"], summary["steps"], summary["groups_trained"]) == (newest, 6, 48)
    assert summary["tokens_missing"] == 0
    assert summary["max_staleness_seen"] <= 2
    (resumed,) = again.events("resumed")
    assert (resumed["version"], resumed["first_group"]) == (newest, 8 * newest)
    versions = [event["version"] for event in again.events("step")]
    assert versions[-6:] == list(range(newest + 1, newest + 7))
    samples = rows(run.folder / "samples.jsonl")
    keys = [(row["arm"], row["index"]) for row in samples]
    assert len(keys) == len(set(keys))
    later = [row for row in samples if row["arm"] >= resumed["first_arm"]]
    assert len(later) == summary["samples_counted"]
    assert min(row["version"] for row in later) == newest
    assert (run.folder / "config-1.toml").read_text() == before


def test_a_finished_run_goes_on_to_a_later_step_and_keeps_its_first_summary(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=3") as run:
        assert run.wait() == 0, run.output
    first = run.summary()
    with engine_run(tmp_path, "run.resume=auto", "run.max_steps=5") as again:
        assert again.wait() == 0, again.output
    assert (again.summary()["resumed_at"], again.summary()["steps"]) == (3, 2)
    assert json.loads((run.folder / "summary-1.json").read_text()) == first
    assert first["resumed_at"] == 0


def test_two_engines_never_share_a_folder(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.resume=auto", "run.max_steps=100000") as run:
        run.wait_for(r"step=[1-9]")
        with engine_run(tmp_path, "run.resume=auto", "run.max_steps=2") as second:
            assert second.wait() == 1, second.output
        assert "must be free, but another engine is using it" in second.output
        assert "Traceback" not in second.output


def test_a_checkpoint_named_by_its_path_starts_a_new_folder(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=3") as run:
        assert run.wait() == 0, run.output
    (checkpoint,) = checkpoints(run.folder / "checkpoints")
    with engine_run(tmp_path, f"run.resume={checkpoint}", "run.max_steps=4") as branch:
        assert branch.wait() == 0, branch.output
    branch.folder = tmp_path / "sim-2"
    assert (branch.summary()["resumed_at"], branch.summary()["steps"]) == (3, 1)
    assert run.summary()["steps"] == 3


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda path: None, 2, "run.resume must be no, auto or the folder of a checkpoint, got"),
        (lambda path: path.mkdir(), 1, "cannot read adastream.json: No such file or directory"),
    ],
)
def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path, make, code, words) -> None:
    make(tmp_path / "absent")
    with engine_run(tmp_path, f"run.resume={tmp_path / 'absent'}", "run.max_steps=4") as run:
        assert run.wait() == code, run.output
    assert words in run.output
    assert "Traceback" not in run.output
