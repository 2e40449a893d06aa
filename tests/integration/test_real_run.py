"""The whole engine with the real vLLM, the real 135M model and the real optimizer: a few steps, one worker killed."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.prepare import main as prepare
from tests.support.run_process import ROOT, assert_gone, engine_run

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = ROOT / "models" / "smollm2-135m-instruct"


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Sums of one digit: the base model is right often enough for useful groups within seconds."""
    levels = "1d+1d=1,1d-1d=1"
    assert prepare(["arithmetic", "--out", str(tmp_path / "data"), "--seed", "3", "--train", "90", "--test", "20",
                    "--levels", levels]) == 0  # fmt: skip
    return tmp_path / "data"


def test_a_real_model_is_sampled_trained_updated_and_saved_although_its_worker_is_killed(
    tmp_path: Path, sums: Path
) -> None:
    overrides = (
        "worker.kind=vllm", "learner.kind=torch", f"model.path={MODEL}", "model.max_context_tokens=128",
        f"data.train={sums / 'train.jsonl'}", f"data.test={sums / 'test.jsonl'}", "sampling.max_tokens=16",
        "worker.count=1", "worker.slots=16", "learner.groups_per_step=2", "run.max_steps=4", "cores.pin=true",
        "strategy.n_max=8", "staleness.max=1", "evaluation.samples=1", "optimizer.lr=1e-5",
        f"worker.kv_cache_bytes={1 << 28}",
    )  # fmt: skip
    with engine_run(tmp_path, *overrides) as run:
        pid = run.pid_of("worker-0")
        run.wait_for(r"step=[1-9]", deadline_s=240)
        os.kill(pid, signal.SIGKILL)
        children = run.descendants()
        assert run.wait(300) == 0, run.output
    assert_gone(children)
    summary = run.summary()
    assert summary["steps"] == 4
    assert summary["weight_updates"] == 5
    assert [event["worker"] for event in run.events("restarted")] == ["worker-0"]
    assert summary["max_staleness_seen"] <= 1
    assert summary["tokens_missing"] == 0
    assert 0 < summary["canary_max_nats"] < 4 * max(summary["canary_noise_nats"], 0.025)
    assert 0 <= summary["accuracy_after"] <= 1
    assert_trained_checkpoint(Path(run.events("saved")[0]["checkpoint"]))


def assert_trained_checkpoint(folder: Path) -> None:
    """It loads in plain transformers and differs from the base model by small, finite steps."""
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).state_dict()
    assert trained.keys() == base.keys()
    changes = [(trained[name].float() - base[name].float()).abs().max().item() for name in base]
    assert 0 < max(changes) < 0.1
