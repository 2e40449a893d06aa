"""Lay weights out in shared memory and describe them so that a worker can check every byte.

Invariants:
- Two segments alternate: version v overwrites that of v - 2, which nobody reads once v - 1 is published.
- A segment is a file under /dev/shm named `adastream-PID-SLOT`, raw little-endian tensor bytes, each tensor at a
  multiple of 64 bytes. Tensors that share memory (a tied head) share their bytes and are both named.
- Segments disappear on close, also after SIGTERM and where the thread that fills them is stuck (`unlink`); those of a
  learner that was killed are removed at the next start: a living learner holds a file lock on its segments, so their
  names cannot be mistaken.
"""

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from engine.core.errors import RunError
from engine.wire import Canary, Manifest, TensorSpec

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "adastream-"
ALIGNMENT_BYTES = 64
NUM_SEGMENTS = 2


@dataclass(slots=True)
class _Segment:
    """An open, locked, mapped file."""

    path: Path
    descriptor: int
    memory: mmap.mmap
    bytes_: Tensor
    """uint8 view of the memory."""


class SegmentPublisher:
    """Owns the segments of one learner; a context manager."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._segments: dict[int, _Segment] = {}
        self._is_over = False

    def __enter__(self) -> "SegmentPublisher":
        """Remove what killed learners left behind."""
        remove_dead_segments(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove our segments; a worker that has one mapped keeps its memory until it lets go."""
        self.unlink()
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()

    def unlink(self) -> None:
        """Remove the names of our segments, those made later too; from any thread, also while one is being filled."""
        self._is_over = True
        for segment in list(self._segments.values()):
            segment.path.unlink(missing_ok=True)

    def lay_out(
        self, policy_version: int, weights: Iterable[tuple[str, Tensor]], canaries: Sequence[Canary]
    ) -> Manifest:
        """Copy `weights` into the segment of `policy_version`.

        Raises:
            RunError: shared memory is full.
        """
        named = list(weights)
        offsets: dict[int, int] = {}
        size = 0
        for _, tensor in named:
            if tensor.data_ptr() not in offsets:
                offsets[tensor.data_ptr()] = size
                size += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        segment = self._segment(policy_version % NUM_SEGMENTS, size)
        described: dict[int, tuple[str, bool]] = {}
        specs: list[TensorSpec] = []
        for name, tensor in named:
            pointer = tensor.data_ptr()
            offset = offsets[pointer]
            if pointer not in described:
                described[pointer] = _write(segment, offset, tensor)
            xxh3, is_finite = described[pointer]
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name, list(tensor.shape), dtype, offset, tensor.nbytes, xxh3, is_finite))
        return Manifest(policy_version, "shm", segment.path.name, size, specs, list(canaries))

    def _segment(self, slot: int, size: int) -> _Segment:
        if slot not in self._segments:
            self._segments[slot] = _create(self._folder / f"{PREFIX}{os.getpid()}-{slot}", size)
            if self._is_over:  # since it was created, perhaps
                self.unlink()
        return self._segments[slot]


def remove_dead_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove segments whose learner is gone; their names."""
    removed: list[str] = []
    for path in folder.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
    if removed:
        logger.info("removed shared-memory segments of learners that are gone: %s", ", ".join(sorted(removed)))
    return removed


def _create(path: Path, size: int) -> _Segment:
    descriptor = _open_locked(path)
    try:
        # Without this a full /dev/shm would be a SIGBUS while copying.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as exc:
        path.unlink()
        os.close(descriptor)
        raise RunError(f"{path.parent} must have room for {size} bytes of weights: {exc.strerror}") from exc
    memory = mmap.mmap(descriptor, size)
    return _Segment(path, descriptor, memory, torch.frombuffer(memory, dtype=torch.uint8))


def _open_locked(path: Path) -> int:
    """A new file with our lock; until we have it another learner's start may take the file for a dead one's."""
    while True:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _write(segment: _Segment, offset: int, tensor: Tensor) -> tuple[str, bool]:
    """Copy `tensor` to `offset`; hash and finiteness of what lies there."""
    end = offset + tensor.nbytes
    there = segment.bytes_[offset:end].view(tensor.dtype).view(tensor.shape)
    there.copy_(tensor)
    # One pass without a temporary: the extremes are NaN or infinite exactly where something is.
    least, largest = torch.aminmax(there)
    is_finite = bool(torch.isfinite(least) & torch.isfinite(largest))
    return xxhash.xxh3_64_hexdigest(memoryview(segment.memory)[offset:end]), is_finite
