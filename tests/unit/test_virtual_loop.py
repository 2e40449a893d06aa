"""The virtual clock that simulations trust."""

import asyncio
import time

import pytest

from tests.support.virtual_loop import Deadlock, run


def test_an_hour_passes_in_well_under_a_second():
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started_at = time.perf_counter()
    assert run(main()) == pytest.approx(3600)
    assert time.perf_counter() - started_at < 1.0


def test_sleepers_wake_in_the_order_of_their_deadlines():
    async def main():
        woken = []

        async def sleeper(number, seconds):
            await asyncio.sleep(seconds)
            woken.append((number, asyncio.get_running_loop().time()))

        async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(sleeper(number, 100 * (5 - number)))
        return woken

    assert run(main()) == [(4, 100), (3, 200), (2, 300), (1, 400), (0, 500)]


def test_a_deadlock_is_reported_with_the_place_that_waits():
    async def stuck():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="stuck"):
        run(stuck())


def test_a_deadline_fires_in_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(30)
