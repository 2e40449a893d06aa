"""A resumed learner goes on bit for bit, from the checkpoint that was meant, or says what does not fit."""

import asyncio
import os
import random
import socket

import msgspec
import numpy as np
import pytest
import torch

from configs import Config
from engine.core.errors import DataError, DeadlineError
from engine.wire import Fingerprint, Milestone, Position, TrainGroup
from learner.checkpoint import read_record
from learner.milestone import Loaded, finish, settle
from learner.resume import CheckpointFolder, check_fits
from learner.state import random_state, set_random_state
from learner.trainer import TorchTrainer
from tests.support.learner_inputs import random_group
from tests.support.tiny_model import save_tiny_model

DEADLINE_S = 30.0
MILESTONE = Milestone(3, 17, Position(40, [3, 9], [41], 50, "ab"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, is_tied=True, dtype=torch.bfloat16)
    return folder


def config_of(model_folder, resume="no", **sections):
    return Config.model_validate(
        {
            "run": {"max_steps": 9, "resume": resume},
            "model": {"path": str(model_folder), "max_context_tokens": 64},
            "optimizer": {"lr": 1e-2, "warmup_steps": 5, "weight_decay": 0.1},
            "sampling": {"max_tokens": 32},
            "learner": {"micro_batch_tokens": 64, "threads": 1, "max_first_mismatch_nats": 20.0},
            **sections,
        }
    )


async def train(trainer, versions):
    """Steps from these versions: their metrics, a draw of every generator after each, and the weights' hashes."""
    found = []
    for version in versions:
        rng = np.random.default_rng(version)
        await trainer.accumulate([random_group(rng, version * 2 + n, version=version) for n in range(2)])
        metrics = await trainer.step()
        del metrics["peak_rss_bytes"]
        found.append((metrics, torch.rand(1).item(), np.random.standard_normal(), random.gauss(0.0, 1.0)))
    manifest = await trainer.lay_out(versions[-1] + 1)
    return found, [(spec.name, spec.xxh3) for spec in manifest.tensors]


def seed_generators(seed):
    random.seed(seed)
    np.random.seed(seed)


async def test_three_steps_and_a_resume_and_three_more_are_six_steps_bit_for_bit(tmp_path, model_folder):
    seed_generators(1)
    with TorchTrainer(config_of(model_folder), tmp_path / "straight") as trainer:
        assert await trainer.open() is None
        straight, weights = await train(trainer, range(6))
        state = {name: tensor.clone() for name, tensor in trainer._backend.state().items()}
    seed_generators(1)
    with TorchTrainer(config_of(model_folder), tmp_path / "run") as trainer:
        await trainer.open()
        first, weights_at_3 = await train(trainer, range(3))
        path = await trainer.save(MILESTONE)
    seed_generators(2)
    with TorchTrainer(config_of(model_folder, "auto"), tmp_path / "run") as trainer:
        assert await trainer.open() == Loaded(path, MILESTONE)
        then, resumed_weights = await train(trainer, range(3, 6))
        resumed_state = trainer._backend.state()
    assert first + then == straight
    assert resumed_weights == weights != weights_at_3
    assert resumed_state.keys() == state.keys() == {"master", "first_moment", "second_moment", "adamw_steps", "steps"}
    for name, tensor in state.items():
        assert torch.equal(tensor, resumed_state[name]), name
    assert state["steps"] == state["adamw_steps"] == 6


async def test_a_checkpoint_of_before_the_first_step_goes_on_as_if_nothing_had_happened(tmp_path, model_folder):
    with TorchTrainer(config_of(model_folder), tmp_path) as trainer:
        await trainer.open()
        path = await trainer.save(Milestone())
        seed_generators(1)
        straight = await train(trainer, range(2))
    with TorchTrainer(config_of(model_folder, path), tmp_path / "other") as trainer:
        assert await trainer.open() == Loaded(path, Milestone())
        seed_generators(1)
        assert await train(trainer, range(2)) == straight


async def test_auto_without_a_checkpoint_starts_anew(tmp_path, model_folder):
    with TorchTrainer(config_of(model_folder, "auto"), tmp_path) as trainer:
        assert await trainer.open() == Loaded("", Milestone())


async def test_a_damaged_checkpoint_is_passed_over_by_auto_and_an_error_by_its_path(tmp_path, model_folder):
    with TorchTrainer(config_of(model_folder), tmp_path) as trainer:
        await trainer.open()
        older = await trainer.save(Milestone(1))
        newer = await trainer.save(Milestone(2))
    state = tmp_path / "checkpoints" / "step-000002" / "state" / "rank-0-of-1.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with TorchTrainer(config_of(model_folder, "auto"), tmp_path) as trainer:
        assert await trainer.open() == Loaded(older, Milestone(1))
    with (
        TorchTrainer(config_of(model_folder, newer), tmp_path) as trainer,
        pytest.raises(DataError, match=r"step-000002: state/rank-0-of-1\.safetensors must have"),
    ):
        await trainer.open()


async def test_another_model_is_refused_and_named(tmp_path, model_folder):
    with TorchTrainer(config_of(model_folder), tmp_path) as trainer:
        await trainer.open()
        path = await trainer.save(Milestone(1))
    save_tiny_model(tmp_path / "untied", is_tied=False, dtype=torch.bfloat16)
    with (
        TorchTrainer(config_of(tmp_path / "untied", path), tmp_path / "run") as trainer,
        pytest.raises(DataError, match=r"shape of lm_head.weight must be \[288, 64\], is absent"),
    ):
        await trainer.open()


async def test_adapters_go_on_only_with_their_alpha_and_on_the_weights_they_were_trained_on(tmp_path, model_folder):
    other = tmp_path / "other-base"
    save_tiny_model(other, is_tied=True, dtype=torch.bfloat16, seed=1)
    with TorchTrainer(config_of(model_folder, lora={"rank": 2, "alpha": 4.0}), tmp_path / "run") as trainer:
        await trainer.open()
        path = await trainer.save(Milestone(1))
    for base, alpha, words in (
        (model_folder, 8.0, r"lora\.alpha must be 4.0 as in the checkpoint, got 8.0 "),
        (other, 4.0, r"does not fit this run: hash of the frozen weights \(model.path\) must be"),
    ):
        config = config_of(base, path, lora={"rank": 2, "alpha": alpha})
        with TorchTrainer(config, tmp_path / "again") as trainer, pytest.raises(DataError, match=words):
            await trainer.open()
    with TorchTrainer(config_of(model_folder, path, lora={"rank": 2, "alpha": 4.0}), tmp_path / "again") as trainer:
        assert await trainer.open() == Loaded(path, Milestone(1))


FINGERPRINT = Fingerprint("deepspeed ZeRO-1", "LlamaForCausalLM", "bfloat16", 2, {"a": [2, 3], "b": [4]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "simulated"}, r"learner\.kind must be simulated as in the checkpoint, got torch"),
        ({"backend": "torch"}, r"learner\.backend must be torch as in the checkpoint, got deepspeed"),
        ({"backend": "deepspeed ZeRO-3"}, r"learner\.zero_stage must be 3 as in the checkpoint, got 1"),
        ({"architecture": "Qwen2ForCausalLM"}, "architecture must be Qwen2ForCausalLM as in the checkpoint, got Llama"),
        ({"dtype": "float32"}, "dtype must be float32 as in the checkpoint, got bfloat16"),
        ({"world_size": 4}, r"learner\.ranks must be 4 as in the checkpoint, got 2"),
        ({"lora_alpha": 32.0}, r"lora\.alpha must be 32.0 as in the checkpoint, got 0.0"),
        ({"frozen": "ab"}, r"hash of the frozen weights \(model.path\) must be ab as in the checkpoint, got none"),
        ({"parameters": {"a": [2, 3], "b": [5]}}, r"shape of b must be \[4\], is \[5\]"),
        ({"parameters": {"a": [2, 3]}}, r"shape of b must be \[4\], is absent"),
        ({"parameters": {"a": [2, 3], "b": [4], "c": [1]}}, r"shape of c must be absent, is \[1\]"),
        ({"parameters": {"b": [4], "a": [2, 3]}}, "parameters are in another order"),
        ({"parameters": {str(n): [n] for n in range(9)}}, "and 8 more"),
    ],
)
def test_what_differs_is_named(tmp_path, change, words):
    saved = msgspec.structs.replace(FINGERPRINT, **change)
    check_fits(tmp_path, FINGERPRINT, FINGERPRINT)
    with pytest.raises(DataError, match=words):
        check_fits(tmp_path, saved, FINGERPRINT)


