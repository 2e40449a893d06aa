"""A learner of two ranks under torchrun and under the deepspeed launcher; bfloat16, gloo."""

import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import load_config
from engine.cores import CorePlan
from engine.launch import learner_command
from engine.run_folder import RunFolder
from engine.wire import Credit, Finished, Resumed, Stop, WeightsReady
from learner import export
from tests.support.learner_run import LearnerRun, torchrun
from tests.support.run_process import assert_gone

SHARED_MEMORY = Path("/dev/shm")
DEEPSPEED = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2"]


def segments_of(process):
    return list(SHARED_MEMORY.glob(f"adastream-{process.pid}-*"))


def norm_weight(manifest):
    content = (SHARED_MEMORY / manifest.location).read_bytes()
    spec = next(spec for spec in manifest.tensors if spec.name == "model.norm.weight")
    return torch.frombuffer(bytearray(content[spec.offset : spec.offset + spec.num_bytes]), dtype=torch.bfloat16)


def all_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("launcher", "zero_stage"),
    [([*torchrun(2), "-m", "learner.train"], 3), ([*DEEPSPEED, "--module", "learner.train"], 1)],
    ids=["torchrun", "deepspeed"],
)
async def test_two_ranks_train_publish_save_and_end_cleanly(tmp_path, launcher, zero_stage):
    rng = np.random.default_rng(0)
    run = LearnerRun(tmp_path, launcher, {"ranks": "2", "zero_stage": str(zero_stage)})
    run.says_where = False
    async with run:
        ready = await run.next(WeightsReady)
        initial = norm_weight(ready.manifest)
        assert "lm_head.weight" in {spec.name for spec in ready.manifest.tensors}
        reports = []
        for version in range(2):
            done, ready = await run.step(rng, version)
            reports.append(done)
        last = norm_weight(ready.manifest)
        ranks = run.ranks()
        assert len(ranks) == 2
        await run.next(Credit)
        await run.hub.send("learner", Stop(reason="test over"))
        finished = await run.next(Finished)
        assert await run.exit_code() == 0, run.log
        assert_gone(ranks)
        assert segments_of(ranks[0]) == []
    # 4 groups of 5 + 1 + 9 tokens: both ranks' sums were added up.
    assert [report.metrics["tokens_trained"] for report in reports] == [60, 60]
    assert all(report.metrics["grad_norm"] > 0 for report in reports)
    assert not torch.equal(initial, last)
    assert Path(finished.checkpoint) == tmp_path / "checkpoints" / "step-000002"
    saved = all_weights(finished.checkpoint)
    assert torch.equal(saved["model.norm.weight"], last)
    assert export.main([finished.checkpoint, str(tmp_path / "exported")]) == 0
    exported = all_weights(tmp_path / "exported")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert export.main([finished.checkpoint, str(tmp_path / "exported")]) == 2


async def test_two_ranks_go_on_from_their_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    launcher, settings = [*torchrun(2), "-m", "learner.train"], {"ranks": "2", "zero_stage": "3"}
    async with LearnerRun(tmp_path, launcher, settings) as run:
        await run.next(WeightsReady)
        _, ready = await run.step(rng, 0)
        last = norm_weight(ready.manifest)
        await run.next(Credit)
        await run.hub.send("learner", Stop(reason="test over"))
        finished = await run.next(Finished)
        assert await run.exit_code() == 0, run.log
    run = LearnerRun(tmp_path, launcher, settings)
    run.options = ["--set", f'run.resume="{finished.checkpoint}"']
    async with run:
        resumed = await run.next(Resumed)
        ready = await run.next(WeightsReady)
        assert torch.equal(norm_weight(ready.manifest), last)
    assert resumed.policy_version == 1
    run.options += ["--set", "learner.zero_stage=1"]
    async with run:
        assert await run.exit_code() != 0
        assert "learner.zero_stage must be 3 as in the checkpoint, got 1" in run.log


async def test_a_follower_that_dies_ends_the_run_in_seconds_and_is_named(tmp_path):
    config_path = tmp_path / "config.toml"
    run = LearnerRun(tmp_path, [], {"ranks": "2", "zero_stage": "2"})
    with RunFolder(tmp_path / "engine") as folder:
        command = learner_command(load_config(config_path), folder, "ADDRESS", CorePlan((), ()))
    # The engine's own command, up to the address.
    run.launcher = [sys.executable, *command.arguments[: command.arguments.index("--connect")]]
    async with run:
        await run.next(WeightsReady)
        launcher, ranks = psutil.Process(run.process.pid), run.ranks()
        killed_at = time.monotonic()
        ranks[1].send_signal(signal.SIGKILL)
        assert await run.exit_code() != 0
        assert time.monotonic() - killed_at < 15.0
        assert_gone([launcher, *ranks])
        assert "rank 1 died: its connection closed" in run.log


async def test_another_number_of_ranks_than_configured_is_said(tmp_path):
    async with LearnerRun(tmp_path, [sys.executable, "-m", "learner.train"], {"ranks": "2"}) as run:
        assert await run.exit_code() == 2
        assert "learner.ranks must be the number of processes that the launcher started, 1, got 2" in run.log


async def test_ranks_end_with_a_launcher_that_was_killed(tmp_path):
    async with LearnerRun(tmp_path, [*torchrun(2), "-m", "learner.train"], {"ranks": "2", "zero_stage": "2"}) as run:
        await run.next(WeightsReady)
        ranks = run.ranks()
        assert len(segments_of(ranks[0])) == 1
        run.process.kill()
        assert await run.exit_code() == -signal.SIGKILL
        assert_gone(ranks)
        assert segments_of(ranks[0]) == []
