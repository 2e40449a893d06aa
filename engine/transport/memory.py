"""The in-memory twin of the ZeroMQ transport, for one loop: tests and simulation under a virtual clock.

Invariants: the same sessions, windows, hellos and endings as `zmq`, because both sit on `hub` and `link`; a parcel
arrives in a later turn of the loop, never inside the call that sent it; no timer runs while all is well, so a virtual
clock still sees a deadlock. Silence is not simulated: a peer here dies (`vanish`) or loses its connection (`sever`).
"""

from typing import Self, TypeAlias

from engine.core.errors import RunError
from engine.transport.base import DEFAULT_WINDOW
from engine.transport.channel import MAX_GRACE_S
from engine.transport.hub import Delivery, HubSide, route_of
from engine.transport.link import LinkSide
from engine.wire import Hello, Message, decode, encode

_Numbered: TypeAlias = tuple[int, Message]


class MemoryHub(HubSide[_Numbered]):
    """The engine's side. Links find it by reference."""

    def __init__(self, window: int, grace_s: float, verify: bool) -> None:
        super().__init__(window, grace_s)
        self._verify = verify
        self._links: dict[str, MemoryLink] = {}

    @classmethod
    async def bind(cls, *, window: int = DEFAULT_WINDOW, grace_s: float = MAX_GRACE_S, verify: bool = True) -> Self:
        """A hub in this loop.

        Args:
            window: unacknowledged messages a direction and peer.
            grace_s: how long a peer may be disconnected before it is gone.
            verify: send every message through the wire format, so that a wrong type is the sender's WireError; False
                hands the object over, which is faster.
        """
        return cls(window, grace_s, verify)

    @property
    def address(self) -> str:
        """A name for logs; links take the hub itself."""
        return f"memory://{self._life}"

    def pack(self, message: Message, seq: int) -> _Numbered:
        """What travels, for both sides."""
        return decode(encode(message, seq)) if self._verify else (seq, message)

    def attach(self, link: "MemoryLink") -> None:
        """A link connects."""
        if self._failure is not None:
            raise RunError(f"no engine listens at {self.address}: {self._failure}")
        self._links[link.route] = link

    def detach(self, link: "MemoryLink") -> None:
        """A link's connection is cut."""
        if self._links.pop(link.route, None) is not None:
            self._on_disconnect(link.route)

    def deliver(self, link: "MemoryLink", connection: int, parcel: _Numbered) -> None:
        """A parcel of `link` arrives, unless the connection it was sent over was cut meanwhile."""
        if link.connection == connection:
            self._on_message(link.route, *parcel)

    def _pack(self, message: Message, seq: int) -> _Numbered:
        return self.pack(message, seq)

    def _transmit(self, route: str, parcel: _Numbered) -> Delivery:
        link = self._links.get(route)
        if link is None:
            return "unreachable"
        self._loop.call_soon(link.deliver, link.connection, parcel)
        return "sent"

    async def _release(self) -> None:
        for link in list(self._links.values()):
            self._loop.call_soon(link.sever)  # behind what was just sent


class MemoryLink(LinkSide[_Numbered]):
    """A peer's side of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, hello: Hello, grace_s: float) -> None:
        super().__init__(hello, grace_s)
        self._hub = hub
        self._is_connected = False
        self.route = route_of(hello)
        """Its address at the hub."""
        self.connection = 0
        """Counts connections: parcels of an earlier one are lost."""

    @classmethod
    async def connect(
        cls,
        hub: MemoryHub,
        hello: Hello,
        *,
        deadline_s: float = 30.0,
        grace_s: float = MAX_GRACE_S,
    ) -> Self:
        """Join `hub` as `hello.name`.

        Raises:
            RunError: the hub refused, or is closed.
            DeadlineError: no answer within `deadline_s`.
        """
        link = cls(hub, hello, grace_s)
        link.reconnect()
        try:
            await link._join(hub.address, deadline_s)
        finally:
            if link._engine_life is None:
                link.vanish()
        return link

    def reconnect(self) -> None:
        """Connect (again) and say hello."""
        self._hub.attach(self)
        self.connection += 1
        self._is_connected = True
        self._on_connect()

    def sever(self) -> None:
        """Cut the connection: everything on its way, in both directions, is lost."""
        self._is_connected = False
        self.connection += 1
        self._hub.detach(self)
        self._on_disconnect()

    def vanish(self) -> None:
        """Die like a killed process: nothing is sent any more, nothing said."""
        self._lose("this process died")
        self.sever()

    def deliver(self, connection: int, parcel: _Numbered) -> None:
        """A parcel of the hub arrives, unless the connection it was sent over was cut."""
        if self.connection == connection:
            self._on_message(*parcel)

    def _pack(self, message: Message, seq: int) -> _Numbered:
        return self._hub.pack(message, seq)

    def _transmit(self, parcel: _Numbered) -> bool:
        if self._is_connected:
            self._loop.call_soon(self._hub.deliver, self, self.connection, parcel)
        return self._is_connected

    async def _release(self) -> None:
        self._loop.call_soon(self.sever)  # behind what was just sent
