"""Child processes as they really start: where they stand among the machine's processes."""

import asyncio
import os
from pathlib import Path

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
