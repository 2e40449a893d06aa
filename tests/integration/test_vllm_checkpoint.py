"""What the learner saved is what vLLM generates with: as a worker's model, and through a resumed run of the engine."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import Config
from engine.wire import Encode, Encoded, Generate, Milestone, SampleDone, SampleKey, SamplingParams, Stop
from learner.checkpoint import checkpoints
from learner.trainer import TorchTrainer
from tests.support.learner_inputs import random_group
from tests.support.run_process import engine_run
from tests.support.tiny_model import logprobs_of, save_tiny_model
from tests.support.worker_process import running_worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BF16_NOISE = 0.2
"""Nats: more than twice what two implementations of the same weights differ by."""


async def trained_checkpoint(model: Path, run_folder: Path, is_tied: bool) -> Path:
    save_tiny_model(model, is_tied=is_tied, dtype=torch.bfloat16)
    sections = {
        "run": {"max_steps": 9},
        "model": {"path": str(model)},
        "optimizer": {"lr": 3e-2},
        "learner": {"max_first_mismatch_nats": 20.0},  # the groups' logprobs are made up
    }
    with TorchTrainer(Config.model_validate(sections), run_folder) as trainer:
        await trainer.open()
        for version in range(4):
            rng = np.random.default_rng(version)
            await trainer.accumulate([random_group(rng, version, lengths=(9, 9, 9), version=version)])
            await trainer.step()
        return Path(await trainer.save(Milestone(4)))


@pytest.mark.parametrize("is_tied", [True, False])
async def test_a_checkpoint_loads_in_vllm_and_draws_what_transformers_computes(tmp_path: Path, is_tied: bool) -> None:
    checkpoint = await trained_checkpoint(tmp_path / "model", tmp_path / "run", is_tied)
    trained = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[run]\nmax_steps = 1\n[model]\npath = "{checkpoint}"\nmax_context_tokens = 160\n'
        "[worker]\nslots = 4\nkv_cache_bytes = 33554432\n"
    )
    async with running_worker("workers.vllm", config, tmp_path / "log", "--cores", "0") as worker:
        await worker.tell(Encode(request=1, prompts=["1 + 1?"], chat_template=True))
        (prompt,) = (await worker.hear(Encoded)).token_ids
        text = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
            [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert prompt.tolist() == list(text)
        params = SamplingParams(max_tokens=24, temperature=1.0, top_p=1.0, seed=3)
        await worker.tell(Generate(key=SampleKey(0, 0), prompt_token_ids=prompt, params=params))
        answer = await worker.hear(SampleDone)
        await worker.tell(Stop(reason="done"))
    whole = [*prompt.tolist(), *answer.token_ids.tolist()]
    differences = [
        np.abs(logprobs_of(model, whole)[len(prompt) - 1 :].numpy() - answer.logprobs).max()
        for model in (trained, base)
    ]
    assert differences[0] < BF16_NOISE < differences[1]


def test_a_run_with_real_models_is_killed_and_resumed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", is_tied=True, dtype=torch.bfloat16)
    overrides = (
        "worker.kind=vllm", "learner.kind=torch", f"model.path={tmp_path / 'model'}", "model.max_context_tokens=96",
        "worker.count=1", "worker.slots=8", f"worker.kv_cache_bytes={1 << 25}", "worker.heartbeat_deadline_s=10",
        "data.train=simulated:60", "sampling.max_tokens=8", "strategy.name=fixed", "strategy.n_max=4",
        "advantage.name=drgrpo", "strategy.unresolved=keep", "learner.groups_per_step=2", "optimizer.lr=1e-3",
        "run.resume=auto", "checkpoint.every_steps=1", "cores.pin=true",
    )  # fmt: skip
    with engine_run(tmp_path, *overrides, "run.max_steps=100000") as run:
        run.wait_for(r"step=[3-9]", deadline_s=180)
        children = run.descendants()
        os.kill(run.process.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        run.wait()
    version = int(checkpoints(run.folder / "checkpoints")[-1].name.removeprefix("step-"))
    with engine_run(tmp_path, *overrides, f"run.max_steps={version + 3}") as again:
        again.wait_for(rf"resumed at version {version}, ", deadline_s=180)
        assert again.wait(180) == 0, again.output
    summary = again.summary()
    assert (summary["resumed_at"], summary["steps"], summary["tokens_missing"]) == (version, 3, 0)
    assert 0 < summary["canary_noise_nats"] < 0.4
    assert [event["version"] for event in again.events("step")][-3:] == [version + 1, version + 2, version + 3]
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    (resumed,) = again.events("resumed")
    assert min(row["version"] for row in samples if row["arm"] >= resumed["first_arm"]) == version
    last = checkpoints(run.folder / "checkpoints")[-1]
    assert last.name == f"step-{version + 3:06d}"
    assert AutoModelForCausalLM.from_pretrained(last, dtype="auto")
