"""ROUTER on the engine's side, DEALER on a peer's side. The one file that knows ZeroMQ.

Invariants:
- Sockets are read and written without blocking, from loop callbacks only; no task waits inside ZeroMQ, so none can be
  cancelled there and lose a message. Reading goes on until the socket is empty, and is looked at again after every
  write, because the socket's file descriptor signals changes, not states.
- ZeroMQ is never trusted to keep a message: what it does not deliver stays in the channel and is sent again.
- High-water marks are finite and above what two windows hold, so the window is the limit that is felt.

A dead peer shows in three ways: its connection breaks (seen at once, forgiven for `grace_s`), its ZeroMQ thread stops
answering (heartbeats of the I/O thread break the connection), or its loop sends no sign of life (silence).
"""

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Self

import zmq

from engine.core.errors import RunError, WireError
from engine.transport.base import DEFAULT_WINDOW
from engine.transport.channel import MAX_GRACE_S, SILENCE_PARTS, Clock
from engine.transport.hub import Delivery, HubSide, route_of
from engine.transport.link import LinkSide
from engine.wire import Frames, Hello, Message, Welcome, decode, encode

logger = logging.getLogger(__name__)

SILENCE_DEADLINE_S = 60.0
ZERO_COPY_BYTES = 1 << 16
"""Frames from here on are sent without a copy: below it the bookkeeping costs more than the copy."""
MAX_WINDOW = 4096
HIGH_WATER = 3 * MAX_WINDOW
"""Messages ZeroMQ may hold a connection: a window, its repetition after a reconnection, and acknowledgements."""
MAX_ROUTE_BYTES = 255
"""ZeroMQ's limit for an identity."""
READS_A_TURN = 256
"""Messages taken before the loop's other callbacks have a turn: some 5 ms."""
RECONNECT_MS, MAX_RECONNECT_MS = 100, 1000
CLOSE_LINGER_MS = 500
PROBE_DELAY_S = 0.05
"""Time a broken connection takes from the I/O thread's event to the socket's routing table."""

_LOGGED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: not ZeroMQ's protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake failed: not authenticated",
}


def _cause(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)


class _Pump:
    """Reads one socket from loop callbacks until it is empty."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_frames: Callable[[list[bytes]], None], on_failure: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._is_scheduled = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self.read)
        self.look_again()

    def look_again(self) -> None:
        """Read in the next turn: this one may have used up the descriptor's signal."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self.read)

    def read(self) -> None:
        """Hand over what waits; a failure below ends the hub or link instead of leaving it deaf."""
        self._is_scheduled = False
        is_whole = False
        try:
            self._read()
            is_whole = True
        finally:
            if not is_whole:
                self._on_failure()

    def _read(self) -> None:
        for _ in range(READS_A_TURN):
            if self._is_closed:
                return
            try:
                # Copied: frames of ZeroMQ's own memory start at any address, and numpy's views must be aligned.
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)
        self.look_again()

    def write(self, frames: Frames) -> None:
        """Send without waiting. Raises zmq.Again where the high-water mark is reached."""
        is_small = all(len(frame) < ZERO_COPY_BYTES for frame in frames)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=is_small)
        finally:
            self.look_again()

    def close(self) -> None:
        """Stop reading."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)


class _Endpoint:
    """A socket with its context, monitor and options."""

    def __init__(self, kind: int, silence_deadline_s: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        beat_ms = max(1, int(1000 * silence_deadline_s / SILENCE_PARTS))
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, (SILENCE_PARTS - 2) * beat_ms)
        self._monitor: zmq.Socket[bytes] | None = None
        self._pumps: list[_Pump] = []
        self._logged: set[int] = set()  # each kind once: a peer that cannot connect tries again for ever

    def start(
        self,
        on_frames: Callable[[list[bytes]], None],
        on_event: Callable[[int], None],
        on_failure: Callable[[], None],
    ) -> _Pump:
        """Read messages and connection events from now on; call it before bind or connect."""
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        for event in _LOGGED:
            wanted |= event
        self._monitor = self.socket.get_monitor_socket(wanted)

        def on_monitor(frames: list[bytes]) -> None:
            event: int = struct.unpack("=hi", frames[0])[0]
            if event not in _LOGGED:
                on_event(event)
            elif event not in self._logged:
                self._logged.add(event)
                logger.warning("%s: %s", _LOGGED[zmq.Event(event)], frames[1].decode(errors="replace"))

        self._pumps = [_Pump(self.socket, on_frames, on_failure), _Pump(self._monitor, on_monitor, on_failure)]
        return self._pumps[0]

    async def close(self) -> None:
        """Give the sockets back; waits for what lingers off the loop."""
        for pump in self._pumps:
            pump.close()
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close()
        self.socket.close()
        await asyncio.to_thread(self._context.term)


class ZmqHub(HubSide[Frames]):
    """The engine's side: a ROUTER that says when it cannot deliver."""

    def __init__(self, endpoint: _Endpoint, window: int, silence_deadline_s: float) -> None:
        super().__init__(window, min(MAX_GRACE_S, silence_deadline_s / 2.0), silence_deadline_s)
        self._endpoint = endpoint
        self._pump = endpoint.start(self._on_frames, self._on_event, lambda: self._fail("the hub's reader failed"))
        self._clock = Clock(silence_deadline_s, self._beat)
        self._address = ""

    @classmethod
    async def bind(
        cls,
        host: str,
        port: int,
        *,
        window: int = DEFAULT_WINDOW,
        silence_deadline_s: float = SILENCE_DEADLINE_S,
    ) -> Self:
        """Listen at host:port; port 0 takes any free one.

        Args:
            host: interface to listen on.
            port: 0 to 65535.
            window: unacknowledged messages a direction and peer, 1 to 4096; the peers take it over.
            silence_deadline_s: a peer that shows no life for this long is gone; the peers take over a shorter one.

        Raises:
            RunError: the port is taken or the host is not ours.
        """
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"window must be 1 to {MAX_WINDOW}, got {window}")
        endpoint = _Endpoint(zmq.ROUTER, silence_deadline_s)
        endpoint.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        endpoint.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        hub = cls(endpoint, window, silence_deadline_s)
        try:
            endpoint.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            await hub.close()
            raise RunError(
                f"cannot listen on {host}:{port}: {_cause(exc)}; stop what uses that port, or set another one"
                f" (0 = any free port)"
            ) from exc
        hub._address = endpoint.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return hub

    @property
    def address(self) -> str:
        """Where peers connect, e.g. tcp://127.0.0.1:5555."""
        return self._address

    def _pack(self, message: Message, seq: int) -> Frames:
        return encode(message, seq)

    def _transmit(self, route: str, parcel: Frames) -> Delivery:
        try:
            self._pump.write([route.encode(), *parcel])
        except zmq.Again:
            return "full"
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return "unreachable"
        return "sent"

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            route = frames[0].decode()
        except UnicodeDecodeError:
            return  # an identity ZeroMQ made up: not one of our links
        try:
            seq, message = decode(frames[1:])
        except WireError as exc:
            self._on_garbage(route, exc)
        else:
            self._on_message(route, seq, message)

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._loop.call_later(PROBE_DELAY_S, self._probe)

    def _probe(self) -> None:
        """Find out whose connection broke: a sign of life cannot be sent to it."""
        if self._failure is None:
            self._on_beat(is_late=True, silent_after_s=0.0)

    def _beat(self, is_late: bool) -> None:
        self._pump.read()
        self._on_beat(is_late, self._clock.silent_after_s)

    async def _release(self) -> None:
        self._clock.stop()
        await self._endpoint.close()


