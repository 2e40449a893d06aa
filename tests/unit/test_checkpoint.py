"""Checkpoints load in plain transformers, appear whole or not at all, and the newest stay."""

import resource

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import Config
from engine.core.errors import RunError
from learner.backends.torch import TorchBackend
from learner.checkpoint import checkpoints, save_checkpoint
from tests.support.learner_inputs import tiny_policy


@pytest.fixture
def file_size_limit():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_text(text):
    return lambda folder: (folder / "model.safetensors").write_text(text)


@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_loads_what_the_backend_saved(tmp_path, tied):
    backend = TorchBackend(tiny_policy(dtype=torch.bfloat16, tied=tied), Config())
    folder = save_checkpoint(tmp_path, 3, 1, backend.save_model)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    ours = dict(backend.weights())
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(tensor, ours[name]) for name, tensor in loaded.state_dict().items())
    assert (folder / "generation_config.json").is_file()
    # No shared storage, no second copy of a tied head.
    size = sum(parameter.nbytes for parameter in loaded.parameters())
    assert (folder / "model.safetensors").stat().st_size < size + 20_000


def test_only_the_newest_are_kept(tmp_path):
    for version in (1, 2, 3):
        save_checkpoint(tmp_path, version, 2, write_text(str(version)))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_second_save_of_a_version_replaces_the_first(tmp_path):
    for text in ("first", "second"):
        folder = save_checkpoint(tmp_path, 1, 2, write_text(text))
    assert (folder / "model.safetensors").read_text() == "second"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(tmp_path, file_size_limit):
    backend = TorchBackend(tiny_policy(), Config())
    older = save_checkpoint(tmp_path, 1, 1, backend.save_model)
    content = (older / "model.safetensors").read_bytes()
    file_size_limit(8192)
    with pytest.raises(RunError, match=r"step-000002 could not be written: .*; checkpoints kept: step-000001"):
        save_checkpoint(tmp_path, 2, 1, backend.save_model)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (older / "model.safetensors").read_bytes() == content


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path):
    def crash(folder):
        write_text("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, 1, crash)
    assert checkpoints(tmp_path) == []
