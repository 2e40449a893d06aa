"""Which checkpoint a run goes on from (`run.resume`), and whether it fits.

Invariants: one learner at a time has a folder of checkpoints, so a learner that outlives its engine for a moment has
finished saving before the next one looks; a checkpoint that was asked for by its path is used or is an error; with
`auto` the newest whole one is. No torch here; the simulated learner resumes by the same rules.
"""

import fcntl
import logging
from pathlib import Path
from typing import TextIO

from configs.root import Config
from engine.core.errors import DataError
from engine.wire import CheckpointRecord, Fingerprint
from learner.checkpoint import clear_leftovers, newest_whole, read_record

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_MAX_NAMED = 3
"""Differences that an error lists."""


class CheckpointFolder:
    """`checkpoints/` of a run folder, in the hands of one learner; close it when done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def open(self) -> None:
        """Wait until no other learner has the folder, and remove what a killed one left half-written."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / _LOCK).open("w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another learner still uses %s: waiting until it ends", self.path)
            # Unblocked by the other's end, which follows its engine's; our engine has a deadline for our start.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        clear_leftovers(self.path)

    def close(self) -> None:
        """Let the next learner in."""
        if self._lock is not None:
            self._lock.close()

    def find(self, config: Config) -> tuple[Path, CheckpointRecord] | None:
        """The checkpoint that `run.resume` means; None = there is none, or none is wanted.

        Raises:
            DataError: it was asked for by its path and is not whole.
        """
        match config.run.resume:
            case "no":
                return None
            case "auto":
                return newest_whole(self.path)
            case path:
                return Path(path), read_record(Path(path))


def check_fits(checkpoint: Path, saved: Fingerprint, ours: Fingerprint) -> None:
    """Whether a state saved as `saved` can be loaded here.

    Raises:
        DataError: it cannot; the text names what differs.
    """
    pairs = [
        (f"{name} must be {now}, is {then}")
        for name, then, now in (
            ("backend", saved.backend, ours.backend),
            ("architecture", saved.architecture, ours.architecture),
            ("dtype", saved.dtype, ours.dtype),
            ("world size", saved.world_size, ours.world_size),
            ("lora.alpha", saved.lora_alpha, ours.lora_alpha),
            ("hash of the frozen weights (model.path)", saved.frozen, ours.frozen),
        )
        if then != now
    ]
    names = [*ours.parameters, *(name for name in saved.parameters if name not in ours.parameters)]
    different = [
        f"shape of {name} must be {ours.parameters.get(name, 'absent')}, is {saved.parameters.get(name, 'absent')}"
        for name in names
        if ours.parameters.get(name) != saved.parameters.get(name)
    ]
    if not different and list(saved.parameters) != list(ours.parameters):
        different = ["parameters are in another order"]
    if len(different) > _MAX_NAMED:
        different = [*different[:_MAX_NAMED], f"and {len(different) - _MAX_NAMED} more"]
    if pairs or different:
        raise DataError(f"checkpoint {checkpoint} does not fit this run: {'; '.join([*pairs, *different])}")
