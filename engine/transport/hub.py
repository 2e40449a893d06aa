"""The engine's side without its sockets: who is a peer, what of theirs counts, what the engine sees of it.

Invariants:
- Every `PeerJoined` is followed by exactly one `PeerGone`, also when the engine itself drops the peer; messages of a
  life lie between the two, and after `drop` none of them is seen any more.
- A life that ended never comes back: its process must start again, with a new life.
- A life has a route of its own, so what a late or stray process sends is never taken for its namesake's.
- Bytes of a peer can end that peer's life, never the hub.

`zmq.ZmqHub` and `memory.MemoryHub` add how parcels travel. They call `_on_message`, `_on_garbage`, `_on_disconnect`
and `_on_beat` from loop callbacks, so nothing here is ever cancelled half-way.
"""

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal

from engine.core.errors import PeerLost, RunError, WireError
from engine.transport.base import HubEvent, PeerGone, PeerJoined, Received
from engine.transport.channel import FAREWELL_S, MAX_GRACE_S, Channel
from engine.transport.session import Parcel
from engine.wire import PROTOCOL_VERSION, Ack, Closed, Hello, Message, Refused, Welcome

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 1.0
REMEMBERED_LIVES = 64
"""Ended lives remembered a name: more than can still be running while their successors start."""

Delivery = Literal["sent", "full", "unreachable"]


def route_of(hello: Hello) -> str:
    """Where parcels of this life come from and go to."""
    return f"{hello.name}/{hello.life}"


@dataclass(slots=True)
class _Peer(Generic[Parcel]):
    hello: Hello
    route: str
    channel: Channel[Parcel]
    heard_at: float
    grace: asyncio.TimerHandle | None = None
    """Ends the life unless the connection comes back."""


