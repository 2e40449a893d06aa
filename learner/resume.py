"""Which checkpoint a run goes on from (`run.resume`), and whether it fits.

Invariants: one learner at a time has a folder of checkpoints, so a learner that outlives its engine for a moment has
finished saving before the next one looks; a checkpoint that was asked for by its path is used or is an error; with
`auto` the newest whole one is, and where there are some and none is whole, that is an error too. No torch here; the
simulated learner resumes by the same rules.
"""

import asyncio
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TextIO

from configs.root import Config
from engine.core.errors import DataError, DeadlineError
from engine.wire import CheckpointRecord, Fingerprint
from learner.checkpoint import clear_leftovers, newest_whole, numbered, read_record

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_MAX_NAMED = 3
"""Differences that an error lists."""


def make_checkpoint_folder(run_folder: Path) -> Path:
    """`checkpoints/` of a run folder, made if missing.

    Raises:
        DataError: nothing can be written there.
    """
    path = run_folder / "checkpoints"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / _LOCK).open("a", encoding="utf-8"):
            return path
    except OSError as exc:
        raise DataError(f"--run-folder {run_folder} must be a folder that can be written: {exc}") from exc


class CheckpointFolder:
    """`checkpoints/` of a run folder, in the hands of one learner; close it when done."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "checkpoints"
        self._run_folder = run_folder
        self._lock: TextIO | None = None

    async def open(self, deadline_s: float) -> None:
        """Wait until no other learner has the folder, and remove what a killed one left half-written.

        Args:
            deadline_s: Longest wait.

        Raises:
            DataError: nothing can be written there.
            DeadlineError: another learner still has it; the text names it.
        """
        make_checkpoint_folder(self._run_folder)
        lock = (self.path / _LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(lock)
            logger.warning("%s still uses %s: waiting until it ends", holder, self.path)
            try:
                async with asyncio.timeout(deadline_s):
                    await _wait_for(lock)
            except TimeoutError:
                raise DeadlineError(f"{holder} still uses {self.path} after {deadline_s:g} s") from None
        self._lock = lock
        lock.truncate(0)
        lock.write(f"learner {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        try:
            clear_leftovers(self.path)
        except OSError as exc:
            raise DataError(f"--run-folder {self._run_folder}: an interrupted save cannot be undone: {exc}") from exc

    def close(self) -> None:
        """Let the next learner in."""
        if self._lock is not None:
            self._lock.close()

    def find(self, config: Config) -> tuple[Path, CheckpointRecord] | None:
        """The checkpoint that `run.resume` means; None = there is none, or none is wanted.

        Raises:
            DataError: it was asked for by its path and is not whole, or there are some and none is whole.
        """
        match config.run.resume:
            case "no":
                return None
            case "auto":
                found = newest_whole(self.path)
                damaged = ", ".join(path.name for path in numbered(self.path))
                if found is None and damaged:
                    raise DataError(
                        f'run.resume = "auto" must find a whole checkpoint in {self.path}, but none of {damaged} is '
                        "(the warnings say why): restore one, or move them away to start anew"
                    )
                return found
            case path:
                return Path(path), read_record(Path(path))


def _holder(lock: TextIO) -> str:
    """Who wrote its name into the lock's file."""
    lock.seek(0)
    return lock.read() or "another learner"


async def _wait_for(lock: TextIO) -> None:
    """Until `lock` is ours; if the wait is cancelled, it is let go as soon as it is.

    flock(2) waits in no selector, and whoever has the lock cannot tell us. So a thread of its own waits, which nobody
    needs to join: the loop answers the engine and heeds signals meanwhile, and the process can end.
    """
    loop, taken = asyncio.get_running_loop(), asyncio.Event()
    guard, is_locked, is_given_up = threading.Lock(), False, False

    def wait() -> None:
        nonlocal is_locked
        fcntl.flock(lock, fcntl.LOCK_EX)
        with guard:
            is_locked = True
            if is_given_up:
                lock.close()
            else:
                loop.call_soon_threadsafe(taken.set)

    threading.Thread(target=wait, name="checkpoint-lock", daemon=True).start()
    try:
        await taken.wait()
    except asyncio.CancelledError:
        with guard:
            is_given_up = True
            if is_locked:
                lock.close()
        raise


def check_fits(checkpoint: Path, saved: Fingerprint, ours: Fingerprint) -> None:
    """Whether a state saved as `saved` can be loaded here.

    Raises:
        DataError: it cannot; the text names what differs, by the settings that would have to change.
    """
    then, now = _settings(saved), _settings(ours)
    pairs = [
        f"{name} must be {then[name]} as in the checkpoint, got {now[name]}"
        for name in then
        if name in now and then[name] != now[name]
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
        raise DataError(
            f"checkpoint {checkpoint} does not fit this run: {'; '.join([*pairs, *different])} (a run with "
            f'model.path = "{checkpoint}" starts from its weights alone)'
        )


def _settings(fingerprint: Fingerprint) -> dict[str, object]:
    """What decides whether a state fits, under the names that a configuration has for it."""
    library, _, stage = fingerprint.backend.partition(" ZeRO-")
    settings: dict[str, object] = {"learner.kind": "simulated" if library == "simulated" else "torch"}
    if library != "simulated":
        settings["learner.backend"] = library
    if stage:
        settings["learner.zero_stage"] = stage
    return settings | {
        "learner.ranks": fingerprint.world_size,
        "architecture": fingerprint.architecture,
        "dtype": fingerprint.dtype,
        "lora.alpha": fingerprint.lora_alpha,
        "hash of the frozen weights (model.path)": fingerprint.frozen or "none",
    }
