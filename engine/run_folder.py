"""runs/NAME/: the resolved config, events.jsonl, samples.jsonl, logs, checkpoints, summary.json.

Invariants: rows are written by one thread in the order given, so the event loop never waits for a disk; summary.json is
written whole or not at all; nothing is overwritten: a new run takes a numbered folder where there is one already, and a
run that goes on in its folder (`run.resume = "auto"`) appends rows and keeps earlier config.toml and summary.json under
numbered names; one engine at a time has a folder.

A resumed run leaves the rows of what came after the checkpoint: its `resumed` event says from which version on steps
were taken again, and from which arm number on arms are new, so no (arm, index) is there twice.
"""

import fcntl
import json
import os
import queue
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TextIO

from configs.load import ConfigError
from configs.root import Config
from engine.core.decisions import Retirement
from engine.core.errors import RunError
from engine.datasets import jsonl_rows
from engine.wire import SampleDone

_MAX_ROWS = 65_536
"""Rows that may wait for the disk: several seconds of the fastest run; a full queue makes the engine wait."""

_LOCK = ".lock"
_BLOCK_BYTES = 1 << 16

_Row = tuple[str, Mapping[str, object]]


class RunFolder:
    """Files of one run. Use as a context manager; closing flushes every row."""

    def __init__(self, path: Path) -> None:
        """`path` may hold an earlier part of this run."""
        self.path = path
        self.next_arm = 0
        """First arm number that no row of samples.jsonl has."""
        self._rows: queue.Queue[_Row | None] = queue.Queue(_MAX_ROWS)
        self._files: dict[str, TextIO] = {}
        self._thread = threading.Thread(target=self._write, name="run-folder", daemon=True)
        self._failure: OSError | None = None

    def __enter__(self) -> "RunFolder":
        """Open the files, after the last whole row of what they hold, and start the writer.

        Raises:
            RunError: another engine has the folder.
            DataError: samples.jsonl holds something else than JSON rows.
        """
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        self._lock()
        for name in ("events", "samples"):
            path = self.path / f"{name}.jsonl"
            _end_at_a_whole_row(path)
            self._files[name] = path.open("a", encoding="utf-8")
        arms = (row.get("arm") for _, row in jsonl_rows(self.path / "samples.jsonl"))
        self.next_arm = max((arm for arm in arms if isinstance(arm, int)), default=-1) + 1
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Write what waits and close."""
        self._rows.put(None)
        self._thread.join()
        for file in self._files.values():
            file.close()

    def event(self, event: str, **fields: object) -> None:
        """One row of events.jsonl."""
        self._put("events", {"event": event, **fields})

    def arm(self, retirement: Retirement, version: int) -> None:
        """The counted samples of a retired arm, one row of samples.jsonl each.

        An advantage that is whitened with its step's is not known yet: null, and an event `whitened` has the step's
        mean and std. A greedy response is no sample: its arm's rows begin at index 1.
        """
        arm, group = retirement.arm, retirement.group
        kept: dict[int, float | None] = {}
        if group:
            kept = {s.index: None if group.awaits_step else group.advantage(s) for s in group.kept}
        for sample in arm.counted:
            response = sample.response
            self._put(
                "samples",
                {
                    "prompt_id": arm.prompt.prompt_id,
                    "level": arm.prompt.level,
                    "arm": arm.arm_id,
                    "index": sample.index,
                    "reward": sample.reward,
                    "tokens": sample.num_tokens,
                    "version": sample.min_version,
                    "learner_version": version,
                    "reason": retirement.reason,
                    "outcome": retirement.outcome,
                    "kept": sample.index in kept,
                    "advantage": kept.get(sample.index),
                    "text": response.text if isinstance(response, SampleDone) else "",
                },
            )

    def write_whole(self, name: str, text: str) -> None:
        """Write a file of the folder atomically; an earlier one stays as NAME-1, NAME-2, ..."""
        target = self.path / name
        if target.exists():
            target.rename(_numbered(target))
        temporary = target.with_name(f".{name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)

    def log_path(self, process: str) -> Path:
        """Where a child process writes."""
        return self.path / "logs" / f"{process}.log"

    def _lock(self) -> None:
        self._files["lock"] = lock = (self.path / _LOCK).open("w", encoding="utf-8")
        try:
            # Held until the file is closed or this process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            lock.close()
            raise RunError(f"run folder {self.path} must be free, but another engine is using it") from exc

    def _put(self, file: str, row: Mapping[str, object]) -> None:
        if self._failure is not None:
            raise RunError(f"run folder {self.path}: cannot write: {self._failure.strerror}") from self._failure
        self._rows.put((file, row))

    def _write(self) -> None:
        while (item := self._rows.get()) is not None:
            if self._failure is not None:
                continue
            name, row = item
            try:
                self._files[name].write(json.dumps(row, ensure_ascii=False) + "\n")
                if self._rows.empty():
                    for file in self._files.values():
                        file.flush()
            except OSError as exc:
                self._failure = exc


def run_path(config: Config) -> Path:
    """Where the run's files go: runs/NAME with `run.resume = "auto"`, else a folder that holds nothing yet.

    Raises:
        ConfigError: `run.resume` names a folder that does not exist.
    """
    first = Path(config.run.folder) / config.run.name
    if config.run.resume == "auto":
        return first
    if config.run.resume != "no" and not Path(config.run.resume).is_dir():
        raise ConfigError(f"run.resume must be no, auto or the folder of a checkpoint, got {config.run.resume!r}")
    path, number = first, 1
    while path.exists() and any(path.iterdir()):
        number += 1
        path = first.with_name(f"{config.run.name}-{number}")
    return path


def _numbered(path: Path) -> Path:
    """NAME-1, NAME-2, ...: the first that is free."""
    return next(other for number in count(1) if not (other := path.with_stem(f"{path.stem}-{number}")).exists())


def _end_at_a_whole_row(path: Path) -> None:
    """Cut off the row that a killed engine was writing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = file.seek(max(0, end - _BLOCK_BYTES))
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)