class ZmqLink(LinkSide[Frames]):
    """A peer's side: a DEALER whose identity is the peer's name and life."""

    def __init__(self, endpoint: _Endpoint, hello: Hello, silence_deadline_s: float) -> None:
        super().__init__(hello, min(MAX_GRACE_S, silence_deadline_s / 2.0))
        self._endpoint = endpoint
        self._pump = endpoint.start(self._on_frames, self._on_event, lambda: self._lose("the link's reader failed"))
        self._silence_deadline_s = silence_deadline_s
        self._clock = Clock(silence_deadline_s, self._beat)

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: Hello,
        *,
        deadline_s: float = 30.0,
        silence_deadline_s: float = SILENCE_DEADLINE_S,
    ) -> Self:
        """Join the engine at `address` as `hello.name`; the engine says what the window is.

        Raises:
            RunError: the engine refused (another protocol, a name or life it does not take), or a bad address.
            DeadlineError: no answer within `deadline_s`.
        """
        identity = route_of(hello).encode()
        if not hello.name or len(identity) > MAX_ROUTE_BYTES or identity[0] == 0:
            raise RunError(
                f"a peer needs a name that does not begin with a zero byte, and at most {MAX_ROUTE_BYTES} bytes for"
                f" its name and life, got {route_of(hello)!r}"
            )
        endpoint = _Endpoint(zmq.DEALER, silence_deadline_s)
        endpoint.socket.setsockopt(zmq.IDENTITY, identity)
        endpoint.socket.setsockopt(zmq.IMMEDIATE, 1)
        endpoint.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        endpoint.socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        link = cls(endpoint, hello, silence_deadline_s)
        try:
            endpoint.socket.connect(address)
            await link._join(address, deadline_s)
        except zmq.ZMQError as exc:
            raise RunError(f"cannot connect to {address!r}: {_cause(exc)}; it must look like tcp://host:port") from exc
        finally:
            if link._engine_life is None:
                link._lose("it never joined")
                await link._release()
        return link

    def _pack(self, message: Message, seq: int) -> Frames:
        return encode(message, seq)

    def _transmit(self, parcel: Frames) -> bool:
        try:
            self._pump.write(parcel)
        except zmq.Again:
            return False
        return True

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            seq, message = decode(frames)
        except WireError as exc:
            self._on_garbage(exc)
        else:
            self._on_message(seq, message)

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_connect()
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnect()

    def _on_welcome(self, welcome: Welcome) -> None:
        super()._on_welcome(welcome)
        if 0.0 < welcome.silence_deadline_s < self._silence_deadline_s:
            self._silence_deadline_s = welcome.silence_deadline_s
            self._clock.stop()
            self._clock = Clock(welcome.silence_deadline_s, self._beat)

    def _beat(self, is_late: bool) -> None:
        self._pump.read()
        self._on_beat(is_late, self._clock.silent_after_s)

    async def _release(self) -> None:
        self._clock.stop()
        await self._endpoint.close()
