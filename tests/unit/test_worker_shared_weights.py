"""What a worker refuses before it touches its weights."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from engine.core.errors import WeightUpdateError
from engine.wire import Manifest, TensorSpec
from workers.shared_weights import SEGMENT_FOLDER, Segment, expected_shapes, verify

EXPECTED = {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4), "model.norm.weight": (4,)}


@pytest.fixture
def manifest() -> Iterator[Manifest]:
    """A good update of EXPECTED in float32, in shared memory."""
    location = f"adastream-unit-{os.getpid()}"
    rng = np.random.default_rng(0)
    parts, specs, offset = [], [], 0
    for name, shape in EXPECTED.items():
        part = rng.normal(size=shape).astype(np.float32).tobytes()
        digest = xxhash.xxh3_64(part).hexdigest()
        specs.append(TensorSpec(name, list(shape), "float32", offset, len(part), digest, True))
        parts.append(part)
        offset += len(part)
    path = SEGMENT_FOLDER / location
    path.write_bytes(b"".join(parts))
    yield Manifest(policy_version=1, mover="shm", location=location, num_bytes=offset, tensors=specs, canaries=[])
    path.unlink()


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with another first tensor."""
    first = msgspec.structs.replace(manifest.tensors[0], **fields)
    return msgspec.structs.replace(manifest, tensors=[first, *manifest.tensors[1:]])


def test_good_weights_pass(manifest: Manifest) -> None:
    verify(manifest, EXPECTED, "float32")


CHANGES: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (lambda m: msgspec.structs.replace(m, tensors=m.tensors[1:]), "missing: model.embed_tokens.weight"),
    (lambda m: msgspec.structs.replace(m, tensors=[m.tensors[0], *m.tensors]), "named twice: model.embed"),
    (lambda m: changed(m, name="model.bias"), "missing"),
    (lambda m: changed(m, shape=[4, 8]), r"shape \[8, 4\], got \[4, 8\]"),
    (lambda m: changed(m, dtype="bfloat16"), "must be float32"),
    (lambda m: changed(m, is_finite=False), "must be finite"),
    (lambda m: changed(m, num_bytes=64), "must have 128 bytes"),
    (lambda m: changed(m, offset=m.num_bytes - 64), "must lie in the segment"),
    (lambda m: changed(m, xxh3="0123456789abcdef"), "must have xxh3 0123456789abcdef"),
    (lambda m: msgspec.structs.replace(m, num_bytes=m.num_bytes + 1), "must hold 273 bytes, got 272"),
    (lambda m: msgspec.structs.replace(m, location="adastream-nowhere"), "cannot be opened"),
    (lambda m: msgspec.structs.replace(m, location="../etc/passwd"), "plain file name"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_does_not_fit_is_refused_by_name(
    manifest: Manifest, change: Callable[[Manifest], Manifest], message: str
) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        verify(change(manifest), EXPECTED, "float32")


def test_an_unknown_tensor_is_refused(manifest: Manifest) -> None:
    fewer = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    with pytest.raises(WeightUpdateError, match=r"unknown to the model: lm_head\.weight"):
        verify(manifest, fewer, "float32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_writer_that_calls_nan_finite_is_caught(manifest: Manifest, value: float) -> None:
    path = SEGMENT_FOLDER / manifest.location
    values = np.frombuffer(path.read_bytes(), dtype=np.float32).copy()
    values[5] = value
    path.write_bytes(values.tobytes())
    digest = xxhash.xxh3_64(values[:32].tobytes()).hexdigest()
    with pytest.raises(WeightUpdateError, match="must be finite, found nan or inf"):
        verify(changed(manifest, xxh3=digest), EXPECTED, "float32")


def test_a_changed_byte_is_caught(manifest: Manifest) -> None:
    path = SEGMENT_FOLDER / manifest.location
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight must have xxh3"):
        verify(manifest, EXPECTED, "float32")


def test_a_reader_leaves_the_segment_to_its_writer(manifest: Manifest) -> None:
    segment = Segment(manifest.location, manifest.num_bytes)
    segment.close()
    assert (SEGMENT_FOLDER / manifest.location).exists()


def save_header(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_tied_head_is_expected_too(tmp_path: Path) -> None:
    save_header(tmp_path / "model-1.safetensors", {"model.embed_tokens.weight": [8, 4]})
    save_header(tmp_path / "model-2.safetensors", {"model.norm.weight": [4]})
    assert expected_shapes(tmp_path) == EXPECTED


def test_an_untied_head_keeps_its_own_shape(tmp_path: Path) -> None:
    save_header(tmp_path / "model.safetensors", {"model.embed_tokens.weight": [8, 4], "lm_head.weight": [9, 4]})
    assert expected_shapes(tmp_path)["lm_head.weight"] == (9, 4)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="found none"):
        expected_shapes(tmp_path)
