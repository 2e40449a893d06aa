"""Seeded faults under a virtual clock: what a bad network does, many times over, in memory."""

import asyncio
import random

import pytest

from engine.core.errors import PeerLost
from engine.transport.base import PeerGone
from tests.support.transports import joined, numbered, read_numbers, run_on


@pytest.mark.parametrize("seed", range(60))
def test_seeded_cuts_never_lose_or_repeat_a_message(seed):
    """Virtual time makes many seeds cheap: cuts, outages and slow readers, in both directions at once."""

    async def scenario(transport):
        rng = random.Random(seed)
        hub, link = await joined(transport, window=rng.choice([1, 2, 5, 16]))
        total = 60

        async def feed(send):
            for index in range(total):
                await send(numbered(index))
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.01]))

        async def slowly(receive):
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.02]))
            return await receive()

        async def disturb():
            for _ in range(rng.randrange(1, 30)):
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.05]))
                link.sever()
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.1]))  # all of them within the grace
                link.reconnect()

        async with asyncio.TaskGroup() as group:
            group.create_task(disturb())
            group.create_task(feed(link.send))
            group.create_task(feed(lambda message: hub.send("w0", message)))
            up = group.create_task(read_numbers(lambda: slowly(hub.receive), total))
            down = group.create_task(read_numbers(lambda: slowly(link.receive), total))
        assert up.result() == list(range(total))
        assert down.result() == list(range(total))

    run_on("memory", scenario)


@pytest.mark.parametrize("how", ["vanish", "sever"])
def test_a_peer_that_dies_or_stays_away_is_gone_after_the_grace(how):
    async def scenario(transport):
        hub, link = await joined(transport)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        getattr(link, how)()
        gone = await hub.receive()
        assert isinstance(gone, PeerGone)
        assert "not back within 4 s" in gone.reason
        assert loop.time() - started_at == pytest.approx(4.0)
        with pytest.raises(PeerLost):
            await link.receive()

    run_on("memory", scenario)
