"""Checkpoints in HF format that are whole or not there.

Invariants: a folder `step-NNNNNN` appears by one rename after all of it is on disk; older ones are removed only
afterwards; a failed save leaves them as they were and nothing of itself.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.core.errors import RunError

logger = logging.getLogger(__name__)

STATE_FILE = "adastream.json"
"""Policy version of the checkpoint, beside the HF files."""


def save_checkpoint(folder: Path, policy_version: int, keep: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a new folder and make it the newest checkpoint under `folder`.

    Args:
        folder: Where checkpoints live; made if missing.
        policy_version: Version of the weights.
        keep: Newest checkpoints that stay.
        write: Writes the HF files into the folder it is given.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: it could not be written (disk full, no permission); older checkpoints are intact.
    """
    target = folder / f"step-{policy_version:06d}"
    temporary = folder / f".{target.name}-{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        (temporary / STATE_FILE).write_text(json.dumps({"policy_version": policy_version}), encoding="utf-8")
        for path in [*temporary.rglob("*"), temporary]:
            _to_disk(path)
        _replace(temporary, target)
        _to_disk(folder)
    except Exception as exc:  # safetensors and tokenizers have types of their own; all mean that it is not saved
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in checkpoints(folder)) or "none"
        raise RunError(f"checkpoint {target} could not be written: {exc}; checkpoints kept: {kept}") from exc
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints under `folder`, oldest version first."""
    return sorted(path for path in folder.glob("step-*") if (path / STATE_FILE).is_file())


def _replace(temporary: Path, target: Path) -> None:
    """Rename over `target`; a folder can only replace an empty one, so an old one steps aside."""
    if not target.exists():
        temporary.rename(target)
        return
    aside = temporary.with_suffix(".old")
    target.rename(aside)
    temporary.rename(target)
    shutil.rmtree(aside)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
