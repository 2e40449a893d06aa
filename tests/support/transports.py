"""Both transports behind one face, so that one suite runs over both; for ZeroMQ through a wire that can be cut."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from engine.core.errors import RunError
from engine.transport.base import Hub, Link, PeerJoined, Received
from engine.transport.memory import MemoryHub, MemoryLink
from engine.transport.zmq import ZmqHub, ZmqLink
from engine.wire import PROTOCOL_VERSION, Hello, SampleFailed, SampleKey
from tests.support.virtual_loop import VirtualLoop

TEST_DEADLINE_S = 60.0


def hello(name: str = "w0", life: str = "life-1", protocol: int = PROTOCOL_VERSION) -> Hello:
    """A worker's first message."""
    return Hello(protocol=protocol, role="worker", name=name, life=life, pid=1)


def numbered(index: int) -> SampleFailed:
    """A small message that carries a number."""
    return SampleFailed(key=SampleKey(0, index), error="")


class _Forward(asyncio.Protocol):
    """One half of a proxied connection."""

    def __init__(self, other: "_Forward | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        for chunk in self.early:
            transport.write(chunk)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        if self.other.transport is None:
            self.other.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # after what it still has to write


class Wire:
    """A TCP proxy in front of a hub; `cut` breaks its connections and what was on its way is lost."""

    def __init__(self, target: str) -> None:
        self._host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._port = int(port)
        self._halves: list[_Forward] = []

    async def open(self) -> str:
        """Listen; returns the address to connect to."""
        loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _accept(self) -> _Forward:
        near, far = _Forward(), _Forward()
        near.other, far.other = far, near
        self._halves += [near, far]
        self._group.create_task(self._connect(near, far))
        return near

    async def _connect(self, near: _Forward, far: _Forward) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, self._host, self._port)
        except OSError:  # the hub is closed
            if near.transport is not None:
                near.transport.abort()

    def cut(self) -> None:
        """Break every connection."""
        halves, self._halves = self._halves, []
        for half in halves:
            if half.transport is not None:
                half.transport.abort()

    async def close(self) -> None:
        """Stop listening."""
        self._server.close()
        self.cut()
        await self._group.__aexit__(None, None, None)


class Transport:
    """Makes hubs and links of one kind and closes what a test left open."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub: Any = None
        self._links: list[Any] = []
        self._wires: dict[int, Wire] = {}

    async def start_hub(self, window: int = 64, silence_deadline_s: float = 8.0) -> Hub:
        """The one hub of a test."""
        if self.kind == "memory":
            self.hub = await MemoryHub.bind(window=window, grace_s=silence_deadline_s / 2)
        else:
            self.hub = await ZmqHub.bind("127.0.0.1", 0, window=window, silence_deadline_s=silence_deadline_s)
        return self.hub

    async def join(self, greeting: Hello | None = None, deadline_s: float = 10.0) -> Link:
        """A link to the hub, through a wire of its own."""
        greeting = greeting or hello()
        if self.kind == "memory":
            link: Any = await MemoryLink.connect(self.hub, greeting, deadline_s=deadline_s, grace_s=4.0)
        else:
            wire = Wire(self.hub.address)
            address = await wire.open()
            try:
                link = await ZmqLink.connect(address, greeting, deadline_s=deadline_s, silence_deadline_s=8.0)
            except RunError:
                await wire.close()
                raise
            self._wires[id(link)] = wire
        self._links.append(link)
        return link

    def cut(self, link: Any) -> None:
        """Lose the connection and all on its way; it comes back."""
        if self.kind == "memory":
            link.sever()
            link.reconnect()
        else:
            self._wires[id(link)].cut()

    async def close(self) -> None:
        """Everything, links first."""
        for link in self._links:
            await link.close()
        for wire in self._wires.values():
            await wire.close()
        if self.hub is not None:
            await self.hub.close()


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "memory": VirtualLoop,
    "zmq-asyncio": asyncio.SelectorEventLoop,
    "zmq-uvloop": uvloop.new_event_loop,
}


def run_on(kind: str, scenario: Callable[[Transport], Awaitable[None]]) -> None:
    """Run `scenario` over one kind of transport; tasks it leaves behind fail it."""

    async def main() -> None:
        transport = Transport(kind)
        async with asyncio.timeout(TEST_DEADLINE_S):
            try:
                await scenario(transport)
            finally:
                await transport.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks outlived the test: {left}"

    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        runner.run(main())


def over(*kinds: str) -> Callable[[Callable[[Transport], Awaitable[None]]], Callable[[str], None]]:
    """Make a test of an async scenario, once a kind of transport."""

    def decorate(scenario: Callable[[Transport], Awaitable[None]]) -> Callable[[str], None]:
        @pytest.mark.parametrize("kind", kinds)
        @functools.wraps(scenario)
        def test(kind: str) -> None:
            run_on(kind, scenario)

        del test.__wrapped__  # pytest reads the parameters of what it wraps otherwise
        return test

    return decorate


every_transport = over(*LOOPS)
zmq_only = over("zmq-asyncio", "zmq-uvloop")


async def joined(transport: Transport, window: int = 64) -> tuple[Hub, Link]:
    """A hub that saw one worker join, and the worker's link."""
    hub = await transport.start_hub(window=window)
    link = await transport.join()
    assert isinstance(await hub.receive(), PeerJoined)
    return hub, link


async def read_numbers(receive: Callable[[], Awaitable[Any]], count: int) -> list[int]:
    """The numbers of the next `count` messages."""
    numbers: list[int] = []
    while len(numbers) < count:
        event = await receive()
        message = event.message if isinstance(event, Received) else event
        numbers.append(message.key.index)
    return numbers
