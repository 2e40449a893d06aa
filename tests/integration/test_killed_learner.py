"""A learner process that was killed is resumed by the next one; the test plays the engine."""

import os
import signal

import numpy as np
import pytest

from engine.transport.base import PeerGone
from engine.wire import Credit, Finished, Position, Resumed, StepDone, Stop, TrainGroup, WeightsPublished, WeightsReady
from learner.checkpoint import checkpoints
from tests.support.learner_inputs import random_group
from tests.support.learner_process import Engine, save_model_with_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-model")
    save_model_with_tokenizer(folder)
    return folder


def hashes(ready):
    return {spec.name: spec.xxh3 for spec in ready.manifest.tensors}


def last_of_step(group, version):
    """The group with the run's position, as the engine sends it at a step's end."""
    position = Position(4 * version + 6, [4 * version + 4], [], 99, "ab")
    return TrainGroup(
        group_id=group.group_id, prompt_id=group.prompt_id, prompt_token_ids=group.prompt_token_ids,
        samples=group.samples, train_version=version, max_staleness=2, turn=4 * version + 3, position=position,
    )  # fmt: skip


async def take_step(engine, version, seed):
    """Publish `version`, ship a step's groups; what the learner says of the next version."""
    rng = np.random.default_rng(seed)
    await engine.send(WeightsPublished(policy_version=version))
    assert (await engine.next(Credit)).groups == 4
    for number in range(4):
        group = random_group(rng, version * 4 + number, lengths=(4, 4), version=version)
        await engine.send(last_of_step(group, version) if number == 3 else group)
    done = await engine.next(StepDone)
    assert done.policy_version == version + 1
    return await engine.next(WeightsReady)


@pytest.mark.timeout(300)
async def test_a_learner_killed_while_it_saves_is_resumed_from_its_last_whole_checkpoint(tmp_path, model_folder):
    async with Engine(tmp_path, model_folder, "run.resume=auto", "checkpoint.every_steps=1") as engine:
        assert await engine.next(Resumed) == Resumed(checkpoint="")
        ready = await engine.next(WeightsReady)
        assert ready.manifest.policy_version == 0
        laid_out = {0: hashes(ready)}
        version = 0
        for life in range(3):
            for _ in range(2):
                ready = await take_step(engine, version, seed=version + 100 * life)
                version += 1
                assert ready.manifest.policy_version == version
                laid_out[version] = hashes(ready)
            # The save of this version has just begun, or is over.
            os.kill(engine.process.pid, signal.SIGKILL)
            await engine.process.wait()
            await engine.start()
            await engine.next(PeerGone)
            resumed = await engine.next(Resumed)
            ready = await engine.next(WeightsReady)
            assert resumed.policy_version == ready.manifest.policy_version
            assert resumed.policy_version in (version - 1, version)
            assert resumed.checkpoint.endswith(f"checkpoints/step-{resumed.policy_version:06d}")
            assert hashes(ready) == laid_out[resumed.policy_version]
            assert resumed.last_group_id == 4 * resumed.policy_version - 1
            before = resumed.policy_version - 1
            assert resumed.position == Position(4 * before + 6, [4 * before + 4], [], 99, "ab")
            version = resumed.policy_version
        await engine.send(WeightsPublished(policy_version=version))
        await engine.next(Credit)
        await engine.send(Stop(reason="over"))
        await engine.next(Finished)
        assert await engine.exit_code() == 0, engine.errors.read_text()
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name != ".lock"]
    assert left == [f"step-{version:06d}"]


async def test_a_checkpoint_that_cannot_be_used_is_a_usage_error_in_one_line(tmp_path, model_folder):
    async with Engine(tmp_path, model_folder) as engine:
        await engine.next(WeightsReady)
        await engine.send(WeightsPublished(policy_version=0))
        await engine.next(Credit)
        await engine.send(Stop(reason="over"))
        await engine.next(Finished)
        await engine.exit_code()
    (checkpoint,) = checkpoints(tmp_path / "run" / "checkpoints")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    async with Engine(tmp_path, model_folder, f"run.resume={checkpoint}") as engine:
        assert await engine.exit_code() == 2
    errors = engine.errors.read_text()
    assert f"checkpoint {checkpoint}: model.safetensors must have" in errors
    assert "Traceback" not in errors
