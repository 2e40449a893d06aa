"""Segments hold exactly what their manifest says, alternate, and disappear."""

import fcntl

import numpy as np
import pytest
import torch
import xxhash

from engine.core.errors import RunError
from engine.wire import Canary
from learner.publish import ALIGNMENT_BYTES, SegmentPublisher, remove_dead_segments
from tests.support.full_disk import full_disk
from tests.support.learner_inputs import tiny_llama

CANARY = Canary(np.arange(4, dtype=np.int32), np.zeros(3, dtype=np.float32))


def weights_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters(remove_duplicate=False)]


def read(folder, manifest, name):
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    content = (folder / manifest.location).read_bytes()[spec.offset : spec.offset + spec.num_bytes]
    assert xxhash.xxh3_64_hexdigest(content) == spec.xxh3
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, spec.dtype)).view(spec.shape)


def test_every_parameter_can_be_read_back_and_hashes_as_described(tmp_path):
    model = tiny_llama(dtype=torch.bfloat16)
    with SegmentPublisher(tmp_path) as publisher:
        manifest = publisher.lay_out(0, weights_of(model), [CANARY])
        assert {spec.name for spec in manifest.tensors} == {*model.state_dict()}
        for name, tensor in model.state_dict().items():
            assert torch.equal(read(tmp_path, manifest, name), tensor)
    assert all(spec.offset % ALIGNMENT_BYTES == 0 for spec in manifest.tensors)
    assert all(spec.is_finite for spec in manifest.tensors)
    assert (manifest.policy_version, manifest.mover, len(manifest.canaries)) == (0, "shm", 1)


def test_a_tied_head_is_named_and_shares_its_bytes(tmp_path):
    with SegmentPublisher(tmp_path) as publisher:
        manifest = publisher.lay_out(0, weights_of(tiny_llama()), [])
    specs = {spec.name: spec for spec in manifest.tensors}
    assert specs["lm_head.weight"].offset == specs["model.embed_tokens.weight"].offset
    assert specs["lm_head.weight"].xxh3 == specs["model.embed_tokens.weight"].xxh3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_marked(tmp_path, bad):
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.norm.weight.data[3] = bad
    with SegmentPublisher(tmp_path) as publisher:
        manifest = publisher.lay_out(0, weights_of(model), [])
    assert [spec.name for spec in manifest.tensors if not spec.is_finite] == ["model.norm.weight"]


def test_two_segments_alternate_so_that_the_last_version_stays_readable(tmp_path):
    model = tiny_llama()
    with SegmentPublisher(tmp_path) as publisher:
        manifests = []
        for version in range(3):
            model.model.norm.weight.data.fill_(float(version))
            manifests.append(publisher.lay_out(version, weights_of(model), []))
            if version:
                assert read(tmp_path, manifests[version - 1], "model.norm.weight")[0] == version - 1
    assert manifests[0].location == manifests[2].location != manifests[1].location


def test_segments_disappear_on_close_also_after_an_error(tmp_path):
    def fail():
        with SegmentPublisher(tmp_path) as publisher:
            publisher.lay_out(0, weights_of(tiny_llama()), [])
            assert list(tmp_path.iterdir())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_segments_can_be_removed_while_another_thread_fills_them(tmp_path):
    with SegmentPublisher(tmp_path) as publisher:
        publisher.lay_out(0, weights_of(tiny_llama()), [])
        publisher.unlink()
        assert list(tmp_path.iterdir()) == []
        assert publisher.lay_out(2, weights_of(tiny_llama()), []).tensors
        publisher.lay_out(1, weights_of(tiny_llama()), [])
        assert list(tmp_path.iterdir()) == []


def test_a_segment_that_another_start_took_for_a_dead_one_is_made_again(tmp_path, monkeypatch):
    real, others = fcntl.flock, [remove_dead_segments]

    def flock_after_another_start(file, operation):
        if operation == fcntl.LOCK_EX and others:
            others.pop()(tmp_path)
        return real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_another_start)
    with SegmentPublisher(tmp_path) as publisher:
        manifest = publisher.lay_out(0, weights_of(tiny_llama()), [])
        assert not others
        assert (tmp_path / manifest.location).exists()


def test_segments_of_dead_learners_are_removed_and_those_of_living_ones_stay(tmp_path):
    (tmp_path / "adastream-4242-0").write_bytes(b"left behind")
    (tmp_path / "something-else").write_bytes(b"not ours")
    living = tmp_path / "adastream-4343-0"
    living.write_bytes(b"in use")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_dead_segments(tmp_path) == ["adastream-4242-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adastream-4343-0", "something-else"]


def test_full_shared_memory_is_a_clear_error_and_leaves_nothing(tmp_path):
    with (
        full_disk(room_bytes=4096),
        SegmentPublisher(tmp_path) as publisher,
        pytest.raises(RunError, match="must have room"),
    ):
        publisher.lay_out(0, weights_of(tiny_llama()), [])
    assert list(tmp_path.iterdir()) == []
