"""Starts `python -m engine.serve` as a user would and watches it from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = (
    "server.http_port=0",
    "worker.slots=16",
    "learner.groups_per_step=8",
    "simulated.tokens_per_s=2000",
    "simulated.step_s=0.05",
    "data.train=simulated:400",
)


class EngineRun:
    """One engine process with the lines it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder / "sim"
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, deadline_s: float = 60.0) -> re.Match[str]:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if match := re.search(pattern, self.output):
                return match
            if self.process.poll() is not None:
                self._reader.join(5)
                if match := re.search(pattern, self.output):
                    return match
                break
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} did not appear; exit code {self.process.poll()}; output:\n{self.output}")

    def wait(self, deadline_s: float = 90.0) -> int:
        code = self.process.wait(deadline_s)
        self._reader.join(5)
        return code

    def pid_of(self, name: str) -> int:
        return int(self.wait_for(rf"{name} joined \(pid (\d+)\)")[1])

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, kind: str) -> list[dict]:
        rows = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [row for row in rows if row["event"] == kind]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def engine_run(folder: Path, *overrides: str, config: str = "configs/sim.toml") -> Iterator[EngineRun]:
    command = [sys.executable, "-m", "engine.serve", "--config", config, f"run.folder={folder}", *SIMULATED, *overrides]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    run = EngineRun(process, folder)
    try:
        yield run
    finally:
        if process.poll() is None:
            for child in run.descendants():
                child.kill()
            process.send_signal(signal.SIGKILL)
        run.wait()
        process.stdout.close()


def assert_gone(processes: list[psutil.Process], deadline_s: float = 15.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=deadline_s)
    alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"still running: {alive}"
