"""Checkpoints that are whole or not there: what users load, and beside it what a run needs to go on exactly.

Layout of `checkpoints/step-000012/`:
- HF files (`config.json`, `model*.safetensors`, tokenizer, ...): weights in their training dtype, for transformers and
  vLLM; readers of these need nothing else.
- `state/rank-R-of-W.safetensors`, one a rank: master weights, optimizer moments and counts, states of the generators of
  random numbers. Names of tensors are the backend's (`Backend.state`); a sharded backend writes its rank's shard. In a
  folder of their own, because vLLM takes every `*.safetensors` beside `config.json` for weights.
- `adastream.json`, written last: how far the run is, what must match to load the states (architecture, parameters,
  dtype, world size, adapters), and size and xxh3_128 of every other file (engine/wire/record.py).

Invariants: a folder `step-NNNNNN` appears by one rename after all of it is on disk; older ones are removed only
afterwards, out of sight first; a failed save leaves them as they were and nothing of itself; what a killed save or
removal left is removed by the next start (`clear_leftovers`). With several ranks the one that calls `save_checkpoint`
tells the others the folder that `write` was given and waits there until all have written. No torch here.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from configs.training import Checkpoint
from engine.core.errors import DataError, RunError, WireError
from engine.wire import CheckpointRecord, FileSum, Fingerprint, Milestone, decode_record, encode_record

logger = logging.getLogger(__name__)

RECORD_FILE = "adastream.json"
_BLOCK_BYTES = 1 << 22


def state_file(rank: int, world_size: int) -> str:
    """Path of a rank's state inside a checkpoint."""
    return f"state/rank-{rank}-of-{world_size}.safetensors"


def save_checkpoint(
    folder: Path, milestone: Milestone, fingerprint: Fingerprint, keep: Checkpoint, write: Callable[[Path], None]
) -> Path:
    """Let `write` fill a new folder and make it the newest checkpoint under `folder`.

    Args:
        folder: Where checkpoints live; made if missing.
        milestone: How far the run is; names the checkpoint.
        fingerprint: Of the states that `write` writes.
        keep: How many stay, and which for good.
        write: Writes the HF files and the states into the folder it is given.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: it could not be written (disk full, no permission); older checkpoints are intact.
    """
    target = folder / f"step-{milestone.policy_version:06d}"
    temporary = folder / f".{target.name}-{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        files = {str(path.relative_to(temporary)): _sum(path) for path in _files(temporary)}
        record = CheckpointRecord(milestone, fingerprint, files)
        (temporary / RECORD_FILE).write_bytes(encode_record(record))
        sync_folder(temporary)
        _replace(temporary, target)
        _to_disk(folder)
    except Exception as exc:  # safetensors and tokenizers have types of their own; all mean that it is not saved
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in checkpoints(folder)) or "none"
        raise RunError(f"checkpoint {target} could not be written: {exc}; checkpoints kept: {kept}") from exc
    _remove_old(folder, milestone.policy_version, keep)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints under `folder`, oldest version first; whether each is still whole, `read_record` says."""
    return [path for path in numbered(folder) if (path / RECORD_FILE).is_file()]


def numbered(folder: Path) -> list[Path]:
    """Everything under `folder` that is named as a checkpoint, oldest version first."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=_version)


def read_record(checkpoint: Path) -> CheckpointRecord:
    """The record of a checkpoint, after every file of it was read and found unchanged.

    Raises:
        DataError: a file is missing or not what it was; the text names it.
    """
    try:
        record = decode_record((checkpoint / RECORD_FILE).read_bytes())
    except OSError as exc:
        raise DataError(f"checkpoint {checkpoint}: cannot read {RECORD_FILE}: {exc.strerror}") from exc
    except WireError as exc:
        raise DataError(f"checkpoint {checkpoint}: {RECORD_FILE}: {exc}") from exc
    for name, expected in record.files.items():
        try:
            found = _sum(checkpoint / name)
        except OSError as exc:
            raise DataError(f"checkpoint {checkpoint}: cannot read {name}: {exc.strerror}") from exc
        if found != expected:
            raise DataError(
                f"checkpoint {checkpoint}: {name} must have {expected.num_bytes} bytes and xxh3 {expected.xxh3}, "
                f"has {found.num_bytes} and {found.xxh3}"
            )
    return record


def newest_whole(folder: Path) -> tuple[Path, CheckpointRecord] | None:
    """The newest checkpoint under `folder` that is whole; damaged ones are passed over with a warning each."""
    for path in reversed(numbered(folder)):
        try:
            return path, read_record(path)
        except DataError as exc:
            logger.warning("passed over: %s", exc)
    return None


def clear_leftovers(folder: Path) -> None:
    """Undo what a killed save left under `folder`; nobody else may be saving there."""
    for path in folder.glob(".step-*.old"):
        target = folder / path.name.removeprefix(".").rpartition("-")[0]
        if target.exists():
            _delete(path)
        else:
            path.rename(target)
    for path in folder.glob(".step-*.tmp"):
        logger.warning("removing %s: a checkpoint that was half written, or half removed", path)
        _delete(path)


def _remove_old(folder: Path, newest: int, keep: Checkpoint) -> None:
    """Those that are neither among the newest nor kept for good; a damaged one of a later version is not ours."""
    older = [path for path in checkpoints(folder) if _version(path) <= newest]
    for path in older[: -keep.keep]:
        if not keep.keep_every or _version(path) % keep.keep_every:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Out of sight first: one that has lost some of its files must not look like a checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}-{os.getpid()}.tmp")
    try:
        checkpoint.rename(hidden)
    except OSError as exc:
        logger.warning("the old checkpoint %s could not be removed: %s", checkpoint, exc)
        return
    _delete(hidden)


def _delete(folder: Path) -> None:
    """Free its room; a failure is no reason to end a run whose checkpoints are whole."""
    try:
        shutil.rmtree(folder)
    except OSError as exc:
        logger.warning("%s could not be deleted and takes up room: %s", folder, exc)


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sum(path: Path) -> FileSum:
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return FileSum(num_bytes, digest.hexdigest())


def _replace(temporary: Path, target: Path) -> None:
    """Rename over `target`; a folder can only replace an empty one, so an old one steps aside."""
    if not target.exists():
        temporary.rename(target)
        return
    aside = temporary.with_suffix(".old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    _delete(aside)


def sync_folder(folder: Path) -> None:
    """Wait until everything under `folder` is on disk."""
    for path in [*folder.rglob("*"), folder]:
        _to_disk(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