def test_generators_go_on_where_they_were():
    seed_generators(4)
    torch.manual_seed(4)
    np.random.standard_normal(3)  # leaves a second normal behind, and so does gauss
    random.gauss(0.0, 1.0)
    state = {name: tensor.clone() for name, tensor in random_state().items()}

    def draws():
        return torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), [random.gauss(0.0, 1.0) for _ in range(3)]

    first = draws()
    assert draws() != first
    set_random_state(state)
    assert draws() == first


async def test_a_second_learner_waits_for_the_folder(tmp_path, caplog):
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    await first.open(DEADLINE_S)
    (first.path / ".step-000004-1.tmp").mkdir()
    opening = asyncio.create_task(second.open(DEADLINE_S))
    await asyncio.sleep(0)
    assert f"learner {os.getpid()} on {socket.gethostname()} still uses {first.path}" in caplog.text
    assert not opening.done()
    assert (first.path / ".step-000004-1.tmp").is_dir()
    first.close()
    await opening
    assert not (first.path / ".step-000004-1.tmp").exists()
    second.close()


async def test_a_learner_that_waits_for_the_folder_can_be_ended_and_lets_the_next_one_in(tmp_path):
    folders = [CheckpointFolder(tmp_path) for _ in range(3)]
    await folders[0].open(DEADLINE_S)
    opening = asyncio.create_task(folders[1].open(DEADLINE_S))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    folders[0].close()
    await folders[2].open(DEADLINE_S)
    folders[2].close()


