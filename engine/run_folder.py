"""runs/NAME/: the resolved config, events.jsonl, samples.jsonl, logs, checkpoints, summary.json.

Invariants: rows are written by one thread in the order given, so the event loop never waits for a disk; summary.json is
written whole or not at all; a folder that already holds a run is kept under a numbered name, never overwritten.
"""

import json
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from configs.root import Config
from engine.core.decisions import Retirement
from engine.core.errors import RunError
from engine.wire import SampleDone

_MAX_ROWS = 65_536
"""Rows that may wait for the disk: several seconds of the fastest run; a full queue makes the engine wait."""

_Row = tuple[str, Mapping[str, object]]


class RunFolder:
    """Files of one run. Use as a context manager; closing flushes every row."""

    def __init__(self, path: Path) -> None:
        """`path` must not exist yet, or be empty."""
        self.path = path
        self._rows: queue.Queue[_Row | None] = queue.Queue(_MAX_ROWS)
        self._files: dict[str, TextIO] = {}
        self._thread = threading.Thread(target=self._write, name="run-folder", daemon=True)
        self._failure: OSError | None = None

    def __enter__(self) -> "RunFolder":
        """Open the files and start the writer."""
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        for name in ("events", "samples"):
            self._files[name] = (self.path / f"{name}.jsonl").open("a", encoding="utf-8")
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
        """Write a file of the folder atomically."""
        target = self.path / name
        temporary = target.with_name(f".{name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)

    def log_path(self, process: str) -> Path:
        """Where a child process writes."""
        return self.path / "logs" / f"{process}.log"

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


def new_run_path(config: Config) -> Path:
    """runs/NAME, or runs/NAME-2, runs/NAME-3, ... where earlier ones exist."""
    first = Path(config.run.folder) / config.run.name
    path, number = first, 1
    while path.exists() and any(path.iterdir()):
        number += 1
        path = first.with_name(f"{config.run.name}-{number}")
    return path
