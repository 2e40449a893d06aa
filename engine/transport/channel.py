"""One end of a conversation with one peer: a pure session plus the waiting, and the clock that watches for silence.

Invariants: senders are served first come, first served; nobody waits on a channel that failed. A channel owns no task
and no timer. The hub has one a peer, a link has one.
"""

import asyncio
from collections.abc import Callable
from typing import Generic

from engine.core.errors import DeadlineError, PeerLost
from engine.transport.session import Inbox, Outbox, Parcel
from engine.wire import Ack, Message

MAX_GRACE_S = 5.0
"""A cut connection heals within this, or the peer is gone: fifty of the shortest reconnection intervals."""

FAREWELL_S = 0.25
"""Wait for the answer to `Closed`. A socket closed with arrivals unread resets its connection, and that can destroy
what it just sent; after the answer nothing arrives any more."""

SILENCE_PARTS = 4
"""A sign of life is due every quarter of the silence deadline; three missing ones in a row mean silence."""


class Channel(Generic[Parcel]):
    """Sends numbered messages within a window and tells arrivals that count from those that do not."""

    def __init__(
        self,
        who: str,
        window: int,
        pack: Callable[[Message, int], Parcel],
        transmit: Callable[[Parcel], bool],
    ) -> None:
        self._who = who
        self._outbox = Outbox[Parcel](window)
        self._inbox = Inbox(window)
        self._pack = pack
        self._transmit = transmit
        self._lost: str | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._is_behind = False  # something was not handed over: hand over nothing before all of it is repeated
        self._changed = asyncio.Event()  # set when room appears, the outbox empties or the channel fails

    @property
    def lost(self) -> str | None:
        """Why the conversation ended; None while it goes on."""
        return self._lost

    @property
    def outstanding(self) -> int:
        """Messages sent and not acknowledged."""
        return self._outbox.outstanding

    async def send(self, message: Message, deadline_s: float) -> None:
        """Send `message` once the window has room.

        Raises:
            DeadlineError: no room within `deadline_s`.
            PeerLost: the conversation ended, before the call or while it waited.
        """
        if self._waiting or not self._outbox.has_room:
            self._waiting += 1
            try:
                async with asyncio.timeout(deadline_s), self._turn:
                    await self._wait_for(lambda: self._outbox.has_room)
                    self._send_now(message)
            except TimeoutError as exc:
                raise DeadlineError(
                    f"{self._who} acknowledged nothing for {deadline_s:g} s while {self.outstanding} messages"
                    f" waited for it; it could not take {type(message).__name__}"
                ) from exc
            finally:
                self._waiting -= 1
        else:
            self._send_now(message)

    def _send_now(self, message: Message) -> None:
        if self._lost is not None:
            raise PeerLost(f"{self._who} is gone: {self._lost}")
        parcel = self._pack(message, self._outbox.next_seq)
        self._outbox.push(parcel)
        if not self._is_behind:
            self._is_behind = not self._transmit(parcel)

    async def flush(self) -> None:
        """Wait until everything is acknowledged or the conversation ended; the caller owns the deadline."""
        await self._wait_for(lambda: not self._outbox.outstanding)

    async def _wait_for(self, holds: Callable[[], bool]) -> None:
        while self._lost is None and not holds():
            self._changed.clear()
            await self._changed.wait()

    def accept(self, seq: int) -> bool:
        """Whether arrival `seq` counts. Raises WireError for a peer that breaks the rules."""
        return self._inbox.accept(seq)

    def consume(self) -> bool:
        """The reader took one message. Returns whether an acknowledgement is still pending."""
        self._inbox.consume()
        if self._inbox.is_ack_due:
            self.acknowledge_arrivals()
        return self._inbox.is_ack_pending

    def acknowledge_arrivals(self) -> None:
        """Tell the peer what was consumed; also the sign of life."""
        self._transmit(self._pack(Ack(seq=self._inbox.acknowledge()), 0))

    def on_ack(self, seq: int) -> None:
        """The peer consumed everything up to `seq`. Raises WireError for a number never sent."""
        if self._outbox.acknowledge(seq):
            self._changed.set()

    def resume(self) -> None:
        """Hand everything unacknowledged over again: the peer is back, or could not take it before."""
        self.acknowledge_arrivals()
        self._is_behind = not all(self._transmit(parcel) for parcel in self._outbox.unacknowledged())

    def show_life(self) -> None:
        """What the clock does while all is well."""
        if self._is_behind:
            self.resume()
        else:
            self.acknowledge_arrivals()

    def fail(self, reason: str) -> None:
        """End the conversation; every waiting sender is told."""
        if self._lost is None:
            self._lost = reason
        self._changed.set()


class Clock:
    """Calls `on_beat(is_late)` every quarter of the silence deadline, from start to stop.

    A beat is late when the loop stood still for longer than a beat: then nobody may be called silent, because their
    signs of life may not have been read yet.
    """

    def __init__(self, silence_deadline_s: float, on_beat: Callable[[bool], None]) -> None:
        if silence_deadline_s <= 0.0:
            raise ValueError(f"silence_deadline_s must be > 0, got {silence_deadline_s}")
        self._beat_s = silence_deadline_s / SILENCE_PARTS
        self._on_beat = on_beat
        self._loop = asyncio.get_running_loop()
        self._beat_at = self._loop.time()
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    @property
    def silent_after_s(self) -> float:
        """Silence of this length is seen at the latest one beat later, so within the deadline."""
        return self._beat_s * (SILENCE_PARTS - 1)

    def _beat(self) -> None:
        now = self._loop.time()
        is_late = now - self._beat_at > 2.0 * self._beat_s
        self._beat_at = now
        self._timer = self._loop.call_later(self._beat_s, self._beat)
        self._on_beat(is_late)

    def stop(self) -> None:
        """No beat follows."""
        self._timer.cancel()
