"""Checks around async tests: no task outlives one, and, where asked, nothing in it holds the loop for long."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator

import pytest

LONGEST_STEP_S = 0.5
"""Far above any honest step, also on a busy machine; a blocking call that matters is longer."""


@pytest.fixture
async def no_orphan_tasks() -> AsyncIterator[None]:
    """Fail a test that leaves tasks behind."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()]
    assert not left, f"tasks outlived the test: {left}"


@pytest.fixture
async def responsive_loop(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Fail a test in which one step of the loop took longer than LONGEST_STEP_S (ask for it by name)."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = LONGEST_STEP_S
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        yield
    slow = [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]
    assert not slow, f"the loop was held: {slow}"


@pytest.fixture(autouse=True)
def watch_async_tests(request: pytest.FixtureRequest) -> None:
    """Every async test gets `no_orphan_tasks`."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("no_orphan_tasks")
