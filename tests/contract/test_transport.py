"""The transport contract, one suite over ZeroMQ (asyncio and uvloop) and its in-memory twin (virtual clock)."""

import asyncio
import random

import numpy as np
import pytest

from engine.core.errors import DeadlineError, PeerLost, RunError
from engine.transport.base import PeerGone, PeerJoined, Received
from engine.wire import Encoded
from tests.support.transports import Transport, every_transport, hello, joined, numbered, read_numbers


@every_transport
async def test_messages_of_both_directions_arrive_in_order_and_once(transport: Transport):
    hub, link = await joined(transport)

    async def send_up():
        for index in range(2000):
            await link.send(numbered(index))

    async def send_down():
        for index in range(2000):
            await hub.send("w0", numbered(index))

    async with asyncio.TaskGroup() as group:
        group.create_task(send_up())
        group.create_task(send_down())
        up = group.create_task(read_numbers(hub.receive, 2000))
        down = group.create_task(read_numbers(link.receive, 2000))
    assert up.result() == list(range(2000))
    assert down.result() == list(range(2000))


@every_transport
async def test_arrays_arrive_whole_small_and_large(transport: Transport):
    hub, link = await joined(transport)
    arrays = [np.arange(size, dtype=np.int32) for size in (0, 1, 16_383, 16_384, 500_000)]
    await link.send(Encoded(request=1, token_ids=arrays))
    event = await hub.receive()
    assert [array.tolist() for array in event.message.token_ids] == [array.tolist() for array in arrays]
    assert all(array.flags.aligned for array in event.message.token_ids)


@every_transport
async def test_a_peer_learns_the_policy_version_of_the_engine(transport: Transport):
    hub = await transport.start_hub()
    hub.policy_version = 7
    link = await transport.join()
    assert link.policy_version == 7


@every_transport
async def test_a_sender_waits_at_a_full_window_and_is_told_at_its_deadline(transport: Transport):
    hub, link = await joined(transport, window=4)
    for index in range(4):
        await link.send(numbered(index))
    with pytest.raises(DeadlineError, match="4 messages waited"):
        await link.send(numbered(99), deadline_s=0.1)
    assert await read_numbers(hub.receive, 2) == [0, 1]
    await link.send(numbered(4), deadline_s=5.0)
    assert await read_numbers(hub.receive, 3) == [2, 3, 4]


@every_transport
async def test_the_engine_waits_at_a_full_window_of_one_peer_only(transport: Transport):
    hub, _ = await joined(transport, window=2)
    other = await transport.join(hello("w1"))
    assert isinstance(await hub.receive(), PeerJoined)
    for index in range(2):
        await hub.send("w0", numbered(index))
    with pytest.raises(DeadlineError, match="w0"):
        await hub.send("w0", numbered(2), deadline_s=0.05)
    await hub.send("w1", numbered(5))
    assert await read_numbers(other.receive, 1) == [5]


@every_transport
async def test_waiting_senders_are_served_in_their_order(transport: Transport):
    hub, link = await joined(transport, window=1)
    async with asyncio.TaskGroup() as group:
        for index in range(20):
            group.create_task(link.send(numbered(index)))
        assert await read_numbers(hub.receive, 20) == list(range(20))


@every_transport
async def test_another_protocol_is_refused_and_never_reaches_the_engine(transport: Transport):
    hub = await transport.start_hub()
    with pytest.raises(RunError, match="protocol must be 1, got 99"):
        await transport.join(hello("old", protocol=99))
    await transport.join(hello("w0"))
    event = await hub.receive()
    assert isinstance(event, PeerJoined)
    assert event.peer == "w0"


