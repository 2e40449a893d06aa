"""Checkpoints load in plain transformers, appear whole or not at all, and those that shall stay do."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import Config
from configs.training import Checkpoint
from engine.core.errors import DataError, RunError
from engine.wire import Fingerprint, Milestone
from learner.backends.torch import TorchBackend
from learner.checkpoint import RECORD_FILE, checkpoints, clear_leftovers, newest_whole, read_record, save_checkpoint
from tests.support.full_disk import full_disk
from tests.support.learner_inputs import tiny_policy
from tests.support.run_process import ROOT

FINGERPRINT = Fingerprint("test", "none", "none", 1, {})


def save(folder, version, write, keep=2, **choices):
    return save_checkpoint(folder, Milestone(version), FINGERPRINT, Checkpoint(keep=keep, **choices), write)


def write_text(text):
    return lambda folder: (folder / "model.safetensors").write_text(text)


@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_loads_what_the_backend_saved(tmp_path, tied):
    backend = TorchBackend(tiny_policy(dtype=torch.bfloat16, tied=tied), Config())
    folder = save(tmp_path, 3, backend.save_model, keep=1)
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
        save(tmp_path, version, write_text(str(version)), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_second_save_of_a_version_replaces_the_first(tmp_path):
    for text in ("first", "second"):
        folder = save(tmp_path, 1, write_text(text), keep=2)
    assert (folder / "model.safetensors").read_text() == "second"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(tmp_path):
    backend = TorchBackend(tiny_policy(), Config())
    older = save(tmp_path, 1, backend.save_model, keep=1)
    content = (older / "model.safetensors").read_bytes()
    refusal = r"step-000002 could not be written: .*; checkpoints kept: step-000001"
    with full_disk(room_bytes=8192), pytest.raises(RunError, match=refusal):
        save(tmp_path, 2, backend.save_model, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (older / "model.safetensors").read_bytes() == content


def refuse(method, monkeypatch, folder_name):
    """Let a method of `Path` or `shutil` fail for the folder whose name starts so, as a read-only disk does."""
    owner, name = method
    real = getattr(owner, name)

    def refusing(path, *arguments, **choices):
        if Path(path).name.startswith(folder_name):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **choices)

    monkeypatch.setattr(owner, name, refusing)


@pytest.mark.parametrize("method", [(Path, "rename"), (shutil, "rmtree")], ids=["hiding", "deleting"])
def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog, method):
    save(tmp_path, 1, write_text("older"))
    with monkeypatch.context() as patch:
        refuse(method, patch, "step-000001" if method[0] is Path else ".step-000001")
        newer = save(tmp_path, 2, write_text("newer"), keep=1)
    assert newest_whole(tmp_path)[0] == newer
    assert "Permission denied" in caplog.text
    clear_leftovers(tmp_path)
    save(tmp_path, 3, write_text("newest"), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_checkpoint_that_cannot_be_replaced_stays_where_it_was(tmp_path, monkeypatch):
    save(tmp_path, 1, write_text("before"))
    refuse((Path, "rename"), monkeypatch, ".step-000001-" + str(os.getpid()) + ".tmp")
    with pytest.raises(RunError, match=r"could not be written: .*Permission denied.*; checkpoints kept: step-000001"):
        save(tmp_path, 1, write_text("after"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (tmp_path / "step-000001" / "model.safetensors").read_text() == "before"


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path):
    def crash(folder):
        write_text("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, crash, keep=1)
    assert checkpoints(tmp_path) == []


def test_every_nth_version_is_kept_for_good(tmp_path):
    for version in range(2, 15, 2):
        save(tmp_path, version, write_text(str(version)), keep=2, every_steps=2, keep_every=4)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-000004", "step-000008", "step-000012", "step-000014"]


def test_a_damaged_checkpoint_of_a_later_version_does_not_take_the_place_of_a_new_one(tmp_path):
    damaged = save(tmp_path, 9, write_text("nine"))
    (damaged / "model.safetensors").write_text("NINE")
    for version in (1, 2, 3):
        save(tmp_path, version, write_text(str(version)), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003", "step-000009"]


def test_versions_are_ordered_as_numbers(tmp_path):
    for version in (999_999, 1_000_000):
        save(tmp_path, version, write_text(str(version)))
    assert newest_whole(tmp_path)[1].milestone.policy_version == 1_000_000


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "model.safetensors must have": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "model.safetensors must have 5 bytes": lambda folder: (folder / "model.safetensors").write_text("n"),
    "cannot read model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    f"cannot read {RECORD_FILE}": lambda folder: (folder / RECORD_FILE).unlink(),
    f"{RECORD_FILE}: is no record": lambda folder: (folder / RECORD_FILE).write_bytes(b'{"xxh3": "'),
    f"{RECORD_FILE}: its content must have xxh3": lambda folder: (folder / RECORD_FILE).write_bytes(
        (folder / RECORD_FILE).read_bytes().replace(b'"policy_version":2', b'"policy_version":7')
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, caplog, words):
    older = save(tmp_path, 1, write_text("older"))
    newer = save(tmp_path, 2, write_text("newer"))
    assert newest_whole(tmp_path)[0] == newer
    DAMAGES[words](newer)
    found, record = newest_whole(tmp_path)
    assert (found, record.milestone.policy_version) == (older, 1)
    assert f"passed over: checkpoint {newer}: {words}" in caplog.text
    with pytest.raises(DataError, match="step-000002: " + words.replace("(", r"\(")):
        read_record(newer)


SAVE_AND_DIE = """
import os, pathlib, sys, signal
from configs.training import Checkpoint
from engine.wire import Fingerprint, Milestone
from learner import checkpoint

folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def write(temporary):
    (temporary / "model.safetensors").write_text("new")
    if moment == "writing":
        die()
if moment == "recording":
    checkpoint.encode_record = die
if moment == "renaming":
    rename = pathlib.Path.rename
    pathlib.Path.rename = lambda path, target: rename(path, target) if path.name.startswith("step-") else die()
def remove_half(path, ignore_errors=False):
    if not ignore_errors:
        (path / "adastream.json").unlink()
        die()
if moment == "removing":
    checkpoint.shutil.rmtree = lambda path, ignore_errors=False: None if ignore_errors else die()
if moment == "half removed":
    checkpoint.shutil.rmtree = remove_half
checkpoint.save_checkpoint(folder, Milestone(2), Fingerprint("test", "none", "none", 1, {}), Checkpoint(keep=1), write)
"""


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("writing", "older"),
        ("recording", "older"),
        ("renaming", "before"),
        ("removing", "new"),
        ("half removed", "new"),
    ],
)
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint_and_nothing_else(tmp_path, moment, left):
    save(tmp_path, 1, write_text("older"))
    if moment == "renaming":  # the new one is to replace one of the same version, which stands aside at that moment
        save(tmp_path, 2, write_text("before"))
    killed = subprocess.run([sys.executable, "-c", SAVE_AND_DIE, tmp_path, moment], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    clear_leftovers(tmp_path)
    found, _ = newest_whole(tmp_path)
    assert (found / "model.safetensors").read_text() == left
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in checkpoints(tmp_path)}
