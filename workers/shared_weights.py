"""New weights in shared memory: what must be there, where it lies, and whether it is really it.

Format: a segment is one file `/dev/shm/LOCATION` (POSIX shared memory of that name); tensor bytes lie contiguous, row
major, little endian, at the offsets of its manifest. A reader maps the file itself: nothing is registered with a
resource tracker, so a reader's death never removes a writer's segment.

Invariant: `verify` reads every byte, so weights that pass it are complete, finite, of the right shape, and the bytes
that the learner wrote. Needs neither torch nor vLLM.
"""

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from engine.core.errors import WeightUpdateError
from engine.wire import Manifest, TensorSpec

SEGMENT_FOLDER = Path("/dev/shm")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CHUNK_BYTES = 1 << 19
"""Bytes looked at in one go: fits a core's cache."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How finite values of a dtype are told apart: the exponent is not all ones."""

    word: type[np.unsignedinteger]
    exponent: int


_LAYOUTS = {
    "bfloat16": _Layout(np.uint16, 0x7F80),
    "float16": _Layout(np.uint16, 0x7C00),
    "float32": _Layout(np.uint32, 0x7F800000),
}


class Segment:
    """One mapped segment, read only. Close it when its weights are loaded."""

    def __init__(self, location: str, num_bytes: int) -> None:
        """Map the segment.

        Raises:
            WeightUpdateError: no such segment, a name that leaves its folder, or it is too small.
        """
        if not location or "/" in location or location.startswith("."):
            raise WeightUpdateError(f"segment name must be a plain file name, got {location!r}")
        try:
            with (SEGMENT_FOLDER / location).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise WeightUpdateError(f"segment {location} cannot be opened: {exc}") from exc
        self.location = location
        if len(self._map) < num_bytes:
            size = len(self._map)
            self.close()
            raise WeightUpdateError(f"segment {location} must hold {num_bytes} bytes, got {size}")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes [offset, offset + num_bytes), not copied; the segment cannot be closed while the view is used."""
        return memoryview(self._map)[offset : offset + num_bytes]

    def close(self) -> None:
        """Unmap; the file stays, it is the writer's."""
        self._map.close()


def expected_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes that an update of the model in `folder` must have: its checkpoint's, and always the head.

    A tied `lm_head.weight` is listed too: without it, vLLM would go on with the old one.

    Raises:
        WeightUpdateError: no safetensors files, or a broken one.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightUpdateError(f"{folder} must hold safetensors files, found none")
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, ValueError, struct.error) as exc:
            raise WeightUpdateError(f"{path} is no safetensors file: {exc}") from exc
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if LM_HEAD not in shapes and EMBEDDING in shapes:
        shapes[LM_HEAD] = shapes[EMBEDDING]
    return shapes


def verify(manifest: Manifest, expected: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Check a manifest against the model and its segment against the manifest (all bytes are read).

    Args:
        manifest: What the learner says it laid out.
        expected: Names and shapes of `expected_shapes`.
        dtype: torch dtype name of the generation engine.

    Raises:
        WeightUpdateError: the first fault, with the tensor's name.
    """
    _check_names([spec.name for spec in manifest.tensors], expected)
    for spec in manifest.tensors:
        _check_form(spec, expected[spec.name], dtype, manifest.num_bytes)
    segment = Segment(manifest.location, manifest.num_bytes)
    try:
        # A tied head names the embedding's bytes once more: they are read once.
        for spec in {(spec.offset, spec.num_bytes, spec.xxh3): spec for spec in manifest.tensors}.values():
            _check_bytes(spec, segment)
    finally:
        segment.close()


def _check_names(names: list[str], expected: Mapping[str, tuple[int, ...]]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise WeightUpdateError(f"tensors must be named once, named twice: {_listed(twice)}")
    if missing := sorted(set(expected) - set(names)):
        raise WeightUpdateError(f"tensors are missing: {_listed(missing)}")
    if unknown := sorted(set(names) - set(expected)):
        raise WeightUpdateError(f"tensors are unknown to the model: {_listed(unknown)}")


def _listed(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _check_form(spec: TensorSpec, shape: tuple[int, ...], dtype: str, segment_bytes: int) -> None:
    if tuple(spec.shape) != shape:
        raise WeightUpdateError(f"{spec.name} must have shape {list(shape)}, got {spec.shape}")
    if spec.dtype != dtype or dtype not in _LAYOUTS:
        raise WeightUpdateError(f"{spec.name} must be {dtype}, got {spec.dtype}")
    if not spec.is_finite:
        raise WeightUpdateError(f"{spec.name} must be finite, its writer found nan or inf")
    num_bytes = math.prod(spec.shape) * np.dtype(_LAYOUTS[dtype].word).itemsize
    if spec.num_bytes != num_bytes:
        raise WeightUpdateError(f"{spec.name} must have {num_bytes} bytes, got {spec.num_bytes}")
    if spec.offset < 0 or spec.offset + spec.num_bytes > segment_bytes:
        raise WeightUpdateError(f"{spec.name} must lie in the segment's {segment_bytes} bytes, got {spec.offset} on")


def _check_bytes(spec: TensorSpec, segment: Segment) -> None:
    """Hash and look for nan and inf in one pass over the bytes, a cache's worth at a time."""
    layout = _LAYOUTS[spec.dtype]
    digest = xxhash.xxh3_64()
    scratch = np.empty(CHUNK_BYTES // np.dtype(layout.word).itemsize, dtype=layout.word)
    mask = layout.word(layout.exponent)
    for start in range(0, spec.num_bytes, CHUNK_BYTES):
        with segment.view(spec.offset + start, min(CHUNK_BYTES, spec.num_bytes - start)) as chunk:
            digest.update(chunk)
            words = np.frombuffer(chunk, dtype=layout.word)
            exponents = np.bitwise_and(words, mask, out=scratch[: len(words)])
            del words
            if exponents.max() == mask:
                raise WeightUpdateError(f"{spec.name} must be finite, found nan or inf")
    if digest.hexdigest() != spec.xxh3:
        raise WeightUpdateError(f"{spec.name} must have xxh3 {spec.xxh3}, got {digest.hexdigest()}")
