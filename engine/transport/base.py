"""The seam between processes: a `Hub` on the engine's side, one `Link` on each peer's side.

Contract of every implementation (tests/contract/test_transport.py runs one suite over all):
- Messages of one direction arrive in order, once, or the peer is reported lost; nothing is dropped silently.
- `send` waits while `window` messages to that peer are unacknowledged (the derived bound of every queue here), and
  raises `DeadlineError` after `deadline_s`; to a peer that is gone it raises `PeerLost`.
- A peer's first message is `Hello`; another protocol version is answered with `Refused` and never reaches the engine.
- A peer that reconnects within the same life resumes: unacknowledged messages are sent again, duplicates are dropped.
- A new life under the same name replaces the old one, which is reported lost first.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.wire import Hello, Message

DEFAULT_WINDOW = 1024
"""Unacknowledged messages a direction: 32 slots x 32 launches; 200 kB groups make 200 MB at most."""


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer said hello."""

    peer: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer's life ended or it was silent past its deadline."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer."""

    peer: str
    message: Message


HubEvent = PeerJoined | PeerGone | Received


class Hub(Protocol):
    """The engine's side: many named peers."""

    @property
    def address(self) -> str:
        """Where peers connect, e.g. tcp://127.0.0.1:5555."""
        ...

    async def receive(self) -> HubEvent:
        """The next event of any peer; waits without limit (the caller owns the deadline)."""
        ...

    async def send(self, peer: str, message: Message, deadline_s: float = 30.0) -> None:
        """Hand `message` to the link of `peer`."""
        ...

    async def drop(self, peer: str, reason: str) -> None:
        """Forget a peer; later messages of its life are ignored."""
        ...

    async def close(self) -> None:
        """Close the sockets after handing over what is queued, within 1 s."""
        ...


class Link(Protocol):
    """A peer's side: one engine."""

    async def receive(self) -> Message:
        """The engine's next message. Raises PeerLost when the engine is gone (silent for its deadline)."""
        ...

    async def send(self, message: Message, deadline_s: float = 30.0) -> None:
        """Hand `message` to the engine."""
        ...

    async def close(self) -> None:
        """Wait up to 2 s for outstanding acknowledgements, then close."""
        ...