@every_transport
async def test_a_cut_connection_resumes_in_the_same_life(transport: Transport):
    hub, link = await joined(transport)
    for index in range(10):
        await link.send(numbered(index))
        await hub.send("w0", numbered(index))
    transport.cut(link)
    for index in range(10, 20):
        await link.send(numbered(index))
        await hub.send("w0", numbered(index))
    assert await read_numbers(hub.receive, 20) == list(range(20))
    assert await read_numbers(link.receive, 20) == list(range(20))


@every_transport
async def test_nothing_is_lost_or_repeated_over_many_cuts_in_mid_stream(transport: Transport):
    hub, link = await joined(transport)
    rng = random.Random(5)
    total = 3000
    is_done = asyncio.Event()

    async def stream(send, receive):
        async def feed():
            for index in range(total):
                await send(numbered(index))
                if index % 16 == 0:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            numbers = group.create_task(read_numbers(receive, total))
        assert numbers.result() == list(range(total))

    async def cut_now_and_then():
        for _ in range(6):
            try:
                async with asyncio.timeout(rng.uniform(0.01, 0.3)):
                    await is_done.wait()
                    return
            except TimeoutError:
                transport.cut(link)

    async with asyncio.TaskGroup() as group:
        group.create_task(cut_now_and_then())
        async with asyncio.TaskGroup() as streams:
            streams.create_task(stream(link.send, hub.receive))
            streams.create_task(stream(lambda message: hub.send("w0", message), link.receive))
        is_done.set()


@every_transport
async def test_a_new_life_replaces_the_old_one_which_is_reported_lost_first(transport: Transport):
    hub, old = await joined(transport)
    new = await transport.join(hello("w0", life="life-2"))
    gone, back = await hub.receive(), await hub.receive()
    assert isinstance(gone, PeerGone)
    assert "new life" in gone.reason
    assert isinstance(back, PeerJoined)
    assert back.hello.life == "life-2"
    await hub.send("w0", numbered(1))
    assert await read_numbers(new.receive, 1) == [1]
    await new.send(numbered(2))
    assert await read_numbers(hub.receive, 1) == [2]
    with pytest.raises(PeerLost, match="replaced"):
        await old.receive()


@every_transport
async def test_an_old_life_that_reconnects_disturbs_nothing(transport: Transport):
    hub, old = await joined(transport)
    new = await transport.join(hello("w0", life="life-2"))
    assert [type(await hub.receive()) for _ in range(2)] == [PeerGone, PeerJoined]
    transport.cut(old)
    with pytest.raises(PeerLost):
        await old.receive()
    await old.close()
    for index in range(10):
        await new.send(numbered(index))
        await hub.send("w0", numbered(index))
    assert await read_numbers(hub.receive, 10) == list(range(10))
    assert await read_numbers(new.receive, 10) == list(range(10))


@every_transport
async def test_a_window_left_half_full_by_an_old_life_does_not_hold_the_new_one(transport: Transport):
    hub, _ = await joined(transport, window=4)
    for index in range(4):
        await hub.send("w0", numbered(index))
    new = await transport.join(hello("w0", life="life-2"))
    assert [type(await hub.receive()) for _ in range(2)] == [PeerGone, PeerJoined]
    await hub.send("w0", numbered(7), deadline_s=5.0)
    assert await read_numbers(new.receive, 1) == [7]


@every_transport
async def test_sending_to_an_unknown_peer_says_so(transport: Transport):
    hub = await transport.start_hub()
    with pytest.raises(PeerLost, match="nobody"):
        await hub.send("nobody", numbered(0))


@every_transport
async def test_a_dropped_peer_is_reported_gone_once_and_its_queued_messages_are_not_seen(transport: Transport):
    hub, link = await joined(transport)
    other = await transport.join(hello("w1"))
    assert isinstance(await hub.receive(), PeerJoined)
    for index in range(5):
        await link.send(numbered(index))
    assert await read_numbers(hub.receive, 1) == [0]
    await hub.drop("w0", "fenced")
    await hub.drop("w0", "fenced again")
    gone = await hub.receive()
    assert gone == PeerGone("w0", "fenced")
    with pytest.raises(PeerLost, match="fenced"):
        await link.receive()
    with pytest.raises(PeerLost, match="fenced"):
        await link.send(numbered(9))
    await other.send(numbered(3))
    assert await hub.receive() == Received("w1", numbered(3))