async def test_a_folder_that_stays_in_use_is_an_error_that_names_who_has_it(tmp_path):
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    await first.open(DEADLINE_S)
    with pytest.raises(DeadlineError, match=rf"learner {os.getpid()} on .* still uses .*checkpoints after 0\.01 s"):
        await second.open(0.01)
    second.close()
    first.close()


async def test_a_run_folder_that_cannot_be_written_is_said_by_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(DataError, match=r"--run-folder .*file.* must be a folder that can be written"):
            await CheckpointFolder(place).open(DEADLINE_S)


def test_auto_does_not_start_anew_where_every_checkpoint_is_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path)
    config = Config.model_validate({"run": {"max_steps": 1, "resume": "auto"}})
    assert folder.find(config) is None
    (folder.path / "step-000003").mkdir(parents=True)
    with pytest.raises(DataError, match=r"none of step-000003 is .*: restore one, or move them away to start anew"):
        folder.find(config)


def group(group_id, turn, position=None):
    return TrainGroup(
        group_id=group_id, prompt_id="p", prompt_token_ids=np.zeros(1, np.int32), samples=[], train_version=0,
        max_staleness=0, turn=turn, position=position,
    )  # fmt: skip


def test_a_milestone_names_exactly_the_turns_that_are_not_settled():
    start = Milestone(4, 8, Position(10, [2, 5, 7], [12], 11, "ab"))
    settled = settle(start, [group(9, 5), group(10, 10)])
    assert settled == Milestone(4, 10, Position(10, [2, 7], [10, 12], 11, "ab"))
    assert finish(settled) == Milestone(5, 10, settled.position)
    marked = settle(settled, [group(11, 2), group(12, 7, Position(20, [11, 15], [], 25, "ab")), group(13, 15)])
    assert marked == Milestone(4, 13, Position(20, [11], [], 25, "ab"))


async def test_the_record_tells_the_milestone_and_what_was_trained(tmp_path, model_folder):
    with TorchTrainer(config_of(model_folder), tmp_path) as trainer:
        await trainer.open()
        path = await trainer.save(MILESTONE)
    record = read_record(tmp_path / "checkpoints" / "step-000003")
    assert str(tmp_path / "checkpoints" / "step-000003") == path
    assert record.milestone == MILESTONE
    assert record.fingerprint.architecture == "LlamaForCausalLM"
    assert record.fingerprint.parameters["model.norm.weight"] == [64]
    assert "lm_head.weight" not in record.fingerprint.parameters
    assert record.files.keys() >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "state/rank-0-of-1.safetensors",
    }
