"""What only sockets and processes can show: killed, stopped and restarted peers, foreign bytes, taken ports."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

import msgspec
import pytest
import zmq

from engine.core.errors import DeadlineError, PeerLost, RunError
from engine.transport.base import PeerGone, PeerJoined, Received
from engine.transport.zmq import ZmqHub, ZmqLink
from engine.wire import Hello, Refused, SampleFailed, SampleKey, decode, encode
from tests.support.transports import Transport, hello, numbered, zmq_only

SILENCE_S = 2.0


@contextlib.asynccontextmanager
async def peer_process(*arguments):
    """A child process of tests.support.peer_process, killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.peer_process", *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def free_port():
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def next_event(hub, kind):
    """The next event, which must be a `kind`."""
    event = await hub.receive()
    assert isinstance(event, kind), event
    return event


@contextlib.contextmanager
def raw_dealer(address, name):
    """A socket that speaks ZeroMQ but not our protocol."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, name)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(address)
        yield dealer


@zmq_only
async def test_a_killed_process_is_reported_gone_and_the_hub_goes_on(transport: Transport):
    hub = await transport.start_hub(silence_deadline_s=SILENCE_S)
    async with peer_process("link", hub.address, "w0") as process:
        await next_event(hub, PeerJoined)
        await hub.send("w0", numbered(7))
        assert (await next_event(hub, Received)).message == numbered(7)
        killed_at = time.monotonic()
        process.kill()
        assert (await next_event(hub, PeerGone)).peer == "w0"
        assert time.monotonic() - killed_at < SILENCE_S
    with pytest.raises(PeerLost):
        await hub.send("w0", numbered(8))
    link = await transport.join(hello("w1"))
    await next_event(hub, PeerJoined)
    await link.send(numbered(1))
    await next_event(hub, Received)


@zmq_only
async def test_a_process_killed_in_mid_stream_leaves_an_unbroken_prefix_and_its_successor_starts_anew(
    transport: Transport,
):
    hub = await transport.start_hub(silence_deadline_s=SILENCE_S)
    async with peer_process("link", hub.address, "w0") as process:
        await next_event(hub, PeerJoined)
        await hub.send("w0", SampleFailed(key=SampleKey(0, 0), error="burst:100000"))
        indices = [(await next_event(hub, Received)).message.key.index for _ in range(500)]
        process.kill()
        async with peer_process("link", hub.address, "w0"):
            while isinstance(event := await hub.receive(), Received):
                indices.append(event.message.key.index)
            assert isinstance(event, PeerGone)
            await next_event(hub, PeerJoined)
            await hub.send("w0", numbered(3))
            assert (await next_event(hub, Received)).message == numbered(3)
    assert indices == list(range(len(indices)))


@zmq_only
async def test_a_stopped_process_is_silent_and_gone_and_finds_itself_refused_when_it_wakes(transport: Transport):
    hub = await transport.start_hub(silence_deadline_s=SILENCE_S)
    async with peer_process("link", hub.address, "w0") as process:
        await next_event(hub, PeerJoined)
        await hub.send("w0", numbered(1))
        await next_event(hub, Received)
        stopped_at = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        await next_event(hub, PeerGone)
        assert time.monotonic() - stopped_at <= SILENCE_S + 0.5
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            assert await process.wait() == 0


@zmq_only
async def test_a_killed_engine_is_reported_to_its_peers(transport: Transport):
    async with peer_process("hub", 0) as process:
        address = (await process.stdout.readline()).decode().strip()
        link = await ZmqLink.connect(address, hello(), silence_deadline_s=SILENCE_S)
        await link.send(numbered(1))
        assert await link.receive() == numbered(1)
        process.kill()
        with pytest.raises(PeerLost, match="engine is gone"):
            await link.receive()
        await link.close()


@zmq_only
async def test_a_restarted_engine_is_a_lost_engine(transport: Transport):
    port = free_port()
    async with peer_process("hub", port) as process:
        await process.stdout.readline()
        link = await ZmqLink.connect(f"tcp://127.0.0.1:{port}", hello(), silence_deadline_s=20.0)
        process.kill()
        await process.wait()
    async with peer_process("hub", port) as process:
        await process.stdout.readline()
        with pytest.raises(PeerLost, match="restarted"):
            await link.receive()
        await link.close()


@zmq_only
async def test_a_stranger_that_sends_garbage_is_refused_and_nobody_notices(transport: Transport):
    hub = await transport.start_hub()
    link = await transport.join()
    await next_event(hub, PeerJoined)
    with raw_dealer(hub.address, b"stranger") as dealer:
        for garbage in (b"", b"\xc1\xff", b"\x92\x01\x80"):
            dealer.send(garbage)
            _, answer = decode(await asyncio.to_thread(dealer.recv_multipart))
            assert isinstance(answer, Refused)
            assert "protocol" in answer.reason
    await link.send(numbered(1))
    assert await hub.receive() == Received("w0", numbered(1))


@zmq_only
async def test_a_peer_that_starts_to_send_garbage_is_gone_with_the_reason(transport: Transport):
    hub = await transport.start_hub()
    with raw_dealer(hub.address, b"w0/life-1") as dealer:
        dealer.send_multipart(encode(hello()))
        await next_event(hub, PeerJoined)
        dealer.send(b"garbage")
        assert "not a message" in (await next_event(hub, PeerGone)).reason


@zmq_only
async def test_a_peer_past_its_window_or_acknowledging_the_future_is_gone(transport: Transport):
    hub = await transport.start_hub(window=2)
    with raw_dealer(hub.address, b"w0/life-1") as dealer:
        dealer.send_multipart(encode(hello()))
        await next_event(hub, PeerJoined)
        for seq in (1, 2, 3):
            dealer.send_multipart(encode(numbered(seq), seq))
        await asyncio.to_thread(dealer.recv_multipart)
        for _ in range(2):
            await next_event(hub, Received)
    link = await transport.join(hello("w1"))
    await link.send(numbered(1))
    events = [await hub.receive() for _ in range(3)]
    assert [type(event) for event in events] == [PeerGone, PeerJoined, Received]
    assert "window" in events[0].reason


@zmq_only
async def test_a_hello_under_another_name_is_refused(transport: Transport):
    hub = await transport.start_hub()
    with raw_dealer(hub.address, b"w0/life-1") as dealer:
        dealer.send_multipart(encode(hello("w1")))
        _, answer = decode(await asyncio.to_thread(dealer.recv_multipart))
        assert isinstance(answer, Refused)
        assert "w1" in answer.reason


@zmq_only
async def test_a_hello_of_a_future_protocol_with_unknown_fields_is_refused_by_version(transport: Transport):
    hub = await transport.start_hub()
    future = msgspec.to_builtins(hello("w0", protocol=2)) | {"colour": "blue"}
    with raw_dealer(hub.address, b"w0/life-1") as dealer:
        dealer.send(msgspec.msgpack.encode([0, future]))
        _, answer = decode(await asyncio.to_thread(dealer.recv_multipart))
        assert isinstance(answer, Refused)
        assert "protocol must be 1, got 2" in answer.reason


@zmq_only
async def test_bytes_that_are_not_even_zeromq_do_no_harm(transport: Transport):
    hub = await transport.start_hub()
    host, port = hub.address.removeprefix("tcp://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()
    link = await transport.join()
    await next_event(hub, PeerJoined)
    await link.send(numbered(1))
    await next_event(hub, Received)


@zmq_only
async def test_a_taken_port_is_named_with_a_remedy(transport: Transport):
    hub = await transport.start_hub()
    port = int(hub.address.rsplit(":", 1)[1])
    with pytest.raises(RunError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; stop what"):
        await ZmqHub.bind("127.0.0.1", port)


@zmq_only
async def test_an_address_nobody_listens_at_is_named_at_the_deadline(transport: Transport):
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError, match=address):
        await ZmqLink.connect(address, hello(), deadline_s=0.3)


@zmq_only
async def test_an_address_that_is_none_is_named(transport: Transport):
    for address in ("", "nonsense", "tcp://127.0.0.1:notaport"):
        with pytest.raises(RunError, match="tcp://host:port"):
            await ZmqLink.connect(address, hello())


@zmq_only
async def test_a_name_zeromq_cannot_carry_is_refused_at_once(transport: Transport):
    hub = await transport.start_hub()
    for name in ("", "\0w", "x" * 256):
        greeting = Hello(protocol=1, role="worker", name=name, life="a", pid=1)
        with pytest.raises(RunError, match="at most 255 bytes"):
            await ZmqLink.connect(hub.address, greeting)


@zmq_only
async def test_a_link_that_is_up_first_finds_the_engine_that_comes_later(transport: Transport):
    port = free_port()
    async with asyncio.TaskGroup() as group:
        connecting = group.create_task(ZmqLink.connect(f"tcp://127.0.0.1:{port}", hello(), deadline_s=20.0))
        await asyncio.sleep(0.2)
        hub = await ZmqHub.bind("127.0.0.1", port)
        await next_event(hub, PeerJoined)
        link = await connecting
    await link.send(numbered(1))
    await next_event(hub, Received)
    await link.close()
    await hub.close()