@every_transport
async def test_a_dropped_life_cannot_come_back_but_a_new_one_can(transport: Transport):
    hub, _ = await joined(transport)
    await hub.drop("w0", "fenced")
    with pytest.raises(RunError, match="reported gone"):
        await transport.join(hello("w0"))
    await transport.join(hello("w0", life="life-2"))
    assert [type(await hub.receive()) for _ in range(2)] == [PeerGone, PeerJoined]


@every_transport
async def test_a_sender_that_waits_for_a_dropped_peer_is_told(transport: Transport):
    hub, _ = await joined(transport, window=1)
    await hub.send("w0", numbered(0))

    async def wait_for_room():
        with pytest.raises(PeerLost, match="fenced"):
            await hub.send("w0", numbered(1), deadline_s=20.0)

    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for_room())
        await asyncio.sleep(0)
        await hub.drop("w0", "fenced")


@every_transport
async def test_a_closing_link_hands_over_its_tail(transport: Transport):
    hub, link = await joined(transport, window=256)
    for index in range(200):
        await link.send(numbered(index))
    async with asyncio.TaskGroup() as group:
        group.create_task(link.close())
        assert await read_numbers(hub.receive, 200) == list(range(200))
    gone = await hub.receive()
    assert isinstance(gone, PeerGone)
    assert "closed" in gone.reason


@every_transport
async def test_a_closing_hub_hands_over_its_tail(transport: Transport):
    hub, link = await joined(transport, window=256)
    for index in range(200):
        await hub.send("w0", numbered(index))
    async with asyncio.TaskGroup() as group:
        group.create_task(hub.close())
        assert await read_numbers(link.receive, 200) == list(range(200))
    with pytest.raises(PeerLost, match="closed"):
        await link.receive()


@every_transport
async def test_closing_does_not_wait_longer_than_promised_for_one_who_does_not_listen(transport: Transport):
    hub, link = await joined(transport)
    await hub.send("w0", numbered(0))
    await link.send(numbered(0))
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    await hub.close()
    assert 0.9 <= loop.time() - started_at < 2.5
    assert await read_numbers(link.receive, 1) == [0]


@every_transport
async def test_a_closed_hub_says_so_to_whoever_waits(transport: Transport):
    hub = await transport.start_hub()

    async def wait():
        with pytest.raises(RunError, match="closed"):
            await hub.receive()

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await asyncio.sleep(0)
        await hub.close()


@every_transport
async def test_a_cancelled_receive_loses_nothing(transport: Transport):
    hub, link = await joined(transport)
    for _ in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await hub.receive()
    for index in range(50):
        await link.send(numbered(index))
    numbers = []
    while len(numbers) < 50:
        try:
            async with asyncio.timeout(0.0005):
                numbers += await read_numbers(hub.receive, 1)
        except TimeoutError:
            continue
    assert numbers == list(range(50))


@every_transport
async def test_an_idle_conversation_goes_on(transport: Transport):
    hub = await transport.start_hub(silence_deadline_s=0.8)
    link = await transport.join()
    assert isinstance(await hub.receive(), PeerJoined)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await hub.receive()
    await link.send(numbered(1))
    assert await read_numbers(hub.receive, 1) == [1]


@every_transport
async def test_an_object_of_the_wrong_kind_is_the_senders_error_and_costs_nothing(transport: Transport):
    hub, link = await joined(transport)
    bad = numbered(0)
    bad.error = object()
    with pytest.raises(Exception, match="cannot send"):
        await link.send(bad)
    await link.send(numbered(1))
    assert await hub.receive() == Received("w0", numbered(1))
