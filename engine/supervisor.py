"""Child processes on this machine: start, watch, restart, stop. Knows commands and process groups, nothing of messages.

Invariants: every child leads its own process group, so a signal to the group reaches its children too; all stay in the
engine's session, because Linux shares cores out by session first (autogroup) and niceness counts only within one; a
worker that dies is started again up to `worker.max_restarts` times, unless it says that its configuration cannot be
used; a learner that dies ends the run with its cause; nothing is left running when `stop` returns.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.core.errors import RunError

log = logging.getLogger(__name__)

UNUSABLE = 2
"""Exit code of a child that cannot use its configuration or model: it would say the same again, so no restart."""
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Command:
    """How a child is started."""

    name: str
    arguments: Sequence[str]
    log_path: Path
    cores: Sequence[int] = ()
    """Told to the child in ADASTREAM_CORES; empty = any."""
    pin: bool = False
    """Also set the child's affinity before it starts (a child with threads of its own kinds pins itself)."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    niceness: int = 0
    max_restarts: int = 0
    causes: Path | None = None
    """Where a launcher's ranks leave an `error.json` with the cause of their end (torchrun --log-dir)."""


OnExit = Callable[[str, str], Awaitable[None]]
"""(name, cause): a child that is restarted next has ended."""


class Children(Protocol):
    """What a run asks of its children's owner; `Supervisor` for processes, another one for simulations in one loop."""

    async def start(self, command: Command) -> None:
        """Start a child and watch it."""
        ...

    def kill(self, name: str) -> None:
        """End a child at once; it is restarted."""
        ...

    def expect_exit(self, name: str, *, only_clean: bool = False) -> None:
        """This child was told to finish: its end is no failure; with `only_clean` if its exit code is 0."""
        ...

    async def finish(self, name: str, deadline_s: float) -> None:
        """Wait until a child that was told to finish has, at most so long."""
        ...

    async def stop(self, deadline_s: float) -> None:
        """End every child and wait until all are gone."""
        ...


@dataclass(slots=True)
class Child:
    """A running child."""

    command: Command
    process: asyncio.subprocess.Process
    num_restarts: int = 0
    started_at: float = field(default_factory=time.time)
    """Wall time, as of files."""


@dataclass(slots=True)
class Supervisor:
    """Owns the children of one run."""

    tasks: asyncio.TaskGroup
    on_exit: OnExit
    children: dict[str, Child] = field(default_factory=dict[str, Child])
    _finishing: dict[str, bool] = field(default_factory=dict[str, bool])
    """Children that were told to finish; whether only exit code 0 is expected of them."""
    _stopping: set[str] = field(default_factory=set[str])

    async def start(self, command: Command) -> None:
        """Start a child and watch it."""
        child = Child(command, await _spawn(command))
        self.children[command.name] = child
        self.tasks.create_task(self._watch(child))

    def kill(self, name: str) -> None:
        """End a child at once (a fenced worker); its watcher restarts it."""
        child = self.children.get(name)
        if child is not None and child.process.returncode is None:
            _signal_group(child.process.pid, signal.SIGKILL)

    def expect_exit(self, name: str, *, only_clean: bool = False) -> None:
        """This child was told to finish: its end is no failure; with `only_clean` if its exit code is 0."""
        self._finishing[name] = only_clean

    async def finish(self, name: str, deadline_s: float) -> None:
        """Wait until a child that was told to finish has, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.children[name].process.wait()

    async def stop(self, deadline_s: float) -> None:
        """Terminate every child, kill what is left at the deadline, and wait until all are gone."""
        self._stopping.update(self.children)
        running = [child.process for child in self.children.values() if child.process.returncode is None]
        for process in running:
            _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                for process in running:
                    await process.wait()
        except TimeoutError:
            log.warning("children did not end within %.0f s and are killed", deadline_s)
        for child in self.children.values():
            _signal_group(child.process.pid, signal.SIGKILL)
        for process in running:
            await process.wait()

    async def _watch(self, child: Child) -> None:
        command = child.command
        while True:
            code = await child.process.wait()
            _signal_group(child.process.pid, signal.SIGKILL)
            if command.name in self._stopping:
                return
            if command.name in self._finishing and not (code and self._finishing[command.name]):
                if code:
                    log.warning("%s %s when it was told to finish", command.name, _cause(code))
                return
            said = _said_by_ranks(command.causes, child.started_at) if command.causes else ""
            cause = f"{command.name} {_cause(code)}{said}"
            cause += f"; its last lines ({command.log_path}):\n{_tail(command.log_path)}"
            if code == UNUSABLE or child.num_restarts >= command.max_restarts:
                raise RunError(cause)
            child.num_restarts += 1
            log.warning("%s %s; restart %d of %d", command.name, _cause(code), child.num_restarts, command.max_restarts)
            await self.on_exit(command.name, _cause(code))
            child.process = await _spawn(command)


async def _spawn(command: Command) -> asyncio.subprocess.Process:
    environment = {**os.environ, **command.environment}
    if command.cores:
        environment["ADASTREAM_CORES"] = ",".join(map(str, command.cores))
    with command.log_path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            preexec_fn=partial(_place, tuple(command.cores) if command.pin else (), command.niceness),
        )


def _place(cores: tuple[int, ...], niceness: int) -> None:
    os.setpgrp()
    if cores:
        os.sched_setaffinity(0, cores)
    os.nice(niceness)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # The group has ended, which is what a signal to it asks for.
        return


def _cause(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _said_by_ranks(causes: Path, since: float) -> str:
    """What the first rank that ended said since then; a launcher's own report buries it."""
    found: list[tuple[int, str]] = []
    for path in sorted(causes.rglob("error.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(path.read_text(encoding="utf-8"))
            text = report["message"] if isinstance(report["message"], str) else report["message"]["message"]
            if path.stat().st_mtime >= since:
                found.append((int(report.get("timestamp", 0)), str(text)))
    return f": {min(found, key=_when)[1]}" if found else ""


def _when(report: tuple[int, str]) -> int:
    return report[0]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-15:])
