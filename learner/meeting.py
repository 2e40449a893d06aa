"""How rank 0 and the ranks that follow it find each other, and the line between rank 0 and each of them.

Invariants:
- Pickles travel only over connections that have shown the key of the run; a stranger at the port costs a few seconds
  and changes nothing.
- Nobody sends for ever: a line whose other side takes nothing for SILENCE_S fails, and so does one whose machine is
  gone.

No torch here. Used by `learner.ranks` and `learner.ranked`.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from engine.core.errors import DeadlineError

logger = logging.getLogger(__name__)

SILENCE_S = 25
"""A rank always reads, whatever it computes: one that takes nothing for so long is stopped, or its machine is gone."""
GREETING_S = 5.0
"""A rank sends its greeting at once; who needs longer is a stranger."""
_KEY_BYTES = 32
_TCP_OPTIONS = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    # Without it data on its way to a machine that is gone is sent again for a quarter of an hour.
    (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S),
)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where followers find rank 0."""

    host: str
    port: int
    key: bytes


class Line:
    """A connection between rank 0 and a follower; any thread may send, one receives."""

    def __init__(self, peer: socket.socket, silence_s: float = SILENCE_S) -> None:
        """Take over a connected socket."""
        peer.settimeout(None)
        whole_s = int(silence_s)
        patience = struct.pack("@ll", whole_s, int((silence_s - whole_s) * 1e6))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if peer.family != socket.AF_UNIX:
            for option, value in _TCP_OPTIONS:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection = Connection(peer.detach())
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError when the other side is gone, or took nothing for SILENCE_S."""
        with self._lock:
            self.connection.send(message)

    def try_to_send(self, message: object) -> None:
        """Send unless the other side is gone; its end was or will be seen by the reader."""
        try:
            self.send(message)
        except OSError as exc:
            logger.debug("not sent: %s", exc)

    def shut_down(self) -> None:
        """End the connection under its readers, which then see its end."""
        try:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
                peer.shutdown(socket.SHUT_RDWR)
        except OSError as exc:
            logger.debug("was closed: %s", exc)


def open_meeting(host: str) -> tuple[socket.socket, Meeting]:
    """Listen on a free port of `host`; rank 0, first."""
    listener = socket.create_server((host, 0))
    return listener, Meeting(host, listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES))


def gather_followers(
    listener: socket.socket, meeting: Meeting, num_followers: int, deadline_s: float
) -> dict[int, Line]:
    """Accept all followers and stop listening; rank to line.

    Raises:
        DeadlineError: not all came in time.
    """
    found: dict[int, Line] = {}
    ends_at = time.monotonic() + deadline_s
    with listener:
        while len(found) < num_followers and (left_s := ends_at - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                break
            peer.settimeout(min(GREETING_S, left_s))
            rank = _greeted(peer, meeting.key)
            if rank is None:
                peer.close()
            else:
                found[rank] = Line(peer)
    missing = [rank for rank in range(1, num_followers + 1) if rank not in found]
    if missing:
        raise DeadlineError(f"ranks {missing} did not come to rank 0 within {deadline_s:g} s")
    return dict(sorted(found.items()))


def _greeted(peer: socket.socket, key: bytes) -> int | None:
    """The rank that says so with the key; None = a stranger."""
    try:
        greeting = _receive(peer, _KEY_BYTES + 4)
    except OSError as exc:
        logger.warning("a stranger came to the ranks' meeting and did not greet: %s", exc)
        return None
    if len(greeting) < _KEY_BYTES + 4 or not hmac.compare_digest(greeting[:_KEY_BYTES], key):
        return None
    return struct.unpack("!I", greeting[_KEY_BYTES:])[0]


def find_leader(rank: int, meeting: Meeting, deadline_s: float) -> Line:
    """Connect to rank 0.

    Raises:
        DeadlineError: it does not answer.
    """
    try:
        peer = socket.create_connection((meeting.host, meeting.port), timeout=deadline_s)
        peer.sendall(meeting.key + struct.pack("!I", rank))
    except OSError as exc:
        raise DeadlineError(f"rank {rank} cannot reach rank 0 at {meeting.host}:{meeting.port}: {exc}") from exc
    return Line(peer)


def _receive(peer: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size and (part := peer.recv(size - len(parts))):
        parts += part
    return parts
