"""Child processes as they really start: where they stand among the machine's processes."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from engine.supervisor import Command, Supervisor

REPORT = "import os; print(os.getsid(0), os.getpgrp() == os.getpid(), os.nice(0), sorted(os.sched_getaffinity(0)))"


async def ignore(name: str, cause: str) -> None: ...


async def test_a_child_leads_its_own_group_but_shares_our_session_where_its_niceness_counts(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    core = min(os.sched_getaffinity(0))
    command = Command("child", ["-c", REPORT], log, cores=(core,), pin=True, niceness=3)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(tasks, ignore)
        supervisor.expect_exit("child")
        await supervisor.start(command)
    session, leads_group, niceness, cores = log.read_text().split(maxsplit=3)
    assert int(session) == os.getsid(0)
    assert leads_group == "True"
    assert int(niceness) == os.nice(0) + 3
    assert cores.strip() == f"[{core}]"


def leave_cause(folder: Path, text: str) -> str:
    """Python that leaves a cause as a rank under torchrun does, and ends."""
    report = json.dumps({"message": text, "timestamp": 5})
    return f"import pathlib; pathlib.Path({str(folder / 'error.json')!r}).write_text({report!r}); raise SystemExit(1)"


async def test_what_a_rank_said_comes_before_its_launchers_report(tmp_path: Path) -> None:
    causes = tmp_path / "causes"
    folders = [causes / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "error.json").write_text('{"message": "of an earlier start", "timestamp": 1}')
    os.utime(folders[0] / "error.json", (1, 1))
    later = json.dumps({"message": {"message": "rank 0 failed: disk full"}, "timestamp": 6})
    (folders[1] / "error.json").write_text(later)
    os.utime(folders[1] / "error.json", (1e11, 1e11))
    command = Command("child", ["-c", leave_cause(folders[2], "disk full")], tmp_path / "child.log", causes=causes)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            await Supervisor(tasks, ignore).start(command)
    (error,) = caught.value.exceptions
    assert str(error).startswith("child exited with code 1: disk full; its last lines")
