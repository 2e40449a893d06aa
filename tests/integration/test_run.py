"""Whole runs in real processes over real sockets, with simulated generation: faults, limits, shutdown."""

import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.support.run_process import assert_gone, engine_run

SUMMARY_KEYS = {
    "accuracy_before", "accuracy_after", "accuracy_by_level", "steps", "wall_s", "setup_s", "groups_trained",
    "groups_zero_signal", "samples_launched", "samples_counted", "samples_aborted", "tokens_generated",
    "tokens_trained", "tokens_aborted", "useful_groups_per_min", "max_staleness_seen", "expired_samples",
    "weight_updates", "weight_pause_s_p50", "weight_update_s_p50", "canary_max_nats", "learner_tokens_per_s",
    "generation_tokens_per_s",
}  # fmt: skip


def assert_ledger_closes(summary: dict) -> None:
    assert summary["tokens_missing"] == 0
    fates = ("trained", "counted", "aborted", "failed", "in_flight")
    assert summary["tokens_generated"] == sum(summary[f"tokens_{fate}"] for fate in fates)
    assert summary["tokens_trained"] > 0


def test_a_run_ends_with_a_summary_whose_ledger_closes(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=10", "data.test=simulated:40") as run:
        assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 10
    assert summary["groups_trained"] == 80
    assert summary["max_staleness_seen"] <= 2
    assert 0.1 < summary["accuracy_before"] < 0.4
    assert_ledger_closes(summary)
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == summary["samples_counted"]
    assert len(run.events("step")) == 10
    assert "look next" in run.output


def test_the_resolved_config_of_a_run_starts_the_same_run(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=2") as run:
        assert run.wait() == 0, run.output
    with engine_run(tmp_path / "again", "run.max_steps=2", config=str(run.folder / "config.toml")) as again:
        assert again.wait() == 0, again.output


def test_strictly_on_policy_runs_and_never_trains_an_older_token(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=6", "staleness.max=0") as run:
        assert run.wait() == 0, run.output
    assert run.summary()["max_staleness_seen"] == 0
    assert_ledger_closes(run.summary())


def test_a_killed_worker_is_restarted_and_its_samples_are_asked_for_again(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=25", "simulated.step_s=0.2") as run:
        pid = run.pid_of("worker-0")
        run.wait_for(r"step=[1-9]")
        os.kill(pid, signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert [event["worker"] for event in run.events("restarted")] == ["worker-0"]
    summary = run.summary()
    assert summary["samples_failed"] > 0
    assert summary["steps"] == 25
    assert_ledger_closes(summary)


def test_a_worker_that_keeps_dying_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000", "worker.max_restarts=0") as run:
        run.wait_for(r"step=[1-9]")
        os.kill(run.pid_of("worker-1"), signal.SIGKILL)
        children = run.descendants()
        assert run.wait() == 1, run.output
    assert "worker-1 was killed by SIGKILL" in run.output
    assert_gone(children)


def test_a_killed_learner_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000") as run:
        run.wait_for(r"step=[1-9]")
        children = run.descendants()
        os.kill(run.pid_of("learner"), signal.SIGKILL)
        assert run.wait() == 1, run.output
    assert "error: learner was killed by SIGKILL" in run.output
    assert_gone(children)


def test_failing_samples_are_asked_for_again_and_never_counted_as_wrong(tmp_path: Path) -> None:
    rates = ("simulated.failure_rate=0.1", "simulated.pass_rate=[0.5]")
    overrides = ("run.max_steps=8", "worker.max_sample_failures=20", *rates)
    with engine_run(tmp_path, *overrides) as run:
        assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["samples_failed"] > 20
    assert summary["prompts_quarantined"] == 0
    assert_ledger_closes(summary)


def test_a_verifier_that_hangs_costs_its_prompt_but_not_the_run(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    rows = [{"id": f"good-{n}", "problem": f"Reply with {n}.", "answer": str(n)} for n in range(60)]
    rows.append({"id": "bad", "problem": "Reply with 1.", "answer": "9^{9^9}"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        "verifier.name=math",
        "verifier.deadline_s=1.0",
        "verifier.max_attempts=1",
        "simulated.pass_rate=[0.5]",
    )
    limits = ("worker.max_sample_failures=2", "run.max_steps=12", "worker.count=1", "worker.slots=8")
    with engine_run(tmp_path, f"data.train={data}", *overrides, *limits) as run:
        assert run.wait() == 0, run.output
    assert run.summary()["prompts_quarantined"] >= 1
    assert_ledger_closes(run.summary())


def test_ctrl_c_drains_saves_and_leaves_nothing_running(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000") as run:
        run.wait_for(r"step=[1-9]")
        children = run.descendants()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(30) == 130, run.output
    assert_ledger_closes(run.summary())
    assert len(run.events("saved")) == 1
    assert_gone(children)


def test_ctrl_c_while_starting_ends_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000") as run:
        run.wait_for("cores:")
        children = run.descendants()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(30) == 130, run.output
    assert "interrupted by SIGINT" in run.output
    assert_gone(children)


def test_a_second_ctrl_c_forces_the_end(tmp_path: Path) -> None:
    overrides = ("run.max_steps=100000", "simulated.step_s=30", "server.drain_deadline_s=300")
    with engine_run(tmp_path, *overrides) as run:
        run.wait_for(r"training:8")
        children = run.descendants()
        run.process.send_signal(signal.SIGINT)
        run.wait_for("stage=(draining|saving)")
        run.process.send_signal(signal.SIGINT)
        assert run.wait(25) == 130, run.output
    assert_gone(children)


def test_a_learner_that_fails_to_save_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    overrides = ("run.max_steps=100000", "simulated.step_s=30", "server.drain_deadline_s=300")
    with engine_run(tmp_path, *overrides) as run:
        run.wait_for(r"training:8")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("stage=saving")
        os.kill(run.pid_of("learner"), signal.SIGKILL)
        assert run.wait(25) == 1, run.output
    assert "error: learner was killed by SIGKILL" in run.output


def test_children_of_a_killed_engine_end_by_themselves(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000", "worker.heartbeat_deadline_s=4") as run:
        run.wait_for(r"step=[1-9]")
        children = run.descendants()
        run.process.send_signal(signal.SIGKILL)
        assert_gone(children, deadline_s=30)


def test_data_that_ends_ends_the_run(tmp_path: Path) -> None:
    overrides = ("run.max_steps=100000", "data.train=simulated:100", "data.max_epochs=1", "simulated.pass_rate=[0.5]")
    with engine_run(tmp_path, *overrides) as run:
        assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["groups_trained"] >= 80
    assert_ledger_closes(summary)


def test_a_time_limit_ends_the_run(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=0", "run.max_train_s=2") as run:
        assert run.wait() == 0, run.output
    assert 1.9 < run.summary()["train_s"] < 8


@pytest.mark.parametrize("key", ["server.http_port", "server.wire_port"])
def test_a_taken_port_is_named(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with engine_run(tmp_path, f"{key}={port}") as run:
            assert run.wait() == 1, run.output
    assert f"127.0.0.1:{port}" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.max_tokns=3", ["sampling.max_tokns", "max_tokens", "allowed"]),
        ("strategy.n_max=3", ["n_max must be >= k_pos + k_neg = 4", "got 3"]),
        ("strategy.name=best", ["strategy.name", "balance", "'best'"]),
        ("data.train=missing.jsonl", ["missing.jsonl"]),
        ("sampling.max_tokens=5000", ["max_context_tokens", "5000"]),
    ],
)
def test_bad_input_is_answered_with_what_was_got_and_what_is_allowed(tmp_path: Path, override, words) -> None:
    with engine_run(tmp_path, override) as run:
        assert run.wait() == 2, run.output
    assert all(word in run.output for word in words), run.output
    assert "Traceback" not in run.output


def test_a_prompt_longer_than_the_context_is_skipped_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    rows = [{"id": f"good-{n}", "problem": f"Reply with {n}.", "answer": str(n)} for n in range(40)]
    rows.append({"id": "long", "problem": "x" * 2000 + " Reply with 1.", "answer": "1"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with engine_run(tmp_path, f"data.train={data}", "run.max_steps=6", "simulated.pass_rate=[0.5]") as run:
        assert run.wait() == 0, run.output
    assert run.summary()["prompts_skipped"] == 1
    assert [event["prompt_id"] for event in run.events("skipped")] == ["long"]


def test_a_data_row_without_an_answer_is_named_with_its_line(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"id": "a", "problem": "Reply with 1.", "answer": "1"}\n{"id": "b", "problem": "Reply with 2."}\n')
    with engine_run(tmp_path, f"data.train={data}") as run:
        assert run.wait() == 2, run.output
    assert f"{data}:2: no column 'answer'" in run.output


def test_a_missing_model_folder_ends_the_run_without_restarts(tmp_path: Path) -> None:
    overrides = ("worker.kind=vllm", "learner.kind=torch", f"model.path={tmp_path / 'no-model'}", "worker.count=1")
    with engine_run(tmp_path, *overrides) as run:
        assert run.wait() == 1, run.output
    assert "no-model" in run.output
    assert "restart" not in run.output


def test_health_and_metrics_answer_while_a_run_goes_on(tmp_path: Path) -> None:
    with engine_run(tmp_path, "run.max_steps=100000") as run:
        url = run.wait_for(r"metrics (http://\S+)/metrics")[1]
        run.wait_for(r"step=[1-9]")
        with urllib.request.urlopen(f"{url}/healthz", timeout=10) as answer:
            health = json.loads(answer.read())
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            body = answer.read().decode()
    assert health["status"] == "ok"
    assert health["version"] >= 1
    assert 'adastream_engine_tokens_total{fate="trained"}' in body