class HubSide(ABC, Generic[Parcel]):
    """Peers, their channels, and the events of all of them in one queue."""

    def __init__(self, window: int, grace_s: float = MAX_GRACE_S, silence_deadline_s: float = 0.0) -> None:
        self.policy_version = 0
        """Told to every peer that says hello; the engine keeps it current."""
        self._window = window
        self._grace_s = grace_s
        self._silence_deadline_s = silence_deadline_s
        self._life = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Peer[Parcel]] = {}
        self._ended: dict[str, deque[str]] = {}
        # Bounded: window messages a peer, and two events a life. The peer is None for events that need no ack.
        self._events: deque[tuple[HubEvent, _Peer[Parcel] | None]] = deque()
        self._arrived = asyncio.Event()  # set when an event waits or the hub failed
        self._ack_pending: dict[int, Channel[Parcel]] = {}
        self._failure: str | None = None
        self._is_closed = False
        self._unanswered: set[str] = set()
        self._answered = asyncio.Event()  # set when one more peer answered the farewell

    @abstractmethod
    def _pack(self, message: Message, seq: int) -> Parcel: ...

    @abstractmethod
    def _transmit(self, route: str, parcel: Parcel) -> Delivery: ...

    @abstractmethod
    async def _release(self) -> None:
        """Give back what carries the parcels."""

    async def receive(self) -> HubEvent:
        """The next event of any peer; waits without limit (the caller owns the deadline).

        Raises:
            RunError: the hub was closed or failed.
        """
        while not self._events:
            if self._failure is not None:
                raise RunError(self._failure)
            self._arrived.clear()
            await self._arrived.wait()
        event, peer = self._events.popleft()
        if peer is not None and peer.channel.lost is None and peer.channel.consume():
            self._ack_pending[id(peer)] = peer.channel
        if not self._events:
            pending, self._ack_pending = self._ack_pending, {}
            for channel in pending.values():
                if channel.lost is None:
                    channel.acknowledge_arrivals()
        return event

    async def send(self, peer: str, message: Message, deadline_s: float = 30.0) -> None:
        """Hand `message` to the link of `peer`; waits while its window is full.

        Raises:
            PeerLost: no such peer, or it went while this waited.
            DeadlineError: its window stayed full for `deadline_s`.
        """
        known = self._peers.get(peer)
        if known is None:
            raise PeerLost(f"no peer {peer!r} is connected")
        await known.channel.send(message, deadline_s)

    async def drop(self, peer: str, reason: str) -> None:
        """End a peer's life: none of its messages is seen any more, only its `PeerGone`. Unknown peers are no error."""
        known = self._peers.get(peer)
        if known is not None:
            self._events = deque(entry for entry in self._events if entry[1] is not known)
            self._end(known, reason)
            self._control(known.route, Refused(reason=f"dropped by the engine: {reason}"))

    async def close(self) -> None:
        """Wait up to 1 s for outstanding acknowledgements, tell every peer, give back the sockets; once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._say_goodbye()
        finally:
            self._fail("the hub is closed")
            await self._release()

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                for peer in list(self._peers.values()):
                    await peer.channel.flush()
        except TimeoutError:
            late = [name for name, peer in self._peers.items() if peer.channel.outstanding]
            logger.warning("hub closed with unacknowledged messages to %s", ", ".join(late))
        for peer in list(self._peers.values()):
            self._unanswered.add(peer.route)
            self._end(peer, "the engine closed")
            self._control(peer.route, Closed(reason="the engine closed"))
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._unanswered:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            logger.info("no answer to the farewell from %s", ", ".join(sorted(self._unanswered)))

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._arrived.set()

    def _push(self, event: HubEvent, peer: _Peer[Parcel] | None = None) -> None:
        self._events.append((event, peer))
        self._arrived.set()

    def _control(self, route: str, message: Message) -> None:
        self._transmit(route, self._pack(message, 0))

    def _sender(self, route: str) -> Callable[[Parcel], bool]:
        """A channel's way out; finding nobody there starts the wait for a reconnection."""

        def transmit(parcel: Parcel) -> bool:
            delivery = self._transmit(route, parcel)
            if delivery == "unreachable":
                self._on_disconnect(route)
            return delivery == "sent"

        return transmit

    def _peer_at(self, route: str) -> _Peer[Parcel] | None:
        name = route.rpartition("/")[0]
        peer = self._peers.get(name)
        return peer if peer is not None and peer.route == route else None

    def _on_message(self, route: str, seq: int, message: Message) -> None:
        if isinstance(message, Hello):
            self._on_hello(route, message)
            return
        peer = self._peer_at(route)
        if peer is None:  # the tail of a life that ended
            if isinstance(message, Closed):
                self._unanswered.discard(route)
                self._answered.set()
            return
        peer.heard_at = self._loop.time()
        try:
            if isinstance(message, Ack):
                peer.channel.on_ack(message.seq)
            elif isinstance(message, Closed):
                self._end(peer, f"it closed: {message.reason}")
                self._control(route, Closed(reason="goodbye"))
            elif peer.channel.accept(seq):
                self._push(Received(peer.hello.name, message), peer)
        except WireError as exc:
            self._refuse(route, str(exc))

    def _on_garbage(self, route: str, error: WireError) -> None:
        """Bytes that are no message arrived from `route`."""
        self._refuse(route, str(error))

    def _refuse(self, route: str, reason: str) -> None:
        logger.warning("peer %s refused: %s", route, reason)
        peer = self._peer_at(route)
        if peer is not None:
            self._end(peer, reason)
        self._control(route, Refused(reason=reason))

    def _on_hello(self, route: str, hello: Hello) -> None:
        problem = self._objection(route, hello)
        if problem is not None:
            self._refuse(route, problem)
            return
        peer = self._peers.get(hello.name)
        if peer is not None and peer.route != route:
            self._refuse(peer.route, f"replaced by a new life (pid {hello.pid})")
            peer = None
        self._control(route, self._welcome())
        if peer is None:
            channel = Channel(f"peer {hello.name!r}", self._window, self._pack, self._sender(route))
            self._peers[hello.name] = _Peer(hello, route, channel, self._loop.time())
            self._push(PeerJoined(hello.name, hello))
            return
        logger.info("peer %s reconnected, %s messages sent again", hello.name, peer.channel.outstanding)
        peer.heard_at = self._loop.time()
        if peer.grace is not None:
            peer.grace.cancel()
            peer.grace = None
        peer.channel.resume()

    def _welcome(self) -> Welcome:
        return Welcome(
            policy_version=self.policy_version,
            life=self._life,
            window=self._window,
            silence_deadline_s=self._silence_deadline_s,
        )

    def _objection(self, route: str, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol must be {PROTOCOL_VERSION}, got {hello.protocol}; install the same version on both sides"
        if route_of(hello) != route:
            return f"connected as {route!r}, but says it is {route_of(hello)!r}"
        if hello.life in self._ended.get(hello.name, ()):
            return f"this life of {hello.name!r} was reported gone; start the process again"
        return None

    def _on_disconnect(self, route: str) -> None:
        peer = self._peer_at(route)
        if peer is not None and peer.grace is None:
            reason = f"it disconnected and was not back within {self._grace_s:g} s"
            peer.grace = self._loop.call_later(self._grace_s, self._end, peer, reason)

    def _on_beat(self, is_late: bool, silent_after_s: float) -> None:
        now = self._loop.time()
        for peer in list(self._peers.values()):
            if not is_late and now - peer.heard_at >= silent_after_s:
                self._refuse(peer.route, f"silent for {now - peer.heard_at:.1f} s")
            else:
                peer.channel.show_life()

    def _end(self, peer: _Peer[Parcel], reason: str) -> None:
        """The life of `peer` is over."""
        del self._peers[peer.hello.name]
        if peer.grace is not None:
            peer.grace.cancel()
        self._ended.setdefault(peer.hello.name, deque(maxlen=REMEMBERED_LIVES)).append(peer.hello.life)
        peer.channel.fail(reason)
        self._push(PeerGone(peer.hello.name, reason))
