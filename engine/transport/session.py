"""One direction of a conversation that survives reconnection: numbers, acknowledgements, window, duplicates. Pure.

Invariants:
- A sender keeps every item until it is acknowledged and holds at most `window` of them; after a reconnection it hands
  all of them over again, in order.
- A receiver takes number n + 1 only after n, so a repeated item and an item behind a lost one are both ignored; the
  repeat that follows a reconnection fills the gap.
- An item is acknowledged when its reader took it, not when it arrived; so what waits at the receiver is bounded by the
  window too, and a sender past it is an error, not a longer queue.

Used by `channel`; checked over lost, repeated, reordered and cut-off deliveries in tests/unit/test_session.py.
"""

from collections import deque
from typing import Generic, TypeVar

from engine.core.errors import WireError

Parcel = TypeVar("Parcel")
"""A numbered message ready for the wire (frames, or the object itself in memory)."""


class Outbox(Generic[Parcel]):
    """The sending end: items 1, 2, 3, ... until each is acknowledged."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be >= 1, got {window}")
        self._window = window
        self._kept: deque[Parcel] = deque()  # bounded by window: push requires has_room
        self._last = 0

    @property
    def next_seq(self) -> int:
        """Number of the item pushed next."""
        return self._last + 1

    @property
    def outstanding(self) -> int:
        """Items not acknowledged."""
        return len(self._kept)

    @property
    def has_room(self) -> bool:
        """One more item may be pushed."""
        return len(self._kept) < self._window

    def push(self, item: Parcel) -> None:
        """Keep `item`, which carries the number `next_seq`; the caller saw `has_room`."""
        assert self.has_room, "push into a full window"
        self._kept.append(item)
        self._last += 1

    def acknowledge(self, seq: int) -> int:
        """Let go of every item up to and including `seq`; an older acknowledgement changes nothing.

        Returns:
            How many items it released.

        Raises:
            WireError: `seq` was never sent.
        """
        if seq > self._last:
            raise WireError(f"acknowledged message {seq}, but only {self._last} were sent")
        released = max(0, seq - (self._last - len(self._kept)))
        for _ in range(released):
            self._kept.popleft()
        return released

    def unacknowledged(self) -> list[Parcel]:
        """What a reconnected peer must be handed again, in order."""
        return list(self._kept)


class Inbox:
    """The receiving end: which arrivals count, and up to where they may be acknowledged."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be >= 1, got {window}")
        self._window = window
        self._received = 0
        self._consumed = 0
        self._acknowledged = 0

    @property
    def consumed(self) -> int:
        """Number of the last item its reader took: what an acknowledgement says."""
        return self._consumed

    @property
    def is_ack_due(self) -> bool:
        """A quarter of the window was consumed since the last acknowledgement."""
        return 4 * (self._consumed - self._acknowledged) >= self._window

    @property
    def is_ack_pending(self) -> bool:
        """Something was consumed since the last acknowledgement."""
        return self._consumed > self._acknowledged

    def accept(self, seq: int) -> bool:
        """Whether the arrival `seq` is the next one; a repeat, or one behind a gap, is not.

        Raises:
            WireError: an unnumbered item, or one past the window.
        """
        if seq < 1:
            raise WireError(f"a message must be numbered from 1, got {seq}")
        if seq != self._received + 1:
            return False
        if self._received - self._acknowledged >= self._window:
            raise WireError(f"message {seq} is past the window of {self._window} unacknowledged messages")
        self._received = seq
        return True

    def consume(self) -> None:
        """The reader took the oldest accepted item."""
        assert self._consumed < self._received, "consumed more than was received"
        self._consumed += 1

    def acknowledge(self) -> int:
        """The number to acknowledge now."""
        self._acknowledged = self._consumed
        return self._consumed
