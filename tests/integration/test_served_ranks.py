"""A whole `python -m engine.serve` with a real vLLM worker and two DeepSpeed ranks (ZeRO-3, gloo) on a tiny model.

One folder tells the story: a run to its end, then the same command goes on from its checkpoint until a rank is killed.
A random model says some digit now and then, which is the signal that groups need.
"""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.run_process import EngineRun, assert_gone, engine_run
from tests.support.tiny_model import save_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

STEPS = 2
BOOT_S = 150.0
LEARNER = ("learner.kind=torch", "learner.backend=deepspeed", "learner.ranks=2", "learner.zero_stage=3")
SIZES = ("model.max_context_tokens=64", "sampling.max_tokens=16", f"worker.kv_cache_bytes={1 << 25}")
BALANCE = ("strategy.k_pos=1", "strategy.k_neg=1", "strategy.group_size=2", "strategy.n_max=64")
RUN = (
    *LEARNER, *SIZES, *BALANCE, "worker.kind=vllm", "worker.count=1", "learner.groups_per_step=4", "cores.pin=true",
    "data.test=", "strategy.futility=none", "staleness.max=1", "optimizer.lr=1e-3", "run.resume=auto",
)  # fmt: skip


class Served:
    """The folder of a run, and what the run needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        save_tiny_model(self.model, is_tied=False, dtype=torch.bfloat16)
        rows = [{"id": f"p{number}", "problem": f"Say {number}.", "answer": str(number % 10)} for number in range(60)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, max_steps: int):
        paths = (f"model.path={self.model}", f"data.train={self.folder / 'train.jsonl'}")
        return engine_run(self.folder / "runs", *RUN, *paths, f"run.max_steps={max_steps}")


def ranks_of(run: EngineRun) -> list[psutil.Process]:
    """Processes of the learner's ranks, rank 0 first; it is the one that the engine knows."""
    launcher = psutil.Process(run.pid_of("learner")).parent()
    return sorted(launcher.children(), key=lambda process: int(process.environ()["RANK"]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def finished(served: Served) -> EngineRun:
    """A run that has ended as it should."""
    with served.start(STEPS) as run:
        run.wait_for("lag-0 noise", BOOT_S)
        children, ranks = run.descendants(), ranks_of(run)
        assert run.wait() == 0, run.output
    assert len(ranks) == 2
    assert_gone(children)
    assert list(Path("/dev/shm").glob(f"adastream-{ranks[0].pid}-*")) == []
    return run


def test_two_ranks_train_what_vllm_samples_and_vllm_samples_what_they_trained(finished: EngineRun) -> None:
    summary, steps = finished.summary(), finished.events("step")
    assert (summary["steps"], summary["weight_updates"], summary["weight_updates_fenced"]) == (STEPS, STEPS + 1, 0)
    assert 0 < summary["canary_max_nats"] < 4 * max(summary["canary_noise_nats"], 0.025)
    assert summary["tokens_missing"] == 0
    assert summary["max_staleness_seen"] <= 1
    assert all(step["grad_norm"] > 0 for step in steps)
    # What rank 0 reports is of both ranks: the engine's own count is the same.
    assert sum(step["tokens_trained"] for step in steps) == summary["tokens_trained"] > 0


def test_their_checkpoint_is_whole_and_holds_other_weights_than_the_first(finished: EngineRun, served: Served) -> None:
    (saved,) = finished.events("saved")
    folder = Path(saved["checkpoint"])
    assert sorted(path.name for path in (folder / "state").iterdir()) == [
        "rank-0-of-2.safetensors", "rank-1-of-2.safetensors",
    ]  # fmt: skip
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict() for path in (served.model, folder)
    )
    assert before.keys() == after.keys()
    assert all(torch.isfinite(after[name]).all() for name in after)
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)


def test_ranks_leave_by_themselves_before_the_engine_ends(finished: EngineRun) -> None:
    log = (finished.folder / "logs" / "learner.log").read_text()
    assert f"stopped at version {STEPS}: the run is over" in log
    assert "SIGTERM" not in log
    assert "Traceback" not in log


def test_a_run_that_goes_on_ends_soon_with_the_name_of_a_rank_that_was_killed(
    finished: EngineRun, served: Served
) -> None:
    with served.start(max_steps=100_000) as run:
        run.wait_for(rf"resumed at version {STEPS}, ", BOOT_S)
        run.wait_for(rf"step=(?!{STEPS}/)[1-9]", BOOT_S)
        children, (_, killed) = run.descendants(), ranks_of(run)
        killed_at = time.monotonic()
        killed.send_signal(signal.SIGKILL)
        assert run.wait(60) == 1, run.output
    assert time.monotonic() - killed_at < 30
    assert_gone(children)
    assert re.search(rf"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9 \(pid: {killed.pid}\)", run.output), run.output
    versions = [step["version"] for step in run.events("step")]
    assert versions == list(range(1, len(versions) + 1))
    assert len(versions) > STEPS
