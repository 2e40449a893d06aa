"""A whole checkpoint becomes a plain HF folder; anything else is refused in one line, and leaves nothing behind."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.training import Checkpoint
from engine.wire import Fingerprint, Milestone
from learner import export
from learner.checkpoint import RECORD_FILE, save_checkpoint, state_file
from learner.shards import save_rank
from tests.support.full_disk import full_disk
from tests.support.learner_process import save_model_with_tokenizer

FINGERPRINT = Fingerprint("torch", "LlamaForCausalLM", "bfloat16", 1, {})


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")


def save(folder, add):
    """A checkpoint of the tiny model; `add(temporary folder)` writes what else is in it."""

    def write(temporary):
        save_model_with_tokenizer(temporary)
        add(temporary)

    return save_checkpoint(folder, Milestone(1), FINGERPRINT, Checkpoint(), write)


def add_masters(folder):
    """The weights with noise that bfloat16 cannot hold."""
    noise = torch.Generator().manual_seed(0)
    masters = [parameter.detach().float().flatten() for parameter in load(folder).parameters()]
    masters = [master + 1e-2 * torch.randn(master.shape, generator=noise) for master in masters]
    save_rank(folder, 0, 1, {"master": torch.cat(masters)})
    return masters


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoints", add_masters)


def refusal(capsys, *arguments):
    """What the export says when it writes nothing."""
    assert export.main([str(argument) for argument in arguments]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_an_export_rounds_the_master_weights_once_or_not_at_all(tmp_path, capsys):
    masters = []
    checkpoint = save(tmp_path, lambda folder: masters.extend(add_masters(folder)))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        assert export.main([str(checkpoint), str(tmp_path / name), "--dtype", name]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / name}\n"
        for parameter, master in zip(load(tmp_path / name).parameters(), masters, strict=True):
            assert parameter.dtype == dtype
            assert torch.equal(parameter.flatten(), master.to(dtype))
        assert AutoTokenizer.from_pretrained(tmp_path / name)


def test_a_run_that_trained_adapters_gives_its_merged_weights_in_bfloat16_only(tmp_path, capsys):
    def add(folder):
        (folder / "adapter").mkdir()
        save_rank(folder, 0, 1, {"master": torch.zeros(5)})

    checkpoint = save(tmp_path, add)
    assert export.main([str(checkpoint), str(tmp_path / "out")]) == 0
    ours = dict(load(checkpoint).named_parameters())
    assert all(torch.equal(parameter, ours[name]) for name, parameter in load(tmp_path / "out").named_parameters())
    assert not (tmp_path / "out" / "adapter").exists()
    words = refusal(capsys, checkpoint, tmp_path / "other", "--dtype", "float32")
    assert "--dtype must be bfloat16" in words
    assert "adapters" in words


def test_a_checkpoint_without_states_is_refused(tmp_path, capsys):
    checkpoint = save(tmp_path, lambda folder: None)
    assert "must hold the states of its ranks" in refusal(capsys, checkpoint, tmp_path / "out")


def test_a_flipped_bit_is_not_exported(tmp_path, checkpoint, capsys):
    path = checkpoint / state_file(0, 1)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert "rank-0-of-1.safetensors must have" in refusal(capsys, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_finished_checkpoint_is_not_exported(tmp_path, checkpoint, capsys):
    (checkpoint / RECORD_FILE).unlink()
    assert f"cannot read {RECORD_FILE}" in refusal(capsys, checkpoint, tmp_path / "out")
    assert "CHECKPOINT must be a folder such as" in refusal(capsys, tmp_path / "absent", tmp_path / "out")


def test_another_kind_of_model_is_said_in_one_line(tmp_path, capsys):
    def add(folder):
        config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
        (folder / "config.json").write_text(json.dumps(config))

    checkpoint = save(tmp_path, add)
    assert "must hold a causal language model, got BertForMaskedLM" in refusal(capsys, checkpoint, tmp_path / "out")


def test_an_out_that_cannot_be_written_leaves_nothing(tmp_path, checkpoint, capsys):
    (tmp_path / "file").write_text("")
    assert "could not be written: " in refusal(capsys, checkpoint, tmp_path / "file" / "out")
    with full_disk(room_bytes=8192):
        assert "could not be written: " in refusal(capsys, checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "file"]
    assert "OUT must not exist yet" in refusal(capsys, checkpoint, tmp_path / "file")
